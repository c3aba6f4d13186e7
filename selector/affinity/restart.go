package affinity

const (
	emptyResponses = 8                    // that it takes to believe that a cache was lost,
	emptyChance    = 1e-8                 // if they would be no more likely than that otherwise
	emptyShare     = 0.05                 // of a claim: a report of less found nothing of it
	claimLeast     = 1024 * BytesPerToken // some services count no less as cached
	claimShare     = 0.25                 // of the prompt: a claim on less is lost in what is rounded
	claimReach     = 0.9                  // of what the cache holds: claims beyond may have been evicted
	reachKeep      = 0.9997               // what the farthest hit is worth at the next one
	castsKept      = 64                   // votes that a lost cache may take back
)

// A claim is what the index knew for sure when a prompt was sent: that its bytes
// (from, to] were last used by the replica's request nth, which was answered.
type claim struct{ from, to, nth uint32 }

// claimed returns the claim of a prompt that is about to be sent, on what the
// owner of its last known block left. r.mu is held.
func (r *Replica) claimed(spans []span, from, to uint32, prompt float64) claim {
	own := r.order.runs.at(spans[len(spans)-1].slot)
	size := float64(to - from)
	if own.phase() != done || own.sure < to || size < claimLeast || size < claimShare*prompt*BytesPerToken {
		return claim{}
	}
	return claim{from, to, own.nth}
}

// A doubt weighs whether a replica has lost its cache unnoticed, by what its
// responses say of claims. One that finds nothing of what request n left says
// that the cache was lost after n and before the response's own request was
// sent; one that finds what n left says that it was not lost after n. Only
// responses that agree on such a time add up, so what an engine forgets or
// misreports now and then never does. They are of as many conversations, because
// what one of them asked for is in the cache again.
//
// What was evicted must not look like that: a claim counts if it lies within
// nine tenths of the voted capacity and of the farthest hit, and by how rarely
// the replica's earlier reports missed at such a distance. Each response that finds
// nothing also votes for a smaller cache, which would leave those after it beyond
// it: so the capacity before the first one counts. Once the cache must have been
// lost their votes are taken back.
type doubt struct {
	after, before uint32 // when the cache was lost, by Replica.sends
	empty         int    // responses that found nothing
	capacity      int64  // that was believed before the first of them
	chance        float64
	reach         float64 // distance of the farthest hit lately
	casts         []cast  // of the latest responses that found nothing, weighed or not
}

// A cast is the vote for a smaller cache of a response that found nothing of what
// request left left, asked by request asked.
type cast struct {
	left, asked uint32
	miss        int64
	own, all    uint64 // the reports' numbers in the replica's vote and in its group's; 0: none
}

// hit takes in up to which distance a report proves a hit.
func (d *doubt) hit(distance int64) { d.reach = max(reachKeep*d.reach, float64(distance)) }

// weigh takes in that of a claim at a distance, made with request nth, held
// bytes of the prompt were found, give or take slack, while the cache was believed
// to have a capacity. It returns whether the cache must have been lost.
func (d *doubt) weigh(c claim, nth uint32, distance, held, slack, capacity int64, v *vote, voted cast) bool {
	if c.to == 0 {
		return false
	}
	nothing := int64(c.from) + int64(emptyShare*float64(c.to-c.from))
	if held > nothing+slack {
		if d.before = min(d.before, c.nth); d.before <= d.after {
			d.empty = 0
		}
		return false
	}
	if held <= nothing {
		voted.left, voted.asked = c.nth, nth
		d.casts = append(d.casts[max(len(d.casts)-castsKept+1, 0):], voted)
	}
	believed := capacity
	if d.empty > 0 {
		believed = d.capacity
	}
	chance := v.missed(distance, float64(d.empty+1))
	if held > nothing || chance > 0.5 || float64(distance) > claimReach*min(d.reach, float64(believed)) {
		return false
	}
	d.after, d.before = max(d.after, c.nth), min(d.before, nth)
	if d.empty == 0 || d.before <= d.after {
		d.after, d.before, d.empty, d.chance = c.nth, nth, 0, 1
		d.capacity = capacity
	}
	d.empty++
	d.chance *= chance
	return d.empty >= emptyResponses && d.chance <= emptyChance
}

// missed is the chance that a report misses at a distance: as often as those
// nearer did, less the latest, and no less than it may be beyond the capacity.
func (v *vote) missed(distance int64, latest float64) float64 {
	bin := voteBin(distance)
	missed, within, beyond := 0.0, 0.0, 0.0
	for i := range voteBins {
		if i <= bin {
			missed += v.miss[i]
			within += v.hit[i]
		} else {
			beyond += v.hit[i]
		}
	}
	missed = 1 + max(missed/v.weight-latest, 0)
	return missed / (missed + min(within, beyond)/v.weight)
}
