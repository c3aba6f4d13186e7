package selector

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/prefix-affinity/caddy/selector/affinity"
)

// upstreamsOf returns the upstreams that a registry has series of.
func upstreamsOf(t *testing.T, registry *prometheus.Registry) map[string]int {
	t.Helper()
	families, err := registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	upstreams := make(map[string]int)
	for _, family := range families {
		for _, m := range family.GetMetric() {
			for _, label := range m.GetLabel() {
				if label.GetName() == "upstream" {
					upstreams[label.GetValue()]++
				}
			}
		}
	}
	return upstreams
}

func TestSeriesAreBounded(t *testing.T) {
	m := newMetricSet()
	registry := prometheus.NewPedanticRegistry()
	for range 2 { // as two handlers of one configuration do
		if err := m.register(registry); err != nil {
			t.Fatal(err)
		}
	}
	for i := range 10_000 {
		m.of(fmt.Sprintf("10.0.0.%d:8000", i)).decided(affinity.Choice{Reason: affinity.Cold, PromptTokens: 1})
	}
	upstreams := upstreamsOf(t, registry)
	if len(upstreams) != maxUpstreamSeries+1 || upstreams[otherUpstreams] == 0 {
		t.Errorf("series of %d upstreams, want %d and the others together", len(upstreams), maxUpstreamSeries)
	}
	if got := counted(m.of("10.0.0.9999:8000").promptTokens); got != 10_000-maxUpstreamSeries {
		t.Errorf("%v prompt tokens of the others, want %d", got, 10_000-maxUpstreamSeries)
	}

	m.forget(func(upstream string) bool { return strings.HasSuffix(upstream, ".7:8000") })
	upstreams = upstreamsOf(t, registry)
	if len(upstreams) != 2 || upstreams["10.0.0.7:8000"] == 0 {
		t.Errorf("series of %v are left", upstreams)
	}
}

// What is counted of an upstream is counted since the start, or since it was
// forgotten.
func TestCountedSince(t *testing.T) {
	m := newMetricSet()
	first := m.of("10.0.0.1:8000").since
	if since := m.of("10.0.0.2:8000").since; !since.Equal(first) || first.IsZero() {
		t.Errorf("counted since %v and %v", first, since)
	}
	time.Sleep(time.Millisecond)
	m.forget(func(upstream string) bool { return upstream == "10.0.0.1:8000" })
	if since := m.of("10.0.0.1:8000").since; !since.Equal(first) {
		t.Errorf("one that was not forgotten: counted since %v, was %v", since, first)
	}
	if since := m.of("10.0.0.2:8000").since; !since.After(first) {
		t.Errorf("one that was forgotten: counted since %v, as before", since)
	}
}

func TestWithoutKeyCountsWithoutAllocating(t *testing.T) {
	m := newMetricSet()
	causes := []string{causeMethod, causeEmpty, causeMethod}
	for _, cause := range causes {
		m.withoutKey(cause)
	}
	for cause, want := range map[string]float64{causeMethod: 2, causeEmpty: 1} {
		if got := counted(m.unkeyed.WithLabelValues(cause)); got != want {
			t.Errorf("%s: counted %v times, want %v", cause, got, want)
		}
	}
	if known := m.knownCauses(); len(known) != 2 {
		t.Errorf("%d counters are known for two causes", len(known))
	}
	if allocs := testing.AllocsPerRun(100, func() { m.withoutKey(causeMethod) }); allocs > 0 && !raceEnabled {
		t.Errorf("counting a known cause allocates %v times", allocs)
	}
}

// TestDecisionTime: health checks and model lists, which take next to no time, must
// not hide what a decision about a prompt takes.
func TestDecisionTime(t *testing.T) {
	p, pool := newTestPolicy(t, Config{}), upstreams(2)
	for _, c := range []struct {
		name, method, body string
		timed              uint64
	}{
		{"body/chat", "POST", `{"messages":[{"role":"user","content":"` + strings.Repeat("Why is the sky blue? ", 40) + `"}]}`, 1},
		{"body/not JSON", "POST", "{", 1},
		{"no body/GET", "GET", "", 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			before := timed(metrics.decisionTime).Count
			r, end := newTestRequest(t, c.method, c.body)
			defer end()
			if p.Select(pool, r, nil) == nil {
				t.Fatal("nothing selected")
			}
			if n := timed(metrics.decisionTime).Count - before; n != c.timed {
				t.Errorf("%d decisions timed, want %d", n, c.timed)
			}
		})
	}
}
