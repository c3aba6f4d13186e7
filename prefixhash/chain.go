package prefixhash

import (
	"crypto/subtle"
	"encoding/binary"
	"math"
	"unicode/utf8"

	"github.com/cespare/xxhash/v2"
)

const (
	// fineBytes is how far into a prompt blocks are short. coarse is how many
	// times longer they are beyond. So 512 KB take 560 blocks instead of
	// 2,048, for at most 256 tokens of match.
	fineBytes = 16 << 10
	coarse    = 4

	// mediaBytes is the nominal weight of an image, sound, video or file: 1,024
	// tokens. Vision encoders make 256 (Gemma 3) to 4,096 (Pixtral at full
	// size) of an image, about 1,300 (Qwen2-VL) of a megapixel; the length of
	// the file says little about it.
	mediaBytes = 4096
)

// mark tells the kind of what follows in a prompt.
type mark byte

const (
	markNone mark = iota

	// Parts, as Explain lists them.
	markPreamble
	markTool
	markDocument
	markMessage
	markText
	markReasoning
	markRefusal
	markToolCall
	markToolResult
	markMedia
	markItem
	markTokens
	markHistory

	// Inside parts.
	markField
	markName
	markCallID
	markArguments
	markString
	markNumber
	markTrue
	markFalse
	markNull
	markList
	markObject
	markKey
	markEnd
)

// chain cuts a prompt into blocks and hashes them, each on the hash before it.
//
// A prompt is text and marks between its parts. A mark weighs one byte. Text
// may hold any byte, so marks couldn't be told from text by their value: the
// hash of a block also takes in the positions of its marks, which makes
// ("ab", "c") differ from ("a", "bc") whatever the texts are.
//
// For half of all seeds, xxhash64 collides on pairs that differ by constants
// in two words of 8 bytes (bit 63 of one, 2^30*P1/P2 in the word 32 bytes on).
// So a block is hashed under a mask of secret bytes: what is a constant
// difference to the sender of such a pair is none to the hash.
type chain struct {
	mask []byte // of the longest block
	open []byte // the open block
	used int    // bytes of it

	marks uint64 // folded positions of the marks in the open block
	hash  uint64 // of everything before the open block
	root  uint64 // seed of the chain

	pos   uint64 // prompt bytes so far
	start uint64 // where the open block starts
	limit uint64 // where it is cut at the latest

	blocks  []Block
	stopped bool // the rest of the prompt is unknown: no more blocks
	digest  xxhash.Digest
	buf     [2048]byte // decoded text on its way elsewhere
	explain *explainer // nil but for Explain
}

// newMask returns the secret bytes that go with a seed, as many as the longest
// block has.
func newMask(seed uint64, blockBytes int) []byte {
	d := seeded(seed, "mask", "")
	mask := make([]byte, 0, blockBytes*coarse+8)
	for len(mask) < blockBytes*coarse {
		_, _ = d.Write([]byte{0})
		mask = binary.LittleEndian.AppendUint64(mask, d.Sum64())
	}
	return mask[:blockBytes*coarse]
}

// begin starts a chain with the preamble: what the KV cache depends on without
// being prompt text. It weighs nothing and its blocks are no blocks of the key.
func (c *chain) begin(seed uint64, mask []byte, blocks []Block) {
	c.root = seed
	c.mask = mask
	if len(c.open) < len(mask) {
		c.open = make([]byte, len(mask))
	}
	c.blocks = blocks[:0]
	c.stopped = false
	c.pos = 0
	c.follow(seed)
}

// seal ends the preamble: the prompt starts at 0.
func (c *chain) seal() {
	c.cut()
	c.blocks = c.blocks[:0]
	c.pos = 0
	c.follow(c.hash)
}

// mark sets the kind of what is written next.
func (c *chain) mark(m mark) {
	if c.explain != nil {
		c.explain.mark(c, m)
	}
	c.marks = (c.marks ^ (c.pos + 1)) * 0x9e3779b97f4a7c15
	c.writeByte(byte(m))
}

func (c *chain) writeByte(b byte) {
	if !c.stopped {
		c.open[c.used] = b
		c.used++
	}
	c.advance(1)
}

// write adds text.
func (c *chain) write(p []byte) {
	for len(p) > 0 && !c.stopped {
		n := copy(c.room(), p)
		c.used += n
		c.advance(uint64(n))
		p = p[n:]
	}
	c.pos += uint64(len(p))
}

// room is what is left of the open block.
func (c *chain) room() []byte {
	n := c.limit - c.pos
	return c.open[c.used:][:n:n]
}

// decoded adds the text of a JSON string as it stands between its quotes. cut
// tells that the body ended within it.
func (c *chain) decoded(raw []byte, cut bool) {
	for len(raw) > 0 && !c.stopped {
		var plain []byte
		if room := c.room(); len(room) >= utf8.UTFMax {
			plain, raw = decode(room[:0], raw, cut)
			c.used += len(plain)
			c.advance(uint64(len(plain)))
		} else {
			plain, raw = decode(c.buf[:0:2*utf8.UTFMax], raw, cut)
			c.write(plain)
		}
	}
	c.pos += uint64(len(raw))
}

// media adds an image, sound, video or file by the hash of its content.
func (c *chain) media(content uint64) {
	c.mark(markMedia)
	c.marks = (c.marks ^ content) * 0x9e3779b97f4a7c15
	c.advance(mediaBytes)
}

// advance counts what was added and cuts the block that it filled.
func (c *chain) advance(bytes uint64) {
	c.pos += bytes
	if c.pos >= c.limit {
		c.cut()
	}
}

// cut ends the open block, if there is anything in it.
func (c *chain) cut() {
	if c.stopped || c.pos == c.start {
		return
	}
	var marks [8]byte
	binary.LittleEndian.PutUint64(marks[:], c.marks)
	c.digest.ResetWithSeed(c.hash)
	subtle.XORBytes(c.open, c.open[:c.used], c.mask)
	_, _ = c.digest.Write(c.open[:c.used])
	_, _ = c.digest.Write(marks[:])
	hash := c.digest.Sum64()
	c.blocks = append(c.blocks, Block{Hash: hash, End: uint32(min(c.pos, math.MaxUint32))})
	c.follow(hash)
}

// follow opens a block after everything with the given hash.
func (c *chain) follow(hash uint64) {
	c.hash = hash
	c.marks, c.used = 0, 0
	c.start = c.pos
	size := len(c.mask)
	if c.pos < fineBytes {
		size /= coarse
	}
	c.limit = c.pos + uint64(size)
}

// stop ends the chain with the last whole block: the prompt's text after this
// point isn't known. Weight is still counted.
func (c *chain) stop() {
	c.stopped = true
}
