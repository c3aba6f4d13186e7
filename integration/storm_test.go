package integration

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prefix-affinity/caddy/integration/engine"
	"github.com/prefix-affinity/caddy/integration/harness"
)

// long is set for the versions of tests that take minutes.
var long = os.Getenv("PREFIX_AFFINITY_LONG") != ""

// tally is what came of the requests of a storm.
type tally struct {
	requests, outlived           atomic.Int64
	unanswered, wrongStatus, cut atomic.Int64
}

// stormSide is one of two Caddys under the same load and the same reloads.
type stormSide struct {
	tally

	name    string
	site    *site
	proxies []string // directives, one after the other
	reloads atomic.Int64
}

func (s *stormSide) String() string {
	return fmt.Sprintf("%d reloads, %d requests, of which %d outlived three reloads: %d were not answered, %d with an error, %d in part",
		s.reloads.Load(), s.requests.Load(), s.outlived.Load(), s.unanswered.Load(), s.wrongStatus.Load(), s.cut.Load())
}

// blow reloads every 200 ms, under the load of conversations and of streams
// that take a second, until the time is over.
func (s *stormSide) blow(t *testing.T, d time.Duration) {
	t.Helper()
	stop := make(chan struct{})
	time.AfterFunc(d, func() { close(stop) })
	stopped := func() bool {
		select {
		case <-stop:
			return true
		default:
			return false
		}
	}
	client := &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 32}}
	defer client.CloseIdleConnections()
	var wg sync.WaitGroup
	for i := range 12 {
		wg.Go(func() {
			var c *conversation
			for n := 0; !stopped(); n++ {
				if n%5 == 0 {
					c = &conversation{name: fmt.Sprintf("client %d at %d", i, time.Now().UnixNano())}
				}
				c.messages = append(c.messages, words(fmt.Sprintf("%s turn %d", c.name, n), 1500))
				s.ask(client, chat(true, c.messages...))
				c.messages = append(c.messages, "aha")
			}
		})
	}
	for i := range 4 {
		wg.Go(func() {
			for n := 0; !stopped(); n++ {
				body := chat(true, words(fmt.Sprintf("stream %d.%d", i, n), 3000))
				s.ask(client, strings.Replace(body, `"max_tokens":4`, `"max_tokens":50`, 1))
			}
		})
	}
	wg.Go(func() {
		tick := time.NewTicker(200 * time.Millisecond)
		defer tick.Stop()
		for !stopped() {
			<-tick.C
			err := s.site.Reload(s.site.file(s.proxies[int(s.reloads.Add(1))%len(s.proxies)]))
			if reset := new(url.Error); err != nil && !errors.As(err, &reset) { // the admin endpoint is replaced as well
				t.Error(err)
			}
		}
	})
	wg.Wait()
}

// ask sends a request and notes what comes of it.
func (s *stormSide) ask(client *http.Client, body string) {
	began := s.reloads.Load()
	s.requests.Add(1)
	res, err := client.Post(s.site.URL+chatPath, "application/json", strings.NewReader(body))
	if err != nil {
		s.unanswered.Add(1)
		return
	}
	defer res.Body.Close()
	answer, err := io.ReadAll(res.Body)
	switch {
	case res.StatusCode != http.StatusOK:
		s.wrongStatus.Add(1)
	case err != nil || !strings.HasSuffix(string(answer), event("[DONE]")):
		s.cut.Add(1)
	case s.reloads.Load() >= began+3:
		s.outlived.Add(1)
	}
}

// footprint is what a Caddy in a process of its own takes at rest.
type footprint struct {
	goroutines, heapMB, rssMB float64
}

func (s *site) footprint(t *testing.T) footprint {
	t.Helper()
	http.DefaultClient.CloseIdleConnections()
	for range 2 { // what a pool holds goes at the second
		res, err := http.Get(s.Admin + "/debug/pprof/heap?gc=1")
		if err != nil {
			t.Fatal(err)
		}
		_, err = io.Copy(io.Discard, res.Body)
		if err = errors.Join(err, res.Body.Close()); err != nil {
			t.Fatal(err)
		}
	}
	metrics, err := s.Metrics()
	if err != nil {
		t.Fatal(err)
	}
	value := func(name string) float64 {
		if metrics[name] == nil {
			t.Skipf("this system does not tell %s", name)
		}
		return metrics[name].GetMetric()[0].GetGauge().GetValue()
	}
	return footprint{
		goroutines: value("go_goroutines"),
		heapMB:     value("go_memstats_heap_alloc_bytes") / (1 << 20),
		rssMB:      value("process_resident_memory_bytes") / (1 << 20),
	}
}

// Reloads that follow each other faster than requests end cost no request that
// they don't cost with Caddy's own policy, and leave nothing behind.
func TestReloadStorm(t *testing.T) {
	d := 4 * time.Second
	switch {
	case testing.Short():
		t.Skip("takes some 10 s")
	case long:
		d = time.Minute
	}
	fleet := harness.TestFleet(t, 5, engine.Config{PrefillRate: 1e6, InterToken: 20 * time.Millisecond, OutputTokens: 50, MaxRunning: 200, CapacityTokens: 1_000_000})
	three, four, five := fleet[:3].Upstreams(), fleet[1:].Upstreams(), fleet.Upstreams()

	// Streams that outlive their configuration leave connections that nobody uses
	// again, and they would be kept for two minutes.
	const transport = "transport http {\n\t\t\tkeepalive 1s\n\t\t}\n\t\t"
	const leastConn = "lb_policy least_conn\n\t\t" + transport
	policy := func(options ...string) string { return policy(options...) + transport }
	stock := &stormSide{name: "least_conn", proxies: []string{
		proxyTo(three, leastConn),
		proxyTo(five, leastConn),
		proxyTo(five, leastConn+"header_down X-Version 3"),
		proxyTo(four, leastConn),
	}}
	// Another handler of the site keeps what the first one's policy learned.
	keeper := "handle_path /kept/* {\n\t\t" + proxyTo(three, policy()) + "\n\t}\n\t"
	another := policy("seed another")
	ours := &stormSide{name: "prefix_affinity", proxies: []string{
		keeper + proxyTo(three, policy()),
		keeper + proxyTo(five, policy("min_match 100", "affinity_weight 3")),
		keeper + proxyTo(five, leastConn),
		keeper + proxyTo(four, policy("block_size 512")),
		keeper + proxyTo(four, policy("poll 100ms", "orca")+"header_down X-Version 5"),
		keeper + proxyTo(three, "lb_policy cookie {\n\t\t\tfallback prefix_affinity\n\t\t}\n\t\t"+transport),
		keeper + proxyTo(three, policy("seed another", "index_size 1024", "fallback random")),
	}}
	sides := []*stormSide{ours, stock}
	for _, s := range sides {
		s.site = newProcess(t, s.proxies[0])
	}

	// Two conversations: one whose state is wanted all the time, one whose hashes
	// nobody wants at times.
	kept, lost := &conversation{name: "kept"}, &conversation{name: "lost"}
	ask := func(c *conversation, path string) decision {
		c.messages = append(c.messages, words(fmt.Sprintf("%s %d", c.name, len(c.messages)), 3000))
		res, _ := ours.site.post(t, path+chatPath, chat(true, c.messages...))
		c.messages = append(c.messages, "aha")
		return decisionOf(t, res)
	}
	at := ask(kept, "/kept").upstream
	ours.site.reloadTo(t, keeper+proxyTo(three, another))
	ask(lost, "")
	if d := ask(lost, ""); d.reason != "affinity" {
		t.Errorf("before the storm: %+v", d)
	}

	blow := func(d time.Duration) {
		var wg sync.WaitGroup
		for _, s := range sides {
			wg.Go(func() { s.blow(t, d) })
		}
		wg.Wait()
		for _, s := range sides {
			s.site.quiet(t)
			s.site.reloadTo(t, s.proxies[0])
		}
	}
	blow(d / 4)
	before := ours.site.footprint(t)
	blow(d)
	var after footprint
	eventually(t, "the goroutines of old configurations to end", func() bool {
		after = ours.site.footprint(t)
		return after.goroutines <= before.goroutines+20
	})
	for _, s := range sides {
		t.Logf("%s: %s", s.name, s)
	}
	t.Logf("%+v after a fifth of the storm, %+v after it; least_conn: %+v", before, after, stock.site.footprint(t))

	if n := ours.wrongStatus.Load() + ours.cut.Load(); n > stock.wrongStatus.Load()+stock.cut.Load() {
		t.Errorf("%d requests failed", n)
	}
	// Caddy resets connections that the listener of the old configuration has not
	// accepted: as many on both sides, but for chance.
	if ours, stock := ours.unanswered.Load(), stock.unanswered.Load(); ours > 2*stock+20 {
		t.Errorf("%d requests were not answered, %d with least_conn", ours, stock)
	}
	for _, s := range sides {
		if s.outlived.Load() == 0 {
			t.Errorf("%s: no stream outlived three reloads", s.name)
		}
	}
	if after.heapMB > before.heapMB+5 || after.rssMB > before.rssMB+25 {
		t.Errorf("the memory grew from %+v to %+v", before, after)
	}
	if d := ask(kept, "/kept"); d.reason != "affinity" || d.upstream != at {
		t.Errorf("the conversation at %s that another handler has went on as %+v", at, d)
	}
	ours.site.settled(t)

	ours.site.reloadTo(t, keeper+proxyTo(three, another))
	if d := ask(lost, ""); d.reason != "cold" {
		t.Errorf("a conversation whose hashes nobody wanted for a while: %+v", d)
	}
	ours.site.reloadTo(t, proxyTo(three, leastConn))
	if all := ours.site.accounts(t); len(all) > 0 {
		t.Errorf("without the policy there are still %+v", all)
	}
}
