package workload

import (
	"context"
	"errors"
	"reflect"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prefix-affinity/caddy/integration/engine"
)

var small = Shape{
	Tenants: 2, SystemTokens: 500, Conversations: 6, Turns: 3, TurnTokens: 50, AnswerTokens: 10,
	Siblings: 8, SharedTokens: 700, Clients: 3, Seed: 1,
}

func plan(t *testing.T, shape Shape) *Plan {
	t.Helper()
	p, err := New(shape)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func start(t *testing.T, cfg engine.Config) *engine.Engine {
	t.Helper()
	e, err := engine.Start("127.0.0.1:0", cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := e.Close(); err != nil {
			t.Error(err)
		}
	})
	return e
}

func TestPlansAreRepeatable(t *testing.T) {
	if !reflect.DeepEqual(plan(t, small), plan(t, small)) {
		t.Error("two plans of one shape differ")
	}
	other := small
	other.Seed++
	if reflect.DeepEqual(plan(t, small).Burst, plan(t, other).Burst) {
		t.Error("the seed changes nothing")
	}
}

// One engine whose cache never fills up finds exactly what the plan says an
// ideal cache would, and exactly the unique tokens fit into it.
func TestIdealIsWhatAnEngineReaches(t *testing.T) {
	p := plan(t, small)
	e := start(t, engine.Config{PrefillRate: 1e6, InterToken: 10 * time.Microsecond})
	var done atomic.Int64
	r, err := p.Play(t.Context(), e.URL(), time.Millisecond, func() { done.Add(1) })
	if err != nil {
		t.Fatal(err)
	}
	if n := p.Requests(); n != 6*3+8 || int(done.Load()) != n || len(r.TTFT) != n {
		t.Errorf("%d requests planned, %d done, %d measured", n, done.Load(), len(r.TTFT))
	}
	s := e.Stats()
	if s.PromptTokens != int64(p.PromptTokens()) || s.HitRatio() != p.IdealHitRatio() {
		t.Errorf("engine: %d tokens, hit ratio %g; plan: %d, %g", s.PromptTokens, s.HitRatio(), p.PromptTokens(), p.IdealHitRatio())
	}
	computed := int(s.PromptTokens - s.CachedTokens + s.OutputTokens)
	if u := p.UniqueTokens(); u > computed || u < computed-p.Requests()*2*engine.BlockTokens {
		t.Errorf("%d unique tokens, but the engine computed %d", u, computed)
	}
	if r.QuantileTTFT(0) > r.QuantileTTFT(0.5) || r.QuantileTTFT(0.5) > r.QuantileTTFT(1) || r.MeanTTFT() > r.Elapsed {
		t.Errorf("times %v", r)
	}
}

func TestMeanPause(t *testing.T) {
	p := plan(t, small)
	uncached := float64(p.PromptTokens()) * (1 - p.IdealHitRatio()) / float64(p.Requests())
	pause, err := p.MeanPause(0.5, 4, 100, 100*time.Millisecond)
	if err != nil {
		t.Fatal(err)
	}
	cycle := pause.Seconds() + uncached/100 + 10*0.1
	if load := 6 / cycle * uncached / (4 * 100); load < 0.499 || load > 0.501 {
		t.Errorf("pauses of %v give a load of %g instead of 0.5", pause, load)
	}
	if _, err := p.MeanPause(0.9, 100, 100, time.Second); err == nil {
		t.Error("6 conversations are enough for 100 replicas")
	}
}

func TestPlayFails(t *testing.T) {
	p := plan(t, small)
	e := start(t, engine.Config{PrefillRate: 1e6, InterToken: 10 * time.Microsecond})
	if err := e.SetFaults(engine.Faults{FailStatus: 503, FailShare: 0.5}); err != nil {
		t.Fatal(err)
	}
	if _, err := p.Play(t.Context(), e.URL(), time.Millisecond, func() {}); err == nil || !strings.Contains(err.Error(), "503") {
		t.Errorf("error %v", err)
	}
	if err := e.SetFaults(engine.Faults{DieMidstream: true}); err != nil {
		t.Fatal(err)
	}
	if _, err := p.Play(t.Context(), e.URL(), time.Millisecond, func() {}); err == nil {
		t.Error("half answers are good enough")
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := p.Play(ctx, e.URL(), time.Hour, func() {}); !errors.Is(err, context.Canceled) {
		t.Errorf("error %v", err)
	}
}
