package signal

import "bytes"

// node is an object or array of a document whose members are looked at. All
// others are skipped.
type node uint8

const (
	rootNode     node = iota
	responseNode      // response of a Responses API event
	messageNode       // message of Anthropic's message_start
	usageNode
	detailsNode // prompt_tokens_details, input_tokens_details
	metaNode    // meta_info
	timingsNode
	sglextNode
	tiersNode   // cached_tokens_details
	choicesNode // the only array
	choiceNode
	deltaNode
)

// member is what a name means in its node. The counts come first, as figures.
type member uint8

const (
	otherMember member = iota + member(figureCount)
	usageMember
	responseMember
	messageMember
	detailsMember
	metaMember
	timingsMember
	sglextMember
	tiersMember
	choicesMember
	deltaMember
	generatedMember // something generated, unless it is empty
	finishMember    // finish_reason: generated, unless it is null
	typeMember
	objectMember
	idMember
	errorMember
	progressMember
	memberCount
)

// memberOf finds the meaning of a name.
func (t *Tap) memberOf(in node, name []byte) member {
	switch in {
	case rootNode:
		switch string(name) {
		case "usage":
			return usageMember
		case "response":
			return responseMember
		case "message":
			return messageMember
		case "meta_info":
			return metaMember
		case "timings":
			return timingsMember
		case "sglext":
			return sglextMember
		case "tokens_evaluated":
			return member(tokensEvaluated)
		case "prompt_eval_count":
			return member(evalCount)
		case "prompt_eval_cached_count":
			return member(evalCached)
		case "tokens_predicted":
			return member(tokensPredicted)
		case "eval_count":
			return member(evalOutput)
		case "object":
			return objectMember
		}
		if t.format == JSON {
			switch string(name) {
			case "id":
				return idMember
			case "type":
				return typeMember
			}
			return otherMember
		}
		if t.output {
			return otherMember
		}
		switch string(name) {
		case "type":
			return typeMember
		case "choices":
			return choicesMember
		case "error":
			return errorMember
		case "prompt_progress":
			return progressMember
		}
	case responseNode:
		switch string(name) {
		case "usage":
			return usageMember
		case "id":
			return idMember
		}
	case messageNode:
		switch string(name) {
		case "usage":
			return usageMember
		case "id":
			return idMember
		}
	case usageNode:
		switch string(name) {
		case "prompt_tokens":
			return member(promptTokens)
		case "input_tokens":
			return member(inputTokens)
		case "prompt_tokens_details", "input_tokens_details":
			return detailsMember
		case "cache_read_input_tokens":
			return member(cacheRead)
		case "cache_creation_input_tokens":
			return member(cacheCreation)
		case "prompt_cache_hit_tokens":
			return member(cacheHit)
		case "prompt_cache_miss_tokens":
			return member(cacheMiss)
		case "completion_tokens":
			return member(completionTokens)
		case "output_tokens":
			return member(outputTokens)
		}
	case detailsNode:
		if string(name) == "cached_tokens" {
			return member(detailsCached)
		}
	case metaNode:
		switch string(name) {
		case "prompt_tokens":
			return member(metaPrompt)
		case "cached_tokens":
			return member(metaCached)
		case "completion_tokens":
			return member(metaCompletion)
		}
	case timingsNode:
		switch string(name) {
		case "cache_n":
			return member(timingsCached)
		case "prompt_n":
			return member(timingsPrompt)
		case "predicted_n":
			return member(timingsPredicted)
		}
	case sglextNode:
		if string(name) == "cached_tokens_details" {
			return tiersMember
		}
	case tiersNode:
		switch string(name) {
		case "device":
			return member(tierDevice)
		case "host":
			return member(tierHost)
		case "storage":
			return member(tierStorage)
		}
	case choiceNode:
		switch string(name) {
		case "delta":
			return deltaMember
		case "text":
			return generatedMember
		case "finish_reason":
			return finishMember
		}
	case deltaNode:
		if string(name) != "role" {
			return generatedMember
		}
	case choicesNode: // an array has no names
	}
	return otherMember
}

// nodeOf gives the node that a member's object is; rootNode stands for none.
var nodeOf = [memberCount]node{
	usageMember:    usageNode,
	responseMember: responseNode,
	messageMember:  messageNode,
	detailsMember:  detailsNode,
	metaMember:     metaNode,
	timingsMember:  timingsNode,
	sglextMember:   sglextNode,
	tiersMember:    tiersNode,
	deltaMember:    deltaNode,
}

// isPreamble says whether an event of this type can come before the first token
// of an answer, or instead of one.
func isPreamble(eventType []byte) bool {
	switch string(eventType) {
	case "ping", "keepalive", "error",
		// Anthropic
		"message_start", "content_block_start",
		// Responses API
		"response.created", "response.queued", "response.in_progress", "response.failed",
		"response.output_item.added", "response.content_part.added",
		"response.reasoning_part.added", "response.reasoning_summary_part.added":
		return true
	}
	return false
}

// state is what the next byte of a document belongs to.
type state uint8

const (
	beforeRoot state = iota
	inObject         // before a name
	inName
	beforeColon
	beforeValue
	inText   // a string value
	inScalar // a number, true, false or null
	inArray  // before an element of choices
	opened   // a skipped container, before its first byte
	inSkipped
	inSkippedText
	closed // at the document's end, or beyond what is JSON
)

const (
	maxNodes = 5   // root, choices, choice, delta; root, response, usage, details
	maxID    = 128 // OpenAI's ids have 55 bytes
)

// document is the walk through one JSON document.
type document struct {
	state   state
	nodes   [maxNodes]node
	top     int    // of nodes
	member  member // whose value is being read
	escaped bool   // in a string: an odd number of backslashes came last
	depth   int    // of skipped containers
	number  int    // value of the digits read
	whole   bool   // number counts: digits only, up to a decimal point
	inPoint bool   // past the decimal point
	text    [maxID]byte
	textLen int // bytes of the string; more than maxID if it doesn't fit

	// What is known of it as an event.
	chunk     bool // has choices
	choice    bool // has at least one
	usage     bool // has usage
	generated bool
	preamble  bool
	kept      bool // is a response, a conversation or a message of Anthropic's
}

// scan walks on through the document.
func (t *Tap) scan(p []byte) {
	d := &t.doc
	for i := 0; i < len(p); {
		c := p[i]
		switch d.state {
		case closed:
			return
		case inName, inText, inSkippedText:
			n, ended := d.readString(p[i:])
			i += n
			if ended {
				t.endString()
			}
			continue
		case inSkipped:
			i += d.skip(p[i:])
			continue
		case inScalar:
			if c == ',' || c == '}' || c == ']' || isSpace(c) {
				t.endScalar()
				continue // c is not part of it
			}
			d.readScalar(c)
		case opened:
			if !isSpace(c) {
				d.generated = d.generated || d.member == generatedMember && c != '}' && c != ']'
				d.state = inSkipped
				continue // c is part of what is skipped
			}
		case beforeRoot:
			if c == '{' {
				d.state = inObject
			} else if !isSpace(c) {
				d.state = closed
			}
		case inObject:
			switch c {
			case '"':
				d.startString(inName)
			case '}':
				t.pop()
			case ',', ' ', '\n', '\r', '\t':
			default:
				d.state = closed
			}
		case beforeColon:
			if c == ':' {
				d.state = beforeValue
			} else if !isSpace(c) {
				d.state = closed
			}
		case beforeValue:
			d.startValue(c)
		case inArray:
			switch c {
			case '{':
				d.choice = true
				d.push(choiceNode)
			case ']':
				t.pop()
			case ',', ' ', '\n', '\r', '\t':
			default:
				d.state = closed
			}
		}
		i++
	}
}

func isSpace(c byte) bool { return c == ' ' || c == '\n' || c == '\r' || c == '\t' }

func (d *document) startValue(c byte) {
	switch c {
	case ' ', '\n', '\r', '\t':
	case '"':
		d.startString(inText)
	case '{':
		d.usage = d.usage || d.member == usageMember
		if n := nodeOf[d.member]; n != rootNode {
			d.push(n)
		} else {
			d.open()
		}
	case '[':
		if d.member == choicesMember {
			d.chunk = true
			d.push(choicesNode)
		} else {
			d.open()
		}
	case '}', ']', ',', ':':
		d.state = closed
	default:
		d.state = inScalar
		d.number, d.whole, d.inPoint = 0, c >= '0' && c <= '9', false
		if c != 'n' {
			d.notNull()
			d.generated = d.generated || d.member == generatedMember && c != 'f'
		}
		d.readScalar(c)
	}
}

// open begins to skip an object or array.
func (d *document) open() {
	d.notNull()
	d.depth = 1
	d.state = opened
}

// notNull notes the members that mean something by being there.
func (d *document) notNull() {
	d.generated = d.generated || d.member == finishMember
	d.preamble = d.preamble || d.member == errorMember || d.member == progressMember
}

func (d *document) push(n node) {
	d.top++
	d.nodes[d.top] = n
	d.next()
}

func (t *Tap) pop() {
	d := &t.doc
	if d.top == 0 {
		d.state = closed
		t.endDocument()
		return
	}
	d.top--
	d.next()
}

// next goes on after a value.
func (d *document) next() {
	d.state = inObject
	if d.nodes[d.top] == choicesNode {
		d.state = inArray
	}
}

func (d *document) startString(s state) {
	d.state = s
	d.textLen = 0
	d.escaped = false
}

// readString consumes bytes of a string, up to and including its closing quote.
// It keeps the first maxID of them.
func (d *document) readString(p []byte) (n int, ended bool) {
	for n < len(p) {
		if d.escaped {
			d.escaped = false
			n++
			continue
		}
		quote := bytes.IndexByte(p[n:], '"')
		end := len(p)
		if quote >= 0 {
			end = n + quote
		}
		backslashes := 0
		for end-backslashes > n && p[end-backslashes-1] == '\\' {
			backslashes++
		}
		n = end
		if backslashes%2 == 1 {
			d.escaped = true
			continue
		}
		if quote >= 0 {
			ended = true
			break
		}
	}
	if d.state != inSkippedText {
		if d.textLen < maxID {
			copy(d.text[d.textLen:], p[:n])
		}
		d.textLen += n
	}
	if ended {
		n++
	}
	return n, ended
}

// word is the string just read, or nil if it is long, as no name or id of interest
// is. Nor do these have escapes: spelled with some they are not known.
func (d *document) word() []byte {
	if d.textLen > maxID {
		return nil
	}
	return d.text[:d.textLen]
}

func (t *Tap) endString() {
	d := &t.doc
	if d.state == inName {
		d.member = t.memberOf(d.nodes[d.top], d.word())
		d.state = beforeColon
		return
	}
	if d.state == inSkippedText {
		d.state = inSkipped
		return
	}
	d.notNull()
	if d.member == generatedMember {
		d.generated = d.generated || d.textLen > 0
	}
	if d.member == typeMember {
		d.preamble = d.preamble || isPreamble(d.word())
		d.kept = d.kept || string(d.word()) == "message"
	}
	if d.member == objectMember {
		switch string(d.word()) {
		case "response", "conversation":
			d.kept = true
		case "error": // vLLM before 2025 names its errors so
			d.preamble = true
		}
	}
	if d.member == idMember {
		t.idLen = copy(t.id[:], d.word())
		if bytes.IndexByte(t.id[:t.idLen], '\\') >= 0 {
			t.idLen = 0
		}
	}
	d.next()
}

func (d *document) readScalar(c byte) {
	switch {
	case c >= '0' && c <= '9':
		if !d.inPoint {
			d.number = d.number*10 + int(c-'0')
		}
		if d.number > maxFigure {
			d.number, d.whole = 0, false
		}
	case c == '.':
		d.inPoint = true
	default:
		d.whole = false
	}
}

func (t *Tap) endScalar() {
	d := &t.doc
	if d.whole && d.member < otherMember {
		t.figures.set(figure(d.member), d.number)
	}
	d.next()
}

// skip passes over the inside of a container of no interest.
func (d *document) skip(p []byte) int {
	for i, c := range p {
		switch c {
		case '"':
			d.startString(inSkippedText)
			return i + 1
		case '{', '[':
			d.depth++
		case '}', ']':
			d.depth--
			if d.depth == 0 {
				d.next()
				return i + 1
			}
		}
	}
	return len(p)
}

// endDocument decides whether an event was output.
func (t *Tap) endDocument() {
	d := &t.doc
	switch {
	case d.preamble:
	case d.chunk:
		// The chunk without choices at a stream's end has the usage; one at the
		// beginning (content filters of hosted APIs) doesn't.
		t.output = t.output || d.generated || !d.choice && d.usage
	default:
		t.output = true
	}
}
