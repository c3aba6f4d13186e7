package affinity

import (
	"math"
	"math/rand/v2"
	"testing"
	"time"
)

// answer is one answer: its tokens, and how long it took.
type answer struct{ uncached, output, seconds float64 }

func TestFit(t *testing.T) {
	// Prompts of some thousand tokens at 10,000 a second, answers of some hundred
	// tokens at 50 a second.
	draw := func(rng *rand.Rand) answer {
		a := answer{uncached: 200 + 8000*rng.ExpFloat64(), output: 1 + 300*rng.Float64()}
		a.seconds = 0.05 + a.uncached/10_000 + a.output/50
		return a
	}
	for name, c := range map[string]struct {
		answers int
		spoil   func(*answer, *rand.Rand)
		within  float64 // of 10,000; 0: the speed must stay unknown
	}{
		"known/exactly":                 {60, func(*answer, *rand.Rand) {}, 0.01},
		"known/with queueing":           {500, func(a *answer, rng *rand.Rand) { a.seconds += 2 * rng.ExpFloat64() }, 0.3},
		"known/with output of any pace": {500, func(a *answer, rng *rand.Rand) { a.seconds += a.output / 50 * (rng.Float64() - 0.5) }, 0.15},
		"known/with one that hung":      {60, func(a *answer, rng *rand.Rand) { a.seconds += map[bool]float64{true: 600}[rng.IntN(30) == 0] }, 0.3},
		"known/output always alike":     {100, func(a *answer, _ *rand.Rand) { a.seconds += (1 - a.output) / 50; a.output = 1 }, 0.01},
		"known/no output":               {100, func(a *answer, _ *rand.Rand) { a.seconds -= a.output / 50; a.output = 0 }, 0.01},
		"unknown/prompts alike":         {500, func(a *answer, _ *rand.Rand) { a.seconds += (4000 - a.uncached) / 10_000; a.uncached = 4000 }, 0},
		"unknown/few":                   {49, func(*answer, *rand.Rand) {}, 0},
		"unknown/all alike":             {500, func(a *answer, _ *rand.Rand) { *a = answer{4000, 100, 2.4} }, 0},
		"unknown/all by the output":     {500, func(a *answer, rng *rand.Rand) { a.seconds = a.output / 50 * (0.5 + rng.Float64()) }, 0},
		"unknown/anything":              {500, func(a *answer, rng *rand.Rand) { a.seconds = 0.02 + 10*rng.Float64() }, 0},
	} {
		t.Run(name, func(t *testing.T) {
			rng := rand.New(rand.NewPCG(1, 2))
			var f fit
			for range c.answers {
				a := draw(rng)
				c.spoil(&a, rng)
				f.take(a.uncached, a.output, a.seconds)
			}
			if c.within == 0 {
				if f.rate != 0 {
					t.Errorf("%v tokens/s", f.rate)
				}
				return
			}
			if !(math.Abs(f.rate/10_000-1) <= c.within) {
				t.Errorf("%v tokens/s, want 10,000 to within %v", f.rate, c.within)
			}
			kept := fit{}
			if kept.add(f.fitState); kept.rate != f.rate || !f.valid() {
				t.Errorf("from a snapshot %v tokens/s, not %v", kept.rate, f.rate)
			}
		})
	}
}

// TestSpeedUnseen: replicas whose answers come as a whole, one of them much slower.
func TestSpeedUnseen(t *testing.T) {
	x := newFixture(2)
	rng := rand.New(rand.NewPCG(3, 4))
	rates := []float64{20_000, 2500}
	serve := func(i int) {
		at := i % 2
		key := keyOf(series(i, 20+rng.IntN(200))...)
		key.Stream = false
		_, a := x.index.Route(x.now, key, x.cands[at:at+1], &x.rule, nil)
		prompt, output := key.Bytes/3, rng.IntN(100) // its tokenizer makes more of them
		seconds := float64(key.Bytes)/BytesPerToken/rates[at] + 0.02*float64(output)
		x.now = x.now.Add(time.Duration(seconds * float64(time.Second)))
		a.Confirm(x.now, false)
		a.Answered(x.now, prompt, 0, output)
		a.Finish(x.now, Served, 0)
	}
	for i := range 40 {
		serve(i)
	}
	if s := x.cands[0].Replica.Snapshot(x.now); s.SpeedMeasurements != 0 || s.TokensPerSecond != speedDefault {
		t.Errorf("after 20 answers %v tokens/s, from %v", s.TokensPerSecond, s.SpeedMeasurements)
	}
	for i := range 600 {
		serve(40 + i)
	}
	fast, slow := x.cands[0].Replica.Snapshot(x.now), x.cands[1].Replica.Snapshot(x.now)
	if ratio := fast.TokensPerSecond / slow.TokensPerSecond; ratio < 1.5 || ratio > 10 || fast.SpeedMeasurements < 100 {
		t.Errorf("%v and %v tokens/s, from %v answers", fast.TokensPerSecond, slow.TokensPerSecond, fast.SpeedMeasurements)
	}

	for i := range 50 { // streams are the better witness
		_, a := x.index.Route(x.now, keyOf(series(1000+i, 100)...), x.cands[i%2:i%2+1], &x.rule, nil)
		x.now = x.now.Add([]time.Duration{320, 2560}[i%2] * time.Millisecond)
		a.FirstOutput(x.now)
		a.Finish(x.now, Served, 0)
	}
	for i, want := range rates {
		if got := x.cands[i].Replica.Snapshot(x.now).TokensPerSecond; got < want*0.8 || got > want*1.25 {
			t.Errorf("replica %d: %v tokens/s, want %v", i, got, want)
		}
	}
}
