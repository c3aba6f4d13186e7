package integration

import (
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/caddyserver/caddy/v2"

	"github.com/prefix-affinity/caddy/integration/harness"
	"github.com/prefix-affinity/caddy/selector"
)

// An option's effect is something that a client, an upstream or an operator
// sees, and that differs with the option.
type effect struct {
	see           func(t *testing.T, options ...string) string
	options       []string
	without, with string // what is seen
}

// effects has every option of selector.Config by its name.
var effects = map[string]effect{
	"fallback": {func(t *testing.T, options ...string) string {
		s, ups := twoUpstreams(t, options...)
		first := 0
		for i := range 10 {
			if s.ask(t, chat(false, words(fmt.Sprintf("cold %d", i), 2000))).upstream == ups[0] {
				first++
			}
		}
		return fmt.Sprintf("%d of 10 on the first", first)
	}, []string{"fallback first"}, "5 of 10 on the first", "10 of 10 on the first"},

	"block_size": {func(t *testing.T, options ...string) string {
		s, _ := twoUpstreams(t, options...)
		common := words("common", 1000)
		s.ask(t, chat(false, common+words("one", 3000)))
		return s.ask(t, chat(false, common+words("another", 3000))).reason
	}, []string{"block_size 4096"}, "affinity", "cold"},

	"max_body": {func(t *testing.T, options ...string) string {
		s, _ := twoUpstreams(t, options...)
		common := words("common", 6000)
		s.ask(t, chat(false, common+words("one", 6000)))
		if d := s.ask(t, chat(false, common+words("another", 6000))); d.matched > d.prompt*9/10 {
			return "the same"
		}
		return "different"
	}, []string{"max_body 4KiB"}, "different", "the same"},

	"min_match": {func(t *testing.T, options ...string) string {
		s, _ := twoUpstreams(t, options...)
		common := words("common", 2000)
		s.ask(t, chat(false, common+words("one", 3000)))
		return s.ask(t, chat(false, common+words("another", 3000))).reason
	}, []string{"min_match 1000"}, "affinity", "cold"},

	// Six requests at once share 20,000 tokens and bring 40,000 each: the second
	// costs its holder 40,000 + alpha*40,000 and the other one alpha*60,000.
	"affinity_weight": {func(t *testing.T, options ...string) string {
		g := newGates(t, 2)
		s := newSite(t, g.upstreams(), policy(options...))
		var wg sync.WaitGroup
		defer wg.Wait()
		prefix := words("prefix", 80_000)
		wg.Go(func() { s.ask(t, chat(false, prefix)) })
		g.take(t, 1)
		wg.Wait()
		s.quiet(t)
		for i := range 6 {
			wg.Go(func() { s.ask(t, chat(false, prefix, "yes", words(fmt.Sprint(i), 160_000))) })
			g.await(t, i+1)
		}
		if got := g.release(); got[0] == 6 || got[1] == 6 {
			return "together"
		}
		return "apart"
	}, []string{"affinity_weight 100"}, "apart", "together"},

	"replica_cache": {func(t *testing.T, options ...string) string {
		up := newScripted(t, yes)
		s := newSite(t, up.addr(), policy(options...))
		for _, name := range []string{"first", "second", "third"} { // 1,500 tokens each
			s.ask(t, chat(false, words(name, 6000)))
		}
		return s.ask(t, chat(false, words("first", 6000))).reason
	}, []string{"replica_cache 2000"}, "affinity", "cold"},

	"poll": {func(t *testing.T, options ...string) string {
		fleet := harness.TestFleet(t, 1, quick)
		s := newSite(t, fleet.Upstreams(), policy(options...))
		body := chat(false, words("polled", 4000))
		s.ask(t, body)
		polls := len(options) > 0
		if polls {
			eventually(t, "the engine to be known", func() bool {
				return s.upstreams(t, fleet[0].Addr())[0].Engine != nil
			})
		}
		fleet[0].Restart()
		if polls {
			eventually(t, "the restart to be seen", func() bool {
				return s.upstreams(t, fleet[0].Addr())[0].Generation > 0
			})
		}
		return s.ask(t, body).reason // after a restart nobody else knows of
	}, []string{"poll 100ms"}, "affinity", "cold"},

	"poll_path": {func(t *testing.T, options ...string) string {
		var polled atomic.Pointer[string]
		up := newScripted(t, func(w http.ResponseWriter, r *http.Request) {
			if r.Method == http.MethodGet {
				polled.Store(&r.URL.Path)
			}
			yes(w, r)
		})
		s := newSite(t, up.addr(), policy(append(options, "poll 100ms")[:1]...))
		s.ask(t, chat(false, "hello"))
		eventually(t, "a poll", func() bool { return polled.Load() != nil })
		return *polled.Load()
	}, []string{"poll 100ms /engine/metrics"}, "/metrics", "/engine/metrics"},

	"orca": {func(t *testing.T, options ...string) string {
		var asked string
		up := newScripted(t, func(w http.ResponseWriter, r *http.Request) {
			asked = r.Header.Get("endpoint-load-metrics-format")
			yes(w, r)
		})
		s := newSite(t, up.addr(), policy(options...))
		s.ask(t, chat(false, "hello"))
		return asked
	}, []string{"orca json"}, "", "json"},

	"cached_tokens_header": {func(t *testing.T, options ...string) string {
		up := newScripted(t, func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("X-Cached", "500")
			yes(w, r)
		})
		s := newSite(t, up.addr(), policy(options...))
		s.ask(t, chat(false, words("cached", 4000)))
		s.quiet(t)
		return fmt.Sprint(s.upstreams(t, up.addr())[0].CachedTokens)
	}, []string{"cached_tokens_header X-Cached"}, "0", "500"},

	"queue_depth_header": {func(t *testing.T, options ...string) string {
		up := newScripted(t, func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("X-Queue", "7")
			yes(w, r)
		})
		s := newSite(t, up.addr(), policy(options...))
		s.ask(t, chat(false, words("queued", 4000)))
		s.quiet(t)
		return fmt.Sprint(s.upstreams(t, up.addr())[0].QueueDepth)
	}, []string{"queue_depth_header X-Queue"}, "0", "7"},

	"session_header": {func(t *testing.T, options ...string) string {
		s, ups := twoUpstreams(t, options...)
		got := make([]int, 2)
		for i := range 10 {
			req, err := http.NewRequest(http.MethodPost, s.URL+chatPath, strings.NewReader(chat(false, words(fmt.Sprintf("unrelated %d", i), 2000))))
			if err != nil {
				t.Fatal(err)
			}
			req.Header.Set("X-Chat", "a")
			res, err := http.DefaultClient.Do(req)
			if err != nil {
				t.Fatal(err)
			}
			res.Body.Close()
			got[slices.Index(ups, decisionOf(t, res).upstream)]++
		}
		return fmt.Sprint(max(got[0], got[1]), " together")
	}, []string{"session_header X-Chat"}, "5 together", "10 together"},

	"scope": {func(t *testing.T, options ...string) string {
		s, _ := twoUpstreams(t, options...)
		as := func(key string) string {
			req, err := http.NewRequest(http.MethodPost, s.URL+chatPath, strings.NewReader(chat(false, words("shared", 4000))))
			if err != nil {
				t.Fatal(err)
			}
			req.Header.Set("Authorization", "Bearer "+key)
			res, err := http.DefaultClient.Do(req)
			if err != nil {
				t.Fatal(err)
			}
			res.Body.Close()
			return decisionOf(t, res).reason
		}
		return as("a") + " " + as("a") + " " + as("b")
	}, []string{"scope {http.request.header.Authorization}"}, "cold affinity affinity", "cold affinity cold"},

	"ignore": {func(t *testing.T, options ...string) string {
		s, _ := twoUpstreams(t, options...)
		s.ask(t, chat(false, "It is 12:30 now. "+words("rest", 4000)))
		return s.ask(t, chat(false, "It is 12:31 now. "+words("rest", 4000))).reason
	}, []string{`ignore "[0-9]+:[0-9]+"`}, "cold", "affinity"},

	"seed": {func(t *testing.T, options ...string) string {
		a, b := newScripted(t, yes), newScripted(t, yes)
		place := func(order func(int) int) (at [24]string) {
			s := newSite(t, a.addr()+" "+b.addr(), policy(options...))
			defer stop(t, s)
			for i := range at {
				i = order(i)
				at[i] = s.ask(t, chat(false, words(fmt.Sprintf("cold %2d", i), 2000))).upstream
			}
			return at
		}
		if place(func(i int) int { return i }) == place(func(i int) int { return 23 - i }) {
			return "by the prompt"
		}
		return "by the load"
	}, []string{"seed secret"}, "by the load", "by the prompt"},

	// 40 prompts of 16 KB are 2,560 blocks.
	"index_size": {func(t *testing.T, options ...string) string {
		up := newScripted(t, yes)
		s := newSite(t, up.addr(), policy(options...))
		for i := range 40 {
			s.ask(t, chat(false, words(fmt.Sprintf("prompt %d", i), 16_000)))
		}
		return s.ask(t, chat(false, words("prompt 0", 16_000))).reason
	}, []string{"index_size 1024"}, "affinity", "cold"},

	"drain": {func(t *testing.T, options ...string) string {
		a, b := newScripted(t, yes), newScripted(t, yes)
		for i := range options {
			options[i] = strings.ReplaceAll(options[i], "$", a.addr())
		}
		s := newSite(t, a.addr()+" "+b.addr(), policy(options...))
		n := 0
		for i := range 10 {
			if s.ask(t, chat(false, words(fmt.Sprintf("cold %d", i), 2000))).upstream == a.addr() {
				n++
			}
		}
		return fmt.Sprintf("%d of 10", n)
	}, []string{"drain $"}, "5 of 10", "0 of 10"},

	"drain_timeout": {func(t *testing.T, options ...string) string {
		a, b := newScripted(t, yes), newScripted(t, yes)
		upstreams, body := a.addr()+" "+b.addr(), chat(false, words("drained", 4000))
		s := newSite(t, upstreams, policy())
		holder := s.ask(t, body).upstream
		s.reload(t, upstreams, policy(append(options, "drain "+holder)...))
		if s.ask(t, body).upstream == holder {
			return "stays"
		}
		return "moves"
	}, []string{"drain_timeout 1ns"}, "stays", "moves"},

	"shadow": {func(t *testing.T, options ...string) string {
		s, ups := twoUpstreams(t, append(options, "fallback round_robin")...)
		first := 0
		for range 10 {
			if s.ask(t, chat(false, words("shadow", 4000))).upstream == ups[0] {
				first++
			}
		}
		if first == 5 {
			return "goes around"
		}
		return "stays"
	}, []string{"shadow"}, "stays", "goes around"},

	"snapshot": {func(t *testing.T, options ...string) string {
		s, _ := twoUpstreams(t, options...)
		s.ask(t, chat(false, words("kept", 2000)))
		s.reloadTo(t, "respond gone") // the last policy leaves
		if _, err := os.Stat(filepath.Join(caddy.AppDataDir(), "prefix_affinity", "snapshot")); err != nil {
			return "nothing written"
		}
		return "written"
	}, []string{"snapshot off"}, "written", "nothing written"},

	"sync": {func(t *testing.T, options ...string) string {
		s, _ := twoUpstreams(t, options...)
		metrics, err := s.Metrics()
		if err != nil {
			t.Fatal(err)
		}
		if metrics["caddy_prefix_affinity_sync_connected"] == nil {
			return "alone"
		}
		return "sharing"
	}, []string{"seed together", "sync redis 127.0.0.1:1"}, "alone", "sharing"}, // package gateways has a real Redis

	"explain": {func(t *testing.T, options ...string) string {
		up := newScripted(t, yes)
		s := newSite(t, up.addr(), "lb_policy prefix_affinity {\n\t\t\t"+strings.Join(append(options, "min_match 64"), "\n\t\t\t")+"\n\t\t}")
		res, _ := s.post(t, chatPath, chat(false, "hello"))
		reason, _, _ := strings.Cut(res.Header.Get("X-Prefix-Affinity"), ";")
		return reason
	}, []string{"explain"}, "", "cold"},
}

func twoUpstreams(t *testing.T, options ...string) (*site, []string) {
	t.Helper()
	a, b := newScripted(t, yes), newScripted(t, yes)
	return newSite(t, a.addr()+" "+b.addr(), policy(options...)), []string{a.addr(), b.addr()}
}

func TestEveryOptionHasItsEffect(t *testing.T) {
	config := reflect.TypeFor[selector.Config]()
	for field := range config.Fields() {
		name, _, _ := strings.Cut(field.Tag.Get("json"), ",")
		e, ok := effects[name]
		if !ok {
			t.Errorf("option %s has no test", name)
			continue
		}
		t.Run(name, func(t *testing.T) {
			t.Run("without", func(t *testing.T) {
				if got := e.see(t); got != e.without {
					t.Errorf("saw %q, want %q", got, e.without)
				}
			})
			t.Run("with", func(t *testing.T) {
				if got := e.see(t, slices.Clone(e.options)...); got != e.with {
					t.Errorf("saw %q, want %q", got, e.with)
				}
			})
		})
	}
	if config.NumField() != len(effects) {
		t.Errorf("%d options, %d tests of options", config.NumField(), len(effects))
	}
}
