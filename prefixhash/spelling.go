package prefixhash

import (
	"bytes"
	"math/bits"
	"unicode/utf8"
)

// Text is hashed as JSON spells it, so that nearly all of it is hashed where it stands
// in the body. Of the spellings that mean the same, one counts, most clients' own
// (JavaScript's, and Python's with ensure_ascii off): a backslash and a letter for a
// byte that has such an escape, \u00xx with small digits for other control characters,
// and UTF-8 for everything else.

// spelled adds the text of a JSON string as it stands between its quotes, in the
// one spelling that is hashed. cut tells that the body ended within it.
func (c *chain) spelled(raw []byte, cut bool) {
	for len(raw) > 0 && !c.stopped {
		if n := canonical(raw); n > 0 {
			c.write(raw[:n])
			raw = raw[n:]
			continue
		}
		var text []byte
		text, raw = respell(c.buf[:0], raw, cut)
		c.write(text)
	}
	c.pos += uint64(len(raw))
}

// spell adds text that is not spelled as in JSON.
func (c *chain) spell(text []byte) {
	for len(text) > 0 {
		n := 0
		for n < len(text) && (text[n] >= utf8.RuneSelf || letters[text[n]] == 0) {
			n++
		}
		c.write(text[:n])
		if n < len(text) {
			c.write(appendSpelled(c.buf[:0], rune(text[n])))
			n++
		}
		text = text[n:]
	}
}

// canonicalWindow is how far canonical looks: what it has passed is hashed while the
// processor's first cache holds it.
const canonicalWindow = 8 << 10

// canonical returns how much of a JSON string's text, from its start, is spelled as it
// is hashed; 0 before an escape that isn't.
//
// What follows the backslash in a canonical escape, one of bfnrt"\, has an even code, and
// what follows it in others, u and /, an odd one. Escapes that JSON doesn't know stay as
// they are, so that it doesn't matter what they are taken for.
func canonical(raw []byte) int {
	p := raw[:min(len(raw), canonicalWindow)]
	for from := 0; from < len(p); {
		at := oddEscape(p, from)
		if p[at] != '\\' {
			break
		}
		before := at
		for before > 0 && p[before-1] == '\\' {
			before--
		}
		if (at-before)&1 == 0 {
			return at
		}
		from = at + 1 // this backslash is what another one escapes
	}
	return len(p)
}

// oddEscape returns the place, at or after from, of the first backslash before a byte with an
// odd code; the last byte's if there is none.
func oddEscape(p []byte, from int) int {
	const step = 64
	last := len(p) - 1
	for from < last {
		n := bytes.IndexByte(p[from:last], '\\')
		if n < 0 {
			break
		}
		if from += n; p[from+1]&1 != 0 {
			return from
		}
		for from++; last-from >= step; from += step { // where there is one, there are more
			q := (*[step + 1]byte)(p[from:])
			found := oddEscapes(q[0:]) | oddEscapes(q[8:]) | oddEscapes(q[16:]) | oddEscapes(q[24:]) |
				oddEscapes(q[32:]) | oddEscapes(q[40:]) | oddEscapes(q[48:]) | oddEscapes(q[56:])
			if found&highs == 0 {
				continue
			}
			for i := 0; i < step; i += 8 {
				for found = oddEscapes(q[i:]) & highs; found != 0; found &= found - 1 {
					if at := i + bits.TrailingZeros64(found)/8; q[at] == '\\' {
						return from + at
					}
				}
			}
		}
	}
	return last
}

const (
	ones  = 0x0101010101010101
	highs = 0x8080808080808080
)

// oddEscapes returns a word in which the highest bits of bytes tell which of the first eight bytes
// of p are backslashes before a byte with an odd code. Where one is a backslash, the next may
// falsely seem to be one, too.
func oddEscapes(p []byte) uint64 {
	x := word(p) ^ '\\'*ones // the bytes that are 0 borrow
	return (x - ones) &^ x & (word(p[1:]) << 7)
}

// respell appends to dst, as far as its capacity goes, the canonical spelling of the
// escapes at the start of raw, and returns what is left of raw. An escape that the
// end of the body cut is left out.
func respell(dst, raw []byte, cut bool) (spelled, rest []byte) {
	for len(raw) > 0 && raw[0] == '\\' && cap(dst)-len(dst) >= longestSpelling {
		if len(raw) == 1 {
			return dst, nil
		}
		switch raw[1] {
		case '/':
			dst, raw = append(dst, '/'), raw[2:]
		case 'u':
			r, size := escaped(raw, cut)
			switch {
			case size == 0:
				return dst, nil
			case r < 0:
				dst = append(dst, '\\', 'u')
			default:
				dst = appendSpelled(dst, r)
			}
			raw = raw[size:]
		default:
			dst, raw = append(dst, raw[:2]...), raw[2:]
		}
	}
	return dst, raw
}

// longestSpelling is the length of \u00xx.
const longestSpelling = 6

// appendSpelled appends the canonical spelling of a rune.
func appendSpelled(dst []byte, r rune) []byte {
	if r >= utf8.RuneSelf {
		return utf8.AppendRune(dst, r)
	}
	switch c := letters[r]; c {
	case 0:
		return append(dst, byte(r))
	case 'u':
		const hex = "0123456789abcdef"
		return append(dst, '\\', 'u', '0', '0', hex[r>>4], hex[r&15])
	default:
		return append(dst, '\\', c)
	}
}

// letters are what stands after the backslash in the spelling of an ASCII character; 0: it
// stands for itself.
var letters = func() (table [utf8.RuneSelf]byte) {
	for c := range ' ' {
		table[c] = 'u'
	}
	for letter, c := range escapes {
		if c != 0 && c != '/' {
			table[c] = byte(letter)
		}
	}
	return table
}()
