package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	_ "github.com/prefix-affinity/caddy"
	"github.com/prefix-affinity/caddy/integration/engine"
	"github.com/prefix-affinity/caddy/integration/harness"
	player "github.com/prefix-affinity/caddy/integration/workload"
)

var live = flag.Int("live", 0, "rounds of the full comparison with real Caddy and engines, of which the medians count; 0: a short one")

// TestLive plays one workload twice under each policy: through a real Caddy
// before simulated engines, on sockets and in real time, and by replay. Both must
// come to the same: hit ratios within 3 points, mean TTFTs as ratios to
// least_conn's within 30 %, and the same order of policies; twice that for the
// single round of the short form.
//
// What the two models share is prefill, one prompt after the other at a rate,
// and LRU memory that running requests pin. They differ in that the engine keeps
// answers cached (a hundredth of the memory here), decodes in steps that all
// requests share, and takes blocks of 16 tokens, which comes to the trace's
// blocks because what follows these is nobody else's. And there is a network. A
// machine that sends requests late because others keep it busy proves nothing.
func TestLive(t *testing.T) {
	if testing.Short() || harness.Race {
		t.Skip("measures time")
	}
	// The rate is such that what Caddy and a busy machine take, some milliseconds a
	// request, is little beside a prefill.
	policies, rounds, rate := []string{"least_conn", "prefix_affinity"}, 1, 12_000.0
	if *live > 0 {
		policies, rounds, rate = []string{"round_robin", "least_conn", "prefix_affinity"}, *live, 2000
	}
	w := &writer{rng: newRand(3)}
	apps := make([]text, 0, 6)
	for range 6 {
		apps = append(apps, w.more(text{}, 2000))
	}
	for i := range 48 {
		w.talk(w.rng.Float64()*6, apps[i%len(apps)], 4, 700, 12, 2)
	}
	work := newTrace("live", generatedBlock, w.rows)
	c := setting{replicas: 4, rate: rate, perToken: 240 / rate, slots: 64, capacity: work.blocks * work.blockTokens / 6}
	c.speedup = pace(work, c, 0.4)
	t.Logf("%d requests, %.2f M prompt tokens, %.0f s", len(work.requests), float64(work.tokens)/1e6, work.span/c.speedup)

	measured, virtual := map[string]seen{}, map[string]seen{}
	for _, policy := range policies {
		var hits, means []float64
		for c.seed = range 5 { // so much does a second of jitter change
			o, err := measure(work, c, policy)
			if err != nil {
				t.Fatal(err)
			}
			hits, means = append(hits, o.hit), append(means, o.mean)
		}
		virtual[policy] = medians(hits, means)
		hits, means = nil, nil
		for range rounds {
			hit, mean, late, err := playLive(t.Context(), work, c, policy)
			if err != nil {
				t.Fatalf("%s: %v", policy, err)
			}
			if late > 0.15*virtual[policy].mean {
				t.Skipf("this machine is too busy to measure anything: requests were sent %.3f s late", late)
			}
			hits, means = append(hits, hit), append(means, mean)
		}
		measured[policy] = medians(hits, means)
		t.Logf("%-16s hit %4.1f %% live, %4.1f %% by replay; mean TTFT %.3f s, %.3f s", policy, 100*measured[policy].hit, 100*virtual[policy].hit, measured[policy].mean, virtual[policy].mean)
	}
	points, times := 0.06, 1.6 // one round
	if *live > 0 {
		points, times = 0.03, 1.3
	}
	for i, p := range policies {
		if d := measured[p].hit - virtual[p].hit; d < -points || d > points {
			t.Errorf("%s: the hit ratio is %.1f points off", p, 100*d)
		}
		r := measured[p].mean / measured["least_conn"].mean / (virtual[p].mean / virtual["least_conn"].mean)
		if r < 1/times || r > times {
			t.Errorf("%s: mean TTFT to least_conn's is %.2f times what replay says", p, r)
		}
		for _, q := range policies[:i] {
			if (measured[p].mean < measured[q].mean) != (virtual[p].mean < virtual[q].mean) {
				t.Errorf("%s and %s change places", p, q)
			}
		}
	}
}

type seen struct{ hit, mean float64 }

func medians(hits, means []float64) seen {
	slices.Sort(hits)
	slices.Sort(means)
	return seen{hits[len(hits)/2], means[len(means)/2]}
}

// playLive sends a trace through Caddy and returns the hit ratio, the mean TTFT
// and by how much requests were sent late on average, in seconds.
func playLive(ctx context.Context, work *trace, c setting, policy string) (hit, mean, late float64, err error) {
	g, err := harness.StartGateway(c.replicas, engine.Config{
		CapacityTokens: c.capacity, PrefillRate: c.rate, InterToken: time.Duration(c.perToken * float64(time.Second)), MaxRunning: c.slots,
	}, "lb_policy "+policy+"\n\t\ttransport http {\n\t\t\tdial_timeout 1m\n\t\t}")
	if err != nil {
		return 0, 0, 0, err
	}
	defer func() { err = errors.Join(err, g.Close()) }()
	transport := &http.Transport{MaxIdleConnsPerHost: len(work.requests)}
	defer transport.CloseIdleConnections()
	client := &http.Client{Transport: transport}

	ended := make([]chan struct{}, len(work.requests))
	for i := range ended {
		ended[i] = make(chan struct{})
	}
	var mu sync.Mutex
	var wg sync.WaitGroup
	begin := time.Now()
	for _, q := range work.requests {
		wg.Go(func() {
			defer close(ended[q.id])
			body, problem := bodyOf(work, q)
			due := begin.Add(time.Duration(q.at / c.speedup * float64(time.Second)))
			time.Sleep(time.Until(due))
			if q.before != nil {
				select {
				case <-ended[q.before.id]:
				default:
					<-ended[q.before.id]
					due = time.Now().Add(200 * time.Millisecond)
					time.Sleep(time.Until(due))
				}
			}
			behind := time.Since(due).Seconds()
			var a player.Answer
			if problem == nil {
				a, problem = player.Ask(ctx, client, "http://"+g.Addr+"/v1/chat/completions", body, nil)
			}
			mu.Lock()
			defer mu.Unlock()
			late += behind / float64(len(work.requests))
			mean += a.TTFT.Seconds() / float64(len(work.requests))
			err = errors.Join(err, problem)
		})
	}
	wg.Wait()
	var prompt, cached int64
	for _, s := range g.Fleet.Stats() {
		prompt += s.PromptTokens
		cached += s.CachedTokens
	}
	return float64(cached) / float64(prompt), mean, late, err
}

// bodyOf makes a request's body: a text for each block, and one of its own for
// the rest of the prompt.
func bodyOf(work *trace, q *traced) ([]byte, error) {
	var prompt bytes.Buffer
	fill := func(name string, tokens int) {
		n := tokens * engine.BytesPerToken
		prompt.WriteString(strings.Repeat(name+" ", n/(len(name)+1)+1)[:n])
	}
	for _, b := range q.blocks {
		fill(fmt.Sprintf("block %d", b), work.blockTokens)
	}
	fill(fmt.Sprintf("request %d", q.id), q.prompt-len(q.blocks)*work.blockTokens)
	return json.Marshal(map[string]any{
		"model": "simulated", "messages": []map[string]string{{"role": "user", "content": prompt.String()}},
		"max_tokens": q.output, "ignore_eos": true, "stream": true, "stream_options": map[string]any{"include_usage": true},
	})
}
