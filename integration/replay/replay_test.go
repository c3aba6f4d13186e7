package main

import (
	"bytes"
	"encoding/csv"
	"encoding/xml"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// small is a workload of conversations that a test can replay often.
func small() *trace {
	w := &writer{rng: newRand(7)}
	app := w.more(text{}, 2000)
	for range 60 {
		w.talk(w.rng.Float64()*300, app, 5, 300, 100, 10)
	}
	return newTrace("small", generatedBlock, w.rows)
}

func fleetOf(t *trace, replicas int, share float64) setting {
	c := setting{replicas: replicas, rate: 8000, perToken: 0.02, slots: 64, speedup: 1, capacity: int(share * float64(t.blocks*t.blockTokens))}
	c.speedup = pace(t, c, 0.7)
	return c
}

func TestPolicies(t *testing.T) {
	work := small()
	c := fleetOf(work, 4, 0.15)
	results := map[string]*outcome{}
	for _, name := range []string{"round_robin", "least_conn", "session_hash", "bounded_hash", "prefix_affinity", "clairvoyant", "pooled"} {
		o, err := measure(work, c, name)
		if err != nil {
			t.Fatal(err)
		}
		again, err := measure(work, c, name)
		if err != nil || *again != *o {
			t.Errorf("%s: a second run differs", name)
		}
		if o.mean <= 0 || o.p50 > o.p90 || o.p90 > o.p99 || o.hit < 0 || o.hit > work.ideal() {
			t.Errorf("%s: %+v", name, o.result)
		}
		results[name] = o
	}
	ours, bound, plain := results["prefix_affinity"], results["pooled"], results["least_conn"]
	if ours.hit < 0.9*bound.hit || ours.mean > 0.75*plain.mean {
		t.Errorf("hit %.3f of %.3f, mean TTFT %.3f s against least_conn's %.3f s", ours.hit, bound.hit, ours.mean, plain.mean)
	}
}

func TestFailure(t *testing.T) {
	work := small()
	c := fleetOf(work, 4, 0.15)
	c.fails = true
	for _, name := range []string{"least_conn", "prefix_affinity", "clairvoyant"} {
		p, err := policyNamed(name)
		if err != nil {
			t.Fatal(err)
		}
		s := simulate(work, c, p)
		for _, j := range s.jobs {
			if !j.ended {
				t.Fatalf("%s: request %d was never answered", name, j.id)
			}
		}
		if p, ok := p.(*product); ok {
			for _, r := range p.gates[0].fleet.Snapshot(s.clock()) {
				if r.InFlight != 0 || r.Waiting != 0 {
					t.Errorf("%s: left in the account: %+v", name, r)
				}
			}
		}
	}
}

// Where nothing streams, it is learned from whole answers that replicas are eight
// times as fast as one is believed to be that nothing is known of, or that one of
// them is eight times as slow as the others.
func TestNothingStreams(t *testing.T) {
	work := generate("unique", 1)
	for name, c := range map[string]struct {
		rate, slow, most float64 // most times the mean TTFT where first outputs are seen
	}{
		"all/fast": {64_000, 0, 1.5}, // 3.2 if it were not learned
		"one/slow": {8000, 0.125, 2}, // 2.8
	} {
		t.Run(name, func(t *testing.T) {
			s := fleetOf(work, 8, 0.04)
			s.rate, s.slow = c.rate, c.slow
			s.speedup = pace(work, s, 0.8)
			seen, err := measure(work, s, "prefix_affinity")
			if err != nil {
				t.Fatal(err)
			}
			unseen, err := measure(work, s, "prefix_affinity+streams=0")
			if err != nil {
				t.Fatal(err)
			}
			if unseen.mean > c.most*seen.mean {
				t.Errorf("mean TTFT %.3f s, %.3f s where first outputs are seen", unseen.mean, seen.mean)
			}
		})
	}
}

func TestCapacityIsFound(t *testing.T) {
	work := small()
	c := fleetOf(work, 2, 0.08)
	o, err := measure(work, c, "prefix_affinity")
	if err != nil {
		t.Fatal(err)
	}
	if o.capacity < 0.85*float64(c.capacity) || o.capacity > 1.15*float64(c.capacity) {
		t.Errorf("learned %.0f tokens, the cache has %d", o.capacity, c.capacity)
	}
}

// TestSync: gateways that tell each other what they do are as good as one.
func TestSync(t *testing.T) {
	work := small()
	c := fleetOf(work, 4, 0.15)
	run := func(name string) *outcome {
		o, err := measure(work, c, name)
		if err != nil {
			t.Fatal(err)
		}
		return o
	}
	one, alone := run("prefix_affinity"), run("prefix_affinity+gateways=4")
	together := run("prefix_affinity+gateways=4+sync=0.05")
	if together.mean > 1.1*one.mean || together.hit < one.hit-0.01 {
		t.Errorf("four gateways: hit %.3f, mean TTFT %.3f s; one: %.3f, %.3f s", together.hit, together.mean, one.hit, one.mean)
	}
	if alone.mean < 1.5*one.mean {
		t.Errorf("four gateways that don't talk are as good, so this tests nothing: %.3f s", alone.mean)
	}
}

// TestCache compares the LRU with a list.
func TestCache(t *testing.T) {
	rng := newRand(1)
	l := newLRU(20)
	var model []int32 // oldest first
	for range 5000 {
		b := int32(rng.IntN(20))
		for i, m := range model {
			if m == b {
				model = append(model[:i:i], model[i+1:]...)
				break
			}
		}
		if rng.IntN(3) == 0 {
			l.remove(b)
		} else {
			l.touch(b)
			model = append(model, b)
		}
		if l.n != len(model) || len(model) > 0 && (l.oldest != model[0] || l.newest != model[len(model)-1]) {
			t.Fatalf("oldest %d, newest %d of %d, want %v", l.oldest, l.newest, l.n, model)
		}
	}
}

func TestCommand(t *testing.T) {
	dir := t.TempDir()
	trace := "{\"block_size\": 16}\n" + strings.Repeat(`{"t": 1, "in": 40, "out": 5, "h": [1, 2], "s": -1}`+"\n", 50) +
		`{"t": 9, "in": 50, "out": 5, "h": [1, 2, 3], "s": 4}` + "\n"
	if err := os.WriteFile(filepath.Join(dir, "tiny.jsonl"), []byte(trace), 0o600); err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	csvFile, svgFile := filepath.Join(dir, "r.csv"), filepath.Join(dir, "r.svg")
	err := run([]string{
		"-traces", dir, "-workloads", "tiny", "-cache", "1k", "-replicas", "2", "-draws", "2",
		"-policies", "least_conn,prefix_affinity+told+streams=0.5,pooled", "-csv", csvFile, "-svg", svgFile,
	}, &out, io.Discard)
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"tiny, 2 replicas, cache 1k, load 0.8", "prefix_affinity+told+streams=0.5", "against the pooled bound"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("the table lacks %q:\n%s", want, out.String())
		}
	}
	f, err := os.Open(csvFile)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if lines, err := csv.NewReader(f).ReadAll(); err != nil || len(lines) != 7 {
		t.Errorf("%d lines of CSV, want 7: %v", len(lines), err)
	}
	svg, err := os.ReadFile(svgFile)
	if err != nil {
		t.Fatal(err)
	}
	for d := xml.NewDecoder(bytes.NewReader(svg)); err == nil; {
		_, err = d.Token()
		if err != nil && !errors.Is(err, io.EOF) {
			t.Errorf("chart: %v", err)
		}
	}

	for _, args := range [][]string{
		{"-workloads", "nobody"},
		{"-workloads", "hot", "-cache", "30"},
		{"-workloads", "hot", "-load", "much"},
		{"-traces", dir, "-workloads", "tiny", "-policies", "magic"},
		{"-traces", dir, "-workloads", "tiny", "-policies", "prefix_affinity+magic"},
		{"-traces", dir, "-workloads", "tiny", "-policies", "prefix_affinity+alpha=x"},
	} {
		if err := run(args, io.Discard, io.Discard); err == nil {
			t.Errorf("%v: no error", args)
		}
	}
}

func TestGenerated(t *testing.T) {
	for name := range generated {
		a, b := generate(name, 1), generate(name, 1)
		if len(a.requests) < 1000 || a.tokens != b.tokens || a.blocks != b.blocks {
			t.Errorf("%s: %d requests of %d tokens, then %d", name, len(a.requests), a.tokens, b.tokens)
		}
		if reusable := a.ideal(); (reusable > 0.5) != (name != "unique") {
			t.Errorf("%s: %.2f reusable", name, reusable)
		}
	}
}
