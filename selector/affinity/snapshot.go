package affinity

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"runtime"
	"slices"
	"time"

	"github.com/cespare/xxhash/v2"
)

// A snapshot is a file of chunks, each its kind, its length and its contents,
// between a mark that names the format's version and the xxhash64 of all before
// it. Numbers are little endian. What there is little of is JSON.
const (
	snapshotMark  = "prefix_affinity\x01"
	snapshotChunk = 1 << 20 // most bytes of a chunk
	snapshotBatch = 1 << 16 // bytes at which a chunk of records is written

	chunkHead     = 'H' // JSON, snapshotHead
	chunkGroup    = 'G' // JSON, keptGroup
	chunkReplica  = 'R' // JSON, keptReplica; in this order they are numbered
	chunkIndex    = 'I' // JSON, indexHead; what follows belongs to it
	chunkSessions = 'S' // id 8, replica 4
	chunkTable    = 'T' // replica 4; what follows belongs to it
	chunkRuns     = 'r' // newest first: start 4, end 4, blocks 4
	chunkBlocks   = 'b' // hash 8, run 4
	chunkChain    = 'c' // a prompt newer than the runs: of each block hash 8, end 4

	recordBytes = 12 // of each kind
	sumBytes    = 8
)

// SnapshotAge is how old a snapshot may be: the engines have forgotten.
const SnapshotAge = 24 * time.Hour

// snapshotHead comes first.
type snapshotHead struct {
	Written time.Time       `json:"written"`
	Notes   json.RawMessage `json:"notes,omitempty"` // the caller's
}

type indexHead struct {
	Key    string `json:"key"`
	Tables []int  `json:"tables"` // replicas that have one
}

// WriteSnapshot writes what is known of the replicas and what each index holds
// that was confirmed, for Restore. The indexes are named by whatever shapes
// their hashes; notes is JSON that Restore hands back. Requests go on meanwhile:
// no lock is held for longer than some ten microseconds. A million blocks take
// 12 MB, and 12 bytes more for each prompt that they belong to.
func (f *Fleet) WriteSnapshot(to io.Writer, now time.Time, indexes map[string]*Index, notes json.RawMessage) error {
	w := newSnapshotWriter(to)
	w.json(chunkHead, snapshotHead{now, notes})
	numbers := f.writeMemories(w, now)
	var c capture
	for _, key := range slices.Sorted(maps.Keys(indexes)) {
		indexes[key].write(w, key, numbers, &c)
	}
	return w.close()
}

func (x *Index) write(w *snapshotWriter, key string, numbers map[*Replica]int, c *capture) {
	x.snapshot.Lock()
	defer x.snapshot.Unlock()
	head := indexHead{Key: key}
	tables := make(map[int]*Replica)
	for r := range *x.tables.Load() {
		if n, ok := numbers[r]; ok { // else it came a moment ago
			head.Tables = append(head.Tables, n)
			tables[n] = r
		}
	}
	slices.Sort(head.Tables)
	w.json(chunkIndex, head)

	serials := make(map[uint32]int, len(tables))
	for r, n := range numbers {
		serials[r.serial] = n
	}
	x.sessions.each(func(id uint64, serial uint32) {
		if n, ok := serials[serial]; ok {
			w.record(chunkSessions, id, uint32(n)) //nolint:gosec // few replicas
		}
	})
	for _, n := range head.Tables {
		if c.take(tables[n], x.table(tables[n])) {
			w.flush()
			w.chunk(chunkTable, binary.LittleEndian.AppendUint32(nil, uint32(n))) //nolint:gosec // few replicas
			c.write(w)
		}
	}
	w.flush()
}

func (c *capture) write(w *snapshotWriter) {
	for _, slot := range c.order {
		r := &c.runs[slot]
		w.record(chunkRuns, uint64(r.start)|uint64(r.end)<<32, c.blocks[slot])
	}
	for _, e := range c.entries {
		w.record(chunkBlocks, e.hash(), c.number[e.slot])
	}
	for _, chain := range c.chains {
		w.flush() // a chunk each
		for _, b := range chain {
			w.append(chunkChain, b.Hash, b.End)
		}
	}
	w.flush()
}

// snapshotWriter writes chunks until something fails.
type snapshotWriter struct {
	to   io.Writer
	sum  *xxhash.Digest
	kind byte
	buf  []byte // records not written yet
	err  error
}

func newSnapshotWriter(to io.Writer) *snapshotWriter {
	w := &snapshotWriter{to: to, sum: xxhash.New()}
	w.write([]byte(snapshotMark))
	return w
}

func (w *snapshotWriter) write(p []byte) {
	_, _ = w.sum.Write(p) // never fails
	if w.err == nil {
		_, w.err = w.to.Write(p)
	}
}

func (w *snapshotWriter) chunk(kind byte, p []byte) {
	if len(p) > snapshotChunk {
		w.err = errors.Join(w.err, fmt.Errorf("chunk '%c' of %d bytes is too long", kind, len(p)))
	}
	var head [5]byte
	head[0] = kind
	binary.LittleEndian.PutUint32(head[1:], uint32(len(p))) //nolint:gosec // at most snapshotChunk
	w.write(head[:])
	w.write(p)
}

func (w *snapshotWriter) json(kind byte, v any) {
	p, err := json.Marshal(v)
	w.err = errors.Join(w.err, err)
	w.chunk(kind, p)
}

// record writes a record, many to a chunk.
func (w *snapshotWriter) record(kind byte, a uint64, b uint32) {
	if kind != w.kind || len(w.buf) >= snapshotBatch {
		w.flush()
	}
	w.append(kind, a, b)
}

// append writes a record to the chunk that is open.
func (w *snapshotWriter) append(kind byte, a uint64, b uint32) {
	w.kind = kind
	w.buf = binary.LittleEndian.AppendUint64(w.buf, a)
	w.buf = binary.LittleEndian.AppendUint32(w.buf, b)
}

// flush ends the chunk that is open.
func (w *snapshotWriter) flush() {
	if len(w.buf) > 0 {
		w.chunk(w.kind, w.buf)
		w.buf = w.buf[:0]
		runtime.Gosched()
	}
}

func (w *snapshotWriter) close() error {
	w.flush()
	w.write(binary.LittleEndian.AppendUint64(nil, w.sum.Sum64()))
	return w.err
}

// snapshotReader reads the chunks of a snapshot whose checksum is right. Their
// contents are checked all the same.
type snapshotReader struct {
	from io.Reader
	buf  []byte
}

var errCorrupt = errors.New("snapshot is truncated or corrupt")

func newSnapshotReader(from io.ReadSeeker) (*snapshotReader, error) {
	size, err := from.Seek(0, io.SeekEnd)
	if err != nil {
		return nil, err
	}
	if _, err := from.Seek(0, io.SeekStart); err != nil {
		return nil, err
	}
	size -= sumBytes
	if size < int64(len(snapshotMark)) {
		return nil, errCorrupt
	}
	mark := make([]byte, len(snapshotMark))
	if _, err := io.ReadFull(from, mark); err != nil {
		return nil, err
	}
	version := len(mark) - 1
	if string(mark[:version]) != snapshotMark[:version] {
		return nil, errors.New("not a snapshot of prefix_affinity")
	}
	if mark[version] != snapshotMark[version] {
		return nil, fmt.Errorf("snapshot has format '%d': this version reads %d", mark[version], snapshotMark[version])
	}
	sum := xxhash.New()
	_, _ = sum.Write(mark) // never fails
	if _, err := io.CopyN(sum, from, size-int64(len(mark))); err != nil {
		return nil, err
	}
	var want [sumBytes]byte
	if _, err := io.ReadFull(from, want[:]); err != nil {
		return nil, err
	}
	if binary.LittleEndian.Uint64(want[:]) != sum.Sum64() {
		return nil, errCorrupt
	}
	if _, err := from.Seek(int64(len(mark)), io.SeekStart); err != nil {
		return nil, err
	}
	return &snapshotReader{from: io.LimitReader(from, size-int64(len(mark)))}, nil
}

// next returns the next chunk, which is valid until the one after; io.EOF: there
// is none.
func (r *snapshotReader) next() (kind byte, p []byte, err error) {
	var head [5]byte
	if _, err := io.ReadFull(r.from, head[:]); err != nil {
		if err == io.ErrUnexpectedEOF {
			err = errCorrupt
		}
		return 0, nil, err
	}
	n := binary.LittleEndian.Uint32(head[1:])
	if n > snapshotChunk {
		return 0, nil, errCorrupt
	}
	r.buf = slices.Grow(r.buf[:0], int(n))[:n]
	if _, err := io.ReadFull(r.from, r.buf); err != nil {
		if err == io.EOF || err == io.ErrUnexpectedEOF {
			err = errCorrupt
		}
		return 0, nil, err
	}
	return head[0], r.buf, nil
}

// records calls f with each record of a chunk.
func records(p []byte, f func(a uint64, b uint32) error) error {
	if len(p)%recordBytes != 0 {
		return errCorrupt
	}
	for ; len(p) > 0; p = p[recordBytes:] {
		if err := f(binary.LittleEndian.Uint64(p), binary.LittleEndian.Uint32(p[8:])); err != nil {
			return err
		}
	}
	return nil
}

// decode reads a chunk of JSON.
func decode(p []byte, v any) error {
	if err := json.NewDecoder(bytes.NewReader(p)).Decode(v); err != nil {
		return errCorrupt
	}
	return nil
}

// amount reports whether v can be a count or a sum of something.
func amount(v ...float64) bool {
	for _, v := range v {
		if !(v >= 0 && v <= math.MaxUint32*1e6) {
			return false
		}
	}
	return true
}
