package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/prefix-affinity/caddy/integration/engine"
	"github.com/prefix-affinity/caddy/integration/harness"
)

// trouble strikes one engine after the other, and reloads Caddy in between.
type trouble struct {
	caddy   *harness.Process
	fleet   harness.Fleet
	configs []string
	rand    *rand.Rand

	reloaded func(config int32) // is called after a reload

	faults, restarts, reloads int
	err                       error // why it ended early
}

func newTrouble(caddy *harness.Process, fleet harness.Fleet, configs []string, seed uint64) *trouble {
	return &trouble{caddy: caddy, fleet: fleet, configs: configs, rand: rand.New(rand.NewPCG(seed, 1))} // #nosec G404 -- to be repeatable
}

var faults = []engine.Faults{
	{Slow: 10},
	{Hang: true},
	{FailStatus: 429, FailShare: 0.5},
	{FailStatus: 500, FailShare: 0.2},
	{FailStatus: 503},
	{DieMidstream: true, FailShare: 0.3},
	{Refuse: true},
	{Reset: true},
	{Blackhole: true},
}

// run makes trouble until ctx ends, and leaves everything sound.
func (tr *trouble) run(ctx context.Context) {
	for next := 1; tr.err == nil && tr.pause(ctx, time.Second); {
		switch tr.rand.IntN(4) {
		case 0:
			tr.reloads++
			tr.err = tr.reload(next % len(tr.configs))
			next++
		case 1:
			tr.restarts++
			tr.fleet[tr.rand.IntN(len(tr.fleet))].Restart()
		default:
			tr.faults++
			e := tr.fleet[tr.rand.IntN(len(tr.fleet))]
			if tr.err = e.SetFaults(faults[tr.rand.IntN(len(faults))]); tr.err == nil {
				tr.pause(ctx, time.Second)
				tr.err = e.SetFaults(engine.Faults{})
			}
		}
	}
	if tr.err == nil {
		tr.err = tr.reload(0)
	}
}

func (tr *trouble) reload(config int) error {
	defer tr.reloaded(int32(config)) // #nosec G115 -- there are few
	return tr.caddy.Reload(tr.configs[config])
}

// pause waits for half to one and a half of mean, and tells whether to go on.
func (tr *trouble) pause(ctx context.Context, mean time.Duration) bool {
	select {
	case <-time.After(mean/2 + time.Duration(tr.rand.Int64N(int64(mean)))):
		return true
	case <-ctx.Done():
		return false
	}
}

func (tr *trouble) String() string {
	return fmt.Sprintf("%d faults, %d restarts of engines, %d reloads of Caddy", tr.faults, tr.restarts, tr.reloads)
}
