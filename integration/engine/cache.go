package engine

import "slices"

// cache is the KV memory of an engine, in blocks. Running requests pin what
// they use, and reserve what they will still fill; the rest holds the blocks of
// finished requests in order of last use until the room is needed. Not safe
// for concurrent use.
type cache struct {
	capacity int
	blocks   map[uint64]*block
	lru      block // ring of unpinned blocks: next is the most recently used
	idle     int   // blocks in the ring
	pinned   int   // distinct blocks in use
	reserved int   // room taken by running requests and not filled yet
}

type block struct {
	hash       uint64
	pins       int
	prev, next *block
}

func newCache(capacity int) *cache {
	c := &cache{capacity: capacity, blocks: make(map[uint64]*block)}
	c.lru.prev, c.lru.next = &c.lru, &c.lru
	return c
}

// used is the share of the memory that running requests hold, which is how
// vLLM counts: blocks kept for reuse only are free.
func (c *cache) used() float64 { return float64(c.pinned+c.reserved) / float64(c.capacity) }

// match counts the leading blocks of chain that are there.
func (c *cache) match(chain []uint64) int {
	for i, h := range chain {
		if c.blocks[h] == nil {
			return i
		}
	}
	return len(chain)
}

// admit starts a request that will fill total blocks: it pins the part of
// chain found in the cache and reserves the rest. ok is false, and nothing
// changes, while running requests leave too little room.
func (c *cache) admit(chain []uint64, total int) (matched int, ok bool) {
	matched = c.match(chain)
	grow := total - matched
	for _, h := range chain[:matched] {
		if c.blocks[h].pins == 0 {
			grow++
		}
	}
	if c.pinned+c.reserved+grow > c.capacity {
		return 0, false
	}
	for _, h := range chain[:matched] {
		c.pin(c.blocks[h])
	}
	c.reserved += total - matched
	c.evict()
	return matched, true
}

// fill turns reserved room into blocks that others can match, pinned.
func (c *cache) fill(chain []uint64) {
	for _, h := range chain {
		b := c.blocks[h]
		if b == nil {
			b = &block{hash: h}
			b.prev, b.next = b, b
			c.blocks[h] = b
			c.idle++ // for pin to take off again
		}
		c.pin(b)
		c.reserved--
	}
	c.evict()
}

// release ends a request: its pinned chain may be evicted from now on, the end
// of it first, and the room it reserved but didn't fill is free.
func (c *cache) release(chain []uint64, reserved int) {
	c.reserved -= reserved
	for _, h := range slices.Backward(chain) {
		b := c.blocks[h]
		if b.pins--; b.pins > 0 {
			continue
		}
		c.pinned--
		c.idle++
		b.prev, b.next = &c.lru, c.lru.next
		b.prev.next, b.next.prev = b, b
	}
}

func (c *cache) pin(b *block) {
	if b.pins++; b.pins > 1 {
		return
	}
	b.prev.next, b.next.prev = b.next, b.prev
	c.idle--
	c.pinned++
}

func (c *cache) evict() {
	for c.idle > 0 && c.idle+c.pinned+c.reserved > c.capacity {
		b := c.lru.prev
		b.prev.next, b.next.prev = b.next, b.prev
		c.idle--
		delete(c.blocks, b.hash)
	}
}
