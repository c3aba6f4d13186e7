package prefixhash

import (
	"regexp"
	"slices"
	"strings"
	"testing"
)

func ignoring(t *testing.T, pattern, body string) Key {
	t.Helper()
	var k Key
	h := New(Config{BlockBytes: 16, Seed: 1, Ignore: regexp.MustCompile(pattern)})
	if cause := h.Sum(&k, "/", []byte(body), true, ""); cause != Keyed {
		t.Fatalf("%s for %.200s", cause, body)
	}
	return k
}

func TestIgnore(t *testing.T) {
	const header = `x-agent-billing-header: [^\n]*\n`
	agent := func(nonce string) string {
		return `{"model":"m","system":[{"type":"text","text":"` + nonce + `"},{"type":"text","text":"You are an agent."}],"messages":[{"role":"user","content":"x"}]}`
	}
	for _, c := range []struct {
		name, pattern, a, b string
		equal, judged       bool
	}{
		{"nonce/left out", header, agent(`x-agent-billing-header: cch=1a2b;\n`), agent(`x-agent-billing-header: cch=3c4d;\n`), true, false},
		{"nonce/as if it weren't there", header, agent(`x-agent-billing-header: cch=1a2b;\n`), agent(``), true, false},
		{"nonce/spelled with escapes", header, agent(`x-agent-billing-header: cch=1a2b;\n`), agent(`x\u002dagent-billing-header: \u0063ch\u000a`), true, false},
		{"nonce/other text counts", header, agent(`x-agent-billing-header: a;\nOne.`), agent(`x-agent-billing-header: a;\nTwo.`), false, false},
		{"no match/judged", header, agent(`Hello`), agent(`Hello`), true, true},
		{"line/anchors", `(?m)^Date: .*$`, `{"prompt":"a\nDate: 1\nb"}`, `{"prompt":"a\nDate: 22\nb"}`, true, false},
		{"line/not in the middle", `(?m)^Date: .*$`, `{"prompt":"a Date: 1"}`, `{"prompt":"a Date: 2"}`, false, true},
		{"word/no boundary after a match", `\ba`, `{"prompt":"aab"}`, `{"prompt":"ab"}`, false, false},
		{"empty/matches nothing", `x*`, `{"prompt":"abc"}`, `{"prompt":"abc"}`, true, true},
		{"tools/too", `v[0-9]+`, `{"prompt":"x","tools":[{"name":"f","description":"v1"}]}`, `{"prompt":"x","tools":[{"name":"f","description":"v2"}]}`, true, false},
		{"several/in one text", `[0-9]+`, `{"prompt":"a1b2c3"}`, `{"prompt":"a4b5c6"}`, true, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			a, b := ignoring(t, c.pattern, c.a), ignoring(t, c.pattern, c.b)
			if equal := slices.Equal(a.Blocks, b.Blocks); equal != c.equal {
				t.Errorf("equal %t, want %t", equal, c.equal)
			}
			if a.Judged != c.judged {
				t.Errorf("judged %t, want %t", a.Judged, c.judged)
			}
		})
	}
}

// A match is found wherever it stands in a text.
func TestIgnoreAnywhere(t *testing.T) {
	at := func(offset int, match, line string) string {
		return `{"prompt":"` + strings.Repeat("x", offset%7) + strings.Repeat(line, offset/len(line)+1)[:offset] + match + strings.Repeat("and the rest ", 1000) + `"}`
	}
	for _, c := range []struct{ name, line string }{
		{"text/one line", "abcd"},
		{"text/lines", "some words in a line \\n"},
	} {
		t.Run(c.name, func(t *testing.T) {
			for around := 0; around < 20_000; around += ignoreWindow / 4 {
				for offset := max(around-24, 0); offset < around+24; offset++ {
					if c.line != "abcd" && strings.HasSuffix(strings.Repeat(c.line, offset/len(c.line)+1)[:offset], `\`) {
						continue
					}
					a, b := ignoring(t, `nonce=[0-9a-f]+;`, at(offset, "nonce=1111aaaa;", c.line)), ignoring(t, `nonce=[0-9a-f]+;`, at(offset, "nonce=2222bbbbcc;", c.line))
					if !slices.Equal(a.Blocks, b.Blocks) {
						t.Fatalf("a match at %d counts", offset)
					}
				}
			}
		})
	}
	t.Run("long", func(t *testing.T) {
		for offset := 3000; offset < 9000; offset += 10 {
			a, b := ignoring(t, `<[^>]*>`, at(offset, "<"+strings.Repeat("1", ignoreLongest-2)+">", "abcd")), ignoring(t, `<[^>]*>`, at(offset, "<2>", "abcd"))
			if !slices.Equal(a.Blocks, b.Blocks) {
				t.Fatalf("a match of %d bytes at %d counts", ignoreLongest, offset)
			}
		}
	})
}

func TestIgnoreLimits(t *testing.T) {
	lines := func(n int, line string) string {
		return `{"prompt":"` + strings.Repeat(line+`\n`, n) + `"}`
	}
	// Across windows, as windows end after a line.
	if a, b := ignoring(t, `[0-9]+`, lines(200, strings.Repeat("word ", 20)+"1")), ignoring(t, `[0-9]+`, lines(200, strings.Repeat("word ", 20)+"22")); !slices.Equal(a.Blocks, b.Blocks) {
		t.Error("a match near the end of a window counts")
	}
	// The first 256 matches of a prompt, over several windows.
	line := strings.Repeat("w", 40)
	a, b := ignoring(t, `[0-9]+`, lines(ignoreMost+1, line+"1")), ignoring(t, `[0-9]+`, lines(ignoreMost+1, line+"2"))
	if n := len(a.Blocks); slices.Equal(a.Blocks, b.Blocks) || shared(a, b) < n-2 {
		t.Errorf("%d of %d blocks shared, want all before match %d", shared(a, b), n, ignoreMost+1)
	}
}
