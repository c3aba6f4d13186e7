package prefixhash

import (
	"bytes"
	"regexp"
)

const (
	// ignoreWindow is how much text Config.Ignore is matched against at once.
	// Windows end after a line where they can.
	ignoreWindow = 4 << 10

	// ignoreMost is how many matches of Config.Ignore are left out of one
	// prompt. A pattern may have to read a whole window for each match, so
	// this bounds the work on a prompt to its length plus 1 MiB.
	ignoreMost = 256
)

// ignorer leaves out of a chain what a pattern matches.
type ignorer struct {
	pattern *regexp.Regexp
	text    []byte
	left    int
	matched bool
}

func (g *ignorer) reset(pattern *regexp.Regexp) {
	g.pattern, g.left, g.matched = pattern, ignoreMost, false
}

// write adds a JSON string's text without what the pattern matches.
func (g *ignorer) write(c *chain, raw []byte, cut bool) {
	g.text = appendDecoded(g.text[:0], raw, cut)
	for text := g.text; len(text) > 0; {
		window := text[:windowEnd(text)]
		text = text[len(window):]
		if g.left > 0 {
			from := 0
			for _, match := range g.pattern.FindAllIndex(window, g.left) {
				if match[1] > match[0] {
					c.write(window[from:match[0]])
					from = match[1]
					g.left--
					g.matched = true
				}
			}
			window = window[from:]
		}
		c.write(window)
	}
}

// windowEnd returns the length of the window that text begins with.
func windowEnd(text []byte) int {
	if len(text) <= ignoreWindow {
		return len(text)
	}
	if line := bytes.LastIndexByte(text[:ignoreWindow], '\n'); line >= 0 {
		return line + 1
	}
	return ignoreWindow
}
