package selector

import (
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/url"
	"reflect"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/caddyserver/caddy/v2"

	"github.com/prefix-affinity/caddy/prefixhash"
	"github.com/prefix-affinity/caddy/selector/affinity"
)

func init() {
	caddy.RegisterModule(adminAPI{})
}

// adminAPI serves the state of all prefix_affinity policies on Caddy's admin
// endpoint:
//
//	GET  /prefix_affinity/upstreams            what is known of each upstream
//	POST /prefix_affinity/lookup?path=<path>   who holds the prompt of the posted request body,
//	                                           by site where there are several policies
//	POST /prefix_affinity/drain?upstream=<address>[&force=true]
//	POST /prefix_affinity/undrain?upstream=<address>
//	POST /prefix_affinity/forget?upstream=<address>
//
// What is forgotten is what an upstream holds, and its speed. The size of its cache
// stays.
//
// A lookup where the policy has a scope takes the tenant from the Authorization
// header: Caddy logs the requests of its admin endpoint, but not what stands
// there.
//
// Unknown parameters are refused. Answers are JSON. They hold counts and addresses, never text of a prompt, a
// key or a hash.
type adminAPI struct{}

// CaddyModule returns the Caddy module information.
func (adminAPI) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{
		ID:  "admin.api.prefix_affinity",
		New: func() caddy.Module { return new(adminAPI) },
	}
}

// Routes returns the routes of the API.
func (adminAPI) Routes() []caddy.AdminRoute {
	route := func(name, method string, handle func(*http.Request) (any, error), parameters ...string) caddy.AdminRoute {
		return caddy.AdminRoute{
			Pattern: "/prefix_affinity/" + name,
			Handler: caddy.AdminHandlerFunc(func(w http.ResponseWriter, r *http.Request) error {
				if r.Method != method {
					w.Header().Set("Allow", method)
					return apiError(http.StatusMethodNotAllowed, "method '%s' not allowed: use %s", r.Method, method)
				}
				if err := checkQuery(r.URL.RawQuery, parameters); err != nil {
					return err
				}
				answer, err := handle(r)
				if err != nil {
					return err
				}
				w.Header().Set("Content-Type", "application/json")
				return json.NewEncoder(w).Encode(answer)
			}),
		}
	}
	return []caddy.AdminRoute{
		route("upstreams", http.MethodGet, listUpstreams),
		route("lookup", http.MethodPost, lookup, "path"),
		route("drain", http.MethodPost, drain, "upstream", "force"),
		route("undrain", http.MethodPost, undrain, "upstream"),
		route("forget", http.MethodPost, forget, "upstream"),
	}
}

// What to do, in the words of a request; a command has others.
const (
	useForce = "add &force=true"
	useList  = "use an address of GET /prefix_affinity/upstreams"
	useQuery = "should be one, ?upstream=<address>"
)

// checkQuery fails where a query has a parameter that its route doesn't know: one
// that is misspelt would be passed over without a word.
func checkQuery(query string, parameters []string) error {
	given, err := url.ParseQuery(query)
	if err != nil {
		return apiError(http.StatusBadRequest, "invalid query '%s': %v", query, err)
	}
	for name := range given {
		switch {
		case slices.Contains(parameters, name):
		case len(parameters) == 0:
			return apiError(http.StatusBadRequest, "unknown parameter '%s': there are none here", name)
		default:
			return apiError(http.StatusBadRequest, "unknown parameter '%s': the parameters are %s", name, strings.Join(parameters, ", "))
		}
	}
	return nil
}

func apiError(status int, format string, args ...any) error {
	return caddy.APIError{HTTPStatus: status, Err: fmt.Errorf(format, args...)}
}

// live are the policies of the configurations that are loaded.
var live = struct {
	sync.Mutex
	policies map[*Policy]struct{}
}{policies: make(map[*Policy]struct{})}

func (p *Policy) enlist() {
	live.Lock()
	defer live.Unlock()
	live.policies[p] = struct{}{}
}

func (p *Policy) retire() {
	live.Lock()
	defer live.Unlock()
	delete(live.policies, p)
}

func livePolicies() []*Policy {
	live.Lock()
	defer live.Unlock()
	return slices.Collect(maps.Keys(live.policies))
}

// upstreamState is what the API tells of an upstream.
type upstreamState struct {
	Address string `json:"address"`

	// Since Caddy started, or forgot an upstream, as in the metrics.
	CountedSince         time.Time        `json:"counted_since"`
	Requests             int64            `json:"requests"`
	Reasons              map[string]int64 `json:"reasons"`
	PromptTokens         float64          `json:"prompt_tokens"`
	MatchedTokens        float64          `json:"matched_tokens"`
	CachedTokens         float64          `json:"cached_tokens"`
	ReportedPromptTokens float64          `json:"reported_prompt_tokens"`
	TTFTHit              ttftState        `json:"ttft_hit"`  // a match was followed
	TTFTMiss             ttftState        `json:"ttft_miss"` // none was

	// Now.
	PendingRequests      int     `json:"pending_requests"`
	WaitingRequests      int     `json:"waiting_requests"`
	PendingPrefillTokens float64 `json:"pending_prefill_tokens"`
	PromptTokensInFlight float64 `json:"prompt_tokens_in_flight"`
	QueueDepth           float64 `json:"queue_depth"`
	IndexBlocks          int     `json:"index_blocks"`

	// Left out while not known.
	CacheCapacityTokens    int     `json:"cache_capacity_tokens,omitempty"`
	PrefillTokensPerSecond float64 `json:"prefill_tokens_per_second,omitempty"`
	PrefillSpeedIsOwn      bool    `json:"prefill_speed_is_own"` // else it is mostly what the others have

	CachedTokenReports float64 `json:"cached_token_reports"`
	ContradictedRatio  float64 `json:"contradicted_ratio"`
	Generation         uint32  `json:"generation"`

	Drain  *drainState  `json:"drain,omitempty"`
	Engine *engineState `json:"engine,omitempty"` // where it is polled
}

// ttftState tells of the times to first output of streamed responses. Means of
// an interval follow from two of them.
type ttftState struct {
	Count      uint64  `json:"count"`
	SumSeconds float64 `json:"sum_seconds"`
}

// engineState is what an engine's own metrics said last.
type engineState struct {
	Name     string  `json:"name"`
	Waiting  float64 `json:"waiting"`
	Running  float64 `json:"running"`
	KVUsage  float64 `json:"kv_usage"`
	HitRatio float64 `json:"hit_ratio"` // since its start, all requests
}

type drainState struct {
	By    string    `json:"by"` // config or api
	Since time.Time `json:"since"`
	Sites []string  `json:"sites,omitempty"` // of the configuration; left out: in all that have the upstream

	some bool // by the configuration, and not in all sites
}

func listUpstreams(*http.Request) (any, error) {
	list := []upstreamState{}
	fleet := currentFleet()
	if fleet == nil {
		return list, nil
	}
	now := time.Now()
	unsent.watch(now)
	for _, s := range fleet.Snapshot(now) {
		u := upstreamState{
			Address:              s.Address,
			PendingRequests:      s.InFlight,
			WaitingRequests:      s.Waiting,
			PendingPrefillTokens: s.PendingPrefillTokens,
			PromptTokensInFlight: s.PromptTokens,
			QueueDepth:           s.QueueDepth,
			IndexBlocks:          s.Blocks,
			CacheCapacityTokens:  s.CapacityTokens,
			CachedTokenReports:   s.Reports,
			ContradictedRatio:    s.Contradicted,
			Generation:           s.Generation,
			Drain:                drainOf(s.Address),
		}
		u.count(metrics.of(s.Address))
		if s.SpeedMeasurements > 0 {
			u.PrefillTokensPerSecond, u.PrefillSpeedIsOwn = s.TokensPerSecond, s.SpeedIsOwn
		}
		list = append(list, u)
	}
	return list, nil
}

// count takes the figures of an upstream's series over.
func (u *upstreamState) count(s *upstreamSeries) {
	u.CountedSince = s.since
	u.Reasons = make(map[string]int64, len(reasons))
	for _, reason := range reasons {
		n := int64(counted(s.decisions[reason]))
		u.Reasons[reason.String()] = n
		u.Requests += n
	}
	u.PromptTokens, u.MatchedTokens = counted(s.promptTokens), counted(s.matchedTokens)
	u.CachedTokens, u.ReportedPromptTokens = counted(s.cachedTokens), counted(s.reportedTokens)
	u.TTFTHit, u.TTFTMiss = timed(s.ttftHit), timed(s.ttftMiss)
	if m := s.engine.Load(); m != nil {
		u.Engine = &engineState{Name: m.Engine, Waiting: max(m.QueueDepth, 0), Running: max(m.Running, 0), KVUsage: max(m.KVUsage, 0)}
		if m.PrefixQueries > 0 {
			u.Engine.HitRatio = max(m.PrefixHits, 0) / m.PrefixQueries
		}
	}
}

// drainOf tells how an upstream is drained, nil where it is not. The admin API
// drains it in all sites, which counts for more than what some are configured to do.
func drainOf(upstream string) *drainState {
	var config *drainState
	var sites []string
	all := true
	for _, p := range livePolicies() {
		if since, ok := p.drains.of(upstream); ok {
			config = &drainState{By: "config", Since: since}
			sites = append(sites, p.sites()...)
		} else if p.routesTo(upstream) {
			all = false
		}
	}
	if config != nil && all {
		return config
	}
	if api := currentDrains(); api != nil {
		if since, ok := api.of(upstream); ok {
			return &drainState{By: "api", Since: since}
		}
	}
	if config != nil {
		slices.Sort(sites)
		config.Sites, config.some = sites, true
	}
	return config
}

// everywhere reports whether the configuration drains the upstream in all sites.
func (d *drainState) everywhere() bool { return d != nil && d.By == "config" && !d.some }

// lookupAnswer tells what one policy would do, or several that would do the same.
type lookupAnswer struct {
	Sites        []string `json:"sites,omitempty"` // where in the configuration
	BlockSize    int      `json:"block_size"`
	Unkeyed      string   `json:"unkeyed,omitempty"` // why the body has no key
	PromptTokens int      `json:"prompt_tokens"`
	Blocks       int      `json:"blocks"`

	// What would be chosen now, if all these upstreams are available. Left out where
	// no request has had the choice between them.
	Upstream string `json:"upstream,omitempty"`
	Reason   string `json:"reason,omitempty"`

	Upstreams []lookupUpstream `json:"upstreams"`
	Parts     []lookupPart     `json:"parts,omitempty"`
}

// lookupPart is a part of the prompt as it was understood, in bytes of the prompt.
type lookupPart struct {
	Kind   string `json:"kind"`
	Role   string `json:"role,omitempty"`
	Start  int    `json:"start"`
	End    int    `json:"end"`
	Blocks int    `json:"blocks"`
}

type lookupUpstream struct {
	Address       string `json:"address"`
	MatchedTokens int    `json:"matched_tokens"`
}

func lookup(r *http.Request) (any, error) {
	path := r.URL.Query().Get("path")
	if path == "" {
		path = "/v1/chat/completions"
	}
	if !strings.HasPrefix(path, "/") {
		return nil, apiError(http.StatusBadRequest, "invalid path '%s': should begin with a slash, as in a request", path)
	}
	scope := r.Header.Get("Authorization")
	policies := livePolicies()
	var most int64
	for _, p := range policies {
		most = max(most, p.config.MaxBody)
	}
	body, err := io.ReadAll(io.LimitReader(r.Body, most+1))
	if err != nil {
		return nil, apiError(http.StatusBadRequest, "reading body: %v", err)
	}
	answers := []lookupAnswer{}
	for _, p := range policies {
		answer := p.lookup(path, scope, body)
		same := slices.IndexFunc(answers, func(other lookupAnswer) bool {
			answer.Sites = other.Sites
			return reflect.DeepEqual(answer, other)
		})
		if same < 0 {
			same = len(answers)
			answer.Sites = nil
			answers = append(answers, answer)
		}
		answers[same].Sites = append(answers[same].Sites, p.sites()...)
	}
	for _, answer := range answers {
		slices.Sort(answer.Sites)
	}
	slices.SortFunc(answers, func(a, b lookupAnswer) int {
		return cmp.Or(slices.Compare(a.Sites, b.Sites), a.BlockSize-b.BlockSize)
	})
	return answers, nil
}

func (p *Policy) lookup(path, scope string, body []byte) lookupAnswer {
	answer := lookupAnswer{BlockSize: p.config.BlockSize, Upstreams: []lookupUpstream{}}
	whole := int64(len(body)) <= p.config.MaxBody
	if !whole {
		body = body[:p.config.MaxBody]
	}
	var key prefixhash.Key
	if cause := p.hasher().Sum(&key, path, body, whole, scope); cause != prefixhash.Keyed {
		answer.Unkeyed = cause.String()
		return answer
	}
	answer.Blocks, answer.PromptTokens = len(key.Blocks), key.Bytes/affinity.BytesPerToken
	parts, _ := p.hasher().Explain(path, body, whole, scope) // of a body that is known to have a key
	for _, part := range parts {
		answer.Parts = append(answer.Parts, lookupPart{part.Kind, part.Role, part.Start, part.End, len(part.Blocks)})
	}
	now := time.Now()
	var candidates []affinity.Candidate
	for _, upstream := range p.upstreams() {
		answer.Upstreams = append(answer.Upstreams, lookupUpstream{Address: upstream})
		if replica := p.learned.fleet.Find(upstream); replica != nil {
			candidates = append(candidates, affinity.Candidate{Replica: replica, State: p.drainState(upstream, now)})
		}
	}
	if len(candidates) < len(answer.Upstreams) {
		return answer // no request has had the choice between them so far
	}
	matched := make([]int, len(candidates))
	choice := p.learned.index.Lookup(now, &key, candidates, p.currentRule(), matched)
	for i := range matched {
		answer.Upstreams[i].MatchedTokens = matched[i]
	}
	if choice.Candidate >= 0 {
		answer.Upstream, answer.Reason = answer.Upstreams[choice.Candidate].Address, choice.Reason.String()
	}
	return answer
}

// named returns the upstream that a request speaks of.
func named(r *http.Request) (string, *affinity.Replica, error) {
	given := r.URL.Query()["upstream"]
	upstream := strings.Join(given, " ")
	if len(given) != 1 || upstream == "" {
		return "", nil, apiError(http.StatusBadRequest, "invalid upstream '%s': %s", upstream, useQuery)
	}
	fleet := currentFleet()
	if fleet == nil {
		return "", nil, apiError(http.StatusNotFound, "no prefix_affinity policy is configured")
	}
	replica := fleet.Find(upstream)
	if replica == nil && !configured(upstream) {
		return "", nil, apiError(http.StatusNotFound, "unknown upstream '%s': %s", upstream, useList)
	}
	return upstream, replica, nil
}

// configured reports whether any policy's handler names the upstream.
func configured(upstream string) bool {
	for _, p := range livePolicies() {
		if slices.Contains(p.observer.dials(), upstream) {
			return true
		}
	}
	return false
}

func drain(r *http.Request) (any, error) {
	upstream, _, err := named(r)
	if err != nil {
		return nil, err
	}
	if drainOf(upstream).everywhere() {
		return nil, apiError(http.StatusConflict, "upstream '%s' is drained by the configuration already", upstream)
	}
	force := r.URL.Query().Get("force")
	if force != "" && force != "true" && force != "false" {
		return nil, apiError(http.StatusBadRequest, "force is '%s': true or false", force)
	}
	if force != "true" {
		for _, p := range livePolicies() {
			if p.lastOne(upstream) {
				return nil, apiError(http.StatusConflict, "upstream '%s' is the last one that is not drained%s: %s to drain it all the same", upstream, in(p.sites()), useForce)
			}
		}
	}
	currentDrains().set(upstream, time.Now())
	return drainOf(upstream), nil
}

// in names sites, where there is one of several.
func in(sites []string) string {
	if len(sites) == 0 || len(livePolicies()) == 1 {
		return ""
	}
	return " " + placed(sites)
}

// placed is where sites are, in words: some have no name but their listener's.
func placed(sites []string) string {
	text := strings.Join(sites, ", ")
	if strings.HasPrefix(text, "on ") {
		return text
	}
	return "in " + text
}

// upstreams returns the addresses of the policy's upstreams. Those that are found
// dynamically are known from its last request.
func (p *Policy) upstreams() []string {
	all := p.observer.dials()
	if last := p.last.Load(); last != nil && (p.observer == nil || p.observer.handler.DynamicUpstreams != nil) {
		for _, up := range last.pool {
			if !slices.Contains(all, up.String()) {
				all = append(all, up.String())
			}
		}
	}
	return all
}

// lastOne reports whether upstream is the only one of the policy's upstreams
// that gets new conversations.
func (p *Policy) lastOne(upstream string) bool {
	all := p.upstreams()
	return slices.Contains(all, upstream) && !slices.ContainsFunc(all, func(other string) bool {
		_, drains := p.draining(other)
		return other != upstream && !drains
	})
}

func undrain(r *http.Request) (any, error) {
	upstream, _, err := named(r)
	if err != nil {
		return nil, err
	}
	if d := drainOf(upstream); d != nil && d.By == "config" {
		return nil, apiError(http.StatusConflict, "upstream '%s' is drained by the configuration: take it out of the drain option", upstream)
	}
	if !currentDrains().end(upstream) {
		return nil, apiError(http.StatusConflict, "upstream '%s' is not drained", upstream)
	}
	return struct{}{}, nil
}

func forget(r *http.Request) (any, error) {
	_, replica, err := named(r)
	if err != nil {
		return nil, err
	}
	if replica != nil {
		replica.Forget()
	}
	return struct{}{}, nil
}

// Interface guards
var (
	_ caddy.Module      = (*adminAPI)(nil)
	_ caddy.AdminRouter = (*adminAPI)(nil)
)
