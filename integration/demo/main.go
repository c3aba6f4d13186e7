// Command demo shows what routing by prefix is worth. It starts four simulated
// engines and a real Caddy in front of them, all in this process on loopback
// ports, and plays the same traffic under four policies:
//
//	go run github.com/prefix-affinity/caddy/integration/demo
//
// The traffic: 3 tenants with system prompts of 2,000 tokens, 60 conversations
// of 6 turns whose history grows, with pauses to think between the turns, and
// a burst of 16 requests that share one document. A replica's cache holds 40 %
// of the unique tokens of all that, so that four can hold everything if each
// holds something else, and not if all hold the same. The pauses are such that
// the conversations keep the replicas' prefill 70 % busy if all of them shared
// one cache that never forgets. The hit ratio of that cache, the ideal, is
// computed from the traffic. Each tenant has 4 client addresses, for the policy
// that goes by them.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"syscall"
	"time"

	_ "github.com/prefix-affinity/caddy"
	"github.com/prefix-affinity/caddy/integration/engine"
	"github.com/prefix-affinity/caddy/integration/harness"
	"github.com/prefix-affinity/caddy/integration/workload"
)

const (
	replicas    = 4
	prefillRate = 12_000 // tokens/s, a mid-size model on a data-centre GPU
	interToken  = 5 * time.Millisecond
	cacheShare  = 0.4
	load        = 0.7
)

var traffic = workload.Shape{
	Tenants: 3, SystemTokens: 2000,
	Conversations: 60, Turns: 6, TurnTokens: 400, AnswerTokens: 40,
	Siblings: 16, SharedTokens: 4000,
	Clients: 12, Seed: 1,
}

// policies are played in this order; -keep leaves the last one up.
var policies = []string{"round_robin", "client_ip_hash", "least_conn", "prefix_affinity"}

func main() {
	keep := flag.Bool("keep", false, "leave Caddy and the engines up when done, with traffic")
	check := flag.Bool("check", false, "fail unless prefix_affinity reaches 0.95 of the ideal hit ratio and half of least_conn's mean TTFT")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, os.Stdout, *keep, *check); err != nil {
		fmt.Fprintln(os.Stderr, "demo:", err)
		os.Exit(1)
	}
}

// outcome is what one policy made of the traffic.
type outcome struct {
	policy string
	client workload.Result
	fleet  []engine.Stats
}

// total adds up the replicas.
func (o outcome) total() (t engine.Stats) {
	for _, s := range o.fleet {
		t.Requests += s.Requests
		t.PromptTokens += s.PromptTokens
		t.CachedTokens += s.CachedTokens
	}
	return t
}

func run(ctx context.Context, stdout *os.File, keep, check bool) (err error) {
	plan, err := workload.New(traffic)
	if err != nil {
		return err
	}
	pause, err := plan.MeanPause(load, replicas, prefillRate, interToken)
	if err != nil {
		return err
	}
	cfg := engine.Config{
		CapacityTokens: int(cacheShare * float64(plan.UniqueTokens())),
		PrefillRate:    prefillRate,
		InterToken:     interToken,
	}
	out := newScreen(stdout)
	out.introduce(plan, cfg, pause)

	addr, err := harness.FreeAddr()
	if err != nil {
		return err
	}
	var caddy *harness.Caddy
	var fleet harness.Fleet
	defer func() {
		if caddy != nil {
			err = errors.Join(err, caddy.Stop())
		}
		err = errors.Join(err, fleet.Close())
	}()
	var outcomes []outcome
	for i, policy := range policies {
		// Every policy gets engines that know nothing yet.
		if err := fleet.Close(); err != nil {
			return err
		}
		if fleet, err = harness.Engines(replicas, cfg); err != nil {
			return err
		}
		config := caddyfile(addr, fleet.Upstreams(), policy)
		if i == 0 {
			caddy, err = harness.StartCaddy(config)
		} else {
			err = caddy.Reload(config)
		}
		if err != nil {
			return err
		}
		progress := out.progress(policy, plan.Requests())
		result, err := plan.Play(ctx, "http://"+addr, pause, progress.step)
		progress.end()
		if err != nil {
			return fmt.Errorf("%s: %w", policy, err)
		}
		outcomes = append(outcomes, outcome{policy, result, fleet.Stats()})
	}
	out.report(plan, outcomes)

	if keep {
		out.invite(addr, caddy.Admin)
		if err := goOn(ctx, "http://"+addr, pause); err != nil {
			return err
		}
	}
	if check {
		return verdict(plan, outcomes)
	}
	return nil
}

// goOn keeps traffic coming until ctx is done, so that there is something to see.
func goOn(ctx context.Context, url string, pause time.Duration) error {
	for shape := traffic; ctx.Err() == nil; {
		shape.Seed++
		plan, err := workload.New(shape)
		if err != nil {
			return err
		}
		if _, err := plan.Play(ctx, url, pause, func() {}); err != nil && ctx.Err() == nil {
			return err
		}
	}
	return nil
}

// caddyfile is the configuration under test: all of it.
func caddyfile(addr, upstreams, policy string) string {
	return `{
	log {
		output stderr
		level ERROR
	}
	servers {
		trusted_proxies static 127.0.0.1/32 # the clients' addresses are made up
	}
}

http://` + addr + ` {
	reverse_proxy ` + upstreams + ` {
		lb_policy ` + policy + `
	}
}
`
}

// verdict compares what prefix_affinity did with what is asked of it.
func verdict(plan *workload.Plan, outcomes []outcome) error {
	var errs []error
	byName := make(map[string]outcome)
	for _, o := range outcomes {
		byName[o.policy] = o
	}
	ours := byName["prefix_affinity"]
	if r := ours.total().HitRatio() / plan.IdealHitRatio(); r < 0.95 {
		errs = append(errs, fmt.Errorf("hit ratio is %.3f of the ideal, not 0.95", r))
	}
	if r := ours.client.MeanTTFT().Seconds() / byName["least_conn"].client.MeanTTFT().Seconds(); r > 0.5 {
		errs = append(errs, fmt.Errorf("mean TTFT is %.2f of least_conn's, not 0.5", r))
	}
	return errors.Join(errs...)
}
