package main

import (
	"container/heap"
	"math/rand/v2"
	"slices"
)

// setting is a fleet and the pace of a trace before it.
type setting struct {
	replicas int
	capacity int     // KV tokens a replica
	rate     float64 // prefill tokens a second
	perToken float64 // seconds an output token
	slots    int     // requests that run at once on a replica
	speedup  float64 // of the trace
	seed     uint64  // > 0: another draw of the arrivals, each up to 1 s off
	pooled   bool    // all replicas share one cache of the total size
	slow     float64 // > 0: replica 0 prefills at this share of the rate
	small    float64 // > 0: replica 0 has this share of the memory
	fails    bool    // replica 0 fails at 40 % of the span and is back, empty, at 50 %
	restarts int     // that many times a replica is back, empty, in the moment it fails
}

// job is a request on its way.
type job struct {
	*traced
	arrived  float64
	replica  *replica
	epoch    int
	matched  int // blocks cached when the prefill started
	cached   int // tokens
	total    int // blocks reserved
	ended    bool
	ttft     float64
	waits    *job // the session's next request
	estimate float64
	note     any // the policy's
}

// replica is an engine: it prefills one request after the other at a fixed
// rate, and decodes beside that.
type replica struct {
	id      int
	cache   *cache
	rate    float64
	queue   []*job
	now     *job // being prefilled
	ready   float64
	running []*job // prefilling or decoding
	epoch   int
	up      bool

	busy     float64
	requests int
	hit, in  int64
}

// sim replays a trace before a policy.
type sim struct {
	setting
	trace    *trace
	policy   policy
	replicas []*replica
	now      float64
	events   events
	serial   int
	jobs     []*job
}

// policy routes. What it is told is what a streaming proxy sees.
type policy interface {
	pick(s *sim, j *job) int
	output(s *sim, j *job) // first output
	ended(s *sim, j *job)  // with what the engine reports
	lost(s *sim, j *job)   // the connection broke
}

type eventKind uint8

const (
	arrives eventKind = iota
	prefilled
	ends
	fails
	returns
	tells // the policy's own: f
	restarts
)

type event struct {
	at      float64
	serial  int
	kind    eventKind
	job     *job
	replica *replica
	epoch   int
	f       func()
}

type events []event

func (e events) Len() int { return len(e) }
func (e events) Less(i, j int) bool {
	return e[i].at < e[j].at || e[i].at == e[j].at && e[i].serial < e[j].serial
}
func (e events) Swap(i, j int) { e[i], e[j] = e[j], e[i] }
func (e *events) Push(x any)   { *e = append(*e, x.(event)) }
func (e *events) Pop() any {
	last := (*e)[len(*e)-1]
	*e = (*e)[:len(*e)-1]
	return last
}

func (s *sim) at(t float64, kind eventKind, j *job, r *replica) {
	s.serial++
	e := event{at: t, serial: s.serial, kind: kind, job: j, replica: r}
	if r != nil {
		e.epoch = r.epoch
	}
	heap.Push(&s.events, e)
}

// later calls a function of the policy's after some seconds.
func (s *sim) later(seconds float64, f func()) {
	s.serial++
	heap.Push(&s.events, event{at: s.now + seconds, serial: s.serial, kind: tells, f: f})
}

// simulate replays a trace.
func simulate(t *trace, c setting, p policy) *sim {
	s := &sim{setting: c, trace: t, policy: p}
	size := max(1, c.capacity/t.blockTokens)
	var pool *cache
	if c.pooled {
		pool = newCache(t.blocks, size*c.replicas)
	}
	for i := range c.replicas {
		r := &replica{id: i, up: true, cache: pool, rate: c.rate}
		if i == 0 && c.slow > 0 {
			r.rate *= c.slow
		}
		if pool == nil {
			own := size
			if i == 0 && c.small > 0 {
				own = int(c.small * float64(size))
			}
			r.cache = newCache(t.blocks, own)
		}
		s.replicas = append(s.replicas, r)
	}
	rng := rand.New(rand.NewPCG(c.seed, 1))
	for _, q := range t.requests {
		at := q.at
		if c.seed > 0 {
			at = max(0, at+2*rng.Float64()-1)
		}
		j := &job{traced: q}
		s.jobs = append(s.jobs, j)
		s.at(at/c.speedup, arrives, j, nil)
	}
	span := t.span / c.speedup
	if c.fails {
		s.at(0.4*span, fails, nil, s.replicas[0])
		s.at(0.5*span, returns, nil, s.replicas[0])
	}
	for i := range c.restarts {
		s.at((float64(i)+1)/float64(c.restarts+1)*span, restarts, nil, s.replicas[i%c.replicas])
	}
	for left := len(s.jobs); left > 0; {
		e := heap.Pop(&s.events).(event)
		s.now = e.at
		if e.kind != arrives && e.kind != returns && e.kind != restarts && e.kind != tells && e.epoch != e.replica.epoch {
			continue
		}
		switch e.kind {
		case tells:
			e.f()
		case arrives:
			s.arrive(e.job)
		case prefilled:
			s.prefilled(e.job)
		case ends:
			s.end(e.job)
			left--
		case fails:
			s.fail(e.replica)
		case returns:
			e.replica.up = true
		case restarts:
			s.restart(e.replica)
		}
	}
	return s
}

// arrive routes a request, unless it waits for the answer before it: within a
// session a turn is sent no earlier than 0.2 s after the last one's answer.
func (s *sim) arrive(j *job) {
	if j.before != nil {
		if b := s.jobs[j.before.id]; !b.ended {
			b.waits = j
			return
		}
	}
	j.arrived = s.now
	s.route(j)
}

func (s *sim) route(j *job) {
	r := s.replicas[s.policy.pick(s, j)]
	j.replica, j.epoch = r, r.epoch
	j.total = (j.prompt + j.output + s.trace.blockTokens - 1) / s.trace.blockTokens
	r.requests++
	r.queue = append(r.queue, j)
	s.start(r)
}

// start lets a replica prefill its next request if it can.
func (s *sim) start(r *replica) {
	if r.now != nil || len(r.queue) == 0 || len(r.running) >= s.slots {
		return
	}
	j := r.queue[0]
	matched, ok := r.cache.admit(j.blocks, j.total)
	if !ok {
		return
	}
	r.queue = r.queue[1:]
	j.matched = matched
	j.cached = min(matched*s.trace.blockTokens, j.prompt-1)
	r.running = append(r.running, j)
	r.now = j
	took := float64(j.prompt-j.cached) / r.rate
	r.busy += took
	r.ready = s.now + took
	s.at(r.ready, prefilled, j, r)
}

// startAll is start for those who share the cache that just got room.
func (s *sim) startAll(r *replica) {
	if !s.pooled {
		s.start(r)
		return
	}
	for _, r := range s.replicas {
		s.start(r)
	}
}

func (s *sim) prefilled(j *job) {
	r := j.replica
	r.cache.filled(j.blocks[j.matched:])
	j.ttft = s.now - j.arrived
	r.now = nil
	s.at(s.now+float64(j.output-1)*s.perToken, ends, j, r)
	s.policy.output(s, j)
	s.startAll(r)
}

func (s *sim) end(j *job) {
	r := j.replica
	r.cache.release(j.blocks, j.total-len(j.blocks))
	i := slices.Index(r.running, j)
	r.running = slices.Delete(r.running, i, i+1)
	j.ended = true
	r.in += int64(j.prompt)
	r.hit += int64(j.cached)
	s.policy.ended(s, j)
	if j.waits != nil {
		s.at(s.now+0.2, arrives, j.waits, nil)
	}
	s.startAll(r)
}

// fail takes a replica down: its cache is lost, and its requests are routed again.
func (s *sim) fail(r *replica) {
	lost := s.empty(r)
	r.up = false
	for _, j := range lost {
		s.route(j)
	}
}

// restart takes a replica down and up again before anybody could notice.
func (s *sim) restart(r *replica) {
	lost := s.empty(r)
	if p, ok := s.policy.(*product); ok {
		p.restarted(s, r)
	}
	for _, j := range lost {
		s.route(j)
	}
}

// empty lets a replica lose everything and returns its requests.
func (s *sim) empty(r *replica) []*job {
	lost := append(slices.Clone(r.running), r.queue...)
	slices.SortFunc(lost, func(a, b *job) int { return a.id - b.id })
	r.epoch++
	r.queue, r.running, r.now = nil, nil, nil
	r.cache = newCache(s.trace.blocks, r.cache.size)
	for _, j := range lost {
		s.policy.lost(s, j)
	}
	return lost
}

// result is what came out of a run.
type result struct {
	hit                  float64 // cached prompt tokens of all prompt tokens
	mean, p50, p90, p99  float64 // seconds to the first token
	busy                 float64 // busiest replica's prefill time to the mean
	requests             float64 // most requests of a replica to the mean
	leastHit, mostHit    float64 // hit ratio of a replica
	prefill              int64   // tokens computed
	first                float64 // those of replica 0 to the mean of the others
	afterP99             float64 // p99 of the tenth of the span after a failed replica is back
	utilisation, kv, use float64 // prefill time, KV memory and slots in use, of what there is
}

func (s *sim) result() result {
	var r result
	ttft := make([]float64, 0, len(s.jobs))
	var after []float64
	span := s.trace.span / s.speedup
	for _, j := range s.jobs {
		ttft = append(ttft, j.ttft)
		r.mean += j.ttft / float64(len(s.jobs))
		if s.fails && j.arrived >= 0.5*span && j.arrived < 0.6*span {
			after = append(after, j.ttft)
		}
		took := float64(j.prompt-j.cached)/s.rate + float64(j.output)*s.perToken
		r.use += took / (float64(s.slots*s.setting.replicas) * span)
		r.kv += took * float64(j.prompt+j.output) / (float64(s.capacity*s.setting.replicas) * span)
	}
	r.p50, r.p90, r.p99 = percentile(ttft, 0.5), percentile(ttft, 0.9), percentile(ttft, 0.99)
	r.afterP99 = percentile(after, 0.99)
	var hit, in int64
	var busy float64
	var requests int
	r.leastHit = 1
	for _, e := range s.replicas {
		hit += e.hit
		in += e.in
		busy += e.busy
		requests += e.requests
		r.busy = max(r.busy, e.busy)
		r.requests = max(r.requests, float64(e.requests))
		if e.in > 0 {
			own := float64(e.hit) / float64(e.in)
			r.leastHit, r.mostHit = min(r.leastHit, own), max(r.mostHit, own)
		}
	}
	own := s.replicas[0].busy * s.replicas[0].rate
	others := -own
	for _, e := range s.replicas {
		others += e.busy * e.rate
	}
	n := float64(len(s.replicas))
	r.first = own / max(others, 1) * (n - 1)
	r.hit = float64(hit) / float64(in)
	r.prefill = in - hit
	r.utilisation = busy / (n * span)
	r.busy /= busy / n
	r.requests /= float64(requests) / n
	return r
}

func percentile(x []float64, p float64) float64 {
	if len(x) == 0 {
		return 0
	}
	slices.Sort(x)
	return x[min(len(x)-1, int(p*float64(len(x))))]
}

// pace returns the speedup that puts the scarcest of prefill time, KV memory
// and slots at a load, as far as one pooled cache could serve it.
func pace(t *trace, c setting, load float64) float64 {
	c.pooled, c.slow, c.small, c.seed, c.fails, c.restarts = true, 0, 0, 0, false, 0
	c.speedup = load * float64(c.replicas) * c.rate * t.span / float64(t.tokens) // as if nothing hit
	for range 3 {
		r := simulate(t, c, newKnowing(false)).result()
		f := load / max(r.utilisation, r.kv, r.use)
		c.speedup *= f
		if f > 0.99 && f < 1.01 {
			break
		}
	}
	return c.speedup
}
