package affinity

import (
	"math"
	"math/bits"
)

// A vote finds the capacity of an LRU cache from reports of the kind "hit up to
// this distance" and "missed from that one": it is the capacity that the fewest
// of them contradict. There is no start value, gain or reset; until a first miss
// is reported the capacity is unlimited. Distances and capacities are in prompt
// bytes.
//
// The constants are insensitive (BENCHMARKS.md has the rows).
type vote struct {
	hit, miss [voteBins]float64 // reports by distance, each worth weight when made
	used      [voteWords]uint64 // a bit for each bin that has had any
	weight    float64           // of a report made now; grows so that old ones fade
	reports   uint64            // so far
}

const (
	voteSteps = 16                  // bins a doubling: capacities are found to 4 %
	voteLeast = 256 * BytesPerToken // smaller caches count as this
	voteBins  = voteSteps*22 + 1    // up to 1G tokens
	voteWords = (voteBins + 63) / 64
	voteKeep  = 0.997 // what a report is worth at the next one
	voteTold  = 20    // reports that a capacity told from outside is worth
	votePool  = 0.1   // what a report of the replica's peers is worth beside its own
	unlimited = int64(math.MaxInt64 / 4)
)

func voteBin(distance int64) int {
	if distance <= voteLeast {
		return 0
	}
	return min(int(voteSteps*math.Log2(float64(distance)/voteLeast)), voteBins-1)
}

// count adds what is reported of the distances in a bin.
func (v *vote) count(bin int, hit, miss float64) {
	v.hit[bin] += hit
	v.miss[bin] += miss
	v.used[bin/64] |= 1 << (bin % 64)
}

// age makes room for a new report.
func (v *vote) age() {
	v.reports++
	if v.weight == 0 {
		v.weight = 1
	}
	if v.weight /= voteKeep; v.weight > 1e12 {
		for i := range v.hit {
			v.hit[i] /= v.weight
			v.miss[i] /= v.weight
		}
		v.weight = 1
	}
}

// report takes in that a cache held what was used up to distance hit, and had
// lost what was used at distance miss. Either may be 0: nothing to say. It returns
// the report's number.
func (v *vote) report(hit, miss int64) (nth uint64) {
	v.age()
	if hit > 0 {
		v.count(voteBin(hit), v.weight, 0)
	}
	if miss > 0 {
		v.count(voteBin(miss), 0, v.weight)
	}
	return v.reports
}

// takeBack undoes that the nth report said something was lost at distance miss.
func (v *vote) takeBack(miss int64, nth uint64) {
	if miss > 0 {
		bin := voteBin(miss)
		v.miss[bin] = max(v.miss[bin]-v.weight*math.Pow(voteKeep, float64(v.reports-nth)), 0)
	}
}

// tell takes in a capacity known from elsewhere, as if it had been reported, and
// returns the report's number.
func (v *vote) tell(capacity int64) (nth int64) {
	v.age()
	bin := voteBin(capacity)
	v.count(max(bin-1, 0), voteTold*v.weight, 0)
	v.count(bin, 0, voteTold*v.weight)
	return int64(v.reports) //nolint:gosec // never so many
}

// untell undoes what a capacity told as the nth report still counts.
func (v *vote) untell(capacity, nth int64) {
	worth := voteTold * v.weight * math.Pow(voteKeep, float64(int64(v.reports)-nth)) //nolint:gosec // as above
	bin := voteBin(capacity)
	below := max(bin-1, 0)
	v.hit[below], v.miss[bin] = max(v.hit[below]-worth, 0), max(v.miss[bin]-worth, 0)
}

// settle returns the bin of the capacity that own and, at a tenth of their
// weight, the pool's reports contradict least; the largest of equals, because
// one that is too large is soon corrected. What counts changes at bins with
// reports only, which are few: this comes with every response.
func settle(own, pool *vote) (bin int) {
	mine := 1 / max(own.weight, 1)
	others := votePool / max(pool.weight, 1)
	bad, least := 0.0, math.Inf(1) // hits beyond + misses within, less a constant
	for w := range voteWords {
		for used := own.used[w] | pool.used[w]; used != 0; used &= used - 1 {
			i := 64*w + bits.TrailingZeros64(used)
			if bad <= least+1e-9 {
				least, bin = bad, i
			}
			bad += mine*(own.miss[i]-own.hit[i]) + others*(pool.miss[i]-pool.hit[i])
		}
	}
	if bad <= least+1e-9 {
		bin = voteBins
	}
	return bin
}

// capacityOf returns the least capacity of a bin.
func capacityOf(bin int) int64 {
	if bin >= voteBins {
		return unlimited
	}
	return int64(voteLeast * math.Exp2(float64(bin)/voteSteps))
}

// contradicted returns the share of the reports that speak against the capacity
// of a bin, and what the reports amount to.
func (v *vote) contradicted(bin int) (share, reports float64) {
	against := 0.0
	for i := range voteBins {
		reports += v.hit[i] + v.miss[i]
		if i < bin {
			against += v.miss[i]
		} else {
			against += v.hit[i]
		}
	}
	if reports == 0 {
		return 0, 0
	}
	return against / reports, reports / v.weight
}
