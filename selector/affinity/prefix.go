package affinity

import (
	"slices"
	"sort"

	"github.com/prefix-affinity/caddy/prefixhash"
)

// A span is a stretch of a prompt's chain that one run owns.
type span struct {
	slot     uint32
	from, to int   // blocks [from, to) of the chain
	far      int64 // the distance of prompt byte b is far + b; see order.base
}

// leading counts the blocks at the start of a chain that are live, by bisection.
// guess is a likely answer. Where an old prefix was dropped before what follows
// it the answer is a guess too; spans checks it.
func (t *table) leading(o *order, chain []prefixhash.Block, guess int) int {
	least, most := 0, len(chain)
	live := func(n int) bool { return t.owner(o, chain[n-1]) != 0 }
	if 0 < guess && guess <= most {
		switch {
		case !live(guess):
			most = guess - 1
		case guess == most || !live(guess+1):
			return guess
		default:
			least = guess + 1
		}
	}
	if least == 0 {
		if most == 0 || !live(1) { // bisection would take long to find nothing
			return 0
		}
		least = 1
	}
	for least < most {
		if n := (least + most + 1) / 2; live(n) {
			least = n
		} else {
			most = n - 1
		}
	}
	return least
}

// spans returns who owns the live blocks at the start of a chain, in the
// chain's order and without a gap. It looks up one block a span besides the
// bisection: whoever owns a block owns all before it back to where its run
// starts, because equal hashes mean equal prefixes.
func (t *table) spans(buf []span, o *order, chain []prefixhash.Block, guess int) []span {
	n := t.leading(o, chain, guess)
again:
	buf = buf[:0]
	for to := n; to > 0; {
		slot := t.owner(o, chain[to-1])
		if slot == 0 {
			n = t.leading(o, chain[:to-1], 0)
			goto again
		}
		from := 0
		if start := o.runs.at(slot).start; start > 0 {
			from = sort.Search(to-1, func(i int) bool { return chain[i].End > start })
		}
		buf = append(buf, span{slot: slot, from: from, to: to})
		to = from
	}
	slices.Reverse(buf)
	for i := range buf {
		r := o.runs.at(buf[i].slot)
		buf[i].far = o.base(r) - int64(r.start)
	}
	return buf
}

// match returns how many blocks at the start of a chain a cache of that capacity
// still holds: the hard edge.
func match(spans []span, chain []prefixhash.Block, capacity int64) (blocks int) {
	for _, s := range spans {
		held := capacity - s.far
		if int64(chain[s.to-1].End) <= held {
			blocks = s.to
			continue
		}
		return s.from + sort.Search(s.to-s.from, func(i int) bool { return int64(chain[s.from+i].End) > held })
	}
	return blocks
}

// known returns the number of blocks that spans cover.
func known(spans []span) int {
	if len(spans) == 0 {
		return 0
	}
	return spans[len(spans)-1].to
}

// An expectation is what the index knew of a prompt when it was sent: that the
// bytes up to end, from where the one before ends, stood at distance far + byte.
// With the engine's report it becomes evidence of the capacity.
type expectation struct {
	end uint32
	far int64
}

// judge says up to which distance a report of held bytes proves a hit, and from
// which a miss; 0: it says nothing. What is held is known to within slack bytes:
// so a piece of the prompt that is found but for less than that was found, and
// one of which no more than that is found was not. Else every prompt whose
// beginning others keep in the cache, and whose rest was evicted, would be a hit
// at the distance of the rest. Of what stands farther than lost, and so cannot be
// there as far as anybody knows, only that it is there is news.
func judge(known []expectation, held, slack, lost int64) (hit, miss int64) {
	start := int64(0)
	for _, k := range known {
		end := int64(k.end)
		if k.far+start > lost && (held <= start+slack || held+slack < end) {
			if held > start+slack {
				hit = max(hit, k.far+held)
			}
			return hit, 0
		}
		if held+slack < end {
			if held > start+slack {
				return max(hit, k.far+held), k.far + held + 1
			}
			return hit, max(hit, k.far+start+1)
		}
		hit, start = max(hit, k.far+min(held, end)), end
	}
	return hit, 0
}

// shared returns how many blocks two chains have in common.
func shared(a, b []prefixhash.Block) int {
	return sort.Search(min(len(a), len(b)), func(i int) bool { return a[i] != b[i] })
}
