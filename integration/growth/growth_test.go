package main

import (
	"regexp"
	"strconv"
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

// The numbers beside the axis are wholly in the picture, up to 100 ms: a figure
// of this font is 7 pixels wide.
func TestLabelsAreNotCutOff(t *testing.T) {
	var svg strings.Builder
	if err := draw([]*figure{{"Blocks", []float64{1, 10}, []curve{{"decision", []float64{1, 1e5}}}}}).Write(&svg); err != nil {
		t.Fatal(err)
	}
	labels := regexp.MustCompile(`<text x="([\d.]+)" [^>]*text-anchor="end"[^>]*>([^<]*)`).FindAllStringSubmatch(svg.String(), -1)
	for _, label := range labels {
		if end, err := strconv.ParseFloat(label[1], 64); err != nil || end < float64(7*len([]rune(label[2]))) {
			t.Errorf("'%s' ends at %s", label[2], label[1])
		}
	}
	if len(labels) != 6 {
		t.Errorf("%d labels", len(labels))
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
