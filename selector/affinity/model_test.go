package affinity

import (
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/prefix-affinity/caddy/prefixhash"
)

// worker is one of several goroutines that use a fleet at once, with a naive
// model of what its own requests must have done to it.
type worker struct {
	t     *testing.T
	x     *fixture
	kind  modelKind
	rng   *rand.Rand
	now   time.Time
	own   [][]prefixhash.Block // prompts that nobody else sends
	all   [][]prefixhash.Block // prompts that everybody sends
	open  []*openAttempt
	owed  map[*Replica]float64                       // tokens of what was refused
	lost  *ledger                                    // and of what failed, shared
	kept  map[*Replica]map[prefixhash.Block]struct{} // own blocks that were computed
	spans [8]int                                     // scratch
}

// ledger is what failed at each replica since its last 2xx to a prompt. Its lock keeps
// the model's order that of the accounts.
type ledger struct {
	sync.Mutex

	tokens map[*Replica]float64
}

// confirm takes in the headers of a 2xx, which pardons what failed before.
func (w *worker) confirm(a *openAttempt, stream, ended bool) {
	w.lost.Lock()
	defer w.lost.Unlock()
	a.Confirm(w.now, stream)
	if !a.confirmed && !ended && len(a.key.Blocks) > 0 {
		w.lost.tokens[a.Replica()] = 0
	}
	a.confirmed = a.confirmed || !ended
}

// openAttempt is an attempt as the model sees it.
type openAttempt struct {
	*Attempt

	key              *prefixhash.Key
	owned            bool
	matched          int
	confirmed, begun bool
}

// modelKind is what may happen at the same time, and so what is determined.
type modelKind struct {
	name     string
	bound    int  // of the index
	restarts bool // replicas lose or are made to forget what they hold
	lies     bool // reports of cached tokens and of queues are arbitrary
	blind    bool // some responses are no streams and time passes, so that who waits is a guess
}

// exact says whether the match of a prompt that one goroutine owns is determined.
func (k modelKind) exact() bool { return !k.restarts && !k.lies && k.bound >= 1<<20 }

var modelKinds = []modelKind{
	{name: "calm", bound: 1 << 20},
	{name: "no streams", bound: 1 << 20, blind: true},
	{name: "restarts", bound: 1 << 20, restarts: true},
	{name: "lies", bound: 1 << 20, lies: true, blind: true},
	{name: "small index", bound: 400},
	{name: "everything", bound: 400, restarts: true, lies: true, blind: true},
}

// TestModel lets several goroutines do at random everything that there is to do,
// and compares the accounts and the index with what a naive model of each knows
// for certain.
func TestModel(t *testing.T) {
	const workers, replicas, rounds = 4, 5, 6
	for _, kind := range modelKinds {
		t.Run(kind.name, func(t *testing.T) {
			for seed := range uint64(rounds) {
				x := newFixture(replicas)
				x.fleet.bound.Store(int64(kind.bound))
				shared := prompts(rand.New(rand.NewPCG(seed, 7)), 40)
				lost := &ledger{tokens: make(map[*Replica]float64)}
				crew := make([]*worker, workers)
				for i := range crew {
					rng := rand.New(rand.NewPCG(seed, uint64(i)))
					crew[i] = &worker{
						t: t, x: x, kind: kind, rng: rng, now: x.now, own: prompts(rng, 40), all: shared,
						owed: make(map[*Replica]float64), lost: lost, kept: make(map[*Replica]map[prefixhash.Block]struct{}),
					}
				}
				at := func(what func(*worker)) {
					var wg sync.WaitGroup
					for _, w := range crew {
						wg.Go(func() { what(w) })
					}
					wg.Wait()
				}
				for range 3 {
					at(func(w *worker) {
						for range 80 {
							w.act()
						}
					})
					checkAccounts(t, x, crew)
				}
				if kind.bound < 1<<20 {
					x.index.Require(2 * kind.bound)
				}
				at(func(w *worker) {
					for len(w.open) > 0 {
						w.finish(w.rng.IntN(len(w.open)))
					}
				})
				checkAccounts(t, x, crew)
				checkEmpty(t, x)
				if t.Failed() {
					t.Fatalf("seed %d", seed)
				}
			}
		})
	}
}

// act does one thing, most often to a request under way.
func (w *worker) act() {
	if w.kind.blind {
		w.now = w.now.Add(time.Duration(w.rng.IntN(100)) * time.Millisecond)
	}
	if len(w.open) == 0 || w.rng.IntN(4) == 0 {
		w.route()
		return
	}
	i := w.rng.IntN(len(w.open))
	a := w.open[i]
	switch w.rng.IntN(9) {
	case 0, 1:
		w.confirm(a, a.key.Stream, false)
	case 2, 3:
		a.FirstOutput(w.now)
		a.begun = true
	case 4:
		w.report(a)
	case 5:
		w.lookup()
	case 6:
		w.operate(a.Replica())
	default:
		w.finish(i)
	}
}

// route sends a request, own or not, to whatever may be had.
func (w *worker) route() {
	cands := make([]Candidate, 0, len(w.x.cands))
	for _, c := range w.x.cands {
		c.State = [...]State{Available, Available, Available, Unavailable, Failed, Drained}[w.rng.IntN(6)]
		cands = append(cands, c)
	}
	w.rng.Shuffle(len(cands), func(i, j int) { cands[i], cands[j] = cands[j], cands[i] })
	cands = cands[:1+w.rng.IntN(len(cands))]
	owned := w.rng.IntN(2) == 0
	chain := w.all[w.rng.IntN(len(w.all))]
	if owned {
		chain = w.own[w.rng.IntN(len(w.own))]
	}
	key := &prefixhash.Key{
		Blocks: chain, Bytes: len(chain) * testBlock, Judged: w.rng.IntN(4) > 0,
		Stream: !w.kind.blind || w.rng.IntN(2) == 0, Session: uint64(w.rng.IntN(9)), Previous: uint64(w.rng.IntN(3)),
	}
	if w.rng.IntN(12) == 0 {
		key.Blocks, owned = nil, false
	}
	rule := w.x.rule
	rule.Rendezvous, rule.Shadow = w.rng.IntN(4) == 0, w.rng.IntN(8) == 0
	var fallback func(Choice) int
	if w.rng.IntN(3) == 0 {
		fallback = func(Choice) int { return w.rng.IntN(len(cands)+2) - 1 }
	}
	choice, attempt := w.x.index.Route(w.now, key, cands, &rule, fallback)
	if (attempt == nil) != (choice.Candidate < 0) {
		w.t.Errorf("attempt %v for %+v", attempt, choice)
	}
	if attempt == nil {
		return
	}
	r := attempt.Replica()
	if r != cands[choice.Candidate].Replica || cands[choice.Candidate].State == Unavailable {
		w.t.Errorf("%+v of %+v went to %s", choice, cands, r.addr)
	}
	if owned {
		w.wantMatch(r, chain, choice.MatchedTokens)
	}
	w.open = append(w.open, &openAttempt{Attempt: attempt, key: key, owned: owned, matched: choice.MatchedTokens})
}

// wantMatch compares the match of an own prompt with the model's: its leading
// blocks that were computed there, or are on their way there.
func (w *worker) wantMatch(r *Replica, chain []prefixhash.Block, got int) {
	want := 0
	for _, b := range chain {
		_, held := w.kept[r][b]
		for _, a := range w.open {
			if n := int(b.End / testBlock); a.owned && a.Replica() == r && len(a.key.Blocks) >= n && a.key.Blocks[n-1] == b {
				held = true
			}
		}
		if !held {
			break
		}
		want += testBlock / BytesPerToken
	}
	if got > want || w.kind.exact() && got < want {
		w.t.Errorf("%d tokens matched at %s, want %d", got, r.addr, want)
	}
}

func (w *worker) lookup() {
	chain := w.own[w.rng.IntN(len(w.own))]
	matched := w.spans[:len(w.x.cands)]
	w.x.index.Lookup(w.now, &prefixhash.Key{Blocks: chain, Bytes: len(chain) * testBlock}, w.x.cands, &w.x.rule, matched)
	for i, c := range w.x.cands {
		w.wantMatch(c.Replica, chain, matched[i])
	}
}

// report says what the engine would: that it had all that was expected of it.
func (w *worker) report(a *openAttempt) {
	prompt, cached := a.key.Bytes/BytesPerToken, a.matched
	if w.kind.lies {
		prompt, cached = w.rng.IntN(2000)-1, w.rng.IntN(2000)-1
		a.Replica().ReportLoad(w.now, float64(w.rng.IntN(50)))
	}
	a.Report(prompt, cached)
}

// operate does what happens to a replica as a whole.
func (w *worker) operate(r *Replica) {
	switch w.rng.IntN(3) {
	case 0:
		r.Snapshot(w.now)
		w.x.fleet.Snapshot(w.now)
	case 1:
		w.x.index.Learn(uint64(w.rng.IntN(3)), r)
	case 2:
		if w.kind.restarts {
			[...]func(){r.Restarted, r.Forget}[w.rng.IntN(2)]()
		}
	}
}

// finish ends a request, at times twice.
func (w *worker) finish(i int) {
	a := w.open[i]
	w.open[i] = w.open[len(w.open)-1]
	w.open = w.open[:len(w.open)-1]
	o := Outcome(w.rng.IntN(int(Rejected) + 1))
	r := a.Replica()
	w.lost.Lock()
	for range 1 + w.rng.IntN(2) {
		a.Finish(w.now, o, 0)
	}
	if o == Lost {
		w.lost.tokens[r] += float64(a.key.Bytes) / BytesPerToken
	}
	w.lost.Unlock()
	if o == Refused {
		w.owed[r] += float64(a.key.Bytes) / BytesPerToken
	}
	if a.owned && (o == Served || a.confirmed && (a.begun || !a.key.Stream)) {
		if w.kept[r] == nil {
			w.kept[r] = make(map[prefixhash.Block]struct{})
		}
		for _, b := range a.key.Blocks {
			w.kept[r][b] = struct{}{}
		}
	}
	switch w.rng.IntN(6) { // what comes too late
	case 0:
		w.confirm(a, true, true)
	case 1:
		a.FirstOutput(w.now)
	}
}

// checkAccounts compares each account with the sum of what the models know,
// while nobody is at work.
func checkAccounts(t *testing.T, x *fixture, crew []*worker) {
	t.Helper()
	blocks := 0
	for _, c := range x.cands {
		var inFlight, waiting int
		var prompt float64
		pending := crew[0].lost.tokens[c.Replica]
		for _, w := range crew {
			pending += w.owed[c.Replica]
			for _, a := range w.open {
				if a.Replica() != c.Replica {
					continue
				}
				tokens := float64(a.key.Bytes) / BytesPerToken
				inFlight++
				prompt += tokens
				if !a.begun {
					waiting++
					pending += max(tokens-float64(a.matched), 1)
				}
			}
		}
		s := c.Replica.Snapshot(x.now)
		blocks += s.Blocks
		if s.InFlight != inFlight || s.PromptTokens != prompt {
			t.Errorf("%s: %d requests of %v tokens in flight, want %d of %v", s.Address, s.InFlight, s.PromptTokens, inFlight, prompt)
		}
		if !crew[0].kind.blind && (s.Waiting != waiting || s.PendingPrefillTokens != pending) {
			t.Errorf("%s: %d requests wait for %v tokens, want %d for %v", s.Address, s.Waiting, s.PendingPrefillTokens, waiting, pending)
		}
	}
	if bound := int(x.fleet.bound.Load()); blocks > bound {
		t.Errorf("%d blocks in an index of %d", blocks, bound)
	}
}

// checkEmpty checks that nothing is left of requests that have ended, when what
// was refused has had its time.
func checkEmpty(t *testing.T, x *fixture) {
	t.Helper()
	for _, c := range x.cands {
		r := c.Replica
		if s := r.Snapshot(x.now.Add(time.Hour)); s.InFlight != 0 || s.Waiting != 0 || s.PendingPrefillTokens != 0 || s.PromptTokens != 0 {
			t.Errorf("left: %+v", s)
		}
		if len(r.provisional) != 0 || r.order.running != 0 || r.order.wait != 0 || r.load.first != nil || r.load.last != nil {
			t.Errorf("%s: left: %d provisional, %d bytes running, %d waiting", r.addr, len(r.provisional), r.order.running, r.order.wait)
		}
		var used int64
		var blocks int
		for slot := range uint32(r.order.runs.size) {
			run := r.order.runs.at(slot)
			if run.phase() == waiting || run.phase() == running {
				t.Errorf("%s: run %d is left", r.addr, slot)
			}
			used += run.size()
			blocks += int(run.blocks)
		}
		if used != r.order.used || blocks != r.order.blocks || used != int64(blocks)*testBlock {
			t.Errorf("%s: runs of %d bytes in %d blocks, counted as %d in %d", r.addr, used, blocks, r.order.used, r.order.blocks)
		}
	}
	if n := x.fleet.blind.Load(); n != 0 {
		t.Errorf("%d blind attempts left", n)
	}
}
