package ui

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// caddy is an admin endpoint that notes what it is asked.
type caddy struct {
	*httptest.Server

	mu   sync.Mutex
	seen []string
}

func newCaddy(t *testing.T, answer http.HandlerFunc) *caddy {
	t.Helper()
	c := new(caddy)
	c.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		if err != nil {
			t.Error(err)
		}
		c.mu.Lock()
		c.seen = append(c.seen, fmt.Sprintf("%s %s %s Origin=%s Secrets=%s %s", r.Method, r.URL, r.Host, r.Header.Get("Origin"), r.Header.Get("Cookie")+r.Header.Get("Authorization"), body))
		c.mu.Unlock()
		answer(w, r)
	}))
	t.Cleanup(c.Close)
	return c
}

func (c *caddy) address() string { return c.Listener.Addr().String() }

// took returns what the endpoint was asked since the last call.
func (c *caddy) took() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	defer func() { c.seen = nil }()
	return strings.Join(c.seen, "\n")
}

func ok(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Content-Type", "application/json")
	_, _ = io.WriteString(w, `[]`)
}

// run serves a page of the given Caddy's and returns its URL and how to end it.
func run(t *testing.T, listen string, admin Admin) (url string, end func() error) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	ready, ended := make(chan string, 1), make(chan error, 1)
	go func() {
		ended <- Run(ctx, listen, admin, func(url string) { ready <- url })
	}()
	end = sync.OnceValue(func() error {
		cancel()
		http.DefaultClient.CloseIdleConnections()
		return <-ended
	})
	t.Cleanup(func() {
		if err := end(); err != nil {
			t.Error(err)
		}
	})
	select {
	case url = <-ready:
	case err := <-ended:
		ended <- err
		t.Fatal(err)
	}
	return url, end
}

// do sends a request with headers and returns the answer's status, body and headers.
func do(t *testing.T, method, url, body string, headers ...string) (int, string, http.Header) {
	t.Helper()
	req, err := http.NewRequest(method, url, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	for _, h := range headers {
		name, value, _ := strings.Cut(h, ": ")
		req.Header.Set(name, value)
		if name == "Host" {
			req.Host = value
		}
	}
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	answer, err := io.ReadAll(res.Body)
	if err != nil {
		t.Fatal(err)
	}
	return res.StatusCode, string(answer), res.Header
}

func TestPage(t *testing.T) {
	url, _ := run(t, "localhost:0", Admin{"tcp", "caddy.test:<2019>"})
	status, body, header := do(t, http.MethodGet, url+"/", "")
	if status != http.StatusOK || header.Get("Content-Type") != "text/html; charset=utf-8" {
		t.Errorf("status %d, %v", status, header)
	}
	if !strings.Contains(body, "caddy.test:&lt;2019&gt;") || strings.Contains(body, "ADMIN") {
		t.Error("the page does not name the admin endpoint, or not as text")
	}
	policy := header.Get("Content-Security-Policy")
	for _, want := range []string{digest(body, "script"), digest(body, "style"), "default-src 'none'", "frame-ancestors 'none'"} {
		if !strings.Contains(policy, want) {
			t.Errorf("the policy lacks %s: %s", want, policy)
		}
	}
	for _, outside := range []string{"http:", "https:", "//cdn", "@import", " src="} {
		for line := range strings.Lines(body) {
			if strings.Contains(line, outside) && !strings.Contains(line, "http://www.w3.org/2000/svg") {
				t.Errorf("the page may load something from outside: %s", line)
			}
		}
	}
}

func TestForwarding(t *testing.T) {
	c := newCaddy(t, ok)
	url, _ := run(t, "localhost:0", Admin{"tcp", c.address()})
	for _, test := range []struct {
		method, path, body string
		status             int
		asked              string // of Caddy; "": nothing
	}{
		{"GET", "/prefix_affinity/upstreams?", "", 200, "GET /prefix_affinity/upstreams"},
		{"POST", "/prefix_affinity/lookup?path=%2Fapi%2Fchat", `{"messages":[]}`, 200, "POST /prefix_affinity/lookup?path=%2Fapi%2Fchat"},
		{"POST", "/prefix_affinity/drain?upstream=10.0.0.1:8000&force=true", "", 200, "POST /prefix_affinity/drain?upstream=10.0.0.1:8000&force=true"},
		{"POST", "/prefix_affinity/undrain?upstream=10.0.0.1:8000", "", 200, "POST /prefix_affinity/undrain?upstream=10.0.0.1:8000"},
		{"POST", "/prefix_affinity/forget?upstream=10.0.0.1:8000", "", 200, "POST /prefix_affinity/forget?upstream=10.0.0.1:8000"},

		{"POST", "/prefix_affinity/upstreams", "", 405, ""},
		{"GET", "/prefix_affinity/drain?upstream=10.0.0.1:8000", "", 405, ""},
		{"DELETE", "/prefix_affinity/lookup", "", 405, ""},
		{"GET", "/config/", "", 404, ""},
		{"POST", "/load", "{}", 404, ""},
		{"POST", "/stop", "", 404, ""},
		{"GET", "/prefix_affinity/", "", 404, ""},
		{"GET", "/prefix_affinity/..%2f..%2fconfig/", "", 404, ""},
		{"POST", "/", "", 405, ""},
	} {
		status, _, _ := do(t, test.method, url+test.path, test.body, "Cookie: secret", "Authorization: tenant", "Origin: "+url)
		if status != test.status {
			t.Errorf("%s %s: status %d, want %d", test.method, test.path, status, test.status)
		}
		want := test.asked
		if want != "" {
			want += fmt.Sprintf(" %s Origin=http://%[1]s Secrets=tenant %s", c.address(), test.body)
		}
		if asked := strings.Replace(c.took(), "upstreams? ", "upstreams ", 1); asked != want {
			t.Errorf("%s %s: Caddy was asked\n%s, want\n%s", test.method, test.path, asked, want)
		}
	}
}

func TestForeign(t *testing.T) {
	c := newCaddy(t, ok)
	url, _ := run(t, "localhost:0", Admin{"tcp", c.address()})
	port := url[strings.LastIndexByte(url, ':'):]
	for _, test := range []struct {
		name    string
		headers []string
		refused bool
	}{
		{"own page", []string{"Origin: " + url, "Sec-Fetch-Site: same-origin"}, false},
		{"own page by IPv4", []string{"Host: 127.0.0.1" + port, "Origin: http://127.0.0.1" + port, "Sec-Fetch-Site: same-origin"}, false},
		{"own page by IPv6", []string{"Host: [::1]" + port, "Origin: http://[::1]" + port}, false},
		{"own page through a tunnel", []string{"Host: LOCALHOST:3000", "Origin: http://localhost:3000", "Sec-Fetch-Site: same-origin"}, false},
		{"no browser", nil, false},
		{"rebound name", []string{"Host: evil.example" + port, "Origin: http://evil.example" + port, "Sec-Fetch-Site: same-origin"}, true},
		{"rebound name without origin", []string{"Host: evil.example" + port}, true},
		{"rebound name without port", []string{"Host: evil.example"}, true},
		{"name that looks like an address", []string{"Host: 127.0.0.1.evil.example" + port}, true},
		{"other site", []string{"Origin: https://evil.example", "Sec-Fetch-Site: cross-site"}, true},
		{"other port of this host", []string{"Origin: http://localhost:1", "Sec-Fetch-Site: same-site"}, true},
		{"other scheme", []string{"Origin: https://localhost" + port}, true},
		{"opaque origin", []string{"Origin: null"}, true},
		{"form of another site", []string{"Sec-Fetch-Site: cross-site"}, true},
	} {
		for _, route := range []string{"drain?upstream=a", "lookup"} {
			status, body, _ := do(t, http.MethodPost, url+"/prefix_affinity/"+route, "", test.headers...)
			if asked := c.took() != ""; asked == test.refused || (status == http.StatusForbidden) != test.refused {
				t.Errorf("%s: status %d, passed on: %t, want refused: %t: %s", test.name, status, asked, test.refused, body)
			}
		}
	}
	// A link from another page may open this one, which can't be read from there.
	status, _, header := do(t, http.MethodGet, url+"/", "", "Sec-Fetch-Site: cross-site", "Sec-Fetch-Mode: navigate")
	if status != http.StatusOK || header.Get("Access-Control-Allow-Origin") != "" || header.Get("Cross-Origin-Resource-Policy") != "same-origin" {
		t.Errorf("status %d, %v", status, header)
	}
}

func TestOwnName(t *testing.T) {
	for _, test := range []struct {
		header string
		known  bool
	}{
		{"gateway.internal:2020", true},
		{"Gateway.Internal", true},
		{"localhost:2020", true},
		{"10.0.0.1:2020", true},
		{"[fe80::1]:2020", true},
		{"other.internal:2020", false},
		{"gateway.internal.evil.example:2020", false},
		{"", false},
	} {
		if got := known(test.header, "gateway.internal"); got != test.known {
			t.Errorf("known(%q) = %t", test.header, got)
		}
	}
}

func TestErrors(t *testing.T) {
	text := func(t *testing.T, body string) string {
		t.Helper()
		var answer struct {
			Error string `json:"error"`
		}
		if err := json.Unmarshal([]byte(body), &answer); err != nil {
			t.Errorf("%v: %s", err, body)
		}
		return answer.Error
	}
	t.Run("refused by Caddy", func(t *testing.T) {
		c := newCaddy(t, func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "application/json")
			w.WriteHeader(http.StatusConflict)
			_, _ = io.WriteString(w, `{"error":"it is the last one"}`)
		})
		url, _ := run(t, "localhost:0", Admin{"tcp", c.address()})
		status, body, _ := do(t, http.MethodPost, url+"/prefix_affinity/drain?upstream=a", "")
		if status != http.StatusConflict || text(t, body) != "it is the last one" {
			t.Errorf("status %d: %s", status, body)
		}
	})
	t.Run("no Caddy", func(t *testing.T) {
		c := newCaddy(t, ok)
		c.Close()
		url, _ := run(t, "localhost:0", Admin{"tcp", c.address()})
		status, body, _ := do(t, http.MethodPost, url+"/prefix_affinity/lookup?path=/api/chat", "")
		if said := text(t, body); status != http.StatusBadGateway || !strings.Contains(said, c.address()+": ") || strings.Contains(said, "/api/chat") {
			t.Errorf("status %d: %s", status, body)
		}
	})
	t.Run("half an answer", func(t *testing.T) {
		c := newCaddy(t, func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Length", "100")
			_, _ = io.WriteString(w, "[")
		})
		url, _ := run(t, "localhost:0", Admin{"tcp", c.address()})
		res, err := http.Get(url + "/prefix_affinity/upstreams")
		if err == nil {
			_, err = io.ReadAll(res.Body)
			res.Body.Close()
		}
		if err == nil {
			t.Error("half an answer passes for one")
		}
	})
	t.Run("redirect", func(t *testing.T) {
		c := newCaddy(t, func(w http.ResponseWriter, r *http.Request) {
			http.Redirect(w, r, "/config/", http.StatusTemporaryRedirect)
		})
		url, _ := run(t, "localhost:0", Admin{"tcp", c.address()})
		do(t, http.MethodPost, url+"/prefix_affinity/drain?upstream=a", "")
		if asked := c.took(); strings.Contains(asked, "/config/") {
			t.Errorf("it was followed: %s", asked)
		}
	})
}

func TestUnixSocket(t *testing.T) {
	path := filepath.Join(t.TempDir(), "admin.sock")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	c := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.WriteString(w, r.Host+" "+r.Header.Get("Origin"))
	}))
	if err := c.Listener.Close(); err != nil {
		t.Fatal(err)
	}
	c.Listener = l
	c.Start()
	t.Cleanup(c.Close)
	url, _ := run(t, "localhost:0", Admin{"unix", path})
	if status, body, _ := do(t, http.MethodGet, url+"/prefix_affinity/upstreams", ""); status != http.StatusOK || body != "127.0.0.1 http://127.0.0.1" {
		t.Errorf("status %d: %s", status, body)
	}
}

func TestListen(t *testing.T) {
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	for listen, want := range map[string]string{
		":2020":                 "use localhost:2020",
		"2020":                  "invalid listen address '2020'",
		taken.Addr().String():   "address already in use",
		"localhost:notaservice": "notaservice",
	} {
		err := Run(t.Context(), listen, Admin{"tcp", "localhost:2019"}, func(string) { t.Errorf("%s: serves", listen) })
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %s", listen, err, want)
		}
	}
}

// A request in flight is answered when the server is told to end.
func TestEnd(t *testing.T) {
	arrived, answer := make(chan struct{}), make(chan struct{})
	c := newCaddy(t, func(w http.ResponseWriter, r *http.Request) {
		close(arrived)
		<-answer
		ok(w, r)
	})
	url, end := run(t, "localhost:0", Admin{"tcp", c.address()})
	status := make(chan int, 1)
	go func() {
		res, err := http.Post(url+"/prefix_affinity/drain?upstream=a", "", nil)
		if err != nil {
			t.Error(err)
			status <- 0
			return
		}
		res.Body.Close()
		status <- res.StatusCode
	}()
	<-arrived
	ended := make(chan error, 1)
	go func() { ended <- end() }()
	for { // until nobody new is let in
		conn, err := net.DialTimeout("tcp", strings.TrimPrefix(url, "http://"), time.Second)
		if err != nil {
			break
		}
		conn.Close()
	}
	select {
	case err := <-ended:
		t.Errorf("it ended before its request: %v", err)
	default:
	}
	close(answer)
	if got := <-status; got != http.StatusOK {
		t.Errorf("status %d", got)
	}
	if err := <-ended; err != nil {
		t.Error(err)
	}
}
