// Command soak runs a Caddy in a process of its own under mixed traffic, faults
// and reloads for a while, and says whether anything grew: memory, goroutines,
// the time that a decision takes, requests that are never settled.
//
//	go run github.com/prefix-affinity/caddy/integration/soak -for 30m
//
// Clients send the next request as soon as they have the last answer, over
// HTTP/1.1 and HTTP/2, so that the load is what the machine sustains. What grew
// is judged by the trend; see growth.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"net/http"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	_ "github.com/prefix-affinity/caddy"
	"github.com/prefix-affinity/caddy/integration/engine"
	"github.com/prefix-affinity/caddy/integration/harness"
)

const (
	replicas     = 4
	outputTokens = 24
	// Limits of growth, beyond what chance explains. Within
	// minutes the heap has not found its size yet: only gross leaks show then.
	rssGrowth      = 0.05
	rssGrowthShort = 0.3
	short          = 10 * time.Minute
	decisionGrowth = 0.5
	goroutines     = 10 // more than before the traffic
)

func main() {
	harness.BeCaddy()
	duration := flag.Duration("for", time.Minute, "how long")
	clients := flag.Int("clients", 64, "that send without a pause")
	seed := flag.Uint64("seed", uint64(time.Now().UnixNano()), "of the traffic and the faults") // #nosec G115 -- any number
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	fmt.Printf("seed %d\n", *seed)
	err := run(ctx, *duration, *clients, *seed)
	var grown grownError
	if *duration < short && errors.As(err, &grown) {
		fmt.Printf("once more, because %v: within minutes that may be chance\n", err)
		err = run(ctx, *duration, *clients, *seed)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	fmt.Println("nothing grew")
}

func run(ctx context.Context, duration time.Duration, clients int, seed uint64) (err error) {
	// Small caches and a small index, so that all that fills up has done so soon.
	fleet, err := harness.Engines(replicas, engine.Config{
		CapacityTokens: 200_000, PrefillRate: 200_000, InterToken: time.Millisecond, OutputTokens: outputTokens, MaxWaiting: 64,
	})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, fleet.Close()) }()
	others, err := newForeign(2)
	if err != nil {
		return err
	}
	defer others.close()
	addr, err := harness.FreeAddr()
	if err != nil {
		return err
	}
	configs := variants(addr, fleet, others)
	caddy, err := harness.StartProcess(configs[0])
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, caddy.Close()) }()

	traffic := newTraffic("http://"+addr, clients, seed)
	traffic.once() // what is made on first use is no leak
	idle, err := calm(caddy, func(n float64) bool { return true })
	if err != nil {
		return err
	}

	ctx, cancel := context.WithTimeout(ctx, duration)
	defer cancel()
	trouble := newTrouble(caddy, fleet, configs, seed)
	trouble.reloaded = traffic.config.Store
	over := make(chan struct{})
	go func() {
		defer close(over)
		trouble.run(ctx)
		cancel() // it has failed, if the time is not over
	}()
	traffic.start()
	samples, err := watch(ctx, caddy, max(time.Second, duration/600), traffic)
	traffic.stop()
	<-over
	if err = errors.Join(err, trouble.err); err != nil {
		return err
	}
	fmt.Printf("%s\n%s\n", traffic, trouble)
	rss, long := rssGrowth, duration >= short
	if !long {
		rss = rssGrowthShort
	}
	grew := samples.judge(rss, long)
	if wrong := errors.Join(settled(caddy), traffic.judge(), leaks(caddy, idle)); wrong != nil {
		return errors.Join(wrong, grew)
	}
	if grew != nil {
		return grownError{grew}
	}
	return nil
}

// grownError says what grew in a run in which nothing else was wrong.
type grownError struct{ error }

// calm waits until the number of Caddy's goroutines is one that will do, and
// doesn't change any more, and returns it.
func calm(caddy *harness.Process, good func(float64) bool) (n float64, err error) {
	last, since := 0.0, time.Now()
	for deadline := time.Now().Add(time.Minute); time.Now().Before(deadline); time.Sleep(200 * time.Millisecond) {
		s, err := take(caddy)
		if err != nil {
			return 0, err
		}
		if s.goroutines != last {
			last, since = s.goroutines, time.Now()
		}
		if good(last) && time.Since(since) > 3*time.Second {
			break
		}
	}
	return last, nil
}

// leaks compares the goroutines with those before the traffic.
func leaks(caddy *harness.Process, before float64) error {
	after, err := calm(caddy, func(n float64) bool { return n <= before+goroutines })
	if err != nil {
		return err
	}
	fmt.Printf("goroutines without traffic: %.0f before, %.0f after\n", before, after)
	if after > before+goroutines {
		return fmt.Errorf("%.0f goroutines are left, there were %.0f", after, before)
	}
	return nil
}

// settled waits until every account is at zero.
func settled(caddy *harness.Process) error {
	var accounts []struct {
		Address      string  `json:"address"`
		Requests     int     `json:"pending_requests"`
		Waiting      int     `json:"waiting_requests"`
		Prefill      float64 `json:"pending_prefill_tokens"`
		PromptTokens float64 `json:"prompt_tokens_in_flight"`
	}
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(100 * time.Millisecond) {
		res, err := http.Get(caddy.Admin + "/prefix_affinity/upstreams")
		if err != nil {
			return err
		}
		err = json.NewDecoder(res.Body).Decode(&accounts)
		if err = errors.Join(err, res.Body.Close()); err != nil {
			return err
		}
		open := false
		for _, a := range accounts {
			open = open || a.Requests != 0 || a.Waiting != 0 || a.Prefill != 0 || a.PromptTokens != 0
		}
		if !open && len(accounts) > 0 {
			fmt.Printf("accounts of %d upstreams are at zero\n", len(accounts))
			return nil
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("accounts are not at zero: %+v", accounts)
		}
	}
}

// variants are the configurations that reloads go through.
func variants(addr string, fleet harness.Fleet, others *foreign) []string {
	site := func(upstreams, policy string) string {
		return fmt.Sprintf(`{
	grace_period 5s
	servers {
		protocols h1 h2c
	}
	log {
		level ERROR
	}
}
http://%s {
	@foreign path /v1/responses /v1/messages /api/chat /v1/embeddings
	handle @foreign {
		reverse_proxy %s {
			lb_policy prefix_affinity {
				session_header X-Session-Id
				max_body 1MiB
				index_size 50000
			}
			transport http {
				keepalive 2s
			}
		}
	}
	handle {
		reverse_proxy %s {
			%s
			lb_retries 3
			lb_retry_match {
				expression `+"`{rp.is_transport_error} == true || {rp.status_code} in [429, 500, 503]`"+`
			}
			transport http {
				keepalive 2s
				dial_timeout 2s
			}
		}
	}
}
`, addr, strings.Join(others.addrs(), " "), upstreams, policy)
	}
	ours := func(options string) string {
		return "lb_policy prefix_affinity {\n\t\t\t\tindex_size 50000\n\t\t\t\t" + options + "\n\t\t\t}"
	}
	all := fleet.Upstreams()
	return []string{
		site(all, ours("poll 1s")),
		site(all, ours("explain\n\t\t\t\tmin_match 128\n\t\t\t\torca text")),
		site(fleet[1:].Upstreams(), ours("poll 500ms\n\t\t\t\taffinity_weight 2")),
		site(all, ours("fallback round_robin\n\t\t\t\tscope {http.request.header.Authorization}")),
		site(all, "lb_policy least_conn\n\t\t\trequest_buffers 8MiB"),
		site(all, ours("block_size 512\n\t\t\t\tdrain "+fleet[0].Addr())),
	}
}
