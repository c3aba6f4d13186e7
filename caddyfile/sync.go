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
		return d.ArgErr()
	}
	if d.Val() != "redis" {
		return d.Errf("unrecognized sync '%s': should be redis", d.Val())
	}
	r := &selector.Redis{Addresses: d.RemainingArgs()}
	if len(r.Addresses) == 0 {
		return d.ArgErr()
	}
	seen := make(map[string]bool)
	for d.NextBlock(1) {
		read, err := readerOf(d, redisOptions, seen)
		if err != nil {
			return err
		}
		if err := read(d, r); err != nil {
			return err
		}
	}
	c.Sync = &selector.Sync{Redis: r}
	return nil
}

// redisOptions holds the readers of the options of sync redis.
var redisOptions = map[string]func(*caddyfile.Dispenser, *selector.Redis) error{
	"username": func(d *caddyfile.Dispenser, r *selector.Redis) error {
		return text(d, &r.Username)
	},
	"password": func(d *caddyfile.Dispenser, r *selector.Redis) error {
		return text(d, &r.Password)
	},
	"db": func(d *caddyfile.Dispenser, r *selector.Redis) (err error) {
		r.DB, err = database(d)
		return err
	},
	"tls": func(d *caddyfile.Dispenser, r *selector.Redis) error {
		r.TLS = true
		return only(d)
	},
	"stream_prefix": func(d *caddyfile.Dispenser, r *selector.Redis) error {
		return text(d, &r.StreamPrefix)
	},
}

func database(d *caddyfile.Dispenser) (int, error) {
	var value string
	if err := text(d, &value); err != nil {
		return 0, err
	}
	n, err := strconv.ParseUint(value, 10, 16)
	if err != nil {
		return 0, d.Errf("invalid db '%s': should be the number of a database", value)
	}
	return int(n), nil
}
