package affinity

import (
	"cmp"
	"runtime"
	"slices"

	"github.com/prefix-affinity/caddy/prefixhash"
)

// How much is done at a time under a replica's lock: some ten microseconds' worth.
const (
	runsAtOnce     = 2 * runsPiece // copied
	chainsAtOnce   = 4             // copied or looked up
	sessionsAtOnce = 64            // copied
)

// A capture is what one table holds that a 2xx has confirmed, copied piece by
// piece while requests go on. What they change meanwhile is noted:
// their prompts are taken whole, and what is left of the copy is as it was.
type capture struct {
	entries []entry
	runs    []run    // by slot
	blocks  []uint32 // entries of each slot
	order   []uint32 // slots of the runs that the table's entries belong to, newest first
	number  []uint32 // place in order, by slot
	chains  [][]prefixhash.Block
}

// take copies what a replica's table holds. It reports false where too much
// changed meanwhile.
func (c *capture) take(r *Replica, t *table) bool {
	j := &changes{}
	r.mu.Lock()
	t.changes = j
	r.mu.Unlock()
	// In this order: what moved between two pieces then has its entries, if any,
	// at a run that does not claim them any more.
	c.inFlight(r, t, j)
	c.copyEntries(r, t)
	c.copyRuns(r)
	c.finish(r, t, j)
	if j.full {
		return false
	}
	c.sort(j)
	return true
}

// inFlight notes the attempts that nobody has confirmed yet. Downwards, because
// whichever ends leaves its place to the last one.
func (c *capture) inFlight(r *Replica, t *table, j *changes) {
	r.mu.Lock()
	for at := len(r.provisional); at > 0; {
		at = min(at, len(r.provisional))
		for range min(at, chainsAtOnce) {
			at--
			if a := r.provisional[at]; a.table == t {
				j.sent(runID{a.slot, a.gen}, a.chain)
			}
		}
		pause(r)
	}
	r.mu.Unlock()
}

// pause lets others have the replica's lock. A woken waiter is next on this very
// processor, and would lose the lock again to us if we went on at once.
func pause(r *Replica) {
	r.mu.Unlock()
	runtime.Gosched()
	r.mu.Lock()
}

func (c *capture) copyEntries(r *Replica, t *table) {
	c.entries = c.entries[:0]
	for hash, more := uint64(0), true; more; {
		n := len(c.entries)
		c.entries = slices.Grow(c.entries, largeSegment)
		r.mu.Lock()
		from := t.segment(hash).entries
		for len(from) > cap(c.entries)-n {
			size := len(from)
			r.mu.Unlock()
			c.entries = slices.Grow(c.entries, size)
			r.mu.Lock()
			from = t.segment(hash).entries
		}
		c.entries = append(c.entries, from...)
		hash, more = t.after(hash)
		r.mu.Unlock()
		runtime.Gosched()
		used := slices.DeleteFunc(c.entries[n:], func(e entry) bool { return e.slot == 0 })
		c.entries = c.entries[:n+len(used)]
	}
}

// copyRuns copies the runs by slot, again if their positions changed meanwhile.
func (c *capture) copyRuns(r *Replica) {
	for try := range 3 {
		c.runs = c.runs[:0]
		r.mu.Lock()
		size, packed := r.order.runs.size, r.order.packed
		r.mu.Unlock()
		c.runs = slices.Grow(c.runs, size)
		for n := 0; n < size; n += runsAtOnce {
			r.mu.Lock()
			for at := n; at < min(n+runsAtOnce, size); at += runsPiece {
				c.runs = append(c.runs, r.order.runs.pieces[at/runsPiece][:min(runsPiece, size-at)]...)
			}
			again := r.order.packed != packed && try < 2 // then in nearly the right order
			r.mu.Unlock()
			runtime.Gosched()
			if again {
				break
			}
		}
		if len(c.runs) == size {
			return
		}
	}
}

// finish ends the notes and takes the confirmed part of its prompts.
func (c *capture) finish(r *Replica, t *table, j *changes) {
	c.chains = c.chains[:0]
	r.mu.Lock()
	for n := 0; n < len(j.list); {
		for range min(chainsAtOnce, len(j.list)-n) {
			if chain := r.confirmed(t, j.list[n].chain); len(chain) > 0 {
				c.chains = append(c.chains, chain)
			}
			n++
		}
		if n < len(j.list) {
			pause(r)
		}
	}
	t.changes = nil
	r.mu.Unlock()
}

// confirmed returns the leading blocks of a chain that are known to be there.
// r.mu is held.
func (r *Replica) confirmed(t *table, chain []prefixhash.Block) []prefixhash.Block {
	for len(chain) > 0 {
		last := len(chain) - 1
		slot := t.owner(&r.order, chain[last])
		switch {
		case slot == 0:
			chain = chain[:last]
		case r.order.runs.at(slot).sure < chain[last].End:
			chain = chain[:shorter(chain, r.order.runs.at(slot).sure)]
		default:
			return chain
		}
	}
	return nil
}

// sort drops what is not alive, or is noted, and puts the runs in order.
func (c *capture) sort(j *changes) {
	c.blocks = zeroed(c.blocks, len(c.runs))
	c.entries = slices.DeleteFunc(c.entries, func(e entry) bool {
		if int(e.slot) >= len(c.runs) || c.runs[e.slot].gen() != e.gen() || !c.runs[e.slot].kept() {
			return true
		}
		c.blocks[e.slot]++
		return false
	})
	for id := range j.runs {
		if int(id.slot) < len(c.runs) && c.runs[id.slot].gen() == id.gen {
			c.blocks[id.slot] = 0
		}
	}
	c.order = c.order[:0]
	for slot, n := range c.blocks {
		if n > 0 {
			c.order = append(c.order, uint32(slot)) //nolint:gosec // slots have 32 bits
		}
	}
	slices.SortFunc(c.order, func(a, b uint32) int {
		return cmp.Compare(c.runs[b].recency(), c.runs[a].recency())
	})
	c.number = zeroed(c.number, len(c.runs))
	for i, slot := range c.order {
		c.number[slot] = uint32(i) //nolint:gosec // fewer than slots
	}
	c.entries = slices.DeleteFunc(c.entries, func(e entry) bool { return c.blocks[e.slot] == 0 })
}

// kept reports whether a run has something that stays.
func (r *run) kept() bool { return r.phase() != free && r.start < r.end && r.sure >= r.end }

// recency orders runs by when they were used last.
func (r *run) recency() uint64 {
	if r.phase() == running {
		return 1 << 32
	}
	return uint64(r.pos)
}

func zeroed(buf []uint32, n int) []uint32 {
	buf = slices.Grow(buf[:0], n)[:n]
	clear(buf)
	return buf
}
