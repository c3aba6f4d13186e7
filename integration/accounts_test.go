package integration

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"
)

// account is what the admin endpoint tells of an upstream's load.
type account struct {
	Address      string  `json:"address"`
	Requests     int     `json:"pending_requests"`
	Waiting      int     `json:"waiting_requests"`
	Prefill      float64 `json:"pending_prefill_tokens"`
	PromptTokens float64 `json:"prompt_tokens_in_flight"`
}

func (s *site) accounts(t *testing.T) []account {
	t.Helper()
	res, err := http.Get(s.Admin + "/prefix_affinity/upstreams")
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	var accounts []account
	if err := json.NewDecoder(res.Body).Decode(&accounts); err != nil {
		t.Fatal(err)
	}
	return accounts
}

// settled waits until every account is at zero. What a refused request cost
// keeps counting for 2 s, so that the pending tokens may take that long.
func (s *site) settled(t *testing.T) {
	t.Helper()
	s.quiet(t)
	var accounts []account
	defer func() {
		if t.Failed() {
			t.Logf("accounts: %+v", accounts)
		}
	}()
	eventually(t, "all accounts at zero", func() bool {
		accounts = s.accounts(t)
		for _, a := range accounts {
			if a.Requests != 0 || a.Waiting != 0 || a.Prefill != 0 || a.PromptTokens != 0 {
				return false
			}
		}
		return true
	})
}

// fates does to a request what its header Fate says. Those whose fate is to
// wait are announced on the channel under their header Id.
type fates struct{ arrivals sync.Map }

func (f *fates) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	begin := func(contentType string) {
		w.Header().Set("Content-Type", contentType)
		_, _ = io.WriteString(w, event(`{"choices":[{"delta":{"content":"a"}}]}`))
		_ = http.NewResponseController(w).Flush()
	}
	wait := func() {
		if arrived, ok := f.arrivals.Load(r.Header.Get("Id")); ok {
			arrived.(chan struct{}) <- struct{}{}
		}
		<-r.Context().Done()
	}
	switch fate := r.Header.Get("Fate"); fate {
	case "json", "stream":
		answer(w, fate == "stream")
	case "wait": // for the client to leave before the headers
		wait()
	case "wait-midstream":
		begin("text/event-stream")
		wait()
	case "die": // before the headers
		panic(http.ErrAbortHandler)
	case "die-midstream":
		begin("text/event-stream")
		panic(http.ErrAbortHandler)
	case "die-midbody":
		w.Header().Set("Content-Length", "1000")
		begin("application/json")
		panic(http.ErrAbortHandler)
	case "429":
		w.Header().Set("Retry-After", "1")
		w.WriteHeader(http.StatusTooManyRequests)
	case "500":
		w.WriteHeader(http.StatusInternalServerError)
	case "503":
		w.WriteHeader(http.StatusServiceUnavailable)
	case "upgrade":
		c, rw, err := http.NewResponseController(w).Hijack()
		if err != nil {
			return
		}
		defer c.Close()
		_, _ = io.WriteString(c, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: echo\r\n\r\n")
		_, _ = io.Copy(c, rw)
	}
}

// meet sends a request to its fate and reads what comes of it.
func (s *site) meet(t *testing.T, client *http.Client, method, fate, body string) {
	t.Helper()
	req, err := http.NewRequest(method, s.URL+chatPath, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("Fate", fate)
	res, err := client.Do(req)
	if err != nil {
		return // some fates end so
	}
	defer res.Body.Close()
	_, _ = io.Copy(io.Discard, res.Body)
}

// leave sends a request, a GET where it has no body, waits until it has reached
// its upstream, does what is to be done meanwhile and closes the connection.
func (s *site) leave(t *testing.T, f *fates, fate, body string, meanwhile func()) {
	t.Helper()
	id, arrived := fmt.Sprint(rand.Int()), make(chan struct{}, 10)
	f.arrivals.Store(id, arrived)
	method := http.MethodPost
	if body == "" {
		method = http.MethodGet
	}
	c := s.dial(t, method, fate, fmt.Sprintf("Id: %s\r\nContent-Length: %d\r\n\r\n%s", id, len(body), body))
	defer c.Close()
	select {
	case <-arrived:
		meanwhile()
	case <-time.After(30 * time.Second):
		t.Errorf("a request whose fate is to %s never reached its upstream", fate)
	}
}

// dial sends a request, as much of it as is given in rest.
func (s *site) dial(t *testing.T, method, fate, rest string) net.Conn {
	t.Helper()
	c, err := net.Dial("tcp", s.addr)
	if err != nil {
		t.Error(err)
		return new(net.TCPConn)
	}
	if _, err := fmt.Fprintf(c, "%s %s HTTP/1.1\r\nHost: %s\r\nContent-Type: application/json\r\nFate: %s\r\n%s", method, chatPath, s.addr, fate, rest); err != nil {
		t.Error(err)
	}
	return c
}

// converse switches to another protocol, has one line echoed, and hangs up or
// waits until the other side does.
func (s *site) converse(t *testing.T, hangUp bool) {
	t.Helper()
	c := s.dial(t, "GET", "upgrade", "Connection: Upgrade\r\nUpgrade: echo\r\n\r\n")
	defer c.Close()
	r := bufio.NewReader(c)
	res, err := http.ReadResponse(r, nil)
	if err != nil {
		t.Error(err)
		return
	}
	res.Body.Close()
	_, _ = io.WriteString(c, "hello\n")
	if line, err := r.ReadString('\n'); res.StatusCode != http.StatusSwitchingProtocols || line != "hello\n" {
		t.Errorf("upgrade: status %d, echo %q, %v", res.StatusCode, line, err)
	}
	if !hangUp {
		_ = c.(*net.TCPConn).CloseWrite()
		_, _ = io.Copy(io.Discard, r)
	}
}

// However requests end, the accounts return to zero, so that placement is as
// even as before. All of it happens at one of the upstreams: a leak in all of
// their accounts alike would not show in the placement.
func TestAccountsReturnToZero(t *testing.T) {
	g := newGates(t, 4)
	g.fates = new(fates)
	s := newSite(t, g.addrs[0], policy())
	n := 0
	prompt := func(stream bool) string { // a new one
		n++
		return chat(stream, words(fmt.Sprintf("prompt %d", n), 4000))
	}
	storm := func() {
		var wg sync.WaitGroup
		clients := clients()
		defer func() {
			wg.Wait()
			for _, client := range clients { // or what was dialed and never used stays open
				client.CloseIdleConnections()
			}
		}()
		for _, client := range clients {
			for _, fate := range []string{"json", "stream", "die", "die-midstream", "die-midbody", "429", "500", "503"} {
				for i := range 6 {
					body := prompt(i%2 == 0)
					wg.Go(func() { s.meet(t, client, http.MethodPost, fate, body) })
				}
				wg.Go(func() { s.meet(t, client, http.MethodGet, fate, "") })
				wg.Go(func() { s.meet(t, client, http.MethodPost, fate, "not json") })
			}
		}
		for i := range 10 {
			for _, fate := range []string{"wait", "wait-midstream"} {
				body := prompt(i%2 == 0)
				wg.Go(func() { s.leave(t, g.fates, fate, body, func() {}) })
				wg.Go(func() { s.leave(t, g.fates, fate, "", func() {}) })
			}
			wg.Go(func() { s.converse(t, i%2 == 0) })
			half := prompt(false)[:1000]
			wg.Go(func() { // leaves in the middle of its body
				c := s.dial(t, "POST", "json", "Content-Length: 4000\r\n\r\n"+half)
				time.Sleep(time.Duration(i) * time.Millisecond)
				_ = c.Close()
			})
		}
	}

	storm()
	s.settled(t)

	// The same with retries, and with an upstream that refuses connections.
	s.reload(t, g.addrs[0]+" "+deadAddr(t), policy("fallback round_robin")+"lb_retries 2\n\t\tlb_retry_match {\n\t\t\texpression `{rp.status_code} in [429, 500]`\n\t\t}")
	storm()
	s.settled(t)

	// Answers that go through routes, where some are copied and some are not even
	// closed, and requests that are chosen for and never sent.
	s.reload(t, g.addrs[0], policy()+"@json header Content-Type application/json\n\t\thandle_response @json {\n\t\t\tabort\n\t\t}\n\t\t"+
		"@stream header Content-Type text/event-stream\n\t\thandle_response @stream {\n\t\t\tcopy_response\n\t\t}")
	storm()
	s.settled(t)
	s.reload(t, "{header.Fate}", policy())
	for range 10 {
		const manyPorts = "127.0.0.1:1-9" // is no place to send anything to
		s.meet(t, http.DefaultClient, http.MethodGet, manyPorts, "")
		s.meet(t, http.DefaultClient, http.MethodPost, manyPorts, prompt(false))
	}
	s.settled(t)

	// Streams and waiting requests that outlive their configuration.
	s.reload(t, g.addrs[0], policy())
	var wg sync.WaitGroup
	var arrived sync.WaitGroup
	reloaded := make(chan struct{})
	for i := range 20 {
		body := prompt(true)
		if i%4 > 1 {
			body = ""
		}
		arrived.Add(1)
		wg.Go(func() {
			s.leave(t, g.fates, []string{"wait", "wait-midstream"}[i%2], body, func() {
				arrived.Done()
				<-reloaded
			})
		})
	}
	arrived.Wait()
	s.reload(t, g.addrs[0], policy())
	close(reloaded)
	wg.Wait()
	s.settled(t)

	// Among upstreams that were never in trouble it gets as much as they do.
	// Short prompts: one request too many in an account would weigh as much as
	// one of these.
	s.reload(t, g.upstreams(), policy())
	for i := range 3 {
		wantEven(t, s.burst(t, g, equalPrompts(fmt.Sprintf("burst %d", i), 64, 200, i%2 == 0)), 3)
		s.settled(t)
	}
}
