package prefixhash

import (
	"fmt"
	"slices"
	"strings"
	"testing"
)

// sum keys a complete body with small blocks, so that short texts have several.
func sum(t testing.TB, path, body string) Key {
	t.Helper()
	var k Key
	if cause := New(Config{BlockBytes: 16, Seed: 1}).Sum(&k, path, []byte(body), true, ""); cause != Keyed {
		t.Fatalf("%s for %s", cause, body)
	}
	return k
}

// shared returns how many leading blocks two keys have in common.
func shared(a, b Key) int {
	n := 0
	for n < min(len(a.Blocks), len(b.Blocks)) && a.Blocks[n] == b.Blocks[n] {
		n++
	}
	return n
}

const (
	chat      = "/v1/chat/completions"
	responses = "/v1/responses"
	anthropic = "/v1/messages"
)

func TestEqualKeys(t *testing.T) {
	for _, c := range []struct {
		name, path string
		bodies     []string
	}{
		{"spelling/white space and member order", chat, []string{
			`{"model":"m","messages":[{"role":"user","content":"x"}],"tools":[{"type":"function","function":{"name":"f","description":"d","parameters":{"type":"object"}}}]}`,
			"{\n \"tools\" : [ {\"function\": {\"parameters\":\t{ \"type\": \"object\" }, \"name\":\"f\" , \"description\":\"d\"}, \"type\":\"function\"} ],\r\n\"messages\": [ { \"content\":\"x\", \"role\":\"user\" } ], \"model\":\"m\"} ",
		}},
		{"spelling/escapes", chat, []string{
			`{"model":"m","messages":[{"role":"user","content":"é/\"\n😀 a"}]}`,
			`{"model":"m","messages":[{"role":"user","content":"\u00e9\/\"\n\ud83d\ude00 \u0061"}]}`,
			`{"\u006dodel":"\u006d","messages":[{"rol\u0065":"us\u0065r","content":[{"typ\u0065":"t\u0065xt","text":"\u00E9\u002f\u0022\u000A\uD83D\uDE00 a"}]}]}`,
		}},
		{"spelling/byte order mark", chat, []string{
			`{"model":"m","messages":[{"role":"user","content":"x"}]}`,
			"\ufeff" + `{"model":"m","messages":[{"role":"user","content":"x"}]}`,
		}},
		{"spelling/last of equal keys", chat, []string{
			`{"model":"m","messages":[{"role":"user","content":"x"}],"tools":[{"name":"f","parameters":{"a":3,"b":2}}]}`,
			`{"model":"n","messages":[],"model":"m","messages":[{"role":"system","content":"y","role":"user","content":"x"}],"tools":[{"name":"g","parameters":{"a":1,"b":2,"a":3},"name":"f"}]}`,
			`{"model":"m","messages":[{"role":"user","content":"x"}],"tools":[{"name":"f","parameters":{"a":1,"b":1,"a":2,"b":2,"a":3}}]}`,
		}},
		{"spelling/last of many equal keys", chat, []string{
			`{"messages":["x"],"tools":[{"name":"f","parameters":{"a":3,"b":2,"c":1,"d":1,"e":1,"f":1,"g":1,"h":1,"i":9}}]}`,
			`{"messages":["x"],"tools":[{"name":"f","parameters":{"a":1,"b":1,"c":1,"d":1,"e":1,"f":1,"g":1,"h":1,"i":1,"a":2,"b":2,"i":8,"a":3,"i":9}}]}`,
		}},
		{"content/string or text parts", chat, []string{
			`{"messages":[{"role":"user","content":"x"}]}`,
			`{"messages":[{"role":"user","content":[{"type":"text","text":"x"}]}]}`,
			`{"messages":[{"role":"user","content":[{"text":"x","type":"text","cache_control":{"type":"ephemeral"}}]}]}`,
			`{"messages":[{"role":"user","content":["x"]}]}`,
		}},
		{"content/nothing", chat, []string{
			`{"messages":[{"role":"assistant","tool_calls":[{"id":"1","function":{"name":"f","arguments":"{}"}}]}]}`,
			`{"messages":[{"role":"assistant","content":null,"tool_calls":[{"id":"1","type":"function","index":0,"function":{"name":"f","arguments":"{}"}}]}]}`,
			`{"messages":[{"role":"assistant","content":"","tool_calls":[{"id":"1","function":{"arguments":"{}","name":"f"}}]}]}`,
			`{"messages":[{"role":"assistant","content":[],"name":null,"refusal":null,"reasoning":"","function_call":null,"tool_calls":[{"id":"1","function":{"name":"f","arguments":"{}"}}]}]}`,
		}},
		{"reasoning/names", chat, []string{
			`{"messages":[{"role":"assistant","content":"x","reasoning":"y"}]}`,
			`{"messages":[{"reasoning_content":"y","role":"assistant","content":"x"}]}`,
			`{"messages":[{"role":"assistant","thinking":"y","content":"x"}]}`,
		}},
		{"anthropic/system string or blocks", anthropic, []string{
			`{"model":"m","system":"abcd","messages":[{"role":"user","content":"x"}]}`,
			`{"model":"m","messages":[{"role":"user","content":"x"}],"system":[{"type":"text","text":"abcd","cache_control":{"type":"ephemeral"}}]}`,
			`{"model":"m","system":[{"type":"text","text":"ab"},{"type":"text","text":"cd"}],"messages":[{"role":"user","content":[{"type":"text","text":"x"}]}]}`,
		}},
		{"responses/ids, status and part names", responses, []string{
			`{"model":"m","instructions":"i","input":[{"role":"user","content":"x"},{"type":"function_call","call_id":"c","name":"f","arguments":"{}"},{"type":"function_call_output","call_id":"c","output":"o"},{"type":"reasoning","summary":[{"type":"summary_text","text":"s"}]},{"type":"web_search_call","action":{"type":"search","query":"q"}}]}`,
			`{"input":[{"type":"message","id":"msg_1","status":"completed","role":"user","content":[{"type":"input_text","text":"x"}]},{"id":"fc_1","type":"function_call","status":"completed","arguments":"{}","name":"f","call_id":"c"},{"output":[{"type":"input_text","text":"o"}],"id":"fco_2","type":"function_call_output","call_id":"c"},{"type":"reasoning","id":"rs_1","summary":[{"text":"s","type":"summary_text"}],"content":null,"encrypted_content":null},{"action":{"query":"q","type":"search"},"status":"failed","id":"ws_1","type":"web_search_call"}],"model":"m","instructions":"i"}`,
		}},
		{"apis/one conversation", "/", []string{
			`{"model":"m","messages":[{"role":"system","content":"s"},{"role":"user","content":"x"}]}`,
			`{"model":"m","system":"s","messages":[{"role":"user","content":"x"}]}`,
			`{"model":"m","instructions":"s","input":"x"}`,
			`{"model":"m","instructions":"s","input":[{"role":"user","content":[{"type":"input_text","text":"x"}]}]}`,
			`{"model":"m","system":"s","messages":"x"}`,
		}},
		{"apis/one tool", "/", []string{
			`{"tools":[{"type":"function","function":{"name":"f","description":"d","parameters":{"type":"object"}}}],"input":"x"}`,
			`{"tools":[{"type":"function","name":"f","description":"d","parameters":{"type":"object"}}],"input":"x"}`,
			`{"tools":[{"name":"f","description":"d","input_schema":{"type":"object"},"cache_control":{"type":"ephemeral"}}],"input":"x"}`,
			`{"functions":[{"name":"f","description":"d","parameters":{"type":"object"}}],"input":"x"}`,
		}},
		{"media/one image", "/", []string{
			`{"messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"data:image/png;base64,AAAA/BBB"}}]}]}`,
			`{"messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"data:image\/png;base64,AAAA\/BBB","detail":"auto"}}]}]}`,
			`{"messages":[{"role":"user","content":[{"type":"image","source":{"type":"base64","media_type":"image/png","data":"AAAA/BBB"}}]}]}`,
			`{"messages":[{"role":"user","images":["AAAA/BBB"]}]}`,
			`{"input":[{"role":"user","content":[{"type":"input_image","image_url":"data:image/png;base64,AAAA/BBB"}]}]}`,
		}},
		{"never/sampling, delivery and names", "/", []string{
			`{"model":"m","messages":[{"role":"user","content":"x"}]}`,
			`{"model":"m","messages":[{"role":"user","content":"x"}],"temperature":1,"top_p":0.5,"top_k":1,"min_p":0,"presence_penalty":1,"frequency_penalty":1,"repetition_penalty":1,"seed":4,"logit_bias":{"1":2},"n":2,"best_of":3,"stop":["a"],"stop_token_ids":[1]}`,
			`{"model":"m","messages":[{"role":"user","content":"x"}],"max_tokens":5,"max_completion_tokens":6,"max_output_tokens":7,"min_tokens":1,"stream":true,"stream_options":{"include_usage":true},"user":"u","metadata":{"a":"b"},"safety_identifier":"s","prompt_cache_key":"k","store":true,"service_tier":"auto","priority":1,"request_id":"r","rid":"r"}`,
			`{"model":"m","messages":[{"role":"user","content":"x"}],"logprobs":true,"top_logprobs":2,"prompt_logprobs":1,"tool_choice":"auto","parallel_tool_calls":true,"response_format":{"type":"json_object"},"guided_json":{},"structured_outputs":{},"regex":"a","ebnf":"b","add_generation_prompt":true,"continue_final_message":false,"echo":true}`,
			`{"model":"m","messages":[{"role":"user","content":"x"}],"keep_alive":"5m","kv_transfer_params":{},"bootstrap_host":"h","session_id":"s","include":["x"],"background":true,"truncation":"auto","options":{"temperature":0},"format":"json","client_metadata":{"a":1},"id_slot":1,"cache_prompt":true}`,
			`{"model":"m","messages":[{"role":"user","content":"x"}],"lora":null,"cache_salt":"","tools":[],"functions":null,"documents":[],"chat_template":null,"chat_template_kwargs":{},"reasoning":{"summary":"auto"},"raw":false,"system":"","previous_response_id":null}`,
		}},
		{"preamble/member order", chat, []string{
			`{"model":"m","chat_template_kwargs":{"a":1,"b":{"c":2,"d":3}},"lora":[{"id":0,"scale":0.5}],"messages":["x"]}`,
			`{"chat_template_kwargs":{"b":{"d":3,"c":2},"a":1},"model":"m","lora":[{"scale":0.5,"id":0}],"messages":["x"]}`,
		}},
		{"effort/names", "/", []string{
			`{"model":"m","reasoning_effort":"high","messages":["x"]}`,
			`{"model":"m","reasoning":{"effort":"high","summary":"auto"},"messages":["x"]}`,
		}},
		{"completions/text or one text", "/v1/completions", []string{
			`{"model":"m","prompt":"abc"}`,
			`{"model":"m","prompt":["abc"]}`,
			`{"model":"m","prompt":["abc","def"]}`,
		}},
		{"completions/token ids", "/v1/completions", []string{
			`{"model":"m","prompt":[1,22,333]}`,
			`{"model":"m","prompt":[ 1 ,22 , 333 ]}`,
			`{"model":"m","prompt":[[1,22,333],[4]]}`,
			`{"model":"m","prompt_token_ids":[1,22,333]}`,
			`{"model":"m","input_ids":[1,22,333],"text":"ignored"}`,
			`{"model":"m","token_ids":[1,22,333]}`,
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			want := sum(t, c.path, c.bodies[0])
			for _, body := range c.bodies[1:] {
				if got := sum(t, c.path, body); !slices.Equal(got.Blocks, want.Blocks) {
					t.Errorf("%s\ndiffers from\n%s", body, c.bodies[0])
				}
			}
		})
	}
}

func TestDifferentKeys(t *testing.T) {
	message := func(parts ...string) string {
		return `{"model":"m","messages":[` + strings.Join(parts, ",") + `]}`
	}
	with := func(member string) string { return `{"messages":[{"role":"user","content":"x"}],` + member + `}` }
	content := func(content string) string { return message(`{"role":"user","content":` + content + `}`) }
	for _, c := range []struct {
		name, path string
		bodies     []string
	}{
		{"preamble/each member", "/", []string{
			with(`"model":"m"`), with(`"model":"n"`), with(`"model":"m","lora_path":"a"`), with(`"model":"m","lora_path":"b"`),
			with(`"model":"m","adapter_id":"a"`), with(`"model":"m","parameters":{"adapter_id":"b"}`),
			with(`"model":"m","lora_request":{"lora_name":"a"}`), with(`"model":"m","lora":[{"id":0,"scale":1}]`), with(`"model":"m","lora":[{"id":0,"scale":2}]`),
			with(`"model":"m","cache_salt":"a"`), with(`"model":"m","cache_salt":"b"`), with(`"model":"m","extra_key":"a"`),
			with(`"model":"m","chat_template":"a"`), with(`"model":"m","chat_template":"b"`), with(`"model":"m","template":"a"`),
			with(`"model":"m","chat_template_kwargs":{"enable_thinking":true}`), with(`"model":"m","chat_template_kwargs":{"enable_thinking":false}`),
			with(`"model":"m","reasoning_effort":"high"`), with(`"model":"m","reasoning_effort":"low"`), with(`"model":"m","reasoning":{"effort":"medium"}`),
			with(`"model":"m","think":true`), with(`"model":"m","think":false`), with(`"model":"m","thinking":{"type":"enabled"}`),
			with(`"model":"m","documents":[{"text":"a"}]`), with(`"model":"m","documents":[{"text":"b"}]`), with(`"model":"m","add_special_tokens":false`),
			with(`"model":"m","mm_processor_kwargs":{"a":1}`), with(`"model":"m","session_params":{"id":"a"}`), with(`"model":"m","system":"a"`),
			with(`"model":"m","features":{"mm_hashes":{"image":["a"]}}`), with(`"model":"m","features":{"mm_hashes":{"image":["b"]}}`),
		}},
		{"tools/set, order and schema", chat, []string{
			with(`"tools":[{"type":"function","function":{"name":"a"}},{"type":"function","function":{"name":"b"}}]`),
			with(`"tools":[{"type":"function","function":{"name":"b"}},{"type":"function","function":{"name":"a"}}]`),
			with(`"tools":[{"type":"function","function":{"name":"a"}}]`),
			with(`"tools":[{"type":"function","function":{"name":"a","description":"d"}}]`),
			with(`"tools":[{"type":"function","function":{"name":"a","strict":true}}]`),
			with(`"tools":[{"type":"function","function":{"name":"a","parameters":{"a":1,"b":2}}}]`),
			with(`"tools":[{"type":"function","function":{"name":"a","parameters":{"b":2,"a":1}}}]`),
			with(`"tools":[{"type":"function","function":{"name":"a","parameters":{"a":"1","b":2}}}]`),
			with(`"tools":[{"type":"function","function":{"name":"a","parameters":{"a":[1],"b":2}}}]`),
			with(`"tools":[{"type":"web_search"}]`), with(`"tools":[{"type":"web_search","max_uses":3}]`),
			with(`"tools":[{"type":"namespace","name":"n","tools":[{"name":"a"}]}]`),
			with(`"tools":[{"type":"namespace","name":"n","tools":[{"name":"b"}]}]`),
			with(`"model":null`),
		}},
		{"json/structure", chat, []string{
			with(`"tools":[{"name":"a","parameters":{"a":"b","c":"d"}}]`), with(`"tools":[{"name":"a","parameters":{"a":"bcd"}}]`),
			with(`"tools":[{"name":"a","parameters":{"a":["b"],"c":"d"}}]`), with(`"tools":[{"name":"a","parameters":{"a":["b","c","d"]}}]`),
			with(`"tools":[{"name":"a","parameters":{"a":["b","cd"]}}]`), with(`"tools":[{"name":"a","parameters":{"a":{"b":{"cd":null}}}}]`),
			with(`"tools":[{"name":"a","parameters":{"a":{"b":{"cd":false}}}}]`), with(`"tools":[{"name":"a","parameters":{"a":[1,2]}}]`),
			with(`"tools":[{"name":"a","parameters":{"a":[12]}}]`), with(`"tools":[{"name":"a","parameters":{"a":[[1],2]}}]`),
			with(`"tools":[{"name":"a","parameters":{"a":"b\",\"c\":\"d"}}]`),
		}},
		{"message/role, name and ids", chat, []string{
			message(`{"role":"user","content":"x"}`), message(`{"role":"system","content":"x"}`), message(`{"role":"developer","content":"x"}`),
			message(`{"role":"assistant","content":"x"}`), message(`{"role":"user","name":"x"}`), message(`{"role":"user","name":"n","content":"x"}`),
			message(`{"role":"tool","content":"x"}`), message(`{"role":"tool","tool_call_id":"1","content":"x"}`), message(`{"role":"tool","tool_call_id":"2","content":"x"}`),
			message(`{"role":"tool","tool_name":"1","content":"x"}`), message(`{"role":"assistant","reasoning":"x"}`), message(`{"role":"assistant","refusal":"x"}`),
			message(`{"content":"userx"}`), message(`{"role":"userx"}`), message(`{"role":"user","content":"x","tools":[{"name":"f"}]}`),
		}},
		{"message/tool calls", chat, []string{
			message(`{"role":"assistant","tool_calls":[{"id":"1","function":{"name":"f","arguments":"{}"}}]}`),
			message(`{"role":"assistant","tool_calls":[{"id":"2","function":{"name":"f","arguments":"{}"}}]}`),
			message(`{"role":"assistant","tool_calls":[{"id":"1","function":{"name":"g","arguments":"{}"}}]}`),
			message(`{"role":"assistant","tool_calls":[{"id":"1","function":{"name":"f","arguments":"{ }"}}]}`),
			message(`{"role":"assistant","tool_calls":[{"id":"1","function":{"name":"f","arguments":{"a":1,"b":2}}}]}`),
			message(`{"role":"assistant","tool_calls":[{"id":"1","function":{"name":"f","arguments":{"b":2,"a":1}}}]}`),
			message(`{"role":"assistant","tool_calls":[{"id":"1","custom":{"name":"f","input":"x"}}]}`),
			message(`{"role":"assistant","tool_calls":[{"id":"1","function":{"name":"f"}},{"id":"1","function":{"name":"f"}}]}`),
			message(`{"role":"assistant","tool_calls":[{"id":"1","function":{"name":"f"}}]}`),
			message(`{"role":"assistant","function_call":{"name":"f","arguments":"{}"}}`),
			message(`{"role":"assistant","content":"{}"}`),
		}},
		{"message/parts", chat, []string{
			content(`[{"type":"text","text":"ab"},{"type":"text","text":"c"}]`), content(`[{"type":"text","text":"a"},{"type":"text","text":"bc"}]`),
			content(`"abc"`), content(`[{"type":"text","text":"abc"},{"type":"text","text":"d"}]`), content(`[{"type":"refusal","refusal":"abc"}]`),
			content(`[{"type":"thinking","thinking":"abc"}]`), content(`[{"type":"thinking","thinking":"abd"}]`), content(`[{"type":"unknown","value":"abc"}]`), content(`[{"type":"unknown","value":"abd"}]`),
		}},
		{"media/plain text that looks like one", chat, []string{
			with(`"tools":[{"name":"f","parameters":{"description":"data: a"}}]`), with(`"tools":[{"name":"f","parameters":{"description":"data: b"}}]`),
			with(`"tools":[{"name":"f","parameters":{"x":"data:image/png;base64,A"}}]`), with(`"tools":[{"name":"f","parameters":{"x":"data:image/png;base64,B"}}]`),
		}},
		{"message/positions", chat, []string{
			message(`{"role":"user","content":"ok"}`), message(`{"role":"user","content":"ok"}`, `{"role":"user","content":"ok"}`),
			message(`{"role":"user","content":"ok"}`, `{"role":"user","content":"ok"}`, `{"role":"user","content":"ok"}`),
			message(`{"role":"user","content":"okok"}`), content(`["ok","ok"]`),
			message(`{"role":"user","content":"ab"}`, `{"role":"user","content":"c"}`), message(`{"role":"user","content":"a"}`, `{"role":"user","content":"bc"}`),
		}},
		{"media/by content", chat, []string{
			content(`[{"type":"image_url","image_url":{"url":"data:image/png;base64,AAAA"}}]`), content(`[{"type":"image_url","image_url":{"url":"data:image/png;base64,AAAB"}}]`),
			content(`[{"type":"image_url","image_url":{"url":"https://example.org/a.png"}}]`), content(`[{"type":"image_url","image_url":{"url":"https://example.org/b.png"}}]`),
			content(`[{"type":"image_url","image_url":{"url":"https://example.org/b.png","detail":"low"}}]`), content(`[{"type":"image_url","image_url":null,"uuid":"u"}]`),
			content(`[{"type":"input_audio","input_audio":{"data":"AAAA","format":"wav"}}]`), content(`[{"type":"input_audio","input_audio":{"data":"AAAB","format":"wav"}}]`),
			content(`[{"type":"video_url","video_url":{"url":"data:video/mp4;base64,AAAA"}}]`), content(`[{"type":"video_url","video_url":{"url":"data:video/mp4;base64,AAAB"}}]`),
			content(`[{"type":"file","file":{"file_data":"data:application/pdf;base64,AAAA"}}]`), content(`[{"type":"file","file":{"file_id":"f"}}]`),
			content(`[{"type":"document","source":{"type":"text","data":"AAAA"}}]`), content(`[{"type":"document","source":{"type":"base64","data":"AAAC"}}]`),
			content(`[{"type":"document","title":"t","source":{"type":"text","data":"AAAA"}}]`), content(`[{"type":"document","source":{"type":"content","content":[{"type":"text","text":"AAAD"}]}}]`),
			content(`[{"type":"image_url","image_url":{"url":"data:,A"}},{"type":"image_url","image_url":{"url":"data:,B"}}]`), content(`[{"type":"image_url","image_url":{"url":"data:,B"}},{"type":"image_url","image_url":{"url":"data:,A"}}]`),
			content(`[{"type":"text","text":"x"},{"type":"image_url","image_url":{"url":"data:,A"}}]`), content(`[{"type":"image_url","image_url":{"url":"data:,A"}},{"type":"text","text":"x"}]`),
			message(`{"role":"user","content":"y","images":["A"]}`), message(`{"role":"user","content":"y","images":["B"]}`),
		}},
		{"responses/items", responses, []string{
			`{"input":[{"type":"function_call","call_id":"1","name":"f","arguments":"{}"}]}`, `{"input":[{"type":"function_call","call_id":"2","name":"f","arguments":"{}"}]}`,
			`{"input":[{"type":"function_call_output","call_id":"1","output":"a"}]}`, `{"input":[{"type":"function_call_output","call_id":"1","output":"b"}]}`,
			`{"input":[{"type":"custom_tool_call","call_id":"1","name":"f","input":"x"}]}`, `{"input":[{"type":"custom_tool_call_output","call_id":"1","output":"x"}]}`,
			`{"input":[{"type":"reasoning","summary":[{"type":"summary_text","text":"a"}]}]}`, `{"input":[{"type":"reasoning","encrypted_content":"a"}]}`, `{"input":[{"type":"reasoning","encrypted_content":"b"}]}`,
			`{"input":[{"type":"item_reference","id":"a"}]}`, `{"input":[{"type":"item_reference","id":"b"}]}`,
			`{"input":[{"type":"web_search_call","action":{"query":"a"}}]}`, `{"input":[{"type":"web_search_call","action":{"query":"b"}}]}`,
			`{"input":[{"type":"image_generation_call","result":"AAAA"}]}`, `{"input":[{"type":"image_generation_call","result":"AAAB"}]}`,
			`{"input":[{"type":"computer_call_output","call_id":"1","output":{"type":"computer_screenshot","image_url":"data:image/png;base64,AAAA"}}]}`,
			`{"input":[{"type":"computer_call_output","call_id":"1","output":{"type":"computer_screenshot","image_url":"data:image/png;base64,AAAB"}}]}`,
			`{"input":[{"role":"assistant","phase":"commentary","content":"x"}]}`, `{"input":[{"role":"assistant","content":"x"}]}`,
			`{"input":"x","instructions":"i"}`, `{"input":"x"}`, `{"input":"x","previous_response_id":"a"}`, `{"input":"x","previous_response_id":"b"}`, `{"input":"x","conversation":"c"}`,
			`{"input":"x","prompt":{"id":"p","variables":{"a":"b"}}}`, `{"input":"x","prompt":{"id":"p","variables":{"a":"c"}}}`,
		}},
		{"anthropic/blocks", anthropic, []string{
			content(`[{"type":"tool_use","id":"1","name":"f","input":{"a":1}}]`), content(`[{"type":"tool_use","id":"1","name":"f","input":{"a":2}}]`), content(`[{"type":"tool_use","id":"2","name":"f","input":{"a":1}}]`),
			content(`[{"type":"tool_result","tool_use_id":"1","content":"a"}]`), content(`[{"type":"tool_result","tool_use_id":"2","content":"a"}]`), content(`[{"type":"tool_result","tool_use_id":"1","content":"b"}]`),
			content(`[{"type":"tool_result","tool_use_id":"1","content":"a","is_error":true}]`), content(`[{"type":"tool_result","tool_use_id":"1","content":[{"type":"text","text":"a"},{"type":"image","source":{"type":"base64","data":"AA"}}]}]`),
			content(`[{"type":"redacted_thinking","data":"a"}]`), content(`[{"type":"redacted_thinking","data":"b"}]`),
		}},
		{"ollama/generate", "/api/generate", []string{
			`{"model":"m","prompt":"x"}`, `{"model":"m","prompt":"x","system":"s"}`, `{"model":"m","prompt":"x","template":"t"}`, `{"model":"m","prompt":"x","raw":true}`,
			`{"model":"m","prompt":"x","context":[1,2]}`, `{"model":"m","prompt":"x","context":[1,3]}`, `{"model":"m","prompt":"x","images":["A"]}`, `{"model":"m","prompt":"x","images":["B"]}`,
			`{"model":"m","prompt":"x","suffix":"s"}`, `{"model":"m","prompt":"xs"}`,
		}},
		{"sglang/generate", "/generate", []string{
			`{"text":"x"}`, `{"text":"y"}`, `{"input_ids":[1,2,3]}`, `{"input_ids":[1,2,4]}`, `{"text":"x","lora_path":"l"}`, `{"text":"x","image_data":"A"}`, `{"text":"x","image_data":["B"]}`,
			`{"text":"x","audio_data":"A"}`, `{"text":"x","video_data":"A"}`, `{"text":"x","extra_key":"k"}`, `{"text":"x","cache_salt":"k"}`, `{"input_embeds":[[0.5,1]]}`, `{"input_embeds":[[0.5,2]]}`,
		}},
		{"llama.cpp/completion and infill", "/completion", []string{
			`{"prompt":"ab"}`, `{"prompt":[12,34]}`, `{"prompt":[12,"ab",34]}`, `{"prompt":[12,"b"]}`, `{"prompt":[1,234]}`, `{"prompt":{"prompt_string":"ab","multimodal_data":["A"]}}`, `{"prompt":{"prompt_string":"ab","multimodal_data":["B"]}}`,
			`{"input_prefix":"a","input_suffix":"b"}`, `{"input_prefix":"ab","input_suffix":""}`, `{"input_prefix":"a","input_suffix":"b","prompt":"c"}`, `{"input_prefix":"a","input_suffix":"bc"}`,
			`{"input_prefix":"a","input_suffix":"b","input_extra":[{"filename":"f","text":"t"}]}`, `{"input_prefix":"a","input_suffix":"b","input_extra":[{"filename":"g","text":"t"}]}`, `{"input_prefix":"a","input_suffix":"b","input_extra":[{"filename":"f","text":"u"}]}`,
		}},
		{"tgi and triton", "/generate", []string{
			`{"inputs":"x"}`, `{"inputs":"y"}`, `{"inputs":"x","parameters":{"adapter_id":"a"}}`, `{"text_input":"z"}`,
		}},
		{"vllm/embeds", "/v1/completions", []string{
			`{"model":"m","prompt_embeds":"AAAA"}`, `{"model":"m","prompt_embeds":"AAAB"}`, `{"model":"m","prompt":"x","prompt_embeds":"AAAA"}`, `{"model":"m","prompt":"x"}`,
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			seen := map[string]string{}
			for _, body := range c.bodies {
				k := sum(t, c.path, body)
				id := fmt.Sprint(k.Blocks)
				if other, ok := seen[id]; ok {
					t.Errorf("%s\nequals\n%s", body, other)
				}
				seen[id] = body
			}
		})
	}
}

// Bodies of both tables as the model sees them.
func TestModel(t *testing.T) {
	for _, body := range seeds() {
		testModel(t, []byte(body))
	}
}

func TestCauses(t *testing.T) {
	for _, c := range []struct {
		name, path, body string
		complete         bool
		want             Cause
	}{
		{"empty/no body", chat, "", true, Empty},
		{"not json/text", chat, "hello", true, NotJSON},
		{"not json/white space", chat, "  \n", true, NotJSON},
		{"not json/truncated", chat, `{"messages":[{"role":"user","content":"x"}]`, true, NotJSON},
		{"not json/trailing", chat, `{"messages":[{"role":"user","content":"x"}]}x`, true, NotJSON},
		{"not json/missing comma", chat, `{"messages":["x"] "model":"m"}`, true, NotJSON},
		{"not json/mismatch", chat, `{"messages":["x"}]`, true, NotJSON},
		{"not json/bare word", chat, `{"messages":nope}`, true, NotJSON},
		{"not json/gzip", chat, "\x1f\x8b\x08\x00\x00", true, NotJSON},
		{"not json/UTF-16", chat, "\xff\xfe{\x00}\x00", true, NotJSON},
		{"head/keyed", chat, `{"messages":[{"role":"user","content":"` + strings.Repeat("x", 40), false, Keyed},
		{"head/before the prompt", chat, `{"model":"m","messa`, false, NoPrompt},
		{"head/no whole block", chat, `{"messages":[{"role":"user","content":"x`, false, NoPrompt},
		{"no prompt/list", chat, `[1,2]`, true, NoPrompt},
		{"no prompt/nothing", chat, `{}`, true, NoPrompt},
		{"no prompt/model only", "/api/generate", `{"model":"m","keep_alive":0}`, true, NoPrompt},
		{"no prompt/no messages", chat, `{"model":"m","messages":[]}`, true, NoPrompt},
		{"no prompt/empty text", "/v1/completions", `{"model":"m","prompt":""}`, true, NoPrompt},
		{"no prompt/rerank by shape", "/x", `{"model":"m","query":"q","documents":["d"]}`, true, NoPrompt},
		{"not prompt/embeddings", "/v1/embeddings", `{"model":"m","input":"x"}`, true, NotPrompt},
		{"not prompt/embeddings under a prefix", "/tenant/a/openai/v1/embeddings/", `{"model":"m","input":"x"}`, true, NotPrompt},
		{"not prompt/embeddings by shape", "/x", `{"model":"m","input":["x","y"]}`, true, NotPrompt},
		{"not prompt/token embeddings by shape", "/x", `{"model":"m","input":[[1,2],[3]]}`, true, NotPrompt},
		{"not prompt/embeddings by a member", "/x", `{"model":"m","input":"x","encoding_format":"base64"}`, true, NotPrompt},
		{"not prompt/ollama embed", "/api/embed", `{"model":"m","input":["x"]}`, true, NotPrompt},
		{"not prompt/ollama embeddings", "/api/embeddings", `{"model":"m","prompt":"x"}`, true, NotPrompt},
		{"not prompt/ollama create", "/api/create", `{"model":"m","from":"n","messages":[{"role":"user","content":"x"}]}`, true, NotPrompt},
		{"not prompt/count tokens", "/v1/messages/count_tokens", `{"model":"m","messages":[{"role":"user","content":"x"}]}`, true, NotPrompt},
		{"not prompt/tokenize", "/tokenize", `{"model":"m","prompt":"x"}`, true, NotPrompt},
		{"not prompt/rerank", "/v1/rerank", `{"model":"m","query":"q","documents":["d"]}`, true, NotPrompt},
		{"not prompt/render", "/v1/chat/completions/render", `{"model":"m","messages":[{"role":"user","content":"x"}]}`, true, NotPrompt},
		{"not prompt/images", "/v1/images/generations", `{"model":"m","prompt":"x"}`, true, NotPrompt},
		{"not prompt/speech", "/v1/audio/speech", `{"model":"m","input":"x","voice":"v"}`, true, NotPrompt},
		{"shape decides/messages with any member", "/x", `{"messages":["x"],"dimensions":7}`, true, Keyed},
		{"shape decides/chat at any path", "/my/llm", `{"messages":[{"role":"user","content":"x"}]}`, true, Keyed},
		{"shape decides/generate at any path", "/my/llm", `{"text":"x"}`, true, Keyed},
		{"shape decides/nested batches", "/my/llm", `{"messages":[[{"role":"user","content":"x"}],[{"role":"user","content":"y"}]]}`, true, Keyed},
	} {
		t.Run(c.name, func(t *testing.T) {
			h := New(Config{BlockBytes: 16})
			k := Key{Blocks: []Block{{1, 2}}, Session: 3, Previous: 4, Stream: true, Judged: true}
			got := h.Sum(&k, c.path, []byte(c.body), c.complete, "")
			if got != c.want {
				t.Fatalf("%s, want %s", got, c.want)
			}
			if (len(k.Blocks) > 0) != (got == Keyed) {
				t.Errorf("%d blocks with cause %s", len(k.Blocks), got)
			}
			if got != Keyed && (k.Session != 0 || k.Previous != 0 || k.Judged) {
				t.Errorf("leftovers of another request: %+v", k)
			}
		})
	}
}

func TestWeight(t *testing.T) {
	long := strings.Repeat("word ", 1000)
	for _, c := range []struct {
		name, path, body string
		least, most      int
	}{
		{"text/as long as it is", chat, `{"messages":[{"role":"user","content":"` + long + `"}]}`, 5000, 5100},
		{"tokens/four bytes each", "/v1/completions", `{"prompt":[` + strings.TrimSuffix(strings.Repeat("128000,", 1000), ",") + `]}`, 4000, 4100},
		{"batch/all prompts", "/v1/completions", `{"prompt":["` + long + `","` + long + `","` + long + `"]}`, 15000, 15100},
		{"batch/all token prompts", "/v1/completions", `{"prompt":[[1,2,3,4],[5,6,7,8]]}`, 32, 40},
		{"batch/all conversations", chat, `{"messages":[[{"role":"user","content":"` + long + `"}],[{"role":"user","content":"` + long + `"}]]}`, 10000, 10100},
		{"media/nominal", chat, `{"messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"data:image/png;base64,` + strings.Repeat("A", 1<<20) + `"}}]}]}`, mediaBytes, mediaBytes + 100},
		{"text/not a data URL", chat, `{"messages":["x"],"tools":[{"name":"f","parameters":{"description":"data: ` + long + `"}}]}`, 5000, 5100},
		{"media/in a tool's result", responses, `{"input":[{"type":"mcp_call","output":"data:image/png;base64,` + strings.Repeat("A", 1<<20) + `"}]}`, mediaBytes, mediaBytes + 100},
		{"not prompt/embeddings", "/v1/embeddings", `{"input":["` + long + `","` + long + `"]}`, 10000, 10100},
		{"not prompt/images", "/v1/images/edits", `{"image":"data:image/png;base64,` + strings.Repeat("A", 1<<20) + `","prompt":"x"}`, mediaBytes, mediaBytes + 100},
		{"no prompt/no session", "/x", `{"query":"` + long + `"}`, 5000, 5100},
	} {
		t.Run(c.name, func(t *testing.T) {
			var k Key
			New(Config{}).Sum(&k, c.path, []byte(c.body), true, "")
			if k.Bytes < c.least || k.Bytes > c.most {
				t.Errorf("%d bytes, want %d to %d", k.Bytes, c.least, c.most)
			}
			if len(k.Blocks) > 0 && int(k.Blocks[len(k.Blocks)-1].End) > k.Bytes {
				t.Errorf("last block ends at %d of %d", k.Blocks[len(k.Blocks)-1].End, k.Bytes)
			}
		})
	}
}

func TestBlockLength(t *testing.T) {
	k := sum(t, "/", `{"prompt":"`+strings.Repeat("x", 40000)+`"}`)
	start := uint32(0)
	for i, b := range k.Blocks {
		want := uint32(16)
		if start >= fineBytes {
			want = 64
		}
		if b.End-start != want && i < len(k.Blocks)-1 {
			t.Fatalf("block of %d bytes at %d, want %d", b.End-start, start, want)
		}
		start = b.End
	}
	if int(start) != k.Bytes || k.Bytes != 40001 {
		t.Errorf("blocks end at %d, weight %d, want 40001", start, k.Bytes)
	}
}

func TestStream(t *testing.T) {
	for _, c := range []struct {
		name, path, body string
		want             bool
	}{
		{"openai/default", chat, `{"messages":["x"]}`, false},
		{"openai/true", chat, `{"messages":["x"],"stream":true}`, true},
		{"openai/null", chat, `{"messages":["x"],"stream":null}`, false},
		{"ollama/default", "/api/chat", `{"messages":["x"]}`, true},
		{"ollama/default under a prefix", "/llm/api/generate", `{"prompt":"x"}`, true},
		{"ollama/false", "/api/chat", `{"messages":["x"],"stream":false}`, false},
		{"ollama/by shape", "/x", `{"messages":["x"],"options":{"num_ctx":1}}`, true},
		{"ollama/by think", "/x", `{"messages":["x"],"think":false}`, true},
		{"tgi/generate_stream", "/generate_stream", `{"inputs":"x"}`, true},
		{"tgi/generate", "/generate", `{"inputs":"x"}`, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			if got := sum(t, c.path, c.body).Stream; got != c.want {
				t.Errorf("stream %t, want %t", got, c.want)
			}
		})
	}
}

func TestSessions(t *testing.T) {
	h := New(Config{Seed: 1})
	for _, c := range []struct {
		name, body        string
		session, previous uint64
		judged            bool
	}{
		{"none", `{"messages":["x"]}`, 0, 0, true},
		{"session/prompt_cache_key", `{"messages":["x"],"prompt_cache_key":"abc"}`, h.ID("", "abc"), 0, true},
		{"session/escaped", `{"messages":["x"],"prompt_cache_key":"\u0061bc"}`, h.ID("", "abc"), 0, true},
		{"session/empty", `{"messages":["x"],"prompt_cache_key":""}`, 0, 0, true},
		{"session/not a string", `{"messages":["x"],"prompt_cache_key":7}`, 0, 0, true},
		{"previous/response", `{"input":"x","previous_response_id":"resp_1"}`, 0, h.ID("", "resp_1"), false},
		{"previous/conversation", `{"input":"x","conversation":"conv_1"}`, 0, h.ID("", "conv_1"), false},
		{"previous/conversation object", `{"input":"x","conversation":{"id":"conv_1"}}`, 0, h.ID("", "conv_1"), false},
		{"previous/thread", `{"messages":["x"],"thread":{"type":"continue","previous_message_id":"msg_1"}}`, 0, h.ID("", "msg_1"), false},
		{"previous/without input", `{"model":"m","previous_response_id":"resp_1"}`, 0, h.ID("", "resp_1"), false},
		{"judged/several prompts", `{"prompt":["x","y"]}`, 0, 0, false},
		{"judged/truncated", `{"messages":["x"],"truncate_prompt_tokens":16}`, 0, 0, false},
		{"judged/truncated by TGI", `{"inputs":"x","parameters":{"truncate":16}}`, 0, 0, false},
		{"judged/truncated if too long", `{"input":"x","truncation":"auto"}`, 0, 0, false},
		{"judged/not truncated", `{"input":"x","truncation":"disabled","truncate_prompt_tokens":null}`, 0, 0, true},
		{"judged/log probabilities of the prompt", `{"messages":["x"],"prompt_logprobs":0}`, 0, 0, false},
		{"judged/log probabilities of the answer", `{"messages":["x"],"logprobs":true,"top_logprobs":2,"prompt_logprobs":null}`, 0, 0, true},
		{"judged/log probabilities from a token on", `{"text":"x","return_logprob":true,"logprob_start_len":0}`, 0, 0, false},
		{"judged/echo", `{"prompt":"x","echo":true,"logprobs":1}`, 0, 0, false},
		{"judged/no echo", `{"prompt":"x","echo":false}`, 0, 0, true},
		{"judged/cache left alone", `{"prompt":"x","cache_prompt":false}`, 0, 0, false},
		{"judged/cache used", `{"prompt":"x","cache_prompt":true}`, 0, 0, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			var k Key
			h.Sum(&k, "/", []byte(c.body), true, "")
			if k.Session != c.session || k.Previous != c.previous || k.Judged != c.judged {
				t.Errorf("session %d previous %d judged %t, want %d, %d, %t", k.Session, k.Previous, k.Judged, c.session, c.previous, c.judged)
			}
		})
	}
	if h.ID("a", "x") == h.ID("", "x") || h.ID("a", "x") == h.ID("b", "x") || h.ID("", "ax") == h.ID("a", "x") {
		t.Error("scopes share a session")
	}
	if h.ID("", "x") == New(Config{Seed: 2}).ID("", "x") {
		t.Error("seeds share a session")
	}
}

// What the stored history adds comes before the new input and after what the
// request repeats.
func TestPreviousKeepsInstructions(t *testing.T) {
	instructions := strings.Repeat("be brief ", 10)
	first := sum(t, responses, `{"instructions":"`+instructions+`","input":"x"}`)
	second := sum(t, responses, `{"instructions":"`+instructions+`","input":"x","previous_response_id":"r"}`)
	if n := shared(first, second); n != len(first.Blocks)-1 {
		t.Errorf("%d of %d blocks shared, want all but the input's", n, len(first.Blocks))
	}
}

func TestScopeAndSeed(t *testing.T) {
	body := []byte(`{"model":"m","messages":[{"role":"user","content":"` + strings.Repeat("x", 100) + `"}]}`)
	key := func(config Config, scope string) Key {
		var k Key
		config.BlockBytes = 16
		New(config).Sum(&k, chat, body, true, scope)
		return k
	}
	base := key(Config{Seed: 1}, "")
	for name, other := range map[string]Key{
		"scope":        key(Config{Seed: 1}, "tenant"),
		"other scope":  key(Config{Seed: 1}, "tenant2"),
		"seed":         key(Config{Seed: 2}, ""),
		"scope + seed": key(Config{Seed: 2}, "tenant"),
	} {
		if base.Bytes != other.Bytes || len(base.Blocks) != len(other.Blocks) {
			t.Errorf("%s: the prompt's length depends on it", name)
		}
		for i := range base.Blocks {
			if base.Blocks[i].Hash == other.Blocks[i].Hash {
				t.Errorf("%s: block %d is shared", name, i)
			}
		}
	}
	if again := key(Config{Seed: 1}, ""); !slices.Equal(again.Blocks, base.Blocks) {
		t.Error("another Hasher with an equal Config gives other hashes")
	}
}

// The hashes are kept on disk and shared between gateways: when this fails on
// purpose, raise KeyVersion.
func TestHashesAreStable(t *testing.T) {
	k := sum(t, chat, `{"model":"m","tools":[{"name":"f"}],"messages":[{"role":"user","content":[{"type":"text","text":"Hello,\nworld"},{"type":"image_url","image_url":{"url":"data:,A"}}]}]}`)
	want := []Block{{0x2190a8d17f5d4bed, 0x3}, {0xdfb06c793053772d, 0x13}, {0xb18745ef7e0de105, 0x1017}}
	if !slices.Equal(k.Blocks, want) {
		t.Errorf("got %#v", k.Blocks)
	}
}

func TestNoAllocations(t *testing.T) {
	if raceEnabled {
		t.Skip("the race detector empties pools")
	}
	h := New(Config{Seed: 1})
	var k Key
	for _, body := range seeds() {
		body := []byte(body)
		h.Sum(&k, "/", body, true, "tenant")
		if n := testing.AllocsPerRun(20, func() { h.Sum(&k, "/", body, true, "tenant") }); n > 0 {
			t.Errorf("%v allocations for %.200s", n, body)
		}
	}
}
