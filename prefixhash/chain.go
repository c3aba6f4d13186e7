package prefixhash

import (
	"encoding/binary"
	"math"
	"math/bits"

	"github.com/cespare/xxhash/v2"
)

const (
	// fineBytes is how far into a prompt blocks are short. coarse is how many
	// times longer they are beyond. So 512 KB take 560 blocks instead of
	// 2,048, for at most 256 tokens of match.
	fineBytes = 16 << 10
	coarse    = 4

	// mostBlocks is where a chain ends: eight times the blocks of the longest
	// prompts in use (2M tokens), 1 MiB of hashes. Only bodies of hundreds of
	// thousands of empty messages come here.
	mostBlocks = 1 << 16

	// mediaBytes is the nominal weight of an image, sound, video or file: 1,024
	// tokens. Vision encoders make 256 (Gemma 3) to 4,096 (Pixtral at full
	// size) of an image, about 1,300 (Qwen2-VL) of a megapixel; the length of
	// the file says little about it.
	mediaBytes = 4096
)

// mark tells the kind of what follows in a prompt.
type mark byte

const (
	// Parts, as Explain lists them.
	markPreamble mark = iota + 1
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
	markInfill

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
type chain struct {
	key  []uint64 // for nh
	open []byte   // text of the open block
	used int      // bytes of it

	marks uint64 // folded positions of the marks in the open block
	hash  uint64 // of everything before the open block

	pos   uint64 // prompt bytes so far
	start uint64 // where the open block starts
	limit uint64 // where it is cut at the latest
	fine  uint64 // length of blocks up to fineBytes

	blocks  []Block
	most    int  // of blocks to note
	stopped bool // no more blocks: the rest of the prompt is unknown or too much

	digest  xxhash.Digest
	buf     [256]byte  // on its way into a block
	explain *explainer // nil but for Explain
}

// begin starts a chain of which only the hash is wanted: that of a medium, or
// of the preamble.
func (c *chain) begin(hash uint64, key []uint64, blockBytes int) {
	c.key = key
	if len(c.open) < 8*len(key) {
		c.open = make([]byte, 8*len(key))
	}
	c.fine = uint64(blockBytes)
	c.blocks, c.most, c.stopped = c.blocks[:0], 0, false
	c.pos = 0
	c.follow(hash)
}

// seal ends the preamble: what the KV cache depends on without being prompt
// text. The prompt starts at 0, after its hash, and its blocks are noted.
func (c *chain) seal(blocks []Block) {
	c.cut()
	c.blocks, c.most = blocks[:0], mostBlocks
	c.pos = 0
	c.follow(c.hash)
}

// mark sets the kind of what is written next.
func (c *chain) mark(m mark) {
	if c.explain != nil {
		c.explain.mark(c, m)
	}
	c.fold(c.pos)
	c.writeByte(byte(m))
}

// fold mixes a value into the open block beside its text, keyed like it.
func (c *chain) fold(value uint64) {
	hi, lo := bits.Mul64(c.marks^value, c.key[0])
	c.marks = hi ^ lo
}

func (c *chain) writeByte(b byte) {
	if !c.stopped {
		c.open[c.used] = b
		c.used++
	}
	c.advance(1)
}

// write adds bytes as they are.
func (c *chain) write(p []byte) {
	for len(p) > 0 && !c.stopped {
		room := c.limit - c.pos
		if c.pos == c.start && room <= uint64(len(p)) && room%stripe == 0 {
			c.pos += room
			c.close(p[:room], int(room)) // without copying it
			p = p[room:]
			continue
		}
		n := copy(c.open[c.used:][:room], p)
		c.used += n
		c.advance(uint64(n))
		p = p[n:]
	}
	c.pos += uint64(len(p))
}

// media adds an image, sound, video or file by the hash of its content.
func (c *chain) media(content uint64) {
	c.mark(markMedia)
	c.fold(content)
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
	padded := (c.used + stripe - 1) / stripe * stripe
	clear(c.open[c.used:padded])
	c.close(c.open[:padded], c.used)
}

// close ends the open block with all of its text, padded to whole stripes.
func (c *chain) close(padded []byte, used int) {
	hi, lo := nh(padded, c.key)
	var sum [32]byte
	binary.LittleEndian.PutUint64(sum[:], hi)
	binary.LittleEndian.PutUint64(sum[8:], lo)
	binary.LittleEndian.PutUint64(sum[16:], c.marks)
	binary.LittleEndian.PutUint64(sum[24:], uint64(used))
	c.digest.ResetWithSeed(c.hash)
	_, _ = c.digest.Write(sum[:])
	hash := c.digest.Sum64()
	if c.most > 0 {
		c.blocks = append(c.blocks, Block{Hash: hash, End: uint32(min(c.pos, math.MaxUint32))})
		if len(c.blocks) == c.most {
			c.stop()
		}
	}
	c.follow(hash)
}

// follow opens a block after everything with the given hash.
func (c *chain) follow(hash uint64) {
	c.hash = hash
	c.marks, c.used = hash, 0
	c.start = c.pos
	c.limit = c.pos + c.fine
	if c.pos >= fineBytes {
		c.limit = c.pos + c.fine*coarse
	}
}

// stop ends the chain with the last whole block: the prompt's text after this
// point isn't known. Weight is still counted.
func (c *chain) stop() {
	c.stopped = true
}
