package prefixhash

import (
	"bytes"
	"crypto/subtle"
)

// modality tells kinds of media apart by the type of their part.
func modality(kind []byte) byte {
	switch {
	case bytes.Contains(kind, []byte("image")):
		return 'i'
	case bytes.Contains(kind, []byte("audio")):
		return 'a'
	case bytes.Contains(kind, []byte("video")):
		return 'v'
	}
	return 'f'
}

// mediaParts adds the media of a part and reports whether there are any.
func (r *keyer) mediaParts(e *element, modality byte) bool {
	for _, n := range e.media {
		if r.has(n) {
			r.mediaOf(n, modality)
			if detail := r.word(e.detail); len(detail) > 0 && string(detail) != "auto" {
				r.field(markField, e.detail)
			}
			return true
		}
	}
	return false
}

// document adds a document part: its text where it has some, else its file.
func (r *keyer) document(e *element) {
	source := r.element(e.media[mediaSource])
	switch string(r.word(source.kind)) {
	case "text":
		r.field(markText, source.media[mediaData])
	case "content":
		r.content(source.content)
	default:
		r.mediaParts(e, 'f')
	}
}

// mediaOf adds an image, sound, video or file by its content: a URL, base64
// text, or an object that holds one of these. So {"url": x} equals x, and the
// base64 text of a data: URL equals that text alone.
func (r *keyer) mediaOf(n ref, modality byte) {
	switch r.kind(n) {
	case text:
		r.known(n)
		r.media(r.digestOf(n, modality))
	case object:
		e := r.element(n)
		if !r.mediaParts(&e, modality) {
			r.known(n)
			r.mark(markMedia)
			r.members(n, "cache_control")
		}
	default:
		r.mark(markMedia)
		r.json(n, false)
	}
}

// digestOf hashes the content of a string in one go, however long, on the
// chain's seed and under its mask like a block.
func (r *keyer) digestOf(n ref, modality byte) uint64 {
	raw := r.raw(n)
	if bytes.HasPrefix(raw, []byte("data:")) {
		if comma := bytes.IndexByte(raw, ','); comma >= 0 {
			raw = raw[comma+1:]
		}
	}
	d := &r.digest
	d.ResetWithSeed(r.root + uint64(modality))
	for at := 0; len(raw) > 0; {
		var plain []byte
		plain, raw = decode(r.buf[:0], raw, r.nodes[n].cut)
		for len(plain) > 0 {
			masked := subtle.XORBytes(plain, plain, r.mask[at:])
			_, _ = d.Write(plain[:masked])
			plain = plain[masked:]
			at = (at + masked) % len(r.mask)
		}
	}
	return d.Sum64()
}
