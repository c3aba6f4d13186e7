package prefixhash

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
)

// A conversation of any API: a body for each number of turns.
type conversation struct {
	name, path string
	turn       func(rng *rand.Rand) []any         // one turn's messages or items
	body       func(history []any) map[string]any // the request that sends them
}

type dict = map[string]any

func words(rng *rand.Rand, most int) string {
	list := []string{"the", "größe", "日本", "😀", "a\nb", `"q"`, "\\", "word", "longer-word", "\u0001", "/"}
	var b strings.Builder
	for range rng.IntN(most) {
		b.WriteString(list[rng.IntN(len(list))] + " ")
	}
	return b.String()
}

func conversations(rng *rand.Rand) []conversation {
	system := words(rng, 100)
	tools := []any{
		dict{"type": "function", "function": dict{"name": "f", "description": words(rng, 30), "parameters": dict{"type": "object", "properties": dict{"a": dict{"type": "string"}}}}},
		dict{"type": "function", "function": dict{"name": "g"}},
	}
	id := func() string { return fmt.Sprint("call_", rng.IntN(1000)) }
	image := func() string { return "data:image/png;base64," + fmt.Sprint(rng.IntN(5)) }
	return []conversation{
		{"chat", chat, func(rng *rand.Rand) []any {
			call := id()
			return [][]any{
				{dict{"role": "user", "content": words(rng, 50)}, dict{"role": "assistant", "content": words(rng, 50)}},
				{dict{"role": "user", "content": []any{dict{"type": "text", "text": words(rng, 50)}, dict{"type": "image_url", "image_url": dict{"url": image()}}}}},
				{
					dict{"role": "assistant", "content": nil, "tool_calls": []any{dict{"id": call, "type": "function", "function": dict{"name": "f", "arguments": `{"a":"` + id() + `"}`}}}},
					dict{"role": "tool", "tool_call_id": call, "content": words(rng, 200)},
				},
			}[rng.IntN(3)]
		}, func(history []any) map[string]any {
			return dict{"model": "m", "messages": append([]any{dict{"role": "system", "content": system}}, history...), "tools": tools}
		}},
		{"responses", responses, func(rng *rand.Rand) []any {
			call := id()
			return [][]any{
				{dict{"type": "message", "id": id(), "role": "user", "content": []any{dict{"type": "input_text", "text": words(rng, 50)}}}},
				{dict{"role": "user", "content": words(rng, 50)}, dict{"type": "reasoning", "id": id(), "summary": []any{dict{"type": "summary_text", "text": words(rng, 10)}}}},
				{
					dict{"type": "function_call", "id": id(), "call_id": call, "name": "f", "arguments": "{}", "status": "completed"},
					dict{"type": "function_call_output", "id": id(), "call_id": call, "output": words(rng, 200)},
				},
				{dict{"type": "web_search_call", "id": id(), "action": dict{"query": words(rng, 5), "type": "search"}}},
			}[rng.IntN(4)]
		}, func(history []any) map[string]any {
			return dict{"model": "m", "instructions": system, "input": history, "tools": []any{dict{"type": "function", "name": "f", "strict": true}}}
		}},
		{"anthropic", anthropic, func(rng *rand.Rand) []any {
			call := id()
			return [][]any{
				{dict{"role": "user", "content": words(rng, 50)}, dict{"role": "assistant", "content": []any{dict{"type": "text", "text": words(rng, 50)}}}},
				{
					dict{"role": "assistant", "content": []any{dict{"type": "thinking", "thinking": words(rng, 20), "signature": "s"}, dict{"type": "tool_use", "id": call, "name": "f", "input": dict{"a": words(rng, 3)}}}},
					dict{"role": "user", "content": []any{dict{"type": "tool_result", "tool_use_id": call, "content": []any{dict{"type": "text", "text": words(rng, 200)}, dict{"type": "image", "source": dict{"type": "base64", "media_type": "image/png", "data": "AAAA"}}}}}},
				},
			}[rng.IntN(2)]
		}, func(history []any) map[string]any {
			return dict{"model": "m", "max_tokens": 9, "system": []any{dict{"type": "text", "text": system}}, "messages": history, "tools": []any{dict{"name": "f", "input_schema": dict{"type": "object"}}}}
		}},
		{"ollama chat", "/api/chat", func(rng *rand.Rand) []any {
			return [][]any{
				{dict{"role": "user", "content": words(rng, 50), "images": []any{"AAAA", "BBBB"}}, dict{"role": "assistant", "content": words(rng, 50)}},
				{
					dict{"role": "assistant", "content": "", "tool_calls": []any{dict{"function": dict{"name": "f", "arguments": dict{"a": words(rng, 3)}}}}},
					dict{"role": "tool", "tool_name": "f", "content": words(rng, 100)},
				},
			}[rng.IntN(2)]
		}, func(history []any) map[string]any {
			return dict{"model": "m", "messages": append([]any{dict{"role": "system", "content": system}}, history...), "tools": tools, "stream": false}
		}},
		{"llama.cpp infill", "/infill", func(rng *rand.Rand) []any {
			return []any{dict{"filename": id() + ".go", "text": words(rng, 200)}}
		}, func(history []any) map[string]any {
			return dict{"input_extra": history, "input_prefix": "", "input_suffix": "}"}
		}},
		{"tokens", "/v1/completions", func(rng *rand.Rand) []any {
			ids := make([]any, 1+rng.IntN(200))
			for i := range ids {
				ids[i] = rng.IntN(128000)
			}
			return ids
		}, func(history []any) map[string]any { return dict{"model": "m", "prompt": history} }},
		{"ollama context", "/api/generate", func(rng *rand.Rand) []any {
			return []any{rng.IntN(128000), rng.IntN(128000), rng.IntN(128000), rng.IntN(128000)}
		}, func(history []any) map[string]any { return dict{"model": "m", "prompt": "x", "context": history} }},
		{"text", "/v1/completions", func(rng *rand.Rand) []any { return []any{"x" + words(rng, 100)} }, func(history []any) map[string]any {
			return dict{"model": "m", "prompt": fmt.Sprint(history...)}
		}},
		{"sglang", "/generate", func(rng *rand.Rand) []any { return []any{"x" + words(rng, 100)} }, func(history []any) map[string]any {
			return dict{"text": fmt.Sprint(history...), "lora_path": "l", "image_data": "AAAA"}
		}},
		{"tgi", "/generate", func(rng *rand.Rand) []any { return []any{"x" + words(rng, 100)} }, func(history []any) map[string]any {
			return dict{"inputs": fmt.Sprint(history...)}
		}},
	}
}

// A conversation's messages that are a prefix of another's give hashes that
// are a prefix of the other's, and different next messages different hashes.
func TestPrefixOfMessages(t *testing.T) {
	for seed := range uint64(15) {
		rng := rand.New(rand.NewPCG(seed, 1))
		for _, c := range conversations(rng) {
			var history []any
			before, turns := Key{}, 1+rng.IntN(8)
			for turn := range turns {
				history = append(history, c.turn(rng)...)
				k := keyOf(t, c, history)
				// Prompts of messages share all their blocks, others all but
				// the last, which may be short.
				want := len(before.Blocks)
				switch c.name {
				case "tokens", "ollama context", "text", "sglang", "tgi", "llama.cpp infill":
					want = tailless(before, c.name)
				}
				if n := shared(before, k); n < want {
					t.Fatalf("%s, seed %d, turn %d: %d of the last turn's %d blocks shared, want %d", c.name, seed, turn, n, len(before.Blocks), want)
				}
				before = k
			}
			if c.name != "chat" && c.name != "responses" && c.name != "anthropic" {
				continue
			}
			at := rng.IntN(len(history))
			other := slices.Clone(history)
			other[at] = dict{"role": "user", "content": "something else"}
			a, b := keyOf(t, c, history), keyOf(t, c, other)
			prefix := keyOf(t, c, history[:max(at, 1)])
			if n := shared(a, b); at > 0 && n < len(prefix.Blocks) || n == len(a.Blocks) {
				t.Fatalf("%s, seed %d: %d of %d blocks shared although message %d differs (%d before it)", c.name, seed, n, len(a.Blocks), at, len(prefix.Blocks))
			}
		}
	}
}

// tailless returns how many blocks of a prompt without messages come again
// when it grows: those before what stands at its end.
func tailless(k Key, name string) int {
	switch n := len(k.Blocks); name {
	case "ollama context": // its prompt, and the context's last block
		return max(0, n-2)
	case "llama.cpp infill": // prefix, suffix and prompt follow the files
		return max(0, n-3)
	default:
		return max(0, n-1)
	}
}

func keyOf(t *testing.T, c conversation, history []any) Key {
	t.Helper()
	body, err := json.Marshal(c.body(history))
	if err != nil {
		t.Fatal(err)
	}
	var k Key
	if cause := New(Config{BlockBytes: 32, Seed: 9}).Sum(&k, c.path, body, true, ""); cause != Keyed && len(history) > 0 {
		t.Fatalf("%s: %s for %.300s", c.name, cause, body)
	}
	testModel(t, body)
	return k
}

// The head of a body gives leading blocks of the body's key, wherever it is
// cut, as long as the body's members come in the prompt's order.
func TestHeads(t *testing.T) {
	body := []byte(`{"model":"m","tools":[{"name":"f","description":"` + strings.Repeat("d", 50) + `"}],"system":"` + strings.Repeat(`s\u00e9`, 20) + `","messages":[` +
		`{"role":"user","content":"` + strings.Repeat(`\ud83d\ude00 x\n`, 20) + `"},` +
		`{"role":"assistant","content":[{"type":"text","text":"` + strings.Repeat(`y`, 100) + `"},{"type":"tool_use","id":"1","name":"f","input":{"a":[1,22,333],"b":{"c":"` + strings.Repeat(`z\"`, 30) + `"}}}]},` +
		`{"role":"user","content":[{"type":"tool_result","tool_use_id":"1","content":"` + strings.Repeat(`\\`, 50) + `"},{"type":"image","source":{"type":"base64","data":"AAAA"}}]},` +
		`{"role":"user","content":"` + strings.Repeat("w", 100) + `"}],"prompt_cache_key":"k"}`)
	tokens := []byte(`{"model":"m","prompt":[` + strings.Repeat("128000, 7,", 50) + `1]}`)
	text := []byte(`{"model":"m","prompt":"` + strings.Repeat(`\u65e5x`, 100) + `"}`)
	h := New(Config{BlockBytes: 16, Seed: 1})
	for _, body := range [][]byte{body, tokens, text} {
		var whole, head Key
		h.Sum(&whole, "/", body, true, "")
		toolsEnd := strings.Index(string(body), `"system"`)
		last := 0
		for cut := range len(body) {
			h.Sum(&head, "/", body[:cut], false, "")
			if cut < toolsEnd {
				continue // the tools aren't whole
			}
			if n := shared(whole, head); n != len(head.Blocks) {
				t.Fatalf("cut at %d (...%s): %d of the head's %d blocks are the body's", cut, body[max(0, cut-20):cut], n, len(head.Blocks))
			}
			last = len(head.Blocks)
		}
		if last < len(whole.Blocks)-1 {
			t.Errorf("the longest head has %d of %d blocks", last, len(whole.Blocks))
		}
	}
}

// Random bodies of known and unknown members, nested anyhow, have the naive
// model's key.
func TestRandomBodies(t *testing.T) {
	names := []string{"x", "\u00e9", "id", "status", "encoding_format"}
	for name := range fieldNames {
		names = append(names, name)
	}
	names = append(names,
		"type", "role", "name", "phase", "content", "text", "refusal", "output", "summary", "reasoning", "reasoning_content",
		"thinking", "encrypted_content", "tool_calls", "function_call", "function", "custom", "call_id", "tool_call_id", "tool_use_id",
		"tool_name", "arguments", "input", "tools", "images", "title", "is_error", "detail", "result", "image_url", "image",
		"input_audio", "source", "url", "file_data", "data", "file_id", "uuid", "description", "parameters", "input_schema",
		"cache_control", "filename", "prompt_string", "multimodal_data", "effort", "adapter_id")
	slices.Sort(names)
	texts := []string{
		"", "a", "user", "system", "message", "text", "image", "function", "function_call", "function_call_output", "reasoning",
		"item_reference", "tool_use", "document", "content", "refusal", "auto", "low", "data:image/png;base64,AAAA", "data:x",
		strings.Repeat("long ", 30), strings.Repeat("日本", 30),
	}
	scalars := []any{nil, true, false, 1, 2.5, -7}
	var value func(rng *rand.Rand, depth int) string
	body := func(rng *rand.Rand, depth int) string {
		var members []string
		for range rng.IntN(6) {
			key, _ := json.Marshal(names[rng.IntN(len(names))])
			members = append(members, string(key)+":"+value(rng, depth+1)) // keys may come twice
		}
		return "{" + strings.Join(members, ",") + "}"
	}
	value = func(rng *rand.Rand, depth int) string {
		switch n := rng.IntN(10); {
		case n < 4 && depth < 6:
			return body(rng, depth)
		case n < 7 && depth < 6:
			var list []string
			for range rng.IntN(5) {
				list = append(list, value(rng, depth+1))
			}
			return "[" + strings.Join(list, ",") + "]"
		case n < 8:
			v, _ := json.Marshal(scalars[rng.IntN(len(scalars))])
			return string(v)
		default:
			v, _ := json.Marshal(texts[rng.IntN(len(texts))])
			return string(v)
		}
	}
	for seed := range uint64(1000) {
		rng := rand.New(rand.NewPCG(seed, 3))
		prompts := []string{"messages", "input", "prompt", "text", "system", "tools", "documents", "input_extra", "input_prefix"}
		text := body(rng, 0)
		for range 2 {
			text = strings.TrimSuffix(text, "}")
			if text != "{" {
				text += ","
			}
			text += `"` + prompts[rng.IntN(len(prompts))] + `":` + value(rng, 0) + "}"
		}
		checkBody(t, "/", []byte(text))
	}
}
