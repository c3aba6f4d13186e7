package affinity

import "github.com/prefix-affinity/caddy/prefixhash"

// A table maps the block hashes that one replica is believed to hold to the
// runs that own them. It is open addressing over pointer-free entries, split
// by the hash's leading bits into segments that grow and split one at a time
// (extendible hashing), so that no insertion rehashes more than one segment.
//
// Entries are never removed one by one: an entry is live while its run still
// owns its byte position, and dead ones go when their segment is rebuilt.
type table struct {
	dir     []*segment // by the leading depth bits of a hash
	depth   uint8
	changes *changes // of late, while a snapshot needs them
	most    int      // blocks that it had room for last; see Index.trim
}

type segment struct {
	entries []entry // see larger
	filled  int     // entries in use, live or dead
	depth   uint8   // leading hash bits that its entries share
}

// entry is 16 bytes; slot 0 marks an empty one.
type entry struct {
	hash uint64
	slot uint32
	gen  uint32
}

const (
	// A segment starts small, because most replicas of most fleets hold little
	// when they are new, and splits at a size that is rebuilt within some tens
	// of microseconds.
	smallSegment = 64
	largeSegment = 6144
	// deepest bounds the directory at 16M segments, whatever the hashes are.
	deepest = 24
)

func newTable() *table {
	return &table{dir: []*segment{{entries: make([]entry, smallSegment)}}}
}

// tableFor returns a table with room for n blocks, so that few of its segments
// have to grow until then, if any.
func tableFor(n int) *table {
	size, depth := smallSegment, uint8(0)
	for ; 3*size < 5*n && size < largeSegment; size = larger(size) { // at most 60 % full; they grow at 75 %
	}
	for ; 3*size<<depth < 5*n && depth < deepest; depth++ {
	}
	t := &table{dir: make([]*segment, 1<<depth), depth: depth}
	for i := range t.dir {
		t.dir[i] = &segment{entries: make([]entry, size), depth: depth}
	}
	return t
}

// after returns the first hash beyond the segment that holds one; false: there
// is none.
func (t *table) after(hash uint64) (uint64, bool) {
	last := hash | ^uint64(0)>>t.segment(hash).depth
	return last + 1, last != ^uint64(0)
}

// larger returns the next size of a segment. Sizes are powers of two and what is
// half-way between them: with powers of two alone a quarter more room is empty.
func larger(size int) int {
	if size&(size-1) == 0 {
		return size + size/2
	}
	return size / 3 * 4
}

// home returns where in a segment a hash belongs, by its last bits.
func (s *segment) home(hash uint64) int {
	return int(uint64(uint32(hash)) * uint64(len(s.entries)) >> 32)
}

func (t *table) segment(hash uint64) *segment { return t.dir[hash>>(64-t.depth)] }

// find returns the entry of hash, live or dead, or nil.
func (t *table) find(hash uint64) *entry {
	s := t.segment(hash)
	for i := s.home(hash); ; i++ {
		if i == len(s.entries) {
			i = 0
		}
		e := &s.entries[i]
		if e.slot == 0 {
			return nil
		}
		if e.hash == hash {
			return e
		}
	}
}

// owner returns the slot of the run that owns a block, or 0.
func (t *table) owner(o *order, b prefixhash.Block) uint32 {
	e := t.find(b.Hash)
	if e == nil {
		return 0
	}
	r := &o.runs[e.slot]
	if r.gen != e.gen || b.End <= r.start || b.End > r.end {
		return 0
	}
	return e.slot
}

// put makes the run in slot the owner of hash.
func (t *table) put(o *order, hash uint64, slot uint32) {
	gen := o.runs[slot].gen
	for {
		s := t.segment(hash)
		i := s.home(hash)
		for s.entries[i].slot != 0 && s.entries[i].hash != hash {
			if i++; i == len(s.entries) {
				i = 0
			}
		}
		e := &s.entries[i]
		if e.slot != 0 {
			e.slot, e.gen = slot, gen
			return
		}
		if 4*(s.filled+1) <= 3*len(s.entries) {
			*e = entry{hash, slot, gen}
			s.filled++
			return
		}
		t.grow(o, s, hash)
	}
}

// drop makes the entry of hash a dead one if the run in slot owns it.
func (t *table) drop(o *order, hash uint64, slot uint32) {
	if e := t.find(hash); e != nil && e.slot == slot && e.gen == o.runs[slot].gen {
		e.gen--
	}
}

// grow rebuilds a full segment: without its dead entries where these are many,
// else at a larger size, else as two.
func (t *table) grow(o *order, s *segment, hash uint64) {
	live := 0
	for i := range s.entries {
		if e := &s.entries[i]; e.slot != 0 && o.runs[e.slot].gen == e.gen {
			live++
		}
	}
	switch {
	case 2*live <= len(s.entries):
		t.rebuild(o, s, s, len(s.entries))
	case len(s.entries) < largeSegment || s.depth == deepest:
		t.rebuild(o, s, s, larger(len(s.entries)))
	default:
		t.split(o, s, hash)
	}
}

func (t *table) split(o *order, s *segment, hash uint64) {
	if s.depth == t.depth {
		dir := make([]*segment, 2*len(t.dir))
		for i, s := range t.dir {
			dir[2*i], dir[2*i+1] = s, s
		}
		t.dir, t.depth = dir, t.depth+1
	}
	s.depth++
	twin := &segment{depth: s.depth}
	// The directory entries of s are neighbours; the upper half becomes the twin's.
	n := 1 << (t.depth - s.depth)
	first := int(hash>>(64-t.depth)) &^ (2*n - 1)
	for i := first + n; i < first+2*n; i++ {
		t.dir[i] = twin
	}
	t.rebuild(o, s, twin, len(s.entries)*2/3)
}

// rebuild moves the live entries of s to new space: those whose next hash bit
// is set to twin, which may be s itself.
func (t *table) rebuild(o *order, s, twin *segment, size int) {
	old := s.entries
	s.entries, s.filled = make([]entry, size), 0
	if twin != s {
		twin.entries, twin.filled = make([]entry, size), 0
	}
	bit := uint64(1) << 63 >> (s.depth - 1)
	for _, e := range old {
		if e.slot == 0 || o.runs[e.slot].gen != e.gen {
			continue
		}
		to := s
		if twin != s && e.hash&bit != 0 {
			to = twin
		}
		i := to.home(e.hash)
		for to.entries[i].slot != 0 {
			if i++; i == size {
				i = 0
			}
		}
		to.entries[i] = e
		to.filled++
	}
}

// rebuildAll moves the live entries to a table of the size that they need.
func (t *table) rebuildAll(o *order) {
	old := t.dir
	fresh := newTable()
	t.dir, t.depth = fresh.dir, fresh.depth
	var last *segment
	for _, s := range old { // neighbours may be the same
		if s == last {
			continue
		}
		last = s
		for _, e := range s.entries {
			if e.slot != 0 && o.runs[e.slot].gen == e.gen {
				t.put(o, e.hash, e.slot)
			}
		}
	}
}
