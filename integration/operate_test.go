package integration

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/prefix-affinity/caddy/integration/engine"
	"github.com/prefix-affinity/caddy/integration/harness"
)

func TestMain(m *testing.M) { harness.Main(m) }

// caddy runs a command of Caddy's against the site.
func (s *site) caddy(t *testing.T, args ...string) (string, error) {
	t.Helper()
	cmd := harness.Command(append(args, "--address", strings.TrimPrefix(s.Admin, "http://"))...)
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	err := cmd.Run()
	return out.String(), err
}

// admin sends a request to the admin API and decodes its answer.
func (s *site) admin(t *testing.T, method, path, body string, to any) int {
	t.Helper()
	req, err := http.NewRequest(method, s.Admin+"/prefix_affinity/"+path, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	if got := res.Header.Get("Content-Type"); got != "application/json" {
		t.Errorf("%s %s: content type %q", method, path, got)
	}
	if err := json.NewDecoder(res.Body).Decode(to); err != nil {
		t.Errorf("%s %s: %v", method, path, err)
	}
	return res.StatusCode
}

type upstream struct {
	Address                string         `json:"address"`
	CountedSince           time.Time      `json:"counted_since"`
	Requests               int            `json:"requests"`
	Reasons                map[string]int `json:"reasons"`
	PromptTokens           float64        `json:"prompt_tokens"`
	MatchedTokens          float64        `json:"matched_tokens"`
	CachedTokens           float64        `json:"cached_tokens"`
	ReportedPromptTokens   float64        `json:"reported_prompt_tokens"`
	PendingRequests        int            `json:"pending_requests"`
	IndexBlocks            int            `json:"index_blocks"`
	QueueDepth             float64        `json:"queue_depth"`
	PrefillTokensPerSecond float64        `json:"prefill_tokens_per_second"`
	TTFTHit                ttft           `json:"ttft_hit"`
	TTFTMiss               ttft           `json:"ttft_miss"`
	CacheCapacityTokens    int            `json:"cache_capacity_tokens"`
	Generation             int            `json:"generation"`
	Drain                  *struct {
		By    string `json:"by"`
		Since string `json:"since"`
	} `json:"drain"`
	Engine *struct {
		Name string `json:"name"`
	} `json:"engine"`
}

type ttft struct {
	Count      int     `json:"count"`
	SumSeconds float64 `json:"sum_seconds"`
}

// upstreams lists what is known of the given upstreams, in their order.
func (s *site) upstreams(t *testing.T, addrs ...string) []upstream {
	t.Helper()
	var all []upstream
	if status := s.admin(t, http.MethodGet, "upstreams", "", &all); status != http.StatusOK {
		t.Fatalf("status %d", status)
	}
	list := make([]upstream, len(addrs))
	for i, addr := range addrs {
		if at := slices.IndexFunc(all, func(u upstream) bool { return u.Address == addr }); at >= 0 {
			list[i] = all[at]
		}
	}
	return list
}

// conversation sends the turns of a conversation and returns which engine has it.
func (s *site) conversation(t *testing.T, fleet []*engine.Engine, name string, turns int) int {
	t.Helper()
	before := make([]int64, len(fleet))
	for i, e := range fleet {
		before[i] = e.Stats().Requests
	}
	var messages []string
	for turn := range turns {
		messages = append(messages, words(fmt.Sprintf("%s asks %d", name, turn), 3000))
		if res, _ := s.post(t, "/v1/chat/completions", chat(true, messages...)); res.StatusCode != http.StatusOK {
			t.Fatalf("status %d", res.StatusCode)
		}
		messages = append(messages, "aha")
	}
	at := -1
	for i, e := range fleet {
		if n := e.Stats().Requests - before[i]; n == int64(turns) {
			at = i
		} else if n != 0 {
			t.Errorf("conversation %s: engine %d got %d of %d turns", name, i, n, turns)
		}
	}
	return at
}

var fast = engine.Config{PrefillRate: 1e6, InterToken: 100 * time.Microsecond, OutputTokens: 2}

func TestAdminAPI(t *testing.T) {
	begun := time.Now()
	fleet := harness.TestFleet(t, 3, fast)
	s := newSite(t, fleet.Upstreams(), "lb_policy prefix_affinity")
	at := s.conversation(t, fleet, "anna", 4)
	if at < 0 {
		t.Fatal("the conversation did not stay")
	}
	holder := fleet[at].Addr()

	t.Run("upstreams", func(t *testing.T) {
		u := s.upstreams(t, holder)[0]
		if u.CountedSince.IsZero() || u.CountedSince.After(begun) {
			t.Errorf("counted since %v, which is after %v", u.CountedSince, begun)
		}
		if u.Requests != 4 || u.Reasons["cold"] != 1 || u.Reasons["affinity"] != 3 {
			t.Errorf("%d requests, reasons %v", u.Requests, u.Reasons)
		}
		stats := fleet[at].Stats()
		if u.CachedTokens != float64(stats.CachedTokens) || u.ReportedPromptTokens != float64(stats.PromptTokens) {
			t.Errorf("cached %v of %v, the engine says %d of %d", u.CachedTokens, u.ReportedPromptTokens, stats.CachedTokens, stats.PromptTokens)
		}
		if u.TTFTHit.Count != 3 || u.TTFTMiss.Count != 1 || u.TTFTHit.SumSeconds <= 0 || u.TTFTMiss.SumSeconds <= 0 {
			t.Errorf("TTFT after a match %+v, without %+v", u.TTFTHit, u.TTFTMiss)
		}
		if u.PendingRequests != 0 || u.IndexBlocks == 0 || u.MatchedTokens == 0 {
			t.Errorf("%+v", u)
		}
	})
	t.Run("lookup", func(t *testing.T) {
		body := chat(true, words("anna asks 0", 3000), "aha", words("and now", 100))
		for range 2 { // asking changes nothing
			var answers []struct {
				PromptTokens int    `json:"prompt_tokens"`
				Upstream     string `json:"upstream"`
				Reason       string `json:"reason"`
				Upstreams    []struct {
					Address       string `json:"address"`
					MatchedTokens int    `json:"matched_tokens"`
				} `json:"upstreams"`
				Parts []struct {
					Kind string `json:"kind"`
					Role string `json:"role"`
				} `json:"parts"`
			}
			if status := s.admin(t, http.MethodPost, "lookup", body, &answers); status != http.StatusOK || len(answers) != 1 {
				t.Fatalf("status %d, %d answers", status, len(answers))
			}
			a := answers[0]
			if a.Upstream != holder || a.Reason != "affinity" || a.PromptTokens < 700 || a.PromptTokens > 900 {
				t.Errorf("%+v, want %s", a, holder)
			}
			var roles []string
			for _, part := range a.Parts {
				if part.Kind == "text" {
					roles = append(roles, part.Role)
				}
			}
			if !slices.Equal(roles, []string{"user", "assistant", "user"}) {
				t.Errorf("parts %+v", a.Parts)
			}
			for _, u := range a.Upstreams {
				if (u.Address == holder) != (u.MatchedTokens > 600) {
					t.Errorf("%s matches %d tokens", u.Address, u.MatchedTokens)
				}
			}
		}
		var unkeyed []struct {
			Unkeyed string `json:"unkeyed"`
		}
		if s.admin(t, http.MethodPost, "lookup", "nonsense", &unkeyed); len(unkeyed) != 1 || unkeyed[0].Unkeyed == "" {
			t.Errorf("%+v", unkeyed)
		}
	})
	t.Run("errors", func(t *testing.T) {
		for _, test := range []struct {
			method, path string
			status       int
			want         string
		}{
			{"POST", "upstreams", http.StatusMethodNotAllowed, "use GET"},
			{"GET", "lookup", http.StatusMethodNotAllowed, "use POST"},
			{"GET", "drain?upstream=" + holder, http.StatusMethodNotAllowed, "use POST"},
			{"POST", "drain", http.StatusBadRequest, "invalid upstream ''"},
			{"POST", "drain?upstream=nobody:1", http.StatusNotFound, "unknown upstream 'nobody:1'"},
			{"POST", "drain?upstream=" + holder + "&froce=true", http.StatusBadRequest, "unknown parameter 'froce': the parameters are upstream, force"},
			{"POST", "drain?upstream=" + holder + "&force=maybe", http.StatusBadRequest, "force is 'maybe': true or false"},
			{"POST", "drain?upstream=" + holder + ";force=true", http.StatusBadRequest, "invalid query"},
			{"POST", "undrain?upstream=" + holder, http.StatusConflict, "is not drained"},
			{"POST", "undrain?upstream=" + holder + "&force=true", http.StatusBadRequest, "unknown parameter 'force': the parameters are upstream"},
			{"POST", "forget?upstream=nobody:1", http.StatusNotFound, "unknown upstream 'nobody:1'"},
			{"POST", "forget?upstraem=" + holder, http.StatusBadRequest, "unknown parameter 'upstraem': the parameters are upstream"},
			{"POST", "lookup?path=v1/messages", http.StatusBadRequest, "invalid path 'v1/messages': should begin with a slash"},
			{"POST", "lookup?scope=tenant", http.StatusBadRequest, "unknown parameter 'scope': the parameters are path"},
			{"GET", "upstreams?upstream=" + holder, http.StatusBadRequest, "unknown parameter 'upstream': there are none here"},
		} {
			var answer struct {
				Error string `json:"error"`
			}
			if status := s.admin(t, test.method, test.path, "", &answer); status != test.status || !strings.Contains(answer.Error, test.want) {
				t.Errorf("%s %s: status %d, %q", test.method, test.path, status, answer.Error)
			}
		}
	})
	t.Run("forget", func(t *testing.T) {
		var none struct{}
		if status := s.admin(t, http.MethodPost, "forget?upstream="+holder, "", &none); status != http.StatusOK {
			t.Fatalf("status %d", status)
		}
		if u := s.upstreams(t, holder)[0]; u.IndexBlocks != 0 {
			t.Errorf("%d blocks are not forgotten", u.IndexBlocks)
		}
	})
}

func TestDrain(t *testing.T) {
	fleet := harness.TestFleet(t, 3, fast)
	s := newSite(t, fleet.Upstreams(), "lb_policy prefix_affinity")
	at := s.conversation(t, fleet, "kept", 2)
	holder := fleet[at].Addr()
	var drained struct {
		By string `json:"by"`
	}
	if status := s.admin(t, http.MethodPost, "drain?upstream="+holder, "", &drained); status != http.StatusOK || drained.By != "api" {
		t.Fatalf("status %d, %+v", status, drained)
	}
	served := func(i int) int64 { return fleet[i].Stats().Requests }

	before := served(at)
	for i := range 30 {
		s.post(t, "/v1/chat/completions", chat(true, words(fmt.Sprintf("new %d", i), 2000)))
		s.post(t, "/v1/embeddings", `{"model":"m","input":"x"}`)
	}
	if n := served(at) - before; n != 0 {
		t.Errorf("the drained upstream got %d new prefixes", n)
	}
	kept := chat(true, words("kept asks 0", 3000), "aha", words("kept asks 1", 3000), "aha", words("kept asks 2", 3000))
	if s.post(t, "/v1/chat/completions", kept); served(at) != before+1 {
		t.Error("its own conversation was taken away")
	}
	s.reload(t, fleet.Upstreams(), "lb_policy prefix_affinity\n\t\theader_down X-Changed 1")
	if d := s.upstreams(t, holder)[0].Drain; d == nil || d.By != "api" {
		t.Error("the drain was lost at a reload")
	}

	// The last one needs force.
	others := slices.Delete([]int{0, 1, 2}, at, at+1)
	var answer struct {
		Error string `json:"error"`
	}
	s.admin(t, http.MethodPost, "drain?upstream="+fleet[others[0]].Addr(), "", &answer)
	last := "drain?upstream=" + fleet[others[1]].Addr()
	if status := s.admin(t, http.MethodPost, last, "", &answer); status != http.StatusConflict || !strings.Contains(answer.Error, "force") {
		t.Errorf("draining the last one: status %d, %q", status, answer.Error)
	}
	if status := s.admin(t, http.MethodPost, last+"&force=true", "", &answer); status != http.StatusOK {
		t.Errorf("draining the last one by force: status %d", status)
	}
	if res, _ := s.post(t, "/v1/chat/completions", chat(true, words("still", 2000))); res.StatusCode != http.StatusOK {
		t.Errorf("with all drained: status %d", res.StatusCode)
	}
	for _, e := range fleet {
		s.admin(t, http.MethodPost, "undrain?upstream="+e.Addr(), "", &answer)
	}
	if d := s.upstreams(t, holder)[0].Drain; d != nil {
		t.Error("undrain did nothing")
	}

	// A drain by configuration is none of the API's business, and its
	// conversations move when the time is over.
	s.reload(t, fleet.Upstreams(), "lb_policy prefix_affinity {\n\t\t\tdrain "+holder+"\n\t\t\tdrain_timeout 1ms\n\t\t}")
	if status := s.admin(t, http.MethodPost, "undrain?upstream="+holder, "", &answer); status != http.StatusConflict || !strings.Contains(answer.Error, "configuration") {
		t.Errorf("undrain of a configured drain: status %d, %q", status, answer.Error)
	}
	time.Sleep(5 * time.Millisecond)
	since := s.upstreams(t, holder)[0].Drain
	s.reload(t, fleet.Upstreams(), "lb_policy prefix_affinity {\n\t\t\tdrain "+holder+"\n\t\t\tdrain_timeout 2ms\n\t\t}")
	if again := s.upstreams(t, holder)[0].Drain; since == nil || again == nil || *again != *since {
		t.Errorf("a reload changed the drain from %+v to %+v", since, again)
	}
	before = served(at)
	if s.post(t, "/v1/chat/completions", kept); served(at) != before {
		t.Error("the conversation stayed beyond drain_timeout")
	}
}

// What one site is configured to drain is told to be drained there, and can be
// drained everywhere all the same.
func TestDrainInOneSite(t *testing.T) {
	fleet := harness.TestFleet(t, 2, fast)
	first := fleet[0].Addr()
	s := newSiteOf(t, "handle /v1/embeddings {\n\t"+proxyTo(fleet.Upstreams(), policy("drain "+first))+"\n\t}\n\thandle {\n\t"+proxyTo(fleet.Upstreams(), policy())+"\n\t}")
	type drain struct {
		By    string   `json:"by"`
		Sites []string `json:"sites"`
	}
	shown := func() (d drain) {
		t.Helper()
		var all []struct {
			Address string `json:"address"`
			Drain   drain  `json:"drain"`
		}
		if status := s.admin(t, http.MethodGet, "upstreams", "", &all); status != http.StatusOK {
			t.Errorf("status %d", status)
		}
		for _, u := range all {
			if u.Address == first {
				d = u.Drain
			}
		}
		return d
	}
	fresh := func() (served bool) {
		before := fleet[0].Stats().Requests
		for i := range 20 {
			s.ask(t, chat(false, words(fmt.Sprintf("%+v %d", shown(), i), 2000)))
		}
		return fleet[0].Stats().Requests > before
	}
	if !fresh() {
		t.Error("the other site drains it, too")
	}
	if d := shown(); d.By != "config" || len(d.Sites) != 1 || !strings.Contains(d.Sites[0], "/v1/embeddings") {
		t.Errorf("it is drained by %+v", d)
	}
	out, err := s.caddy(t, "prefix-affinity", "status")
	if err != nil || !regexp.MustCompile(`by config since \S+ in \S+/v1/embeddings on `).MatchString(out) {
		t.Errorf("%v, status says\n%s", err, out)
	}
	var answer drain
	if status := s.admin(t, http.MethodPost, "drain?upstream="+first, "", &answer); status != http.StatusOK || answer.By != "api" || fresh() {
		t.Errorf("it can't be drained everywhere: status %d, %+v", status, answer)
	}
	var refused struct {
		Error string `json:"error"`
	}
	if status := s.admin(t, http.MethodPost, "drain?upstream="+fleet[1].Addr(), "", &refused); status != http.StatusConflict || !strings.Contains(refused.Error, "is the last one that is not drained in 127.0.0.1") {
		t.Errorf("draining the last one: status %d, %q", status, refused.Error)
	}
	if status := s.admin(t, http.MethodPost, "undrain?upstream="+first, "", &struct{}{}); status != http.StatusOK || shown().By != "config" {
		t.Errorf("status %d, it is drained by %+v", status, shown())
	}
}

// Who drains everything is told what it means, and what it means is that it has no
// effect.
func TestDrainOfAll(t *testing.T) {
	fleet := harness.TestFleet(t, 2, fast)
	first, second := fleet[0].Addr(), fleet[1].Addr()
	s := newSite(t, fleet.Upstreams(), policy())
	var drained struct{}
	warnings := 0
	for _, test := range []struct {
		name    string
		api     string // drained before
		options []string
		warns   bool
	}{
		{"config/none", "", nil, false},
		{"config/one", "", []string{"drain " + first}, false},
		{"config/all", "", []string{"drain " + first + " " + second}, true},
		{"config/all, long ago", "", []string{"drain " + first + " " + second, "drain_timeout 1ns"}, true},
		{"config/and the rest by the API", second, []string{"drain " + first}, true},
	} {
		t.Run(test.name, func(t *testing.T) {
			if test.api != "" {
				s.reload(t, fleet.Upstreams(), policy())
				if status := s.admin(t, http.MethodPost, "drain?upstream="+test.api, "", &drained); status != http.StatusOK {
					t.Fatalf("status %d", status)
				}
			}
			s.reload(t, fleet.Upstreams(), policy(test.options...))
			if test.warns {
				warnings++
			}
			log, err := s.Log()
			if n := strings.Count(log, "all upstreams are drained, so they get new conversations all the same"); err != nil || n != warnings {
				t.Errorf("%v, %d warnings, want %d", err, n, warnings)
			}
			before := fleet[0].Stats().Requests
			for i := range 20 {
				s.ask(t, chat(false, words(fmt.Sprintf("%s %d", test.name, i), 2000)))
			}
			if served := fleet[0].Stats().Requests > before; served != (test.warns || test.options == nil) {
				t.Errorf("the first has new prefixes: %t", served)
			}
		})
	}
}

// A mistake that shows only when a configuration is loaded, where no line of a
// Caddyfile is known, names the reverse_proxy that it is in.
func TestLoadErrors(t *testing.T) {
	fleet := harness.TestFleet(t, 2, fast)
	s := newSite(t, fleet.Upstreams(), "lb_policy prefix_affinity")
	in := ", in reverse_proxy " + fleet.Upstreams()
	for _, test := range []struct{ name, option, want string }{
		{"drain/other", "drain 1.2.3.4:1", "invalid drain '1.2.3.4:1': should be one of the upstreams "},
		{"drain/name", "drain localhost:1", "invalid drain 'localhost:1': should be one of the upstreams "},
		{"seed/not set", "seed {env.PREFIX_AFFINITY_NOT_SET}", "placeholder '{env.PREFIX_AFFINITY_NOT_SET}' of seed has no value: set what it refers to"},
		{"seed/misspelt", "seed {enw.SEED}", "placeholder '{enw.SEED}' of seed has no value"},
		{"seed/half not set", "seed sesame-{env.PREFIX_AFFINITY_NOT_SET}", "placeholder '{env.PREFIX_AFFINITY_NOT_SET}' of seed has no value"},
		{"seed/half misspelt", "seed {env.PREFIX_AFFINITY_URL}{enw.SEED}", "placeholder '{enw.SEED}' of seed has no value"},
		{"seed/no file", "seed sesame-{file./no/such/file}", "placeholder '{file./no/such/file}' of seed has no value"},
		{"seed/of a request", "seed {http.request.host}", "placeholder '{http.request.host}' of seed has no value"},
		{"sync/password", "seed s\n\t\t\tsync redis 127.0.0.1:1 {\n\t\t\t\tpassword sesame-{env.PREFIX_AFFINITY_NOT_SET}\n\t\t\t}", "placeholder '{env.PREFIX_AFFINITY_NOT_SET}' of password has no value: set what it refers to, in sync"},
		{"sync/address", "seed s\n\t\t\tsync redis {env.PREFIX_AFFINITY_URL}", "invalid address '{env.PREFIX_AFFINITY_URL}' of sync: what it refers to should be host or host:port"},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Setenv("PREFIX_AFFINITY_URL", "redis://:sesame@127.0.0.1:1")
			err := s.Reload(s.file(proxyTo(fleet.Upstreams(), policy(test.option))))
			if err == nil || !strings.Contains(err.Error(), test.want) || !strings.Contains(err.Error(), in) || strings.Contains(err.Error(), "sesame") {
				t.Errorf("got %q, want it to say %q%s", err, test.want, in)
			}
		})
	}
}

// Whatever Caddy knows without a request may be in a seed.
func TestSeedOfPlaceholders(t *testing.T) {
	file := filepath.Join(t.TempDir(), "seed")
	if err := os.WriteFile(file, []byte("secret\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	t.Setenv("PREFIX_AFFINITY_SEED", "secret")
	s, ups := twoUpstreams(t, "seed a-secret")
	upstreams := strings.Join(ups, " ")
	body := chat(false, words("seeded", 4000))
	s.ask(t, body)
	for _, seed := range []string{"a-{env.PREFIX_AFFINITY_SEED}", "a-{file." + file + "}"} {
		s.reload(t, upstreams, policy("seed "+seed))
		if d := s.ask(t, body); d.reason != "affinity" {
			t.Errorf("seed %s: %+v", seed, d)
		}
	}
	if err := s.Reload(s.file(proxyTo(upstreams, policy("seed {system.hostname}-{system.os}")))); err != nil {
		t.Error(err)
	}
}

func TestCommand(t *testing.T) {
	fleet := harness.TestFleet(t, 2, fast)
	s := newSite(t, fleet.Upstreams(), "lb_policy prefix_affinity")
	if out, err := s.caddy(t, "prefix-affinity", "status"); err != nil || !strings.Contains(out, "no upstream has served") {
		t.Errorf("%v: %s", err, out)
	}
	at := s.conversation(t, fleet, "anna", 2)
	holder := fleet[at].Addr()
	stats := fleet[at].Stats()
	ratio := fmt.Sprintf("%.1f %%", 100*stats.HitRatio())
	if out, err := s.caddy(t, "prefix-affinity", "status"); err != nil || !strings.Contains(out, holder) || !strings.Contains(out, ratio) || !strings.Contains(out, "counted since 20") {
		t.Errorf("%v, want a hit ratio of %s and since when: %s", err, ratio, out)
	}
	file := t.TempDir() + "/body.json"
	if err := os.WriteFile(file, []byte(chat(true, words("anna asks 0", 3000), "aha", "next")), 0o600); err != nil {
		t.Fatal(err)
	}
	if out, err := s.caddy(t, "prefix-affinity", "lookup", file); err != nil || !regexp.MustCompile(regexp.QuoteMeta(holder)+`\s+7\d\d\s+affinity`).MatchString(out) {
		t.Errorf("%v: %s", err, out)
	}
	for _, args := range [][]string{{"drain", holder}, {"undrain", holder}, {"forget", holder}} {
		if out, err := s.caddy(t, append([]string{"prefix-affinity"}, args...)...); err != nil || !strings.Contains(out, holder) {
			t.Errorf("%v: %v: %s", args, err, out)
		}
	}
	out, err := s.caddy(t, "prefix-affinity", "status", "--json")
	var list []upstream
	if err != nil || json.Unmarshal([]byte(out), &list) != nil || len(list) < 2 {
		t.Errorf("%v: %s", err, out)
	}
	if out, err := s.caddy(t, "prefix-affinity", "drain", fleet[1-at].Addr()); err != nil {
		t.Errorf("%v: %s", err, out)
	}
	// What the API says of its requests is said in the words of the command line.
	for _, test := range []struct{ args, want string }{
		{"drain " + holder, "upstream '" + holder + "' is the last one that is not drained: add --force to drain it all the same"},
		{"drain nobody:1", "unknown upstream 'nobody:1': use an address of caddy prefix-affinity status"},
		{"drain ", "invalid upstream '': should be one address"},
		{"undrain " + holder, "upstream '" + holder + "' is not drained"},
		{"lookup " + file + ".missing", "no such file"},
		{"drain", "accepts 1 arg"},
		{"nonsense", "unknown subcommand 'nonsense'"},
	} {
		out, err := s.caddy(t, append([]string{"prefix-affinity"}, strings.Split(test.args, " ")...)...)
		if err == nil || !strings.Contains(out, test.want) || strings.Contains(out, "HTTP") || strings.Contains(out, "{") || strings.Contains(out, "=") {
			t.Errorf("%s: %v, want %q: %s", test.args, err, test.want, out)
		}
	}
	if out, err := s.caddy(t, "prefix-affinity", "drain", "--force", holder); err != nil {
		t.Errorf("%v: %s", err, out)
	}
	// A script that looks up what can't be found notices, also where several sites
	// have an answer each.
	for _, proxy := range []string{policy(), policy() + "\n\t}\n\treverse_proxy /other " + fleet.Upstreams() + " {\n\t\t" + policy("block_size 512")} {
		s.reload(t, fleet.Upstreams(), proxy)
		for _, test := range []struct{ body, path, want string }{
			{"", chatPath, "no prompt to go by: the body is empty"},
			{"hello", chatPath, "no prompt to go by: the body is not JSON"},
			{`{"model":"m"}`, chatPath, "no prompt to go by: the body has no prompt"},
			{`{"model":"m","input":"x"}`, embPath, "no prompt to go by: it is for an API that generates nothing"},
		} {
			if err := os.WriteFile(file, []byte(test.body), 0o600); err != nil {
				t.Fatal(err)
			}
			for _, more := range []string{"--path=" + test.path, "--json"} {
				out, err := s.caddy(t, "prefix-affinity", "lookup", file, "--path", test.path, more)
				if err == nil || strings.Count(out, test.want) != 1 || strings.Contains(out, "unkeyed") != (more == "--json") {
					t.Errorf("%s %s: %v, want %q: %s", test.body, more, err, test.want, out)
				}
			}
		}
	}
	s.reloadTo(t, "respond gone")
	if out, err := s.caddy(t, "prefix-affinity", "lookup", file); err == nil || !strings.Contains(out, "no prefix_affinity policy is configured") {
		t.Errorf("%v: %s", err, out)
	}
}

// scrape returns the samples of the metrics with a prefix, by name and labels.
func (s *site) scrape(t *testing.T) map[string]float64 {
	t.Helper()
	res, err := http.Get(s.Admin + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	text, err := io.ReadAll(res.Body)
	if err != nil {
		t.Fatal(err)
	}
	samples := make(map[string]float64)
	for line := range strings.Lines(string(text)) {
		if name, value, ok := strings.Cut(strings.TrimSpace(line), "} "); ok && strings.HasPrefix(name, "caddy_prefix_affinity_") {
			if samples[name+"}"], err = strconv.ParseFloat(value, 64); err != nil {
				t.Error(err)
			}
		}
	}
	return samples
}

func TestMetrics(t *testing.T) {
	fleet := harness.TestFleet(t, 2, fast)
	s := newSite(t, fleet.Upstreams(), "lb_policy prefix_affinity")
	at := s.conversation(t, fleet, "anna", 3)
	holder := fleet[at].Addr()
	check := func(name, labels string, want float64) {
		t.Helper()
		key := fmt.Sprintf("caddy_prefix_affinity_%s{%s}", name, strings.ReplaceAll(labels, "$", holder))
		if got, ok := s.scrape(t)[key]; !ok || got != want {
			t.Errorf("%s = %v (present: %t), want %v", key, got, ok, want)
		}
	}
	stats := fleet[at].Stats()
	check("decisions_total", `reason="affinity",upstream="$"`, 2)
	check("decisions_total", `reason="cold",upstream="$"`, 1)
	check("decisions_total", `reason="overflow",upstream="$"`, 0)
	check("cached_tokens_total", `upstream="$"`, float64(stats.CachedTokens))
	check("reported_prompt_tokens_total", `upstream="$"`, float64(stats.PromptTokens))
	check("ttft_seconds_count", `match="hit",upstream="$"`, 2)
	check("ttft_seconds_count", `match="miss",upstream="$"`, 1)
	check("pending_requests", `upstream="$"`, 0)

	// They go on across reloads, also where several handlers have the policy.
	for range 3 {
		s.reload(t, fleet.Upstreams(), "lb_policy prefix_affinity\n\t}\n\treverse_proxy /other "+fleet.Upstreams()+" {\n\t\tlb_policy prefix_affinity")
	}
	check("decisions_total", `reason="affinity",upstream="$"`, 2)
	s.post(t, "/v1/chat/completions", chat(true, words("anna asks 0", 3000), "aha", "go on"))
	check("decisions_total", `reason="affinity",upstream="$"`, 3)
}

func TestShadowOnlyRecords(t *testing.T) {
	fleet := harness.TestFleet(t, 2, fast)
	s := newSite(t, fleet.Upstreams(), "lb_policy prefix_affinity {\n\t\t\tshadow\n\t\t\tfallback round_robin\n\t\t}")
	prompt := chat(true, words("shadow", 4000))
	for range 10 {
		s.post(t, "/v1/chat/completions", prompt)
	}
	a, b := fleet[0].Stats().Requests, fleet[1].Stats().Requests
	if a != 5 || b != 5 {
		t.Errorf("round_robin served %d and %d", a, b)
	}
	var wanted, served float64
	for name, value := range s.scrape(t) {
		for _, e := range fleet {
			if strings.Contains(name, e.Addr()) {
				switch {
				case strings.Contains(name, "shadow_matched_tokens_total"):
					wanted += value
				case strings.Contains(name, "_matched_tokens_total"):
					served += value
				}
			}
		}
	}
	// Each of ten equal prompts but the first would have matched; round_robin
	// misses one more.
	if ratio := wanted / served; ratio < 1.12 || ratio > 1.13 {
		t.Errorf("%v tokens would have matched, %v did: ratio %.3f, want 9/8", wanted, served, ratio)
	}
	s.reload(t, fleet.Upstreams(), policy("shadow", "fallback round_robin"))
	if explanation := s.asSession(t, "", "", "/v1/chat/completions", prompt); !regexp.MustCompile(`;wanted="127\.0\.0\.1:\d+";wanted_matched=\d{3,}$`).MatchString(explanation) {
		t.Errorf("explained as %q", explanation)
	}
}

// A lookup has all upstreams of a site, and names none as chosen before a request has
// had the choice, nor one that is drained.
func TestLookupHasAllUpstreams(t *testing.T) {
	fleet := harness.TestFleet(t, 4, fast)
	addrs := make([]string, len(fleet))
	for i := range fleet {
		addrs[i] = fleet[i].Addr()
	}
	s := newSiteOf(t, "handle /other/* {\n\t\turi strip_prefix /other\n\t\t"+proxyTo(addrs[0]+" "+addrs[3], policy())+"\n\t}\n\thandle {\n\t\t"+proxyTo(strings.Join(addrs[:3], " "), policy())+"\n\t}")
	lookup := func() (upstreams []string, chosen string) {
		t.Helper()
		var answers []struct {
			Sites     []string
			Upstream  string
			Upstreams []struct{ Address string }
		}
		if status := s.admin(t, http.MethodPost, "lookup", chat(false, words("unheard of", 2000)), &answers); status != http.StatusOK {
			t.Fatalf("status %d", status)
		}
		for _, a := range answers {
			if strings.Contains(strings.Join(a.Sites, " "), "/other/*") {
				continue
			}
			for _, u := range a.Upstreams {
				upstreams = append(upstreams, u.Address)
			}
			return upstreams, a.Upstream
		}
		t.Fatalf("no answer for the site: %+v", answers)
		return nil, ""
	}
	s.post(t, "/other"+chatPath, chat(false, words("elsewhere", 2000)))
	if upstreams, chosen := lookup(); !slices.Equal(upstreams, addrs[:3]) || chosen != "" {
		t.Errorf("before its first request: %q of %q", chosen, upstreams)
	}
	s.ask(t, chat(false, words("here", 2000)))
	if upstreams, chosen := lookup(); !slices.Equal(upstreams, addrs[:3]) || !slices.Contains(upstreams, chosen) {
		t.Errorf("after its first request: %q of %q", chosen, upstreams)
	}
	for range 2 {
		_, chosen := lookup()
		if status := s.admin(t, http.MethodPost, "drain?upstream="+chosen, "", new(any)); status != http.StatusOK {
			t.Fatalf("draining %q: status %d", chosen, status)
		}
		if _, now := lookup(); now == chosen || now == "" {
			t.Errorf("with %s drained: %q", chosen, now)
		}
	}
}

// An upstream has one cache, whichever policies have the upstream.
func TestOneCacheOfManyPolicies(t *testing.T) {
	config := fast
	config.CapacityTokens = 40_000
	fleet := harness.TestFleet(t, 3, config)
	first, second, third := fleet[0].Addr(), fleet[1].Addr(), fleet[2].Addr()
	two := func(upstreams, proxy, others, other string) string {
		return "handle /embeddings {\n\t" + proxyTo(upstreams, proxy) + "\n\t}\n\thandle {\n\t" + proxyTo(others, other) + "\n\t}"
	}
	s := newSiteOf(t, two(first+" "+second, policy("replica_cache 5000"), second+" "+third, policy("replica_cache 5000")))
	for _, test := range []struct{ name, directives, want string }{
		{
			"different/shared upstream", two(first+" "+second, policy("replica_cache 5000"), second+" "+third, policy("replica_cache 9000")),
			"replica_cache of '" + second + "' is 9000 here and 5000 in reverse_proxy " + first + " " + second + ": it is one cache, so they should be the same, or one left out, in reverse_proxy " + second + " " + third,
		},
		{"different/no shared upstream", two(first, policy("replica_cache 5000"), second, policy("replica_cache 9000")), ""},
		{"different/auto", two(first, policy("replica_cache 5000"), first, policy("replica_cache auto")), ""},
		{"different/after a reload", two(first, policy("replica_cache 9000"), first, policy("replica_cache 9000")), ""},
	} {
		t.Run(test.name, func(t *testing.T) {
			err := s.Reload(s.file(test.directives))
			if (err == nil) != (test.want == "") || err != nil && !strings.Contains(err.Error(), test.want) {
				t.Errorf("got %v, want %q", err, test.want)
			}
		})
	}
	t.Run("polled/by another policy", func(t *testing.T) {
		s.reloadTo(t, two(first, policy("poll 100ms"), first, policy("replica_cache 9000")))
		s.post(t, "/embeddings", `{"input":"x"}`) // begins polling
		s.ask(t, chat(false, words("asked", 4000)))
		eventually(t, "a poll", func() bool { return s.upstreams(t, first)[0].Engine != nil })
		for range 5 {
			time.Sleep(100 * time.Millisecond)
			if got := s.upstreams(t, first)[0].CacheCapacityTokens; got < 8500 || got > 9500 {
				t.Errorf("%d tokens, want the 9,000 that are configured", got)
			}
		}
	})
}

// Nothing of a prompt, a key or a session name may appear anywhere.
func TestPrivacy(t *testing.T) {
	fleet := harness.TestFleet(t, 2, fast)
	s := newSite(t, fleet.Upstreams(), "lb_policy prefix_affinity {\n\t\t\tscope {http.request.header.X-Tenant}\n\t\t\tseed SEEDMARKER\n\t\t\texplain\n\t\t}\n\t}\n\tlog {\n\t\tformat json\n\t}\n\thandle_errors {\n\t\trespond 500")
	level, err := http.Post(s.Admin+"/config/logging/logs/default/level", "application/json", strings.NewReader(`"DEBUG"`))
	if err != nil || level.StatusCode != http.StatusOK {
		t.Fatalf("debug log: %v", err)
	}
	level.Body.Close()
	s.reloaded(t)
	body := strings.Replace(chat(true, words("PROMPTMARKER", 3000)), `"model":"m"`, `"model":"m","prompt_cache_key":"SESSIONMARKER"`, 1)
	for range 3 {
		req, err := http.NewRequest(http.MethodPost, s.URL+"/v1/chat/completions", strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Content-Type", "application/json")
		req.Header.Set("X-Tenant", "TENANTMARKER")
		res, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		if strings.Contains(fmt.Sprint(res.Header), "MARKER") {
			t.Errorf("response headers: %v", res.Header)
		}
		if _, err := io.Copy(io.Discard, res.Body); err != nil {
			t.Error(err)
		}
		res.Body.Close()
	}
	log, err := s.Log()
	if err != nil {
		t.Fatal(err)
	}
	// Caddy itself logs request headers, and the configuration that it loads. In
	// our own lines nothing of them may appear, in none the prompt or the session.
	own := 0
	for line := range strings.Lines(log) {
		if strings.Contains(line, "selection_policies.prefix_affinity") {
			own++
			if strings.Contains(line, "MARKER") {
				t.Errorf("logged: %s", line)
			}
		}
		if strings.Contains(line, "PROMPTMARKER") || strings.Contains(line, "SESSIONMARKER") {
			t.Errorf("logged: %s", line)
		}
	}
	if own < 3 {
		t.Errorf("%d lines of ours in the debug log", own)
	}
	for _, path := range []string{"/metrics", "/prefix_affinity/upstreams"} {
		res, err := http.Get(s.Admin + path)
		if err != nil {
			t.Fatal(err)
		}
		answer, err := io.ReadAll(res.Body)
		res.Body.Close()
		if err != nil || bytes.Contains(answer, []byte("MARKER")) {
			t.Errorf("%s: %v, or it holds what it must not", path, err)
		}
	}
	ask, err := http.NewRequest(http.MethodPost, s.Admin+"/prefix_affinity/lookup", strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	ask.Header.Set("Authorization", "TENANTMARKER")
	res, err := http.DefaultClient.Do(ask)
	if err != nil {
		t.Fatal(err)
	}
	answer, err := io.ReadAll(res.Body)
	res.Body.Close()
	if err != nil || res.StatusCode != http.StatusOK || bytes.Contains(answer, []byte("MARKER")) {
		t.Errorf("lookup: %v %s", err, answer)
	}
	if !bytes.Contains(answer, []byte(`"reason":"affinity"`)) {
		t.Errorf("the tenant's prompt is not found: %s", answer)
	}
	if log, err = s.Log(); err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(log) {
		if strings.Contains(line, "/prefix_affinity/lookup") && strings.Contains(line, "MARKER") {
			t.Errorf("logged: %s", line)
		}
	}
}
