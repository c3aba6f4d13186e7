package prefixhash

import (
	"bytes"
	"cmp"
	"slices"
)

// json adds a value that a template prints as JSON: compact, text in one spelling,
// numbers as they are spelled. Members keep their order unless sorted is set,
// for values whose members templates only look up. Of equal keys the last
// value counts, in the place of the first, as engines read them.
func (r *keyer) json(n ref, sorted bool) {
	switch r.kind(n) {
	case null:
		r.mark(markNull)
	case falsehood:
		r.mark(markFalse)
	case truth:
		r.mark(markTrue)
	case numbers:
		r.numbers(n)
	case text:
		if dataURL(r.raw(n)) > 0 {
			r.mediaOf(n, 0)
			return
		}
		r.mark(markString)
		r.text(n)
	case list:
		r.mark(markList)
		for e := r.first(n); e != 0; e = r.next(n, e) {
			r.json(e, sorted)
		}
		r.ends(n)
	case object:
		r.mark(markObject)
		if sorted {
			r.known(n)
			r.members(n)
		} else {
			r.unique(n)
			for k := r.firstKey(n); k != 0; k = r.nextKey(n, k) {
				if value := r.nodes[k].next; value != 0 {
					r.mark(markKey)
					r.write(r.raw(k))
					r.json(value, false)
				}
			}
		}
		r.ends(n)
	}
}

// ends marks the end of a container, unless that end isn't known.
func (r *keyer) ends(n ref) {
	r.known(n)
	r.mark(markEnd)
}

// known stops the chain if the body ended within a value.
func (r *keyer) known(n ref) {
	if r.nodes[n].cut {
		r.stop()
	}
}

// numbers adds each number of a run by its spelling.
func (r *keyer) numbers(n ref) {
	for rest := r.raw(n); len(rest) > 0; {
		var number []byte
		number, rest, _ = bytes.Cut(rest, []byte{','})
		r.mark(markNumber)
		r.write(bytes.TrimSpace(number))
	}
}

// members adds an object's members sorted by key, but for those named in skip.
func (r *keyer) members(n ref, skip ...string) {
	base := len(r.refs)
	sorted := r.sort(n, skip...)
	for i, k := range sorted {
		key := r.raw(k)
		if i+1 < len(sorted) && bytes.Equal(key, r.raw(sorted[i+1])) {
			continue
		}
		r.mark(markKey)
		r.write(key)
		r.json(k+1, true)
	}
	r.refs = r.refs[:base]
}

// sort pushes an object's keys, but for those named in skip, to the stack in their
// order, equal ones in that of the body. The caller pops them.
func (r *keyer) sort(n ref, skip ...string) []ref {
	base := len(r.refs)
	for k := r.firstKey(n); k != 0; k = r.nextKey(n, k) {
		if key := r.raw(k); !slices.ContainsFunc(skip, func(name string) bool { return string(key) == name }) {
			r.refs = append(r.refs, k)
		}
	}
	sorted := r.refs[base:]
	slices.SortFunc(sorted, func(a, b ref) int {
		return cmp.Or(bytes.Compare(r.raw(a), r.raw(b)), cmp.Compare(a, b))
	})
	return sorted
}

// few is how many members are compared one by one. Sorting is faster for more.
const few = 8

// unique points the first of equal keys at the last value and the others at none.
func (r *keyer) unique(n ref) {
	var seen [few]ref
	count := 0
	for k := r.firstKey(n); k != 0; k = r.nextKey(n, k) {
		if count == few {
			r.uniqueMany(n)
			return
		}
		key := r.raw(k)
		for _, s := range seen[:count] {
			if bytes.Equal(key, r.raw(s)) {
				r.nodes[s].next, r.nodes[k].next = k+1, 0
				break
			}
		}
		seen[count] = k
		count++
	}
}

func (r *keyer) uniqueMany(n ref) {
	base := len(r.refs)
	sorted := r.sort(n)
	for i := 1; i < len(sorted); i++ {
		first := sorted[i-1]
		if k := sorted[i]; bytes.Equal(r.raw(first), r.raw(k)) {
			r.nodes[first].next, r.nodes[k].next = k+1, 0
			sorted[i] = first // the next one compares with the first again
		}
	}
	r.refs = r.refs[:base]
}
