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
			if detail := r.short(e.detail); len(detail) > 0 && string(detail) != "auto" {
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
	switch string(r.short(source.kind)) {
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
		r.media(r.contentHash(n, modality))
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

// dataURL returns where the base64 text of a data: URL begins, 0 for other text.
func dataURL(raw []byte) int {
	const encoding, most = ";base64,", 128 // media types with parameters are short
	if !bytes.HasPrefix(raw, []byte("data:")) {
		return 0
	}
	if i := bytes.Index(raw[:min(len(raw), most)], []byte(encoding)); i >= 0 {
		return i + len(encoding)
	}
	return 0
}

// contentHash hashes the content of a string, however long.
func (r *keyer) contentHash(n ref, modality byte) uint64 {
	raw := r.raw(n)
	c := &r.medium
	c.begin(r.root+uint64(modality), r.key, int(r.fine))
	c.spelled(raw[dataURL(raw):], r.nodes[n].cut)
	c.cut()
	return c.hash
}
