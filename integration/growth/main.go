// Command growth measures how the time of a decision grows: with the replicas,
// with the blocks in the index, with the prompt's length and with the
// goroutines that decide at once. It runs the project's own code (prefixhash,
// selector/affinity) without HTTP.
//
//	go run ./integration/growth -svg integration/growth/growth.svg
//
// Each time is the best of rounds in which all points take turns, so that a busy
// machine bends no curve. The law is the slope of the points' logarithms: 0 for
// what does not grow, 1 for what grows in proportion; over all points, and over
// the larger half of them, where constants count less.
package main

import (
	"flag"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"text/tabwriter"

	"github.com/prefix-affinity/caddy/integration/chart"
	"github.com/prefix-affinity/caddy/integration/measure"
)

func main() {
	svg := flag.String("svg", "", "draw the curves into this file")
	most := flag.Int("blocks", 10_000_000, "most blocks in an index: 400 MB for 10,000,000")
	flag.Parse()
	if err := run(os.Stdout, *svg, *most); err != nil {
		fmt.Fprintln(os.Stderr, "growth:", err)
		os.Exit(1)
	}
}

func run(out io.Writer, svg string, mostBlocks int) error {
	all := make([]*figure, 0, 4)
	for _, measured := range []func() *figure{byReplicas, func() *figure { return byBlocks(mostBlocks) }, byLength, byConcurrency} {
		f := measured()
		if err := f.print(out); err != nil {
			return err
		}
		all = append(all, f)
		runtime.GC()
	}
	if svg == "" {
		return nil
	}
	file, err := os.Create(filepath.Clean(svg))
	if err != nil {
		return err
	}
	if err := draw(all).Write(file); err != nil {
		return err
	}
	return file.Close()
}

// figure is what was measured against one quantity.
type figure struct {
	title  string
	x      []float64
	curves []curve
}

type curve struct {
	name         string
	microseconds []float64
}

// upper is the slope over the larger half of the points.
func (f *figure) upper(c curve) float64 {
	half := len(f.x) / 2
	return measure.Slope(f.x[half:], c.microseconds[half:])
}

func (f *figure) print(out io.Writer) error {
	fmt.Fprintf(out, "\n%s\n", f.title)
	t := tabwriter.NewWriter(out, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprint(t, "\t")
	for _, c := range f.curves {
		fmt.Fprintf(t, "%s\t", c.name)
	}
	for i, x := range f.x {
		fmt.Fprintf(t, "\n%.0f\t", x)
		for _, c := range f.curves {
			fmt.Fprintf(t, "%.3g µs\t", c.microseconds[i])
		}
	}
	fmt.Fprint(t, "\nslope\t")
	for _, c := range f.curves {
		fmt.Fprintf(t, "%.2f\t", measure.Slope(f.x, c.microseconds))
	}
	fmt.Fprint(t, "\nof the larger half\t")
	for _, c := range f.curves {
		fmt.Fprintf(t, "%.2f\t", f.upper(c))
	}
	fmt.Fprintln(t)
	return t.Flush()
}

var colors = [...]string{"#1f6feb", "#d97706", "#16a34a", "#9333ea"}

// draw puts the figures into a grid of two columns.
func draw(all []*figure) *chart.Drawing {
	const width, height, left, top, bottom = 440, 300, 72, 30, 50
	d := chart.New(2*width, (len(all)+1)/2*height, "Time of a decision against replicas, blocks, prompt length and goroutines")
	for i, f := range all {
		x0, y0 := float64(i%2*width), float64(i/2*height)
		least, most := f.curves[0].microseconds[0], f.curves[0].microseconds[0]
		for _, c := range f.curves {
			for _, y := range c.microseconds {
				least, most = min(least, y), max(most, y)
			}
		}
		across := chart.Log(f.x[0], f.x[len(f.x)-1], x0+left, x0+width-110)
		up := chart.Log(least, most, y0+height-bottom, y0+top)
		d.Text(x0+left, y0+18, f.title, `font-weight="bold"`)
		for _, x := range across.Decades() {
			d.Line("#eee", [2]float64{across.At(x), up.Start}, [2]float64{across.At(x), up.End})
			d.Text(across.At(x), up.Start+16, number(x), `text-anchor="middle" fill="#555"`)
		}
		for _, y := range up.Decades() {
			d.Line("#eee", [2]float64{across.Start, up.At(y)}, [2]float64{across.End, up.At(y)})
			d.Text(across.Start-6, up.At(y)+4, fmt.Sprintf("%g µs", y), `text-anchor="end" fill="#555"`)
		}
		labels := make([]float64, 0, len(f.curves)) // where they are
		for n, c := range f.curves {
			points := make([][2]float64, len(f.x))
			for i := range f.x {
				points[i] = [2]float64{across.At(f.x[i]), up.At(c.microseconds[i])}
				d.Dot(colors[n], points[i][0], points[i][1])
			}
			d.Line(colors[n], points...)
			last := points[len(points)-1]
			y := spot(labels, last[1]+4)
			labels = append(labels, y)
			d.Text(last[0]+8, y, fmt.Sprintf("%s ^%.2f", c.name, f.upper(c)), fmt.Sprintf(`fill="%s"`, colors[n]))
		}
	}
	return d
}

// spot returns the place nearest to y where a line of text covers none of the
// others.
func spot(others []float64, y float64) float64 {
	const line = 13
	free := func(y float64) bool {
		return !slices.ContainsFunc(others, func(other float64) bool { return math.Abs(other-y) < line })
	}
	for d := 0.0; ; d++ {
		if free(y - d) {
			return y - d
		}
		if free(y + d) {
			return y + d
		}
	}
}

func number(x float64) string {
	switch {
	case x >= 1e6:
		return fmt.Sprintf("%gM", x/1e6)
	case x >= 1e3:
		return fmt.Sprintf("%gk", x/1e3)
	}
	return fmt.Sprintf("%g", x)
}
