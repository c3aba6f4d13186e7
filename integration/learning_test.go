package integration

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prefix-affinity/caddy/integration/engine"
	"github.com/prefix-affinity/caddy/integration/harness"
)

// mispredicted sends requests that ask for one of 40 prefixes of 2,000 tokens
// to replicas that hold 10 each, and returns the share of the last 120 of 300
// requests for which the predicted match is off by more than a tenth of the
// prompt from what the engine really found in its cache.
func mispredicted(t *testing.T, s *site, fleet harness.Fleet, stream bool) float64 {
	t.Helper()
	const requests, judged = 300, 120
	rng := rand.New(rand.NewPCG(1, 2))
	wrong := 0
	for i := range requests {
		prefix := rng.IntN(40)
		before := fleet.Stats()
		d := s.ask(t, chat(stream, words(fmt.Sprintf("prefix %d", prefix), 8000), "yes", fmt.Sprintf("question %d", i)))
		if i < requests-judged {
			continue
		}
		for j, stats := range fleet.Stats() {
			if fleet[j].Addr() != d.upstream {
				continue
			}
			cached, prompt := stats.CachedTokens-before[j].CachedTokens, stats.PromptTokens-before[j].PromptTokens
			off := float64(d.matched)/float64(d.prompt) - float64(cached)/float64(prompt)
			if off > 0.1 || off < -0.1 {
				wrong++
			}
		}
	}
	return float64(wrong) / judged
}

// What the engines report teaches how much they hold. A capacity is found to a
// bin of 4 %, and the distance of a prompt of 2,000 tokens is known to 5 % of a
// capacity of 20,000 on either side, so that of prefixes asked for at random,
// whose distances spread evenly over twice the capacity, some 7 % lie too close
// to the edge to call: of 120, 8 with a standard deviation of 2.8. 20 are
// allowed. Who believes that nothing is ever evicted is wrong at every miss,
// half of the time: 60 with a standard deviation of 5.5, of which 30 are asked.
func TestPredictionsFollowReports(t *testing.T) {
	small := quick
	small.CapacityTokens = 20_000
	silent := small
	silent.Cached = engine.CachedNever
	header := silent
	header.CachedTokensHeader = "X-Cached-Tokens"
	for _, test := range []struct {
		name   string
		engine engine.Config
		stream bool
		option string
		learns bool
	}{
		{"usage/json", small, false, "min_match 64", true},
		{"usage/sse", small, true, "min_match 64", true},
		{"header/json", header, false, "cached_tokens_header x-cached-tokens", true},
		{"header/sse", header, true, "cached_tokens_header x-cached-tokens", true},
		{"never/json", silent, false, "min_match 64", false},
		{"never/sse", header, true, "min_match 64", false}, // says it, but nobody was told to look
	} {
		t.Run(test.name, func(t *testing.T) {
			fleet := harness.TestFleet(t, 2, test.engine)
			s := newSite(t, fleet.Upstreams(), policy(test.option))
			wrong := mispredicted(t, s, fleet, test.stream)
			t.Logf("%.1f %% mispredicted", 100*wrong)
			switch {
			case test.learns && wrong > 1./6:
				t.Errorf("%.0f %% of the matches were mispredicted", 100*wrong)
			case !test.learns && wrong < 1./4:
				t.Errorf("only %.0f %% of the matches were mispredicted: this test shows nothing", 100*wrong)
			}
		})
	}
}

// Without polling, too, an engine that has lost its cache is found out, by what
// it says of conversations that it should have. What it says of prompts that
// are not keyed as they are, of which text was ignored, is no evidence, nor is
// what it says of one client's conversation alone.
func TestRestartFoundOut(t *testing.T) {
	engine := quick
	engine.CapacityTokens = 100_000
	fleet := harness.TestFleet(t, 1, engine)
	s := newSite(t, fleet.Upstreams(), policy("ignore `^at \\d+ `"))
	rng := rand.New(rand.NewPCG(1, 2))
	ask := func(prefix int, stamp string) {
		s.ask(t, chat(true, stamp+words(fmt.Sprintf("prefix %d", prefix), 6000), "yes", fmt.Sprintf("question %d", rng.Int())))
		s.quiet(t)
	}
	generation := func() int { return s.upstreams(t, fleet[0].Addr())[0].Generation }
	for i := range 160 {
		ask(i%40, fmt.Sprintf("at %d ", i)) // the engine finds nothing of these, and has not restarted
	}
	for range 200 {
		ask(40+rng.IntN(20), "")
	}
	if generation() != 0 {
		t.Fatal("a restart was noticed before there was one")
	}
	fleet[0].Restart()
	for range 20 {
		ask(40, "")
		ask(41, "")
	}
	if generation() != 0 {
		t.Error("two conversations were enough to conclude a restart")
	}
	for range 40 {
		ask(42+rng.IntN(18), "")
	}
	if generation() != 1 {
		t.Error("the restart was not noticed")
	}
	if log, err := s.Log(); err != nil || !strings.Contains(log, "must have restarted") {
		t.Errorf("the log says nothing of it: %v", err)
	}
}

// scripted is an upstream that answers as its test says at the time.
type scripted struct {
	*httptest.Server

	answer atomic.Pointer[http.HandlerFunc]
}

func newScripted(t *testing.T, answer http.HandlerFunc) *scripted {
	t.Helper()
	up := new(scripted)
	up.set(answer)
	up.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body) // fails when the client leaves
		(*up.answer.Load())(w, r)
	}))
	t.Cleanup(up.Close)
	return up
}

func (up *scripted) set(answer http.HandlerFunc) { up.answer.Store(&answer) }

func (up *scripted) addr() string { return up.Listener.Addr().String() }

// yes is what a sound engine without statistics does.
func yes(w http.ResponseWriter, _ *http.Request) { answer(w, false) }

// abandon sends a request and leaves: at once when it has reached the upstream,
// or after the first byte of the answer.
func (s *site) abandon(t *testing.T, body string, reached <-chan struct{}, midstream bool) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, s.URL+chatPath, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/json")
	left := make(chan struct{})
	go func() {
		defer close(left)
		res, err := http.DefaultClient.Do(req)
		if err != nil {
			return
		}
		defer res.Body.Close()
		_, _ = res.Body.Read(make([]byte, 1))
		if midstream {
			cancel()
		}
		_, _ = io.Copy(io.Discard, res.Body)
	}()
	<-reached
	if !midstream {
		cancel()
	}
	<-left
	s.quiet(t)
}

// Only a 2xx says that an upstream has a prompt.
func TestConfirmedBy2xxOnly(t *testing.T) {
	for _, test := range []struct {
		name   string
		holds  bool
		answer http.HandlerFunc
	}{
		{"status/200", true, yes},
		{"status/201", true, status(http.StatusCreated)},
		{"status/204", true, status(http.StatusNoContent)},
		{"status/302", false, status(http.StatusFound)},
		{"status/400", false, status(http.StatusBadRequest)},
		{"status/404", false, status(http.StatusNotFound)},
		{"status/429", false, status(http.StatusTooManyRequests)},
		{"status/500", false, status(http.StatusInternalServerError)},
		{"status/503", false, status(http.StatusServiceUnavailable)},
		{"connection/lost", false, func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) }},
	} {
		t.Run(test.name, func(t *testing.T) {
			up := newScripted(t, test.answer)
			s := newSite(t, up.addr(), policy())
			body := chat(false, words("prompt", 4000))
			s.post(t, chatPath, body)
			s.quiet(t)
			up.set(yes)
			if d := s.ask(t, body); (d.reason == "affinity") != test.holds || (d.matched > 0) != test.holds {
				t.Errorf("the second time: %+v", d)
			}
			s.quiet(t)
			if d := s.ask(t, body); d.reason != "affinity" || d.matched < d.prompt*9/10 {
				t.Errorf("after a 200: %+v", d)
			}
		})
	}

	for _, midstream := range []bool{false, true} {
		t.Run(fmt.Sprintf("abort/midstream=%t", midstream), func(t *testing.T) {
			reached := make(chan struct{}, 1)
			up := newScripted(t, func(w http.ResponseWriter, r *http.Request) {
				if midstream {
					w.Header().Set("Content-Type", "text/event-stream")
					_, _ = io.WriteString(w, event(`{"choices":[{"delta":{"content":"a"}}]}`))
					_ = http.NewResponseController(w).Flush()
				}
				reached <- struct{}{}
				<-r.Context().Done() // the abort reaches the upstream
			})
			s := newSite(t, up.addr(), policy())
			body := chat(midstream, words("prompt", 4000))
			s.abandon(t, body, reached, midstream)
			up.set(yes)
			// Once the answer has begun, the prompt is in the cache.
			if d := s.ask(t, body); (d.reason == "affinity") != midstream {
				t.Errorf("after the abort: %+v", d)
			}
		})
	}
}

// A retry takes its prompt back from where it failed.
func TestRetryMovesThePrompt(t *testing.T) {
	bad := newScripted(t, status(http.StatusInternalServerError))
	good := newScripted(t, yes)
	s := newSite(t, bad.addr()+" "+good.addr(), policy("fallback first")+"lb_retries 1\n\t\tlb_retry_match {\n\t\t\texpression `{rp.status_code} == 500`\n\t\t}")
	body := chat(false, words("prompt", 4000))
	for i, reason := range []string{"cold", "affinity"} {
		if d := s.ask(t, body); d.upstream != good.addr() || d.reason != reason {
			t.Errorf("request %d: %+v", i, d)
		}
		s.quiet(t)
	}
}

// rawUpstream answers one request a connection and tells its head byte for byte.
func rawUpstream(t *testing.T, answer string) (addr string, heads <-chan string) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	seen := make(chan string, 100)
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				r := bufio.NewReader(c)
				var head strings.Builder
				for !strings.HasSuffix(head.String(), "\r\n\r\n") {
					line, err := r.ReadString('\n')
					if err != nil {
						return
					}
					head.WriteString(line)
				}
				seen <- head.String()
				_, _ = io.WriteString(c, answer)
			}()
		}
	}()
	return l.Addr().String(), seen
}

// The report is asked for as Triton reads it (lower case), and given to nobody
// who has not asked himself.
func TestORCAIsBetweenUsAndTheEngine(t *testing.T) {
	const report = "TEXT named_metrics.num_requests_waiting=0.0"
	for _, test := range []struct {
		name, option, client string // format that the client asks for
		asked                string // what the upstream gets
		answered             bool   // whether the client sees a report
	}{
		{"off/plain", "", "", "", true}, // not ours: passes
		{"text/plain", "orca", "", "text", false},
		{"text/named", "orca text", "", "text", false},
		{"json/plain", "orca json", "", "json", false},
		{"json/client-asks", "orca json", "TEXT", "TEXT", true},
	} {
		t.Run(test.name, func(t *testing.T) {
			addr, heads := rawUpstream(t, "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close\r\nendpoint-load-metrics: "+report+"\r\nEndpoint-Load-Metrics-Bin: AAAA\r\n\r\n{}")
			s := newSite(t, addr, policy(test.option))
			for protocol, client := range clients() {
				req, err := http.NewRequest(http.MethodPost, s.URL+chatPath, strings.NewReader(chat(false, "hello")))
				if err != nil {
					t.Fatal(err)
				}
				req.Header.Set("Content-Type", "application/json")
				if test.client != "" {
					req.Header.Set("endpoint-load-metrics-format", test.client)
				}
				res, err := client.Do(req)
				if err != nil {
					t.Fatal(err)
				}
				res.Body.Close()
				asked := ""
				for line := range strings.Lines(<-heads) {
					if name, value, _ := strings.Cut(line, ":"); strings.EqualFold(name, "endpoint-load-metrics-format") {
						asked += strings.TrimSpace(value)
					}
				}
				if asked != test.asked {
					t.Errorf("%s: the upstream was asked for %q, want %q", protocol, asked, test.asked)
				}
				if got := res.Header.Get("endpoint-load-metrics"); (got == report) != test.answered || (got == "") == test.answered {
					t.Errorf("%s: the client got the report %q", protocol, got)
				}
				if got := res.Header.Get("endpoint-load-metrics-bin"); (got != "") != test.answered {
					t.Errorf("%s: the client got the binary report %q", protocol, got)
				}
			}
		})
	}
}

// A queue that an upstream reports keeps cold requests away from it, until it
// says otherwise or should have worked it off.
func TestReportedQueue(t *testing.T) {
	for _, test := range []struct{ name, option, header, format string }{
		{"orca/text", "orca", "endpoint-load-metrics", "TEXT named_metrics.kv_cache_usage_perc=0.5, named_metrics.num_requests_waiting=%d.0"},
		{"orca/json", "orca json", "endpoint-load-metrics", `JSON {"named_metrics": {"num_requests_waiting": %d.0}}`},
		{"header/named", "queue_depth_header x-queue-depth", "X-Queue-Depth", "%d"},
	} {
		t.Run(test.name, func(t *testing.T) {
			busy, idle := newScripted(t, yes), newScripted(t, yes)
			s := newSite(t, busy.addr()+" "+idle.addr(), policy(test.option))
			n := 0
			cold := func() string {
				n++
				return s.ask(t, chat(false, words(fmt.Sprintf("cold %d", n), 4000))).upstream
			}
			// Both are asked for something else, in turn, and one of them reports.
			report := func(depth int) {
				t.Helper()
				busy.set(func(w http.ResponseWriter, r *http.Request) {
					w.Header().Set(test.header, fmt.Sprintf(test.format, depth))
					yes(w, r)
				})
				defer busy.set(yes)
				for told := false; !told; {
					res, err := http.Get(s.URL + "/v1/models")
					if err != nil {
						t.Fatal(err)
					}
					res.Body.Close()
					told = decisionOf(t, res).upstream == busy.addr()
				}
			}
			share := func(requests int) (atBusy int) {
				for range requests {
					if cold() == busy.addr() {
						atBusy++
					}
				}
				return atBusy
			}
			if got := share(40); got < 10 || got > 30 {
				t.Fatalf("%d of 40 requests before any report", got)
			}
			report(10_000)
			if got := share(20); got != 0 {
				t.Errorf("%d of 20 cold requests went to a queue of 10,000", got)
			}
			report(0)
			if got := share(40); got < 10 {
				t.Errorf("%d of 40 cold requests went to the upstream that has no queue any more", got)
			}
			report(20)
			eventually(t, "the queue to count as worked off", func() bool { return cold() == busy.addr() })
		})
	}
}

// Where nothing streams, the prefill speed comes from how long whole answers take.
func TestSpeedOfWholeAnswers(t *testing.T) {
	const rate = 100_000
	fleet := harness.TestFleet(t, 2, engine.Config{PrefillRate: rate, InterToken: time.Millisecond})
	s := newSite(t, fleet.Upstreams(), policy())
	rng := rand.New(rand.NewPCG(5, 6))
	var bodies []string
	for i := range 160 {
		body := chat(false, words(fmt.Sprintf("prompt %d", i), 2000+rng.IntN(16_000)))
		bodies = append(bodies, strings.Replace(body, `"max_tokens":4`, fmt.Sprintf(`"max_tokens":%d`, 1+rng.IntN(40)), 1))
	}
	for _, body := range bodies[:40] {
		s.ask(t, body)
	}
	for _, u := range s.upstreams(t, strings.Fields(fleet.Upstreams())...) {
		if u.PrefillTokensPerSecond != 0 {
			t.Errorf("%s: %v tokens/s from some 20 answers", u.Address, u.PrefillTokensPerSecond)
		}
	}
	for _, body := range bodies[40:] {
		s.ask(t, body)
	}
	for _, u := range s.upstreams(t, strings.Fields(fleet.Upstreams())...) {
		if v := u.PrefillTokensPerSecond; v < rate/2 || v > rate*2 {
			t.Errorf("%s: %v tokens/s, want %v", u.Address, v, rate)
		}
	}
}

// Nothing is held back: the upstream sends the next piece only when the client
// has the last one.
func TestStreamsAreNotHeldBack(t *testing.T) {
	pieces := map[string][]string{
		"text/event-stream": {
			": hello\n\n", "event: message\n", `data: {"choices":[{"delta":{"role":"assistant"`, "}}]}\n", "\n",
			"d", `ata: {"choices":[{"delta":{"content":"a"}}]}` + "\n\n", event(`{"choices":[{"delta":{"content":"b"}}]}`),
			`data: {"choices":[],"usage":{"prompt_tokens":100,"prompt_tokens_details":{"cached_tok`, `ens":96}}}` + "\n\n", "data: [DONE]\n\n",
		},
		"application/x-ndjson": {`{"message":{"content":"a"}`, "}\n", `{"message":{"content":"b"}}` + "\n", `{"done":true,"prompt_eval_count":5`, "}\n"},
		"application/json":     {`{"usage":`, `{"prompt_tokens":`, "12}", "}"},
		"text/plain":           {"a", "b\n", "c"},
	}
	for contentType, sent := range pieces {
		for protocol, client := range clients() {
			passed := t.Run(contentType+"/"+protocol, func(t *testing.T) {
				got := make(chan struct{}, len(sent))
				up := newScripted(t, func(w http.ResponseWriter, _ *http.Request) {
					w.Header().Set("Content-Type", contentType)
					for i, piece := range sent {
						_, _ = io.WriteString(w, piece)
						_ = http.NewResponseController(w).Flush()
						select {
						case <-got:
						case <-time.After(20 * time.Second):
							t.Errorf("piece %d, %q, was held back", i, piece)
							panic(http.ErrAbortHandler)
						}
					}
				})
				s := newSite(t, up.addr(), policy("orca", "cached_tokens_header X-Cached"))
				ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
				defer cancel()
				req, err := http.NewRequestWithContext(ctx, http.MethodPost, s.URL+chatPath, strings.NewReader(chat(true, words("stream", 2000))))
				if err != nil {
					t.Fatal(err)
				}
				res, err := client.Do(req)
				if err != nil {
					t.Fatal(err)
				}
				defer res.Body.Close()
				for _, piece := range sent {
					b := make([]byte, len(piece))
					if _, err := io.ReadFull(res.Body, b); err != nil || string(b) != piece {
						t.Fatalf("got %q, %v, want %q", b, err, piece)
					}
					got <- struct{}{}
				}
				if rest, err := io.ReadAll(res.Body); err != nil || len(rest) > 0 {
					t.Errorf("then %q, %v", rest, err)
				}
			})
			if !passed {
				return // the others would take as long to fail
			}
		}
	}
}

// Whatever an upstream says of itself, the answer reaches the client as it is,
// and routing goes on as before.
func TestNonsenseInAnswersDoesNoHarm(t *testing.T) {
	bodies := map[string]string{
		"usage/null":        `{"usage":null}`,
		"usage/number":      `{"usage":5}`,
		"usage/list":        `{"usage":[{"prompt_tokens":1}]}`,
		"usage/text":        `{"usage":{"prompt_tokens":"many","prompt_tokens_details":{"cached_tokens":"all"}}}`,
		"usage/negative":    `{"usage":{"prompt_tokens":-5,"prompt_tokens_details":{"cached_tokens":-7}}}`,
		"usage/huge":        `{"usage":{"prompt_tokens":1e308,"prompt_tokens_details":{"cached_tokens":1e309}}}`,
		"usage/long":        `{"usage":{"prompt_tokens":99999999999999999999999999,"prompt_tokens_details":{"cached_tokens":99999999999999999999999999}}}`,
		"usage/more-cached": `{"usage":{"prompt_tokens":10,"prompt_tokens_details":{"cached_tokens":1000000}}}`,
		"usage/zero-prompt": `{"usage":{"prompt_tokens":0,"prompt_tokens_details":{"cached_tokens":0}}}`,
		"usage/details":     `{"usage":{"prompt_tokens":10,"prompt_tokens_details":[]}}`,
		"json/cut":          `{"usage":{"prompt_tokens":10,"prompt_to`,
		"json/deep":         strings.Repeat(`{"usage":`, 10_000),
		"json/nul":          "{\"usage\":{\"prompt_tokens\x00\":\xff}}",
		"json/not":          "<html>busy</html>",
		"json/empty":        "",
	}
	var now atomic.Pointer[http.HandlerFunc]
	odd := newScripted(t, func(w http.ResponseWriter, r *http.Request) { (*now.Load())(w, r) })
	sound := newScripted(t, yes)
	s := newSite(t, odd.addr()+" "+sound.addr(), policy("orca", "cached_tokens_header X-Cached", "queue_depth_header X-Queue"))
	as := func(contentType string, header [2]string, body string) {
		f := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", contentType)
			if header[0] != "" {
				w.Header().Set(header[0], header[1])
			}
			_, _ = io.WriteString(w, body)
		})
		now.Store(&f)
	}
	// check asks until the odd one has answered: of two upstreams a new prompt
	// goes to either, but never always to the same.
	check := func(t *testing.T, want string) {
		t.Helper()
		eventually(t, "a cold request to come to the upstream", func() bool {
			body := chat(strings.Contains(want, "data:"), words(fmt.Sprintf("%s %d", t.Name(), rand.Int()), 2000))
			first, got := s.post(t, chatPath, body)
			d := decisionOf(t, first)
			if d.upstream != odd.addr() {
				return false
			}
			if got != want {
				t.Errorf("the client got %q, want %q", got, want)
			}
			s.quiet(t)
			if again := s.ask(t, body); again.reason != "affinity" || again.upstream != d.upstream || again.matched < again.prompt*9/10 {
				t.Errorf("asked again: %+v", again)
			}
			return true
		})
	}
	for name, body := range bodies {
		t.Run(name, func(t *testing.T) {
			as("application/json", [2]string{}, body)
			check(t, body)
			stream := event(body) + event("[DONE]")
			as("text/event-stream", [2]string{}, stream)
			check(t, stream)
		})
	}
	for name, header := range map[string][2]string{
		"orca/empty":         {"Endpoint-Load-Metrics", ""},
		"orca/format":        {"Endpoint-Load-Metrics", "XML <a/>"},
		"orca/text":          {"Endpoint-Load-Metrics", "TEXT ,,=,==,named_metrics.num_requests_waiting=,num_requests_waiting=x"},
		"orca/nan":           {"Endpoint-Load-Metrics", "TEXT named_metrics.num_requests_waiting=NaN"},
		"orca/infinite":      {"Endpoint-Load-Metrics", "TEXT named_metrics.num_requests_waiting=Inf"},
		"orca/negative":      {"Endpoint-Load-Metrics", "TEXT named_metrics.num_requests_waiting=-3"},
		"orca/huge":          {"Endpoint-Load-Metrics", "TEXT named_metrics.num_requests_waiting=1e300"},
		"orca/json":          {"Endpoint-Load-Metrics", `JSON {"named_metrics": [{"num_requests_waiting":`},
		"orca/json-text":     {"Endpoint-Load-Metrics", `JSON {"named_metrics": {"num_requests_waiting": "3"}}`},
		"orca/json-huge":     {"Endpoint-Load-Metrics", `JSON {"named_metrics": {"num_requests_waiting": 1e300}}`},
		"queue/text":         {"X-Queue", "long"},
		"queue/negative":     {"X-Queue", "-1"},
		"queue/huge":         {"X-Queue", "1e300"},
		"cached/text":        {"X-Cached", "all"},
		"cached/negative":    {"X-Cached", "-1"},
		"cached/huge":        {"X-Cached", "1e300"},
		"cached/overflow":    {"X-Cached", "9999999999999999999999"},
		"cached/almost-huge": {"X-Cached", "1e15"},
	} {
		t.Run(name, func(t *testing.T) {
			as("application/json", header, "{}")
			check(t, "{}")
		})
	}
	if log, err := s.Log(); err != nil || strings.Contains(log, "panic") {
		t.Errorf("the log speaks of a panic, or can't be read: %v", err)
	}
}
