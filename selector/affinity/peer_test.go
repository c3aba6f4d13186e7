package affinity

import (
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/prefix-affinity/caddy/prefixhash"
)

// tell is a journal that is a function.
type tell struct{ f func(Event) }

func (j *tell) Note(e Event) { j.f(e) }

// follow lets x do what happens to the other.
func (x *fixture) follow(other *fixture) *Peer {
	p := x.index.NewPeer()
	other.index.SetJournal(&tell{func(e Event) { p.Apply(x.now, e) }})
	return p
}

// state is what a fixture knows, to compare.
func (x *fixture) state(probes []*prefixhash.Key) string {
	s := ""
	for _, r := range x.fleet.Snapshot(x.now) {
		s += fmt.Sprintf("%s: %d in flight, %d waiting, %.2f prompt, %d capacity, %d blocks, %.4f reports\n",
			r.Address, r.InFlight, r.Waiting, r.PromptTokens, r.CapacityTokens, r.Blocks, r.Reports)
		l := &x.fleet.Find(r.Address).load
		s += fmt.Sprintf("%v penalties, turn %d", l.penalties, l.turn)
		if g := x.fleet.Find(r.Address).group.Load(); g != nil {
			s += fmt.Sprintf(", %.2f given, %.2f on average", l.filled(g, fillDefault), g.clock)
		}
		s += "\n"
	}
	matched := make([]int, len(x.cands))
	for _, key := range probes {
		x.index.Lookup(x.now, key, x.cands, &x.rule, matched)
		s += fmt.Sprint(matched, find(views(x.cands), x.index.sessions.get(key.Session)), "\n")
	}
	return s
}

func views(cands []Candidate) []view {
	v := make([]view, len(cands))
	for i := range cands {
		v[i].r = cands[i].Replica
	}
	return v
}

// TestPeers: two gateways that follow each other know what a single one would
// know that sent all of it to the same places.
func TestPeers(t *testing.T) {
	for seed := range uint64(20) {
		rng := rand.New(rand.NewPCG(seed, 8))
		a, b, single := newFixture(3), newFixture(3), newFixture(3)
		all := []*fixture{a, b, single}
		peers := []*Peer{a.follow(b), b.follow(a)}
		single.rule.Shadow = true
		for _, x := range all {
			x.fleet.bound.Store(3 * 30) // some are pushed out
			x.fleet.mu.Lock()
			x.fleet.join(x.cands, x.now) // as the first request of each would
			x.fleet.mu.Unlock()
		}
		type pair struct{ own, twin *Attempt }
		var flying []pair
		var probes []*prefixhash.Key
		for i := range 600 {
			a.now = a.now.Add(time.Duration(rng.IntN(200)) * time.Millisecond)
			b.now, single.now = a.now, a.now
			for _, x := range all { // each does at its own decisions, and when matters
				x.fleet.advance(x.now, x.cands)
			}
			gate := all[rng.IntN(2)]
			if rng.IntN(3) == 0 || len(flying) == 0 {
				// Too short to teach speed: that, each measures on its own.
				key := keyOf(append(series(rng.IntN(4), 1+rng.IntN(5)), series(100+i, rng.IntN(3))...)...)
				key.Session, key.Stream = uint64(rng.IntN(5)), rng.IntN(4) > 0
				if rng.IntN(10) == 0 {
					key.Blocks = nil
				}
				probes = append(probes, key)
				c, own := gate.route(key)
				_, twin := single.index.Route(single.now, key, single.cands, &single.rule, func(Choice) int { return c.Candidate })
				flying = append(flying, pair{own, twin})
				continue
			}
			n := rng.IntN(len(flying))
			f, now := flying[n], a.now
			stream, o := rng.IntN(4) > 0, Outcome(rng.IntN(5))
			tokens, cached := 100+rng.IntN(900), rng.IntN(1000)
			step := rng.IntN(5)
			for _, at := range []*Attempt{f.own, f.twin} {
				switch step {
				case 0:
					at.Confirm(now, stream)
				case 1:
					at.FirstOutput(now)
				case 2:
					at.Report(tokens, cached)
				case 3:
					at.Finish(now, o, time.Second)
				case 4:
					at.Report(-1, cached)
				}
			}
			if f.own.ended {
				flying = append(flying[:n], flying[n+1:]...)
			}
			if seed%2 == 0 && rng.IntN(50) == 0 {
				gate.index.Learn(3, gate.cands[1].Replica)
				single.index.Learn(3, single.cands[1].Replica)
			}
			if i%20 > 0 {
				continue
			}
			for k, x := range all[:2] {
				if got, want := x.state(probes), single.state(probes); got != want {
					t.Fatalf("seed %d, step %d, gateway %d knows\n%swant\n%s", seed, i, k, got, want)
				}
			}
		}
		for _, f := range flying {
			f.own.Finish(a.now, Served, 0)
		}
		for i, x := range all[:2] {
			for _, r := range x.fleet.Snapshot(x.now.Add(time.Hour)) {
				if r.InFlight != 0 || r.Waiting != 0 || r.PromptTokens != 0 || r.PendingPrefillTokens != 0 {
					t.Errorf("seed %d: left in the account of gateway %d: %+v", seed, i, r)
				}
			}
			if n := peers[i].InFlight(); n != 0 {
				t.Errorf("seed %d: gateway %d still follows %d attempts", seed, i, n)
			}
		}
	}
}

// TestPeersAtOnce: the same from many goroutines, with the events coming late.
func TestPeersAtOnce(t *testing.T) {
	a, b := newFixture(4), newFixture(4)
	var busy, late sync.WaitGroup
	var ends []func()
	for _, x := range []*fixture{a, b} {
		other := a
		if x == a {
			other = b
		}
		events := make(chan Event, 64)
		x.index.SetJournal(&tell{func(e Event) {
			e.Blocks = append([]prefixhash.Block(nil), e.Blocks...) // not kept
			events <- e
		}})
		ends = append(ends, func() { close(events) })
		late.Go(func() {
			p := other.index.NewPeer()
			for e := range events {
				p.Apply(now0, e)
			}
			if p.InFlight() != 0 {
				t.Errorf("%d attempts have not ended", p.InFlight())
			}
		})
		for g := range 4 {
			busy.Go(func() {
				rng := rand.New(rand.NewPCG(uint64(g), 1))
				for i := range 300 {
					_, at := x.route(keyOf(append(series(rng.IntN(3), 5), series(100+i, 2)...)...))
					at.Confirm(now0, true)
					at.FirstOutput(now0)
					at.Report(400, 100)
					at.Finish(now0, Outcome(rng.IntN(5)), 0)
				}
			})
		}
	}
	busy.Wait()
	for _, end := range ends {
		end()
	}
	late.Wait()
	for _, x := range []*fixture{a, b} {
		for _, r := range x.fleet.Snapshot(now0.Add(time.Hour)) {
			if r.InFlight != 0 || r.Waiting != 0 || r.PromptTokens != 0 {
				t.Errorf("left in the account: %+v", r)
			}
		}
	}
}

// TestPeerVanishes: what a gateway had in flight ends with it, and says nothing
// about the replicas.
func TestPeerVanishes(t *testing.T) {
	a, b := newFixture(2), newFixture(2)
	p := b.follow(a)
	unconfirmed, confirmed := keyOf(series(1, 10)...), keyOf(series(2, 10)...)
	a.route(unconfirmed)
	_, at := a.route(confirmed)
	at.Confirm(a.now, true)
	at.FirstOutput(a.now)
	b.serve(keyOf(series(3, 2)...)) // makes the replicas candidates
	if p.InFlight() != 2 {
		t.Fatalf("follows %d attempts, want 2", p.InFlight())
	}
	p.Expire(b.now)
	for _, r := range b.fleet.Snapshot(b.now) {
		if r.InFlight != 0 || r.Waiting != 0 || r.PendingPrefillTokens != 0 {
			t.Errorf("left in the account: %+v", r)
		}
	}
	matched := make([]int, 2)
	b.index.Lookup(b.now, unconfirmed, b.cands, &b.rule, matched)
	if matched[0]+matched[1] != 0 {
		t.Errorf("what nobody confirmed is believed to be cached: %v", matched)
	}
	b.index.Lookup(b.now, confirmed, b.cands, &b.rule, matched)
	if matched[0]+matched[1] != 640 {
		t.Errorf("what was confirmed is not believed to be cached: %v", matched)
	}
	at.Finish(a.now, Served, 0) // comes after all: nothing to end
}

// TestPeerFirst: a gateway that has chosen nothing yet takes in what others do,
// and its first request goes where they have sent that prompt.
func TestPeerFirst(t *testing.T) {
	a := newFixture(4)
	b := newFixture(4)
	b.fleet = NewFleet()
	b.index = NewIndex(b.fleet, 1_000_000)
	b.follow(a)
	want := make([]int, 20)
	for i := range want {
		c, at := a.route(keyOf(series(i, 20)...))
		want[i] = c.Candidate
		at.Confirm(a.now, true)
		a.now = a.now.Add(500 * time.Millisecond)
		at.FirstOutput(a.now)
		at.Report(1280, 0)
		at.Report(1280, 640)
		at.Finish(a.now, Outcome(i%2*int(Aborted)), 0)
	}
	for i := range a.cands {
		theirs, ours := a.cands[i].Replica, b.fleet.Find(a.cands[i].Replica.addr)
		want := theirs.load.filled(theirs.group.Load(), fillDefault)
		if got := ours.load.fill; got < 0.8*want || got > 1.25*want {
			t.Errorf("replica %d got %.0f tokens lately, want about %.0f", i, got, want)
		}
	}
	_, open := a.route(keyOf(series(99, 20)...))
	b.now = a.now
	for i := range b.cands {
		b.cands[i].Replica = b.fleet.Replica(fmt.Sprintf("10.0.0.%d:8000", i+1))
	}
	for i := range want {
		if c := b.serve(keyOf(append(series(i, 20), 7)...)); c.Candidate != want[i] || c.Reason != Affinity {
			t.Errorf("prompt %d goes to %d (%s), the other gateway sent it to %d", i, c.Candidate, c.Reason, want[i])
		}
	}
	open.FirstOutput(a.now)
	open.Finish(a.now, Lost, 0)
}

// TestPeerBounds: another gateway can't make this one grow without end.
func TestPeerBounds(t *testing.T) {
	x := newFixture(1)
	p := x.index.NewPeer()
	for i := range uint64(peerReplicas + peerAttempts + 10) {
		p.Apply(x.now, Event{Kind: Sent, Attempt: i, Replica: fmt.Sprint("r", i%(2*peerReplicas)), PromptTokens: 1, UncachedTokens: 1})
		p.Apply(x.now, Event{Kind: Learned, Session: i, Replica: fmt.Sprint("l", i)})
	}
	if n := len(*x.fleet.replicas.Load()); n != peerReplicas {
		t.Errorf("%d replicas", n)
	}
	if p.InFlight() > peerAttempts {
		t.Errorf("%d attempts", p.InFlight())
	}
}

// TestPeerSpeed: what another gateway measured counts here, and what it sent is
// not taken for a fast or slow prefill of the own requests.
func TestPeerSpeed(t *testing.T) {
	a, b := newFixture(1), newFixture(1)
	b.follow(a)
	b.serve(keyOf(1, 2))
	for i := range 50 {
		_, at := a.route(keyOf(series(i, 20)...))
		a.now = a.now.Add(640 * time.Millisecond) // 2000 tokens a second
		b.now = a.now.Add(time.Second)            // this gateway hears of it late
		at.FirstOutput(a.now)
		at.Finish(a.now, Served, 0)
	}
	if r := b.fleet.Snapshot(b.now)[0]; r.TokensPerSecond < 1990 || r.TokensPerSecond > 2010 {
		t.Errorf("%.0f tokens/s, want 2000 as the other gateway measured", r.TokensPerSecond)
	}
	// The replica is busy with the other gateway's request, which we hear of
	// after we sent ours.
	before := b.fleet.Snapshot(b.now)[0].SpeedMeasurements
	_, own := b.route(keyOf(series(1000, 20)...))
	b.now = b.now.Add(farTime / 2)
	a.now = b.now
	_, theirs := a.route(keyOf(series(1001, 20)...))
	b.now = b.now.Add(5 * time.Second)
	own.FirstOutput(b.now)
	if after := b.fleet.Snapshot(b.now)[0].SpeedMeasurements; after > before {
		t.Error("took the wait behind another gateway's request for a slow prefill")
	}
	own.Finish(b.now, Served, 0)
	theirs.Finish(b.now, Served, 0)
	// Nor does a late first output of the other gateway's say when ours began.
	before = b.fleet.Snapshot(b.now)[0].SpeedMeasurements
	_, theirs = a.route(keyOf(series(1002, 20)...))
	_, own = b.route(keyOf(series(1003, 20)...))
	b.now = b.now.Add(time.Second)
	theirs.FirstOutput(a.now) // at once, as far as it knows
	b.now = b.now.Add(time.Millisecond)
	own.FirstOutput(b.now)
	if after := b.fleet.Snapshot(b.now)[0].SpeedMeasurements; after > before {
		t.Error("took the late news of another gateway's first output for the beginning of the own prefill")
	}
}

// TestPeerReplica: a replica that only another gateway speaks of is known, with what
// is said of it.
func TestPeerReplica(t *testing.T) {
	a, b := newFixture(2), newFixture(1)
	b.follow(a)
	b.serve(keyOf(1, 2))
	for i := range 4 {
		a.serve(keyOf(series(i, 20)...))
	}
	states := b.fleet.Snapshot(b.now)
	if len(states) != 2 || states[0].Blocks == 0 || states[1].Blocks == 0 {
		t.Errorf("states %+v", states)
	}
}

// TestJournalEnds: a journal that was replaced is not told of new attempts.
func TestJournalEnds(t *testing.T) {
	x := newFixture(1)
	var first, second int
	one, two := &tell{func(Event) { first++ }}, &tell{func(Event) { second++ }}
	x.index.SetJournal(one)
	_, at := x.route(keyOf(1, 2))
	x.index.SetJournal(two)
	x.index.EndJournal(one) // not the current one
	x.serve(keyOf(3, 4))
	x.index.EndJournal(two)
	x.serve(keyOf(5, 6))
	at.Finish(x.now, Served, 0)
	if first != 2 || second != 4 {
		t.Errorf("%d and %d events, want 2 and 4", first, second)
	}
}
