package harness

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/prefix-affinity/caddy/integration/engine"
)

// Fleet is a set of simulated engines.
type Fleet []*engine.Engine

// Engines starts n equal engines on free loopback ports. Their answers name
// them in x-inference-pod: replica-1, replica-2 and so on, unless cfg has a name.
func Engines(n int, cfg engine.Config) (Fleet, error) {
	fleet := make(Fleet, 0, n)
	for i := range n {
		c := cfg
		if c.Name == "" {
			c.Name = fmt.Sprintf("replica-%d", i+1)
		}
		addr, err := FreeAddr() // an engine may leave it and come back
		if err != nil {
			return nil, errors.Join(err, fleet.Close())
		}
		e, err := engine.Start(addr, c)
		if err != nil {
			return nil, errors.Join(err, fleet.Close())
		}
		fleet = append(fleet, e)
	}
	return fleet, nil
}

// TestFleet starts engines as Engines does, and ends them when the test ends.
func TestFleet(t *testing.T, n int, cfg engine.Config) Fleet {
	t.Helper()
	fleet, err := Engines(n, cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := fleet.Close(); err != nil {
			t.Error(err)
		}
	})
	return fleet
}

// Upstreams lists the engines' addresses as the arguments of reverse_proxy.
func (f Fleet) Upstreams() string {
	addrs := make([]string, len(f))
	for i, e := range f {
		addrs[i] = e.Addr()
	}
	return strings.Join(addrs, " ")
}

// Stats returns each engine's figures, in the order of the fleet.
func (f Fleet) Stats() []engine.Stats {
	stats := make([]engine.Stats, len(f))
	for i, e := range f {
		stats[i] = e.Stats()
	}
	return stats
}

// Close ends all engines and waits for them.
func (f Fleet) Close() error {
	var err error
	for _, e := range f {
		err = errors.Join(err, e.Close())
	}
	return err
}
