package engine

import (
	"math/rand/v2"
	"slices"
	"testing"
)

// naive is the cache's behaviour, spelled out: chains in use, and blocks not in
// use in order, most recently used first.
type naive struct {
	capacity int
	pins     map[uint64]int
	idle     []uint64
	reserved int
}

func (n *naive) has(h uint64) bool { return n.pins[h] > 0 || slices.Contains(n.idle, h) }

func (n *naive) match(chain []uint64) (m int) {
	for m < len(chain) && n.has(chain[m]) {
		m++
	}
	return m
}

func (n *naive) used() int { return len(n.pins) + n.reserved }

func (n *naive) pin(h uint64) {
	n.pins[h]++
	n.idle = slices.DeleteFunc(n.idle, func(o uint64) bool { return o == h })
}

func (n *naive) evict() {
	for len(n.idle) > 0 && n.used()+len(n.idle) > n.capacity {
		n.idle = n.idle[:len(n.idle)-1]
	}
}

func (n *naive) admit(chain []uint64, total int) (int, bool) {
	m := n.match(chain)
	after := n.used() + total - m
	for _, h := range chain[:m] {
		if n.pins[h] == 0 {
			after++
		}
	}
	if after > n.capacity {
		return 0, false
	}
	for _, h := range chain[:m] {
		n.pin(h)
	}
	n.reserved += total - m
	n.evict()
	return m, true
}

func (n *naive) fill(chain []uint64) {
	for _, h := range chain {
		n.pin(h)
		n.reserved--
	}
	n.evict()
}

func (n *naive) release(chain []uint64, reserved int) {
	n.reserved -= reserved
	for _, h := range slices.Backward(chain) {
		if n.pins[h]--; n.pins[h] == 0 {
			delete(n.pins, h)
			n.idle = slices.Insert(n.idle, 0, h)
		}
	}
}

// Requests of a random tree of prompts come, are prefilled and end in any
// order; after every step the cache holds what the naive one does.
func TestCacheAgainstNaive(t *testing.T) {
	for seed := range uint64(20) {
		r := rand.New(rand.NewPCG(seed, 0)) // #nosec G404 -- a test
		capacity := 20 + r.IntN(60)
		c, n := newCache(capacity), &naive{capacity: capacity, pins: map[uint64]int{}}
		type running struct {
			chain          []uint64
			matched, total int
			filled         bool
		}
		var now []running
		for step := range 2000 {
			switch i := r.IntN(max(len(now), 1)); {
			case len(now) == 0 || r.IntN(3) == 0: // one more: 3 heads, 4 middles each, 8 ends each
				a, b, d := r.Uint64N(3), r.Uint64N(4), r.Uint64N(8)
				var chain []uint64
				for k := range uint64(2 + r.IntN(12)) {
					switch {
					case k < 3:
						chain = append(chain, 1000*(a+1)+k)
					case k < 6:
						chain = append(chain, 10_000*(10*a+b+1)+k)
					default:
						chain = append(chain, 1_000_000*(100*a+10*b+d+1)+k)
					}
				}
				total := len(chain) + r.IntN(4)
				m, ok := c.admit(chain, total)
				if wantM, wantOK := n.admit(chain, total); m != wantM || ok != wantOK {
					t.Fatalf("seed %d, step %d: admit gives %d, %t instead of %d, %t", seed, step, m, ok, wantM, wantOK)
				}
				if ok {
					now = append(now, running{chain: chain, matched: m, total: total})
				}
			case now[i].filled:
				q := now[i]
				c.release(q.chain, q.total-len(q.chain))
				n.release(q.chain, q.total-len(q.chain))
				now = slices.Delete(now, i, i+1)
			case r.IntN(4) == 0: // aborted in its prefill
				q := now[i]
				c.release(q.chain[:q.matched], q.total-q.matched)
				n.release(q.chain[:q.matched], q.total-q.matched)
				now = slices.Delete(now, i, i+1)
			default:
				c.fill(now[i].chain[now[i].matched:])
				n.fill(now[i].chain[now[i].matched:])
				now[i].filled = true
			}
			if c.pinned != len(n.pins) || c.reserved != n.reserved || c.idle != len(n.idle) {
				t.Fatalf("seed %d, step %d: pinned, reserved, idle are %d, %d, %d instead of %d, %d, %d",
					seed, step, c.pinned, c.reserved, c.idle, len(n.pins), n.reserved, len(n.idle))
			}
			if c.pinned+c.reserved+c.idle > capacity {
				t.Fatalf("seed %d, step %d: over the capacity", seed, step)
			}
			var order []uint64
			for b := c.lru.next; b != &c.lru; b = b.next {
				order = append(order, b.hash)
			}
			if !slices.Equal(order, n.idle) {
				t.Fatalf("seed %d, step %d: idle blocks %v instead of %v", seed, step, order, n.idle)
			}
		}
	}
}

func TestCacheEvictsTailsFirst(t *testing.T) {
	c := newCache(4)
	old, young := []uint64{1, 2, 3}, []uint64{10, 11}
	for _, chain := range [][]uint64{old, young} {
		if _, ok := c.admit(chain, len(chain)); !ok {
			t.Fatal("not admitted")
		}
		c.fill(chain)
		c.release(chain, 0)
	}
	if m := c.match(old); m != 2 {
		t.Errorf("%d blocks of the old chain are left instead of its first 2", m)
	}
	if m := c.match(young); m != 2 {
		t.Errorf("%d blocks of the young chain are left instead of 2", m)
	}
}
