package engine

import (
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

// These tests run in a bubble of testing/synctest, whose clock is exact.

// simulate runs f with a scheduler in a bubble.
func simulate(t *testing.T, cfg Config, f func(t *testing.T, s *scheduler)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		s := newScheduler(cfg.withDefaults())
		defer s.close()
		f(t, s)
	})
}

// start submits a prompt of so many tokens that shares none with other names.
func start(t *testing.T, s *scheduler, name string, tokens, output int) *job {
	t.Helper()
	text := strings.Repeat(name+strings.Repeat(".", BytesPerToken-len(name)), tokens)
	r := request{Prompt: []byte(`"` + text + `"`)}
	p, err := r.prompt(completionsPath)
	if err != nil {
		t.Fatal(err)
	}
	j := &job{prompt: p, output: output, wake: make(chan struct{}, 1)}
	if _, ok := s.submit(j); !ok {
		t.Fatal("queue full")
	}
	return j
}

// await waits for so many tokens of the answer.
func (j *job) await(tokens int) {
	for int(j.made.Load()) < tokens && !j.over.Load() {
		<-j.wake
	}
}

// took checks how long something took, to the microsecond that rounding costs.
func took(t *testing.T, what string, begin time.Time, want time.Duration) {
	t.Helper()
	if d := time.Since(begin) - want; d.Abs() > time.Microsecond {
		t.Errorf("%s after %v instead of %v", what, time.Since(begin), want)
	}
}

func TestPrefill(t *testing.T) {
	cfg := Config{PrefillRate: 1000, InterToken: 10 * time.Millisecond}
	simulate(t, cfg, func(t *testing.T, s *scheduler) {
		begin := time.Now()
		j := start(t, s, "a", 1000, 3)
		j.await(1)
		took(t, "first token", begin, time.Second)
		j.await(3)
		took(t, "last token", begin, time.Second+20*time.Millisecond)

		// All of it but the block with the last token is in the cache now.
		begin = time.Now()
		j = start(t, s, "a", 1008, 1)
		j.await(1)
		took(t, "first token of the cached prompt", begin, 16*time.Millisecond)
		if j.cachedTokens() != 992 {
			t.Errorf("%d tokens cached instead of 992", j.cachedTokens())
		}
		if l := s.load(); l.prompt != 2008 || l.cached != 992 || l.output != 4 || l.used != 0 {
			t.Errorf("load %+v", l)
		}
	})
}

func TestPrefillInOrder(t *testing.T) {
	simulate(t, Config{PrefillRate: 1000}, func(t *testing.T, s *scheduler) {
		begin := time.Now()
		long, short, twin := start(t, s, "a", 2000, 1), start(t, s, "b", 100, 1), start(t, s, "a", 2000, 1)
		if l := s.load(); l.running != 1 || l.waiting != 2 {
			t.Errorf("load %+v", l)
		}
		long.await(1)
		took(t, "first", begin, 2*time.Second)
		short.await(1)
		took(t, "second", begin, 2100*time.Millisecond)
		twin.await(1) // the first one's prompt was in the cache when its turn came
		took(t, "third", begin, 2116*time.Millisecond)
	})
}

func TestMaxRunning(t *testing.T) {
	cfg := Config{PrefillRate: 1000, InterToken: time.Second, MaxRunning: 2}
	simulate(t, cfg, func(t *testing.T, s *scheduler) {
		begin := time.Now()
		start(t, s, "a", 100, 3) // until 2.1 s
		start(t, s, "b", 100, 9)
		j := start(t, s, "c", 100, 1)
		j.await(1)
		took(t, "third request", begin, 2200*time.Millisecond)
	})
}

func TestMemory(t *testing.T) {
	cfg := Config{PrefillRate: 1000, InterToken: time.Second, CapacityTokens: 160}
	simulate(t, cfg, func(t *testing.T, s *scheduler) {
		begin := time.Now()
		start(t, s, "a", 78, 2)      // 5 blocks, until the step at 1.078 s
		start(t, s, "b", 62, 2)      // 4 blocks
		j := start(t, s, "c", 20, 1) // 2 blocks
		if l := s.load(); l.used != 0.5 {
			t.Errorf("%g of the memory used by the first", l.used)
		}
		j.await(1)
		took(t, "third request", begin, 1098*time.Millisecond)
	})
}

func TestSpeed(t *testing.T) {
	simulate(t, Config{PrefillRate: 1000, InterToken: 100 * time.Millisecond}, func(t *testing.T, s *scheduler) {
		begin := time.Now()
		j := start(t, s, "a", 1000, 2)
		time.Sleep(500 * time.Millisecond) // half of the prefill
		s.setSpeed(0)
		time.Sleep(10 * time.Second)
		s.setSpeed(0.5)
		j.await(1)
		took(t, "first token", begin, 11500*time.Millisecond)
		j.await(2)
		took(t, "second token", begin, 11700*time.Millisecond)
	})
}

func TestMaxWaiting(t *testing.T) {
	simulate(t, Config{PrefillRate: 1000, MaxWaiting: 1}, func(t *testing.T, s *scheduler) {
		start(t, s, "a", 2000, 1)
		start(t, s, "b", 3000, 1)
		p, err := Tokenize(completionsPath, []byte(`{"prompt":"hello"}`))
		if err != nil {
			t.Fatal(err)
		}
		after, ok := s.submit(&job{prompt: p, output: 1, wake: make(chan struct{}, 1)})
		if ok || after != 3*time.Second {
			t.Errorf("a second waiting request: %t, retry after %v", ok, after)
		}
		if l := s.load(); l.waiting != 1 {
			t.Errorf("%d waiting", l.waiting)
		}
	})
}

func TestAbort(t *testing.T) {
	for _, c := range []struct {
		name   string
		after  time.Duration
		cached int // blocks of the aborted prompt left
	}{
		{"prefill/freed at once", 400 * time.Millisecond, 0},
		{"decode/prompt stays", 1500 * time.Millisecond, 62},
	} {
		t.Run(c.name, func(t *testing.T) {
			cfg := Config{PrefillRate: 1000, InterToken: time.Second, MaxRunning: 1}
			simulate(t, cfg, func(t *testing.T, s *scheduler) {
				j := start(t, s, "a", 1000, 100)
				waits := start(t, s, "w", 100, 1)
				next := start(t, s, "b", 100, 1)
				s.abort(waits)
				time.Sleep(c.after)
				if n := next.made.Load(); n != 0 {
					t.Fatalf("the next request has %d tokens already", n)
				}
				s.abort(j)
				s.abort(j) // once more does nothing
				begin := time.Now()
				next.await(1)
				took(t, "the next request", begin, 100*time.Millisecond)
				if l := s.load(); l.used != 0 || l.running != 0 || l.waiting != 0 {
					t.Errorf("left behind: %+v", l)
				}
				if n := s.cache.match(j.prompt.Blocks); n != c.cached {
					t.Errorf("%d blocks of the prompt are cached instead of %d", n, c.cached)
				}
			})
		})
	}
}

func TestCrash(t *testing.T) {
	cfg := Config{PrefillRate: 1000, InterToken: time.Second}
	simulate(t, cfg, func(t *testing.T, s *scheduler) {
		jobs := []*job{start(t, s, "a", 100, 100), start(t, s, "b", 1000, 1), start(t, s, "c", 100, 1)}
		time.Sleep(200 * time.Millisecond) // decoding, in prefill, waiting
		s.crash()
		for i, j := range jobs {
			j.await(100)
			if !j.crashed.Load() {
				t.Errorf("request %d knows nothing of the crash", i)
			}
			s.abort(j)
		}
		if l := s.load(); l.used != 0 || l.running != 0 || l.waiting != 0 {
			t.Errorf("left behind: %+v", l)
		}
		begin := time.Now()
		start(t, s, "a", 100, 1).await(1)
		took(t, "first token with the cache empty", begin, 100*time.Millisecond)
	})
}
