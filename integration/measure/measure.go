// Package measure has what this project's benchmarks share: how costs are
// compared on a machine that does other things at the same time, and bodies to
// measure with.
package measure

import (
	"math"
	"time"
)

// A comparison ends after so many rounds or so much time, but not before it has
// had a few rounds.
const (
	fewestRounds = 5
	mostRounds   = 200
	longest      = 2 * time.Second
)

// Best calls functions in turns and returns the shortest time of each. Other
// work on the machine disturbs all alike, and some round goes undisturbed. A
// function should take between some 10 us and a few ms, so that the clock
// doesn't matter and the scheduler seldom does. prepare comes before each round
// and is not timed; done can end it early.
func Best(prepare func(), done func([]time.Duration) bool, f ...func()) []time.Duration {
	best := make([]time.Duration, len(f))
	began := time.Now()
	for round := 0; round < fewestRounds || round < mostRounds && time.Since(began) < longest; round++ {
		prepare()
		for i := range f {
			start := time.Now()
			f[i]()
			if took := time.Since(start); round == 0 || took < best[i] {
				best[i] = took
			}
		}
		if round+1 >= fewestRounds && done(best) {
			break
		}
	}
	return best
}

// Ratio returns how many times as long as the floor something takes, each at its
// best. It ends early when that is at most enough; for a mere measurement enough
// is 0.
func Ratio(enough float64, f, floor func()) float64 {
	return RatioOf(func() {}, enough, f, floor)
}

// RatioOf is Ratio where each round needs something prepared.
func RatioOf(prepare func(), enough float64, f, floor func()) float64 {
	return ratio(Best(prepare, func(best []time.Duration) bool { return ratio(best) <= enough }, f, floor))
}

func ratio(best []time.Duration) float64 { return best[0].Seconds() / best[1].Seconds() }

// Slope fits y = c * x^slope by least squares of the logarithms: 0 for what does
// not grow, 1 for what grows in proportion. All values must be positive.
func Slope(x, y []float64) float64 {
	n := float64(len(x))
	var meanX, meanY, xy, xx float64
	for i := range x {
		meanX += math.Log(x[i]) / n
		meanY += math.Log(y[i]) / n
	}
	for i := range x {
		dx := math.Log(x[i]) - meanX
		xy += dx * (math.Log(y[i]) - meanY)
		xx += dx * dx
	}
	return xy / xx
}
