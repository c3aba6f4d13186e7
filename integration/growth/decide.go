package main

import (
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prefix-affinity/caddy/integration/measure"
	"github.com/prefix-affinity/caddy/prefixhash"
	"github.com/prefix-affinity/caddy/selector/affinity"
)

const path = "/v1/chat/completions"

var hasher = prefixhash.New(prefixhash.Config{Seed: 1})

// router is an index before a fleet.
type router struct {
	index   *affinity.Index
	cands   []affinity.Candidate
	rule    affinity.Rule
	now     time.Time
	matched []int
	keys    []*prefixhash.Key // that it knows
	next    atomic.Int64
	fresh   []prefixhash.Block
}

func newRouter(replicas int) *router {
	fleet := affinity.NewFleet()
	x := &router{index: affinity.NewIndex(fleet, 1<<30), rule: affinity.Rule{MinMatchTokens: 64}, now: time.Now(), matched: make([]int, replicas)}
	for i := range replicas {
		x.cands = append(x.cands, affinity.Candidate{Replica: fleet.Replica(fmt.Sprintf("10.0.%d.%d:8000", i/250, i%250))})
	}
	return x
}

// serve decides and takes in an answer that comes at once.
func (x *router) serve(key *prefixhash.Key, cands []affinity.Candidate) {
	_, attempt := x.index.Route(x.now, key, cands, &x.rule, nil)
	attempt.Confirm(x.now, true)
	attempt.FirstOutput(x.now)
	attempt.Finish(x.now, affinity.Served, 0)
}

// learn stores prompts, each at another replica than the one before.
func (x *router) learn(key *prefixhash.Key) {
	at := len(x.keys) % len(x.cands)
	x.serve(key, x.cands[at:at+1])
	x.keys = append(x.keys, key)
}

func (x *router) known() *prefixhash.Key {
	return x.keys[int(x.next.Add(1))%len(x.keys)]
}

func (x *router) match()  { x.index.Lookup(x.now, x.known(), x.cands, &x.rule, x.matched) }
func (x *router) decide() { x.serve(x.known(), x.cands) }

// decideNew decides for a prompt that nobody has seen.
func (x *router) decideNew() {
	key := *x.known()
	x.fresh = append(x.fresh[:0], key.Blocks...)
	n := uint64(x.next.Load()) << 40
	for i := range x.fresh {
		x.fresh[i].Hash = mix(x.fresh[i].Hash + n)
	}
	key.Blocks = x.fresh
	x.serve(&key, x.cands)
}

// promptOf makes the key of a prompt of blocks, of which all start with the same
// eighth.
func promptOf(number, blocks int) *prefixhash.Key {
	key := &prefixhash.Key{Blocks: make([]prefixhash.Block, blocks), Bytes: blocks * 256, Stream: true, Judged: true}
	hash := uint64(1)
	for i := range key.Blocks {
		if i == blocks/8 {
			hash += uint64(number) << 32
		}
		hash = mix(hash + uint64(i))
		key.Blocks[i] = prefixhash.Block{Hash: hash, End: uint32(i+1) * 256}
	}
	return key
}

func mix(x uint64) uint64 { // splitmix64
	x += 0x9e3779b97f4a7c15
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}

// row is what a curve's points are measured of.
type row struct {
	name   string
	points []func()
}

// curvesOf times the points of each row in turns. A function is called so often
// that it takes some 100 us: the clock doesn't matter then, and the scheduler
// seldom does.
func curvesOf(rows ...row) []curve {
	curves := make([]curve, 0, len(rows))
	for _, r := range rows {
		times := make([]int, 0, len(r.points))
		repeated := make([]func(), 0, len(r.points))
		for _, f := range r.points {
			once := measure.Best(func() {}, func([]time.Duration) bool { return true }, f)[0]
			n := 1 + int(100*time.Microsecond/max(once, 1))
			times, repeated = append(times, n), append(repeated, func() {
				for range n {
					f()
				}
			})
		}
		c := curve{name: r.name}
		for p, best := range measure.Best(func() {}, func([]time.Duration) bool { return false }, repeated...) {
			c.microseconds = append(c.microseconds, 1e6*best.Seconds()/float64(times[p]))
		}
		curves = append(curves, c)
	}
	return curves
}

func byReplicas() *figure {
	f := &figure{title: "Replicas, for prompts of 32 KB"}
	var match, decide []func()
	for n := 2; n <= 512; n *= 2 {
		x := newRouter(n)
		for c := range max(256, n) {
			x.learn(promptOf(c, 128))
		}
		f.x, match, decide = append(f.x, float64(n)), append(match, x.match), append(decide, x.decide)
	}
	f.curves = curvesOf(row{"match", match}, row{"decision", decide})
	return f
}

func byBlocks(most int) *figure {
	f := &figure{title: "Blocks stored, for prompts of 32 KB, 8 replicas"}
	var match, decide []func()
	for n := 1000; n <= most; n *= 10 {
		x := newRouter(8)
		for c := range n / 128 {
			x.learn(promptOf(c, 128))
		}
		for c := range x.keys { // prompts from all over the index
			if step := len(x.keys) / 500; step > 1 && c < 500 {
				x.keys[c] = x.keys[c*step]
			}
		}
		x.keys = x.keys[:min(len(x.keys), 500)]
		f.x, match, decide = append(f.x, float64(n)), append(match, x.match), append(decide, x.decide)
	}
	f.curves = curvesOf(row{"match", match}, row{"decision", decide})
	return f
}

func byLength() *figure {
	f := &figure{title: "Prompt bytes, 8 replicas"}
	var key, match, decide, decideNew []func()
	for n := 1 << 10; n <= 4<<20; n *= 4 {
		x := newRouter(8)
		var body []byte
		for c := range 8 {
			body = measure.Chat{Bytes: n, Conversation: uint64(c)}.JSON()
			k := &prefixhash.Key{}
			hasher.Sum(k, path, body, true, "")
			x.learn(k)
		}
		var k prefixhash.Key
		f.x, match, decide = append(f.x, float64(len(body))), append(match, x.match), append(decide, x.decide)
		decideNew = append(decideNew, x.decideNew)
		key = append(key, func() { hasher.Sum(&k, path, body, true, "") })
	}
	f.curves = curvesOf(row{"key", key}, row{"match", match}, row{"decision", decide}, row{"new prompt", decideNew})
	return f
}

func byConcurrency() *figure {
	f := &figure{title: "Goroutines, for prompts of 32 KB, 8 replicas"}
	x := newRouter(8)
	for c := range 2000 {
		x.learn(promptOf(c, 128))
	}
	var decide []func()
	for n := 1; n <= 64; n *= 2 {
		f.x = append(f.x, float64(n))
		decide = append(decide, func() {
			var workers sync.WaitGroup
			for range n {
				workers.Go(func() {
					for range 256 / n {
						x.decide()
					}
				})
			}
			workers.Wait()
		})
	}
	f.curves = curvesOf(row{"256 decisions", decide})
	return f
}
