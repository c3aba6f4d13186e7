package integration

import (
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/net/dns/dnsmessage"

	"github.com/prefix-affinity/caddy/integration/engine"
	"github.com/prefix-affinity/caddy/integration/harness"
)

// roomy are engines that can hold and run all that these tests bring.
var roomy = engine.Config{PrefillRate: 1e6, InterToken: time.Millisecond, OutputTokens: 4, MaxRunning: 200, CapacityTokens: 1_000_000}

// everyone lets each conversation have its next turn, and returns how many
// stayed where they were.
func everyone(t *testing.T, s *site, conversations []*conversation) (stayed int) {
	t.Helper()
	for _, c := range conversations {
		at := c.at
		if c.turn(t, s, true); c.at == at {
			stayed++
		}
	}
	return stayed
}

// amidStreams has all conversations stream at once, does something in the
// meantime, and lets them all come to their end.
func amidStreams(t *testing.T, s *site, fleet harness.Fleet, conversations []*conversation, meanwhile func()) (stayed int) {
	t.Helper()
	set := func(f engine.Faults) {
		for _, e := range fleet {
			if err := e.SetFaults(f); err != nil {
				t.Error(err)
			}
		}
	}
	set(engine.Faults{Hang: true}) // after the headers of a stream
	var mu sync.Mutex
	var wg sync.WaitGroup
	for _, c := range conversations {
		wg.Go(func() {
			at := c.at
			d := c.turn(t, s, true)
			if c.at == at {
				mu.Lock()
				stayed++
				mu.Unlock()
			} else {
				t.Logf("moved: %+v from %s", d, at)
			}
		})
	}
	eventually(t, "all streams to be running", func() bool {
		n := 0
		for _, stats := range fleet.Stats() {
			n += stats.Waiting + stats.Running
		}
		return n == len(conversations)
	})
	meanwhile()
	set(engine.Faults{})
	wg.Wait()
	return stayed
}

// A reload costs nobody a request or the replica that knows him.
func TestReloadsAmidStreams(t *testing.T) {
	const clients = 200
	fleet := harness.TestFleet(t, 5, roomy)
	four, five := fleet[:4].Upstreams(), fleet.Upstreams()
	s := newSite(t, four, policy())
	conversations := newConversations(clients)
	everyone(t, s, conversations)
	check := func(when string, stayed int) {
		t.Helper()
		if stayed < clients*95/100 {
			t.Errorf("%s %d of %d conversations stayed on their replica, want 95 %%", when, stayed, clients)
		}
	}

	check("amid a changed header", amidStreams(t, s, fleet, conversations, func() {
		s.reload(t, four, policy()+"header_down X-Version 2")
	}))
	check("after it", everyone(t, s, conversations))
	check("amid an added upstream", amidStreams(t, s, fleet, conversations, func() {
		s.reload(t, five, policy())
	}))
	check("after it", everyone(t, s, conversations))
	for i := range 50 {
		s.reload(t, five, policy(fmt.Sprintf("min_match %d", 64+i))+fmt.Sprintf("header_down X-Version %d", i))
	}
	check("after 50 reloads", everyone(t, s, conversations))
	s.settled(t)

	// New prefixes find the added upstream.
	before := fleet[4].Stats().Requests
	for i := range 50 {
		s.ask(t, chat(false, words(fmt.Sprintf("new %d", i), 3000)))
	}
	if n := fleet[4].Stats().Requests - before; n < 5 {
		t.Errorf("%d of 50 new prefixes went to the added upstream", n)
	}
}

// What was learned stays with whatever does not change what it means.
func TestWhatAReloadKeeps(t *testing.T) {
	fleet := harness.TestFleet(t, 2, quick)
	s := newSite(t, fleet.Upstreams(), policy())
	body := chat(false, words("kept", 4000))
	s.ask(t, body)
	for _, test := range []struct {
		proxy string
		kept  bool
	}{
		{policy("min_match 100", "affinity_weight 2"), true},
		{policy("fallback random", "orca", "max_body 1MiB"), true},
		{policy("index_size 4194304"), true},
		{policy() + "health_uri /health\n\t\theader_up X-New yes", true},
		{policy("block_size 512"), false},
		{policy("seed another"), false},
	} {
		s.reload(t, fleet.Upstreams(), test.proxy)
		if d := s.ask(t, body); (d.reason == "affinity") != test.kept {
			t.Errorf("after a reload to %q: %+v", test.proxy, d)
		}
		s.reload(t, fleet.Upstreams(), policy())
		if !test.kept {
			s.ask(t, body) // nobody kept the other hashes meanwhile
		}
	}
	if err := s.Reload(s.file(proxyTo(fleet.Upstreams(), policy("block_size 1")))); err == nil {
		t.Error("a wrong configuration was loaded")
	}
	if d := s.ask(t, body); d.reason != "affinity" {
		t.Errorf("after a configuration that failed: %+v", d)
	}
}

// A lower index_size acts at the reload, the largest of all policies counts, and
// what fits is kept.
func TestLowerIndexSize(t *testing.T) {
	up := newScripted(t, yes)
	two := func(first, second string) string {
		return "handle /a {\n\t" + proxyTo(up.addr(), policy(first)) + "\n\t}\n\thandle {\n\t" + proxyTo(up.addr(), policy(second)) + "\n\t}"
	}
	s := newSiteOf(t, two("index_size 8192", "index_size 2048"))
	prompt := func(i int) string { return chat(false, words(fmt.Sprintf("prompt %d", i), 16_000)) } // 63 blocks
	for i := range 80 {
		s.ask(t, prompt(i))
	}
	blocks := func() int { return s.upstreams(t, up.addr())[0].IndexBlocks }
	for _, test := range []struct {
		first, second string
		least, most   int
	}{
		{"index_size 8192", "index_size 1024", 4096, 8192},
		{"index_size 2048", "index_size 4096", 3900, 4096},
		{"index_size 2048", "index_size 1024", 1900, 2048},
		{"index_size 8192", "index_size 8192", 1900, 2048},
	} {
		s.reloadTo(t, two(test.first, test.second))
		if n := blocks(); n < test.least || n > test.most {
			t.Errorf("%s and %s: %d blocks", test.first, test.second, n)
		}
		if d := s.ask(t, prompt(79)); d.reason != "affinity" {
			t.Errorf("%s and %s: the latest prompt is %s", test.first, test.second, d.reason)
		}
	}
	if err := s.Reload(s.file(two("index_size 1024", "block_size 1"))); err == nil {
		t.Error("a wrong configuration was loaded")
	}
	if err := s.Reload(s.file(two("index_size 1024", "seed {env.PREFIX_AFFINITY_NOT_SET}"))); err == nil {
		t.Error("a wrong configuration was loaded")
	}
	if n := blocks(); n < 1900 {
		t.Errorf("%d blocks after configurations that failed", n)
	}
}

// Changing to another policy and back loses no request, though what was learned
// is forgotten where nothing uses it.
func TestAnotherPolicyAndBack(t *testing.T) {
	fleet := harness.TestFleet(t, 3, roomy)
	s := newSite(t, fleet.Upstreams(), policy())
	conversations := newConversations(60)
	everyone(t, s, conversations)
	for range 3 {
		amidStreams(t, s, fleet, conversations, func() {
			s.reload(t, fleet.Upstreams(), "lb_policy round_robin")
			if res, _ := s.post(t, embPath, `{"input":"x"}`); res.Header.Get("X-Prefix-Affinity") != "" {
				t.Error("still our policy")
			}
			s.reload(t, fleet.Upstreams(), policy())
		})
		s.settled(t)
		everyone(t, s, conversations) // finds its place again
		if stayed := everyone(t, s, conversations); stayed < 57 {
			t.Errorf("%d of 60 conversations stayed on their replica, want 95 %%", stayed)
		}
	}
	s.settled(t)
}

// nameServer answers every question with the same addresses: those for an
// address by their hosts, those for services (SRV) by their ports.
type nameServer struct {
	conn net.PacketConn

	mu    sync.Mutex
	addrs []netip.AddrPort
	next  func() []netip.AddrPort // nil: addrs every time
}

func newNameServer(t *testing.T) *nameServer {
	t.Helper()
	conn, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	n := &nameServer{conn: conn}
	done := make(chan struct{})
	go func() {
		defer close(done)
		n.serve()
	}()
	t.Cleanup(func() {
		_ = conn.Close()
		<-done
	})
	return n
}

// set changes the addresses, given as host:port.
func (n *nameServer) set(t *testing.T, upstreams ...string) {
	t.Helper()
	var addrs []netip.AddrPort
	for _, up := range upstreams {
		addr, err := netip.ParseAddrPort(up)
		if err != nil {
			t.Fatal(err)
		}
		addrs = append(addrs, addr)
	}
	n.mu.Lock()
	n.addrs = addrs
	n.mu.Unlock()
}

func (n *nameServer) serve() {
	buf := make([]byte, 1500)
	for {
		size, client, err := n.conn.ReadFrom(buf)
		if err != nil {
			return
		}
		var query dnsmessage.Message
		if query.Unpack(buf[:size]) != nil || len(query.Questions) != 1 {
			continue
		}
		question := query.Questions[0]
		reply := dnsmessage.Message{
			Header:    dnsmessage.Header{ID: query.ID, Response: true, Authoritative: true},
			Questions: query.Questions,
		}
		n.mu.Lock()
		if n.next != nil {
			n.addrs = n.next()
		}
		for _, addr := range n.addrs {
			answer := dnsmessage.Resource{Header: dnsmessage.ResourceHeader{Name: question.Name, Type: question.Type, Class: question.Class}}
			switch question.Type {
			case dnsmessage.TypeA:
				answer.Body = &dnsmessage.AResource{A: addr.Addr().As4()}
			case dnsmessage.TypeSRV:
				answer.Body = &dnsmessage.SRVResource{Port: addr.Port(), Target: dnsmessage.MustNewName("replica.test.")}
			default:
				continue
			}
			reply.Answers = append(reply.Answers, answer)
		}
		n.mu.Unlock()
		if packed, err := reply.Pack(); err == nil {
			_, _ = n.conn.WriteTo(packed, client)
		}
	}
}

// enginesAt starts engines on one port of n loopback addresses.
func enginesAt(t *testing.T, n int) (fleet harness.Fleet, port string) {
	t.Helper()
	for attempt := 0; ; attempt++ {
		var err error
		fleet, port = nil, "0"
		for i := range n {
			var e *engine.Engine
			if e, err = engine.Start(fmt.Sprintf("127.0.0.%d:%s", i+1, port), quick); err != nil {
				break
			}
			fleet = append(fleet, e)
			if _, port, err = net.SplitHostPort(e.Addr()); err != nil {
				t.Fatal(err)
			}
		}
		if err == nil {
			break
		}
		_ = fleet.Close()
		if attempt == 5 {
			t.Skipf("this machine has no 127.0.0.2 and so on: %v", err)
		}
	}
	t.Cleanup(func() {
		if err := fleet.Close(); err != nil {
			t.Error(err)
		}
	})
	return fleet, port
}

// Dynamic upstreams are other pointers at every request, and come and go.
func TestDynamicUpstreams(t *testing.T) {
	fleet, port := enginesAt(t, 4)
	for _, kind := range []string{"a", "multi"} {
		t.Run(kind, func(t *testing.T) {
			names := newNameServer(t)
			names.set(t, fleet[0].Addr(), fleet[1].Addr(), fleet[2].Addr())
			// Caddy keeps the addresses of a name for the whole process.
			source := fmt.Sprintf("dynamic a {\n\t\t\tname replicas-%s.test\n\t\t\tport %s\n\t\t\trefresh 1ms\n\t\t\tresolvers %s\n\t\t\tversions ipv4\n\t\t}\n\t\t", kind, port, names.conn.LocalAddr())
			if kind == "multi" {
				source = strings.Replace(source, "dynamic a {", "dynamic multi {\n\t\t\ta {", 1) + "}\n\t\t"
			}
			s := newSiteOf(t, "reverse_proxy {\n\t\t"+source+policy()+"\n\t}")
			conversations := newConversations(12)
			for _, c := range conversations {
				c.name = kind + " " + c.name
			}
			for turn := range 4 {
				for _, c := range conversations {
					at, d := c.at, c.turn(t, s, turn%2 == 0)
					if turn > 0 && (d.upstream != at || d.reason != "affinity") {
						t.Errorf("%s, turn %d: %+v after %s", c.name, turn, d, at)
					}
				}
			}

			// The first goes, a fourth comes.
			names.set(t, fleet[1].Addr(), fleet[2].Addr(), fleet[3].Addr())
			eventually(t, "the change to be seen", func() bool {
				res, err := http.Get(s.URL + "/v1/models")
				if err != nil {
					t.Fatal(err)
				}
				res.Body.Close()
				return decisionOf(t, res).upstream == fleet[3].Addr()
			})
			for _, c := range conversations {
				at, d := c.at, c.turn(t, s, false)
				if d.upstream == fleet[0].Addr() || at != fleet[0].Addr() && d.upstream != at {
					t.Errorf("%s moved from %s to %s", c.name, at, d.upstream)
				}
			}
			for _, c := range conversations {
				if at, d := c.at, c.turn(t, s, false); d.upstream != at {
					t.Errorf("%s moved on from %s to %s", c.name, at, d.upstream)
				}
			}
			s.settled(t)
		})
	}
}
