// Command replay measures routing policies on workloads of LLM requests, in
// virtual time: this project's own routing code (selector/affinity, not a copy),
// the policies that any proxy has, and bounds that no router can reach.
//
//	go run ./integration/replay                      # six generated workloads, under a minute
//	go run ./integration/replay -traces DIR -workloads conversation -cache 500k,30% -load 0.5,0.8 -draws 3
//	go run ./integration/replay -policies prefix_affinity,prefix_affinity+streams=0,pooled
//
// # Model
//
// A replica prefills one request after the other at -rate uncached tokens a
// second; decoding runs beside that at -tpot seconds a token, for at most -slots
// requests. A request is let in when a slot is free and its prompt and output
// fit the KV memory beside what running requests pin; the rest of the memory is
// an LRU prefix cache that gives up the ends of prompts first. Within a session
// a turn waits for the answer before it. TTFT is from arrival to the end of the
// prefill. The workload is sped up until the scarcest of prefill time, KV memory
// and slots reaches -load, as far as one pooled cache could serve it. There is
// no network, and answers are not cached.
//
// # Policies
//
// round_robin, least_conn, session_hash (rendezvous), bounded_hash (consistent,
// load at most 1.25 times the mean), prefix_affinity, and as bounds pooled (one
// cache of the total size, any server) and clairvoyant (true caches, exact
// queues, this project's cost). prefix_affinity takes options after a plus:
// told[=x] (capacity configured, x times the truth), reports=s (share of
// responses that report cached tokens), lies=s (of these say 0), off=s (reported
// counts off by up to s), streams=s (share of requests whose first output is
// seen), unseen=s (share of requests that go past the gateway), poll=t (the
// replicas' queues are read every t seconds), gateways=n (that don't talk),
// sync=t (gateways know what the others did t seconds later), rendezvous,
// alpha=a, min_match=n.
package main

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

func main() {
	if err := run(os.Args[1:], os.Stdout, os.Stderr); err != nil && !errors.Is(err, flag.ErrHelp) {
		fmt.Fprintln(os.Stderr, "replay:", err)
		os.Exit(1)
	}
}

func run(args []string, out, log io.Writer) (err error) {
	f := flag.NewFlagSet("replay", flag.ContinueOnError)
	f.SetOutput(log)
	traces := f.String("traces", "", "folder of trace files NAME.jsonl; without it workloads are generated")
	workloads := f.String("workloads", "chat,agents,hot,tenants,bursts,unique", "workloads, generated ones or trace files")
	policies := f.String("policies", "round_robin,least_conn,session_hash,bounded_hash,prefix_affinity,clairvoyant,pooled", "policies and bounds")
	caches := f.String("cache", "30%", "KV memory of a replica: Nk tokens, or the fleet's as a share of the workload's unique tokens")
	loads := f.String("load", "0.8", "loads")
	draws := f.Int("draws", 1, "draws of the arrivals; the table has the medians")
	seed := f.Uint64("seed", 1, "of the first draw; 0: arrivals as recorded")
	c := setting{}
	f.IntVar(&c.replicas, "replicas", 8, "replicas")
	f.Float64Var(&c.rate, "rate", 8000, "prefill tokens a second")
	f.Float64Var(&c.perToken, "tpot", 0.02, "seconds an output token")
	f.IntVar(&c.slots, "slots", 64, "requests that run at once on a replica")
	f.Float64Var(&c.slow, "slow", 0, "replica 0 prefills at this share of the rate")
	f.Float64Var(&c.small, "small", 0, "replica 0 has this share of the memory")
	f.BoolVar(&c.fails, "fail", false, "replica 0 fails at 40 % of the span and is back, empty, at 50 %")
	f.IntVar(&c.restarts, "restarts", 0, "so many times, evenly spread, a replica in its turn loses its cache and its requests and goes on")
	csvFile := f.String("csv", "", "write the results to this file")
	svgFile := f.String("svg", "", "draw the results into this file")
	if err := f.Parse(args); err != nil {
		return err
	}
	var all []*outcome
	for name := range strings.SplitSeq(*workloads, ",") {
		t, err := workload(*traces, name)
		if err != nil {
			return err
		}
		fmt.Fprintf(log, "%s: %d requests, %.1f M prompt tokens, %.1f %% of them reusable\n", name, len(t.requests), float64(t.tokens)/1e6, 100*t.ideal())
		for cache := range strings.SplitSeq(*caches, ",") {
			c := c
			if c.capacity, err = capacityOf(t, cache, c.replicas); err != nil {
				return err
			}
			for l := range strings.SplitSeq(*loads, ",") {
				load, err := strconv.ParseFloat(l, 64)
				if err != nil || load <= 0 {
					return fmt.Errorf("load '%s' is not a number above 0", l)
				}
				c.speedup = pace(t, c, load)
				for d := range *draws {
					c.seed = *seed + uint64(d)
					for policy := range strings.SplitSeq(*policies, ",") {
						o, err := measure(t, c, policy)
						if err != nil {
							return err
						}
						o.workload, o.cache, o.load, o.draw, o.policy = name, cache, load, c.seed, policy
						all = append(all, o)
					}
				}
			}
		}
	}
	return errors.Join(table(out, all), write(*csvFile, all, writeCSV), write(*svgFile, all, drawing))
}

// measure replays a workload before a policy.
func measure(t *trace, c setting, name string) (*outcome, error) {
	p, err := policyNamed(name)
	if err != nil {
		return nil, err
	}
	c.pooled = name == "pooled"
	if c.pooled {
		c.fails, c.restarts = false, 0
	}
	s := simulate(t, c, p)
	o := &outcome{setting: c, result: s.result()}
	if p, ok := p.(*product); ok {
		for _, r := range p.gates[0].fleet.Snapshot(s.clock()) {
			o.capacity += float64(r.CapacityTokens) / float64(c.replicas)
		}
		o.restarts = p.restarts
	}
	return o, nil
}

func write(name string, all []*outcome, to func(io.Writer, []*outcome) error) error {
	if name == "" {
		return nil
	}
	f, err := os.Create(filepath.Clean(name))
	if err != nil {
		return err
	}
	return errors.Join(to(f, all), f.Close())
}

func workload(dir, name string) (*trace, error) {
	if generated[name] != nil {
		return generate(name, 1), nil
	}
	if dir == "" {
		return nil, fmt.Errorf("unknown workload '%s': name a folder of trace files with -traces", name)
	}
	return loadTrace(filepath.Join(dir, name+".jsonl"), name)
}

// policyNamed returns a new policy. The product's name can be followed by what
// is different: prefix_affinity+told+streams=0.5.
func policyNamed(name string) (policy, error) {
	switch name, options, _ := strings.Cut(name, "+"); name {
	case "round_robin":
		return &roundRobin{}, nil
	case "least_conn":
		return &leastConn{}, nil
	case "session_hash":
		return &sessionHash{}, nil
	case "bounded_hash":
		return &boundedHash{}, nil
	case "pooled":
		return newKnowing(false), nil
	case "clairvoyant":
		return newKnowing(true), nil
	case "prefix_affinity":
		return newProduct(options)
	}
	return nil, fmt.Errorf("unknown policy '%s'", name)
}

// capacityOf turns "500k" or "30%" into tokens a replica, never less than the
// longest request needs.
func capacityOf(t *trace, spec string, replicas int) (int, error) {
	need := 0
	for _, q := range t.requests {
		need = max(need, q.prompt+q.output+2*t.blockTokens)
	}
	digits := strings.TrimRight(spec, "%k")
	n, err := strconv.ParseFloat(digits, 64)
	switch unit := strings.TrimPrefix(spec, digits); {
	case err != nil || n <= 0:
	case unit == "%":
		return max(need, int(float64(t.blocks*t.blockTokens)*n/100/float64(replicas))), nil
	case unit == "k":
		return max(need, int(n*1000)), nil
	}
	return 0, fmt.Errorf("cache '%s' is neither tokens like 500k nor a share like 30%%", spec)
}
