package signal

import (
	"bytes"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"unsafe"
)

// result is everything that a Tap tells of a body.
type result struct {
	usage Usage
	first int // bytes passed when Write reported the first output; 0: never
	id    string
}

// tapped writes a body in pieces.
func tapped(t *testing.T, f Format, pieces ...[]byte) result {
	t.Helper()
	var (
		tap Tap
		r   result
		n   int
	)
	tap.Reset(f)
	for _, p := range pieces {
		n += len(p)
		if tap.Write(p) {
			if r.first > 0 {
				t.Errorf("first output reported after %d bytes and again after %d", r.first, n)
			}
			r.first = n
		}
	}
	r.usage, r.id = tap.Usage(), string(tap.ResponseID())
	return r
}

// want is what a Tap tells that gets the body byte by byte: an event with output
// is complete with its closing brace.
func (b *body) want() result {
	r := result{usage: b.usage, id: b.id}
	if b.first == 0 {
		return r
	}
	separator := "\n\n"
	switch {
	case b.format == NDJSON:
		separator = "\n"
	case strings.Contains(b.text, "\r\n"):
		separator = "\r\n\r\n"
	}
	events := strings.SplitAfter(b.text, separator)
	r.first = len(strings.Join(events[:b.first], "")) - len(separator)
	return r
}

func split(p []byte, n int) [][]byte { return slices.Collect(slices.Chunk(p, n)) }

func TestTap(t *testing.T) {
	for i := range bodies {
		b := &bodies[i]
		t.Run(b.name, func(t *testing.T) {
			if got, want := tapped(t, b.format, split([]byte(b.text), 1)...), b.want(); got != want {
				t.Errorf("got %+v, want %+v", got, want)
			}
		})
	}
}

// However a body is cut, the Tap tells the same, and of the first output with
// the write that completes it.
func TestTapCut(t *testing.T) {
	for i := range bodies {
		b := &bodies[i]
		t.Run(b.name, func(t *testing.T) {
			text := []byte(b.text)
			cuts := make([]int, 0, len(text))
			for cut := range text {
				if len(text) < 4<<10 || cut < 1<<10 || cut > len(text)-1<<10 {
					cuts = append(cuts, cut)
				}
			}
			for _, cut := range cuts {
				want := b.want()
				if want.first > 0 {
					whole := want.first
					want.first = len(text)
					if cut >= whole {
						want.first = cut
					}
				}
				if got := tapped(t, b.format, text[:cut], text[cut:]); got != want {
					t.Fatalf("cut at %d: got %+v, want %+v", cut, got, want)
				}
			}
			random := rand.New(rand.NewPCG(1, uint64(len(text))))
			for range 50 {
				var pieces [][]byte
				for rest := text; len(rest) > 0; {
					n := min(1+random.IntN(40), len(rest))
					pieces = append(pieces, rest[:n])
					rest = rest[n:]
				}
				got, want := tapped(t, b.format, pieces...), b.want()
				if want.first > 0 {
					for end, n := 0, 0; n < len(pieces); n++ {
						if end += len(pieces[n]); end >= want.first {
							want.first = end
							break
						}
					}
				}
				if got != want {
					t.Fatalf("got %+v, want %+v", got, want)
				}
			}
		})
	}
}

// The id is there as soon as it was read, so that a stream's next turn can be
// routed while the stream still runs.
func TestTapResponseIDEarly(t *testing.T) {
	var tap Tap
	tap.Reset(SSE)
	tap.Write([]byte(`data: {"type":"response.created","response":{"id":"resp_1"`))
	if id := tap.ResponseID(); string(id) != "resp_1" {
		t.Errorf("got %q, want %q", id, "resp_1")
	}
}

func TestTapReset(t *testing.T) {
	var tap Tap
	for range 2 {
		for i := range bodies {
			b := &bodies[i]
			tap.Reset(b.format)
			first := tap.Write([]byte(b.text))
			if tap.Usage() != b.usage || string(tap.ResponseID()) != b.id || first != (b.first > 0) {
				t.Errorf("%s: %+v, %q, %v", b.name, tap.Usage(), tap.ResponseID(), first)
			}
		}
	}
}

func TestTapAllocatesNothing(t *testing.T) {
	tap := new(Tap)
	for i := range bodies {
		b := &bodies[i]
		text := []byte(b.text)
		if n := testing.AllocsPerRun(10, func() {
			tap.Reset(b.format)
			for chunk := range slices.Chunk(text, 7) {
				tap.Write(chunk)
			}
			_ = tap.Usage()
			_ = tap.ResponseID()
		}); n != 0 {
			t.Errorf("%s: %v allocations", b.name, n)
		}
	}
	if size := unsafe.Sizeof(*tap); size > 1<<10 {
		t.Errorf("a Tap has %d bytes, want at most 1024", size)
	}
}

func TestFormatOf(t *testing.T) {
	for _, c := range []struct {
		contentType string
		want        Format
	}{
		{"application/json", JSON},
		{"Application/JSON; charset=utf-8", JSON},
		{"text/event-stream", SSE},
		{" text/event-stream ;charset=utf-8", SSE},
		{"application/x-ndjson", NDJSON},
		{"application/ndjson", NDJSON},
		{"", None},
		{"text/html", None},
		{"application/jsonp", None},
		{"application/octet-stream; x=application/json", None},
	} {
		if got := FormatOf(c.contentType); got != c.want {
			t.Errorf("FormatOf(%q) = %v, want %v", c.contentType, got, c.want)
		}
	}
}

// A stream of what 100 users read, and one long answer full of quotes.
func BenchmarkTap(b *testing.B) {
	const event = `data: {"id":"chatcmpl-0123456789abcdef","object":"chat.completion.chunk","created":1764460800,"model":"meta-llama/Llama-3.1-8B-Instruct","choices":[{"index":0,"delta":{"content":" word"},"logprobs":null,"finish_reason":null}]}` + "\n\n"
	stream := bytes.Repeat([]byte(event), 4000)
	answer := []byte(`{"id":"chatcmpl-1","object":"chat.completion","choices":[{"index":0,"message":{"role":"assistant","content":` + quote(strings.Repeat("A line of an answer with a \"quote\" in it.\n", 25000)) + `}}],"usage":{"prompt_tokens":100,"prompt_tokens_details":{"cached_tokens":64}}}`)
	vector := []byte(`{"object":"list","data":[{"embedding":[` + strings.Repeat("0.0123456789,", 80000) + `0]}],"usage":{"prompt_tokens":100}}`)
	for _, c := range []struct {
		name   string
		format Format
		text   []byte
		chunk  int
	}{
		{"sse/event by event", SSE, stream, len(event)},
		{"sse/32k", SSE, stream, 32 << 10},
		{"json/32k", JSON, answer, 32 << 10},
		{"embedding/32k", JSON, vector, 32 << 10},
	} {
		b.Run(c.name, func(b *testing.B) {
			b.SetBytes(int64(len(c.text)))
			b.ReportAllocs()
			tap := new(Tap)
			for b.Loop() {
				tap.Reset(c.format)
				for chunk := range slices.Chunk(c.text, c.chunk) {
					tap.Write(chunk)
				}
			}
		})
		b.Run(c.name+"/copy", func(b *testing.B) {
			b.SetBytes(int64(len(c.text)))
			dst := make([]byte, c.chunk)
			for b.Loop() {
				for chunk := range slices.Chunk(c.text, c.chunk) {
					copy(dst, chunk)
				}
			}
		})
	}
}
