package prefixhash

import (
	"bytes"
	"unicode/utf16"
	"unicode/utf8"
)

// appendDecoded appends the text that a JSON string spells. Escapes that JSON doesn't
// know stay as they are, halves of surrogate pairs become U+FFFD; an escape that the end
// of the body cut is left out.
func appendDecoded(dst, raw []byte, cut bool) []byte {
	for {
		n := bytes.IndexByte(raw, '\\')
		if n < 0 {
			return append(dst, raw...)
		}
		dst, raw = append(dst, raw[:n]...), raw[n:]
		if len(raw) == 1 {
			return dst
		}
		switch c := raw[1]; {
		case escapes[c] != 0:
			dst, raw = append(dst, escapes[c]), raw[2:]
		case c != 'u':
			dst, raw = append(dst, '\\', c), raw[2:]
		default:
			r, size := escaped(raw, cut)
			switch {
			case size == 0:
				return dst
			case r < 0:
				dst = append(dst, '\\', 'u')
			default:
				dst = utf8.AppendRune(dst, r)
			}
			raw = raw[size:]
		}
	}
}

// escaped returns the rune that a \u escape at the start of raw stands for, and its
// length. The rune is negative where it isn't one, the length 0 where the end of the body
// cut it.
func escaped(raw []byte, cut bool) (r rune, size int) {
	if len(raw) < 6 {
		return 0, 0
	}
	if r = hex4(raw[2:6]); r < 0 {
		return r, 2
	}
	if !utf16.IsSurrogate(r) {
		return r, 6
	}
	low := rune(-1)
	if len(raw) >= 12 && raw[6] == '\\' && raw[7] == 'u' {
		low = hex4(raw[8:12])
	} else if cut && len(raw) < 12 {
		return 0, 0
	}
	if r = utf16.DecodeRune(r, low); r == utf8.RuneError {
		return r, 6
	}
	return r, 12
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
