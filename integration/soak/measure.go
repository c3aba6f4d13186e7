package main

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/prefix-affinity/caddy/integration/harness"
)

// sample is what Caddy's metrics say at a time.
type sample struct {
	at              time.Time
	rss, goroutines float64
	blocks          float64  // in the index
	heap, cpu       float64  // bytes in use, seconds
	decisions       []bucket // cumulative
	requests        int64    // of all clients
}

type bucket struct{ limit, count float64 }

func take(caddy *harness.Process) (sample, error) {
	metrics, err := caddy.Metrics()
	for tries := 0; err != nil && tries < 10; tries++ { // a reload replaces the admin endpoint, too
		time.Sleep(100 * time.Millisecond)
		metrics, err = caddy.Metrics()
	}
	if err != nil {
		return sample{}, err
	}
	s := sample{at: time.Now()}
	for name, value := range map[string]*float64{
		"process_resident_memory_bytes": &s.rss, "go_goroutines": &s.goroutines, "go_memstats_heap_inuse_bytes": &s.heap, "process_cpu_seconds_total": &s.cpu,
	} {
		family := metrics[name].GetMetric()
		if len(family) != 1 {
			return s, fmt.Errorf("no metric %s: only Linux has all", name)
		}
		*value = family[0].GetGauge().GetValue() + family[0].GetCounter().GetValue()
	}
	for _, m := range metrics["caddy_prefix_affinity_index_blocks"].GetMetric() {
		s.blocks += m.GetGauge().GetValue()
	}
	for _, m := range metrics["caddy_prefix_affinity_decision_seconds"].GetMetric() {
		for _, b := range m.GetHistogram().GetBucket() {
			s.decisions = append(s.decisions, bucket{b.GetUpperBound(), float64(b.GetCumulativeCount())})
		}
	}
	return s, nil
}

type samples []sample

// watch takes samples until the time is over, and says now and then how it goes.
func watch(ctx context.Context, caddy *harness.Process, every time.Duration, traffic *traffic) (all samples, err error) {
	tick := time.NewTicker(every)
	defer tick.Stop()
	for {
		s, err := take(caddy)
		if err != nil {
			return all, err
		}
		s.requests = traffic.requests.Load()
		all = append(all, s)
		if n := len(all); n > 1 && n%10 == 0 {
			since := all[n-10]
			t := s.at.Sub(since.at).Seconds()
			fmt.Printf("%6.0f s  %5.0f requests/s  %3.0f %% of a core  RSS %4.0f MiB  heap %4.0f MiB  %6.0f blocks  %5.0f goroutines  p99 of decisions %.0f µs\n",
				s.at.Sub(all[0].at).Seconds(), float64(s.requests-since.requests)/t, 100*(s.cpu-since.cpu)/t,
				s.rss/(1<<20), s.heap/(1<<20), s.blocks, s.goroutines, 1e6*quantile(since.decisions, s.decisions, 0.99))
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return all, nil
		}
	}
}

// judge says what grew, RSS by more than the given share. In a long run what only
// may have grown counts too: such a margin tells nothing.
func (all samples) judge(rssGrowth float64, long bool) error {
	// Memory takes half of the time to find its size. Decisions need none, and are
	// told from the scheduler's whims the better the longer they are watched.
	half, most := all[len(all)/2:], all[len(all)/20:]
	if len(half) < 2*windows {
		return fmt.Errorf("%d samples are too few: run for longer", len(all))
	}
	var rss, p50, p99 []float64
	for w := range windows {
		sum := 0.0
		part := window(half, w)
		for _, s := range part {
			sum += s.rss
		}
		rss = append(rss, sum/float64(len(part)))
		part = window(most, w)
		from, to := part[0].decisions, part[len(part)-1].decisions
		p50, p99 = append(p50, quantile(from, to, 0.5)), append(p99, quantile(from, to, 0.99))
	}
	var failed []error
	for _, m := range []struct {
		name, unit   string
		values       []float64
		scale, limit float64
	}{
		{"RSS", "MiB", rss, 1 << 20, rssGrowth},
		{"median of the decision time", "µs", p50, 1e-6, decisionGrowth},
		{"p99 of the decision time", "µs", p99, 1e-6, decisionGrowth},
	} {
		change, margin := growth(m.values)
		fmt.Printf("%s: %.1f to %.1f %s, trend %+.1f %% ± %.1f %%\n", m.name,
			slices.Min(m.values)/m.scale, slices.Max(m.values)/m.scale, m.unit, 100*change, 100*margin)
		switch {
		case change-margin > m.limit:
			failed = append(failed, fmt.Errorf("%s grew by more than %.0f %%: %.3g", m.name, 100*m.limit, m.values))
		case long && change > m.limit:
			failed = append(failed, fmt.Errorf("%s may have grown by more than %.0f %%, or something else had the processors: %.3g", m.name, 100*m.limit, m.values))
		}
	}
	return errors.Join(failed...)
}

// windows are the parts whose averages the trend is fitted to. Neighbouring
// samples say nearly the same, so each for itself would make the trend look surer
// than it is.
const windows = 12

func window(all samples, w int) samples {
	return all[w*len(all)/windows : (w+1)*len(all)/windows]
}

// growth fits a line through the averages of equal windows by least squares. It
// returns by how much the line rises over their span as a share of their mean,
// and half the width of the 95 % confidence interval of that, by Student's t
// with two degrees of freedom fewer than windows.
func growth(values []float64) (change, margin float64) {
	const t95 = 2.228 // two-sided, for 10 degrees of freedom
	n := float64(len(values))
	mean := 0.0
	for _, v := range values {
		mean += v / n
	}
	var sxx, sxy, rest float64
	for i, v := range values {
		x := float64(i) - (n-1)/2
		sxx += x * x
		sxy += x * v
	}
	slope := sxy / sxx
	for i, v := range values {
		d := v - mean - slope*(float64(i)-(n-1)/2)
		rest += d * d
	}
	deviation := math.Sqrt(rest / (n - 2) / sxx)
	return slope * n / mean, t95 * deviation * n / mean
}

// quantile is what a share q of what a histogram counted between two times stays
// under, evenly spread within its bucket on a logarithmic scale; no more than the
// highest limit.
func quantile(from, to []bucket, q float64) float64 {
	count := func(i int) float64 {
		if i < len(from) {
			return to[i].count - from[i].count
		}
		return to[i].count
	}
	if len(to) == 0 {
		return math.NaN()
	}
	wanted := q * count(len(to)-1)
	below, limit := 0.0, to[0].limit/4
	for i, b := range to {
		n := count(i)
		switch {
		case math.IsInf(b.limit, 1):
		case n >= wanted && n > below:
			return limit * math.Pow(b.limit/limit, (wanted-below)/(n-below))
		default:
			below, limit = n, b.limit
		}
	}
	return limit
}
