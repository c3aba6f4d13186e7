package prefixhash

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"unicode/utf8"
)

// spellingOf returns what is hashed of a JSON string's text.
func spellingOf(raw string, cut bool) string {
	var c chain
	c.begin(0, longKey, 8*len(longKey))
	c.spelled([]byte(raw), cut)
	return string(c.open[:c.used])
}

var longKey = nhKey(0, 64<<10)

// naiveSpelling spells text like JavaScript's JSON.stringify.
func naiveSpelling(text string) string {
	var b strings.Builder
	m := model{}
	m.text(text)
	for _, u := range m.units {
		b.WriteByte(u.text)
	}
	return b.String()
}

func TestSpelling(t *testing.T) {
	for _, c := range []struct {
		name, raw, want string
		cut             bool
	}{
		{"canonical/plain", `a b`, `a b`, false},
		{"canonical/letters", `\b\f\n\r\t\"\\`, `\b\f\n\r\t\"\\`, false},
		{"canonical/control", `\u0000\u001f`, `\u0000\u001f`, false},
		{"canonical/UTF-8", `é日😀`, `é日😀`, false},
		{"respelled/slash", `a\/b`, `a/b`, false},
		{"respelled/letters", `\u0008\u000C\u000a\u000D\u0009\u0022\u005c`, `\b\f\n\r\t\"\\`, false},
		{"respelled/control", `\u001F`, `\u001f`, false},
		{"respelled/ASCII", `\u0041\u007f`, "A\x7f", false},
		{"respelled/UTF-8", `\u00e9\u65E5\ud83d\uDE00`, `é日😀`, false},
		{"respelled/half of a pair", `\ud83dx\ude00`, "\uFFFDx\uFFFD", false},
		{"backslashes/before u", `\\u0041\\\u0041\\\\u0041`, `\\u0041\\A\\\\u0041`, false},
		{"backslashes/before a slash", `\\/\\\/`, `\\/\\/`, false},
		{"unknown/even", `\d\s`, `\d\s`, false},
		{"unknown/odd", `\a\c`, `\a\c`, false},
		{"unknown/u", `\u00zz\u00`, `\u00zz`, true},
		{"cut/after the backslash", `ab\`, `ab`, true},
		{"cut/after an escaped one", `ab\\`, `ab\\`, true},
		{"cut/in an escape", `ab\u00e`, `ab`, true},
		{"cut/between the halves of a pair", `ab\ud83d\ud`, `ab`, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			if got := spellingOf(c.raw, c.cut); got != c.want {
				t.Errorf("%s is hashed as %s, want %s", c.raw, got, c.want)
			}
		})
	}
}

// What is hashed depends on the text alone, wherever its escapes fall in what is looked
// at in one go.
func TestSpellingOfAnyString(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	pieces := []string{
		`a`, `plain words `, `]`, `u`, `/`, `\n`, `\"`, `\\`, `\\\\`, `\/`, `\t`, `\u000a`, `\u005C`, `\u00e9`, `\ud83d\ude00`, `é`, `日本`,
		strings.Repeat("x", 63), strings.Repeat("y", 64), strings.Repeat(`\\`, 40),
	}
	for range 3000 {
		var b strings.Builder
		if random.IntN(4) == 0 {
			b.WriteString(strings.Repeat("z", canonicalWindow-random.IntN(100)))
		}
		for range random.IntN(40) {
			b.WriteString(pieces[random.IntN(len(pieces))])
		}
		raw := b.String()
		var text string
		if err := json.Unmarshal([]byte(`"`+raw+`"`), &text); err != nil {
			t.Fatal(err)
		}
		checkSpelling(t, raw, text)
	}
}

func checkSpelling(t *testing.T, raw, text string) {
	t.Helper()
	want := naiveSpelling(text)
	if got := spellingOf(raw, false); got != want {
		t.Fatalf("%q is hashed as\n     %q\nwant %q", raw, got, want)
	}
	if got := spellingOf(want, false); got != want {
		t.Fatalf("%q is hashed as\n     %q", want, got)
	}
	if n := canonical([]byte(want)); n != len(want) && len(want) < canonicalWindow && !strings.Contains(want, `\u`) {
		t.Fatalf("%q is its own spelling, but taken for it up to %d only", want, n)
	}
	var spelt chain
	spelt.begin(0, longKey, 8*len(longKey))
	spelt.spell([]byte(text))
	if got := string(spelt.open[:spelt.used]); got != want {
		t.Fatalf("text %q is spelled\n     %q\nwant %q", text, got, want)
	}
	for cut := range min(len(raw), 40) { // what is hashed of a head begins what is hashed of the whole
		if head := spellingOf(raw[:len(raw)-cut], true); !strings.HasPrefix(want, head) {
			t.Fatalf("%q, cut, is hashed as %q, the whole as %q", raw[:len(raw)-cut], head, want)
		}
	}
}

func FuzzSpelling(f *testing.F) {
	f.Add([]byte(`a\n\u00e9\/`))
	f.Fuzz(func(t *testing.T, raw []byte) {
		if len(raw) > 40<<10 {
			return
		}
		var text string
		if !utf8.Valid(raw) || json.Unmarshal(fmt.Appendf(nil, `"%s"`, raw), &text) != nil {
			spellingOf(string(raw), true) // must not panic
			return
		}
		if decoded := appendDecoded(nil, raw, false); string(decoded) != text {
			t.Fatalf("%q is decoded as %q, want %q", raw, decoded, text)
		}
		checkSpelling(t, string(raw), text)
	})
}

// Whole blocks are hashed where they stand in the body, others as copies: it makes no difference.
func TestBlocksInPlace(t *testing.T) {
	text := bytes.Repeat([]byte("0123456789abcdef"), 4<<10)
	key := nhKey(3, coarse*256)
	blocks := func(pieces ...int) []Block {
		var c chain
		c.begin(5, key, 256)
		c.seal(nil)
		rest := text
		for len(rest) > 0 {
			for _, n := range pieces {
				n = min(n, len(rest))
				c.write(rest[:n])
				rest = rest[n:]
			}
		}
		c.cut()
		return c.blocks
	}
	want := blocks(1) // no piece fills a block
	for _, pieces := range [][]int{{len(text)}, {255, 1}, {256}, {257}, {1024, 7}, {10_000}} {
		if got := blocks(pieces...); fmt.Sprint(got) != fmt.Sprint(want) {
			t.Errorf("written in pieces of %v it has other blocks", pieces)
		}
	}
}
