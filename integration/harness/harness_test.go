package harness

import (
	"fmt"
	"io"
	"net/http"
	"os"
	"strings"
	"testing"

	"github.com/prefix-affinity/caddy/integration/engine"
)

func TestMain(m *testing.M) {
	BeCaddy()
	os.Exit(m.Run())
}

func TestHarness(t *testing.T) {
	fleet, err := Engines(2, engine.Config{})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := fleet.Close(); err != nil {
			t.Error(err)
		}
	}()
	addr, err := FreeAddr()
	if err != nil {
		t.Fatal(err)
	}
	site := "http://" + addr + " {\n\t%s\n\treverse_proxy " + fleet.Upstreams() + " {\n\t\tlb_policy round_robin\n\t}\n}\n"
	c, err := StartCaddy(fmt.Sprintf(site, "header X-Version 1"))
	if err != nil {
		t.Fatal(err)
	}
	stopped := false
	defer func() {
		if stopped {
			return
		}
		if err := c.Stop(); err != nil {
			t.Error(err)
		}
	}()
	get := func(url string) *http.Response {
		t.Helper()
		resp, err := http.Get(url)
		if err != nil { // who connects while a reload closes the old listener is dropped
			resp, err = http.Get(url)
		}
		if err != nil {
			t.Fatal(err)
		}
		if _, err := io.Copy(io.Discard, resp.Body); err != nil {
			t.Error(err)
		}
		if err := resp.Body.Close(); err != nil {
			t.Error(err)
		}
		return resp
	}

	pods := map[string]bool{}
	for range 2 {
		pods[get("http://"+addr+"/health").Header.Get("X-Inference-Pod")] = true
	}
	if !pods["replica-1"] || !pods["replica-2"] {
		t.Errorf("round_robin reached %v", pods)
	}

	if err := c.Reload(fmt.Sprintf(site, "header X-Version 2")); err != nil {
		t.Fatal(err)
	}
	if v := get("http://" + addr + "/health").Header.Get("X-Version"); v != "2" {
		t.Errorf("version %q after the reload", v)
	}
	if err := c.Reload("bad {\n\tnonsense\n}\n"); err == nil {
		t.Error("a bad Caddyfile was loaded")
	}
	if resp := get(c.Admin + "/config/"); resp.StatusCode != http.StatusOK {
		t.Errorf("admin: %s", resp.Status)
	}
	if log, err := c.Log(); err != nil || !strings.Contains(log, `"logger":"admin"`) {
		t.Errorf("log %q, %v", log, err)
	}

	dir := c.dir
	stopped = true
	if err := c.Stop(); err != nil {
		t.Error(err)
	}
	if _, err := http.Get("http://" + addr); err == nil { //nolint:bodyclose // there is none
		t.Error("the site outlives Stop")
	}
	if _, err := os.Stat(dir); !os.IsNotExist(err) {
		t.Errorf("%s is left: %v", dir, err)
	}
}

func TestProcess(t *testing.T) {
	addr, err := FreeAddr()
	if err != nil {
		t.Fatal(err)
	}
	site := "{\n\tgrace_period 1s\n}\nhttp://" + addr + " {\n\trespond %s\n}\n"
	p, err := StartProcess(fmt.Sprintf(site, "one"))
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := p.Close(); err != nil {
			t.Error(err)
		}
		if _, err := os.Stat(p.dir); !os.IsNotExist(err) {
			t.Errorf("%s is left: %v", p.dir, err)
		}
	}()
	get := func() string {
		resp, err := http.Get("http://" + addr)
		if err != nil {
			return err.Error()
		}
		defer resp.Body.Close()
		body, _ := io.ReadAll(resp.Body)
		return string(body)
	}
	if got := get(); got != "one" {
		t.Errorf("at first: %s", got)
	}
	if err := p.Reload(fmt.Sprintf(site, "two")); err != nil || get() != "two" {
		t.Errorf("after a reload: %s, %v", get(), err)
	}
	metrics, err := p.Metrics()
	if err != nil || metrics["process_resident_memory_bytes"].GetMetric()[0].GetGauge().GetValue() < 1<<20 {
		t.Errorf("metrics: %v, %v", metrics["process_resident_memory_bytes"], err)
	}
	for name, end := range map[string]func() error{"stop": p.Stop, "kill": p.Kill} {
		if err := end(); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if got := get(); !strings.Contains(got, "refused") {
			t.Errorf("after %s: %s", name, got)
		}
		if err := end(); err != nil {
			t.Errorf("%s again: %v", name, err)
		}
		if err := p.Start(); err != nil {
			t.Fatal(err)
		}
		if got := get(); got != "one" {
			t.Errorf("started after %s: %s", name, got)
		}
	}
	if p, err := StartProcess("bad {\n\tnonsense\n}\n"); err == nil {
		t.Errorf("a bad Caddyfile was started: %v", p.Close())
	}
	broken := "http://" + addr + " {\n\tlog {\n\t\toutput file /dev/null/log\n\t}\n}\n"
	if _, err := StartProcess(broken); err == nil || !strings.Contains(err.Error(), "/dev/null/log") {
		t.Errorf("a Caddyfile that can't be loaded: %v", err)
	}
}
