package main

import (
	"math"
	"math/rand/v2"
	"testing"
)

// Growth is the trend, and its margin tells it from chance.
func TestGrowth(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 1)) // #nosec G404 -- to be repeatable
	const runs = 1000
	for _, test := range []struct {
		name  string
		rise  float64 // over all windows, of a mean of 100
		noise float64
		found float64 // least share of runs whose growth is beyond the margin
		most  float64
	}{
		{"flat/quiet", 0, 0.001, 0.01, 0.05},
		{"flat/noisy", 0, 10, 0.01, 0.05},
		{"rising/clear", 30, 3, 0.99, 1},
		{"rising/within the noise", 1, 30, 0, 0.05},
	} {
		grew, sum := 0.0, 0.0
		for range runs {
			values := make([]float64, windows)
			for i := range values {
				values[i] = 100 + test.rise*(float64(i)/windows-0.5) + test.noise*r.NormFloat64()
			}
			change, margin := growth(values)
			sum += change / runs
			if change > margin { // 2.5 % of those that are flat
				grew++
			}
		}
		grew /= runs
		if grew < test.found || grew > test.most {
			t.Errorf("%s: grew in %.3f of the runs, want %.2f to %.2f", test.name, grew, test.found, test.most)
		}
		if math.Abs(100*sum-test.rise) > 0.05*test.rise+0.1*test.noise {
			t.Errorf("%s: %.2f on average", test.name, 100*sum)
		}
	}
}

func TestQuantile(t *testing.T) {
	before := []bucket{{1, 100}, {4, 100}, {16, 100}, {math.Inf(1), 100}}
	after := []bucket{{1, 100}, {4, 200}, {16, 300}, {math.Inf(1), 300}}
	for _, test := range []struct{ q, want float64 }{{0.25, 2}, {0.5, 4}, {0.75, 8}, {1, 16}} {
		if got := quantile(before, after, test.q); math.Abs(got-test.want) > 1e-9 {
			t.Errorf("quantile %g is %g, want %g", test.q, got, test.want)
		}
	}
	after[3].count = 1000
	if got := quantile(before, after, 0.99); got != 16 {
		t.Errorf("beyond the limits: %g", got)
	}
	if got := quantile(nil, after, 0.1); got > 1 {
		t.Errorf("from the start: %g", got)
	}
}
