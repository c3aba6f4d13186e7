package selector

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"github.com/prefix-affinity/caddy/selector/affinity"
)

// drains are the upstreams that get no new conversations, and since when. One that
// drains keeps the conversations that it holds until drain_timeout has passed.
// There is one set for the process, changed through the admin API, and one in
// each configuration, which that can't change.
type drains struct {
	mu    sync.Mutex // serialises changes
	since atomic.Pointer[map[string]time.Time]
}

func newDrains() *drains {
	d := new(drains)
	d.since.Store(new(map[string]time.Time))
	return d
}

// of returns since when an upstream drains; false if it doesn't.
func (d *drains) of(upstream string) (time.Time, bool) {
	since, ok := (*d.since.Load())[upstream]
	return since, ok
}

// set begins an upstream's drain, unless it has begun already.
func (d *drains) set(upstream string, now time.Time) {
	d.change(func(since map[string]time.Time) {
		if _, ok := since[upstream]; !ok {
			since[upstream] = now
		}
	})
}

// all returns all drains.
func (d *drains) all() map[string]time.Time { return *d.since.Load() }

// end ends a drain and reports whether there was one.
func (d *drains) end(upstream string) (was bool) {
	d.change(func(since map[string]time.Time) {
		_, was = since[upstream]
		delete(since, upstream)
	})
	return was
}

func (d *drains) change(f func(map[string]time.Time)) {
	d.mu.Lock()
	defer d.mu.Unlock()
	since := maps.Clone(*d.since.Load())
	if since == nil {
		since = make(map[string]time.Time)
	}
	f(since)
	d.since.Store(&since)
}

// checkDrain fails where the drain option names what is not an upstream: whoever
// then switches it off would cut off what it serves.
func (p *Policy) checkDrain() error {
	if p.observer == nil || p.observer.handler.DynamicUpstreamsRaw != nil {
		return nil
	}
	dials := p.observer.dials()
	for _, upstream := range p.config.Drain {
		if !slices.Contains(dials, upstream) {
			return fmt.Errorf("invalid drain '%s': should be one of the upstreams %s", upstream, strings.Join(dials, ", "))
		}
	}
	return nil
}

// drain begins the drains of the configuration. Those that an earlier
// configuration has begun go on, so that a reload doesn't prolong them.
func (p *Policy) drain(now time.Time) {
	p.drains = newDrains()
	for _, upstream := range p.config.Drain {
		p.learned.begun.set(upstream, now)
		since, _ := p.learned.begun.of(upstream)
		p.drains.set(upstream, since)
	}
}

// draining returns since when an upstream drains, by the configuration or the
// admin API; false if it doesn't.
func (p *Policy) draining(upstream string) (since time.Time, drains bool) {
	if since, drains = p.drains.of(upstream); drains {
		return since, drains
	}
	return p.learned.drained.of(upstream)
}

// drainState tells what an available upstream may be chosen for.
func (p *Policy) drainState(upstream string, now time.Time) affinity.State {
	since, drained := p.draining(upstream)
	switch {
	case !drained:
		return affinity.Available
	case now.Sub(since) > time.Duration(p.config.DrainTimeout):
		return affinity.Failed // what it still holds moves, as long as there are others
	}
	return affinity.Drained
}

// warnDrained tells whoever drains all upstreams that it keeps nothing away.
func (p *Policy) warnDrained() {
	dials := p.observer.dials()
	if len(dials) == 0 || slices.ContainsFunc(dials, func(upstream string) bool { _, drains := p.draining(upstream); return !drains }) {
		return
	}
	p.logger.Warn("all upstreams are drained, so they get new conversations all the same: there is no other for them to go to",
		zap.Strings("upstreams", dials))
}

// drainsAny reports whether any upstream drains at all.
func (p *Policy) drainsAny() bool { return len(p.drains.all()) > 0 || len(p.learned.drained.all()) > 0 }

// endDrain ends the drains that no other configuration goes on with.
func (p *Policy) endDrain() {
	for _, upstream := range p.config.Drain {
		if !slices.ContainsFunc(livePolicies(), func(other *Policy) bool { _, drains := other.drains.of(upstream); return drains }) {
			p.learned.begun.end(upstream)
		}
	}
}
