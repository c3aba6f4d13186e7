package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"sync"
	"sync/atomic"
	"text/tabwriter"
	"time"

	"github.com/prefix-affinity/caddy/integration/measure"
)

// patient upstreams take whole bodies and answer when they are told to.
type patient struct {
	taken  atomic.Int64
	answer chan struct{} // closed: a first token
	finish chan struct{} // closed: the rest
}

func (p *patient) serve(w http.ResponseWriter, r *http.Request) {
	if _, err := io.Copy(io.Discard, r.Body); err != nil {
		return
	}
	p.taken.Add(1)
	<-p.answer
	w.Header().Set("Content-Type", "text/event-stream")
	if _, err := fmt.Fprintf(w, token, 0); err == nil {
		_ = http.NewResponseController(w).Flush()
		<-p.finish
	}
}

// memory holds requests of several sizes and tells what each takes of the
// proxy's memory while it waits, while its answer streams, and afterwards.
func memory(out io.Writer) error {
	t := tabwriter.NewWriter(out, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t, "\trequests\tbody\tpeak RSS\theap waiting\teach\tbodies in powers of two\theap answering\theap after\tRSS after\tRSS before\t")
	for _, p := range []policy{leastConn, buffering, affinity} {
		for _, size := range []int{2 << 10, 32 << 10, 500 << 10} {
			for _, n := range []int{100, 1000} {
				if err := hold(t, p, n, size); err != nil {
					return fmt.Errorf("%s, %d of %d KB: %w", p.name, n, size>>10, err)
				}
			}
		}
	}
	return t.Flush()
}

func hold(out io.Writer, p policy, n, size int) error {
	engines := &patient{answer: make(chan struct{}), finish: make(chan struct{})}
	upstreams, stop, err := serve(4, engines.serve)
	if err != nil {
		return err
	}
	defer stop()
	x, err := p.start(upstreams)
	if err != nil {
		return err
	}
	defer x.Close()
	before, err := x.collected()
	if err != nil {
		return err
	}

	body := measure.Chat{Bytes: size}.JSON()
	client := &http.Client{Transport: &http.Transport{DisableCompression: true}}
	defer client.CloseIdleConnections()
	failures := make(chan error, n)
	var first, all sync.WaitGroup
	first.Add(n)
	for range n {
		all.Go(func() {
			began := sync.OnceFunc(first.Done)
			defer began()
			res, err := ask(context.Background(), client, "http://"+x.addr+"/v1/chat/completions", body)
			if err == nil {
				_, err = res.Body.Read(make([]byte, 1))
				began()
				if err == nil {
					_, err = io.Copy(io.Discard, res.Body)
				}
				err = errors.Join(err, res.Body.Close())
			}
			failures <- err
		})
	}
	for engines.taken.Load() < int64(n) {
		if len(failures) > 0 {
			return <-failures
		}
		time.Sleep(10 * time.Millisecond)
	}
	peak, err := x.used()
	if err != nil {
		return err
	}
	waiting, err := x.collected()
	if err != nil {
		return err
	}
	close(engines.answer)
	first.Wait()
	answering, err := x.collected()
	if err != nil {
		return err
	}
	close(engines.finish)
	all.Wait()
	client.CloseIdleConnections()
	if _, err = x.collected(); err != nil {
		return err
	}
	time.Sleep(5 * time.Second) // the runtime returns memory in the background
	after, err := x.collected()
	if err != nil {
		return err
	}
	close(failures)
	for err := range failures {
		if err != nil {
			return err
		}
	}
	room := 4096
	for room <= len(body) {
		room *= 2
	}
	const mib = 1 << 20
	_, err = fmt.Fprintf(out, "%s\t%d\t%d KB\t%d MiB\t%d MiB\t%d KiB\t%d MiB\t%d MiB\t%d MiB\t%d MiB\t%d MiB\t\n", p.name, n, size>>10,
		peak.RSS/mib, waiting.HeapInuse/mib, (int64(waiting.HeapInuse)-int64(before.HeapInuse))/int64(n)/1024, n*room/mib,
		answering.HeapInuse/mib, after.HeapInuse/mib, after.RSS/mib, before.RSS/mib)
	return err
}
