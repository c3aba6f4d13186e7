package prefixhash

import (
	"bytes"
	"encoding/binary"
)

// element is a message, a part of one, or an item of a Responses input: the
// members of all of them, by the names that the APIs give them. Their order in
// the body never counts.
type element struct {
	kind, role, name, phase                          ref
	content, text, refusal, output, summary          ref
	reasoning, reasoningContent, thinking, encrypted ref
	toolCalls, functionCall, function, custom        ref
	callID                                           ref // tool_call_id, call_id, tool_use_id
	id, toolName, arguments, input                   ref
	tools, images, title, context, isError           ref
	detail, result                                   ref
	media                                            [mediaFields]ref
}

// Where media stand, by what identifies their content best.
const (
	mediaImageURL = iota
	mediaImage
	mediaInputAudio
	mediaAudioURL
	mediaAudio
	mediaVideoURL
	mediaVideo
	mediaFile
	mediaSource
	mediaURL
	mediaFileData
	mediaData
	mediaFileURL
	mediaFileID
	mediaUUID // vLLM: content that the engine has cached
	mediaFields
)

func (r *keyer) element(n ref) (e element) {
	var callID, toolCallID, toolUseID ref
	for k := r.firstKey(n); k != 0; k = r.nextKey(n, k) {
		v := k + 1
		switch string(r.raw(k)) {
		case "type":
			e.kind = v
		case "role":
			e.role = v
		case "name":
			e.name = v
		case "phase":
			e.phase = v
		case "content":
			e.content = v
		case "text":
			e.text = v
		case "refusal":
			e.refusal = v
		case "output":
			e.output = v
		case "summary":
			e.summary = v
		case "reasoning":
			e.reasoning = v
		case "reasoning_content":
			e.reasoningContent = v
		case "thinking":
			e.thinking = v
		case "encrypted_content":
			e.encrypted = v
		case "tool_calls":
			e.toolCalls = v
		case "function_call":
			e.functionCall = v
		case "function":
			e.function = v
		case "custom":
			e.custom = v
		case "call_id":
			callID = v
		case "tool_call_id":
			toolCallID = v
		case "tool_use_id":
			toolUseID = v
		case "id":
			e.id = v
		case "tool_name":
			e.toolName = v
		case "arguments":
			e.arguments = v
		case "input":
			e.input = v
		case "tools":
			e.tools = v
		case "images":
			e.images = v
		case "title":
			e.title = v
		case "context":
			e.context = v
		case "is_error":
			e.isError = v
		case "detail":
			e.detail = v
		case "result":
			e.result = v
		case "image_url":
			e.media[mediaImageURL] = v
		case "image":
			e.media[mediaImage] = v
		case "input_audio":
			e.media[mediaInputAudio] = v
		case "audio_url":
			e.media[mediaAudioURL] = v
		case "audio":
			e.media[mediaAudio] = v
		case "video_url":
			e.media[mediaVideoURL] = v
		case "video":
			e.media[mediaVideo] = v
		case "file":
			e.media[mediaFile] = v
		case "source":
			e.media[mediaSource] = v
		case "url":
			e.media[mediaURL] = v
		case "file_data":
			e.media[mediaFileData] = v
		case "data":
			e.media[mediaData] = v
		case "file_url":
			e.media[mediaFileURL] = v
		case "file_id":
			e.media[mediaFileID] = v
		case "uuid":
			e.media[mediaUUID] = v
		}
	}
	e.callID = r.either(toolCallID, r.either(callID, toolUseID))
	return e
}

// messages adds a conversation: messages, or items of a Responses input.
func (r *keyer) messages(n ref) {
	switch r.kind(n) {
	case text: // LMDeploy's messages, Responses' input
		r.said("user", n)
	case list:
		if e := r.first(n); r.kind(e) == list { // vLLM's batch of conversations
			r.batch(n, r.messages)
			return
		}
		for e := r.first(n); e != 0; e = r.next(n, e) {
			r.message(e)
		}
	}
}

// said adds a message whose role the API implies.
func (r *keyer) said(role string, content ref) {
	r.implied(role)
	r.content(content)
	r.cut()
}

func (r *keyer) implied(role string) {
	r.mark(markMessage)
	r.write([]byte(role))
	if r.explain != nil {
		r.explain.role(role)
	}
}

// system adds Anthropic's system or Responses' instructions. Engines join the
// text of its blocks.
func (r *keyer) system(n ref) {
	if r.kind(n) != list {
		r.said("system", n)
		return
	}
	r.implied("system")
	r.mark(markText)
	for e := r.first(n); e != 0; e = r.next(n, e) {
		if t := r.get(e, "text"); r.kind(t) == text {
			r.text(t)
		} else {
			r.part(e)
		}
	}
	r.known(n)
	r.cut()
}

// stored adds the ID of the history that an engine kept from earlier requests.
func (r *keyer) stored(previous uint64) {
	r.mark(markHistory)
	var id [8]byte
	binary.LittleEndian.PutUint64(id[:], previous)
	r.write(id[:])
	r.cut()
}

// message adds one message or item; it starts a block and its last block may
// be short.
func (r *keyer) message(n ref) {
	if r.kind(n) < text {
		return // no engine takes a number for a message
	}
	r.mark(markMessage)
	if r.kind(n) != object {
		r.content(n)
		r.cut()
		return
	}
	e := r.element(n)
	if e.role == 0 && e.kind == 0 {
		r.known(n)
	}
	switch string(r.short(e.kind)) {
	case "", "message":
		r.turn(&e)
	case "function_call", "custom_tool_call":
		r.call(e.callID, e.name, r.either(e.arguments, e.input))
	case "function_call_output", "custom_tool_call_output", "computer_call_output":
		r.result(e.callID, e.output, 0)
	case "reasoning":
		r.mark(markReasoning)
		r.content(r.either(e.content, e.summary))
		r.field(markField, e.encrypted)
	case "item_reference":
		r.mark(markHistory)
		r.field(markField, e.id)
	default:
		if r.has(e.role) {
			r.turn(&e)
		} else {
			r.item(n, &e)
		}
	}
	r.known(n)
	r.cut()
}

// turn adds a message's fields in canonical order.
func (r *keyer) turn(e *element) {
	if r.kind(e.role) == text {
		r.text(e.role)
		if r.explain != nil {
			r.explain.role(string(r.short(e.role)))
		}
	}
	r.field(markName, e.name)
	r.field(markName, e.toolName)
	r.field(markCallID, e.callID)
	r.field(markField, e.phase)
	r.tools(e.tools)
	r.field(markReasoning, r.either(e.reasoning, r.either(e.reasoningContent, e.thinking)))
	r.mediaList(e.images, 'i')
	r.content(e.content)
	r.field(markRefusal, e.refusal)
	r.mediaParts(e, 'a') // an assistant's spoken answer
	for c := r.first(e.toolCalls); c != 0; c = r.next(e.toolCalls, c) {
		if r.kind(c) != object {
			continue
		}
		call := r.element(c)
		f := r.element(r.either(call.function, call.custom))
		r.call(call.id, r.either(f.name, call.name), r.either(r.either(f.arguments, f.input), call.arguments))
	}
	r.known(e.toolCalls)
	if r.has(e.functionCall) {
		f := r.element(e.functionCall)
		r.call(0, f.name, f.arguments)
	}
}

// content adds a message's content: text or parts.
func (r *keyer) content(n ref) {
	switch r.kind(n) {
	case absent, null:
	case list:
		for e := r.first(n); e != 0; e = r.next(n, e) {
			r.part(e)
		}
	default:
		r.part(n)
	}
	r.known(n)
}

// part adds one part of a message's content. What has no known shape is added
// as JSON.
func (r *keyer) part(n ref) {
	switch r.kind(n) {
	case text:
		r.field(markText, n)
		return
	case object:
	default:
		r.json(n, false)
		return
	}
	e := r.element(n)
	kind := r.short(e.kind)
	switch string(kind) {
	case "tool_use", "server_tool_use", "mcp_tool_use":
		r.call(e.id, e.name, e.input)
	case "thinking", "redacted_thinking":
		r.field(markReasoning, r.either(e.thinking, e.media[mediaData]))
	case "refusal":
		r.field(markRefusal, e.refusal)
	case "document":
		r.field(markName, e.title)
		r.field(markField, e.context)
		r.document(&e)
	default:
		switch {
		case r.has(e.callID) && r.has(e.content): // tool_result, web_search_tool_result, ...
			r.result(e.callID, e.content, e.isError)
		case r.kind(e.text) == text: // text, input_text, output_text, summary_text, ...
			r.field(markText, e.text)
		case !r.mediaParts(&e, modality(kind)):
			r.item(n, &e)
		}
	}
	r.known(n)
}

// item adds what no template prints in a known way: all its members but those
// that differ between equal prompts.
func (r *keyer) item(n ref, e *element) {
	r.known(n) // members are sorted: any may be missing
	r.mark(markItem)
	r.members(n, "id", "status", "cache_control", "result")
	if r.has(e.result) { // a generated image
		r.mediaOf(e.result, 'i')
	}
}

// call adds a tool call. Arguments are a string, hashed as sent, or an object.
func (r *keyer) call(id, name, arguments ref) {
	r.mark(markToolCall)
	r.field(markCallID, id)
	r.field(markName, name)
	r.field(markArguments, arguments)
}

// result adds what a tool answered.
func (r *keyer) result(id, content, isError ref) {
	r.mark(markToolResult)
	r.field(markCallID, id)
	r.content(content)
	if r.kind(isError) == truth {
		r.mark(markTrue)
	}
}

// field adds a value of any type, if there is one.
func (r *keyer) field(m mark, n ref) {
	switch {
	case !r.has(n):
	case r.kind(n) == text:
		r.mark(m)
		r.text(n)
	default:
		r.mark(m)
		r.json(n, false)
	}
}

// text adds the text of a string.
func (r *keyer) text(n ref) {
	v := r.nodes[n]
	if r.ignore.pattern == nil {
		r.spelled(r.raw(n), v.cut)
	} else {
		r.ignore.write(&r.chain, r.raw(n), v.cut)
	}
	r.known(n)
}

// short returns the decoded text of a short string, nil for other values.
func (r *keyer) short(n ref) []byte {
	if r.kind(n) != text {
		return nil
	}
	raw := r.raw(n)
	if bytes.IndexByte(raw, '\\') < 0 {
		return raw
	}
	base := len(r.keys)
	r.keys = appendDecoded(r.keys, raw, r.nodes[n].cut)
	return r.keys[base:]
}

// either returns a if it says something, else b.
func (r *keyer) either(a, b ref) ref {
	if r.has(a) {
		return a
	}
	return b
}
