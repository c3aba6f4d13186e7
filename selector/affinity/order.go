package affinity

// An order is one replica's requests in the order of their last use, each with
// the run of prompt bytes that it was the last to use. It is the picture of the
// replica's LRU prefix cache: the distance of a block is the number of distinct
// prompt bytes that were used after it, and the cache holds the block while
// that stays below its capacity, whatever the hit ratio.
//
// What a request owns is one piece, because whoever shares part of its prompt
// shares the start of it and takes that away. Moving a request is O(log n) and
// touches none of its blocks. Nothing here is a pointer, so the collector has
// nothing to walk.
//
// Not safe for concurrent use.
type order struct {
	runs runs     // by slot; slot 0 is never used
	free []uint32 // slots to use again
	at   []place  // by position, oldest first
	tree []weight // Fenwick tree over the chunks of positions
	next uint32   // first position not yet given out
	head uint32   // no position before it is taken

	packed  int // counts the times that positions were given anew
	cleared int // counts the times that everything was forgotten

	used    int64 // bytes of waiting and done runs
	wait    int64 // bytes of waiting runs
	running int64 // bytes of running runs
	blocks  int   // of all runs
	placed  int   // runs that have a position
}

// phase is where in its life a request is, as far as its replica's cache goes.
type phase uint8

const (
	free    phase = iota // the slot is not in use
	waiting              // sent, no output yet
	running              // first output seen: its prompt is pinned
	done                 // ended: its prompt can be evicted
)

// A run is what one request was the last to use: the bytes (start, end] of its
// prompt.
type run struct {
	life       uint32 // the phase, and before it in 24 bits the gen: which use of the slot this is
	start, end uint32
	sure       uint32 // bytes of the prompt that a 2xx has confirmed
	blocks     uint32
	pos        uint32 // position in the order, unless running
	nth        uint32 // which of the replica's requests it is
}

func (r *run) phase() phase { return phase(r.life) }

func (r *run) gen() uint32 { return r.life >> 8 }

func (r *run) become(p phase) { r.life = r.life&^0xff | uint32(p) }

// runs are kept in pieces, so that one more neither moves the others nor makes room
// for as many again.
type runs struct {
	pieces []*[runsPiece]run
	size   int
}

const runsPiece = 512 // 14 KiB, what the allocator hands out without a rest

func (r *runs) at(slot uint32) *run { return &r.pieces[slot/runsPiece][slot%runsPiece] }

// grow makes room for as many runs.
func (r *runs) grow(size int) {
	for r.size = max(r.size, size); len(r.pieces)*runsPiece < size; {
		r.pieces = append(r.pieces, new([runsPiece]run))
	}
}

// less returns how many blocks a run has without n of them. A snapshot may have
// brought some of them only.
func (r *run) less(n int) uint32 { return r.blocks - min(r.blocks, uint32(n)) }

func (r *run) size() int64 { return int64(r.end) - int64(r.start) }

// A place is a position in the order. Its run's size is there too, so that a sum
// over neighbours is one over a cache line.
type place struct {
	taken uint32 // the slot of its run; 0: nobody's; plus waits
	bytes uint32
}

const waits = 1 << 31 // the run is a waiting one

func (p place) slot() uint32 { return p.taken &^ waits }

func (p place) weight() weight {
	if p.taken&waits != 0 {
		return weight{int64(p.bytes), int64(p.bytes)}
	}
	return weight{int64(p.bytes), 0}
}

// weight is what some places weigh, in bytes: all, and those that wait.
type weight struct{ used, wait int64 }

func (w *weight) add(more weight) {
	w.used += more.used
	w.wait += more.wait
}

// chunk is for how many places the tree has a node: it sums up chunks before one
// and the rest is summed place by place. A node for each place would take as much
// memory as the run itself.
const chunk = 16

// add adds to what the places of a chunk weigh.
func (o *order) add(pos uint32, w weight) {
	o.used += w.used
	o.wait += w.wait
	for i := pos/chunk + 1; i < uint32(len(o.tree)); i += i & -i {
		o.tree[i].add(w)
	}
}

// upTo sums the positions up to and including pos. What is asked for most often is
// recent, and so nearer to all there are.
func (o *order) upTo(pos uint32) (w weight) {
	if o.next-pos <= 2*chunk {
		w = weight{o.used, o.wait}
		for _, p := range o.at[pos+1 : o.next] {
			w.add(weight{-p.weight().used, -p.weight().wait})
		}
		return w
	}
	before := pos / chunk
	for i := before; i > 0; i -= i & -i {
		w.add(o.tree[i])
	}
	for _, p := range o.at[before*chunk : pos+1] {
		w.add(p.weight())
	}
	return w
}

// count adds bytes to what run r weighs where it stands.
func (o *order) count(r *run, bytes int64) {
	switch r.phase() {
	case waiting:
		o.at[r.pos].bytes += uint32(bytes)
		o.add(r.pos, weight{bytes, bytes})
	case running:
		o.running += bytes
	case done:
		o.at[r.pos].bytes += uint32(bytes)
		o.add(r.pos, weight{bytes, 0})
	case free:
	}
}

// take makes an empty run, without a place in the order yet.
func (o *order) take() uint32 {
	if n := len(o.free); n > 0 {
		slot := o.free[n-1]
		o.free = o.free[:n-1]
		return slot
	}
	slot := max(o.runs.size, 1)
	o.runs.grow(slot + 1)
	return uint32(slot) //nolint:gosec // runs have slots of 32 bits
}

// enter moves a run to the newest place of another phase.
func (o *order) enter(slot uint32, to phase) {
	o.leave(slot)
	r := o.runs.at(slot)
	r.become(to)
	if to == running {
		o.running += r.size()
		return
	}
	if int(o.next) >= len(o.at) {
		o.compact()
	}
	r.pos = o.next
	o.next++
	o.at[r.pos] = place{taken: slot}
	if to == waiting {
		o.at[r.pos].taken |= waits
	}
	o.placed++
	o.count(r, r.size())
}

// leave takes a run out of the order.
func (o *order) leave(slot uint32) {
	r := o.runs.at(slot)
	o.count(r, -r.size())
	if r.phase() == waiting || r.phase() == done {
		o.at[r.pos] = place{}
		o.placed--
	}
	r.become(free)
}

// release forgets a run; what refers to it is void from now on.
func (o *order) release(slot uint32) {
	o.leave(slot)
	r := o.runs.at(slot)
	o.blocks -= int(r.blocks)
	*r = run{life: r.life&^0xff + 1<<8}
	o.free = append(o.free, slot)
}

// cut sets the piece of its prompt that a run owns.
func (o *order) cut(slot, start, end, blocks uint32) {
	r := o.runs.at(slot)
	before := r.size()
	o.blocks += int(blocks) - int(r.blocks)
	r.start, r.end, r.blocks = start, end, blocks
	o.count(r, r.size()-before)
}

// compact gives the runs new positions without gaps, and room for a third as many
// again.
func (o *order) compact() { o.repack(o.placed/3 + 1) }

// repack gives the runs new positions without gaps, and room for more.
func (o *order) repack(more int) {
	size := max(64, o.placed+more+1)
	at := make([]place, size)
	tree := make([]weight, (size-1)/chunk+2)
	next := uint32(1)
	for _, p := range o.at {
		if p.taken == 0 {
			continue
		}
		o.runs.at(p.slot()).pos = next
		at[next] = p
		tree[next/chunk+1].add(p.weight())
		next++
	}
	for i := 1; i < len(tree); i++ {
		if up := i + i&-i; up < len(tree) {
			tree[up].add(tree[i])
		}
	}
	o.at, o.tree, o.next, o.head = at, tree, next, 1
	o.packed++
}

// reserve returns n slots for the runs of an older order, in room that is given as
// far as it goes.
func (o *order) reserve(n int, room []*[runsPiece]run) (slots []uint32) {
	slots = make([]uint32, 0, n)
	spare := max(len(o.free)-n, 0)
	slots = append(slots, o.free[spare:]...)
	o.free = o.free[:spare]
	first, more := max(o.runs.size, 1), n-len(slots) // slot 0 is never used
	needed := (first+more-1)/runsPiece + 1 - len(o.runs.pieces)
	o.runs.pieces = append(o.runs.pieces, room[:min(max(needed, 0), len(room))]...)
	o.runs.grow(first + more)
	for i := range more {
		slots = append(slots, uint32(first+i)) //nolint:gosec // runs have slots of 32 bits
	}
	return slots
}

// precede makes the runs of an older order, in slots that were reserved for it,
// the ones that were used before all of o's, if there is room for both in the
// older one, which also knows as many slots.
func (o *order) precede(older *order, reserved []bool) bool {
	if int(older.next)+o.placed > len(older.at) || older.runs.size < o.runs.size {
		return false
	}
	for slot := range uint32(o.runs.size) { //nolint:gosec // runs have slots of 32 bits
		switch {
		case !reserved[slot]:
			*older.runs.at(slot) = *o.runs.at(slot)
		case older.runs.at(slot).phase() == free:
			o.free = append(o.free, slot)
		}
	}
	older.runs.size = o.runs.size
	o.runs = older.runs
	for _, p := range o.at[o.head:o.next] {
		if p.taken == 0 {
			continue
		}
		o.runs.at(p.slot()).pos = older.next
		older.at[older.next] = p
		older.add(older.next, p.weight())
		older.next++
	}
	o.at, o.tree, o.next, o.head = older.at, older.tree, older.next, older.head
	o.used, o.wait = older.used, older.wait
	o.blocks += older.blocks
	o.placed += older.placed
	o.packed++
	return true
}

// base returns the distance at which a run's first byte will stand when a request
// that comes now is let in: after all that wait, which push out what they don't
// share with it, whenever they were sent.
func (o *order) base(r *run) int64 {
	switch r.phase() {
	case waiting:
		return o.wait - o.upTo(r.pos).wait
	case done:
		w := o.upTo(r.pos)
		return o.running + o.used - w.used + w.wait
	case free, running: // pinned: it is at no distance
	}
	return 0
}

// oldest returns the done run that was used least recently and that keep does
// not hold, or 0.
func (o *order) oldest(keep []span) uint32 {
	for pos := o.head; pos < o.next; pos++ {
		slot := o.at[pos].slot()
		if slot == 0 {
			if pos == o.head {
				o.head++
			}
			continue
		}
		if o.runs.at(slot).phase() == done && !holds(keep, slot) {
			return slot
		}
	}
	return 0
}

func holds(spans []span, slot uint32) bool {
	for i := range spans {
		if spans[i].slot == slot {
			return true
		}
	}
	return false
}

// shrink forgets what was used least recently until so many blocks are left: in
// whole runs, so that what stays is still a prefix, and nothing of what keep holds.
func (o *order) shrink(blocks int, keep []span) {
	for o.blocks > blocks {
		slot := o.oldest(keep)
		if slot == 0 {
			return
		}
		o.release(slot)
	}
}

// forget drops what a cache of that capacity has lost long ago, and what it would
// have if it were much larger than believed: what it still finds of that speaks for it. What waits does
// not count: a prompt that the replica refuses, because it is too long say, has
// taken nothing there.
func (o *order) forget(capacity int64) {
	if capacity < unlimited {
		o.forgetBeyond(remembered(capacity))
	}
}

// forgetLeast is the distance, 2M tokens, within which nothing is forgotten.
const forgetLeast int64 = 2_000_000 * BytesPerToken

// remembered is the distance within which prompts are remembered.
func remembered(capacity int64) int64 { return max(capacity+capacity/2, forgetLeast) }

// forgetBeyond drops what stands at more than a distance.
func (o *order) forgetBeyond(limit int64) {
	for {
		slot := o.oldest(nil)
		if slot == 0 {
			return
		}
		if o.base(o.runs.at(slot))-o.wait <= limit {
			return
		}
		o.release(slot)
	}
}

// clear releases the runs of the requests before the nth.
func (o *order) clear(nth uint32) {
	o.cleared++
	for slot := range uint32(o.runs.size) { //nolint:gosec // runs have slots of 32 bits
		if r := o.runs.at(slot); r.phase() != free && r.nth < nth {
			o.release(slot)
		}
	}
}
