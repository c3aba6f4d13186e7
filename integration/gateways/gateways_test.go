// Package gateways has tests only: several Caddys, each a process of its own,
// before the same replicas, with a real Redis between them.
package gateways

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	_ "github.com/prefix-affinity/caddy"
	"github.com/prefix-affinity/caddy/integration/engine"
	"github.com/prefix-affinity/caddy/integration/harness"
	"github.com/prefix-affinity/caddy/integration/workload"
)

var thorough = flag.Bool("thorough", false, "always three rounds, and gateways that don't talk too")

func TestMain(m *testing.M) {
	harness.BeCaddy()
	os.Exit(m.Run())
}

// gateway is a Caddy with one reverse_proxy.
type gateway struct {
	*harness.Process

	addr string
}

// newGateway starts a Caddy with the given upstreams and lines in its policy.
func newGateway(t *testing.T, upstreams string, options ...string) *gateway {
	t.Helper()
	return newGatewayOf(t, upstreams+" {", options...)
}

// newGatewayOf starts one whose reverse_proxy begins as given.
func newGatewayOf(t *testing.T, proxy string, options ...string) *gateway {
	t.Helper()
	addr, err := harness.FreeAddr()
	if err != nil {
		t.Fatal(err)
	}
	g := &gateway{addr: addr}
	g.Process, err = harness.StartProcess(fmt.Sprintf(`{
		default_bind 127.0.0.1
		grace_period 1s
	}
	http://%s {
		reverse_proxy %s
			lb_policy prefix_affinity {
				snapshot off
				explain
				%s
			}
			# The engines are in the test's process, which may be short of time.
			transport http {
				dial_timeout 30s
			}
		}
	}`, addr, proxy, strings.Join(options, "\n\t\t\t\t")))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if t.Failed() {
			log, _ := g.Log()
			t.Logf("a gateway's log ends:\n%s", log[max(0, len(log)-3000):])
		}
		if err := g.Close(); err != nil {
			t.Error(err)
		}
	})
	return g
}

func sharing(r *redisServer) []string { return []string{"seed secret", "sync redis " + r.addr} }

// figure reads a metric without labels; -1 if it is not there.
func (g *gateway) figure(t *testing.T, name string) float64 {
	t.Helper()
	families, err := g.Metrics()
	if err != nil {
		t.Fatal(err)
	}
	f := families["caddy_prefix_affinity_"+name]
	if f == nil || len(f.GetMetric()) == 0 {
		return -1
	}
	m := f.GetMetric()[0]
	return m.GetGauge().GetValue() + m.GetCounter().GetValue()
}

// meet waits until every gateway knows all others.
func meet(t *testing.T, gates []*gateway) {
	t.Helper()
	eventually(t, "all gateways know each other", func() bool {
		for _, g := range gates {
			if g.figure(t, "sync_connected") != 1 || g.figure(t, "sync_peers") != float64(len(gates)-1) {
				return false
			}
		}
		return true
	})
}

// logged counts a gateway's log lines that hold a text.
func (g *gateway) logged(t *testing.T, text string) int {
	t.Helper()
	log, err := g.Log()
	if err != nil {
		t.Fatal(err)
	}
	return strings.Count(log, text)
}

const (
	away   = "redis is away"
	login  = "redis refuses the login"
	rights = "redis denies the user a right"
	there  = "sync: connected"
)

// balancer spreads connections at random, as an L4 balancer or DNS does.
func balancer(t *testing.T, gates []*gateway) (url string) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var open sync.WaitGroup
	t.Cleanup(func() {
		if err := l.Close(); err != nil {
			t.Error(err)
		}
		open.Wait()
	})
	open.Go(func() {
		for {
			in, err := l.Accept()
			if err != nil {
				return
			}
			open.Go(func() {
				defer in.Close()
				out, err := net.Dial("tcp", gates[rand.IntN(len(gates))].addr)
				if err != nil {
					return
				}
				defer out.Close()
				open.Go(func() {
					_, _ = io.Copy(out, in)
					_ = out.Close()
				})
				_, _ = io.Copy(in, out)
			})
		}
	})
	return "http://" + l.Addr().String()
}

// quick is an engine that takes no noticeable time.
var quick = engine.Config{PrefillRate: 1e8, InterToken: time.Millisecond, CapacityTokens: 10_000_000, MaxRunning: 1000}

// ask sends a turn of a conversation to a gateway and returns the replica that
// answered.
func ask(t *testing.T, g *gateway, conversation, turns int) string {
	t.Helper()
	body := question(conversation, turns)
	a, err := workload.Ask(t.Context(), http.DefaultClient, "http://"+g.addr+"/v1/chat/completions", body, nil)
	if err != nil {
		t.Error(err)
	}
	return a.Replica
}

func question(conversation, turns int) []byte {
	type message struct {
		Role    string `json:"role"`
		Content string `json:"content"`
	}
	var messages []message
	for turn := range turns {
		messages = append(messages, message{"user", strings.Repeat(fmt.Sprintf("conversation %d turn %d. ", conversation, turn), 80)})
	}
	body, err := json.Marshal(map[string]any{"model": "m", "messages": messages, "max_tokens": 2, "stream": true})
	if err != nil {
		panic(err)
	}
	return body
}

// agree returns the share of conversations whose next turn goes to the replica
// of the last one, when it comes to another gateway.
func agree(t *testing.T, where map[int]string, turns int, at *gateway) float64 {
	t.Helper()
	same := 0
	for conversation, replica := range where {
		if ask(t, at, conversation, turns) == replica {
			same++
		}
	}
	return float64(same) / float64(len(where))
}

// TestNewcomer: a gateway that joins sends conversations where the others have
// sent them, within five seconds, and one that dies leaves nothing behind.
func TestNewcomer(t *testing.T) {
	r := newRedis(t)
	fleet := harness.TestFleet(t, 8, quick)
	gates := []*gateway{newGateway(t, fleet.Upstreams(), sharing(r)...), newGateway(t, fleet.Upstreams(), sharing(r)...)}
	meet(t, gates)
	where := make(map[int]string)
	for i := range 100 {
		where[i] = ask(t, gates[i%2], i, 2)
	}
	began := time.Now()
	late := newGateway(t, fleet.Upstreams(), sharing(r)...)
	eventually(t, "the newcomer has read what was before", func() bool { return late.figure(t, "sync_connected") == 1 })
	took := time.Since(began)
	same := agree(t, where, 3, late)
	t.Logf("%.0f %% of the conversations stay, %s after its start", 100*same, took)
	if same < 0.9 {
		t.Errorf("%.0f %% of the conversations stay where they were", 100*same)
	}

	if err := late.Kill(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the others notice that it is gone", func() bool { return gates[0].figure(t, "sync_peers") == 1 })
	for _, g := range gates {
		eventually(t, "nothing is in flight", func() bool { return g.inFlight(t) == 0 })
		if n := g.logged(t, away) + g.logged(t, "is ignored"); n > 0 {
			t.Errorf("%d warnings", n)
		}
	}
}

func (g *gateway) inFlight(t *testing.T) (n float64) {
	t.Helper()
	families, err := g.Metrics()
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range families["caddy_prefix_affinity_pending_requests"].GetMetric() {
		n += m.GetGauge().GetValue()
	}
	return n
}

// TestTrouble: whatever happens to Redis, under load no request fails, each
// gateway says so once, and afterwards they agree again, also on what they did
// alone.
func TestTrouble(t *testing.T) {
	r := newRedis(t)
	fleet := harness.TestFleet(t, 4, quick)
	gates := []*gateway{newGateway(t, fleet.Upstreams(), sharing(r)...), newGateway(t, fleet.Upstreams(), sharing(r)...)}
	meet(t, gates)

	var stop atomic.Bool
	var load sync.WaitGroup
	var served atomic.Int64
	for client := range 8 {
		load.Go(func() {
			for i := 0; !stop.Load(); i++ {
				ask(t, gates[rand.IntN(2)], 1_000_000*(client+1)+i/5, 1+i%5)
				served.Add(1)
				time.Sleep(20 * time.Millisecond)
			}
		})
	}
	defer load.Wait()
	defer stop.Store(true)

	next := 0
	for _, trouble := range []struct {
		name       string
		begin, end func()
	}{
		{"killed", func() { r.kill(t) }, func() { r.start(t) }},
		{"frozen", func() { r.signal(t, syscall.SIGSTOP) }, func() { r.signal(t, syscall.SIGCONT) }},
		{"garbage", nil, nil},
		{"failing over", func() { r.say("REPLICAOF 127.0.0.1 1") }, func() { r.say("REPLICAOF NO ONE") }},
		{"another user's key", func() { r.say("DEL prefix_affinity:events"); r.say("SET prefix_affinity:events x") }, func() { r.say("DEL prefix_affinity:events") }},
	} {
		before := []int{gates[0].logged(t, away), gates[1].logged(t, away)}
		if trouble.name == "garbage" {
			var end func()
			trouble.begin = func() { r.kill(t); end = r.garbage(t) }
			trouble.end = func() { end(); r.start(t) }
		}
		trouble.begin()
		for i, g := range gates {
			eventually(t, trouble.name+": gateway says that it is alone", func() bool { return g.logged(t, away) == before[i]+1 })
		}
		where := make(map[int]string)
		for range 30 {
			where[next] = ask(t, gates[next%2], next, 2)
			next++
		}
		trouble.end()
		meet(t, gates)
		time.Sleep(time.Second) // what was kept comes
		for i, g := range gates {
			if n := g.logged(t, away); n != before[i]+1 {
				t.Errorf("%s: gateway %d warned %d times", trouble.name, i, n-before[i])
			}
			if same := agree(t, where, 3+i, g); same < 0.9 {
				t.Errorf("%s: gateway %d sends %.0f %% of what was sent meanwhile to the same replica", trouble.name, i, 100*same)
			}
		}
	}
	connected := gates[0].logged(t, there)
	if answer := r.say("FLUSHALL"); !strings.HasPrefix(answer, "+OK") {
		t.Error(answer)
	}
	where := make(map[int]string)
	for range 30 {
		where[next] = ask(t, gates[next%2], next, 2)
		next++
	}
	time.Sleep(time.Second)
	if same := agree(t, where, 3, gates[0]); same < 0.9 {
		t.Errorf("flushed: %.0f %% go to the same replica", 100*same)
	}
	if n := gates[0].logged(t, there); n != connected {
		t.Error("a flush counts as an outage")
	}
	stop.Store(true)
	load.Wait()
	for _, g := range gates {
		eventually(t, "nothing is in flight", func() bool { return g.inFlight(t) == 0 })
	}
	t.Logf("%d requests served meanwhile", served.Load())
}

// TestStrangers: a gateway with another block_size is ignored with one warning.
func TestStrangers(t *testing.T) {
	r := newRedis(t)
	fleet := harness.TestFleet(t, 2, quick)
	ours := newGateway(t, fleet.Upstreams(), sharing(r)...)
	theirs := newGateway(t, fleet.Upstreams(), append(sharing(r), "block_size 512")...)
	for i := range 20 {
		ask(t, theirs, i, 2)
		time.Sleep(100 * time.Millisecond)
	}
	for _, g := range []*gateway{ours, theirs} {
		eventually(t, "a warning", func() bool { return g.logged(t, "other parameters is ignored") == 1 })
		if g.figure(t, "sync_events_received_total") != 0 || g.figure(t, "sync_peers") != 0 {
			t.Error("followed a gateway with other parameters")
		}
	}
}

// traffic keeps eight replicas busy for some ten seconds.
var traffic = workload.Shape{
	Tenants: 6, SystemTokens: 1500, Conversations: 160, Turns: 5, TurnTokens: 300, AnswerTokens: 20,
	Siblings: 16, SharedTokens: 3000, Clients: 20, Seed: 1,
}

// TestAsOne compares several gateways with one: the median of three rounds, in
// which they take turns. A round whose mean is within the target is enough, since
// other work on the machine makes it worse only.
func TestAsOne(t *testing.T) {
	r := newRedis(t)
	plan, err := workload.New(traffic)
	if err != nil {
		t.Fatal(err)
	}
	const prefillRate, interToken = 8000, 5 * time.Millisecond
	pause, err := plan.MeanPause(0.7, 8, prefillRate, interToken)
	if err != nil {
		t.Fatal(err)
	}
	type outcome struct{ ttft, hit float64 }
	play := func(gateways int, options ...string) outcome {
		fleet := harness.TestFleet(t, 8, engine.Config{
			PrefillRate: prefillRate, InterToken: interToken, CapacityTokens: int(0.3 * float64(plan.UniqueTokens())),
		})
		var gates []*gateway
		for range gateways {
			gates = append(gates, newGateway(t, fleet.Upstreams(), options...))
		}
		synced := len(options) > 1
		if synced {
			meet(t, gates)
		}
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
		defer cancel()
		result, err := plan.Play(ctx, balancer(t, gates), pause, func() {})
		if err != nil {
			t.Fatal(err)
		}
		var total engine.Stats
		for _, s := range fleet.Stats() {
			total.PromptTokens += s.PromptTokens
			total.CachedTokens += s.CachedTokens
		}
		o := outcome{result.MeanTTFT().Seconds(), total.HitRatio()}
		told := ""
		if synced {
			events, bytes := 0.0, 0.0
			for _, g := range gates {
				events += g.figure(t, "sync_events_sent_total")
				bytes += g.figure(t, "sync_sent_bytes_total")
			}
			told = fmt.Sprintf(", %.1f events and %.0f bytes a request, %.1f ms late", events/float64(plan.Requests()),
				bytes/float64(plan.Requests()), 1000*gates[0].figure(t, "sync_delay_seconds"))
		}
		t.Logf("%d gateways, %q: mean TTFT %.0f ms, hit ratio %.3f, %s%s", gateways, options, 1000*o.ttft, o.hit, result.Elapsed.Round(time.Millisecond), told)
		for _, g := range gates {
			if err := g.Stop(); err != nil {
				t.Error(err)
			}
		}
		return o
	}
	for _, n := range []int{2, 4} {
		var ratios, points []float64
		for range 3 {
			one, several := play(1), play(n, sharing(r)...)
			ratios = append(ratios, several.ttft/one.ttft)
			points = append(points, 100*(one.hit-several.hit))
			if len(ratios) == 1 && ratios[0] <= 1.3 && points[0] <= 3 && !*thorough {
				break
			}
		}
		slices.Sort(ratios)
		slices.Sort(points)
		t.Logf("%d gateways: mean TTFT %.2f times that of one, hit ratio %.1f points less", n, ratios[len(ratios)/2], points[len(points)/2])
		if points[len(points)/2] > 3 {
			t.Errorf("%d gateways: hit ratio %.1f points less", n, points[len(points)/2])
		}
		if ratios[0] > 1.3 && !harness.Race {
			t.Errorf("%d gateways: mean TTFT %.2f times that of one at best", n, ratios[0])
		}
		if *thorough {
			play(n, "seed secret")
		}
	}
}
