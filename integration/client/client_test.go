package client

import (
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"fmt"
	"maps"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	_ "github.com/prefix-affinity/caddy"
	"github.com/prefix-affinity/caddy/integration/engine"
	"github.com/prefix-affinity/caddy/integration/harness"
)

// requests that conversation.mjs makes: ten turns, each with a tool call.
const requests = 20

// TestOpenAI has the openai package hold a conversation through HTTPS, and asks
// the engines who got it. The last case shows that without the policy the
// conversation does not stay where it began.
func TestOpenAI(t *testing.T) {
	if _, err := os.Stat("node_modules/openai"); err != nil {
		t.Skip("the package is not installed here: npm ci --prefix integration/client")
	}
	for _, test := range []struct {
		name, policy, transport, protocol string
		replicas                          int // that get requests
	}{
		{"prefix_affinity/fetch", "prefix_affinity", "fetch", "HTTP/1.1", 1},
		{"prefix_affinity/http2", "prefix_affinity", "http2", "HTTP/2.0", 1},
		{"round_robin/fetch", "round_robin", "fetch", "HTTP/1.1", 4},
	} {
		t.Run(test.name, func(t *testing.T) {
			fleet := harness.TestFleet(t, 4, engine.Config{
				PrefillRate: 100_000, InterToken: time.Millisecond, OutputTokens: 24,
			})
			site := startSite(t, test.policy, fleet.Upstreams())

			answers := site.converse(t, test.transport)
			if len(answers) != requests {
				t.Fatalf("the client got %d answers, want %d", len(answers), requests)
			}
			for i, a := range answers {
				if a.Chunks < 12 {
					t.Errorf("answer %d came in %d chunks: not streamed", i, a.Chunks)
				}
			}
			var served []int64
			for _, s := range fleet.Stats() {
				if s.Requests != s.Served {
					t.Errorf("an engine served %d of %d requests", s.Served, s.Requests)
				}
				if s.Served > 0 {
					served = append(served, s.Served)
				}
			}
			if len(served) != test.replicas {
				t.Errorf("%d replicas got requests, want %d: %d", len(served), test.replicas, served)
			}
			if test.replicas == 1 {
				for i, a := range answers[1:] {
					// All that the request before it sent is there.
					if before := answers[i]; a.Cached < before.Prompt-engine.BlockTokens {
						t.Errorf("answer %d: %d tokens cached of the %d before", i+1, a.Cached, before.Prompt)
					}
				}
			}
			if got, want := site.protocols(t), map[string]int{test.protocol: requests}; !maps.Equal(got, want) {
				t.Errorf("requests by protocol %v, want %v", got, want)
			}
		})
	}
}

// site is a running Caddy with a certificate of its internal CA.
type site struct {
	caddy *harness.Caddy
	addr  string
	root  string // file with the CA's root certificate
}

func startSite(t *testing.T, policy, upstreams string) site {
	t.Helper()
	addr, err := harness.FreeAddr()
	if err != nil {
		t.Fatal(err)
	}
	_, port, err := net.SplitHostPort(addr)
	if err != nil {
		t.Fatal(err)
	}
	storage := t.TempDir()
	c, err := harness.StartCaddy(fmt.Sprintf(`{
	storage file_system %s
	skip_install_trust
	auto_https disable_redirects
	servers {
		protocols h1 h2
	}
}

https://localhost:%s {
	bind 127.0.0.1
	tls internal
	log
	reverse_proxy %s {
		lb_policy %s
	}
}
`, storage, port, upstreams, policy))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := c.Stop(); err != nil {
			t.Error(err)
		}
	})
	s := site{c, "localhost:" + port, filepath.Join(storage, "pki", "authorities", "local", "root.crt")}
	s.await(t)
	return s
}

// await returns when the site has its certificate, which Caddy makes in the
// background.
func (s site) await(t *testing.T) {
	t.Helper()
	pem, err := os.ReadFile(s.root)
	if err != nil {
		t.Fatal(err)
	}
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(pem)
	for deadline := time.Now().Add(30 * time.Second); ; time.Sleep(20 * time.Millisecond) {
		conn, err := tls.Dial("tcp", s.addr, &tls.Config{RootCAs: roots})
		if err == nil {
			if err := conn.Close(); err != nil {
				t.Fatal(err)
			}
			return
		}
		if time.Now().After(deadline) {
			t.Fatal(err)
		}
	}
}

// answer is what conversation.mjs says about one.
type answer struct{ Chunks, Prompt, Cached int }

func (s site) converse(t *testing.T, transport string) []answer {
	t.Helper()
	node := exec.CommandContext(t.Context(), "node", "conversation.mjs", "https://"+s.addr+"/v1", transport)
	node.Env = append(os.Environ(), "NODE_EXTRA_CA_CERTS="+s.root)
	var stderr strings.Builder
	node.Stderr = &stderr
	out, err := node.Output()
	if err != nil {
		t.Fatalf("%v\n%s", err, stderr.String())
	}
	var answers []answer
	if err := json.Unmarshal(out, &answers); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	return answers
}

// protocols counts the requests in the access log by HTTP version.
func (s site) protocols(t *testing.T) map[string]int {
	t.Helper()
	log, err := s.caddy.Log()
	if err != nil {
		t.Fatal(err)
	}
	count := make(map[string]int)
	for line := range strings.Lines(log) {
		var entry struct {
			Logger  string
			Request struct{ Proto string }
		}
		if err := json.Unmarshal([]byte(line), &entry); err != nil {
			t.Fatalf("%v: %s", err, line)
		}
		if strings.HasPrefix(entry.Logger, "http.log.access") {
			count[entry.Request.Proto]++
		}
	}
	return count
}
