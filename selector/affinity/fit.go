package affinity

import "math"

// A fit finds the prefill speed where first outputs can't be seen, from answers
// that come as a whole. Such an answer takes
//
//	seconds = uncached/rate + output*perToken + overhead
//
// and what it waits, which does not depend on its own tokens. The least squares of
// the relative errors give the three, so that an answer that hung says no more than
// any other. Old answers fade like measured prefills.
type fit struct {
	fitState
	found [3]float64 // seconds an uncached token, an output token, and an answer
	known bool       // found is; what an answer should take may be surer than each of them
	rate  float64    // 0: not known
}

// A fitState sums up answers: of what each counts, which is its uncached tokens,
// output tokens and 1, all by its seconds, the products and the sums.
type fitState struct {
	Products [3][3]float64 `json:"products"` // the upper half
	Sums     [3]float64    `json:"sums"`
	Count    float64       `json:"count"`
}

const (
	fitCounts = 50   // answers before a fit counts
	fitApart  = 1e-4 // of the squares of uncached tokens: how much may not follow from the other counts, at least
	fitRidge  = 1e-9 // what keeps outputs apart from overhead where all are alike, or none
	fitError  = 0.2  // standard error of the speed, as a share of it, up to which it does
)

// take takes in an answer.
func (f *fit) take(uncached, output, seconds float64) {
	counts := [3]float64{uncached / seconds, output / seconds, 1 / seconds}
	for i, x := range counts {
		for j := i; j < len(counts); j++ {
			f.Products[i][j] = speedKeep*f.Products[i][j] + x*counts[j]
		}
		f.Sums[i] = speedKeep*f.Sums[i] + x
	}
	f.Count = speedKeep*f.Count + 1
	f.solve()
}

// add takes in the answers of a snapshot.
func (f *fit) add(s fitState) {
	for i := range s.Products {
		for j := i; j < len(s.Products); j++ {
			f.Products[i][j] += s.Products[i][j]
		}
		f.Sums[i] += s.Sums[i]
	}
	f.Count += s.Count
	f.solve()
}

// solve solves the normal equations by Cramer's rule. The speed is not known while
// too few answers, or prompts too much alike, leave it open. Outputs may be alike.
func (f *fit) solve() {
	f.known, f.rate = false, 0
	if f.Count < fitCounts {
		return
	}
	m, s := f.Products, &f.Sums
	m[1][1] += fitRidge * (m[1][1] + m[2][2])
	m[2][2] += fitRidge * m[2][2]
	var inverse [3][3]float64 // times the determinant
	inverse[0][0] = m[1][1]*m[2][2] - m[1][2]*m[1][2]
	inverse[0][1] = m[0][2]*m[1][2] - m[0][1]*m[2][2]
	inverse[0][2] = m[0][1]*m[1][2] - m[0][2]*m[1][1]
	inverse[1][1] = m[0][0]*m[2][2] - m[0][2]*m[0][2]
	inverse[1][2] = m[0][1]*m[0][2] - m[0][0]*m[1][2]
	inverse[2][2] = m[0][0]*m[1][1] - m[0][1]*m[0][1]
	det := m[0][0]*inverse[0][0] + m[0][1]*inverse[0][1] + m[0][2]*inverse[0][2]
	if !(det > fitApart*m[0][0]*inverse[0][0]) {
		return
	}
	f.known, f.found = true, [3]float64{}
	explained := 0.0
	for i := range f.found {
		for j := range f.found {
			f.found[i] += inverse[min(i, j)][max(i, j)] * s[j] / det
		}
		explained += f.found[i] * s[i]
	}
	variance := max(f.Count-explained, 0) / (f.Count - 3) * inverse[0][0] / det
	if perUncached := f.found[0]; perUncached > 0 && math.Sqrt(variance) <= fitError*perUncached {
		f.rate = 1 / perUncached
	}
}

// expected returns the seconds that an answer should take.
func (f *fit) expected(uncached, output float64) float64 {
	return max(f.found[0]*uncached+f.found[1]*output+f.found[2], speedMoment)
}
