// Command replay measures routing policies on traces of LLM requests, in
// virtual time: the project's own routing code, simpler policies, and bounds
// that no router can reach.
package main

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

func main() {
	dir := flag.String("traces", "", "folder of trace files")
	names := flag.String("t", "", "traces")
	caps := flag.String("cap", "30%", "")
	loads := flag.String("load", "0.8", "")
	n := flag.Int("n", 8, "")
	seeds := flag.String("seed", "0", "")
	pols := flag.String("policy", "prefix_affinity,pooled", "")
	fail := flag.Bool("fail", false, "")
	small := flag.Float64("small", 0, "")
	slow := flag.Float64("slow", 0, "")
	rate := flag.Float64("rate", 8000, "")
	rest := flag.Int("restarts", 0, "")
	flag.Parse()
	fmt.Println("trace,n,cap,cap_tok,load,speed,policy,hit,p50,p90,p99,mean,util,busy_imb,req_imb,min_rep_hit,max_rep_hit,eff_tok,fail_p99,fail_hit,extra")
	for name := range strings.SplitSeq(*names, ",") {
		t, err := loadTrace(filepath.Join(*dir, name+".jsonl"), name)
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		for c := range strings.SplitSeq(*caps, ",") {
			for l := range strings.SplitSeq(*loads, ",") {
				load, _ := strconv.ParseFloat(l, 64)
				set := setting{replicas: *n, capacity: capacityOf(t, c, *n), rate: *rate, perToken: 0.02, slots: 64}
				set.speedup = pace(t, set, load)
				set.fails, set.small, set.slow, set.restarts = *fail, *small, *slow, *rest
				for sd := range strings.SplitSeq(*seeds, ",") {
					set.seed, _ = strconv.ParseUint(sd, 10, 64)
					for pn := range strings.SplitSeq(*pols, ",") {
						set.pooled = pn == "pooled"
						p, err := policyNamed(pn)
						if err != nil {
							fmt.Fprintln(os.Stderr, err)
							os.Exit(1)
						}
						s := simulate(t, set, p)
						r := s.result()
						extra := ""
						if q, ok := p.(*product); ok {
							x := 0.0
							for _, st := range q.fleets[0].fleet.Snapshot(s.clock()) {
								x += float64(st.CapacityTokens) / float64(*n)
							}
							extra = fmt.Sprintf("%.0f", x/1000)
						}
						fmt.Printf("%s@%s,%d,%s,%d,%.2f,%.3f,%s,%.4f,%.3f,%.3f,%.3f,%.3f,%.3f,%.3f,%.3f,%.3f,%.3f,%d,%.3f,%.4f,%s\n", name, sd, *n, c, set.capacity, load, set.speedup, pn,
							r.hit, r.p50, r.p90, r.p99, r.mean, r.utilisation, r.busy, r.requests, r.leastHit, r.mostHit, r.prefill, r.afterP99, 0.0, extra)
					}
				}
			}
		}
	}
}

// policyNamed returns a new policy. The product's name can be followed by what
// is different: prefix_affinity+told+streams=0.5.
func policyNamed(name string) (policy, error) {
	name, options, _ := strings.Cut(name, "+")
	switch name {
	case "round_robin":
		return &roundRobin{}, nil
	case "least_conn":
		return &leastConn{}, nil
	case "session_hash":
		return &sessionHash{}, nil
	case "bounded_hash":
		return &boundedHash{}, nil
	case "pooled":
		return newKnowing(false), nil
	case "clairvoyant":
		return newKnowing(true), nil
	case "prefix_affinity":
		return newProduct(options)
	}
	return nil, fmt.Errorf("unknown policy '%s'", name)
}

func capacityOf(t *trace, spec string, n int) int {
	need := 0
	for _, q := range t.requests {
		need = max(need, q.prompt+q.output+2*t.blockTokens)
	}
	if share, ok := strings.CutSuffix(spec, "%"); ok {
		f, _ := strconv.ParseFloat(share, 64)
		return max(need, int(float64(t.blocks)*float64(t.blockTokens)*f/100/float64(n)))
	}
	v, _ := strconv.Atoi(strings.TrimSuffix(spec, "k"))
	return max(need, v*1000)
}
