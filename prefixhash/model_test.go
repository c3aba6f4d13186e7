package prefixhash

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"math"
	"math/big"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/cespare/xxhash/v2"
)

// A naive model of the key: the whole body in an encoding/json tree, the whole
// prompt in a list of units, hashed byte by byte. It shares the marks and the
// order with the package, nothing else.

type (
	member struct {
		key   string
		value any
	}
	tree []member // an object: members in their order, the last of equal keys in the place of the first
)

func (t tree) get(key string) any {
	for _, m := range t {
		if m.key == key {
			return m.value
		}
	}
	return nil
}

func parseTree(body []byte) (any, error) {
	if !json.Valid(body) {
		return nil, fmt.Errorf("not JSON")
	}
	d := json.NewDecoder(bytes.NewReader(body))
	d.UseNumber()
	return readTree(d)
}

func readTree(d *json.Decoder) (any, error) {
	token, err := d.Token()
	if err != nil {
		return nil, err
	}
	switch token {
	case json.Delim('['):
		items := []any{}
		for d.More() {
			item, err := readTree(d)
			if err != nil {
				return nil, err
			}
			items = append(items, item)
		}
		_, err = d.Token()
		return items, err
	case json.Delim('{'):
		t := tree{}
		for d.More() {
			key, err := d.Token()
			if err != nil {
				return nil, err
			}
			value, err := readTree(d)
			if err != nil {
				return nil, err
			}
			name := key.(string)
			if i := slices.IndexFunc(t, func(m member) bool { return m.key == name }); i >= 0 {
				t[i].value = value
			} else {
				t = append(t, member{name, value})
			}
		}
		_, err = d.Token()
		return t, err
	}
	return token, nil
}

// unit is one step of a prompt.
type unit struct {
	mark     mark // if not 0
	text     byte // if no mark, media or end
	media    bool
	sum      uint64
	boundary bool // a block ends here
}

type model struct {
	config Config
	key    []uint64 // for NH
	root   uint64
	before []unit // preamble
	units  []unit
}

func says(v any) bool {
	switch v := v.(type) {
	case nil:
		return false
	case string:
		return v != ""
	case []any:
		return len(v) > 0
	case tree:
		return len(v) > 0
	}
	return true
}

func first(values ...any) any {
	for _, v := range values {
		if says(v) {
			return v
		}
	}
	return nil
}

func str(v any) string {
	s, _ := v.(string)
	return s
}

func obj(v any) tree {
	t, _ := v.(tree)
	return t
}

func items(v any) []any {
	l, _ := v.([]any)
	return l
}

func (m *model) mark(k mark) { m.units = append(m.units, unit{mark: k}) }
func (m *model) boundary()   { m.units = append(m.units, unit{boundary: true}) }
func (m *model) bytes(s string) {
	for _, c := range []byte(s) {
		m.units = append(m.units, unit{text: c})
	}
}

// text adds text as JSON spells it.
func (m *model) text(s string) {
	for _, c := range []byte(s) {
		if i := strings.IndexByte("\"\\\b\f\n\r\t", c); i >= 0 {
			m.bytes("\\" + `"\bfnrt`[i:i+1])
		} else if c < ' ' {
			m.bytes(fmt.Sprintf(`\u%04x`, c))
		} else {
			m.bytes(string([]byte{c}))
		}
	}
}

func (m *model) json(v any, sorted bool) {
	switch v := v.(type) {
	case nil:
		m.mark(markNull)
	case bool:
		m.mark(map[bool]mark{true: markTrue, false: markFalse}[v])
	case json.Number:
		m.mark(markNumber)
		m.bytes(v.String())
	case string:
		if strings.HasPrefix(v, "data:") && strings.Contains(v[:min(len(v), 128)], ";base64,") {
			m.medium(v, 0)
			return
		}
		m.mark(markString)
		m.text(v)
	case []any:
		m.mark(markList)
		for _, e := range v {
			m.json(e, sorted)
		}
		m.mark(markEnd)
	case tree:
		m.mark(markObject)
		if sorted {
			m.sorted(v)
		} else {
			for _, e := range v {
				m.mark(markKey)
				m.bytes(e.key)
				m.json(e.value, false)
			}
		}
		m.mark(markEnd)
	}
}

func (m *model) sorted(t tree, skip ...string) {
	t = slices.Clone(t)
	slices.SortFunc(t, func(a, b member) int { return strings.Compare(a.key, b.key) })
	for _, e := range t {
		if !slices.Contains(skip, e.key) {
			m.mark(markKey)
			m.bytes(e.key)
			m.json(e.value, true)
		}
	}
}

func (m *model) field(k mark, v any) {
	if !says(v) {
		return
	}
	m.mark(k)
	if s, ok := v.(string); ok {
		m.text(s)
	} else {
		m.json(v, false)
	}
}

func (m *model) medium(v any, modality byte) {
	switch v := v.(type) {
	case string:
		if strings.HasPrefix(v, "data:") {
			if i := strings.Index(v[:min(len(v), 128)], ";base64,"); i >= 0 {
				v = v[i+len(";base64,"):]
			}
		}
		m.mark(markMedia)
		m.units = append(m.units, unit{media: true, sum: m.contentHash(v, modality)})
	case tree:
		if !m.mediaOf(v, modality) {
			m.mark(markMedia)
			m.sorted(v, "cache_control")
		}
	default:
		m.mark(markMedia)
		m.json(v, false)
	}
}

func (m *model) mediaOf(t tree, modality byte) bool {
	for _, key := range []string{
		"image_url", "image", "input_audio", "audio_url", "audio", "video_url", "video", "file",
		"source", "url", "file_data", "data", "file_url", "file_id", "uuid",
	} {
		if v := t.get(key); says(v) {
			m.medium(v, modality)
			if d := str(t.get("detail")); d != "" && d != "auto" {
				m.field(markField, d)
			}
			return true
		}
	}
	return false
}

func (m *model) mediaList(v any, modality byte) {
	if list, ok := v.([]any); ok {
		for i, e := range list {
			if i > 0 && isNumber(e) && isNumber(list[i-1]) {
				m.json(e, false) // a list of numbers is one medium
			} else {
				m.mediaList(e, modality)
			}
		}
	} else if says(v) {
		m.medium(v, modality)
	}
}

func (m *model) tools(v any) {
	for _, e := range items(v) {
		t, ok := e.(tree)
		if !ok {
			continue
		}
		m.mark(markTool)
		rest := func(t tree) {
			if kind := str(t.get("type")); kind != "" && kind != "function" && kind != "custom" {
				m.field(markField, kind)
			}
			m.sorted(t, "type", "function", "name", "description", "parameters", "input_schema", "cache_control")
		}
		if f, ok := t.get("function").(tree); ok {
			rest(t)
			t = f
		}
		m.field(markName, t.get("name"))
		m.field(markText, t.get("description"))
		m.field(markArguments, first(t.get("parameters"), t.get("input_schema")))
		rest(t)
	}
}

func (m *model) content(v any) {
	if list, ok := v.([]any); ok {
		for _, e := range list {
			m.part(e)
		}
	} else if v != nil {
		m.part(v)
	}
}

func (m *model) part(v any) {
	t, ok := v.(tree)
	if s, isText := v.(string); isText {
		m.field(markText, s)
		return
	} else if !ok {
		m.json(v, false)
		return
	}
	kind := str(t.get("type"))
	callID := first(t.get("tool_call_id"), t.get("call_id"), t.get("tool_use_id"))
	_, hasText := t.get("text").(string)
	modality := byte('f')
	for _, k := range []string{"video", "audio", "image"} {
		if strings.Contains(kind, k) {
			modality = k[0]
		}
	}
	switch {
	case kind == "tool_use" || kind == "server_tool_use" || kind == "mcp_tool_use":
		m.call(t.get("id"), t.get("name"), t.get("input"))
	case kind == "thinking" || kind == "redacted_thinking":
		m.field(markReasoning, first(t.get("thinking"), t.get("data")))
	case kind == "refusal":
		m.field(markRefusal, t.get("refusal"))
	case kind == "document":
		m.field(markName, t.get("title"))
		m.field(markField, t.get("context"))
		switch source := obj(t.get("source")); str(source.get("type")) {
		case "text":
			m.field(markText, source.get("data"))
		case "content":
			m.content(source.get("content"))
		default:
			m.mediaOf(t, 'f')
		}
	case says(callID) && says(t.get("content")):
		m.result(callID, t.get("content"), t.get("is_error"))
	case hasText:
		m.field(markText, t.get("text"))
	default:
		if !m.mediaOf(t, modality) {
			m.item(t)
		}
	}
}

func (m *model) item(t tree) {
	m.mark(markItem)
	m.sorted(t, "id", "status", "cache_control", "result")
	if says(t.get("result")) {
		m.medium(t.get("result"), 'i')
	}
}

func (m *model) call(id, name, arguments any) {
	m.mark(markToolCall)
	m.field(markCallID, id)
	m.field(markName, name)
	m.field(markArguments, arguments)
}

func (m *model) result(id, content, isError any) {
	m.mark(markToolResult)
	m.field(markCallID, id)
	m.content(content)
	if isError == true {
		m.mark(markTrue)
	}
}

func (m *model) said(role string, content any) {
	m.mark(markMessage)
	m.text(role)
	m.content(content)
	m.boundary()
}

func (m *model) system(v any) {
	list, ok := v.([]any)
	if !ok {
		m.said("system", v)
		return
	}
	m.mark(markMessage)
	m.bytes("system")
	m.mark(markText)
	for _, e := range list {
		if s, ok := obj(e).get("text").(string); ok {
			m.text(s)
		} else {
			m.part(e)
		}
	}
	m.boundary()
}

func (m *model) messages(v any) {
	if s, ok := v.(string); ok {
		m.said("user", s)
		return
	}
	list := items(v)
	if len(list) > 0 {
		if _, batch := list[0].([]any); batch {
			m.messages(list[0])
			return
		}
	}
	for _, e := range list {
		m.message(e)
		m.boundary()
	}
}

// scalar tells what no engine takes for a message or document.
func scalar(v any) bool {
	switch v.(type) {
	case string, []any, tree:
		return false
	}
	return true
}

func (m *model) message(v any) {
	if scalar(v) {
		return
	}
	m.mark(markMessage)
	t, ok := v.(tree)
	if !ok {
		m.content(v)
		return
	}
	callID := first(t.get("tool_call_id"), t.get("call_id"), t.get("tool_use_id"))
	switch kind := str(t.get("type")); {
	case kind == "function_call" || kind == "custom_tool_call":
		m.call(callID, t.get("name"), first(t.get("arguments"), t.get("input")))
	case kind == "function_call_output" || kind == "custom_tool_call_output" || kind == "computer_call_output":
		m.result(callID, t.get("output"), nil)
	case kind == "reasoning":
		m.mark(markReasoning)
		m.content(first(t.get("content"), t.get("summary")))
		m.field(markField, t.get("encrypted_content"))
	case kind == "item_reference":
		m.mark(markHistory)
		m.field(markField, t.get("id"))
	case kind != "" && kind != "message" && !says(t.get("role")):
		m.item(t)
	default:
		if says(t.get("role")) {
			if role, ok := t.get("role").(string); ok {
				m.text(role)
			}
		}
		m.field(markName, t.get("name"))
		m.field(markName, t.get("tool_name"))
		m.field(markCallID, callID)
		m.field(markField, t.get("phase"))
		m.tools(t.get("tools"))
		m.field(markReasoning, first(t.get("reasoning"), t.get("reasoning_content"), t.get("thinking")))
		m.mediaList(t.get("images"), 'i')
		m.content(t.get("content"))
		m.field(markRefusal, t.get("refusal"))
		m.mediaOf(t, 'a')
		for _, c := range items(t.get("tool_calls")) {
			call, ok := c.(tree)
			if !ok {
				continue
			}
			f := obj(first(call.get("function"), call.get("custom")))
			m.call(call.get("id"), first(f.get("name"), call.get("name")),
				first(f.get("arguments"), f.get("input"), call.get("arguments")))
		}
		if f := t.get("function_call"); says(f) {
			m.call(nil, obj(f).get("name"), obj(f).get("arguments"))
		}
	}
}

func (m *model) prompts(v any) {
	list, ok := v.([]any)
	if !ok || slices.ContainsFunc(list, isNumber) {
		m.single(v)
	} else if len(list) > 0 {
		m.single(list[0])
	}
}

func isNumber(v any) bool {
	_, ok := v.(json.Number)
	return ok
}

func (m *model) single(v any) {
	switch v := v.(type) {
	case string:
		m.mark(markText)
		m.text(v)
	case []any:
		for i, e := range v {
			if n, ok := e.(json.Number); ok {
				if i == 0 || !isNumber(v[i-1]) {
					m.mark(markTokens)
				}
				id := uint32(0)
				for _, c := range n.String() {
					if '0' <= c && c <= '9' {
						id = id*10 + uint32(c-'0')
					}
				}
				m.bytes(string(binary.LittleEndian.AppendUint32(nil, id)))
			} else {
				m.single(e)
			}
		}
	case tree:
		m.mediaList(v.get("multimodal_data"), 'i')
		if s, ok := v.get("prompt_string").(string); ok {
			m.mark(markText)
			m.text(s)
		}
	}
}

// walk builds the units of a body and reports whether there is a prompt.
func (m *model) walk(t tree) bool {
	sub := func(key, name string) any { return obj(t.get(key)).get(name) }
	prompt, stored := t.get("prompt"), any(nil)
	if p, ok := prompt.(tree); ok && (says(t.get("input")) || says(p.get("id"))) {
		prompt, stored = nil, p
	}
	raw := t.get("raw")
	if raw != true {
		raw = nil
	}
	for i, v := range []any{
		t.get("model"), t.get("lora"), t.get("lora_path"), t.get("lora_request"),
		first(t.get("adapter_id"), sub("parameters", "adapter_id")),
		t.get("cache_salt"), t.get("extra_key"), t.get("session_params"), t.get("chat_template"),
		t.get("chat_template_kwargs"), t.get("template"), raw, t.get("add_special_tokens"), stored,
		first(t.get("reasoning_effort"), sub("reasoning", "effort")),
		first(t.get("think"), sub("thinking", "type")),
		t.get("mm_processor_kwargs"), t.get("media_io_kwargs"), t.get("features"),
	} {
		if says(v) {
			m.mark(markPreamble)
			m.units = append(m.units, unit{text: byte(i)})
			m.json(v, true)
		}
	}
	m.before, m.units = m.units, nil
	for _, d := range items(t.get("documents")) {
		if !scalar(d) {
			m.mark(markDocument)
			m.json(d, false)
			m.boundary()
		}
	}
	m.tools(t.get("tools"))
	m.tools(t.get("functions"))
	m.boundary()

	ids := first(t.get("prompt_token_ids"), t.get("input_ids"), t.get("token_ids"))
	conversation := func(system, messages any) bool {
		if says(system) {
			m.system(system)
		}
		m.messages(messages)
		return says(messages)
	}
	switch {
	case says(ids):
	case says(t.get("messages")):
		return conversation(t.get("system"), t.get("messages"))
	case says(t.get("input")):
		return conversation(t.get("instructions"), t.get("input"))
	case says(t.get("input_prefix")) || says(t.get("input_suffix")):
		for _, e := range items(t.get("input_extra")) {
			if file, ok := e.(tree); ok {
				m.mark(markDocument)
				m.field(markName, file.get("filename"))
				m.field(markText, file.get("text"))
				m.boundary()
			}
		}
		for _, v := range []any{t.get("input_prefix"), t.get("input_suffix"), prompt} {
			m.mark(markInfill)
			if says(v) {
				m.single(v)
			}
			m.boundary()
		}
		return true
	}
	prompt = first(ids, prompt, t.get("text"), t.get("inputs"), t.get("text_input"))
	if !says(prompt) && !says(t.get("prompt_embeds")) && !says(t.get("input_embeds")) {
		return false
	}
	if says(t.get("system")) {
		m.system(t.get("system"))
	}
	if says(t.get("context")) {
		m.single(t.get("context"))
		m.boundary()
	}
	m.mediaList(t.get("prompt_embeds"), 'e')
	m.mediaList(t.get("input_embeds"), 'e')
	m.mediaList(t.get("images"), 'i')
	m.mediaList(t.get("image_data"), 'i')
	m.mediaList(t.get("audio_data"), 'a')
	m.mediaList(t.get("video_data"), 'v')
	m.prompts(prompt)
	m.boundary()
	m.field(markText, t.get("suffix"))
	m.boundary()
	return true
}

// blocks hashes the units one by one.
func (m *model) blocks() []Block {
	var blocks []Block
	var open []byte
	var marks, pos uint64
	hash, start := m.root, uint64(0)
	marks = hash
	end := func() {
		if pos > start {
			hash = m.blockHash(hash, open, marks)
			blocks = append(blocks, Block{hash, uint32(pos)})
		}
		open, marks, start = nil, hash, pos
	}
	fold := func(value uint64) {
		product := new(big.Int).SetUint64(marks ^ value)
		product.Mul(product, new(big.Int).SetUint64(m.key[0]))
		marks = new(big.Int).Rsh(product, 64).Uint64() ^ new(big.Int).And(product, new(big.Int).SetUint64(math.MaxUint64)).Uint64()
	}
	add := func(u unit) {
		switch {
		case u.boundary:
			end()
			return
		case u.mark != 0:
			fold(pos)
			open = append(open, byte(u.mark))
			pos++
		case u.media:
			fold(u.sum)
			pos += mediaBytes
		default:
			open = append(open, u.text)
			pos++
		}
		size := uint64(m.config.BlockBytes)
		if start >= fineBytes {
			size *= coarse
		}
		if pos-start >= size {
			end()
		}
	}
	for _, u := range m.before {
		add(u)
	}
	end()
	blocks, pos, start, marks = nil, 0, 0, hash
	for _, u := range m.units {
		add(u)
	}
	return blocks
}

// blockHash is the hash of a block with the NH of its text in big numbers.
func (m *model) blockHash(before uint64, text []byte, marks uint64) uint64 {
	length := len(text)
	for len(text)%16 != 0 || len(text)%stripe != 0 {
		text = append(text, 0)
	}
	sum := new(big.Int)
	for i := 0; i < len(text); i += 16 {
		a := binary.LittleEndian.Uint64(text[i:]) + m.key[i/8]
		b := binary.LittleEndian.Uint64(text[i+8:]) + m.key[i/8+1]
		sum.Add(sum, new(big.Int).Mul(new(big.Int).SetUint64(a), new(big.Int).SetUint64(b)))
	}
	var words [16]byte
	sum.Mod(sum, new(big.Int).Lsh(big.NewInt(1), 128)).FillBytes(words[:]) // big-endian
	var all []byte
	for _, w := range []uint64{
		binary.BigEndian.Uint64(words[:]), binary.BigEndian.Uint64(words[8:]), marks, uint64(length),
	} {
		all = binary.LittleEndian.AppendUint64(all, w)
	}
	return xxhash64(before, all)
}

// contentHash is the hash of a medium: that of the last of its blocks.
func (m *model) contentHash(text string, modality byte) uint64 {
	c := &model{config: m.config, key: m.key, root: m.root + uint64(modality)}
	c.text(text)
	c.boundary()
	if blocks := c.blocks(); len(blocks) > 0 {
		return blocks[len(blocks)-1].Hash
	}
	return c.root
}

func xxhash64(seed uint64, p []byte) uint64 {
	d := xxhash.NewWithSeed(seed)
	_, _ = d.Write(p)
	return d.Sum64()
}

// modelBlocks returns the model's chain of a body without stored history; ok
// is false where the model has nothing to say.
func modelBlocks(config Config, body []byte) (blocks []Block, ok bool) {
	v, err := parseTree(body)
	t, isObject := v.(tree)
	if err != nil || !isObject {
		return nil, false
	}
	for _, key := range []string{"previous_response_id", "conversation", "thread"} {
		if t.get(key) != nil {
			return nil, false
		}
	}
	root := seeded(config.Seed, "chain", "")
	m := &model{config: config, key: nhKey(config.Seed, coarse*config.BlockBytes), root: root.Sum64()}
	if !m.walk(t) {
		return nil, true
	}
	return m.blocks(), true
}

func testModel(t *testing.T, body []byte) {
	t.Helper()
	config := Config{BlockBytes: 64, Seed: 7}
	want, ok := modelBlocks(config, body)
	if !ok || !utf8.Valid(body) {
		return
	}
	var k Key
	cause := New(config).Sum(&k, "/", body, true, "")
	if cause == NotPrompt {
		return
	}
	if cause == NotJSON {
		if depthOf(body) > maxDepth {
			return
		}
		t.Fatalf("valid JSON has no key: %.300q", body)
	}
	if !slices.Equal(k.Blocks, want) {
		t.Fatalf("blocks differ from the model's\n got %v\nwant %v\nbody %.1000q", k.Blocks, want, body)
	}
	if cause == Keyed && (k.Bytes < int(want[len(want)-1].End) || k.Bytes > math.MaxInt32) {
		t.Fatalf("weight %d, last block ends at %d", k.Bytes, want[len(want)-1].End)
	}
}

// depthOf bounds the nesting of a body from above.
func depthOf(body []byte) int {
	return bytes.Count(body, []byte{'['}) + bytes.Count(body, []byte{'{'})
}
