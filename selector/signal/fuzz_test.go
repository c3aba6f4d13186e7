package signal

import (
	"bytes"
	"encoding/json"
	"math/rand/v2"
	"strings"
	"testing"
)

// anyCut writes text in pieces of a size drawn by seed and must tell the same as
// in one piece, and as byte by byte.
func anyCut(t *testing.T, f Format, text []byte, seed uint64) (result, bool) {
	t.Helper()
	whole := tapped(t, f, text)
	output := whole.first > 0
	random := rand.New(rand.NewPCG(seed, 0))
	var pieces [][]byte
	for rest := text; len(rest) > 0; {
		n := min(1+random.IntN(1+int(seed%64)), len(rest))
		pieces = append(pieces, rest[:n])
		rest = rest[n:]
	}
	for _, pieces := range [][][]byte{pieces, split(text, 1)} {
		if got := tapped(t, f, pieces...); got.usage != whole.usage || got.id != whole.id || (got.first > 0) != output {
			t.Fatalf("whole: %+v; in pieces: %+v", whole, got)
		}
	}
	if u := whole.usage; u.PromptTokens < -1 || u.PromptTokens == 0 || u.CachedTokens < -1 ||
		u.PromptTokens > 0 && u.CachedTokens > u.PromptTokens || len(whole.id) > maxID {
		t.Fatalf("impossible: %+v", whole)
	}
	return whole, output
}

// comparable says whether the naive model knows what to make of a document.
func comparable(document []byte) bool {
	return json.Valid(document) && !bytes.Contains(document, []byte(`\u`)) && !repeatsNames(document)
}

func seeds(f *testing.F, format Format) {
	for i := range bodies {
		if b := &bodies[i]; b.format == format && len(b.text) < 4<<10 {
			f.Add([]byte(b.text), uint64(i))
		}
	}
}

func FuzzTapJSON(f *testing.F) {
	seeds(f, JSON)
	f.Fuzz(func(t *testing.T, text []byte, seed uint64) {
		got, output := anyCut(t, JSON, text, seed)
		if output {
			t.Error("a document reported as a stream's first output")
		}
		if !comparable(text) {
			return
		}
		var want figures
		modelFigures(&want, text)
		if got.usage != want.usage() {
			t.Errorf("got %+v, want %+v", got.usage, want.usage())
		}
		var root struct{ ID, Object, Type any }
		if json.Unmarshal(text, &root) != nil {
			return
		}
		if kept := root.Object == "response" || root.Object == "conversation" || root.Type == "message"; !kept && got.id != "" {
			t.Errorf("id %q of no answer that can be continued", got.id)
		}
	})
}

func FuzzTapNDJSON(f *testing.F) {
	seeds(f, NDJSON)
	f.Fuzz(func(t *testing.T, text []byte, seed uint64) {
		got, output := anyCut(t, NDJSON, text, seed)
		documents(t, bytes.Split(text, newline), got.usage, output)
	})
}

func FuzzTapSSE(f *testing.F) {
	seeds(f, SSE)
	f.Fuzz(func(t *testing.T, text []byte, seed uint64) {
		got, output := anyCut(t, SSE, text, seed)
		// Events by a naive reading: a line that isn't ended counts as far as it goes.
		var (
			events [][]byte
			event  []byte
		)
		for line := range bytes.SplitSeq(text, newline) {
			if len(bytes.Trim(line, "\r")) == 0 {
				events, event = append(events, event), nil
			} else if data, isData := bytes.CutPrefix(line, []byte(dataField)); isData {
				event = append(event, data...)
			}
		}
		documents(t, append(events, event), got.usage, output)
	})
}

// documents compares a stream's result with the naive model's, if that can read
// all documents.
func documents(t *testing.T, list [][]byte, usage Usage, output bool) {
	t.Helper()
	var (
		want       figures
		wantOutput bool
	)
	for _, document := range list {
		switch trimmed := bytes.TrimLeft(document, " \t\r\n"); {
		case len(trimmed) == 0 || trimmed[0] != '{':
		case !comparable(document):
			return
		default:
			modelFigures(&want, document)
			wantOutput = wantOutput || modelOutput(document)
		}
	}
	if usage != want.usage() || output != wantOutput {
		t.Errorf("got %+v, output %v; want %+v, output %v", usage, output, want.usage(), wantOutput)
	}
}

// Documents put together at random from the names and values that matter, and
// some that don't, have the figures and the output that the naive model finds.
func TestTapModel(t *testing.T) {
	random := rand.New(rand.NewPCG(3, 4))
	for range 500 {
		text := []byte(randomObject(random, 4))
		got, _ := anyCut(t, JSON, text, random.Uint64())
		var want figures
		if !comparable(text) {
			t.Fatalf("not comparable: %s", text)
		}
		modelFigures(&want, text)
		if got.usage != want.usage() {
			t.Fatalf("%s: got %+v, want %+v", text, got.usage, want.usage())
		}
		event := []byte("data: " + string(text) + "\n\n")
		_, output := anyCut(t, SSE, event, random.Uint64())
		if want := modelOutput(text); output != want {
			t.Fatalf("%s: output %v, want %v", text, output, want)
		}
	}
}

var someNames = strings.Fields(`usage response message meta_info timings sglext cached_tokens_details tokens_evaluated
	prompt_eval_count prompt_eval_cached_count object type choices error prompt_progress id delta text finish_reason role content
	prompt_tokens input_tokens prompt_tokens_details input_tokens_details cache_read_input_tokens cache_creation_input_tokens
	prompt_cache_hit_tokens prompt_cache_miss_tokens cached_tokens cache_n prompt_n device host storage other`)

func randomObject(random *rand.Rand, depth int) string {
	var b strings.Builder
	b.WriteByte('{')
	for i, n := range random.Perm(len(someNames))[:random.IntN(9)] {
		if i > 0 {
			b.WriteByte(',')
		}
		b.WriteString(quote(someNames[n]))
		b.WriteByte(':')
		b.WriteString(randomValue(random, someNames[n], depth-1))
	}
	b.WriteByte('}')
	return b.String()
}

func randomValue(random *rand.Rand, name string, depth int) string {
	switch n := random.IntN(12); {
	case name == "choices" && n < 9:
		choices := make([]string, random.IntN(3))
		for i := range choices {
			choices[i] = randomObject(random, depth)
		}
		return "[" + strings.Join(choices, ", ") + "]"
	case name == "type" && n < 9:
		return quote([]string{"ping", "message_start", "response.created", "response.output_text.delta"}[n%4])
	case name == "object" && n < 6:
		return quote([]string{"error", "response", "chat.completion.chunk"}[n%3])
	case n < 4:
		return []string{"0", "7", "64", "100.0"}[n]
	case n < 8 && depth > 0:
		return randomObject(random, depth)
	}
	return []string{"null", "true", "false", `""`, quote(forged), "[]", "[1]", "{}", "-1", "1e2", " [ { } ] "}[random.IntN(11)]
}

func FuzzParseORCA(f *testing.F) {
	f.Add("TEXT named_metrics.kv_cache_usage_perc=0.4, named_metrics.num_requests_waiting=3.0", "")
	f.Add(`JSON {"named_metrics": {"kv_cache_usage_perc": 0.4, "num_requests_waiting": 3.0}}`, "TEXT ")
	f.Add(`JSON {"named_metrics":{"kv_cache_utilization":0.25,"max_token_capacity":131072}}`, "JSON [")
	f.Fuzz(func(t *testing.T, a, b string) {
		load, ok := ParseORCA([]string{a, b})
		known := false
		for _, v := range []float64{load.QueueDepth, load.KVUsage, load.CapacityTokens} {
			if v != -1 && !plausible(v) {
				t.Errorf("impossible: %+v", load)
			}
			known = known || v >= 0
		}
		if known != ok || load.KVUsage > 1 {
			t.Errorf("impossible: %+v, %v", load, ok)
		}
		if other, _ := ParseORCA([]string{b, a}); other != load {
			t.Errorf("%+v; in the other order %+v", load, other)
		}
		if n, ok := ParseCount([]string{a, b}); ok != (n >= 0) || ok && !plausible(n) {
			t.Errorf("impossible: %v, %v", n, ok)
		}
	})
}
