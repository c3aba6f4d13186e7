package engine

import (
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"sync/atomic"
	"time"
)

// Stats is what an engine received and did since it was started. Restarts
// don't reset it.
type Stats struct {
	Requests int64 `json:"requests"` // completions asked for
	Served   int64 `json:"served"`   // answered to the end
	Aborted  int64 `json:"aborted"`  // given up by their client before the end
	Refused  int64 `json:"refused"`  // 429 because the queue was full
	Rejected int64 `json:"rejected"` // 400 because the request made no sense
	Failed   int64 `json:"failed"`   // ended by a fault or a restart

	// Of requests whose prefill began; the difference is what was prefilled.
	PromptTokens int64 `json:"prompt_tokens"`
	CachedTokens int64 `json:"cached_tokens"`
	OutputTokens int64 `json:"output_tokens"`

	Waiting int     `json:"waiting"` // requests now
	Running int     `json:"running"` // requests now
	KVUsage float64 `json:"kv_usage"`

	// Bodies received in full. BodySum adds up their xxhash64s, modulo 2^64: it
	// is the same whatever their order, and differs if one was lost, doubled or
	// changed.
	Bodies    int64  `json:"bodies"`
	BodyBytes int64  `json:"body_bytes"`
	BodySum   uint64 `json:"body_sum"`
}

// HitRatio is the share of the prompt tokens that came from the cache; 0 for none.
func (s Stats) HitRatio() float64 {
	return float64(s.CachedTokens) / float64(max(s.PromptTokens, 1))
}

// tally holds the figures that handlers count.
type tally struct {
	requests, served, aborted, refused, rejected, failed atomic.Int64
	bodies, bodyBytes                                    atomic.Int64
	bodySum                                              atomic.Uint64
}

// Stats returns the figures up to now.
func (e *Engine) Stats() Stats {
	l := e.sched.load()
	t := &e.tally
	return Stats{
		Requests: t.requests.Load(), Served: t.served.Load(), Aborted: t.aborted.Load(),
		Refused: t.refused.Load(), Rejected: t.rejected.Load(), Failed: t.failed.Load(),
		PromptTokens: l.prompt, CachedTokens: l.cached, OutputTokens: l.output,
		Waiting: l.waiting, Running: l.running, KVUsage: l.used,
		Bodies: t.bodies.Load(), BodyBytes: t.bodyBytes.Load(), BodySum: t.bodySum.Load(),
	}
}

// metrics answers in the Prometheus text format with vLLM's names.
func (e *Engine) metrics(w http.ResponseWriter, _ *http.Request) {
	l := e.sched.load()
	w.Header().Set("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
	model := `{engine="0",model_name="` + e.cfg.Model + `"}`
	for _, m := range []struct {
		name, kind, help, labels string
		value                    float64
	}{
		{"vllm:num_requests_running", "gauge", "Requests in prefill and decode.", model, float64(l.running)},
		{"vllm:num_requests_waiting", "gauge", "Requests waiting for their prefill.", model, float64(l.waiting)},
		{"vllm:kv_cache_usage_perc", "gauge", "Share of the KV memory that running requests hold. 1 means all.", model, l.used},
		{"vllm:prefix_cache_queries_total", "counter", "Prompt tokens looked up in the prefix cache.", model, float64(l.prompt)},
		{"vllm:prefix_cache_hits_total", "counter", "Prompt tokens found in the prefix cache.", model, float64(l.cached)},
		{
			"vllm:cache_config_info", "gauge", "Shape of the KV memory.",
			fmt.Sprintf(`{block_size="%d",num_gpu_blocks="%d"}`, BlockTokens, e.cfg.CapacityTokens/BlockTokens), 1,
		},
		{
			"process_start_time_seconds", "gauge", "Unix time of the process's start.", "",
			float64(e.started.Load()) / float64(time.Second),
		},
	} {
		// The error is a client that has left.
		_, _ = fmt.Fprintf(w, "# HELP %s %s\n# TYPE %s %s\n%s%s %s\n",
			m.name, m.help, m.name, m.kind, m.name, m.labels, pythonFloat(m.value))
	}
}

const (
	orcaFormatHeader = "Endpoint-Load-Metrics-Format"
	orcaHeader       = "Endpoint-Load-Metrics"
)

// orca returns the load report that a request asked for by format, the way
// vLLM writes it (vllm/entrypoints/openai/orca_metrics.py), or "".
func orca(format string, l load) string {
	usage, queue := pythonFloat(l.used), pythonFloat(float64(l.waiting))
	switch strings.ToLower(format) {
	case "text":
		return "TEXT named_metrics.kv_cache_usage_perc=" + usage + ", named_metrics.num_requests_waiting=" + queue
	case "json":
		return `JSON {"named_metrics": {"kv_cache_usage_perc": ` + usage + `, "num_requests_waiting": ` + queue + `}}`
	}
	return ""
}

// pythonFloat prints a float as Python does: 3.0, 0.25, 5e-05.
func pythonFloat(v float64) string {
	format := byte('f')
	if v != 0 && v < 1e-4 {
		format = 'e'
	}
	s := strconv.FormatFloat(v, format, -1, 64)
	if !strings.ContainsAny(s, ".e") {
		s += ".0"
	}
	return s
}
