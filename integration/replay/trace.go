package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"os"
)

// A trace is a workload to replay.
type trace struct {
	name        string
	blockTokens int
	blocks      int     // distinct ones, numbered from 0
	span        float64 // seconds
	tokens      int64   // prompt tokens of all requests
	requests    []*traced
}

// traced is a request of a trace.
type traced struct {
	id      int
	at      float64 // seconds
	prompt  int     // tokens
	output  int     // tokens
	blocks  []int32 // full blocks of the prompt; equal ones at equal places mean an equal prefix
	session uint64  // what a router could tell a session by
	before  *traced // the session's request whose answer this one waits for
}

// row is a request as trace files have it; the first line of a file is
// {"block_size": tokens}.
type row struct {
	T   float64 `json:"t"`   // arrival, seconds
	In  int     `json:"in"`  // prompt tokens
	Out int     `json:"out"` // output tokens
	H   []int64 `json:"h"`   // ids of the prompt's full blocks
	S   int64   `json:"s"`   // session, or -1
}

// loadTrace reads a trace file.
func loadTrace(path, name string) (*trace, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	lines := bufio.NewScanner(f)
	lines.Buffer(make([]byte, 1<<20), 16<<20)
	var head struct {
		BlockSize int `json:"block_size"`
	}
	if !lines.Scan() {
		return nil, fmt.Errorf("trace '%s' is empty", path)
	}
	if err := json.Unmarshal(lines.Bytes(), &head); err != nil || head.BlockSize <= 0 {
		return nil, fmt.Errorf("trace '%s': the first line must be {\"block_size\": tokens}", path)
	}
	var rows []row
	for lines.Scan() {
		var r row
		if err := json.Unmarshal(lines.Bytes(), &r); err != nil {
			return nil, fmt.Errorf("trace '%s', request %d: %w", path, len(rows), err)
		}
		rows = append(rows, r)
	}
	return newTrace(name, head.BlockSize, rows), lines.Err()
}

// newTrace numbers the blocks of rows and finds their sessions.
func newTrace(name string, blockTokens int, rows []row) *trace {
	t := &trace{name: name, blockTokens: blockTokens}
	numbers := map[int64]int32{}
	last := map[int64]*traced{}
	for i, r := range rows {
		q := &traced{id: i, at: r.T, prompt: r.In, output: max(r.Out, 1), blocks: make([]int32, len(r.H))}
		for k, h := range r.H {
			n, ok := numbers[h]
			if !ok {
				n = int32(len(numbers))
				numbers[h] = n
			}
			q.blocks[k] = n
		}
		if r.S >= 0 {
			q.session = mix(uint64(r.S) + 1<<50)
			q.before = last[r.S]
			last[r.S] = q
		}
		t.requests = append(t.requests, q)
		t.tokens += int64(q.prompt)
		t.span = max(t.span, q.at)
	}
	t.blocks = len(numbers)
	t.guessSessions()
	return t
}

// guessSessions names the sessions of requests that come without one by their
// first block that under 1 % of the requests carry: what a hash over the first
// user message amounts to.
func (t *trace) guessSessions() {
	carried := make([]int, t.blocks)
	for _, q := range t.requests {
		for _, b := range q.blocks {
			carried[b]++
		}
	}
	rare := max(20, len(t.requests)/100)
	for _, q := range t.requests {
		if q.session != 0 {
			continue
		}
		q.session = mix(uint64(q.id) + 1<<40)
		for _, b := range q.blocks {
			if carried[b] <= rare {
				q.session = mix(uint64(b))
				break
			}
		}
	}
}

// ideal is the hit ratio of one cache without bounds.
func (t *trace) ideal() float64 {
	seen := make([]bool, t.blocks)
	var hit int64
	for _, q := range t.requests {
		n := 0
		for n < len(q.blocks) && seen[q.blocks[n]] {
			n++
		}
		hit += int64(min(n*t.blockTokens, q.prompt-1))
		for _, b := range q.blocks {
			seen[b] = true
		}
	}
	return float64(hit) / float64(t.tokens)
}

// mix is splitmix64.
func mix(x uint64) uint64 {
	x += 0x9e3779b97f4a7c15
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}

// chance draws a number in [0, 1) that depends on its arguments alone, so that
// what happens to a request is the same under every policy.
func chance(id int, what uint64) float64 {
	return float64(mix(uint64(id)+what<<32)>>11) / (1 << 53)
}
