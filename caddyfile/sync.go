package caddyfile

import (
	"strconv"

	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"

	"github.com/prefix-affinity/caddy/selector"
)

// syncWith reads
//
//	sync redis <address...> {
//		username      <name>
//		password      <secret>
//		db            <number>
//		tls
//		stream_prefix <text>
//	}
func syncWith(d *caddyfile.Dispenser, c *selector.Config) error {
	if !d.NextArg() {
		return errArgs
	}
	if d.Val() != "redis" {
		return d.Errf("unrecognized sync '%s': should be redis", d.Val())
	}
	r := &selector.Redis{Addresses: d.RemainingArgs()}
	if len(r.Addresses) == 0 {
		return errArgs
	}
	for _, address := range r.Addresses { // with its value it would pass for the nodes of a cluster
		if _, ok := redisOptions[address]; ok {
			return d.Errf("invalid address '%s' of sync: options belong in a block", address)
		}
	}
	var seen []string
	for d.NextBlock(1) {
		if err := readOption(d, redisOptions, &seen, r); err != nil {
			return err
		}
	}
	c.Sync = &selector.Sync{Redis: r}
	return nil
}

// redisOptions has the options of sync redis.
var redisOptions = map[string]option[*selector.Redis]{
	"username": {"<name>", func(d *caddyfile.Dispenser, r *selector.Redis) error {
		return text(d, &r.Username)
	}},
	"password": {"<secret>", func(d *caddyfile.Dispenser, r *selector.Redis) error {
		return text(d, &r.Password)
	}},
	"db": {"<number>", func(d *caddyfile.Dispenser, r *selector.Redis) (err error) {
		r.DB, err = database(d)
		return err
	}},
	"tls": {"", func(d *caddyfile.Dispenser, r *selector.Redis) error {
		r.TLS = true
		return only(d)
	}},
	"stream_prefix": {"<text>", func(d *caddyfile.Dispenser, r *selector.Redis) error {
		return text(d, &r.StreamPrefix)
	}},
}

func database(d *caddyfile.Dispenser) (int, error) {
	var value string
	if err := text(d, &value); err != nil {
		return 0, err
	}
	n, err := strconv.ParseUint(value, 10, 16)
	if err != nil {
		return 0, d.Errf("invalid db '%s': should be the number of a database, from 0 to 65535", value)
	}
	return int(n), nil
}
