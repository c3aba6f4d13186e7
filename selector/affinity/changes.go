package affinity

import "github.com/prefix-affinity/caddy/prefixhash"

// changes keeps the prompts that are sent while a table is read or restored, so
// that what moved meanwhile can be made good. Guarded by the replica's lock,
// like the table, but for the first changes of the list: they don't change.
type changes struct {
	list   []change
	runs   map[runID]struct{} // that these prompts went into
	blocks int
	full   bool // some prompts are missing

	cleared int // of the order, when this began
}

// A change gives some blocks of a prompt to a run, or to none.
type change struct {
	chain    []prefixhash.Block
	owner    runID
	from, to int // in blocks
}

// runID names a run for as long as it lives.
type runID struct{ slot, gen uint32 }

// changesMost, in blocks, bounds what is kept at 16 MiB: thousands of prompts,
// where a pass takes milliseconds.
const changesMost = 1 << 20

// sent notes that a prompt belongs to a run.
func (c *changes) sent(run runID, chain []prefixhash.Block) {
	if c = c.grow(chain); c != nil {
		// One by one: a single slice would be copied whenever it grows, under the lock.
		chain = append([]prefixhash.Block(nil), chain...)
		c.add(run, change{chain, run, 0, len(chain)})
	}
}

// withdrawn notes that a run has lost some blocks of its prompt to an heir, and
// those after them to nobody.
func (c *changes) withdrawn(run runID, chain []prefixhash.Block, heir runID, from, common, to int) {
	if c = c.grow(chain); c != nil {
		chain = append([]prefixhash.Block(nil), chain...)
		if from < common {
			c.add(run, change{chain, heir, from, common})
		}
		c.add(run, change{chain, runID{}, common, to})
	}
}

// grow counts a prompt's blocks, and returns nil if it is not wanted.
func (c *changes) grow(chain []prefixhash.Block) *changes {
	if c == nil || c.full {
		return nil
	}
	if c.blocks += len(chain); c.blocks > changesMost {
		c.full = true
		return nil
	}
	return c
}

func (c *changes) add(run runID, change change) {
	c.list = append(c.list, change)
	if c.runs == nil {
		c.runs = make(map[runID]struct{})
	}
	c.runs[run] = struct{}{}
}
