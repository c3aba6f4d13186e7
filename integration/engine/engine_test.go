package engine_test

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"os"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/cespare/xxhash/v2"
	"go.uber.org/goleak"

	"github.com/prefix-affinity/caddy/integration/engine"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// fast is an engine that takes no noticeable time.
var fast = engine.Config{PrefillRate: 1e9, InterToken: time.Microsecond, OutputTokens: 5}

// start runs an engine and a client of its own for one test.
func start(t *testing.T, cfg engine.Config) (*engine.Engine, *http.Client) {
	t.Helper()
	e, err := engine.Start("127.0.0.1:0", cfg)
	if err != nil {
		t.Fatal(err)
	}
	client := &http.Client{Transport: &http.Transport{}}
	t.Cleanup(func() {
		client.CloseIdleConnections()
		if err := e.Close(); err != nil {
			t.Error(err)
		}
	})
	return e, client
}

type fields map[string]any

// chat is a request body; more fields may be added or replaced.
func chat(text string, more fields) string {
	body := fields{"messages": []any{fields{"role": "user", "content": text}}}
	maps.Copy(body, more)
	b, err := json.Marshal(body)
	if err != nil {
		panic(err)
	}
	return string(b)
}

func post(t *testing.T, client *http.Client, url, body string, header ...string) (*http.Response, string) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, url, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	for i := 0; i < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	resp, err := client.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	answer, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp, string(answer)
}

// completion is what a client reads of an answer or a chunk.
type completion struct {
	Object  string
	Choices []struct {
		Text    string
		Message struct {
			Role, Content string
			ToolCalls     []toolCall `json:"tool_calls"`
		}
		Delta struct {
			Role, Content string
			ToolCalls     []toolCall `json:"tool_calls"`
		}
		FinishReason string `json:"finish_reason"`
	}
	Usage *struct {
		PromptTokens     int `json:"prompt_tokens"`
		CompletionTokens int `json:"completion_tokens"`
		TotalTokens      int `json:"total_tokens"`
		Details          *struct {
			CachedTokens int `json:"cached_tokens"`
		} `json:"prompt_tokens_details"`
	}
}

type toolCall struct {
	ID       string
	Function struct{ Name, Arguments string }
}

func decode(t *testing.T, answer string) (c completion) {
	t.Helper()
	if err := json.Unmarshal([]byte(answer), &c); err != nil {
		t.Fatalf("%v: %s", err, answer)
	}
	return c
}

// events splits a stream into its chunks, and checks how it ends.
func events(t *testing.T, stream string) (chunks []completion) {
	t.Helper()
	all := strings.Split(stream, "\n\n")
	if len(all) < 3 || all[len(all)-1] != "" || all[len(all)-2] != "data: [DONE]" {
		t.Fatalf("stream doesn't end as it should: %q", stream)
	}
	for _, event := range all[:len(all)-2] {
		data, ok := strings.CutPrefix(event, "data: ")
		if !ok {
			t.Fatalf("event %q", event)
		}
		chunks = append(chunks, decode(t, data))
	}
	return chunks
}

func TestWholeAndStreamedAnswersAgree(t *testing.T) {
	e, client := start(t, fast)
	tools := fields{
		"tools":       []any{fields{"type": "function", "function": fields{"name": "look_up"}}},
		"tool_choice": "required",
	}
	named := fields{"tools": tools["tools"], "tool_choice": fields{"type": "function", "function": fields{"name": "other"}}}
	for _, c := range []struct {
		name, path, body, finish, tool string
	}{
		{"chat/text", "/v1/chat/completions", chat("hello", nil), "stop", ""},
		{"chat/short", "/v1/chat/completions", chat("hello", fields{"max_tokens": 2}), "length", ""},
		{"chat/long", "/v1/chat/completions", chat("hello", fields{"max_tokens": 9, "ignore_eos": true}), "length", ""},
		{"chat/tool", "/v1/chat/completions", chat("hello", tools), "tool_calls", "look_up"},
		{"chat/named tool", "/v1/chat/completions", chat("hello", named), "tool_calls", "other"},
		{"completion/text", "/v1/completions", `{"prompt":"hello"}`, "stop", ""},
		{"completion/long", "/v1/completions", `{"prompt":"hello","min_tokens":9}`, "stop", ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, answer := post(t, client, e.URL()+c.path, c.body)
			whole := decode(t, answer)
			streaming := strings.TrimSuffix(c.body, "}") + `,"stream":true,"stream_options":{"include_usage":true}}`
			resp, stream := post(t, client, e.URL()+c.path, streaming)
			if ct := resp.Header.Get("Content-Type"); ct != "text/event-stream; charset=utf-8" {
				t.Errorf("content type %q", ct)
			}
			var text, arguments, tool, finish string
			tokens := 0
			chunks := events(t, stream)
			for _, chunk := range chunks {
				for _, choice := range chunk.Choices {
					piece := choice.Text + choice.Delta.Content
					text += piece
					for _, call := range choice.Delta.ToolCalls {
						tool += call.Function.Name
						piece += call.Function.Arguments
						arguments += call.Function.Arguments
					}
					if piece != "" {
						tokens++
					}
					finish += choice.FinishReason
				}
			}
			last := chunks[len(chunks)-1]
			if last.Usage == nil || len(last.Choices) != 0 {
				t.Fatalf("no usage at the end: %s", stream)
			}
			choice := whole.Choices[0]
			if finish != c.finish || choice.FinishReason != c.finish {
				t.Errorf("finish reasons %q and %q instead of %q", choice.FinishReason, finish, c.finish)
			}
			if tokens != whole.Usage.CompletionTokens || tokens != last.Usage.CompletionTokens {
				t.Errorf("%d tokens streamed, usages say %d and %d", tokens, whole.Usage.CompletionTokens, last.Usage.CompletionTokens)
			}
			if whole.Usage.TotalTokens != whole.Usage.PromptTokens+tokens {
				t.Errorf("usage %+v", whole.Usage)
			}
			if c.tool == "" {
				if want := choice.Text + choice.Message.Content; text != want || text == "" {
					t.Errorf("streamed %q instead of %q", text, want)
				}
				return
			}
			call := choice.Message.ToolCalls[0]
			if tool != c.tool || call.Function.Name != c.tool || call.ID == "" {
				t.Errorf("called %q and %+v instead of %q", tool, call, c.tool)
			}
			if arguments != call.Function.Arguments || !json.Valid([]byte(arguments)) {
				t.Errorf("streamed arguments %q instead of %q", arguments, call.Function.Arguments)
			}
		})
	}
}

func TestCachedTokensReport(t *testing.T) {
	const none = -1
	text := strings.Repeat("x", 6400) // 100 blocks, and the cached part ends in the one with the closing mark
	usage := fields{"include_usage": true}
	for _, c := range []struct {
		name            string
		cfg             engine.Config
		more            fields
		noUsage         bool
		atFirst, atNext int
	}{
		{"asked/whole", engine.Config{}, nil, false, 0, 1600},
		{"asked/stream", engine.Config{}, fields{"stream": true, "stream_options": usage}, false, 0, 1600},
		{"asked/not", engine.Config{}, fields{"stream": true}, true, none, none},
		{"always/stream", engine.Config{Cached: engine.CachedAlways}, fields{"stream": true}, false, 0, 1600},
		{"never/whole", engine.Config{Cached: engine.CachedNever}, nil, false, none, none},
		{"never/stream", engine.Config{Cached: engine.CachedNever}, fields{"stream": true, "stream_options": usage}, false, none, none},
		{"no zero/whole", engine.Config{DropZero: true}, nil, false, none, 1600},
	} {
		t.Run(c.name, func(t *testing.T) {
			cfg := c.cfg
			cfg.PrefillRate, cfg.InterToken = fast.PrefillRate, fast.InterToken
			e, client := start(t, cfg)
			for i, want := range []int{c.atFirst, c.atNext} {
				_, answer := post(t, client, e.URL()+"/v1/chat/completions", chat(text, c.more))
				var got completion
				if c.more["stream"] == true {
					chunks := events(t, answer)
					got = chunks[len(chunks)-1]
				} else {
					got = decode(t, answer)
				}
				if (got.Usage == nil) != c.noUsage {
					t.Fatalf("usage %+v", got.Usage)
				}
				cached := none
				if got.Usage != nil && got.Usage.Details != nil {
					cached = got.Usage.Details.CachedTokens
				}
				if cached != want {
					t.Errorf("answer %d reports %d cached tokens instead of %d", i+1, cached, want)
				}
			}
			if s := e.Stats(); s.CachedTokens != 1600 || s.Requests != 2 || s.Served != 2 {
				t.Errorf("stats %+v", s)
			}
		})
	}
}

func TestLoadHeaders(t *testing.T) {
	const (
		text = "TEXT named_metrics.kv_cache_usage_perc=0.0, named_metrics.num_requests_waiting=0.0"
		js   = `JSON {"named_metrics": {"kv_cache_usage_perc": 0.0, "num_requests_waiting": 0.0}}`
	)
	cfg := fast
	cfg.Name, cfg.CachedTokensHeader, cfg.QueueDepthHeader = "pod", "X-Cached", "X-Queue"
	e, client := start(t, cfg)
	post(t, client, e.URL()+"/v1/completions", `{"prompt":"`+strings.Repeat("x", 65)+`"}`)
	for _, c := range []struct{ name, path, body, format, want string }{
		{"chat/text", "/v1/chat/completions", chat("x", nil), "text", text},
		{"chat/upper case", "/v1/chat/completions", chat("x", nil), "TEXT", text},
		{"chat/json", "/v1/chat/completions", chat("x", nil), "json", js},
		{"chat/other", "/v1/chat/completions", chat("x", nil), "bin", ""},
		{"chat/not asked", "/v1/chat/completions", chat("x", nil), "", ""},
		{"chat/stream", "/v1/chat/completions", chat("x", fields{"stream": true}), "text", ""},
		{"chat/error", "/v1/chat/completions", `{}`, "text", ""},
		{"completion/text", "/v1/completions", `{"prompt":"x"}`, "text", text},
	} {
		t.Run(c.name, func(t *testing.T) {
			resp, _ := post(t, client, e.URL()+c.path, c.body, "Endpoint-Load-Metrics-Format", c.format)
			if got := resp.Header.Get("endpoint-load-metrics"); got != c.want {
				t.Errorf("%q instead of %q", got, c.want)
			}
			if got := resp.Header.Get("X-Inference-Pod"); got != "pod" {
				t.Errorf("pod %q", got)
			}
		})
	}
	for _, stream := range []string{"false", "true"} {
		resp, _ := post(t, client, e.URL()+"/v1/completions", `{"prompt":"`+strings.Repeat("x", 66)+`","stream":`+stream+`}`)
		if c, q := resp.Header.Get("X-Cached"), resp.Header.Get("X-Queue"); c != "16" || q != "0" {
			t.Errorf("stream %s: cached %q, queue %q", stream, c, q)
		}
	}
}

func TestErrors(t *testing.T) {
	e, client := start(t, engine.Config{CapacityTokens: 1600, PrefillRate: 1e9, InterToken: time.Microsecond})
	for _, c := range []struct {
		name, path, body string
		status           int
	}{
		{"body/not JSON", "/v1/chat/completions", "hello", 400},
		{"body/empty", "/v1/chat/completions", "", 400},
		{"body/no messages", "/v1/chat/completions", "{}", 400},
		{"options/stream_options alone", "/v1/chat/completions", chat("x", fields{"stream_options": fields{}}), 400},
		{"options/n", "/v1/chat/completions", chat("x", fields{"n": 2}), 400},
		{"prompt/too long", "/v1/completions", `{"prompt":"` + strings.Repeat("x", 6400) + `"}`, 400},
		{"prompt/just right", "/v1/completions", `{"prompt":"` + strings.Repeat("x", 6000) + `"}`, 200},
		{"path/unknown", "/v1/nothing", "{}", 404},
		{"path/method", "/v1/models", "{}", 405},
	} {
		t.Run(c.name, func(t *testing.T) {
			if resp, answer := post(t, client, e.URL()+c.path, c.body); resp.StatusCode != c.status {
				t.Errorf("%s instead of %d: %s", resp.Status, c.status, answer)
			}
		})
	}
	if s := e.Stats(); s.Rejected != 6 || s.Served != 1 {
		t.Errorf("stats %+v", s)
	}
}

// stream opens a streamed answer and leaves it to the test.
func stream(t *testing.T, ctx context.Context, client *http.Client, url, text string) *http.Response {
	t.Helper()
	body := chat(text, fields{"stream": true})
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url+"/v1/chat/completions", strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	resp, err := client.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	return resp
}

// eventually waits for what the other side of a connection will do soon.
func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for range 2000 {
		if ok() {
			return
		}
		time.Sleep(5 * time.Millisecond)
	}
	t.Fatalf("%s: not within 10 s", what)
}

func TestHeadersComeBeforeThePrefill(t *testing.T) {
	for _, preamble := range []bool{false, true} {
		t.Run(fmt.Sprintf("preamble/%t", preamble), func(t *testing.T) {
			e, client := start(t, engine.Config{Preamble: preamble, OutputTokens: 2, InterToken: time.Microsecond})
			if err := e.SetFaults(engine.Faults{Hang: true}); err != nil {
				t.Fatal(err)
			}
			resp := stream(t, t.Context(), client, e.URL(), "hello") // would hang here
			defer resp.Body.Close()
			lines := bufio.NewScanner(resp.Body)
			if preamble && (!lines.Scan() || !strings.Contains(lines.Text(), `"role":"assistant"`)) {
				t.Errorf("first line %q", lines.Text())
			}
			if s := e.Stats(); s.OutputTokens != 0 || s.Running != 1 {
				t.Errorf("hanging: %+v", s)
			}
			if err := e.SetFaults(engine.Faults{}); err != nil {
				t.Fatal(err)
			}
			var last string
			for lines.Scan() {
				last = firstOf(lines.Text(), last)
			}
			if last != "data: [DONE]" || lines.Err() != nil {
				t.Errorf("ends with %q, %v", last, lines.Err())
			}
		})
	}
}

// firstOf returns the first of the two that isn't empty.
func firstOf(a, b string) string {
	if a != "" {
		return a
	}
	return b
}

func TestClientAbort(t *testing.T) {
	e, client := start(t, engine.Config{InterToken: time.Millisecond, OutputTokens: 100_000, CapacityTokens: 10_000_000})
	const n = 20
	var wg sync.WaitGroup
	for range n {
		wg.Go(func() {
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			resp := stream(t, ctx, client, e.URL(), "hello")
			defer resp.Body.Close()
			if _, err := io.ReadFull(resp.Body, make([]byte, 1000)); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	eventually(t, "all aborts arrive", func() bool { return e.Stats().Aborted == n })
	if s := e.Stats(); s.Running != 0 || s.Waiting != 0 || s.KVUsage != 0 || s.Served != 0 {
		t.Errorf("stats %+v", s)
	}
}

func TestQueueFull(t *testing.T) {
	e, client := start(t, engine.Config{PrefillRate: 1000, MaxWaiting: 1})
	if err := e.SetFaults(engine.Faults{Hang: true}); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	for _, text := range []string{"runs", strings.Repeat("waits", 2000)} {
		resp := stream(t, ctx, client, e.URL(), text)
		defer resp.Body.Close()
	}
	resp, _ := post(t, client, e.URL()+"/v1/chat/completions", chat("too many", nil))
	if resp.StatusCode != http.StatusTooManyRequests || resp.Header.Get("Retry-After") != "3" {
		t.Errorf("%s, retry after %q instead of the 2.5 s that the queue takes", resp.Status, resp.Header.Get("Retry-After"))
	}
	cancel()
	eventually(t, "aborts while hanging", func() bool { return e.Stats().Aborted == 2 })
	if s := e.Stats(); s.Refused != 1 || s.Waiting != 0 {
		t.Errorf("stats %+v", s)
	}
}

func TestRestart(t *testing.T) {
	e, client := start(t, engine.Config{PrefillRate: 1e9, InterToken: time.Millisecond, OutputTokens: 10_000})
	text := strings.Repeat("x", 6400)
	short := chat(text, fields{"max_tokens": 1})
	post(t, client, e.URL()+"/v1/chat/completions", short)
	began := metric(t, client, e, "process_start_time_seconds")
	resp := stream(t, t.Context(), client, e.URL(), text)
	defer resp.Body.Close()
	post(t, client, e.URL()+"/control", `{"restart":true}`)
	if _, err := io.Copy(io.Discard, resp.Body); !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("the stream ends with %v", err)
	}
	_, answer := post(t, client, e.URL()+"/v1/chat/completions", short)
	if n := decode(t, answer).Usage.Details.CachedTokens; n != 0 {
		t.Errorf("%d tokens cached after the restart", n)
	}
	if now := metric(t, client, e, "process_start_time_seconds"); now <= began {
		t.Errorf("started at %v, restarted at %v", began, now)
	}
	eventually(t, "the failure is counted", func() bool { return e.Stats().Failed == 1 })
	if s := e.Stats(); s.Served != 2 || s.Aborted != 0 {
		t.Errorf("stats %+v", s)
	}
}

func get(t *testing.T, client *http.Client, url string) (*http.Response, string) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url, nil)
	if err != nil {
		t.Fatal(err)
	}
	resp, err := client.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	answer, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp, string(answer)
}

// metric reads one series, named with its labels.
func metric(t *testing.T, client *http.Client, e *engine.Engine, series string) (v float64) {
	t.Helper()
	_, text := get(t, client, e.URL()+"/metrics")
	for line := range strings.Lines(text) {
		if value, ok := strings.CutPrefix(line, series+" "); ok {
			if _, err := fmt.Sscan(value, &v); err != nil {
				t.Fatal(err)
			}
			return v
		}
	}
	t.Fatalf("no %s in %s", series, text)
	return 0
}

func TestMetrics(t *testing.T) {
	cfg := fast
	cfg.CapacityTokens = 3200
	e, client := start(t, cfg)
	for range 2 {
		post(t, client, e.URL()+"/v1/completions", `{"prompt":"`+strings.Repeat("x", 256)+`"}`)
	}
	if err := e.SetFaults(engine.Faults{Hang: true}); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		resp := stream(t, t.Context(), client, e.URL(), strings.Repeat("y", 64))
		defer resp.Body.Close()
	}
	const labels = `{engine="0",model_name="simulated"}`
	for series, want := range map[string]float64{
		"vllm:num_requests_running" + labels:                           1,
		"vllm:num_requests_waiting" + labels:                           1,
		"vllm:kv_cache_usage_perc" + labels:                            3. / 200,
		"vllm:prefix_cache_queries_total" + labels:                     64 + 64 + 29,
		"vllm:prefix_cache_hits_total" + labels:                        48,
		`vllm:cache_config_info{block_size="16",num_gpu_blocks="200"}`: 1,
	} {
		if v := metric(t, client, e, series); v != want {
			t.Errorf("%s is %v instead of %v", series, v, want)
		}
	}
	if _, models := get(t, client, e.URL()+"/v1/models"); !strings.Contains(models, `"id":"simulated"`) {
		t.Errorf("models: %s", models)
	}
}

func TestFailShare(t *testing.T) {
	e, client := start(t, fast)
	post(t, client, e.URL()+"/control", `{"fail_status":503,"fail_share":0.25}`)
	failed := 0
	for range 40 {
		if resp, _ := post(t, client, e.URL()+"/v1/chat/completions", chat("x", nil)); resp.StatusCode == http.StatusServiceUnavailable {
			failed++
		}
	}
	if s := e.Stats(); failed != 10 || s.Failed != 10 || s.Served != 30 {
		t.Errorf("%d of 40 requests failed instead of 10, stats %+v", failed, s)
	}
	// A second change leaves the first one's fields.
	post(t, client, e.URL()+"/control", `{"unhealthy":true}`)
	want := engine.Faults{FailStatus: 503, FailShare: 0.25, Unhealthy: true}
	if f := e.Faults(); f != want {
		t.Errorf("faults %+v instead of %+v", f, want)
	}
	if resp, _ := get(t, client, e.URL()+"/health"); resp.StatusCode != http.StatusServiceUnavailable {
		t.Errorf("health %s", resp.Status)
	}
	post(t, client, e.URL()+"/control", `{"unhealthy":false}`)
	if resp, _ := get(t, client, e.URL()+"/health"); resp.StatusCode != http.StatusOK {
		t.Errorf("health %s", resp.Status)
	}
}

func TestControlErrors(t *testing.T) {
	e, client := start(t, fast)
	for _, body := range []string{`{"slow":-1}`, `{"fail_status":200}`, `{"fail_share":2}`, `{"typo":1}`, `hello`} {
		if resp, _ := post(t, client, e.URL()+"/control", body); resp.StatusCode != http.StatusBadRequest {
			t.Errorf("%s: %s", body, resp.Status)
		}
	}
	if f := e.Faults(); f != (engine.Faults{}) {
		t.Errorf("faults %+v", f)
	}
	if _, err := engine.Start("127.0.0.1:0", engine.Config{MaxRunning: -1}); err == nil {
		t.Error("a negative figure was taken")
	}
}

func TestDieMidstream(t *testing.T) {
	cfg := fast
	cfg.OutputTokens = 10
	e, client := start(t, cfg)
	if err := e.SetFaults(engine.Faults{DieMidstream: true}); err != nil {
		t.Fatal(err)
	}
	resp := stream(t, t.Context(), client, e.URL(), "hello")
	defer resp.Body.Close()
	answer, err := io.ReadAll(resp.Body)
	if !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("the stream ends with %v", err)
	}
	if n := bytes.Count(answer, []byte("data: ")); n != 1+5 {
		t.Errorf("%d events instead of the role and half of 10 tokens: %s", n, answer)
	}
	if _, err := client.Post(e.URL()+"/v1/completions", "", strings.NewReader(`{"prompt":"x"}`)); err == nil { //nolint:bodyclose // there is none
		t.Error("a plain answer came through")
	}
	eventually(t, "failures are counted", func() bool { return e.Stats().Failed == 2 })
	if s := e.Stats(); s.Running != 0 || s.KVUsage != 0 {
		t.Errorf("stats %+v", s)
	}
}

func TestCutOff(t *testing.T) {
	for _, c := range []struct {
		name   string
		faults engine.Faults
		want   error
	}{
		{"connection/refused", engine.Faults{Refuse: true}, syscall.ECONNREFUSED},
		{"connection/reset", engine.Faults{Reset: true}, syscall.ECONNRESET},
		{"connection/black hole", engine.Faults{Blackhole: true}, os.ErrDeadlineExceeded},
	} {
		t.Run(c.name, func(t *testing.T) {
			cfg := fast
			cfg.OutputTokens, cfg.InterToken = 10_000, time.Millisecond
			e, client := start(t, cfg)
			running := stream(t, t.Context(), client, e.URL(), "hello")
			defer running.Body.Close()
			if err := e.SetFaults(c.faults); err != nil {
				t.Fatal(err)
			}
			if _, err := io.Copy(io.Discard, running.Body); err == nil {
				t.Error("a running stream ended well")
			}
			if err := probe(e.Addr()); !errors.Is(err, c.want) {
				t.Errorf("%v instead of %v", err, c.want)
			}
			if err := e.SetFaults(engine.Faults{}); err != nil {
				t.Fatal(err)
			}
			if resp, _ := get(t, client, e.URL()+"/health"); resp.StatusCode != http.StatusOK {
				t.Errorf("health afterwards: %s", resp.Status)
			}
			eventually(t, "the stream is gone", func() bool { return e.Stats().Running == 0 })
		})
	}
}

// probe asks for /health on a connection of its own.
func probe(addr string) error {
	c, err := net.Dial("tcp", addr)
	if err != nil {
		return err
	}
	defer c.Close()
	if err := c.SetDeadline(time.Now().Add(200 * time.Millisecond)); err != nil {
		return err
	}
	if _, err := io.WriteString(c, "GET /health HTTP/1.0\r\n\r\n"); err != nil {
		return err
	}
	_, err = io.ReadAll(c)
	return err
}

func TestBodySum(t *testing.T) {
	e, client := start(t, fast)
	var sum uint64
	var size int64
	for i := range 10 {
		body := chat(strings.Repeat("x", i*1000), nil)
		sum += xxhash.Sum64String(body)
		size += int64(len(body))
		post(t, client, e.URL()+"/v1/chat/completions", body)
	}
	var s engine.Stats
	_, answer := get(t, client, e.URL()+"/stats")
	if err := json.Unmarshal([]byte(answer), &s); err != nil {
		t.Fatal(err)
	}
	if s.Bodies != 10 || s.BodyBytes != size || s.BodySum != sum {
		t.Errorf("stats %+v, sent %d bytes with sum %d", s, size, sum)
	}
}

// A hundred streams of an engine take about as long as one: one scheduler
// keeps the pace for all.
func TestManyStreamsKeepPace(t *testing.T) {
	const tokens = 100
	e, client := start(t, engine.Config{PrefillRate: 1e9, InterToken: 10 * time.Millisecond, OutputTokens: tokens, MaxRunning: 1000, CapacityTokens: 1 << 20})
	run := func(n int) time.Duration {
		begin := time.Now()
		var wg sync.WaitGroup
		for range n {
			wg.Go(func() {
				_, answer := post(t, client, e.URL()+"/v1/chat/completions", chat("hello", fields{"stream": true}))
				if n := strings.Count(answer, "data: "); n != tokens+3 {
					t.Errorf("%d events", n)
				}
			})
		}
		wg.Wait()
		return time.Since(begin)
	}
	one, many := run(1), run(100)
	t.Logf("one stream %v, 100 streams %v", one, many)
	if many > 10*one { // one after the other would be 100 times
		t.Errorf("one stream takes %v, 100 at once %v", one, many)
	}
}

func TestCloseTwice(t *testing.T) {
	e, err := engine.Start("127.0.0.1:0", engine.Config{})
	if err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := e.Close(); err != nil {
			t.Error(err)
		}
	}
}
