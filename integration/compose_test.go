package integration

import (
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/cookiejar"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/quic-go/quic-go/http3"
	"golang.org/x/net/websocket"

	"github.com/prefix-affinity/caddy/integration/harness"
)

// chatServer answers chat requests, streamed or not, as asked.
func chatServer(w http.ResponseWriter, r *http.Request) {
	body, _ := io.ReadAll(r.Body)
	answer(w, strings.Contains(string(body), `"stream":true`))
}

// certificate is one for 127.0.0.1, with its key, also in files.
type certificate struct {
	tls.Certificate

	pool              *x509.CertPool // that trusts it
	certFile, keyFile string
}

func newCertificate(t *testing.T) certificate {
	t.Helper()
	server := httptest.NewTLSServer(nil) // has one
	defer server.Close()
	c := certificate{Certificate: server.TLS.Certificates[0], pool: x509.NewCertPool()}
	c.pool.AddCert(server.Certificate())
	key, err := x509.MarshalPKCS8PrivateKey(c.PrivateKey)
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	c.certFile, c.keyFile = filepath.Join(dir, "cert.pem"), filepath.Join(dir, "key.pem")
	for file, block := range map[string]*pem.Block{
		c.certFile: {Type: "CERTIFICATE", Bytes: c.Certificate.Certificate[0]},
		c.keyFile:  {Type: "PRIVATE KEY", Bytes: key},
	} {
		if err := os.WriteFile(file, pem.EncodeToMemory(block), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return c
}

// The kinds of upstreams, by what they speak.
func plain(t *testing.T, _ certificate) *recorder {
	t.Helper()
	return newRecorder(t, chatServer)
}

func overTLS(t *testing.T, c certificate) *recorder {
	t.Helper()
	rec := newUnstartedRecorder(t, chatServer)
	rec.EnableHTTP2 = true
	rec.TLS = &tls.Config{Certificates: []tls.Certificate{c.Certificate}}
	rec.StartTLS()
	return rec
}

func overH2C(t *testing.T, _ certificate) *recorder {
	t.Helper()
	rec := newUnstartedRecorder(t, chatServer)
	rec.Config.Protocols = new(http.Protocols)
	rec.Config.Protocols.SetUnencryptedHTTP2(true) // and nothing else
	rec.Start()
	return rec
}

// overQUIC also has a TCP server, which keeps the port.
func overQUIC(t *testing.T, c certificate) *recorder {
	t.Helper()
	rec := newRecorder(t, chatServer)
	conn, err := net.ListenPacket("udp", rec.addr())
	if err != nil {
		t.Fatal(err)
	}
	server := &http3.Server{
		Handler:   rec.Config.Handler,
		TLSConfig: http3.ConfigureTLSConfig(&tls.Config{Certificates: []tls.Certificate{c.Certificate}}),
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = server.Serve(conn)
	}()
	t.Cleanup(func() {
		_ = server.Close()
		_ = conn.Close()
		<-done
	})
	return rec
}

// The ways in which a request can come.
func h2(c certificate) http.RoundTripper {
	return &http.Transport{TLSClientConfig: &tls.Config{RootCAs: c.pool}, ForceAttemptHTTP2: true}
}

func h3(c certificate) http.RoundTripper {
	return &http3.Transport{TLSClientConfig: &tls.Config{RootCAs: c.pool}}
}

// In every composition a conversation's second turn goes where the first was,
// bodies arrive byte for byte, answers are complete, and nothing is left in the
// accounts.
//
// In the directives POLICY stands for the policy's line, A to D for the addresses
// of the upstreams and ALL for all of them, AUTH for a server that says yes, DEAD
// for an address that refuses connections, OTHER for that of another site, CERT
// and KEY for files, and NAMES for a name server.
func TestCompositions(t *testing.T) {
	var asked atomic.Int64
	auth := newScripted(t, func(w http.ResponseWriter, _ *http.Request) {
		asked.Add(1)
		w.Header().Set("X-User", "u")
	})
	names := newNameServer(t)
	cert := newCertificate(t)
	const proxy = "reverse_proxy ALL {\nPOLICY\n}\n"
	within := func(outer string) string {
		return "reverse_proxy ALL {\nlb_policy " + outer + " {\nfallback prefix_affinity {\nexplain\n}\n}\n}\n"
	}

	for _, test := range []struct {
		name       string
		directives string                                  // of the site
		sites      string                                  // more of them
		upstream   func(*testing.T, certificate) *recorder // what they speak; plain if nil
		client     func(certificate) http.RoundTripper     // how requests come; HTTP/1.1 if nil
		path       string                                  // before that of the API
	}{
		{name: "fallback of/header", directives: within("header Pin")},
		{name: "fallback of/query", directives: within("query pin")},
		{name: "fallback of/cookie", directives: within("cookie lb secret")},

		{name: "chain/forward_auth with another policy", directives: "forward_auth AUTH {\nuri /auth\ncopy_headers X-User\n}\n" + proxy},
		{name: "chain/forward_auth with this policy", directives: "forward_auth AUTH {\nuri /auth\nlb_policy prefix_affinity\n}\n" + proxy},
		{
			name:       "chain/gateway behind gateway",
			directives: "reverse_proxy OTHER {\nPOLICY\n}\n",
			sites:      "http://OTHER {\n" + proxy + "}\n",
		},
		{name: "chain/filters", directives: "encode gzip\nrequest_body {\nmax_size 1MB\n}\nlog_append affinity {rp.prefix_affinity.reason}\n" + proxy},
		{name: "chain/buffers", directives: "reverse_proxy ALL {\nPOLICY\nrequest_buffers 1MiB\nresponse_buffers 1MiB\n}\n"},

		{name: "response/copied", directives: "reverse_proxy ALL {\nPOLICY\n@any status 2xx\nhandle_response @any {\nheader X-Copied yes\ncopy_response\n}\n}\n"},
		// The first proxy has sent the body, and it is still there for the second.
		{name: "response/from the next proxy", directives: "reverse_proxy AUTH {\nlb_policy prefix_affinity\n@any status 2xx\nhandle_response @any {\n" + proxy + "}\n}\n"},

		{name: "rewrite/handle_path", path: "/team", directives: "handle_path /team/* {\n" + proxy + "}\n"},
		// The API is told by the path that the upstream gets: there is no prompt in
		// a request for embeddings.
		{name: "rewrite/to the API", path: "/v1/embeddings?", directives: "rewrite /v1/embeddings /v1/chat/completions\n" + proxy},
		{name: "rewrite/in the proxy", path: "/v1/embeddings?", directives: "reverse_proxy ALL {\nPOLICY\nrewrite /v1/chat/completions\n}\n"},

		{
			name:       "error route/nobody is left",
			directives: "reverse_proxy DEAD {\nPOLICY\n}\nhandle_errors {\n" + proxy + "}\n",
		},
		{
			name:       "error route/an error before",
			directives: "error 503\nhandle_errors {\n" + proxy + "}\n",
		},
		{
			name:       "dynamic/srv",
			directives: "reverse_proxy {\ndynamic srv llm.test {\nresolvers NAMES\n}\ntransport http {\nresolvers NAMES\n}\nPOLICY\n}\n",
		},
		{
			name:       "dynamic/srv among several sources",
			directives: "reverse_proxy {\ndynamic multi {\nsrv llm-2.test {\nresolvers NAMES\n}\n}\ntransport http {\nresolvers NAMES\n}\nPOLICY\n}\n",
		},

		{name: "upstream/h2c", directives: "reverse_proxy ALL {\nPOLICY\ntransport http {\nversions h2c\n}\n}\n", upstream: overH2C},
		{name: "upstream/https", directives: "reverse_proxy ALL {\nPOLICY\ntransport http {\ntls\ntls_trust_pool file CERT\n}\n}\n", upstream: overTLS},
		{name: "upstream/https by scheme", directives: "reverse_proxy https://A https://B {\nPOLICY\ntransport http {\ntls_trust_pool file CERT\n}\n}\n", upstream: overTLS},
		{name: "upstream/http3", directives: "reverse_proxy ALL {\nPOLICY\ntransport http {\nversions 3\ntls_trust_pool file CERT\n}\n}\n", upstream: overQUIC},

		{name: "client/http2", directives: "tls CERT KEY\n" + proxy, client: h2},
		{name: "client/http3", directives: "tls CERT KEY\n" + proxy, client: h3},
	} {
		t.Run(test.name, func(t *testing.T) {
			asked.Store(0)
			if test.upstream == nil {
				test.upstream = plain
			}
			ups, addrs := make([]*recorder, 4), make([]string, 4)
			for i := range ups {
				ups[i] = test.upstream(t, cert)
				addrs[i] = ups[i].addr()
			}
			names.set(t, addrs...)
			s, other := newSiteAt(t), newSiteAt(t)
			fill := strings.NewReplacer(
				"POLICY", strings.TrimSpace(policy()), "ALL", strings.Join(addrs, " "), "AUTH", auth.addr(), "DEAD", deadAddr(t),
				"https://A", "https://"+addrs[0], "https://B", "https://"+addrs[1],
				"OTHER", other.addr, "CERT", cert.certFile, "KEY", cert.keyFile, "NAMES", names.conn.LocalAddr().String())
			if test.client != nil {
				s.URL = "https://" + s.addr
				s.client = &http.Client{Transport: test.client(cert)}
				if c, ok := s.client.Transport.(io.Closer); ok {
					defer c.Close()
				}
			}
			s.start(t, fill.Replace("{\ndefault_bind 127.0.0.1\nauto_https disable_redirects\ngrace_period 1s\n}\n"+s.URL+" {\n"+test.directives+"}\n"+test.sites))
			s.URL += test.path

			conversations := newConversations(3)
			for _, c := range conversations {
				c.name = test.name + " " + c.name
			}
			const turns = 4
			for turn := range turns {
				for _, c := range conversations {
					stream := turn%2 == 1
					at, d := c.at, c.turn(t, s, stream)
					if turn > 0 && (d.upstream != at || d.reason != "affinity") {
						t.Errorf("%s, turn %d: %+v after %s", c.name, turn, d, at)
					}
					sent := chat(stream, c.messages[:len(c.messages)-1]...)
					if got := takeAll(t, ups); !slices.Equal(got, []string{sent}) {
						t.Errorf("%s, turn %d: %d requests reached the upstreams, not the one sent", c.name, turn, len(got))
					}
				}
			}
			if strings.Contains(test.directives, "AUTH") && asked.Load() != 3*turns {
				t.Errorf("the first proxy was asked %d times, want %d", asked.Load(), 3*turns)
			}
			s.settled(t)
			if test.client != nil {
				s.client.CloseIdleConnections()
			}
		})
	}
}

// takeAll returns the bodies that came to any of the upstreams since the last call.
func takeAll(t *testing.T, ups []*recorder) (all []string) {
	t.Helper()
	for _, up := range ups {
		bodies, errs := up.take()
		for i, err := range errs {
			if err != nil {
				t.Errorf("upstream %s got %d bytes and %v", up.addr(), len(bodies[i]), err)
			}
		}
		all = append(all, bodies...)
	}
	return all
}

// One handler may serve one request twice: here again in the route for its own
// error, and inside the answer route of another. (Requests without a body: the
// first pass uses it up, in stock Caddy too.)
func TestSameProxyTwice(t *testing.T) {
	var calls atomic.Int64
	up := newScripted(t, func(w http.ResponseWriter, r *http.Request) {
		if calls.Add(1)%2 == 1 {
			w.WriteHeader(http.StatusTeapot)
			return
		}
		yes(w, r)
	})
	named := "\n}\n&(proxy) {\n\t" + proxyTo(up.addr(), policy()+"header_down X-Attempts {rp.prefix_affinity.attempts}\n\t\t@teapot status 418\n\t\thandle_response @teapot {\n\t\t\t%s\n\t\t}")
	for _, test := range []struct{ name, directives string }{
		{"error route", "invoke proxy\n\thandle_errors {\n\t\tinvoke proxy\n\t}" + fmt.Sprintf(named, "error 503")},
		{"answer route", "invoke proxy" + fmt.Sprintf(named, "invoke proxy")},
	} {
		t.Run(test.name, func(t *testing.T) {
			calls.Store(0)
			s := newSiteOf(t, test.directives)
			for range 20 {
				res, err := http.Get(s.URL + "/v1/models")
				if err != nil {
					t.Fatal(err)
				}
				res.Body.Close()
				if d := decisionOf(t, res); d.reason != "no_key" || res.Header.Get("X-Attempts") != "1" {
					t.Errorf("status %d, %+v, attempt %s", res.StatusCode, d, res.Header.Get("X-Attempts"))
				}
			}
			if calls.Load() != 40 {
				t.Errorf("the upstream was asked %d times for 20 requests, want twice each", calls.Load())
			}
			s.settled(t)
		})
	}
}

// settledJar takes no further cookies.
type settledJar struct{ http.CookieJar }

func (settledJar) SetCookies(*url.URL, []*http.Cookie) {}

// A cookie policy that asked this one for a stand-in goes back to its own choice
// as soon as it can, even for the next attempt of the same request. That one is
// no decision of ours, and gets the whole body; if the client has not sent it all,
// no upstream is blamed.
func TestCookiePolicyTakesItsRequestBack(t *testing.T) {
	g := newGates(t, 1)
	dead := deadAddr(t)
	lb := "lb_policy cookie lb secret {\n\t\t\tfallback prefix_affinity {\n\t\t\t\texplain\n\t\t\t\tmax_body 4KiB\n\t\t\t}\n\t\t}\n\t\tunhealthy_request_count 1\n\t\tlb_try_duration 30s\n\t\tlb_try_interval 10ms\n\t\tfail_duration 1h\n\t\tmax_fails 1000000"
	s := newSite(t, g.upstreams(), lb)
	jar, err := cookiejar.New(nil)
	if err != nil {
		t.Fatal(err)
	}
	client := &http.Client{Jar: jar}
	var wg sync.WaitGroup
	defer wg.Wait()
	ask := func(name string) {
		body := chat(true, words(name, 3000))
		wg.Go(func() {
			res, text := send(t, client, s.URL+chatPath, strings.NewReader(body), int64(len(body)))
			if res.StatusCode != http.StatusOK || answerOf(t, res, text) != "yes" {
				t.Errorf("%s: status %d, answer %q", name, res.StatusCode, text)
			}
			if by := res.Header.Get("X-Prefix-Affinity"); (by == "") != (name != "first") {
				t.Errorf("%s: X-Prefix-Affinity %q", name, by)
			}
		})
	}
	ask("first")
	g.take(t, 1)
	wg.Wait() // and the client has its cookie
	client.Jar = settledJar{jar}

	s.reload(t, g.upstreams()+" "+dead, lb)
	ask("second")
	g.await(t, 1)
	ask("third")
	tried := func(n int) func() bool { return func() bool { return s.upstreams(t, dead)[0].Requests > n } }
	eventually(t, "a stand-in to be tried", tried(1))
	g.release()
	g.take(t, 1)
	wg.Wait()

	ask("fourth")
	g.await(t, 1)
	before := s.upstreams(t, dead)[0].Requests
	c, err := net.Dial("tcp", s.addr)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	body := chat(true, words("cut", 100_000))
	target, err := url.Parse(s.URL)
	if err != nil {
		t.Fatal(err)
	}
	_, err = fmt.Fprintf(c, "POST %s HTTP/1.1\r\nHost: %s\r\nCookie: %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s",
		chatPath, s.addr, jar.Cookies(target)[0], 2*len(body), body)
	if err != nil {
		t.Fatal(err)
	}
	if err := c.(*net.TCPConn).CloseWrite(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "a stand-in to be tried for the cut request", tried(before+1))
	g.release()
	if got := strings.Join(statuses(c, 1), " "); got != "499" {
		t.Errorf("status %q of a request that is cut, want 499", got)
	}
	if n := s.fails(t, g.upstreams()); n > 0 {
		t.Errorf("the upstream is blamed %d times", n)
	}
	wg.Wait()
	s.settled(t)
}

// Where no upstream is available, the body is left for what the error route makes
// of the request, be it a proxy that knows nothing of this policy.
func TestErrorRouteGetsTheBody(t *testing.T) {
	backup := newRecorder(t, chatServer)
	s := newSiteOf(t, proxyTo(deadAddr(t), policy()+"fail_duration 1m")+"\n\thandle_errors {\n\t\treverse_proxy "+backup.addr()+"\n\t}")
	for i := range 4 {
		method, body := http.MethodPost, chat(i%2 == 0, words(fmt.Sprint(i), 3000))
		if i == 0 {
			method, body = http.MethodGet, "" // finds out that it is down
		}
		req, err := http.NewRequest(method, s.URL+chatPath, strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		res, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		res.Body.Close()
		if got := takeAll(t, []*recorder{backup}); !slices.Equal(got, []string{body}) {
			t.Errorf("request %d: status %d, the backup got %d requests, not the one sent", i, res.StatusCode, len(got))
		}
	}
	s.settled(t)
}

// A proxy in the error route gets the whole body, too, where the one before it has
// read the beginning and left the rest with the client.
func TestErrorRouteGetsTheRest(t *testing.T) {
	const form, anyJSON = "application/x-www-form-urlencoded", "application/json"
	for _, test := range []struct {
		name, first, second, contentType, body string
		chunked                                bool
	}{
		{name: "read/form", contentType: form, body: "a=b&c=" + strings.Repeat("d", 5000)},
		{name: "read/form of unknown length", contentType: form, body: "a=b&c=" + strings.Repeat("d", 50_000), chunked: true},
		{name: "read/form after retries", first: "lb_retries 2", contentType: form, body: "a=b&c=" + strings.Repeat("d", 5000)},
		{name: "read/form before request_buffers", second: "request_buffers 1MiB", contentType: form, body: "a=b&c=" + strings.Repeat("d", 5000)},
		{name: "read/form after request_buffers", first: "request_buffers 1MiB", contentType: form, body: "a=b&c=" + strings.Repeat("d", 5000)},
		{name: "read/form of unknown length after request_buffers", first: "request_buffers 1MiB", contentType: form, body: "a=b&c=" + strings.Repeat("d", 5000), chunked: true},
		{name: "read/form of unknown length before request_buffers", second: "request_buffers 1MiB", contentType: form, body: "a=b&c=" + strings.Repeat("d", 5000), chunked: true},
		{name: "read/JSON array", contentType: anyJSON, body: "[" + strings.Repeat(`"a",`, 20_000) + `"b"]`},
		{name: "read/prompt beyond max_body", contentType: anyJSON, body: chat(false, words("long", 20_000))},
		{name: "read/prompt beyond max_body, of unknown length", contentType: anyJSON, body: chat(false, words("long", 20_000)), chunked: true},
		{name: "read/prompt", contentType: anyJSON, body: chat(false, words("short", 200))},
		{name: "read/prompt of unknown length", contentType: anyJSON, body: chat(false, words("short", 200)), chunked: true},
		{name: "read/prompt before request_buffers", second: "request_buffers 1MiB", contentType: anyJSON, body: chat(false, words("short", 1000))},
		{name: "read/prompt before request_buffers without a limit", second: "request_buffers unlimited", contentType: anyJSON, body: chat(false, words("short", 1000))},
		{name: "read/prompt of unknown length before request_buffers without a limit", second: "request_buffers unlimited", contentType: anyJSON, body: chat(false, words("short", 1000)), chunked: true},
		{name: "read/prompt between request_buffers", first: "request_buffers 1MiB", second: "request_buffers 1MiB", contentType: anyJSON, body: chat(false, words("short", 1000)), chunked: true},
	} {
		t.Run(test.name, func(t *testing.T) {
			backup := newRecorder(t, chatServer)
			s := newSiteOf(t, proxyTo(deadAddr(t), policy("max_body 16KiB")+test.first)+
				"\n\thandle_errors {\n\t\t"+proxyTo(backup.addr(), policy("max_body 8KiB")+test.second)+"\n\t}")
			var body io.Reader = strings.NewReader(test.body)
			if test.chunked {
				body = io.MultiReader(body)
			}
			res, err := http.Post(s.URL+chatPath, test.contentType, body)
			if err != nil {
				t.Fatal(err)
			}
			res.Body.Close()
			if got := takeAll(t, []*recorder{backup}); !slices.Equal(got, []string{test.body}) {
				t.Errorf("status %d, the backup got %d requests, not the one sent", res.StatusCode, len(got))
			}
			s.settled(t)
		})
	}
}

// What comes after a proxy that has read a body gets all of it, a body that was put
// in its place, or an error, never a part of it that passes for all. (Another policy
// takes a body of unknown length for an empty one: net/http does, of any that can't
// be read.)
func TestNoPartOfABodyPassesForAll(t *testing.T) {
	const form = "application/x-www-form-urlencoded"
	bodies := map[string]string{
		chat(false, words("short", 1000)):           "application/json",
		"[" + strings.Repeat(`"a",`, 5000) + `"b"]`: "application/json",
		"a=b&c=" + strings.Repeat("d", 50_000):      form,
	}
	for _, test := range []struct {
		name, route string
		set         string // what the route makes of the body
		whole       bool   // it must arrive
		known       bool   // its length is
		none        bool   // the route makes it none
	}{
		{name: "next/another policy", route: "reverse_proxy BACKUP", known: true},
		{name: "next/no prompt by its type", route: "request_header Content-Type application/octet-stream\nreverse_proxy BACKUP {\nPOLICY\n}", whole: true},
		{name: "next/no prompt by its method", route: "reverse_proxy BACKUP {\nPOLICY\nmethod DELETE\n}", whole: true},
		{name: "next/no body by its method", route: "reverse_proxy BACKUP {\nPOLICY\nmethod GET\n}", none: true, whole: true},
		{name: "next/body replaced", route: "request_body {\nset NEW\n}\nreverse_proxy BACKUP {\nPOLICY\n}", set: "NEW", whole: true},
		{name: "next/this policy", route: "reverse_proxy BACKUP {\nPOLICY\n}", whole: true},
	} {
		t.Run(test.name, func(t *testing.T) {
			backup := newRecorder(t, chatServer)
			route := strings.NewReplacer("BACKUP", backup.addr(), "POLICY", strings.TrimSpace(policy())).Replace(test.route)
			s := newSiteOf(t, proxyTo(deadAddr(t), policy())+"\n\thandle_errors {\n"+route+"\n}")
			for body, contentType := range bodies {
				for _, chunked := range []bool{false, true} {
					if chunked && test.known {
						continue
					}
					var sent io.Reader = strings.NewReader(body)
					if chunked {
						sent = io.MultiReader(sent)
					}
					res, err := http.Post(s.URL+chatPath, contentType, sent)
					if err != nil {
						t.Fatal(err)
					}
					res.Body.Close()
					want := body
					if test.set != "" || test.none {
						want = test.set
					}
					got, errs := backup.take()
					for i := range got {
						if errs[i] == nil && got[i] != want {
							t.Errorf("%.10q, chunked %t: status %d, %d bytes passed for the %d sent", body, chunked, res.StatusCode, len(got[i]), len(want))
						}
					}
					if test.whole && (len(got) != 1 || got[0] != want) {
						t.Errorf("%.10q, chunked %t: status %d, the backup got %d requests, not the one sent", body, chunked, res.StatusCode, len(got))
					}
				}
			}
		})
	}
}

// Sites that share upstreams share what is known of them. A lookup names the
// sites, and tells them apart where they would do different things.
func TestSitesShareUpstreams(t *testing.T) {
	fleet := harness.TestFleet(t, 4, quick)
	s, other := newSiteAt(t), newSiteAt(t)
	s.start(t, s.file(proxyTo(fleet.Upstreams(), policy()))+"http://"+other.addr+" {\n\thandle /v1/* {\n\t\t"+proxyTo(fleet.Upstreams(), policy())+
		"\n\t}\n\thandle /coarse/* {\n\t\t"+proxyTo(fleet[0].Addr(), policy("block_size 512"))+"\n\t}\n}\n")
	other.caddyServer, other.Admin = s.caddyServer, s.Admin

	conversations := newConversations(8)
	for turn := range 4 {
		for _, c := range conversations {
			at, d := c.at, c.turn(t, []*site{s, other}[turn%2], turn%2 == 0)
			if turn > 0 && (d.upstream != at || d.reason != "affinity") {
				t.Errorf("%s, turn %d: %+v after %s", c.name, turn, d, at)
			}
		}
	}
	s.settled(t)
	if accounts := s.accounts(t); len(accounts) != len(fleet) {
		t.Errorf("%d accounts for %d upstreams", len(accounts), len(fleet))
	}

	body := chat(true, conversations[0].messages...)
	var answers []struct {
		Sites     []string `json:"sites"`
		Upstream  string   `json:"upstream"`
		Upstreams []any    `json:"upstreams"`
	}
	if status := s.admin(t, http.MethodPost, "lookup", body, &answers); status != http.StatusOK || len(answers) != 2 {
		t.Fatalf("status %d, %+v", status, answers)
	}
	place := func(s *site, path string) string { return "127.0.0.1" + path + " on " + s.addr }
	both, coarse := []string{place(s, ""), place(other, "/v1/*")}, []string{place(other, "/coarse/*")}
	slices.Sort(both)
	for _, a := range answers {
		switch {
		case slices.Equal(a.Sites, both):
			if a.Upstream != conversations[0].at || len(a.Upstreams) != 4 {
				t.Errorf("%+v", a)
			}
		case slices.Equal(a.Sites, coarse):
			if len(a.Upstreams) != 1 {
				t.Errorf("%+v", a)
			}
		default:
			t.Errorf("a lookup of the sites %q", a.Sites)
		}
	}
	file := filepath.Join(t.TempDir(), "body.json")
	if err := os.WriteFile(file, []byte(body), 0o600); err != nil {
		t.Fatal(err)
	}
	out, err := s.caddy(t, "prefix-affinity", "lookup", file)
	for _, name := range []string{strings.Join(both, "; "), coarse[0]} {
		if err != nil || !strings.Contains(out, name+":\n") {
			t.Errorf("%v: no %s in %s", err, name, out)
		}
	}
}

// WebSockets pass through, and count as requests in flight while they last.
func TestWebSocketsPassThrough(t *testing.T) {
	addrs := make([]string, 2)
	for i := range addrs {
		up := httptest.NewServer(websocket.Handler(func(c *websocket.Conn) { _, _ = io.Copy(c, c) }))
		t.Cleanup(up.Close)
		addrs[i] = up.Listener.Addr().String()
	}
	s := newSite(t, strings.Join(addrs, " "), policy())
	for range 4 {
		c, err := websocket.Dial("ws://"+s.addr+"/v1/realtime?model=m", "", s.URL)
		if err != nil {
			t.Fatal(err)
		}
		for _, size := range []int{1, 100, 70_000} {
			sent, got := words("frame", size), make([]byte, size)
			if _, err := io.WriteString(c, sent); err != nil {
				t.Fatal(err)
			}
			if _, err := io.ReadFull(c, got); err != nil || string(got) != sent {
				t.Errorf("an echo of %d bytes is not what was sent: %v", size, err)
			}
		}
		if n := sum(s.accounts(t)); n != 1 {
			t.Errorf("%d requests in flight while one connection is open", n)
		}
		if err := c.Close(); err != nil {
			t.Error(err)
		}
		s.settled(t)
	}
}

func sum(accounts []account) (requests int) {
	for _, a := range accounts {
		requests += a.Requests
	}
	return requests
}
