package signal

import "strings"

// body is one response body as an engine writes it, and what a Tap must tell of
// it.
type body struct {
	name   string
	format Format
	text   string
	usage  Usage
	first  int // number of the event or line, from 1, that is the first with output; 0: none
	id     string
}

var unsaid = Usage{PromptTokens: -1, CachedTokens: -1, OutputTokens: -1}

// forged is an answer in which a model writes whatever a tap looks for.
const forged = `"},"usage":{"prompt_tokens":7,"prompt_tokens_details":{"cached_tokens":5}},"type":"ping","error":1,` +
	"\n\ndata: {\"usage\":{\"prompt_tokens\":7,\"prompt_tokens_details\":{\"cached_tokens\":5}}}\n\n" +
	"{\"prompt_eval_count\":7,\"prompt_eval_cached_count\":5}\n" +
	`\"usage\":{\"cached_tokens\":5}\\`

// quote spells s as a JSON string.
func quote(s string) string {
	return `"` + strings.NewReplacer(`\`, `\\`, `"`, `\"`, "\n", `\n`).Replace(s) + `"`
}

var forgedDelta = `data: {"id":"c","object":"chat.completion.chunk","choices":[{"index":0,"delta":{"content":` + quote(forged) + `},"finish_reason":null}]}` + "\n\n"

var bodies = []body{
	{
		name: "vllm/chat", format: JSON,
		text:  `{"id":"chatcmpl-1","object":"chat.completion","created":1,"model":"m","choices":[{"index":0,"message":{"role":"assistant","reasoning_content":null,"content":"Hi","tool_calls":[]},"logprobs":null,"finish_reason":"stop","stop_reason":null}],"usage":{"prompt_tokens":100,"total_tokens":150,"completion_tokens":50,"prompt_tokens_details":{"cached_tokens":64}},"prompt_logprobs":null,"kv_transfer_params":null}`,
		usage: Usage{100, 64, 50},
	},
	{
		name: "vllm/chat without details", format: JSON,
		text:  `{"id":"chatcmpl-1","object":"chat.completion","choices":[],"usage":{"prompt_tokens":100,"total_tokens":150,"completion_tokens":50,"prompt_tokens_details":null}}`,
		usage: Usage{100, -1, 50},
	},
	{
		name: "vllm/chat with an empty count", format: JSON,
		text:  `{"object":"chat.completion","usage":{"prompt_tokens":100,"prompt_tokens_details":{"cached_tokens":null}}}`,
		usage: Usage{100, -1, -1},
	},
	{
		name: "vllm/chat stream", format: SSE,
		text: `data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]}

data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,"delta":{"content":"Hi"},"logprobs":null,"finish_reason":null}]}

data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,"delta":{"content":""},"logprobs":null,"finish_reason":"stop","stop_reason":null}]}

data: {"id":"chatcmpl-1","object":"chat.completion.chunk","model":"m","choices":[],"usage":{"prompt_tokens":100,"total_tokens":150,"completion_tokens":50,"prompt_tokens_details":{"cached_tokens":64}}}

data: [DONE]

`,
		usage: Usage{100, 64, 50}, first: 2,
	},
	{
		name: "vllm/chat stream with continuous usage", format: SSE,
		text: `data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}],"usage":{"prompt_tokens":100,"total_tokens":100,"completion_tokens":0}}

data: {"choices":[{"index":0,"delta":{"content":"Hi"},"finish_reason":null}],"usage":{"prompt_tokens":100,"total_tokens":101,"completion_tokens":1}}

data: {"choices":[],"usage":{"prompt_tokens":100,"total_tokens":101,"completion_tokens":1,"prompt_tokens_details":{"cached_tokens":0}}}

`,
		usage: Usage{100, 0, 1}, first: 2,
	},
	{
		name: "vllm/chat stream of a tool call", format: SSE,
		text: `data: {"choices":[{"index":0,"delta":{"role":"assistant"},"finish_reason":null}]}

data: {"choices":[{"index":0,"delta":{"tool_calls":[]},"finish_reason":null}]}

data: {"choices":[{"index":0,"delta":{"tool_calls":[{"index":0,"id":"call_1","type":"function","function":{"name":"f"}}]},"finish_reason":null}]}

`,
		usage: unsaid, first: 3,
	},
	{
		name: "vllm/chat stream without a word", format: SSE,
		text: `data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}

data: {"choices":[{"index":0,"delta":{"content":""},"finish_reason":"stop"}]}

`,
		usage: unsaid, first: 2,
	},
	{
		name: "vllm/chat stream that fails", format: SSE,
		text: `data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}

data: {"error": {"object": "error", "message": "out of memory", "type": "InternalServerError", "param": null, "code": 500}}

data: [DONE]

`,
		usage: unsaid,
	},
	{
		name: "vllm/chat stream that fails, old", format: SSE,
		text:  `data: {"object":"error","message":"out of memory","type":"InternalServerError","param":null,"code":500}` + "\n\n",
		usage: unsaid,
	},
	{
		name: "vllm/completions", format: JSON,
		text:  `{"id":"cmpl-1","object":"text_completion","choices":[{"index":0,"text":"Hi","finish_reason":"length"}],"usage":{"prompt_tokens":100,"total_tokens":150,"completion_tokens":50,"prompt_tokens_details":{"cached_tokens":64}}}`,
		usage: Usage{100, 64, 50},
	},
	{
		name: "vllm/completions stream", format: SSE,
		text: `: keep-alive

data: {"id":"cmpl-1","object":"text_completion","choices":[{"index":0,"text":"","logprobs":null,"finish_reason":null}]}

data: {"id":"cmpl-1","object":"text_completion","choices":[{"index":0,"text":"Hi","logprobs":null,"finish_reason":null}]}

data: {"id":"cmpl-1","object":"text_completion","choices":[],"usage":{"prompt_tokens":100,"completion_tokens":1,"total_tokens":101,"prompt_tokens_details":{"cached_tokens":96}}}

data: [DONE]

`,
		usage: Usage{100, 96, 1}, first: 3,
	},
	{
		name: "vllm/responses", format: JSON,
		text:  `{"id":"resp_1","created_at":1,"metadata":{"id":"no"},"model":"m","object":"response","output":[{"id":"msg_1","type":"message","content":[{"text":"Hi"}]}],"status":"completed","usage":{"input_tokens":100,"input_tokens_details":{"cached_tokens":64,"input_tokens_per_turn":[100],"cached_tokens_per_turn":[64]},"output_tokens":50,"output_tokens_details":{"reasoning_tokens":0},"total_tokens":150}}`,
		usage: Usage{100, 64, 50}, id: "resp_1",
	},
	{
		name: "vllm/responses stream", format: SSE,
		text: `event: response.created
data: {"response":{"id":"resp_1","object":"response","status":"in_progress","instructions":"long","output":[],"usage":null},"sequence_number":0,"type":"response.created"}

event: response.in_progress
data: {"response":{"id":"resp_1","object":"response","status":"in_progress","output":[],"usage":null},"sequence_number":1,"type":"response.in_progress"}

event: response.output_item.added
data: {"type":"response.output_item.added","output_index":0,"item":{"id":"msg_1","type":"message","status":"in_progress","content":[],"role":"assistant"}}

event: response.content_part.added
data: {"type":"response.content_part.added","item_id":"msg_1","part":{"type":"output_text","text":""}}

event: response.output_text.delta
data: {"type":"response.output_text.delta","item_id":"msg_1","delta":"Hi"}

event: response.completed
data: {"type":"response.completed","response":{"id":"resp_1","object":"response","output":[{"id":"msg_1","usage":{"input_tokens":1}}],"usage":{"input_tokens":100,"input_tokens_details":{"cached_tokens":64},"output_tokens":50,"total_tokens":150}}}

`,
		usage: Usage{100, 64, 50}, first: 5, id: "resp_1",
	},
	{
		name: "vllm/messages", format: JSON,
		text:  `{"id":"msg_1","type":"message","role":"assistant","content":[{"type":"text","text":"Hi"},{"type":"tool_use","id":"t","name":"f","input":{"usage":{"input_tokens":1,"cache_read_input_tokens":1}}}],"usage":{"input_tokens":36,"output_tokens":50,"cache_creation_input_tokens":0,"cache_read_input_tokens":64}}`,
		usage: Usage{100, 64, 50}, id: "msg_1",
	},
	{
		name: "vllm/messages without details", format: JSON,
		text:  `{"id":"msg_1","type":"message","usage":{"input_tokens":100,"output_tokens":50}}`,
		usage: Usage{100, -1, 50}, id: "msg_1",
	},
	{
		name: "vllm/messages stream", format: SSE, // the first usage comes from a chunk without details
		text: `event: message_start
data: {"type":"message_start","message":{"id":"msg_1","content":[],"model":"m","usage":{"input_tokens":100,"output_tokens":0}}}

event: content_block_start
data: {"index":0,"type":"content_block_start","content_block":{"type":"text","text":""}}

event: content_block_delta
data: {"index":0,"type":"content_block_delta","delta":{"type":"text_delta","text":"Hi"}}

event: content_block_stop
data: {"index":0,"type":"content_block_stop"}

event: message_delta
data: {"type":"message_delta","delta":{"stop_reason":"end_turn"},"usage":{"input_tokens":36,"output_tokens":50,"cache_creation_input_tokens":0,"cache_read_input_tokens":64}}

event: message_stop
data: {"type":"message_stop"}

data: [DONE]

`,
		usage: Usage{100, 64, 50}, first: 3, id: "msg_1",
	},
	{
		name: "sglang/chat stream", format: SSE,
		text: `data: {"id":"1","object":"chat.completion.chunk","choices":[{"index":0,"delta":{"role":"assistant","content":"","reasoning_content":null,"tool_calls":null},"logprobs":null,"finish_reason":null,"matched_stop":null}],"usage":null}

data: {"id":"1","object":"chat.completion.chunk","choices":[{"index":0,"delta":{"role":null,"content":null,"reasoning_content":"Hm","tool_calls":null},"logprobs":null,"finish_reason":null,"matched_stop":null}],"usage":null}

data: {"id":"1","object":"chat.completion.chunk","choices":[],"usage":{"prompt_tokens":100,"total_tokens":101,"completion_tokens":1,"prompt_tokens_details":{"cached_tokens":64},"reasoning_tokens":1}}

data: [DONE]

`,
		usage: Usage{100, 64, 1}, first: 2,
	},
	{
		name: "sglang/chat with tiers only", format: JSON,
		text:  `{"id":"1","object":"chat.completion","choices":[],"usage":{"prompt_tokens":100,"total_tokens":101,"completion_tokens":1,"prompt_tokens_details":null},"sglext":{"cached_tokens_details":{"device":40,"host":20,"storage":4,"storage_backend":"hf3fs"}}}`,
		usage: Usage{100, 64, 1},
	},
	{
		name: "sglang/generate", format: JSON,
		text:  `{"text":"Hi","output_ids":[1,2],"meta_info":{"id":"ab","finish_reason":{"type":"length","length":8,"prompt_tokens":3},"prompt_tokens":100,"completion_tokens":8,"cached_tokens":64,"cached_tokens_details":null,"e2e_latency":0.78}}`,
		usage: Usage{100, 64, 8},
	},
	{
		name: "sglang/generate, nothing cached", format: JSON,
		text:  `{"text":"Hi","meta_info":{"prompt_tokens":100,"cached_tokens":0}}`,
		usage: Usage{100, 0, -1},
	},
	{
		name: "sglang/generate of a batch", format: JSON, // several prompts: no figure for one of them
		text:  `[{"text":"Hi","meta_info":{"prompt_tokens":100,"cached_tokens":64}},{"text":"Ho","meta_info":{"prompt_tokens":10,"cached_tokens":4}}]`,
		usage: unsaid,
	},
	{
		name: "sglang/generate stream", format: SSE,
		text: `data: {"text":"Hi","meta_info":{"id":"ab","finish_reason":null,"prompt_tokens":100,"completion_tokens":1,"cached_tokens":64}}

data: {"text":"Hi there","meta_info":{"id":"ab","finish_reason":{"type":"stop"},"prompt_tokens":100,"completion_tokens":2,"cached_tokens":64}}

data: [DONE]

`,
		usage: Usage{100, 64, 2}, first: 1,
	},
	{
		name: "sglang/messages stream", format: SSE,
		text: `event: message_start
data: {"type":"message_start","message":{"id":"msg_1","type":"message","role":"assistant","content":[],"usage":{"input_tokens":36,"output_tokens":0,"cache_read_input_tokens":64}}}

event: message_delta
data: {"type":"message_delta","delta":{"stop_reason":"max_tokens"},"usage":{"input_tokens":0,"output_tokens":0}}

`,
		usage: Usage{100, 64, 0}, first: 2, id: "msg_1",
	},
	{
		name: "llama.cpp/chat stream, usage not asked for", format: SSE,
		text: `data: {"choices":[{"finish_reason":null,"index":0,"delta":{"role":"assistant","content":null}}],"created":1,"id":"chatcmpl-1","model":"m","object":"chat.completion.chunk"}

data: {"choices":[{"finish_reason":null,"index":0,"delta":{"content":"Hi"}}],"created":1,"id":"chatcmpl-1","model":"m","object":"chat.completion.chunk"}

data: {"choices":[{"finish_reason":"stop","index":0,"delta":{}}],"created":1,"id":"chatcmpl-1","model":"m","object":"chat.completion.chunk","timings":{"cache_n":64,"prompt_n":36,"prompt_ms":20.5,"predicted_n":1,"predicted_ms":9.9}}

data: [DONE]

`,
		usage: Usage{100, 64, 1}, first: 2,
	},
	{
		name: "llama.cpp/chat stream with progress", format: SSE,
		text: `data: {"choices":[{"finish_reason":null,"index":0,"delta":{"role":"assistant","content":null}}],"created":1,"object":"chat.completion.chunk","prompt_progress":{"total":100,"cache":64,"processed":80,"time_ms":5}}

data: {"choices":[{"finish_reason":null,"index":0,"delta":{"role":"assistant","content":null}}],"created":1,"object":"chat.completion.chunk","prompt_progress":{"total":100,"cache":64,"processed":100,"time_ms":9}}

data: {"choices":[{"finish_reason":null,"index":0,"delta":{"role":"assistant","content":null}}],"created":1,"object":"chat.completion.chunk"}

data: {"choices":[{"finish_reason":null,"index":0,"delta":{"content":"Hi"}}],"created":1,"object":"chat.completion.chunk"}

data: {"choices":[],"created":1,"object":"chat.completion.chunk","usage":{"completion_tokens":1,"prompt_tokens":100,"total_tokens":101,"prompt_tokens_details":{"cached_tokens":64}},"timings":{"cache_n":64,"prompt_n":36}}

`,
		usage: Usage{100, 64, 1}, first: 4,
	},
	{
		name: "llama.cpp/chat, timings of an old build", format: JSON, // prompt_n leaves out what was cached
		text:  `{"object":"chat.completion","timings":{"prompt_n":36,"prompt_ms":20.5}}`,
		usage: unsaid,
	},
	{
		name: "llama.cpp/completion", format: JSON,
		text:  `{"index":0,"content":"Hi","tokens":[],"id_slot":0,"stop":true,"model":"m","tokens_predicted":1,"tokens_evaluated":100,"generation_settings":{"n_predict":1,"tokens_evaluated":3},"prompt":"p","has_new_line":false,"truncated":false,"stop_type":"limit","stopping_word":"","tokens_cached":101,"timings":{"cache_n":64,"prompt_n":36}}`,
		usage: Usage{100, 64, 1},
	},
	{
		name: "llama.cpp/completion stream", format: SSE,
		text: `data: {"index":0,"content":"","tokens":[],"stop":false,"id_slot":-1,"tokens_predicted":0,"tokens_evaluated":0,"prompt_progress":{"total":100,"cache":0,"processed":50,"time_ms":5}}

data: {"index":0,"content":"Hi","tokens":[5],"stop":false,"id_slot":-1,"tokens_predicted":1,"tokens_evaluated":100}

data: {"index":0,"content":"","tokens":[],"stop":true,"tokens_predicted":1,"tokens_evaluated":100,"tokens_cached":101}

`,
		usage: Usage{100, -1, 1}, first: 2,
	},
	{
		name: "llama.cpp/responses stream", format: SSE,
		text: `event: response.created
data: {"type":"response.created","response":{"id":"resp_ab","object":"response","status":"in_progress"}}

event: response.in_progress
data: {"type":"response.in_progress","response":{"id":"resp_ab","object":"response","status":"in_progress"}}

event: response.reasoning_text.delta
data: {"type":"response.reasoning_text.delta","delta":"Hm","item_id":"rs_1"}

event: response.completed
data: {"type":"response.completed","response":{"id":"resp_ab","object":"response","usage":{"input_tokens":100,"output_tokens":1,"total_tokens":101,"input_tokens_details":{"cached_tokens":0}}}}

`,
		usage: Usage{100, 0, 1}, first: 3, id: "resp_ab",
	},
	{
		name: "llama.cpp/messages", format: JSON,
		text:  `{"id":"chatcmpl-1","type":"message","role":"assistant","content":[],"usage":{"cache_read_input_tokens":64,"input_tokens":36,"output_tokens":1}}`,
		usage: Usage{100, 64, 1}, id: "chatcmpl-1",
	},
	{
		name: "tgi/generate", format: JSON,
		text:  `{"generated_text":"Hi","details":{"finish_reason":"length","generated_tokens":1,"seed":null,"prefill":[],"tokens":[]}}`,
		usage: unsaid,
	},
	{
		name: "tgi/generate stream", format: SSE,
		text: `data:{"index":1,"token":{"id":13,"text":"\n","logprob":-0.1,"special":false},"generated_text":null,"details":null}

data:{"index":2,"token":{"id":14,"text":"Hi","logprob":-0.1,"special":false},"generated_text":"\nHi","details":null}

`,
		usage: unsaid, first: 1,
	},
	{
		name: "trtllm/chat, nothing cached", format: JSON,
		text:  `{"id":"chatcmpl-1","object":"chat.completion","choices":[],"usage":{"prompt_tokens":100,"total_tokens":150,"completion_tokens":50,"prompt_tokens_details":{"cached_tokens":0}},"prompt_token_ids":null}`,
		usage: Usage{100, 0, 50},
	},
	{
		name: "triton/generate stream", format: SSE,
		text:  `data: {"model_name":"ensemble","model_version":"1","sequence_end":false,"sequence_id":0,"sequence_start":false,"text_output":"Hi"}` + "\n\n",
		usage: unsaid, first: 1,
	},
	{
		name: "ollama/chat", format: JSON,
		text:  `{"model":"m","created_at":"2026-11-30T00:00:00Z","message":{"role":"assistant","content":"Hi","tool_calls":[{"function":{"name":"f","arguments":{"usage":{"prompt_tokens":1}}}}]},"done_reason":"stop","done":true,"total_duration":5,"load_duration":1,"prompt_eval_count":100,"prompt_eval_cached_count":64,"prompt_eval_duration":2,"eval_count":50,"eval_duration":3}`,
		usage: Usage{100, 64, 50},
	},
	{
		name: "ollama/chat stream", format: NDJSON,
		text: `{"model":"m","created_at":"2026-11-30T00:00:00Z","message":{"role":"assistant","content":"Hi"},"done":false}
{"model":"m","created_at":"2026-11-30T00:00:00Z","message":{"role":"assistant","content":""},"done_reason":"stop","done":true,"prompt_eval_count":100,"prompt_eval_cached_count":64,"eval_count":50}
`,
		usage: Usage{100, 64, 50}, first: 1,
	},
	{
		name: "ollama/generate stream", format: NDJSON,
		text: `{"model":"m","response":"Hi","done":false}
{"model":"m","response":"","done":true,"context":[1,2,3],"prompt_eval_count":100,"eval_count":50}
`,
		usage: Usage{100, -1, 50}, first: 1,
	},
	{
		name: "ollama/stream that fails", format: NDJSON,
		text:  `{"error":"model runner has unexpectedly stopped"}` + "\n",
		usage: unsaid,
	},
	{
		name: "ollama/openai stream", format: SSE,
		text: `data: {"id":"chatcmpl-1","object":"chat.completion.chunk","choices":[{"index":0,"delta":{"role":"assistant","content":"Hi"},"finish_reason":null}]}

data: {"id":"chatcmpl-1","object":"chat.completion.chunk","choices":[],"usage":{"prompt_tokens":100,"completion_tokens":1,"total_tokens":101}}

data: [DONE]

`,
		usage: Usage{100, -1, 1}, first: 1,
	},
	{
		name: "lmdeploy/chat", format: JSON,
		text:  `{"id":"1","object":"chat.completion","choices":[],"usage":{"prompt_tokens":100,"total_tokens":150,"completion_tokens":50}}`,
		usage: Usage{100, -1, 50},
	},
	{
		name: "litellm/chat from anthropic", format: JSON,
		text:  `{"id":"chatcmpl-1","object":"chat.completion","choices":[],"usage":{"completion_tokens":50,"prompt_tokens":100,"total_tokens":150,"prompt_tokens_details":{"audio_tokens":null,"cached_tokens":64},"cache_creation_input_tokens":10,"cache_read_input_tokens":64}}`,
		usage: Usage{100, 64, 50},
	},
	{
		name: "litellm/responses from anthropic", format: JSON,
		text:  `{"id":"resp_1","object":"response","usage":{"input_tokens":100,"input_tokens_details":{"cached_tokens":64},"output_tokens":50,"cache_creation_input_tokens":10,"cache_read_input_tokens":64}}`,
		usage: Usage{100, 64, 50}, id: "resp_1",
	},
	{
		name: "litellm/messages stream", format: SSE, // opens the block before the prefill
		text: `event: message_start
data: {"type": "message_start", "message": {"id": "msg_1", "usage": {"input_tokens": 0, "output_tokens": 0}}}

event: content_block_start
data: {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}

event: content_block_delta
data: {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "Hi"}}

event: message_delta
data: {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"input_tokens": 100, "output_tokens": 1}}

`,
		usage: Usage{100, -1, 1}, first: 3, id: "msg_1",
	},
	{
		name: "openai/chat, short prompt", format: JSON,
		text: `{
  "id": "chatcmpl-1",
  "object": "chat.completion",
  "choices": [],
  "usage": {
    "prompt_tokens": 100,
    "completion_tokens": 50,
    "total_tokens": 150,
    "prompt_tokens_details": {
      "cached_tokens": 0,
      "audio_tokens": 0
    }
  }
}
`,
		usage: Usage{100, 0, 50},
	},
	{
		name: "openai/chat stream of empty deltas", format: SSE,
		text: `data: {"choices":[{"index":0,"delta":{"role":"assistant","content":"","refusal":null,"tool_calls":[ ],"audio":{ },"done":false},"logprobs":{"content":[]},"text":"","finish_reason":null}]}

data: {"choices":[{"index":0,"delta":null},{"index":1,"delta":"","finish_reason":null}]}

data: {"choices":[{"index":0,"delta":{}},{"index":1,"delta":{"audio":{"data":""}}}]}

`,
		usage: unsaid, first: 3,
	},
	{
		name: "openai/chat stream with filters first", format: SSE,
		text: `data: {"choices":[],"created":0,"id":"","model":"","object":"","prompt_filter_results":[{"prompt_index":0}]}

data: {"choices":[{"index":0,"delta":{"content":"Hi"},"finish_reason":null}],"usage":null}

`,
		usage: unsaid, first: 2,
	},
	{
		name: "openai/responses stream that queues", format: SSE,
		text: `event: response.queued
data: {"type":"response.queued","response":{"id":"resp_1","usage":null}}

event: keepalive
data: {"type":"keepalive","sequence_number":3}

event: response.failed
data: {"type":"response.failed","response":{"id":"resp_1","error":{"code":"server_error"},"usage":null}}

`,
		usage: unsaid, id: "resp_1",
	},
	{
		name: "openai/conversation", format: JSON,
		text:  `{"id":"conv_1","object":"conversation","created_at":1,"metadata":{}}`,
		usage: unsaid, id: "conv_1",
	},
	{
		name: "anthropic/messages", format: JSON,
		text:  `{"id":"msg_1","type":"message","role":"assistant","content":[{"type":"text","text":"Hi"}],"stop_reason":"end_turn","usage":{"input_tokens":26,"cache_creation_input_tokens":10,"cache_read_input_tokens":64,"cache_creation":{"ephemeral_5m_input_tokens":10,"ephemeral_1h_input_tokens":0},"output_tokens":50,"service_tier":"standard"}}`,
		usage: Usage{100, 64, 50}, id: "msg_1",
	},
	{
		name: "anthropic/messages stream", format: SSE,
		text: `event: message_start
data: {"type":"message_start","message":{"id":"msg_1","type":"message","role":"assistant","content":[],"stop_reason":null,"usage":{"input_tokens":36,"cache_read_input_tokens":60,"cache_creation_input_tokens":4,"output_tokens":1}}}

event: content_block_start
data: {"type":"content_block_start","index":0,"content_block":{"type":"tool_use","id":"toolu_1","name":"f","input":{}}}

event: ping
data: {"type": "ping"}

event: content_block_delta
data: {"type":"content_block_delta","index":0,"delta":{"type":"input_json_delta","partial_json":"{\"usage\":{\"input_tokens\":1}}"}}

event: message_delta
data: {"type":"message_delta","delta":{"stop_reason":"tool_use","stop_sequence":null},"usage":{"output_tokens":15}}

event: message_stop
data: {"type":"message_stop"}

`,
		usage: Usage{100, 60, 15}, first: 4, id: "msg_1",
	},
	{
		name: "anthropic/stream that fails", format: SSE,
		text: `event: error
data: {"type":"error","error":{"type":"overloaded_error","message":"Overloaded"}}

`,
		usage: unsaid,
	},
	{
		name: "deepseek/chat", format: JSON, // white space keeps the connection alive until the answer is there
		text:  "\n\n\n" + `{"id":"1","object":"chat.completion","choices":[],"usage":{"prompt_tokens":100,"completion_tokens":1,"total_tokens":101,"prompt_cache_hit_tokens":64,"prompt_cache_miss_tokens":36}}`,
		usage: Usage{100, 64, 1},
	},
	{
		name: "deepseek/chat stream", format: SSE,
		text: `: keep-alive

: keep-alive

data: {"choices":[{"index":0,"delta":{"content":"","reasoning_content":"Hm"},"finish_reason":null}]}

data: {"choices":[{"index":0,"delta":{"content":"","reasoning_content":null},"finish_reason":"length"}],"usage":{"completion_tokens":1,"prompt_cache_hit_tokens":64,"prompt_cache_miss_tokens":36}}

data: [DONE]

`,
		usage: Usage{100, 64, 1}, first: 3,
	},
	{
		name: "llm-d sim/chat cut by its threshold", format: JSON,
		text:  `{"id":"chatcmpl-1","object":"chat.completion","choices":[{"finish_reason":"cache_threshold"}],"usage":{"prompt_tokens":100,"completion_tokens":0,"total_tokens":100,"prompt_tokens_details":null}}`,
		usage: Usage{100, -1, 0},
	},

	{
		name: "framing/crlf", format: SSE,
		text:  ": hello\r\n\r\nevent: x\r\ndata: {\"choices\":[{\"delta\":{\"content\":\"Hi\"}}]}\r\n\r\ndata: {\"choices\":[],\"usage\":{\"prompt_tokens\":100,\"prompt_tokens_details\":{\"cached_tokens\":64}}}\r\n\r\n",
		usage: Usage{100, 64, -1}, first: 2,
	},
	{
		name: "framing/document over several lines", format: SSE,
		text:  "data: {\"choices\":[],\"usage\":\ndata: {\"prompt_tokens\":100,\ndata: \"prompt_tokens_details\":{\ndata:\"cached_tokens\":64}}}\n\n",
		usage: Usage{100, 64, -1}, first: 1,
	},
	{
		name: "framing/other fields", format: SSE,
		text:  "id: {\"usage\":{\"prompt_tokens\":1}}\ndatum: {\"usage\":{\"prompt_tokens\":2}}\ndata : {\"usage\":{\"prompt_tokens\":3}}\ndata\nretry: 5\n\n",
		usage: unsaid,
	},
	{
		name: "framing/documents that break off", format: SSE,
		text:  "data: {\"choices\":[{\"delta\":{\"content\":\"Hi\n\ndata: {\"usage\":{\"prompt_tokens\":100}}\n\ndata: {\"usage\":{\"prompt_tokens\":9",
		usage: Usage{100, -1, -1}, first: 2,
	},
	{
		name: "framing/lines that break off", format: NDJSON,
		text:  "{\"message\":{\"content\":\"Hi\n\nnull\n[1]\n{\"prompt_eval_count\":100}\n{\"prompt_eval_count\":9",
		usage: Usage{100, -1, -1}, first: 5,
	},
	{
		name: "framing/body that breaks off in a count", format: JSON,
		text:  `{"usage":{"prompt_tokens":100,"prompt_tokens_details":{"cached_tokens":6`,
		usage: Usage{100, -1, -1},
	},
	{
		name: "framing/several documents", format: JSON,
		text:  `{"usage":{"prompt_tokens":100}}{"usage":{"prompt_tokens":5}}`,
		usage: Usage{100, -1, -1},
	},
	{
		name: "framing/another format", format: None,
		text:  `{"usage":{"prompt_tokens":100}}`,
		usage: unsaid,
	},
	{
		name: "framing/text", format: JSON,
		text:  `Internal Server Error {"usage":{"prompt_tokens":100}}`,
		usage: unsaid,
	},

	{
		name: "framing/no JSON from here on", format: NDJSON,
		text:  "{\"a\":],\"prompt_eval_count\":1}\n{\"a\"=5,\"prompt_eval_count\":1}\n{a:5,\"prompt_eval_count\":1}\n{\"choices\":[5,{\"text\":\"Hi\"}],\"prompt_eval_count\":1}\n",
		usage: unsaid,
	},

	{
		name: "place/usage before the answer", format: JSON,
		text:  `{"usage":{"prompt_tokens":100,"prompt_tokens_details":{"cached_tokens":64}},"choices":[{"message":{"content":` + quote(strings.Repeat(forged, 60)) + `}}]}`,
		usage: Usage{100, 64, -1},
	},
	{
		name: "place/usage after the answer", format: JSON,
		text:  `{"choices":[{"message":{"content":` + quote(strings.Repeat(forged, 60)) + `}}],"usage":{"prompt_tokens":100,"prompt_tokens_details":{"cached_tokens":64}}}`,
		usage: Usage{100, 64, -1},
	},
	{
		name: "place/elsewhere", format: JSON,
		text:  `{"metadata":{"usage":{"prompt_tokens":1},"timings":{"cache_n":1}},"prompt_tokens":1,"cached_tokens":1,"choices":[{"usage":{"prompt_tokens":1}}],"output":[{"usage":{"input_tokens":1}}],"usage":[{"prompt_tokens":1}],"meta_info":"prompt_tokens","message":{"meta_info":{"prompt_tokens":1}},"response":{"prompt_eval_count":1,"meta_info":{"prompt_tokens":1}},"timings":{"details":{"cache_n":1}}}`,
		usage: unsaid,
	},

	{
		name: "forged/chat", format: JSON,
		text:  `{"choices":[{"message":{"role":"assistant","content":` + quote(forged) + `}}]}`,
		usage: unsaid,
	},
	{
		name: "forged/chat stream", format: SSE,
		text:  forgedDelta + forgedDelta,
		usage: unsaid, first: 1,
	},
	{
		name: "forged/chat stream with usage", format: SSE,
		text:  strings.Repeat(forgedDelta, 50) + `data: {"choices":[],"usage":{"prompt_tokens":100,"prompt_tokens_details":{"cached_tokens":64}}}` + "\n\n",
		usage: Usage{100, 64, -1}, first: 1,
	},
	{
		name: "forged/ollama stream", format: NDJSON,
		text:  `{"message":{"role":"assistant","content":` + quote(forged) + `},"done":false}` + "\n",
		usage: unsaid, first: 1,
	},
	{
		name: "forged/names", format: JSON,
		text:  `{` + quote(`usage":{"prompt_tokens":1},"x`) + `:1,"usage\"":{"prompt_tokens":1},"` + strings.Repeat("x", 200) + `usage":{"prompt_tokens":1}}`,
		usage: unsaid,
	},

	{
		name: "figures/odd", format: JSON,
		text:  `{"usage":{"prompt_tokens":"100","input_tokens":-5,"prompt_cache_hit_tokens":1e3,"prompt_cache_miss_tokens":true},"timings":{"cache_n":99999999999999999999,"prompt_n":2147483648},"prompt_eval_count":6x4,"tokens_evaluated":[5]}`,
		usage: unsaid,
	},
	{
		name: "figures/with a fraction", format: JSON,
		text:  `{"usage":{"prompt_tokens":100.0,"prompt_tokens_details":{"cached_tokens":64.0}}}`,
		usage: Usage{100, 64, -1},
	},
	{
		name: "figures/more cached than there is", format: JSON,
		text:  `{"usage":{"prompt_tokens":36,"prompt_tokens_details":{"cached_tokens":64}}}`,
		usage: Usage{36, -1, -1},
	},
	{
		name: "figures/no prompt", format: JSON,
		text:  `{"usage":{"prompt_tokens":0,"prompt_tokens_details":{"cached_tokens":0}}}`,
		usage: Usage{-1, 0, -1},
	},
	{
		name: "id/too long", format: JSON,
		text:  `{"id":"` + strings.Repeat("x", maxID+1) + `","object":"response"}`,
		usage: unsaid,
	},
	{
		name: "id/of something else", format: JSON,
		text:  `{"id":"chatcmpl-1","object":"chat.completion"}`,
		usage: unsaid,
	},
}
