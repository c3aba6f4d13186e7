package prefixhash

import (
	"bytes"
	"regexp"
)

const (
	// ignoreWindow is how much text Config.Ignore is matched against at once, and
	// ignoreLongest of it belongs to the next window, too: a match of that length is
	// found wherever it is. Windows begin after a line where they can.
	ignoreWindow  = 4 << 10
	ignoreLongest = 1 << 10

	// ignoreMost is how many matches of Config.Ignore are left out of one
	// prompt. A pattern may have to read a whole window for each match, so
	// this bounds the work on a prompt to twice its length plus 1 MiB.
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
		window := text[:min(len(text), ignoreWindow)]
		end := next(text)
		from := 0
		if g.left > 0 {
			for _, match := range g.pattern.FindAllIndex(window, g.left) {
				if match[0] >= end {
					break
				}
				if match[1] > match[0] {
					c.spell(window[from:match[0]])
					from = match[1]
					g.left--
					g.matched = true
				}
			}
		}
		end = max(end, from)
		c.spell(window[from:end])
		text = text[end:]
	}
}

// next returns where the window after the first one of a text begins, unless a match
// ends later.
func next(text []byte) int {
	if len(text) <= ignoreWindow {
		return len(text)
	}
	const least, most = ignoreWindow / 2, ignoreWindow - ignoreLongest
	if line := bytes.LastIndexByte(text[least:most], '\n'); line >= 0 {
		return least + line + 1
	}
	return most
}
