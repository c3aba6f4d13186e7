package selector

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/headers"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/zap"

	"github.com/prefix-affinity/caddy/selector/affinity"
	"github.com/prefix-affinity/caddy/selector/signal"
)

// The headers of ORCA, the load report of the open request cost aggregation.
const (
	orcaRequest  = "Endpoint-Load-Metrics-Format"
	orcaResponse = "Endpoint-Load-Metrics"
)

// maxRetryAfter bounds how long an upstream can keep requests away by saying so.
const maxRetryAfter = time.Minute

// observer stands between a reverse_proxy handler and its transport. A selection
// policy sees requests only; what the answers say it learns here. Whatever does
// not concern one of the policy's requests (health checks, say) passes as is.
type observer struct {
	http.RoundTripper

	policy  *Policy
	handler *reverseproxy.Handler
	own     caddy.CleanerUpper // the transport, where the handler had none yet
}

// observe puts an observer before the transport of the handler that is being
// provisioned. Where there is none (another module embeds the policy), it
// returns nil, and the policy routes without learning from answers.
func observe(ctx caddy.Context, p *Policy) (*observer, error) {
	handler := handlerAround(ctx)
	if handler == nil {
		p.logger.Warn("no reverse_proxy handler around this policy: it can't learn from responses")
		return nil, nil
	}
	if _, ok := handler.Transport.(*observer); ok {
		return nil, errors.New("prefix_affinity within prefix_affinity: a fallback should be another policy")
	}
	o := &observer{policy: p, handler: handler, RoundTripper: handler.Transport}
	if handler.Transport == nil { // the handler would make the same one a moment later
		t := new(reverseproxy.HTTPTransport)
		if err := t.Provision(ctx); err != nil {
			return nil, fmt.Errorf("provisioning default transport: %v", err)
		}
		o.RoundTripper, o.own = t, t
	}
	handler.Transport = o
	return o, nil
}

// handlerAround returns the reverse_proxy handler that a module is provisioned
// in, or nil.
func handlerAround(ctx caddy.Context) (handler *reverseproxy.Handler) {
	for _, module := range ctx.Modules() { // the last is the nearest
		if h, ok := module.(*reverseproxy.Handler); ok {
			handler = h
		}
	}
	return handler
}

// describe names a handler as its configuration does. Where it is, Caddy doesn't
// say before all is loaded.
func describe(handler *reverseproxy.Handler) string {
	switch {
	case handler == nil:
		return "a policy without reverse_proxy"
	case len(handler.Upstreams) == 0:
		return "reverse_proxy with dynamic upstreams"
	}
	const most = 4
	dials := dialsOf(handler)
	if n := len(dials); n > most {
		dials = append(dials[:most:most], fmt.Sprintf("and %d more", n-most))
	}
	return "reverse_proxy " + strings.Join(dials, " ")
}

// dials returns the addresses of the handler's upstreams, as far as its
// configuration names them.
func (o *observer) dials() []string {
	if o == nil {
		return nil
	}
	return dialsOf(o.handler)
}

func dialsOf(handler *reverseproxy.Handler) []string {
	dials := make([]string, 0, len(handler.Upstreams))
	for _, up := range handler.Upstreams {
		dials = append(dials, up.Dial)
	}
	return dials
}

func (o *observer) cleanup() error {
	if o == nil || o.own == nil {
		return nil
	}
	return o.own.Cleanup()
}

// RoundTrip sends a request and watches the answer. It returns the transport's
// errors as they are: the handler looks at their types.
func (o *observer) RoundTrip(req *http.Request) (*http.Response, error) {
	q, ours := o.requestOf(req)
	switch {
	case q == nil:
		return o.RoundTripper.RoundTrip(req)
	case !ours:
		res, spoilt, err := o.deliver(q, q.lend(req))
		if spoilt != nil {
			return answerSpoilt(req, spoilt)
		}
		return res, err
	}
	unsent.remove(q)
	attempt := q.attempt
	asked := o.policy.config.ORCA != "" && req.Header.Get(orcaRequest) == ""
	if asked {
		ask := *req
		ask.Header = maps.Clone(req.Header)
		ask.Header[orcaRequest] = []string{o.policy.config.ORCA}
		req = &ask
	}
	res, spoilt, err := o.deliver(q, req)
	if err != nil {
		outcome := affinity.Lost
		if req.Context().Err() != nil || errors.Is(err, context.Canceled) || spoilt != nil {
			outcome = affinity.Aborted
		}
		attempt.Finish(time.Now(), outcome, 0)
		q.watchEnd() // there may be another attempt
		if spoilt != nil {
			return answerSpoilt(req, spoilt)
		}
		return res, err
	}
	o.readLoad(q, res)
	if asked {
		if res.StatusCode == http.StatusOK && !isEventStream(res) {
			q.series.reporting.orca(o.policy.logger, q.upstream, res.Header[orcaResponse] != nil)
		}
		res.Header.Del(orcaResponse)
		res.Header.Del(orcaResponse + "-Bin")
	}
	if o.policy.config.Explain {
		res.Header.Set("X-Prefix-Affinity", q.explain())
	}
	o.watch(q, attempt, res)
	return res, nil
}

// deliver lets the transport send a request. spoilt is why that failed where the
// upstream is not to blame: the client has not sent its whole body.
func (o *observer) deliver(q *request, req *http.Request) (res *http.Response, spoilt, err error) {
	if q.content != nil {
		if res, err = o.RoundTripper.RoundTrip(req); err != nil {
			q.complete()
			spoilt = q.held.broken()
		}
		return res, spoilt, err
	}
	if req.Body == nil || req.Body == http.NoBody {
		res, err = o.RoundTripper.RoundTrip(req)
		return res, nil, err
	}
	passing := *req
	body := &passingBody{ReadCloser: req.Body}
	passing.Body = body
	if res, err = o.RoundTripper.RoundTrip(&passing); err != nil {
		spoilt = body.cut.get()
	}
	return res, spoilt, err
}

// answerSpoilt answers a request whose body the client failed to send. For Caddy an
// error of the transport is the upstream's, which two bad requests could so put out
// of use for all.
func answerSpoilt(req *http.Request, body error) (*http.Response, error) {
	status := http.StatusBadRequest
	var refused caddyhttp.HandlerError
	var network net.Error
	switch {
	case errors.As(body, &refused) && refused.StatusCode != 0: // it is longer than request_body allows, say
		status = refused.StatusCode
	case errors.Is(body, io.ErrUnexpectedEOF), errors.As(body, &network), req.Context().Err() != nil:
		return nil, fmt.Errorf("%w: the client has not sent its whole body: %w", context.Canceled, body) // Caddy says 499
	}
	return &http.Response{
		Status:     fmt.Sprintf("%d %s", status, http.StatusText(status)),
		StatusCode: status,
		Proto:      "HTTP/1.1",
		ProtoMajor: 1,
		ProtoMinor: 1,
		Header:     http.Header{},
		Body:       http.NoBody,
		Request:    req,
	}, nil
}

// requestOf finds the policy's request that was sent last in this request's
// context: Select and RoundTrip follow each other on one goroutine. ours is false
// where another policy has chosen the upstream, as a cookie policy may after a
// failure, although it had this one choose before.
func (o *observer) requestOf(req *http.Request) (q *request, ours bool) {
	trail, _ := caddyhttp.GetVar(req.Context(), trailVar).(*trail)
	q = trail.find(o.policy, nil)
	if q == nil || q.attempt == nil {
		return q, false
	}
	dial, ok := reverseproxy.GetDialInfo(req.Context())
	return q, !ok || dial.Upstream.String() == q.upstream
}

// readLoad takes in what the response's headers say about the upstream's queue.
func (o *observer) readLoad(q *request, res *http.Response) {
	if values := res.Header[orcaResponse]; values != nil {
		load, ok := signal.ParseORCA(values)
		if ok && load.QueueDepth >= 0 {
			q.attempt.Replica().ReportLoad(time.Now(), load.QueueDepth)
		}
		if ok && load.CapacityTokens > 0 && o.policy.config.ReplicaCache == 0 {
			q.attempt.Replica().ReportCapacity(int(load.CapacityTokens))
		}
	}
	if name := o.policy.config.QueueDepthHeader; name != "" {
		if depth, ok := signal.ParseCount(res.Header.Values(name)); ok {
			q.attempt.Replica().ReportLoad(time.Now(), depth)
		}
	}
}

// watch follows the attempt to the end of its response.
func (o *observer) watch(q *request, attempt *affinity.Attempt, res *http.Response) {
	now := time.Now()
	switch status := res.StatusCode; {
	case status == http.StatusSwitchingProtocols:
		q.watchEnd() // the connection leaves HTTP: it ends with the request
	case status == http.StatusTooManyRequests, status == http.StatusServiceUnavailable:
		attempt.Finish(now, affinity.Refused, retryAfter(res.Header.Get("Retry-After"), now))
		q.watchEnd() // there may be another attempt
	case status >= http.StatusInternalServerError && status != http.StatusNotImplemented: // which is about the request
		attempt.Finish(now, affinity.Lost, 0)
		q.watchEnd() // the same
	case status < 200 || status > 299:
		attempt.Finish(now, affinity.Rejected, 0)
		q.watchEnd() // the same
	default:
		format := signal.None
		if res.Header.Get("Content-Encoding") == "" {
			format = signal.FormatOf(res.Header.Get("Content-Type"))
		}
		stream := format == signal.SSE || format == signal.NDJSON
		attempt.Confirm(now, stream)
		if o.handler != nil && len(o.handler.HandleResponse) > 0 {
			q.watchEnd() // such a route may abort, and leave the body open
		}
		t := &q.answer
		if t.attempt != nil {
			t = new(tappedBody)
		}
		*t = tappedBody{ReadCloser: res.Body, q: q, attempt: attempt, series: q.series, promptTokens: q.choice.PromptTokens, cached: -1, stream: stream}
		if t.ttft = q.series.ttftMiss; q.choice.MatchedTokens >= o.policy.config.MinMatch {
			t.ttft = q.series.ttftHit
		}
		if name := o.policy.config.CachedTokensHeader; name != "" {
			if cached, ok := signal.ParseCount(res.Header.Values(name)); ok {
				t.cached = int(cached)
			}
		}
		if format != signal.None {
			t.tap = taps.Get().(*signal.Tap)
			t.tap.Reset(format)
		}
		res.Body = t
	}
}

func isEventStream(res *http.Response) bool {
	return signal.FormatOf(res.Header.Get("Content-Type")) == signal.SSE
}

// retryAfter reads a Retry-After header, in seconds or as a date.
func retryAfter(value string, now time.Time) time.Duration {
	if value == "" {
		return 0
	}
	var after time.Duration
	if seconds, err := strconv.ParseUint(value, 10, 16); err == nil {
		after = time.Duration(seconds) * time.Second
	} else if date, err := http.ParseTime(value); err == nil {
		after = date.Sub(now)
	}
	return min(max(after, 0), maxRetryAfter)
}

var taps = sync.Pool{New: func() any { return new(signal.Tap) }}

// tappedBody is the body of a successful response on its way to the client. It
// looks at what passes and never holds it up.
type tappedBody struct {
	io.ReadCloser

	q            *request
	attempt      *affinity.Attempt
	series       *upstreamSeries
	ttft         prometheus.Observer
	tap          *signal.Tap // nil: the format is not known
	promptTokens int         // as estimated
	cached       int         // cached tokens by header; -1: not said
	stream       bool        // its first output is seen
	started      bool
	known        bool // the id of the response was learned
	ended        bool
}

func (t *tappedBody) Read(p []byte) (int, error) {
	n, err := t.ReadCloser.Read(p)
	if !t.started { // the response is on its way to the client: there will be no other attempt
		t.started = true
		t.q.settle()
	}
	if n > 0 && t.tap != nil {
		if t.tap.Write(p[:n]) {
			now := time.Now()
			t.attempt.FirstOutput(now)
			t.ttft.Observe(now.Sub(t.attempt.Sent()).Seconds())
		}
		if !t.known {
			t.learnID()
		}
	}
	if err != nil {
		outcome := affinity.Lost
		switch {
		case err == io.EOF:
			outcome = affinity.Served
		case t.q.r.Context().Err() != nil:
			outcome = affinity.Aborted
		}
		t.end(outcome)
	}
	return n, err
}

// learnID notes where the response is stored that a later request may continue.
func (t *tappedBody) learnID() {
	if id := t.tap.ResponseID(); id != nil {
		t.known = true
		p := t.q.policy
		p.learned.index.Learn(p.hasher().ID(t.q.scope, string(id)), t.attempt.Replica())
	}
}

func (t *tappedBody) Close() error {
	err := t.ReadCloser.Close()
	t.end(affinity.Aborted)
	return err
}

func (t *tappedBody) end(outcome affinity.Outcome) {
	if t.ended {
		return
	}
	t.ended = true
	usage := signal.Usage{PromptTokens: -1, CachedTokens: -1, OutputTokens: -1}
	if t.tap != nil {
		if !t.known {
			t.learnID() // a JSON body tells it at its end
		}
		usage = t.tap.Usage()
		taps.Put(t.tap)
		t.tap = nil
	}
	if usage.CachedTokens < 0 {
		usage.CachedTokens = t.cached
	}
	if outcome == affinity.Served && t.q.cause == keyed {
		t.series.reporting.cached(t.q.policy.logger, t.q.upstream, usage.CachedTokens >= 0)
	}
	if usage.CachedTokens >= 0 {
		if t.attempt.Report(usage.PromptTokens, usage.CachedTokens) {
			t.q.policy.logger.Info("upstream must have restarted, for it finds nothing of what it held: forgotten", zap.String("upstream", t.q.upstream))
		}
		if usage.PromptTokens < 0 {
			usage.PromptTokens = t.promptTokens
		}
		t.series.cachedTokens.Add(float64(usage.CachedTokens))
		t.series.reportedTokens.Add(float64(usage.PromptTokens))
	}
	now := time.Now()
	if outcome == affinity.Served && !t.stream && usage.OutputTokens >= 0 {
		t.attempt.Answered(now, usage.PromptTokens, usage.CachedTokens, usage.OutputTokens)
	}
	t.attempt.Finish(now, outcome, 0)
	t.q.policy.learns()
	if t.started {
		t.q.unwatch()
	} else {
		t.q.watchEnd() // there may be another attempt
	}
}

// explain tells what was decided, as a structured header field (RFC 8941).
func (q *request) explain() string {
	text := fmt.Sprintf("%s;upstream=%q;matched=%d;prompt=%d", q.choice.Reason, q.upstream, q.choice.MatchedTokens, q.choice.PromptTokens)
	if q.shadowed != nil {
		text += fmt.Sprintf(";wanted=%q;wanted_matched=%d", q.shadowed.upstream, q.shadowed.choice.MatchedTokens)
	}
	return text
}

// RequestHeaderOps forwards the transport's header operations: they set the
// Host of upstreams with TLS.
func (o *observer) RequestHeaderOps() *headers.HeaderOps {
	if t, ok := o.RoundTripper.(reverseproxy.RequestHeaderOpsTransport); ok {
		return t.RequestHeaderOps()
	}
	return nil
}

// ProxyProtocolEnabled forwards whether the transport speaks PROXY protocol.
func (o *observer) ProxyProtocolEnabled() bool {
	t, ok := o.RoundTripper.(reverseproxy.ProxyProtocolTransport)
	return ok && t.ProxyProtocolEnabled()
}

// OverrideHealthCheckScheme lets the transport set the scheme of health checks.
func (o *observer) OverrideHealthCheckScheme(base *url.URL, port string) {
	if t, ok := o.RoundTripper.(reverseproxy.HealthCheckSchemeOverriderTransport); ok {
		t.OverrideHealthCheckScheme(base, port)
	}
}

// RequiresContentLength forwards whether the transport needs bodies of known length.
func (o *observer) RequiresContentLength() bool {
	t, ok := o.RoundTripper.(reverseproxy.ContentLengthRequiredTransport)
	return ok && t.RequiresContentLength()
}

// Interface guards
var (
	_ reverseproxy.RequestHeaderOpsTransport           = (*observer)(nil)
	_ reverseproxy.ProxyProtocolTransport              = (*observer)(nil)
	_ reverseproxy.HealthCheckSchemeOverriderTransport = (*observer)(nil)
	_ reverseproxy.ContentLengthRequiredTransport      = (*observer)(nil)
)
