package prefixhash

import "math"

// keyer makes one key: a body's tape, its chain and scratch memory.
type keyer struct {
	tape
	chain         // of the prompt
	medium chain  // one image, sound, video or file at a time
	root   uint64 // seed of both

	fields fields
	refs   []ref // stack of sorted members
	ignore ignorer
	others uint64 // weight of a batch's other prompts
}

// Scratch memory up to these sizes is kept between requests; a keyer that grew
// beyond was needed for a freak body and is left to the collector.
const (
	keptNodes = 1 << 16 // 1 MiB
	keptBytes = 1 << 20
)

// release drops what refers to a request and reports whether to keep the keyer.
func (r *keyer) release() bool {
	r.src, r.blocks, r.explain = nil, nil, nil
	return cap(r.nodes) <= keptNodes && cap(r.refs) <= keptNodes &&
		cap(r.keys) <= keptBytes && cap(r.ignore.text) <= keptBytes
}

// sumInto fills k from body.
func (r *keyer) sumInto(h *Hasher, k *Key, path string, body []byte, complete bool, scope string) Cause {
	*k = Key{Blocks: k.Blocks[:0]}
	if len(body) == 0 {
		return Empty
	}
	if len(body) > maxBody {
		body, complete = body[:maxBody], false
	}
	if !r.parse(body, complete) {
		return NotJSON
	}
	const root ref = 1
	if r.kind(root) != object {
		return NoPrompt
	}
	r.collect(root)
	at := endpointOf(path)
	k.Stream = r.streams(at)
	if at == noPrompt || !r.generates() {
		k.Bytes = clamp(r.weigh(root))
		return NotPrompt
	}
	k.Session = r.named(h, scope, r.fields[fieldPromptCacheKey])
	k.Previous = r.previous(h, scope)

	r.root = h.root
	if scope != "" {
		r.root = chainRoot(h.config.Seed, scope)
	}
	r.begin(r.root, h.key, h.config.BlockBytes)
	r.ignore.reset(h.config.Ignore)
	r.others, r.refs = 0, r.refs[:0]
	r.preamble()
	r.seal(k.Blocks)
	found := r.prompt(k.Previous)
	k.Blocks = r.blocks
	if !found || len(k.Blocks) == 0 {
		k.Blocks = k.Blocks[:0]
		k.Bytes = clamp(r.weigh(root))
		return NoPrompt
	}
	k.Bytes = clamp(r.pos + r.others)
	k.Judged = complete && !r.stopped && !r.ignore.matched && k.Previous == 0 && r.others == 0 && r.told()
	return Keyed
}

// clamp makes a weight an int.
func clamp(weight uint64) int { return int(min(weight, math.MaxInt32)) }

// preamble adds what the KV cache depends on without being prompt text.
func (r *keyer) preamble() {
	for i, n := range r.fields[:preambleFields] {
		if r.has(n) {
			r.mark(markPreamble)
			r.writeByte(byte(i))
			r.json(n, true)
		}
	}
}

// prompt adds the prompt in canonical order and reports whether there is one.
func (r *keyer) prompt(previous uint64) bool {
	f := &r.fields
	r.documents(f[fieldDocuments])
	r.tools(f[fieldTools])
	r.tools(f[fieldFunctions])
	r.cut()
	switch {
	case r.has(f[fieldPromptTokenIDs]), r.has(f[fieldInputIDs]), r.has(f[fieldTokenIDs]):
		return r.plain()
	case r.has(f[fieldMessages]):
		return r.conversation(f[fieldSystem], f[fieldMessages], previous)
	case r.has(f[fieldInput]), previous != 0:
		return r.conversation(f[fieldInstructions], f[fieldInput], previous)
	case r.has(f[fieldInputPrefix]), r.has(f[fieldInputSuffix]):
		r.infill()
		return true
	}
	return r.plain()
}

// conversation adds a system prompt, the mark of a stored history, and messages.
func (r *keyer) conversation(system, messages ref, previous uint64) bool {
	if r.has(system) {
		r.system(system)
	}
	if previous != 0 {
		r.stored(previous)
	}
	r.messages(messages)
	return r.has(messages)
}
