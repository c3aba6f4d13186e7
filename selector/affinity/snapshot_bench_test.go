package affinity

import (
	"bytes"
	"io"
	"slices"
	"testing"
	"time"
)

// BenchmarkSnapshot reports the time that one of a thousand decisions exceeds while
// a million blocks over 8 replicas are written, and while they are read, as
// multiples of the same while nothing else happens: that of a full index, and for
// reading also that of one which is as empty and fills as fast. And how long both
// take, and a block's bytes.
func BenchmarkSnapshot(b *testing.B) {
	const blocks, fresh, rounds = 1_000_000, 10, 5
	x := newFixture(8)
	x.index.Require(10 * blocks)
	for c := range blocks / fresh {
		x.serve(keyOf(append(series(0, 8), series(c+1, fresh)...)...))
	}
	file := x.snapshot(b)
	n := 0
	// decide times decisions until over, and until there are enough.
	decide := func(x *fixture, over <-chan struct{}) (took []float64) {
		for {
			select {
			case <-over:
				return took
			default:
			}
			n++
			key := keyOf(append(series(0, 8), series(n*7919%(blocks/fresh)+1, fresh)...)...)
			began := time.Now()
			_, a := x.route(key)
			took = append(took, time.Since(began).Seconds())
			a.FirstOutput(x.now)
			a.Finish(x.now, Served, 0)
		}
	}
	meanwhile := func(f func() error) chan struct{} {
		over := make(chan struct{})
		go func() {
			defer close(over)
			if err := f(); err != nil {
				b.Error(err)
			}
		}()
		return over
	}
	for b.Loop() {
		var idle, writing, filling, reading []float64
		var wrote, read time.Duration
		for round := range rounds {
			idle = append(idle, decide(x, meanwhile(func() error {
				time.Sleep(time.Second)
				return nil
			}))...)
			writing = append(writing, decide(x, meanwhile(func() error {
				began := time.Now()
				defer func() { wrote += time.Since(began) }()
				return x.fleet.WriteSnapshot(io.Discard, x.now, map[string]*Index{testKey: x.index}, nil)
			}))...)
			empty := newFixture(8)
			empty.index.Require(10 * blocks)
			filling = append(filling, decide(empty, meanwhile(func() error {
				time.Sleep(max(read/time.Duration(max(round, 1)), 100*time.Millisecond)) // as long
				return nil
			}))...)
			y := newFixture(8)
			y.index.Require(10 * blocks)
			y.index.Expect()
			reading = append(reading, decide(y, meanwhile(func() error {
				began := time.Now()
				defer func() { read += time.Since(began) }()
				_, err := y.index.Restore(bytes.NewReader(file), testKey, y.now)
				return err
			}))...)
		}
		for _, p := range []struct {
			name string
			at   float64
		}{{"p50", 0.5}, {"p99", 0.99}, {"p99.9", 0.999}} {
			base := percentile(idle, p.at)
			b.ReportMetric(1e6*base, p.name+"-µs")
			b.ReportMetric(percentile(writing, p.at)/base, p.name+"-write-x")
			b.ReportMetric(percentile(reading, p.at)/base, p.name+"-read-x")
			b.ReportMetric(percentile(reading, p.at)/percentile(filling, p.at), p.name+"-read-filling-x")
		}
		b.ReportMetric(float64(len(writing)), "write-decisions")
		b.ReportMetric(float64(len(reading)), "read-decisions")
		b.ReportMetric(wrote.Seconds()*1e3/rounds, "write-ms")
		b.ReportMetric(read.Seconds()*1e3/rounds, "read-ms")
	}
	b.ReportMetric(float64(len(file))/blocks, "bytes/block")
}

func percentile(times []float64, at float64) float64 {
	slices.Sort(times)
	return times[int(at*float64(len(times)-1))]
}
