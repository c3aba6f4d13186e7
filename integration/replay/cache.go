package main

import "slices"

// A cache is the KV memory of a replica in blocks: requests that run pin theirs,
// the rest is an LRU prefix cache that gives up the ends of prompts first.
type cache struct {
	size int
	lru  lru     // cached and not pinned
	pins []int32 // by block
	held int     // blocks pinned
	anon int     // pinned memory that is not shareable: output, tails, what is not prefilled yet
}

func newCache(blocks, size int) *cache {
	return &cache{size: size, lru: newLRU(blocks), pins: make([]int32, blocks)}
}

func (c *cache) has(b int32) bool { return c.pins[b] > 0 || c.lru.in[b] }

// match counts the leading blocks that are cached.
func (c *cache) match(blocks []int32) int {
	for i, b := range blocks {
		if !c.has(b) {
			return i
		}
	}
	return len(blocks)
}

func (c *cache) pin(b int32) {
	if c.pins[b] == 0 {
		c.lru.remove(b)
		c.held++
	}
	c.pins[b]++
}

// admit pins what is cached of a prompt and reserves the rest of total blocks,
// if they fit beside what is pinned. A request larger than the memory is let in
// alone.
func (c *cache) admit(blocks []int32, total int) (matched int, ok bool) {
	matched = c.match(blocks)
	fresh := total - matched
	for _, b := range blocks[:matched] {
		if c.pins[b] == 0 {
			fresh++
		}
	}
	if c.held+c.anon+fresh > c.size && c.held+c.anon > 0 {
		return matched, false
	}
	for _, b := range blocks[:matched] {
		c.pin(b)
	}
	c.anon += total - matched
	c.trim()
	return matched, true
}

// filled turns what was reserved for blocks that are now prefilled into cache.
func (c *cache) filled(blocks []int32) {
	for _, b := range blocks {
		c.pin(b)
	}
	c.anon -= len(blocks)
	c.trim()
}

// release unpins an ended request and its anonymous blocks.
func (c *cache) release(blocks []int32, anon int) {
	c.anon -= anon
	for _, b := range slices.Backward(blocks) {
		if c.pins[b]--; c.pins[b] == 0 {
			c.held--
			c.lru.touch(b)
		}
	}
	c.trim()
}

func (c *cache) trim() {
	for c.held+c.anon+c.lru.n > c.size && c.lru.n > 0 {
		c.lru.remove(c.lru.oldest)
	}
}

// An lru orders blocks by their last use.
type lru struct {
	newer, older   []int32
	in             []bool
	newest, oldest int32
	n              int
}

const none = int32(-1)

func newLRU(blocks int) lru {
	return lru{newer: make([]int32, blocks), older: make([]int32, blocks), in: make([]bool, blocks), newest: none, oldest: none}
}

// touch makes a block the newest.
func (l *lru) touch(b int32) {
	l.remove(b)
	l.newer[b], l.older[b] = none, l.newest
	if l.newest != none {
		l.newer[l.newest] = b
	} else {
		l.oldest = b
	}
	l.newest = b
	l.in[b] = true
	l.n++
}

func (l *lru) remove(b int32) {
	if !l.in[b] {
		return
	}
	if p := l.newer[b]; p != none {
		l.older[p] = l.older[b]
	} else {
		l.newest = l.older[b]
	}
	if p := l.older[b]; p != none {
		l.newer[p] = l.newer[b]
	} else {
		l.oldest = l.newer[b]
	}
	l.in[b] = false
	l.n--
}
