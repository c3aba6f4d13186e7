package share

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/maintnotifications"
)

// Options say where the stream is.
type Options struct {
	Addresses []string // several: a cluster
	Username  string
	Password  string
	DB        int
	TLS       bool   // verified against the system's roots
	Prefix    string // of the stream's name
}

// stream is the stream's name.
func (o Options) stream() string { return o.Prefix + ":events" }

// field is the one of an entry that has the batch.
const field = "b"

type redisStream struct {
	client redis.UniversalClient
	key    string
}

// dial makes a client; it connects when it is used.
func dial(o Options) *redisStream {
	config := &redis.UniversalOptions{
		Addrs: o.Addresses, Username: o.Username, Password: o.Password, DB: o.DB,
		// Everything has a deadline, and is tried again by who knows what is new.
		ContextTimeoutEnabled: true,
		MaxRetries:            -1,
		DialTimeout:           opTimeout,
		DialerRetries:         1,
		PoolSize:              2, // one reads, one writes
		// The least that a server must know.
		Protocol:                 2,
		DisableIdentity:          true,
		MaintNotificationsConfig: &maintnotifications.Config{Mode: maintnotifications.ModeDisabled},
	}
	if o.TLS {
		config.TLSConfig = &tls.Config{MinVersion: tls.VersionTLS12}
	}
	return &redisStream{redis.NewUniversalClient(config), o.stream()}
}

func (s *redisStream) add(ctx context.Context, entries [][]byte, keep int64) (string, error) {
	pipe := s.client.Pipeline()
	added := make([]*redis.StringCmd, len(entries))
	for i, e := range entries {
		added[i] = pipe.XAdd(ctx, &redis.XAddArgs{Stream: s.key, MaxLen: keep, Approx: true, Values: []any{field, e}})
	}
	if _, err := pipe.Exec(ctx); err != nil {
		return "", err
	}
	return added[len(added)-1].Result()
}

func (s *redisStream) read(ctx context.Context, after string, count int64, wait time.Duration) ([]entry, error) {
	if wait == 0 {
		wait = -1
	}
	streams, err := s.client.XRead(ctx, &redis.XReadArgs{Streams: []string{s.key, after}, Count: count, Block: wait}).Result()
	if errors.Is(err, redis.Nil) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	if len(streams) != 1 || int64(len(streams[0].Messages)) > count {
		return nil, fmt.Errorf("answer with %d streams", len(streams))
	}
	entries := make([]entry, 0, len(streams[0].Messages))
	for _, m := range streams[0].Messages {
		data, _ := m.Values[field].(string) // else it is not ours
		entries = append(entries, entry{m.ID, []byte(data)})
	}
	return entries, nil
}

// trouble says what is wrong where an operation failed: time mends a Redis that
// can't be reached, but not one that answers and refuses.
func trouble(err error) string {
	text := err.Error()
	switch {
	case redis.IsPermissionError(err):
		return "redis denies the user a right (XADD and XREAD on the stream are needed, on a cluster CLUSTER too)"
	case redis.IsAuthError(err),
		strings.Contains(text, "invalid password"), // before version 6
		strings.Contains(text, "AUTH"):             // where it has no password
		return "redis refuses the login (are password and username right?)"
	}
	return "redis is away"
}

func (s *redisStream) close() error { return s.client.Close() }
