package chart

import (
	"encoding/xml"
	"io"
	"slices"
	"strings"
	"testing"
)

func TestDrawing(t *testing.T) {
	d := New(100, 50, "a < b")
	d.Text(1, 2, `"x" & y`, `text-anchor="end"`)
	d.Rect(1, 2, 3, 4, "#fff")
	d.Line("#000", [2]float64{1, 2}, [2]float64{3, 4})
	d.Dot("#000", 1, 2)
	var b strings.Builder
	if err := d.Write(&b); err != nil {
		t.Fatal(err)
	}
	for x := xml.NewDecoder(strings.NewReader(b.String())); ; {
		if _, err := x.Token(); err == io.EOF {
			break
		} else if err != nil {
			t.Fatalf("%v in\n%s", err, &b)
		}
	}
}

func TestLog(t *testing.T) {
	a := Log(0.02, 300, 100, 0)
	if got := a.Decades(); !slices.Equal(got, []float64{0.01, 0.1, 1, 10, 100, 1000}) {
		t.Errorf("decades %v", got)
	}
	for value, want := range map[float64]float64{0.01: 100, 1: 60, 1000: 0} {
		if got := a.At(value); got < want-1e-9 || got > want+1e-9 {
			t.Errorf("%g is at %g, want %g", value, got, want)
		}
	}
	if one := Log(1, 1, 0, 10); one.At(1) != 0 || one.To != 1 {
		t.Errorf("a single value: %+v", one)
	}
}
