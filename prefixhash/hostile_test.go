package prefixhash

import (
	"encoding/binary"
	"fmt"
	"regexp"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"
)

// Bodies made to be expensive, each by a length n.
var hostile = []struct {
	name string
	body func(n int) string
	want Cause
}{
	{"deep lists", func(n int) string {
		return `{"messages":` + strings.Repeat("[", n/2) + strings.Repeat("]", n/2) + `}`
	}, NotJSON},
	{"deep objects in tools", func(n int) string {
		return `{"messages":["x"],"tools":[` + strings.Repeat(`{"a":`, n/6) + "1" + strings.Repeat("}", n/6) + `]}`
	}, NotJSON},
	{"deep, never closed", func(n int) string { return `{"messages":` + strings.Repeat(`[{"content":`, n/12) }, NotJSON},
	{"as deep as allowed, again and again", func(n int) string {
		one := `{"name":"f","parameters":` + strings.Repeat("[", maxDepth-4) + strings.Repeat("]", maxDepth-4) + `},`
		return `{"messages":["x"],"tools":[` + strings.Repeat(one, 1+n/len(one)) + `{}]}`
	}, Keyed},
	{"deep unsound value", func(n int) string {
		return `{"messages":` + strings.Repeat("[", maxDepth-2) + "t" + strings.Repeat("x", n)
	}, NotJSON},
	{"many empty messages", func(n int) string { return `{"messages":[` + strings.Repeat("{},", n/3) + `{}]}` }, Keyed},
	{"many keys", func(n int) string {
		var b strings.Builder
		b.WriteString(`{"messages":["x"],"tools":[{"name":"f","parameters":{`)
		for i := 0; b.Len() < n; i++ {
			fmt.Fprintf(&b, `"%d":0,`, i)
		}
		return b.String() + `"x":0}}]}`
	}, Keyed},
	{"many equal keys", func(n int) string {
		return `{"messages":["x"],"chat_template_kwargs":{` + strings.Repeat(`"a":0,`, n/6) + `"a":1},"tools":[{"name":"f","parameters":{` + strings.Repeat(`"a":0,`, n/6) + `"a":1}}]}`
	}, Keyed},
	{"many top-level keys", func(n int) string {
		return "{" + strings.Repeat(`"messages":["x"],`, n/17) + `"messages":["y"]}`
	}, Keyed},
	{"many escaped keys", func(n int) string {
		return `{"messages":["x"],"metadata":{` + strings.Repeat(`"\u0061":0,`, n/11) + `"a":0}}`
	}, Keyed},
	{"backslashes", func(n int) string { return `{"prompt":"` + strings.Repeat(`\\`, n/2) + `"}` }, Keyed},
	{"escaped quotes", func(n int) string { return `{"prompt":"` + strings.Repeat(`\"`, n/2) + `"}` }, Keyed},
	{"half surrogate pairs", func(n int) string { return `{"prompt":"` + strings.Repeat(`\ud83d`, n/6) + `"}` }, Keyed},
	{"no closing quote", func(n int) string { return `{"prompt":"` + strings.Repeat(`x`, n) }, NotJSON},
	{"numbers", func(n int) string { return `{"prompt":[` + strings.Repeat("1,", n/2) + `1]}` }, Keyed},
	{"one long number", func(n int) string { return `{"prompt":[` + strings.Repeat("1", n) + `]}` }, Keyed},
	{"prompts", func(n int) string { return `{"prompt":[` + strings.Repeat(`"",`, n/3) + `"x"]}` }, Keyed},
	{"white space", func(n int) string { return `{"prompt":` + strings.Repeat(" ", n) + `"x"}` }, Keyed},
	{"data URL without a comma", func(n int) string {
		return `{"messages":[{"content":[{"type":"image_url","image_url":"data:` + strings.Repeat("x", n) + `"}]}]}`
	}, Keyed},
	{"escaped image", func(n int) string { return `{"prompt":"x","images":["` + strings.Repeat(`\/`, n/2) + `"]}` }, Keyed},
	{"invalid UTF-8", func(n int) string { return `{"prompt":"` + strings.Repeat("\xff", n) + `"}` }, Keyed},
	{"long session name", func(n int) string {
		return `{"prompt":"x","prompt_cache_key":"` + strings.Repeat(`\n`, n/2) + `"}`
	}, Keyed},
}

// Time and memory grow with the length of a body and no faster.
func TestHostileBodies(t *testing.T) {
	if raceEnabled {
		t.Skip("measures time")
	}
	const small, large = 128 << 10, 512 << 10
	h := New(Config{Seed: 1})
	for _, c := range hostile {
		t.Run(c.name, func(t *testing.T) {
			short, long := []byte(c.body(small)), []byte(c.body(large))
			var k Key
			if got := h.Sum(&k, "/", long, true, ""); got != c.want {
				t.Errorf("%s, want %s", got, c.want)
			}
			if got := k.Bytes; got > 64*len(long) {
				t.Errorf("weighs %d bytes", got)
			}
			for _, complete := range []bool{true, false} {
				linear := float64(len(long)) / float64(len(short))
				if growth := growth(h, short, long, complete, 4*linear); growth > 4*linear {
					t.Errorf("%.0f times as long for %.0f times as much", growth, linear)
				}
			}
			var before, after runtime.MemStats
			runtime.ReadMemStats(&before)
			New(Config{Seed: 1}).Sum(&k, "/", long, true, "")
			runtime.ReadMemStats(&after)
			if used := after.TotalAlloc - before.TotalAlloc; used > 64*uint64(len(long)) {
				t.Errorf("%d bytes allocated for a body of %d", used, len(long))
			}
		})
	}
}

// growth returns how many times as long a key of long takes, by the best times
// of both. It tries on while that is above the limit, for a busy machine's sake.
func growth(h *Hasher, short, long []byte, complete bool, limit float64) (growth float64) {
	var k Key
	shorter, longer := time.Hour, time.Hour
	for range 50 {
		start := time.Now()
		h.Sum(&k, "/", short, complete, "")
		shorter = min(shorter, time.Since(start))
		start = time.Now()
		h.Sum(&k, "/", long, complete, "")
		longer = min(longer, time.Since(start))
		if growth = float64(longer) / float64(shorter+10*time.Microsecond); growth <= limit {
			break
		}
	}
	return growth
}

// A pattern that reads on to the end for each of its matches.
func TestIgnoreIsLinear(t *testing.T) {
	if raceEnabled {
		t.Skip("measures time")
	}
	h := New(Config{Ignore: regexp.MustCompile(`(?s)q.*z|q`)})
	body := func(n int) []byte { return []byte(`{"prompt":"` + strings.Repeat("q", n) + `"}`) }
	if growth := growth(h, body(256<<10), body(2<<20), true, 3*8); growth > 3*8 {
		t.Errorf("%.0f times as long for 8 times as much", growth)
	}
}

func TestDeepBodyOfHundredThousand(t *testing.T) {
	var k Key
	h := New(Config{})
	for _, body := range []string{
		strings.Repeat("[", 100000) + strings.Repeat("]", 100000),
		strings.Repeat(`{"messages":[`, 100000),
		`{"messages":[{"role":"user","content":"` + strings.Repeat("x", 1000) + `"}],"metadata":` + strings.Repeat("[", 100000) + strings.Repeat("]", 100000) + `}`,
	} {
		for _, complete := range []bool{true, false} {
			if got := h.Sum(&k, chat, []byte(body), complete, ""); got != NotJSON {
				t.Errorf("%s for %.30s", got, body)
			}
		}
	}
}

// A keyer that grew for a freak body isn't kept.
func TestPoolDropsTheOversized(t *testing.T) {
	var r keyer
	h := New(Config{})
	var k Key
	r.sumInto(h, &k, "/", []byte(`{"messages":[`+strings.Repeat("{},", keptNodes)+`{}]}`), true, "")
	if r.release() {
		t.Errorf("a keyer with %d nodes is kept", cap(r.nodes))
	}
	var small keyer
	small.sumInto(h, &k, "/", []byte(`{"messages":["x"]}`), true, "")
	if !small.release() || small.src != nil || small.blocks != nil {
		t.Error("a small keyer isn't kept, or keeps its request")
	}
}

func TestConcurrentUse(t *testing.T) {
	h := New(Config{Seed: 1, Ignore: regexp.MustCompile("nonce")})
	bodies := seeds()
	want := make([]string, len(bodies))
	for i, body := range bodies {
		var k Key
		h.Sum(&k, "/", []byte(body), true, "")
		want[i] = fmt.Sprint(k)
	}
	var wg sync.WaitGroup
	for g := range 8 {
		wg.Go(func() {
			var k Key
			for i := range 500 {
				n := (i*7 + g) % len(bodies)
				h.Sum(&k, "/", []byte(bodies[n]), true, "")
				if got := fmt.Sprint(k); got != want[n] {
					t.Errorf("got %s, want %s", got, want[n])
					return
				}
			}
		})
	}
	wg.Wait()
}

// Pairs of texts that collide under half of all xxhash64 seeds: bit 63 of a
// word of 8 bytes flipped, 2^30*P1/P2 taken from the word 32 bytes later.
func TestBuiltCollisions(t *testing.T) {
	const p1, p2 = 0x9e3779b185ebca87, 0xc2b2ae3d27d4eb4f
	inverse := uint64(1) // of p2 modulo 2^64, by Newton's method
	for range 6 {
		inverse *= 2 - p2*inverse
	}
	difference := uint64(1) << 30
	difference *= p1
	difference *= inverse

	plain, masked, tried := 0, 0, 0
	for seed := range uint64(200) {
		h := New(Config{Seed: seed, BlockBytes: 256})
		for sign := range 2 {
			words := make([]uint64, 127)
			for i := range words {
				words[i] = uint64(i)*0x0101010101010101 + 7
			}
			prompt := func(words []uint64) []byte {
				ids := make([]string, 0, 2*len(words))
				for _, w := range words {
					ids = append(ids, strconv.FormatUint(w&0xffffffff, 10), strconv.FormatUint(w>>32, 10))
				}
				// Two marks and six bytes make a word, so that the others are aligned.
				return []byte(`{"prompt":["123456",` + strings.Join(ids, ",") + `]}`)
			}
			var a, b Key
			h.Sum(&a, "/", prompt(words), true, "")
			at := 64 // in the third block
			words[at] ^= 1 << 63
			if sign == 0 {
				words[at+4] -= difference
			} else {
				words[at+4] += difference
			}
			h.Sum(&b, "/", prompt(words), true, "")
			tried++
			if a.Blocks[len(a.Blocks)-1] == b.Blocks[len(b.Blocks)-1] {
				masked++
			}
			plain += collidesUnmasked(seed, difference, sign == 1)
		}
	}
	if plain < tried/4 {
		t.Errorf("the pairs collide under %d of %d seeds in plain xxhash64: not the pairs that this test is about", plain, tried)
	}
	if masked > 0 {
		t.Errorf("%d of %d pairs collide", masked, tried)
	}
}

func collidesUnmasked(seed, difference uint64, add bool) int {
	text := make([]byte, 64)
	for i := range text {
		text[i] = byte(i)
	}
	a := xxhash64(seed, text)
	text[7] ^= 1 << 7
	word := binary.LittleEndian.Uint64(text[32:])
	if add {
		word += difference
	} else {
		word -= difference
	}
	binary.LittleEndian.PutUint64(text[32:], word)
	if xxhash64(seed, text) == a {
		return 1
	}
	return 0
}
