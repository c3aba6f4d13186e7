package prefixhash

import (
	"bytes"
	"encoding/binary"
	"math"
	"unicode/utf16"
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
type chain struct {
	digest xxhash.Digest // of the open block, seeded with the hash before it
	marks  uint64        // folded positions of the marks in the open block

	pos   uint64 // prompt bytes so far
	start uint64 // where the open block starts
	limit uint64 // where it is cut at the latest
	block uint64 // length of the fine blocks
	root  uint64 // seed of the chain

	blocks  []Block
	stopped bool // the rest of the prompt is unknown: no more blocks
	buf     [2048]byte
	explain *explainer // nil but for Explain
}

// begin starts a chain with the preamble: what the KV cache depends on without
// being prompt text. It weighs nothing and has no block of its own.
func (c *chain) begin(seed uint64, blockBytes int, blocks []Block) {
	c.root = seed
	c.digest.ResetWithSeed(seed)
	c.marks = 0
	c.pos, c.start, c.limit = 0, 0, math.MaxUint64
	c.block = uint64(blockBytes)
	c.blocks = blocks[:0]
	c.stopped = false
}

// seal ends the preamble: the prompt starts at 0.
func (c *chain) seal() {
	hash := c.sum()
	c.pos, c.start = 0, 0
	c.open(hash)
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
	c.buf[0] = b
	c.write(c.buf[:1])
}

// write adds text.
func (c *chain) write(p []byte) {
	for len(p) > 0 {
		n := int(min(c.limit-c.pos, uint64(len(p))))
		_, _ = c.digest.Write(p[:n])
		c.pos += uint64(n)
		p = p[n:]
		if c.pos == c.limit {
			c.cut()
		}
	}
}

// decoded adds the text of a JSON string as it stands between its quotes. cut
// tells that the body ended within it.
func (c *chain) decoded(raw []byte, cut bool) {
	for len(raw) > 0 {
		n := bytes.IndexByte(raw, '\\')
		if n < 0 {
			c.write(raw)
			return
		}
		if n >= len(c.buf) {
			c.write(raw[:n])
			raw = raw[n:]
		}
		var plain []byte
		plain, raw = decode(c.buf[:0], raw, cut)
		c.write(plain)
	}
}

// media adds an image, sound, video or file by the hash of its content.
func (c *chain) media(content uint64) {
	c.mark(markMedia)
	var sum [8]byte
	binary.LittleEndian.PutUint64(sum[:], content)
	_, _ = c.digest.Write(sum[:])
	c.pos += mediaBytes
	if c.pos >= c.limit {
		c.cut()
	}
}

// cut ends the open block, if there is anything in it.
func (c *chain) cut() {
	if c.stopped || c.pos == c.start {
		return
	}
	hash := c.sum()
	c.blocks = append(c.blocks, Block{Hash: hash, End: uint32(min(c.pos, math.MaxUint32))})
	c.open(hash)
}

// stop ends the chain with the last whole block: the prompt's text after this
// point isn't known. Weight is still counted.
func (c *chain) stop() {
	c.stopped = true
	c.limit = math.MaxUint64
}

// open starts a block on the hash before it.
func (c *chain) open(hash uint64) {
	c.digest.ResetWithSeed(hash)
	c.marks = 0
	c.start = c.pos
	size := c.block
	if c.pos >= fineBytes {
		size *= coarse
	}
	c.limit = c.pos + size
}

func (c *chain) sum() uint64 {
	var marks [8]byte
	binary.LittleEndian.PutUint64(marks[:], c.marks)
	_, _ = c.digest.Write(marks[:])
	return c.digest.Sum64()
}

// appendDecoded appends the whole text of a JSON string.
func appendDecoded(dst, raw []byte, cut bool) []byte {
	for len(raw) > 0 {
		if cap(dst)-len(dst) < utf8.UTFMax {
			dst = append(dst, make([]byte, max(len(raw), 64))...)[:len(dst)]
		}
		dst, raw = decode(dst, raw, cut)
	}
	return dst
}

// decode appends text of a JSON string to dst as far as its capacity goes and
// returns what is left of raw. Escapes that JSON doesn't know stay as they
// are, halves of surrogate pairs become U+FFFD; an escape that the end of the
// body cut is left out.
func decode(dst, raw []byte, cut bool) (decoded, rest []byte) {
	for len(raw) > 0 {
		room := cap(dst) - len(dst)
		if room < utf8.UTFMax {
			break
		}
		if raw[0] != '\\' {
			n := min(len(raw), room)
			if i := bytes.IndexByte(raw[:n], '\\'); i >= 0 {
				n = i
			}
			dst = append(dst, raw[:n]...)
			raw = raw[n:]
			continue
		}
		if len(raw) == 1 {
			return dst, nil
		}
		c := raw[1]
		switch c {
		case '"', '\\', '/':
		case 'n':
			c = '\n'
		case 't':
			c = '\t'
		case 'r':
			c = '\r'
		case 'b':
			c = '\b'
		case 'f':
			c = '\f'
		case 'u':
			if len(raw) < 6 {
				return dst, nil
			}
			r, size := hex4(raw[2:6]), 6
			if r < 0 {
				dst = append(dst, '\\', 'u')
				raw = raw[2:]
				continue
			}
			if utf16.IsSurrogate(r) {
				low := rune(-1)
				if len(raw) >= 12 && raw[6] == '\\' && raw[7] == 'u' {
					low = hex4(raw[8:12])
				} else if cut && len(raw) < 12 {
					return dst, nil
				}
				if r = utf16.DecodeRune(r, low); r != utf8.RuneError {
					size = 12
				}
			}
			dst = utf8.AppendRune(dst, r)
			raw = raw[size:]
			continue
		default:
			dst = append(dst, '\\')
		}
		dst = append(dst, c)
		raw = raw[2:]
	}
	return dst, raw
}

// hex4 returns the value of four hexadecimal digits, -1 if they are none.
func hex4(p []byte) (r rune) {
	for _, c := range p[:4] {
		switch {
		case '0' <= c && c <= '9':
			c -= '0'
		case 'a' <= c && c <= 'f':
			c -= 'a' - 10
		case 'A' <= c && c <= 'F':
			c -= 'A' - 10
		default:
			return -1
		}
		r = r<<4 | rune(c)
	}
	return r
}
