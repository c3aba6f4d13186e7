package affinity

import (
	"sync"
	"time"

	"github.com/prefix-affinity/caddy/prefixhash"
)

// An Attempt is one try of one request on one replica. The replica's account
// and index have it from the moment it was routed; what is seen of the response must
// be told by its methods, and at last Finish. They may come from any goroutine, in any
// order and more than once.
type Attempt struct {
	replica  *Replica
	prompt   float64
	uncached float64
	sent     time.Time
	journal  Journal          // nil: nobody wants to know
	id       uint64           // its number in the journal
	last     prefixhash.Block // of its chain
	*mark                     // nil: no key

	// Guarded by Fleet.mu.
	prev, next *Attempt // in the replica's queue
	queued     bool     // no output yet
	blind      bool     // its first output won't be seen
	confirmed  bool
	ended      bool

	far        bool // of another gateway: what is known of it comes late
	candidates int  // it was chosen from
}

// A mark is what an attempt left in its replica's index. It is guarded by
// Replica.mu.
type mark struct {
	table      *table
	slot, gen  uint32              // its run; slot 0: none
	chain      []prefixhash.Block  // while provisional
	buffer     *[]prefixhash.Block // that chain is kept in
	place      int                 // among the provisional ones
	known      []expectation       // what the index knew when it was sent
	first      [4]expectation      // space for most
	claim      claim               // what it knew for sure
	nth        uint32              // which of the replica's requests it is
	judged     bool                // what the engine reports is evidence
	generation uint32
}

// newAttempt returns an attempt of a request that has a key or not.
func newAttempt(keyed bool) *Attempt {
	if !keyed {
		return new(Attempt)
	}
	a := new(struct { // one allocation
		Attempt
		own mark
	})
	a.mark = &a.own
	a.known = a.first[:0]
	return &a.Attempt
}

// chains holds buffers for the chains of provisional attempts.
var chains = sync.Pool{New: func() any { return new([]prefixhash.Block) }}

func (a *Attempt) keep(chain []prefixhash.Block) {
	a.buffer = chains.Get().(*[]prefixhash.Block)
	*a.buffer = append((*a.buffer)[:0], chain...)
	a.chain = *a.buffer
}

func (a *Attempt) drop() {
	chains.Put(a.buffer)
	a.chain, a.buffer = nil, nil
}

// Replica returns where the attempt goes.
func (a *Attempt) Replica() *Replica { return a.replica }

// Sent returns when the attempt was routed.
func (a *Attempt) Sent() time.Time { return a.sent }

// Confirm takes in the headers of a 2xx. stream says whether a first output will
// be seen: until then the prompt may still wait for its prefill. If not, the
// replica has it, and the prefill counts as done when it should be.
func (a *Attempt) Confirm(now time.Time, stream bool) {
	f := a.replica.fleet
	f.mu.Lock()
	fresh := !a.confirmed && !a.ended
	held := false
	if fresh {
		a.confirmed = true
		if a.mark != nil { // a list of models may come from one that computes nothing
			a.replica.load.works()
		}
		held = !stream || !a.queued
		if a.queued {
			a.see(stream)
		}
	}
	f.mu.Unlock()
	if held && a.mark != nil {
		a.replica.mu.Lock()
		a.replica.confirm(a)
		a.replica.mu.Unlock()
	}
	if fresh {
		a.note(Event{Kind: Confirmed, Stream: stream})
	}
}

// see notes whether the first output of a queued attempt will be seen.
func (a *Attempt) see(stream bool) {
	if a.blind == !stream {
		return
	}
	a.blind = !stream
	if a.blind {
		a.replica.fleet.blind.Add(1)
	} else {
		a.replica.fleet.blind.Add(-1)
	}
}

// FirstOutput takes in that the first output of a stream has come: the prefill
// is over.
func (a *Attempt) FirstOutput(now time.Time) {
	f := a.replica.fleet
	var buf [8]*Attempt
	f.mu.Lock()
	fresh := a.queued
	if !fresh {
		f.mu.Unlock()
		return
	}
	held := a.confirmed
	a.see(true)
	passed, took := a.replica.load.output(a.replica.group.Load(), a, now, buf[:0])
	f.mu.Unlock()

	r := a.replica
	r.mu.Lock()
	r.run(passed)
	if held && a.mark != nil {
		r.confirm(a)
	}
	r.mu.Unlock()
	a.note(Event{Kind: Output, Took: took})
}

// Report takes in how many prompt tokens the engine counted, and how many of
// them it had cached. promptTokens < 0: not said, the own estimate counts. It
// returns whether the replica must have restarted, as its last responses found
// nothing of what it had; that is forgotten.
func (a *Attempt) Report(promptTokens, cachedTokens int) (restarted bool) {
	if promptTokens == 0 || cachedTokens < 0 {
		return false
	}
	return a.report(a.cachedShare(promptTokens, cachedTokens))
}

// cachedShare returns the share of the prompt that was cached. Engines count tokens
// unlike we do.
func (a *Attempt) cachedShare(promptTokens, cachedTokens int) float64 {
	of := float64(promptTokens)
	if promptTokens < 0 {
		of = a.prompt
	}
	return min(float64(cachedTokens)/of, 1)
}

// report takes in which share of the prompt the engine had cached.
func (a *Attempt) report(share float64) (restarted bool) {
	if a.mark == nil {
		return false
	}
	r := a.replica
	r.mu.Lock()
	fresh := a.judged && a.generation == r.generation
	if fresh {
		a.judged = false
		restarted = r.judge(a, share)
	}
	r.mu.Unlock()
	if fresh {
		a.note(Event{Kind: Reported, Share: share})
	}
	return restarted
}

// Answered takes in what the engine counted of an answer that came as a whole: what
// Report takes in, but cachedTokens < 0 is not said, and the output tokens. Where
// first outputs are not seen, this is how the prefill speed is learned.
func (a *Attempt) Answered(now time.Time, promptTokens, cachedTokens, outputTokens int) {
	r := a.replica
	r.fleet.mu.Lock()
	defer r.fleet.mu.Unlock()
	g := r.group.Load()
	if g == nil || g.speed.count >= speedCounts || !a.blind || a.ended || a.far {
		return
	}
	uncached, output := a.uncached, float64(outputTokens)
	if cachedTokens >= 0 && promptTokens != 0 {
		uncached = max(a.prompt*(1-a.cachedShare(promptTokens, cachedTokens)), 1)
	}
	seconds := max(now.Sub(a.sent).Seconds(), speedMoment)
	g.fit.take(uncached, output, seconds)
	if g.fit.known {
		due := g.fit.expected(uncached, output)
		r.load.test(now)
		g.due.measure(due, seconds)
		r.load.due.measure(due, seconds)
	}
}

// Finish takes in how the attempt ended. A replica that refused it, or whose
// connection failed, counts as having its work queued for retryAfter, or for
// 2 s where that is 0.
func (a *Attempt) Finish(now time.Time, o Outcome, retryAfter time.Duration) {
	r := a.replica
	var buf [8]*Attempt
	var passed []*Attempt
	r.fleet.mu.Lock()
	if a.ended {
		r.fleet.mu.Unlock()
		return
	}
	a.ended = true
	// A stream that ends before its first output may have computed nothing.
	stays := o == Served || a.confirmed && (!a.queued || a.blind)
	l := &r.load
	switch {
	case a.queued && a.blind && o == Served:
		passed, _ = l.output(r.group.Load(), a, now, buf[:0])
	case a.queued:
		if l.first == a {
			l.since, l.clear = now, false
		}
		l.dequeue(a)
	}
	l.leave(a)
	if o == Lost || o == Refused {
		l.punish(a, o == Lost, now, retryAfter)
	}
	r.fleet.mu.Unlock()

	if a.mark != nil || len(passed) > 0 {
		r.mu.Lock()
		r.run(passed)
		switch {
		case a.mark == nil:
		case stays:
			r.confirm(a)
			r.end(a)
		default:
			r.withdraw(a)
		}
		r.mu.Unlock()
	}
	a.note(Event{Kind: Finished, Outcome: o, RetryAfter: retryAfter})
}

// run moves requests whose prefill is over on in the replica's order. r.mu is
// held.
func (r *Replica) run(passed []*Attempt) {
	for _, a := range passed {
		if r.owns(a) && r.order.runs.at(a.slot).phase() == waiting {
			r.order.enter(a.slot, running)
		}
	}
}
