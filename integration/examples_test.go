package integration

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"go.yaml.in/yaml/v3"
)

const examples = "../examples/"

func example(t *testing.T, name string) string {
	t.Helper()
	text, err := os.ReadFile(examples + name)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// A JSON example is what its Caddyfile adapts to. There the key is known at run
// time only.
func TestExamplesInJSON(t *testing.T) {
	files, err := filepath.Glob(examples + "*.json")
	if err != nil || len(files) == 0 {
		t.Fatalf("no examples: %v", err)
	}
	for _, variable := range []string{"LLM_HOST", "LLM_UPSTREAMS", "OLLAMA_UPSTREAMS"} {
		unset(t, variable)
	}
	t.Setenv("LLM_KEY", "{env.LLM_KEY}")
	for _, file := range files {
		got, err := adapt(t, example(t, strings.TrimSuffix(filepath.Base(file), ".json")+".Caddyfile"))
		if err != nil {
			t.Fatal(err)
		}
		if *update {
			if err := os.WriteFile(file, []byte(got), 0o644); err != nil {
				t.Fatal(err)
			}
			continue
		}
		var twin bytes.Buffer
		if err := json.Indent(&twin, []byte(strings.TrimSpace(example(t, filepath.Base(file)))), "", "\t"); err != nil {
			t.Fatalf("%s: %v", file, err)
		}
		if twin.String()+"\n" != got {
			t.Errorf("%s is not what its Caddyfile adapts to: go test ./integration -run ExamplesInJSON -update", file)
		}
	}
}

// unset takes a variable out of the environment until the test ends.
func unset(t *testing.T, variable string) {
	t.Helper()
	t.Setenv(variable, "") // restores it
	if err := os.Unsetenv(variable); err != nil {
		t.Fatal(err)
	}
}

// production runs the production example as it is, but for the address that it
// listens on.
func production(t *testing.T, key, upstreams string) *site {
	t.Helper()
	s := newSiteAt(t)
	t.Setenv("LLM_HOST", s.URL)
	t.Setenv("LLM_KEY", key)
	t.Setenv("LLM_UPSTREAMS", upstreams)
	s.start(t, strings.Replace(example(t, "production.Caddyfile"), "{\n", "{\n\tdefault_bind 127.0.0.1\n\tgrace_period 1s\n", 1))
	return s
}

// authorized sends a request with a header Authorization, none if it is empty.
func (s *site) authorized(t *testing.T, authorization, path, body string) *http.Response {
	t.Helper()
	req, err := http.NewRequest(http.MethodPost, s.URL+path, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/json")
	if authorization != "" {
		req.Header.Set("Authorization", authorization)
	}
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	res.Body.Close()
	return res
}

// The production example lets in who knows the key, to the API alone, also where
// the key is a placeholder, as in its JSON; and nobody while there is no key.
func TestProductionExampleKey(t *testing.T) {
	for _, test := range []struct {
		name, adapted, key  string // of the environment, when it is adapted and when it runs
		path, authorization string
		status              int
	}{
		{"key/right", "secret", "secret", chatPath, "Bearer secret", http.StatusOK},
		{"key/right in JSON", "{env.LLM_KEY}", "secret", chatPath, "Bearer secret", http.StatusOK},
		{"key/none", "secret", "secret", chatPath, "", http.StatusUnauthorized},
		{"key/wrong", "secret", "secret", chatPath, "Bearer guess", http.StatusUnauthorized},
		{"key/wrong in JSON", "{env.LLM_KEY}", "secret", chatPath, "Bearer guess", http.StatusUnauthorized},
		{"key/its name in JSON", "{env.LLM_KEY}", "secret", chatPath, "Bearer {env.LLM_KEY}", http.StatusUnauthorized},
		{"unset/empty", "", "", chatPath, "Bearer ", http.StatusUnauthorized},
		{"unset/empty in JSON", "{env.LLM_KEY}", "", chatPath, "Bearer ", http.StatusUnauthorized},
		{"unset/none", "", "", chatPath, "", http.StatusUnauthorized},
		{"path/not of the API", "secret", "secret", "/metrics", "Bearer secret", http.StatusNotFound},
		{"path/around", "secret", "secret", "/v1/../metrics", "Bearer secret", http.StatusNotFound},
	} {
		t.Run(test.name, func(t *testing.T) {
			up := newRecorder(t, chatServer)
			s := production(t, test.adapted, up.addr())
			t.Setenv("LLM_KEY", test.key)
			if res := s.authorized(t, test.authorization, test.path, chat(false, "hello")); res.StatusCode != test.status {
				t.Errorf("status %d, want %d", res.StatusCode, test.status)
			}
			bodies, _ := up.take()
			if got := slices.Contains(bodies, chat(false, "hello")); got != (test.status == http.StatusOK) {
				t.Errorf("the upstream got the request: %t", got)
			}
		})
	}
}

// With the production example, a request that its replica turns away or loses is
// tried on another one, with its whole body, and a client is told when to come
// back if there is none.
func TestProductionExampleRetries(t *testing.T) {
	for name, fail := range map[string]http.HandlerFunc{
		"429":        status(http.StatusTooManyRequests),
		"502":        status(http.StatusBadGateway),
		"503":        status(http.StatusServiceUnavailable),
		"connection": func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) },
	} {
		t.Run(name, func(t *testing.T) {
			var failing atomic.Int64 // requests that are yet to fail
			var ups []*recorder
			var addrs []string
			for range 3 {
				up := newRecorder(t, func(w http.ResponseWriter, r *http.Request) {
					if r.URL.Path == chatPath && failing.Add(-1) >= 0 {
						fail(w, r)
						return
					}
					chatServer(w, r)
				})
				ups, addrs = append(ups, up), append(addrs, up.addr())
			}
			s := production(t, "secret", strings.Join(addrs, " "))
			// asked are the upstreams that got a body, once each.
			asked := func(body string) (n int) {
				for _, up := range ups {
					bodies, _ := up.take()
					switch got := slices.DeleteFunc(bodies, func(b string) bool { return b == "" }); { // but for health checks
					case slices.Equal(got, []string{body}):
						n++
					case len(got) > 0:
						t.Errorf("%s got %d requests, not one as it was sent", up.addr(), len(got))
					}
				}
				return n
			}
			for i, fails := range []int64{0, 1, 2} {
				failing.Store(fails)
				body := chat(i == 0, words(fmt.Sprintf("%s %d", name, fails), 3000))
				res := s.authorized(t, "Bearer secret", chatPath, body)
				if n := asked(body); res.StatusCode != http.StatusOK || n != int(fails)+1 {
					t.Errorf("status %d after %d failures, %d replicas were asked", res.StatusCode, fails, n)
				}
			}
			failing.Store(3)
			body := chat(true, words("hopeless", 3000))
			res := s.authorized(t, "Bearer secret", chatPath, body)
			if n := asked(body); res.StatusCode < 400 || res.Header.Get("Retry-After") != "2" || n > 3 {
				t.Errorf("status %d, Retry-After %q after all %d replicas failed", res.StatusCode, res.Header.Get("Retry-After"), n)
			}
			s.settled(t)
		})
	}
}

// The compose file's gateway loads a Caddyfile whose upstreams are the compose
// file's services, and is built as the README says.
func TestComposeFile(t *testing.T) {
	var file struct {
		Services map[string]struct {
			Image       string
			Build       struct{ Context, Dockerfile string }
			Environment map[string]string
			Volumes     []string
			Ports       []string
			DependsOn   []string `yaml:"depends_on"`
		}
		Volumes map[string]any
	}
	if err := yaml.Unmarshal([]byte(example(t, "compose.yaml")), &file); err != nil {
		t.Fatal(err)
	}
	for name, service := range file.Services {
		if (service.Image == "") == (service.Build.Dockerfile == "") {
			t.Errorf("%s: image %q, Dockerfile %q, want one of them", name, service.Image, service.Build.Dockerfile)
		}
		for _, volume := range service.Volumes {
			source, _, _ := strings.Cut(volume, ":")
			_, named := file.Volumes[source]
			if _, err := os.Stat(examples + source); !named && err != nil {
				t.Errorf("%s: volume %q: %v", name, volume, err)
			}
		}
		for _, port := range service.Ports {
			if !strings.HasPrefix(port, "127.0.0.1:") {
				t.Errorf("%s: port %q is open to the network", name, port)
			}
		}
	}

	gateway := file.Services["gateway"]
	caddyfile, _, _ := strings.Cut(gateway.Volumes[0], ":")
	for variable, value := range gateway.Environment {
		t.Setenv(variable, value)
	}
	adapted, err := adapt(t, example(t, caddyfile))
	if err != nil {
		t.Fatal(err)
	}
	dials := dialsOf(t, adapted)
	for _, dial := range dials {
		host, _, err := net.SplitHostPort(dial)
		if _, known := file.Services[host]; err != nil || !known || !slices.Contains(gateway.DependsOn, host) {
			t.Errorf("the gateway's upstream %q is no service that it depends on", dial)
		}
	}
	if len(dials) != len(file.Services)-1 {
		t.Errorf("the gateway has the upstreams %q, of %d services", dials, len(file.Services))
	}

	dockerfile, err := os.ReadFile(filepath.Join(examples, gateway.Build.Context, gateway.Build.Dockerfile))
	if err != nil {
		t.Fatal(err)
	}
	readme, err := os.ReadFile("../README.md")
	if err != nil {
		t.Fatal(err)
	}
	_, build, _ := strings.Cut(string(dockerfile), "RUN ")
	build, _, _ = strings.Cut(build, "\n")
	if !strings.Contains(string(readme), "\n"+build+"\n") {
		t.Errorf("the Dockerfile's %q is not what the README says", build)
	}
	version := strings.TrimPrefix(strings.Fields(build)[2], "v")
	for line := range strings.Lines(string(dockerfile)) {
		if image, ok := strings.CutPrefix(line, "FROM caddy:"); ok && !strings.HasPrefix(image, version) {
			t.Errorf("the Dockerfile takes caddy:%s, want %s", strings.TrimSpace(image), version)
		}
	}
}

// dialsOf finds the upstreams in an adapted configuration.
func dialsOf(t *testing.T, config string) (dials []string) {
	t.Helper()
	var root any
	if err := json.Unmarshal([]byte(config), &root); err != nil {
		t.Fatal(err)
	}
	var walk func(any)
	walk = func(v any) {
		switch v := v.(type) {
		case []any:
			for _, e := range v {
				walk(e)
			}
		case map[string]any:
			if dial, ok := v["dial"].(string); ok {
				dials = append(dials, dial)
			}
			for _, e := range v {
				walk(e)
			}
		}
	}
	walk(root)
	return dials
}
