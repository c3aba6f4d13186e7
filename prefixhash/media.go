package prefixhash

import "bytes"

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
		r.digest2.ResetWithSeed(r.root + uint64(modality))
		r.digestOf(n)
		r.media(r.digest2.Sum64())
		r.known(n)
	case object:
		e := r.element(n)
		if !r.mediaParts(&e, modality) {
			r.mark(markMedia)
			r.members(n, "cache_control")
		}
	default:
		r.mark(markMedia)
		r.json(n, false)
	}
}

// digestOf hashes the content of a string in one go, however long.
func (r *keyer) digestOf(n ref) {
	raw := r.raw(n)
	if bytes.HasPrefix(raw, []byte("data:")) {
		if comma := bytes.IndexByte(raw, ','); comma >= 0 {
			raw = raw[comma+1:]
		}
	}
	for len(raw) > 0 {
		i := bytes.IndexByte(raw, '\\')
		if i < 0 {
			i = len(raw)
		}
		_, _ = r.digest2.Write(raw[:i])
		var plain []byte
		plain, raw = decode(r.buf[:0], raw[i:], r.nodes[n].cut)
		_, _ = r.digest2.Write(plain)
	}
}
