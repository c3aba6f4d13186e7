package selector

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"strings"

	"github.com/caddyserver/caddy/v2"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/redis/go-redis/v9"
	"go.uber.org/zap"

	"github.com/prefix-affinity/caddy/prefixhash"
	"github.com/prefix-affinity/caddy/selector/affinity"
	"github.com/prefix-affinity/caddy/selector/share"
)

// DefaultStreamPrefix begins the name of the stream in Redis.
const DefaultStreamPrefix = "prefix_affinity"

const (
	redisPort = "6379"
	maxDB     = 1<<16 - 1
)

// Sync says through what several Caddys share what each of them learns.
type Sync struct {
	// A Redis or Valkey, of version 5 or later.
	Redis *Redis `json:"redis,omitempty"`
}

// Redis says where a Redis or Valkey is. Each value may be a placeholder such as
// `{env.REDIS_PASSWORD}` or `{file./run/secrets/redis}`, which must have a value.
// Gateways before other upstreams should use another Redis or stream_prefix.
//
// It needs no persistence. It holds hashes of prompts, addresses of upstreams and
// counts, in some 64 MiB, and sees what it is told a few times a second for each
// Caddy. A user's permissions should include XADD and XREAD on the stream, and on
// a cluster CLUSTER.
type Redis struct {
	// Where it is, as host or host:port; several are the nodes of a cluster that
	// are asked first. The port is 6379 if there is none.
	Addresses []string `json:"addresses,omitempty"`

	// The user. By default there is none but the password's.
	Username string `json:"username,omitempty"`

	// The password. By default there is none.
	Password string `json:"password,omitempty"`

	// The number of the database. A cluster has none but the default, 0.
	DB int `json:"db,omitempty"`

	// Connect with TLS, verified against the system's roots. Off by default.
	TLS bool `json:"tls,omitempty"`

	// What the name of the stream begins with: `:events` is added. Default is
	// `prefix_affinity`.
	StreamPrefix string `json:"stream_prefix,omitempty"`
}

func (s *Sync) validate() error {
	switch {
	case s == nil:
		return nil
	case s.Redis == nil || len(s.Redis.Addresses) == 0:
		return errors.New("invalid sync: should be redis with an address")
	case s.Redis.DB < 0 || s.Redis.DB > maxDB:
		return fmt.Errorf("invalid db '%d': should be the number of a database, from 0 to %d", s.Redis.DB, maxDB)
	case s.Redis.DB > 0 && len(s.Redis.Addresses) > 1:
		return fmt.Errorf("invalid db '%d': several addresses are a cluster, which has only 0", s.Redis.DB)
	case s.Redis.Username != "" && s.Redis.Password == "":
		return fmt.Errorf("username '%s' has no password", s.Redis.Username)
	}
	r := s.Redis
	for option, value := range map[string]string{
		"username of sync": r.Username, "password of sync": r.Password, "stream_prefix of sync": r.StreamPrefix, "address of sync": strings.Join(r.Addresses, " "),
	} {
		if err := closed(option, value); err != nil {
			return err
		}
	}
	for _, address := range s.Redis.Addresses {
		if strings.Contains(address, "{") {
			continue
		}
		if _, err := redisAddresses(address); err != nil {
			return err
		}
	}
	return nil
}

// redisAddresses returns the addresses in a text, with their ports.
func redisAddresses(text string) (all []string, err error) {
	for one := range strings.FieldsSeq(text) {
		host, port, err := net.SplitHostPort(one)
		if err != nil {
			host, port = strings.Trim(one, "[]"), redisPort
		}
		_, badPort := strconv.ParseUint(port, 10, 16)
		_, notIP := netip.ParseAddr(host)
		if badPort != nil || host == "" || strings.Contains(host, "/") || strings.Contains(host, ":") && notIP != nil {
			return nil, fmt.Errorf("invalid address '%s' of sync: should be host or host:port, with the rest in options", one)
		}
		all = append(all, net.JoinHostPort(host, port))
	}
	if len(all) == 0 {
		return nil, fmt.Errorf("invalid address '%s' of sync: should be host or host:port", text)
	}
	return all, nil
}

// Complete reports an option that lacks what it needs.
func (c Config) Complete() error {
	if err := c.Sync.validate(); err != nil {
		return err // a policy is provisioned before it is validated
	}
	if c.Sync != nil && c.Seed == "" {
		return errors.New("sync needs a seed, the same for all Caddys: set seed, for example to {env.PREFIX_SEED}")
	}
	return nil
}

// resolve returns the options with the values of their placeholders.
func (r *Redis) resolve() (o share.Options, err error) {
	text := func(name, value string) string {
		filled, wrong := fill(name, value)
		if wrong != nil && err == nil {
			err = fmt.Errorf("%w, in sync", wrong)
		}
		return filled
	}
	for _, address := range r.Addresses {
		addresses, wrong := redisAddresses(text("address", address))
		if wrong != nil && err == nil { // what it refers to may have a password in it
			err = fmt.Errorf("invalid address '%s' of sync: what it refers to should be host or host:port", address)
		}
		o.Addresses = append(o.Addresses, addresses...)
	}
	o.Username, o.Password = text("username", r.Username), text("password", r.Password)
	o.DB, o.TLS = r.DB, r.TLS
	if o.Prefix = text("stream_prefix", r.StreamPrefix); o.Prefix == "" {
		o.Prefix = DefaultStreamPrefix
	}
	return o, err
}

// Keys of states: a share by what it connects to, and the one of a configuration
// by the configuration's registry.
type (
	shareKey   struct{ options string }
	shareOfKey struct{ registry *prometheus.Registry }
)

// startSync lets the policy's index be shared as configured.
func (p *Policy) startSync(registry *prometheus.Registry) error {
	if p.config.Sync == nil {
		return nil
	}
	options, err := p.config.Sync.Redis.resolve()
	if err != nil {
		return err
	}
	key := shareKey{fmt.Sprintf("%#v", options)}
	one, err := load(&p.learned.taken, shareOfKey{registry}, func() shareKey { return key })
	if err != nil {
		return err
	}
	if one != key {
		return errors.New("sync differs between the policies of this configuration: should be the same for all that have it")
	}
	value, _, err := states.LoadOrNew(key, func() (caddy.Destructor, error) {
		redis.SetLogger(redisLog{})
		return sharing{share.New(options, syncLog)}, nil
	})
	if err != nil {
		return err
	}
	p.learned.taken = append(p.learned.taken, key)
	p.syncing = value.(sharing).Share
	seed := sha256.Sum256([]byte("prefix_affinity sync\x00" + p.config.Seed))
	p.learned.leave = p.syncing.Join(share.Params{
		KeyVersion: prefixhash.KeyVersion,
		BlockSize:  p.config.BlockSize,
		Seed:       [8]byte(seed[:8]),
	}, p.learned.index)
	return nil
}

// sharing closes a share that no configuration wants any more.
type sharing struct{ *share.Share }

// Destruct implements caddy.Destructor.
func (s sharing) Destruct() error { return s.Close() }

// currentRule returns the rule to go by: while gateways see each other none has
// to guess where others may have sent something.
func (p *Policy) currentRule() *affinity.Rule {
	if p.syncing != nil && p.syncing.Connected() {
		return &p.together
	}
	return &p.rule
}

// syncStats tells how the exchange goes; false if there is none.
func syncStats() (st share.Stats, ok bool) {
	var found *share.Share
	states.Range(func(_, value any) bool {
		if s, is := value.(sharing); is {
			found = s.Share
		}
		return found == nil
	})
	if found == nil {
		return st, false
	}
	return found.Stats(), true
}

// syncMetrics reads its values at the time of the scrape. Without sync there are
// none.
type syncMetrics struct {
	connected, peers, delay, sent, received, dropped, sentBytes, receivedBytes *prometheus.Desc
}

func newSyncMetrics(ns, sub string) syncMetrics {
	desc := func(name, help string) *prometheus.Desc {
		return prometheus.NewDesc(prometheus.BuildFQName(ns, sub, "sync_"+name), help, nil, nil)
	}
	return syncMetrics{
		connected:     desc("connected", "Whether what other gateways do is known here: 1, or 0 while Redis is away."),
		peers:         desc("peers", "Other gateways heard of in the last three seconds."),
		delay:         desc("delay_seconds", "How late the last news of another gateway was read, from when Redis had it."),
		sent:          desc("events_sent_total", "Events told to the other gateways."),
		received:      desc("events_received_total", "Events of other gateways that were taken in."),
		dropped:       desc("events_dropped_total", "Events that were never told because Redis was away for too long."),
		sentBytes:     desc("sent_bytes_total", "Bytes of the events told."),
		receivedBytes: desc("received_bytes_total", "Bytes read from Redis, the own ones among them."),
	}
}

// Describe implements prometheus.Collector.
func (m syncMetrics) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range [...]*prometheus.Desc{m.connected, m.peers, m.delay, m.sent, m.received, m.dropped, m.sentBytes, m.receivedBytes} {
		ch <- d
	}
}

// Collect implements prometheus.Collector.
func (m syncMetrics) Collect(ch chan<- prometheus.Metric) {
	st, ok := syncStats()
	if !ok {
		return
	}
	connected := 0.0
	if st.Connected {
		connected = 1
	}
	gauge := func(d *prometheus.Desc, v float64) { ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v) }
	count := func(d *prometheus.Desc, v int64) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, float64(v))
	}
	gauge(m.connected, connected)
	gauge(m.peers, float64(st.Peers))
	gauge(m.delay, st.DelaySeconds)
	count(m.sent, st.EventsSent)
	count(m.received, st.EventsReceived)
	count(m.dropped, st.EventsDropped)
	count(m.sentBytes, st.BytesSent)
	count(m.receivedBytes, st.BytesReceived)
}

func syncLog() *zap.Logger { return caddy.Log().Named("prefix_affinity") }

// redisLog keeps what the client library says on its own, which is all said once
// more by the errors it returns, off the standard error.
type redisLog struct{}

// Printf implements the library's logger.
func (redisLog) Printf(_ context.Context, format string, args ...any) {
	if c := caddy.Log().Named("redis").Check(zap.DebugLevel, "client"); c != nil {
		c.Write(zap.String("says", fmt.Sprintf(format, args...)))
	}
}
