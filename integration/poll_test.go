package integration

import (
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prefix-affinity/caddy/integration/harness"
)

// Polling reads the engine's size and queue, and notices a restart between two
// requests.
func TestPoll(t *testing.T) {
	config := fast
	config.CapacityTokens = 40_000
	fleet := harness.TestFleet(t, 2, config)
	s := newSite(t, fleet.Upstreams(), "lb_policy prefix_affinity {\n\t\t\tpoll 100ms\n\t\t}")
	at := s.conversation(t, fleet, "anna", 2)
	addr := fleet[at].Addr()
	eventually(t, "learning the capacity", func() bool {
		u := s.upstreams(t, addr)[0]
		return u.CacheCapacityTokens > 36_000 && u.CacheCapacityTokens < 44_000 && u.Engine != nil && u.Engine.Name == "vllm"
	})
	time.Sleep(1100 * time.Millisecond) // start times may be whole seconds
	fleet[at].Restart()
	eventually(t, "noticing the restart", func() bool {
		u := s.upstreams(t, addr)[0]
		return u.Generation == 1 && u.IndexBlocks == 0
	})
}

// The engines are asked as they are for everything else: over TLS, by a socket's
// path, with the handler's headers.
func TestPollReaches(t *testing.T) {
	cert := newCertificate(t)
	dir, err := os.MkdirTemp("", "poll") // the path of a socket has to be short
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	socket := filepath.Join(dir, "s")
	const over = "\n\t\ttransport http {\n\t\t\t"
	for _, test := range []struct {
		name, scheme, directives, host string
		start                          func(*recorder)
	}{
		{"upstream/plain", "", "", "UPSTREAM", (*recorder).Start},
		{"upstream/https", "", over + "tls\n\t\t\ttls_trust_pool file " + cert.certFile + "\n\t\t}", "UPSTREAM", func(rec *recorder) {
			rec.TLS = &tls.Config{Certificates: []tls.Certificate{cert.Certificate}}
			rec.StartTLS()
		}},
		{"upstream/https by scheme", "https://", over + "tls_trust_pool file " + cert.certFile + "\n\t\t}", "UPSTREAM", func(rec *recorder) {
			rec.TLS = &tls.Config{Certificates: []tls.Certificate{cert.Certificate}}
			rec.StartTLS()
		}},
		{"upstream/h2c", "h2c://", "", "UPSTREAM", func(rec *recorder) {
			rec.Config.Protocols = new(http.Protocols)
			rec.Config.Protocols.SetUnencryptedHTTP2(true)
			rec.Start()
		}},
		{"upstream/socket", "unix/", "", "localhost", func(rec *recorder) {
			_ = rec.Listener.Close()
			if rec.Listener, err = net.Listen("unix", socket); err != nil {
				t.Fatal(err)
			}
			rec.Start()
		}},
		{"headers/of the handler", "", "\n\t\theader_up Host engine.test", "engine.test", (*recorder).Start},
		{"headers/of the upstream", "", "\n\t\theader_up Host {upstream_hostport}", "UPSTREAM", (*recorder).Start},
	} {
		t.Run(test.name, func(t *testing.T) {
			var host atomic.Value
			rec := newUnstartedRecorder(t, func(w http.ResponseWriter, r *http.Request) {
				if r.Method != http.MethodGet {
					yes(w, r)
					return
				}
				host.Store(r.Host)
				_, _ = io.WriteString(w, "vllm:num_requests_waiting 0\nvllm:num_requests_running 0\n")
			})
			test.start(rec)
			known := rec.addr()
			if test.scheme == "unix/" {
				known = "unix/" + known
			}
			s := newSite(t, strings.TrimSuffix(test.scheme, "unix/")+known, policy("poll 100ms")+test.directives)
			s.ask(t, chat(false, "hello"))
			eventually(t, "a poll", func() bool { return s.upstreams(t, known)[0].Engine != nil })
			if want := strings.ReplaceAll(test.host, "UPSTREAM", rec.addr()); host.Load() != want {
				t.Errorf("asked as host %v, want %s", host.Load(), want)
			}
		})
	}

	t.Run("upstream/placeholder", func(t *testing.T) {
		up := newScripted(t, yes)
		s := newSite(t, "{http.request.header.To}", policy("poll 100ms"))
		req, err := http.NewRequest(http.MethodPost, s.URL+chatPath, strings.NewReader(chat(false, "hello")))
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("To", up.addr())
		res, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		res.Body.Close()
		if res.StatusCode != http.StatusOK {
			t.Errorf("status %d", res.StatusCode)
		}
		eventually(t, "a warning", func() bool {
			log, err := s.Log()
			return err == nil && strings.Count(log, "it can't be polled") == 1
		})
	})
}

// Policies that find their upstreams dynamically ask those, and look for prompts
// there, not what another site has.
func TestDynamicUpstreamsAreOnesOwn(t *testing.T) {
	counted := func(polls *atomic.Int32) *scripted {
		return newScripted(t, func(w http.ResponseWriter, r *http.Request) {
			if r.Method == http.MethodGet {
				polls.Add(1)
			}
			yes(w, r)
		})
	}
	var polls, others atomic.Int32
	up, other := counted(&polls), counted(&others)
	names := newNameServer(t)
	names.set(t, up.addr())
	dynamic := fmt.Sprintf("reverse_proxy {\n\t\t\tdynamic srv own.test {\n\t\t\t\tresolvers %[1]s\n\t\t\t}\n\t\t\ttransport http {\n\t\t\t\tresolvers %[1]s\n\t\t\t}\n\t\t\t%[2]s\n\t\t}",
		names.conn.LocalAddr(), policy("poll 100ms"))
	const path = "/dynamic/v1/chat/completions"
	s := newSiteOf(t, "handle /dynamic/* {\n\t\t"+dynamic+"\n\t}\n\thandle {\n\t\t"+proxyTo(other.addr(), policy())+"\n\t}")
	body := chat(false, words("whose", 3000))
	lookup := func(when string, want ...string) {
		t.Helper()
		var answers []struct {
			Sites     []string
			Upstreams []struct{ Address string }
		}
		if status := s.admin(t, http.MethodPost, "lookup", body, &answers); status != http.StatusOK {
			t.Fatalf("%s: status %d", when, status)
		}
		for _, a := range answers {
			if !slices.ContainsFunc(a.Sites, func(site string) bool { return strings.Contains(site, "/dynamic/*") }) {
				continue
			}
			var got []string
			for _, u := range a.Upstreams {
				got = append(got, u.Address)
			}
			if !slices.Equal(got, want) {
				t.Errorf("%s: upstreams %q, want %q", when, got, want)
			}
			return
		}
		t.Errorf("%s: no answer for the site: %+v", when, answers)
	}
	s.ask(t, body)
	lookup("before its first request")
	s.post(t, path, body)
	eventually(t, "polls", func() bool { return polls.Load() > 0 })
	time.Sleep(300 * time.Millisecond) // for polls of the other
	if n := others.Load(); n > 0 {
		t.Errorf("the upstream of another site was polled %d times", n)
	}
	_, port, _ := net.SplitHostPort(up.addr())
	lookup("after its first request", "replica.test.:"+port)
}

// An engine that keeps the poller waiting doesn't keep the others.
func TestPollWaitsForNobody(t *testing.T) {
	var polls, hanging atomic.Int32
	slow := newScripted(t, func(w http.ResponseWriter, r *http.Request) {
		if r.Method != http.MethodGet {
			yes(w, r)
			return
		}
		polls.Store(0)
		hanging.Add(1)
		<-r.Context().Done()
		hanging.Add(-1)
	})
	quick := newScripted(t, func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodGet && hanging.Load() > 0 {
			polls.Add(1)
		}
		yes(w, r)
	})
	s := newSite(t, slow.addr()+" "+quick.addr(), policy("poll 100ms"))
	s.ask(t, chat(false, "hello"))
	eventually(t, "a poll that hangs", func() bool { return hanging.Load() > 0 })
	eventually(t, "polls of the other while one hangs", func() bool { return polls.Load() > 2 })
	if n := hanging.Load(); n > 1 {
		t.Errorf("%d polls of one upstream at once", n)
	}
}

// What is polled in vain is told at the first answer that says so, once until it
// is otherwise; what may pass is tried some more.
func TestPollInVain(t *testing.T) {
	const known = "vllm:num_requests_waiting 0\nvllm:num_requests_running 0\n"
	page := func(text string) http.HandlerFunc {
		return func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, text) }
	}
	for _, test := range []struct {
		name   string
		answer http.HandlerFunc
		polls  int32 // until it is told
		want   string
	}{
		{"page/not there", status(http.StatusNotFound), 1, "upstream has no metrics there"},
		{"page/refused", status(http.StatusUnauthorized), 1, "upstream has no metrics there"},
		{"page/switched off", status(http.StatusNotImplemented), 1, "upstream has no metrics there"},
		{"page/elsewhere", func(w http.ResponseWriter, r *http.Request) { http.Redirect(w, r, "/login", http.StatusFound) }, 1, "upstream has no metrics there"},
		{"metrics/none", page(""), 1, "no metrics of an engine that is known here"},
		{"metrics/html", page("<html>\n<p>Welcome</p>\n</html>\n"), 1, "no metrics of an engine that is known here"},
		{"metrics/another program's", page("process_start_time_seconds 1\ngo_goroutines 5\n"), 1, "no metrics of an engine that is known here"},
		{"passing/starting", status(http.StatusServiceUnavailable), 5, "upstream's metrics can't be read"},
		{"passing/behind a gateway", status(http.StatusBadGateway), 5, "upstream's metrics can't be read"},
		{"none/known", page(known), 0, ""},
	} {
		t.Run(test.name, func(t *testing.T) {
			var polls atomic.Int32
			up := newScripted(t, func(w http.ResponseWriter, r *http.Request) {
				if r.Method == http.MethodGet {
					polls.Add(1)
					test.answer(w, r)
					return
				}
				yes(w, r)
			})
			interval := "100ms"
			if test.polls == 1 {
				interval = "1h" // a second poll is not what it takes
			}
			s := newSite(t, up.addr(), policy("poll "+interval))
			s.ask(t, chat(false, "hello"))
			told := func() (warnings, right int) {
				log, err := s.Log()
				if err != nil {
					t.Fatal(err)
				}
				return strings.Count(log, `"poll: `), strings.Count(log, test.want)
			}
			if test.want == "" {
				eventually(t, "some polls", func() bool { return polls.Load() > 5 })
				if n, _ := told(); n != 0 {
					t.Errorf("%d warnings", n)
				}
				return
			}
			eventually(t, "a warning", func() bool { n, _ := told(); return n > 0 })
			if n, right := told(); n != 1 || right != 1 || polls.Load() != test.polls {
				t.Errorf("%d warnings after %d polls, of which %d say %q", n, polls.Load(), right, test.want)
			}
		})
	}

	// An engine that says that it has none is left alone; one that has had them, or
	// that may be starting, is not: when it is back is what matters.
	const process = known + "process_start_time_seconds %d\n"
	for _, test := range []struct {
		name    string
		had     bool // metrics before
		down    http.HandlerFunc
		noticed bool
	}{
		{"starts/refusing", false, status(http.StatusServiceUnavailable), true},
		{"starts/without a page", false, status(http.StatusNotFound), false},
		{"restarts/refusing", true, status(http.StatusServiceUnavailable), true},
		{"restarts/behind a gateway", true, status(http.StatusBadGateway), true},
		{"restarts/without a page", true, status(http.StatusNotFound), true},
		{"restarts/with an empty page", true, page(""), true},
		{"restarts/cutting connections", true, func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) }, true},
	} {
		t.Run(test.name, func(t *testing.T) {
			var polls, started atomic.Int32
			up := newScripted(t, nil)
			serve := func(metrics http.HandlerFunc) {
				polls.Store(0)
				up.set(func(w http.ResponseWriter, r *http.Request) {
					if r.Method == http.MethodGet {
						metrics(w, r)
						polls.Add(1)
						return
					}
					yes(w, r)
				})
			}
			running := func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintf(w, process, started.Load()) }
			s := newSite(t, up.addr(), policy("poll 100ms"))
			asked := func() { eventually(t, "polls", func() bool { return polls.Load() > 2 }) }
			if test.had {
				started.Store(1)
				serve(running)
				s.ask(t, chat(false, "hello"))
				asked()
			}
			var tries atomic.Int32
			serve(func(w http.ResponseWriter, r *http.Request) {
				tries.Add(1)
				test.down(w, r)
			})
			s.ask(t, chat(false, "hello"))
			if !test.noticed {
				time.Sleep(time.Second)
				if n := tries.Load(); n != 1 {
					t.Errorf("asked %d times although it has no metrics", n)
				}
				return
			}
			eventually(t, "more tries than are told", func() bool { return tries.Load() > 7 })
			started.Store(2)
			serve(running)
			asked()
			if u := s.upstreams(t, up.addr())[0]; u.Engine == nil || (u.Generation == 1) != test.had {
				t.Errorf("after it came back: engine %v, generation %d", u.Engine, u.Generation)
			}
		})
	}

	t.Run("again/after it was known", func(t *testing.T) {
		var polls atomic.Int32
		up := newScripted(t, page(""))
		s := newSite(t, up.addr(), policy("poll 100ms"))
		serve := func(text string, warnings int) {
			t.Helper()
			up.set(func(w http.ResponseWriter, r *http.Request) {
				polls.Add(1)
				page(text)(w, r)
			})
			polls.Store(0)
			s.post(t, chatPath, chat(false, "hello"))
			eventually(t, "some polls", func() bool { return polls.Load() > 3 })
			log, err := s.Log()
			if n := strings.Count(log, `"poll: `); err != nil || n != warnings {
				t.Errorf("%v, %d warnings, want %d", err, n, warnings)
			}
		}
		serve("", 1)
		serve(known, 1)
		serve("", 2)
	})
}
