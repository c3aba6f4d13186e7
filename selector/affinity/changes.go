package affinity

import "github.com/prefix-affinity/caddy/prefixhash"

// changes keeps the prompts that are sent while a table is read or filled piece
// by piece, so that what moved between two pieces can be made good. Guarded by
// the replica's lock, like the table.
type changes struct {
	chains [][]prefixhash.Block
	runs   map[runID]struct{} // that these prompts went into
	blocks int
	full   bool // some prompts are missing
}

// runID names a run for as long as it lives.
type runID struct{ slot, gen uint32 }

// changesMost, in blocks, bounds what is kept at 16 MiB: thousands of prompts,
// where a pass takes milliseconds.
const changesMost = 1 << 20

func (c *changes) note(run runID, chain []prefixhash.Block) {
	if c == nil {
		return
	}
	if c.blocks += len(chain); c.blocks > changesMost {
		c.full = true
		return
	}
	// One by one: a single slice would be copied whenever it grows, under the lock.
	c.chains = append(c.chains, append([]prefixhash.Block(nil), chain...))
	if c.runs == nil {
		c.runs = make(map[runID]struct{})
	}
	c.runs[run] = struct{}{}
}
