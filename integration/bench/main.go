// Command bench measures what prefix_affinity costs. Each policy has a Caddy in a
// process of its own, the same binary; upstreams and clients are in this
// process, on loopback sockets. Policies take turns in slices of a fraction of a
// second, and what counts are the ratios to least_conn, as medians of the rounds,
// so that a noisy machine disturbs all alike.
//
//	go run ./integration/bench                      # CPU time, rate and latency of requests
//	go run ./integration/bench -profile requests    # and where the CPU time goes
//	go run ./integration/bench streams              # delay and CPU time of streamed tokens
//	go run ./integration/bench memory               # memory of requests that wait
//	go run ./integration/bench -check               # requests and streams within bounds, for CI
//
// # Requests
//
// Chat completions of 2, 32 and 512 KB, 64 conversations under one system prompt,
// each request with a last message of its own, before four upstreams that
// answer at once. CPU time is what getrusage says of the proxy's process.
//
// # Streams
//
// 64 streams of 50 tokens a second and 256 of 10. The delay is the time from the
// upstream's write of a token to the client's read of it.
//
// # Memory
//
// Requests whose bodies the upstreams have and don't answer yet; then all are
// answered with a first token; then they end.
package main

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"slices"
	"time"

	_ "github.com/prefix-affinity/caddy"
	"github.com/prefix-affinity/caddy/integration/harness"
)

var (
	rounds   = flag.Int("rounds", 5, "rounds that the medians are taken of")
	perRound = flag.Int("slices", 8, "slices of each policy in a round")
	slice    = flag.Duration("slice", 200*time.Millisecond, "length of a slice; five times that for streams")
	check    = flag.Bool("check", false, "measure little, and fail where a cost is far beyond what is expected")
	profile  = flag.Bool("profile", false, "tell by parts where the CPU time of requests goes (needs the go command)")
)

func main() {
	harness.BeCaddy()
	flag.Parse()
	if err := run(os.Stdout, flag.Args()); err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

func run(out io.Writer, what []string) error {
	if *check {
		*rounds, *perRound = 3, 4
		return errors.Join(requests(out), streams(out))
	}
	if len(what) == 0 {
		what = []string{"requests"}
	}
	subjects := map[string]func(io.Writer) error{"requests": requests, "streams": streams, "memory": memory}
	for _, w := range what {
		subject := subjects[w]
		if subject == nil {
			return fmt.Errorf("unknown subject '%s': requests, streams or memory", w)
		}
		if err := subject(out); err != nil {
			return fmt.Errorf("%s: %w", w, err)
		}
	}
	return nil
}

// spread is how something was over the rounds.
type spread struct{ least, median, most float64 }

func spreadOf(values []float64) spread {
	values = slices.Sorted(slices.Values(values))
	return spread{values[0], values[len(values)/2], values[len(values)-1]}
}

func (s spread) String() string {
	return fmt.Sprintf("%.2f (%.2f-%.2f)", s.median, s.least, s.most)
}

// over returns how a figure of the rounds compares with that of others.
func over[T any](rounds, base []T, of func(T) float64) spread {
	ratios := make([]float64, len(rounds))
	for i := range rounds {
		ratios[i] = of(rounds[i]) / of(base[i])
	}
	return spreadOf(ratios)
}

func median[T any](rounds []T, of func(T) float64) float64 {
	values := make([]float64, len(rounds))
	for i := range rounds {
		values[i] = of(rounds[i])
	}
	return spreadOf(values).median
}

// quantile returns a quantile of sorted values.
func quantile(sorted []float64, q float64) float64 {
	return sorted[min(int(q*float64(len(sorted))), len(sorted)-1)]
}
