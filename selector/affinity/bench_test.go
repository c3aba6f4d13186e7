package affinity

import (
	"fmt"
	"runtime"
	"sync/atomic"
	"testing"

	"github.com/prefix-affinity/caddy/prefixhash"
)

// benchKey is a prompt of 512 KB under a system prompt of 16 KB that every
// replica holds; conversation c is at replica c modulo their number.
func benchKey(c, blocks int) *prefixhash.Key {
	return keyOf(append(series(0, 64), series(c+1, blocks-64)...)...)
}

func warm(replicas, conversations, blocks int) (*fixture, []*prefixhash.Key) {
	x := newFixture(replicas)
	x.index.Require(100_000_000)
	keys := make([]*prefixhash.Key, conversations)
	for c := range keys {
		keys[c] = benchKey(c, blocks)
		at := c % replicas
		_, a := x.index.Route(x.now, keys[c], x.cands[at:at+1], &x.rule, nil)
		a.FirstOutput(x.now)
		a.Finish(x.now, Served, 0)
	}
	return x, keys
}

// BenchmarkMatch finds what each replica holds of a prompt of 560 blocks (512 KB).
func BenchmarkMatch(b *testing.B) {
	for _, replicas := range []int{2, 8, 64, 512} {
		b.Run(fmt.Sprintf("replicas=%d", replicas), func(b *testing.B) {
			x, keys := warm(replicas, 1000, 560)
			matched := make([]int, replicas)
			b.ReportAllocs()
			for i := 0; b.Loop(); i++ {
				x.index.Lookup(x.now, keys[i%len(keys)], x.cands, &x.rule, matched)
			}
		})
	}
}

// BenchmarkRoute is a whole decision: match, rule, account, insertion and end.
func BenchmarkRoute(b *testing.B) {
	for _, replicas := range []int{8, 64} {
		for _, blocks := range []int{65, 128, 560} {
			b.Run(fmt.Sprintf("replicas=%d/blocks=%d", replicas, blocks), func(b *testing.B) {
				x, keys := warm(replicas, 1000, blocks)
				b.ReportAllocs()
				for i := 0; b.Loop(); i++ {
					x.serve(keys[i%len(keys)])
				}
			})
		}
	}
}

// BenchmarkRouteFresh inserts a prompt of 560 blocks that nobody has seen.
func BenchmarkRouteFresh(b *testing.B) {
	x, _ := warm(8, 100, 560)
	chain := make([]prefixhash.Block, 560)
	n := uint64(0)
	b.ReportAllocs()
	for b.Loop() {
		for i := range chain {
			n++
			chain[i] = prefixhash.Block{Hash: mix(n + 1<<60), End: uint32(i+1) * testBlock}
		}
		x.serve(&prefixhash.Key{Blocks: chain, Bytes: 560 * testBlock, Stream: true})
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/560, "ns/block")
}

// BenchmarkRouteParallel routes unrelated prompts of 128 blocks at once.
func BenchmarkRouteParallel(b *testing.B) {
	x := newFixture(8)
	var next atomic.Int64
	keys := make([]*prefixhash.Key, 4096)
	for i := range keys {
		keys[i] = keyOf(series(i, 128)...)
	}
	b.ReportAllocs()
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			x.serve(keys[next.Add(1)%int64(len(keys))])
		}
	})
}

// BenchmarkMemory stores a million blocks over 8 replicas, 10 of each request
// fresh, and reports what a block takes, everything included.
func BenchmarkMemory(b *testing.B) {
	for b.Loop() {
		var before, after runtime.MemStats
		x := newFixture(8)
		x.index.Require(10_000_000)
		runtime.GC()
		runtime.ReadMemStats(&before)
		blocks := 0
		for c := 0; blocks < 1_000_000; c++ {
			x.serve(keyOf(append(series(0, 8), series(c+1, 10)...)...))
			blocks += 10
		}
		runtime.GC()
		runtime.ReadMemStats(&after)
		b.ReportMetric(float64(after.HeapAlloc-before.HeapAlloc)/float64(blocks), "bytes/block")
		runtime.KeepAlive(x)
	}
}
