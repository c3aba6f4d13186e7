package selector

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"testing"
	"time"

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

// TestPollRests: which failures, and how many in a row, have an upstream left alone,
// and for how long.
func TestPollRests(t *testing.T) {
	const none = statusError(http.StatusNotFound)
	timeout := fmt.Errorf("reading: %w", context.DeadlineExceeded)
	for _, test := range []struct {
		name   string
		had    string // the engine that it was
		errs   []error
		paused time.Duration
	}{
		{"none/never had", "", []error{none}, pollPause},
		{"none/another program's", "", []error{errUnknown, errUnknown, none}, pollPause},
		{"none/had", "vllm", []error{none, none, none, none, none, none}, 0},
		{"unknown/page", "", slices.Repeat([]error{errUnknown}, 9), 0},
		{"down/refused", "", slices.Repeat([]error{errors.New("connection refused")}, 9), 0},
		{"down/503", "", slices.Repeat([]error{statusError(503)}, 9), 0},
		{"silent/for a while", "vllm", slices.Repeat([]error{timeout}, pollTries-1), 0},
		{"silent/for long", "vllm", slices.Repeat([]error{timeout}, pollTries), pollRest},
	} {
		t.Run(test.name, func(t *testing.T) {
			p := newTestPolicy(t, Config{})
			upstream := test.name // its own: what engines say is known to all policies
			if test.had != "" {
				metrics.of(upstream).engine.Store(&signal.EngineMetrics{Engine: test.had})
			}
			o := newPoller(p)
			defer o.close()
			u := o.of(upstream)
			for _, err := range test.errs {
				o.failed(upstream, u, err)
			}
			left := time.Until(u.pause)
			if test.paused == 0 && !u.pause.IsZero() || test.paused > 0 && (left > test.paused || left < test.paused/2) {
				t.Errorf("left alone for %v, want %v", left, test.paused)
			}
		})
	}
}
