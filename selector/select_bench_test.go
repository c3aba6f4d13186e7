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

	"github.com/prefix-affinity/caddy/integration/measure"
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
	tb.Setenv("XDG_DATA_HOME", tb.TempDir()) // it keeps what it learns
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

// deciders returns how Caddy's own least_conn and this policy decide, the
// account and its end included.
func deciders(tb testing.TB, replicas int) (stock, ours func(*http.Request)) {
	tb.Helper()
	pool := upstreams(replicas)
	least := new(reverseproxy.LeastConnSelection)
	p := newTestPolicy(tb, Config{})
	p.observer = &observer{policy: p, handler: new(reverseproxy.Handler)}
	return func(r *http.Request) {
			if least.Select(pool, r, nil) == nil {
				tb.Fatal("nothing selected")
			}
		}, func(r *http.Request) {
			if p.Select(pool, r, nil) == nil {
				tb.Fatal("nothing selected")
			}
			q := caddyhttp.GetVar(r.Context(), trailVar).(*trail).find(p, r)
			unsent.remove(q)
			q.settle()
			q.attempt.Finish(time.Now(), affinity.Served, 0)
		}
}

// selectCosts are how many times as long as with least_conn a decision without
// a body may take, by the number of upstreams.
var selectCosts = map[int]float64{8: 6, 64: 2.5}

// BenchmarkSelect is a decision without a body, beside Caddy's own least_conn.
func BenchmarkSelect(b *testing.B) {
	for _, n := range []int{8, 64} {
		stock, ours := deciders(b, n)
		b.Run(fmt.Sprintf("least_conn/%d", n), func(b *testing.B) { benchmarkSelect(b, stock) })
		b.Run(fmt.Sprintf("prefix_affinity/%d", n), func(b *testing.B) {
			benchmarkSelect(b, ours)
			b.ReportMetric(selectRatio(b, n, 0), "x_least_conn")
		})
	}
}

// selectRatio compares both.
func selectRatio(tb testing.TB, replicas int, enough float64) float64 {
	stock, ours := deciders(tb, replicas)
	var requests [64]*http.Request // each can be decided once
	prepare := func() {
		for i := range requests {
			requests[i], _ = newTestRequest(tb, http.MethodGet, "")
		}
	}
	batch := func(requests []*http.Request, decide func(*http.Request)) func() {
		return func() {
			for _, r := range requests {
				decide(r)
			}
		}
	}
	return measure.RatioOf(prepare, enough, batch(requests[:32], ours), batch(requests[32:], stock))
}

// TestSelectCost: a tenfold slip fails this, noise doesn't.
func TestSelectCost(t *testing.T) {
	if testing.Short() || raceEnabled {
		t.Skip("measures time")
	}
	for n, most := range selectCosts {
		if ratio := selectRatio(t, n, most); ratio > 4*most {
			t.Errorf("%d upstreams: a decision takes %.1f times as long as with least_conn, at most %.1f expected", n, ratio, most)
		} else {
			t.Logf("%d upstreams: %.1f times as long as with least_conn (target %.1f)", n, ratio, most)
		}
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
