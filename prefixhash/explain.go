package prefixhash

// Part is a piece of a prompt as the key sees it. It holds no text.
type Part struct {
	Kind       string  // "text", "reasoning", "tool_call", "tool_result", "media", "tool", ...
	Role       string  // of the message it belongs to; "other" for a role unknown here
	Start, End int     // range in prompt bytes; equal for what weighs nothing
	Blocks     []Block // the blocks that end within it
}

// explainer takes notes of a chain's parts.
type explainer struct {
	parts   []Part
	message string // role
}

var partKinds = [...]string{
	markPreamble:   "preamble",
	markTool:       "tool",
	markDocument:   "document",
	markMessage:    "message",
	markText:       "text",
	markReasoning:  "reasoning",
	markRefusal:    "refusal",
	markToolCall:   "tool_call",
	markToolResult: "tool_result",
	markMedia:      "media",
	markItem:       "item",
	markTokens:     "tokens",
	markHistory:    "history",
	markInfill:     "infill",
}

// Explain lists the parts of a prompt in their order with their byte ranges,
// roles and block hashes; the parameters are Sum's. Blocks of all parts
// together are Sum's Blocks.
func (h *Hasher) Explain(path string, body []byte, complete bool, scope string) ([]Part, Cause) {
	r := h.keyers.Get().(*keyer)
	e := &explainer{}
	r.explain = e
	var k Key
	cause := r.sumInto(h, &k, path, body, complete, scope)
	weight := int(r.pos)
	if r.release() {
		h.keyers.Put(r)
	}
	if cause != Keyed {
		return nil, cause
	}
	e.finish(k.Blocks, weight)
	return e.parts, cause
}

// mark begins a part at the chain's position.
func (e *explainer) mark(c *chain, m mark) {
	inPreamble := c.most == 0
	if int(m) >= len(partKinds) || inPreamble != (m == markPreamble) {
		return
	}
	if m == markMessage || m == markTool || m == markDocument {
		e.message = ""
	}
	e.parts = append(e.parts, Part{Kind: partKinds[m], Role: e.message, Start: int(c.pos)})
}

// role names the role of the message just begun. Only known roles are named:
// a client may write anything there.
func (e *explainer) role(role string) {
	switch role {
	case "system", "developer", "user", "assistant", "tool", "function":
	default:
		role = "other"
	}
	e.message = role
	e.parts[len(e.parts)-1].Role = role
}

// finish ends each part where the next begins and hands out the blocks.
func (e *explainer) finish(blocks []Block, end int) {
	for i := range e.parts {
		p := &e.parts[i]
		p.End = end
		if i+1 < len(e.parts) {
			p.End = e.parts[i+1].Start
		}
		if p.Kind == partKinds[markPreamble] {
			p.Start, p.End = 0, 0
			continue
		}
		n := 0
		for n < len(blocks) && (int(blocks[n].End) <= p.End || i == len(e.parts)-1) {
			n++
		}
		p.Blocks, blocks = blocks[:n:n], blocks[n:]
	}
}
