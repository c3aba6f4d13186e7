package integration

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	dto "github.com/prometheus/client_model/go"

	"github.com/prefix-affinity/caddy/integration/harness"
)

// site is a running Caddy with one reverse_proxy.
type site struct {
	caddyServer

	Admin   string // base URL of the admin endpoint
	URL     string
	addr    string
	server  string       // options
	client  *http.Client // that post uses
	stopped bool
}

// caddyServer is a Caddy in this process or in one of its own.
type caddyServer interface {
	Reload(caddyfile string) error
	Log() (string, error)
	Metrics() (map[string]*dto.MetricFamily, error)
	Stop() error
}

// process is a Caddy in a process of its own that leaves nothing behind.
type process struct{ *harness.Process }

func (p process) Stop() error { return p.Close() }

// newSite runs a reverse_proxy with the given upstreams and the given lines in
// its block.
func newSite(t *testing.T, upstreams, proxy string) *site {
	t.Helper()
	return newSiteOf(t, proxyTo(upstreams, proxy))
}

// newSiteOf runs a site of the given directives.
func newSiteOf(t *testing.T, directives string) *site {
	t.Helper()
	return newSiteWith(t, "", directives)
}

// newSiteWith runs a site of the given directives on a server with the given
// options.
func newSiteWith(t *testing.T, server, directives string) *site {
	t.Helper()
	s := newSiteAt(t)
	s.server = server
	s.start(t, s.file(directives))
	return s
}

// newProcess runs a site of the given directives in a process of its own, so
// that its memory and its goroutines are its own.
func newProcess(t *testing.T, directives string) *site {
	t.Helper()
	s := newSiteAt(t)
	p, err := harness.StartProcess(s.file(directives))
	if err != nil {
		t.Fatal(err)
	}
	s.caddyServer, s.Admin = process{p}, p.Admin
	s.stopAfter(t)
	return s
}

// newSiteAt finds an address for a site that is yet to be started.
func newSiteAt(t *testing.T) *site {
	t.Helper()
	addr, err := harness.FreeAddr()
	if err != nil {
		t.Fatal(err)
	}
	return &site{URL: "http://" + addr, addr: addr, client: http.DefaultClient}
}

// start runs a Caddyfile.
func (s *site) start(t *testing.T, caddyfile string) {
	t.Helper()
	c, err := harness.StartCaddy(caddyfile)
	if err != nil {
		t.Fatal(err)
	}
	s.caddyServer, s.Admin = c, c.Admin
	s.stopAfter(t)
}

// stopAfter stops the Caddy when the test ends, if nothing has before.
func (s *site) stopAfter(t *testing.T) {
	t.Helper()
	t.Cleanup(func() {
		if t.Failed() {
			if log, err := s.Log(); err == nil {
				t.Logf("caddy's log ends:\n%s", log[max(0, len(log)-4000):])
			}
		}
		if s.stopped {
			return
		}
		if err := s.Stop(); err != nil {
			t.Error(err)
		}
	})
}

func (s *site) file(directives string) string {
	return fmt.Sprintf("{\n\tdefault_bind 127.0.0.1\n\tgrace_period 1s\n\tservers {\n\t\tprotocols h1 h2c\n\t\t%s\n\t}\n}\nhttp://%s {\n\t%s\n}\n", s.server, s.addr, directives)
}

// proxyTo is a reverse_proxy directive.
func proxyTo(upstreams, proxy string) string {
	return fmt.Sprintf("reverse_proxy %s {\n\t\t%s\n\t}", upstreams, proxy)
}

// policy is a line of reverse_proxy with our policy and its options, of which
// explain is always one.
func policy(options ...string) string {
	return "lb_policy prefix_affinity {\n\t\t\t" + strings.Join(append(options, "explain"), "\n\t\t\t") + "\n\t\t}\n\t\t"
}

// reload changes the proxy's upstreams and lines.
func (s *site) reload(t *testing.T, upstreams, proxy string) {
	t.Helper()
	s.reloadTo(t, proxyTo(upstreams, proxy))
}

// reloadTo changes the site's directives.
func (s *site) reloadTo(t *testing.T, directives string) {
	t.Helper()
	if err := s.Reload(s.file(directives)); err != nil {
		t.Error(err)
	}
	s.reloaded(t)
}

// reloaded waits until the listener of the last configuration is gone: Caddy
// resets the connections that it has not accepted by then, and closes the idle
// ones that it has, which can cost a request as well.
func (s *site) reloaded(t *testing.T) {
	t.Helper()
	_, port, err := net.SplitHostPort(s.addr)
	if err != nil {
		t.Fatal(err)
	}
	n, err := strconv.ParseUint(port, 10, 16)
	if err != nil {
		t.Fatal(err)
	}
	listening := fmt.Sprintf(":%04X 00000000:0000 0A", n)
	eventually(t, "a single listener", func() bool {
		sockets, err := os.ReadFile("/proc/net/tcp")
		if err != nil { // not Linux
			time.Sleep(100 * time.Millisecond)
			return true
		}
		return bytes.Count(sockets, []byte(listening)) == 1
	})
	http.DefaultClient.CloseIdleConnections()
}

// quiet waits until Caddy counts no request in flight to any upstream: what has
// happened is known to the policy then.
func (s *site) quiet(t *testing.T) {
	t.Helper()
	eventually(t, "no request in flight", func() bool {
		res, err := http.Get(s.Admin + "/reverse_proxy/upstreams")
		if err != nil {
			t.Fatal(err)
		}
		defer res.Body.Close()
		var upstreams []struct {
			Requests int `json:"num_requests"`
		}
		if err := json.NewDecoder(res.Body).Decode(&upstreams); err != nil {
			t.Fatal(err)
		}
		for _, up := range upstreams {
			if up.Requests != 0 {
				return false
			}
		}
		return true
	})
}

// eventually waits for something that must come to pass; how long it takes is
// no matter.
func eventually(t *testing.T, what string, happened func() bool) {
	t.Helper()
	for deadline := time.Now().Add(30 * time.Second); !happened(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("still waiting for: %s", what)
		}
	}
}

// recorder is an upstream that notes the bodies it gets and answers as told; the
// answer may read the body too.
type recorder struct {
	*httptest.Server

	mu     sync.Mutex
	bodies []string
	errs   []error
}

func newRecorder(t *testing.T, answer http.HandlerFunc) *recorder {
	t.Helper()
	rec := newUnstartedRecorder(t, answer)
	rec.Start()
	return rec
}

func newUnstartedRecorder(t *testing.T, answer http.HandlerFunc) *recorder {
	t.Helper()
	rec := new(recorder)
	rec.Server = httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		rec.mu.Lock()
		rec.bodies, rec.errs = append(rec.bodies, string(body)), append(rec.errs, err)
		rec.mu.Unlock()
		r.Body = io.NopCloser(bytes.NewReader(body))
		answer(w, r)
	}))
	t.Cleanup(rec.Close)
	return rec
}

func (rec *recorder) addr() string { return rec.Listener.Addr().String() }

// take returns the bodies received since the last call.
func (rec *recorder) take() ([]string, []error) {
	rec.mu.Lock()
	defer rec.mu.Unlock()
	bodies, errs := rec.bodies, rec.errs
	rec.bodies, rec.errs = nil, nil
	return bodies, errs
}

func status(code int) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(code) }
}

// deadAddr is an address that refuses connections.
func deadAddr(t *testing.T) string {
	t.Helper()
	addr, err := harness.FreeAddr()
	if err != nil {
		t.Fatal(err)
	}
	return addr
}

// chat is the body of a chat request.
func chat(stream bool, messages ...string) string {
	var b strings.Builder
	fmt.Fprintf(&b, `{"model":"m","stream":%t,"stream_options":{"include_usage":true},"max_tokens":4,"messages":[`, stream)
	if !stream {
		b.Reset()
		b.WriteString(`{"model":"m","max_tokens":4,"messages":[`)
	}
	for i, m := range messages {
		if i > 0 {
			b.WriteByte(',')
		}
		role := "user"
		if i%2 == 1 {
			role = "assistant"
		}
		fmt.Fprintf(&b, `{"role":%q,"content":%q}`, role, m)
	}
	b.WriteString("]}")
	return b.String()
}

// words makes n bytes of text that no other name begins with.
func words(name string, n int) string {
	var b strings.Builder
	for i := 0; b.Len() < n; i++ {
		fmt.Fprintf(&b, "%s says %d. ", name, i)
	}
	return b.String()[:n]
}

// post sends a body and returns the answer's status, headers and body.
func (s *site) post(t *testing.T, path, body string) (*http.Response, string) {
	t.Helper()
	return send(t, s.client, s.URL+path, strings.NewReader(body), int64(len(body)))
}

func send(t *testing.T, client *http.Client, url string, body io.Reader, length int64) (*http.Response, string) {
	t.Helper()
	req, err := http.NewRequest(http.MethodPost, url, body)
	if err != nil {
		t.Fatal(err)
	}
	req.ContentLength = length
	req.Header.Set("Content-Type", "application/json")
	res, err := client.Do(req)
	if err != nil {
		t.Error(err)
		return &http.Response{Header: http.Header{}}, ""
	}
	defer res.Body.Close()
	var answer bytes.Buffer
	if _, err := answer.ReadFrom(res.Body); err != nil {
		t.Error(err)
	}
	return res, answer.String()
}
