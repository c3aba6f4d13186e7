// Package chart draws the results of this project's measurements as SVG.
package chart

import (
	"fmt"
	"html"
	"io"
	"math"
	"strings"
)

// A Drawing is built up from top to bottom; coordinates are pixels.
type Drawing struct{ svg strings.Builder }

// New returns an empty drawing on white ground.
func New(width, height int, title string) *Drawing {
	d := &Drawing{}
	fmt.Fprintf(&d.svg, `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" font-family="sans-serif" font-size="12" role="img">`, width, height)
	fmt.Fprintf(&d.svg, "\n<title>%s</title>\n<rect width=\"100%%\" height=\"100%%\" fill=\"#fff\"/>\n", html.EscapeString(title))
	return d
}

// Write ends the drawing.
func (d *Drawing) Write(w io.Writer) error {
	_, err := io.WriteString(w, d.svg.String()+"</svg>\n")
	return err
}

// Text writes at a point; style is attributes, such as text-anchor="end".
func (d *Drawing) Text(x, y float64, text, style string) {
	fmt.Fprintf(&d.svg, `<text x="%.1f" y="%.1f" %s>%s</text>`+"\n", x, y, style, html.EscapeString(text))
}

// Rect fills a rectangle.
func (d *Drawing) Rect(x, y, width, height float64, fill string) {
	fmt.Fprintf(&d.svg, `<rect x="%.1f" y="%.1f" width="%.1f" height="%.1f" fill="%s"/>`+"\n", x, y, width, height, fill)
}

// Line joins points.
func (d *Drawing) Line(color string, points ...[2]float64) {
	fmt.Fprintf(&d.svg, `<polyline fill="none" stroke="%s" points="`, color)
	for i, p := range points {
		if i > 0 {
			d.svg.WriteByte(' ')
		}
		fmt.Fprintf(&d.svg, "%.1f,%.1f", p[0], p[1])
	}
	d.svg.WriteString("\"/>\n")
}

// Dot marks a point.
func (d *Drawing) Dot(color string, x, y float64) {
	fmt.Fprintf(&d.svg, `<circle cx="%.1f" cy="%.1f" r="3" fill="%s"/>`+"\n", x, y, color)
}

// A LogAxis shows values by their logarithms, over whole decades.
type LogAxis struct {
	From, To   float64 // decades: 0 is 1, 1 is 10
	Start, End float64 // pixels
}

// Log returns the axis for values from least to most, both above 0.
func Log(least, most, start, end float64) LogAxis {
	a := LogAxis{math.Floor(math.Log10(least)), math.Ceil(math.Log10(most)), start, end}
	if a.From == a.To {
		a.To++
	}
	return a
}

// At returns where a value is.
func (a LogAxis) At(value float64) float64 {
	return a.Start + (a.End-a.Start)*(math.Log10(value)-a.From)/(a.To-a.From)
}

// Decades returns the powers of ten on the axis.
func (a LogAxis) Decades() []float64 {
	decades := make([]float64, 0, int(a.To-a.From)+1)
	for d := a.From; d <= a.To; d++ {
		decades = append(decades, math.Pow(10, d))
	}
	return decades
}
