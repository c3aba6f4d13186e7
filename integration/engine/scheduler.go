package engine

import (
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// job is one request inside the scheduler. The handler that made it reads the
// atomics whenever wake has something.
type job struct {
	prompt Prompt
	output int // tokens to generate

	wake    chan struct{} // capacity 1
	made    atomic.Int64  // tokens generated so far
	over    atomic.Bool   // nothing more will come
	crashed atomic.Bool   // ... because the engine died

	// Guarded by scheduler.mu, except that the handler may read matched once
	// made is positive.
	state   state
	matched int // blocks found in the cache
}

type state uint8

const (
	waiting state = iota
	prefilling
	decoding
	done
)

func (j *job) cachedTokens() int { return j.matched * BlockTokens }

// total is the room that a job takes up in the cache, in blocks.
func (j *job) total() int {
	return (j.prompt.Tokens + j.output + BlockTokens - 1) / BlockTokens
}

// reusable are the blocks that may come from the cache. The last token is
// always computed: its output is the first token of the answer.
func (j *job) reusable() []uint64 {
	return j.prompt.Blocks[:(j.prompt.Tokens-1)/BlockTokens]
}

func (j *job) signal() {
	select {
	case j.wake <- struct{}{}:
	default:
	}
}

// scheduler is the engine's loop: prefill one prompt after the other, decode
// all running requests a token a step beside it. One goroutine and one timer
// serve every stream, so that hundreds of them keep an inter-token time of a
// millisecond: a late wake-up makes up for the steps it missed.
//
// It lives in its own time, which slows down and stands still with the engine.
type scheduler struct {
	cfg Config

	mu         sync.Mutex
	speed      float64 // own time by real time
	now        time.Duration
	read       time.Time // when now was brought up to date
	cache      *cache
	queue      []*job
	current    *job // being prefilled
	prefillEnd time.Duration
	decodes    []*job
	nextStep   time.Duration
	counts     counts

	wake chan struct{} // capacity 1: something was added that may be due sooner
	stop chan struct{}
	gone chan struct{}
}

// counts are the figures that only grow, in tokens.
type counts struct {
	prompt, cached, output int64
}

const never = time.Duration(math.MaxInt64)

func newScheduler(cfg Config) *scheduler {
	s := &scheduler{
		cfg:   cfg,
		speed: 1,
		read:  time.Now(),
		cache: newCache(cfg.CapacityTokens / BlockTokens),
		wake:  make(chan struct{}, 1),
		stop:  make(chan struct{}),
		gone:  make(chan struct{}),
	}
	go s.run()
	return s
}

func (s *scheduler) close() {
	close(s.stop)
	<-s.gone
}

func (s *scheduler) run() {
	defer close(s.gone)
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-timer.C:
		case <-s.wake:
		case <-s.stop:
			return
		}
		s.mu.Lock()
		s.advance()
		timer.Reset(s.untilDue())
		s.mu.Unlock()
	}
}

// submit queues a job, or says after how long it may be tried again.
func (s *scheduler) submit(j *job) (retryAfter time.Duration, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.advance()
	s.queue = append(s.queue, j)
	s.admit()
	if s.cfg.MaxWaiting > 0 && len(s.queue) > s.cfg.MaxWaiting {
		s.queue = s.queue[:len(s.queue)-1]
		tokens := 0
		for _, q := range s.queue {
			tokens += q.prompt.Tokens
		}
		return s.prefillTime(tokens), false
	}
	s.rouse()
	return 0, true
}

// match counts the tokens of a job's prompt that the cache holds now.
func (s *scheduler) match(j *job) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.advance()
	return s.cache.match(j.reusable()) * BlockTokens
}

// abort takes a job out, at whatever point it is.
func (s *scheduler) abort(j *job) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.advance()
	switch j.state {
	case done:
		return
	case waiting:
		s.queue = without(s.queue, j)
	case prefilling:
		s.current = nil
		s.cache.release(j.prompt.Blocks[:j.matched], j.total()-j.matched)
	case decoding:
		s.decodes = without(s.decodes, j)
		s.release(j)
	}
	j.state = done
	s.admit()
	s.rouse()
}

// crash ends every job and forgets the cache.
func (s *scheduler) crash() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.advance()
	jobs := slices.Concat(s.queue, s.decodes)
	if s.current != nil {
		jobs = append(jobs, s.current)
	}
	for _, j := range jobs {
		j.state = done
		j.crashed.Store(true)
		j.over.Store(true)
		j.signal()
	}
	s.queue, s.current, s.decodes = nil, nil, nil
	s.cache = newCache(s.cache.capacity)
}

// setSpeed slows the engine down (0.5: all takes twice as long) or stops it (0).
func (s *scheduler) setSpeed(speed float64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.advance()
	s.speed = speed
	s.rouse()
}

// load is what an engine says of itself.
type load struct {
	waiting, running int
	used             float64 // share of the cache held by running requests
	counts
}

func (s *scheduler) load() load {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.advance()
	return load{waiting: len(s.queue), running: s.running(), used: s.cache.used(), counts: s.counts}
}

func (s *scheduler) running() int {
	n := len(s.decodes)
	if s.current != nil {
		n++
	}
	return n
}

// advance brings the engine up to the present, event by event.
func (s *scheduler) advance() {
	t := time.Now()
	end := s.now + time.Duration(float64(t.Sub(s.read))*s.speed)
	s.read = t
	for {
		due := s.due()
		if due > end {
			break
		}
		s.now = due
		if s.current != nil && s.prefillEnd == due {
			s.endPrefill()
		} else {
			s.step()
		}
		s.admit()
	}
	s.now = end
}

// due is when the next event happens, in the engine's time.
func (s *scheduler) due() time.Duration {
	due := never
	if s.current != nil {
		due = s.prefillEnd
	}
	if len(s.decodes) > 0 {
		due = min(due, s.nextStep)
	}
	return due
}

// untilDue is how long the loop may sleep.
func (s *scheduler) untilDue() time.Duration {
	due := s.due()
	if due == never || s.speed == 0 {
		return time.Hour
	}
	return time.Duration(float64(due-s.now) / s.speed)
}

func (s *scheduler) rouse() {
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

// admit starts the prefill of the queue's head if the engine is free for it.
func (s *scheduler) admit() {
	if s.current != nil || len(s.queue) == 0 || s.running() >= s.cfg.MaxRunning {
		return
	}
	j := s.queue[0]
	matched, ok := s.cache.admit(j.reusable(), j.total())
	if !ok {
		return
	}
	s.queue = s.queue[1:]
	j.matched = matched
	j.state = prefilling
	s.current = j
	s.prefillEnd = s.now + s.prefillTime(j.prompt.Tokens-j.cachedTokens())
	s.counts.prompt += int64(j.prompt.Tokens)
	s.counts.cached += int64(j.cachedTokens())
}

func (s *scheduler) prefillTime(tokens int) time.Duration {
	return time.Duration(float64(tokens) / s.cfg.PrefillRate * float64(time.Second))
}

// endPrefill makes the prompt's blocks visible and the first token.
func (s *scheduler) endPrefill() {
	j := s.current
	s.current = nil
	s.cache.fill(j.prompt.Blocks[j.matched:])
	j.state = decoding
	if len(s.decodes) == 0 {
		s.nextStep = s.now + s.cfg.InterToken
	}
	s.decodes = append(s.decodes, j)
	s.generate(j)
	s.decodes = slices.DeleteFunc(s.decodes, isDone)
}

// step makes one more token for every running request.
func (s *scheduler) step() {
	for _, j := range s.decodes {
		s.generate(j)
	}
	s.decodes = slices.DeleteFunc(s.decodes, isDone)
	s.nextStep += s.cfg.InterToken
}

func (s *scheduler) generate(j *job) {
	s.counts.output++
	if j.made.Add(1) == int64(j.output) {
		s.release(j)
		j.state = done
		j.over.Store(true)
	}
	j.signal()
}

// release keeps what a decoding job computed, its output included, for reuse.
func (s *scheduler) release(j *job) {
	tail := j.prompt.After(j.prompt.Answer(int(j.made.Load())))
	s.cache.fill(tail)
	all := slices.Concat(j.prompt.Blocks, tail)
	s.cache.release(all, j.total()-len(all))
}

func isDone(j *job) bool { return j.state == done }

func without(jobs []*job, j *job) []*job {
	return slices.DeleteFunc(jobs, func(o *job) bool { return o == j })
}
