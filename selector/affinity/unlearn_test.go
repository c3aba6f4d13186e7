package affinity

import (
	"math/rand/v2"
	"testing"
	"time"

	"github.com/prefix-affinity/caddy/prefixhash"
)

// roomyEngines hold everything that they were asked since their start.
type roomyEngines []map[uint64]bool

// burst has prompts arrive at once, and answers them; it returns how many of
// them found their beginning, all but the last fresh blocks, and how many were
// taken for cold.
func (e roomyEngines) burst(x *fixture, fresh int, keys []*prefixhash.Key) (found, cold int) {
	var open []*Attempt
	for _, key := range keys {
		c, a := x.route(key)
		if c.Reason == Cold {
			cold++
		}
		open = append(open, a)
	}
	for i, a := range open {
		held, cache := 0, e[0]
		for n, c := range x.cands {
			if c.Replica == a.replica {
				cache = e[n]
			}
		}
		for held < len(keys[i].Blocks) && cache[keys[i].Blocks[held].Hash] {
			held++
		}
		if held >= len(keys[i].Blocks)-fresh {
			found++
		}
		for _, b := range keys[i].Blocks {
			cache[b.Hash] = true
		}
		x.now = x.now.Add(5 * time.Millisecond)
		a.Confirm(x.now, true)
		a.FirstOutput(x.now)
		a.Report(keys[i].Bytes/BytesPerToken, held*testBlock/BytesPerToken)
		a.Finish(x.now, Served, 0)
	}
	return found, cold
}

// Engines that restart between short conversations look as if they had small
// caches. That must not last, in whatever order conversations come back.
func TestSmallCacheIsUnlearned(t *testing.T) {
	const many = 400 // conversations, so many that a cache as small would have lost them for long
	for _, order := range []string{"same", "random"} {
		rng := rand.New(rand.NewPCG(1, 1))
		x := newFixture(3)
		engines := roomyEngines{{}, {}, {}}
		talks := func(first, n, turns int) (keys []*prefixhash.Key) {
			for i := range n {
				key := keyOf(series(first+i, 6+2*turns)...)
				key.Judged = true
				keys = append(keys, key)
			}
			return keys
		}
		engines.burst(x, 8, talks(0, 30, 1))
		engines.burst(x, 2, talks(0, 30, 2))
		for i := range engines {
			clear(engines[i])
		}
		engines.burst(x, 2, talks(0, 30, 3))
		for i, c := range x.cands {
			if c.Replica.capacity == unlimited {
				t.Errorf("%s: replica %d has misled nobody", order, i)
			}
		}
		for round := range 6 {
			first := 1000 * (round + 1)
			engines.burst(x, 8, talks(first, many, 1))
			again := talks(first, many, 2)
			if order == "random" {
				rng.Shuffle(len(again), func(i, j int) { again[i], again[j] = again[j], again[i] })
			}
			if found, cold := engines.burst(x, 2, again); round >= 1 && (found < many*95/100 || cold > many/20) {
				t.Errorf("%s: round %d: %d of %d found their beginning, %d were taken for cold", order, round, found, many, cold)
			}
		}
	}
}

// To forget what a replica holds is not to forget how much it can.
func TestForgetKeepsTheCapacity(t *testing.T) {
	x := newFixture(1)
	x.serve(keyOf(series(1, 6)...))
	r := x.cands[0].Replica
	r.ReportCapacity(5000)
	before := x.fleet.Snapshot(x.now)[0]
	if before.CapacityTokens == 0 || before.Blocks == 0 {
		t.Fatalf("nothing was learned: %+v", before)
	}
	r.Forget()
	if after := x.fleet.Snapshot(x.now)[0]; after.Blocks != 0 || after.CapacityTokens != before.CapacityTokens || after.Generation != before.Generation {
		t.Errorf("%+v, before %+v", after, before)
	}
}

// A capacity that was told counts for as long as somebody tells it.
func TestCapacityThatNobodyTellsAnyMore(t *testing.T) {
	for _, test := range []struct {
		name  string
		after func(x *fixture) *fixture // returns who goes on
		still int                       // tells
		want  int
	}{
		{"reload/with the option", func(x *fixture) *fixture { x.fleet.Recall(x.now); return x }, 5000, 5000},
		{"reload/with another", func(x *fixture) *fixture { x.fleet.Recall(x.now); return x }, 9000, 9000},
		{"reload/without", func(x *fixture) *fixture { x.fleet.Recall(x.now); return x }, 0, 0},
		{"restart/with the option", func(x *fixture) *fixture { return x.restart(t, x.snapshot(t)) }, 5000, 5000},
		{"restart/without", func(x *fixture) *fixture { return x.restart(t, x.snapshot(t)) }, 0, 0},
	} {
		x := newFixture(1)
		x.rule.CapacityTokens = 5000
		for i := range 50 { // of reports that say nothing else
			_, a := x.route(keyOf(series(i, 3)...))
			a.Confirm(x.now, true)
			a.Report(192, 1)
			a.Finish(x.now, Served, 0)
		}
		x = test.after(x)
		x.rule.CapacityTokens = test.still
		x.serve(keyOf(series(100, 3)...))
		if got := x.fleet.Snapshot(x.now)[0].CapacityTokens; got != max(5000, test.still) {
			t.Errorf("%s: at once %d tokens", test.name, got)
		}
		x.now = x.now.Add(recallAfter + time.Second)
		x.serve(keyOf(series(101, 3)...))
		if got := x.fleet.Snapshot(x.now)[0].CapacityTokens; got != test.want {
			t.Errorf("%s: %d tokens, want %d", test.name, got, test.want)
		}
	}
}
