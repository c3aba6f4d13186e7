package prefixhash

import (
	"encoding/base64"
	"encoding/json"
	"math/rand/v2"
	"strconv"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/cespare/xxhash/v2"
)

// A benchmark's body: a chat with tools and a conversation that fills size
// bytes, 6 % of its words not ASCII; two images of size/2 if images is set.
func benchBody(size int, escaped, images, toolsLast bool) []byte {
	rng := rand.New(rand.NewPCG(1, 2))
	words := strings.Fields("the of and to in is that it was for on are as with his they at be this from have or by one had not but what all were when we there can an your which their said if do will each about how up out them then she many some so these would other into has more her two like him see time could no make than first been its who now people my made over did down only way find use may water long little very after words called just where most know")
	foreign := []string{"größer", "naïve", "日本語", "привет", "☕", "été"}
	text := func(n int) string {
		var b strings.Builder
		for b.Len() < n {
			switch r := rng.IntN(100); {
			case r < 6:
				b.WriteString(foreign[rng.IntN(len(foreign))])
			case r < 9:
				b.WriteString("\n")
			case r < 10:
				b.WriteString(`"quoted"`)
			default:
				b.WriteString(words[rng.IntN(len(words))])
			}
			b.WriteByte(' ')
		}
		return b.String()
	}
	type m = map[string]any
	body := struct {
		Model    string `json:"model"`
		Tools    any    `json:"tools,omitempty"`
		Messages []any  `json:"messages"`
		Late     any    `json:"tools_last,omitempty"`
		Stream   bool   `json:"stream"`
	}{Model: "m", Stream: true}
	var tools []any
	for i := range 1 + min(size/8192, 12) {
		tools = append(tools, m{"type": "function", "function": m{
			"name": "tool_" + strconv.Itoa(i), "description": text(min(size/64, 200)),
			"parameters": m{"type": "object", "properties": m{"path": m{"type": "string", "description": text(60)}, "count": m{"type": "integer"}}, "required": []string{"path"}},
		}})
	}
	if toolsLast {
		body.Late = tools
	} else {
		body.Tools = tools
	}
	left := size
	if images {
		raw := make([]byte, size/2*3/4)
		for range 2 {
			for i := range raw {
				raw[i] = byte(rng.Uint32())
			}
			url := "data:image/png;base64," + base64.StdEncoding.EncodeToString(raw)
			body.Messages = append(body.Messages, m{"role": "user", "content": []any{
				m{"type": "text", "text": text(200)}, m{"type": "image_url", "image_url": m{"url": url}},
			}})
		}
		left = 16 << 10
	}
	body.Messages = append(body.Messages, m{"role": "system", "content": text(left / 4)})
	for i := 0; left/4*3 > 0; i++ {
		n := min(left/4*3, 200+rng.IntN(3000))
		body.Messages = append(body.Messages, m{"role": []string{"user", "assistant"}[i%2], "content": text(n * 9 / 10)})
		left -= n * 4 / 3
	}
	out, err := json.Marshal(body)
	if err != nil {
		panic(err)
	}
	out = []byte(strings.Replace(string(out), "tools_last", "tools", 1))
	if escaped {
		out = escapeNonASCII(out)
	}
	return out
}

func escapeNonASCII(body []byte) []byte {
	var out []byte
	for _, r := range string(body) {
		if r < utf8.RuneSelf {
			out = append(out, byte(r))
			continue
		}
		q := strconv.QuoteToASCII(string(r))
		q = q[1 : len(q)-1]
		if strings.HasPrefix(q, `\U`) {
			hi, lo := 0xd800+(r-0x10000)>>10, 0xdc00+(r-0x10000)&0x3ff
			q = `\u` + strconv.FormatInt(int64(hi), 16) + `\u` + strconv.FormatInt(int64(lo), 16)
		}
		out = append(out, q...)
	}
	return out
}

// The cases of the cost table, each with the most that a key may cost in times
// of an xxhash64 over the body.
type cost struct {
	name                               string
	size                               int
	escaped, images, toolsLast, tokens bool
	most                               float64
}

var costs = []cost{
	{name: "2KB", size: 2 << 10, most: 30},
	{name: "32KB", size: 32 << 10, most: 14},
	{name: "512KB", size: 512 << 10, most: 9},
	{name: "512KB/tools last", size: 512 << 10, toolsLast: true, most: 9},
	{name: "32KB/escaped", size: 32 << 10, escaped: true, most: 30},
	{name: "512KB/escaped", size: 512 << 10, escaped: true, most: 30},
	{name: "4MB/images", size: 4 << 20, images: true, most: 8},
	{name: "128k token ids", size: 128 << 10, tokens: true, most: 60},
}

func (c cost) body() []byte {
	if !c.tokens {
		return benchBody(c.size, c.escaped, c.images, c.toolsLast)
	}
	ids := make([]int, c.size)
	for i := range ids {
		ids[i] = i * 7919 % 128000
	}
	body, err := json.Marshal(map[string]any{"model": "m", "prompt": ids})
	if err != nil {
		panic(err)
	}
	return body
}

func BenchmarkKey(b *testing.B) {
	h := New(Config{Seed: 1})
	for _, c := range costs {
		body := c.body()
		b.Run(c.name, func(b *testing.B) {
			b.SetBytes(int64(len(body)))
			b.ReportAllocs()
			var k Key
			for b.Loop() {
				h.Sum(&k, "/v1/chat/completions", body, true, "")
			}
			b.ReportMetric(float64(len(k.Blocks)), "blocks")
			b.ReportMetric(costRatio(h, &k, body, 0), "x_xxhash64")
		})
	}
}

// costRatio times keys and xxhash64 over the body in turns and returns the
// ratio of their best rounds, at the latest when it is low enough: a busy
// machine disturbs both alike.
func costRatio(h *Hasher, k *Key, body []byte, enough float64) (ratio float64) {
	n := max(1, 128<<10/len(body))
	best := func(best time.Duration, f func()) time.Duration {
		start := time.Now()
		for range n {
			f()
		}
		return min(best, time.Since(start))
	}
	key, floor := time.Hour, time.Hour
	for range 200 {
		key = best(key, func() { h.Sum(k, "/v1/chat/completions", body, true, "") })
		floor = best(floor, func() { xxhash.Sum64(body) })
		if ratio = key.Seconds() / floor.Seconds(); ratio <= enough {
			break
		}
	}
	return ratio
}

// A tenfold slip fails this, noise doesn't.
func TestCost(t *testing.T) {
	if testing.Short() || raceEnabled {
		t.Skip("measures time")
	}
	h := New(Config{Seed: 1})
	for _, c := range costs {
		body := c.body()
		var k Key
		if ratio := costRatio(h, &k, body, c.most); ratio > 3*c.most {
			t.Errorf("%s: a key takes %.1f times an xxhash64 of the body, at most %.0f expected", c.name, ratio, c.most)
		} else {
			t.Logf("%s: %.1f times an xxhash64 of the body (target %.0f)", c.name, ratio, c.most)
		}
	}
}

func BenchmarkFloorXXHash64(b *testing.B) {
	for _, c := range costs {
		body := c.body()
		b.Run(c.name, func(b *testing.B) {
			b.SetBytes(int64(len(body)))
			for b.Loop() {
				xxhash.Sum64(body)
			}
		})
	}
}

func BenchmarkFloorEncodingJSON(b *testing.B) {
	for _, c := range costs {
		body := c.body()
		b.Run(c.name, func(b *testing.B) {
			b.SetBytes(int64(len(body)))
			b.ReportAllocs()
			for b.Loop() {
				var v struct {
					Model    string
					Tools    json.RawMessage
					Messages []struct {
						Role    string
						Content json.RawMessage
					}
				}
				if err := json.Unmarshal(body, &v); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

func BenchmarkKeyParallel(b *testing.B) {
	h := New(Config{Seed: 1})
	body := benchBody(32<<10, false, false, false)
	b.SetBytes(int64(len(body)))
	b.ReportAllocs()
	b.RunParallel(func(pb *testing.PB) {
		var k Key
		for pb.Next() {
			h.Sum(&k, "/v1/chat/completions", body, true, "")
		}
	})
}
