package prefixhash

import (
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// recorded finds the folder of recorded client bodies, which lies beside the
// repository and isn't part of it.
func recorded(t *testing.T) string {
	t.Helper()
	dir := os.Getenv("PREFIX_AFFINITY_SHARED")
	if dir == "" {
		at, err := os.Getwd()
		if err != nil {
			t.Fatal(err)
		}
		for dir = filepath.Join(at, "shared"); at != filepath.Dir(at); dir = filepath.Join(at, "shared") {
			if _, err := os.Stat(filepath.Join(dir, "bodies")); err == nil {
				break
			}
			at = filepath.Dir(at)
		}
	}
	dir = filepath.Join(dir, "bodies")
	if _, err := os.Stat(dir); err != nil {
		t.Skip("no recorded bodies here")
	}
	return dir
}

type recording struct {
	name, path string
	turns      [][]byte
}

// recordings reads all bodies, the turns of a loop together: name.json or
// name-t1.json, name-t2.json and so on.
func recordings(t *testing.T) (all []recording) {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(recorded(t), "*.json"))
	if err != nil {
		t.Fatal(err)
	}
	agents, err := filepath.Glob(filepath.Join(recorded(t), "agents", "*.json"))
	if err != nil {
		t.Fatal(err)
	}
	pattern := regexp.MustCompile(`^(.*?)(?:-t([1-9]))?\.json$`)
	loops := map[string]*recording{}
	for _, file := range append(files, agents...) {
		if strings.HasSuffix(file, ".headers.json") {
			continue
		}
		match := pattern.FindStringSubmatch(filepath.Base(file))
		loop := loops[match[1]]
		if loop == nil {
			loop = &recording{name: match[1]}
			loops[match[1]] = loop
		}
		turn := 1
		if match[2] != "" {
			turn = int(match[2][0] - '0')
		}
		for len(loop.turns) < turn {
			loop.turns = append(loop.turns, nil)
		}
		if loop.turns[turn-1], err = os.ReadFile(file); err != nil {
			t.Fatal(err)
		}
		headers, err := os.ReadFile(strings.TrimSuffix(file, ".json") + ".headers.json")
		if err != nil {
			t.Fatal(err)
		}
		var request struct{ Target string }
		if err := json.Unmarshal(headers, &request); err != nil {
			t.Fatal(err)
		}
		loop.path = request.Target
	}
	for _, name := range slices.Sorted(maps.Keys(loops)) {
		all = append(all, *loops[name])
	}
	return all
}

// Loops whose turns don't resend their history.
var forgetful = map[string]string{
	"anthropic-ai_sdk-1.14.0-tool-runner": "continues a stored thread",
	"openai-6.49.0-responses-previous-id": "continues a stored response",
	"opencode-1.18.33-task":               "its first request asks for a title",
}

// Turn N+1 of every recorded loop covers the whole of turn N.
func TestRecordedLoops(t *testing.T) {
	h := New(Config{Seed: 1})
	t.Logf("%-58s %5s %8s %8s  %s", "loop", "turn", "bytes", "covered", "share of the turn before")
	for _, rec := range recordings(t) {
		if len(rec.turns) == 1 {
			continue
		}
		var before, k Key
		for i, body := range rec.turns {
			if cause := h.Sum(&k, rec.path, body, true, ""); cause != Keyed {
				t.Errorf("%s: turn %d has no key: %s", rec.name, i+1, cause)
			}
			if i > 0 {
				covered, of := 0, int(before.Blocks[len(before.Blocks)-1].End)
				if n := shared(before, k); n > 0 {
					covered = int(k.Blocks[n-1].End)
				}
				note := ""
				if why, ok := forgetful[rec.name]; ok && i == 1 {
					note = "(" + why + ")"
				} else if covered != of {
					t.Errorf("%s: turn %d covers %d of the %d bytes of turn %d", rec.name, i+1, covered, of, i)
				}
				t.Logf("%-58s %5d %8d %8d  %.3f %s", rec.name, i+1, k.Bytes, covered, float64(covered)/float64(of), note)
			}
			before = Key{Blocks: slices.Clone(k.Blocks)}
		}
	}
}

// Every recorded body has the key of the naive model, or a reason for none.
func TestRecordedBodies(t *testing.T) {
	for _, rec := range recordings(t) {
		for i, body := range rec.turns {
			name := fmt.Sprintf("%s turn %d", rec.name, i+1)
			var k Key
			cause := New(Config{Seed: 1}).Sum(&k, rec.path, body, true, "")
			want := Keyed
			if strings.Contains(rec.name, "embed") || strings.Contains(rec.name, "count-tokens") {
				want = NotPrompt
			}
			if cause != want {
				t.Errorf("%s: %s, want %s", name, cause, want)
			}
			if want == Keyed {
				testModel(t, body)
			}
			if k.Bytes == 0 {
				t.Errorf("%s: weighs nothing", name)
			}
		}
	}
}

// Two sessions of one agent share tools and system prompt up to the block of
// the first byte that differs.
func TestRecordedSessions(t *testing.T) {
	for _, c := range []struct {
		loop    string
		turn    int
		replace []string
	}{
		{"codex-0.171.0-task", 0, []string{
			"01a2296e-05f0-7f11-b153-8588ab0d24b7", "01b3333e-1111-7f11-b153-000000000000",
			"msg_01a2296e", "msg_01b3333e", "msg_8a20a4b4", "msg_9b31b5c5",
			"/home/dev/project", "/srv/other", "2026-11-29", "2026-12-01",
		}},
		{"opencode-1.18.33-task", 1, []string{
			"/home/dev/project", "/srv/other", "Sun Nov 29 2026", "Tue Dec 01 2026",
		}},
	} {
		for _, rec := range recordings(t) {
			if rec.name != c.loop {
				continue
			}
			one := string(rec.turns[c.turn])
			other := strings.NewReplacer(c.replace...).Replace(one)
			config := Config{Seed: 1, BlockBytes: DefaultBlockBytes}
			var a, b Key
			New(config).Sum(&a, rec.path, []byte(one), true, "")
			New(config).Sum(&b, rec.path, []byte(other), true, "")
			same := 0
			if n := shared(a, b); n > 0 {
				same = int(a.Blocks[n-1].End)
			}
			differs := firstDifference(t, config, one, other)
			raw := 0
			for raw < min(len(one), len(other)) && one[raw] == other[raw] {
				raw++
			}
			t.Logf("%-24s %6d bytes of body, %6d of prompt; first difference at byte %6d of the body, %6d of the prompt; shared %6d", c.loop, len(one), a.Bytes, raw, differs, same)
			if same > differs || same <= differs-coarse*DefaultBlockBytes {
				t.Errorf("%s: %d bytes shared, the first difference is at %d", c.loop, same, differs)
			}
		}
	}
}

// firstDifference returns the prompt byte at which the naive models of two
// bodies differ.
func firstDifference(t *testing.T, config Config, one, other string) int {
	t.Helper()
	units := func(body string) []unit {
		v, err := parseTree([]byte(body))
		if err != nil {
			t.Fatal(err)
		}
		m := &model{config: config, key: nhKey(config.Seed, coarse*config.BlockBytes)}
		m.walk(v.(tree))
		return m.units
	}
	a, b := units(one), units(other)
	pos := 0
	for i := range min(len(a), len(b)) {
		if a[i] != b[i] {
			break
		}
		if a[i].media {
			pos += mediaBytes
		} else if !a[i].boundary {
			pos++
		}
	}
	return pos
}
