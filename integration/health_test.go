package integration

import (
	"fmt"
	"io"
	"net/http"
	"net/http/cookiejar"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prefix-affinity/caddy/integration/engine"
	"github.com/prefix-affinity/caddy/integration/harness"
)

const retryOn503 = "lb_retry_match {\n\t\t\texpression `{rp.status_code} == 503`\n\t\t}\n\t\t"

// The replica that holds a conversation is passed over while it is not
// available, and has it back afterwards if it holds more than the others.
func TestUnavailableHolderIsPassedOver(t *testing.T) {
	for _, test := range []struct {
		name, proxy string
		fault       engine.Faults
	}{
		{"active/health check", "health_uri /health\n\t\thealth_interval 20ms\n\t\thealth_timeout 5s", engine.Faults{Unhealthy: true}},
		{"passive/refused", "lb_retries 3\n\t\tlb_retry_match {\n\t\t\tmethod POST\n\t\t}\n\t\tfail_duration 1h", engine.Faults{Refuse: true}},
		{"passive/reset", "lb_retries 3\n\t\tlb_retry_match {\n\t\t\tmethod POST\n\t\t}\n\t\tfail_duration 1h", engine.Faults{Reset: true}},
		{"passive/status", "lb_retries 3\n\t\tfail_duration 1h\n\t\tunhealthy_status 503\n\t\t" + retryOn503, engine.Faults{FailStatus: 503}},
	} {
		t.Run(test.name, func(t *testing.T) {
			fleet := harness.TestFleet(t, 3, quick)
			s := newSite(t, fleet.Upstreams(), policy()+test.proxy)
			c := newConversations(1)[0]
			c.turn(t, s, false)
			holder := c.at
			c.turn(t, s, false)
			if c.at != holder {
				t.Fatalf("moved from %s to %s while all were healthy", holder, c.at)
			}
			for _, e := range fleet {
				if e.Addr() == holder {
					if err := e.SetFaults(test.fault); err != nil {
						t.Fatal(err)
					}
				}
			}
			var d decision
			eventually(t, "the holder to be passed over", func() bool {
				d = c.turn(t, s, false)
				return d.upstream != holder
			})
			// Its failed attempt may have been this request's, or none was needed.
			if d.reason != "unhealthy" && d.reason != "cold" {
				t.Errorf("the turn that moved: %+v", d)
			}
			at := d.upstream
			for range 3 {
				if d = c.turn(t, s, false); d.upstream != at || d.reason != "affinity" {
					t.Errorf("after the move: %+v", d)
				}
			}
		})
	}
}

// Without health checks nobody knows that a holder is dead but by the attempts
// that fail. What they send elsewhere, be it a retry or the requests of the next
// seconds, does not go there for load.
func TestDeadHolderWithoutHealthChecks(t *testing.T) {
	fleet := harness.TestFleet(t, 2, quick)
	s := newSite(t, fleet.Upstreams(), policy()+"lb_retries 1\n\t\tlb_retry_match {\n\t\t\tmethod POST\n\t\t}")
	long := chat(false, words("long", 40_000))
	holder := s.ask(t, long).upstream
	var short []string // held there too
	for i := 0; len(short) < 3; i++ {
		body := chat(false, words(fmt.Sprintf("short %d", i), 4000))
		if s.ask(t, body).upstream == holder {
			short = append(short, body)
		}
	}
	for _, e := range fleet {
		if e.Addr() == holder {
			if err := e.SetFaults(engine.Faults{Refuse: true}); err != nil {
				t.Fatal(err)
			}
		}
	}
	for i, body := range append([]string{long}, short...) {
		if d := s.ask(t, body); d.upstream == holder || d.reason != "unhealthy" {
			t.Errorf("request %d: %+v", i, d)
		}
	}
}

// Without retries, too, a client that tries again after an answer which is the upstream's
// fault comes to another one, and the answers that are the request's fault move nothing.
func TestFailingHolderIsPassedOver(t *testing.T) {
	for _, c := range []struct {
		status int
		moves  bool
	}{{500, true}, {502, true}, {503, true}, {429, true}, {400, false}, {404, false}, {501, false}} {
		for _, size := range []int{600, 20_000} {
			t.Run(fmt.Sprintf("%d/%d bytes", c.status, size), func(t *testing.T) {
				fleet := harness.TestFleet(t, 3, quick)
				s := newSite(t, fleet.Upstreams(), policy())
				body := chat(false, words("asked", size))
				holder := s.ask(t, body).upstream
				if d := s.ask(t, body); d.upstream != holder {
					t.Fatalf("the test needs a holder: %+v after %s", d, holder)
				}
				for _, e := range fleet {
					if e.Addr() == holder {
						if err := e.SetFaults(engine.Faults{FailStatus: c.status}); err != nil {
							t.Fatal(err)
						}
					}
				}
				if res, _ := s.post(t, chatPath, body); res.StatusCode != c.status || decisionOf(t, res).upstream != holder {
					t.Fatalf("status %d from %+v", res.StatusCode, decisionOf(t, res))
				}
				res, _ := s.post(t, chatPath, body)
				if moved := decisionOf(t, res).upstream != holder; moved != c.moves {
					t.Errorf("then status %d, %+v", res.StatusCode, decisionOf(t, res))
				}
			})
		}
	}
}

// An upstream that fails at once has nothing in flight and is the cheapest of all but for
// that. It must not get what the others would have served.
func TestFailingUpstreamIsNoBlackHole(t *testing.T) {
	fleet := harness.TestFleet(t, 4, quick)
	s := newSite(t, fleet.Upstreams(), policy())
	if err := fleet[0].SetFaults(engine.Faults{FailStatus: http.StatusInternalServerError}); err != nil {
		t.Fatal(err)
	}
	const clients, requests = 8, 50
	var failed atomic.Int64
	began := time.Now()
	var wg sync.WaitGroup
	for c := range clients {
		wg.Go(func() {
			for i := range requests {
				if res, _ := s.post(t, chatPath, chat(false, words(fmt.Sprintf("client %d, %d", c, i), 120))); res.StatusCode != http.StatusOK {
					failed.Add(1)
				}
			}
		})
	}
	wg.Wait()
	// Each 2 s it is tried again, by as many at once as come before the first has failed.
	if most := clients * int64(1+time.Since(began)/(2*time.Second)); failed.Load() > most {
		t.Errorf("%d of %d requests failed in %v, at most %d should", failed.Load(), clients*requests, time.Since(began), most)
	}
}

// Upstreams at their limit (unhealthy_request_count) are passed over.
func TestFullHolderIsPassedOver(t *testing.T) {
	g := newGates(t, 3)
	s := newSite(t, g.upstreams(), policy()+"unhealthy_request_count 2")
	body := chat(false, words("full", 4000), "yes", "a")
	var wg sync.WaitGroup
	defer wg.Wait()
	wg.Go(func() { s.ask(t, body) })
	first := g.take(t, 1)
	wg.Wait()
	s.quiet(t)
	var decisions [6]decision
	for i := range decisions {
		wg.Go(func() { decisions[i] = s.ask(t, body) })
		g.await(t, i+1)
	}
	got := g.release()
	wg.Wait()
	wantEven(t, got, 0)
	for i, d := range decisions[:2] {
		if d.reason != "affinity" {
			t.Errorf("request %d: %+v after %v", i, d, first)
		}
	}
	if d := decisions[2]; d.reason != "unhealthy" {
		t.Errorf("request 2: %+v, although its holder is full", d)
	}
}

// An upstream that failed a request gets it again only when no other is left.
func TestRetriesGoElsewhere(t *testing.T) {
	for _, fallback := range []string{"least_conn", "first", "random"} {
		t.Run(fallback, func(t *testing.T) {
			var mu sync.Mutex
			var tried []string
			busy := make([]*scripted, 3)
			addrs := ""
			for i := range busy {
				busy[i] = newScripted(t, func(w http.ResponseWriter, _ *http.Request) {
					mu.Lock()
					tried = append(tried, busy[i].addr())
					mu.Unlock()
					w.WriteHeader(http.StatusServiceUnavailable)
				})
				addrs += busy[i].addr() + " "
			}
			good := newScripted(t, yes)
			s := newSite(t, addrs+good.addr(), policy("fallback "+fallback)+"lb_retries 3\n\t\t"+retryOn503)
			for i := range 20 {
				tried = nil
				if d := s.ask(t, chat(false, words(fmt.Sprintf("retry %d", i), 3000))); d.upstream != good.addr() {
					t.Errorf("served by %+v", d)
				}
				for j, addr := range tried {
					if strings.Contains(strings.Join(tried[:j], " "), addr) {
						t.Errorf("tried twice: %v", tried)
					}
				}
			}
			// With the good one gone, all others have their second chance.
			s.reload(t, addrs, policy("fallback "+fallback)+"lb_retries 5\n\t\t"+retryOn503)
			tried = nil
			if res, _ := s.post(t, chatPath, chat(false, words("hopeless", 3000))); res.StatusCode != http.StatusServiceUnavailable {
				t.Errorf("status %d", res.StatusCode)
			}
			if len(tried) != 6 {
				t.Errorf("%d attempts, want 6", len(tried))
			}
			for i := range 3 {
				if len(tried) >= 3 && tried[i] == tried[(i+1)%3] {
					t.Errorf("an upstream was tried again before all others: %v", tried)
				}
			}
		})
	}
}

// With every replica at its limit a request waits for one to become free, or
// gets 503, as it does with Caddy's own least_conn.
func TestAllFull(t *testing.T) {
	for _, lb := range []string{"lb_policy least_conn\n\t\t", policy(), policy("fallback random")} {
		name := strings.Fields(lb)[1] + "/" + fmt.Sprint(len(lb))
		t.Run(name, func(t *testing.T) {
			g := newGates(t, 2)
			s := newSite(t, g.upstreams(), lb+"unhealthy_request_count 1")
			var wg sync.WaitGroup
			defer wg.Wait()
			fill := func() {
				for i := range 2 {
					wg.Go(func() { s.post(t, chatPath, chat(true, words(fmt.Sprintf("fill %d", i), 2000))) })
					g.await(t, i+1)
				}
			}
			fill()
			if res, _ := s.post(t, chatPath, chat(false, words("one more", 2000))); res.StatusCode != http.StatusServiceUnavailable {
				t.Errorf("status %d without lb_try_duration", res.StatusCode)
			}
			g.release()
			wg.Wait()
			s.quiet(t)

			s.reload(t, g.upstreams(), lb+"unhealthy_request_count 1\n\t\tlb_try_duration 30s\n\t\tlb_try_interval 10ms")
			fill()
			served := make(chan int)
			go func() {
				res, _ := s.post(t, chatPath, chat(false, words("waits", 2000)))
				served <- res.StatusCode
			}()
			select {
			case status := <-served:
				t.Errorf("status %d at once, although all are full", status)
			case <-time.After(100 * time.Millisecond): // ten tries later
			}
			g.release()
			g.await(t, 1)
			g.release()
			if status := <-served; status != http.StatusOK {
				t.Errorf("status %d after waiting", status)
			}
		})
	}
}

// A hot prefix spreads over as many replicas as it takes, little more, and
// leaves the others' conversations alone.
//
// One replica prefills 8,000 tokens/s. Every request for the hot prefix of
// 4,000 tokens adds 400 new ones, so that one replica serves 20 of them a
// second; 40 come, evenly spaced, until there were 100. Beside them 8
// conversations of 4,000 tokens go on, ten turns of them a second.
func TestHotPrefix(t *testing.T) {
	const (
		requests = 100
		interval = time.Second / 40
		others   = 8
	)
	config := engine.Config{PrefillRate: 8000, InterToken: time.Millisecond, OutputTokens: 4}
	type call struct{ pin, body string }
	prefix := words("hot", 16_000)
	hot, turns := make([]call, requests), make([]call, others+requests/4)
	for i := range hot {
		hot[i] = call{"hot", chat(true, prefix, "yes", words(fmt.Sprintf("question %d", i), 1600))}
	}
	for i := range turns {
		history := []string{words(fmt.Sprintf("other %d", i%others), 16_000)}
		for turn := range i / others {
			history = append(history, "yes", words(fmt.Sprintf("turn %d", turn), 100))
		}
		turns[i] = call{fmt.Sprint(i % others), chat(true, history...)}
	}

	// ask returns the time to the first byte of output, which engines send with
	// the first token, and who served.
	ask := func(s *site, c call) (time.Duration, string) {
		req, err := http.NewRequest(http.MethodPost, s.URL+chatPath, strings.NewReader(c.body))
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Content-Type", "application/json")
		req.Header.Set("Pin", c.pin)
		start := time.Now()
		res, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Error(err)
			return 0, ""
		}
		defer res.Body.Close()
		_, _ = res.Body.Read(make([]byte, 1))
		ttft := time.Since(start)
		if _, err := io.Copy(io.Discard, res.Body); err != nil || res.StatusCode != http.StatusOK {
			t.Errorf("status %d, %v", res.StatusCode, err)
		}
		return ttft, res.Header.Get("X-Inference-Pod")
	}
	type result struct {
		mean  time.Duration
		share map[string]int // hot requests by replica
		stays float64        // share of the others' turns that stayed where the last one was
	}
	try := func(t *testing.T, lb string) (r result, stalled time.Duration) {
		t.Helper()
		fleet := harness.TestFleet(t, 4, config)
		s := newSite(t, fleet.Upstreams(), lb)
		var wg sync.WaitGroup
		at := make([]string, others)
		for i := range others { // they have been here before
			wg.Go(func() { _, at[i] = ask(s, turns[i]) })
		}
		wg.Wait()
		ask(s, call{"hot", chat(true, prefix)}) // and so has the prefix

		var mu sync.Mutex
		var sum time.Duration
		r.share = make(map[string]int)
		stayed := 0
		watched := watchMachine()
		start := time.Now()
		for i := range hot {
			time.Sleep(time.Until(start.Add(time.Duration(i) * interval)))
			wg.Go(func() {
				ttft, pod := ask(s, hot[i])
				mu.Lock()
				defer mu.Unlock()
				sum += ttft
				r.share[pod]++
			})
			if i%4 != 3 {
				continue
			}
			wg.Go(func() {
				_, pod := ask(s, turns[others+i/4])
				mu.Lock()
				defer mu.Unlock()
				if pod == at[i/4%others] {
					stayed++
				}
				at[i/4%others] = pod
			})
		}
		wg.Wait()
		r.mean, r.stays, stalled = sum/requests, float64(stayed)/(requests/4), watched()
		t.Logf("mean TTFT %v, hot requests by replica %v, %.0f %% of the others' turns stayed, machine stalled for %v", r.mean, r.share, 100*r.stays, stalled)
		return r, stalled
	}
	// A prefill of 400 tokens takes 50 ms. Where the machine stands still for
	// twice as long, all that comes afterwards comes at once, and what is
	// measured is the machine.
	run := func(t *testing.T, lb string) result {
		t.Helper()
		for range 5 {
			if r, stalled := try(t, lb); stalled < 100*time.Millisecond {
				return r
			}
		}
		t.Skip("the machine is too busy to offer a steady load")
		return result{}
	}

	ours := run(t, "lb_policy prefix_affinity")
	pinned := run(t, "lb_policy header Pin")
	if n := len(pinned.share); n != 1 {
		t.Fatalf("pinned to %d replicas", n)
	}
	if n := len(ours.share); n != 2 && n != 3 {
		t.Errorf("served by %d replicas, want 2 or 3", n)
	}
	for pod, n := range ours.share {
		if n > requests*65/100 {
			t.Errorf("%s served %d of %d requests, want at most 65 %%", pod, n, requests)
		}
	}
	if ours.mean > pinned.mean/2 {
		t.Errorf("mean TTFT %v, want at most half of the %v that pinning gives", ours.mean, pinned.mean)
	}
	if ours.stays < 0.9 {
		t.Errorf("%.0f %% of the others' turns stayed on their replica, want 90", 100*ours.stays)
	}
}

// watchMachine returns a function that ends the watch and tells the longest time
// for which the machine did not let this process run.
func watchMachine() (worst func() time.Duration) {
	const nap = 5 * time.Millisecond
	stop, result := make(chan struct{}), make(chan time.Duration)
	go func() {
		var longest time.Duration
		for {
			select {
			case <-stop:
				result <- longest
				return
			default:
			}
			before := time.Now()
			time.Sleep(nap)
			longest = max(longest, time.Since(before)-nap)
		}
	}()
	return func() time.Duration {
		close(stop)
		return <-result
	}
}

// Any of Caddy's policies can choose for cold requests; a match still decides
// for the others.
func TestFallbackPolicies(t *testing.T) {
	for _, test := range []struct {
		fallback string
		check    func(t *testing.T, got []int) // cold requests by upstream
	}{
		{"first", func(t *testing.T, got []int) {
			if got[0] != 40 {
				t.Errorf("first: %v", got)
			}
		}},
		{"round_robin", func(t *testing.T, got []int) { wantEven(t, got, 0) }},
		{"weighted_round_robin 3 1 0 0", func(t *testing.T, got []int) {
			if got[0] != 30 || got[1] != 10 {
				t.Errorf("weighted_round_robin: %v", got)
			}
		}},
		{"random_choose 2", func(t *testing.T, got []int) {
			// All idle: a random one each. None of 4 gets more than 30 of 40 but
			// once in 10^11 times.
			for _, n := range got {
				if n > 30 {
					t.Errorf("random_choose: %v", got)
				}
			}
		}},
		{"header Pin {\n\t\t\t\tfallback first\n\t\t\t}", func(t *testing.T, got []int) {
			if got[0] != 40 {
				t.Errorf("header without the header, then first: %v", got)
			}
		}},
		{"cookie replica secret {\n\t\t\t\tfallback first\n\t\t\t}", func(t *testing.T, got []int) {
			if got[0] != 40 {
				t.Errorf("cookie without a cookie, then first: %v", got)
			}
		}},
		{"client_ip_hash", func(t *testing.T, got []int) {
			if got[0] != 40 && got[1] != 40 && got[2] != 40 && got[3] != 40 {
				t.Errorf("client_ip_hash: %v", got)
			}
		}},
	} {
		t.Run(strings.Fields(test.fallback)[0], func(t *testing.T) {
			fleet := harness.TestFleet(t, 4, quick)
			s := newSite(t, fleet.Upstreams(), policy("fallback "+test.fallback))
			for i := range 40 {
				body := chat(i%2 == 0, words(fmt.Sprintf("cold %d", i), 2000))
				d := s.ask(t, body)
				if d.reason != "cold" {
					t.Errorf("request %d: %+v", i, d)
				}
				if again := s.ask(t, body); again.reason != "affinity" || again.upstream != d.upstream {
					t.Errorf("request %d again: %+v after %+v", i, again, d)
				}
			}
			got := make([]int, 4)
			for i, stats := range fleet.Stats() {
				got[i] = int(stats.Requests) / 2
			}
			test.check(t, got)
		})
	}
}

// The cookie that a fallback sets comes back and is honoured.
func TestCookieFallbackSticks(t *testing.T) {
	fleet := harness.TestFleet(t, 4, quick)
	s := newSite(t, fleet.Upstreams(), policy("fallback cookie replica secret {\n\t\t\t\tfallback random\n\t\t\t}"))
	seen := make(map[string]bool)
	for c := range 8 {
		jar, err := cookiejar.New(nil)
		if err != nil {
			t.Fatal(err)
		}
		client := &http.Client{Jar: jar}
		at := ""
		for i := range 5 {
			body := chat(false, words(fmt.Sprintf("client %d, question %d", c, i), 2000))
			res, _ := send(t, client, s.URL+chatPath, strings.NewReader(body), int64(len(body)))
			d := decisionOf(t, res)
			if at != "" && d.upstream != at {
				t.Errorf("client %d moved from %s to %s", c, at, d.upstream)
			}
			at = d.upstream
		}
		seen[at] = true
	}
	if len(seen) < 2 { // all 8 on one of 4: once in 16,384 times of chance
		t.Errorf("all clients were sent to %v", seen)
	}
}
