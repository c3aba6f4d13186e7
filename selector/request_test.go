package selector

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
)

// TestEnds: a request counts from when it is routed until it ends, however that is,
// although mostly nobody watches for it.
func TestEnds(t *testing.T) {
	answer := func(status int, header ...string) func(*http.Request) (*http.Response, error) {
		return func(*http.Request) (*http.Response, error) {
			h := make(http.Header)
			for i := 0; i < len(header); i += 2 {
				h.Set(header[i], header[i+1])
			}
			return &http.Response{StatusCode: status, Header: h, Body: io.NopCloser(strings.NewReader("data: {}\n\n"))}, nil
		}
	}
	read := func(body io.ReadCloser) { _, _ = io.Copy(io.Discard, body) }
	start := func(body io.ReadCloser) { _, _ = body.Read(make([]byte, 1)) }
	shut := func(body io.ReadCloser) { _ = body.Close() }
	routes := &reverseproxy.Handler{HandleResponse: make([]caddyhttp.ResponseHandler, 1)}
	for _, test := range []struct {
		name      string
		handler   *reverseproxy.Handler // nil: the policy has none
		transport func(*http.Request) (*http.Response, error)
		body      func(io.ReadCloser) // what becomes of the response's
		pending   int                 // when the headers are there
		after     int                 // when that became of it
	}{
		{"sent/never", new(reverseproxy.Handler), nil, nil, 1, 1},
		{"sent/nobody sees it", nil, nil, nil, 1, 1},
		{"error/connection", new(reverseproxy.Handler), func(*http.Request) (*http.Response, error) { return nil, errors.New("refused") }, nil, 0, 0},
		{"error/client", new(reverseproxy.Handler), func(*http.Request) (*http.Response, error) { return nil, context.Canceled }, nil, 0, 0},
		{"refused/429", new(reverseproxy.Handler), answer(429, "Retry-After", "7"), shut, 0, 0},
		{"refused/503", new(reverseproxy.Handler), answer(503), shut, 0, 0},
		{"rejected/404", new(reverseproxy.Handler), answer(404), shut, 0, 0},
		{"served/read", new(reverseproxy.Handler), answer(200), read, 1, 0},
		{"served/stream read", new(reverseproxy.Handler), answer(200, "Content-Type", "text/event-stream"), read, 1, 0},
		{"served/closed", new(reverseproxy.Handler), answer(200), shut, 1, 0},
		{"served/stream closed", new(reverseproxy.Handler), answer(200, "Content-Type", "text/event-stream"), func(b io.ReadCloser) { start(b); shut(b) }, 1, 0},
		{"routes/read", routes, answer(200), read, 1, 0},
		{"routes/abort", routes, answer(200), func(io.ReadCloser) {}, 1, 1},
		{"routes/abort stream", routes, answer(200, "Content-Type", "text/event-stream"), start, 1, 1},
		{"upgraded", new(reverseproxy.Handler), answer(101), func(io.ReadCloser) {}, 1, 1},
	} {
		for _, keyed := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s/keyed=%t", test.name, keyed), func(t *testing.T) {
				p := newTestPolicy(t, Config{})
				if test.handler != nil {
					p.observer = &observer{policy: p, handler: test.handler}
				}
				pool := upstreams(1)
				pending := func() int { return p.learned.fleet.Find(pool[0].Dial).Snapshot(time.Now()).InFlight }
				method, body := http.MethodGet, ""
				if keyed {
					method, body = http.MethodPost, `{"messages":[{"role":"user","content":"a question"}]}`
				}
				r, end := newTestRequest(t, method, body)
				defer end()
				if p.Select(pool, r, nil) == nil {
					t.Fatal("nothing selected")
				}
				var res *http.Response
				if test.transport != nil {
					p.observer.RoundTripper = roundTripper(func(req *http.Request) (*http.Response, error) {
						if n := pending(); n != 1 {
							t.Errorf("%d pending while the upstream has it", n)
						}
						return test.transport(req)
					})
					res, _ = p.observer.RoundTrip(r) //nolint:bodyclose // some are left open on purpose
				}
				if n := pending(); n != test.pending {
					t.Errorf("%d pending, want %d", n, test.pending)
				}
				if res != nil {
					test.body(res.Body)
				}
				if n := pending(); n != test.after {
					t.Errorf("%d pending afterwards, want %d", n, test.after)
				}
				end()
				q := caddyhttp.GetVar(r.Context(), trailVar).(*trail).find(p, r)
				for deadline := time.Now().Add(time.Minute); pending() > 0 || keyed && q.held.refs.Load() > 0; time.Sleep(time.Millisecond) {
					unsent.watch(time.Now())
					if time.Now().After(deadline) {
						t.Fatal("pending for good, or its body is held")
					}
				}
			})
		}
	}
}

// TestUnsent: what is not sent in time is watched from the next decision on.
func TestUnsent(t *testing.T) {
	p := newTestPolicy(t, Config{})
	p.observer = &observer{policy: p, handler: new(reverseproxy.Handler)}
	pool := upstreams(1)
	choose := func() *request {
		r, end := newTestRequest(t, http.MethodPost, `{"messages":[{"role":"user","content":"a question"}]}`)
		t.Cleanup(end)
		if p.Select(pool, r, nil) == nil {
			t.Fatal("nothing selected")
		}
		return caddyhttp.GetVar(r.Context(), trailVar).(*trail).find(p, r)
	}
	watched := func(q *request) bool {
		q.mu.Lock()
		defer q.mu.Unlock()
		return q.stop != nil
	}
	first, second := choose(), choose()
	unsent.remove(second) // it is sent
	time.Sleep(2 * sendingTime)
	if watched(first) {
		t.Error("watched although nothing else was decided")
	}
	third := choose()
	if !watched(first) || watched(second) || watched(third) {
		t.Errorf("watched: %t, %t, %t, want the first only", watched(first), watched(second), watched(third))
	}
	unsent.remove(first) // a second time
	unsent.watch(time.Now())
	if unsent.first != nil || unsent.last != nil {
		t.Error("some are left")
	}
}

// TestFailedWithoutPrompt: the next attempt goes elsewhere.
func TestFailedWithoutPrompt(t *testing.T) {
	p := newTestPolicy(t, Config{})
	p.observer = &observer{policy: p, handler: new(reverseproxy.Handler)}
	pool := upstreams(3)
	tried := make(map[string]bool)
	p.observer.RoundTripper = roundTripper(func(*http.Request) (*http.Response, error) { return nil, errors.New("refused") })
	r, end := newTestRequest(t, http.MethodGet, "")
	defer end()
	for range pool {
		up := p.Select(pool, r, nil)
		if up == nil || tried[up.Dial] {
			t.Fatalf("%v after %v", up, tried)
		}
		tried[up.Dial] = true
		_, _ = p.observer.RoundTrip(r) //nolint:bodyclose // there is none
	}
	if p.Select(pool, r, nil) == nil {
		t.Error("all have failed once, yet none is tried again")
	}
}

func TestUnwanted(t *testing.T) {
	for _, test := range []struct {
		name, method, header, value, want string
	}{
		{"method/get", http.MethodGet, "", "", causeMethod},
		{"method/put", http.MethodPut, "", "", keyed},
		{"upgrade/websocket", http.MethodPost, "Upgrade", "websocket", causeUpgrade},
		{"upgrade/h2c", http.MethodPost, "Upgrade", "h2c", keyed}, // Java's client and curl --http2 offer it
		{"type/none", http.MethodPost, "Content-Type", "", keyed},
		{"type/json", http.MethodPost, "Content-Type", "application/json; charset=utf-8", keyed},
		{"type/of curl", http.MethodPost, "Content-Type", "application/x-www-form-urlencoded", keyed},
		{"type/bytes", http.MethodPost, "Content-Type", "application/octet-stream", causeType},
		{"type/parts", http.MethodPost, "Content-Type", "multipart/form-data; boundary=x", causeType},
		{"type/broken", http.MethodPost, "Content-Type", ";", causeType},
		{"encoding/gzip", http.MethodPost, "Content-Encoding", "gzip", causeEncoding},
		{"encoding/none", http.MethodPost, "Content-Encoding", "identity", keyed},
	} {
		r, end := newTestRequest(t, test.method, `{"prompt":"x"}`)
		if test.header != "" {
			r.Header.Set(test.header, test.value)
		}
		if got := unwanted(r); got != test.want {
			t.Errorf("%s: '%s', want '%s'", test.name, got, test.want)
		}
		end()
	}
}

func TestStoredResponse(t *testing.T) {
	for path, want := range map[string]string{
		"/v1/responses":                       "",
		"/v1/responses/":                      "",
		"/v1/responses/resp_1":                "resp_1",
		"/team/a/v1/responses/resp_1/":        "resp_1",
		"/v1/responses/resp_1/cancel":         "resp_1",
		"/v1/responses/resp_1/input_items":    "resp_1",
		"/v1/responses/resp_1/input_items/x":  "",
		"/v1/responses/input_tokens":          "", // counts those of its body
		"/v1/responses/compact":               "",
		"/v1/chat/completions/chatcmpl_1":     "",
		"/v1/responses/resp_1/something/else": "",
		"/v1/responses//cancel":               "",
		"/v1/responsesandmore/resp_1":         "",
		"/responses/resp_1":                   "",
		"/v1/responses/a%2Fb":                 "a%2Fb",
		"/v1/responses/resp_1/cancel/v1/":     "",
		"/v1/responses/v1/responses/resp_1":   "",
		"/v1/responses/resp_1/v1/responses/x": "",
		"":                                    "",
	} {
		if got := storedResponse(path); got != want {
			t.Errorf("'%s': '%s', want '%s'", path, got, want)
		}
	}
}
