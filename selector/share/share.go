// Package share lets gateways before the same replicas know what each of them
// does, through a stream of Redis or Valkey.
//
// Each gateway writes down what it sends and what it sees of the answers
// (affinity.Event), in batches, a few hundredths of a second late, and does to
// its own index what the others write. The stream keeps the recent past for who
// comes later. All of this happens in the background: a request that is decided
// appends some bytes to a batch in memory and waits for nothing. While Redis is
// away, each gateway goes on with what it knows; what it would tell is kept up to
// a bound and told later.
//
// It knows nothing of Caddy. Everything exported is safe for concurrent use.
package share

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"github.com/prefix-affinity/caddy/selector/affinity"
)

const (
	// gather is how long events wait for others to share a batch with. With as
	// much again on the reader's side it is most of what one gateway lags behind
	// another, and a fraction of what costs anything (BENCHMARKS.md).
	gather = 10 * time.Millisecond
	// heartbeat is how often a gateway with nothing to tell says that it is there,
	// and aliveFor how long one that says nothing counts as there.
	heartbeat = time.Second
	aliveFor  = 3 * time.Second
	forgetFor = time.Minute // then its numbers may begin anew

	readWait   = 500 * time.Millisecond // for entries to come; Close waits as long
	opTimeout  = 2 * time.Second        // of an operation, beyond what it waits on purpose
	byeTimeout = 300 * time.Millisecond
	leastPause = 100 * time.Millisecond // between attempts to connect,
	mostPause  = 5 * time.Second        // doubling up to that

	// clockBack is how far the stream's ids may fall back before it is another
	// stream under the same name: a Redis that was lost, and one with another clock.
	clockBack = 5000 // ms

	batchBytes = 64 << 10 // a batch that is full; an event more may stand over
	sendBytes  = 1 << 20  // written at once
	queueBytes = 8 << 20  // kept while Redis is away, the newest
	readCount  = 32       // entries read at once
	// streamBytes is about what the stream takes of Redis's memory.
	streamBytes  = 64 << 20
	entryBytes   = 100 // that an entry takes beside its batch
	leastEntries = 256
	mostEntries  = 1 << 20

	mostPeers   = 256 // gateways followed
	mostIgnored = 64  // gateways warned of
)

// stream is an append-only log that forgets its beginning.
type stream interface {
	// add appends entries, lets the stream forget all but about the last keep, and
	// returns the id of the last one.
	add(ctx context.Context, entries [][]byte, keep int64) (id string, err error)
	// read returns entries after an id, up to count, and waits for some if there
	// are none. wait 0: it doesn't.
	read(ctx context.Context, after string, count int64, wait time.Duration) ([]entry, error)
	close() error
}

type entry struct {
	id   string // milliseconds-sequence
	data []byte
}

// Share is one process's part in the stream.
type Share struct {
	stream  stream
	name    string // of the stream, to say where
	gateway uint64 // this process
	log     func() *zap.Logger

	start     *time.Timer
	stop      context.CancelFunc
	done      chan struct{} // nil: never started
	wake      chan struct{} // there is something to write
	full      chan struct{} // there is a full batch to write
	connected atomic.Bool
	told      []string     // what has been wrong in this outage; used by run only
	offset    atomic.Int64 // ns that the local clock is ahead of the stream's
	back      atomic.Bool  // the stream began anew
	average   atomic.Int64 // bytes of an entry
	stats     counters

	mu       sync.Mutex // guards what follows
	channels map[Params]*channel
	queue    []batch // sealed, oldest first
	queued   int     // bytes
	closed   bool

	// Of whoever writes, or reads.
	sending []batch
	cursor  id
	ignored map[uint64]bool
	decoder decoder
}

// batch is an entry to be written.
type batch struct {
	data   []byte
	events int
}

type counters struct {
	sent, received, dropped, sentBytes, receivedBytes atomic.Int64
	delay                                             atomic.Int64
}

// Stats is how the exchange goes.
type Stats struct {
	Connected      bool
	Peers          int     // gateways heard of lately, without this one
	EventsSent     int64   // written
	EventsReceived int64   // applied
	EventsDropped  int64   // not written, because Redis was away for too long
	BytesSent      int64   // of batches
	BytesReceived  int64   // of batches, the own ones too
	DelaySeconds   float64 // from the stream to here, of the last entry
}

// channel is what is shared of one index.
type channel struct {
	share  *Share
	params Params
	index  *affinity.Index
	users  int // guarded by Share.mu

	mu       sync.Mutex // guards what follows
	encoder  encoder
	open     []byte // batch that is being filled; empty: none
	events   int
	sequence uint64
	sealed   time.Time // when the last batch was

	peers map[uint64]*peer // guarded by peersMu
	// peersMu is not mu, which requests wait for.
	peersMu sync.Mutex
}

// peer is another gateway.
type peer struct {
	*affinity.Peer

	sequence uint64 // of its last batch
	heard    time.Time
}

// New makes a share that begins after a moment, so that a configuration that is
// only checked connects to nobody. log returns the logger of the time.
func New(o Options, log func() *zap.Logger) *Share {
	return begin(dial(o), o.stream(), log, startAfter)
}

const startAfter = 300 * time.Millisecond

func begin(via stream, name string, log func() *zap.Logger, after time.Duration) *Share {
	s := &Share{
		stream: via, name: name, gateway: rand.Uint64(), log: log,
		wake: make(chan struct{}, 1), full: make(chan struct{}, 1), done: make(chan struct{}),
		channels: make(map[Params]*channel), ignored: make(map[uint64]bool),
	}
	ctx, stop := context.WithCancel(context.Background())
	s.stop = stop
	s.average.Store(batchBytes / 16)
	s.start = time.AfterFunc(after, func() {
		defer close(s.done)
		s.run(ctx)
	})
	return s
}

// Join shares an index until leave is called. Indexes with equal params are the
// same one.
func (s *Share) Join(p Params, x *affinity.Index) (leave func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	c := s.channels[p]
	if c == nil {
		c = &channel{
			share: s, params: p, index: x, peers: make(map[uint64]*peer),
			sequence: uint64(time.Now().UnixMicro()), // #nosec G115 -- beyond those of a channel that was left before
		}
		s.channels[p] = c
		x.SetJournal(c)
	}
	c.users++
	return sync.OnceFunc(func() {
		s.mu.Lock()
		c.users--
		last := c.users == 0
		if last {
			delete(s.channels, p)
		}
		s.mu.Unlock()
		if last {
			x.EndJournal(c)
			c.forgetPeers()
		}
	})
}

// Close says goodbye, if Redis listens, and ends everything.
func (s *Share) Close() error {
	started := !s.start.Stop()
	s.stop()
	if started {
		<-s.done
	}
	s.mu.Lock()
	channels := s.all()
	s.mu.Unlock()
	if s.connected.Load() {
		for _, c := range channels {
			c.mu.Lock()
			c.seal(true)
			c.mu.Unlock()
		}
		ctx, cancel := context.WithTimeout(context.Background(), byeTimeout)
		_ = s.write(ctx) // who doesn't hear it will notice
		cancel()
	}
	s.mu.Lock()
	s.closed, s.queue, s.queued = true, nil, 0
	s.mu.Unlock()
	for _, c := range channels {
		c.index.EndJournal(c)
		c.forgetPeers()
	}
	s.connected.Store(false)
	return s.stream.close()
}

// all returns the channels. s.mu is held.
func (s *Share) all() []*channel {
	all := make([]*channel, 0, len(s.channels))
	for _, c := range s.channels {
		all = append(all, c)
	}
	return all
}

// Connected reports whether what others do is known here.
func (s *Share) Connected() bool { return s.connected.Load() }

// Stats tells how the exchange goes.
func (s *Share) Stats() Stats {
	st := Stats{
		Connected:      s.connected.Load(),
		EventsSent:     s.stats.sent.Load(),
		EventsReceived: s.stats.received.Load(),
		EventsDropped:  s.stats.dropped.Load(),
		BytesSent:      s.stats.sentBytes.Load(),
		BytesReceived:  s.stats.receivedBytes.Load(),
		DelaySeconds:   time.Duration(s.stats.delay.Load()).Seconds(),
	}
	s.mu.Lock()
	channels := s.all()
	s.mu.Unlock()
	alive := make(map[uint64]bool)
	now := time.Now()
	for _, c := range channels {
		c.peersMu.Lock()
		for gateway, p := range c.peers {
			if now.Sub(p.heard) < aliveFor {
				alive[gateway] = true
			}
		}
		c.peersMu.Unlock()
	}
	st.Peers = len(alive)
	return st
}

// Note implements affinity.Journal.
func (c *channel) Note(e affinity.Event) {
	c.mu.Lock()
	if len(c.open) == 0 {
		c.begin(false)
	}
	c.open = c.encoder.append(c.open, &e)
	c.events++
	signal := c.share.wake
	if len(c.open) >= batchBytes {
		c.seal(false)
		signal = c.share.full
	}
	c.mu.Unlock()
	select {
	case signal <- struct{}{}:
	default:
	}
}

// begin opens a batch. c.mu is held.
func (c *channel) begin(bye bool) {
	c.sequence++
	c.encoder.reset()
	c.events = 0
	c.open = appendHeader(make([]byte, 0, 512), &header{
		gateway: c.share.gateway, sequence: c.sequence, bye: bye, params: c.params,
	})
}

// seal closes the open batch, if there is one, and one that says goodbye after
// it. c.mu is held.
func (c *channel) seal(bye bool) {
	if len(c.open) > 0 {
		c.share.push(batch{c.open, c.events})
		c.open = nil
	}
	if bye {
		c.begin(true)
		c.share.push(batch{c.open, 0})
		c.open = nil
	}
	c.sealed = time.Now()
}

// push queues a batch, and drops the oldest where there are too many.
func (s *Share) push(b batch) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return
	}
	s.queue = append(s.queue, b)
	s.queued += len(b.data)
	for s.queued > queueBytes {
		s.stats.dropped.Add(int64(s.queue[0].events))
		s.queued -= len(s.queue[0].data)
		s.queue[0] = batch{}
		s.queue = s.queue[1:]
	}
}

// collect seals what is open, and lets each channel say that it is there.
func (s *Share) collect() {
	s.mu.Lock()
	channels := s.all()
	s.mu.Unlock()
	for _, c := range channels {
		c.mu.Lock()
		if len(c.open) == 0 && time.Since(c.sealed) >= heartbeat {
			c.begin(false)
		}
		if len(c.open) > 0 {
			c.seal(false)
		}
		c.mu.Unlock()
	}
}

// run keeps up the exchange until ctx ends.
func (s *Share) run(ctx context.Context) {
	pause := leastPause
	for {
		err := s.session(ctx)
		was := s.connected.Swap(false)
		if ctx.Err() != nil {
			s.connected.Store(was) // Close says goodbye
			return
		}
		if wrong := trouble(err); !slices.Contains(s.told, wrong) {
			s.told = append(s.told, wrong)
			s.log().Warn("sync: "+wrong+", so this gateway goes on alone and tries again",
				zap.String("stream", s.name), zap.Error(err))
		}
		if was {
			pause = leastPause
		}
		for wait := time.Now().Add(pause + rand.N(pause/2)); time.Now().Before(wait); {
			if !sleep(ctx, min(time.Until(wait), heartbeat)) {
				return
			}
			s.expire(time.Now())
		}
		pause = min(2*pause, mostPause)
	}
}

// sleep reports whether ctx let it.
func sleep(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}

// session writes and reads until something fails.
func (s *Share) session(ctx context.Context) error {
	s.collect()
	if err := s.write(ctx); err != nil {
		return err
	}
	if _, err := s.read(ctx, 0); err != nil {
		return err
	}
	s.connected.Store(true)
	s.told = nil
	s.log().Info("sync: connected", zap.String("stream", s.name), zap.Int64("events_dropped", s.stats.dropped.Load()))

	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	failed := make(chan error, 2)
	var both sync.WaitGroup
	both.Go(func() { failed <- s.writer(ctx) })
	both.Go(func() { failed <- s.reader(ctx) })
	err := <-failed
	cancel()
	both.Wait()
	return err
}

func (s *Share) writer(ctx context.Context) error {
	beat := time.NewTicker(heartbeat / 2)
	defer beat.Stop()
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case now := <-beat.C:
			s.expire(now)
		case <-s.full:
		case <-s.wake:
			select {
			case <-time.After(gather):
			case <-s.full:
			case <-ctx.Done():
				return ctx.Err()
			}
		}
		s.collect()
		if err := s.write(ctx); err != nil {
			return err
		}
	}
}

// write writes the queue. What could not be written is kept: if it was after
// all, it is known by its sequence.
func (s *Share) write(ctx context.Context) error {
	for {
		if len(s.sending) == 0 {
			s.mu.Lock()
			for bytes := 0; len(s.queue) > 0 && bytes < sendBytes; {
				b := s.queue[0]
				s.sending = append(s.sending, b)
				s.queue[0] = batch{}
				s.queue = s.queue[1:]
				s.queued -= len(b.data)
				bytes += len(b.data)
			}
			s.mu.Unlock()
		}
		if len(s.sending) == 0 {
			return nil
		}
		entries := make([][]byte, len(s.sending))
		for i, b := range s.sending {
			entries[i] = b.data
		}
		keep := min(max(streamBytes/(s.average.Load()+entryBytes), leastEntries), mostEntries)
		limited, cancel := context.WithTimeout(ctx, opTimeout)
		before := time.Now()
		last, err := s.stream.add(limited, entries, keep)
		cancel()
		if err != nil {
			return err
		}
		at, err := parseID(last)
		if err != nil {
			return err
		}
		middle := before.Add(time.Since(before) / 2)
		s.offset.Store(middle.UnixNano() - at.time().UnixNano())
		if at.ms+clockBack < s.readTo() {
			s.back.Store(true)
		}
		for _, b := range s.sending {
			s.stats.sent.Add(int64(b.events))
			s.stats.sentBytes.Add(int64(len(b.data)))
		}
		clear(s.sending)
		s.sending = s.sending[:0]
	}
}

func (s *Share) reader(ctx context.Context) error {
	for {
		n, err := s.read(ctx, readWait)
		if err != nil {
			return err
		}
		// Where entries come one by one it is cheaper to let some gather.
		if n > 0 && n < readCount && !sleep(ctx, gather) {
			return ctx.Err()
		}
	}
}

// read applies the next entries and returns how many there were.
func (s *Share) read(ctx context.Context, wait time.Duration) (int, error) {
	if s.back.Swap(false) {
		s.setReadTo(id{})
	}
	limited, cancel := context.WithTimeout(ctx, wait+opTimeout)
	defer cancel()
	entries, err := s.stream.read(limited, s.cursor.String(), readCount, wait)
	if err != nil {
		return 0, err
	}
	for _, e := range entries {
		at, err := parseID(e.id)
		if err != nil {
			return 0, err
		}
		s.setReadTo(at)
		s.stats.receivedBytes.Add(int64(len(e.data)))
		s.average.Add((int64(len(e.data)) - s.average.Load()) / 16)
		s.apply(e.data, at)
	}
	return len(entries), nil
}

// readTo is where the reader is, for the writer, in milliseconds.
func (s *Share) readTo() uint64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.cursor.ms
}

func (s *Share) setReadTo(at id) {
	s.mu.Lock()
	s.cursor = at
	s.mu.Unlock()
}

// apply does what a batch says.
func (s *Share) apply(data []byte, at id) {
	now := time.Now()
	when := at.time().Add(time.Duration(s.offset.Load()))
	if when.After(now) {
		when = now
	}
	h, err := s.decoder.header(data)
	if h.gateway == s.gateway {
		return
	}
	s.mu.Lock()
	c := s.channels[h.params]
	s.mu.Unlock()
	if err != nil || c == nil {
		if now.Sub(when) < aliveFor { // else it may be gone for long
			s.ignore(&h, err)
		}
		return
	}
	s.stats.delay.Store(int64(now.Sub(when)))
	n, err := c.apply(&h, &s.decoder, when)
	s.stats.received.Add(int64(n))
	if err != nil {
		s.ignore(&h, err)
	}
}

// ignore warns once of a gateway, or of what is none.
func (s *Share) ignore(h *header, err error) {
	if s.ignored[h.gateway] || len(s.ignored) >= mostIgnored {
		return
	}
	s.ignored[h.gateway] = true
	gateway := zap.String("gateway", strconv.FormatUint(h.gateway, 16))
	switch {
	case errors.Is(err, errVersion):
		s.log().Warn("sync: a gateway of another version of this policy is ignored, and so are we by it", gateway, zap.Error(err))
	case err != nil:
		s.log().Warn("sync: what stands in the stream can't be read, and is ignored: does something else write there?",
			zap.String("stream", s.name), gateway, zap.Error(err))
	default:
		s.log().Warn("sync: a gateway with other parameters is ignored: should have the same seed and block_size, and the same version of this policy",
			gateway, zap.Int("its_block_size", h.params.BlockSize), zap.Int("its_key_version", h.params.KeyVersion))
	}
}

// apply does what the events of a batch say, and returns how many there were.
func (c *channel) apply(h *header, d *decoder, at time.Time) (n int, err error) {
	c.peersMu.Lock()
	defer c.peersMu.Unlock()
	if c.peers == nil {
		return 0, nil // left
	}
	p := c.peers[h.gateway]
	if p == nil {
		if len(c.peers) >= mostPeers {
			return 0, nil
		}
		p = &peer{Peer: c.index.NewPeer(), sequence: h.sequence - 1}
		c.peers[h.gateway] = p
	}
	if h.sequence <= p.sequence {
		return 0, nil // written twice
	}
	if h.sequence != p.sequence+1 {
		p.Expire(at) // we may have missed how they ended
	}
	p.sequence, p.heard = h.sequence, at
	for {
		var e affinity.Event
		ok, err := d.next(&e)
		if !ok {
			if err != nil || h.bye {
				p.Expire(at)
			}
			if h.bye {
				p.heard = time.Time{}
			}
			return n, err
		}
		p.Apply(at, e)
		n++
	}
}

// expire ends what gateways had in flight that are silent.
func (s *Share) expire(now time.Time) {
	s.mu.Lock()
	channels := s.all()
	s.mu.Unlock()
	for _, c := range channels {
		c.peersMu.Lock()
		for gateway, p := range c.peers {
			silent := now.Sub(p.heard)
			if silent >= aliveFor {
				p.Expire(now)
			}
			if silent >= forgetFor {
				delete(c.peers, gateway)
			}
		}
		c.peersMu.Unlock()
	}
}

// forgetPeers ends what all others had in flight, for good.
func (c *channel) forgetPeers() {
	c.peersMu.Lock()
	defer c.peersMu.Unlock()
	for _, p := range c.peers {
		p.Expire(time.Now())
	}
	c.peers = nil
}

// id is the place of an entry in the stream.
type id struct{ ms, n uint64 }

func (i id) String() string { return strconv.FormatUint(i.ms, 10) + "-" + strconv.FormatUint(i.n, 10) }

func (i id) time() time.Time { return time.UnixMilli(int64(i.ms)) } // #nosec G115 -- bounded by parseID

func parseID(text string) (i id, err error) {
	ms, n, _ := strings.Cut(text, "-")
	i.ms, err = strconv.ParseUint(ms, 10, 48)
	if err == nil {
		i.n, err = strconv.ParseUint(n, 10, 64)
	}
	if err != nil {
		return id{}, fmt.Errorf("'%s' is no id of a stream's entry", text)
	}
	return i, nil
}
