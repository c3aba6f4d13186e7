package main

import (
	"fmt"
	"io"
	"os"
	"strings"
	"sync"
	"text/tabwriter"
	"time"

	"github.com/prefix-affinity/caddy/integration/engine"
	"github.com/prefix-affinity/caddy/integration/workload"
)

// screen writes what the demo has to say.
type screen struct {
	io.Writer
	terminal bool
}

func newScreen(f *os.File) screen {
	info, err := f.Stat()
	return screen{f, err == nil && info.Mode()&os.ModeCharDevice != 0}
}

func (s screen) say(format string, args ...any) {
	// Nobody is left to tell that the output is gone.
	_, _ = fmt.Fprintf(s, format, args...)
}

func (s screen) introduce(plan *workload.Plan, cfg engine.Config, pause time.Duration) {
	s.say("%d engines: prefill %s tokens/s, a token each %v, cache %s tokens (%.0f %% of %s unique ones)\n",
		replicas, thousands(int64(cfg.PrefillRate)), cfg.InterToken,
		thousands(int64(cfg.CapacityTokens)), 100*cacheShare, thousands(int64(plan.UniqueTokens())))
	s.say("%d requests, %s prompt tokens: %d conversations of %d turns, %v to think between them, and a burst of %d\n",
		plan.Requests(), thousands(int64(plan.PromptTokens())),
		traffic.Conversations, traffic.Turns, pause.Round(time.Millisecond), traffic.Siblings)
	s.say("load %.1f of what the engines could prefill if they shared one endless cache, whose hit ratio is %.1f %%\n\n",
		load, 100*plan.IdealHitRatio())
}

// progress shows how far a policy got.
type progress struct {
	screen
	label string
	total int
	begin time.Time

	mu    sync.Mutex
	count int
	shown int // tenths, where there is no terminal to draw on
}

const nameWidth = 16

func (s screen) progress(policy string, total int) *progress {
	p := &progress{screen: s, label: fmt.Sprintf("%-*s", nameWidth, policy), total: total, begin: time.Now()}
	if !p.terminal {
		p.say("%s", p.label)
	}
	return p
}

// step counts an answer.
func (p *progress) step() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.count++
	if p.terminal {
		p.say("\r%s %s %3d/%d %4.1fs", p.label, bar(float64(p.count)/float64(p.total), 40), p.count, p.total, time.Since(p.begin).Seconds())
		return
	}
	for ; p.shown < 10*p.count/p.total; p.shown++ {
		p.say(" %d%%", 10*(p.shown+1))
	}
}

func (p *progress) end() {
	if p.terminal {
		p.say("\n")
		return
	}
	p.say(" %4.1fs\n", time.Since(p.begin).Seconds())
}

func (s screen) report(plan *workload.Plan, outcomes []outcome) {
	ideal := plan.IdealHitRatio()
	w := tabwriter.NewWriter(s, 0, 0, 3, ' ', tabwriter.AlignRight)
	row := func(cells ...string) {
		_, _ = fmt.Fprintln(w, strings.Join(cells, "\t")+"\t") // see say
	}
	s.say("\n")
	row("policy", "hit ratio", "of ideal", "prefilled tokens", "TTFT mean", "p50", "p99", "took")
	for _, o := range outcomes {
		t := o.total()
		row(o.policy, percent(t.HitRatio()), percent(t.HitRatio()/ideal), thousands(t.PromptTokens-t.CachedTokens),
			millis(o.client.MeanTTFT()), millis(o.client.QuantileTTFT(0.5)), millis(o.client.QuantileTTFT(0.99)),
			fmt.Sprintf("%.1f s", o.client.Elapsed.Seconds()))
	}
	_ = w.Flush()

	s.say("\nper replica: requests, hit ratio, prefilled tokens\n")
	for _, o := range outcomes {
		cells := []string{o.policy}
		for _, r := range o.fleet {
			cells = append(cells, fmt.Sprintf("%d  %s  %s", r.Requests, percent(r.HitRatio()), thousands(r.PromptTokens-r.CachedTokens)))
		}
		row(cells...)
	}
	_ = w.Flush()

	s.say("\nhit ratio (ideal %s)\n", percent(ideal))
	for _, o := range outcomes {
		s.chart(o.policy, o.total().HitRatio(), 1, percent(o.total().HitRatio()))
	}
	s.say("\nmean TTFT\n")
	var worst time.Duration
	for _, o := range outcomes {
		worst = max(worst, o.client.MeanTTFT())
	}
	for _, o := range outcomes {
		s.chart(o.policy, o.client.MeanTTFT().Seconds(), worst.Seconds(), millis(o.client.MeanTTFT()))
	}
}

func (s screen) chart(name string, value, full float64, label string) {
	s.say("%*s %s %s\n", nameWidth, name, bar(value/full, 50), label)
}

// invite says what a kept demo can be asked.
func (s screen) invite(addr, admin string) {
	s.say("\nLeft up with prefix_affinity, and more conversations, until Ctrl-C. Ask the same twice:\n\n")
	s.say("  curl -si http://%s/v1/chat/completions -d '{\"messages\":[{\"role\":\"user\",\"content\":\"'\"$(seq -s ' ' 2000)\"'\"}]}' | grep -oiE 'x-inference-pod: .*|\"cached_tokens\":[0-9]+'\n\n", addr)
	s.say("See it in a browser, with the Caddy that the README builds:\n\n")
	s.say("  ./caddy prefix-affinity ui --address %s\n\n", strings.TrimPrefix(admin, "http://"))
	s.say("Caddy's admin endpoint: %s (its configuration: /config/, metrics: /metrics)\n", admin)
}

// bar draws a share of a width in eighths of a character.
func bar(share float64, width int) string {
	eighths := int(share*float64(width)*8 + 0.5)
	full := strings.Repeat("█", eighths/8)
	if rest := eighths % 8; rest > 0 {
		full += string([]rune("▏▎▍▌▋▊▉")[rest-1])
	}
	return full + strings.Repeat(" ", max(0, width-len([]rune(full))))
}

func percent(v float64) string { return fmt.Sprintf("%.1f %%", 100*v) }

func millis(d time.Duration) string { return fmt.Sprintf("%d ms", d.Milliseconds()) }

// thousands groups an integer's digits by commas.
func thousands(n int64) string {
	s := fmt.Sprint(n)
	for i := len(s) - 3; i > 0; i -= 3 {
		s = s[:i] + "," + s[i:]
	}
	return s
}
