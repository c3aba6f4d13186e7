package browser

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	_ "github.com/prefix-affinity/caddy"
	"github.com/prefix-affinity/caddy/integration/engine"
	"github.com/prefix-affinity/caddy/integration/harness"
	"github.com/prefix-affinity/caddy/integration/workload"
)

var screenshots = flag.String("screenshots", "", "`directory` that gets pictures of the page; none are made if empty")

// TestMain lets the test binary be a caddy, for the command that serves the page.
func TestMain(m *testing.M) {
	harness.BeCaddy()
	flag.Parse()
	os.Exit(m.Run())
}

const chat = "/v1/chat/completions"

// TestPage has Chromium open the page of a Caddy that serves traffic, look at it
// and use it; page.mjs says how.
func TestPage(t *testing.T) {
	if _, err := os.Stat("node_modules/playwright-core"); err != nil {
		t.Skip("the packages are not installed here: npm ci --prefix integration/browser")
	}
	chromium, err := exec.LookPath("chromium")
	if err != nil {
		t.Skip("Chromium is not installed here: it is in Debian's package chromium")
	}

	t.Run("8 replicas", func(t *testing.T) {
		s := newSite(t, 8)
		// A prompt whose holder is known.
		question := words("who has this", 4000)
		var holder *engine.Engine
		for range 2 {
			holder = s.ask(t, question)
		}
		if err := s.Fleet[7].SetFaults(engine.Faults{Slow: 3}); err != nil {
			t.Fatal(err)
		}
		s.traffic(t, workload.Shape{
			Tenants: 10, SystemTokens: 1500, Conversations: 32, Turns: 6, TurnTokens: 300, AnswerTokens: 40,
			Siblings: 6, SharedTokens: 2000, Clients: 10,
		})
		url, end := s.page(t, s.Admin)
		result := browse(t, chromium, "use", map[string]any{"url": url, "holder": holder.Addr(), "body": request(question)})
		end()

		drained := s.find(t, result.Drained)
		var state []struct {
			Address string
			Drain   struct{ By string }
		}
		s.admin(t, &state)
		for _, u := range state {
			if by := u.Drain.By; (by == "api") != (u.Address == drained.Addr()) {
				t.Errorf("%s is drained by %q, the button was that of %s", u.Address, by, drained.Addr())
			}
		}
		s.stop() // of the traffic
		before := drained.Stats().Requests
		for i := range 24 {
			s.ask(t, words(fmt.Sprintf("new prefix %d", i), 2000))
		}
		if n := drained.Stats().Requests - before; n != 0 {
			t.Errorf("the drained replica got %d new prefixes", n)
		}
	})

	t.Run("64 replicas", func(t *testing.T) {
		s := newSite(t, 64)
		s.traffic(t, workload.Shape{
			Tenants: 80, SystemTokens: 1000, Conversations: 160, Turns: 3, TurnTokens: 200, AnswerTokens: 16,
			Siblings: 6, SharedTokens: 2000, Clients: 10,
		})
		url, end := s.page(t, s.Admin)
		browse(t, chromium, "survey", map[string]any{"url": url, "replicas": 64})
		end()
	})

	t.Run("nothing to see", func(t *testing.T) {
		s := newSite(t, 1)
		unused, endUnused := s.page(t, s.Admin)
		free, err := harness.FreeAddr()
		if err != nil {
			t.Fatal(err)
		}
		unreachable, endUnreachable := s.page(t, "http://"+free)
		browse(t, chromium, "states", map[string]any{
			"No upstream has served a request yet.":            unused,
			"no answer from Caddy's admin endpoint at " + free: unreachable,
		})
		if err := s.Reload("http://" + s.Addr + " {\n\tbind 127.0.0.1\n\trespond ok\n}\n"); err != nil {
			t.Fatal(err)
		}
		browse(t, chromium, "states", map[string]any{"No prefix_affinity policy is configured in this Caddy.": unused})
		endUnreachable()
		endUnused()
	})
}

// site is a gateway with the policy.
type site struct {
	*harness.Gateway

	stop func() // ends the traffic
}

func newSite(t *testing.T, replicas int) *site {
	t.Helper()
	g, err := harness.StartGateway(replicas, engine.Config{
		CapacityTokens: 60_000, PrefillRate: 12_000, InterToken: 5 * time.Millisecond,
	}, "lb_policy prefix_affinity {\n\t\t\tpoll 1s\n\t\t}")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := g.Close(); err != nil {
			t.Error(err)
		}
	})
	return &site{g, func() {}}
}

// traffic keeps conversations of a shape going until the test ends or s.stop.
func (s *site) traffic(t *testing.T, shape workload.Shape) {
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	wg.Go(func() {
		for ctx.Err() == nil {
			shape.Seed++ // other prompts, so that there are misses
			plan, err := workload.New(shape)
			if err != nil {
				t.Error(err)
				return
			}
			if _, err := plan.Play(ctx, "http://"+s.Addr, 500*time.Millisecond, func() {}); err != nil && ctx.Err() == nil {
				t.Error(err)
				return
			}
		}
	})
	s.stop = sync.OnceFunc(func() {
		cancel()
		wg.Wait()
	})
	t.Cleanup(s.stop)
}

// ask sends a question and returns who answered it.
func (s *site) ask(t *testing.T, question string) *engine.Engine {
	t.Helper()
	a, err := workload.Ask(t.Context(), http.DefaultClient, "http://"+s.Addr+chat, []byte(request(question)), nil)
	if err != nil {
		t.Fatal(err)
	}
	for i, e := range s.Fleet {
		if a.Replica == fmt.Sprintf("replica-%d", i+1) {
			return e
		}
	}
	t.Fatalf("the answer is from %q", a.Replica)
	return nil
}

func (s *site) find(t *testing.T, addr string) *engine.Engine {
	t.Helper()
	for _, e := range s.Fleet {
		if e.Addr() == addr {
			return e
		}
	}
	t.Fatalf("no engine at %q", addr)
	return nil
}

// admin gets what Caddy tells of the upstreams.
func (s *site) admin(t *testing.T, to any) {
	t.Helper()
	res, err := http.Get(s.Admin + "/prefix_affinity/upstreams")
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	if err := json.NewDecoder(res.Body).Decode(to); err != nil {
		t.Fatal(err)
	}
}

// page runs the command that serves the page of an admin endpoint, until end,
// which is Ctrl-C.
func (s *site) page(t *testing.T, admin string) (url string, end func()) {
	t.Helper()
	cmd := harness.Command("prefix-affinity", "ui", "--listen", "localhost:0", "--address", strings.TrimPrefix(admin, "http://"))
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	end = sync.OnceFunc(func() {
		if err := cmd.Process.Signal(os.Interrupt); err != nil {
			t.Error(err)
		}
		if err := cmd.Wait(); err != nil {
			t.Errorf("the command ended with %v: %s", err, stderr.String())
		}
	})
	t.Cleanup(end)
	line, err := bufio.NewReader(stdout).ReadString('\n')
	if err != nil {
		t.Fatalf("%v: %s", err, stderr.String())
	}
	said := regexp.MustCompile(`http://localhost:\d+`).FindString(line)
	if said == "" {
		t.Fatalf("the command said %q", line)
	}
	return said, end
}

// result is what page.mjs has to say.
type result struct {
	Drained string // by a click
}

// browse does what page.mjs does under a name.
func browse(t *testing.T, chromium, name string, args map[string]any) result {
	t.Helper()
	args["chromium"], args["screenshots"] = chromium, *screenshots
	text, err := json.Marshal(args)
	if err != nil {
		t.Fatal(err)
	}
	node := exec.CommandContext(t.Context(), "node", "page.mjs", name)
	node.Stdin = bytes.NewReader(text)
	var stderr strings.Builder
	node.Stderr = &stderr
	out, err := node.Output()
	if err != nil {
		t.Fatalf("%v\n%s", err, stderr.String())
	}
	var r result
	if err := json.Unmarshal(out, &r); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	return r
}

// request is a streamed chat with one question.
func request(question string) string {
	return fmt.Sprintf(`{"model":"simulated","stream":true,"stream_options":{"include_usage":true},"max_tokens":4,"messages":[{"role":"user","content":%q}]}`, question)
}

// words makes n bytes of text that no other name begins with.
func words(name string, n int) string {
	var b strings.Builder
	for i := 0; b.Len() < n; i++ {
		fmt.Fprintf(&b, "%s says %d. ", name, i)
	}
	return b.String()[:n]
}
