package main

import (
	"encoding/csv"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"

	"github.com/prefix-affinity/caddy/integration/chart"
)

// outcome is the result of one run.
type outcome struct {
	workload string
	cache    string
	load     float64
	draw     uint64
	policy   string
	setting  setting
	result
	capacity float64 // tokens, as the product sees it in the end, replicas' mean
	restarts tally
}

// setting's name in tables.
func (o *outcome) where() string {
	return fmt.Sprintf("%s, %d replicas, cache %s, load %g", o.workload, o.setting.replicas, o.cache, o.load)
}

// table writes a table for each setting, the draws' median in each field, and
// at the end all settings as ratios to the pooled bound.
func table(w io.Writer, all []*outcome) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	median := func(where, policy string, field func(*outcome) float64) float64 {
		var x []float64
		for _, o := range all {
			if o.where() == where && o.policy == policy {
				x = append(x, field(o))
			}
		}
		slices.Sort(x)
		return x[len(x)/2]
	}
	wheres, policies := distinct(all, (*outcome).where), distinct(all, func(o *outcome) string { return o.policy })
	for _, where := range wheres {
		fmt.Fprintf(t, "%s\n\thit %%\tmean TTFT s\tp50\tp90\tp99\tbusiest/mean\thit %% by replica\tprefill Mtok\t\n", where)
		for _, p := range policies {
			f := func(field func(*outcome) float64) float64 { return median(where, p, field) }
			fmt.Fprintf(t, "%s\t%.1f\t%.3f\t%.3f\t%.2f\t%.2f\t%.2f\t%.0f-%.0f\t%.1f\t\n", p,
				100*f(func(o *outcome) float64 { return o.hit }), f(func(o *outcome) float64 { return o.mean }),
				f(func(o *outcome) float64 { return o.p50 }), f(func(o *outcome) float64 { return o.p90 }),
				f(func(o *outcome) float64 { return o.p99 }), f(func(o *outcome) float64 { return o.busy }),
				100*f(func(o *outcome) float64 { return o.leastHit }), 100*f(func(o *outcome) float64 { return o.mostHit }),
				f(func(o *outcome) float64 { return float64(o.prefill) / 1e6 }))
		}
		fmt.Fprintln(t)
	}
	if err := errors.Join(t.Flush(), restartTable(w, all)); err != nil {
		return err
	}
	if !slices.Contains(policies, "pooled") {
		return t.Flush()
	}
	fmt.Fprintf(t, "against the pooled bound (geometric means, at most 50)\n\thit\tmean TTFT\tp99\t\n")
	for _, p := range policies {
		ratio := func(field func(*outcome) float64) float64 {
			sum := 0.0
			for _, where := range wheres {
				sum += math.Log(min(median(where, p, field)/max(median(where, "pooled", field), 1e-6), 50))
			}
			return math.Exp(sum / float64(len(wheres)))
		}
		fmt.Fprintf(t, "%s\t%.3f\t%.2f\t%.2f\t\n", p, ratio(func(o *outcome) float64 { return max(o.hit, 1e-6) }),
			ratio(func(o *outcome) float64 { return o.mean }), ratio(func(o *outcome) float64 { return o.p99 }))
	}
	return t.Flush()
}

// restartTable says what became of the injected restarts, over all draws.
func restartTable(w io.Writer, all []*outcome) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	var sum []*outcome
	for _, o := range all {
		if o.restarts == (tally{}) {
			continue
		}
		i := slices.IndexFunc(sum, func(s *outcome) bool { return s.where() == o.where() && s.policy == o.policy })
		if i < 0 {
			sum, i = append(sum, &outcome{workload: o.workload, cache: o.cache, load: o.load, policy: o.policy, setting: o.setting}), len(sum)
		}
		r := &sum[i].restarts
		r.injected += o.restarts.injected
		r.shown += o.restarts.shown
		r.noticed += o.restarts.noticed
		r.within += o.restarts.within
		r.wrong += o.restarts.wrong
	}
	if len(sum) > 0 {
		fmt.Fprintf(t, "restarts\tpolicy\tinjected\tshown by 8 responses\tnoticed\tby 8\twhere none was\t\n")
	}
	for _, o := range sum {
		r := o.restarts
		fmt.Fprintf(t, "%s\t%s\t%d\t%d\t%d\t%d\t%d\t\n", o.where(), o.policy, r.injected, r.shown, r.noticed, r.within, r.wrong)
	}
	return t.Flush()
}

// distinct returns the values of a field in the order of their coming.
func distinct(all []*outcome, field func(*outcome) string) []string {
	var names []string
	for _, o := range all {
		if n := field(o); !slices.Contains(names, n) {
			names = append(names, n)
		}
	}
	return names
}

// writeCSV writes a line for each run.
func writeCSV(w io.Writer, all []*outcome) error {
	c := csv.NewWriter(w)
	lines := append(make([][]string, 0, 1+len(all)), []string{
		"workload", "replicas", "cache", "cache_tokens", "load", "draw", "speedup", "policy", "hit", "ttft_mean", "ttft_p50", "ttft_p90",
		"ttft_p99", "busiest_to_mean", "requests_most_to_mean", "replica_hit_least", "replica_hit_most", "prefill_tokens", "prefill_first_to_others", "ttft_p99_after_failure",
		"capacity_learned", "restarts_injected", "restarts_shown", "restarts_noticed", "restarts_noticed_by_8", "restarts_wrong",
	})
	for _, o := range all {
		line := append(make([]string, 0, len(lines[0])),
			o.workload, strconv.Itoa(o.setting.replicas), o.cache, strconv.Itoa(o.setting.capacity), number(o.load),
			strconv.FormatUint(o.draw, 10), number(o.setting.speedup), o.policy,
		)
		for _, x := range []float64{o.hit, o.mean, o.p50, o.p90, o.p99, o.busy, o.requests, o.leastHit, o.mostHit, float64(o.prefill), o.first, o.afterP99, o.capacity} {
			line = append(line, number(x))
		}
		for _, n := range []int{o.restarts.injected, o.restarts.shown, o.restarts.noticed, o.restarts.within, o.restarts.wrong} {
			line = append(line, strconv.Itoa(n))
		}
		lines = append(lines, line)
	}
	return c.WriteAll(lines)
}

func number(x float64) string { return strconv.FormatFloat(x, 'g', 6, 64) }

// drawing draws mean TTFT as bars on a logarithmic scale, a group for each
// setting, with the hit ratio beside them.
func drawing(w io.Writer, all []*outcome) error {
	const row, left, width, gap = 18, 150, 620, 34
	wheres, policies := distinct(all, (*outcome).where), distinct(all, func(o *outcome) string { return o.policy })
	least, most := math.Inf(1), 0.0
	for _, o := range all {
		least, most = min(least, max(o.mean, 1e-3)), max(most, o.mean)
	}
	axis := chart.Log(least, most*1.12, left, left+width)
	height := len(wheres)*(len(policies)*row+gap) + 60
	d := chart.New(left+width+90, height, "Mean time to first token and hit ratio, by workload and policy")
	for _, seconds := range axis.Decades() {
		x := axis.At(seconds)
		d.Line("#ddd", [2]float64{x, 20}, [2]float64{x, float64(height - 30)})
		d.Text(x, 14, fmt.Sprintf("%g s", seconds), `text-anchor="middle" fill="#555"`)
	}
	y := 24.0
	for _, where := range wheres {
		d.Text(8, y+14, where, `font-weight="bold"`)
		y += 22
		for _, p := range policies {
			for _, o := range all {
				if o.where() != where || o.policy != p {
					continue
				}
				fill := "#9aa7b5"
				switch {
				case strings.HasPrefix(p, "prefix_affinity"):
					fill = "#1f6feb"
				case p == "pooled" || p == "clairvoyant":
					fill = "#d5dae0"
				}
				end := axis.At(max(o.mean, 1e-3))
				d.Text(left-6, y+12, p, `text-anchor="end"`)
				d.Rect(left, y+2, max(end-left, 1), row-5, fill)
				d.Text(end+5, y+12, fmt.Sprintf("%.2f s, %.0f %%", o.mean, 100*o.hit), "")
				break
			}
			y += row
		}
		y += gap - 22
	}
	d.Text(left, float64(height-10), "mean time to first token (logarithmic), hit ratio; pooled and clairvoyant are bounds, not policies", `fill="#555"`)
	return d.Write(w)
}
