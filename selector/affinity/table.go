package affinity

import "github.com/prefix-affinity/caddy/prefixhash"

// A table maps the block hashes that one replica is believed to hold to the
// runs that own them. It is open addressing over pointer-free entries, split
// by the hash's leading bits into segments that grow and split one at a time
// (extendible hashing), so that no insertion rehashes more than one segment.
//
// It goes by the first 40 bits of a hash, which are as good as any of those that
// package prefixhash makes: with ten million blocks, one lookup of
// an unknown block in a hundred thousand finds another's, and a request goes
// where it need not.
//
// Entries are never removed one by one: an entry is live while its run still
// owns its byte position, and dead ones go when their segment is rebuilt.
type table struct {
	dir     []*segment // by the leading depth bits of a hash
	depth   uint8
	changes *changes // of late, while a snapshot needs them
	most    int      // blocks that it had room for last; see Index.trim
	touched uint32   // says nothing; see putAll
}

type segment struct {
	entries []entry
	filled  int   // entries in use, live or dead
	depth   uint8 // leading hash bits that its entries share
}

// entry is 12 bytes; slot 0 marks an empty one.
type entry struct {
	low  uint32 // the last 32 of the hash's first 40 bits
	high uint32 // the first 8 of them, and before them the 24 of the run's gen
	slot uint32
}

func entryOf(hash uint64, slot, gen uint32) entry {
	return entry{uint32(hash >> 24), uint32(hash>>56) | gen<<8, slot} //nolint:gosec // as the fields say
}

// of reports whether the entry is that of a hash.
func (e *entry) of(hash uint64) bool {
	return e.low == uint32(hash>>24) && uint8(e.high) == uint8(hash>>56) //nolint:gosec // as the fields say
}

// hash returns the hash, as far as it is known.
func (e *entry) hash() uint64 { return uint64(e.high&0xff)<<56 | uint64(e.low)<<24 }

func (e *entry) gen() uint32 { return e.high >> 8 }

// live reports whether the entry's run is the one that it was made for. It may have
// lost the block all the same.
func (e *entry) live(o *order) bool { return e.slot != 0 && o.runs.at(e.slot).gen() == e.gen() }

// kill makes the entry a dead one: its run has another gen.
func (e *entry) kill() { e.high -= 1 << 8 }

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
	return &table{dir: []*segment{{entries: space(smallSegment)}}}
}

// tableFor returns a table with room for n blocks, so that few of its segments
// have to grow until then, if any.
func tableFor(n int) *table {
	depth := uint8(0)
	for ; roomFor(n>>depth) > largeSegment && depth < deepest; depth++ {
	}
	size := roomFor(n>>depth + n>>depth/8) // hashes are not spread evenly
	t := &table{dir: make([]*segment, 1<<depth), depth: depth}
	for i := range t.dir {
		t.dir[i] = &segment{entries: space(size), depth: depth}
	}
	return t
}

// after returns the first hash beyond the segment that holds one; false: there
// is none.
func (t *table) after(hash uint64) (uint64, bool) {
	last := hash | ^uint64(0)>>t.segment(hash).depth
	return last + 1, last != ^uint64(0)
}

// roomFor returns the size of a segment with room for n entries: they fill three
// fifths of it, and it is rebuilt at three quarters.
func roomFor(n int) int { return max(smallSegment, (5*n+2)/3) }

// space returns so many empty entries, and as many more as the allocator would
// waste.
func space(size int) []entry {
	e := append([]entry(nil), make([]entry, size)...)
	e = e[:cap(e)]
	clear(e[size:]) // as no specification says it is
	return e
}

// home returns where in a segment the entry of a hash belongs. The product's first
// bits depend on all bits, also where all hashes of a segment begin alike.
func (s *segment) home(hash uint64) int {
	const odd = 0x9E3779B1                                                  // 2^32 over the golden ratio
	return int(uint64(uint32(hash>>24)*odd) * uint64(len(s.entries)) >> 32) //nolint:gosec // less than len
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
		if e.of(hash) {
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
	r := o.runs.at(e.slot)
	if r.gen() != e.gen() || b.End <= r.start || b.End > r.end {
		return 0
	}
	return e.slot
}

// put makes the run in slot the owner of hash.
func (t *table) put(o *order, hash uint64, slot uint32) {
	gen := o.runs.at(slot).gen()
	for {
		s := t.segment(hash)
		i := s.home(hash)
		for s.entries[i].slot != 0 && !s.entries[i].of(hash) {
			if i++; i == len(s.entries) {
				i = 0
			}
		}
		e := &s.entries[i]
		if e.slot != 0 {
			*e = entryOf(hash, slot, gen)
			return
		}
		if 4*(s.filled+1) <= 3*len(s.entries) {
			*e = entryOf(hash, slot, gen)
			s.filled++
			return
		}
		t.grow(o, s, hash)
	}
}

// ahead is how many entries are touched before they are needed.
const ahead = 16

// putAll makes the run in slot the owner of blocks. Where their entries are is in no
// order and mostly in no cache: the processor fetches them at once if nothing but their
// places is asked for, and one after the other if each has to be understood first.
func (t *table) putAll(o *order, blocks []prefixhash.Block, slot uint32) {
	for len(blocks) > 0 {
		n := min(ahead, len(blocks))
		for _, b := range blocks[:n] {
			s := t.segment(b.Hash)
			t.touched += s.entries[s.home(b.Hash)].slot
		}
		for _, b := range blocks[:n] {
			t.put(o, b.Hash, slot)
		}
		blocks = blocks[n:]
	}
}

// drop makes the entry of hash a dead one if the run in slot owns it.
func (t *table) drop(o *order, hash uint64, slot uint32) {
	if e := t.find(hash); e != nil && e.slot == slot && e.gen() == o.runs.at(slot).gen() {
		e.kill()
	}
}

// grow rebuilds a full segment without its dead entries, in as much space as the
// others need, or as two.
func (t *table) grow(o *order, s *segment, hash uint64) {
	live := 0
	for i := range s.entries {
		if s.entries[i].live(o) {
			live++
		}
	}
	if size := roomFor(live); size <= largeSegment || s.depth == deepest {
		s.rebuild(o, s, 0, size)
	} else {
		t.split(o, s, hash, live)
	}
}

func (t *table) split(o *order, s *segment, hash uint64, live int) {
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
	upper, bit := 0, uint64(1)<<63>>(s.depth-1)
	for i := range s.entries {
		if e := &s.entries[i]; e.hash()&bit != 0 && e.live(o) {
			upper++
		}
	}
	size := roomFor(max(upper, live-upper)) // hashes from elsewhere may be all alike
	s.rebuild(o, twin, bit, size)
}

// rebuild moves the live entries of s to new space: those whose hash has a bit set
// to twin, which may be s itself.
func (s *segment) rebuild(o *order, twin *segment, bit uint64, size int) {
	old := s.entries
	s.entries, s.filled = space(size), 0
	if twin != s {
		twin.entries, twin.filled = space(size), 0
	}
	for i := range old {
		e := &old[i]
		if !e.live(o) {
			continue
		}
		to := s
		if e.hash()&bit != 0 {
			to = twin
		}
		i := to.home(e.hash())
		for to.entries[i].slot != 0 {
			if i++; i == len(to.entries) {
				i = 0
			}
		}
		to.entries[i] = *e
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
			if e.live(o) {
				t.put(o, e.hash(), e.slot)
			}
		}
	}
}
