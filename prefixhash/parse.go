package prefixhash

import "bytes"

// maxDepth is the deepest nesting that is read: CPython's json and orjson,
// which most engines use, give up at about 1,000 levels as well.
const maxDepth = 1000

// kind of a JSON value. Text, lists and objects come last: they hold prompts.
type kind uint8

const (
	absent kind = iota // no such value
	null
	falsehood
	truth
	numbers // one number, or a run of them in a list
	text
	list
	object
)

// ref is the place of a value on the tape; 0 is no value.
type ref uint32

// node is a value or a member's key. Pointer-free: the collector walks nothing.
type node struct {
	start, end uint32 // its text; a string's without quotes, a container's with brackets
	// next is the place after a value and all that it contains. For a key it
	// is its value: the member's own, or that of a later member with the same
	// key (see unique).
	next ref
	kind kind
	cut  bool // the body ended within this value
	lent bool // a key that was spelled with escapes: its text is in tape.keys
}

// tape is the list of a body's values in their order, containers before their
// content. Reading is lenient where strictness costs time and no engine would
// serve the request anyway: numbers, escapes and control characters are not
// checked.
type tape struct {
	src   []byte
	nodes []node
	keys  []byte // decoded text of the keys spelled with escapes
}

// parse reads src, which is only the head of a body if not complete: what is
// open at its end is then closed there. It reports whether src is sound.
// Tables of integers (token ids) take one node, so the tape needs at most 16
// bytes for each 3 of the body.
func (t *tape) parse(src []byte, complete bool) bool {
	src = bytes.TrimPrefix(src, []byte("\xef\xbb\xbf"))
	t.src = src
	t.nodes = append(t.nodes[:0], node{}) // place 0: no value
	t.keys = t.keys[:0]

	var top ref // innermost open container; the chain of open ones is in next
	depth := 0
	i := 0

value:
	i = skipSpace(src, i)
	if i == len(src) {
		goto ended
	}
	switch c := src[i]; c {
	case '{', '[':
		if depth++; depth > maxDepth {
			return false
		}
		kind := object
		if c == '[' {
			kind = list
		}
		t.nodes = append(t.nodes, node{start: uint32(i), next: top, kind: kind})
		top = ref(len(t.nodes) - 1)
		i = skipSpace(src, i+1)
		if i == len(src) {
			goto ended
		}
		if src[i] == c+2 { // '}' or ']'
			goto closing
		}
		if c == '{' {
			goto key
		}
		goto value

	case '"':
		end, ok := stringEnd(src, i+1)
		if !ok && complete {
			return false
		}
		t.nodes = append(t.nodes, node{
			start: uint32(i + 1), end: uint32(end), next: ref(len(t.nodes) + 1), kind: text, cut: !ok,
		})
		if !ok {
			goto ended
		}
		i = end + 1

	case 't', 'f', 'n':
		literal, kind := "true", truth
		switch c {
		case 'f':
			literal, kind = "false", falsehood
		case 'n':
			literal, kind = "null", null
		}
		rest := src[i:min(i+len(literal), len(src))]
		if string(rest) != literal {
			if i+len(rest) == len(src) && literal[:len(rest)] == string(rest) {
				goto ended
			}
			return false
		}
		t.nodes = append(t.nodes, node{
			start: uint32(i), end: uint32(i + len(rest)), next: ref(len(t.nodes) + 1), kind: kind,
		})
		i += len(rest)

	default:
		end := numberEnd(src, i)
		if end == i {
			return false
		}
		if end == len(src) {
			goto ended // perhaps the head of a longer number
		}
		t.nodes = append(t.nodes, node{
			start: uint32(i), end: uint32(end), next: ref(len(t.nodes) + 1), kind: numbers,
		})
		i = end
		if top != 0 && t.nodes[top].kind == list {
			i = t.run(i)
		}
	}

after:
	if top == 0 {
		return skipSpace(src, i) == len(src)
	}
	i = skipSpace(src, i)
	if i == len(src) {
		goto ended
	}
	switch {
	case src[i] == ',':
		i++
		if t.nodes[top].kind == list {
			goto value
		}
		i = skipSpace(src, i)
		if i == len(src) {
			goto ended
		}
		goto key
	case src[i] == ']' && t.nodes[top].kind == list, src[i] == '}' && t.nodes[top].kind == object:
		goto closing
	}
	return false

closing:
	{
		n := &t.nodes[top]
		top, n.next, n.end = n.next, ref(len(t.nodes)), uint32(i+1)
		depth--
		i++
		goto after
	}

key:
	{
		if src[i] != '"' {
			return false
		}
		end, ok := stringEnd(src, i+1)
		colon := skipSpace(src, min(end+1, len(src)))
		if !ok || colon == len(src) {
			goto ended
		}
		if src[colon] != ':' {
			return false
		}
		t.addKey(i+1, end)
		i = colon + 1
		goto value
	}

ended:
	if complete {
		return false
	}
	// A key whose value didn't come is no member.
	if last := len(t.nodes) - 1; top != 0 && t.nodes[last].kind == absent && last > 0 {
		t.nodes = t.nodes[:last]
	}
	for top != 0 {
		n := &t.nodes[top]
		top, n.next, n.end, n.cut = n.next, ref(len(t.nodes)), uint32(len(src)), true
	}
	return len(t.nodes) > 1
}

// addKey appends a member's key. Its kind is absent, which tells it from values.
func (t *tape) addKey(start, end int) {
	n := node{start: uint32(start), end: uint32(end), next: ref(len(t.nodes) + 1)}
	if raw := t.src[start:end]; bytes.IndexByte(raw, '\\') >= 0 {
		n.lent = true
		n.start = uint32(len(t.keys))
		t.keys = appendDecoded(t.keys, raw, false)
		n.end = uint32(len(t.keys))
	}
	t.nodes = append(t.nodes, n)
}

// run takes the numbers that follow the last node in a list into that node and
// returns the place after them. A number at the very end of the body is left
// out: it may be longer than that.
func (t *tape) run(i int) int {
	n := &t.nodes[len(t.nodes)-1]
	for {
		next := skipSpace(t.src, i)
		if next == len(t.src) || t.src[next] != ',' {
			return i
		}
		next = skipSpace(t.src, next+1)
		end := numberEnd(t.src, next)
		if end == next || end == len(t.src) {
			return i
		}
		n.end = uint32(end)
		i = end
	}
}

// skipSpace returns the place of the first byte at or after i that isn't white space.
func skipSpace(src []byte, i int) int {
	for i < len(src) && src[i] <= ' ' {
		i++
	}
	return i
}

// stringEnd returns the place of the quote that ends the string whose text
// begins at i, or len(src) and false if there is none.
func stringEnd(src []byte, i int) (int, bool) {
	for from := i; ; {
		n := bytes.IndexByte(src[from:], '"')
		if n < 0 {
			return len(src), false
		}
		quote := from + n
		escape := quote
		for escape > i && src[escape-1] == '\\' {
			escape--
		}
		if (quote-escape)&1 == 0 {
			return quote, true
		}
		from = quote + 1
	}
}

// numberEnd returns the place after the number at i, or i if there is none.
// NaN and the infinities are numbers to Python's json.
func numberEnd(src []byte, i int) int {
	start := i
	for i < len(src) && (src[i]-'0' <= 9 || inNumber(src[i])) {
		i++
	}
	if i < len(src) && (i == start || i == start+1 && src[start] == '-') {
		for _, name := range [...]string{"NaN", "Infinity"} {
			if len(src)-i >= len(name) && string(src[i:i+len(name)]) == name {
				return i + len(name)
			}
		}
	}
	return i
}

func inNumber(c byte) bool {
	switch c {
	case '-', '+', '.', 'e', 'E':
		return true
	}
	return false
}

// raw returns a value's text as it stands in the body, a key's decoded.
func (t *tape) raw(n ref) []byte {
	v := &t.nodes[n]
	if v.lent {
		return t.keys[v.start:v.end]
	}
	return t.src[v.start:v.end]
}

func (t *tape) kind(n ref) kind { return t.nodes[n].kind }

// has tells whether a value is there and says something: templates take null,
// "", [] and {} for nothing.
func (t *tape) has(n ref) bool {
	switch v := &t.nodes[n]; v.kind {
	case absent, null:
		return false
	case text:
		return v.start != v.end
	case list, object:
		return v.next != n+1
	}
	return true
}

// first returns the first element of a list; 0 if there is none or n is no list.
func (t *tape) first(n ref) ref {
	if t.kind(n) != list {
		return 0
	}
	return t.inside(n, n+1)
}

// next returns the element after the given one, 0 after the last.
func (t *tape) next(list, element ref) ref {
	return t.inside(list, t.nodes[element].next)
}

// firstKey returns the first key of an object; 0 if there is none or n is no
// object. The key's own value follows it.
func (t *tape) firstKey(n ref) ref {
	if t.kind(n) != object {
		return 0
	}
	return t.inside(n, n+1)
}

// nextKey returns the key after the given one, 0 after the last.
func (t *tape) nextKey(object, key ref) ref {
	return t.inside(object, t.nodes[key+1].next)
}

// inside returns n if it lies within a container, else 0.
func (t *tape) inside(container, n ref) ref {
	if n < t.nodes[container].next {
		return n
	}
	return 0
}

// get returns a member of an object, 0 if there is none or n is no object. Of
// equal keys the last counts, as engines read them.
func (t *tape) get(n ref, name string) (value ref) {
	for k := t.firstKey(n); k != 0; k = t.nextKey(n, k) {
		if string(t.raw(k)) == name {
			value = k + 1
		}
	}
	return value
}
