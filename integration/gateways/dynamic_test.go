package gateways

import (
	"fmt"
	"net"
	"sync/atomic"
	"testing"
	"time"

	"github.com/miekg/dns"

	"github.com/prefix-affinity/caddy/integration/engine"
	"github.com/prefix-affinity/caddy/integration/harness"
)

// nameServer answers every question for addresses with those it was given last.
type nameServer struct {
	addr  string
	hosts atomic.Pointer[[]string]
}

func newNameServer(t *testing.T) *nameServer {
	t.Helper()
	conn, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	n := &nameServer{addr: conn.LocalAddr().String()}
	n.set()
	server := &dns.Server{PacketConn: conn, Handler: dns.HandlerFunc(n.answer)}
	done := make(chan error, 1)
	go func() { done <- server.ActivateAndServe() }()
	t.Cleanup(func() {
		if err := server.Shutdown(); err != nil {
			t.Error(err)
		}
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return n
}

func (n *nameServer) set(hosts ...string) { n.hosts.Store(&hosts) }

func (n *nameServer) answer(w dns.ResponseWriter, q *dns.Msg) {
	a := new(dns.Msg)
	a.SetReply(q)
	for _, question := range q.Question {
		if question.Qtype != dns.TypeA {
			continue
		}
		for _, host := range *n.hosts.Load() {
			a.Answer = append(a.Answer, &dns.A{
				Hdr: dns.RR_Header{Name: question.Name, Rrtype: dns.TypeA, Class: dns.ClassINET},
				A:   net.ParseIP(host),
			})
		}
	}
	_ = w.WriteMsg(a) // who asked asks again
}

// TestDynamic: replicas that DNS finds come and go before two gateways. New ones
// get their share, those that went get nothing, and one that comes back gets its
// conversations.
func TestDynamic(t *testing.T) {
	r := newRedis(t)
	names := newNameServer(t)
	first, err := harness.FreeAddr()
	if err != nil {
		t.Fatal(err)
	}
	_, port, err := net.SplitHostPort(first)
	if err != nil {
		t.Fatal(err)
	}
	hosts := []string{"127.0.0.2", "127.0.0.3", "127.0.0.4"}
	for _, host := range hosts {
		config := quick
		config.Name = host
		e, err := engine.Start(net.JoinHostPort(host, port), config)
		if err != nil {
			t.Skipf("no other loopback addresses here: %v", err)
		}
		t.Cleanup(func() {
			if err := e.Close(); err != nil {
				t.Error(err)
			}
		})
	}
	names.set(hosts[:2]...)
	dynamic := fmt.Sprintf("{\n\t\t\tdynamic a {\n\t\t\t\tname replicas.test\n\t\t\t\tport %s\n\t\t\t\trefresh 50ms\n\t\t\t\tresolvers %s\n\t\t\t}", port, names.addr)
	gates := []*gateway{newGatewayOf(t, dynamic, sharing(r)...), newGatewayOf(t, dynamic, sharing(r)...)}
	meet(t, gates)

	where := make(map[int]string)
	count := func() map[string]int {
		n := make(map[string]int)
		for _, host := range where {
			n[host]++
		}
		return n
	}
	for i := range 40 {
		where[i] = ask(t, gates[i%2], i, 2)
	}
	if n := count(); n[hosts[0]] < 10 || n[hosts[1]] < 10 || n[hosts[2]] > 0 {
		t.Errorf("requests by replica: %v", n)
	}

	names.set(hosts[0], hosts[2]) // one goes, one comes
	eventually(t, "the new replica is asked", func() bool {
		at := len(where)
		where[at] = ask(t, gates[at%2], at, 2)
		return where[at] == hosts[2]
	})
	time.Sleep(time.Second) // the other gateway's refresh is over too
	for i := 1000; i < 1040; i++ {
		where[i] = ask(t, gates[i%2], i, 2)
		if where[i] == hosts[1] {
			t.Fatal("sent to a replica that is gone")
		}
	}
	if n := count(); n[hosts[2]] < 10 {
		t.Errorf("requests by replica: %v", n)
	}

	names.set(hosts...) // it is back
	time.Sleep(time.Second)
	for _, g := range gates {
		if same := agree(t, where, 3, g); same < 0.9 {
			t.Errorf("%.0f %% of the conversations stay where they were", 100*same)
		}
	}
}
