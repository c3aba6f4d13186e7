package affinity

import (
	"fmt"
	"runtime"
	"runtime/metrics"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/cespare/xxhash/v2"

	"github.com/prefix-affinity/caddy/integration/measure"
	"github.com/prefix-affinity/caddy/prefixhash"
)

const (
	longBlocks   = 560 // of a prompt of 512 KB
	systemBlocks = 64  // of a system prompt of 16 KB
)

// full is an index that holds as many blocks as it may: prompts of 512 KB under
// a system prompt that every replica holds, dealt out among them.
type full struct {
	*fixture
	keys  []*prefixhash.Key // some of those that it holds
	fresh uint64
	chain [longBlocks]prefixhash.Block
}

func fill(replicas, blocks int) *full {
	x := &full{fixture: newFixture(replicas)}
	x.index.Require(blocks)
	conversations := max(blocks/(longBlocks-systemBlocks), replicas)
	for c := range conversations * 5 / 4 {
		key := keyOf(append(series(0, systemBlocks), series(c+1, longBlocks-systemBlocks)...)...)
		at := c % replicas
		_, a := x.index.Route(x.now, key, x.cands[at:at+1], &x.rule, nil)
		a.FirstOutput(x.now)
		a.Finish(x.now, Served, 0)
		if c >= conversations*3/4 && len(x.keys) < 1000 {
			x.keys = append(x.keys, key)
		}
	}
	return x
}

// insert serves a prompt of 512 KB that nobody has seen.
func (x *full) insert() {
	for i := range x.chain {
		x.fresh++
		x.chain[i] = prefixhash.Block{Hash: mix(x.fresh + 1<<60), End: uint32(i+1) * testBlock}
	}
	x.serve(&prefixhash.Key{Blocks: x.chain[:], Bytes: longBlocks * testBlock, Stream: true})
}

// insertRatio compares the insertion of a block, with its share of the decision,
// with xxhash64 over the text of one.
func (x *full) insertRatio(enough float64) float64 {
	text := make([]byte, 256)
	return measure.Ratio(enough, x.insert, func() {
		for range longBlocks {
			xxhash.Sum64(text)
		}
	})
}

// matchRatio compares finding what each replica holds of a prompt with making
// its key, for one of 128k tokens.
func matchRatio(enough float64) float64 {
	x := newFixture(8)
	h := prefixhash.New(prefixhash.Config{Seed: 1})
	var bodies [16][]byte
	var keys [16]prefixhash.Key
	for c := range bodies {
		bodies[c] = measure.Chat{Bytes: 512 << 10, Conversation: uint64(c)}.JSON()
		h.Sum(&keys[c], "/v1/chat/completions", bodies[c], true, "")
		x.serve(&keys[c])
	}
	matched := make([]int, 8)
	return measure.Ratio(enough, func() {
		for c := range keys {
			x.index.Lookup(x.now, &keys[c], x.cands, &x.rule, matched)
		}
	}, func() {
		var k prefixhash.Key
		for c := range bodies {
			h.Sum(&k, "/v1/chat/completions", bodies[c], true, "")
		}
	})
}

// grid runs a benchmark on full indexes of several sizes.
func grid(b *testing.B, run func(*testing.B, *full)) {
	for _, blocks := range []int{1_000_000, 10_000_000} {
		for _, replicas := range []int{8, 64} {
			var x *full
			b.Run(fmt.Sprintf("blocks=%dM/replicas=%d", blocks/1_000_000, replicas), func(b *testing.B) {
				if x == nil {
					x = fill(replicas, blocks)
				}
				b.ReportAllocs()
				run(b, x)
			})
		}
	}
}

// BenchmarkMatch finds what each replica holds of a prompt of 512 KB.
func BenchmarkMatch(b *testing.B) {
	grid(b, func(b *testing.B, x *full) {
		matched := make([]int, len(x.cands))
		for i := 0; b.Loop(); i++ {
			x.index.Lookup(x.now, x.keys[i%len(x.keys)], x.cands, &x.rule, matched)
		}
	})
	b.Run("x_key", func(b *testing.B) {
		for b.Loop() {
			b.ReportMetric(matchRatio(0), "x_key")
		}
	})
}

// BenchmarkRoute is a whole decision for a prompt of 512 KB that a replica
// holds: match, rule, account, insertion and end.
func BenchmarkRoute(b *testing.B) {
	grid(b, func(b *testing.B, x *full) {
		for i := 0; b.Loop(); i++ {
			x.serve(x.keys[i%len(x.keys)])
		}
	})
}

// BenchmarkInsert is the same for one that nobody has seen, which replaces
// another.
func BenchmarkInsert(b *testing.B) {
	grid(b, func(b *testing.B, x *full) {
		for b.Loop() {
			x.insert()
		}
		b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/longBlocks, "ns/block")
		b.ReportMetric(x.insertRatio(0), "x_xxhash64")
	})
}

// crowd is what several goroutines route at once: prompts of 128 blocks before 8
// replicas, of which the first so many start all alike.
type crowd struct {
	*fixture
	keys []*prefixhash.Key
	next atomic.Int64
}

func newCrowd(alike int) *crowd {
	x := &crowd{fixture: newFixture(8)}
	for i := range 4096 {
		x.keys = append(x.keys, keyOf(append(series(0, alike), series(i+1, 128-alike)...)...))
		x.serve(x.keys[i])
	}
	return x
}

func (x *crowd) run(goroutines, n int) {
	var workers sync.WaitGroup
	end := x.next.Load() + int64(n)
	for range goroutines {
		workers.Go(func() {
			for i := x.next.Add(1); i <= end; i = x.next.Add(1) {
				x.serve(x.keys[i%int64(len(x.keys))])
			}
		})
	}
	workers.Wait()
}

const few = 400 // decisions, some ms

// speedup compares one goroutine with two: as often as one does something, two
// do it so many times.
func (x *crowd) speedup(enough float64) float64 {
	return 1 / measure.Ratio(1/enough, func() { x.run(2, few) }, func() { x.run(1, few) })
}

// apart compares two goroutines with two that have an index each, which is the
// most that the machine lets them do.
func (x *crowd) apart(other *crowd) float64 {
	return 1 / measure.Ratio(0, func() { x.run(2, few) }, func() {
		var workers sync.WaitGroup
		workers.Go(func() { x.run(1, few/2) })
		workers.Go(func() { other.run(1, few/2) })
		workers.Wait()
	})
}

// BenchmarkRouteParallel routes prompts at once that start differently, or all
// with one system prompt. It reports how many times as much two goroutines get
// done as one, and as two with an index each; and the share of its time that a
// goroutine waits for locks.
func BenchmarkRouteParallel(b *testing.B) {
	for _, alike := range []int{0, systemBlocks} {
		x := newCrowd(alike)
		for _, goroutines := range []int{1, 2, 8} {
			b.Run(fmt.Sprintf("alike=%d/goroutines=%d", alike, goroutines), func(b *testing.B) {
				b.ReportAllocs()
				before := gauge("/sync/mutex/wait/total:seconds")
				x.run(goroutines, b.N)
				waited := gauge("/sync/mutex/wait/total:seconds") - before
				b.ReportMetric(100*waited/b.Elapsed().Seconds()/float64(goroutines), "%waiting")
				if goroutines == 2 {
					b.StopTimer()
					b.ReportMetric(x.speedup(1000), "x_one")
					b.ReportMetric(x.apart(newCrowd(alike)), "x_apart")
				}
			})
		}
	}
}

func gauge(name string) float64 {
	sample := []metrics.Sample{{Name: name}}
	metrics.Read(sample)
	if sample[0].Value.Kind() == metrics.KindUint64 {
		return float64(sample[0].Value.Uint64())
	}
	return sample[0].Value.Float64()
}

// memory stores about so many blocks over 8 replicas, in prompts of so many fresh
// ones, and returns what each takes, everything included, and the share of that
// which the collector has to look through. If full, there is no room for more, and
// as many were stored before and dropped again.
func memory(blocks, fresh int, full bool) (bytesPerBlock, scanned float64) {
	heap := func() (size, scan float64) {
		runtime.GC()
		runtime.GC() // pools are emptied by two
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return float64(m.HeapAlloc), gauge("/gc/scan/heap:bytes")
	}
	size, scan := heap()
	x := newFixture(8)
	prompts := blocks / fresh
	if full {
		x.fleet.bound.Store(int64(blocks))
		prompts *= 2
	} else {
		x.index.Require(100 * blocks)
	}
	for c := range prompts {
		x.serve(keyOf(series(c, fresh)...))
	}
	sizeAfter, scanAfter := heap()
	stored := 0
	for _, r := range x.fleet.Snapshot(x.now) {
		stored += r.Blocks
	}
	return (sizeAfter - size) / float64(stored), (scanAfter - scan) / (sizeAfter - size)
}

// BenchmarkMemory reports what a stored block takes, by how many fresh ones a
// prompt brings, and how much of the index the collector walks.
func BenchmarkMemory(b *testing.B) {
	for _, c := range []struct {
		blocks, fresh int
		full          bool
	}{
		{1_000_000, 1, false},
		{1_000_000, 2, false},
		{1_000_000, 10, false},
		{1_000_000, 500, false},
		{10_000_000, 10, false},
		{500_000, 1, true},
		{500_000, 2, true},
		{500_000, 10, true},
		{500_000, 500, true},
	} {
		b.Run(fmt.Sprintf("blocks=%d/fresh=%d/full=%t", c.blocks, c.fresh, c.full), func(b *testing.B) {
			for b.Loop() {
				bytes, scanned := memory(c.blocks, c.fresh, c.full)
				b.ReportMetric(bytes, "bytes/block")
				b.ReportMetric(100*scanned, "%scanned")
			}
		})
	}
}

// TestCost: a tenfold slip fails this, noise doesn't.
func TestCost(t *testing.T) {
	if testing.Short() || raceEnabled {
		t.Skip("measures time")
	}
	bytes, scanned := memory(200_000, 10, false)
	short, _ := memory(200_000, 1, true)
	for _, c := range []struct {
		name          string
		got, expected float64
		most          float64
	}{
		{"insertion of a block to xxhash64 over one", fill(8, 200_000).insertRatio(12), 12, 36},
		{"match before 8 replicas to key of 128k tokens", matchRatio(1. / 30), 1. / 30, 1. / 10},
		{"two goroutines to one", 1 / newCrowd(0).speedup(1.3), 1 / 1.3, 1.5},
		{"two goroutines to one behind a system prompt", 1 / newCrowd(systemBlocks).speedup(1.3), 1 / 1.3, 1.5},
		{"bytes a block", bytes, 64, 75},
		{"bytes a block of a full index where each prompt brings one", short, 64, 75},
		{"share that the collector walks", scanned, 0.01, 0.03},
	} {
		if c.got > c.most {
			t.Errorf("%s: %.3f, at most %.3f expected", c.name, c.got, c.expected)
		} else {
			t.Logf("%s: %.3f (target %.3f)", c.name, c.got, c.expected)
		}
	}
}
