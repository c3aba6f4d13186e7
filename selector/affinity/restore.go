package affinity

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"runtime"
	"slices"
	"time"

	"github.com/prefix-affinity/caddy/prefixhash"
)

// Restored tells of a snapshot that was read.
type Restored struct {
	Written time.Time
	Notes   json.RawMessage // what WriteSnapshot was given
	Blocks  int             // that the index took over
}

// ErrForeign: the snapshot says nothing of this index.
var ErrForeign = errors.New("snapshot was made with another seed, block_size or version of the prompt key")

// Expect says that a Restore follows, and no WriteSnapshot before it: what
// requests bring from now on is noted.
func (x *Index) Expect() { x.watch(true) }

// Restore takes in a snapshot: what it knows of the index that is named key, and
// what it knows of the fleet, unless another index of it was restored before.
// Requests may come meanwhile, after Expect. They count as more recent than
// everything that is restored, and what they brought stays. Where from is not a snapshot, is
// truncated, corrupt or too old, an error is returned and nothing changed; with
// ErrForeign only the fleet did.
func (x *Index) Restore(from io.ReadSeeker, key string, now time.Time) (Restored, error) {
	x.snapshot.Lock()
	defer x.snapshot.Unlock()
	x.watch(true)
	defer x.watch(false)

	var s Restored
	r, err := newSnapshotReader(from)
	if err != nil {
		return s, err
	}
	l := loader{reader: r, index: x}
	var head snapshotHead
	if err := l.expect(chunkHead, &head); err != nil {
		return s, err
	}
	s.Written, s.Notes = head.Written, head.Notes
	if age := now.Sub(head.Written); age > SnapshotAge || age < -SnapshotAge {
		return s, fmt.Errorf("snapshot is of %s: the engines have forgotten", head.Written.Format(time.RFC3339))
	}
	if err := l.memories(now); err != nil {
		return s, err
	}
	for {
		var index indexHead
		switch err := l.expect(chunkIndex, &index); {
		case err == io.EOF:
			return s, ErrForeign
		case err != nil:
			return s, err
		case index.Key == key:
			err = l.load(index)
			s.Blocks = l.blocks
			return s, err
		}
		if err := l.skip(); err != nil {
			return s, err
		}
	}
}

// watch begins or ends to note what changes in all tables, also of those to come.
func (x *Index) watch(on bool) {
	x.grow.Lock()
	defer x.grow.Unlock()
	if x.restoring == on {
		return
	}
	x.restoring = on
	for r, t := range *x.tables.Load() {
		r.mu.Lock()
		t.changes = nil
		if on {
			// Nobody knows what came before.
			t.changes = &changes{full: t.depth > 0 || t.dir[0].filled > 0, cleared: r.order.cleared}
		}
		r.mu.Unlock()
	}
}

// loader reads a snapshot for one index.
type loader struct {
	reader   *snapshotReader
	index    *Index
	replicas []*Replica // by number
	kind     byte       // of the chunk that was read too far; 0: none
	chunk    []byte
	blocks   int
}

func (l *loader) next() (kind byte, p []byte, err error) {
	if kind, l.kind = l.kind, 0; kind != 0 {
		return kind, l.chunk, nil
	}
	return l.reader.next()
}

// back lets next return a chunk again.
func (l *loader) back(kind byte, p []byte) { l.kind, l.chunk = kind, p }

func (l *loader) expect(wanted byte, v any) error {
	kind, p, err := l.next()
	if err != nil {
		return err
	}
	if kind != wanted {
		return errCorrupt
	}
	return decode(p, v)
}

// memories reads what there is before the first index.
func (l *loader) memories(now time.Time) error {
	var groups []keptGroup
	var all []keptReplica
	for {
		kind, p, err := l.next()
		switch {
		case err == io.EOF, kind == chunkIndex:
			l.index.fleet.remember(groups, all, now)
			for _, m := range all {
				l.replicas = append(l.replicas, l.index.fleet.Replica(m.Address))
			}
			if err == nil {
				l.back(kind, p)
			}
			return nil
		case err != nil:
			return err
		case kind == chunkGroup:
			var s keptGroup
			if err := decode(p, &s); err != nil {
				return err
			}
			if !s.valid() || len(groups) == memoriesMost {
				return errCorrupt
			}
			groups = append(groups, s)
		case kind == chunkReplica:
			var m keptReplica
			if err := decode(p, &m); err != nil {
				return err
			}
			if !m.valid(len(groups)) || len(all) == memoriesMost || m.Speed.Count > 0 && groups[m.Group].Speed.Count == 0 {
				return errCorrupt
			}
			all = append(all, m)
		default:
			return errCorrupt
		}
	}
}

// skip passes over an index.
func (l *loader) skip() error {
	for {
		kind, p, err := l.next()
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
		if kind == chunkIndex {
			l.back(kind, p)
			return nil
		}
	}
}

// load reads an index.
func (l *loader) load(head indexHead) error {
	for _, n := range head.Tables { // all, because they share the bound
		if n < 0 || n >= len(l.replicas) {
			return errCorrupt
		}
		l.index.table(l.replicas[n])
	}
	sessions := make(map[uint64]uint32)
	for {
		kind, p, err := l.next()
		if kind != chunkSessions && err == nil || err == io.EOF { // they come first
			l.index.sessions.restore(sessions)
			sessions = nil
		}
		switch {
		case err == io.EOF, kind == chunkIndex:
			return nil
		case err != nil:
			return err
		case kind == chunkSessions && sessions != nil:
			err = records(p, func(id uint64, n uint32) error {
				if int(n) >= len(l.replicas) {
					return errCorrupt
				}
				if len(sessions) < 2*sessionsKept {
					sessions[id] = l.replicas[n].serial
				}
				return nil
			})
		case kind == chunkTable:
			if len(p) != 4 || binary.LittleEndian.Uint32(p) >= uint32(len(l.replicas)) { //nolint:gosec // at most memoriesMost
				return errCorrupt
			}
			err = l.table(l.replicas[binary.LittleEndian.Uint32(p)])
		default:
			return errCorrupt
		}
		if err != nil {
			return err
		}
	}
}

// table reads what one replica held into a table and an order of its own, where
// the prompts of the last moment can be entered as they were sent, and then puts
// it before what requests have brought.
func (l *loader) table(r *Replica) error {
	m := merger{replica: r, live: l.index.table(r), limit: l.index.fleet.limit()}
	if !m.wanted() {
		return errCorrupt
	}
	defer m.giveBack()
	var runs []run
	var slots []uint32 // by number
	total := 0
	place := func() { // oldest first
		if slots != nil {
			return
		}
		m.table = tableFor(min(total, m.limit))
		m.reserve(len(runs))
		o := &m.order
		slots = make([]uint32, len(runs))
		for i, run := range slices.Backward(runs) {
			slots[i] = o.take()
			o.cut(slots[i], run.start, run.end, 0)
			o.runs.at(slots[i]).sure = run.end
			o.enter(slots[i], done)
		}
	}
	var chain []prefixhash.Block
	for {
		kind, p, err := l.next()
		switch {
		case err == io.EOF:
			place()
			l.blocks += m.merge()
			return nil
		case err != nil:
			return err
		case kind == chunkRuns && slots == nil:
			err = records(p, func(piece uint64, blocks uint32) error {
				start, end := uint32(piece), uint32(piece>>32) //nolint:gosec // the halves
				if start >= end || blocks == 0 {
					return errCorrupt
				}
				if total += int(blocks); total <= m.limit { // the oldest don't fit
					runs = append(runs, run{start: start, end: end, blocks: blocks})
				} else {
					total = math.MaxInt32
				}
				return nil
			})
		case kind == chunkBlocks:
			place()
			err = records(p, func(hash uint64, number uint32) error {
				if int(number) >= len(runs) {
					return nil
				}
				run := m.order.runs.at(slots[number])
				if run.blocks == runs[number].blocks {
					return nil
				}
				run.blocks++
				m.order.blocks++
				m.table.put(&m.order, hash, slots[number])
				return nil
			})
		case kind == chunkChain:
			place()
			chain = chain[:0]
			err = records(p, func(hash uint64, end uint32) error {
				if len(chain) > 0 && end <= chain[len(chain)-1].End || end == 0 {
					return errCorrupt
				}
				chain = append(chain, prefixhash.Block{Hash: hash, End: end})
				return nil
			})
			if len(m.order.free) == 0 {
				m.reserve(slotsAtOnce)
			}
			m.table.renew(&m.order, chain, m.limit)
		default:
			place()
			l.blocks += m.merge()
			l.back(kind, p)
			return nil
		}
		if err != nil {
			return err
		}
	}
}

// merger brings what one replica held, which nobody else sees yet, up to what
// requests have done to it meanwhile, and then puts both together at once.
type merger struct {
	replica *Replica
	live    *table
	limit   int // blocks

	order order // of runs in slots that the live order has reserved
	table *table
	slots []uint32
	ours  []bool // by slot: reserved
}

// wanted reports whether what changes is noted: the part of this replica does
// not come a second time.
func (m *merger) wanted() bool {
	m.replica.mu.Lock()
	defer m.replica.mu.Unlock()
	return m.live.changes != nil
}

// slotsAtOnce is how many slots are reserved for prompts whose number isn't known,
// and positions kept for those that come.
const slotsAtOnce = 256

// reserve makes room for n more runs.
func (m *merger) reserve(n int) {
	r := m.replica
	r.mu.Lock()
	size := r.order.runs.size
	r.mu.Unlock()
	room := make([]*[runsPiece]run, (n+slotsAtOnce)/runsPiece+1)
	for i := range room {
		room[i] = new([runsPiece]run)
		clear(room[i][:]) // so that the system provides it now and not under the lock
	}
	m.cover(size + n + slotsAtOnce)
	r.mu.Lock()
	slots := r.order.reserve(n, room)
	m.cover(r.order.runs.size)
	for _, slot := range slots {
		m.order.runs.at(slot).life = r.order.runs.at(slot).life // what refers to it is void
	}
	r.mu.Unlock()
	for _, slot := range slots {
		m.ours[slot] = true
	}
	m.slots = append(m.slots, slots...)
	m.order.free = append(m.order.free, slots...)
}

// cover lets the order know as many slots.
func (m *merger) cover(slots int) {
	if more := slots - m.order.runs.size; more > 0 {
		m.order.runs.grow(slots)
		m.ours = append(m.ours, make([]bool, more)...)
	}
}

// giveBack returns the slots that nothing has come into.
func (m *merger) giveBack() {
	m.replica.mu.Lock()
	defer m.replica.mu.Unlock()
	m.replica.order.free = append(m.replica.order.free, m.slots...)
}

// merge puts both together and returns how many blocks that brings. The lock is
// held for what came since it was held last, and for the live order's runs.
func (m *merger) merge() (blocks int) {
	r := m.replica
	for _, slot := range m.slots {
		if own := m.order.runs.at(slot); own.phase() == done && own.blocks == 0 {
			m.order.release(slot) // its blocks are missing
		}
	}
	applied := 0
	for turn := 0; ; turn++ {
		r.mu.Lock()
		j, live := m.live.changes, &r.order
		if j.full || j.cleared != live.cleared {
			m.live.changes = nil
			r.mu.Unlock()
			return 0
		}
		slots, placed, stored := live.runs.size, live.placed, live.blocks
		distance, capacity := live.running+live.used-live.wait, r.capacity
		changes := j.list[applied:]
		if len(changes) <= changesAtOnce || turn > turnsMost {
			m.apply(changes)
			if blocks = m.order.blocks; blocks == 0 || live.precede(&m.order, m.ours) {
				break // still locked
			}
			applied += len(changes)
			changes = nil
		}
		r.mu.Unlock()

		m.apply(changes)
		applied += len(changes)
		m.cover(slots + slots/2)
		if placed > len(m.order.at)-int(m.order.next) {
			m.order.repack(2*placed + slotsAtOnce)
		}
		m.order.shrink(max(m.limit-stored, 0), nil)
		if capacity < unlimited {
			m.order.forgetBeyond(remembered(capacity) - distance)
		}
	}
	defer r.mu.Unlock()
	if blocks > 0 {
		m.slots = nil
		m.live.dir, m.live.depth = m.table.dir, m.table.depth
		r.order.shrink(m.limit, nil)
		r.order.forget(r.capacity)
	}
	m.live.changes = nil
	return blocks
}

const (
	changesAtOnce = 4  // applied under the replica's lock
	turnsMost     = 64 // or all, where requests are faster than we
)

// apply makes the owners of prompts that were sent meanwhile own their blocks
// here too. What restored runs had of them is cut off.
func (m *merger) apply(list []change) {
	o, t := &m.order, m.table
	for _, c := range list {
		m.cover(int(c.owner.slot) + 1)
		gone := m.ours[c.owner.slot] // its slot was free when it was reserved
		if !gone {
			o.runs.at(c.owner.slot).life = c.owner.gen << 8 // so that it counts as alive
		}
		losing, lost := uint32(0), 0
		for i := c.from; i < c.to; i++ {
			b := c.chain[i]
			if c.owner.slot == 0 {
				if e := t.find(b.Hash); e != nil && !m.ours[e.slot] {
					e.kill()
				}
				continue
			}
			if slot := t.owner(o, b); slot != 0 { // a restored one: live ones hold no bytes here
				if slot != losing {
					o.lose(losing, c.chain, lost)
				}
				losing, lost = slot, i+1
			}
			if !gone {
				t.put(o, b.Hash, c.owner.slot)
			}
		}
		o.lose(losing, c.chain, lost)
	}
}

// lose takes the first blocks of a prompt from a run, which may be 0.
func (o *order) lose(slot uint32, chain []prefixhash.Block, blocks int) {
	if slot == 0 {
		return
	}
	own := o.runs.at(slot)
	switch end := startOf(chain, blocks); {
	case end >= own.end:
		o.release(slot)
	default:
		o.cut(slot, end, own.end, own.less(blocks-shorter(chain, own.start)))
	}
}

// renew makes a prompt the most recent one, whether or not all before a block of
// it that is there is there too.
func (t *table) renew(o *order, chain []prefixhash.Block, limit int) {
	losing, to := uint32(0), 0
	for i, b := range chain {
		if slot := t.owner(o, b); slot != 0 {
			if slot != losing {
				o.lose(losing, chain, to)
			}
			losing, to = slot, i+1
		}
	}
	o.lose(losing, chain, to)
	for o.blocks+len(chain) > limit {
		slot := o.oldest(nil)
		if slot == 0 {
			break
		}
		o.release(slot)
	}
	chain = chain[:min(len(chain), max(limit-o.blocks, 0))]
	if len(chain) == 0 {
		return
	}
	end := chain[len(chain)-1].End
	slot := o.take()
	o.cut(slot, 0, end, uint32(len(chain))) //nolint:gosec // chains are short
	o.runs.at(slot).sure = end
	o.enter(slot, done)
	for _, b := range chain {
		t.put(o, b.Hash, slot)
	}
}

// each calls f with all sessions, the newer ones last.
func (s *sessions) each(f func(id uint64, serial uint32)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	n := 0
	for _, m := range [...]map[uint64]uint32{s.old, s.young} {
		for id, serial := range m {
			f(id, serial)
			if n++; n%sessionsAtOnce == 0 {
				s.mu.Unlock()
				runtime.Gosched()
				s.mu.Lock()
			}
		}
	}
}

// restore takes in sessions that are older than all that are known.
func (s *sessions) restore(older map[uint64]uint32) {
	if len(older) == 0 {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.old == nil {
		s.old = older
	}
}
