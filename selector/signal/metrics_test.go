package signal

import (
	"errors"
	"io"
	"strings"
	"testing"
)

// nothing is what text says that says nothing.
var nothing = EngineMetrics{
	Load:    Load{QueueDepth: -1, KVUsage: -1, CapacityTokens: -1},
	Running: -1, PrefixQueries: -1, PrefixHits: -1, StartTime: -1,
}

func TestParseMetrics(t *testing.T) {
	for _, c := range []struct {
		name string
		text string
		want EngineMetrics
	}{
		{
			name: "vllm/one engine",
			text: `# HELP python_info Python platform information
# TYPE python_info gauge
python_info{implementation="CPython",major="3",minor="12"} 1.0
# HELP process_start_time_seconds Start time of the process since unix epoch in seconds.
# TYPE process_start_time_seconds gauge
process_start_time_seconds 1.76446080017e+09
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 5.0
# HELP vllm:num_requests_waiting Number of requests waiting to be processed.
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="m"} 3.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 3.0
# HELP vllm:kv_cache_usage_perc KV-cache usage. 1 means 100 percent usage.
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.4
# HELP vllm:prefix_cache_queries_total Prefix cache queries, in terms of number of queried tokens.
# TYPE vllm:prefix_cache_queries_total counter
vllm:prefix_cache_queries_total{engine="0",model_name="m"} 2.96015e+06
# TYPE vllm:prefix_cache_queries_created gauge
vllm:prefix_cache_queries_created{engine="0",model_name="m"} 1.7e+09
vllm:prefix_cache_hits_total{engine="0",model_name="m"} 236901.0
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="16",cache_dtype="auto",enable_prefix_caching="True",engine="0",num_cpu_blocks="None",num_gpu_blocks="573",sliding_window="None"} 1.0
# TYPE vllm:time_to_first_token_seconds histogram
vllm:time_to_first_token_seconds_bucket{engine="0",le="0.001",model_name="m"} 0.0
vllm:time_to_first_token_seconds_bucket{engine="0",le="+Inf",model_name="m"} 9.0
vllm:time_to_first_token_seconds_count{engine="0",model_name="m"} 9.0
vllm:time_to_first_token_seconds_sum{engine="0",model_name="m"} 1.5
`,
			want: EngineMetrics{Load{3, 0.4, 9168}, "vllm", 5, 2960150, 236901, 1764460800.17},
		},
		{
			name: "vllm/two engines, sizes in tokens",
			text: `vllm:num_requests_running{engine="0",model_name="m"} 5
vllm:num_requests_running{engine="1",model_name="m"} 2
vllm:num_requests_waiting{engine="0",model_name="m"} 0
vllm:num_requests_waiting{engine="1",model_name="m"} 4
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.75
vllm:prefix_cache_queries_total{engine="0",model_name="m"} 100
vllm:prefix_cache_queries_total{engine="1",model_name="m"} 50
vllm:prefix_cache_hits_total{engine="0",model_name="m"} 40
vllm:prefix_cache_hits_total{engine="1",model_name="m"} 0
vllm:cache_config_info{block_size="8",engine="0",kv_cache_size_tokens="463459",num_gpu_blocks="320"} 1
vllm:cache_config_info{block_size="8",engine="1",kv_cache_size_tokens="463459",num_gpu_blocks="320"} 1
`,
			want: EngineMetrics{Load{4, 0.75, 926918}, "vllm", 7, 150, 40, -1},
		},
		{
			name: "vllm/old names",
			text: `vllm:num_requests_running{model_name="m"} 1.0
vllm:num_requests_waiting{model_name="m"} 0.0
vllm:gpu_cache_usage_perc{model_name="m"} 0.5
vllm:gpu_prefix_cache_queries_total{model_name="m"} 100.0
vllm:gpu_prefix_cache_hits_total{model_name="m"} 10.0
vllm:cache_config_info{block_size="16",num_gpu_blocks="None"} 1.0
`,
			want: EngineMetrics{Load{0, 0.5, -1}, "vllm", 1, 100, 10, -1},
		},
		{
			name: "sglang/colon",
			text: `# HELP sglang:num_queue_reqs The number of requests in the waiting queue.
# TYPE sglang:num_queue_reqs gauge
sglang:num_queue_reqs{engine_type="unified",model_name="m",moe_ep_rank="0",pp_rank="0",tp_rank="0"} 2826.0
sglang:num_queue_reqs{engine_type="unified",model_name="m",moe_ep_rank="0",pp_rank="0",priority="1",tp_rank="0"} 26.0
sglang:num_queue_reqs{engine_type="unified",model_name="m",moe_ep_rank="0",pp_rank="0",tp_rank="1"} 2826.0
sglang:num_running_reqs{engine_type="unified",model_name="m",moe_ep_rank="0",pp_rank="0",tp_rank="0"} 7.0
sglang:token_usage{engine_type="unified",model_name="m",moe_ep_rank="0",pp_rank="0",tp_rank="0"} 0.28
sglang:cache_hit_rate{engine_type="unified",model_name="m"} 0.5
sglang:prompt_tokens_total{is_streaming="false",model_name="m"} 4000.0
sglang:prompt_tokens_total{is_streaming="true",model_name="m"} 1000.0
sglang:cached_tokens_total{cache_source="device",model_name="m"} 1000.0
sglang:cached_tokens_total{cache_source="host",model_name="m"} 200.0
sglang:max_total_num_tokens{model_name="m",tp_rank="0"} 7.0
sglang:cache_config_info{model_name="m",num_pages="11147",page_size="64",tp_rank="0"} 1.0
sglang:cache_config_info{model_name="m",num_pages="11147",page_size="64",tp_rank="1"} 1.0
`,
			want: EngineMetrics{Load{2826, 0.28, 713408}, "sglang", 7, 5000, 1200, -1},
		},
		{
			name: "sglang/underscore, replicated",
			text: `sglang_num_queue_reqs{dp_rank="0",model_name="m"} 1
sglang_num_queue_reqs{dp_rank="1",model_name="m"} 2
sglang_num_running_reqs{dp_rank="0",model_name="m"} 3
sglang_num_running_reqs{dp_rank="1",model_name="m"} 4
sglang_token_usage{dp_rank="0",model_name="m"} 0.1
sglang_token_usage{dp_rank="1",model_name="m"} 0.2
sglang_max_total_num_tokens{dp_rank="0",model_name="m"} 1024
sglang_max_total_num_tokens{dp_rank="1",model_name="m"} 1024
`,
			want: EngineMetrics{Load{3, 0.2, 2048}, "sglang", 7, -1, -1, -1},
		},
		{
			name: "llama.cpp/now",
			text: `# HELP llamacpp:prompt_tokens_total Number of prompt tokens processed.
# TYPE llamacpp:prompt_tokens_total counter
llamacpp:prompt_tokens_total 1000
llamacpp:prompt_tokens_cached_total 3.21457e+06
# HELP llamacpp:requests_processing Number of requests processing.
# TYPE llamacpp:requests_processing gauge
llamacpp:requests_processing 1
llamacpp:requests_deferred 2
`,
			want: EngineMetrics{Load{2, -1, -1}, "llama.cpp", 1, 3215570, 3214570, -1},
		},
		{
			name: "llama.cpp/old",
			text: `llamacpp:prompt_tokens_total 1000
llamacpp:kv_cache_usage_ratio 0.125
llamacpp:requests_processing 1
llamacpp:requests_deferred 0
`,
			want: EngineMetrics{Load{0, 0.125, -1}, "llama.cpp", 1, -1, -1, -1},
		},
		{
			name: "trtllm/serve",
			text: `process_start_time_seconds 1.7e+09
trtllm_num_requests_waiting{engine_type="trtllm",model_name="m"} 4.0
trtllm_num_requests_running{engine_type="trtllm",model_name="m"} 6.0
trtllm_kv_cache_utilization{engine_type="trtllm",model_name="m"} 0.62
trtllm_kv_cache_hit_rate{engine_type="trtllm",model_name="m"} 0.5
trtllm_kv_cache_max_blocks{engine_type="trtllm",model_name="m"} 1000.0
trtllm_kv_cache_tokens_per_block{engine_type="trtllm",model_name="m"} 32.0
`,
			want: EngineMetrics{Load{4, 0.62, 32000}, "trtllm", 6, -1, -1, 1.7e9},
		},
		{
			name: "triton/trtllm backend",
			text: `# HELP nv_trt_llm_request_metrics TRT LLM request metrics
# TYPE nv_trt_llm_request_metrics gauge
nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="waiting",version="1"} 3
nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="context",version="1"} 1
nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="scheduled",version="1"} 4
nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="max",version="1"} 512
nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="active",version="1"} 7
# TYPE nv_trt_llm_kv_cache_block_metrics gauge
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="fraction",model="tensorrt_llm",version="1"} 0.25
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="tokens_per",model="tensorrt_llm",version="1"} 64
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="used",model="tensorrt_llm",version="1"} 512
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="free",model="tensorrt_llm",version="1"} 1536
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="max",model="tensorrt_llm",version="1"} 2048
`,
			want: EngineMetrics{Load{3, 0.25, 131072}, "triton", 4, -1, -1, -1},
		},
		{
			name: "tgi/3",
			text: `# TYPE tgi_queue_size gauge
tgi_queue_size 3
# TYPE tgi_batch_current_size gauge
tgi_batch_current_size 5
tgi_batch_current_max_tokens 4096
tgi_request_count 150
`,
			want: EngineMetrics{Load{3, -1, -1}, "tgi", 5, -1, -1, -1},
		},
		{
			name: "lmdeploy/turbomind",
			text: `lmdeploy:num_requests_running{engine="0",model_name="m"} 5.0
lmdeploy:num_requests_waiting{engine="0",model_name="m"} 10.0
lmdeploy:gpu_cache_usage_perc{engine="0",model_name="m"} 0.9
`,
			want: EngineMetrics{Load{10, 0.9, -1}, "lmdeploy", 5, -1, -1, -1},
		},
		{name: "unknown/nothing", text: "", want: nothing},
		{
			name: "unknown/another program",
			text: "process_start_time_seconds 5\nup 1\nhttp_requests_total{code=\"200\"} 7\n",
			want: func() EngineMetrics { m := nothing; m.StartTime = 5; return m }(),
		},
		{name: "unknown/a page", text: "<html>\n<body>vllm:num_requests_waiting 5</body>\n</html>\n", want: nothing},
		{
			name: "odd/values that can't be",
			text: `vllm:num_requests_waiting{engine="0"} NaN
vllm:num_requests_waiting{engine="1"} -3
vllm:num_requests_waiting{engine="2"} +Inf
vllm:num_requests_running 1
vllm:kv_cache_usage_perc 40
vllm:gpu_cache_usage_perc 0.4
vllm:cache_config_info{block_size="1e9",num_gpu_blocks="1e9"} 1
`,
			want: EngineMetrics{Load{-1, 0.4, -1}, "vllm", 1, -1, -1, -1},
		},
		{
			name: "odd/more tokens than there can be",
			text: "trtllm_num_requests_waiting 0\ntrtllm_kv_cache_max_blocks 1e9\ntrtllm_kv_cache_tokens_per_block 1e9\n",
			want: EngineMetrics{Load{0, -1, -1}, "trtllm", -1, -1, -1, -1},
		},
		{
			name: "odd/cache not set up",
			text: "vllm:num_requests_waiting 0\nvllm:cache_config_info{block_size=\"16\",num_gpu_blocks=\"0\"} 1\n",
			want: EngineMetrics{Load{0, -1, -1}, "vllm", -1, -1, -1, -1},
		},
		{
			name: "odd/broken lines of no interest",
			text: "# TYPE x y z\nx{ 1\n}\nvllm:num_requests_waiting 2\n\x00\xff 7\n",
			want: EngineMetrics{Load{2, -1, -1}, "vllm", -1, -1, -1, -1},
		},
		{
			name: "odd/long lines",
			text: "x{a=\"" + strings.Repeat("y", maxLineBytes) + "\"} 1\n" +
				"vllm:num_requests_running{a=\"" + strings.Repeat("vllm:num_requests_running 9 ", maxLineBytes/10) + "\"} 1\n" +
				strings.Repeat("y", maxLineBytes) + "vllm:num_requests_running 9\n" +
				"  vllm:num_requests_waiting \t 2 1764460800000\n",
			want: EngineMetrics{Load{2, -1, -1}, "vllm", -1, -1, -1, -1},
		},
		{
			name: "odd/cut off in a figure",
			text: "vllm:num_requests_waiting 2\nvllm:num_requests_running 12",
			want: EngineMetrics{Load{2, -1, -1}, "vllm", -1, -1, -1, -1},
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			got, err := ParseMetrics(strings.NewReader(c.text))
			if err != nil || got != c.want {
				t.Errorf("got %+v, %v; want %+v", got, err, c.want)
			}
		})
	}
}

type brokenReader struct{}

var errBroken = errors.New("connection reset")

func (brokenReader) Read([]byte) (int, error) { return 0, errBroken }

func TestParseMetricsErrors(t *testing.T) {
	for _, c := range []struct {
		name string
		text io.Reader
		want string
	}{
		{"unreadable/connection", io.MultiReader(strings.NewReader("vllm:num_requests_waiting 2\n"), brokenReader{}), "reading engine metrics: connection reset"},
		{"unreadable/no value", strings.NewReader("vllm:num_requests_waiting x\n"), "parsing engine metrics: text format parsing error in line 1"},
		{"unreadable/labels", strings.NewReader("vllm:num_requests_waiting{a=b} 1\n"), "parsing engine metrics: "},
		{"endless/known lines", strings.NewReader(strings.Repeat("tgi_queue_size 1\n", maxKeptBytes/16)), "reading engine metrics: more lines of known metrics than 128 KiB"},
	} {
		t.Run(c.name, func(t *testing.T) {
			got, err := ParseMetrics(c.text)
			if err == nil || !strings.HasPrefix(err.Error(), c.want) {
				t.Errorf("got %v, want %q", err, c.want)
			}
			if got != nothing {
				t.Errorf("got %+v with an error", got)
			}
		})
	}
}

// The text of a busy vLLM: figures amid 200 KB of histograms.
func BenchmarkParseMetrics(b *testing.B) {
	var text strings.Builder
	for _, name := range []string{"time_to_first_token_seconds", "e2e_request_latency_seconds", "request_prompt_tokens"} {
		for range 600 {
			text.WriteString(`vllm:` + name + `_bucket{engine="0",le="0.001",model_name="meta-llama/Llama-3.1-8B-Instruct"} 0.0` + "\n")
		}
	}
	text.WriteString(`vllm:num_requests_running{engine="0",model_name="m"} 5.0
vllm:num_requests_waiting{engine="0",model_name="m"} 3.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.4
vllm:prefix_cache_queries_total{engine="0",model_name="m"} 2.96015e+06
vllm:prefix_cache_hits_total{engine="0",model_name="m"} 236901.0
vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="573"} 1.0
`)
	b.SetBytes(int64(text.Len()))
	b.ReportAllocs()
	for b.Loop() {
		if m, err := ParseMetrics(strings.NewReader(text.String())); err != nil || m.Engine != "vllm" {
			b.Fatal(m, err)
		}
	}
}

func FuzzParseMetrics(f *testing.F) {
	f.Add([]byte("vllm:num_requests_running{engine=\"0\",model_name=\"m\"} 5.0\nvllm:cache_config_info{block_size=\"16\",num_gpu_blocks=\"573\"} 1.0\n"))
	f.Add([]byte("# TYPE sglang:num_queue_reqs gauge\nsglang_num_queue_reqs{tp_rank=\"0\"} 2 1764460800000\n"))
	f.Add([]byte("nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type=\"tokens_per\"} 64\nnv_trt_llm_request_metrics{request_type=\"waiting\"} 1\n"))
	f.Add([]byte("process_start_time_seconds 1.7e9\ntgi_queue_size +Inf\n"))
	f.Fuzz(func(t *testing.T, text []byte) {
		m, err := ParseMetrics(strings.NewReader(string(text)))
		if err != nil && m != nothing {
			t.Errorf("got %+v with an error", m)
		}
		for _, v := range []float64{m.QueueDepth, m.KVUsage, m.CapacityTokens, m.Running, m.PrefixQueries, m.PrefixHits, m.StartTime} {
			if v != -1 && !(v >= 0 && v <= 1e20) {
				t.Errorf("impossible: %+v", m)
			}
		}
		if m.KVUsage > 1 || m.CapacityTokens == 0 || (m.Engine == "") != (m.QueueDepth < 0 && m.Running < 0) {
			t.Errorf("impossible: %+v", m)
		}
	})
}
