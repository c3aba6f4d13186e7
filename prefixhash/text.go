package prefixhash

import (
	"bytes"
	"unicode/utf16"
	"unicode/utf8"
)

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
	out := dst[:cap(dst)]
	at := len(dst)
	for len(raw) > 0 && len(out)-at >= utf8.UTFMax {
		if raw[0] != '\\' {
			plain := raw[:min(len(raw), len(out)-at)]
			if i := bytes.IndexByte(plain, '\\'); i >= 0 {
				plain = plain[:i]
			}
			at += copy(out[at:], plain)
			raw = raw[len(plain):]
			continue
		}
		if len(raw) == 1 {
			return out[:at], nil
		}
		c := raw[1]
		if plain := escapes[c]; plain != 0 {
			out[at] = plain
			at++
			raw = raw[2:]
			continue
		}
		if c != 'u' {
			out[at], out[at+1] = '\\', c
			at += 2
			raw = raw[2:]
			continue
		}
		if len(raw) < 6 {
			return out[:at], nil
		}
		r, size := hex4(raw[2:6]), 6
		if r < 0 {
			out[at], out[at+1] = '\\', 'u'
			at += 2
			raw = raw[2:]
			continue
		}
		if utf16.IsSurrogate(r) {
			low := rune(-1)
			if len(raw) >= 12 && raw[6] == '\\' && raw[7] == 'u' {
				low = hex4(raw[8:12])
			} else if cut && len(raw) < 12 {
				return out[:at], nil
			}
			if r = utf16.DecodeRune(r, low); r != utf8.RuneError {
				size = 12
			}
		}
		at += utf8.EncodeRune(out[at:], r)
		raw = raw[size:]
	}
	return out[:at], raw
}

// escapes are the bytes that stand for others after a backslash.
var escapes = [256]byte{
	'"': '"', '\\': '\\', '/': '/', 'b': '\b', 'f': '\f', 'n': '\n', 'r': '\r', 't': '\t',
}

// hex4 returns the value of four hexadecimal digits, a negative one if they are none.
func hex4(p []byte) rune {
	_ = p[3]
	a, b, c, d := digits[p[0]], digits[p[1]], digits[p[2]], digits[p[3]]
	if a|b|c|d < 0 {
		return -1
	}
	return rune(a)<<12 | rune(b)<<8 | rune(c)<<4 | rune(d)
}

// digits are the values of hexadecimal digits, -1 for other bytes.
var digits = func() (table [256]int8) {
	for i := range table {
		table[i] = -1
	}
	for i, c := range "0123456789abcdef" {
		table[c] = int8(i)
	}
	for i, c := range "ABCDEF" {
		table[c] = int8(10 + i)
	}
	return table
}()
