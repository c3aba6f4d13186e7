package prefixhash

import (
	"encoding/binary"
	"math/bits"
)

// stripe is how much text nh takes at once.
const stripe = 64

// nh is the keyed hash NH of UMAC (Black, Halevi, Krawczyk, Krovetz, Rogaway,
// 1999) over 64-bit words: two different texts of one length give the same 128
// bits under 1 of 2^64 keys, whoever chose them. xxhash64 alone can't promise
// that: there are pairs of texts that collide under half of all its seeds. The
// length of text is a multiple of stripe; key has at least as many bytes.
func nh(text []byte, key []uint64) (hi, lo uint64) {
	for len(text) >= stripe {
		t, k := (*[stripe]byte)(text), (*[stripe / 8]uint64)(key)
		h0, l0 := bits.Mul64(word(t[0:])+k[0], word(t[8:])+k[1])
		h1, l1 := bits.Mul64(word(t[16:])+k[2], word(t[24:])+k[3])
		h2, l2 := bits.Mul64(word(t[32:])+k[4], word(t[40:])+k[5])
		h3, l3 := bits.Mul64(word(t[48:])+k[6], word(t[56:])+k[7])
		hi, lo = add(hi, lo, h0, l0)
		hi, lo = add(hi, lo, h1, l1)
		hi, lo = add(hi, lo, h2, l2)
		hi, lo = add(hi, lo, h3, l3)
		text, key = text[stripe:], key[stripe/8:]
	}
	return hi, lo
}

func word(p []byte) uint64 { return binary.LittleEndian.Uint64(p) }

// add returns the sum of two numbers of 128 bits modulo 2^128.
func add(hi, lo, h, l uint64) (uint64, uint64) {
	lo, carry := bits.Add64(lo, l, 0)
	hi, _ = bits.Add64(hi, h, carry)
	return hi, lo
}

// nhKey returns the key that goes with a seed, for texts up to a length.
func nhKey(seed uint64, length int) []uint64 {
	d := seeded(seed, "nh", "")
	key := make([]uint64, (length+stripe-1)/stripe*stripe/8)
	for i := range key {
		_, _ = d.Write([]byte{0})
		key[i] = d.Sum64()
	}
	return key
}
