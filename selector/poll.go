package selector

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
	"go.uber.org/zap"

	"github.com/prefix-affinity/caddy/selector/signal"
)

const (
	pollTimeout     = 2 * time.Second
	pollBytes       = 4 << 20 // an engine has up to 500 KB to say
	pollConcurrency = 8
	// pollTries in a row that failed are told in the log.
	pollTries = 5
	// pollPause is how long an engine is left alone that says that it has no metrics,
	// and never had any. Any other failure may be that of an engine which restarts, and
	// when it is back is what matters most: it goes on being asked, pollRest apart
	// where it keeps everybody waiting for an answer.
	pollPause = 10 * time.Minute
	pollRest  = 15 * time.Second
)

// poller reads the metrics of a policy's upstreams at intervals. It asks through
// the handler's transport and with its header_up, so TLS and keys are the same as
// for requests.
type poller struct {
	policy *Policy
	start  sync.Once
	ctx    context.Context
	stop   context.CancelFunc
	done   sync.WaitGroup
	slots  chan struct{}

	mu   sync.Mutex
	seen map[string]*polled // by upstream
}

// polled is what a poller knows of an upstream. While it is asked, that belongs to
// who asks.
type polled struct {
	asked    atomic.Bool
	failures int       // in a row
	pause    time.Time // not asked before
	told     bool      // that its metrics are of no use, since they were last
}

func newPoller(p *Policy) *poller {
	ctx, stop := context.WithCancel(context.Background())
	return &poller{policy: p, ctx: ctx, stop: stop, slots: make(chan struct{}, pollConcurrency), seen: make(map[string]*polled)}
}

// run begins polling with the first request: a configuration that is only
// checked asks nobody.
func (o *poller) run() {
	o.start.Do(func() {
		o.done.Go(func() {
			ticker := time.NewTicker(time.Duration(o.policy.config.Poll))
			defer ticker.Stop()
			for {
				o.round(time.Now())
				select {
				case <-ticker.C:
				case <-o.ctx.Done():
					return
				}
			}
		})
	})
}

func (o *poller) close() {
	o.stop()
	o.start.Do(func() {}) // none begins any more
	o.done.Wait()
}

// round asks every upstream that has answered the round before.
func (o *poller) round(now time.Time) {
	upstreams := o.policy.upstreams()
	o.forget(upstreams)
	for _, upstream := range upstreams {
		u := o.of(upstream)
		if u.asked.Load() || now.Before(u.pause) || !metrics.of(upstream).pollDue(now, time.Duration(o.policy.config.Poll)) {
			continue
		}
		select {
		case o.slots <- struct{}{}:
		case <-o.ctx.Done():
			return
		}
		u.asked.Store(true)
		o.done.Go(func() {
			if err := o.ask(upstream); err != nil {
				o.failed(upstream, u, err)
			} else {
				u.failures, u.told = 0, false
			}
			u.asked.Store(false)
			<-o.slots
		})
	}
}

func (o *poller) of(upstream string) *polled {
	o.mu.Lock()
	defer o.mu.Unlock()
	u := o.seen[upstream]
	if u == nil {
		u = new(polled)
		o.seen[upstream] = u
	}
	return u
}

// forget drops the upstreams that are not there any more.
func (o *poller) forget(present []string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if len(o.seen) <= len(present) {
		return
	}
	keep := make(map[string]*polled, len(present))
	for _, upstream := range present {
		if u := o.seen[upstream]; u != nil {
			keep[upstream] = u
		}
	}
	o.seen = keep
}

// ask reads one upstream's metrics and passes on what they say.
func (o *poller) ask(upstream string) error {
	ctx, cancel := context.WithTimeout(o.ctx, pollTimeout)
	defer cancel()
	req, err := o.newRequest(ctx, upstream)
	if err != nil {
		return err
	}
	res, err := o.policy.observer.RoundTripper.RoundTrip(req)
	if err != nil {
		return err
	}
	defer res.Body.Close()
	if res.StatusCode != http.StatusOK {
		return statusError(res.StatusCode)
	}
	said, err := signal.ParseMetrics(io.LimitReader(res.Body, pollBytes))
	if err != nil {
		return err
	}
	if said.Engine == "" {
		return errUnknown // and what it said before is what the next page is compared with
	}
	if said.StartTime < 0 { // llama.cpp says it in a header
		if started, err := strconv.ParseFloat(res.Header.Get("Process-Start-Time-Unix"), 64); err == nil {
			said.StartTime = started
		}
	}
	o.tell(upstream, said)
	return nil
}

// newRequest makes a request as the handler makes those to an upstream: where it
// goes is said by the context, and the transport knows whether it speaks TLS.
func (o *poller) newRequest(ctx context.Context, upstream string) (*http.Request, error) {
	repl := caddy.NewReplacer()
	dial, err := repl.ReplaceOrErr(upstream, true, true)
	if err != nil {
		return nil, errPlaceholder
	}
	addr, err := caddy.ParseNetworkAddress(dial)
	if err != nil {
		return nil, err
	}
	to := reverseproxy.DialInfo{Network: addr.Network, Address: addr.JoinHostPort(0), Host: addr.Host, Port: strconv.Itoa(int(addr.StartPort))}
	repl.Set("http.reverse_proxy.upstream.address", to.String())
	repl.Set("http.reverse_proxy.upstream.hostport", to.Address)
	repl.Set("http.reverse_proxy.upstream.host", to.Host)
	repl.Set("http.reverse_proxy.upstream.port", to.Port)
	ctx = context.WithValue(context.WithValue(ctx, caddy.ReplacerCtxKey, repl), dialInfoKey, to)
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, o.policy.config.PollPath, nil)
	if err != nil {
		return nil, err
	}
	req.URL.Host, req.Host = to.Address, to.Address
	if addr.IsUnixNetwork() {
		req.Host = "localhost"
	}
	if h := o.policy.observer.handler; h.Headers != nil && h.Headers.Request != nil {
		h.Headers.Request.ApplyToRequest(req)
	}
	return req, nil
}

// dialInfoKey is the key that reverseproxy.GetDialInfo looks for, which Caddy's
// transport dials by. It has no exported name.
const dialInfoKey caddy.CtxKey = "reverse_proxy.dial_info"

// errPlaceholder is the failure of an address that only requests make whole.
var errPlaceholder = errors.New("its address has placeholders")

// errUnknown is no failure for good: some engines have no metrics before their
// first request.
var errUnknown = errors.New("no metrics of a known engine")

// statusError is an answer that is no page of metrics.
type statusError int

func (e statusError) Error() string { return fmt.Sprintf("status %d", int(e)) }

// lasting reports whether the next answer will be the same: a server that is
// only starting or overloaded says otherwise.
func (e statusError) lasting() bool { return e < 500 || e == http.StatusNotImplemented }

func (o *poller) tell(upstream string, said signal.EngineMetrics) {
	before := metrics.of(upstream).engine.Swap(&said)
	replica := o.policy.learned.fleet.Find(upstream)
	if replica == nil {
		return // it has served nothing yet
	}
	if said.QueueDepth >= 0 {
		replica.ReportLoad(time.Now(), said.QueueDepth)
	}
	if said.CapacityTokens > 0 && !cacheConfigured(upstream) {
		replica.ReportCapacity(int(said.CapacityTokens))
	}
	if before != nil && restarted(*before, said) {
		replica.Restarted()
		o.policy.logger.Info("upstream has restarted: what it held is forgotten", zap.String("upstream", upstream))
	}
}

// cacheConfigured reports whether a policy says how much the upstream holds: that
// counts for all.
func cacheConfigured(upstream string) bool {
	return slices.ContainsFunc(livePolicies(), func(p *Policy) bool {
		return p.config.ReplicaCache > 0 && p.routesTo(upstream)
	})
}

// restarted compares two polls of an engine. Engines of several processes tell no
// start time, but what they count since their start falls.
func restarted(before, now signal.EngineMetrics) bool {
	if before.StartTime > 0 && now.StartTime > 0 {
		return before.StartTime != now.StartTime
	}
	return now.PrefixQueries >= 0 && now.PrefixQueries < before.PrefixQueries
}

// failed takes note of an error, and warns where it won't pass soon: at once where
// the upstream has answered, else after some tries.
func (o *poller) failed(upstream string, u *polled, err error) {
	if o.ctx.Err() != nil {
		return
	}
	status, answered := errors.AsType[statusError](err)
	what, next := "upstream's metrics can't be read", "it goes on being asked"
	switch u.failures++; {
	case errors.Is(err, errPlaceholder):
		u.pause, next = time.Now().Add(pollPause), "it can't be polled"
	case errors.Is(err, errUnknown):
		what = "upstream's page has no metrics of an engine that is known here (is the path right?)"
	case answered && status.lasting():
		what = "upstream has no metrics there (is the path right? llama.cpp has them with --metrics, SGLang with --enable-metrics)"
		if metrics.of(upstream).engine.Load() == nil {
			u.pause, next = time.Now().Add(pollPause), "it is asked again in "+pollPause.String()
		}
	case u.failures < pollTries:
		return
	case errors.Is(err, context.DeadlineExceeded):
		u.pause = time.Now().Add(pollRest)
	}
	if u.told {
		return
	}
	u.told = true
	o.policy.logger.Warn("poll: "+what+", so its queue and cache are not known from it; "+next,
		zap.String("upstream", upstream), zap.String("path", o.policy.config.PollPath), zap.Error(err))
}
