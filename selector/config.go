package selector

import (
	"encoding/json"
	"fmt"
	"regexp"
	"strings"
	"time"

	"github.com/caddyserver/caddy/v2"
	"golang.org/x/net/http/httpguts"
)

// Defaults of the options, the only place where they are set.
const (
	DefaultBlockSize = 256     // bytes: some 64 tokens, four blocks of vLLM
	DefaultMaxBody   = 8 << 20 // bytes: the text of 2M tokens, or a dozen photos
	DefaultMinMatch  = 64      // tokens: the least that saves a measurable prefill
	DefaultIndexSize = 2 << 20 // blocks: 11 times what 8 replicas of 1M tokens need at most

	DefaultPollPath     = "/metrics"
	DefaultDrainTimeout = caddy.Duration(30 * time.Minute) // most conversations pause for less
	DefaultSnapshot     = caddy.Duration(time.Minute)
)

// Bounds of the options: outside of them a value is a mistake.
const (
	minBlockSize = 64
	maxBlockSize = 64 << 10
	minMaxBody   = 4 << 10
	maxMaxBody   = 1 << 30
	maxMinMatch  = 1 << 20 // few contexts are longer
	minCache     = 256     // smaller ones count as this
	maxCache     = 1 << 30
	minIndexSize = 1 << 10
	maxIndexSize = 1 << 30
	minPoll      = caddy.Duration(100 * time.Millisecond)
	maxPoll      = caddy.Duration(time.Hour) // of no use any more
	minSnapshot  = caddy.Duration(time.Second)
	maxSnapshot  = caddy.Duration(24 * time.Hour) // an older one is not read
)

// Config holds the options of the policy. All are optional.
type Config struct {
	// The policy that chooses for requests without a prompt, for prompts that no
	// upstream holds and for those whose holder is too busy. It chooses among
	// the upstreams that are available and have not failed this request.
	//
	// Defaults to `least_conn`, counted in work: such requests go to the
	// upstream with the least to do, which is the one with the fewest requests
	// in flight where all requests are alike.
	FallbackRaw json.RawMessage `json:"fallback,omitempty" caddy:"namespace=http.reverse_proxy.selection_policies inline_key=policy"`

	// How many bytes of a prompt make a block, the unit in which prompts are
	// compared, within the first 16 KiB; beyond them blocks are four times as
	// long. Smaller blocks find slightly longer matches and take more memory.
	// Default is 256.
	BlockSize int `json:"block_size,omitempty"`

	// How many bytes of a request body are read to find its prompt. A longer
	// body is known by its head; its rest is streamed, so that such a request
	// can't be tried on another upstream once part of the rest was sent.
	// Default is 8 MiB.
	MaxBody int64 `json:"max_body,omitempty"`

	// A match of fewer tokens is not worth following, 1 to 1,048,576. Default is 64.
	MinMatch int `json:"min_match,omitempty"`

	// How much a token that must be computed anew weighs against a token that
	// waits in a queue: higher values follow the cache longer into a queue.
	// By default it adapts to the load, from 1 on an idle fleet to 10.
	AffinityWeight float64 `json:"affinity_weight,omitempty"`

	// How many tokens the KV cache of one replica holds. By default it is
	// learned from the cached tokens that the engines report; set it (within
	// some 10 %) where they report none, 256 to 1,073,741,824. It counts in all
	// policies that have the upstream, instead of what poll finds: those that set it
	// should agree, which is checked unless upstreams are dynamic. Where it is taken
	// away it counts for another minute.
	ReplicaCache int `json:"replica_cache,omitempty"`

	// How often to read the engines' own metrics in Prometheus format: their
	// queues (also of requests that this gateway did not send), the size of their
	// KV cache, and whether they have restarted. vLLM, SGLang, llama.cpp,
	// TensorRT-LLM, Triton, TGI and LMDeploy are understood; an upstream whose page
	// is none of theirs is warned of once. One that is down or loading goes on being
	// asked; one that answers that it has none, and never had, is asked every 10
	// minutes. Off by default.
	Poll caddy.Duration `json:"poll,omitempty"`

	// Where the metrics are on an upstream. Default is `/metrics`.
	PollPath string `json:"poll_path,omitempty"`

	// Ask the engines for a load report in the response headers (ORCA), in the
	// format `text` or `json`. vLLM and Triton with TensorRT-LLM send one. The
	// report is taken out of the response unless the client asked for it too.
	// Off by default: it makes vLLM collect its metrics for every request.
	ORCA string `json:"orca,omitempty"`

	// A response header in which an engine or a gateway before it says how many
	// tokens of the prompt it found in its cache.
	CachedTokensHeader string `json:"cached_tokens_header,omitempty"`

	// A response header in which an engine or a gateway before it says how many
	// requests wait in its queue.
	QueueDepthHeader string `json:"queue_depth_header,omitempty"`

	// Request headers that name a session, in the order in which they are
	// looked at. Requests of one session stay on one upstream where their
	// prompts don't say where to go, as long as the load allows. The default is
	// a list of headers that coding agents send; a body's `prompt_cache_key`
	// counts where none of them is present.
	SessionHeaders []string `json:"session_header,omitempty"`

	// Tenants that must not share: requests for which this text, usually a
	// placeholder such as `{http.request.header.Authorization}`, differs never
	// match each other's prompts. Where it has a placeholder that is not known,
	// requests are not compared at all and go to the fallback.
	Scope string `json:"scope,omitempty"`

	// Volatile text that is left out when prompts are compared, as regular
	// expressions (RE2): up to 256 times in a prompt, and up to 1 KiB each time. The
	// request itself is not changed.
	Ignore []string `json:"ignore,omitempty"`

	// A secret from which the hashes start. Several Caddys that serve the same
	// upstreams agree better where it is the same. May be a placeholder such as
	// `{env.SEED}`, or have some, all of which must have a value. By default it is
	// random, made once and kept in Caddy's data directory.
	Seed string `json:"seed,omitempty"`

	// Share what is learned, and the load, with the other Caddys before the same
	// upstreams, so that they act as one. Needs a seed. Off by default.
	Sync *Sync `json:"sync,omitempty"`

	// How many blocks are remembered, over all upstreams: the memory bound. One
	// block takes some 25 bytes, up to 62 where prompts are one block long.
	// Where policies differ the largest counts; a lower one acts at the reload.
	// Default is 2,097,152.
	IndexSize int `json:"index_size,omitempty"`

	// Upstreams, by address as host:port, that get no new conversations: conversations
	// that they hold stay until they end or drain_timeout has passed. Where no other
	// upstream is available they get everything all the same. For draining without a
	// change of the configuration use the admin API.
	Drain []string `json:"drain,omitempty"`

	// How long conversations may stay on an upstream that drains. Default is 30m.
	DrainTimeout caddy.Duration `json:"drain_timeout,omitempty"`

	// How often what was learned is written to a file in Caddy's data directory,
	// so that it survives a restart of Caddy, besides at its shutdown: which
	// upstream holds which blocks (as hashes), capacities, speeds, sessions and the
	// drains made through the admin API. It is read in the background at the
	// start, unless it is older than 24 hours. 12 to 24 bytes a block. Nothing is
	// written before a request has come, nor by a second Caddy that uses the same
	// directory. There is one for all policies of a configuration: those that say an
	// interval should agree. A negative value, `off` in a Caddyfile, neither reads nor
	// writes it, and should be in all or none. Default is what another policy says,
	// else 1m.
	Snapshot caddy.Duration `json:"snapshot,omitempty"`

	// Decide and record, but let the fallback choose: for trying the policy out.
	// The metric shadow_matched_tokens_total has what it would have found cached,
	// matched_tokens_total what the fallback found. Off by default.
	Shadow bool `json:"shadow,omitempty"`

	// Tell in the response header X-Prefix-Affinity which upstream was chosen
	// and why. Off by default.
	Explain bool `json:"explain,omitempty"`
}

// defaultSessionHeaders are the headers in which known clients name their
// session: Claude Code; Codex; older versions of Codex (Caddy drops headers with
// an underscore unless expected_underscore_headers names them); OpenCode and
// vLLM's router; OpenCode.
var defaultSessionHeaders = []string{
	"X-Claude-Code-Session-Id",
	"Session-Id",
	"Session_id",
	"X-Session-Id",
	"X-Session-Affinity",
	"X-Opencode-Session",
}

// withDefaults returns c with the default of every option that was not set.
func (c Config) withDefaults() Config {
	if c.BlockSize == 0 {
		c.BlockSize = DefaultBlockSize
	}
	if c.MaxBody == 0 {
		c.MaxBody = DefaultMaxBody
	}
	if c.MinMatch == 0 {
		c.MinMatch = DefaultMinMatch
	}
	if c.IndexSize == 0 {
		c.IndexSize = DefaultIndexSize
	}
	if len(c.SessionHeaders) == 0 {
		c.SessionHeaders = defaultSessionHeaders
	}
	if c.PollPath == "" {
		c.PollPath = DefaultPollPath
	}
	if c.DrainTimeout == 0 {
		c.DrainTimeout = DefaultDrainTimeout
	}
	return c
}

// Validate reports the first option whose value can't work.
func (c Config) Validate() error {
	c = c.withDefaults()
	switch {
	case c.BlockSize < minBlockSize || c.BlockSize > maxBlockSize:
		return fmt.Errorf("invalid block_size '%d': should be from %d to %d bytes", c.BlockSize, minBlockSize, maxBlockSize)
	case c.MaxBody < minMaxBody || c.MaxBody > maxMaxBody:
		return fmt.Errorf("invalid max_body '%d': should be from %d to %d bytes", c.MaxBody, minMaxBody, maxMaxBody)
	case c.MinMatch < 1 || c.MinMatch > maxMinMatch:
		return fmt.Errorf("invalid min_match '%d': should be from 1 to %d tokens", c.MinMatch, maxMinMatch)
	case c.AffinityWeight != 0 && !(c.AffinityWeight >= 1 && c.AffinityWeight <= 100):
		return fmt.Errorf("invalid affinity_weight '%g': should be from 1 to 100, or left out", c.AffinityWeight)
	case c.ReplicaCache != 0 && (c.ReplicaCache < minCache || c.ReplicaCache > maxCache):
		return fmt.Errorf("invalid replica_cache '%d': should be from %d to %d tokens, or auto", c.ReplicaCache, minCache, maxCache)
	case c.ORCA != "" && c.ORCA != "text" && c.ORCA != "json":
		return fmt.Errorf("invalid orca '%s': should be text or json", c.ORCA)
	case c.Poll != 0 && (c.Poll < minPoll || c.Poll > maxPoll):
		return fmt.Errorf("invalid poll '%s': should be from %s to %s", time.Duration(c.Poll), time.Duration(minPoll), time.Duration(maxPoll))
	case !strings.HasPrefix(c.PollPath, "/"):
		return fmt.Errorf("invalid poll_path '%s': should begin with a slash", c.PollPath)
	case c.DrainTimeout < 0:
		return fmt.Errorf("invalid drain_timeout '%s': should be positive", time.Duration(c.DrainTimeout))
	case c.Snapshot != 0 && c.Snapshot != -1 && (c.Snapshot < minSnapshot || c.Snapshot > maxSnapshot):
		return fmt.Errorf("invalid snapshot '%s': should be from %s to %s, or off", time.Duration(c.Snapshot), time.Duration(minSnapshot), time.Duration(maxSnapshot))
	case c.IndexSize < minIndexSize || c.IndexSize > maxIndexSize:
		return fmt.Errorf("invalid index_size '%d': should be from %d to %d blocks", c.IndexSize, minIndexSize, maxIndexSize)
	}
	if err := c.Sync.validate(); err != nil {
		return err
	}
	if err := closed("seed", c.Seed); err != nil {
		return err
	}
	if c.Scope != "" && !ofRequest(c.Scope) {
		return fmt.Errorf("invalid scope '%s': it is the same for every request; should be a placeholder such as {http.request.header.Authorization}", c.Scope)
	}
	if !balanced(c.Scope) { // Caddy takes what is not closed for plain text
		return fmt.Errorf("invalid scope '%s': a brace has no counterpart, so that all tenants would share; should be a placeholder such as {http.request.header.Authorization}", c.Scope)
	}
	for option, names := range map[string][]string{
		"cached_tokens_header": given(c.CachedTokensHeader),
		"queue_depth_header":   given(c.QueueDepthHeader),
		"session_header":       c.SessionHeaders,
	} {
		for _, name := range names {
			if !httpguts.ValidHeaderFieldName(name) {
				return fmt.Errorf("invalid %s '%s': should be the name of a header", option, name)
			}
		}
	}
	for _, upstream := range c.Drain {
		if !dialable(upstream) {
			return fmt.Errorf("invalid drain '%s': should be the address of an upstream, as host:port", upstream)
		}
	}
	for _, expr := range c.Ignore {
		if re, err := regexp.Compile(expr); err != nil {
			return fmt.Errorf("invalid ignore '%s': %v", expr, err)
		} else if re.MatchString("") {
			return fmt.Errorf("invalid ignore '%s': it matches the empty text, so it would leave out nothing", expr)
		}
	}
	return nil
}

// given returns the value of an option, unless it is left out.
func given(value string) []string {
	if value == "" {
		return nil
	}
	return []string{value}
}

// dialable reports whether an upstream can have an address: what is written as a
// placeholder can.
func dialable(address string) bool {
	if strings.Contains(address, "{") {
		return true
	}
	parsed, err := caddy.ParseNetworkAddress(address)
	if err != nil || strings.Contains(address, "://") {
		return false
	}
	return parsed.IsUnixNetwork() || parsed.IsFdNetwork() || parsed.StartPort > 0 && parsed.PortRangeSize() == 1
}

// balanced reports whether each brace of a text has its counterpart.
func balanced(text string) bool {
	open := 0
	for _, r := range text {
		switch r {
		case '{':
			open++
		case '}':
			open--
		}
		if open < 0 {
			return false
		}
	}
	return open == 0
}

// closed fails where an option has the beginning of a placeholder that a process
// can fill, and not its end: Caddy takes that for plain text. Any other brace may be
// part of a secret. As the value may be one, the error does not tell it.
func closed(option, value string) error {
	for _, begun := range opened.FindAllStringSubmatch(value, -1) {
		if begun[2] == "" {
			return fmt.Errorf("invalid %s: the brace of '%s' is not closed; should be a placeholder such as {env.NAME}", option, begun[1])
		}
	}
	return nil
}

var opened = regexp.MustCompile(`(\{(?:env|file|system)\.)[^{}]*(\}?)`)

// ignored joins the ignore expressions into one, nil where there is none.
func (c Config) ignored() (*regexp.Regexp, error) {
	if len(c.Ignore) == 0 {
		return nil, nil
	}
	return regexp.Compile("(?:" + strings.Join(c.Ignore, ")|(?:") + ")")
}

// fill returns the value of an option with those of its placeholders, all of
// which must have one: a seed or a password that lacks a part would be wrong
// without a word. As it may be a secret, errors tell no more of it than the
// placeholder.
func fill(option, value string) (string, error) {
	return caddy.NewReplacer().ReplaceFunc(value, func(name string, is any) (any, error) {
		if caddy.ToString(is) == "" {
			return nil, fmt.Errorf("placeholder '{%s}' of %s has no value: set what it refers to", name, option)
		}
		return is, nil
	})
}

// ofRequest reports whether a text refers to anything that requests can differ in.
func ofRequest(text string) bool {
	for _, name := range placeholders.FindAllStringSubmatch(text, -1) {
		if !strings.HasPrefix(name[1], "env.") && !strings.HasPrefix(name[1], "file.") && !strings.HasPrefix(name[1], "system.") {
			return true
		}
	}
	return strings.Count(text, "{") != strings.Count(text, "}") // another mistake
}

var placeholders = regexp.MustCompile(`\{([^{}]*)\}`)
