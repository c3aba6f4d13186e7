package faults

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prefix-affinity/caddy/integration/workload"
)

const (
	interToken   = 100 * time.Millisecond
	outputTokens = 12
	promptBytes  = 32_000 // of a conversation's first turn: 8,000 tokens, so that moving one is not done lightly
)

type message struct {
	Role    string `json:"role"`
	Content string `json:"content"`
}

// conversation is a client that talks to a site.
type conversation struct {
	name    string
	history []message
	tokens  int    // of an answer; 0: as many as engines like
	at      string // replica that gave the last answer
}

// words makes n bytes of text that no other name begins with.
func words(name string, n int) string {
	var b strings.Builder
	for i := 0; b.Len() < n; i++ {
		fmt.Fprintf(&b, "%s says %d. ", name, i)
	}
	return b.String()[:n]
}

// turn asks the next question. A question that was not answered is asked again
// the next time.
func (c *conversation) turn(ctx context.Context, client *http.Client, url string) (workload.Answer, error) {
	if n := len(c.history); n == 0 {
		c.history = []message{{"user", words(c.name, promptBytes)}}
	} else if c.history[n-1].Role == "assistant" {
		c.history = append(c.history, message{"user", words(fmt.Sprintf("%s, turn %d", c.name, n/2), 200)})
	}
	body, err := json.Marshal(map[string]any{
		"model": "simulated", "messages": c.history, "max_tokens": c.tokens,
		"stream": true, "stream_options": map[string]any{"include_usage": true},
	})
	if err != nil {
		return workload.Answer{}, err
	}
	a, err := workload.Ask(ctx, client, url+"/v1/chat/completions", body, nil)
	if err == nil {
		c.history = append(c.history, message{"assistant", a.Text})
		c.at = a.Replica
	}
	return a, err
}

// phase is a part of a run: before, during and after the fault.
type phase int

const (
	before phase = iota
	during
	after
	phases
)

// tally is what the clients of a site saw in one phase.
type tally struct {
	requests int
	broken   int // the answer had begun
	refused  int // there was none: another replica might have given it
	sound    int // of turns whose conversation was on a replica without a fault,
	stayed   int // so many were answered there
	attempts int // the most for an answered request
}

// load is a number of clients who talk to a site without a pause.
type load struct {
	url       string
	client    *http.Client
	untouched func(replica string) bool

	wg       sync.WaitGroup
	stop     atomic.Bool
	now      atomic.Int32 // phase
	inFlight atomic.Int32
	answered atomic.Int32 // clients that had an answer

	mu      sync.Mutex
	tallies [phases]tally
	errors  map[string]int // refusals by their reason
}

// counting notes how many attempts a request took, as the site's header tells.
type counting struct {
	*http.Transport
	load *load
}

func (c counting) RoundTrip(r *http.Request) (*http.Response, error) {
	res, err := c.Transport.RoundTrip(r)
	if err == nil {
		if n, err := strconv.Atoi(res.Header.Get("X-Attempts")); err == nil {
			c.load.mu.Lock()
			t := &c.load.tallies[c.load.now.Load()]
			t.attempts = max(t.attempts, n)
			c.load.mu.Unlock()
		}
	}
	return res, err
}

func newLoad(name, url string, clients int, untouched func(string) bool) *load {
	l := &load{url: url, untouched: untouched, errors: make(map[string]int)}
	l.client = &http.Client{Transport: counting{&http.Transport{MaxIdleConnsPerHost: 2 * clients}, l}}
	for i := range clients {
		c := &conversation{name: fmt.Sprintf("%s client %d", name, i)}
		l.wg.Go(func() { l.talk(c) })
	}
	return l
}

func (l *load) talk(c *conversation) {
	first := true
	for !l.stop.Load() {
		at, asked := c.at, l.now.Load()
		l.inFlight.Add(1)
		a, err := c.turn(context.Background(), l.client, l.url)
		l.inFlight.Add(-1)

		l.mu.Lock()
		t := &l.tallies[max(asked, min(l.now.Load(), int32(during)))] // a fault counts for the requests it meets
		t.requests++
		switch {
		case err == nil && at != "" && l.untouched(at):
			t.sound++
			if c.at == at {
				t.stayed++
			}
		case err == nil:
		case a.Replica != "":
			t.broken++
		default:
			t.refused++
			l.errors[fmt.Sprintf("%.60s", err)]++
		}
		l.mu.Unlock()

		if err != nil {
			time.Sleep(200 * time.Millisecond) // clients' libraries wait, too
		} else if first {
			first = false
			l.answered.Add(1)
		}
	}
}

// end waits for all clients to have their last answer.
func (l *load) end() {
	l.stop.Store(true)
	l.wg.Wait()
	l.client.CloseIdleConnections()
}

// total adds up all phases.
func (l *load) total() (sum tally) {
	for _, t := range l.tallies {
		sum.requests += t.requests
		sum.broken += t.broken
		sum.refused += t.refused
		sum.attempts = max(sum.attempts, t.attempts)
	}
	return sum
}

// kept is the share of the turns in a phase that were answered where their
// conversation was, of those on replicas without a fault.
func (l *load) kept(p phase) float64 {
	t := l.tallies[p]
	return float64(t.stayed) / float64(max(t.sound, 1))
}

// together lets conversations have a turn each at the same time.
func together(ctx context.Context, conversations []*conversation, url string) error {
	errs := make([]error, len(conversations))
	var wg sync.WaitGroup
	for i, c := range conversations {
		wg.Go(func() { _, errs[i] = c.turn(ctx, http.DefaultClient, url) })
	}
	wg.Wait()
	return errors.Join(errs...)
}

func newConversations(name string, n, tokens int) []*conversation {
	all := make([]*conversation, n)
	for i := range all {
		all[i] = &conversation{name: fmt.Sprintf("%s %02d", name, i), tokens: tokens}
	}
	return all
}
