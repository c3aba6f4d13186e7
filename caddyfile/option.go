package caddyfile

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
)

// readerOf returns the reader of the option on which d stands, and notes in seen
// that it was there. Only ignore may come again.
func readerOf[R any](d *caddyfile.Dispenser, options map[string]R, seen map[string]bool) (read R, err error) {
	option := d.Val()
	read, ok := options[option]
	switch {
	case !ok:
		return read, d.Err(unrecognized(option, slices.Sorted(maps.Keys(options))))
	case seen[option] && option != "ignore":
		return read, d.Errf("%s already specified", option)
	}
	seen[option] = true
	return read, nil
}

// unrecognized says what an option should have been: one of those there are,
// perhaps the one that is spelt most like it.
func unrecognized(option string, known []string) string {
	nearest := slices.MinFunc(known, func(a, b string) int { return edits(option, a) - edits(option, b) })
	hint := ""
	if edits(option, nearest) <= len(nearest)/3 {
		hint = fmt.Sprintf("did you mean '%s'? ", nearest)
	}
	return fmt.Sprintf("unrecognized option '%s': %sthe options are %s", option, hint, strings.Join(known, ", "))
}

// edits counts how many letters must be inserted, left out or replaced to make b
// of a.
func edits(a, b string) int {
	row := make([]int, len(b)+1) // for the beginning of a, by that of b
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diagonal := row[0]
		row[0] = i + 1
		for j := range len(b) {
			other := diagonal
			if a[i] != b[j] {
				other++
			}
			diagonal = row[j+1]
			row[j+1] = min(other, diagonal+1, row[j]+1)
		}
	}
	return row[len(b)]
}
