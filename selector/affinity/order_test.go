package affinity

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/prefix-affinity/caddy/prefixhash"
)

const testBlock = 256

// chainOf makes the chain of a prompt of numbered blocks.
func chainOf(ids []int) []prefixhash.Block {
	chain := make([]prefixhash.Block, len(ids))
	h := uint64(0)
	for i, id := range ids {
		h = mix(h ^ uint64(id))
		chain[i] = prefixhash.Block{Hash: h, End: uint32(i+1) * testBlock}
	}
	return chain
}

// prompts draws prompts that share prefixes of all lengths.
func prompts(rng *rand.Rand, n int) [][]prefixhash.Block {
	var ids [][]int
	for range n {
		var p []int
		if len(ids) > 0 && rng.IntN(5) > 0 {
			from := ids[rng.IntN(len(ids))]
			p = slices.Clone(from[:rng.IntN(len(from)+1)])
		}
		for range rng.IntN(6) {
			p = append(p, rng.IntN(1<<30))
		}
		if len(p) == 0 {
			p = []int{rng.IntN(1 << 30)}
		}
		ids = append(ids, p)
	}
	out := make([][]prefixhash.Block, n)
	for i := range ids {
		out[i] = chainOf(ids[i])
	}
	return out
}

// naive is the stack distance as its definition has it, block by block.
type naive struct {
	owner map[uint64]*naiveRun
	runs  []*naiveRun
	tick  int
}

type naiveRun struct {
	chain []prefixhash.Block
	tick  int
	phase phase
}

func (n *naive) send(chain []prefixhash.Block) *naiveRun {
	n.tick++
	r := &naiveRun{chain: chain, tick: n.tick, phase: waiting}
	n.runs = append(n.runs, r)
	for _, b := range chain {
		n.owner[b.Hash] = r
	}
	return r
}

func (n *naive) end(r *naiveRun) {
	n.tick++
	r.phase, r.tick = done, n.tick
}

func (n *naive) owned(r *naiveRun) (bytes int64) {
	for _, b := range r.chain {
		if n.owner[b.Hash] == r {
			bytes += testBlock
		}
	}
	return bytes
}

// distances returns the distance of every leading known block.
func (n *naive) distances(chain []prefixhash.Block) (far []int64) {
	var last *naiveRun
	var d int64
	for _, b := range chain {
		r := n.owner[b.Hash]
		if r == nil {
			break
		}
		if r != last {
			last, d = r, 0
			for _, other := range n.runs {
				if other == r {
					continue
				}
				switch {
				case r.phase == waiting && other.phase == waiting && other.tick > r.tick,
					r.phase == done && other.phase != done,
					r.phase == done && other.tick > r.tick:
					d += n.owned(other)
				}
			}
		}
		d += testBlock
		far = append(far, d)
	}
	return far
}

func TestDistances(t *testing.T) {
	for seed := range uint64(25) {
		rng := rand.New(rand.NewPCG(seed, 1))
		model := &naive{owner: map[uint64]*naiveRun{}}
		r := NewFleet().Replica("a")
		table := newTable()
		chains := prompts(rng, 120)
		type pair struct {
			a *Attempt
			n *naiveRun
		}
		var live []pair
		for step, chain := range chains {
			spans := table.spans(nil, &r.order, chain, rng.IntN(8))
			far := model.distances(chain)
			if known(spans) != len(far) {
				t.Fatalf("seed %d step %d: %d blocks known, want %d", seed, step, known(spans), len(far))
			}
			for _, s := range spans {
				for i := s.from; i < s.to; i++ {
					end := int64(chain[i].End)
					if s.far+end != far[i] {
						t.Fatalf("seed %d step %d block %d: at %d, want %d", seed, step, i, s.far+end, far[i])
					}
				}
			}
			a := &Attempt{replica: r, mark: &mark{table: table}}
			r.send(table, a, chain, rng.IntN(8), 1<<30, nil)
			r.confirm(a)
			live = append(live, pair{a, model.send(chain)})
			for range rng.IntN(3) {
				i := rng.IntN(len(live))
				p := live[i]
				if p.n.phase == waiting && rng.IntN(4) > 0 {
					r.run([]*Attempt{p.a})
					p.n.phase = running
					continue
				}
				r.end(p.a)
				model.end(p.n)
				live = slices.Delete(live, i, i+1)
				if len(live) == 0 {
					break
				}
			}
		}
		var want int64
		for _, run := range model.runs {
			want += model.owned(run)
		}
		if got := r.order.used + r.order.running; got != want || r.order.blocks != int(want)/testBlock {
			t.Fatalf("seed %d: %d bytes in %d blocks, want %d", seed, got, r.order.blocks, want)
		}
	}
}

// TestWithdraw: a block is known while someone confirmed it or an attempt that
// may still be confirmed carries it, and not otherwise.
func TestWithdraw(t *testing.T) {
	for seed := range uint64(120) {
		rng := rand.New(rand.NewPCG(seed, 2))
		r := NewFleet().Replica("a")
		table := newTable()
		confirmed := map[uint64]bool{}
		pending := map[*Attempt][]prefixhash.Block{}
		check := func(step int, chain []prefixhash.Block) {
			want := 0
			for _, b := range chain {
				held := confirmed[b.Hash]
				for _, c := range pending {
					held = held || slices.Contains(c, b)
				}
				if !held {
					break
				}
				want++
			}
			if got := known(table.spans(nil, &r.order, chain, 0)); got != want {
				t.Fatalf("seed %d step %d: %d of %d blocks known, want %d", seed, step, got, len(chain), want)
			}
		}
		var all []*Attempt
		chains := prompts(rng, 60)
		for step, chain := range chains {
			a := &Attempt{replica: r, mark: &mark{table: table}}
			r.send(table, a, chain, 0, 1<<30, nil)
			pending[a] = chain
			all = append(all, a)
			for range rng.IntN(4) {
				i := rng.IntN(len(all))
				a := all[i]
				switch rng.IntN(4) {
				case 0:
					r.run([]*Attempt{a})
				case 1:
					r.confirm(a)
					for _, b := range pending[a] {
						confirmed[b.Hash] = true
					}
					delete(pending, a)
				default:
					if _, ok := pending[a]; ok {
						r.withdraw(a)
						delete(pending, a)
					} else {
						r.end(a)
					}
					all = slices.Delete(all, i, i+1)
				}
				if len(all) == 0 {
					break
				}
			}
			check(step, chains[rng.IntN(step+1)])
			check(step, chain)
		}
		for _, a := range all {
			if _, ok := pending[a]; ok {
				r.withdraw(a)
				delete(pending, a)
			} else {
				r.end(a)
			}
		}
		for _, chain := range chains {
			check(-1, chain)
		}
		if len(r.provisional) > 0 || r.order.running != 0 || r.order.wait != 0 || r.order.blocks != len(confirmed) {
			t.Fatalf("seed %d: %d provisional, %d running, %d waiting, %d blocks for %d confirmed", seed, len(r.provisional), r.order.running, r.order.wait, r.order.blocks, len(confirmed))
		}
	}
}

// TestBound: however much is in flight, no more blocks are stored than allowed,
// and what is left of a chain is its start.
func TestBound(t *testing.T) {
	const limit = 50
	rng := rand.New(rand.NewPCG(3, 3))
	r := NewFleet().Replica("a")
	table := newTable()
	var live []*Attempt
	for step, chain := range prompts(rng, 5000) {
		a := &Attempt{replica: r, mark: &mark{table: table}}
		r.send(table, a, chain, 0, limit, nil)
		if r.order.blocks > limit {
			t.Fatalf("step %d: %d blocks, limit %d", step, r.order.blocks, limit)
		}
		if n := known(table.spans(nil, &r.order, chain, 0)); n < len(chain) && r.order.blocks < limit {
			t.Fatalf("step %d: %d of %d blocks stored though there is room", step, n, len(chain))
		}
		live = append(live, a)
		for len(live) > rng.IntN(40) {
			i := rng.IntN(len(live))
			if rng.IntN(3) == 0 {
				r.withdraw(live[i])
			} else {
				r.confirm(live[i])
				r.end(live[i])
			}
			live = slices.Delete(live, i, i+1)
		}
	}
	entries, filled := 0, 0
	for _, s := range table.dir {
		entries += len(s.entries)
		filled += s.filled
	}
	if entries > 2*limit+smallSegment {
		t.Errorf("%d entries for %d blocks", entries, limit)
	}
	if r.order.runs.size > 2*limit {
		t.Errorf("%d runs for %d blocks", r.order.runs.size, limit)
	}
}

func TestTable(t *testing.T) {
	o := &order{}
	table := newTable()
	slot := o.take()
	o.cut(slot, 0, 1<<31, 0)
	const n = 120_000
	for i := range uint64(n) {
		table.put(o, mix(i), slot)
	}
	for i := range uint64(n) {
		if table.owner(o, prefixhash.Block{Hash: mix(i), End: 1}) != slot {
			t.Fatalf("hash %d lost", i)
		}
	}
	if table.owner(o, prefixhash.Block{Hash: mix(n), End: 1}) != 0 {
		t.Error("a hash that was never put is found")
	}
	bytes := 0
	seen := map[*segment]bool{}
	for _, s := range table.dir {
		if !seen[s] {
			bytes += 12 * len(s.entries)
			seen[s] = true
		}
	}
	if bytes > n*12*2 {
		t.Errorf("%d bytes for %d entries", bytes, n)
	}
}

// What a cache has lost long ago is forgotten, but not what it would hold if it
// were larger than believed.
func TestForget(t *testing.T) {
	const least = int(forgetLeast / testBlock)
	for _, test := range []struct {
		name         string
		blocks, kept int
	}{
		{"capacity/small", 100, least},
		{"capacity/large", least, least * 3 / 2},
	} {
		r := NewFleet().Replica("a")
		table := newTable()
		r.capacity = int64(test.blocks) * testBlock
		for i := range 2 * least {
			a := &Attempt{replica: r, mark: &mark{table: table}}
			r.send(table, a, chainOf([]int{i}), 0, 1<<30, nil)
			r.confirm(a)
			r.end(a)
		}
		if r.order.blocks < test.kept || r.order.blocks > test.kept+2 {
			t.Errorf("%s: %d blocks kept, want %d", test.name, r.order.blocks, test.kept)
		}
	}
}

func ExampleReason() {
	fmt.Println(Affinity, Overflow, Unhealthy, Cold, NoKey, Session)
	// Output: affinity overflow unhealthy cold no_key session
}

var now0 = time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)

// However alike the hashes of a segment begin, they spread over it.
func TestSegmentSpread(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 1))
	for _, same := range []int{0, 8, 14, 20} { // first bits, of 40
		table, o := newTable(), &order{}
		slot := o.take()
		for range 50_000 {
			table.put(o, 0x5a5a5a5a_5a5a5a5a&^(^uint64(0)>>same)|rng.Uint64()>>same, slot)
		}
		entries, strayed := 0, 0
		var last *segment
		for _, s := range table.dir {
			if s == last {
				continue
			}
			last = s
			for i, e := range s.entries {
				if e.slot != 0 {
					entries++
					strayed += (i - s.home(e.hash()) + len(s.entries)) % len(s.entries)
				}
			}
		}
		if mean := float64(strayed) / float64(entries); mean > 2.5 { // 1.5 where they are three quarters full, with linear probing
			t.Errorf("%d bits alike: entries are %.1f places from home in the mean", same, mean)
		}
	}
}
