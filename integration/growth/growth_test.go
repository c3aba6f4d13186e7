package main

import (
	"strings"
	"testing"

	"github.com/prefix-affinity/caddy/selector/affinity"
)

func TestReport(t *testing.T) {
	f := &figure{"Replicas", []float64{1, 10, 100, 1000}, []curve{{"match", []float64{5, 5, 50, 500}}, {"decision", []float64{7, 7, 7, 7}}}}
	var table, svg strings.Builder
	if err := f.print(&table); err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(strings.TrimSpace(table.String()), "\n")
	if got := strings.Fields(lines[len(lines)-1]); got[len(got)-2] != "1.00" || got[len(got)-1] != "0.00" {
		t.Errorf("slopes of the larger half %v in\n%s", got, &table)
	}
	if err := draw([]*figure{f, f}).Write(&svg); err != nil || strings.Count(svg.String(), "<circle") != 16 || !strings.Contains(svg.String(), "match ^1.00") {
		t.Errorf("%v\n%s", err, &svg)
	}
}

// What is measured is what it says: prompts that the index knows.
func TestRouter(t *testing.T) {
	x := newRouter(4)
	for c := range 8 {
		x.learn(promptOf(c, 128))
	}
	for range 8 {
		key := x.known()
		x.index.Lookup(x.now, key, x.cands, &x.rule, x.matched)
		holders := 0
		for _, tokens := range x.matched {
			if tokens == 128*256/affinity.BytesPerToken {
				holders++
			} else if tokens < 16*256/affinity.BytesPerToken {
				t.Errorf("the system prompt is not known: %v", x.matched)
			}
		}
		if holders != 1 {
			t.Errorf("matched %v", x.matched)
		}
	}
}
