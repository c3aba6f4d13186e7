package affinity

import (
	"sync"
	"sync/atomic"
	"time"

	"github.com/prefix-affinity/caddy/prefixhash"
)

// An Index knows which replica holds which prompt prefix, for prompts that are
// hashed alike.
type Index struct {
	fleet   *Fleet
	tables  atomic.Pointer[map[*Replica]*table]
	gone    atomic.Uint32 // of the fleet, when tables were last cleared of them
	journal atomic.Pointer[Journal]

	_        apart
	turns    atomic.Uint64
	numbers  atomic.Uint64 // attempts told to a journal
	sessions sessions

	grow      sync.Mutex // serialises changes of tables
	snapshot  sync.Mutex // one is written or read at a time
	restoring bool       // one is being read, so that changes of new tables are noted; guarded by grow
}

// apart keeps what every request writes off the cache lines of what others read.
type apart [64]byte

// NewIndex returns an empty index and raises the fleet's bound: see Require.
func NewIndex(f *Fleet, maxBlocks int) *Index {
	x := &Index{fleet: f}
	x.Require(maxBlocks)
	x.tables.Store(&map[*Replica]*table{})
	return x
}

// Require raises the bound of what all indexes of the fleet hold together to
// maxBlocks blocks, if it is less: the largest counts, because they share the
// replicas' caches.
func (x *Index) Require(maxBlocks int) {
	for bound := &x.fleet.bound; ; {
		old := bound.Load()
		if int64(maxBlocks) <= old || bound.CompareAndSwap(old, int64(maxBlocks)) {
			return
		}
	}
}

// Trim drops what is beyond the bound, where that was lowered.
func (x *Index) Trim() {
	x.grow.Lock()
	defer x.grow.Unlock()
	x.trim()
}

// table returns a replica's part of the index.
func (x *Index) table(r *Replica) *table {
	if t := (*x.tables.Load())[r]; t != nil {
		return t
	}
	x.grow.Lock()
	defer x.grow.Unlock()
	if t := (*x.tables.Load())[r]; t != nil {
		return t
	}
	t := newTable()
	if x.restoring {
		r.mu.Lock()
		t.changes = &changes{cleared: r.order.cleared}
		r.mu.Unlock()
	}
	x.change(r, t)
	x.trim()
	return t
}

// trim takes the replicas that hold more than their share back to it, now that
// it is less, as with one more of them: whoever gets requests does that himself, but replicas that
// have left get none. Memory is given back a quarter at a time, so that many that
// come one after the other don't have everything rebuilt each time. x.grow is held.
func (x *Index) trim() {
	limit := x.fleet.limit()
	for r, t := range *x.tables.Load() {
		r.mu.Lock()
		t.most = max(t.most, r.order.blocks)
		r.order.shrink(limit, nil)
		if r.order.blocks < t.most-t.most/4 {
			t.most = r.order.blocks
			r.order.compact()
			t.rebuildAll(&r.order)
		}
		r.mu.Unlock()
	}
}

// change drops the tables of replicas that are gone, and adds one.
func (x *Index) change(r *Replica, t *table) {
	x.gone.Store(x.fleet.gone.Load())
	old := *x.tables.Load()
	next := make(map[*Replica]*table, len(old)+1)
	for r, t := range old {
		if !r.gone.Load() {
			next[r] = t
		}
	}
	if r != nil {
		next[r] = t
	}
	x.tables.Store(&next)
}

// scratch is what a decision needs for a moment.
type scratch struct {
	views []view // empty where nothing but the load decides
	spans []span
	guess int // how many blocks of a prompt a replica is likely to hold
}

// matched returns how many prompt bytes a candidate is believed to hold.
func (s *scratch) matched(candidate int) uint32 {
	if candidate >= len(s.views) {
		return 0
	}
	return s.views[candidate].matched
}

// noScratch is that of a decision by load alone. It stays empty.
var noScratch scratch

// noKey is the key of a request that has none.
var noKey = prefixhash.Key{Stream: true}

var scratches = sync.Pool{New: func() any { return new(scratch) }}

// Route chooses a replica for a request and takes the request into its account
// and index at once: simultaneous requests go as if they had come one after the
// other.
//
// A nil key, or one without blocks, is no prompt to go by: the replica with the
// fewest requests in flight has it. fallback, if not nil, chooses for requests
// that no match decides (cold, overflow, no_key; unhealthy where no other match
// is worth following); it is given the own choice and returns an index into
// cands, or -1 to leave it at that. No lock is held while it runs.
//
// The attempt is nil if no candidate is available. key is not kept.
func (x *Index) Route(now time.Time, key *prefixhash.Key, cands []Candidate, rule *Rule, fallback func(Choice) int) (Choice, *Attempt) {
	if len(cands) == 0 {
		return Choice{Candidate: -1, Holder: -1}, nil
	}
	f := x.fleet
	if f.blind.Load() > 0 {
		f.advance(now, cands)
	}
	s := &noScratch
	if key == nil {
		key = &noKey
	} else {
		s = scratches.Get().(*scratch)
		defer scratches.Put(s)
		s.views = s.views[:0]
	}
	chain := key.Blocks
	prompt := float64(key.Bytes) / BytesPerToken
	a := newAttempt(len(chain) > 0)
	a.prompt, a.sent, a.blind, a.candidates = prompt, now, !key.Stream, len(cands)
	if len(chain) > 0 {
		a.last = chain[len(chain)-1]
	}
	choice := x.decide(s, now, key, cands, rule)
	if choice.Candidate < 0 {
		f.mu.Unlock()
		return choice, nil
	}
	r := cands[choice.Candidate].Replica
	if fallback != nil && (rule.Shadow || undecided(choice, rule)) {
		f.mu.Unlock()
		if len(chain) > 0 {
			r.mu.Unlock()
		}
		if c := fallback(choice); c >= 0 && c < len(cands) && cands[c].State != Unavailable {
			choice.Candidate, r = c, cands[c].Replica
			choice.MatchedTokens = int(s.matched(c) / BytesPerToken)
		}
		if len(chain) > 0 {
			r.mu.Lock()
		}
		f.mu.Lock()
	}
	a.replica, a.uncached = r, uncached(prompt, s.matched(choice.Candidate))
	r.load.enqueue(a, now)
	r.load.give(r.group.Load(), a, r.limit(), len(cands))
	if len(chain) > 0 {
		r.load.bring(chain, s.views[choice.Candidate].held)
	} else {
		r.load.turn = x.turns.Add(1)
	}
	f.sweep(now)
	f.mu.Unlock()

	if len(chain) > 0 {
		v := &s.views[choice.Candidate]
		a.table, a.generation, a.judged = v.table, r.generation, key.Judged
		r.send(a.table, a, chain, v.blocks, f.limit(), s.spans[:0])
		r.mu.Unlock()
	}
	x.sessions.set(key.Session, r.serial)
	a.announce(x, chain, key)
	return choice, a
}

// decide chooses. It returns with Fleet.mu held and, if there is a chain, with
// the lock of the chosen replica, so that who decides next sees the load that
// this request brings, and who looks there next sees its prompt. What was looked
// up before somebody else decided is looked up again where that matters.
func (x *Index) decide(s *scratch, now time.Time, key *prefixhash.Key, cands []Candidate, rule *Rule) Choice {
	f, chain := x.fleet, key.Blocks
	prompt := float64(key.Bytes) / BytesPerToken
	if len(chain) == 0 && key.Session == 0 && key.Previous == 0 {
		f.mu.Lock()
		f.join(cands, now)
		return Choice{Candidate: leastBusy(cands, now), Reason: NoKey, PromptTokens: int(prompt), Holder: -1}
	}
	x.look(now, s, chain, cands, rule)
	views := s.views
	minMatch := rule.minMatch()
	session := find(views, x.sessions.get(key.Session))
	previous := x.sessions.get(key.Previous)
	stored := find(views, previous)
	var locked *Replica
	unlock := func() {
		if locked != nil {
			locked.mu.Unlock()
			locked = nil
		}
	}
	for {
		admit(views, cands, minMatch, session, stored)
		f.mu.Lock()
		if outdated(views, chain) {
			f.mu.Unlock()
			unlock()
			for i := range views {
				if views[i].outdated {
					s.look(now, &views[i], chain, rule, views[i].blocks)
				}
			}
			continue
		}
		g := f.join(cands, now)
		for i, c := range cands {
			views[i].inFlight = max(views[i].r.load.inFlight, c.InFlight)
		}
		choice := x.choose(views, cands, g, key, rule, minMatch, prompt, session, stored, now)
		if previous != 0 && stored != choice.Candidate && choice.Candidate >= 0 {
			choice.Reason = Gone
		}
		var to *Replica
		if len(chain) > 0 && choice.Candidate >= 0 {
			to = cands[choice.Candidate].Replica
		}
		switch {
		case to == locked:
			return choice
		case to == nil || to.mu.TryLock():
			unlock()
			return choice
		}
		// Whoever has that lock may keep it for long: not while everybody waits for us.
		f.mu.Unlock()
		unlock()
		to.mu.Lock()
		locked = to
	}
}

// outdated marks the views of replicas where somebody has brought more of a
// chain since they were looked at, and reports whether there are any. Fleet.mu is
// held.
func outdated(views []view, chain []prefixhash.Block) (some bool) {
	for i := range views {
		v := &views[i]
		v.outdated = v.held < len(chain) && v.r.load.broughtSince(v.seen, chain[v.held].Hash)
		some = some || v.outdated
	}
	return some
}

// look finds what each candidate is believed to hold of a chain.
func (x *Index) look(now time.Time, s *scratch, chain []prefixhash.Block, cands []Candidate, rule *Rule) {
	if x.fleet.gone.Load() != x.gone.Load() {
		x.grow.Lock()
		x.change(nil, nil)
		x.grow.Unlock()
	}
	s.views = s.views[:0]
	for i := range cands {
		r := cands[i].Replica
		s.views = append(s.views, view{r: r})
		if len(chain) == 0 {
			continue
		}
		v := &s.views[i]
		v.table = x.table(r)
		s.look(now, v, chain, rule, s.guess)
		if i == 0 || v.blocks < s.guess {
			s.guess = v.blocks // many hold the same system prompt, few more of a conversation
		}
	}
}

// look finds what one candidate is believed to hold; guess is a likely number of
// blocks.
func (s *scratch) look(now time.Time, v *view, chain []prefixhash.Block, rule *Rule, guess int) {
	r := v.r
	r.mu.Lock()
	r.tell(int64(rule.CapacityTokens) * BytesPerToken)
	if !r.recall.IsZero() && now.After(r.recall) {
		r.untell()
		r.settle()
	}
	s.spans = v.table.spans(s.spans, &r.order, chain, guess)
	v.held = match(s.spans, chain, r.capacity)
	v.goes = v.held > 0 && v.held == known(s.spans) && r.order.runs.at(s.spans[len(s.spans)-1].slot).end == chain[v.held-1].End
	v.seen = r.load.brought
	r.mu.Unlock()
	v.blocks = known(s.spans)
	v.matched = startOf(chain, v.held)
	v.limit = r.limit()
}

// choose applies the rule. Fleet.mu is held.
func (x *Index) choose(views []view, cands []Candidate, g *group, key *prefixhash.Key, rule *Rule, minMatch uint32, prompt float64, session, stored int, now time.Time) Choice {
	c := Choice{PromptTokens: int(prompt), Holder: -1}
	switch {
	case stored >= 0 && views[stored].usable:
		c.Candidate, c.Reason = stored, Session
	case len(key.Blocks) == 0:
		c.Candidate, c.Reason = leastBusy(cands, now), NoKey
		if session >= 0 && views[session].usable && views[session].inFlight+views[session].r.load.lost(now) <= views[c.Candidate].inFlight+1 {
			c.Candidate, c.Reason = session, Session
		}
	default:
		weigh(views, g, rule, minMatch, prompt, key.Blocks, now)
		tie := func(i int) float64 { return views[i].filled }
		if rule.Rendezvous {
			hash := unknown(key.Blocks, views)
			tie = func(i int) float64 { return rendezvous(hash, views[i].r) }
		}
		c.Candidate = least(views, minMatch, session, rule.Rendezvous, tie)
		if c.Candidate < 0 {
			break
		}
		if c.Reason = reason(views, c.Candidate, longest(views, c.Candidate), minMatch); c.Reason == Cold && c.Candidate == session {
			c.Reason = Session
		}
	}
	if c.Holder = longest(views, c.Candidate); c.Holder >= 0 {
		c.HolderTokens = int(views[c.Holder].matched / BytesPerToken)
	}
	if c.Candidate >= 0 {
		c.MatchedTokens = int(views[c.Candidate].matched / BytesPerToken)
	}
	return c
}

// undecided reports whether the fallback may choose.
func undecided(c Choice, rule *Rule) bool {
	switch c.Reason {
	case Cold, Overflow, NoKey, Gone:
		return true
	case Unhealthy:
		return c.MatchedTokens < rule.MinMatchTokens
	default:
		return false
	}
}

func find(views []view, serial uint32) int {
	for i := range views {
		if serial != 0 && views[i].r.serial == serial {
			return i
		}
	}
	return -1
}

// Lookup sets matched to how many tokens of the prompt each candidate is
// believed to hold, and returns what Route would choose now. It changes nothing.
func (x *Index) Lookup(now time.Time, key *prefixhash.Key, cands []Candidate, rule *Rule, matched []int) Choice {
	s := scratches.Get().(*scratch)
	defer scratches.Put(s)
	x.look(now, s, key.Blocks, cands, rule)
	views := s.views
	for i, v := range views {
		matched[i] = int(v.matched / BytesPerToken) //nolint:gosec // there is one for each candidate
	}
	var g *group
	for i := range views {
		if g = views[i].r.group.Load(); g == nil {
			return Choice{Candidate: -1, Holder: -1} // not a candidate of any request so far
		}
	}
	if g == nil {
		return Choice{Candidate: -1, Holder: -1}
	}
	minMatch := rule.minMatch()
	session := find(views, x.sessions.get(key.Session))
	stored := find(views, x.sessions.get(key.Previous))
	admit(views, cands, minMatch, session, stored)
	x.fleet.mu.Lock()
	defer x.fleet.mu.Unlock()
	for i, c := range cands {
		views[i].inFlight = max(views[i].r.load.inFlight, c.InFlight)
	}
	return x.choose(views, cands, g, key, rule, minMatch, float64(key.Bytes)/BytesPerToken, session, stored, now)
}

// Learn notes that the response or conversation of an id is kept at a replica;
// keys name it as Previous.
func (x *Index) Learn(id uint64, r *Replica) {
	x.sessions.set(id, r.serial)
	if j := x.journal.Load(); j != nil {
		(*j).Note(Event{Kind: Learned, Session: id, Replica: r.addr})
	}
}
