package affinity

import (
	"math"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prefix-affinity/caddy/prefixhash"
)

// A Replica is one LLM server, by address.
type Replica struct {
	addr   string
	place  uint64 // of its address, for rendezvous
	serial uint32
	fleet  *Fleet
	group  atomic.Pointer[group]
	gone   atomic.Bool
	size   atomic.Int64 // capacity, readable without mu

	load load // guarded by fleet.mu

	_           apart
	mu          sync.Mutex // guards what follows and the replica's tables
	order       order
	provisional []*Attempt // sent, and not confirmed by a 2xx yet
	generation  uint32
	sends       uint32 // prompts sent; wraps, which makes old ones say nothing
	doubt       doubt
	vote        vote
	fits        int       // the vote's bin
	capacity    int64     // bytes
	told        int64     // capacity told from outside
	toldAs      int64     // the number of the vote's report
	recall      time.Time // when it stops counting, unless somebody tells it again; zero: it goes on
	cached      bool      // it has reported cached tokens
}

// ReplicaState is what is known of a replica.
type ReplicaState struct {
	Address              string
	InFlight             int     // requests sent and not ended
	Waiting              int     // those without output yet
	PendingPrefillTokens float64 // uncached tokens of these
	PromptTokens         float64 // of the requests in flight
	QueueDepth           float64 // as the replica last reported
	TokensPerSecond      float64 // prefill speed
	SpeedMeasurements    float64 // of this replica that this rests on, old ones fading; 0: it is a guess
	SpeedIsOwn           bool    // and not its fleet's: enough was measured there, and lately
	CapacityTokens       int     // of its prefix cache; 0: no limit is known
	Reports              float64 // of cached tokens that this rests on, old ones fading
	Contradicted         float64 // share of these that speak against it; over 0.2: the model doesn't describe this engine
	Blocks               int     // in the index
	Generation           uint32  // counts the restarts noticed
}

// Snapshot returns what is known of the replica at a time.
func (r *Replica) Snapshot(now time.Time) ReplicaState {
	s := ReplicaState{Address: r.addr}
	r.fleet.mu.Lock()
	l := &r.load
	s.InFlight, s.Waiting, s.PromptTokens, s.QueueDepth = l.inFlight, l.waiting, l.prompt, l.depth
	s.TokensPerSecond, s.SpeedMeasurements = speedDefault, l.speed.count
	if g := r.group.Load(); g != nil {
		s.TokensPerSecond = g.rate() * l.pace(g, now)
		if g.speed.count < speedCounts && g.fit.rate > 0 {
			s.SpeedMeasurements = l.due.count
		}
		s.SpeedIsOwn = s.SpeedMeasurements >= speedCounts && l.left(now) > 0.5
		s.PendingPrefillTokens = l.pending(s.TokensPerSecond, now)
	}
	r.fleet.mu.Unlock()

	r.mu.Lock()
	defer r.mu.Unlock()
	if r.capacity < unlimited {
		s.CapacityTokens = int(r.capacity / BytesPerToken)
	}
	s.Contradicted, s.Reports = r.vote.contradicted(r.fits)
	s.Blocks, s.Generation = r.order.blocks, r.generation
	return s
}

// ReportLoad takes in how many requests the replica says it has queued. What of
// it this process did not send counts as work there until the replica should
// have done it.
func (r *Replica) ReportLoad(now time.Time, queueDepth float64) {
	r.fleet.mu.Lock()
	defer r.fleet.mu.Unlock()
	l := &r.load
	l.depth, l.queuedAt, l.queue = queueDepth, now, 0
	if g := r.group.Load(); g != nil {
		l.queue = max(queueDepth-float64(l.waiting), 0) * g.mean
	}
}

// ReportCapacity takes in the size of the replica's KV cache in tokens, where
// its configuration or metrics say so. Reports of cached tokens can outvote it.
func (r *Replica) ReportCapacity(tokens int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.tell(int64(tokens) * BytesPerToken)
}

func (r *Replica) tell(capacity int64) {
	switch {
	case capacity <= 0:
	case capacity == r.told:
		r.recall = time.Time{}
	default:
		r.untell()
		r.told, r.toldAs = capacity, r.vote.tell(capacity)
		r.settle()
	}
}

// untell lets the capacity that was told count no more. r.mu is held.
func (r *Replica) untell() {
	if r.told > 0 {
		r.vote.untell(r.told, r.toldAs)
	}
	r.told, r.recall = 0, time.Time{}
}

// recallAfter is how long a capacity counts that nobody may tell any more.
const recallAfter = time.Minute

// Recall lets the capacities that were told count a minute longer, unless they are
// told again: a configuration has gone that may have been who did.
func (f *Fleet) Recall(now time.Time) {
	for _, r := range *f.replicas.Load() {
		r.mu.Lock()
		if r.told > 0 {
			r.recall = now.Add(recallAfter)
		}
		r.mu.Unlock()
	}
}

// settle counts the votes.
func (r *Replica) settle() {
	if g := r.group.Load(); g != nil {
		g.mu.Lock()
		r.fits = settle(&r.vote, &g.vote)
		g.mu.Unlock()
	} else {
		r.fits = settle(&r.vote, &vote{})
	}
	r.capacity = capacityOf(r.fits)
	if r.told > 0 && r.fits == voteBin(r.told) {
		r.capacity = r.told
	}
	r.size.Store(r.capacity)
}

// limit is over how many tokens of work the replica's share is remembered.
func (r *Replica) limit() float64 {
	if size := r.size.Load(); size > 0 && size < unlimited {
		return float64(size) / BytesPerToken
	}
	return fillDefault
}

// Restarted says that the replica is known to have lost its cache: nothing is
// believed to be there any more. Its capacity stays; its speed is taken for that of
// its fleet until it shows another one.
func (r *Replica) Restarted() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.lost(math.MaxUint32)
}

// lost forgets what requests before the nth left in the cache. r.mu is held.
func (r *Replica) lost(nth uint32) {
	r.generation++
	r.cached = false
	r.untested()
	if r.doubt.empty > 0 {
		r.takeBack()
	}
	r.doubt = doubt{}
	r.order.clear(nth)
}

// Forget drops everything that is believed to be cached at the replica, and its
// speed as after a restart. Its capacity stays: reports correct it, if it is another
// machine now.
func (r *Replica) Forget() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.untested()
	r.order.clear(math.MaxUint32)
}

// untested makes what was measured of the replica's speed say nothing of what is
// there now. r.mu is held.
func (r *Replica) untested() {
	r.fleet.mu.Lock()
	r.load.tested = time.Time{}
	r.fleet.mu.Unlock()
}

// send enters a prompt as the most recent one. It notes in a what was known of
// it, for the evidence, and in the table who holds it now. limit bounds the
// blocks stored. r.mu is held.
func (r *Replica) send(t *table, a *Attempt, chain []prefixhash.Block, guess, limit int, buf []span) {
	o := &r.order
	spans := t.spans(buf, o, chain, guess)
	have := known(spans)
	for _, s := range spans {
		a.known = append(a.known, expectation{chain[s.to-1].End, s.far})
	}
	r.sends++
	a.nth = r.sends
	if have > 0 {
		a.claim = r.claimed(spans, startOf(chain, spans[len(spans)-1].from), chain[have-1].End, a.prompt)
	}

	o.shrink(limit-(len(chain)-have), spans)
	chain = chain[:min(len(chain), have+max(limit-o.blocks, 0))]
	if len(chain) == 0 {
		return
	}

	// What others owned of the prompt becomes ours. A run that has ended and is
	// all ours simply goes on as ours, which spares its blocks the writing: so
	// the next turn of a conversation takes over the last one.
	var sure uint32
	var slot uint32
	heir := -1
	for i, s := range spans {
		own, end := o.runs.at(s.slot), chain[s.to-1].End
		if i == 0 || sure == chain[s.from-1].End {
			sure = max(sure, min(own.sure, end))
		}
		if own.phase() == done && own.end == end && (heir < 0 || s.to-s.from > spans[heir].to-spans[heir].from) {
			heir = i
		}
	}
	for i, s := range spans {
		own, end := o.runs.at(s.slot), chain[s.to-1].End
		switch {
		case i == heir:
		case own.phase() == done && own.end == end:
			o.release(s.slot)
		default:
			o.cut(s.slot, end, own.end, own.less(s.to-s.from))
		}
	}
	from, to := 0, 0 // blocks of the heir
	if heir >= 0 {
		slot, from, to = spans[heir].slot, spans[heir].from, spans[heir].to
		o.leave(slot)
	} else {
		slot = o.take()
	}
	o.cut(slot, 0, chain[len(chain)-1].End, uint32(len(chain)))
	o.runs.at(slot).sure, o.runs.at(slot).nth = sure, a.nth
	o.enter(slot, waiting)
	t.putAll(o, chain[:min(from, len(chain))], slot)
	t.putAll(o, chain[min(to, len(chain)):], slot)
	a.slot, a.gen = slot, o.runs.at(slot).gen()
	t.changes.sent(runID{a.slot, a.gen}, chain)
	a.keep(chain)
	a.place = len(r.provisional)
	r.provisional = append(r.provisional, a)
	o.forget(r.capacity)
}

// owns reports whether an attempt still stands for a run. r.mu is held.
func (r *Replica) owns(a *Attempt) bool {
	return a.mark != nil && a.slot != 0 && r.order.runs.at(a.slot).gen() == a.gen
}

// settled takes an attempt out of the provisional ones.
func (r *Replica) settled(a *Attempt) {
	if a.chain == nil {
		return
	}
	a.drop()
	last := len(r.provisional) - 1
	moved := r.provisional[last]
	r.provisional[a.place], moved.place = moved, a.place
	r.provisional[last] = nil
	r.provisional = r.provisional[:last]
}

// confirm makes an attempt's prompt stay, also what later attempts took over of
// it. r.mu is held.
func (r *Replica) confirm(a *Attempt) {
	if r.owns(a) {
		o := &r.order
		own := o.runs.at(a.slot)
		own.sure = max(own.sure, own.end)
		chain := a.chain[:shorter(a.chain, own.start)]
		for len(chain) > 0 {
			last := chain[len(chain)-1]
			slot := a.table.owner(o, last)
			if slot == 0 {
				chain = chain[:len(chain)-1]
				continue
			}
			other := o.runs.at(slot)
			other.sure = max(other.sure, last.End)
			chain = chain[:shorter(chain, other.start)]
		}
	}
	r.settled(a)
}

// end gives an attempt's run its last place in the order. r.mu is held.
func (r *Replica) end(a *Attempt) {
	if r.owns(a) {
		if r.order.runs.at(a.slot).size() == 0 {
			r.order.release(a.slot)
		} else {
			r.order.enter(a.slot, done)
		}
	}
	a.slot = 0
	r.settled(a)
	r.order.forget(r.capacity)
}

// withdraw takes back what an attempt brought that nobody confirmed. What
// another attempt brought too becomes that one's again. r.mu is held.
func (r *Replica) withdraw(a *Attempt) {
	if !r.owns(a) {
		a.slot = 0
		r.settled(a)
		return
	}
	o := &r.order
	own := *o.runs.at(a.slot)
	from := shorter(a.chain, max(own.start, own.sure)) // blocks before it stay
	to := shorter(a.chain, own.end)
	// Of those that share most with us the last one sent lost it to us.
	var heir *Attempt
	common := from
	for _, b := range r.provisional {
		if b == a || b.table != a.table || !r.owns(b) {
			continue
		}
		if n := min(shared(a.chain, b.chain), to); n > common && o.runs.at(b.slot).start == a.chain[n-1].End {
			heir, common = b, n
		}
	}
	var next runID
	if heir != nil {
		next = runID{heir.slot, heir.gen}
		theirs := *o.runs.at(heir.slot)
		o.cut(heir.slot, startOf(a.chain, from), theirs.end, theirs.blocks+uint32(common-from))
		for _, b := range a.chain[from:common] {
			a.table.put(o, b.Hash, heir.slot)
		}
	}
	for _, b := range a.chain[common:to] {
		a.table.drop(o, b.Hash, a.slot)
	}
	a.table.changes.withdrawn(runID{a.slot, a.gen}, a.chain, next, from, common, to)
	if end := startOf(a.chain, from); end > own.start {
		o.cut(a.slot, own.start, end, own.less(to-from))
		o.runs.at(a.slot).sure = end
		o.enter(a.slot, done)
	} else {
		o.release(a.slot)
	}
	a.slot = 0
	r.settled(a)
}

// judge takes in a report of cached tokens and returns whether the cache must
// have been lost. r.mu is held.
func (r *Replica) judge(a *Attempt, share float64) bool {
	r.cached = r.cached || share > 0
	if !r.cached {
		return false // an engine that only ever says 0 says nothing
	}
	bytes := a.prompt * BytesPerToken
	held, slack := int64(share*bytes), int64(slack*bytes)
	hit, miss := judge(a.known, held, slack, r.capacity+r.capacity/2)
	if hit == 0 && miss == 0 {
		return false
	}
	before, voted := r.capacity, cast{miss: miss, own: r.vote.report(hit, miss)}
	if g := r.group.Load(); g != nil {
		g.mu.Lock()
		voted.all = g.vote.report(hit, miss)
		g.mu.Unlock()
	}
	r.settle()
	r.doubt.hit(hit)
	distance := a.known[len(a.known)-1].far + int64(a.known[len(a.known)-1].end)
	if !r.doubt.weigh(a.claim, a.nth, distance, held, slack, before, &r.vote, voted) {
		return false
	}
	r.lost(r.doubt.before)
	return true
}

// takeBack undoes the votes that a lost cache explains: of responses that found
// nothing of what was left before, and asked for after, it was lost. r.mu is held.
func (r *Replica) takeBack() {
	g := r.group.Load()
	for _, c := range r.doubt.casts {
		if c.left >= r.doubt.before || c.asked < r.doubt.before {
			continue
		}
		r.vote.takeBack(c.miss, c.own)
		if c.all > 0 {
			g.mu.Lock()
			g.vote.takeBack(c.miss, c.all)
			g.mu.Unlock()
		}
	}
	r.settle()
}

// slack is the share of a prompt by which a report may fall short: tokens and
// bytes are not spread alike over it, and engines count whole blocks.
const slack = 0.1

// shorter returns how many blocks of a chain lie within its first bytes.
func shorter(chain []prefixhash.Block, bytes uint32) int {
	least, most := 0, len(chain)
	for least < most {
		if n := (least + most) / 2; chain[n].End <= bytes {
			least = n + 1
		} else {
			most = n
		}
	}
	return least
}

// startOf returns where block i of a chain starts.
func startOf(chain []prefixhash.Block, i int) uint32 {
	if i == 0 {
		return 0
	}
	return chain[i-1].End
}
