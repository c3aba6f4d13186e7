// Command bench measures what prefix_affinity costs: one Caddy in a process of
// its own, four upstreams that answer at once, and the same requests through
// least_conn, least_conn with request_buffers and prefix_affinity, in turn and
// over several rounds, so that a noisy machine disturbs all alike. What counts
// are the ratios to least_conn, as medians of the rounds.
package main

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"io"
	"math"
	"net/http"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"text/tabwriter"
	"time"

	_ "github.com/prefix-affinity/caddy"
	"github.com/prefix-affinity/caddy/integration/harness"
)

var (
	rounds   = flag.Int("rounds", 5, "rounds that the medians are taken of")
	duration = flag.Duration("duration", time.Second, "time for each policy in a round")
	check    = flag.Bool("check", false, "fail where a cost is far beyond what is expected, for CI: 2 and 32 KB over 64 connections only")
)

func main() {
	harness.BeCaddy()
	flag.Parse()
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// policy is one of the ways to balance that are compared.
type policy struct {
	name, proxy string
	addr        string
}

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

// limits are the most that -check lets the median CPU time a request be, as a
// multiple of least_conn's: far enough from what is expected (1.1 and 1.35) for
// noise not to matter, near enough for a slip of a few times to show.
var limits = map[int]float64{2 << 10: 2, 32 << 10: 3}

func run() error {
	var upstreams []string
	for range 4 {
		up, err := serve()
		if err != nil {
			return err
		}
		defer up.Close()
		upstreams = append(upstreams, up.Addr)
	}
	policies := []*policy{
		{name: "least_conn", proxy: "lb_policy least_conn"},
		{name: "least_conn + request_buffers", proxy: "lb_policy least_conn\n\t\trequest_buffers 8MiB"},
		{name: "prefix_affinity", proxy: "lb_policy prefix_affinity"},
	}
	caddy, err := start(policies, strings.Join(upstreams, " "))
	if err != nil {
		return err
	}
	defer caddy.Close()

	var failed []error
	for _, s := range settings() {
		medians, err := caddy.compare(s, policies)
		if err != nil {
			return err
		}
		if limit := limits[s.bodyBytes]; *check && medians[2] > limit {
			failed = append(failed, fmt.Errorf("%s: prefix_affinity takes %.2f times the CPU time of least_conn, more than %.1f", s, medians[2], limit))
		}
	}
	return errors.Join(failed...)
}

func settings() (all []setting) {
	if *check {
		return []setting{{2 << 10, 64, false}, {32 << 10, 64, false}}
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

// serve runs an upstream that answers every request at once.
func serve() (*http.Server, error) {
	answer := []byte(`{"id":"x","object":"chat.completion","choices":[{"index":0,"message":{"role":"assistant","content":"ok"},"finish_reason":"stop"}],` +
		`"usage":{"prompt_tokens":500,"completion_tokens":1,"total_tokens":501,"prompt_tokens_details":{"cached_tokens":400}}}`)
	addr, err := harness.FreeAddr()
	if err != nil {
		return nil, err
	}
	server := &http.Server{Addr: addr, ReadHeaderTimeout: time.Minute, Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if _, err := io.Copy(io.Discard, r.Body); err == nil {
			w.Header().Set("Content-Type", "application/json")
			_, _ = w.Write(answer)
		}
	})}
	go func() {
		if err := server.ListenAndServe(); !errors.Is(err, http.ErrServerClosed) {
			fmt.Fprintln(os.Stderr, err)
		}
	}()
	return server, nil
}

// proxy is the Caddy that is measured, in a process of its own so that its CPU
// time can be told from that of the clients and upstreams.
type proxy struct{ *harness.Process }

func start(policies []*policy, upstreams string) (*proxy, error) {
	var config strings.Builder
	config.WriteString("{\n\tservers {\n\t\tprotocols h1 h2c\n\t}\n\tlog {\n\t\tlevel ERROR\n\t}\n}\n")
	for _, policy := range policies {
		var err error
		if policy.addr, err = harness.FreeAddr(); err != nil {
			return nil, err
		}
		fmt.Fprintf(&config, "http://%s {\n\treverse_proxy %s {\n\t\t%s\n\t}\n}\n", policy.addr, upstreams, policy.proxy)
	}
	process, err := harness.StartProcess(config.String())
	return &proxy{process}, err
}

// cpu returns the CPU time that the process has used, by its own metrics.
func (p *proxy) cpu() (time.Duration, error) {
	metrics, err := p.Metrics()
	if err != nil {
		return 0, err
	}
	used := metrics["process_cpu_seconds_total"]
	if used == nil {
		return 0, errors.New("no process_cpu_seconds_total: only Linux tells it")
	}
	return time.Duration(used.Metric[0].GetCounter().GetValue() * float64(time.Second)), nil
}

// figures of one policy in one round.
type figures struct{ cpu, rate, p50, p99 float64 }

// compare measures all policies under a setting and prints a table. It returns
// the median ratios of CPU time.
func (p *proxy) compare(s setting, policies []*policy) (cpu []float64, err error) {
	client := newClient(s)
	defer client.CloseIdleConnections()
	bodies := conversations(s.bodyBytes)
	measured := make([][]figures, len(policies))
	for round := range *rounds + 1 {
		for i, policy := range policies {
			f, err := p.measure(client, policy, s, bodies)
			if err != nil {
				return nil, fmt.Errorf("%s, %s: %w", s, policy.name, err)
			}
			if round > 0 { // the first warms up
				measured[i] = append(measured[i], f)
			}
		}
	}
	ratio := func(i int, of func(figures) float64) float64 {
		ratios := make([]float64, 0, len(measured[i]))
		for round := range measured[i] {
			ratios = append(ratios, of(measured[i][round])/of(measured[0][round]))
		}
		slices.Sort(ratios)
		return ratios[len(ratios)/2]
	}
	median := func(i int, of func(figures) float64) float64 {
		values := make([]float64, 0, len(measured[i]))
		for _, f := range measured[i] {
			values = append(values, of(f))
		}
		slices.Sort(values)
		return values[len(values)/2]
	}
	fmt.Printf("\n%s\n", s)
	t := tabwriter.NewWriter(os.Stdout, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t, "CPU/request\tratio\trequests/s\tratio\tp50\tp99\tratio\t\t")
	for i, policy := range policies {
		cpu = append(cpu, ratio(i, func(f figures) float64 { return f.cpu }))
		fmt.Fprintf(t, "%.0f µs\t%.2f\t%.0f\t%.2f\t%.2f ms\t%.2f ms\t%.2f\t  %s\t\n",
			1e6*median(i, func(f figures) float64 { return f.cpu }), cpu[i],
			median(i, func(f figures) float64 { return f.rate }), ratio(i, func(f figures) float64 { return f.rate }),
			1e3*median(i, func(f figures) float64 { return f.p50 }),
			1e3*median(i, func(f figures) float64 { return f.p99 }), ratio(i, func(f figures) float64 { return f.p99 }), policy.name)
	}
	return cpu, t.Flush()
}

func newClient(s setting) *http.Client {
	t := &http.Transport{MaxIdleConnsPerHost: s.connections, MaxConnsPerHost: s.connections, DisableCompression: true}
	if s.http2 {
		t.Protocols = new(http.Protocols)
		t.Protocols.SetUnencryptedHTTP2(true)
	}
	return &http.Client{Transport: t}
}

// measure sends requests for a while.
func (p *proxy) measure(client *http.Client, policy *policy, s setting, bodies [][]byte) (f figures, err error) {
	before, err := p.cpu()
	if err != nil {
		return f, err
	}
	var next atomic.Int64
	var mu sync.Mutex
	var times []float64
	var failures []error
	began := time.Now()
	var workers sync.WaitGroup
	for range s.connections {
		workers.Go(func() {
			var own []float64
			var failure error
			for failure == nil && time.Since(began) < *duration {
				sent := time.Now()
				failure = post(client, "http://"+policy.addr+"/v1/chat/completions", bodies[next.Add(1)%int64(len(bodies))])
				own = append(own, time.Since(sent).Seconds())
			}
			mu.Lock()
			defer mu.Unlock()
			times, failures = append(times, own...), append(failures, failure)
		})
	}
	workers.Wait()
	took := time.Since(began)
	after, err := p.cpu()
	if err := errors.Join(append(failures, err)...); err != nil {
		return f, err
	}
	slices.Sort(times)
	at := func(share float64) float64 {
		return times[int(math.Min(share*float64(len(times)), float64(len(times)-1)))]
	}
	n := float64(len(times))
	return figures{(after - before).Seconds() / n, n / took.Seconds(), at(0.5), at(0.99)}, nil
}

func post(client *http.Client, url string, body []byte) error {
	res, err := client.Post(url, "application/json", bytes.NewReader(body))
	if err != nil {
		return err
	}
	_, err = io.Copy(io.Discard, res.Body)
	if res.StatusCode != http.StatusOK {
		err = fmt.Errorf("status %s", res.Status)
	}
	return errors.Join(err, res.Body.Close())
}

// conversations makes chat requests of n bytes: 64 conversations of one tenant,
// a third of each the shared system prompt, in messages of 2 KB.
func conversations(n int) [][]byte {
	bodies := make([][]byte, 64)
	for i := range bodies {
		var b bytes.Buffer
		fmt.Fprintf(&b, `{"model":"m","messages":[{"role":"system","content":%q}`, words("system", n/3))
		for turn := 0; b.Len() < n-100; turn++ {
			role := [...]string{"user", "assistant"}[turn%2]
			fmt.Fprintf(&b, `,{"role":%q,"content":%q}`, role, words(fmt.Sprintf("%d.%d", i, turn), min(2000, n-100-b.Len())))
		}
		b.WriteString(`]}`)
		bodies[i] = b.Bytes()
	}
	return bodies
}

func words(name string, n int) string {
	var b strings.Builder
	for i := 0; b.Len() < n; i++ {
		fmt.Fprintf(&b, "%s says \"%d\" – naïve. ", name, i)
	}
	return strings.ToValidUTF8(b.String()[:n], "")
}
