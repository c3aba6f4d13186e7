package main

import (
	"context"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prefix-affinity/caddy/integration/engine"
	"github.com/prefix-affinity/caddy/integration/workload"
)

func TestDemo(t *testing.T) {
	full := traffic
	defer func() { traffic = full }()
	traffic.Turns = 1
	path := filepath.Join(t.TempDir(), "stdout")
	f, err := os.Create(path) // #nosec G304 -- a test's own directory
	if err != nil {
		t.Fatal(err)
	}
	read := func() string {
		said, err := os.ReadFile(path) // #nosec G304 -- a test's own directory
		if err != nil {
			t.Error(err)
		}
		return string(said)
	}
	ctx, cancel := context.WithCancel(t.Context())
	var user sync.WaitGroup
	defer user.Wait()
	defer cancel()
	user.Go(func() { // presses Ctrl-C when the demo is left up
		defer cancel()
		for ctx.Err() == nil && !strings.Contains(read(), "Caddy's admin endpoint") {
			time.Sleep(50 * time.Millisecond)
		}
	})
	if err := run(ctx, f, true, false); err != nil {
		t.Fatal(err)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	said, invitation, _ := strings.Cut(read(), "\nLeft up")
	if !regexp.MustCompile(`(?m)^  \./caddy prefix-affinity ui --address 127\.0\.0\.1:\d+$`).MatchString(invitation) {
		t.Errorf("the page's command is missing: %s", invitation)
	}
	for _, policy := range policies {
		// progress, the two tables, the two charts
		if n := strings.Count(said, policy); n != 5 {
			t.Errorf("%s is named %d times instead of 5", policy, n)
		}
	}
	if n := strings.Count(said, " 100% "); n != len(policies) {
		t.Errorf("%d policies were played to the end", n)
	}
	if t.Failed() {
		t.Logf("%s", said)
	}
}

func TestVerdict(t *testing.T) {
	plan, err := workload.New(traffic)
	if err != nil {
		t.Fatal(err)
	}
	result := func(policy string, ofIdeal float64, ttft time.Duration) outcome {
		cached := int64(1e6 * plan.IdealHitRatio() * ofIdeal)
		return outcome{
			policy: policy,
			client: workload.Result{TTFT: []time.Duration{ttft}},
			fleet:  []engine.Stats{{PromptTokens: 4e5}, {PromptTokens: 6e5, CachedTokens: cached}},
		}
	}
	for _, c := range []struct {
		name    string
		ofIdeal float64
		ttft    time.Duration
		ok      bool
	}{
		{"good/both", 0.96, 49 * time.Millisecond, true},
		{"bad/hit ratio", 0.94, 49 * time.Millisecond, false},
		{"bad/TTFT", 0.96, 51 * time.Millisecond, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			outcomes := []outcome{result("least_conn", 0.5, 100*time.Millisecond), result("prefix_affinity", c.ofIdeal, c.ttft)}
			if err := verdict(plan, outcomes); (err == nil) != c.ok {
				t.Errorf("verdict %v", err)
			}
		})
	}
}

func TestFigures(t *testing.T) {
	for n, want := range map[int64]string{0: "0", 999: "999", 1000: "1,000", 1234567: "1,234,567"} {
		if got := thousands(n); got != want {
			t.Errorf("%d is %q", n, got)
		}
	}
	for share, want := range map[float64]string{0: "    ", 0.5: "██  ", 0.53125: "██▏ ", 1: "████"} {
		if got := bar(share, 4); got != want {
			t.Errorf("%g is drawn %q instead of %q", share, got, want)
		}
	}
}
