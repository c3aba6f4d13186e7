package selector

import (
	"errors"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"

	"github.com/prefix-affinity/caddy/selector/affinity"
	"github.com/prefix-affinity/caddy/selector/signal"
)

// Metrics are kept once for the process and registered with the registry of
// every configuration, so that they go on across reloads. The label upstream is
// the dial address, as in Caddy's own caddy_reverse_proxy_upstreams_healthy.
//
// An upstream's series go when the fleet forgets it, so their number is bounded
// by the upstreams of the last hour; beyond maxUpstreamSeries they share one.
var metrics = newMetricSet()

const (
	maxUpstreamSeries = 1024
	otherUpstreams    = "other"
)

// reasons are all there are; each has a series from the start, so that rates are
// right from its first count.
var reasons = [...]affinity.Reason{
	affinity.Affinity, affinity.Overflow, affinity.Unhealthy, affinity.Cold, affinity.NoKey, affinity.Session,
	affinity.Gone,
}

type metricSet struct {
	decisions      *prometheus.CounterVec
	promptTokens   *prometheus.CounterVec
	matchedTokens  *prometheus.CounterVec
	shadowTokens   *prometheus.CounterVec
	cachedTokens   *prometheus.CounterVec
	reportedTokens *prometheus.CounterVec
	ttft           *prometheus.HistogramVec
	decisionTime   prometheus.Histogram
	unkeyed        *prometheus.CounterVec
	gauges         fleetGauges
	sync           syncMetrics

	causes atomic.Pointer[[]causeCounter] // of unkeyed; changed under mu

	mu     sync.RWMutex
	series map[string]*upstreamSeries
	since  time.Time // from when on a new upstream's requests are all counted
}

// upstreamSeries are the series of one upstream, looked up once.
type upstreamSeries struct {
	since                                                     time.Time // when they were at 0
	decisions                                                 [len(reasons)]prometheus.Counter
	promptTokens, matchedTokens, cachedTokens, reportedTokens prometheus.Counter
	shadowMatchedTokens                                       prometheus.Counter
	ttftHit, ttftMiss                                         prometheus.Histogram
	reporting                                                 reporting
	engine                                                    atomic.Pointer[signal.EngineMetrics] // as last polled; nil: never
	polled                                                    atomic.Int64                         // Unix nanoseconds
}

func newMetricSet() *metricSet {
	const ns, sub = "caddy", "prefix_affinity"
	counter := func(name, help string, labels ...string) *prometheus.CounterVec {
		return prometheus.NewCounterVec(prometheus.CounterOpts{Namespace: ns, Subsystem: sub, Name: name, Help: help}, labels)
	}
	return &metricSet{
		decisions:      counter("decisions_total", "Attempts by the upstream they were sent to and why.", "upstream", "reason"),
		promptTokens:   counter("prompt_tokens_total", "Estimated prompt tokens sent to an upstream.", "upstream"),
		matchedTokens:  counter("matched_tokens_total", "Prompt tokens that an upstream was believed to hold when they were sent there.", "upstream"),
		shadowTokens:   counter("shadow_matched_tokens_total", "Prompt tokens that the upstream which the policy would have chosen was believed to hold, while shadow leaves the choice to the fallback.", "upstream"),
		cachedTokens:   counter("cached_tokens_total", "Prompt tokens that an upstream reported to have found in its cache.", "upstream"),
		reportedTokens: counter("reported_prompt_tokens_total", "Prompt tokens of the responses that reported cached tokens.", "upstream"),
		ttft: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Namespace: ns, Subsystem: sub, Name: "ttft_seconds",
			Help:    "Time from sending a request to the first output of its streamed response, by whether a match was followed.",
			Buckets: prometheus.ExponentialBucketsRange(0.005, 120, 20),
		}, []string{"upstream", "match"}),
		decisionTime: prometheus.NewHistogram(prometheus.HistogramOpts{
			Namespace: ns, Subsystem: sub, Name: "decision_seconds",
			Help:    "Time taken by a decision about a request with a body that may hold a prompt, reading it not included.",
			Buckets: prometheus.ExponentialBuckets(1e-6, 4, 10),
		}),
		unkeyed: counter("body_unkeyed_total", "Requests without a prompt to go by, and why.", "cause"),
		gauges:  newFleetGauges(ns, sub),
		sync:    newSyncMetrics(ns, sub),
		series:  make(map[string]*upstreamSeries),
		since:   time.Now(),
	}
}

// register makes the metrics show up in a configuration's registry.
func (m *metricSet) register(registry prometheus.Registerer) error {
	for _, c := range []prometheus.Collector{
		m.decisions, m.promptTokens, m.matchedTokens, m.shadowTokens, m.cachedTokens, m.reportedTokens, m.ttft, m.decisionTime, m.unkeyed, m.gauges, m.sync,
	} {
		var known prometheus.AlreadyRegisteredError
		if err := registry.Register(c); err != nil && !errors.As(err, &known) {
			return err
		}
	}
	return nil
}

// of returns the series of an upstream.
func (m *metricSet) of(upstream string) *upstreamSeries {
	m.mu.RLock()
	s := m.series[upstream]
	m.mu.RUnlock()
	if s != nil {
		return s
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if s := m.series[upstream]; s != nil {
		return s
	}
	if len(m.series) >= maxUpstreamSeries {
		upstream = otherUpstreams
		if s := m.series[upstream]; s != nil {
			return s
		}
	}
	s = &upstreamSeries{
		since:               m.since,
		promptTokens:        m.promptTokens.WithLabelValues(upstream),
		matchedTokens:       m.matchedTokens.WithLabelValues(upstream),
		cachedTokens:        m.cachedTokens.WithLabelValues(upstream),
		reportedTokens:      m.reportedTokens.WithLabelValues(upstream),
		shadowMatchedTokens: m.shadowTokens.WithLabelValues(upstream),
		ttftHit:             m.ttft.WithLabelValues(upstream, "hit").(prometheus.Histogram),
		ttftMiss:            m.ttft.WithLabelValues(upstream, "miss").(prometheus.Histogram),
	}
	for _, reason := range reasons {
		s.decisions[reason] = m.decisions.WithLabelValues(upstream, reason.String())
	}
	m.series[upstream] = s
	return s
}

// forget drops the series of the upstreams that are not among those known.
func (m *metricSet) forget(known func(upstream string) bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for upstream := range m.series {
		if known(upstream) || upstream == otherUpstreams {
			continue
		}
		delete(m.series, upstream)
		m.since = time.Now()
		labels := prometheus.Labels{"upstream": upstream}
		m.decisions.DeletePartialMatch(labels)
		m.promptTokens.DeletePartialMatch(labels)
		m.matchedTokens.DeletePartialMatch(labels)
		m.shadowTokens.DeletePartialMatch(labels)
		m.cachedTokens.DeletePartialMatch(labels)
		m.reportedTokens.DeletePartialMatch(labels)
		m.ttft.DeletePartialMatch(labels)
	}
}

// causeCounter counts the requests without a key for one cause.
type causeCounter struct {
	cause string
	prometheus.Counter
}

// withoutKey counts a request without a key.
func (m *metricSet) withoutKey(cause string) {
	known := m.knownCauses() // few: to compare their names is faster than a map
	for i := range known {
		if known[i].cause == cause {
			known[i].Inc()
			return
		}
	}
	m.newCause(cause).Inc()
}

func (m *metricSet) knownCauses() []causeCounter {
	if known := m.causes.Load(); known != nil {
		return *known
	}
	return nil
}

// newCause is apart, because what it stores is on the heap from its first line on.
func (m *metricSet) newCause(cause string) prometheus.Counter {
	m.mu.Lock()
	defer m.mu.Unlock()
	known := m.knownCauses()
	counter := m.unkeyed.WithLabelValues(cause)
	if !slices.ContainsFunc(known, func(c causeCounter) bool { return c.cause == cause }) {
		known = append(slices.Clone(known), causeCounter{cause, counter})
		m.causes.Store(&known)
	}
	return counter
}

// pollDue reports whether the upstream's metrics should be read now, and takes
// the turn: of several policies the one with the shortest interval does.
func (s *upstreamSeries) pollDue(now time.Time, interval time.Duration) bool {
	last := s.polled.Load()
	return now.UnixNano()-last >= int64(interval)*9/10 && s.polled.CompareAndSwap(last, now.UnixNano())
}

// decided counts a decision.
func (s *upstreamSeries) decided(c affinity.Choice) {
	s.decisions[c.Reason].Inc()
	if c.PromptTokens > 0 {
		s.promptTokens.Add(float64(c.PromptTokens))
		s.matchedTokens.Add(float64(c.MatchedTokens))
	}
}

// counted returns what a counter stands at.
func counted(c prometheus.Counter) float64 {
	return read(c).GetCounter().GetValue()
}

// timed returns how many times a histogram has, and their sum.
func timed(h prometheus.Histogram) ttftState {
	m := read(h).GetHistogram()
	return ttftState{Count: m.GetSampleCount(), SumSeconds: m.GetSampleSum()}
}

func read(metric prometheus.Metric) *dto.Metric {
	m := new(dto.Metric)
	if err := metric.Write(m); err != nil {
		panic(err) // metrics without exemplars have nothing that could fail
	}
	return m
}

// fleetGauges reads its values at the time of the scrape.
type fleetGauges struct {
	pendingRequests, pendingPrefill, indexBlocks, capacity, generation, speed, queueDepth, contradicted *prometheus.Desc
}

func newFleetGauges(ns, sub string) fleetGauges {
	desc := func(name, help string) *prometheus.Desc {
		return prometheus.NewDesc(prometheus.BuildFQName(ns, sub, name), help, []string{"upstream"}, nil)
	}
	return fleetGauges{
		pendingRequests: desc("pending_requests", "Requests sent to an upstream and not ended."),
		pendingPrefill:  desc("pending_prefill_tokens", "Uncached prompt tokens sent to an upstream whose first output has not come yet, as estimated."),
		indexBlocks:     desc("index_blocks", "Prompt blocks remembered for an upstream."),
		capacity:        desc("cache_capacity_tokens", "Size of an upstream's prefix cache, learned or told; absent while it is not known."),
		generation:      desc("generation", "How many restarts of an upstream were noticed."),
		speed:           desc("prefill_tokens_per_second", "Prefill speed that an upstream is believed to have, by its own measurements or its fleet's; absent before it has any."),
		queueDepth:      desc("queue_depth", "Waiting requests that an upstream last reported."),
		contradicted:    desc("contradicted_ratio", "Share of an upstream's reports of cached tokens that contradict the capacity. Above 0.2 the model of its cache does not fit."),
	}
}

// Describe implements prometheus.Collector.
func (g fleetGauges) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range [...]*prometheus.Desc{
		g.pendingRequests, g.pendingPrefill, g.indexBlocks, g.capacity, g.generation, g.speed, g.queueDepth, g.contradicted,
	} {
		ch <- d
	}
}

// Collect implements prometheus.Collector.
func (g fleetGauges) Collect(ch chan<- prometheus.Metric) {
	fleet := currentFleet()
	if fleet == nil {
		return
	}
	metrics.forget(func(upstream string) bool { return fleet.Find(upstream) != nil })
	now := time.Now()
	unsent.watch(now)
	states := fleet.Snapshot(now)
	for _, s := range states[:min(len(states), maxUpstreamSeries)] {
		gauge := func(d *prometheus.Desc, v float64) {
			ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, s.Address)
		}
		gauge(g.pendingRequests, float64(s.InFlight))
		gauge(g.pendingPrefill, s.PendingPrefillTokens)
		gauge(g.indexBlocks, float64(s.Blocks))
		gauge(g.generation, float64(s.Generation))
		gauge(g.queueDepth, s.QueueDepth)
		gauge(g.contradicted, s.Contradicted)
		if s.CapacityTokens > 0 {
			gauge(g.capacity, float64(s.CapacityTokens))
		}
		if s.SpeedMeasurements > 0 {
			gauge(g.speed, s.TokensPerSecond)
		}
	}
}
