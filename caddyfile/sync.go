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
		option := d.Val()
		if seen[option] {
			return d.Errf("%s already specified", option)
		}
		seen[option] = true
		var err error
		switch option {
		case "username":
			err = text(d, &r.Username)
		case "password":
			err = text(d, &r.Password)
		case "db":
			r.DB, err = database(d)
		case "tls":
			r.TLS = true
			err = only(d)
		case "stream_prefix":
			err = text(d, &r.StreamPrefix)
		default:
			return d.Errf("unrecognized option '%s'", option)
		}
		if err != nil {
			return err
		}
	}
	c.Sync = &selector.Sync{Redis: r}
	return nil
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
