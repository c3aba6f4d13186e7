package main

import (
	"math"
	"slices"
)

// counting is what simple policies need: requests in flight.
type counting struct{ inFlight map[*replica]int }

func (c *counting) sent(r *replica) {
	if c.inFlight == nil {
		c.inFlight = map[*replica]int{}
	}
	c.inFlight[r]++
}
func (c *counting) output(*sim, *job)    {}
func (c *counting) ended(_ *sim, j *job) { c.inFlight[j.replica]-- }
func (c *counting) lost(_ *sim, j *job)  { c.inFlight[j.replica]-- }

// fewest is least_conn; Caddy breaks its ties at random.
func (c *counting) fewest(s *sim, j *job) *replica {
	var best *replica
	for k := range s.replicas {
		r := s.replicas[(k+int(mix(uint64(j.id))%uint64(len(s.replicas))))%len(s.replicas)]
		if r.up && (best == nil || c.inFlight[r] < c.inFlight[best]) {
			best = r
		}
	}
	return best
}

type roundRobin struct {
	counting
	next int
}

func (p *roundRobin) pick(s *sim, j *job) int {
	for {
		p.next++
		if r := s.replicas[p.next%len(s.replicas)]; r.up {
			p.sent(r)
			return r.id
		}
	}
}

type leastConn struct{ counting }

func (p *leastConn) pick(s *sim, j *job) int {
	r := p.fewest(s, j)
	p.sent(r)
	return r.id
}

// sessionHash is a hash over the session, by rendezvous as Caddy's ip_hash,
// header and cookie policies have it.
type sessionHash struct{ counting }

func (p *sessionHash) pick(s *sim, j *job) int {
	var best *replica
	var most uint64
	for _, r := range s.replicas {
		if h := mix(j.session ^ mix(uint64(r.id)+77)); r.up && (best == nil || h > most) {
			best, most = r, h
		}
	}
	p.sent(best)
	return best.id
}

// boundedHash is consistent hashing with bounded load over the session: the
// first replica on the ring that has less than 1.25 times the mean in flight.
type boundedHash struct {
	counting
	ring []point
}

type point struct {
	hash    uint64
	replica int
}

func (p *boundedHash) pick(s *sim, j *job) int {
	if p.ring == nil {
		for _, r := range s.replicas {
			for v := range 256 {
				p.ring = append(p.ring, point{mix(uint64(r.id)<<32 + uint64(v)), r.id})
			}
		}
		slices.SortFunc(p.ring, func(a, b point) int {
			if a.hash < b.hash {
				return -1
			}
			return 1
		})
	}
	total, up := 1, 0
	for _, r := range s.replicas {
		if r.up {
			total += p.inFlight[r]
			up++
		}
	}
	bound := int(math.Ceil(1.25 * float64(total) / float64(up)))
	at, _ := slices.BinarySearchFunc(p.ring, j.session, func(q point, h uint64) int {
		if q.hash < h {
			return -1
		}
		return 1
	})
	for k := range p.ring {
		r := s.replicas[p.ring[(at+k)%len(p.ring)].replica]
		if r.up && p.inFlight[r] < bound {
			p.sent(r)
			return r.id
		}
	}
	r := p.fewest(s, j)
	p.sent(r)
	return r.id
}

// knowing sees the true caches, what is on its way to them, and the exact
// queues. greedy takes the least time to first token; else the cost is the
// product's. Before one pooled cache, greedy gives the pooled bound.
type knowing struct {
	greedy  bool
	coming  []map[int32]int // blocks on their way, by replica
	waiting int
	prompt  []float64
	flying  []float64
	fill    []float64
}

func newKnowing(careful bool) *knowing { return &knowing{greedy: !careful} }

func (p *knowing) pick(s *sim, j *job) int {
	if p.coming == nil {
		for range s.replicas {
			p.coming = append(p.coming, map[int32]int{})
		}
		n := len(s.replicas)
		p.prompt, p.flying, p.fill = make([]float64, n), make([]float64, n), make([]float64, n)
	}
	best, least, work := -1, math.Inf(1), 0.0
	alpha := 1.0
	if !p.greedy {
		alpha = min(10, 1+2*float64(p.waiting)/float64(len(s.replicas)))
	}
	for i, r := range s.replicas {
		if !r.up {
			continue
		}
		n := 0
		for n < len(j.blocks) && (r.cache.has(j.blocks[n]) || p.coming[i][j.blocks[n]] > 0) {
			n++
		}
		u := float64(max(1, j.prompt-n*s.trace.blockTokens))
		queue := 0.0
		if r.now != nil {
			queue = (r.ready - s.now) * r.rate
		}
		for _, q := range r.queue {
			queue += q.estimate
		}
		cost := (queue + alpha*u) * s.rate / r.rate
		if !p.greedy {
			cost += 0.05*p.prompt[i] + 300*p.flying[i]
		}
		if cost < least || cost == least && p.fill[i] < p.fill[best] {
			best, least, work = i, cost, u
		}
	}
	j.estimate = work
	p.waiting++
	p.prompt[best] += float64(j.prompt)
	p.flying[best]++
	p.fill[best] += work
	for _, b := range j.blocks {
		p.coming[best][b]++
	}
	j.note = true // on its way
	return best
}

func (p *knowing) arrivedAt(j *job) {
	if j.note == nil {
		return
	}
	j.note = nil
	p.waiting--
	coming := p.coming[j.replica.id]
	for _, b := range j.blocks {
		if coming[b]--; coming[b] == 0 {
			delete(coming, b)
		}
	}
}

func (p *knowing) output(_ *sim, j *job) { p.arrivedAt(j) }
func (p *knowing) ended(_ *sim, j *job) {
	p.prompt[j.replica.id] -= float64(j.prompt)
	p.flying[j.replica.id]--
}

func (p *knowing) lost(s *sim, j *job) {
	p.arrivedAt(j)
	p.ended(s, j)
}
