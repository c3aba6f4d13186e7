package signal

import (
	"bytes"
	"strings"
)

// Format is how a response body is written, by its content type.
type Format uint8

const (
	None   Format = iota // nothing here can read it
	JSON                 // one document
	SSE                  // server-sent events: one document per event
	NDJSON               // one document per line (Ollama)
)

// FormatOf tells the format of a body from its Content-Type.
func FormatOf(contentType string) Format {
	mediaType, _, _ := strings.Cut(contentType, ";")
	switch mediaType = strings.TrimSpace(mediaType); {
	case strings.EqualFold(mediaType, "application/json"):
		return JSON
	case strings.EqualFold(mediaType, "text/event-stream"):
		return SSE
	case strings.EqualFold(mediaType, "application/x-ndjson"), strings.EqualFold(mediaType, "application/ndjson"):
		return NDJSON
	}
	return None
}

// Tap watches one response body as it streams by: the prompt's token counts,
// the first output and the id under which the answer may be kept.
//
// It walks the JSON as it comes and keeps no bytes but a short name or id, so it
// needs neither a window at the body's end nor luck with chunk boundaries: any
// way of cutting a body gives the same result. It knows for each byte whether it
// is structure or text, so what a model writes is never read as a figure.
// Write neither blocks nor allocates; text is passed over at the speed of
// bytes.IndexByte.
//
// Reset comes first; a Tap may then be pooled and reset for the next body. It is
// not safe for concurrent use.
type Tap struct {
	format   Format
	doc      document
	figures  figures
	output   bool // an event with output was seen
	reported bool // and Write said so

	// Server-sent events: bytes of "data:" seen in this line, whether the line is
	// another one, and whether it is blank so far.
	matched int
	other   bool
	filled  bool

	id    [maxID]byte
	idLen int
}

// Reset makes t ready for a new body.
func (t *Tap) Reset(f Format) { *t = Tap{format: f} }

// Write passes t the next bytes of the body. It returns true for the bytes that
// complete the first event with output, so at most once, and never for a body
// that isn't a stream.
//
// Output is anything but comments, pings, errors and what a server may send
// before it has a first token: response.created and its like, message_start,
// blocks that are opened empty, llama.cpp's prompt_progress, and chat chunks with
// only a role. vLLM and SGLang send the role once the first token is there, but
// the token follows in the same write, while gateways and others send it before
// the prefill: so the chunk with the token is the right one for all of them.
func (t *Tap) Write(p []byte) (first bool) {
	switch t.format {
	case None:
	case JSON:
		t.scan(p)
		return false
	case SSE:
		t.writeEvents(p)
	case NDJSON:
		t.writeLines(p)
	}
	if t.output && !t.reported {
		t.reported = true
		return true
	}
	return false
}

// Usage returns what the body has said of its prompt so far.
func (t *Tap) Usage() Usage { return t.figures.usage() }

// ResponseID returns the id under which a later request may continue this answer:
// that of a Responses API response, of a conversation made by that API, or of a
// message of Anthropic's API. A stream tells it as soon as it was seen, a JSON body
// at its end; nil until then. The bytes are t's own and last until its next Reset.
func (t *Tap) ResponseID() []byte {
	if t.idLen == 0 || t.format == JSON && !t.doc.kept {
		return nil
	}
	return t.id[:t.idLen]
}

const dataField = "data:"

// writeEvents takes server-sent events apart. A document may span several data
// lines; a blank line ends it. Lines end in LF or CRLF, as all engines write them.
func (t *Tap) writeEvents(p []byte) {
	for len(p) > 0 {
		line, rest, ended := bytes.Cut(p, newline)
		t.writeField(line)
		if ended {
			if !t.filled {
				t.doc = document{}
			}
			t.matched, t.other, t.filled = 0, false, false
		}
		p = rest
	}
}

var newline = []byte{'\n'}

func (t *Tap) writeField(line []byte) {
	for i := 0; i < len(line) && !t.filled; i++ {
		t.filled = line[i] != '\r'
	}
	for !t.other && t.matched < len(dataField) && len(line) > 0 {
		t.other = line[0] != dataField[t.matched]
		t.matched++
		line = line[1:]
	}
	if !t.other {
		t.scan(line)
	}
}

func (t *Tap) writeLines(p []byte) {
	for len(p) > 0 {
		line, rest, ended := bytes.Cut(p, newline)
		t.scan(line)
		if ended {
			t.doc = document{}
		}
		p = rest
	}
}
