package affinity

import "time"

// A Peer is another gateway before the same replicas, as its journal shows it.
// Its attempts count in the replicas' accounts and in the index like the own
// ones, and what the engines report about them is evidence too.
//
// Not safe for concurrent use, unlike the rest of the package.
type Peer struct {
	index    *Index
	attempts map[uint64]*Attempt // not ended, by number
}

const (
	// peerAttempts bounds what one gateway can have in flight, as far as others
	// follow it.
	peerAttempts = 1 << 16
	// peerReplicas bounds the fleet as far as others make it grow.
	peerReplicas = 1024
)

// NewPeer returns a gateway that has sent nothing yet.
func (x *Index) NewPeer() *Peer {
	return &Peer{index: x, attempts: make(map[uint64]*Attempt)}
}

// InFlight is how many of its attempts have not ended.
func (p *Peer) InFlight() int { return len(p.attempts) }

// Apply does to the index what an event did to the other one. Events of attempts
// that are not known are ignored.
func (p *Peer) Apply(now time.Time, e Event) {
	switch e.Kind {
	case Sent:
		p.send(now, &e)
		return
	case Learned:
		if r := p.replica(e.Replica); r != nil {
			p.index.sessions.set(e.Session, r.serial)
		}
		return
	default:
	}
	a := p.attempts[e.Attempt]
	if a == nil {
		return
	}
	switch e.Kind {
	case Confirmed:
		a.Confirm(now, e.Stream)
	case Output:
		a.FirstOutput(now)
		p.measure(now, a, e.Took)
	case Reported:
		a.report(min(max(e.Share, 0), 1))
	case Finished:
		delete(p.attempts, e.Attempt)
		a.Finish(now, e.Outcome, e.RetryAfter)
	default:
	}
}

// replica returns the replica at an address, or nil if there are too many.
func (p *Peer) replica(addr string) *Replica {
	f := p.index.fleet
	if r := f.Find(addr); r != nil || len(*f.replicas.Load()) >= peerReplicas {
		return r
	}
	return f.Replica(addr)
}

// send is Route without the choice.
func (p *Peer) send(now time.Time, e *Event) {
	x := p.index
	r := p.replica(e.Replica)
	if r == nil || len(p.attempts) >= peerAttempts || p.attempts[e.Attempt] != nil {
		return
	}
	a := newAttempt(len(e.Blocks) > 0)
	a.replica, a.prompt, a.uncached, a.sent = r, max(e.PromptTokens, 0), max(e.UncachedTokens, 1), now
	a.blind, a.far = !e.Stream, true
	if n := len(e.Blocks); n > 0 {
		a.last = e.Blocks[n-1]
	}
	p.attempts[e.Attempt] = a

	if x.fleet.blind.Load() > 0 {
		x.fleet.advance(now, []Candidate{{Replica: r}})
	}
	x.fleet.mu.Lock()
	r.load.enqueue(a, now)
	r.load.give(r.group.Load(), a, r.limit(), max(e.Candidates, 1))
	if len(e.Blocks) == 0 {
		r.load.turn = x.turns.Add(1)
	}
	x.fleet.sweep(now)
	x.fleet.mu.Unlock()

	if len(e.Blocks) > 0 {
		s := scratches.Get().(*scratch)
		defer scratches.Put(s)
		a.table = x.table(r)
		limit := x.fleet.limit()
		r.mu.Lock()
		a.generation, a.judged = r.generation, e.Judged
		r.send(a.table, a, e.Blocks, 0, limit, s.spans[:0])
		r.mu.Unlock()
	}
	x.sessions.set(e.Session, r.serial)
}

// measure takes in how long a prefill was, as the other gateway saw it.
func (p *Peer) measure(now time.Time, a *Attempt, took time.Duration) {
	if took <= 0 {
		return
	}
	f := p.index.fleet
	f.mu.Lock()
	if g := a.replica.group.Load(); g != nil {
		a.replica.load.measure(g, a.uncached, took, now)
	}
	f.mu.Unlock()
}

// Expire ends all attempts of a gateway that is not heard of any more. That says
// nothing about the replicas; what was not confirmed is taken back.
func (p *Peer) Expire(now time.Time) {
	for id, a := range p.attempts {
		delete(p.attempts, id)
		a.Finish(now, Aborted, 0)
	}
}
