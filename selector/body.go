package selector

import (
	"bytes"
	"errors"
	"io"
	"math/bits"
	"net/http"
	"sync"
	"sync/atomic"
)

// errRevoked ends the reads of an attempt that was given up for another one.
var errRevoked = errors.New("request body belongs to a later attempt")

// held is what was read of a request body for its key, kept so that every
// attempt gets the body byte for byte. Its bytes don't change once it is made;
// the request and the body of each attempt hold it, and the last one to let go
// returns its memory to the pool.
type held struct {
	bytes []byte
	page  *page
	exact page          // for a short body
	err   error         // how reading ended, io.EOF where the body is whole
	tail  io.ReadCloser // what was not read; it can be read once only
	taken atomic.Bool   // an attempt has begun to read the tail
	cut   failure       // the client's, to send the tail
	refs  atomic.Int32
	lent  atomic.Bool // first is in use
	first attemptBody // most requests need no other
}

// whole reports whether the entire body is held.
func (h *held) whole() bool { return h.err == io.EOF }

// size is how much is held. It may be asked while others let go.
func (h *held) size() int {
	if !h.retain() {
		return 0
	}
	defer h.release()
	return len(h.bytes)
}

// nothing reports whether nothing could be read: somebody else has.
func (h *held) nothing() bool { return h.err != nil && len(h.bytes) == 0 }

// broken returns why the client's whole body can't be had, so that no upstream is to
// blame; nil: it can, as far as is known.
func (h *held) broken() error {
	if h.err != nil && !h.whole() {
		return h.err
	}
	return h.cut.get()
}

// failure keeps the first error of reading a body.
type failure struct{ first atomic.Pointer[error] }

func (f *failure) note(err error) {
	// What is read after the transport closed the body is nobody's failure.
	if err != nil && err != io.EOF && !errors.Is(err, http.ErrBodyReadAfterClose) {
		f.first.CompareAndSwap(nil, &err)
	}
}

func (f *failure) get() error {
	if err := f.first.Load(); err != nil {
		return *err
	}
	return nil
}

// passingBody is a body that is not held, on its way to the upstream.
type passingBody struct {
	io.ReadCloser

	cut failure
}

func (b *passingBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	b.cut.note(err)
	return n, err
}

// retain adds a holder; false means that the bytes are gone.
func (h *held) retain() bool {
	for {
		n := h.refs.Load()
		if n == 0 {
			return false
		}
		if h.refs.CompareAndSwap(n, n+1) {
			return true
		}
	}
}

func (h *held) release() {
	if h.refs.Add(-1) == 0 {
		h.page.free()
		h.page, h.bytes, h.exact.buf = nil, nil, nil
	}
}

// read reads from body until it ends, until limit bytes are read, or until
// wanted says no to what has come so far. size is the announced length, -1 if
// unknown; memory grows with what arrives, never with what is announced.
func (h *held) read(body io.ReadCloser, size, limit int64, wanted func([]byte) bool) {
	h.tail = body
	h.refs.Store(1)
	if 0 <= size && size <= packedBytes && size < limit {
		h.exact = page{buf: make([]byte, size+1), class: -1}
		h.page = &h.exact
	} else {
		h.page = newPage(firstPage(size, limit))
	}
	buf, n := h.page.buf, 0
	asked := false
	for {
		if n == len(buf) {
			if int64(n) >= limit {
				break
			}
			next := newPage(nextPage(int64(n), size, limit))
			copy(next.buf, buf)
			h.page.free()
			h.page, buf = next, next.buf
		}
		room := buf[n:]
		if rest := limit - int64(n); int64(len(room)) > rest {
			room = room[:rest]
		}
		if len(room) == 0 {
			break
		}
		m, err := body.Read(room)
		n += m
		if err != nil {
			h.err, h.tail = err, nil
			break
		}
		if !asked && n > 0 {
			asked = true
			if !wanted(buf[:n]) {
				break
			}
		}
	}
	h.bytes = buf[:n]
}

// surrender returns what was read of a body whose tail no attempt has begun to read,
// and leaves the tail to whoever reads on; nil: there is none to leave.
func (h *held) surrender() []byte {
	if h.err != nil || !h.retain() {
		return nil
	}
	defer h.release()
	if h.taken.Swap(true) {
		return nil
	}
	return bytes.Clone(h.bytes)
}

// joined is a body after what was read of it.
func joined(head []byte, body io.ReadCloser) io.ReadCloser {
	return struct {
		io.Reader
		io.Closer
	}{io.MultiReader(bytes.NewReader(head), body), body}
}

// attemptBody is a held body as one attempt sends it.
type attemptBody struct {
	held *held

	mu   sync.Mutex
	off  int
	tail bool // it is the one that reads it
	over bool // closed or revoked
}

// open returns the body for a new attempt, or nil where none can be built: its
// tail is gone with an earlier attempt, or the request is over.
func (h *held) open() io.ReadCloser {
	if h.taken.Load() || !h.retain() {
		return nil
	}
	if h.whole() && !h.page.pooled() && len(h.bytes) <= packedBytes {
		defer h.release() // the collector minds the bytes
		return io.NopCloser(bytes.NewReader(h.bytes))
	}
	if h.lent.Swap(true) {
		return &attemptBody{held: h}
	}
	h.first.held = h
	return &h.first
}

func (b *attemptBody) Read(p []byte) (int, error) {
	b.mu.Lock()
	if b.over {
		b.mu.Unlock()
		return 0, errRevoked
	}
	h := b.held
	if b.off < len(h.bytes) {
		n := copy(p, h.bytes[b.off:])
		b.off += n
		b.mu.Unlock()
		return n, nil
	}
	if h.err != nil {
		b.mu.Unlock()
		return 0, h.err
	}
	if !b.tail && h.taken.Swap(true) { // by a handler in an error route
		b.mu.Unlock()
		return 0, errRevoked
	}
	b.tail = true
	b.mu.Unlock()
	n, err := h.tail.Read(p)
	h.cut.note(err)
	return n, err
}

// Close ends this attempt's body. The client's own body stays open for later
// attempts: net/http's server closes it when the handler returns.
func (b *attemptBody) Close() error {
	b.mu.Lock()
	over := b.over
	b.over = true
	b.mu.Unlock()
	if !over {
		b.held.release()
	}
	return nil
}

// again offers a whole body to net/http, which sends it once more on a new
// connection when a kept-alive one turned out to be closed.
func (h *held) again() (io.ReadCloser, error) {
	if b := h.open(); b != nil {
		return b, nil
	}
	return nil, http.ErrBodyReadAfterClose
}

// page is pooled memory for bodies.
type page struct {
	buf   []byte
	class int // index into pages; -1: not pooled
}

const (
	minPageBits = 12 // 4 KiB: most questions without history
	maxPageBits = 23 // 8 MiB: the default max_body
	// trustedBytes of an announced length are taken at once, and from there on
	// growthFactor times of what has arrived.
	trustedBytes = 64 << 10
	growthFactor = 8
	// packedBytes is the longest body that is sent as a bytes.Reader. net/http knows
	// that one not to block, so that it need not send the headers ahead: a system call
	// and a packet less, as long as all fits into its 4 KiB buffer. It doesn't say when
	// it has done with the bytes, which is why these are not pooled.
	packedBytes = 4 << 10
)

var pages [maxPageBits - minPageBits + 1]sync.Pool

func newPage(size int64) *page {
	class := max(0, bits.Len64(uint64(size-1))-minPageBits)
	if class >= len(pages) {
		return &page{buf: make([]byte, size), class: -1}
	}
	if p, ok := pages[class].Get().(*page); ok {
		return p
	}
	return &page{buf: make([]byte, 1<<(class+minPageBits)), class: class}
}

func (p *page) pooled() bool { return p.class >= 0 }

func (p *page) free() {
	if p.pooled() {
		pages[p.class].Put(p)
	}
}

// firstPage and nextPage ask for one byte more than announced, so that the read
// that reports the end of the body has room.
func firstPage(size, limit int64) int64 {
	if size < 0 {
		return min(limit, 1<<minPageBits)
	}
	return min(size+1, limit, trustedBytes)
}

func nextPage(have, size, limit int64) int64 {
	next := growthFactor * have
	if size >= have {
		next = min(next, size+1)
	}
	return min(next, limit)
}
