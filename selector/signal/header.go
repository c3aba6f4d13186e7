package signal

import (
	"bytes"
	"encoding/json"
	"strconv"
	"strings"
)

// Load is what an engine said about itself in a response. A negative field was
// not said.
type Load struct {
	QueueDepth     float64 // requests waiting for their prefill
	KVUsage        float64 // share of the KV cache in use, 0 to 1
	CapacityTokens float64 // tokens that the KV cache holds
}

// maxReportBytes bounds a load report. vLLM's and Triton's have under 200
// bytes; data parallel ones repeat an entry per engine.
const maxReportBytes = 16 << 10

// ParseORCA reads the values of the header endpoint-load-metrics, which vLLM and
// Triton's TensorRT-LLM backend send to requests that ask for it with
// endpoint-load-metrics-format:
//
//	TEXT named_metrics.kv_cache_usage_perc=0.4, named_metrics.num_requests_waiting=3.0
//	JSON {"named_metrics": {"kv_cache_utilization": 0.25, "max_token_capacity": 131072}}
//
// An entry that comes several times (one per data-parallel engine) counts with
// its largest value. The result is false if no entry is known: with its
// statistics off vLLM sends an empty report, which must not pass for an idle
// engine. Entries that can't be read are passed over.
func ParseORCA(values []string) (Load, bool) {
	load := Load{QueueDepth: -1, KVUsage: -1, CapacityTokens: -1}
	for _, v := range values {
		v = strings.TrimSpace(v)
		if len(v) < len("TEXT ") || len(v) > maxReportBytes || v[4] != ' ' {
			continue
		}
		switch format, report := v[:4], v[5:]; {
		case strings.EqualFold(format, "TEXT"):
			load.addText(report)
		case strings.EqualFold(format, "JSON"):
			load.addJSON(report)
		}
	}
	return load, load.QueueDepth >= 0 || load.KVUsage >= 0 || load.CapacityTokens >= 0
}

func (l *Load) addText(report string) {
	for entry := range strings.SplitSeq(report, ",") {
		name, value, found := strings.Cut(entry, "=")
		if !found {
			continue
		}
		if v, ok := number(value); ok {
			l.add(strings.TrimPrefix(strings.TrimSpace(name), "named_metrics."), v)
		}
	}
}

func (l *Load) addJSON(report string) {
	if json.Valid([]byte(report)) { // a report that isn't JSON says nothing
		l.addObject(json.NewDecoder(strings.NewReader(report)), true)
	}
}

// addObject reads valid JSON member by member, so that every one of several equal
// names counts.
func (l *Load) addObject(d *json.Decoder, outer bool) {
	if open, err := d.Token(); err != nil || open != json.Delim('{') {
		return
	}
	for d.More() {
		var value json.RawMessage
		name, err := d.Token()
		if err != nil || d.Decode(&value) != nil {
			return
		}
		if v, ok := number(string(value)); ok {
			l.add(strings.TrimPrefix(name.(string), "named_metrics."), v)
		} else if outer && name == "named_metrics" {
			l.addObject(json.NewDecoder(bytes.NewReader(value)), false)
		}
	}
}

func (l *Load) add(name string, v float64) {
	switch name {
	case "num_requests_waiting": // vLLM
		l.QueueDepth = max(l.QueueDepth, v)
	case "kv_cache_usage_perc", "kv_cache_utilization": // vLLM, Triton
		if v <= 1 {
			l.KVUsage = max(l.KVUsage, v)
		}
	case "max_token_capacity": // Triton
		l.CapacityTokens = max(l.CapacityTokens, v)
	}
}

// ParseCount reads a header whose value is a plain number that isn't negative,
// such as a gateway's count of cached tokens or of queued requests. The largest
// of several values counts; false if none is such a number.
func ParseCount(values []string) (float64, bool) {
	count := -1.0
	for _, v := range values {
		if n, ok := number(v); ok {
			count = max(count, n)
		}
	}
	return count, count >= 0
}

// number reads a plausible decimal number. The words and hexadecimal forms that
// strconv knows are none.
func number(s string) (float64, bool) {
	s = strings.TrimSpace(s)
	for i := range len(s) {
		if c := s[i]; (c < '0' || c > '9') && c != '.' && c != 'e' && c != 'E' && c != '+' && c != '-' {
			return 0, false
		}
	}
	v, err := strconv.ParseFloat(s, 64)
	return v, err == nil && plausible(v)
}

// plausible says whether v can be a count or a time: a number that isn't
// negative and keeps sums and products of several finite.
func plausible(v float64) bool { return v >= 0 && v <= 1e15 }
