package affinity

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/prefix-affinity/caddy/prefixhash"
)

// TestIndexSize: whatever replicas come and however uneven the traffic is, all
// of them together never hold more blocks than allowed, and with equal traffic
// they hold about that.
func TestIndexSize(t *testing.T) {
	const bound = 8000
	stored := func(x *fixture) (all int) {
		for _, r := range x.fleet.Snapshot(x.now) {
			all += r.Blocks
		}
		return all
	}
	small := func(n int) *fixture {
		x := newFixture(n)
		x.fleet.bound.Store(bound)
		return x
	}
	at := func(x *fixture, i int, key *prefixhash.Key) {
		_, a := x.index.Route(x.now, key, x.cands[i:i+1], &x.rule, nil)
		a.Confirm(x.now, true)
		a.FirstOutput(x.now)
		a.Finish(x.now, Served, 0)
	}
	t.Run("even", func(t *testing.T) {
		x := small(8)
		for c := range 2000 {
			at(x, c%8, keyOf(series(c, 1+c%40)...))
			if n := stored(x); n > bound {
				t.Fatalf("%d blocks after %d prompts", n, c+1)
			}
		}
		if n := stored(x); n < bound*9/10 {
			t.Errorf("only %d blocks", n)
		}
	})
	t.Run("skewed", func(t *testing.T) {
		x := small(8)
		rng := rand.New(rand.NewPCG(1, 1))
		for c := range 2000 {
			at(x, rng.IntN(1+rng.IntN(8)), keyOf(series(c, 1+rng.IntN(60))...))
			if n := stored(x); n > bound {
				t.Fatalf("%d blocks after %d prompts", n, c+1)
			}
		}
		if n := x.cands[0].Replica.Snapshot(x.now).Blocks; n > bound/8 {
			t.Errorf("the busiest holds %d blocks", n)
		}
	})
	t.Run("lowered", func(t *testing.T) {
		x := small(8)
		for c := range 2000 {
			at(x, c%8, keyOf(series(c, 1+c%40)...))
		}
		for _, lower := range []int{bound + 1, bound} {
			if x.fleet.Lower(lower) {
				t.Errorf("%d is not lower than %d", lower, bound)
			}
		}
		if !x.fleet.Lower(bound / 4) {
			t.Error("not lowered")
		}
		x.index.Trim()
		if n := stored(x); n > bound/4 || n < bound/4*9/10-8*40 {
			t.Errorf("%d blocks of %d", n, bound/4)
		}
		entries := 0
		for _, table := range *x.index.tables.Load() {
			var last *segment
			for _, s := range table.dir {
				if s != last {
					entries += len(s.entries)
				}
				last = s
			}
		}
		if entries > bound+smallSegment*8 {
			t.Errorf("%d entries for %d blocks: the memory is not given back", entries, bound/4)
		}
		x.index.Require(bound)
		for c := range 2000 {
			at(x, c%8, keyOf(series(c, 1+c%40)...))
		}
		if n := stored(x); n > bound || n < bound*9/10 {
			t.Errorf("%d blocks of %d", n, bound)
		}
	})
	t.Run("replicas come", func(t *testing.T) {
		x := small(1)
		for n := 2; n <= 16; n++ {
			for c := range 1000 {
				at(x, len(x.cands)-1, keyOf(series(1000*n+c, 10)...))
			}
			x.cands = append(x.cands, Candidate{Replica: x.fleet.Replica(fmt.Sprint(n))})
			at(x, n-1, keyOf(series(n, 10)...))
			if n := stored(x); n > bound {
				t.Fatalf("%d blocks on %d replicas", n, len(x.cands))
			}
		}
	})
	t.Run("at once", func(t *testing.T) { // all in flight: nothing can be dropped
		x := small(4)
		for c := range 1000 {
			x.route(keyOf(series(c, 40)...))
			if n := stored(x); n > bound {
				t.Fatalf("%d blocks with %d requests in flight", n, c+1)
			}
		}
	})
}

// A table that gives memory back while a snapshot is read or written goes on
// noting what changes: else the snapshot would be wrong, or its reader crash.
func TestTrimKeepsNotes(t *testing.T) {
	x := newFixture(1)
	x.fleet.bound.Store(8000)
	for c := range 800 {
		x.serve(keyOf(series(c, 10)...))
	}
	table := x.index.table(x.cands[0].Replica)
	noted := &changes{}
	table.changes = noted
	before := len(table.dir)
	for n := range 8 {
		x.index.table(x.fleet.Replica(fmt.Sprint("another ", n)))
	}
	if len(table.dir) >= before && before > 1 {
		t.Fatalf("%d segments, as before", before)
	}
	if table.changes != noted {
		t.Error("what changes is not noted any more")
	}
}
