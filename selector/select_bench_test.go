package selector

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
	"go.uber.org/zap"

	"github.com/prefix-affinity/caddy/selector/affinity"
)

func upstreams(n int) reverseproxy.UpstreamPool {
	pool := make(reverseproxy.UpstreamPool, n)
	for i := range pool {
		pool[i] = &reverseproxy.Upstream{Dial: fmt.Sprintf("10.0.%d.%d:8000", i/250, i%250), Host: new(reverseproxy.Host)}
	}
	return pool
}

// newTestPolicy makes a policy without a handler around it.
func newTestPolicy(tb testing.TB, config Config) *Policy {
	tb.Helper()
	ctx, cancel := caddy.NewContext(caddy.Context{Context: context.Background()})
	tb.Cleanup(cancel)
	p, err := Provision(ctx, &config)
	if err != nil {
		tb.Fatal(err)
	}
	p.logger = zap.NewNop() // tests log everything, production does not
	tb.Cleanup(func() {
		if err := p.Cleanup(); err != nil {
			tb.Error(err)
		}
	})
	return p
}

// newTestRequest makes a request as reverse_proxy hands it to a policy. end ends it.
func newTestRequest(tb testing.TB, method, body string) (r *http.Request, end func()) {
	tb.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	r, err := http.NewRequestWithContext(ctx, method, "http://llm/v1/chat/completions", strings.NewReader(body))
	if err != nil {
		tb.Fatal(err)
	}
	r.Body = io.NopCloser(r.Body)
	r.Header.Set("Content-Type", "application/json")
	return caddyhttp.PrepareRequest(r, caddy.NewReplacer(), nil, new(caddyhttp.Server)), cancel
}

// A decision without a body, the account and its end included, beside Caddy's
// own least_conn.
func BenchmarkSelect(b *testing.B) {
	for _, n := range []int{8, 64} {
		pool := upstreams(n)
		b.Run(fmt.Sprintf("least_conn/%d", n), func(b *testing.B) {
			policy := new(reverseproxy.LeastConnSelection)
			benchmarkSelect(b, func(r *http.Request) {
				if policy.Select(pool, r, nil) == nil {
					b.Fatal("nothing selected")
				}
			})
		})
		b.Run(fmt.Sprintf("prefix_affinity/%d", n), func(b *testing.B) {
			p := newTestPolicy(b, Config{})
			benchmarkSelect(b, func(r *http.Request) {
				if p.Select(pool, r, nil) == nil {
					b.Fatal("nothing selected")
				}
				q := caddyhttp.GetVar(r.Context(), trailVar).(*trail).find(p, r)
				q.settle()
				q.attempt.Finish(time.Now(), affinity.Served, 0)
				q.stop()
			})
		})
	}
}

func benchmarkSelect(b *testing.B, decide func(*http.Request)) {
	b.ReportAllocs()
	requests := make([]*http.Request, 1024) // made ahead, because stopping the timer costs more than a decision
	i := len(requests)
	for b.Loop() {
		if i == len(requests) {
			b.StopTimer()
			for i = range requests {
				requests[i], _ = newTestRequest(b, http.MethodGet, "")
			}
			i = 0
			b.StartTimer()
		}
		decide(requests[i])
		i++
	}
}
