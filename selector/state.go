package selector

import (
	"errors"

	"github.com/caddyserver/caddy/v2"

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
