package engine

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/cespare/xxhash/v2"
)

const (
	chatPath        = "/v1/chat/completions"
	completionsPath = "/v1/completions"
)

// generate answers a chat or text completion.
func (e *Engine) generate(w http.ResponseWriter, r *http.Request) {
	e.tally.requests.Add(1)
	body, err := io.ReadAll(r.Body)
	if err != nil {
		e.tally.aborted.Add(1)
		writeError(w, http.StatusBadRequest, "reading the body: "+err.Error())
		return
	}
	e.tally.bodies.Add(1)
	e.tally.bodyBytes.Add(int64(len(body)))
	e.tally.bodySum.Add(xxhash.Sum64(body))

	faults := e.faults.Load()
	hit := e.hits(faults)
	if hit && faults.FailStatus != 0 {
		e.tally.failed.Add(1)
		writeError(w, faults.FailStatus, "failing as told")
		return
	}
	a, err := e.newAnswer(r.URL.Path, body)
	if err != nil {
		e.tally.rejected.Add(1)
		writeError(w, http.StatusBadRequest, err.Error())
		return
	}
	if hit {
		a.dieAfter = (a.job.output + 1) / 2
	}
	if after, ok := e.sched.submit(a.job); !ok {
		e.tally.refused.Add(1)
		w.Header().Set("Retry-After", strconv.Itoa(int(math.Ceil(max(after.Seconds(), 1)))))
		writeError(w, http.StatusTooManyRequests, "the queue is full")
		return
	}
	if a.request.Stream {
		err = a.stream(w, r)
	} else {
		err = a.whole(w, r)
	}
	var fault cut
	switch {
	case err == nil:
		e.tally.served.Add(1)
	case errors.As(err, &fault):
		e.sched.abort(a.job)
		e.tally.failed.Add(1)
		panic(http.ErrAbortHandler) // cuts the connection
	default: // the client has left
		e.sched.abort(a.job)
		e.tally.aborted.Add(1)
	}
}

// answer is one completion on its way.
type answer struct {
	engine   *Engine
	request  request
	job      *job
	path     string
	id       string
	created  int64
	tool     string // the function it calls; "": it is text
	finish   string // finish_reason
	dieAfter int    // tokens; 0: never
}

func (e *Engine) newAnswer(path string, body []byte) (*answer, error) {
	a := &answer{engine: e, path: path, created: time.Now().Unix()}
	r := &a.request
	if err := json.Unmarshal(body, r); err != nil {
		return nil, fmt.Errorf("body is not a request: %w", err)
	}
	if r.StreamOptions != nil && !r.Stream {
		return nil, errors.New("stream_options: only with stream")
	}
	if r.N > 1 {
		return nil, fmt.Errorf("n is %d: this engine makes one choice a request", r.N)
	}
	prompt, err := r.prompt(path)
	if err != nil {
		return nil, err
	}
	output := max(e.cfg.OutputTokens, r.MinTokens)
	a.finish = "stop"
	if limit := max(r.MaxTokens, r.MaxCompletionTokens); limit > 0 && (r.IgnoreEOS || limit < output) {
		output = limit
		a.finish = "length"
	}
	if prompt.Tokens+output > e.cfg.CapacityTokens {
		return nil, fmt.Errorf("%d prompt and %d output tokens: this engine holds %d",
			prompt.Tokens, output, e.cfg.CapacityTokens)
	}
	if path == chatPath {
		a.id = "chatcmpl-"
		if a.tool = r.calls(); a.tool != "" {
			a.finish = "tool_calls"
		}
	} else {
		a.id = "cmpl-"
	}
	a.id += strconv.FormatUint(xxhash.Sum64String(e.addr)^uint64(e.tally.bodies.Load()), 16) // #nosec G115 -- a count
	a.job = &job{prompt: prompt, output: output, wake: make(chan struct{}, 1)}
	return a, nil
}

// calls returns the function that tool_choice makes the answer call: the named
// one, or the first if any is required.
func (r *request) calls() string {
	type function struct {
		Function struct {
			Name string `json:"name"`
		} `json:"function"`
	}
	var named function
	if json.Unmarshal(r.ToolChoice, &named) == nil {
		return named.Function.Name
	}
	var tools []function
	if bytes.Equal(r.ToolChoice, []byte(`"required"`)) && json.Unmarshal(r.Tools, &tools) == nil && len(tools) > 0 {
		return tools[0].Function.Name
	}
	return ""
}

// cut is why an answer ends early.
type cut string

func (c cut) Error() string { return string(c) }

const (
	errCrashed cut = "engine died"
	errDied    cut = "died in mid-answer as told"
)

// next waits until more than sent tokens are there, or all are.
func (a *answer) next(r *http.Request, sent int) (made int, over bool, err error) {
	for {
		select {
		case <-a.job.wake:
		case <-r.Context().Done():
			return 0, false, r.Context().Err()
		}
		over = a.job.over.Load() // before made, which grows first
		made = int(a.job.made.Load())
		switch {
		case a.job.crashed.Load():
			return 0, false, errCrashed
		case a.dieAfter > 0 && made >= a.dieAfter:
			return a.dieAfter, true, nil
		case over || made > sent:
			return made, over, nil
		}
	}
}

// whole sends the answer at once when it is there.
func (a *answer) whole(w http.ResponseWriter, r *http.Request) error {
	e, j := a.engine, a.job
	a.loadHeader(w)
	for over := false; !over; {
		var err error
		if _, over, err = a.next(r, j.output); err != nil {
			return err
		}
	}
	if a.dieAfter > 0 {
		return errDied
	}
	if v := orca(r.Header.Get(orcaFormatHeader), e.sched.load()); v != "" {
		w.Header().Set(orcaHeader, v)
	}
	if e.cfg.CachedTokensHeader != "" {
		w.Header().Set(e.cfg.CachedTokensHeader, strconv.Itoa(j.cachedTokens()))
	}
	text := j.prompt.Answer(j.output)
	choice := map[string]any{"index": 0, "logprobs": nil, "finish_reason": a.finish}
	switch {
	case a.path == completionsPath:
		choice["text"] = text
	case a.tool != "":
		choice["message"] = map[string]any{"role": "assistant", "content": nil, "tool_calls": []any{a.toolCall(argumentsHead + text + argumentsTail)}}
	default:
		choice["message"] = map[string]any{"role": "assistant", "content": text}
	}
	object := "chat.completion"
	if a.path == completionsPath {
		object = "text_completion"
	}
	writeJSON(w, http.StatusOK, map[string]any{
		"id": a.id, "object": object, "created": a.created, "model": a.request.Model,
		"choices": []any{choice}, "usage": a.usage(),
	})
	return r.Context().Err()
}

// stream sends the answer token by token as server-sent events.
func (a *answer) stream(w http.ResponseWriter, r *http.Request) error {
	e, j := a.engine, a.job
	a.loadHeader(w)
	if e.cfg.CachedTokensHeader != "" {
		w.Header().Set(e.cfg.CachedTokensHeader, strconv.Itoa(e.sched.match(j)))
	}
	w.Header().Set("Content-Type", "text/event-stream; charset=utf-8")
	w.Header().Set("Cache-Control", "no-cache")
	w.WriteHeader(http.StatusOK)
	out := http.NewResponseController(w)
	chunks := a.newChunks()
	var b []byte
	if e.cfg.Preamble {
		b = chunks.preamble(b)
	}
	sent := 0
	for over := false; ; {
		if _, err := w.Write(b); err != nil {
			return err
		}
		if err := out.Flush(); err != nil {
			return err
		}
		if over {
			return nil
		}
		made, last, err := a.next(r, sent)
		if err != nil {
			return err
		}
		b = b[:0]
		if sent == 0 && !e.cfg.Preamble {
			b = chunks.preamble(b)
		}
		for ; sent < made; sent++ {
			b = chunks.token(b, sent)
		}
		if a.dieAfter > 0 && sent >= a.dieAfter {
			_, _ = w.Write(b)
			_ = out.Flush() // the client should see half, it may be gone
			return errDied
		}
		if over = last; over {
			b = chunks.end(b)
		}
	}
}

func (a *answer) loadHeader(w http.ResponseWriter) {
	if name := a.engine.cfg.QueueDepthHeader; name != "" {
		w.Header().Set(name, strconv.Itoa(a.engine.sched.load().waiting))
	}
}

// usage is the answer's usage object.
func (a *answer) usage() map[string]any {
	prompt, output, cached := a.job.prompt.Tokens, a.job.output, a.job.cachedTokens()
	u := map[string]any{"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}
	if a.engine.cfg.Cached != CachedNever && (cached > 0 || !a.engine.cfg.DropZero) {
		u["prompt_tokens_details"] = map[string]any{"cached_tokens": cached}
	}
	return u
}

func (a *answer) wantsUsage() bool {
	return a.engine.cfg.Cached == CachedAlways || a.request.StreamOptions != nil && a.request.StreamOptions.IncludeUsage
}

func (a *answer) toolCall(arguments string) map[string]any {
	return map[string]any{
		"index": 0, "id": "call_" + a.id, "type": "function",
		"function": map[string]any{"name": a.tool, "arguments": arguments},
	}
}

// A called function gets the answer's text as its only argument.
const (
	argumentsHead = `{"text":"`
	argumentsTail = `"}`
)

// chunks writes the events of one stream.
type chunks struct {
	a          *answer
	head, tail []byte // around a token
}

func (a *answer) newChunks() *chunks {
	c := &chunks{a: a}
	var delta any
	switch {
	case a.path == completionsPath:
		delta = "\x00"
	case a.tool != "":
		delta = map[string]any{"tool_calls": []any{map[string]any{
			"index": 0, "function": map[string]any{"arguments": "\x00"},
		}}}
	default:
		delta = map[string]any{"content": "\x00"}
	}
	c.head, c.tail, _ = bytes.Cut(c.event(nil, delta, nil), []byte(`\u0000`))
	return c
}

// event appends a chunk with one choice.
func (c *chunks) event(b []byte, delta, finish any) []byte {
	choice := map[string]any{"index": 0, "logprobs": nil, "finish_reason": finish}
	if c.a.path == completionsPath {
		choice["text"] = delta
	} else {
		choice["delta"] = delta
	}
	return c.data(b, map[string]any{"choices": []any{choice}})
}

// data appends a chunk.
func (c *chunks) data(b []byte, v map[string]any) []byte {
	v["id"], v["created"], v["model"] = c.a.id, c.a.created, c.a.request.Model
	v["object"] = "chat.completion.chunk"
	if c.a.path == completionsPath {
		v["object"] = "text_completion"
	}
	j, err := json.Marshal(v)
	if err != nil {
		panic(err) // plain values
	}
	b = append(b, "data: "...)
	b = append(b, j...)
	return append(b, "\n\n"...)
}

// preamble appends what a chat stream begins with.
func (c *chunks) preamble(b []byte) []byte {
	switch {
	case c.a.path == completionsPath:
		return b
	case c.a.tool != "":
		return c.event(b, map[string]any{"role": "assistant", "content": nil, "tool_calls": []any{c.a.toolCall("")}}, nil)
	}
	return c.event(b, map[string]any{"role": "assistant", "content": ""}, nil)
}

// token appends token i of the answer.
func (c *chunks) token(b []byte, i int) []byte {
	b = append(b, c.head...)
	if c.a.tool != "" && i == 0 {
		b = append(b, escape(argumentsHead)...)
	}
	b = c.a.job.prompt.output(b, i, i+1)
	if c.a.tool != "" && i == c.a.job.output-1 {
		b = append(b, escape(argumentsTail)...)
	}
	return append(b, c.tail...)
}

// escape makes s fit between the quotes of a JSON string.
func escape(s string) string { return strings.ReplaceAll(s, `"`, `\"`) }

// end appends what follows the last token.
func (c *chunks) end(b []byte) []byte {
	finished := any(map[string]any{})
	if c.a.path == completionsPath {
		finished = ""
	}
	b = c.event(b, finished, c.a.finish)
	if c.a.wantsUsage() {
		b = c.data(b, map[string]any{"choices": []any{}, "usage": c.a.usage()})
	}
	return append(b, "data: [DONE]\n\n"...)
}

func writeError(w http.ResponseWriter, status int, message string) {
	writeJSON(w, status, map[string]any{
		"error": map[string]any{"message": message, "type": http.StatusText(status), "code": status},
	})
}
