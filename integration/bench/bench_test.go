package main

import (
	"math"
	"testing"
)

func TestShares(t *testing.T) {
	shares := sharesOf([]byte(`File: caddy
Type: cpu
Duration: 5s, Total samples = 3s
-----------+-------------------------------------------------------
      20ms   github.com/prefix-affinity/caddy/prefixhash.nh (inline)
             github.com/prefix-affinity/caddy/prefixhash.(*Hasher).Sum
             github.com/prefix-affinity/caddy/selector.(*request).readKey
             github.com/prefix-affinity/caddy/selector.(*Policy).Select
             net/http.(*conn).serve
-----------+-------------------------------------------------------
      10ms   internal/runtime/syscall/linux.Syscall6
             net.(*conn).Read
             github.com/prefix-affinity/caddy/selector.(*held).read
             github.com/prefix-affinity/caddy/selector.(*Policy).Select
             net/http.(*conn).serve
-----------+-------------------------------------------------------
      10ms   runtime.findRunnable
             runtime.mcall
-----------+-------------------------------------------------------
`))
	for part, want := range map[string]float64{"key: hashing": 0.5, "reading the body": 0.25, "runtime and scheduler": 0.25} {
		if math.Abs(shares[part]-want) > 1e-9 {
			t.Errorf("%s has %.2f, want %.2f of %v", part, shares[part], want, shares)
		}
	}
	if len(shares) != 3 {
		t.Errorf("shares %v", shares)
	}
}

// Ratios are formed round by round: what disturbs a round disturbs both.
func TestOver(t *testing.T) {
	self := func(x float64) float64 { return x }
	if got := over([]float64{12, 60, 2.4}, []float64{10, 40, 2}, self); math.Abs(got.median-1.2) > 1e-9 || got.least != got.median || got.most != 1.5 {
		t.Errorf("got %v", got)
	}
	if got := quantile([]float64{1, 2, 3}, 0.99); got != 3 {
		t.Errorf("quantile %g", got)
	}
}
