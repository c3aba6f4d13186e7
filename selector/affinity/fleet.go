package affinity

import (
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

const (
	// forgetAfter is how long a replica is remembered that is no candidate of any
	// request.
	forgetAfter = time.Hour
	// maxReplicas are remembered, if so many are not candidates at once: those
	// that come and go within an hour must not pile up. Each takes some 8 KB
	// beside its blocks.
	maxReplicas = 1024
)

// A Fleet keeps what is known of every replica of the process by its address:
// load, speed, capacity. It outlives the policies that use it.
type Fleet struct {
	replicas atomic.Pointer[map[string]*Replica]
	bound    atomic.Int64  // of the blocks of all replicas
	gone     atomic.Uint32 // counts sweeps that forgot something

	grow      sync.Mutex // serialises changes of replicas
	serial    uint32
	remembers atomic.Bool // what a snapshot kept

	_     apart
	mu    sync.Mutex   // guards the load accounts and what follows
	blind atomic.Int32 // attempts whose first output will not be seen; changes under mu
	swept time.Time
}

// NewFleet returns a fleet that knows nobody.
func NewFleet() *Fleet {
	f := &Fleet{}
	f.replicas.Store(&map[string]*Replica{})
	return f
}

// Replica returns the replica at an address. Callers ask again for every
// request: a replica that was no candidate for an hour is forgotten.
func (f *Fleet) Replica(addr string) *Replica {
	if r := (*f.replicas.Load())[addr]; r != nil {
		return r
	}
	f.grow.Lock()
	defer f.grow.Unlock()
	old := *f.replicas.Load()
	if r := old[addr]; r != nil {
		return r
	}
	f.serial++
	r := &Replica{addr: addr, place: mixString(addr), serial: f.serial, fleet: f, fits: voteBins, capacity: unlimited}
	next := make(map[string]*Replica, len(old)+1)
	maps.Copy(next, old)
	next[addr] = r
	f.replicas.Store(&next)
	return r
}

// Find returns the replica at an address, or nil if it is not known.
func (f *Fleet) Find(addr string) *Replica { return (*f.replicas.Load())[addr] }

// limit is each replica's share of the bound, in blocks.
func (f *Fleet) limit() int { return int(f.bound.Load()) / max(len(*f.replicas.Load()), 1) }

// Lower lowers the bound of what all indexes of the fleet hold together to
// maxBlocks blocks, if it is more, and reports whether it was: the indexes should
// be trimmed then.
func (f *Fleet) Lower(maxBlocks int) bool {
	for {
		old := f.bound.Load()
		if int64(maxBlocks) >= old {
			return false
		}
		if f.bound.CompareAndSwap(old, int64(maxBlocks)) {
			return true
		}
	}
}

// Snapshot returns what is known of all replicas, by address.
func (f *Fleet) Snapshot(now time.Time) []ReplicaState {
	all := *f.replicas.Load()
	states := make([]ReplicaState, 0, len(all))
	for _, addr := range slices.Sorted(maps.Keys(all)) {
		states = append(states, all[addr].Snapshot(now))
	}
	return states
}

// sweep forgets the replicas that have not been candidates for long, and, where
// there are too many, those that have not been for longest. f.mu is held.
func (f *Fleet) sweep(now time.Time) {
	crowded := len(*f.replicas.Load()) > maxReplicas
	if !crowded && now.Sub(f.swept) < forgetAfter/6 {
		return
	}
	f.swept = now
	f.grow.Lock()
	defer f.grow.Unlock()
	old := *f.replicas.Load()
	unused := make([]*Replica, 0, len(old))
	for _, r := range old {
		if r.load.used.IsZero() { // made for a request that is still on its way here
			r.load.used = now
		}
		if r.load.inFlight == 0 && r.load.used.Before(now.Add(-usedWithin)) {
			unused = append(unused, r)
		}
	}
	slices.SortFunc(unused, func(a, b *Replica) int { return a.load.used.Compare(b.load.used) })
	next := maps.Clone(old)
	for _, r := range unused {
		// A quarter more than must go, so that the next one comes in peace.
		if now.Sub(r.load.used) < forgetAfter && (!crowded || len(next) <= maxReplicas*3/4) {
			break
		}
		delete(next, r.addr)
		r.gone.Store(true)
	}
	if len(next) < len(old) {
		f.replicas.Store(&next)
		f.gone.Add(1)
	}
}

// advance lets time pass for the requests whose first output can't be seen.
func (f *Fleet) advance(now time.Time, cands []Candidate) {
	var buf [8]*Attempt
	passed := buf[:0]
	f.mu.Lock()
	for i := range cands {
		r := cands[i].Replica
		if g := r.group.Load(); g != nil {
			passed = r.load.advance(g, now, passed)
		}
	}
	f.mu.Unlock()
	for len(passed) > 0 { // those of one replica follow each other
		r, n := passed[0].replica, 1
		for n < len(passed) && passed[n].replica == r {
			n++
		}
		r.mu.Lock()
		r.run(passed[:n])
		r.mu.Unlock()
		passed = passed[n:]
	}
}

// Forgotten counts how often replicas were forgotten: who keeps some must ask for
// them again when it has changed.
func (f *Fleet) Forgotten() uint32 { return f.gone.Load() }

// A group is the replicas that have been candidates together: they serve the
// same models, so what one teaches says something of the others.
type group struct {
	speed speed   // of all of them; guarded by Fleet.mu
	fit   fit     // of answers that came as a whole; Fleet.mu
	due   speed   // of such answers: the seconds that they should have taken, and took; Fleet.mu
	clock float64 // uncached tokens given to a replica, on average; Fleet.mu
	mean  float64 // uncached tokens of a request lately; Fleet.mu
	given float64 // requests that mean is over; Fleet.mu

	mu   sync.Mutex
	vote vote
}

// join puts the candidates into one group and notes that they are in use. f.mu
// is held.
func (f *Fleet) join(cands []Candidate, now time.Time) *group {
	var g *group
	fresh := 0
	unused := now.Add(-usedWithin)
	for i := range cands {
		if l := &cands[i].Replica.load; l.used.Before(unused) {
			l.used = now
		}
		switch h := cands[i].Replica.group.Load(); {
		case h == nil:
			fresh++
		case g == nil:
			g = h
		}
	}
	if fresh == 0 {
		return g
	}
	if g == nil {
		g = &group{}
	}
	fill := 0.0
	for i := range cands {
		if r := cands[i].Replica; r.group.Load() != nil {
			fill += r.load.filled(r.group.Load(), r.limit())
		}
	}
	for i := range cands {
		if r := cands[i].Replica; r.group.CompareAndSwap(nil, g) && fresh < len(cands) {
			// A newcomer would get everything that is cold until it has caught up.
			r.load.fill, r.load.filledAt = fill/float64(len(cands)-fresh), g.clock
		}
	}
	return g
}

// mixString and mix are for placing only: they need to spread, not to withstand.
func mixString(s string) uint64 {
	h := uint64(14695981039346656037) // FNV-1a
	for i := range len(s) {
		h = (h ^ uint64(s[i])) * 1099511628211
	}
	return mix(h)
}

func mix(x uint64) uint64 { // splitmix64
	x += 0x9e3779b97f4a7c15
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}
