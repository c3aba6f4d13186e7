// Package selector is the side of the policy that faces Caddy. It finds the
// prompt of a request, asks package affinity where to send it, and watches the
// response to learn from it.
//
// A Policy is safe for concurrent use. On a request's path it does no I/O but
// reading the body; the only goroutines are those that poll the engines and that
// read and write snapshots of what was learned.
package selector

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"

	"github.com/prefix-affinity/caddy/prefixhash"
	"github.com/prefix-affinity/caddy/selector/affinity"
	"github.com/prefix-affinity/caddy/selector/share"
)

// Policy is a provisioned configuration.
type Policy struct {
	config   Config
	within   any // the configuration that it belongs to: its registry
	rule     affinity.Rule
	together affinity.Rule         // while other gateways tell what they do
	syncing  *share.Share          // nil: off
	fallback reverseproxy.Selector // nil: least_conn, counted in work
	hasher   func() *prefixhash.Hasher
	learned  learned
	drains   *drains // by the configuration
	last     atomic.Pointer[resolved]
	serves   atomic.Bool // it had a request; kept by the keeper
	poller   *poller     // nil: the engines' metrics are not read
	observer *observer
	notices  notices
	logger   *zap.Logger
}

// Provision makes a policy from its configuration and lets it see the responses
// of the reverse_proxy handler that it belongs to.
func Provision(ctx caddy.Context, config *Config) (*Policy, error) {
	p, err := provision(ctx, config)
	if err != nil { // a Caddyfile's line is not known any more
		return nil, fmt.Errorf("%w, in %s", err, describe(handlerAround(ctx)))
	}
	return p, nil
}

func provision(ctx caddy.Context, config *Config) (*Policy, error) {
	p := &Policy{config: config.withDefaults(), within: ctx.GetMetricsRegistry(), logger: ctx.Logger()}
	p.rule = affinity.Rule{
		MinMatchTokens: p.config.MinMatch,
		Alpha:          p.config.AffinityWeight,
		CapacityTokens: p.config.ReplicaCache,
		Rendezvous:     p.config.Seed != "",
		Shadow:         p.config.Shadow,
	}
	p.together = p.rule
	p.together.Rendezvous = false // everybody sees who has it
	if err := p.config.Complete(); err != nil {
		return nil, err
	}
	p.config.SessionHeaders = slices.Clone(p.config.SessionHeaders)
	for i, name := range p.config.SessionHeaders {
		p.config.SessionHeaders[i] = http.CanonicalHeaderKey(name)
	}
	if err := p.loadFallback(ctx, config); err != nil {
		return nil, err
	}
	ignore, err := p.config.ignored()
	if err != nil {
		return nil, fmt.Errorf("invalid ignore: %v", err)
	}
	if p.config.Seed, err = fill("seed", p.config.Seed); err != nil {
		return nil, err
	}
	start := ownSeed
	if secret := p.config.Seed; secret != "" {
		start = func() seed { return configuredSeed(secret) }
	}
	p.hasher = sync.OnceValue(func() *prefixhash.Hasher {
		return prefixhash.New(prefixhash.Config{BlockBytes: p.config.BlockSize, Seed: start().start, Ignore: ignore})
	})
	if err := metrics.register(ctx.GetMetricsRegistry()); err != nil {
		return nil, fmt.Errorf("registering metrics: %v", err)
	}
	if p.observer, err = observe(ctx, p); err != nil {
		return nil, err
	}
	if err := errors.Join(p.checkDrain(), p.checkCache()); err != nil {
		return nil, errors.Join(err, p.observer.cleanup())
	}
	p.learned, err = loadLearned(p.config)
	if err != nil {
		return nil, errors.Join(err, p.observer.cleanup())
	}
	// The registry is the configuration's own.
	if err := p.learned.keeper.join(p, ctx.GetMetricsRegistry(), start); err != nil {
		return nil, errors.Join(err, p.learned.release(), p.observer.cleanup())
	}
	if err := p.startSync(ctx.GetMetricsRegistry()); err != nil {
		p.learned.keeper.leave(p)
		return nil, errors.Join(err, p.learned.release(), p.observer.cleanup())
	}
	p.drain(time.Now())
	p.warnDrained()
	if p.config.Poll > 0 && p.observer != nil {
		p.poller = newPoller(p)
	}
	p.enlist()
	return p, nil
}

// handler returns the reverse_proxy handler that the policy belongs to, nil where there
// is none.
func (p *Policy) handler() *reverseproxy.Handler {
	if p.observer == nil {
		return nil
	}
	return p.observer.handler
}

// checkCache fails where another policy of the configuration says otherwise how
// much an upstream of both holds: what is known of an upstream is known to all.
func (p *Policy) checkCache() error {
	if p.config.ReplicaCache == 0 {
		return nil
	}
	for _, other := range livePolicies() {
		if other.within != p.within || other.config.ReplicaCache == 0 || other.config.ReplicaCache == p.config.ReplicaCache {
			continue
		}
		for _, upstream := range p.observer.dials() {
			if slices.Contains(other.observer.dials(), upstream) {
				return fmt.Errorf("replica_cache of '%s' is %d here and %d in %s: it is one cache, so they should be the same, or one left out",
					upstream, p.config.ReplicaCache, other.config.ReplicaCache, describe(other.handler()))
			}
		}
	}
	return nil
}

func (p *Policy) loadFallback(ctx caddy.Context, config *Config) error {
	if config.FallbackRaw == nil || string(config.FallbackRaw) == "null" {
		if p.config.Shadow {
			p.fallback = new(reverseproxy.LeastConnSelection)
		}
		return nil
	}
	var named struct {
		Policy string `json:"policy"`
	}
	if err := json.Unmarshal(config.FallbackRaw, &named); err != nil {
		return fmt.Errorf("loading fallback selection policy: %v", err)
	}
	module, err := ctx.LoadModule(config, "FallbackRaw")
	if err != nil {
		return fmt.Errorf("loading fallback selection policy: %s", err)
	}
	if named.Policy != "least_conn" || p.config.Shadow { // ours is that already, in a finer measure
		p.fallback = module.(reverseproxy.Selector)
	}
	return nil
}

// Cleanup gives back what Provision took. It may be called on nil, which is
// what a failed Provision returns.
func (p *Policy) Cleanup() error {
	if p == nil {
		return nil
	}
	p.retire()
	if p.learned.fleet != nil { // else Provision failed
		p.learned.fleet.Recall(time.Now())
		lowerBound(p.learned.fleet)
	}
	p.endDrain()
	if p.poller != nil {
		p.poller.close()
	}
	p.learned.keeper.leave(p)
	return errors.Join(p.learned.release(), p.observer.cleanup())
}

// lowerBound lets the memory bound follow the policies that are left.
func lowerBound(fleet *affinity.Fleet) {
	left, most := livePolicies(), 0
	for _, p := range left {
		most = max(most, p.config.IndexSize)
	}
	if most == 0 || !fleet.Lower(most) {
		return
	}
	for _, p := range left {
		p.learned.index.Trim()
	}
}

// Select returns an available host, if any.
func (p *Policy) Select(pool reverseproxy.UpstreamPool, r *http.Request, w http.ResponseWriter) *reverseproxy.Upstream {
	vars, _ := r.Context().Value(caddyhttp.VarsCtxKey).(map[string]any)
	trail, _ := vars[trailVar].(*trail)
	q := trail.find(p, r)
	if q == nil {
		if !slices.ContainsFunc(pool, (*reverseproxy.Upstream).Available) {
			return nil // and the body stays for an error route
		}
		p.learns()
		q = p.newRequest(vars, trail, r)
	}
	up := p.choose(q, pool, r, w)
	if up != nil && p.observer != nil {
		unsent.add(q, q.attempt.Sent())
	}
	if p.poller != nil {
		p.poller.run() // now that it is known whom to ask
	}
	return up
}

// choose chooses an upstream for the request's next attempt.
func (p *Policy) choose(q *request, pool reverseproxy.UpstreamPool, r *http.Request, w http.ResponseWriter) *reverseproxy.Upstream {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.giveUp()
	if !q.rewind(r) {
		return nil // the error of the last attempt stands
	}
	now := time.Now() // after the body has come

	s := scratches.Get().(*scratch)
	defer scratches.Put(s)
	s.candidates = s.candidates[:0]
	known := p.resolve(pool)
	plain := len(q.failed) == 0 && !p.drainsAny()
	for i, up := range pool {
		state := affinity.Available
		switch {
		case !up.Available():
			state = affinity.Unavailable
		case !plain:
			state = q.stateOf(up, now)
		}
		s.candidates = append(s.candidates, affinity.Candidate{Replica: known.replicas[i], State: state, InFlight: up.NumRequests()})
	}
	var fallback func(affinity.Choice) int
	if p.fallback != nil {
		fallback = func(wanted affinity.Choice) int {
			if p.config.Shadow {
				q.shadowed = &shadowed{wanted, pool[wanted.Candidate].String()}
				known.seriesOf(wanted.Candidate).shadowMatchedTokens.Add(float64(wanted.MatchedTokens))
			}
			return p.fallBack(pool, s.candidates, r, w)
		}
	}
	key := q.routingKey()
	choice, attempt := p.learned.index.Route(now, key, s.candidates, p.currentRule(), fallback)
	if choice.Candidate < 0 {
		return nil
	}
	if key != nil { // others take next to no time, and would hide what prompts take
		metrics.decisionTime.Observe(time.Since(now).Seconds())
	}
	up := pool[choice.Candidate]
	q.send(attempt, choice, up.String(), holderOf(pool, choice), known.seriesOf(choice.Candidate))
	if c := p.logger.Check(zapcore.DebugLevel, "selected upstream"); c != nil {
		c.Write(zap.String("upstream", q.upstream),
			zap.Stringer("reason", choice.Reason),
			zap.Int("prompt_tokens", choice.PromptTokens),
			zap.Int("matched_tokens", choice.MatchedTokens),
			zap.Int("attempt", q.attempts))
	}
	return up
}

// learns notes that there is something new to keep.
func (p *Policy) learns() {
	if p.config.Snapshot >= 0 {
		p.learned.keeper.note(p)
	}
}

// resolved is what belongs to the addresses of a pool of upstreams.
type resolved struct {
	pool      reverseproxy.UpstreamPool
	replicas  []*affinity.Replica
	series    []atomic.Pointer[upstreamSeries] // of those that were chosen
	forgotten uint32                           // by the fleet, and so by the metrics, when it was looked up
}

// routesTo reports whether an upstream is one of the policy's, by its
// configuration or at its last request.
func (p *Policy) routesTo(upstream string) bool {
	if slices.Contains(p.observer.dials(), upstream) {
		return true
	}
	last := p.last.Load()
	return last != nil && slices.ContainsFunc(last.pool, func(up *reverseproxy.Upstream) bool { return up.String() == upstream })
}

// seriesOf returns the series of an upstream.
func (k *resolved) seriesOf(i int) *upstreamSeries {
	s := k.series[i].Load()
	if s == nil {
		s = metrics.of(k.pool[i].String())
		k.series[i].Store(s)
	}
	return s
}

// resolve returns the replica of each upstream. Where the upstreams are those of
// the last request, which they are unless they are found dynamically, it need not
// look them up by their addresses.
func (p *Policy) resolve(pool reverseproxy.UpstreamPool) *resolved {
	forgotten := p.learned.fleet.Forgotten()
	if last := p.last.Load(); last != nil && last.forgotten == forgotten && slices.Equal(last.pool, pool) {
		return last
	}
	now := &resolved{slices.Clone(pool), make([]*affinity.Replica, len(pool)), make([]atomic.Pointer[upstreamSeries], len(pool)), forgotten}
	for i, up := range pool {
		now.replicas[i] = p.learned.fleet.Replica(up.String())
	}
	p.last.Store(now)
	return now
}

// fallBack asks the fallback policy, which sees only the upstreams that may be
// chosen: those that have not failed this request, as long as there are any.
func (p *Policy) fallBack(pool reverseproxy.UpstreamPool, candidates []affinity.Candidate, r *http.Request, w http.ResponseWriter) int {
	for _, state := range [...]affinity.State{affinity.Available, affinity.Failed} {
		var open reverseproxy.UpstreamPool
		for i, c := range candidates {
			if c.State == state {
				open = append(open, pool[i])
			}
		}
		if len(open) == 0 {
			continue
		}
		if up := p.fallback.Select(open, r, w); up != nil {
			for i := range pool {
				if pool[i] == up {
					return i
				}
			}
		}
	}
	return -1
}

func holderOf(pool reverseproxy.UpstreamPool, choice affinity.Choice) string {
	if choice.Holder < 0 {
		return ""
	}
	return pool[choice.Holder].String()
}

// scratch is the working memory of one Select.
type scratch struct{ candidates []affinity.Candidate }

var scratches = sync.Pool{New: func() any { return new(scratch) }}
