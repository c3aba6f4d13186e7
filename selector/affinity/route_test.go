package affinity

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/prefix-affinity/caddy/prefixhash"
)

// fixture is a fleet with an index before it.
type fixture struct {
	fleet *Fleet
	index *Index
	cands []Candidate
	rule  Rule
	now   time.Time
}

func newFixture(n int) *fixture {
	f := NewFleet()
	x := &fixture{fleet: f, index: NewIndex(f, 1_000_000), rule: Rule{MinMatchTokens: 64}, now: now0}
	for i := range n {
		x.cands = append(x.cands, Candidate{Replica: f.Replica(fmt.Sprintf("10.0.0.%d:8000", i+1))})
	}
	return x
}

func (x *fixture) route(key *prefixhash.Key) (Choice, *Attempt) {
	return x.index.Route(x.now, key, x.cands, &x.rule, nil)
}

// serve routes a key and answers it at once.
func (x *fixture) serve(key *prefixhash.Key) Choice {
	c, a := x.route(key)
	a.Confirm(x.now, true)
	a.FirstOutput(x.now)
	a.Finish(x.now, Served, 0)
	return c
}

// keyOf makes the key of a prompt of numbered blocks of 64 tokens.
func keyOf(ids ...int) *prefixhash.Key {
	return &prefixhash.Key{Blocks: chainOf(ids), Bytes: len(ids) * testBlock, Stream: true, Judged: true}
}

// series returns n numbers nobody else uses.
func series(start, n int) []int {
	ids := make([]int, n)
	for i := range ids {
		ids[i] = start*100_000 + i
	}
	return ids
}

// counts returns requests a candidate.
func (x *fixture) counts(n int, key func(i int) *prefixhash.Key, each func(*Attempt)) []int {
	counts := make([]int, len(x.cands))
	for i := range n {
		c, a := x.route(key(i))
		counts[c.Candidate]++
		if each != nil {
			each(a)
		}
	}
	return counts
}

func TestSpread(t *testing.T) {
	serve := func(x *fixture) func(*Attempt) {
		return func(a *Attempt) {
			a.Confirm(x.now, true)
			a.FirstOutput(x.now)
			a.Finish(x.now, Served, 0)
			x.now = x.now.Add(time.Second)
		}
	}
	unrelated := func(i int) *prefixhash.Key { return keyOf(series(i, 16)...) }
	t.Run("cold/one after the other", func(t *testing.T) {
		x := newFixture(4)
		for i, n := range x.counts(200, unrelated, serve(x)) {
			if n < 30 || n > 70 {
				t.Errorf("candidate %d got %d of 200", i, n)
			}
		}
	})
	t.Run("cold/one after the other by rendezvous", func(t *testing.T) {
		x := newFixture(4)
		x.rule.Rendezvous = true
		for i, n := range x.counts(200, unrelated, serve(x)) {
			if n < 30 || n > 70 {
				t.Errorf("candidate %d got %d of 200", i, n)
			}
		}
	})
	t.Run("cold/one after the other under a short system prompt", func(t *testing.T) {
		x := newFixture(4)
		x.rule.MinMatchTokens = 128
		for i, n := range x.counts(200, func(i int) *prefixhash.Key { return keyOf(append([]int{7}, series(i, 16)...)...) }, serve(x)) {
			if n < 30 || n > 70 {
				t.Errorf("candidate %d got %d of 200", i, n)
			}
		}
	})
	t.Run("shared prefix/all caches are used in the end", func(t *testing.T) {
		x := newFixture(4)
		x.rule.CapacityTokens = 20_000
		counts := x.counts(400, func(i int) *prefixhash.Key { return keyOf(append(series(0, 8), series(i+1, 8)...)...) }, serve(x))
		if slices.Max(counts) > 250 {
			t.Errorf("of 400 requests that share 512 tokens and bring 512 the candidates got %v", counts)
		}
	})
	t.Run("cold/64 at once", func(t *testing.T) {
		for _, blocks := range []int{1, 16, 200} {
			x := newFixture(4)
			for i, n := range x.counts(64, func(i int) *prefixhash.Key { return keyOf(series(i, blocks)...) }, nil) {
				if n < 13 || n > 19 {
					t.Errorf("candidate %d got %d of 64 prompts of %d blocks", i, n, blocks)
				}
			}
		}
	})
	t.Run("cold/64 at once that will not stream", func(t *testing.T) {
		x := newFixture(4)
		for i, n := range x.counts(64, func(i int) *prefixhash.Key {
			k := unrelated(i)
			k.Stream = false
			return k
		}, nil) {
			if n < 13 || n > 19 {
				t.Errorf("candidate %d got %d of 64", i, n)
			}
		}
	})
	t.Run("no key/one after the other", func(t *testing.T) {
		x := newFixture(4)
		for i, n := range x.counts(200, func(int) *prefixhash.Key { return nil }, serve(x)) {
			if n != 50 {
				t.Errorf("candidate %d got %d of 200", i, n)
			}
		}
	})
	t.Run("siblings/16 of a new 50 KB prefix at once", func(t *testing.T) {
		x := newFixture(4)
		counts := x.counts(16, func(i int) *prefixhash.Key {
			return keyOf(append(series(0, 200), series(i+1, 2)...)...)
		}, nil)
		used := 0
		for _, n := range counts {
			if n > 0 {
				used++
			}
		}
		if used > 2 {
			t.Errorf("spread over %d replicas: %v", used, counts)
		}
	})
}

// Requests that come at once go exactly as if they had come one after the other:
// each sees what those before it brought, also those decided a moment ago.
func TestAtOnce(t *testing.T) {
	const burst, rounds = 64, 40
	system := slices.Clip(series(0, 40))
	only := func(x *fixture, at int, ids []int) {
		y := *x
		y.cands = x.cands[at : at+1]
		y.serve(keyOf(ids...))
	}
	everywhere := func(x *fixture) {
		for i := range x.cands {
			only(x, i, system)
		}
	}
	same := func(n int) func(int) []int { return func(int) []int { return series(1, n) } }
	for _, c := range []struct {
		name    string
		prepare func(*fixture)
		prompt  func(i int) []int
	}{
		{"one prompt/new", func(*fixture) {}, same(100)},
		{"one prompt/of one block", func(*fixture) {}, same(1)},
		{"one prompt/new under a known system prompt", everywhere, func(int) []int { return append(system, series(1, 60)...) }},
		{"one prompt/known to one", func(x *fixture) { only(x, 1, series(1, 100)) }, same(100)},
		{"one prompt/known to all", func(x *fixture) {
			for i := range x.cands {
				only(x, i, series(1, 100))
			}
		}, same(100)},
		{"one prompt/evicted", func(x *fixture) {
			x.rule.CapacityTokens = 20_000
			for n := range 4 {
				only(x, 1, series(1+n, 100))
			}
		}, same(100)},
		{"siblings/new under a known system prompt", everywhere, func(i int) []int {
			return append(append(system, series(1, 60)...), series(i+2, 5)...)
		}},
		{"conversations/system prompt known to one", func(x *fixture) { only(x, 2, system) }, func(i int) []int {
			return append(system, series(i+1, 60)...)
		}},
		{"conversations/system prompt known to all", everywhere, func(i int) []int { return append(system, series(i+1, 60)...) }},
		{"conversations/new", func(*fixture) {}, func(i int) []int { return series(i+1, 60) }},
	} {
		t.Run(c.name, func(t *testing.T) {
			keys := make([]*prefixhash.Key, burst)
			for i := range keys {
				keys[i] = keyOf(c.prompt(i)...)
			}
			type place struct{ candidate, matched int }
			tally := func(choices []Choice) map[place]int {
				n := make(map[place]int)
				for _, c := range choices {
					n[place{c.Candidate, c.MatchedTokens}]++
				}
				return n
			}
			choices := make([]Choice, burst)
			fresh := func() *fixture {
				x := newFixture(4)
				c.prepare(x)
				return x
			}
			x := fresh()
			for i := range keys {
				choices[i], _ = x.route(keys[i])
			}
			want := tally(choices)
			for round := range rounds {
				x := fresh()
				var wg sync.WaitGroup
				start := make(chan struct{})
				for i := range keys {
					wg.Go(func() {
						<-start
						choices[i], _ = x.route(keys[i])
					})
				}
				close(start)
				wg.Wait()
				if got := tally(choices); !maps.Equal(got, want) {
					t.Fatalf("round %d: requests by candidate and match %v, one after the other %v", round, got, want)
				}
			}
		})
	}
}

// TestLeastConn: among equal requests nobody holds, those with the fewest in
// flight are chosen, whatever the load and the order of the list.
func TestLeastConn(t *testing.T) {
	for seed := range uint64(1000) {
		rng := rand.New(rand.NewPCG(seed, 4))
		x := newFixture(2 + rng.IntN(7))
		blocks := 1 + rng.IntN(30)
		output := rng.IntN(2) == 0 // the loads are all waiting, or all running
		id := 0
		fresh := func() *prefixhash.Key { id++; return keyOf(series(id, blocks)...) }
		for i := range x.cands {
			for range rng.IntN(5) {
				_, a := x.index.Route(x.now, fresh(), x.cands[i:i+1], &x.rule, nil)
				if output {
					a.FirstOutput(x.now.Add(time.Second))
				}
			}
		}
		x.now = x.now.Add(time.Duration(rng.IntN(3000)) * time.Millisecond)
		rng.Shuffle(len(x.cands), func(i, j int) { x.cands[i], x.cands[j] = x.cands[j], x.cands[i] })
		fewest := 1000
		for _, c := range x.cands {
			fewest = min(fewest, c.Replica.Snapshot(x.now).InFlight)
		}
		want := x.cands
		c, _ := x.route(fresh())
		if got := want[c.Candidate].Replica.Snapshot(x.now).InFlight - 1; got != fewest || c.Reason != Cold {
			t.Fatalf("seed %d: %v chose one with %d in flight, fewest is %d", seed, c.Reason, got, fewest)
		}
	}
}

func TestReasons(t *testing.T) {
	prompt := keyOf(series(1, 100)...)
	t.Run("cold", func(t *testing.T) {
		x := newFixture(2)
		if c := x.serve(prompt); c.Reason != Cold || c.Holder != -1 || c.PromptTokens != 6400 || c.MatchedTokens != 0 {
			t.Errorf("%+v", c)
		}
	})
	t.Run("cold/match below min_match", func(t *testing.T) {
		x := newFixture(2)
		x.rule.MinMatchTokens = 65
		x.serve(keyOf(append(series(1, 1), 7)...))
		if c := x.serve(prompt); c.Reason != Cold || c.HolderTokens != 64 {
			t.Errorf("%+v", c)
		}
	})
	t.Run("affinity", func(t *testing.T) {
		x := newFixture(4)
		at := x.serve(prompt).Candidate
		for range 3 {
			if c := x.serve(prompt); c.Candidate != at || c.Reason != Affinity || c.MatchedTokens != 6400 || c.Holder != at || c.HolderTokens != 6400 {
				t.Errorf("%+v", c)
			}
		}
	})
	t.Run("affinity/longer of two", func(t *testing.T) {
		x := newFixture(2)
		x.serve(keyOf(series(1, 10)...))
		x.index.Route(x.now, prompt, x.cands[1:], &x.rule, nil)
		if c := x.serve(prompt); c.Candidate != 1 || c.Reason != Affinity {
			t.Errorf("%+v", c)
		}
	})
	t.Run("overflow", func(t *testing.T) {
		x := newFixture(2)
		at := x.serve(prompt).Candidate
		for i := range 40 {
			x.index.Route(x.now, keyOf(series(i+2, 100)...), x.cands[at:at+1], &x.rule, nil)
		}
		if c, _ := x.route(prompt); c.Candidate == at || c.Reason != Overflow || c.Holder != at {
			t.Errorf("%+v", c)
		}
	})
	t.Run("unhealthy", func(t *testing.T) {
		x := newFixture(2)
		at := x.serve(prompt).Candidate
		x.cands[at].State = Unavailable
		if c, _ := x.route(prompt); c.Candidate == at || c.Reason != Unhealthy || c.Holder != at {
			t.Errorf("%+v", c)
		}
	})
	t.Run("unhealthy/next best match", func(t *testing.T) {
		x := newFixture(3)
		x.index.Route(x.now, prompt, x.cands[:1], &x.rule, nil)
		x.index.Route(x.now, keyOf(series(1, 50)...), x.cands[2:], &x.rule, nil)
		x.cands[0].State = Failed
		if c, _ := x.route(prompt); c.Candidate != 2 || c.Reason != Unhealthy || c.MatchedTokens != 3200 {
			t.Errorf("%+v", c)
		}
	})
	t.Run("unhealthy/a shorter match is passed over for load", func(t *testing.T) {
		x := newFixture(3)
		x.index.Route(x.now, prompt, x.cands[:1], &x.rule, nil)
		x.index.Route(x.now, keyOf(series(1, 10)...), x.cands[1:2], &x.rule, nil)
		for i := range 40 {
			x.index.Route(x.now, keyOf(series(i+2, 100)...), x.cands[1:2], &x.rule, nil)
		}
		x.cands[0].State = Failed
		if c, _ := x.route(prompt); c.Candidate != 2 || c.Reason != Unhealthy || c.Holder != 0 {
			t.Errorf("%+v", c)
		}
	})
	// A failed connection counts as work for a while, but work it is not.
	for _, test := range []struct {
		name    string
		outcome Outcome
		queued  int // requests that wait there too
		want    Reason
	}{
		{"unhealthy/connection failed lately", Lost, 0, Unhealthy},
		{"overflow/connection failed lately, too much to do as well", Lost, 40, Overflow},
		{"overflow/refused lately", Refused, 0, Overflow},
	} {
		t.Run(test.name, func(t *testing.T) {
			x := newFixture(2)
			at := x.serve(prompt).Candidate
			holder := x.cands[at : at+1]
			for i := range test.queued {
				x.index.Route(x.now, keyOf(series(i+100, 100)...), holder, &x.rule, nil)
			}
			for i := range 2 {
				_, a := x.index.Route(x.now, keyOf(series(i+2, 100)...), holder, &x.rule, nil)
				a.Finish(x.now, test.outcome, 0)
			}
			if c, _ := x.route(prompt); c.Candidate == at || c.Reason != test.want || c.Holder != at {
				t.Errorf("%+v", c)
			}
		})
	}
	t.Run("none", func(t *testing.T) {
		x := newFixture(2)
		x.cands[0].State, x.cands[1].State = Unavailable, Unavailable
		if c, a := x.route(prompt); c.Candidate != -1 || a != nil {
			t.Errorf("%+v", c)
		}
		if c, a := x.index.Route(x.now, prompt, nil, &x.rule, nil); c.Candidate != -1 || a != nil {
			t.Errorf("%+v", c)
		}
	})
	t.Run("failed/last resort", func(t *testing.T) {
		x := newFixture(2)
		x.cands[0].State, x.cands[1].State = Unavailable, Failed
		if c, _ := x.route(prompt); c.Candidate != 1 {
			t.Errorf("%+v", c)
		}
	})
	t.Run("drained/keeps what only it holds", func(t *testing.T) {
		x := newFixture(2)
		at := x.serve(prompt).Candidate
		x.cands[at].State = Drained
		if c := x.serve(prompt); c.Candidate != at || c.Reason != Affinity {
			t.Errorf("%+v", c)
		}
		if c := x.serve(keyOf(series(2, 9)...)); c.Candidate == at {
			t.Errorf("%+v", c)
		}
	})
	t.Run("drained/its system prompt draws nobody there", func(t *testing.T) {
		x := newFixture(2)
		system := series(1, 100)
		talk := func(c, turns int) *prefixhash.Key {
			return keyOf(append(slices.Clone(system), series(c, 3*turns)...)...)
		}
		at := x.serve(talk(2, 1)).Candidate
		x.cands[at].State = Drained
		if c := x.serve(talk(3, 1)); c.Candidate == at || c.Reason != Unhealthy {
			t.Errorf("a new conversation: %+v", c)
		}
		for turns := 2; turns < 5; turns++ {
			if c := x.serve(talk(2, turns)); c.Candidate != at || c.Reason != Affinity {
				t.Errorf("turn %d of the one that was there: %+v", turns, c)
			}
		}
	})
	// What little work a short prompt is must not make a replica that can't be
	// reached look like the others.
	t.Run("cold/connection failed lately", func(t *testing.T) {
		for _, key := range []func(i int) *prefixhash.Key{
			func(i int) *prefixhash.Key { return keyOf(series(i+1, 2)...) },
			func(i int) *prefixhash.Key { k := keyOf(series(i+1, 2)...); k.Session = 77; return k },
			func(int) *prefixhash.Key { return keyOf() },
			func(int) *prefixhash.Key { return nil },
		} {
			x := newFixture(2)
			failed := 0
			for i := range 20 {
				c, a := x.route(key(i))
				if c.Candidate == 0 {
					failed++
					a.Finish(x.now, Lost, 0)
				} else {
					a.Confirm(x.now, true)
					a.FirstOutput(x.now)
					a.Finish(x.now, Served, 0)
				}
				x.now = x.now.Add(90 * time.Millisecond)
			}
			if failed > 1 {
				t.Errorf("%d requests within 2 s went to a replica that can't be reached", failed)
			}
		}
	})
	t.Run("session/short prompt", func(t *testing.T) {
		x := newFixture(4)
		k := keyOf(1)
		k.Session = 77
		at := x.serve(k).Candidate
		x.index.Route(x.now, keyOf(9), x.cands[at:at+1], &x.rule, nil)
		for i := range 8 {
			x.serve(keyOf(series(i+5, 30)...))
			k := keyOf(100 + i)
			k.Session = 77
			if c := x.serve(k); c.Candidate != at || c.Reason != Session {
				t.Errorf("%+v", c)
			}
		}
	})
	t.Run("session/gives way to load", func(t *testing.T) {
		x := newFixture(2)
		k := keyOf(1)
		k.Session = 77
		at := x.serve(k).Candidate
		for i := range 20 {
			x.index.Route(x.now, keyOf(series(i+2, 100)...), x.cands[at:at+1], &x.rule, nil)
		}
		if c, _ := x.route(k); c.Candidate == at {
			t.Errorf("%+v", c)
		}
	})
	t.Run("previous/even when loaded", func(t *testing.T) {
		x := newFixture(2)
		x.index.Learn(99, x.cands[1].Replica)
		for i := range 20 {
			x.index.Route(x.now, keyOf(series(i+2, 100)...), x.cands[1:], &x.rule, nil)
		}
		k := keyOf(1)
		k.Previous = 99
		if c, _ := x.route(k); c.Candidate != 1 || c.Reason != Session {
			t.Errorf("%+v", c)
		}
		x.cands[1].State = Unavailable
		if c, _ := x.route(k); c.Candidate != 0 || c.Reason != Gone {
			t.Errorf("%+v", c)
		}
	})
	t.Run("no key", func(t *testing.T) {
		x := newFixture(2)
		x.cands[0].InFlight = 1
		if c, _ := x.route(nil); c.Candidate != 1 || c.Reason != NoKey {
			t.Errorf("%+v", c)
		}
	})
}

func TestFallback(t *testing.T) {
	prompt := keyOf(series(1, 100)...)
	to := func(n int) func(Choice) int { return func(Choice) int { return n } }
	x := newFixture(3)
	c, a := x.index.Route(x.now, prompt, x.cands, &x.rule, to(2))
	if c.Candidate != 2 || c.Reason != Cold || a.Replica() != x.cands[2].Replica {
		t.Errorf("cold: %+v", c)
	}
	if c, _ := x.index.Route(x.now, prompt, x.cands, &x.rule, to(0)); c.Candidate != 2 || c.Reason != Affinity {
		t.Errorf("affinity: %+v", c)
	}
	if c, _ := x.index.Route(x.now, nil, x.cands, &x.rule, to(1)); c.Candidate != 1 || c.Reason != NoKey {
		t.Errorf("no key: %+v", c)
	}
	x.cands[2].State = Unavailable
	if c, _ := x.index.Route(x.now, prompt, x.cands, &x.rule, to(1)); c.Candidate != 1 || c.Reason != Unhealthy {
		t.Errorf("unhealthy: %+v", c)
	}
	for _, n := range []int{-1, 2, 3} { // leaves it, not available, out of range
		if c, _ := x.index.Route(x.now, keyOf(n), x.cands, &x.rule, to(n)); c.Candidate == 2 || c.Candidate < 0 {
			t.Errorf("fallback %d: %+v", n, c)
		}
	}
	// A fallback that comes back here must not wait for itself.
	x.index.Route(x.now, keyOf(5), x.cands, &x.rule, func(Choice) int {
		c, _ := x.index.Route(x.now, keyOf(5), x.cands, &x.rule, nil)
		return c.Candidate
	})
}

// A prompt that the replica refuses computes nothing there: what it held before
// is still there afterwards, however long the refused one was.
func TestRefusedPromptTakesNothingAway(t *testing.T) {
	x := newFixture(1)
	x.rule.CapacityTokens = 40_000
	held := keyOf(series(1, 100)...)
	x.serve(held)
	for n := range 5 {
		_, a := x.route(keyOf(series(2+n, 4000)...)) // 256,000 tokens
		if c := x.index.Lookup(x.now, held, x.cands, &x.rule, make([]int, 1)); n == 0 && c.MatchedTokens > 6400 {
			t.Errorf("%+v", c)
		}
		a.Finish(x.now, Rejected, 0)
	}
	if c := x.serve(held); c.MatchedTokens != 6400 {
		t.Errorf("%d tokens matched after refused prompts, want 6400", c.MatchedTokens)
	}
}

// A client that leaves before the first output leaves nothing behind, although
// engines send the headers of a stream at once: neither is its prompt believed to
// be there, nor can its absence make the cache look small.
func TestLeavingEarlyTeachesNothing(t *testing.T) {
	x := newFixture(1)
	x.serve(keyOf(series(1, 100)...))
	_, a := x.route(keyOf(series(1, 100)...))
	a.Confirm(x.now, true)
	a.FirstOutput(x.now)
	a.Report(6400, 6384)
	a.Finish(x.now, Served, 0)
	for n := range 50 {
		prompt := keyOf(series(2+n, 100)...)
		_, a := x.route(prompt)
		a.Confirm(x.now, true)
		a.Finish(x.now, Aborted, 0)
		c, a := x.route(prompt)
		if c.MatchedTokens != 0 {
			t.Fatalf("%+v", c)
		}
		a.Confirm(x.now, true)
		a.FirstOutput(x.now)
		a.Report(6400, 0)
		a.Finish(x.now, Served, 0)
	}
	if s := x.cands[0].Replica.Snapshot(x.now); s.CapacityTokens != 0 {
		t.Errorf("capacity %d", s.CapacityTokens)
	}
}

func TestAbsurdQueueReportIsForgotten(t *testing.T) {
	x := newFixture(2)
	busy := func(n int) int {
		return x.counts(20, func(i int) *prefixhash.Key { return keyOf(series(n+i, 10)...) }, func(a *Attempt) {
			a.Confirm(x.now, true)
			a.FirstOutput(x.now)
			a.Finish(x.now, Served, 0)
		})[0]
	}
	busy(1) // so that the size of a request is known
	x.cands[0].Replica.ReportLoad(x.now, 1e12)
	if n := busy(100); n != 0 {
		t.Errorf("%d requests went to a replica that has just reported a queue", n)
	}
	x.now = x.now.Add(reportTime)
	if n := busy(200); n == 0 {
		t.Error("the report still counts")
	}
}

// A shadow's fallback serves everything; what the rule wanted is told.
func TestShadow(t *testing.T) {
	x := newFixture(3)
	prompt := keyOf(series(1, 100)...)
	at := x.serve(prompt).Candidate
	x.rule.Shadow = true
	other := (at + 1) % 3
	var wanted Choice
	c, _ := x.index.Route(x.now, prompt, x.cands, &x.rule, func(c Choice) int { wanted = c; return other })
	if wanted.Candidate != at || wanted.MatchedTokens != 6400 {
		t.Errorf("wanted %+v, want candidate %d", wanted, at)
	}
	if c.Candidate != other || c.MatchedTokens != 0 {
		t.Errorf("served by %+v, want candidate %d", c, other)
	}
}

// Engines prefill several prompts together, and the gateway may read the first
// outputs in any order: a prompt must not look as if it had taken the moment
// between two outputs.
func TestSpeedIgnoresOutputsOutOfOrder(t *testing.T) {
	x := newFixture(1)
	_, first := x.route(keyOf(series(1, 200)...))
	_, sibling := x.route(keyOf(append(series(1, 200), 7)...))
	_, third := x.route(keyOf(series(2, 200)...))
	x.now = x.now.Add(time.Second)
	sibling.FirstOutput(x.now)
	first.FirstOutput(x.now.Add(time.Microsecond))
	third.FirstOutput(x.now.Add(time.Second))
	if s := x.cands[0].Replica.Snapshot(x.now); s.SpeedMeasurements > 0 && (s.TokensPerSecond > 20_000 || s.TokensPerSecond < 5000) {
		t.Errorf("speed %.0f tokens/s after 12,800 tokens a second", s.TokensPerSecond)
	}
}

func TestLookup(t *testing.T) {
	x := newFixture(3)
	prompt := keyOf(series(1, 100)...)
	at := x.serve(prompt).Candidate
	before := x.fleet.Snapshot(x.now)
	matched := make([]int, 3)
	choice := x.index.Lookup(x.now, keyOf(append(series(1, 40), 7)...), x.cands, &x.rule, matched)
	if choice.Candidate != at || choice.Reason != Affinity || choice.MatchedTokens != 2560 {
		t.Errorf("would choose %+v, want candidate %d", choice, at)
	}
	for i, n := range matched {
		if want := map[bool]int{true: 2560}[i == at]; n != want {
			t.Errorf("candidate %d: %d tokens, want %d", i, n, want)
		}
	}
	if after := x.fleet.Snapshot(x.now); !slices.Equal(before, after) {
		t.Errorf("lookup changed %v to %v", before, after)
	}
}

func TestRefusal(t *testing.T) {
	x := newFixture(2)
	prompt := keyOf(series(1, 100)...)
	at := x.serve(prompt).Candidate
	for range 9 {
		_, a := x.index.Route(x.now, prompt, x.cands[at:at+1], &x.rule, nil)
		a.Finish(x.now, Refused, 5*time.Second)
	}
	x.now = x.now.Add(4 * time.Second)
	if c := x.serve(prompt); c.Candidate == at {
		t.Errorf("chosen again right after refusals: %+v", c)
	}
	x.now = x.now.Add(2 * time.Second)
	if s := x.cands[at].Replica.Snapshot(x.now); s.PendingPrefillTokens != 0 {
		t.Errorf("refusals still count: %+v", s)
	}
}

// Who tries again after a failure on an idle fleet comes to another replica, however
// much of the prompt the one that failed holds, and however little it was given of late.
func TestNextTryGoesElsewhere(t *testing.T) {
	for _, c := range []struct {
		name    string
		blocks  int
		outcome Outcome
		warm    int  // prompts of 6,400 tokens that the others had of late
		holds   bool // it has the prompt
	}{
		{"lost/tiny", 1, Lost, 0, true},
		{"lost/short", 20, Lost, 0, true},
		{"lost/long", 2000, Lost, 0, true},
		{"lost/given little", 100, Lost, 500, true},
		{"lost/given little, tiny and cold", 1, Lost, 500, false},
		{"refused/tiny", 1, Refused, 0, true},
		{"refused/long", 2000, Refused, 0, true},
		{"refused/given little, tiny and cold", 1, Refused, 500, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			x := newFixture(4)
			prompt := keyOf(series(1, c.blocks)...)
			serveAt := func(at int, key *prefixhash.Key) {
				_, a := x.index.Route(x.now, key, x.cands[at:at+1], &x.rule, nil)
				a.Confirm(x.now, true)
				a.FirstOutput(x.now)
				a.Finish(x.now, Served, 0)
			}
			for i := range 4 { // all known
				serveAt(i, keyOf(series(10_000+i, 100)...))
			}
			for i := range c.warm {
				serveAt(1+i%3, keyOf(series(i+100, 100)...))
			}
			if c.holds {
				serveAt(0, prompt)
			}
			first, a := x.route(prompt)
			if (c.holds || c.warm > 0) && first.Candidate != 0 && c.blocks > 1 {
				t.Fatalf("the test needs it to go to replica 0 first: %+v", first)
			}
			a.Finish(x.now, c.outcome, 0)
			second, a := x.route(prompt)
			if second.Candidate == first.Candidate {
				t.Errorf("tried again where it has just failed: %+v", second)
			}
			a.Finish(x.now, Aborted, 0)
			x.now = x.now.Add(penaltyTime)
			if third, _ := x.route(prompt); third.Candidate != first.Candidate {
				t.Errorf("the failure still counts: %+v", third)
			}
		})
	}
}

// What a replica failed or refused moves who tries it again, not the conversations of others,
// and when it has answered somebody else it has not failed for good.
func TestFailureOfOthersMovesNobody(t *testing.T) {
	for _, outcome := range []Outcome{Lost, Refused} {
		for _, blocks := range []int{1, 30, 90} {
			x := newFixture(4)
			conversation, poison := keyOf(series(1, 100)...), keyOf(series(1000, blocks)...)
			at := x.serve(conversation).Candidate
			fail := func() {
				_, a := x.index.Route(x.now, poison, x.cands[at:at+1], &x.rule, nil)
				a.Finish(x.now, outcome, 0)
			}
			fail()
			if c := x.serve(conversation); c.Candidate != at {
				t.Errorf("outcome %d of %d blocks: the conversation of 100 left: %+v", outcome, blocks, c)
			}
			if c, a := x.route(poison); outcome == Refused && c.Candidate == at {
				t.Errorf("%d blocks tried again where they were refused: %+v", blocks, c)
			} else {
				a.Finish(x.now, Aborted, 0)
			}
			if outcome == Lost {
				for range 20 { // each after an answer to somebody else
					fail()
					if c := x.serve(conversation); c.Candidate != at {
						t.Fatalf("%d blocks: the conversation left: %+v", blocks, c)
					}
				}
			}
		}
	}
}

// A replica that fails at once is always idle, and behind with what it was given:
// it must not get all prompts for that.
func TestFailingReplicaIsNoBlackHole(t *testing.T) {
	for _, c := range []struct {
		name   string
		blocks int
		keyed  bool
	}{{"tiny", 1, true}, {"short", 10, true}, {"long", 200, true}, {"without a prompt", 0, false}} {
		t.Run(c.name, func(t *testing.T) {
			x := newFixture(4)
			for i := range 400 { // while replica 0 was full, say
				at := i % 4
				if i >= 8 {
					at = 1 + i%3
				}
				_, a := x.index.Route(x.now, keyOf(series(i, 100)...), x.cands[at:at+1], &x.rule, nil)
				a.Confirm(x.now, true)
				a.FirstOutput(x.now)
				a.Finish(x.now, Served, 0)
			}
			const requests = 600 // in a minute
			failed := 0
			for i := range requests {
				var key *prefixhash.Key
				if c.keyed {
					key = keyOf(series(1000+i, c.blocks)...)
				}
				choice, a := x.route(key)
				if choice.Candidate == 0 {
					failed++
					a.Finish(x.now, Lost, 0)
				} else {
					a.Confirm(x.now, true)
					a.FirstOutput(x.now)
					a.Finish(x.now, Served, 0)
				}
				x.now = x.now.Add(time.Minute / requests)
			}
			if most := 1 + int(time.Minute/penaltyTime); failed > most {
				t.Errorf("%d of %d went to the one that fails, at most %d should", failed, requests, most)
			}
		})
	}
}

func TestQueueDepth(t *testing.T) {
	x := newFixture(2)
	for i := range 20 {
		x.serve(keyOf(series(i, 100)...))
	}
	for range 200 { // looks at the list of models, say, which say nothing about what a request in a queue is
		_, a := x.route(nil)
		a.Finish(x.now, Served, 0)
	}
	x.cands[0].Replica.ReportLoad(x.now, 30)
	counts := x.counts(6, func(i int) *prefixhash.Key { return keyOf(series(i+100, 100)...) }, nil)
	if counts[0] != 0 {
		t.Errorf("a replica with a queue of 30 got %d of 6", counts[0])
	}
	x.now = x.now.Add(time.Minute)
	if s := x.cands[0].Replica.Snapshot(x.now); s.PendingPrefillTokens != 0 {
		t.Errorf("a report of a minute ago counts as %v tokens", s.PendingPrefillTokens)
	}
}

// What waits before a prompt pushes out what its replica holds of it.
func TestQueueEvicts(t *testing.T) {
	x := newFixture(1)
	x.rule.CapacityTokens = 10_000
	r := x.cands[0].Replica
	conversation := keyOf(series(0, 32)...) // 2,048 tokens
	route := func(id, blocks int) { x.route(keyOf(series(id, blocks)...)) }

	route(1, 100) // waits, and leaves room for the conversation
	x.serve(conversation)
	if c, a := x.route(conversation); c.MatchedTokens != 2048 {
		t.Errorf("behind 6,400 tokens, %d of the conversation's 2,048 are held", c.MatchedTokens)
	} else {
		a.Finish(x.now, Rejected, 0)
	}
	route(2, 100)
	x.serve(conversation)
	before := r.Snapshot(x.now).PendingPrefillTokens
	c, a := x.route(conversation)
	if c.MatchedTokens != 0 || c.Reason != Cold {
		t.Errorf("behind 12,800 tokens in a cache of 10,000, %d are held (%v)", c.MatchedTokens, c.Reason)
	}
	if work := r.Snapshot(x.now).PendingPrefillTokens - before; work != 2048 {
		t.Errorf("it counts as %v tokens of work, not 2,048", work)
	}
	a.Finish(x.now, Rejected, 0)
}

func TestCapacity(t *testing.T) {
	// A cache of 40 prompts that are asked for again and again in one order:
	// what is asked again after fewer is a hit, after more a miss.
	x := newFixture(1)
	r := x.cands[0].Replica
	last := map[int]int{}
	rng := rand.New(rand.NewPCG(1, 6))
	for i := range 2000 {
		id := rng.IntN(80)
		_, a := x.route(keyOf(series(id, 64)...))
		a.Confirm(x.now, true)
		a.FirstOutput(x.now)
		between := map[int]bool{}
		for other, at := range last {
			if other != id && at > last[id] {
				between[other] = true
			}
		}
		if _, ok := last[id]; ok && len(between) < 40 {
			a.Report(64*64, 64*64-16)
		} else {
			a.Report(64*64, 0)
		}
		a.Finish(x.now, Served, 0)
		last[id] = i
	}
	s := r.Snapshot(x.now)
	if want := 40 * 64 * 64; s.CapacityTokens < want*95/100 || s.CapacityTokens > want*105/100 {
		t.Errorf("capacity %d, want %d", s.CapacityTokens, want)
	}
	if s.Contradicted > 0.05 {
		t.Errorf("%v of the reports speak against it", s.Contradicted)
	}

	// Conversations under one system prompt, which the cache always holds: the
	// engine counts tokens, we bytes, so what it found is never just that prompt.
	for name, system := range map[string]int{"short": 2, "long": 40} {
		for _, off := range []float64{-0.04, 0, 0.04} { // of the whole prompt
			t.Run(fmt.Sprintf("shared/%s system prompt/%+.2f", name, off), func(t *testing.T) {
				x := newFixture(1)
				const room = 2000 // blocks beside the system prompt
				last := map[int]int{}
				turns := make([]int, 80)
				rng := rand.New(rand.NewPCG(2, 7))
				for i := range 3000 {
					id := rng.IntN(len(turns))
					blocks := 40 + 4*turns[id]
					turns[id] = (turns[id] + 1) % 8
					chain := append(series(1_000_000, system), series(id, blocks)...)
					_, a := x.route(keyOf(chain...))
					a.Confirm(x.now, true)
					a.FirstOutput(x.now)
					between := blocks
					for other, at := range last {
						if other != id && at > last[id] {
							between += 40 + 4*((turns[other]+7)%8)
						}
					}
					found := float64(system)
					if _, ok := last[id]; ok && between <= room {
						found += float64(min(blocks, 40+4*((turns[id]+6)%8)))
					}
					total := float64(len(chain))
					if len(last) > 0 {
						a.Report(64*len(chain), int(64*min(max(found+off*total, 0), total)))
					} else {
						a.Report(64*len(chain), 0)
					}
					a.Finish(x.now, Served, 0)
					last[id] = i
				}
				s := x.cands[0].Replica.Snapshot(x.now)
				if want := room * 64; s.CapacityTokens < want*8/10 || s.CapacityTokens > want*12/10 {
					t.Errorf("capacity %d, want %d", s.CapacityTokens, want)
				}
				if s.Contradicted > 0.1 {
					t.Errorf("%v of the reports speak against it", s.Contradicted)
				}
			})
		}
	}

	t.Run("told", func(t *testing.T) {
		x := newFixture(1)
		x.rule.CapacityTokens = 123_456
		x.serve(keyOf(1))
		if got := x.cands[0].Replica.Snapshot(x.now).CapacityTokens; got != 123_456 {
			t.Errorf("capacity %d", got)
		}
	})
	t.Run("only zeros", func(t *testing.T) {
		x := newFixture(1)
		for range 50 {
			_, a := x.route(keyOf(series(1, 64)...))
			a.Report(64*64, 0)
			a.Finish(x.now, Served, 0)
		}
		if got := x.cands[0].Replica.Snapshot(x.now).CapacityTokens; got != 0 {
			t.Errorf("capacity %d from an engine that only says 0", got)
		}
	})
	t.Run("not judged", func(t *testing.T) {
		x := newFixture(1)
		for i := range 50 {
			k := keyOf(series(1, 64)...)
			k.Judged = i < 10
			_, a := x.route(k)
			a.Report(64*64, map[bool]int{true: 64 * 64}[i < 10])
			a.Finish(x.now, Served, 0)
		}
		if got := x.cands[0].Replica.Snapshot(x.now).CapacityTokens; got != 0 {
			t.Errorf("capacity %d from requests that are no evidence", got)
		}
	})
}

func TestSpeed(t *testing.T) {
	x := newFixture(2)
	for i := range 200 {
		at := i % 2
		_, a := x.index.Route(x.now, keyOf(series(i, 100)...), x.cands[at:at+1], &x.rule, nil)
		x.now = x.now.Add([]time.Duration{640, 5120}[at] * time.Millisecond) // 10,000 and 1,250 tokens/s
		a.FirstOutput(x.now)
		a.Finish(x.now, Served, 0)
	}
	for i, want := range []float64{10_000, 1250} {
		if got := x.cands[i].Replica.Snapshot(x.now).TokensPerSecond; got < want*0.8 || got > want*1.25 {
			t.Errorf("replica %d: %v tokens/s, want %v", i, got, want)
		}
	}
}

// A replica that was slow for a while is tried again, soon after it was restarted and
// some minutes after it was left alone otherwise, and one that stays slow costs few
// requests.
func TestSlowOnceIsTriedAgain(t *testing.T) {
	for _, streams := range []bool{true, false} {
		t.Run(fmt.Sprintf("stream=%t", streams), func(t *testing.T) {
			x := newFixture(4)
			slow := false
			id := 0
			share := func(d time.Duration) (requests, there int) { // of the last replica
				for end := x.now.Add(d); x.now.Before(end); requests++ {
					id++
					key := keyOf(series(id, 20+id%40)...)
					key.Stream = streams
					c, a := x.route(key)
					rate := 20_000.0
					if c.Candidate == 3 {
						there++
						if slow {
							rate = 2000
						}
					}
					x.now = x.now.Add(time.Duration(float64(key.Bytes) / BytesPerToken / rate * float64(time.Second)))
					a.Confirm(x.now, streams)
					if streams {
						a.FirstOutput(x.now)
					}
					x.now = x.now.Add(time.Duration(id%20) * 5 * time.Millisecond)
					a.Answered(x.now, -1, -1, id%20)
					a.Finish(x.now, Served, 0)
				}
				return requests, there
			}
			if n, there := share(5 * time.Minute); there < n/8 {
				t.Fatalf("%d of %d requests while all are alike", there, n)
			}
			slow = true
			share(2 * time.Minute)
			if n, there := share(10 * time.Minute); there == 0 || there > n/50 {
				t.Errorf("%d of %d requests while it is slow", there, n)
			}
			if x.cands[0].Replica.Snapshot(x.now).SpeedIsOwn != true || x.cands[3].Replica.Snapshot(x.now.Add(2*time.Minute)).SpeedIsOwn {
				t.Error("a speed that was just measured is not the replica's own, or one that was not for two minutes is")
			}
			slow = false
			share(6 * time.Minute)
			if n, there := share(5 * time.Minute); there < n/8 {
				t.Errorf("%d of %d requests six minutes after it was slow", there, n)
			}
			slow = true
			share(5 * time.Minute)
			slow = false
			x.cands[3].Replica.Restarted()
			if n, there := share(2 * time.Minute); there < n/16 {
				t.Errorf("%d of %d requests after its restart", there, n)
			}
		})
	}
}

// Whatever has faded, what a snapshot keeps of a replica can be read.
func TestFadedSpeedIsKept(t *testing.T) {
	x := newFixture(1)
	r := x.cands[0].Replica
	serve := func(id int, streams bool) {
		key := keyOf(series(id, 20+id%40)...)
		key.Stream = streams
		_, a := x.route(key)
		x.now = x.now.Add(time.Duration(100+id%7) * time.Millisecond)
		a.Confirm(x.now, streams)
		if streams {
			a.FirstOutput(x.now)
		}
		a.Answered(x.now, -1, -1, id%5)
		a.Finish(x.now, Served, 0)
	}
	for i := range 200 {
		serve(i, false)
	}
	for i := range 100 {
		r.Restarted()
		serve(1000+i, i%3 > 0)
		if m := r.memory(r.group.Load(), 0, x.now); !m.valid(1) {
			t.Fatalf("after %d restarts %+v", i+1, m)
		}
	}
}

func TestRestarted(t *testing.T) {
	x := newFixture(2)
	prompt := keyOf(series(1, 100)...)
	at := x.serve(prompt).Candidate
	_, flying := x.route(prompt)
	r := x.cands[at].Replica
	r.Restarted()
	matched := make([]int, 2)
	if x.index.Lookup(x.now, prompt, x.cands, &x.rule, matched); matched[at] != 0 {
		t.Errorf("%d tokens matched after a restart", matched[at])
	}
	flying.Confirm(x.now, true)
	flying.Report(6400, 0)
	flying.Finish(x.now, Served, 0)
	if s := r.Snapshot(x.now); s.Generation != 1 || s.Reports != 0 || s.Blocks != 0 {
		t.Errorf("%+v", s)
	}
	x.cands = x.cands[at : at+1]
	x.serve(prompt)
	if x.index.Lookup(x.now, prompt, x.cands, &x.rule, matched); matched[0] != 6400 {
		t.Errorf("%d tokens matched after being served again", matched[0])
	}
}

func TestForgotten(t *testing.T) {
	f := NewFleet()
	x := NewIndex(f, 1000)
	rule := &Rule{MinMatchTokens: 64}
	now := now0
	_, stays := x.Route(now, keyOf(1), []Candidate{{Replica: f.Replica("busy")}}, rule, nil)
	for i := range 500 {
		now = now.Add(time.Minute)
		_, a := x.Route(now, keyOf(i), []Candidate{{Replica: f.Replica(fmt.Sprint(i))}}, rule, nil)
		a.Finish(now, Served, 0)
	}
	if n := len(*f.replicas.Load()); n > 80 {
		t.Errorf("%d replicas remembered", n)
	}
	if n := len(*x.tables.Load()); n > 80 {
		t.Errorf("%d tables kept", n)
	}
	if f.Find("busy") == nil || f.Find("busy") != stays.Replica() {
		t.Error("a replica with a request in flight was forgotten")
	}
	if f.Find("0") != nil {
		t.Error("an unused replica was not forgotten")
	}

	t.Run("candidates that were never chosen", func(t *testing.T) {
		x := newFixture(1)
		for i := range 500 {
			x.now = x.now.Add(time.Minute)
			other := x.fleet.Replica(fmt.Sprint(i))
			_, a := x.index.Route(x.now, nil, []Candidate{{Replica: other, State: Unavailable}, x.cands[0]}, &x.rule, nil)
			a.Finish(x.now, Served, 0)
		}
		if n := len(*x.fleet.replicas.Load()); n > 80 {
			t.Errorf("%d replicas remembered", n)
		}
	})
	t.Run("but not what is still there", func(t *testing.T) {
		x := newFixture(4)
		prompt := keyOf(series(1, 100)...)
		at := x.serve(prompt).Candidate
		x.now = x.now.Add(8 * time.Hour) // of the night
		x.serve(keyOf(9))
		x.now = x.now.Add(time.Hour)
		if c := x.serve(prompt); c.Candidate != at || c.Reason != Affinity || x.cands[at].Replica.gone.Load() {
			t.Errorf("%+v", c)
		}
	})
}

// TestAccount: an attempt is in the account from when it is routed to Finish, with or
// without a key, whatever else comes when.
func TestAccount(t *testing.T) {
	finish := func(x *fixture, a *Attempt) { a.Finish(x.now, Served, 0) }
	confirm := func(x *fixture, a *Attempt) { a.Confirm(x.now, false) }
	output := func(x *fixture, a *Attempt) { a.FirstOutput(x.now) }
	report := func(_ *fixture, a *Attempt) { a.Report(100, 50) }
	type does = []func(*fixture, *Attempt)
	for _, test := range []struct {
		name   string
		key    *prefixhash.Key
		does   does
		want   int
		events string
	}{
		{"none/routed", nil, nil, 1, "s"},
		{"none/ended", nil, does{confirm, output, finish, finish}, 0, "scof"},
		{"none/reported", nil, does{confirm, output, report, finish}, 0, "scof"},
		{"none/too late", nil, does{finish, confirm, output}, 0, "sf"},
		{"key/routed", keyOf(1, 2), nil, 1, "s"},
		{"key/ended", keyOf(1, 2), does{confirm, finish, confirm}, 0, "scf"},
		{"no blocks/routed", &prefixhash.Key{Bytes: 400}, nil, 1, "s"},
	} {
		t.Run(test.name, func(t *testing.T) {
			x := newFixture(1)
			events := ""
			x.index.SetJournal(&tell{func(e Event) {
				if events += string("scorfl"[e.Kind]); e.Kind == Sent && e.Candidates != 1 {
					t.Errorf("sent: %+v", e)
				}
			}})
			_, a := x.route(test.key)
			for _, do := range test.does {
				do(x, a)
			}
			if s := a.Replica().Snapshot(x.now); s.InFlight != test.want || events != test.events {
				t.Errorf("%d in flight after %q, want %d after %q", s.InFlight, events, test.want, test.events)
			}
			x.now = x.now.Add(time.Hour)
			x.serve(keyOf(3))
			if l := &a.Replica().load; l.inFlight != test.want || test.want == 0 && (l.first != nil || l.backlog != 0 || l.prompt != 0 || x.fleet.blind.Load() != 0) {
				t.Errorf("left over: %+v", l)
			}
		})
	}
}

// TestSmallerIndexBeside: an index with a smaller bound takes nothing away from
// another one that knows the same replicas.
func TestSmallerIndexBeside(t *testing.T) {
	x := newFixture(2)
	at := make([]int, 40)
	for i := range at {
		at[i] = x.serve(keyOf(series(i, 100)...)).Candidate
	}
	large := x.index
	x.index = NewIndex(x.fleet, 1000)
	x.serve(keyOf(series(100, 100)...))
	x.index = large
	for i := range at {
		if c := x.serve(keyOf(series(i, 100)...)); c.Candidate != at[i] || c.Reason != Affinity {
			t.Fatalf("prompt %d: %+v", i, c)
		}
	}
}

// TestChurn: replicas that come and go faster than time forgets them neither pile
// up themselves nor do their blocks.
func TestChurn(t *testing.T) {
	const bound, replicas = 10_000, maxReplicas * 5 / 4
	x := newFixture(1)
	x.fleet.bound.Store(bound)
	most := 0
	for i := range replicas {
		x.now = x.now.Add(10 * time.Millisecond)
		x.cands[0].Replica = x.fleet.Replica(fmt.Sprint(i))
		for n := range 1 + 2*bound/20/(i+1) { // to fill its share
			x.serve(keyOf(series(n, 20)...))
		}
		if i&(i-1) == 0 || i == replicas-1 {
			blocks, entries := 0, 0
			for r, table := range *x.index.tables.Load() {
				blocks += r.order.blocks
				var last *segment
				for _, s := range table.dir {
					if s != last {
						entries += len(s.entries)
					}
					last = s
				}
			}
			most = max(most, blocks)
			if n := len(*x.index.tables.Load()); entries > 2*bound+smallSegment*n {
				t.Errorf("%d entries for %d blocks after %d replicas, %d of them known", entries, blocks, i+1, n)
			}
		}
	}
	if most > bound {
		t.Errorf("%d blocks in an index of %d", most, bound)
	}
	if n := len(*x.fleet.replicas.Load()); n > maxReplicas {
		t.Errorf("%d replicas remembered", n)
	}
}

func TestSessionsBounded(t *testing.T) {
	var s sessions
	s.set(1, 42)
	for i := range uint64(4 * sessionsKept) {
		s.set(i+2, 1)
		if i%(sessionsKept/2) == 0 && s.get(1) != 42 {
			t.Fatal("a session in use was lost")
		}
	}
	if n := len(s.young) + len(s.old); n > 2*sessionsKept {
		t.Errorf("%d remembered", n)
	}
}
