package affinity

import "time"

// A keptReplica is what a snapshot keeps of a replica beside its index.
type keptReplica struct {
	Address     string     `json:"address"`
	Group       int        `json:"group"`
	IdleSeconds float64    `json:"idle_seconds"` // since a request went there
	Speed       speedState `json:"speed"`
	Due         speedState `json:"due"`
	Untested    float64    `json:"untested_seconds"` // since either was measured, forgetAfter at most
	Filled      float64    `json:"filled"`           // uncached tokens given lately
	Votes       []binVotes `json:"votes"`
	ToldBytes   int64      `json:"told_bytes"`  // capacity told from outside,
	ToldAgo     float64    `json:"told_ago"`    // so many reports ago
	Cached      bool       `json:"cached"`      // it has reported cached tokens
	ReachBytes  float64    `json:"reach_bytes"` // distance of the farthest hit lately
	Generation  uint32     `json:"generation"`
}

// A keptGroup is what a snapshot keeps of a group.
type keptGroup struct {
	Speed speedState `json:"speed"`
	Fit   fitState   `json:"fit"`
	Due   speedState `json:"due"`
	Mean  float64    `json:"mean"`  // uncached tokens of a request
	Given float64    `json:"given"` // requests that mean is over
	Votes []binVotes `json:"votes"`
}

type speedState struct {
	Tokens  float64 `json:"tokens"`
	Seconds float64 `json:"seconds"`
	Count   float64 `json:"count"`
}

// binVotes are the reports in one bin of a vote, as if made now.
type binVotes struct {
	Bin  int     `json:"bin"`
	Hit  float64 `json:"hit"`
	Miss float64 `json:"miss"`
}

const (
	memoriesMost = 4096 // replicas of a snapshot
	addressMost  = 1024 // bytes
)

// writeMemories writes all groups and replicas, and returns the replicas' numbers.
func (f *Fleet) writeMemories(w *snapshotWriter, now time.Time) map[*Replica]int {
	numbers := make(map[*Replica]int)
	groups := make(map[*group]int)
	var memories []keptReplica
	for _, r := range *f.replicas.Load() {
		g := r.group.Load()
		if g == nil || len(memories) == memoriesMost || len(r.addr) > addressMost {
			continue // no request could go there so far
		}
		n, ok := groups[g]
		if !ok {
			n = len(groups)
			groups[g] = n
			w.json(chunkGroup, f.stateOf(g))
		}
		numbers[r] = len(memories)
		memories = append(memories, r.memory(g, n, now))
	}
	for i := range memories {
		w.json(chunkReplica, &memories[i])
	}
	return numbers
}

func (f *Fleet) stateOf(g *group) keptGroup {
	f.mu.Lock()
	s := keptGroup{Speed: g.speed.state(), Fit: g.fit.fitState, Due: g.due.state(), Mean: g.mean, Given: g.given}
	f.mu.Unlock()
	g.mu.Lock()
	s.Votes = g.vote.state()
	g.mu.Unlock()
	return s
}

func (r *Replica) memory(g *group, number int, now time.Time) keptReplica {
	m := keptReplica{Address: r.addr, Group: number}
	r.fleet.mu.Lock()
	if l := &r.load; !l.used.IsZero() {
		m.IdleSeconds = min(max(now.Sub(l.used), 0), forgetAfter).Seconds()
	}
	m.Untested = min(max(now.Sub(r.load.tested), 0), forgetAfter).Seconds()
	m.Speed, m.Due, m.Filled = r.load.speed.state(), r.load.due.state(), r.load.filled(g, r.limit())
	r.fleet.mu.Unlock()
	r.mu.Lock()
	m.Votes, m.ToldBytes, m.Cached = r.vote.state(), r.told, r.cached
	if r.told > 0 {
		m.ToldAgo = float64(int64(r.vote.reports) - r.toldAs) //nolint:gosec // never so many
	}
	m.ReachBytes, m.Generation = r.doubt.reach, r.generation
	r.mu.Unlock()
	return m
}

// remember takes in what a snapshot kept. What was learned meanwhile stays, and
// counts beside it. Time in which there was no gateway does not count.
func (f *Fleet) remember(groups []keptGroup, memories []keptReplica, now time.Time) {
	if !f.remembers.CompareAndSwap(false, true) {
		return
	}
	replicas := make([]*Replica, len(memories))
	joined := make([]*group, len(groups))
	for i, m := range memories {
		replicas[i] = f.Replica(m.Address)
	}
	f.mu.Lock()
	for i, m := range memories {
		if g := replicas[i].group.Load(); g != nil && joined[m.Group] == nil {
			joined[m.Group] = g
		}
	}
	for i, s := range groups {
		g := joined[i]
		if g == nil {
			g = &group{}
			joined[i] = g
		}
		g.speed.add(s.Speed)
		g.fit.add(s.Fit)
		g.due.add(s.Due)
		if all := g.given + s.Given; all > 0 {
			g.mean = (g.mean*g.given + s.Mean*s.Given) / all
			g.given = min(all, meanOver)
		}
		g.mu.Lock()
		g.vote.add(s.Votes)
		g.mu.Unlock()
	}
	for i, m := range memories {
		replicas[i].group.CompareAndSwap(nil, joined[m.Group])
	}
	f.mu.Unlock()

	for i, m := range memories {
		r := replicas[i]
		r.mu.Lock()
		if r.told == 0 && m.ToldBytes > 0 { // by whom, only time can tell
			r.told, r.toldAs, r.recall = m.ToldBytes, int64(r.vote.reports)-int64(m.ToldAgo), now.Add(recallAfter) //nolint:gosec // never so many
		}
		r.cached = r.cached || m.Cached
		r.doubt.reach = max(r.doubt.reach, m.ReachBytes)
		r.generation = max(r.generation, m.Generation)
		r.vote.add(m.Votes)
		r.settle()
		r.mu.Unlock()

		f.mu.Lock()
		l, g := &r.load, r.group.Load()
		if g == joined[m.Group] { // else its fleet's speed may not be known
			l.speed.add(m.Speed)
			l.due.add(m.Due)
			l.tested = now.Add(-time.Duration(m.Untested * float64(time.Second)))
		}
		l.fill, l.filledAt = l.filled(g, r.limit())+m.Filled, g.clock
		if l.used.IsZero() {
			l.used = now.Add(-time.Duration(m.IdleSeconds * float64(time.Second)))
		}
		f.mu.Unlock()
	}
}

// valid reports whether what is kept can be true.
func (m *keptReplica) valid(groups int) bool {
	return m.Address != "" && len(m.Address) <= addressMost && m.Group >= 0 && m.Group < groups && m.Speed.valid() && m.Due.valid() && validVotes(m.Votes) &&
		amount(m.Filled, m.ReachBytes, m.ToldAgo) && m.IdleSeconds >= 0 && m.IdleSeconds <= forgetAfter.Seconds() && m.Untested >= 0 && m.Untested <= forgetAfter.Seconds() && m.ToldBytes >= 0 && m.ToldBytes < unlimited
}

func (s *keptGroup) valid() bool {
	return s.Speed.valid() && s.Due.valid() && s.Fit.valid() && amount(s.Mean, s.Given) && validVotes(s.Votes)
}

func (s *speedState) valid() bool {
	return amount(s.Tokens, s.Seconds, s.Count) && (s.Count > 0) == (s.Seconds > 0) && (s.Count > 0) == (s.Tokens > 0)
}

func (s *fitState) valid() bool {
	for _, of := range append(s.Products[:], s.Sums, [3]float64{s.Count}) {
		for _, v := range of {
			if !(v >= 0 && v <= 1e30) { // squares of a million tokens in a moment
				return false
			}
		}
	}
	return true
}

func (s *speed) state() speedState { return speedState{s.tokens, s.seconds, s.count} }

func (s *speed) add(m speedState) {
	s.tokens += m.Tokens
	s.seconds += m.Seconds
	s.count += m.Count
}

func (v *vote) state() (all []binVotes) {
	for i := range voteBins {
		if v.hit[i] > 0 || v.miss[i] > 0 {
			all = append(all, binVotes{i, v.hit[i] / v.weight, v.miss[i] / v.weight})
		}
	}
	return all
}

func (v *vote) add(all []binVotes) {
	if v.weight == 0 {
		v.weight = 1
	}
	for _, b := range all {
		v.count(b.Bin, b.Hit*v.weight, b.Miss*v.weight)
	}
}

func validVotes(all []binVotes) bool {
	for _, b := range all {
		if b.Bin < 0 || b.Bin >= voteBins || !amount(b.Hit, b.Miss) {
			return false
		}
	}
	return true
}
