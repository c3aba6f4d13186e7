package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"text/tabwriter"
	"time"

	"github.com/prefix-affinity/caddy/integration/measure"
)

// setting is one kind of load.
type setting struct {
	bodyBytes   int
	connections int
	http2       bool
}

func (s setting) String() string {
	protocol := "HTTP/1.1"
	if s.http2 {
		protocol = "HTTP/2"
	}
	return fmt.Sprintf("%d KB, %d connections, %s", s.bodyBytes>>10, s.connections, protocol)
}

// requestLimits are the most that -check lets the CPU time of a request be, as a
// multiple of least_conn's. What was measured is 1.08, 1.12 and 2.07; ten times
// as much on top of least_conn would be 1.8, 2.2 and 12.
var requestLimits = map[int]float64{2 << 10: 1.5, 32 << 10: 2, 512 << 10: 4}

func settings() (all []setting) {
	if *check {
		return []setting{{2 << 10, 64, false}, {32 << 10, 64, false}, {512 << 10, 64, false}}
	}
	for _, http2 := range []bool{false, true} {
		for _, size := range []int{2 << 10, 32 << 10, 512 << 10} {
			for _, connections := range []int{1, 64} {
				all = append(all, setting{size, connections, http2})
			}
		}
	}
	return all
}

const answer = `{"id":"x","object":"chat.completion","choices":[{"index":0,"message":{"role":"assistant","content":"ok"},"finish_reason":"stop"}],` +
	`"usage":{"prompt_tokens":500,"completion_tokens":1,"total_tokens":501,"prompt_tokens_details":{"cached_tokens":400}}}`

func answerAtOnce(w http.ResponseWriter, r *http.Request) {
	if _, err := io.Copy(io.Discard, r.Body); err == nil {
		w.Header().Set("Content-Type", "application/json")
		_, _ = io.WriteString(w, answer)
	}
}

// requests compares policies under all settings.
func requests(out io.Writer) error {
	upstreams, stop, err := serve(4, answerAtOnce)
	if err != nil {
		return err
	}
	defer stop()
	policies := []policy{leastConn, buffering, affinity}
	if *check {
		policies = []policy{leastConn, affinity}
	}
	proxies, stop, err := startAll(policies, upstreams)
	if err != nil {
		return err
	}
	defer stop()
	if err := fill(proxies); err != nil {
		return fmt.Errorf("filling the caches: %w", err)
	}
	var failed []error
	for _, s := range settings() {
		cpu, err := compare(out, s, proxies)
		if err != nil {
			return fmt.Errorf("%s: %w", s, err)
		}
		if limit := requestLimits[s.bodyBytes]; *check && cpu > limit {
			failed = append(failed, fmt.Errorf("%s: prefix_affinity takes %.2f times the CPU time of least_conn, more than %.1f", s, cpu, limit))
		}
		if *profile && s.connections > 1 && !s.http2 {
			if err := parts(out, s, proxies); err != nil {
				return err
			}
		}
	}
	return errors.Join(failed...)
}

// fill sends every proxy prompts of 4M tokens, which makes 1M for each of its
// upstreams: what its index is about where it has run for a while.
func fill(proxies []*proxy) error {
	l := newLoad(setting{bodyBytes: 512 << 10, connections: 1})
	defer l.close()
	for _, x := range proxies {
		for range 32 {
			if err := post(l.clients[0], "http://"+x.addr+"/v1/chat/completions", l.body()); err != nil {
				return err
			}
		}
	}
	return nil
}

// figures of one policy in one round.
type figures struct{ cpu, rate, p50, p99 float64 }

// compare measures all policies under a setting, prints a table and returns the
// ratio of CPU time for the last of them.
func compare(out io.Writer, s setting, proxies []*proxy) (float64, error) {
	measured := make([][]figures, len(proxies))
	l := newLoad(s)
	defer l.close()
	for round := range *rounds + 1 {
		totals := make([]total, len(proxies))
		for n := range *perRound {
			for i := range proxies {
				i = (i + n) % len(proxies) // nobody always comes first
				if err := l.run(proxies[i], *slice, &totals[i]); err != nil {
					return 0, err
				}
			}
		}
		for i := range totals {
			if round > 0 { // the first warms up
				measured[i] = append(measured[i], totals[i].figures())
			}
		}
	}
	fmt.Fprintf(out, "\n%s\n", s)
	t := tabwriter.NewWriter(out, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t, "CPU/request\tratio\trequests/s\tratio\tp50\tp99\tratio\t\t")
	cpu := func(f figures) float64 { return f.cpu }
	rate := func(f figures) float64 { return f.rate }
	p50 := func(f figures) float64 { return f.p50 }
	p99 := func(f figures) float64 { return f.p99 }
	for i, m := range measured {
		fmt.Fprintf(t, "%.0f µs\t%v\t%.0f\t%v\t%.2f ms\t%.2f ms\t%v\t  %s\t\n", 1e6*median(m, cpu), over(m, measured[0], cpu),
			median(m, rate), over(m, measured[0], rate), 1e3*median(m, p50), 1e3*median(m, p99), over(m, measured[0], p99), proxies[i].name)
	}
	last := measured[len(measured)-1]
	return over(last, measured[0], cpu).median, t.Flush()
}

// total is what slices add up to.
type total struct {
	cpu, wall time.Duration
	times     []float64
	allocs    uint64
	allocated uint64
	lockWait  float64
}

func (t *total) figures() figures {
	slices.Sort(t.times)
	n := float64(len(t.times))
	return figures{t.cpu.Seconds() / n, n / t.wall.Seconds(), quantile(t.times, 0.5), quantile(t.times, 0.99)}
}

// load sends requests over connections of its own.
type load struct {
	clients []*http.Client
	heads   []string // bodies without their ends
	sent    atomic.Int64
}

func newLoad(s setting) *load {
	l := &load{}
	for range s.connections {
		t := &http.Transport{DisableCompression: true}
		if s.http2 {
			t.Protocols = new(http.Protocols)
			t.Protocols.SetUnencryptedHTTP2(true)
		}
		l.clients = append(l.clients, &http.Client{Transport: t})
	}
	for c := range 64 {
		head, _, _ := strings.Cut(string(measure.Chat{Bytes: s.bodyBytes, Conversation: uint64(c)}.JSON()), `"}],"stream":`)
		l.heads = append(l.heads, head)
	}
	return l
}

func (l *load) close() {
	for _, c := range l.clients {
		c.CloseIdleConnections()
	}
}

// body returns the body of a request that nobody has sent.
func (l *load) body() []byte {
	n := l.sent.Add(1)
	return fmt.Appendf(nil, `%s %d"}],"stream":true}`, l.heads[n%int64(len(l.heads))], n)
}

// run sends requests one after the other on each connection for a while.
func (l *load) run(x *proxy, d time.Duration, t *total) error {
	before, err := x.used()
	if err != nil {
		return err
	}
	began := time.Now()
	var mu sync.Mutex
	var failures []error
	var workers sync.WaitGroup
	for _, client := range l.clients {
		workers.Go(func() {
			var times []float64
			var failure error
			for failure == nil && time.Since(began) < d {
				body := l.body()
				sent := time.Now()
				failure = post(client, "http://"+x.addr+"/v1/chat/completions", body)
				times = append(times, time.Since(sent).Seconds())
			}
			mu.Lock()
			defer mu.Unlock()
			t.times, failures = append(t.times, times...), append(failures, failure)
		})
	}
	workers.Wait()
	t.wall += time.Since(began)
	after, err := x.used()
	t.cpu += after.CPU - before.CPU
	t.allocs += after.Allocs - before.Allocs
	t.allocated += after.Allocated - before.Allocated
	t.lockWait += after.LockWait - before.LockWait
	return errors.Join(append(failures, err)...)
}

func post(client *http.Client, url string, body []byte) error {
	res, err := ask(context.Background(), client, url, body)
	if err != nil {
		return err
	}
	_, err = io.Copy(io.Discard, res.Body)
	return errors.Join(err, res.Body.Close())
}

// ask returns a response of status 200.
func ask(ctx context.Context, client *http.Client, url string, body []byte) (*http.Response, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url, bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	req.Header.Set("Content-Type", "application/json")
	res, err := client.Do(req)
	if err != nil {
		return nil, err
	}
	if res.StatusCode != http.StatusOK {
		return nil, errors.Join(fmt.Errorf("status %s", res.Status), res.Body.Close())
	}
	return res, nil
}
