package measure

import (
	"encoding/json"
	"fmt"
	"math"
	"strings"
	"testing"
	"time"
)

func TestRatio(t *testing.T) {
	work := func(n int) func() {
		return func() {
			for end := time.Now().Add(time.Duration(n) * 20 * time.Microsecond); time.Now().Before(end); {
			}
		}
	}
	if r := Ratio(3.3, work(3), work(1)); r < 2.7 || r > 3.3 {
		t.Errorf("three times the work takes %.2f times as long", r)
	}
	calls := 0
	if Ratio(100, func() { calls++; work(1)() }, work(1)); calls != fewestRounds {
		t.Errorf("%d rounds though the first were good enough", calls)
	}
}

func TestSlope(t *testing.T) {
	x := []float64{1, 10, 1000}
	for _, slope := range []float64{0, 0.5, 1, 2} {
		var y []float64
		for _, x := range x {
			y = append(y, 7*math.Pow(x, slope))
		}
		if got := Slope(x, y); math.Abs(got-slope) > 1e-9 {
			t.Errorf("slope %g, want %g", got, slope)
		}
	}
}

func TestChat(t *testing.T) {
	type body struct {
		Model    string
		Tools    []any
		Messages []any
	}
	for _, c := range []Chat{
		{Bytes: 2 << 10},
		{Bytes: 32 << 10, ToolsLast: true},
		{Bytes: 512 << 10, Conversation: 7},
		{Bytes: 1 << 20, Images: true},
	} {
		t.Run(fmt.Sprintf("%d", c.Bytes), func(t *testing.T) {
			plain := c.JSON()
			if n := float64(len(plain)) / float64(c.Bytes); n < 0.85 || n > 1.15 {
				t.Errorf("%d bytes", len(plain))
			}
			if last := strings.Index(string(plain), `"tools"`) > len(plain)/2; last != c.ToolsLast {
				t.Error("tools are not where they should be")
			}
			var read, escaped body
			if err := json.Unmarshal(plain, &read); err != nil || len(read.Tools) == 0 || len(read.Messages) < 2 {
				t.Fatalf("%d tools, %d messages, %v", len(read.Tools), len(read.Messages), err)
			}
			c.Escaped = true
			ascii := c.JSON()
			if err := json.Unmarshal(ascii, &escaped); err != nil || strings.ContainsFunc(string(ascii), func(r rune) bool { return r > 127 }) {
				t.Error("not in ASCII", err)
			}
			if fmt.Sprint(escaped) != fmt.Sprint(read) {
				t.Error("the escaped body says something else")
			}
		})
	}
}
