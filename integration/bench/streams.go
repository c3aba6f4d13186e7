package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"text/tabwriter"
	"time"

	"github.com/prefix-affinity/caddy/integration/measure"
)

// streaming is how many streams there are at once, and how fast each is.
type streaming struct {
	streams         int
	tokensPerSecond int
}

// -check lets streams cost these multiples of least_conn. Delays are mostly the
// scheduler's; what held tokens up until the next one would add ten times as much.
const streamCPULimit, streamDelayLimit = 1.8, 8.0

// epoch is what delays are measured from: upstreams and clients are one process.
var epoch = time.Now()

// token is a chunk of an answer, with the time when it was sent.
const token = `data: {"id":"x","object":"chat.completion.chunk","choices":[{"index":0,"delta":{"content":" token"},"finish_reason":null}],"sent":%d}` + "\n\n"

// answerSlowly streams tokens until the client has enough.
func answerSlowly(w http.ResponseWriter, r *http.Request) {
	if _, err := io.Copy(io.Discard, r.Body); err != nil {
		return
	}
	perSecond, err := strconv.Atoi(r.URL.Query().Get("tokens_per_second"))
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	w.Header().Set("Content-Type", "text/event-stream")
	interval := time.Second / time.Duration(perSecond)
	time.Sleep(rand.N(interval)) // they don't speak in chorus
	ticks := time.NewTicker(interval)
	defer ticks.Stop()
	for r.Context().Err() == nil {
		if _, err := fmt.Fprintf(w, token, time.Since(epoch)); err != nil || http.NewResponseController(w).Flush() != nil {
			return
		}
		select {
		case <-ticks.C:
		case <-r.Context().Done():
		}
	}
}

// streams compares the delay of tokens and the CPU time that they take.
func streams(out io.Writer) error {
	upstreams, stop, err := serve(4, answerSlowly)
	if err != nil {
		return err
	}
	defer stop()
	proxies, stop, err := startAll([]policy{leastConn, affinity}, upstreams)
	if err != nil {
		return err
	}
	defer stop()
	all := []streaming{{64, 50}, {256, 10}}
	if *check {
		all = all[:1]
	}
	var failed []error
	for _, s := range all {
		cpu, delay, err := s.compare(out, proxies)
		if err != nil {
			return err
		}
		if *check && (cpu > streamCPULimit || delay > streamDelayLimit) {
			failed = append(failed, fmt.Errorf("streams: prefix_affinity takes %.2f times the CPU time of least_conn and %.2f times its delay, more than %.1f or %.1f",
				cpu, delay, streamCPULimit, streamDelayLimit))
		}
	}
	return errors.Join(failed...)
}

func (s streaming) compare(out io.Writer, proxies []*proxy) (cpuRatio, delayRatio float64, err error) {
	measured := make([][]figures, len(proxies))
	for round := range *rounds + 1 {
		totals := make([]total, len(proxies))
		for n := range max(*perRound/4, 1) {
			for i := range proxies {
				i = (i + n + round) % len(proxies)
				if err := s.run(proxies[i], 5**slice, &totals[i]); err != nil {
					return 0, 0, err
				}
			}
		}
		for i := range totals {
			if round > 0 {
				measured[i] = append(measured[i], totals[i].figures())
			}
		}
	}
	fmt.Fprintf(out, "\n%d streams of %d tokens/s\n", s.streams, s.tokensPerSecond)
	t := tabwriter.NewWriter(out, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t, "CPU/token\tratio\tp50\tratio\tp99\tratio\t\t")
	cpu := func(f figures) float64 { return f.cpu }
	p50 := func(f figures) float64 { return f.p50 }
	p99 := func(f figures) float64 { return f.p99 }
	for i, m := range measured {
		fmt.Fprintf(t, "%.1f µs\t%v\t%.3f ms\t%v\t%.2f ms\t%v\t  %s\t\n", 1e6*median(m, cpu), over(m, measured[0], cpu),
			1e3*median(m, p50), over(m, measured[0], p50), 1e3*median(m, p99), over(m, measured[0], p99), proxies[i].name)
	}
	last := measured[len(measured)-1]
	return over(last, measured[0], cpu).median, over(last, measured[0], p50).median, t.Flush()
}

// run opens streams, measures for a while, and ends them.
func (s streaming) run(x *proxy, d time.Duration, t *total) error {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	client := &http.Client{Transport: &http.Transport{DisableCompression: true}}
	defer client.CloseIdleConnections()
	url := fmt.Sprintf("http://%s/v1/chat/completions?tokens_per_second=%d", x.addr, s.tokensPerSecond)
	var mu sync.Mutex
	var failures []error
	var from, to time.Duration // tokens sent in between count
	var started, readers sync.WaitGroup
	started.Add(s.streams)
	ready := make(chan struct{})
	for i := range s.streams {
		readers.Go(func() {
			begun := sync.OnceFunc(started.Done)
			defer begun()
			res, err := ask(ctx, client, url, measure.Chat{Bytes: 2 << 10, Conversation: uint64(i)}.JSON())
			if err != nil {
				mu.Lock()
				failures = append(failures, err)
				mu.Unlock()
				return
			}
			defer res.Body.Close()
			var sent, came []time.Duration
			for lines := bufio.NewScanner(res.Body); lines.Scan(); {
				now := time.Since(epoch)
				if _, at, ok := strings.Cut(lines.Text(), `"sent":`); ok {
					begun()
					if ns, err := strconv.ParseInt(strings.TrimSuffix(at, "}"), 10, 64); err == nil {
						sent, came = append(sent, time.Duration(ns)), append(came, now)
					}
				}
			}
			<-ready // the window is known
			mu.Lock()
			defer mu.Unlock()
			for i := range sent {
				if sent[i] >= from && sent[i] < to {
					t.times = append(t.times, (came[i] - sent[i]).Seconds())
				}
			}
		})
	}
	started.Wait()
	before, err := x.used()
	from = time.Since(epoch)
	time.Sleep(d)
	after, err2 := x.used()
	to = time.Since(epoch)
	close(ready)
	time.Sleep(20 * time.Millisecond) // for what is on its way
	cancel()
	readers.Wait()
	t.cpu, t.wall = t.cpu+after.CPU-before.CPU, t.wall+to-from
	if len(failures) == 0 && len(t.times) == 0 {
		err = errors.Join(err, errors.New("no tokens came"))
	}
	return errors.Join(append(failures, err, err2)...)
}
