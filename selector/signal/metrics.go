package signal

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strconv"
	"strings"

	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
)

// EngineMetrics is what an engine said about itself in its Prometheus text. A
// negative figure was not said.
//
// Where one address serves several engines (data parallelism), requests, tokens
// and capacities are their sum, and the KV usage is that of the fullest.
type EngineMetrics struct {
	Load
	Engine  string  // "vllm", "sglang", "llama.cpp", "trtllm", "triton", "tgi", "lmdeploy"; "": none that is known here
	Running float64 // requests being prefilled or decoded

	// Prompt tokens looked up in the prefix cache since the engine started, and
	// those found there. They only grow: a lower figure is a restart.
	PrefixQueries, PrefixHits float64

	// StartTime is process_start_time_seconds, in Unix seconds. Python engines
	// leave it out where several processes share their metrics; llama.cpp has it
	// in the response header Process-Start-Time-Unix instead.
	StartTime float64
}

// series names the samples to read: those of one metric, or of them only those
// with a label's value. Names have "_" for ":", which covers both of SGLang's
// prefixes.
type series struct{ name, label, value string }

// cacheInfo names a metric whose labels describe the KV cache.
type cacheInfo struct {
	name         string
	tokens       string // its tokens, if it says so
	size, blocks string // tokens a block, blocks
}

// engine says where an engine's figures are. Of several series the first that
// is there counts.
type engine struct {
	name             string
	waiting, running series
	usage            []series
	queries, hits    []series
	misses           series // for engines that count these instead of queries
	info             cacheInfo
	capacity         series // in tokens
	size, blocks     series // tokens a block, blocks
}

const startTime = "process_start_time_seconds"

var engines = [...]engine{
	{
		name:    "vllm",
		waiting: series{name: "vllm_num_requests_waiting"},
		running: series{name: "vllm_num_requests_running"},
		usage:   []series{{name: "vllm_kv_cache_usage_perc"}, {name: "vllm_gpu_cache_usage_perc"}},
		queries: []series{{name: "vllm_prefix_cache_queries_total"}, {name: "vllm_gpu_prefix_cache_queries_total"}},
		hits:    []series{{name: "vllm_prefix_cache_hits_total"}, {name: "vllm_gpu_prefix_cache_hits_total"}},
		// Models with several kinds of attention have blocks of several sizes:
		// only kv_cache_size_tokens, where it is said, is right for them.
		info: cacheInfo{"vllm_cache_config_info", "kv_cache_size_tokens", "block_size", "num_gpu_blocks"},
	},
	{
		name:     "sglang",
		waiting:  series{name: "sglang_num_queue_reqs"},
		running:  series{name: "sglang_num_running_reqs"},
		usage:    []series{{name: "sglang_token_usage"}},
		queries:  []series{{name: "sglang_prompt_tokens_total"}},
		hits:     []series{{name: "sglang_cached_tokens_total"}},
		info:     cacheInfo{name: "sglang_cache_config_info", size: "page_size", blocks: "num_pages"},
		capacity: series{name: "sglang_max_total_num_tokens"},
	},
	{
		name:    "llama.cpp",
		waiting: series{name: "llamacpp_requests_deferred"},
		running: series{name: "llamacpp_requests_processing"},
		usage:   []series{{name: "llamacpp_kv_cache_usage_ratio"}},
		hits:    []series{{name: "llamacpp_prompt_tokens_cached_total"}},
		misses:  series{name: "llamacpp_prompt_tokens_total"},
	},
	{
		name:    "trtllm",
		waiting: series{name: "trtllm_num_requests_waiting"},
		running: series{name: "trtllm_num_requests_running"},
		usage:   []series{{name: "trtllm_kv_cache_utilization"}},
		size:    series{name: "trtllm_kv_cache_tokens_per_block"},
		blocks:  series{name: "trtllm_kv_cache_max_blocks"},
	},
	{
		name:    "triton",
		waiting: series{"nv_trt_llm_request_metrics", "request_type", "waiting"},
		running: series{"nv_trt_llm_request_metrics", "request_type", "scheduled"},
		usage:   []series{{"nv_trt_llm_kv_cache_block_metrics", "kv_cache_block_type", "fraction"}},
		size:    series{"nv_trt_llm_kv_cache_block_metrics", "kv_cache_block_type", "tokens_per"},
		blocks:  series{"nv_trt_llm_kv_cache_block_metrics", "kv_cache_block_type", "max"},
	},
	{
		name:    "tgi",
		waiting: series{name: "tgi_queue_size"},
		running: series{name: "tgi_batch_current_size"},
	},
	{
		name:    "lmdeploy",
		waiting: series{name: "lmdeploy_num_requests_waiting"},
		running: series{name: "lmdeploy_num_requests_running"},
		usage:   []series{{name: "lmdeploy_gpu_cache_usage_perc"}},
	},
}

// wanted has the names of all metrics that are read.
var wanted = func() map[string]bool {
	names := map[string]bool{startTime: true}
	for _, e := range engines {
		for _, list := range [...][]series{{e.waiting, e.running, e.misses, e.capacity, e.size, e.blocks}, e.usage, e.queries, e.hits} {
			for _, s := range list {
				names[s.name] = true
			}
		}
		names[e.info.name] = true
	}
	delete(names, "")
	return names
}()

const (
	// maxLineBytes is well above vLLM's cache_config_info, the longest line of
	// interest, which has some 2 KB. Longer lines are passed over.
	maxLineBytes = 16 << 10
	// maxKeptBytes is enough for sixteen vLLM engines behind one address.
	maxKeptBytes = 128 << 10
)

// ParseMetrics reads an engine's Prometheus text. It reads r to its end, so the
// caller bounds it; an engine has 20 to 500 KB to say, of which only the lines
// of known metrics are parsed. A last line without its line feed was cut off and
// doesn't count. Text of an unknown engine is no error, unreadable text is.
func ParseMetrics(r io.Reader) (EngineMetrics, error) {
	m := EngineMetrics{
		Load: Load{QueueDepth: -1, KVUsage: -1, CapacityTokens: -1}, Running: -1,
		PrefixQueries: -1, PrefixHits: -1, StartTime: -1,
	}
	text, err := knownLines(r)
	if err != nil {
		return m, fmt.Errorf("reading engine metrics: %w", err)
	}
	parser := expfmt.NewTextParser(model.LegacyValidation)
	parsed, err := parser.TextToMetricFamilies(bytes.NewReader(text))
	if err != nil {
		return m, fmt.Errorf("parsing engine metrics: %w", err)
	}
	all := families(parsed)
	m.StartTime = all.max(series{name: startTime})
	for _, e := range engines {
		if waiting, running := all.sum(e.waiting), all.sum(e.running); waiting >= 0 || running >= 0 {
			m.Engine, m.QueueDepth, m.Running = e.name, waiting, running
			m.read(all, &e)
			break
		}
	}
	return m, nil
}

func (m *EngineMetrics) read(all families, e *engine) {
	for _, s := range e.usage {
		if usage := all.max(s); usage >= 0 && usage <= 1 {
			m.KVUsage = usage
			break
		}
	}
	m.PrefixQueries, m.PrefixHits = all.firstSum(e.queries), all.firstSum(e.hits)
	if misses := all.sum(e.misses); misses >= 0 && m.PrefixHits >= 0 {
		m.PrefixQueries = misses + m.PrefixHits
	}
	m.CapacityTokens = all.infoTokens(e.info)
	if m.CapacityTokens < 0 {
		m.CapacityTokens = all.sum(e.capacity)
	}
	if size, blocks := all.max(e.size), all.sum(e.blocks); m.CapacityTokens < 0 && size >= 0 && blocks >= 0 {
		m.CapacityTokens = size * blocks
	}
	if m.CapacityTokens == 0 || !plausible(m.CapacityTokens) {
		m.CapacityTokens = -1 // zero: not set up yet, for a cache of no tokens serves nobody
	}
}

var errTooMuch = errors.New("more lines of known metrics than " + strconv.Itoa(maxKeptBytes>>10) + " KiB, expected one engine's")

// knownLines returns the samples of the wanted metrics, their names with "_" for
// ":". Comments are left out, so that the parser finds all samples untyped.
func knownLines(r io.Reader) ([]byte, error) {
	var (
		kept  []byte
		lines = bufio.NewReaderSize(r, maxLineBytes)
		long  bool // the line's beginning was passed over
	)
	for {
		line, err := lines.ReadSlice('\n')
		if err == io.EOF {
			return kept, nil
		}
		if err != nil && !errors.Is(err, bufio.ErrBufferFull) {
			return nil, err
		}
		whole := err == nil && !long
		long = err != nil
		if !whole {
			continue
		}
		line = bytes.TrimLeft(line, " \t")
		end := bytes.IndexAny(line, "{ \t")
		if end < 0 {
			continue
		}
		name := line[:end]
		if colon := bytes.IndexByte(name, ':'); colon >= 0 {
			name[colon] = '_'
		}
		if !wanted[string(name)] {
			continue
		}
		if len(kept)+len(line) > maxKeptBytes {
			return nil, errTooMuch
		}
		kept = append(kept, line...)
	}
}

// families are the parsed metrics by name.
type families map[string]*dto.MetricFamily

// fold gives what value reads from the samples of a metric: one figure for each
// engine. Of samples that differ only in labels which don't tell engines apart
// (ranks of one engine, SGLang's priorities beside their total) the largest
// counts.
func (f families) fold(name string, value func(*dto.Metric) (float64, bool)) []float64 {
	family := f[name]
	if family == nil {
		return nil
	}
	byEngine := make(map[string]float64, len(family.Metric))
	for _, sample := range family.Metric {
		if v, ok := value(sample); ok && plausible(v) {
			id := identity(sample)
			byEngine[id] = max(byEngine[id], v)
		}
	}
	return slices.Collect(maps.Values(byEngine))
}

func (f families) values(s series) []float64 {
	return f.fold(s.name, func(sample *dto.Metric) (float64, bool) {
		return sample.GetUntyped().GetValue(), s.label == "" || labelOf(sample, s.label) == s.value
	})
}

func identity(sample *dto.Metric) string {
	var id strings.Builder
	for _, l := range sample.Label {
		switch l.GetName() {
		case "tp_rank", "pp_rank", "moe_ep_rank", "priority", "pid":
		default:
			id.WriteString(strconv.Quote(l.GetName()))
			id.WriteString(strconv.Quote(l.GetValue()))
		}
	}
	return id.String()
}

func labelOf(sample *dto.Metric, name string) string {
	for _, l := range sample.Label {
		if l.GetName() == name {
			return l.GetValue()
		}
	}
	return ""
}

// sum adds up a series, max takes its largest value; both are -1 without one.
func (f families) sum(s series) float64 { return total(f.values(s)) }

func (f families) max(s series) float64 {
	largest := -1.0
	for _, v := range f.values(s) {
		largest = max(largest, v)
	}
	return largest
}

func (f families) firstSum(list []series) float64 {
	for _, s := range list {
		if sum := f.sum(s); sum >= 0 {
			return sum
		}
	}
	return -1
}

// infoTokens reads capacities from labels. vLLM says "None" where it doesn't
// know.
func (f families) infoTokens(info cacheInfo) float64 {
	return total(f.fold(info.name, func(sample *dto.Metric) (float64, bool) {
		if tokens, ok := number(labelOf(sample, info.tokens)); ok {
			return tokens, true
		}
		size, known := number(labelOf(sample, info.size))
		blocks, counted := number(labelOf(sample, info.blocks))
		return size * blocks, known && counted
	}))
}

func total(values []float64) float64 {
	if len(values) == 0 {
		return -1
	}
	sum := 0.0
	for _, v := range values {
		sum += v
	}
	return sum
}
