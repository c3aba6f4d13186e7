package affinity

import (
	"cmp"
	"math"
	"slices"
	"time"

	"github.com/prefix-affinity/caddy/prefixhash"
)

const (
	// speedDefault, in tokens a second, is what the tokens in the rule's
	// constants were chosen for; a fleet whose speed is unknown counts as that.
	speedDefault = 8000
	speedKeep    = 0.998 // what a measurement is worth at the next one
	speedLeast   = 500   // tokens: a shorter prefill is mostly overhead
	speedMoment  = 0.02  // seconds: what took less is taken for that, because scheduling alone takes some
	speedCounts  = 20    // measurements before a replica may differ from its fleet
	speedPrior   = 5     // measurements of the fleet's mean that each replica starts with
	speedSame    = 0.15  // differences up to this are taken for noise
	speedRange   = 16    // most times that a replica may differ from its fleet

	// speedLasts is how long what was measured of a replica counts in full while
	// nothing new is, and speedHalves in which time half of it is forgotten then. A
	// replica that was slow once would be left alone for good: it would have no
	// occasion to show that it is not any more. One that still is costs a request or
	// two every other minute.
	speedLasts  = time.Minute
	speedHalves = 20 * time.Second
	speedFaded  = 1e-6 // what is left at least, for nothing to become 0

	// penaltyTime is how long a refused request keeps counting as work where the
	// replica did not say.
	penaltyTime = 2 * time.Second
	penalties   = 32 // remembered one by one; further ones add to the last

	// reportTime is how long a reported queue counts if nobody renews it. A
	// replica that said something absurd once must not be left alone for good: it
	// would have no occasion to correct itself.
	reportTime = 10 * time.Second

	// fillDefault, in tokens, is over how much work a replica's share of it is
	// remembered while its capacity is not known.
	fillDefault = 1e6

	// farTime is how late what another gateway has sent is known here, at most as
	// a rule.
	farTime = 250 * time.Millisecond

	meanOver = 64 // requests that the mean work of a request is over

	// usedWithin is how much later a replica may have been a candidate than noted.
	usedWithin = time.Second

	broughtKept = 16 // prompts; many more than come to a replica during a decision
)

// A load is the account of a replica: what this process sent there and has not
// seen the end of, in prompt tokens. All of it is guarded by Fleet.mu. Decisions
// read all replicas' loads, so what they need is in few cache lines and what they
// don't change isn't written.
type load struct {
	first   *Attempt // without output yet, oldest first
	waiting int
	backlog float64   // their uncached tokens
	since   time.Time // when the first of them became the first

	inFlight int
	brought  uint64 // prompts that were not believed to be there; guarded by Replica.mu, too

	prompt   float64 // tokens in flight
	fill     float64 // uncached tokens given lately, as of filledAt
	filledAt float64 // group.clock
	speed    speed

	queue float64  // tokens queued there by others, as of queuedAt
	last  *Attempt // without output

	penalties []penalty
	queuedAt  time.Time
	depth     float64 // as reported
	clear     bool    // since is a time seen, not a guess

	turn   uint64              // when it last got a request without a key
	due    speed               // see group.due
	tested time.Time           // when speed or due was last measured; zero: they say nothing of what is there now
	used   time.Time           // when it was last a candidate, but for usedWithin
	firsts [broughtKept]uint64 // of the nth prompt brought, at n%broughtKept: the hash of its first block that was not there
}

// penalty is the work of requests that a replica refused or failed. For a while it
// counts as if it waited there.
type penalty struct {
	tokens   float64
	requests int
	failed   bool
	last     prefixhash.Block // of the prompt, for who tries it again
	until    time.Time
}

// speed sums up measured prefills, old ones fading. Their ratio hardly moves by
// a single request that was mispredicted.
type speed struct{ tokens, seconds, count float64 }

func (s *speed) measure(tokens, seconds float64) {
	s.tokens = speedKeep*s.tokens + tokens
	s.seconds = speedKeep*s.seconds + seconds
	s.count = speedKeep*s.count + 1
}

func (s *speed) rate() float64 {
	if s.count == 0 {
		return speedDefault
	}
	return s.tokens / s.seconds
}

// rate is the prefill speed of a group, in tokens a second.
func (g *group) rate() float64 {
	if g.speed.count < speedCounts && g.fit.rate > 0 {
		return g.fit.rate
	}
	return g.speed.rate()
}

// pace is a replica's prefill speed as a multiple of its group's. Where first
// outputs are not seen, it is by how long its answers take.
func (l *load) pace(g *group, now time.Time) float64 {
	s, all := &l.speed, &g.speed
	if all.count < speedCounts {
		s, all = &l.due, &g.due
	}
	if s.count < speedCounts {
		return 1
	}
	left, prior := l.left(now), speedPrior/all.count
	own := (left*s.tokens + prior*all.tokens) / (left*s.seconds + prior*all.seconds)
	p := own / all.rate()
	if math.Abs(p-1) <= speedSame {
		return 1
	}
	return min(max(p, 1.0/speedRange), speedRange)
}

// left is the share that still counts of what was measured of the replica.
func (l *load) left(now time.Time) float64 {
	untested := now.Sub(l.tested) - speedLasts
	return math.Exp2(-max(untested, 0).Seconds() / speedHalves.Seconds())
}

// test makes room for a new measurement of the replica.
func (l *load) test(now time.Time) {
	left := max(l.left(now), speedFaded)
	for _, s := range [...]*speed{&l.speed, &l.due} {
		s.tokens *= left
		s.seconds *= left
		if s.seconds < speedFaded*speedMoment { // only what is not measured any more
			*s = speed{}
		}
	}
	l.tested = now
}

// enqueue takes a request into the account.
func (l *load) enqueue(a *Attempt, now time.Time) {
	if l.first == nil {
		l.first, l.since = a, now
		l.clear = l.clear || l.inFlight == 0
	} else {
		l.last.next, a.prev = a, l.last
	}
	if a.far && now.Sub(l.since) < farTime {
		l.clear = false // it may have been there before what we believe to be first
	}
	l.last = a
	a.queued = true
	l.waiting++
	l.inFlight++
	l.backlog += a.uncached
	l.prompt += a.prompt
	if a.blind {
		a.replica.fleet.blind.Add(1)
	}
}

// bring notes that a prompt goes to the replica, which holds so many blocks of it.
// The lock of the replica is held, too, until its index has the prompt.
func (l *load) bring(chain []prefixhash.Block, held int) {
	if held < len(chain) {
		l.firsts[l.brought%broughtKept] = chain[held].Hash
		l.brought++
	}
}

// broughtSince reports whether one of the prompts brought after the first so many
// may have brought a block that was the first of its prompt not to be there. All
// that share the block agree on that.
func (l *load) broughtSince(seen, hash uint64) bool {
	if l.brought-seen > broughtKept {
		return true
	}
	for ; seen < l.brought; seen++ {
		if l.firsts[seen%broughtKept] == hash {
			return true
		}
	}
	return false
}

// leave takes a request that ended out of the account.
func (l *load) leave(a *Attempt) {
	l.inFlight--
	l.prompt -= a.prompt
	if l.inFlight == 0 {
		l.prompt = 0 // what rounding left
	}
}

// punish lets a request that was refused, or that the replica failed, count as
// work.
func (l *load) punish(a *Attempt, failed bool, now time.Time, d time.Duration) {
	if d <= 0 {
		d = penaltyTime
	}
	l.pardon(now)
	p := penalty{tokens: a.prompt, requests: 1, failed: failed, last: a.last, until: now.Add(d)}
	if len(l.penalties) >= penalties {
		for i := range slices.Backward(l.penalties) {
			if old := &l.penalties[i]; old.failed == failed {
				p.tokens += old.tokens
				p.requests += old.requests
				if old.until.After(p.until) {
					p.until = old.until
				}
				*old = p
				return
			}
		}
	}
	l.penalties = append(l.penalties, p)
}

// works takes in that the replica answers: what it failed before says nothing any more.
func (l *load) works() {
	l.penalties = slices.DeleteFunc(l.penalties, func(p penalty) bool { return p.failed })
}

// dequeue takes a request out of those without output.
func (l *load) dequeue(a *Attempt) {
	if a.prev != nil {
		a.prev.next = a.next
	} else {
		l.first = a.next
	}
	if a.next != nil {
		a.next.prev = a.prev
	} else {
		l.last = a.prev
	}
	a.prev, a.next, a.queued = nil, nil, false
	l.waiting--
	l.backlog -= a.uncached
	if l.waiting == 0 {
		l.backlog = 0 // what rounding left
	}
	if a.blind {
		a.replica.fleet.blind.Add(-1)
	}
}

// advance lets the requests whose first output can't be seen pass at the
// replica's speed, and adds them to passed.
func (l *load) advance(g *group, now time.Time, passed []*Attempt) []*Attempt {
	for l.first != nil && l.first.blind {
		took := time.Duration(l.first.uncached / (g.rate() * l.pace(g, now)) * float64(time.Second))
		if now.Sub(l.since) < took {
			break
		}
		passed = append(passed, l.first)
		l.since, l.clear = l.since.Add(took), false
		l.dequeue(l.first)
	}
	return passed
}

// output notes the first output of a request. What was queued before it has
// been prefilled too, as far as that can't be seen itself. took is how long the
// prefill was, 0 if that isn't known.
func (l *load) output(g *group, a *Attempt, now time.Time, passed []*Attempt) (_ []*Attempt, took time.Duration) {
	for b := a.prev; b != nil; {
		before := b.prev
		if b.blind {
			passed = append(passed, b)
			l.dequeue(b)
			l.clear = false
		}
		b = before
	}
	start := l.since
	if a.sent.After(start) {
		start = a.sent
	}
	// An output that overtakes another one says that both were prefilled
	// together, and so nothing about the time that either took.
	inOrder := a.prev == nil
	seen := !a.blind && !a.far
	if d := now.Sub(start); l.clear && inOrder && seen && a.uncached > speedLeast && d > 0 {
		took = d
		l.measure(g, a.uncached, took, now)
	}
	l.since, l.clear = now, inOrder && seen
	l.dequeue(a)
	return append(passed, a), took
}

// measure takes in how long a prefill was.
func (l *load) measure(g *group, tokens float64, took time.Duration, now time.Time) {
	seconds := max(took.Seconds(), speedMoment)
	l.test(now)
	g.speed.measure(tokens, seconds)
	l.speed.measure(tokens, seconds)
}

// foreign is the work that others are reported to have queued there, as far as
// the replica should not have done it meanwhile at its rate in tokens a second.
func (l *load) foreign(rate float64, now time.Time) float64 {
	if l.queue == 0 {
		return 0
	}
	age := max(now.Sub(l.queuedAt), 0)
	left := l.queue - age.Seconds()*rate
	if left <= 0 || age >= reportTime {
		l.queue = 0
		return 0
	}
	return left
}

// pending is the work ahead of a new request: uncached tokens sent and without
// output, less what should have been prefilled of the first since the last
// output, plus what was refused and what others have queued.
func (l *load) pending(rate float64, now time.Time) float64 {
	work := l.backlog
	if l.first != nil {
		work -= min(max(now.Sub(l.since).Seconds(), 0)*rate, l.first.uncached)
	}
	work = max(work, 0)
	l.pardon(now)
	for _, p := range l.penalties {
		work += p.tokens
	}
	return work + l.foreign(rate, now)
}

// pardon drops the penalties that are over.
func (l *load) pardon(now time.Time) {
	l.penalties = slices.DeleteFunc(l.penalties, func(p penalty) bool { return !now.Before(p.until) })
}

// lately sums up penalties: all, the tokens that the replica failed, and those of a
// chain or what it goes on from. It follows pending, which drops what is over.
func (l *load) lately(chain []prefixhash.Block) (all penalty, failed, own float64) {
	for _, p := range l.penalties {
		all.tokens += p.tokens
		all.requests += p.requests
		if p.failed {
			failed += p.tokens
		}
		byEnd := func(b prefixhash.Block, end uint32) int { return cmp.Compare(b.End, end) }
		if i, found := slices.BinarySearchFunc(chain, p.last.End, byEnd); found && chain[i] == p.last {
			own += p.tokens
		}
	}
	return all, failed, own
}

// lost is how many requests were refused or failed lately.
func (l *load) lost(now time.Time) (n int) {
	for _, p := range l.penalties {
		if now.Before(p.until) {
			n += p.requests
		}
	}
	return n
}

// filled is the uncached work given lately, decayed over one capacity.
func (l *load) filled(g *group, capacity float64) float64 {
	return l.fill * math.Exp((l.filledAt-g.clock)/capacity)
}

// give adds a request's work to what was given lately; n replicas share the group's.
// Before a replica has a group, as where only other gateways have used it so far, it
// counts as the average of its peers. What has no prompt, a look at the list of models, say,
// is none of the requests whose mean work is known.
func (l *load) give(g *group, a *Attempt, capacity float64, n int) {
	if a.prompt == 0 {
		return
	}
	tokens := a.uncached
	if g == nil {
		l.fill = l.fill*math.Exp(-tokens/capacity) + tokens
		return
	}
	l.fill, l.filledAt = l.filled(g, capacity)+tokens, g.clock
	g.clock += tokens / float64(n)
	g.given = min(g.given+1, meanOver)
	g.mean += (tokens - g.mean) / g.given
}
