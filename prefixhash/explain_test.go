package prefixhash

import (
	"slices"
	"strings"
	"testing"
)

func TestExplain(t *testing.T) {
	body := `{"model":"m","tools":[{"name":"f"}],"documents":[{"text":"d"}],"messages":[{"role":"system","content":"secret ` + strings.Repeat("s", 40) + `"},
		{"role":"user","content":[{"type":"text","text":"x"},{"type":"image_url","image_url":{"url":"data:,A"}}]},
		{"role":"assistant","reasoning":"r","tool_calls":[{"id":"1","function":{"name":"f"}}]},{"role":"secret role","content":"y"}]}`
	h := New(Config{BlockBytes: 16, Seed: 1})
	parts, cause := h.Explain(chat, []byte(body), true, "")
	if cause != Keyed {
		t.Fatal(cause)
	}
	var kinds, roles []string
	var blocks []Block
	end := 0
	for _, p := range parts {
		kinds = append(kinds, p.Kind)
		roles = append(roles, p.Role)
		blocks = append(blocks, p.Blocks...)
		if p.Start != end {
			t.Errorf("%s starts at %d, the part before ends at %d", p.Kind, p.Start, end)
		}
		end = p.End
		for _, b := range p.Blocks {
			if int(b.End) <= p.Start || int(b.End) > p.End {
				t.Errorf("block that ends at %d in %s from %d to %d", b.End, p.Kind, p.Start, p.End)
			}
		}
	}
	if want := []string{"preamble", "document", "tool", "message", "text", "message", "text", "media", "message", "reasoning", "tool_call", "message", "text"}; !slices.Equal(kinds, want) {
		t.Errorf("kinds %q, want %q", kinds, want)
	}
	if want := []string{"", "", "", "system", "system", "user", "user", "user", "assistant", "assistant", "assistant", "other", "other"}; !slices.Equal(roles, want) {
		t.Errorf("roles %q, want %q", roles, want)
	}
	var k Key
	h.Sum(&k, chat, []byte(body), true, "")
	if !slices.Equal(blocks, k.Blocks) || end != k.Bytes {
		t.Errorf("blocks to %d, Sum's to %d", end, k.Bytes)
	}
	if parts, cause := h.Explain("/v1/embeddings", []byte(body), true, ""); parts != nil || cause != NotPrompt {
		t.Errorf("%v, %s for embeddings", parts, cause)
	}
}
