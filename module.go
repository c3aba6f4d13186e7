// Package prefixaffinity adds the load-balancing policy prefix_affinity to
// Caddy's reverse_proxy. It sends each LLM request to the replica whose KV
// cache already holds the beginning of its prompt.
package prefixaffinity

import (
	"net/http"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"

	prefixcaddyfile "github.com/prefix-affinity/caddy/caddyfile"
	"github.com/prefix-affinity/caddy/selector"
)

func init() {
	caddy.RegisterModule(new(PrefixAffinity))
}

// PrefixAffinity is a policy that selects the upstream that holds the longest
// cached beginning of the request's prompt, as long as its queue allows. It is
// made for replicas of one LLM server (vLLM, SGLang, llama.cpp, TensorRT-LLM,
// Ollama and others): a replica that has seen a prompt's beginning skips most
// of its prefill.
//
// The policy reads the request's JSON body, hashes the prompt into a chain of
// blocks, and remembers which upstream was sent which chain. What the upstreams
// report about their caches corrects it. Everything learned outlives config
// reloads and restarts of Caddy. A request that has no prompt, or a prompt that no upstream holds, or
// whose holder is unhealthy or too busy, is chosen by the fallback policy.
//
// Placeholder | Description
// ------------|-------------
// `{http.reverse_proxy.prefix_affinity.reason}` | Why the upstream was chosen: `affinity`, `session`, `cold`, `overflow`, `unhealthy`, `gone` or `no_key`
// `{http.reverse_proxy.prefix_affinity.upstream}` | The dial address of the chosen upstream
// `{http.reverse_proxy.prefix_affinity.prompt_tokens}` | The estimated prompt tokens of the request
// `{http.reverse_proxy.prefix_affinity.matched_tokens}` | How many of them the chosen upstream is believed to hold
// `{http.reverse_proxy.prefix_affinity.holder}` | The upstream with the longest match, chosen or not
// `{http.reverse_proxy.prefix_affinity.attempts}` | How often the request was sent so far
type PrefixAffinity struct {
	selector.Config

	policy *selector.Policy
}

// CaddyModule returns the Caddy module information.
func (*PrefixAffinity) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{
		ID:  "http.reverse_proxy.selection_policies.prefix_affinity",
		New: func() caddy.Module { return new(PrefixAffinity) },
	}
}

// Provision sets up the module.
func (p *PrefixAffinity) Provision(ctx caddy.Context) (err error) {
	p.policy, err = selector.Provision(ctx, &p.Config)
	return err
}

// Validate ensures that p's configuration is valid.
func (p *PrefixAffinity) Validate() error { return p.Config.Validate() }

// Cleanup gives back what Provision took. What the policy has learned stays
// while another config uses it.
func (p *PrefixAffinity) Cleanup() error { return p.policy.Cleanup() }

// Select returns an available host, if any.
func (p *PrefixAffinity) Select(pool reverseproxy.UpstreamPool, r *http.Request, w http.ResponseWriter) *reverseproxy.Upstream {
	return p.policy.Select(pool, r, w)
}

// UnmarshalCaddyfile sets up the module from Caddyfile tokens. Syntax:
//
//	lb_policy prefix_affinity {
//		fallback             <policy> [<args...>]
//		block_size           <size>
//		max_body             <size>
//		min_match            <tokens>
//		affinity_weight      <number>|auto
//		replica_cache        <tokens>|auto
//		poll                 <interval> [<path>]
//		orca                 [text|json]
//		cached_tokens_header <name>
//		queue_depth_header   <name>
//		session_header       <names...>
//		scope                <placeholder>
//		ignore               <regexp>
//		seed                 <secret>
//		sync                 redis <address...> {
//			username      <name>
//			password      <secret>
//			db            <number>
//			tls
//			stream_prefix <text>
//		}
//		index_size           <blocks>
//		drain                <upstream...>
//		drain_timeout        <duration>
//		snapshot             <interval>|off
//		shadow
//		explain
//	}
//
// All options are optional; the README's table explains them.
func (p *PrefixAffinity) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	return prefixcaddyfile.Unmarshal(d, &p.Config)
}

// Interface guards
var (
	_ reverseproxy.Selector = (*PrefixAffinity)(nil)
	_ caddy.Provisioner     = (*PrefixAffinity)(nil)
	_ caddy.Validator       = (*PrefixAffinity)(nil)
	_ caddy.CleanerUpper    = (*PrefixAffinity)(nil)
	_ caddyfile.Unmarshaler = (*PrefixAffinity)(nil)
)
