package integration

import (
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prefix-affinity/caddy/integration/engine"
	"github.com/prefix-affinity/caddy/integration/harness"
)

// quick are engines whose speed is no matter.
var quick = engine.Config{PrefillRate: 1e6, InterToken: time.Millisecond, OutputTokens: 4}

// A conversation stays where it began, and every turn matches all of the last
// one, whatever other conversations do in between.
func TestConversationsStay(t *testing.T) {
	for _, stream := range []bool{false, true} {
		t.Run(fmt.Sprintf("stream=%t", stream), func(t *testing.T) {
			fleet := harness.TestFleet(t, 4, quick)
			s := newSite(t, fleet.Upstreams(), policy())
			conversations := newConversations(12)
			before := make([]decision, len(conversations))
			for turn := range 6 {
				for i, c := range conversations {
					at, d := c.at, c.turn(t, s, stream)
					last := before[i]
					before[i] = d
					switch {
					case d.matched > d.prompt:
						t.Errorf("%s, turn %d: matched %d of %d tokens", c.name, turn, d.matched, d.prompt)
					case turn == 0 && (d.reason != "cold" || d.matched != 0):
						t.Errorf("%s begins with %+v", c.name, d)
					case turn > 0 && (d.reason != "affinity" || d.upstream != at || d.matched < last.prompt || d.matched <= last.matched):
						t.Errorf("%s, turn %d: %+v after %+v", c.name, turn, d, last)
					}
				}
			}
			// Turn n of 6 is n parts long, n-1 of them cached: 15 of 21, less the
			// last part of a block each time.
			var prompt, cached int64
			for _, stats := range fleet.Stats() {
				prompt, cached = prompt+stats.PromptTokens, cached+stats.CachedTokens
			}
			if ratio := float64(cached) / float64(prompt); ratio < 0.95*15/21 {
				t.Errorf("the engines' own hit ratio is %.3f", ratio)
			}
		})
	}
}

// Simultaneous requests see each other, though Caddy counts none of them yet.
func TestColdBurstSpreads(t *testing.T) {
	for _, size := range []int{200, 4000, 40_000} {
		for _, stream := range []bool{false, true} {
			t.Run(fmt.Sprintf("%d/stream=%t", size, stream), func(t *testing.T) {
				g := newGates(t, 4)
				s := newSite(t, g.upstreams(), policy())
				wantEven(t, s.burst(t, g, equalPrompts("burst", 64, size, stream)), 3)
				s.quiet(t)
				wantEven(t, s.burst(t, g, equalPrompts("again", 64, size, stream)), 3)
			})
		}
	}
}

// siblings are 16 requests that share a prefix of 50 KB.
func siblings(family string, stream bool) []string {
	prefix := words(family, 50_000)
	bodies := make([]string, 16)
	for i := range bodies {
		bodies[i] = chat(stream, prefix, "yes", words(fmt.Sprintf("sibling %d", i), 120))
	}
	return bodies
}

// The prefix of a burst of siblings is computed once or twice, not everywhere.
func TestSiblingsStayTogether(t *testing.T) {
	for _, stream := range []bool{false, true} {
		t.Run(fmt.Sprintf("first/stream=%t", stream), func(t *testing.T) {
			g := newGates(t, 4)
			s := newSite(t, g.upstreams(), policy())
			got := s.burst(t, g, siblings("first", stream))
			if slices.Sort(got); got[0]+got[1] > 0 {
				t.Errorf("siblings per upstream: %v, want them on at most 2", got)
			}
		})
		// With the engines' speed known: a prefix takes them 0.25 s.
		t.Run(fmt.Sprintf("later/stream=%t", stream), func(t *testing.T) {
			fleet := harness.TestFleet(t, 4, engine.Config{PrefillRate: 50_000, InterToken: time.Millisecond, OutputTokens: 4})
			s := newSite(t, fleet.Upstreams(), policy())
			for family := range 4 {
				before := fleet.Stats()
				var wg sync.WaitGroup
				for _, body := range siblings(fmt.Sprintf("family %d", family), stream) {
					wg.Go(func() { s.ask(t, body) })
				}
				wg.Wait()
				used := 0
				for i, stats := range fleet.Stats() {
					if stats.Requests > before[i].Requests {
						used++
					}
				}
				if used > 2 {
					t.Errorf("siblings of family %d went to %d upstreams, want at most 2", family, used)
				}
			}
		})
	}
}

// Load is work, not requests: a prompt of 50,000 tokens outweighs ten of 1,000.
func TestLoadIsCountedInWork(t *testing.T) {
	for _, stream := range []bool{false, true} {
		t.Run(fmt.Sprintf("stream=%t", stream), func(t *testing.T) {
			g := newGates(t, 2)
			s := newSite(t, g.upstreams(), policy())
			var wg sync.WaitGroup
			defer wg.Wait()
			long := chat(stream, words("long", 200_000))
			wg.Go(func() { s.ask(t, long) })
			g.await(t, 1)
			for i, body := range equalPrompts("short", 10, 4000, stream) {
				wg.Go(func() { s.ask(t, body) })
				g.await(t, i+2)
			}
			if got := g.release(); got[0] != 1 && got[1] != 1 {
				t.Errorf("requests per upstream: %v, one of which is as much work as the others together", got)
			}
		})
	}
}

// What nobody holds goes around evenly, also when no two requests overlap.
func TestUnrelatedRequestsSpread(t *testing.T) {
	for _, stream := range []bool{false, true} {
		t.Run(fmt.Sprintf("stream=%t", stream), func(t *testing.T) {
			fleet := harness.TestFleet(t, 4, quick)
			s := newSite(t, fleet.Upstreams(), policy())
			for i := range 200 {
				// Lengths from 400 to 7,600 bytes, in no order.
				if d := s.ask(t, chat(stream, words(fmt.Sprintf("question %d", i), 400+i*3677%7200))); d.reason != "cold" {
					t.Errorf("question %d: %+v", i, d)
				}
			}
			for i, stats := range fleet.Stats() {
				if stats.Requests < 30 || stats.Requests > 70 {
					t.Errorf("%d of 200 requests went to upstream %d, want 15 to 35 %%", stats.Requests, i)
				}
			}
		})
	}
}

// Requests without a prompt go by the fewest requests in flight, those with a
// prompt included.
func TestRequestsWithoutPrompt(t *testing.T) {
	g := newGates(t, 4)
	s := newSite(t, g.upstreams(), policy())
	send := func(i int) {
		if i%2 == 0 {
			res, err := http.Get(s.URL + "/v1/models")
			if err != nil {
				t.Error(err)
				return
			}
			res.Body.Close()
			if d := decisionOf(t, res); d.reason != "no_key" || d.matched != 0 {
				t.Errorf("GET: %+v", d)
			}
			return
		}
		res, _ := s.post(t, embPath, fmt.Sprintf(`{"model":"m","input":"text %d"}`, i))
		if d := decisionOf(t, res); d.reason != "no_key" {
			t.Errorf("embeddings: %+v", d)
		}
	}
	var wg sync.WaitGroup
	defer wg.Wait()

	for i := range 40 {
		wg.Go(func() { send(i) })
	}
	wantEven(t, g.take(t, 40), 0)
	wg.Wait()

	// One after the other: always all idle, yet not always the same one.
	sequential := make([]int, 4)
	for i := range 40 {
		wg.Go(func() { send(i) })
		for j, n := range g.take(t, 1) {
			sequential[j] += n
		}
		wg.Wait()
		s.quiet(t)
	}
	wantEven(t, sequential, 5)

	// Twelve siblings keep one upstream busy; 12 requests without a prompt go to
	// the other three.
	prefix := words("busy", 50_000)
	for i := range 12 {
		wg.Go(func() { s.ask(t, chat(true, prefix, "yes", fmt.Sprint(i))) })
		g.await(t, i+1)
	}
	busy := g.counts()
	for i := range 12 {
		wg.Go(func() { send(i) })
		g.await(t, 12+i+1)
	}
	all := g.release()
	most := 0
	for i := range all {
		most = max(most, all[i])
	}
	for i, n := range busy {
		if n > 4 && all[i] != n {
			t.Errorf("requests without a prompt went where most were in flight: %v, before %v", all, busy)
		}
	}
	if most > 12 {
		t.Errorf("requests per upstream: %v", all)
	}
}

// What was decided can be put into response headers and the access log.
func TestPlaceholders(t *testing.T) {
	fleet := harness.TestFleet(t, 2, quick)
	s := newSiteOf(t, `log
	log_append reason {rp.prefix_affinity.reason}
	log_append matched {rp.prefix_affinity.matched_tokens}
	`+proxyTo(fleet.Upstreams(), policy()+`header_down X-Decision "{rp.prefix_affinity.reason} {rp.prefix_affinity.upstream} {rp.prefix_affinity.matched_tokens} {rp.prefix_affinity.prompt_tokens} {rp.prefix_affinity.holder} {rp.prefix_affinity.attempts}"`))
	body := chat(false, words("placeholder", 3000))
	for i, reason := range []string{"cold", "affinity"} {
		res, _ := s.post(t, chatPath, body)
		d := decisionOf(t, res)
		holder := ""
		if i > 0 {
			holder = d.upstream
		}
		want := fmt.Sprintf("%s %s %d %d %s 1", reason, d.upstream, d.matched, d.prompt, holder)
		if got := res.Header.Get("X-Decision"); got != want {
			t.Errorf("header_down: %q, want %q", got, want)
		}
		var line struct {
			Reason  string `json:"reason"`
			Matched int    `json:"matched"`
		}
		eventually(t, "the access log", func() bool {
			log, err := s.Log()
			if err != nil {
				t.Fatal(err)
			}
			var access []string
			for l := range strings.Lines(log) {
				if strings.Contains(l, `"http.log.access`) && strings.HasSuffix(l, "\n") {
					access = append(access, l)
				}
			}
			if len(access) <= i {
				return false
			}
			if err := json.Unmarshal([]byte(access[i]), &line); err != nil {
				t.Fatal(err)
			}
			return true
		})
		if line.Reason != reason || line.Matched != d.matched {
			t.Errorf("access log: %+v, want %s and %d", line, reason, d.matched)
		}
	}
	// A request without a prompt has its reason too.
	res, _ := s.post(t, embPath, `{"input":"x"}`)
	if got := res.Header.Get("X-Decision"); !strings.HasPrefix(got, "no_key "+fleet[0].Addr()+" ") && !strings.HasPrefix(got, "no_key "+fleet[1].Addr()+" ") {
		t.Errorf("header_down of a request without a prompt: %q", got)
	}
}
