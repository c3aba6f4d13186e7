package integration

import (
	"io"
	"net/http"
	"os"
	"strings"
	"testing"

	"github.com/prefix-affinity/caddy/integration/harness"
)

// syncTo is the options of a policy that shares through a Redis.
func syncTo(addr, more string) string {
	return policy("seed secret", "snapshot off", "sync redis "+addr+" {\n\t\t\t\tpassword {env.TEST_REDIS_PASSWORD}\n\t\t\t\t"+more+"\n\t\t\t}")
}

// TestSyncAlone: without Redis a gateway starts, serves and reloads, warns once
// and tells no secret. (With it: package gateways.)
func TestSyncAlone(t *testing.T) {
	const password = "open sesame"
	t.Setenv("TEST_REDIS_PASSWORD", password)
	fleet := harness.TestFleet(t, 2, fast)
	redis := deadAddr(t)
	s := newSite(t, fleet.Upstreams(), syncTo(redis, ""))
	warnings := func() int {
		log, err := s.Log()
		if err != nil {
			t.Fatal(err)
		}
		if strings.Contains(log, password) {
			t.Error("the log has the password")
		}
		return strings.Count(log, "redis is away")
	}
	body := chat(true, words("a", 4000))
	first, _ := s.post(t, "/v1/chat/completions", body)
	eventually(t, "a warning", func() bool { return warnings() == 1 })
	s.reload(t, fleet.Upstreams(), syncTo(redis, "")+"\n\t\tlb_retries 1")
	again, _ := s.post(t, "/v1/chat/completions", body)
	if first.StatusCode != 200 || again.StatusCode != 200 || !strings.HasPrefix(again.Header.Get("X-Prefix-Affinity"), "affinity") {
		t.Errorf("%d, then %d %s", first.StatusCode, again.StatusCode, again.Header.Get("X-Prefix-Affinity"))
	}
	if n := warnings(); n != 1 {
		t.Errorf("%d warnings after a reload", n)
	}
	metrics, err := s.Metrics()
	if err != nil {
		t.Fatal(err)
	}
	if f := metrics["caddy_prefix_affinity_sync_connected"]; f == nil || f.GetMetric()[0].GetGauge().GetValue() != 0 {
		t.Errorf("sync_connected is %v", f)
	}

	s.reload(t, fleet.Upstreams(), policy("snapshot off"))
	metrics, err = s.Metrics()
	if err != nil {
		t.Fatal(err)
	}
	if metrics["caddy_prefix_affinity_sync_connected"] != nil {
		t.Error("sync goes on after it was taken out")
	}
}

// TestSyncMistakes: what can't work fails when it is loaded.
func TestSyncMistakes(t *testing.T) {
	t.Setenv("TEST_REDIS_PASSWORD", "x")
	fleet := harness.TestFleet(t, 2, fast)
	s := newSite(t, fleet.Upstreams(), syncTo("127.0.0.1:1", ""))
	two := func(first, second string) string {
		return "handle /a {\n\t" + proxyTo(fleet.Upstreams(), first) + "\n\t}\n\thandle {\n\t" + proxyTo(fleet.Upstreams(), second) + "\n\t}"
	}
	fails := func(name, directives, want string) {
		t.Helper()
		err := s.Reload(s.file(directives))
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", name, err)
		}
	}
	fails("two servers", two(syncTo("127.0.0.1:1", ""), syncTo("127.0.0.1:2", "")), "sync differs between the policies")
	fails("two prefixes", two(syncTo("127.0.0.1:1", ""), syncTo("127.0.0.1:1", "stream_prefix x")), "sync differs between the policies")
	if err := s.Reload(s.file(two(syncTo("127.0.0.1:2", ""), syncTo("127.0.0.1:2", "")))); err != nil {
		t.Errorf("another server for all: %v", err)
	}
	if err := s.Reload(s.file(two(syncTo("127.0.0.1:2", ""), policy("seed secret", "snapshot off")))); err != nil {
		t.Errorf("one without sync: %v", err)
	}
	if err := os.Unsetenv("TEST_REDIS_PASSWORD"); err != nil {
		t.Fatal(err)
	}
	fails("no password", proxyTo(fleet.Upstreams(), syncTo("127.0.0.1:2", "")), "placeholder '{env.TEST_REDIS_PASSWORD}' of password has no value")
	s.reload(t, fleet.Upstreams(), policy("seed secret", "snapshot off"))
	for _, sync := range []string{`{}`, `{"redis":{}}`} {
		t.Run("json/"+sync, func(t *testing.T) {
			res, err := http.Get(s.Admin + "/config/")
			if err != nil {
				t.Fatal(err)
			}
			config, err := io.ReadAll(res.Body)
			_ = res.Body.Close()
			if err != nil || !strings.Contains(string(config), `"seed":"secret"`) {
				t.Fatalf("%s: %v", config, err)
			}
			broken := strings.Replace(string(config), `"seed":"secret"`, `"seed":"secret","sync":`+sync, 1)
			res, err = http.Post(s.Admin+"/load", "application/json", strings.NewReader(broken))
			if err != nil {
				t.Fatal(err)
			}
			defer res.Body.Close()
			answer, err := io.ReadAll(res.Body)
			if res.StatusCode == http.StatusOK || !strings.Contains(string(answer), "invalid sync") {
				t.Errorf("%s: %s, %v", res.Status, answer, err)
			}
		})
	}
}
