// Package caddyfile turns the tokens of a prefix_affinity block into its
// configuration. It reads; selector checks and fills in defaults.
package caddyfile

import (
	"encoding/json"
	"regexp"
	"strconv"
	"strings"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
	"github.com/dustin/go-humanize"

	"github.com/prefix-affinity/caddy/selector"
)

// Unmarshal reads one `lb_policy prefix_affinity` with its block into c.
func Unmarshal(d *caddyfile.Dispenser, c *selector.Config) error {
	d.Next() // consume the policy's name
	if d.NextArg() {
		return d.Errf("unexpected argument '%s' of prefix_affinity: should be options in a block", d.Val())
	}
	var seen []string
	for d.NextBlock(0) {
		option := caddyfile.NewDispenser([]caddyfile.Token{d.Token()})
		option.Next()
		if err := readOption(d, options, &seen, c); err != nil {
			return err
		}
		if err := c.Validate(); err != nil { // here, so that the error names the option's line
			return option.WrapErr(err)
		}
	}
	if err := c.Complete(); err != nil {
		return d.WrapErr(err)
	}
	return nil
}

// options has the options of the policy.
var options = map[string]option[*selector.Config]{
	"fallback": {"<policy> [<args...>]", func(d *caddyfile.Dispenser, c *selector.Config) (err error) {
		c.FallbackRaw, err = fallback(d)
		return err
	}},
	"block_size": {"<size>", func(d *caddyfile.Dispenser, c *selector.Config) error {
		size, err := size(d)
		c.BlockSize = int(size)
		return err
	}},
	"max_body": {"<size>", func(d *caddyfile.Dispenser, c *selector.Config) (err error) {
		c.MaxBody, err = size(d)
		return err
	}},
	"min_match": {"<tokens>", func(d *caddyfile.Dispenser, c *selector.Config) (err error) {
		c.MinMatch, err = count(d, "tokens")
		return err
	}},
	"affinity_weight": {"<number>|auto", weight},
	"replica_cache": {"<tokens>|auto", func(d *caddyfile.Dispenser, c *selector.Config) error {
		if auto(d) {
			return only(d)
		}
		var err error
		c.ReplicaCache, err = count(d, "tokens")
		return err
	}},
	"poll": {"<interval> [<path>]", func(d *caddyfile.Dispenser, c *selector.Config) (err error) {
		args := d.RemainingArgs()
		if len(args) < 1 || len(args) > 2 {
			return errArgs
		}
		if c.Poll, err = duration(d, "poll", args[0]); err != nil {
			return err
		}
		if len(args) == 2 {
			if c.PollPath = args[1]; c.PollPath == "" { // which means the default in JSON
				return d.Err("invalid poll_path '': should begin with a slash")
			}
		}
		return nil
	}},
	"orca": {"[text|json]", func(d *caddyfile.Dispenser, c *selector.Config) error {
		c.ORCA = "text"
		if d.NextArg() {
			c.ORCA = d.Val()
		}
		if c.ORCA != "text" && c.ORCA != "json" {
			return d.Errf("invalid orca '%s': should be text or json", c.ORCA)
		}
		return only(d)
	}},
	"cached_tokens_header": {"<name>", func(d *caddyfile.Dispenser, c *selector.Config) error {
		return text(d, &c.CachedTokensHeader)
	}},
	"queue_depth_header": {"<name>", func(d *caddyfile.Dispenser, c *selector.Config) error {
		return text(d, &c.QueueDepthHeader)
	}},
	"session_header": {"<names...>", func(d *caddyfile.Dispenser, c *selector.Config) error {
		c.SessionHeaders = d.RemainingArgs()
		if len(c.SessionHeaders) == 0 {
			return errArgs
		}
		return nil
	}},
	"scope": {"<placeholder>", func(d *caddyfile.Dispenser, c *selector.Config) error {
		return text(d, &c.Scope)
	}},
	"ignore": {"<regexp>", func(d *caddyfile.Dispenser, c *selector.Config) error {
		var expr string
		if err := text(d, &expr); err != nil {
			return err
		}
		if _, err := regexp.Compile(expr); err != nil {
			return d.Errf("invalid ignore '%s': %v", expr, err)
		}
		c.Ignore = append(c.Ignore, expr)
		return nil
	}},
	"seed": {"<secret>", func(d *caddyfile.Dispenser, c *selector.Config) error {
		return text(d, &c.Seed)
	}},
	"sync": {"redis <address...> {...}", syncWith},
	"index_size": {"<blocks>", func(d *caddyfile.Dispenser, c *selector.Config) (err error) {
		c.IndexSize, err = count(d, "blocks")
		return err
	}},
	"drain": {"<upstream...>", func(d *caddyfile.Dispenser, c *selector.Config) error {
		c.Drain = d.RemainingArgs()
		if len(c.Drain) == 0 {
			return errArgs
		}
		return nil
	}},
	"drain_timeout": {"<duration>", func(d *caddyfile.Dispenser, c *selector.Config) error {
		var value string
		if err := text(d, &value); err != nil {
			return err
		}
		var err error
		c.DrainTimeout, err = duration(d, "drain_timeout", value)
		return err
	}},
	"snapshot": {"<interval>|off", func(d *caddyfile.Dispenser, c *selector.Config) error {
		var value string
		if err := text(d, &value); err != nil {
			return err
		}
		if value == "off" {
			c.Snapshot = -1
			return nil
		}
		var err error
		if c.Snapshot, err = duration(d, "snapshot", value); err != nil {
			return d.Errf("invalid snapshot '%s': should be an interval such as 10m, or off", value)
		}
		return nil
	}},
	"shadow": {"", func(d *caddyfile.Dispenser, c *selector.Config) error {
		c.Shadow = true
		return only(d)
	}},
	"explain": {"", func(d *caddyfile.Dispenser, c *selector.Config) error {
		c.Explain = true
		return only(d)
	}},
}

// fallback reads a selection policy, its block included, as reverse_proxy does.
func fallback(d *caddyfile.Dispenser) (json.RawMessage, error) {
	if !d.NextArg() {
		return nil, errArgs
	}
	name := d.Val()
	if name == "prefix_affinity" {
		return nil, d.Errf("invalid fallback '%s': should be another policy", name)
	}
	const policies = "http.reverse_proxy.selection_policies"
	id := policies + "." + name
	info, err := caddy.GetModule(id)
	if err != nil {
		var known []string
		for _, m := range caddy.GetModules(policies) {
			if other := m.ID.Name(); other != "prefix_affinity" {
				known = append(known, other)
			}
		}
		return nil, d.Errf("unrecognized fallback '%s': %sthere is no module %s", name, meant(name, known), id)
	}
	module := info.New()
	policy, ok := module.(reverseproxy.Selector)
	reader, readable := module.(caddyfile.Unmarshaler)
	if !ok || !readable {
		return nil, d.Errf("invalid fallback '%s': module %s can't be one in a Caddyfile", name, id)
	}
	tokens := d.NewFromNextSegment()
	if err := reader.UnmarshalCaddyfile(tokens); err != nil {
		return nil, err
	}
	for tokens.Next() && tokens.Val() != "}" { // caddyfile.UnmarshalModule would drop them without a word
		if tokens.Val() == "{" {
			continue
		}
		return nil, tokens.Errf("unexpected '%s': fallback %s has no more options", tokens.Val(), name)
	}
	return caddyconfig.JSONModuleObject(policy, "policy", name, nil), nil
}

func weight(d *caddyfile.Dispenser, c *selector.Config) error {
	if auto(d) {
		return only(d)
	}
	var value string
	if err := text(d, &value); err != nil {
		return err
	}
	weight, err := strconv.ParseFloat(value, 64)
	if err != nil || !(weight >= 1 && weight <= 100) {
		return d.Errf("invalid affinity_weight '%s': should be from 1 to 100, or auto", value)
	}
	c.AffinityWeight = weight
	return nil
}

// text reads the single argument of an option.
func text(d *caddyfile.Dispenser, to *string) error {
	option := d.Val()
	if !d.NextArg() {
		return errArgs
	}
	if *to = d.Val(); strings.TrimSpace(*to) == "" {
		return d.Errf("invalid %s '%s': should not be empty; leave the option out for its default", option, *to)
	}
	return only(d)
}

// only fails where an option has more arguments.
func only(d *caddyfile.Dispenser) error {
	if d.NextArg() {
		return errArgs
	}
	return nil
}

// auto reports whether the option's argument is the word auto, and takes it.
func auto(d *caddyfile.Dispenser) bool {
	if !d.NextArg() {
		return false
	}
	if d.Val() == "auto" {
		return true
	}
	d.Prev()
	return false
}

// size reads a size in bytes, with or without a unit.
func size(d *caddyfile.Dispenser) (int64, error) {
	option := d.Val()
	var value string
	if err := text(d, &value); err != nil {
		return 0, err
	}
	size, err := humanize.ParseBytes(value)
	if err != nil || size == 0 || size > 1<<40 {
		return 0, d.Errf("invalid %s '%s': should be a size such as 256 or 8MiB", option, value)
	}
	return int64(size), nil
}

func duration(d *caddyfile.Dispenser, option, value string) (caddy.Duration, error) {
	duration, err := caddy.ParseDuration(value)
	if err != nil || duration <= 0 {
		return 0, d.Errf("invalid %s '%s': should be a positive duration such as 10s", option, value)
	}
	return caddy.Duration(duration), nil
}

// count reads a positive whole number.
func count(d *caddyfile.Dispenser, unit string) (int, error) {
	option := d.Val()
	var value string
	if err := text(d, &value); err != nil {
		return 0, err
	}
	n, err := strconv.Atoi(value)
	if err != nil || n < 1 {
		return 0, d.Errf("invalid %s '%s': should be a positive number of %s", option, value, unit)
	}
	return n, nil
}
