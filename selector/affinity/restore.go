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
			t.changes = &changes{full: t.depth > 0 || t.dir[0].filled > 0} // nobody knows what came before
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

// table reads what one replica held into a table of its own, where the prompts
// of the last moment can be entered as they were sent, and then moves it over.
func (l *loader) table(r *Replica) error {
	x := l.index
	live := x.table(r)
	r.mu.Lock()
	again := live.changes == nil
	r.mu.Unlock()
	if again {
		return errCorrupt
	}
	limit := x.fleet.limit()
	t, o := newTable(), new(order)
	var runs []run
	var slots []uint32 // by number
	total := 0
	place := func() { // oldest first
		if slots != nil {
			return
		}
		slots = make([]uint32, len(runs))
		for i, run := range slices.Backward(runs) {
			slots[i] = o.take()
			o.cut(slots[i], run.start, run.end, 0)
			o.runs[slots[i]].sure = run.end
			o.enter(slots[i], done)
		}
	}
	var chain []prefixhash.Block
	for {
		kind, p, err := l.next()
		switch {
		case err == io.EOF:
			place()
			l.blocks += x.merge(r, live, o, t, limit)
			return nil
		case err != nil:
			return err
		case kind == chunkRuns && slots == nil:
			err = records(p, func(piece uint64, blocks uint32) error {
				start, end := uint32(piece), uint32(piece>>32) //nolint:gosec // the halves
				if start >= end || blocks == 0 {
					return errCorrupt
				}
				if total += int(blocks); total <= limit { // the oldest don't fit
					runs = append(runs, run{start: start, end: end, blocks: blocks})
				} else {
					total = math.MaxInt32
				}
				return nil
			})
		case kind == chunkBlocks:
			place()
			err = records(p, func(hash uint64, number uint32) error {
				if int(number) >= len(runs) || o.runs[slots[number]].blocks == runs[number].blocks {
					return nil
				}
				o.runs[slots[number]].blocks++
				o.blocks++
				t.put(o, hash, slots[number])
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
			t.renew(o, chain, limit)
		default:
			place()
			l.blocks += x.merge(r, live, o, t, limit)
			l.back(kind, p)
			return nil
		}
		if err != nil {
			return err
		}
	}
}

// merge moves what was restored of a replica over and returns how many blocks
// that are. It is found by requests when all of it is there.
func (x *Index) merge(r *Replica, live *table, from *order, t *table, limit int) (blocks int) {
	m := merger{replica: r, table: live, moved: make([]runID, len(from.runs))}
	m.reserve(from.placed)
	m.runs(from, limit)
	if blocks = m.entries(from, t); blocks == 0 {
		return 0
	}
	if !m.adopt(t) {
		return 0
	}
	return blocks
}

// merger moves what is older than all a replica's runs to it.
type merger struct {
	replica *Replica
	table   *table
	cleared int     // of the order, when it began
	moved   []runID // where the runs have gone, by their slots
}

// reserve makes room for n runs before all others.
func (m *merger) reserve(n int) {
	r, o := m.replica, &m.replica.order
	for spare := 64; ; {
		at, tree := make([]uint32, n+spare), make([]weight, n+spare)
		runs := make([]run, 0, n+spare)
		r.mu.Lock()
		if need := max(2*o.placed+1, len(o.runs)); need >= spare {
			spare = 2 * need
			r.mu.Unlock()
			continue
		}
		o.unpack(at, tree, uint32(n)) //nolint:gosec // runs have slots of 32 bits
		if o.runs = append(runs, o.runs...); len(o.runs) == 0 {
			o.runs = append(o.runs, run{}) // slot 0
		}
		m.cleared = o.cleared
		r.mu.Unlock()
		return
	}
}

// runs moves the runs, newest first, as many as find room and a cache that could
// still hold them.
func (m *merger) runs(from *order, limit int) {
	r, o := m.replica, &m.replica.order
	r.mu.Lock()
	defer r.mu.Unlock()
	for pos, n := int(from.next)-1, 0; pos > 0; pos-- {
		slot := from.at[pos]
		if slot == 0 {
			continue
		}
		if n++; n%entriesAtOnce == 0 {
			pause(r)
		}
		own := &from.runs[slot]
		if own.blocks == 0 {
			continue
		}
		if o.cleared != m.cleared || o.blocks+int(own.blocks) > limit || o.room == 0 {
			break
		}
		to := o.take()
		o.cut(to, own.start, own.end, own.blocks)
		o.runs[to].sure = own.end
		o.enterOldest(to)
		m.moved[slot] = runID{to, o.runs[to].gen}
		if o.forget(r.capacity); o.runs[to].gen != m.moved[slot].gen {
			break
		}
	}
	o.room = 0
}

// entries makes the entries of a table, which nobody else sees, those of the runs
// that were moved, and counts them.
func (m *merger) entries(from *order, t *table) (moved int) {
	var dead runID
	for _, id := range m.moved {
		if id.slot != 0 {
			dead = runID{id.slot, id.gen - 1}
		}
	}
	if dead.slot == 0 {
		return 0
	}
	for hash, more := uint64(0), true; more; hash, more = t.after(hash) {
		s := t.segment(hash)
		for i := range s.entries {
			e := &s.entries[i]
			if e.slot == 0 {
				continue
			}
			id := m.moved[e.slot]
			if id.slot == 0 || from.runs[e.slot].gen != e.gen {
				id = dead
			} else {
				moved++
			}
			e.slot, e.gen = id.slot, id.gen
		}
	}
	return moved
}

// adopt puts what requests have brought meanwhile into the restored table, which
// then takes the place of the one that it was brought to. It reports false where
// the notes do not say what that is.
func (m *merger) adopt(t *table) bool {
	r, o := m.replica, &m.replica.order
	r.mu.Lock()
	defer r.mu.Unlock()
	j := m.table.changes
	for n := 0; n < len(j.chains) && !j.full; n++ {
		if n%chainsAtOnce == chainsAtOnce-1 {
			pause(r)
		}
		m.enter(t, j, j.chains[n])
	}
	m.table.changes = nil
	if j.full {
		for n, id := range m.moved {
			if n%entriesAtOnce == 0 {
				pause(r)
			}
			if id.slot != 0 && o.runs[id.slot].gen == id.gen {
				o.release(id.slot)
			}
		}
		return false
	}
	m.table.dir, m.table.depth = t.dir, t.depth
	return true
}

// enter makes the owners of a prompt's blocks own them in a restored table too.
// What restored runs had of them is cut off. r.mu is held.
func (m *merger) enter(t *table, j *changes, chain []prefixhash.Block) {
	o := &m.replica.order
	losing, to := uint32(0), 0
	for i, b := range chain {
		slot, e := m.table.owner(o, b), t.find(b.Hash)
		alive := e != nil && o.runs[e.slot].gen == e.gen
		restored := alive
		if alive {
			_, brought := j.runs[runID{e.slot, e.gen}]
			restored = !brought
		}
		if slot == 0 {
			if alive && !restored {
				e.gen-- // it was withdrawn
			}
			continue
		}
		if restored && b.End > o.runs[e.slot].start && b.End <= o.runs[e.slot].end {
			if e.slot != losing {
				o.lose(losing, chain, to)
			}
			losing, to = e.slot, i+1
		}
		t.put(o, b.Hash, slot)
	}
	o.lose(losing, chain, to)
}

// lose takes the first blocks of a prompt from a run, which may be 0.
func (o *order) lose(slot uint32, chain []prefixhash.Block, blocks int) {
	if slot == 0 {
		return
	}
	own := &o.runs[slot]
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
	o.runs[slot].sure = end
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
			if n++; n%entriesAtOnce == 0 {
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
