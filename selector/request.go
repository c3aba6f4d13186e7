package selector

import (
	"cmp"
	"context"
	"io"
	"mime"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"

	"github.com/prefix-affinity/caddy/prefixhash"
	"github.com/prefix-affinity/caddy/selector/affinity"
)

// Why a request has no key, beside the causes of package prefixhash.
const (
	keyed           = ""
	causeMethod     = "method"
	causeUpgrade    = "upgrade"
	causeType       = "content_type"
	causeEncoding   = "content_encoding"
	causeEmpty      = "empty"
	causeStreamed   = "incremental"
	causeUnreadable = "unreadable"
	causeScope      = "scope"
)

// request is what the policy knows of one request from the first Select to the
// end of its response: one pass through one reverse_proxy handler.
type request struct {
	policy *Policy
	r      *http.Request // the handler's clone, the same for all attempts
	trail  *trail
	own    trail    // that of the first request
	before *request // on the trail
	cause  string   // keyed, or why there is no key
	scope  string   // the tenant
	stored uint64   // the hash of the response that the path names; 0: none

	// Guarded by unsent.mu.
	earlier, later *request
	chosen         time.Time
	unsent         bool

	mu       sync.Mutex
	stop     func() bool // takes back the watch for the request's end; nil: there is none
	*content             // nil: the body is left as it came
	failed   []string    // upstreams that had their attempt
	over     bool        // no further attempt can come; key and held are gone
	attempt  *affinity.Attempt
	choice   affinity.Choice
	shadowed *shadowed
	upstream string // that the attempt went to
	holder   string // upstream with the longest match
	series   *upstreamSeries
	attempts int
	answer   tappedBody // of the first attempt that has one
}

// content is what was read of a request. Its request's lock guards it.
type content struct {
	key    prefixhash.Key
	blocks *[]prefixhash.Block // the key's memory, pooled; nil: there is no key
	held   *held               // mine, or that of a request before
	body   io.ReadCloser       // the attempt's
	mine   held                // what this one read
}

// shadowed is what a policy that is a shadow would have chosen.
type shadowed struct {
	choice   affinity.Choice
	upstream string
}

// A trail is what one HTTP request leads to: it may pass several handlers, and
// one handler may run inside its own response routes. Only the goroutine that
// serves the request uses it.
type trail struct {
	newest *request
	latest *request // the one that was decided last
}

// trailVar names the variable that holds a request's trail.
const trailVar = "prefix_affinity"

// find returns a policy's newest request on the trail: that of r, where r is
// given, because the clone that a handler made tells its runs apart. t and what
// it returns may be nil.
func (t *trail) find(p *Policy, r *http.Request) *request {
	if t == nil {
		return nil
	}
	q := t.newest
	for q != nil && (q.policy != p || r != nil && q.r != r) {
		q = q.before
	}
	return q
}

// bodyHolder returns the newest request on the trail that holds a whole body, nil
// if none does.
func (t *trail) bodyHolder() *request {
	if t == nil {
		return nil
	}
	b := t.newest
	for b != nil && (b.content == nil || b.held == nil || !b.held.whole() || b.held.size() == 0) {
		b = b.before
	}
	return b
}

// newRequest reads what the request says about its prompt, and puts it on the trail, or, where
// there is none yet, a new one among the variables.
func (p *Policy) newRequest(vars map[string]any, t *trail, r *http.Request) *request {
	var q *request
	cause, before := unwanted(r), t.bodyHolder()
	if cause == causeEmpty && before != nil && r.ContentLength == 0 {
		// request_buffers finds nothing left to read, and takes that for no body.
		cause, r.Body, r.ContentLength = keyed, http.NoBody, before.r.ContentLength
	}
	if cause == keyed || before != nil && r.Body != nil {
		both := new(struct { // one allocation
			request
			own content
		})
		q, both.content = &both.request, &both.own
	} else {
		q = &request{cause: cause}
	}
	q.policy, q.r = p, r
	if q.trail = t; t == nil {
		q.trail = &q.own
		if vars != nil {
			vars[trailVar] = q.trail
		}
		if repl, ok := r.Context().Value(caddy.ReplacerCtxKey).(*caddy.Replacer); ok {
			repl.Map(q.trail.placeholder)
		}
	}
	q.before, q.trail.newest = q.trail.newest, q
	switch {
	case q.content == nil:
	case cause == keyed:
		q.readKey()
	default: // a handler before has read the body, which is not ours to read
		q.cause = cause
		q.readBody(never)
	}
	if id := storedResponse(r.URL.Path); id != "" && q.resolveScope() {
		q.stored = p.hasher().ID(q.scope, id)
	}
	p.notices.body(p.logger, q.cause, time.Now)
	if q.cause != keyed {
		metrics.withoutKey(q.cause)
	}
	if p.observer == nil {
		q.watchEnd()
	}
	return q
}

// watchEnd has the request's end seen, whatever happens. It costs as much as all
// else of a decision by load alone, so that it is for where nobody else sees the end:
// most requests are sent, and end when their response does (see unsent for the others).
func (q *request) watchEnd() {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.stop == nil {
		q.stop = context.AfterFunc(q.r.Context(), q.end)
	}
}

// readBody reads the body, or takes over what an earlier handler has read of it: this
// one is in its error route, say.
func (q *request) readBody(wanted func([]byte) bool) {
	body := q.resume()
	q.held = &q.mine
	q.held.read(body, q.r.ContentLength, q.policy.config.MaxBody, wanted)
	if !q.held.nothing() || q.r.ContentLength == 0 {
		return
	}
	if before := q.trail.bodyHolder(); before != nil && before.held.retain() {
		q.held.release()
		q.held = before.held
	}
}

// readKey reads the body and makes the prompt's key.
func (q *request) readKey() {
	r, config, wanted := q.r, &q.policy.config, looksLikeJSON
	if o := q.policy.observer; o != nil && o.handler.RequestBuffers != 0 {
		wanted = always // what is left in Caddy's buffer is gone when the handler ends
	}
	q.readBody(wanted)
	if q.held.err != nil && !q.held.whole() {
		q.cause = causeUnreadable // the client's fault or its leave: nothing to learn
		return
	}
	hasher := q.policy.hasher()
	if !q.resolveScope() {
		q.cause = causeScope
		return
	}
	q.blocks = keyBlocks.Get().(*[]prefixhash.Block)
	q.key.Blocks = *q.blocks
	switch cause := hasher.Sum(&q.key, r.URL.Path, q.held.bytes, q.held.whole(), q.scope); cause {
	case prefixhash.Keyed:
	case prefixhash.NoPrompt: // the history is stored at the engine, say
		q.cause = cause.String()
	default:
		q.cause = cause.String()
		return
	}
	for _, name := range config.SessionHeaders {
		if ids := r.Header[name]; len(ids) > 0 && ids[0] != "" {
			q.key.Session = hasher.ID(q.scope, ids[0])
			break
		}
	}
}

// resume returns the request's body as it was before an earlier handler read the
// beginning of it, which it kept, and left the rest because that was too long.
func (q *request) resume() io.ReadCloser {
	r := q.r
	for b := q.before; b != nil; b = b.before {
		if b.content == nil {
			continue
		}
		rest := b.r.ContentLength - int64(b.held.size()) // as request_buffers counts
		if r.ContentLength != b.r.ContentLength && (b.r.ContentLength < 0 || r.ContentLength != rest) {
			continue // it is another body, as request_body may set
		}
		if head := b.held.surrender(); head != nil {
			r.ContentLength = b.r.ContentLength
			return joined(head, r.Body)
		}
	}
	return r.Body
}

// complete reads the rest of a body that no attempt has begun to send, up to
// max_body: what was read of it is gone for whoever comes next and is not of this
// policy, and the rest must not pass for all.
func (q *request) complete() {
	old := q.held
	head := old.surrender()
	if head == nil {
		return
	}
	whole := new(held)
	whole.read(joined(head, old.tail), q.r.ContentLength, q.policy.config.MaxBody, always)
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.over {
		whole.release()
		return
	}
	q.held = whole
	old.release()
}

// routingKey returns what the request can be routed by, nil if there is nothing.
func (q *request) routingKey() *prefixhash.Key {
	switch {
	case q.content != nil && q.blocks != nil:
		q.key.Previous = cmp.Or(q.key.Previous, q.stored)
		return &q.key
	case q.stored != 0:
		return &prefixhash.Key{Stream: true, Previous: q.stored}
	}
	return nil
}

// storedResponse returns the id of the response that a path asks for, cancels or
// deletes, or "": the upstream that made it has it.
func storedResponse(path string) string {
	_, id, ok := strings.Cut(path, "/v1/responses/")
	if !ok {
		return ""
	}
	id, what, _ := strings.Cut(id, "/")
	switch {
	case what != "" && what != "cancel" && what != "input_items", id == "input_tokens", id == "compact":
		return ""
	}
	return id
}

// resolveScope finds the request's tenant; false means that nobody can tell.
func (q *request) resolveScope() bool {
	scope := q.policy.config.Scope
	if scope == "" {
		return true
	}
	repl, ok := q.r.Context().Value(caddy.ReplacerCtxKey).(*caddy.Replacer)
	if !ok {
		return false
	}
	var err error
	q.scope, err = repl.ReplaceOrErr(scope, false, true)
	if err != nil {
		q.policy.notices.scope(q.policy.logger, scope)
	}
	return err == nil
}

// unwanted tells why a request's body is left alone, keyed if it is not.
func unwanted(r *http.Request) string {
	switch {
	case r.Method != http.MethodPost && r.Method != http.MethodPut && r.Method != http.MethodPatch:
		return causeMethod
	case r.Header.Get("Upgrade") != "" && !strings.EqualFold(r.Header.Get("Upgrade"), "h2c"): // which clients offer with any request
		return causeUpgrade
	case r.Body == nil || r.Body == http.NoBody:
		return causeEmpty
	case caddyhttp.IsIncremental(r.Header):
		return causeStreamed // its sender wants every byte passed on at once
	case r.Header.Get("Content-Encoding") != "" && !strings.EqualFold(r.Header.Get("Content-Encoding"), "identity"):
		return causeEncoding
	}
	header := r.Header.Get("Content-Type")
	if header == "" || header == "application/json" {
		return keyed
	}
	mediaType, _, err := mime.ParseMediaType(header)
	switch {
	case err != nil:
		return causeType
	case strings.HasSuffix(mediaType, "json"), // application/json and application/anything+json
		mediaType == "text/plain", mediaType == "application/x-www-form-urlencoded": // what curl -d and careless clients say
		return keyed
	}
	return causeType
}

func always([]byte) bool { return true }
func never([]byte) bool  { return false }

// looksLikeJSON tells from its first bytes whether a body may be a JSON object.
func looksLikeJSON(head []byte) bool {
	for i, b := range head {
		switch {
		case b == ' ', b == '\t', b == '\n', b == '\r':
		case i < 3 && (b == 0xEF || b == 0xBB || b == 0xBF): // byte order mark
		default:
			return b == '{'
		}
	}
	return true
}

// rewind gives the request the body of its next attempt; false means that there
// can be none because part of it was sent and not kept.
func (q *request) rewind(r *http.Request) bool {
	if q.content == nil {
		return true
	}
	if q.body != nil {
		if r.Body != q.body {
			return true // request_buffers: the handler has put back a fresh body itself
		}
		_ = q.body.Close()
	}
	body := q.held.open()
	if body == nil && r.Context().Err() == nil {
		return false
	}
	if body == nil { // the client has left: the attempt ends before it begins, and says so
		body = &attemptBody{held: q.held, over: true}
	}
	q.body = body
	r.Body = body
	if q.held.whole() {
		r.GetBody = q.held.again
	}
	return true
}

// unwatch takes that back.
func (q *request) unwatch() {
	q.mu.Lock()
	stop := q.stop
	q.mu.Unlock()
	if stop != nil {
		stop()
	}
}

// lend gives the body to an attempt at an upstream that another policy chose, and
// ends the one of ours before it.
func (q *request) lend(req *http.Request) *http.Request {
	q.watchEnd()
	q.mu.Lock()
	defer q.mu.Unlock()
	q.giveUp()
	if q.content == nil || q.body == nil || req.Body != q.body || !q.rewind(q.r) {
		return req
	}
	lent := *req
	lent.Body, lent.GetBody = q.r.Body, q.r.GetBody
	return &lent
}

// send notes the attempt that comes next.
func (q *request) send(attempt *affinity.Attempt, choice affinity.Choice, upstream, holder string, series *upstreamSeries) {
	q.attempt, q.choice, q.upstream, q.holder, q.series = attempt, choice, upstream, holder, series
	q.trail.latest = q
	q.attempts++
	series.decided(choice)
	if q.over { // the client left while we were choosing
		attempt.Finish(attempt.Sent(), affinity.Aborted, 0)
	}
}

// giveUp ends the attempt before the next one: its upstream had its chance.
func (q *request) giveUp() {
	if q.attempt == nil {
		return
	}
	unsent.remove(q)
	q.attempt.Finish(time.Now(), affinity.Lost, 0) // where the observer has not said more
	q.failed = append(q.failed, q.upstream)
	q.attempt = nil
}

// stateOf tells whether an available upstream may be chosen.
func (q *request) stateOf(up *reverseproxy.Upstream, now time.Time) affinity.State {
	if slices.Contains(q.failed, up.String()) {
		return affinity.Failed
	}
	return q.policy.drainState(up.String(), now)
}

// settle returns the memory that only a further attempt could need.
func (q *request) settle() {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.over {
		return
	}
	q.over = true
	if q.content == nil {
		return
	}
	q.held.release()
	if q.blocks != nil {
		*q.blocks = q.key.Blocks
		keyBlocks.Put(q.blocks)
		q.blocks, q.key.Blocks = nil, nil
	}
}

// end closes everything, however the request came to its end.
func (q *request) end() {
	q.settle()
	q.mu.Lock()
	attempt := q.attempt
	q.mu.Unlock()
	if attempt != nil {
		attempt.Finish(time.Now(), affinity.Aborted, 0)
	}
}

// placeholder resolves {http.reverse_proxy.prefix_affinity.*}: what was decided
// last counts.
func (t *trail) placeholder(name string) (any, bool) {
	name, ok := strings.CutPrefix(name, "http.reverse_proxy.prefix_affinity.")
	q := t.latest
	if !ok || q == nil {
		return nil, false
	}
	switch name {
	case "reason":
		return q.choice.Reason.String(), true
	case "upstream":
		return q.upstream, true
	case "prompt_tokens":
		return q.choice.PromptTokens, true
	case "matched_tokens":
		return q.choice.MatchedTokens, true
	case "holder":
		return q.holder, true
	case "attempts":
		return q.attempts, true
	}
	return nil, false
}

var keyBlocks = sync.Pool{New: func() any { return new([]prefixhash.Block) }}
