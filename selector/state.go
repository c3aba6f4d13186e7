package selector

import (
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"

	"github.com/caddyserver/caddy/v2"
	"go.uber.org/zap"

	"github.com/prefix-affinity/caddy/selector/affinity"
)

// states keeps what was learned across config reloads: it lives as long as any
// config uses it. Requests that outlive it keep what they point to.
var states = caddy.NewUsagePool()

// Keys of states. Loads, speeds and capacities belong to the upstreams and are
// there once for the process; a prefix index is shared by the policies whose
// hashes agree.
type (
	fleetKey  struct{}
	drainsKey struct{}
	begunKey  struct{}
	keeperKey struct{}
	indexKey  struct {
		seed      string
		blockSize int
	}
)

// shared makes a value of the usage pool that needs no destructor.
type shared[T any] struct{ value T }

func (shared[T]) Destruct() error { return nil }

// load returns the value under key, made by construct if it is new, and notes
// in taken that it must be given back.
func load[T any](taken *[]any, key any, construct func() T) (T, error) {
	value, _, err := states.LoadOrNew(key, func() (caddy.Destructor, error) {
		return shared[T]{construct()}, nil
	})
	if err != nil {
		var none T
		return none, err
	}
	*taken = append(*taken, key)
	return value.(shared[T]).value, nil
}

// learned is the state that a policy shares with others.
type learned struct {
	fleet   *affinity.Fleet
	index   *affinity.Index
	drained *drains // by the admin API
	begun   *drains // by any configuration
	keeper  *keeper
	key     indexKey
	fresh   bool   // no other policy had the index before
	leave   func() // the exchange with other gateways; nil: there is none
	taken   []any
}

func loadLearned(c Config) (l learned, err error) {
	l.fleet, err = load(&l.taken, fleetKey{}, affinity.NewFleet)
	if err != nil {
		return l, err
	}
	l.drained, err = load(&l.taken, drainsKey{}, newDrains)
	if err != nil {
		return l, errors.Join(err, l.release())
	}
	l.begun, err = load(&l.taken, begunKey{}, newDrains)
	if err != nil {
		return l, errors.Join(err, l.release())
	}
	k, _, err := states.LoadOrNew(keeperKey{}, func() (caddy.Destructor, error) {
		return newKeeper(l.fleet, l.drained), nil
	})
	if err != nil {
		return l, errors.Join(err, l.release())
	}
	l.keeper = k.(*keeper)
	l.taken = append(l.taken, keeperKey{})
	l.key = indexKey{c.Seed, c.BlockSize}
	l.index, err = load(&l.taken, l.key, func() *affinity.Index {
		l.fresh = true
		return affinity.NewIndex(l.fleet, c.IndexSize)
	})
	if err != nil {
		return l, errors.Join(err, l.release())
	}
	l.index.Require(c.IndexSize)
	return l, nil
}

// currentFleet and currentDrains return what the process has while any
// configuration uses it, else nil.
func currentFleet() *affinity.Fleet { return current[*affinity.Fleet](fleetKey{}) }
func currentDrains() *drains        { return current[*drains](drainsKey{}) }

func current[T any](wanted any) (found T) {
	states.Range(func(key, value any) bool {
		if key != wanted {
			return true
		}
		found = value.(shared[T]).value
		return false
	})
	return found
}

func (l *learned) release() error {
	if l.leave != nil {
		l.leave()
	}
	errs := make([]error, 0, len(l.taken))
	for _, key := range l.taken {
		_, err := states.Delete(key)
		errs = append(errs, err)
	}
	l.taken = nil
	return errors.Join(errs...)
}

// seedOf turns a configured secret into the start of the hash chains.
func seedOf(secret string) uint64 {
	sum := sha256.Sum256([]byte("prefix_affinity seed\x00" + secret))
	return binary.BigEndian.Uint64(sum[:])
}

// ownSeed is the seed where none is configured: random, made once for this
// machine and kept in Caddy's data directory, so that hashes agree across
// restarts and can't be computed outside.
var ownSeed = sync.OnceValue(func() uint64 {
	secret, err := keptSecret(filepath.Join(caddy.AppDataDir(), "prefix_affinity", "seed"))
	if err != nil {
		caddy.Log().Named("prefix_affinity").Warn("seed can't be kept: hashes will differ after a restart",
			zap.Error(err))
	}
	return seedOf(secret)
})

// keptSecret reads the secret in a file, which it makes where there is none. It
// returns a random secret even where it fails.
func keptSecret(path string) (string, error) {
	fresh := rand.Text()
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return fresh, err
	}
	tmp, err := os.CreateTemp(filepath.Dir(path), ".seed-*") // mode 0600
	if err != nil {
		return fresh, err
	}
	defer os.Remove(tmp.Name())
	_, err = tmp.WriteString(fresh + "\n")
	if err := errors.Join(err, tmp.Close()); err != nil {
		return fresh, err
	}
	// A link appears complete or not at all, and only where no other process
	// was first.
	if err := os.Link(tmp.Name(), path); err == nil {
		return fresh, nil
	} else if !errors.Is(err, fs.ErrExist) {
		return fresh, err
	}
	kept, err := os.ReadFile(path)
	if err != nil {
		return fresh, err
	}
	secret := strings.TrimSpace(string(kept))
	if len(secret) < hex.EncodedLen(8) {
		return fresh, fmt.Errorf("seed file '%s' is damaged: remove it", path)
	}
	return secret, nil
}
