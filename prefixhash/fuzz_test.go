package prefixhash

import (
	"bytes"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"
)

// Seed corpora: bodies of every format, valid and not.
var corpus = map[string][]string{
	"chat": {
		`{"model":"m","messages":[{"role":"system","content":"You help."},{"role":"user","content":"Hi \u00e9\ud83d\ude00 \"x\"\n"}],"stream":true}`,
		`{"model":"m","messages":[{"role":"user","content":[{"type":"text","text":"a"},{"type":"image_url","image_url":{"url":"data:image/png;base64,AAAA","detail":"low"}},{"type":"input_audio","input_audio":{"data":"AA","format":"wav"}},{"type":"file","file":{"file_data":"data:,x"}}]}]}`,
		`{"messages":[{"role":"assistant","content":null,"reasoning_content":"r","tool_calls":[{"id":"1","type":"function","function":{"name":"f","arguments":"{\"a\":1}"}},{"id":"2","custom":{"name":"g","input":"x"}}],"refusal":"no"},{"role":"tool","tool_call_id":"1","name":"f","content":"ok"},{"role":"function","name":"f","content":"1"},{"role":"assistant","function_call":{"name":"f","arguments":"{}"}}],"functions":[{"name":"f"}]}`,
		`{"tools":[{"type":"function","function":{"name":"f","description":"d","parameters":{"type":"object","properties":{"a":{"enum":[1,2.5,-3e1,true,false,null,"s",[],{}]}}},"strict":true}}],"documents":[{"title":"t","text":"x"}],"chat_template":"t","chat_template_kwargs":{"b":[1,{"d":1,"c":2}],"a":true},"cache_salt":"s","lora_request":{"lora_name":"l"},"reasoning_effort":"low","messages":[{"role":"user","content":"x"}]}`,
		`{"messages":[[{"role":"user","content":"x"}],[{"role":"user","content":"y"}]]}`,
		`{"messages":"plain","tools":[1,null,[{}],"x"]}`,
		`{"model":"a","model":"b","messages":[],"messages":[{"role":"x","role":"user","content":"1","content":"2"}]}`,
		`{"messages":[1,null,true,"x",[1,2],{"content":{"type":"text","text":"y"}},{"role":1,"content":7},{"type":"human","role":"u","content":"x"}]}`,
	},
	"completions": {
		`{"model":"m","prompt":"Once upon","suffix":"end","max_tokens":5}`,
		`{"prompt":["a","b"]}`, `{"prompt":[1,2,128000]}`, `{"prompt":[[1,2],[3]]}`, `{"prompt":[]}`, `{"prompt":[[]]}`, `{"prompt":[1.5,-2,1e3,99999999999]}`,
		`{"prompt_token_ids":[1,2],"messages":["x"]}`, `{"prompt_embeds":["AAAA","BBBB"]}`, `{"prompt":{"id":"p"}}`, `{"prompt":"` + strings.Repeat("long text ", 60) + `"}`,
	},
	"responses": {
		`{"model":"m","instructions":"i","input":"x","previous_response_id":"r","prompt_cache_key":"k"}`,
		`{"input":[{"type":"message","id":"m1","role":"user","content":[{"type":"input_text","text":"x"},{"type":"input_image","image_url":"data:,A"},{"type":"input_file","file_id":"f"}]},{"type":"function_call","call_id":"c","name":"f","arguments":"{}"},{"type":"function_call_output","call_id":"c","output":[{"type":"input_text","text":"o"}]},{"type":"reasoning","id":"r","summary":[{"type":"summary_text","text":"s"}],"encrypted_content":"e"},{"type":"item_reference","id":"i"},{"type":"image_generation_call","result":"AAAA"},{"type":"computer_call_output","call_id":"c","output":{"type":"computer_screenshot","image_url":"data:,B"}},{"type":"mcp_call","name":"n","arguments":"{}","output":"o"}]}`,
		`{"input":"x","prompt":{"id":"p","variables":{"b":"1","a":"2"}},"reasoning":{"effort":"high"},"text":{"format":{"type":"text"}},"tools":[{"type":"web_search","max_uses":1},{"type":"namespace","name":"n","tools":[{"name":"x"}]}]}`,
		`{"input":["x","y"]}`, `{"input":[[1]]}`, `{"input":"x","conversation":{"id":"c"}}`,
	},
	"anthropic": {
		`{"model":"m","max_tokens":1,"system":[{"type":"text","text":"a","cache_control":{"type":"ephemeral"}},{"type":"text","text":"b"}],"tools":[{"name":"f","description":"d","input_schema":{"type":"object"},"cache_control":{"type":"ephemeral"}}],"messages":[{"role":"user","content":[{"type":"text","text":"x"},{"type":"image","source":{"type":"base64","media_type":"image/png","data":"AAAA"}},{"type":"document","title":"t","context":"c","source":{"type":"text","data":"d"}},{"type":"document","source":{"type":"content","content":[{"type":"text","text":"e"}]}}]},{"role":"assistant","content":[{"type":"thinking","thinking":"t","signature":"s"},{"type":"redacted_thinking","data":"r"},{"type":"tool_use","id":"1","name":"f","input":{"a":[1]}}]},{"role":"user","content":[{"type":"tool_result","tool_use_id":"1","content":[{"type":"text","text":"o"}],"is_error":true}]}],"thinking":{"type":"enabled","budget_tokens":5}}`,
		`{"system":"s","messages":[{"role":"user","content":"x"}],"thread":{"type":"continue","previous_message_id":"m"}}`,
		`{"system":[1,"x",{"type":"image","source":{"url":"u"}}],"messages":[{"role":"user","content":[{"type":"web_search_tool_result","tool_use_id":"1","content":[{"type":"x","url":"u"}]},{"type":"search_result","source":"s","title":"t"}]}]}`,
	},
	"ollama": {
		`{"model":"m","messages":[{"role":"user","content":"x","images":["AAAA"]},{"role":"assistant","thinking":"t","content":"","tool_calls":[{"function":{"name":"f","arguments":{"b":1,"a":2}}}]},{"role":"tool","tool_name":"f","content":"1"}],"options":{"num_ctx":1},"think":"high","keep_alive":"5m"}`,
		`{"model":"m","system":"s","template":"{{ .Prompt }}","context":[1,2,3],"prompt":"x","suffix":"y","images":["AAAA"],"raw":true}`,
	},
	"engines": {
		`{"text":["a","b"],"image_data":[["AAAA"],"u"],"audio_data":"A","video_data":null,"lora_path":["l"],"extra_key":"k","session_params":{"id":"s"}}`,
		`{"input_ids":[[1,2],[3]],"image_data":"AAAA"}`, `{"input_embeds":[[0.1,NaN,-Infinity]]}`,
		`{"prompt":[12,"str",34],"lora":[{"id":0,"scale":0.5}]}`, `{"prompt":{"prompt_string":"p","multimodal_data":["AAAA"]}}`, `{"prompt":[{"prompt_string":"p"},"q"]}`,
		`{"input_prefix":"a","input_suffix":"b","input_extra":[{"filename":"f","text":"t"},1],"prompt":"c"}`,
		`{"inputs":"x","parameters":{"adapter_id":"a"}}`, `{"text_input":"x"}`, `{"token_ids":[1,2],"features":{"mm_hashes":{"image":["h"]}}}`,
	},
	"unsound": {
		"", " ", "{", "}", "[", `"`, `{"`, `{"a`, `{"a"`, `{"a":`, `{"a":1`, `{"a":1,`, `{"a":tru`, `nul`, `-`, `1`, "\ufeff{}", `{"messages":[{"content":"\`, `{"messages":[{"content":"\u12`, `{"messages":["\ud83d`,
		`{"messages":["\ud83d\u0041\udc00\ud83dx\x\u12g4"]}`, "{\"messages\":[\"\xff\xc3(\x00\"]}", `{"messages":[` + strings.Repeat("[", 50), `{"tools":[` + strings.Repeat(`{"tools":[`, 20),
		`{"messages":[{"role":"user","content":"cut in the middle of a sentence that takes more than one block of sixteen`,
	},
}

func seeds() (all []string) {
	for _, bodies := range corpus {
		all = append(all, bodies...)
	}
	slices.Sort(all)
	return all
}

func fuzz(f *testing.F, format, path string) {
	for _, body := range corpus[format] {
		f.Add([]byte(body))
	}
	for _, body := range corpus["unsound"] {
		f.Add([]byte(body))
	}
	f.Fuzz(func(t *testing.T, body []byte) { checkBody(t, path, body) })
}

func FuzzChat(f *testing.F)        { fuzz(f, "chat", chat) }
func FuzzCompletions(f *testing.F) { fuzz(f, "completions", "/v1/completions") }
func FuzzResponses(f *testing.F)   { fuzz(f, "responses", responses) }
func FuzzAnthropic(f *testing.F)   { fuzz(f, "anthropic", anthropic) }
func FuzzOllama(f *testing.F)      { fuzz(f, "ollama", "/api/chat") }
func FuzzEngines(f *testing.F)     { fuzz(f, "engines", "/generate") }

func FuzzPath(f *testing.F) {
	for _, path := range []string{"", "/", "//", "/v1/embeddings/", "/api/create", "/api/chat", "/a/b/generate_stream"} {
		f.Add(path)
	}
	f.Fuzz(func(t *testing.T, path string) { checkBody(t, path, []byte(corpus["chat"][0])) })
}

// checkBody states what holds for any body.
func checkBody(t *testing.T, path string, body []byte) {
	t.Helper()
	h := New(Config{BlockBytes: 16, Seed: 3})
	before := bytes.Clone(body)
	var k, again, head Key
	cause := h.Sum(&k, path, body, true, "s")
	if h.Sum(&again, path, body, true, "s") != cause || fmt.Sprint(k) != fmt.Sprint(again) {
		t.Fatalf("two keys of one body: %+v and %+v", k, again)
	}
	if !bytes.Equal(body, before) {
		t.Fatal("the body was changed")
	}
	if (cause == Keyed) != (len(k.Blocks) > 0) {
		t.Fatalf("%d blocks with cause %s", len(k.Blocks), cause)
	}
	end := uint32(0)
	for _, b := range k.Blocks {
		if b.End <= end {
			t.Fatalf("block ends at %d after %d", b.End, end)
		}
		end = b.End
	}
	if int(end) > k.Bytes {
		t.Fatalf("blocks end at %d of %d bytes", end, k.Bytes)
	}

	// The head of a body gives leading blocks of the body's, unless members
	// that come first in a prompt come late in the body.
	cut := len(body) / 2
	h.Sum(&head, path, body[:cut], false, "s")
	if head.Judged {
		t.Fatal("the key of a head is judged")
	}

	parts, explained := h.Explain(path, body, true, "s")
	if explained != cause {
		t.Fatalf("explained as %s, keyed as %s", explained, cause)
	}
	var blocks []Block
	at := 0
	for _, p := range parts {
		if p.Start > p.End || p.Start < at && p.Kind != "preamble" {
			t.Fatalf("parts out of order: %+v", parts)
		}
		at = p.End
		blocks = append(blocks, p.Blocks...)
	}
	if !slices.Equal(blocks, k.Blocks) {
		t.Fatalf("explained blocks %v, keyed %v", blocks, k.Blocks)
	}

	testModel(t, body)
	if cause == Keyed && json.Valid(body) {
		var indented bytes.Buffer
		if err := json.Indent(&indented, body, "", "\t"); err != nil {
			t.Fatal(err)
		}
		var spelled Key
		h.Sum(&spelled, path, indented.Bytes(), true, "s")
		if !slices.Equal(spelled.Blocks, k.Blocks) {
			t.Fatalf("white space changes the key of %.500q", body)
		}
	}
}
