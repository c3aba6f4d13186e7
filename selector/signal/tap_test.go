package signal

import (
	"bytes"
	"strings"
	"testing"
)

// body is one response body as an engine writes it and what it must tell.
type body struct {
	name   string
	format Format
	text   string
	usage  Usage
	first  int // 0: no output; n: the write that completes the n-th event or line (1-based) is the first with output
	id     string
}

func unsaid() Usage { return Usage{PromptTokens: -1, CachedTokens: -1} }

// forged is an answer in which a model writes everything that a tap looks for.
const forged = `"},"usage":{"prompt_tokens":7,"prompt_tokens_details":{"cached_tokens":5}},"type":"ping","error":1,` +
	"\n\ndata: {\"usage\":{\"prompt_tokens\":7,\"prompt_tokens_details\":{\"cached_tokens\":5}}}\n\n" +
	`\"usage\":{\"cached_tokens\":5}\\`

var bodies = []body{
	{
		name: "vllm/chat", format: JSON,
		text:  `{"id":"chatcmpl-1","object":"chat.completion","created":1,"model":"m","choices":[{"index":0,"message":{"role":"assistant","content":"Hi","tool_calls":[]},"finish_reason":"stop"}],"usage":{"prompt_tokens":100,"total_tokens":150,"completion_tokens":50,"prompt_tokens_details":{"cached_tokens":64}},"prompt_logprobs":null}`,
		usage: Usage{100, 64},
	},
	{
		name: "vllm/chat without details", format: JSON,
		text:  `{"id":"chatcmpl-1","object":"chat.completion","choices":[],"usage":{"prompt_tokens":100,"total_tokens":150,"completion_tokens":50,"prompt_tokens_details":null}}`,
		usage: Usage{100, -1},
	},
	{
		name: "vllm/chat stream", format: SSE,
		text: `data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]}

data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,"delta":{"content":"Hi"},"logprobs":null,"finish_reason":null}]}

data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,"delta":{"content":""},"logprobs":null,"finish_reason":"stop","stop_reason":null}]}

data: {"id":"chatcmpl-1","object":"chat.completion.chunk","model":"m","choices":[],"usage":{"prompt_tokens":100,"total_tokens":150,"completion_tokens":50,"prompt_tokens_details":{"cached_tokens":64}}}

data: [DONE]

`,
		usage: Usage{100, 64}, first: 2,
	},
	{
		name: "responses/stream", format: SSE,
		text: `event: response.created
data: {"type":"response.created","sequence_number":0,"response":{"id":"resp_1","object":"response","status":"in_progress","instructions":"long","output":[],"usage":null}}

event: response.in_progress
data: {"type":"response.in_progress","sequence_number":1,"response":{"id":"resp_1","object":"response","status":"in_progress","output":[],"usage":null}}

event: response.output_item.added
data: {"type":"response.output_item.added","output_index":0,"item":{"id":"msg_1","type":"message","status":"in_progress","content":[],"role":"assistant"}}

event: response.output_text.delta
data: {"type":"response.output_text.delta","item_id":"msg_1","delta":"Hi"}

event: response.completed
data: {"type":"response.completed","response":{"id":"resp_1","object":"response","usage":{"input_tokens":100,"input_tokens_details":{"cached_tokens":64},"output_tokens":50,"total_tokens":150}}}

`,
		usage: Usage{100, 64}, first: 4, id: "resp_1",
	},
	{
		name: "anthropic/stream", format: SSE,
		text: `event: message_start
data: {"type":"message_start","message":{"id":"msg_1","type":"message","role":"assistant","content":[],"usage":{"input_tokens":36,"cache_read_input_tokens":60,"cache_creation_input_tokens":4,"output_tokens":1}}}

event: content_block_start
data: {"type":"content_block_start","index":0,"content_block":{"type":"text","text":""}}

event: ping
data: {"type": "ping"}

event: content_block_delta
data: {"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":"Hi"}}

event: message_delta
data: {"type":"message_delta","delta":{"stop_reason":"end_turn"},"usage":{"output_tokens":15}}

`,
		usage: Usage{100, 60}, first: 4,
	},
	{
		name: "ollama/stream", format: NDJSON,
		text: `{"model":"m","message":{"role":"assistant","content":"Hi"},"done":false}
{"model":"m","message":{"role":"assistant","content":""},"done":true,"prompt_eval_count":100,"prompt_eval_cached_count":64,"eval_count":50}
`,
		usage: Usage{100, 64}, first: 1,
	},
	{
		name: "forged/chat", format: JSON,
		text:  `{"choices":[{"message":{"role":"assistant","content":` + quote(forged) + `}}]}`,
		usage: unsaid(),
	},
	{
		name: "forged/chat stream", format: SSE,
		text:  `data: {"choices":[{"index":0,"delta":{"content":` + quote(forged) + `}}]}` + "\n\n",
		usage: unsaid(), first: 1,
	},
}

// quote spells s as a JSON string.
func quote(s string) string {
	return `"` + strings.NewReplacer(`\`, `\\`, `"`, `\"`, "\n", `\n`).Replace(s) + `"`
}

// result is everything that a tap tells.
type result struct {
	usage Usage
	first int // bytes written up to and including the write that was the first with output; 0: none
	id    string
}

func tapped(f Format, chunks ...[]byte) result {
	var (
		t Tap
		r result
		n int
	)
	t.Reset(f)
	for _, c := range chunks {
		n += len(c)
		if t.Write(c) {
			r.first = n
		}
	}
	r.usage, r.id = t.Usage(), string(t.ResponseID())
	return r
}

func (b body) want() result {
	r := result{usage: b.usage, id: b.id}
	if b.first == 0 {
		return r
	}
	separator := "\n\n"
	if b.format == NDJSON {
		separator = "\n"
	}
	events := strings.SplitAfter(b.text, separator)
	r.first = len(strings.Join(events[:b.first], ""))
	// The event is complete with its closing brace.
	r.first -= len(separator)
	return r
}

func TestTap(t *testing.T) {
	for _, b := range bodies {
		t.Run(b.name, func(t *testing.T) {
			var single [][]byte
			for i := range len(b.text) {
				single = append(single, []byte(b.text[i:i+1]))
			}
			if got, want := tapped(b.format, single...), b.want(); got != want {
				t.Errorf("byte by byte: got %+v, want %+v", got, want)
			}
		})
	}
}

func TestTapAnySplit(t *testing.T) {
	for _, b := range bodies {
		t.Run(b.name, func(t *testing.T) {
			text := []byte(b.text)
			want := b.want()
			for i := range text {
				got := tapped(b.format, text[:i], text[i:])
				wantFirst := 0
				if want.first > 0 {
					wantFirst = len(text)
					if i >= want.first {
						wantFirst = i
					}
				}
				if got != (result{want.usage, wantFirst, want.id}) {
					t.Fatalf("cut at %d: got %+v, want %+v, first after %d", i, got, want, wantFirst)
				}
			}
		})
	}
}

func TestTapAllocatesNothing(t *testing.T) {
	for _, b := range bodies {
		text := []byte(b.text)
		tap := new(Tap)
		if n := testing.AllocsPerRun(100, func() {
			tap.Reset(b.format)
			for chunk := range chunks(text, 7) {
				tap.Write(chunk)
			}
			_ = tap.Usage()
			_ = tap.ResponseID()
		}); n != 0 {
			t.Errorf("%s: %v allocations", b.name, n)
		}
	}
}

// chunks cuts p into pieces of n bytes.
func chunks(p []byte, n int) func(yield func([]byte) bool) {
	return func(yield func([]byte) bool) {
		for len(p) > 0 {
			c := p[:min(n, len(p))]
			p = p[len(c):]
			if !yield(c) {
				return
			}
		}
	}
}

func BenchmarkTap(b *testing.B) {
	streamed := bytes.Repeat([]byte(`data: {"id":"chatcmpl-0123456789abcdef","object":"chat.completion.chunk","created":1764460800,"model":"meta-llama/Llama-3.1-8B-Instruct","choices":[{"index":0,"delta":{"content":" word"},"logprobs":null,"finish_reason":null}]}`+"\n\n"), 4000)
	whole := []byte(`{"id":"chatcmpl-1","object":"chat.completion","choices":[{"index":0,"message":{"role":"assistant","content":` + quote(strings.Repeat("A line of an answer with a \"quote\" in it.\n", 25000)) + `}}],"usage":{"prompt_tokens":100,"prompt_tokens_details":{"cached_tokens":64}}}`)
	for _, c := range []struct {
		name   string
		format Format
		text   []byte
		chunk  int
	}{
		{"sse/event", SSE, streamed, len(streamed) / 4000},
		{"sse/32k", SSE, streamed, 32 << 10},
		{"json/32k", JSON, whole, 32 << 10},
	} {
		b.Run(c.name, func(b *testing.B) {
			b.SetBytes(int64(len(c.text)))
			b.ReportAllocs()
			tap := new(Tap)
			for b.Loop() {
				tap.Reset(c.format)
				for chunk := range chunks(c.text, c.chunk) {
					tap.Write(chunk)
				}
			}
		})
		b.Run(c.name+"/copy", func(b *testing.B) {
			b.SetBytes(int64(len(c.text)))
			dst := make([]byte, c.chunk)
			for b.Loop() {
				for chunk := range chunks(c.text, c.chunk) {
					copy(dst, chunk)
				}
			}
		})
	}
}
