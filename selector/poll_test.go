package selector

import (
	"testing"

	"github.com/prefix-affinity/caddy/selector/signal"
)

func TestRestarted(t *testing.T) {
	said := func(start, queries float64) signal.EngineMetrics {
		return signal.EngineMetrics{StartTime: start, PrefixQueries: queries}
	}
	for _, test := range []struct {
		name        string
		before, now signal.EngineMetrics
		want        bool
	}{
		{"start/same", said(100, 5), said(100, 9), false},
		{"start/later", said(100, 5), said(200, 9), true},
		{"start/same-counts-less", said(100, 5), said(100, 3), false},
		{"start/not-said-again", said(100, 5), said(-1, 9), false},
		{"queries/more", said(-1, 5), said(-1, 9), false},
		{"queries/less", said(-1, 5), said(-1, 0), true},
		{"queries/not-said", said(-1, 5), said(-1, -1), false},
		{"nothing/said", said(-1, -1), said(-1, -1), false},
	} {
		if got := restarted(test.before, test.now); got != test.want {
			t.Errorf("%s: %t", test.name, got)
		}
	}
}
