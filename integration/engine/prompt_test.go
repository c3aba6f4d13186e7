package engine

import (
	"encoding/json"
	"maps"
	"strings"
	"testing"
)

func chatBody(t *testing.T, fields map[string]any, messages ...any) []byte {
	t.Helper()
	body := map[string]any{"messages": messages}
	maps.Copy(body, fields)
	b, err := json.Marshal(body)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func say(role string, content any) map[string]any {
	return map[string]any{"role": role, "content": content}
}

func tokenize(t *testing.T, path string, body []byte) Prompt {
	t.Helper()
	p, err := Tokenize(path, body)
	if err != nil {
		t.Fatalf("%s: %v", body, err)
	}
	return p
}

func shared(a, b Prompt) (n int) {
	for n < min(len(a.Blocks), len(b.Blocks)) && a.Blocks[n] == b.Blocks[n] {
		n++
	}
	return n
}

func TestTokenizeSharedBlocks(t *testing.T) {
	text := strings.Repeat("All is well that ends well. ", 40)
	base := chatBody(t, nil, say("system", text), say("user", "one"))
	baseBlocks := len(tokenize(t, chatPath, base).Blocks)
	headBytes := len("<|im_start|>system\n" + text + "<|im_end|>\n<|im_start|>user\n")
	for _, c := range []struct {
		name string
		body []byte
		want int
	}{
		{"same/other sampling", chatBody(t, map[string]any{"temperature": 1, "stream": true}, say("system", text), say("user", "one")), baseBlocks},
		{"same/parts", chatBody(t, nil, say("system", []any{map[string]any{"type": "text", "text": text}}), say("user", "one")), baseBlocks},
		{"same/next turn", chatBody(t, nil, say("system", text), say("user", "one"), say("assistant", "two"), say("user", "three")), baseBlocks},
		{"head/other question", chatBody(t, nil, say("system", text), say("user", "two")), headBytes / blockBytes},
		{"none/role", chatBody(t, nil, say("developer", text), say("user", "one")), 0},
		{"none/tools", chatBody(t, map[string]any{"tools": []any{map[string]any{"type": "function"}}}, say("system", text), say("user", "one")), 0},
		{"none/model", chatBody(t, map[string]any{"model": "lora"}, say("system", text), say("user", "one")), 0},
		{"none/salt", chatBody(t, map[string]any{"cache_salt": "x"}, say("system", text), say("user", "one")), 0},
		{"none/first byte", chatBody(t, nil, say("system", "x"+text), say("user", "one")), 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			if n := shared(tokenize(t, chatPath, base), tokenize(t, chatPath, c.body)); n != c.want {
				t.Errorf("%d blocks shared instead of %d", n, c.want)
			}
		})
	}
}

func TestTokenizeCounts(t *testing.T) {
	image := say("user", []any{map[string]any{"type": "image_url", "image_url": map[string]any{"url": "data:,"}}})
	frame := len("<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\n")
	for _, c := range []struct {
		name, path, body string
		tokens           int
	}{
		{"chat/empty content", chatPath, string(chatBody(t, nil, say("user", ""))), (frame + 3) / 4},
		{"chat/null content", chatPath, string(chatBody(t, nil, say("user", nil))), (frame + 3) / 4},
		{"chat/image", chatPath, string(chatBody(t, nil, image)), (frame+3)/4 + imageTokens},
		{"completion/text", completionsPath, `{"prompt":"12345678"}`, 2},
		{"completion/odd text", completionsPath, `{"prompt":"123456789"}`, 3},
		{"completion/one in a list", completionsPath, `{"prompt":["12345678"]}`, 2},
		{"completion/ids", completionsPath, `{"prompt":[1,2,3]}`, 3},
		{"completion/ids in a list", completionsPath, `{"prompt":[[1,2,3]]}`, 3},
	} {
		t.Run(c.name, func(t *testing.T) {
			if n := tokenize(t, c.path, []byte(c.body)).Tokens; n != c.tokens {
				t.Errorf("%d tokens instead of %d", n, c.tokens)
			}
		})
	}
}

func TestTokenizeErrors(t *testing.T) {
	for _, c := range []struct{ name, path, body string }{
		{"json/none", chatPath, `hello`},
		{"chat/no messages", chatPath, `{}`},
		{"chat/no role", chatPath, `{"messages":[{"content":"x"}]}`},
		{"chat/content", chatPath, `{"messages":[{"role":"user","content":3}]}`},
		{"chat/part", chatPath, `{"messages":[{"role":"user","content":[{"type":"video"}]}]}`},
		{"completion/none", completionsPath, `{}`},
		{"completion/empty", completionsPath, `{"prompt":""}`},
		{"completion/batch", completionsPath, `{"prompt":["a","b"]}`},
		{"completion/number", completionsPath, `{"prompt":3}`},
	} {
		t.Run(c.name, func(t *testing.T) {
			if _, err := Tokenize(c.path, []byte(c.body)); err == nil {
				t.Error("no error")
			}
		})
	}
}

// A turn that repeats the answer word for word starts with all blocks that the
// engine had when the answer was complete.
func TestAfterIsPrefixOfNextTurn(t *testing.T) {
	for length := range 130 {
		first := say("user", strings.Repeat("x", length))
		p := tokenize(t, chatPath, chatBody(t, nil, first))
		answer := p.Answer(50)
		held := append(p.Blocks, p.After(answer)...)
		next := tokenize(t, chatPath, chatBody(t, nil, first, say("assistant", answer), say("user", "go on")))
		if n := shared(Prompt{Blocks: held}, next); n != len(held) {
			t.Fatalf("first message of %d bytes: next turn shares %d of %d blocks", length, n, len(held))
		}
	}
}

func FuzzTokenize(f *testing.F) {
	f.Add(`{"messages":[{"role":"user","content":"hi"}],"prompt":"x"}`)
	f.Add(`{"messages":[{"role":"user","content":[{"type":"text","text":"hi"}]}],"tools":[{}],"prompt":[[1,2]]}`)
	f.Fuzz(func(t *testing.T, body string) {
		for _, path := range []string{chatPath, completionsPath} {
			p, err := Tokenize(path, []byte(body))
			if err == nil && (p.Tokens < 1 || len(p.Blocks) > p.Tokens/BlockTokens) {
				t.Errorf("%d tokens, %d blocks", p.Tokens, len(p.Blocks))
			}
		}
	})
}
