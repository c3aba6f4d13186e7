package share

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"time"

	"github.com/prefix-affinity/caddy/prefixhash"
	"github.com/prefix-affinity/caddy/selector/affinity"
)

// A batch is an entry of the stream: a header and the events of one gateway.
//
//	"pa"  version  gateway  sequence  flags  parameters  event...
//
// The first three have the same place in every version, so that a gateway can
// tell that it doesn't understand another one, and which. Numbers are varints
// (encoding/binary) unless they are hashes, which are eight bytes, big endian.
// Every batch can be read by itself: attempts are numbered relative to the one
// before, and replicas are named where they come first.
const (
	magic       = "pa"
	version     = 1
	fixedHeader = len(magic) + 1 + 8

	flagBye = 1 // the gateway leaves

	// What an event holds beyond that is not sent by a gateway of ours.
	maxAddress    = 512
	maxPrompt     = 1 << 32 // bytes
	maxCandidates = 1 << 20
	maxRetryAfter = time.Hour
	maxTook       = time.Hour

	shareSteps = 1 << 16 // in which a share is told
)

// Params are what must agree for the hashes of two gateways to mean the same.
type Params struct {
	KeyVersion int
	BlockSize  int
	Seed       [8]byte // a fingerprint of the secret
}

// header is what a batch says of its sender.
type header struct {
	gateway  uint64
	sequence uint64 // of the batch, without a gap
	bye      bool
	params   Params
}

func appendHeader(b []byte, h *header) []byte {
	b = append(b, magic...)
	b = append(b, version)
	b = binary.BigEndian.AppendUint64(b, h.gateway)
	b = binary.AppendUvarint(b, h.sequence)
	var flags byte
	if h.bye {
		flags |= flagBye
	}
	b = append(b, flags)
	b = binary.AppendUvarint(b, uint64(h.params.KeyVersion)) // #nosec G115 -- not negative
	b = binary.AppendUvarint(b, uint64(h.params.BlockSize))  // #nosec G115 -- not negative
	return append(b, h.params.Seed[:]...)
}

// errVersion says that a batch is of a version that is not known here. Its
// header has the gateway.
var errVersion = errors.New("of another version")

var errGarbage = errors.New("not a batch of prefix_affinity")

// Flags of an event, beside its kind in the lower four bits. The outcome of a
// finished attempt takes their place.
const (
	kindMask    = 0x0f
	flagStream  = 0x10
	flagJudged  = 0x20
	flagSession = 0x40
)

// encoder appends events to a batch.
type encoder struct {
	last     uint64            // attempt
	replicas map[string]uint64 // by address, from 1
}

func (c *encoder) reset() {
	c.last = 0
	clear(c.replicas)
}

func (c *encoder) append(b []byte, e *affinity.Event) []byte {
	first := byte(e.Kind)
	if e.Stream {
		first |= flagStream
	}
	if e.Judged {
		first |= flagJudged
	}
	switch {
	case e.Kind == affinity.Sent && e.Session != 0:
		first |= flagSession
	case e.Kind == affinity.Finished:
		first |= byte(e.Outcome) << 4
	}
	b = append(b, first)
	if e.Kind == affinity.Learned {
		b = binary.BigEndian.AppendUint64(b, e.Session)
		return c.address(b, e.Replica)
	}
	b = binary.AppendVarint(b, int64(e.Attempt-c.last)) // #nosec G115 -- wraps both ways
	c.last = e.Attempt
	switch e.Kind {
	case affinity.Sent:
		b = c.address(b, e.Replica)
		b = binary.AppendUvarint(b, bytesOf(e.PromptTokens))
		b = binary.AppendUvarint(b, bytesOf(e.UncachedTokens))
		b = binary.AppendUvarint(b, uint64(e.Candidates)) // #nosec G115 -- not negative
		if e.Session != 0 {
			b = binary.BigEndian.AppendUint64(b, e.Session)
		}
		b = binary.AppendUvarint(b, uint64(len(e.Blocks)))
		end := uint32(0)
		for _, block := range e.Blocks {
			b = binary.BigEndian.AppendUint64(b, block.Hash)
			b = binary.AppendUvarint(b, uint64(block.End-end))
			end = block.End
		}
	case affinity.Output:
		b = binary.AppendUvarint(b, uint64(min(max(e.Took, 0), maxTook)/time.Microsecond)) // #nosec G115 -- not negative
	case affinity.Reported:
		b = binary.AppendUvarint(b, uint64(math.Round(min(max(e.Share, 0), 1)*shareSteps)))
	case affinity.Finished:
		b = binary.AppendUvarint(b, uint64(min(max(e.RetryAfter, 0), maxRetryAfter)/time.Millisecond)) // #nosec G115 -- not negative
	default:
	}
	return b
}

// bytesOf undoes the division that makes tokens of bytes, so nothing is lost.
func bytesOf(tokens float64) uint64 {
	return uint64(min(max(tokens, 0)*affinity.BytesPerToken, maxPrompt))
}

func (c *encoder) address(b []byte, addr string) []byte {
	if n := c.replicas[addr]; n > 0 {
		return binary.AppendUvarint(b, n)
	}
	if c.replicas == nil {
		c.replicas = make(map[string]uint64)
	}
	c.replicas[addr] = uint64(len(c.replicas) + 1)
	b = binary.AppendUvarint(b, 0)
	b = binary.AppendUvarint(b, uint64(len(addr)))
	return append(b, addr...)
}

// decoder reads a batch. After an error it gives zeros.
type decoder struct {
	rest     []byte
	err      error
	last     uint64
	replicas []string
	blocks   []prefixhash.Block
}

// header begins a batch.
func (d *decoder) header(b []byte) (h header, err error) {
	*d = decoder{replicas: d.replicas[:0], blocks: d.blocks[:0]}
	if len(b) < fixedHeader || string(b[:len(magic)]) != magic {
		return h, errGarbage
	}
	h.gateway = binary.BigEndian.Uint64(b[len(magic)+1:])
	if v := b[len(magic)]; v != version {
		return h, fmt.Errorf("%w: %d, not %d", errVersion, v, version)
	}
	d.rest = b[fixedHeader:]
	h.sequence = d.number(math.MaxUint64)
	h.bye = d.byte()&flagBye != 0
	h.params.KeyVersion = int(d.number(math.MaxInt32)) // #nosec G115 -- bounded
	h.params.BlockSize = int(d.number(math.MaxInt32))  // #nosec G115 -- bounded
	copy(h.params.Seed[:], d.take(8))
	return h, d.err
}

// next reads an event; false at the end. Its blocks hold until the next call.
func (d *decoder) next(e *affinity.Event) (ok bool, err error) {
	if d.err != nil || len(d.rest) == 0 {
		return false, d.err
	}
	first := d.byte()
	*e = affinity.Event{Kind: affinity.EventKind(first & kindMask)}
	switch {
	case e.Kind > affinity.Learned:
		return false, d.fail("an event of kind %d", e.Kind)
	case e.Kind == affinity.Learned:
		e.Session = d.hash()
		e.Replica = d.address()
		return d.err == nil, d.err
	}
	delta, n := binary.Varint(d.rest)
	if n <= 0 {
		return false, d.fail("a number cut off")
	}
	d.rest = d.rest[n:]
	e.Attempt = d.last + uint64(delta) // #nosec G115 -- wraps both ways
	d.last = e.Attempt
	switch e.Kind {
	case affinity.Sent:
		e.Stream, e.Judged = first&flagStream != 0, first&flagJudged != 0
		e.Replica = d.address()
		e.PromptTokens = float64(d.number(maxPrompt)) / affinity.BytesPerToken
		e.UncachedTokens = float64(d.number(maxPrompt)) / affinity.BytesPerToken
		e.Candidates = int(d.number(maxCandidates)) // #nosec G115 -- bounded
		if first&flagSession != 0 {
			e.Session = d.hash()
		}
		e.Blocks = d.chain()
	case affinity.Confirmed:
		e.Stream = first&flagStream != 0
	case affinity.Output:
		e.Took = time.Duration(d.number(uint64(maxTook/time.Microsecond))) * time.Microsecond // #nosec G115 -- bounded
	case affinity.Reported:
		e.Share = float64(d.number(shareSteps)) / shareSteps
	case affinity.Finished:
		if e.Outcome = affinity.Outcome(first >> 4); e.Outcome > affinity.Rejected {
			return false, d.fail("outcome %d", e.Outcome)
		}
		e.RetryAfter = time.Duration(d.number(uint64(maxRetryAfter/time.Millisecond))) * time.Millisecond // #nosec G115 -- bounded
	default:
	}
	return d.err == nil, d.err
}

// chain reads the blocks of a prompt.
func (d *decoder) chain() []prefixhash.Block {
	n := d.number(uint64(len(d.rest) / 9)) // a block takes that many bytes at least
	d.blocks = d.blocks[:0]
	end := uint64(0)
	for range n {
		hash, length := d.hash(), d.number(maxPrompt)
		end += length
		if d.err == nil && (length == 0 || end > math.MaxUint32) {
			_ = d.fail("a block of %d bytes", length)
		}
		if d.err != nil {
			return nil
		}
		d.blocks = append(d.blocks, prefixhash.Block{Hash: hash, End: uint32(end)})
	}
	return d.blocks
}

func (d *decoder) address() string {
	n := d.number(uint64(len(d.replicas)))
	switch {
	case d.err != nil:
		return ""
	case n > 0:
		return d.replicas[n-1]
	}
	addr := string(d.take(int(d.number(maxAddress)))) // #nosec G115 -- bounded
	if d.err == nil && addr == "" {
		_ = d.fail("a replica without an address")
	}
	d.replicas = append(d.replicas, addr)
	return addr
}

func (d *decoder) hash() uint64 {
	if b := d.take(8); b != nil {
		return binary.BigEndian.Uint64(b)
	}
	return 0
}

func (d *decoder) byte() byte {
	if b := d.take(1); b != nil {
		return b[0]
	}
	return 0
}

func (d *decoder) number(most uint64) uint64 {
	if d.err != nil {
		return 0
	}
	v, n := binary.Uvarint(d.rest)
	if n <= 0 {
		_ = d.fail("a number cut off")
		return 0
	}
	d.rest = d.rest[n:]
	if v > most {
		_ = d.fail("%d where at most %d makes sense", v, most)
		return 0
	}
	return v
}

func (d *decoder) take(n int) []byte {
	if d.err == nil && n > len(d.rest) {
		_ = d.fail("a field cut off")
	}
	if d.err != nil {
		return nil
	}
	b := d.rest[:n]
	d.rest = d.rest[n:]
	return b
}

func (d *decoder) fail(format string, args ...any) error {
	if d.err == nil {
		d.err = fmt.Errorf("%w: it has "+format, append([]any{errGarbage}, args...)...)
	}
	return d.err
}
