package main

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"strings"
	"text/tabwriter"
	"time"
)

// profiled is how long a policy is watched.
const profiled = 5 * time.Second

// A part is what CPU time goes to: the first in the list with a function on the
// sample's stack.
type part struct {
	name      string
	functions []string // prefixes
}

const project = "github.com/prefix-affinity/caddy/"

var allParts = []part{
	{"garbage collector", []string{"runtime.gcBgMarkWorker", "runtime.gcAssistAlloc", "runtime.bgsweep", "runtime.bgscavenge", "runtime.gcStart"}},
	{"key: hashing", []string{"github.com/cespare/xxhash/v2.", project + "prefixhash.(*chain).", project + "prefixhash.nh"}},
	{"key: parsing", []string{project + "prefixhash."}},
	{"index: match", []string{project + "selector/affinity.(*Index).look"}},
	{"index: insert", []string{project + "selector/affinity.(*Replica).send"}},
	{"rule, accounts, learning", []string{project + "selector/affinity."}},
	{"reading the body", []string{project + "selector.(*held).read", "net/http.(*transferWriter).doBodyCopy", "golang.org/x/net/http2.(*clientStream).writeRequestBody"}},
	{"watching the response", []string{project + "selector/signal."}},
	{"the rest of the selection", []string{project + "selector.(*Policy).Select", project + "selector.(*request).", project + "selector.(*tappedBody).end", "github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy.LeastConnSelection"}},
	{"transport to the upstream", []string{"net/http.(*persistConn)", "net/http.(*Transport)"}},
	{"serving the client", []string{"net/http.(*conn).serve", "net/http.(*http2serverConn)", "net/http.(*connReader)", "golang.org/x/net/http2."}},
	{"runtime and scheduler", []string{""}},
}

// parts tells what the CPU time of a request goes to, with least_conn and with
// the policy, what it allocates, and how long it is blocked on mutexes. The
// body is read from the client by hold with prefix_affinity and while it is
// sent to the upstream otherwise.
func parts(out io.Writer, s setting, proxies []*proxy) error {
	l := newLoad(s)
	defer l.close()
	first, last := proxies[0], proxies[len(proxies)-1]
	var perRequest [2]map[string]float64
	var totals [2]total
	for i, x := range []*proxy{first, last} {
		t := &totals[i]
		if err := l.run(x, *slice, &total{}); err != nil {
			return err
		}
		shares := make(chan map[string]float64, 1)
		failure := make(chan error, 1)
		go func() {
			sh, err := x.profile(profiled)
			shares <- sh
			failure <- err
		}()
		if err := l.run(x, profiled, t); err != nil {
			return err
		}
		perRequest[i] = <-shares
		if err := <-failure; err != nil {
			return err
		}
		for name := range perRequest[i] {
			perRequest[i][name] *= 1e6 * t.figures().cpu
		}
	}
	fmt.Fprintln(out)
	t := tabwriter.NewWriter(out, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintf(t, "%s\t%s\t\t\n", first.name, last.name)
	for _, p := range allParts {
		fmt.Fprintf(t, "%.1f µs\t%.1f µs\t  %s\t\n", perRequest[0][p.name], perRequest[1][p.name], p.name)
	}
	for _, line := range []struct {
		name, format string
		of           func(*total) float64
	}{
		{"allocations", "%.0f", func(t *total) float64 { return float64(t.allocs) }},
		{"allocated", "%.1f KB", func(t *total) float64 { return float64(t.allocated) / 1024 }},
		{"blocked on mutexes", "%.1f µs", func(t *total) float64 { return 1e6 * t.lockWait }},
	} {
		for i := range totals {
			fmt.Fprintf(t, line.format+"\t", line.of(&totals[i])/float64(len(totals[i].times)))
		}
		fmt.Fprintf(t, "  %s\t\n", line.name)
	}
	return t.Flush()
}

// profile returns the share of each part in the CPU time of the next while.
func (x *proxy) profile(d time.Duration) (map[string]float64, error) {
	res, err := http.Get(fmt.Sprintf("%s/debug/pprof/profile?seconds=%.0f", x.Admin, d.Seconds()))
	if err != nil {
		return nil, err
	}
	defer res.Body.Close()
	f, err := os.CreateTemp("", "cpu-*.pprof")
	if err != nil {
		return nil, err
	}
	defer os.Remove(f.Name())
	_, err = io.Copy(f, res.Body)
	if err := errors.Join(err, f.Close()); err != nil {
		return nil, err
	}
	traces, err := exec.Command("go", "tool", "pprof", "-traces", "-unit=ms", f.Name()).Output()
	if err != nil {
		return nil, fmt.Errorf("go tool pprof: %w", err)
	}
	return sharesOf(traces), nil
}

// sharesOf reads stacks as pprof prints them: after a line of dashes the time
// and the innermost function, then its callers.
func sharesOf(traces []byte) map[string]float64 {
	shares := make(map[string]float64)
	sum := 0.0
	var took float64
	var stack []string
	add := func() {
		if took > 0 {
			shares[partOf(stack)] += took
			sum += took
		}
		took, stack = 0, stack[:0]
	}
	for lines := bufio.NewScanner(bytes.NewReader(traces)); lines.Scan(); {
		line := lines.Text()
		if strings.HasPrefix(line, "-----") {
			add()
			continue
		}
		fields := strings.Fields(line)
		if len(fields) > 1 && strings.HasSuffix(fields[0], "ms") {
			if _, err := fmt.Sscanf(fields[0], "%fms", &took); err == nil {
				fields = fields[1:]
			}
		}
		if len(fields) > 0 {
			stack = append(stack, fields[0])
		}
	}
	add()
	for name := range shares {
		shares[name] /= sum
	}
	return shares
}

func partOf(stack []string) string {
	for _, p := range allParts {
		for _, function := range stack {
			for _, prefix := range p.functions {
				if strings.HasPrefix(function, prefix) {
					return p.name
				}
			}
		}
	}
	return ""
}
