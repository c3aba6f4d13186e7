package affinity

import (
	"math"
	"math/rand/v2"
	"slices"
	"testing"
)

// lruEngine is a replica that really caches: conversations, whole, in the order
// of their last use. It reports what it finds.
type lruEngine struct {
	x      *fixture
	room   int // conversations
	cached []int
	turns  map[int]int
	report func(prompt, cached int) (int, int)
	judged bool
}

const turnBlocks, firstBlocks = 2, 30

func newLRUEngine(room int) *lruEngine {
	return &lruEngine{
		x: newFixture(1), room: room, turns: map[int]int{}, judged: true,
		report: func(prompt, cached int) (int, int) { return prompt, cached },
	}
}

// ask sends a conversation's next turn and returns whether its report showed a
// restart.
func (e *lruEngine) ask(conversation int) bool {
	before := firstBlocks + turnBlocks*e.turns[conversation]
	e.turns[conversation] = min(e.turns[conversation]+1, 5)
	key := keyOf(series(conversation, before+turnBlocks)...)
	key.Judged = e.judged
	_, a := e.x.route(key)
	found := 0
	if i := slices.Index(e.cached, conversation); i >= 0 {
		found = before*64 - 1
		e.cached = slices.Delete(e.cached, i, i+1)
	}
	if e.cached = append(e.cached, conversation); len(e.cached) > e.room {
		e.cached = e.cached[1:]
	}
	a.Confirm(e.x.now, true)
	a.FirstOutput(e.x.now)
	restarted := false
	if prompt, cached := e.report(key.Bytes/BytesPerToken, found); cached >= 0 {
		restarted = a.Report(prompt, cached)
	}
	a.Finish(e.x.now, Served, 0)
	return restarted
}

func TestRestartWithoutNotice(t *testing.T) {
	always := func(int) bool { return true }
	for _, test := range []struct {
		name    string
		room    int
		turns   int
		back    func(conversation int) bool // after the restart
		change  func(e *lruEngine, rng *rand.Rand)
		notices bool
	}{
		{"noticed/room for all", 100, 600, always, nil, true},
		{"noticed/evicts", 33, 1000, always, nil, true},
		{"noticed/counts off", 100, 600, always, func(e *lruEngine, rng *rand.Rand) {
			e.report = func(prompt, cached int) (int, int) { return prompt * 13 / 10, cached * (120 + rng.IntN(20)) / 100 }
		}, true},
		{"too few/two conversations", 100, 600, func(c int) bool { return c < 2 }, nil, false},
		{"too few/seven", 100, 600, func(c int) bool { return c < 7 }, nil, false},
		{"no evidence/not judged", 100, 600, always, func(e *lruEngine, _ *rand.Rand) { e.judged = false }, false},
		{"no evidence/never reports", 100, 600, always, func(e *lruEngine, _ *rand.Rand) {
			e.report = func(prompt, _ int) (int, int) { return prompt, -1 }
		}, false},
		{"no evidence/leaves out zeros", 100, 600, always, func(e *lruEngine, _ *rand.Rand) {
			e.report = func(prompt, cached int) (int, int) {
				if cached == 0 {
					cached = -1
				}
				return prompt, cached
			}
		}, false},
		{"no evidence/always zero", 100, 600, always, func(e *lruEngine, _ *rand.Rand) {
			e.report = func(prompt, _ int) (int, int) { return prompt, 0 }
		}, false},
	} {
		t.Run(test.name, func(t *testing.T) {
			const conversations = 40
			rng := rand.New(rand.NewPCG(1, 1))
			e := newLRUEngine(test.room)
			if test.change != nil {
				test.change(e, rng)
			}
			for range test.turns {
				if e.ask(rng.IntN(conversations)) {
					t.Fatal("noticed a restart before there was one")
				}
			}
			e.cached = nil
			asked := 0
			var again []int
			for range 400 {
				c := rng.IntN(conversations)
				if !test.back(c) {
					continue
				}
				asked++
				if again = append(again, c); e.ask(c) {
					if !test.notices {
						t.Fatalf("noticed after %v", again)
					}
					break
				}
			}
			state := e.x.cands[0].Replica.Snapshot(e.x.now)
			if (state.Generation == 1) != test.notices {
				t.Fatalf("generation %d", state.Generation)
			}
			if !test.notices {
				return
			}
			if asked < emptyResponses || asked > 3*emptyResponses {
				t.Errorf("noticed by response %d", asked)
			}
			// What showed the restart has refilled the cache, what did not come again is lost.
			refilled := 0
			for c := range conversations {
				matched := make([]int, 1)
				key := keyOf(series(c, firstBlocks)...)
				e.x.index.Lookup(e.x.now, key, e.x.cands, &e.x.rule, matched)
				switch {
				case matched[0] == 0:
				case slices.Contains(again, c):
					refilled++
				default:
					t.Errorf("conversation %d: %d tokens matched", c, matched[0])
				}
			}
			if refilled < emptyResponses {
				t.Errorf("only %d of %d conversations are believed to be there again", refilled, len(again))
			}
		})
	}
}

// What shows that a cache was lost says nothing of its size, though each of these
// responses alone might.
func TestRestartKeepsCapacity(t *testing.T) {
	const conversations = 40
	for _, test := range []struct {
		name        string
		room, turns int
	}{
		{"never evicted/160", 100, 160},
		{"never evicted/300", 100, 300},
		{"evicts/300", 33, 300},
		{"evicts/400", 33, 400},
	} {
		t.Run(test.name, func(t *testing.T) {
			for seed := range uint64(20) {
				rng := rand.New(rand.NewPCG(seed, 1))
				e := newLRUEngine(test.room)
				for range test.turns {
					e.ask(rng.IntN(conversations))
				}
				r := e.x.cands[0].Replica
				before := r.Snapshot(e.x.now).CapacityTokens
				e.cached = nil
				asked := 1
				for !e.ask(rng.IntN(conversations)) && asked < 5*emptyResponses {
					asked++
				}
				state := r.Snapshot(e.x.now)
				if state.Generation != 1 {
					t.Errorf("seed %d: no restart noticed in %d responses", seed, asked)
					continue
				}
				if after := state.CapacityTokens; math.Abs(float64(after-before)) > 0.05*float64(before) {
					t.Errorf("seed %d: capacity of %d tokens after the restart, %d before", seed, after, before)
				}
			}
		})
	}
}

// A cache that is small, or becomes so, is found to be as soon as before votes
// could be taken back: that took 28, 58 and 244 reports.
func TestSmallerCache(t *testing.T) {
	const conversations, room, seeds = 40, 15, 20
	const tokens = room * (firstBlocks + 5*turnBlocks) * 64
	for _, test := range []struct {
		name          string
		before, turns int // room for conversations, before there was for 15, and turns until then
		most          int // reports that it takes, in the mean
	}{
		{"from the start", room, 0, 30},
		{"soon", 100, 80, 62},
		{"late", 100, 600, 256},
	} {
		t.Run(test.name, func(t *testing.T) {
			reports := 0
			for seed := range uint64(seeds) {
				rng := rand.New(rand.NewPCG(seed, 1))
				e := newLRUEngine(test.before)
				for range test.turns {
					e.ask(rng.IntN(conversations))
				}
				e.room = room
				e.cached = e.cached[max(len(e.cached)-room, 0):]
				for learned := 0; learned == 0 || learned > tokens*5/4; reports++ {
					e.ask(rng.IntN(conversations))
					learned = e.x.cands[0].Replica.Snapshot(e.x.now).CapacityTokens
				}
			}
			if mean := reports / seeds; mean > test.most {
				t.Errorf("learned by %d reports in the mean, want at most %d", mean, test.most)
			}
		})
	}
}

// An engine that forgets or misreports now and then has not restarted.
func TestNoRestart(t *testing.T) {
	for _, test := range []struct {
		name  string
		room  int
		lies  float64
		burst int // every 100 requests so many zeros in a row
	}{
		{"evicts", 10, 0, 0},
		{"lies/one in ten", 25, 0.1, 0},
		{"lies/one in three", 100, 0.33, 0},
		{"lies/six in a row", 100, 0, 6},
	} {
		t.Run(test.name, func(t *testing.T) {
			for seed := range uint64(5) {
				rng := rand.New(rand.NewPCG(seed, 1))
				e := newLRUEngine(test.room)
				n := 0
				e.report = func(prompt, cached int) (int, int) {
					if n++; rng.Float64() < test.lies || n%100 < test.burst {
						cached = 0
					}
					return prompt, cached
				}
				for i := range 2000 {
					if e.ask(rng.IntN(40)) {
						t.Fatalf("seed %d: a restart noticed at request %d", seed, i)
					}
					if i == 1000 && test.lies == 0 {
						e.room = max(e.room/3, 5) // of a sudden it holds less
					}
				}
			}
		})
	}
}

// Responses add up to a restart only if they agree on when it was.
func TestDoubt(t *testing.T) {
	const size, distance = 10_000, 1_000_000
	type response struct {
		left, asked uint32 // requests
		empty       bool
	}
	empties := func(from, to uint32) (list []response) {
		for n := from; n < to; n++ {
			list = append(list, response{n, n + 100, true})
		}
		return list
	}
	for _, test := range []struct {
		name      string
		responses []response
		lost      bool
	}{
		{"eight", empties(1, 9), true},
		{"seven", empties(1, 8), false},
		{"eight/what is newer is there", slices.Concat(empties(1, 8), []response{{50, 150, false}}, empties(8, 9)), true},
		{"eight/what is older is there", slices.Concat(empties(1, 8), []response{{7, 150, false}}, empties(8, 9)), false},
		{"eight/what came again is lost again", slices.Concat(empties(1, 8), []response{{105, 150, true}}), false},
	} {
		t.Run(test.name, func(t *testing.T) {
			d, v := doubt{}, vote{}
			for range 100 {
				v.report(distance/2, 0)
				v.report(2*distance, 0)
			}
			d.hit(2 * distance)
			lost := false
			for _, r := range test.responses {
				held := int64(size)
				if r.empty {
					held = 0
				}
				lost = d.weigh(claim{0, size, r.left}, r.asked, distance, held, size/10, unlimited, &v, cast{})
			}
			if lost != test.lost {
				t.Errorf("lost: %t", lost)
			}
		})
	}
}
