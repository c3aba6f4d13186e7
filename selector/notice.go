package selector

import (
	"sync/atomic"
	"time"

	"go.uber.org/zap"
)

const (
	// noticeAfter responses without a figure, an upstream does not seem to
	// report it at all.
	noticeAfter = 50
	// unkeyedTime without a single prompt in any body is no accident.
	unkeyedTime  = time.Minute
	unkeyedLeast = 10
)

// notices tell the operator once what keeps a policy from working well: once for
// each configuration, so that a mistake made again is told again.
type notices struct {
	since     atomic.Int64 // Unix nanoseconds, of the first body without a prompt after those with; 0: none
	unkeyed   atomic.Int64 // bodies since then
	told      atomic.Bool
	scopeTold atomic.Bool
}

// scope warns of a scope that nothing resolves.
func (n *notices) scope(logger *zap.Logger, scope string) {
	if !n.scopeTold.Swap(true) {
		logger.Error("scope has a placeholder that is not known here, so all requests go to the fallback: is it spelt right?",
			zap.String("scope", scope))
	}
}

// body counts a request with a body, and warns where none has had a prompt for
// a minute.
func (n *notices) body(logger *zap.Logger, cause string, clock func() time.Time) {
	if cause == keyed {
		if n.since.Load() != 0 { // most requests come here, and write nothing
			n.since.Store(0)
			n.unkeyed.Store(0)
		}
		return
	}
	switch cause {
	case causeMethod, causeUpgrade, causeEmpty, causeUnreadable:
		return // never meant to have one
	}
	now := clock().UnixNano()
	since := n.since.Load()
	if since == 0 {
		since = now
		n.since.Store(now)
	}
	if n.unkeyed.Add(1) < unkeyedLeast || now-since < int64(unkeyedTime) || n.told.Swap(true) {
		return
	}
	logger.Warn("no request body has held a prompt for a minute, so all requests go to the fallback: "+
		"are these requests to an LLM server, and does the policy see them as JSON, not compressed?",
		zap.String("last_cause", cause))
}

// reporting follows what an upstream's successful responses say.
type reporting struct {
	responses, orcaAsked                   atomic.Int64
	reports, silence, orcaAnswer, orcaNone atomic.Bool // seen and told
}

// cached notes whether a response reported cached tokens.
func (n *reporting) cached(logger *zap.Logger, upstream string, reported bool) {
	if reported {
		if !n.reports.Load() && !n.reports.Swap(true) {
			logger.Info("upstream reports cached tokens", zap.String("upstream", upstream))
		}
		return
	}
	if n.responses.Add(1) == noticeAfter && !n.reports.Load() && !n.silence.Swap(true) {
		logger.Warn("upstream never reports cached tokens, so what it holds can't be checked: start vLLM with --enable-prompt-tokens-details, "+
			"SGLang with --enable-cache-report, let clients that stream ask with stream_options.include_usage, or set replica_cache",
			zap.String("upstream", upstream))
	}
}

// orca notes whether a response that should hold a load report does.
func (n *reporting) orca(logger *zap.Logger, upstream string, answered bool) {
	if answered {
		n.orcaAnswer.Store(true)
		return
	}
	if n.orcaAsked.Add(1) == noticeAfter && !n.orcaAnswer.Load() && !n.orcaNone.Swap(true) {
		logger.Warn("upstream was asked for load reports (orca) and never sent one: vLLM does for answers that are not streamed, other engines may not",
			zap.String("upstream", upstream))
	}
}
