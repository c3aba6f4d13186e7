package affinity

import (
	"math"
	"math/rand/v2"
	"testing"
)

// TestSettle: bins without reports change nothing, however reports came.
func TestSettle(t *testing.T) {
	everyBin := func(own, pool *vote) (bin int) {
		mine, others := 1/max(own.weight, 1), votePool/max(pool.weight, 1)
		bad, least := 0.0, math.Inf(1)
		for i := range voteBins + 1 {
			if bad <= least+1e-9 {
				least, bin = bad, i
			}
			if i < voteBins {
				bad += mine*(own.miss[i]-own.hit[i]) + others*(pool.miss[i]-pool.hit[i])
			}
		}
		return bin
	}
	for seed := range uint64(50) {
		rng := rand.New(rand.NewPCG(seed, 5))
		votes := [2]vote{}
		distance := func() int64 { return int64(math.Exp2(10 + 24*rng.Float64()*rng.Float64())) }
		for i := range 200 {
			v := &votes[rng.IntN(2)]
			switch hit, miss := distance(), distance(); rng.IntN(12) {
			case 0:
				v.tell(hit)
			case 1:
				v.takeBack(miss, v.report(hit, miss))
			case 2:
				if len(v.state()) > 0 {
					v.add(votes[rng.IntN(2)].state())
				}
			case 3, 4, 5:
				v.report(0, miss)
			default:
				v.report(hit, 0)
			}
			if got, want := settle(&votes[0], &votes[1]), everyBin(&votes[0], &votes[1]); got != want {
				t.Fatalf("seed %d, report %d: bin %d, want %d", seed, i, got, want)
			}
		}
	}
}

// BenchmarkSettle is what every response that reports its cached tokens costs.
func BenchmarkSettle(b *testing.B) {
	rng := rand.New(rand.NewPCG(1, 5))
	var own, pool vote
	for range 1000 {
		distance := int64(math.Exp2(16 + 5*rng.Float64()))
		own.report(distance, 0)
		pool.report(distance, 0)
	}
	for b.Loop() {
		settle(&own, &pool)
	}
}
