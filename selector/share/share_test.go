package share

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"

	"github.com/prefix-affinity/caddy/prefixhash"
	"github.com/prefix-affinity/caddy/selector/affinity"
)

// memory is a stream in memory, for all gateways of a test.
type memory struct {
	mu      sync.Mutex
	entries []entry
	keep    int // bound of the test's own; 0: as told
	last    id
	ahead   time.Duration // its clock's
	trouble error         // of every operation
	hangs   bool          // operations don't end
	more    *sync.Cond
}

func newMemory() *memory {
	m := &memory{}
	m.more = sync.NewCond(&m.mu)
	return m
}

func (m *memory) set(f func()) {
	m.mu.Lock()
	defer m.mu.Unlock()
	f()
	m.more.Broadcast()
}

func (m *memory) add(ctx context.Context, entries [][]byte, keep int64) (string, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if err := m.wrong(ctx); err != nil {
		return "", err
	}
	for _, e := range entries {
		at := id{uint64(time.Now().Add(m.ahead).UnixMilli()), 0}
		if at.ms <= m.last.ms {
			at = id{m.last.ms, m.last.n + 1}
		}
		m.last = at
		m.entries = append(m.entries, entry{at.String(), append([]byte(nil), e...)})
	}
	if m.keep > 0 {
		keep = int64(m.keep)
	}
	m.entries = m.entries[max(0, len(m.entries)-int(keep)):]
	m.more.Broadcast()
	return m.last.String(), nil
}

func (m *memory) wrong(ctx context.Context) error {
	if m.hangs {
		m.mu.Unlock()
		<-ctx.Done()
		m.mu.Lock()
		return ctx.Err()
	}
	return m.trouble
}

func (m *memory) read(ctx context.Context, after string, count int64, wait time.Duration) ([]entry, error) {
	stop := context.AfterFunc(ctx, func() { m.set(func() {}) })
	defer stop()
	from, err := parseID(after)
	if err != nil {
		return nil, err
	}
	until := time.Now().Add(wait)
	timer := time.AfterFunc(wait, func() { m.set(func() {}) })
	defer timer.Stop()
	m.mu.Lock()
	defer m.mu.Unlock()
	for {
		if err := errors.Join(m.wrong(ctx), ctx.Err()); err != nil {
			return nil, err
		}
		var found []entry
		for _, e := range m.entries {
			at, _ := parseID(e.id)
			if (at.ms > from.ms || at.ms == from.ms && at.n > from.n) && int64(len(found)) < count {
				found = append(found, e)
			}
		}
		if len(found) > 0 || !time.Now().Before(until) {
			return found, nil
		}
		m.more.Wait()
	}
}

func (m *memory) close() error { return nil }

// gate is a gateway before the replicas of a test.
type gate struct {
	*Share

	fleet *affinity.Fleet
	index *affinity.Index
	cands []affinity.Candidate
	leave func()
	logs  *observer.ObservedLogs
}

// view is a gateway's own view of a stream, so that it can be cut off alone.
type view struct {
	*memory

	cut *bool
}

func (v view) add(ctx context.Context, entries [][]byte, keep int64) (string, error) {
	v.mu.Lock()
	cut := *v.cut
	v.mu.Unlock()
	if cut {
		return "", errors.New("cut off")
	}
	return v.memory.add(ctx, entries, keep)
}

func newGate(t *testing.T, m stream, p Params) *gate {
	core, logs := observer.New(zapcore.InfoLevel)
	g := &gate{fleet: affinity.NewFleet(), logs: logs}
	g.index = affinity.NewIndex(g.fleet, 1_000_000)
	for i := range 4 {
		g.cands = append(g.cands, affinity.Candidate{Replica: g.fleet.Replica(fmt.Sprintf("10.0.0.%d:8000", i+1))})
	}
	g.Share = begin(m, "test:events", func() *zap.Logger { return zap.New(core) }, time.Millisecond)
	g.leave = g.Join(p, g.index)
	t.Cleanup(func() {
		if err := g.Close(); err != nil {
			t.Error(err)
		}
		for _, r := range g.fleet.Snapshot(time.Now()) {
			if r.InFlight != 0 {
				t.Errorf("left in the account of %s: %+v", r.Address, r)
			}
		}
	})
	return g
}

func prompt(n int, blocks int) *prefixhash.Key {
	key := &prefixhash.Key{Bytes: blocks * 1024, Stream: true, Judged: true}
	for i := range blocks {
		key.Blocks = append(key.Blocks, prefixhash.Block{Hash: uint64(n*1000+i+1) * 0x9e3779b97f4a7c15, End: uint32(i+1) * 1024})
	}
	return key
}

func (g *gate) send(key *prefixhash.Key) (int, *affinity.Attempt) {
	c, a := g.index.Route(time.Now(), key, g.cands, &affinity.Rule{MinMatchTokens: 64}, nil)
	return c.Candidate, a
}

func (g *gate) serve(key *prefixhash.Key) int {
	c, a := g.send(key)
	a.Confirm(time.Now(), true)
	a.FirstOutput(time.Now())
	a.Finish(time.Now(), affinity.Served, 0)
	return c
}

func (g *gate) inFlight() (n int) {
	for _, r := range g.fleet.Snapshot(time.Now()) {
		n += r.InFlight
	}
	return n
}

func (g *gate) matched(key *prefixhash.Key) (most int) {
	matched := make([]int, len(g.cands))
	g.index.Lookup(time.Now(), key, g.cands, &affinity.Rule{MinMatchTokens: 64}, matched)
	for _, n := range matched {
		most = max(most, n)
	}
	return most
}

func (g *gate) warnings() int { return g.logs.FilterLevelExact(zap.WarnLevel).Len() }

const soon = 10*gather + 2*time.Millisecond

// TestTogether: what one gateway sends and sees the other knows soon, and what
// was in flight ends with the gateway that sent it.
func TestTogether(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMemory()
		a, b := newGate(t, m, testParams), newGate(t, m, testParams)
		time.Sleep(time.Second)
		if !a.Connected() || a.Stats().Peers != 1 || b.Stats().Peers != 1 {
			t.Fatalf("%+v %+v", a.Stats(), b.Stats())
		}
		where := a.serve(prompt(1, 8))
		a.index.Learn(77, a.cands[2].Replica)
		_, open := a.send(prompt(2, 8))
		time.Sleep(soon)
		if b.inFlight() != 1 || b.matched(prompt(1, 8)) != 2048 {
			t.Errorf("%d in flight, %d tokens matched", b.inFlight(), b.matched(prompt(1, 8)))
		}
		if got := b.serve(prompt(1, 9)); got != where {
			t.Errorf("sent to %d, the other one to %d", got, where)
		}
		next := prompt(3, 1)
		next.Previous = 77
		if got := b.serve(next); got != 2 {
			t.Errorf("what continues a stored response went to %d", got)
		}
		open.Confirm(time.Now(), true)
		open.Finish(time.Now(), affinity.Served, 0)
		time.Sleep(soon)
		if b.inFlight() != 0 {
			t.Errorf("%d in flight", b.inFlight())
		}
		if s := b.Stats(); s.EventsReceived != 4+1+1+2 || s.EventsSent != 8 || s.BytesSent == 0 || s.BytesReceived <= s.BytesSent {
			t.Errorf("%+v", s)
		}

		a.send(prompt(4, 8)) // and then it is killed
		time.Sleep(soon)
		a.stop()
		<-a.done
		time.Sleep(aliveFor - time.Second)
		if b.inFlight() != 1 {
			t.Errorf("%d in flight, before the other one counts as gone", b.inFlight())
		}
		time.Sleep(2 * time.Second)
		if b.inFlight() != 0 || b.Stats().Peers != 0 {
			t.Errorf("%d in flight, %d peers", b.inFlight(), b.Stats().Peers)
		}
		if a.warnings()+b.warnings() > 0 {
			t.Error(a.logs.All(), b.logs.All())
		}
		a.connected.Store(false)
		a.index = nil // its own attempts stay in its account
		a.fleet = affinity.NewFleet()
	})
}

// TestGoodbye: a gateway that is closed ends at once for the others.
func TestGoodbye(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMemory()
		a, b := newGate(t, m, testParams), newGate(t, m, testParams)
		time.Sleep(time.Second)
		_, own := a.send(prompt(1, 8))
		time.Sleep(soon)
		if err := a.Close(); err != nil {
			t.Error(err)
		}
		time.Sleep(soon)
		if b.inFlight() != 0 || b.Stats().Peers != 0 {
			t.Errorf("%d in flight, %d peers", b.inFlight(), b.Stats().Peers)
		}
		own.Finish(time.Now(), affinity.Served, 0) // tells a closed share
		a.serve(prompt(2, 2))
	})
}

// TestJoinsLate: a gateway that comes later reads what the stream has kept: it
// knows where prompts are, and has only the loads of those that live.
func TestJoinsLate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMemory()
		a, dead := newGate(t, m, testParams), newGate(t, m, testParams)
		time.Sleep(time.Second)
		want := make([]int, 50)
		for i := range want {
			want[i] = []*gate{a, dead}[i%2].serve(prompt(i, 8))
			time.Sleep(100 * time.Millisecond)
		}
		_, lost := dead.send(prompt(100, 4))
		time.Sleep(soon)
		dead.stop()
		<-dead.done
		time.Sleep(time.Minute)
		_, open := a.send(prompt(101, 4))
		time.Sleep(soon)
		b := newGate(t, m, testParams)
		time.Sleep(2 * time.Second)
		if b.inFlight() != 1 {
			t.Errorf("%d in flight, want the one of the gateway that lives", b.inFlight())
		}
		for i, where := range want {
			if got := b.serve(prompt(i, 9)); got != where {
				t.Errorf("prompt %d goes to %d, went to %d", i, got, where)
			}
		}
		open.Finish(time.Now(), affinity.Served, 0)
		lost.Finish(time.Now(), affinity.Served, 0)
		dead.connected.Store(false)
	})
}

// TestOutage: whatever is wrong with the stream, gateways go on alone, say so
// once, and know everything soon after it is over.
func TestOutage(t *testing.T) {
	for name, test := range map[string]struct{ begin, end func(m *memory) }{
		"refuses": {
			func(m *memory) { m.trouble = errors.New("connection refused") },
			func(m *memory) { m.trouble = nil },
		},
		"hangs": {
			func(m *memory) { m.hangs = true },
			func(m *memory) { m.hangs = false },
		},
		"flushed": {
			func(m *memory) { m.trouble, m.entries = errors.New("loading"), nil },
			func(m *memory) { m.trouble = nil },
		},
		"flushed and its clock back": {
			func(m *memory) { m.trouble, m.entries, m.last, m.ahead = errors.New("loading"), nil, id{}, -time.Hour },
			func(m *memory) { m.trouble = nil },
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				m := newMemory()
				a, b := newGate(t, m, testParams), newGate(t, m, testParams)
				time.Sleep(time.Second)
				_, before := a.send(prompt(1, 4))
				time.Sleep(soon)
				m.set(func() { test.begin(m) })
				for i := range 300 {
					a.serve(prompt(10+i, 4))
					time.Sleep(100 * time.Millisecond)
				}
				if a.Connected() || b.Connected() || b.inFlight() != 0 {
					t.Errorf("connected: %t and %t, %d in flight", a.Connected(), b.Connected(), b.inFlight())
				}
				m.set(func() { test.end(m) })
				time.Sleep(mostPause + mostPause/2 + 5*time.Second)
				for i := range 300 {
					if b.matched(prompt(10+i, 4)) != 1024 {
						t.Fatalf("prompt %d of the time alone is not known", i)
					}
				}
				if a.warnings() != 1 || b.warnings() != 1 {
					t.Error(a.logs.All(), b.logs.All())
				}
				if !a.Connected() || a.Stats().Peers != 1 || a.Stats().EventsDropped != 0 {
					t.Errorf("%+v", a.Stats())
				}
				before.Finish(time.Now(), affinity.Served, 0)
				where := a.serve(prompt(1000, 4))
				time.Sleep(soon)
				if got := b.serve(prompt(1000, 5)); got != where {
					t.Errorf("after all, prompts go to %d and %d", where, got)
				}
			})
		})
	}
}

// TestNeverThere: a gateway starts and works without Redis, and warns once.
func TestNeverThere(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMemory()
		m.trouble = errors.New("no such host")
		a := newGate(t, m, testParams)
		time.Sleep(time.Hour)
		a.serve(prompt(1, 2))
		if a.warnings() != 1 || a.logs.Len() != 1 || a.Connected() {
			t.Error(a.logs.All())
		}
	})
}

// TestMemoryIsBounded: what can't be told is kept up to a bound, the newest, and
// the others notice the gap.
func TestMemoryIsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMemory()
		cut := false
		a, b := newGate(t, view{m, &cut}, testParams), newGate(t, m, testParams)
		time.Sleep(time.Second)
		_, stuck := a.send(prompt(1, 4)) // its end will be dropped
		time.Sleep(soon)
		if b.inFlight() != 1 {
			t.Fatalf("%d in flight", b.inFlight())
		}
		m.set(func() { cut = true })
		stuck.Finish(time.Now(), affinity.Served, 0)
		long := prompt(2, 1000)
		for range 3 * queueBytes / (10 * 1000) {
			a.serve(long)
		}
		a.serve(prompt(3, 4))
		a.mu.Lock()
		if a.queued > queueBytes {
			t.Errorf("%d bytes are kept", a.queued)
		}
		a.mu.Unlock()
		m.set(func() { cut = false })
		time.Sleep(20 * time.Second)
		if a.Stats().EventsDropped == 0 || b.inFlight() != 0 || b.matched(prompt(3, 4)) != 1024 {
			t.Errorf("%d dropped, %d in flight, %d matched", a.Stats().EventsDropped, b.inFlight(), b.matched(prompt(3, 4)))
		}
	})
}

// TestStrangers: gateways with other parameters, of other versions, and other
// programs are ignored, with one warning each.
func TestStrangers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMemory()
		other := testParams
		other.BlockSize = 512
		a, b := newGate(t, m, testParams), newGate(t, m, other)
		time.Sleep(time.Second)
		for i := range 20 {
			b.serve(prompt(i, 4))
			time.Sleep(200 * time.Millisecond)
		}
		if a.matched(prompt(1, 4)) != 0 || a.Stats().EventsReceived != 0 || a.Stats().Peers != 0 {
			t.Errorf("%+v", a.Stats())
		}
		if a.warnings() != 1 || b.warnings() != 1 {
			t.Error(a.logs.All())
		}
		for _, garbage := range []string{"", "GET / HTTP/1.1", "pa\x09abcdefgh and more", "pa\x01"} {
			for range 3 {
				if _, err := m.add(t.Context(), [][]byte{[]byte(garbage)}, 1000); err != nil {
					t.Error(err)
				}
			}
		}
		// A batch that breaks off: what it began is not left in flight.
		broken := encode(header{gateway: 5, sequence: 1, params: testParams}, goldenEvents[:1])
		if _, err := m.add(t.Context(), [][]byte{append(broken, 0x0f)}, 1000); err != nil {
			t.Error(err)
		}
		time.Sleep(time.Second)
		if a.inFlight() != 0 || a.warnings() != 4 { // block size, garbage, version, broken off
			t.Errorf("%d in flight, %v", a.inFlight(), a.logs.All())
		}
	})
}

// TestOldStrangers: what ended long ago is no reason to warn.
func TestOldStrangers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMemory()
		other := testParams
		other.Seed[0]++
		old := newGate(t, m, other)
		time.Sleep(time.Second)
		old.serve(prompt(1, 2))
		time.Sleep(soon)
		old.stop()
		<-old.done
		old.connected.Store(false)
		time.Sleep(time.Minute)
		a := newGate(t, m, testParams)
		time.Sleep(time.Minute)
		if a.warnings() != 0 {
			t.Error(a.logs.All())
		}
	})
}

// TestTwice: entries that were written twice, because the answer to the first
// try was lost, count once.
func TestTwice(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMemory()
		a := newGate(t, m, testParams)
		time.Sleep(time.Second)
		b := encode(header{gateway: 5, sequence: 7, params: testParams}, goldenEvents[:2])
		for range 3 {
			if _, err := m.add(t.Context(), [][]byte{b}, 1000); err != nil {
				t.Error(err)
			}
		}
		time.Sleep(soon)
		if a.inFlight() != 2 || a.Stats().EventsReceived != 2 {
			t.Errorf("%d in flight, %d received", a.inFlight(), a.Stats().EventsReceived)
		}
	})
}

// TestGap: where entries are missing nobody knows how what was in flight ended.
func TestGap(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMemory()
		a := newGate(t, m, testParams)
		time.Sleep(time.Second)
		for _, step := range []struct {
			sequence uint64
			events   []affinity.Event
			want     int
		}{{7, goldenEvents[:2], 2}, {8, nil, 2}, {10, nil, 0}} {
			b := encode(header{gateway: 5, sequence: step.sequence, params: testParams}, step.events)
			if _, err := m.add(t.Context(), [][]byte{b}, 1000); err != nil {
				t.Error(err)
			}
			time.Sleep(soon)
			if a.inFlight() != step.want {
				t.Errorf("after batch %d: %d in flight, want %d", step.sequence, a.inFlight(), step.want)
			}
		}
	})
}

// TestLeaveAndJoin: an index that is shared again is heard again.
func TestLeaveAndJoin(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMemory()
		a, b := newGate(t, m, testParams), newGate(t, m, testParams)
		time.Sleep(time.Second)
		second := a.Join(testParams, a.index) // another policy
		a.leave()
		a.serve(prompt(1, 4))
		time.Sleep(soon)
		if b.matched(prompt(1, 4)) == 0 {
			t.Error("one of two policies left, and nothing is shared any more")
		}
		_, open := b.send(prompt(5, 4))
		time.Sleep(soon)
		second()
		if a.inFlight() != 0 {
			t.Error("what others have in flight stays after all have left")
		}
		a.serve(prompt(2, 4))
		time.Sleep(soon)
		if b.matched(prompt(2, 4)) != 0 {
			t.Error("shared though nobody wants it")
		}
		a.leave = a.Join(testParams, a.index)
		a.serve(prompt(3, 4))
		time.Sleep(soon)
		if b.matched(prompt(3, 4)) == 0 {
			t.Error("not heard after it joined again")
		}
		open.Finish(time.Now(), affinity.Served, 0)
		time.Sleep(soon)
	})
}

// TestNeverStarts: a share that is closed at once touches nothing.
func TestNeverStarts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMemory()
		s := begin(m, "x", zap.NewNop, startAfter)
		s.Join(testParams, affinity.NewIndex(affinity.NewFleet(), 1000))
		time.Sleep(startAfter / 2)
		if err := s.Close(); err != nil || len(m.entries) > 0 {
			t.Error(err, len(m.entries))
		}
		time.Sleep(time.Minute)
	})
}

func BenchmarkNote(b *testing.B) {
	for _, blocks := range []int{16, 128} {
		b.Run(fmt.Sprint(blocks, " blocks"), func(b *testing.B) {
			s := begin(newMemory(), "x", zap.NewNop, time.Hour)
			defer s.stop()
			index := affinity.NewIndex(affinity.NewFleet(), 1000)
			c := &channel{share: s, params: testParams, index: index}
			key := prompt(1, blocks)
			b.ReportAllocs()
			b.RunParallel(func(p *testing.PB) {
				for i := uint64(0); p.Next(); i++ {
					c.Note(affinity.Event{Kind: affinity.Sent, Attempt: i, Replica: "10.0.0.1:8000", Candidates: 8, PromptTokens: 100, UncachedTokens: 10, Blocks: key.Blocks})
					c.Note(affinity.Event{Kind: affinity.Finished, Attempt: i})
				}
			})
		})
	}
}

// What servers of all versions answer to those that they don't want.
func TestTrouble(t *testing.T) {
	for _, test := range []struct{ name, answer, want string }{
		{"login/none", "NOAUTH Authentication required.", "refuses the login"},
		{"login/wrong", "WRONGPASS invalid username-password pair or user is disabled.", "refuses the login"},
		{"login/wrong, version 5", "ERR invalid password", "refuses the login"},
		{"login/needless", "ERR AUTH <password> called without any password configured for the default user.", "refuses the login"},
		{"login/needless, version 5", "ERR Client sent AUTH, but no password is set", "refuses the login"},
		{"right/command", "NOPERM this user has no permissions to run the 'xadd' command", "denies the user a right"},
		{"right/key", "NOPERM No permissions to access a key", "denies the user a right"},
		{"away/refused", "dial tcp 127.0.0.1:1: connect: connection refused", "is away"},
		{"away/loading", "LOADING Redis is loading the dataset in memory", "is away"},
	} {
		if got := trouble(errors.New(test.answer)); !strings.Contains(got, test.want) {
			t.Errorf("%s: %s", test.name, got)
		}
	}
}
