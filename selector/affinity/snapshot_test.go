package affinity

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cespare/xxhash/v2"

	"github.com/prefix-affinity/caddy/prefixhash"
)

const testKey = "seed and so on"

func (x *fixture) snapshot(t testing.TB) []byte {
	t.Helper()
	var b bytes.Buffer
	if err := x.fleet.WriteSnapshot(&b, x.now, map[string]*Index{testKey: x.index}, nil); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// restart returns a fixture that knows what the snapshot says.
func (x *fixture) restart(t testing.TB, snapshot []byte) *fixture {
	t.Helper()
	y := newFixture(len(x.cands))
	y.now = x.now
	if _, err := y.index.Restore(bytes.NewReader(snapshot), testKey, y.now); err != nil {
		t.Fatal(err)
	}
	return y
}

// sound checks what must always be true of a replica's order and table, given
// all prompts that were ever sent.
func (x *fixture) sound(t *testing.T, chains [][]prefixhash.Block) {
	t.Helper()
	for i, c := range x.cands {
		r := c.Replica
		o := &r.order
		var used, wait, pinned, blocks, placed int64
		again := make(map[uint32]bool) // slots to use
		for _, slot := range o.free {
			if again[slot] || slot == 0 || o.runs.at(slot).phase() != free {
				t.Fatalf("replica %d: slot %d is not free, or twice", i, slot)
			}
			again[slot] = true
		}
		for slot := range uint32(o.runs.size) {
			run := o.runs.at(slot)
			blocks += int64(run.blocks)
			switch run.phase() {
			case free:
				if slot > 0 && !again[slot] {
					t.Fatalf("replica %d: slot %d is never used again", i, slot)
				}
				if run.size() != 0 || run.blocks != 0 {
					t.Fatalf("replica %d: slot %d is free and holds %+v", i, slot, *run)
				}
				continue
			case running:
				pinned += run.size()
				continue
			case done:
			case waiting:
				wait += run.size()
			}
			used += run.size()
			placed++
			if at := o.at[run.pos]; at.slot() != slot || int64(at.bytes) != run.size() || (at.taken != at.slot()) != (run.phase() == waiting) || run.pos < o.head || run.pos >= o.next {
				t.Fatalf("replica %d: slot %d is not at its position %d of [%d,%d)", i, slot, run.pos, o.head, o.next)
			}
		}
		var all weight
		if o.next > 0 {
			all = o.upTo(o.next - 1)
		}
		if o.used != used || o.wait != wait || o.running != pinned || int64(o.blocks) != blocks || int64(o.placed) != placed || all.used != used || all.wait != wait {
			t.Fatalf("replica %d: %d used, %d waiting, %d running, %d blocks, %d placed, in the tree %+v; want %d, %d, %d, %d, %d",
				i, o.used, o.wait, o.running, o.blocks, o.placed, all, used, wait, pinned, blocks, placed)
		}
		if chains == nil {
			continue
		}
		// Every byte that a run claims is a block of some prompt that is there.
		table := x.index.table(r)
		owned := make(map[uint64]bool)
		var bytes int64
		for _, chain := range chains {
			for n, b := range chain {
				if !owned[b.Hash] && table.owner(o, b) != 0 {
					owned[b.Hash] = true
					bytes += int64(b.End - startOf(chain, n))
				}
			}
		}
		if bytes != used+pinned || len(owned) != int(blocks) {
			t.Fatalf("replica %d: %d bytes in %d blocks claimed, %d in %d are there", i, used+pinned, blocks, bytes, len(owned))
		}
	}
}

// matches returns what each replica holds of each prompt.
func (x *fixture) matches(chains [][]prefixhash.Block) [][]int {
	all := make([][]int, len(chains))
	for i, chain := range chains {
		all[i] = make([]int, len(x.cands))
		x.index.Lookup(x.now, &prefixhash.Key{Blocks: chain, Bytes: len(chain) * testBlock}, x.cands, &x.rule, all[i])
	}
	return all
}

func TestSnapshotKeepsTheIndex(t *testing.T) {
	for seed := range uint64(18) {
		rng := rand.New(rand.NewPCG(seed, 7))
		x := newFixture(3)
		x.rule.CapacityTokens = int(seed%3) * 3000 // 0: not known
		chains := prompts(rng, 400)
		type flight struct {
			a         *Attempt
			confirmed bool
		}
		var flights []flight
		for _, chain := range chains {
			at := rng.IntN(len(x.cands))
			_, a := x.index.Route(x.now, &prefixhash.Key{Blocks: chain, Bytes: len(chain) * testBlock, Stream: true}, x.cands[at:at+1], &x.rule, nil)
			flights = append(flights, flight{a: a})
			for range rng.IntN(4) {
				i := rng.IntN(len(flights))
				switch f := &flights[i]; rng.IntN(3) {
				case 0:
					f.a.Confirm(x.now, true)
					f.confirmed = true
				case 1:
					f.a.FirstOutput(x.now)
				default:
					f.a.Finish(x.now, Lost, 0)
					flights = slices.Delete(flights, i, i+1)
				}
				if len(flights) == 0 {
					break
				}
			}
		}
		inFlight := x.snapshot(t)
		for _, f := range flights {
			f.a.Finish(x.now, Lost, 0)
		}
		for _, c := range x.cands {
			c.Replica.order.forget(c.Replica.capacity) // as the next request would
		}
		quiet := x.snapshot(t)

		if seed%3 == 0 { // else the order decides too, and what was in flight counts as ended
			y := x.restart(t, inFlight)
			y.sound(t, chains)
			if got, want := y.matches(chains), x.matches(chains); fmt.Sprint(got) != fmt.Sprint(want) {
				t.Fatalf("seed %d: other matches than without what was in flight", seed)
			}
		}
		y := x.restart(t, quiet)
		y.sound(t, nil)
		for i := range x.cands {
			before, after := x.cands[i].Replica, y.cands[i].Replica
			if before.capacity != after.capacity {
				t.Fatalf("seed %d: capacity %d, was %d", seed, after.capacity, before.capacity)
			}
			for _, chain := range chains {
				a := x.index.table(before).spans(nil, &before.order, chain, 0)
				b := y.index.table(after).spans(nil, &after.order, chain, 0)
				same := len(a) == len(b)
				for n := range min(len(a), len(b)) {
					same = same && a[n].from == b[n].from && a[n].to == b[n].to && a[n].far == b[n].far
				}
				if !same {
					t.Fatalf("seed %d, replica %d: %+v, was %+v", seed, i, b, a)
				}
			}
		}
		if again := y.snapshot(t); len(again) != len(quiet) {
			t.Errorf("seed %d: a snapshot of what was restored has %d bytes, not %d", seed, len(again), len(quiet))
		}
	}
}

// talk is a conversation under the system prompt of all.
type talk struct {
	at   int // replica
	ids  []int
	turn int
}

// next makes the prompt of the next turn.
func (c *talk) next(n int) *prefixhash.Key {
	c.turn++
	if c.ids == nil {
		c.ids = series(0, 40)
	}
	c.ids = append(c.ids, series(1_000_000+n*1000+c.turn, 3)...)
	return keyOf(c.ids...)
}

// converse has goroutines lead the conversations on until stop is set, and returns
// when all are over. said gets each prompt that was answered.
func (x *fixture) converse(talks []*talk, stop *atomic.Bool, said func(n int, key *prefixhash.Key)) (wait func()) {
	const clients = 3
	var all sync.WaitGroup
	for client := range clients {
		all.Go(func() {
			rng := rand.New(rand.NewPCG(uint64(client), 8))
			for !stop.Load() {
				n := rng.IntN(len(talks)/clients)*clients + client
				c := talks[n]
				key := c.next(n)
				_, a := x.index.Route(x.now, key, x.cands[c.at:c.at+1], &x.rule, nil)
				a.FirstOutput(x.now)
				a.Finish(x.now, Served, 0)
				said(n, key)
				time.Sleep(10 * time.Microsecond) // a replica where too much changes is left out: see changesMost
			}
		})
	}
	return all.Wait
}

func newTalks(n, replicas int) []*talk {
	talks := make([]*talk, n)
	for i := range talks {
		talks[i] = &talk{at: i % replicas}
	}
	return talks
}

// TestSnapshotAmidRequests: what was confirmed before the snapshot began is in it,
// and nothing that was never sent.
func TestSnapshotAmidRequests(t *testing.T) {
	x := newFixture(2)
	x.index.Require(10_000_000)
	talks := newTalks(300, len(x.cands))
	for n, c := range talks {
		c.ids = nil
		_, a := x.index.Route(x.now, c.next(n), x.cands[c.at:c.at+1], &x.rule, nil)
		a.Finish(x.now, Served, 0)
	}
	for round := range 2 {
		for _, c := range talks { // so that prompts stay short
			c.ids = c.ids[:min(len(c.ids), 60)]
		}
		said := make([]atomic.Pointer[prefixhash.Key], len(talks))
		var stop atomic.Bool
		wait := x.converse(talks, &stop, func(n int, key *prefixhash.Key) { said[n].Store(key) })
		for i := 0; i < 200; i = countSaid(said) {
			runtime.Gosched()
		}
		before := make([]*prefixhash.Key, len(said))
		for n := range said {
			before[n] = said[n].Load()
		}
		snapshot := x.snapshot(t)
		stop.Store(true)
		wait()
		y := x.restart(t, snapshot)
		y.sound(t, nil)
		for n, key := range before {
			if key == nil {
				continue
			}
			matched := make([]int, len(x.cands))
			y.index.Lookup(y.now, key, y.cands, &y.rule, matched)
			if want := key.Bytes / BytesPerToken; matched[talks[n].at] != want {
				t.Fatalf("round %d: %d of %d tokens of conversation %d are in the snapshot", round, matched[talks[n].at], want, n)
			}
		}
	}
}

func countSaid(said []atomic.Pointer[prefixhash.Key]) (n int) {
	for i := range said {
		if said[i].Load() != nil {
			n++
		}
	}
	return n
}

// TestRestoreAmidRequests: requests that come while a snapshot is read neither
// lose what they brought nor what it holds.
func TestRestoreAmidRequests(t *testing.T) {
	for round := range 4 {
		x := newFixture(2)
		x.index.Require(10_000_000)
		talks := newTalks(1200, len(x.cands))
		var mu sync.Mutex
		var chains [][]prefixhash.Block
		last := make([]*prefixhash.Key, len(talks))
		for n, c := range talks {
			last[n] = c.next(n)
			chains = append(chains, last[n].Blocks)
			_, a := x.index.Route(x.now, last[n], x.cands[c.at:c.at+1], &x.rule, nil)
			a.Finish(x.now, Served, 0)
		}
		snapshot := x.snapshot(t)

		y := newFixture(2)
		y.index.Require(10_000_000)
		y.index.Expect()
		var stop atomic.Bool
		wait := y.converse(talks, &stop, func(n int, key *prefixhash.Key) {
			mu.Lock()
			defer mu.Unlock()
			last[n] = key
			chains = append(chains, key.Blocks)
		})
		restored, err := y.index.Restore(bytes.NewReader(snapshot), testKey, y.now)
		stop.Store(true)
		wait()
		if err != nil || restored.Blocks == 0 {
			t.Fatal(restored, err)
		}
		for n, key := range last {
			matched := make([]int, len(y.cands))
			y.index.Lookup(y.now, key, y.cands, &y.rule, matched)
			if want := key.Bytes / BytesPerToken; matched[talks[n].at] != want {
				t.Fatalf("round %d: %d of %d tokens of conversation %d are known", round, matched[talks[n].at], want, n)
			}
		}
		y.sound(t, chains)
	}
}

func TestRestoreIntoLess(t *testing.T) {
	x := newFixture(2)
	for i := range 400 {
		x.serve(keyOf(series(i, 10)...))
	}
	snapshot := x.snapshot(t)
	t.Run("bound", func(t *testing.T) {
		y := &fixture{fleet: NewFleet(), rule: x.rule, now: x.now}
		y.index = NewIndex(y.fleet, 1000)
		y.cands = []Candidate{{Replica: y.fleet.Replica("10.0.0.1:8000")}, {Replica: y.fleet.Replica("10.0.0.2:8000")}}
		if _, err := y.index.Restore(bytes.NewReader(snapshot), testKey, y.now); err != nil {
			t.Fatal(err)
		}
		y.sound(t, nil)
		for i, c := range y.cands {
			if n := c.Replica.order.blocks; n > 500 || n < 480 {
				t.Errorf("replica %d: %d blocks, want nearly 500", i, n)
			}
		}
		matched := make([]int, 2)
		if y.index.Lookup(y.now, keyOf(series(399, 10)...), y.cands, &y.rule, matched); matched[0]+matched[1] != 640 {
			t.Errorf("the newest prompt is not there: %v", matched)
		}
		if y.index.Lookup(y.now, keyOf(series(0, 10)...), y.cands, &y.rule, matched); matched[0]+matched[1] != 0 {
			t.Errorf("the oldest prompt is there: %v", matched)
		}
	})
	t.Run("capacity", func(t *testing.T) {
		const least = int(forgetLeast / testBlock)
		x := newFixture(2)
		for i := range 2 * least / 9 {
			x.serve(keyOf(series(i, 10)...))
		}
		y := newFixture(2)
		for _, c := range y.cands {
			c.Replica.ReportCapacity(100 * testBlock / BytesPerToken)
		}
		if _, err := y.index.Restore(bytes.NewReader(x.snapshot(t)), testKey, y.now); err != nil {
			t.Fatal(err)
		}
		y.sound(t, nil)
		for i, c := range y.cands {
			if n := c.Replica.order.blocks; n < least || n > least+20 {
				t.Errorf("replica %d: %d blocks kept, want %d", i, n, least)
			}
		}
	})
	t.Run("forgotten meanwhile", func(t *testing.T) {
		y := newFixture(2)
		y.index.Expect()
		for _, c := range y.cands {
			y.index.table(c.Replica)
		}
		y.cands[0].Replica.Forget()
		if _, err := y.index.Restore(bytes.NewReader(snapshot), testKey, y.now); err != nil {
			t.Fatal(err)
		}
		if forgotten, other := y.cands[0].Replica.order.blocks, y.cands[1].Replica.order.blocks; forgotten != 0 || other == 0 {
			t.Errorf("%d blocks of what was forgotten come back, %d of the other", forgotten, other)
		}
	})
}

func TestSnapshotKeepsTheFleet(t *testing.T) {
	x := newFixture(2)
	r := x.cands[0].Replica
	key := func(i int) *prefixhash.Key {
		k := keyOf(series(i, 20)...)
		k.Session = uint64(i + 1)
		return k
	}
	for i := range 60 {
		_, a := x.index.Route(x.now, key(i), x.cands, &x.rule, nil)
		a.Confirm(x.now, true)
		x.now = x.now.Add(100 * time.Millisecond)
		a.FirstOutput(x.now)
		a.Report(1280, 0)
		a.Finish(x.now, Served, 0)
	}
	r.Restarted()
	r.ReportCapacity(5000)
	x.index.Learn(7777, x.cands[1].Replica)
	before := x.fleet.Snapshot(x.now)
	snapshot := x.snapshot(t)

	y := newFixture(0)
	y.now = x.now.Add(10 * time.Hour)
	restored, err := y.index.Restore(bytes.NewReader(snapshot), testKey, y.now)
	if err != nil || !restored.Written.Equal(x.now) {
		t.Fatal(restored, err)
	}
	if after := y.fleet.Snapshot(y.now); fmt.Sprint(after) != fmt.Sprint(before) {
		t.Errorf("after: %+v\nbefore: %+v", after, before)
	}
	for _, s := range before {
		y.cands = append(y.cands, Candidate{Replica: y.fleet.Find(s.Address)})
	}
	matched := make([]int, 2)
	c := y.index.Lookup(y.now, &prefixhash.Key{Session: key(59).Session, Bytes: 100}, y.cands, &y.rule, matched)
	if c.Reason != Session {
		t.Errorf("session forgotten: %+v", c)
	}
	if c := y.index.Lookup(y.now, &prefixhash.Key{Previous: 7777, Bytes: 100}, y.cands, &y.rule, matched); c.Reason != Session || c.Candidate != 1 {
		t.Errorf("stored response forgotten: %+v", c)
	}
	y.serve(key(100)) // looks for who has been gone for an hour
	if y.fleet.Find(before[0].Address) == nil || y.fleet.Find(before[1].Address) == nil {
		t.Error("the time without a gateway counts as time without a request")
	}

	// A second index of the fleet does not bring everything again.
	other := NewIndex(y.fleet, 1000)
	measured := y.fleet.Snapshot(y.now)[0].SpeedMeasurements
	if _, err := other.Restore(bytes.NewReader(snapshot), "another", y.now); !errors.Is(err, ErrForeign) {
		t.Errorf("foreign index: %v", err)
	}
	if got := y.fleet.Snapshot(y.now)[0].SpeedMeasurements; got != measured {
		t.Errorf("%g measurements, were %g", got, measured)
	}
}

// Two indexes have their own parts in one file.
func TestSnapshotOfTwoIndexes(t *testing.T) {
	x := newFixture(2)
	other := *x
	other.index = NewIndex(x.fleet, 1_000_000)
	for i := range 50 {
		x.serve(keyOf(series(i, 5)...))
		other.serve(keyOf(series(1000+i, 5)...))
	}
	var file bytes.Buffer
	notes := json.RawMessage(`{"drains":{}}`)
	if err := x.fleet.WriteSnapshot(&file, x.now, map[string]*Index{"a": x.index, "b": other.index}, notes); err != nil {
		t.Fatal(err)
	}
	for key, first := range map[string]int{"a": 0, "b": 1000} {
		y := newFixture(2)
		restored, err := y.index.Restore(bytes.NewReader(file.Bytes()), key, x.now)
		if err != nil || restored.Blocks != 250 || string(restored.Notes) != string(notes) {
			t.Fatalf("%s: %+v, %v", key, restored, err)
		}
		y.sound(t, nil)
		for i := range 2000 {
			matched := make([]int, 2)
			y.index.Lookup(y.now, keyOf(series(i, 5)...), y.cands, &y.rule, matched)
			if want := i >= first && i < first+50; (matched[0]+matched[1] == 320) != want {
				t.Fatalf("%s: prompt %d: %v", key, i, matched)
			}
		}
	}
}

// Two indexes of one fleet are restored into the same replicas: the second finds
// more there than it has set aside room for.
func TestRestoreOfTwoIndexes(t *testing.T) {
	const prompts = 3 * slotsAtOnce
	x := newFixture(2)
	other := *x
	other.index = NewIndex(x.fleet, 1_000_000)
	for i := range prompts {
		x.serve(keyOf(series(i, 3)...))
		other.serve(keyOf(series(10_000+i, 3)...))
	}
	var file bytes.Buffer
	if err := x.fleet.WriteSnapshot(&file, x.now, map[string]*Index{"a": x.index, "b": other.index}, nil); err != nil {
		t.Fatal(err)
	}
	y := newFixture(2)
	second := *y
	second.index = NewIndex(y.fleet, 1_000_000)
	for _, f := range []struct {
		fixture *fixture
		key     string
		first   int
	}{{y, "a", 0}, {&second, "b", 10_000}} {
		restored, err := f.fixture.index.Restore(bytes.NewReader(file.Bytes()), f.key, y.now)
		if err != nil || restored.Blocks != 3*prompts {
			t.Fatalf("%s: %+v, %v", f.key, restored, err)
		}
		y.sound(t, nil)
	}
	for i := range prompts {
		for _, f := range []struct {
			fixture *fixture
			first   int
		}{{y, 0}, {&second, 10_000}} {
			matched := make([]int, 2)
			f.fixture.index.Lookup(y.now, keyOf(series(f.first+i, 3)...), y.cands, &y.rule, matched)
			if matched[0]+matched[1] != 3*testBlock/BytesPerToken {
				t.Fatalf("prompt %d: %v", f.first+i, matched)
			}
		}
	}
}

// Reloads may restore an index into the same replicas again and again: the places
// of what they have forgotten meanwhile are used again.
func TestRestoreAgain(t *testing.T) {
	x := newFixture(2)
	for i := range 1000 {
		x.serve(keyOf(series(i, 3)...))
	}
	snapshot := x.snapshot(t)
	y := newFixture(2)
	for round := range 50 {
		y.index = NewIndex(y.fleet, 1_000_000)
		y.serve(keyOf(series(10_000+round, 3)...))
		y.index.Expect()
		if restored, err := y.index.Restore(bytes.NewReader(snapshot), testKey, y.now); err != nil || restored.Blocks == 0 {
			t.Fatal(restored, err)
		}
		y.sound(t, nil)
		for i, c := range y.cands {
			if n := c.Replica.order.runs.size; n > 1000+round {
				t.Fatalf("round %d, replica %d: room for %d runs", round, i, n)
			}
			c.Replica.Forget()
		}
	}
}

// What is sent and withdrawn while a snapshot is read ends as if it had come after.
func TestRestoreAmidWithdrawals(t *testing.T) {
	for _, test := range []struct {
		name   string
		shared bool // prompts begin like those of the snapshot
	}{{"prompts/apart", false}, {"prompts/shared", true}} {
		rng := rand.New(rand.NewPCG(1, 9))
		all := prompts(rng, 800)
		before, since := all[:200], all[200:] // of which more stay than there are slots set aside
		if !test.shared {
			since = prompts(rng, 600)
			all = append(before, since...)
		}
		route := func(y *fixture, chain []prefixhash.Block) *Attempt {
			_, a := y.index.Route(y.now, &prefixhash.Key{Blocks: chain, Bytes: len(chain) * testBlock, Stream: true}, y.cands, &y.rule, nil)
			return a
		}
		x := newFixture(1)
		for _, chain := range before {
			route(x, chain).Finish(x.now, Served, 0)
		}
		snapshot := x.snapshot(t)
		early, late := newFixture(1), x.restart(t, snapshot)
		early.index.Expect()
		for _, y := range []*fixture{early, late} {
			rng := rand.New(rand.NewPCG(2, 2))
			var open []*Attempt
			for _, chain := range since {
				open = append(open, route(y, chain))
				for len(open) > 0 && rng.IntN(2) == 0 {
					i := rng.IntN(len(open))
					open[i].Finish(y.now, []Outcome{Served, Lost, Aborted}[rng.IntN(3)], 0)
					open = slices.Delete(open, i, i+1)
				}
			}
			for _, a := range open {
				a.Finish(y.now, Lost, 0)
			}
		}
		if _, err := early.index.Restore(bytes.NewReader(snapshot), testKey, early.now); err != nil {
			t.Fatal(err)
		}
		early.sound(t, all)
		late.sound(t, all)
		matches := late.matches(all)
		for i, got := range early.matches(all) {
			// Whoever did not know yet that a block is there takes it back with the prompt.
			if want := matches[i][0]; got[0] > want || got[0] < want && !test.shared {
				t.Fatalf("%s: prompt %d: %d tokens, want %d", test.name, i, got[0], want)
			}
		}
	}
}

func TestRestoreRefuses(t *testing.T) {
	x := newFixture(2)
	for i := range 3 {
		k := keyOf(series(i, 2)...)
		k.Session = uint64(i + 1)
		x.serve(k)
	}
	_, _ = x.route(keyOf(series(9, 2)...))
	snapshot := x.snapshot(t)
	refused := func(name string, file []byte, now time.Time) {
		t.Helper()
		y := newFixture(0)
		if _, err := y.index.Restore(bytes.NewReader(file), testKey, now); err == nil {
			t.Errorf("%s: taken", name)
		}
		if len(y.fleet.Snapshot(now)) > 0 || len(*y.index.tables.Load()) > 0 {
			t.Errorf("%s: something changed", name)
		}
	}
	for i := range snapshot {
		refused(fmt.Sprintf("truncated at %d", i), snapshot[:i], x.now)
		for _, flip := range []byte{1, 0x80, 0xff} {
			file := slices.Clone(snapshot)
			file[i] ^= flip
			refused(fmt.Sprintf("corrupt at %d", i), file, x.now)
		}
	}
	refused("longer", append(slices.Clone(snapshot), 0), x.now)
	refused("old", snapshot, x.now.Add(SnapshotAge+time.Second))
	refused("of the future", snapshot, x.now.Add(-SnapshotAge-time.Second))
	refused("another version", resealed(append([]byte("prefix_affinity\x02"), snapshot[16:]...)), x.now)
	y := newFixture(2)
	if _, err := y.index.Restore(bytes.NewReader(snapshot), "another key", x.now); !errors.Is(err, ErrForeign) {
		t.Errorf("foreign: %v", err)
	}
}

// resealed returns a snapshot with the checksum that it should have.
func resealed(snapshot []byte) []byte {
	body := snapshot[:len(snapshot)-sumBytes]
	return binary.LittleEndian.AppendUint64(slices.Clone(body), xxhash.Sum64(body))
}

// FuzzRestore reads anything whose checksum is right, amid requests.
func FuzzRestore(f *testing.F) {
	x := newFixture(2)
	for i := range 6 {
		k := keyOf(append(series(0, 3), series(1+i, 2)...)...)
		k.Session = uint64(i + 1)
		x.serve(k)
	}
	_, a := x.route(keyOf(append(series(0, 3), series(9, 2)...)...))
	a.Confirm(x.now, true)
	f.Add(x.snapshot(f))
	f.Add(newFixture(1).snapshot(f))
	twice := x.snapshot(f)
	twice = twice[:len(twice)-sumBytes]
	tables := bytes.Index(twice, []byte{chunkTable, 4, 0, 0, 0})
	f.Add(append(append(twice, twice[tables:]...), make([]byte, sumBytes)...))
	f.Fuzz(func(t *testing.T, file []byte) {
		if len(file) < len(snapshotMark)+sumBytes {
			return
		}
		file = resealed(file)
		y := &fixture{fleet: NewFleet(), rule: x.rule, now: x.now}
		y.index = NewIndex(y.fleet, 64)
		for i := range 2 {
			y.cands = append(y.cands, Candidate{Replica: y.fleet.Replica(fmt.Sprintf("10.0.0.%d:8000", i+1))})
		}
		y.index.Expect()
		_, in := y.route(keyOf(append(series(0, 3), series(2, 2)...)...))
		_, _ = y.index.Restore(bytes.NewReader(file), testKey, y.now)
		y.sound(t, nil)
		in.Finish(y.now, Served, 0)
		for i := range 12 {
			if c := y.serve(keyOf(append(series(0, 3), series(i, 2)...)...)); c.Candidate < 0 {
				t.Fatal("nothing chosen")
			}
		}
		y.sound(t, nil)
		for _, s := range y.fleet.Snapshot(y.now) {
			if s.Blocks > 64 || !(s.TokensPerSecond > 0) || !(s.PendingPrefillTokens >= 0) {
				t.Errorf("%+v", s)
			}
		}
		y.snapshot(t)
	})
}
