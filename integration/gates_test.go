package integration

import (
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
)

// gates are upstreams that hold every request back until they are opened, so
// that a test says itself what is simultaneous. Requests with a header Fate
// pass to theirs at once.
type gates struct {
	addrs []string
	fates *fates

	mu      sync.Mutex
	arrived []int // requests by upstream since the last opening
	open    chan struct{}
}

func newGates(t *testing.T, n int) *gates {
	t.Helper()
	g := &gates{arrived: make([]int, n), open: make(chan struct{})}
	for i := range n {
		server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { g.hold(i, w, r) }))
		g.addrs = append(g.addrs, server.Listener.Addr().String())
		t.Cleanup(server.Close)
	}
	t.Cleanup(func() { g.release() })
	return g
}

func (g *gates) upstreams() string { return strings.Join(g.addrs, " ") }

func (g *gates) hold(i int, w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(r.Body)
	if err != nil {
		return // the client has left
	}
	if r.Header.Get("Fate") != "" {
		g.fates.ServeHTTP(w, r)
		return
	}
	g.mu.Lock()
	g.arrived[i]++
	open := g.open
	g.mu.Unlock()
	select {
	case <-open:
		answer(w, strings.Contains(string(body), `"stream":true`))
	case <-r.Context().Done():
	}
}

// counts returns how many requests each gate has got since the last opening.
func (g *gates) counts() []int {
	g.mu.Lock()
	defer g.mu.Unlock()
	return slices.Clone(g.arrived)
}

// await waits for n requests altogether.
func (g *gates) await(t *testing.T, n int) {
	t.Helper()
	defer func() {
		if t.Failed() {
			g.release() // or whoever waits for the answers does so for ever
		}
	}()
	eventually(t, fmt.Sprintf("%d requests at the gates", n), func() bool {
		sum := 0
		for _, c := range g.counts() {
			sum += c
		}
		return sum >= n
	})
}

// release lets everything pass that waits now, and returns the counts up to now.
func (g *gates) release() []int {
	g.mu.Lock()
	defer g.mu.Unlock()
	arrived := g.arrived
	g.arrived = make([]int, len(arrived))
	close(g.open)
	g.open = make(chan struct{})
	return arrived
}

// take waits for n requests, lets them pass and returns where they were.
func (g *gates) take(t *testing.T, n int) []int {
	t.Helper()
	g.await(t, n)
	return g.release()
}

// answer is a complete answer of an engine that reports no cached tokens.
func answer(w http.ResponseWriter, stream bool) {
	if !stream {
		w.Header().Set("Content-Type", "application/json")
		_, _ = io.WriteString(w, `{"choices":[{"index":0,"message":{"role":"assistant","content":"yes"}}]}`)
		return
	}
	w.Header().Set("Content-Type", "text/event-stream")
	_, _ = io.WriteString(w, event(`{"choices":[{"index":0,"delta":{"content":"yes"}}]}`)+event("[DONE]"))
}

// event is a server-sent event.
func event(data string) string { return "data: " + data + "\n\n" }
