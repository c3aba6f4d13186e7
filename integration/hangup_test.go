package integration

import (
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
)

// departures are upstreams that stream until their client leaves, and note when
// that was for each request by its header Id.
type departures struct {
	mu      sync.Mutex
	present map[string]bool
	left    map[string]time.Time
}

func (d *departures) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	id := r.Header.Get("Id")
	d.mu.Lock()
	d.present[id] = true
	d.mu.Unlock()
	defer func() {
		d.mu.Lock()
		defer d.mu.Unlock()
		delete(d.present, id)
		d.left[id] = time.Now()
	}()
	if r.Header.Get("Silent") != "" { // a long prefill, before the headers
		<-r.Context().Done()
		return
	}
	w.Header().Set("Content-Type", "text/event-stream")
	tick := time.NewTicker(40 * time.Millisecond)
	defer tick.Stop()
	for {
		_, _ = io.WriteString(w, event(`{"choices":[{"delta":{"content":"on and on "}}]}`))
		_ = http.NewResponseController(w).Flush()
		select {
		case <-tick.C:
		case <-r.Context().Done():
			return
		}
	}
}

// A client that leaves, at whatever point, leaves the replica within a second,
// which then stops computing for nobody. A loaded machine takes longer; then no
// longer than under stock Caddy.
func TestAbortsReachTheReplica(t *testing.T) {
	const streams, atOnce = 1000, 40
	d := &departures{present: make(map[string]bool), left: make(map[string]time.Time)}
	addrs := ""
	for range 4 {
		addrs += newRecorder(t, d.ServeHTTP).addr() + " "
	}
	s := newSiteOf(t, sideBySide(addrs, addrs, "lb_retries 2"))
	var protocols []*http.Client
	for _, c := range clients() {
		protocols = append(protocols, c)
		defer c.CloseIdleConnections()
	}

	// Both sides take turns, so that what else the machine does meets both.
	gone := make(map[string]time.Time)
	var mu sync.Mutex
	var wg sync.WaitGroup
	ids := make(chan int)
	for range atOnce {
		wg.Go(func() {
			for i := range ids {
				side := []string{"ours", "stock"}[i%2]
				id := fmt.Sprintf("%s %d", side, i/2)
				ctx, cancel := context.WithCancel(t.Context())
				req, err := http.NewRequestWithContext(ctx, http.MethodPost, s.URL+chatPath, strings.NewReader(chat(true, words(id, 100+rand.IntN(8000)))))
				if err != nil {
					t.Error(err)
				}
				req.Header.Set("Content-Type", "application/json")
				req.Header.Set("Side", side)
				req.Header.Set("Id", id)
				leave := func() {
					mu.Lock()
					gone[id] = time.Now()
					mu.Unlock()
					cancel()
				}
				silent := i/2%5 == 0
				if silent {
					req.Header.Set("Silent", "1")
					time.AfterFunc(time.Duration(rand.Int64N(int64(300*time.Millisecond))), leave)
				}
				res, err := protocols[i/2%len(protocols)].Do(req)
				switch {
				case silent && err == nil:
					t.Errorf("%s: status %d before the answer", id, res.StatusCode)
					res.Body.Close()
				case silent: // it has left
				case err != nil:
					t.Errorf("%s: %v", id, err)
					cancel()
				default: // amid some event
					_, _ = io.CopyN(io.Discard, res.Body, rand.Int64N(600))
					leave()
					res.Body.Close()
				}
			}
		})
	}
	for i := range 2 * streams {
		ids <- i
	}
	close(ids)
	wg.Wait()
	eventually(t, "no request at the upstreams", func() bool {
		d.mu.Lock()
		defer d.mu.Unlock()
		return len(d.present) == 0
	})
	s.settled(t)

	delays := map[string][]time.Duration{}
	for id, left := range d.left {
		side, _, _ := strings.Cut(id, " ")
		delays[side] = append(delays[side], left.Sub(gone[id]))
	}
	for side, all := range delays {
		slices.Sort(all)
		t.Logf("%s: of %d aborted streams %d had reached their replica, which knew after %v (median), %v (p99), %v (at the latest)",
			side, streams, len(all), all[len(all)/2], all[len(all)*99/100], all[len(all)-1])
	}
	ours, stock := delays["ours"], delays["stock"]
	if len(ours) < streams/2 {
		t.Errorf("only %d of %d requests reached a replica", len(ours), streams)
	}
	if latest := ours[len(ours)-1]; latest > time.Second && latest > 2*stock[len(stock)-1] {
		t.Errorf("an abort took %v, at most %v under stock Caddy", latest, stock[len(stock)-1])
	}
}
