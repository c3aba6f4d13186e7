package prefixhash

import (
	"bytes"
	"encoding/binary"
)

// prompts adds a prompt without messages in any of its shapes: text, token
// ids, a mix of both, llama.cpp's {prompt_string, multimodal_data}, or a list
// of these, which is several prompts.
func (r *keyer) prompts(n ref) {
	if r.kind(n) != list {
		r.single(n)
		return
	}
	mixed := false
	for e := r.first(n); e != 0; e = r.next(n, e) {
		mixed = mixed || r.kind(e) == numbers
	}
	if mixed {
		r.single(n)
	} else if r.first(n) != 0 {
		r.batch(n, r.single)
	}
}

// batch adds the first of several prompts and the weight of the others.
func (r *keyer) batch(n ref, one func(ref)) {
	first := r.first(n)
	one(first)
	for e := r.next(n, first); e != 0; e = r.next(n, e) {
		r.others += r.weigh(e)
	}
}

// single adds one prompt.
func (r *keyer) single(n ref) {
	switch r.kind(n) {
	case text:
		r.mark(markText)
		r.text(n)
	case list:
		for e := r.first(n); e != 0; e = r.next(n, e) {
			if r.kind(e) == numbers {
				r.tokens(e)
			} else {
				r.single(e)
			}
		}
	case object:
		r.mediaList(r.get(n, "multimodal_data"), 'i')
		if s := r.get(n, "prompt_string"); r.kind(s) == text {
			r.mark(markText)
			r.text(s)
		}
	}
	r.known(n)
}

// tokens adds token ids, four bytes each: about what a token is worth in text.
func (r *keyer) tokens(n ref) {
	r.mark(markTokens)
	out, id := r.buf[:0], uint32(0)
	for _, c := range r.raw(n) {
		switch {
		case '0' <= c && c <= '9':
			id = id*10 + uint32(c-'0')
		case c == ',':
			if len(out) == len(r.buf) {
				r.write(out)
				out = out[:0]
			}
			out = binary.LittleEndian.AppendUint32(out, id)
			id = 0
		}
	}
	r.write(out)
	r.write(binary.LittleEndian.AppendUint32(r.buf[:0], id))
}

// mediaList adds one medium or a list of them.
func (r *keyer) mediaList(n ref, modality byte) {
	if r.kind(n) != list {
		if r.has(n) {
			r.mediaOf(n, modality)
		}
		return
	}
	for e := r.first(n); e != 0; e = r.next(n, e) {
		r.mediaList(e, modality)
	}
	r.known(n)
}

// plain adds a prompt without messages and reports whether there is one.
func (r *keyer) plain() bool {
	f := &r.fields
	var prompt ref
	for _, at := range [...]field{
		fieldPromptTokenIDs, fieldInputIDs, fieldTokenIDs, // before text: they replace it
		fieldPrompt, fieldText, fieldInputs, fieldTextInput,
	} {
		prompt = r.either(prompt, f[at])
	}
	if !r.has(prompt) && !r.has(f[fieldPromptEmbeds]) && !r.has(f[fieldInputEmbeds]) {
		return false
	}
	if r.has(f[fieldSystem]) {
		r.system(f[fieldSystem])
	}
	if r.has(f[fieldContext]) {
		r.single(f[fieldContext])
		r.cut()
	}
	// Engines put images before the text or at placeholders in it.
	r.mediaList(f[fieldPromptEmbeds], 'e')
	r.mediaList(f[fieldInputEmbeds], 'e')
	r.mediaList(f[fieldImages], 'i')
	r.mediaList(f[fieldImageData], 'i')
	r.mediaList(f[fieldAudioData], 'a')
	r.mediaList(f[fieldVideoData], 'v')
	r.prompts(prompt)
	r.cut()
	if r.has(f[fieldSuffix]) {
		r.field(markText, f[fieldSuffix])
		r.cut()
	}
	return true
}

// infill adds llama.cpp's code infill: other files, what stands before and
// after the cursor, and the prompt, each starting a block.
func (r *keyer) infill() {
	f := &r.fields
	extra := f[fieldInputExtra]
	for e := r.first(extra); e != 0; e = r.next(extra, e) {
		if r.kind(e) != object {
			continue
		}
		r.mark(markDocument)
		r.field(markName, r.get(e, "filename"))
		r.field(markText, r.get(e, "text"))
		r.known(e)
		r.cut()
	}
	for _, at := range [...]field{fieldInputPrefix, fieldInputSuffix, fieldPrompt} {
		r.mark(markInfill)
		if r.has(f[at]) {
			r.single(f[at])
		}
		r.cut()
	}
}

// weigh returns the weight of a value that isn't hashed: text by its length in
// the body, numbers as tokens, media at their nominal weight.
func (r *keyer) weigh(n ref) (weight uint64) {
	end := max(r.nodes[n].next, n+1)
	for ; n < end; n++ {
		switch v := &r.nodes[n]; v.kind {
		case text:
			if dataURL(r.raw(n)) > 0 {
				weight += mediaBytes
			} else {
				weight += uint64(v.end - v.start)
			}
		case numbers:
			weight += 4 * uint64(1+bytes.Count(r.raw(n), []byte{','}))
		}
	}
	return weight
}
