package affinity

import (
	"time"

	"github.com/prefix-affinity/caddy/prefixhash"
)

// The constants of the rule, in tokens of prefill work where they have a unit;
// BENCHMARKS.md shows what changing each one does.
const (
	alphaSlope  = 2    // alpha grows by that for each request waiting a replica,
	alphaMost   = 10   // to no more than this,
	alphaIdle   = 1    // as if no more than one were waiting where none is,
	alphaQueue  = 2    // two more for each that is,
	alphaMemory = 8    // and eight more where prompts in flight fill the cache;
	alphaGiven  = 0.5  // half more for each capacity of uncached tokens given lately
	beta        = 0.05 // prompt tokens in flight slow decoding and fill the memory
	gamma       = 300  // and so does each request
	lostShare   = 0.02 // of what a replica must have evicted counts as held: it may hold more than is believed,
	homeShare   = 0.5  // of what nobody holds its home by rendezvous counts as holding
	equal       = 1    // costs that differ by less are the same,
	placeLeast  = 500  // or by that much where a cold prompt could go to any idle replica,
	placeShare  = 0.1  // or by that share: measured speeds never agree exactly
	stay        = 2000 // what staying with its session may cost a request whose match is no worse there
)

// view is a candidate as the rule sees it.
type view struct {
	r        *Replica
	table    *table
	usable   bool
	outdated bool // somebody brought more of the prompt
	inFlight int
	blocks   int     // known of the prompt
	held     int     // those of them believed cached
	goes     bool    // on from where another prompt ended there: a conversation's next turn
	matched  uint32  // and their bytes
	seen     uint64  // load.brought when that was looked up
	limit    float64 // Replica.limit
	filled   float64 // load.filled
	pace     float64 // load.pace
	queue    float64 // requests before their first output
	cost     float64
	lost     float64 // of it, what requests count that were refused or failed lately,
	failed   float64 // and of that, those that the replica failed
}

// weigh sets what the request would cost on each usable candidate:
//
//	cost  = (pending + (alpha + given/2)*uncached) / pace + beta*prompt + gamma*in flight
//	alpha = min(10, 1 + 2*min(waiting/N, 1 + 2*queue + 8*prompt/capacity))
//
// in prompt tokens of prefill work, where pending is the uncached work queued
// at the candidate net of its progress, uncached the request's own beyond the
// match, pace the candidate's prefill speed as a multiple of its fleet's, prompt
// the prompt tokens in flight there, queue its requests before their first
// output, waiting those of all N candidates, and given the uncached tokens sent
// there lately, in capacities of its cache: they evict what others come back
// for, so that at low load, too, all caches are used. A match too short to be
// worth following counts as none. With Rendezvous the home of what nobody is
// known to hold counts as holding half of it: another gateway, which sees it as
// new too, may have sent it there. Where a replica must have evicted what it held,
// a fiftieth of that counts as held: if more of its cache is left than is believed,
// this is how that comes to light. What was refused or failed lately counts as
// waiting there; for who tries the same prompt again, or goes on from it, at what it would cost
// where it costs most, so that on an idle fleet one failure is enough for the next try to go
// elsewhere, however much is cached there, and others stay whose match is worth more than
// that.
//
// alpha = 1 would take the shortest time to first token. That is unstable: it
// ignores that computing a prefix again delays everyone behind and evicts what
// others come back for. So the more requests wait in the fleet, the dearer it
// gets, but on a replica with neither a queue nor a full memory it harms few,
// and a prefix that is in demand spreads there. An idle fleet follows the
// longest match, and a queue that outweighs the match sends the request
// elsewhere.
//
// Source: found by replay of public traces (integration/replay), starting from
// the cost alpha*uncached + backlog of published routers; BENCHMARKS.md has
// the results and what each constant does.
func weigh(views []view, g *group, rule *Rule, minMatch uint32, prompt float64, chain []prefixhash.Block, now time.Time) {
	waiting, n := 0.0, 0.0
	rate := g.rate()
	for i := range views {
		if v := &views[i]; v.usable {
			l := &v.r.load
			v.pace = l.pace(g, now)
			v.queue = float64(l.waiting)
			if others := l.foreign(rate*v.pace, now); others > 0 {
				v.queue += others / max(g.mean, 1)
			}
			waiting += v.queue
			n++
		}
	}
	home, spare := -1, 0.0
	if rule.Rendezvous {
		home, spare = homeOf(views, chain), homeShare*unheld(views, prompt)
	}
	dearest, some := 0.0, false
	for i := range views {
		v := &views[i]
		if !v.usable {
			continue
		}
		l := &v.r.load
		alpha := rule.Alpha
		if alpha == 0 {
			harm := alphaIdle + alphaQueue*v.queue + alphaMemory*l.prompt/v.limit
			alpha = min(alphaMost, 1+alphaSlope*min(waiting/n, harm))
		}
		match := v.matched
		if match < minMatch {
			match = 0
		}
		v.filled = l.filled(v.r.group.Load(), v.limit)
		given := v.filled / v.limit
		fresh := uncached(prompt, match)
		fresh = max(fresh-lostShare*float64(startOf(chain, v.blocks)-v.matched)/BytesPerToken, 1)
		if i == home {
			fresh = max(fresh-spare, 1)
		}
		weight := alpha + alphaGiven*given
		v.cost = (l.pending(rate*v.pace, now)+weight*fresh)/v.pace + beta*l.prompt + gamma*float64(v.inFlight)
		v.lost, v.failed = 0, 0
		dearest = max(dearest, weight/v.pace)
		some = some || len(l.penalties) > 0
	}
	if !some {
		return
	}
	for i := range views {
		if v := &views[i]; v.usable {
			all, failed, own := v.r.load.lately(chain)
			more := gamma*float64(all.requests) + max(dearest-1/v.pace, 0)*own
			v.cost += more
			v.lost, v.failed = all.tokens/v.pace+more, failed/v.pace
			if failed > 0 {
				v.failed += more
			}
		}
	}
}

func uncached(prompt float64, matched uint32) float64 {
	return max(prompt-float64(matched)/BytesPerToken, 1)
}

// least returns the candidate to take, -1 if none is usable: the cheapest. Of
// those that can't be told apart from it by cost, and don't give up more of a
// match, it takes in this order the one with the longest match, with the fewest
// requests in flight, and the one for which tie is least; never the first in
// the list for being first. The session's replica comes before all that as long
// as it does not cost much more. Where to put a cold prompt is a matter of little
// cost while a replica is idle, and with agree at any time: then more can't be
// told apart.
func least(views []view, minMatch uint32, session int, agree bool, tie func(i int) float64) int {
	best := -1
	for i := range views {
		if views[i].usable && (best < 0 || views[i].cost < views[best].cost) {
			best = i
		}
	}
	if best < 0 {
		return -1
	}
	lowest, floor := views[best].cost, views[best].matched
	within := func(i int, allowance float64) bool {
		v := &views[i]
		if v.lost > views[best].lost { // where requests fail, the small difference that it makes counts
			allowance = min(allowance, equal)
		}
		return v.usable && v.cost <= lowest+allowance && (v.matched >= floor || floor < minMatch)
	}
	if session >= 0 && within(session, stay) {
		return session
	}
	rank := func(i int) (match uint32, inFlight int, last float64) {
		return views[i].matched / minMatch, views[i].inFlight, tie(i)
	}
	allowance := float64(equal)
	if floor < minMatch && (agree || views[best].inFlight == 0) {
		allowance = max(placeLeast, placeShare*lowest)
	}
	match, inFlight, last := rank(best)
	for i := range views {
		if !within(i, allowance) || views[i].matched >= minMatch && !within(i, equal) {
			continue
		}
		m, n, t := rank(i)
		if m > match || m == match && (n < inFlight || n == inFlight && t < last) {
			best, match, inFlight, last = i, m, n, t
		}
	}
	return best
}

// rendezvous orders candidates for a hash so that everybody who asks agrees and
// one that goes takes only its own along.
func rendezvous(hash uint64, r *Replica) float64 { return float64(mix(hash ^ r.place)) }

// homeOf returns the usable candidate whose turn it is by rendezvous to have
// what nobody holds of a chain.
func homeOf(views []view, chain []prefixhash.Block) int {
	hash, home := unknown(chain, views), -1
	for i := range views {
		if views[i].usable && (home < 0 || rendezvous(hash, views[i].r) < rendezvous(hash, views[home].r)) {
			home = i
		}
	}
	return home
}

// unheld returns the tokens of a prompt that nobody holds.
func unheld(views []view, prompt float64) float64 {
	var held uint32
	for i := range views {
		held = max(held, views[i].matched)
	}
	return uncached(prompt, held)
}

// unknown returns the first block of a chain that nobody holds, or its last:
// where a conversation starts that shares only a system prompt with others.
func unknown(chain []prefixhash.Block, views []view) uint64 {
	n := 0
	for i := range views {
		n = max(n, views[i].blocks)
	}
	return chain[min(n, len(chain)-1)].Hash
}

// admit decides which candidates may be chosen: the available ones, and the
// drained where they hold more than any of these of a conversation that goes on, or
// have the session or the stored response; if there are none the drained, then those
// that failed.
func admit(views []view, cands []Candidate, minMatch uint32, session, stored int) {
	var held uint32
	for i := range views {
		if cands[i].State == Available {
			held = max(held, views[i].matched)
		}
	}
	any := false
	for i := range views {
		v := &views[i]
		v.usable = cands[i].State == Available || cands[i].State == Drained && (v.goes && v.matched >= held+minMatch || i == session || i == stored)
		any = any || v.usable
	}
	for _, s := range [...]State{Drained, Failed} {
		for i := range views {
			if !any && cands[i].State == s {
				views[i].usable = true
			}
		}
		for i := range views {
			any = any || views[i].usable
		}
	}
}

// leastBusy chooses for a request that nothing is known of: the fewest in flight or
// lost lately, and of equals the one whose turn it is; -1 if none is available.
// Fleet.mu is held.
func leastBusy(cands []Candidate, now time.Time) int {
	best, fewest, last, state := -1, 0, uint64(0), Unavailable
	for i := range cands {
		c := &cands[i]
		if c.State > state || c.State == Unavailable {
			continue
		}
		l := &c.Replica.load
		n := max(l.inFlight, c.InFlight) + l.lost(now)
		if c.State < state || n < fewest || n == fewest && l.turn < last {
			best, fewest, last, state = i, n, l.turn, c.State
		}
	}
	return best
}

// reason says why candidate c was chosen, where nothing but the match counts.
func reason(views []view, c, holder int, minMatch uint32) Reason {
	if holder < 0 || views[holder].matched < minMatch {
		return Cold
	}
	if views[c].matched >= minMatch && views[c].matched+minMatch > views[holder].matched {
		return Affinity
	}
	best := c
	for i := range views {
		if views[i].usable && views[i].matched > views[best].matched {
			best = i
		}
	}
	passed := &views[best]
	switch {
	case passed.matched < max(views[c].matched+minMatch, views[holder].matched-minMatch+1):
		return Unhealthy // nobody that could be chosen holds as much as the holder
	case passed.failed > 0 && passed.cost-passed.failed <= views[c].cost:
		return Unhealthy // it would have been chosen, had it not failed
	}
	return Overflow
}

// longest returns the candidate with the longest match, or -1; of equals the
// chosen one, else a usable one.
func longest(views []view, chosen int) int {
	holder := -1
	var most uint32
	for i := range views {
		m := views[i].matched
		if m == 0 {
			continue
		}
		if m > most || m == most && (i == chosen || views[i].usable && !views[holder].usable && holder != chosen) {
			holder, most = i, m
		}
	}
	return holder
}
