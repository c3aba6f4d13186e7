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
