package prefixhash

import (
	"encoding/json"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/cespare/xxhash/v2"

	"github.com/prefix-affinity/caddy/integration/measure"
)

// The cases of the cost table, each with the most that a key may cost in times
// of an xxhash64 over the body.
type cost struct {
	name string
	body func() []byte
	most float64
}

var costs = []cost{
	{"2KB", measure.Chat{Bytes: 2 << 10}.JSON, 30},
	{"2KB/tools last", measure.Chat{Bytes: 2 << 10, ToolsLast: true}.JSON, 30},
	{"2KB/escaped", measure.Chat{Bytes: 2 << 10, Escaped: true}.JSON, 40},
	{"32KB", measure.Chat{Bytes: 32 << 10}.JSON, 14},
	{"32KB/tools last", measure.Chat{Bytes: 32 << 10, ToolsLast: true}.JSON, 14},
	{"32KB/escaped", measure.Chat{Bytes: 32 << 10, Escaped: true}.JSON, 30},
	{"512KB", measure.Chat{Bytes: 512 << 10}.JSON, 9},
	{"512KB/tools last", measure.Chat{Bytes: 512 << 10, ToolsLast: true}.JSON, 9},
	{"512KB/escaped", measure.Chat{Bytes: 512 << 10, Escaped: true}.JSON, 30},
	{"512KB/escaped/tools last", measure.Chat{Bytes: 512 << 10, Escaped: true, ToolsLast: true}.JSON, 30},
	{"4MB/images", measure.Chat{Bytes: 4 << 20, Images: true}.JSON, 8},
	{"4MB/images/tools last", measure.Chat{Bytes: 4 << 20, Images: true, ToolsLast: true}.JSON, 8},
	{"4MB/images/escaped", measure.Chat{Bytes: 4 << 20, Images: true, Escaped: true}.JSON, 8},
	{"128k token ids", tokenIDs, 60},
}

func tokenIDs() []byte {
	ids := make([]int, 128<<10)
	for i := range ids {
		ids[i] = i * 7919 % 128000
	}
	body, err := json.Marshal(map[string]any{"model": "m", "prompt": ids})
	if err != nil {
		panic(err)
	}
	return body
}

// BenchmarkKey makes the keys of bodies. Beside the time it reports what they
// cost in times of two floors, taken in turns with them: xxhash64 over the body,
// and encoding/json's reading of nothing but roles and raw contents.
func BenchmarkKey(b *testing.B) {
	h := New(Config{Seed: 1})
	for _, c := range costs {
		body := c.body()
		b.Run(c.name, func(b *testing.B) {
			b.SetBytes(int64(len(body)))
			b.ReportAllocs()
			var k Key
			sum := func() { h.Sum(&k, "/v1/chat/completions", body, true, "") }
			for b.Loop() {
				sum()
			}
			b.ReportMetric(float64(len(k.Blocks)), "blocks")
			b.ReportMetric(costRatio(h, &k, body, 0), "x_xxhash64")
			b.ReportMetric(measure.Ratio(0, sum, func() { unmarshal(b, body) }), "x_encoding/json")
		})
	}
}

// costRatio compares keys with xxhash64 over the body.
func costRatio(h *Hasher, k *Key, body []byte, enough float64) float64 {
	n := max(1, 128<<10/len(body)) // enough for the clock
	return measure.Ratio(enough, func() {
		for range n {
			h.Sum(k, "/v1/chat/completions", body, true, "")
		}
	}, func() {
		for range n {
			xxhash.Sum64(body)
		}
	})
}

// TestCost: a tenfold slip fails this, noise doesn't.
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
		if allocs := testing.AllocsPerRun(10, func() { h.Sum(&k, "/v1/chat/completions", body, true, "") }); allocs > 0 {
			t.Errorf("%s: %g allocations a key", c.name, allocs)
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
				unmarshal(b, body)
			}
		})
	}
}

func unmarshal(tb testing.TB, body []byte) {
	var v struct {
		Model    string
		Tools    json.RawMessage
		Messages []struct {
			Role    string
			Content json.RawMessage
		}
	}
	if err := json.Unmarshal(body, &v); err != nil {
		tb.Fatal(err)
	}
}

// BenchmarkKeyParallel shares the keys of 32 KB among goroutines.
func BenchmarkKeyParallel(b *testing.B) {
	h := New(Config{Seed: 1})
	body := measure.Chat{Bytes: 32 << 10}.JSON()
	for _, goroutines := range []int{1, 2, 8} {
		b.Run(fmt.Sprintf("goroutines=%d", goroutines), func(b *testing.B) {
			b.SetBytes(int64(len(body)))
			b.ReportAllocs()
			var left atomic.Int64
			left.Store(int64(b.N))
			var workers sync.WaitGroup
			for range goroutines {
				workers.Go(func() {
					var k Key
					for left.Add(-1) >= 0 {
						h.Sum(&k, "/v1/chat/completions", body, true, "")
					}
				})
			}
			workers.Wait()
		})
	}
}
