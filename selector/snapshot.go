package selector

import (
	"bufio"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/gofrs/flock"
	"go.uber.org/zap"

	"github.com/prefix-affinity/caddy/prefixhash"
	"github.com/prefix-affinity/caddy/selector/affinity"
)

// keeper keeps what the process has learned in a file, so that it survives a
// restart. There is one for all policies, as long as any configuration has one.
// It writes only after a policy has served a request, and only while no other
// process does.
type keeper struct {
	path    string
	fleet   *affinity.Fleet
	drained *drains
	lock    *flock.Flock

	begin   sync.Once
	served  atomic.Bool
	changed atomic.Bool   // since the last snapshot
	reset   chan struct{} // the interval may be another
	stop    chan struct{}
	done    sync.WaitGroup

	mu      sync.Mutex
	users   map[*Policy]keeperUser
	off     bool                       // for the policy that left last
	indexes map[indexKey]*kept         // of policies, also those that left since the last snapshot
	loads   map[chan struct{}]struct{} // files being read

	warned bool // that the file is of no use

	told, failing bool // of another process, to write; for who writes
}

// keeperUser is a policy that may write snapshots.
type keeperUser struct {
	config   any           // that it belongs to
	interval time.Duration // 0: the default; negative: off
}

// kept is an index that goes into snapshots.
type kept struct {
	index *affinity.Index
	seed  func() seed
	users int
}

// snapshotNotes are what the file says beside what package affinity knows.
type snapshotNotes struct {
	Drains map[string]time.Time `json:"drains,omitempty"` // made by the admin API
}

func newKeeper(fleet *affinity.Fleet, drained *drains) *keeper {
	path := filepath.Join(caddy.AppDataDir(), "prefix_affinity", "snapshot")
	return &keeper{
		path:    path,
		fleet:   fleet,
		drained: drained,
		lock:    flock.New(path+".lock", flock.SetPermissions(0o600)),
		reset:   make(chan struct{}, 1),
		stop:    make(chan struct{}),
		users:   make(map[*Policy]keeperUser),
		indexes: make(map[indexKey]*kept),
		loads:   make(map[chan struct{}]struct{}),
	}
}

func (k *keeper) log() *zap.Logger { return caddy.Log().Named("prefix_affinity") }

// join lets a policy of a configuration take part. What the snapshot holds of its
// index, if that is a fresh one, is read in the background.
func (k *keeper) join(p *Policy, config any, start func() seed) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	interval := time.Duration(p.config.Snapshot)
	for _, other := range k.users {
		if other.config == config && other.interval != interval && (other.interval < 0 || interval < 0 || other.interval > 0 && interval > 0) {
			return fmt.Errorf("snapshot is '%s' here and '%s' in another policy: there is one for all, so they should be the same",
				written(interval), written(other.interval))
		}
	}
	k.users[p] = keeperUser{config, interval}
	k.wake()
	if interval < 0 {
		return nil
	}
	own := k.indexes[p.learned.key]
	if own == nil || own.index != p.learned.index {
		own = &kept{index: p.learned.index, seed: start}
		k.indexes[p.learned.key] = own
	}
	own.users++
	if p.learned.fresh {
		k.load(p, own)
	}
	return nil
}

// written is an interval as it stands in a Caddyfile.
func written(interval time.Duration) string {
	switch {
	case interval < 0:
		return "off"
	case interval == 0:
		return "left out"
	}
	return interval.String()
}

// leave ends a policy's part.
func (k *keeper) leave(p *Policy) {
	k.mu.Lock()
	defer k.mu.Unlock()
	user, ok := k.users[p]
	if !ok {
		return
	}
	delete(k.users, p)
	k.off = user.interval < 0
	if own := k.indexes[p.learned.key]; own != nil && !k.off {
		own.users--
	}
	k.wake()
}

func (k *keeper) wake() {
	select {
	case k.reset <- struct{}{}:
	default: // it will look anyway
	}
}

// interval is the shortest that is said by the policies that serve requests: a
// configuration that fails to load has no say. Where none does yet, all have. 0: none
// wants snapshots.
func (k *keeper) interval() time.Duration {
	k.mu.Lock()
	defer k.mu.Unlock()
	var serving, all wish
	for p, u := range k.users {
		all.add(u.interval)
		if p.serves.Load() {
			serving.add(u.interval)
		}
	}
	if d := serving.interval(); d > 0 {
		return d
	}
	return all.interval()
}

// wish is what several policies say of the interval.
type wish struct {
	said    time.Duration // the shortest; 0: nobody said one
	leftOut bool
}

func (w *wish) add(interval time.Duration) {
	switch {
	case interval > 0:
		w.said = shorter(w.said, interval)
	case interval == 0:
		w.leftOut = true
	}
}

func (w *wish) interval() time.Duration {
	if w.said == 0 && w.leftOut {
		return time.Duration(DefaultSnapshot)
	}
	return w.said
}

// shorter returns the shorter of two intervals; 0 is none.
func shorter(a, b time.Duration) time.Duration {
	if a == 0 {
		return b
	}
	return min(a, b)
}

// load reads the snapshot for a policy's index. k.mu is held.
func (k *keeper) load(p *Policy, own *kept) {
	key := p.learned.key
	file, err := os.Open(k.path)
	if err != nil {
		if !errors.Is(err, fs.ErrNotExist) {
			k.warn(err)
		}
		return
	}
	own.index.Expect()
	restart := !k.served.Load() // else new options have made this index
	policy := describe(p.handler())
	read := make(chan struct{})
	k.loads[read] = struct{}{}
	go func() {
		defer file.Close()
		defer func() {
			k.mu.Lock()
			delete(k.loads, read)
			k.mu.Unlock()
			close(read)
		}()
		began := time.Now()
		restored, err := own.index.Restore(file, fingerprint(key, own.seed().start), began)
		foreign := errors.Is(err, affinity.ErrForeign)
		if restart && (err == nil || foreign) {
			k.redrain(restored.Notes)
		}
		switch {
		case foreign && restart: // other policies may find theirs
			k.log().Warn("nothing was learned before the restart with this policy's seed, block_size and version: it starts anew",
				zap.String("file", k.path), zap.String("policy", policy))
			return
		case foreign:
			return
		case err != nil:
			k.mu.Lock()
			k.warn(err)
			k.mu.Unlock()
			return
		}
		k.log().Info("read what was learned before the restart", zap.Time("written", restored.Written),
			zap.Int("blocks", restored.Blocks), zap.Duration("took", time.Since(began)))
	}()
}

// warn says once that the file is of no use. k.mu is held.
func (k *keeper) warn(err error) {
	if !k.warned {
		k.warned = true
		k.log().Warn("what was learned before the restart can't be used: starting anew", zap.String("file", k.path), zap.Error(err))
	}
}

func (k *keeper) redrain(notes json.RawMessage) {
	var n snapshotNotes
	if json.Unmarshal(notes, &n) != nil {
		return // another version's
	}
	for upstream, since := range n.Drains {
		k.drained.set(upstream, since)
	}
}

// fingerprint names what shapes the hashes of an index, without telling the seed.
func fingerprint(key indexKey, seed uint64) string {
	b := []byte("prefix_affinity snapshot\x00")
	for _, n := range [...]uint64{seed, uint64(key.blockSize), prefixhash.KeyVersion} { //nolint:gosec // checked by Validate
		b = binary.BigEndian.AppendUint64(b, n)
	}
	sum := sha256.Sum256(b)
	return hex.EncodeToString(sum[:16])
}

// note takes in that a request of a policy came or ended. From the first one on
// there are snapshots.
func (k *keeper) note(p *Policy) {
	if !p.serves.Load() {
		p.serves.Store(true)
		k.wake()
	}
	if !k.changed.Load() {
		k.changed.Store(true)
	}
	k.begin.Do(func() {
		k.served.Store(true)
		k.done.Go(k.run)
	})
}

func (k *keeper) run() {
	k.acquire()
	last := time.Now()
	for {
		var due <-chan time.Time
		if interval := k.interval(); interval > 0 {
			due = time.After(time.Until(last.Add(interval)))
		}
		select {
		case <-due:
			last = time.Now()
			if k.changed.Swap(false) {
				k.write()
			}
		case <-k.reset:
		case <-k.stop:
			return
		}
	}
}

// Destruct writes the last snapshot, when no configuration has a policy any more.
func (k *keeper) Destruct() error {
	k.begin.Do(func() {}) // none begins any more
	close(k.stop)
	k.done.Wait()
	if k.served.Load() && !k.off {
		k.write()
	}
	for _, read := range k.reading() {
		<-read
	}
	return k.lock.Close()
}

func (k *keeper) reading() (all []chan struct{}) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for read := range k.loads {
		all = append(all, read)
	}
	return all
}

// acquire reports whether this process is the one that writes.
func (k *keeper) acquire() bool {
	if k.lock.Locked() {
		return true
	}
	err := os.MkdirAll(filepath.Dir(k.path), 0o700)
	if err == nil {
		_, err = k.lock.TryLock()
	}
	if err != nil {
		k.failed(err)
	} else if !k.lock.Locked() && !k.told {
		k.told = true
		k.log().Info("another Caddy on this machine writes the snapshot: this one does not", zap.String("file", k.path))
	}
	return k.lock.Locked()
}

func (k *keeper) failed(err error) {
	k.changed.Store(true)
	if !k.failing {
		k.failing = true
		k.log().Warn("what was learned can't be written: a restart will forget it", zap.String("file", k.path), zap.Error(err))
	}
}

// write writes a snapshot, unless another process does. Files that are still
// being read are waited for, lest what they hold is lost.
func (k *keeper) write() {
	for _, read := range k.reading() {
		<-read
	}
	if !k.acquire() {
		k.changed.Store(true)
		return
	}
	began := time.Now()
	k.mu.Lock()
	all := maps.Clone(k.indexes)
	maps.DeleteFunc(k.indexes, func(_ indexKey, own *kept) bool { return own.users == 0 })
	k.mu.Unlock()
	indexes := make(map[string]*affinity.Index)
	for key, own := range all {
		seed := own.seed()
		if err := seed.keep(); err != nil { // nobody could use it
			k.failed(err)
			continue
		}
		indexes[fingerprint(key, seed.start)] = own.index
	}
	if len(indexes) == 0 {
		return // the file there is may be of use again
	}
	size, err := k.replace(began, indexes)
	if err != nil {
		k.failed(err)
		return
	}
	k.failing = len(indexes) < len(all)
	if c := k.log().Check(zap.DebugLevel, "wrote what was learned"); c != nil {
		c.Write(zap.String("file", k.path), zap.Int64("bytes", size), zap.Duration("took", time.Since(began)))
	}
}

// replace puts a new file in the place of the old one: there is always a whole one.
func (k *keeper) replace(now time.Time, indexes map[string]*affinity.Index) (size int64, err error) {
	notes, err := json.Marshal(snapshotNotes{Drains: k.drained.all()})
	if err != nil {
		return 0, err
	}
	if err := os.MkdirAll(filepath.Dir(k.path), 0o700); err != nil { // somebody may have deleted it
		return 0, err
	}
	tmp := k.path + ".tmp"
	if err := os.Remove(tmp); err != nil && !errors.Is(err, fs.ErrNotExist) { // of a process that was killed
		return 0, err
	}
	file, err := os.OpenFile(tmp, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return 0, err
	}
	defer func() {
		if err != nil {
			_ = os.Remove(tmp)
		}
	}()
	w := bufio.NewWriterSize(file, 1<<18)
	err = k.fleet.WriteSnapshot(w, now, indexes, notes)
	if err == nil {
		err = w.Flush()
	}
	if err == nil {
		err = file.Sync()
	}
	if info, statErr := file.Stat(); statErr == nil {
		size = info.Size()
	}
	if err := errors.Join(err, file.Close()); err != nil {
		return 0, err
	}
	return size, os.Rename(tmp, k.path)
}
