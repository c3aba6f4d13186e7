package caddyfile

import (
	"errors"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"

	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
)

// An option of a C has a name, under which it is found, and a reader, which stands
// on the name and takes the rest of the line.
type option[C any] struct {
	takes string // what stands behind the name
	read  func(*caddyfile.Dispenser, C) error
}

// errArgs is a reader's error where arguments are missing or too many.
var errArgs = errors.New("wrong argument count")

// readOption reads the option on which d stands into c. seen are those before it
// in their block: only ignore may come again.
func readOption[C any](d *caddyfile.Dispenser, options map[string]option[C], seen *[]string, c C) error {
	name := d.Val()
	o, ok := options[name]
	switch {
	case name == "{" && len(*seen) > 0:
		last := (*seen)[len(*seen)-1]
		return d.Errf("%s has no block: should be '%s'", last, usage(last, options[last].takes))
	case !ok && handlers.MatchString(name):
		return d.Errf("unrecognized option '%s': it is one of reverse_proxy and belongs outside of this block", name)
	case !ok:
		return d.Err(unrecognized(name, slices.Sorted(maps.Keys(options))))
	case name != "ignore" && slices.Contains(*seen, name):
		return d.Errf("%s already specified", name)
	}
	*seen = append(*seen, name)
	err := o.read(d, c)
	if errors.Is(err, errArgs) {
		return d.Errf("%v of %s: should be '%s'", err, name, usage(name, o.takes))
	}
	return err
}

// handlers are options of reverse_proxy, one block further out.
var handlers = regexp.MustCompile("^(lb_|health_|unhealthy_|header_|trusted_|(to|transport|dynamic|fail_duration|max_fails|flush_interval|request_buffers|response_buffers|stream_timeout|handle_response|replace_status|rewrite|method)$)")

func usage(name, takes string) string { return strings.TrimSpace(name + " " + takes) }

// unrecognized says what an option should have been: one of those there are,
// perhaps the one that is spelt most like it.
func unrecognized(option string, known []string) string {
	return fmt.Sprintf("unrecognized option '%s': %sthe options are %s", option, meant(option, known), strings.Join(known, ", "))
}

// meant asks for the one of the known names that is spelt like another, if there is one.
func meant(name string, known []string) string {
	nearest := slices.MinFunc(known, func(a, b string) int { return edits(name, a) - edits(name, b) })
	if edits(name, nearest) > len(nearest)/3 {
		return ""
	}
	return fmt.Sprintf("did you mean '%s'? ", nearest)
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
