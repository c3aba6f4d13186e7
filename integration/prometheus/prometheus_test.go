// Package prometheus has Debian's Prometheus scrape a real run and put the
// queries of examples/grafana to it.
package prometheus

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	_ "github.com/prefix-affinity/caddy"
	"github.com/prefix-affinity/caddy/integration/engine"
	"github.com/prefix-affinity/caddy/integration/harness"
	"github.com/prefix-affinity/caddy/integration/workload"
)

const grafana = "../../examples/grafana"

func look(t *testing.T, command string) string {
	t.Helper()
	path, err := exec.LookPath(command)
	if err != nil {
		t.Skipf("%s is not installed here: it is in Debian's package prometheus", command)
	}
	return path
}

func TestAlertRules(t *testing.T) {
	promtool := look(t, "promtool")
	for _, args := range [][]string{{"check", "rules", "alerts.yml"}, {"test", "rules", "alerts.test.yml"}} {
		cmd := exec.Command(promtool, args...)
		cmd.Dir = grafana
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Errorf("promtool %s: %v\n%s", strings.Join(args, " "), err, out)
		}
	}
}

// TestDashboard runs every query of the dashboard against a Prometheus that
// scrapes two gateways (one Caddy under two names) while traffic runs, and has
// it evaluate the alert rules.
func TestDashboard(t *testing.T) {
	binary := look(t, "prometheus")
	board := readDashboard(t)
	gateway := startGateway(t)
	p := startPrometheus(t, binary, strings.TrimPrefix(gateway.Admin, "http://"))

	for _, v := range board.variables {
		t.Run("variable "+v.Name, func(t *testing.T) {
			match := regexp.MustCompile(`^label_values\((.+), (\w+)\)$`).FindStringSubmatch(v.Query)
			if match == nil {
				t.Fatalf("don't know the query %q", v.Query)
			}
			var values []string
			p.eventually(t, func() error {
				return p.get("label/"+match[2]+"/values", url.Values{"match[]": {interpolate(match[1])}}, &values)
			}, func() bool { return len(values) > 1 }) // the point of choosing
		})
	}
	for _, q := range slices.Concat(board.queries, readmeQueries(t)) {
		t.Run(q.panel+"/"+q.RefID, func(t *testing.T) {
			var answer struct {
				Result []struct {
					Metric map[string]string
					Value  [2]any // time, value
				}
			}
			p.eventually(t, func() error {
				return p.get("query", url.Values{"query": {interpolate(q.Expr)}}, &answer)
			}, func() bool {
				for _, series := range answer.Result {
					text, _ := series.Value[1].(string)
					if v, err := strconv.ParseFloat(text, 64); err == nil && !math.IsNaN(v) && !math.IsInf(v, 0) {
						return true
					}
				}
				return false
			})
			// Legends name labels that are there.
			for _, label := range regexp.MustCompile(`{{(\w+)}}`).FindAllStringSubmatch(q.LegendFormat, -1) {
				for _, series := range answer.Result {
					if series.Metric[label[1]] == "" {
						t.Errorf("the legend %q has nothing to say of %v", q.LegendFormat, series.Metric)
					}
				}
			}
		})
	}
	t.Run("alert rules", func(t *testing.T) {
		var answer struct {
			Groups []struct {
				Rules []struct{ Name, Health, LastError, State string }
			}
		}
		p.eventually(t, func() error { return p.get("rules", nil, &answer) }, func() bool {
			return len(answer.Groups) > 0 && len(answer.Groups[0].Rules) > 0 &&
				!slices.ContainsFunc(answer.Groups[0].Rules, func(r struct{ Name, Health, LastError, State string }) bool { return r.Health == "unknown" })
		})
		for _, r := range answer.Groups[0].Rules {
			if r.Health != "ok" || r.State == "firing" {
				t.Errorf("%s: health %s, %s %s", r.Name, r.Health, r.State, r.LastError)
			}
		}
		var recorded struct{ Result []any }
		for _, name := range []string{"upstream:prefix_affinity_hit_ratio:rate10m", "job:prefix_affinity_hit_ratio:rate10m", "upstream:prefix_affinity_prompt_tokens:rate10m", "upstream:prefix_affinity_pending_prefill_tokens:avg5m"} {
			p.eventually(t, func() error { return p.get("query", url.Values{"query": {name}}, &recorded) }, func() bool { return len(recorded.Result) > 0 })
		}
	})
}

// interpolate fills a query's variables in as Grafana does, with all chosen.
func interpolate(query string) string {
	return strings.NewReplacer("$gateway", ".*", "$replica", ".*", "$__rate_interval", "15s").Replace(query)
}

// readmeQueries returns the lines of the README's promql blocks. A run is too
// short for their intervals.
func readmeQueries(t *testing.T) (queries []query) {
	t.Helper()
	text, err := os.ReadFile("../../README.md")
	if err != nil {
		t.Fatal(err)
	}
	inside := false
	for line := range strings.Lines(string(text)) {
		switch line = strings.TrimSpace(line); {
		case strings.HasPrefix(line, "```"):
			inside = line == "```promql"
		case inside && line != "":
			queries = append(queries, query{"README", strconv.Itoa(len(queries) + 1), strings.ReplaceAll(line, "[5m]", "[15s]"), ""})
		}
	}
	if len(queries) == 0 {
		t.Error("the README has no promql block")
	}
	return queries
}

type dashboard struct {
	variables []struct{ Name, Type, Query string }
	queries   []query
}

type query struct {
	panel                     string
	RefID, Expr, LegendFormat string
}

type panel struct {
	ID         int
	Title      string
	Type       string
	Repeat     string
	Datasource *struct{ UID string }
	GridPos    struct{ X, Y, W, H int }
	Targets    []query
	Panels     []panel
}

// readDashboard reads the dashboard and checks what Grafana would not say.
func readDashboard(t *testing.T) dashboard {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(grafana, "dashboard.json"))
	if err != nil {
		t.Fatal(err)
	}
	var file struct {
		Templating struct {
			List []struct{ Name, Type, Query string }
		}
		Panels []panel
	}
	if err := json.Unmarshal(text, &file); err != nil {
		t.Fatal(err)
	}
	var board dashboard
	for _, v := range file.Templating.List {
		if v.Type == "query" {
			board.variables = append(board.variables, v)
		}
	}
	var all []panel
	repeated := false
	for _, p := range file.Panels {
		all = append(append(all, p), p.Panels...)
		repeated = repeated || p.Repeat == "replica" && len(p.Panels) > 0
	}
	if !repeated {
		t.Error("no row for each replica")
	}
	ids := make(map[int]bool)
	for i, p := range all {
		if ids[p.ID] {
			t.Errorf("panel %q has the id of another one", p.Title)
		}
		ids[p.ID] = true
		for _, other := range all[:i] {
			a, b := p.GridPos, other.GridPos
			if a.X < b.X+b.W && b.X < a.X+a.W && a.Y < b.Y+b.H && b.Y < a.Y+a.H {
				t.Errorf("panels %q and %q overlap", p.Title, other.Title)
			}
		}
		if p.Type == "row" {
			continue
		}
		if p.Datasource == nil || p.Datasource.UID != "${datasource}" {
			t.Errorf("panel %q is bound to a data source", p.Title)
		}
		if len(p.Targets) == 0 {
			t.Errorf("panel %q asks nothing", p.Title)
		}
		for _, q := range p.Targets {
			if !strings.Contains(q.Expr, `instance=~"$gateway"`) {
				t.Errorf("panel %q does not heed the choice of gateways: %s", p.Title, q.Expr)
			}
			q.panel = fmt.Sprintf("%d %s", p.ID, p.Title)
			board.queries = append(board.queries, q)
		}
	}
	if len(board.queries) < 20 || len(board.variables) < 2 {
		t.Fatalf("%d queries and %d variables were found", len(board.queries), len(board.variables))
	}
	return board
}

// startGateway runs a Caddy with the policy and keeps traffic going that has
// something of everything: hits, misses, evictions, requests without a prompt.
func startGateway(t *testing.T) *harness.Gateway {
	t.Helper()
	g, err := harness.StartGateway(3, engine.Config{PrefillRate: 50_000, InterToken: time.Millisecond, CapacityTokens: 40_000},
		"lb_policy prefix_affinity {\n\t\t\tpoll 1s\n\t\t}")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := g.Close(); err != nil {
			t.Error(err)
		}
	})
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	wg.Go(func() {
		shape := workload.Shape{
			Tenants: 4, SystemTokens: 1000, Conversations: 12, Turns: 4, TurnTokens: 200, AnswerTokens: 20,
			Siblings: 4, SharedTokens: 2000, Clients: 4,
		}
		for ctx.Err() == nil {
			shape.Seed++
			plan, err := workload.New(shape)
			if err != nil {
				t.Error(err)
				return
			}
			if _, err := plan.Play(ctx, "http://"+g.Addr, 300*time.Millisecond, func() {}); err != nil && ctx.Err() == nil {
				t.Error(err)
				return
			}
			if err := embed(ctx, g.Addr); err != nil && ctx.Err() == nil {
				t.Error(err)
				return
			}
		}
	})
	t.Cleanup(func() {
		cancel()
		wg.Wait()
	})
	return g
}

// embed sends a request without a prompt to go by.
func embed(ctx context.Context, addr string) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+addr+"/v1/embeddings", strings.NewReader(`{"model":"m","input":"x"}`))
	if err != nil {
		return err
	}
	req.Header.Set("Content-Type", "application/json")
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		return err
	}
	return res.Body.Close()
}

// server is a running Prometheus.
type server struct{ api string }

func startPrometheus(t *testing.T, binary, target string) server {
	t.Helper()
	dir := t.TempDir()
	rules, err := filepath.Abs(filepath.Join(grafana, "alerts.yml"))
	if err != nil {
		t.Fatal(err)
	}
	config := fmt.Sprintf(`global:
  scrape_interval: 1s
  evaluation_interval: 1s
rule_files: [%q]
scrape_configs:
  - job_name: caddy
    static_configs:
      - targets: [%q]
        labels: { instance: gateway-1 }
      - targets: [%[2]q]
        labels: { instance: gateway-2 }
`, rules, target)
	if err := os.WriteFile(filepath.Join(dir, "prometheus.yml"), []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}
	addr, err := harness.FreeAddr()
	if err != nil {
		t.Fatal(err)
	}
	var log bytes.Buffer
	cmd := exec.Command(binary, "--config.file="+filepath.Join(dir, "prometheus.yml"), "--storage.tsdb.path="+filepath.Join(dir, "data"), "--web.listen-address="+addr, "--log.level=warn")
	cmd.Stdout, cmd.Stderr = &log, &log
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := cmd.Process.Signal(syscall.SIGTERM); err != nil {
			t.Error(err)
		}
		if err := cmd.Wait(); err != nil || t.Failed() {
			t.Logf("prometheus ended with %v: %s", err, log.String())
		}
	})
	return server{"http://" + addr + "/api/v1/"}
}

// get decodes the data of an API call into to.
func (s server) get(path string, args url.Values, to any) error {
	res, err := http.Get(s.api + path + "?" + args.Encode())
	if err != nil {
		return err
	}
	defer res.Body.Close()
	text, err := io.ReadAll(res.Body)
	if err != nil {
		return err
	}
	answer := struct {
		Status, Error string
		Data          any
	}{Data: to}
	if err := json.Unmarshal(text, &answer); err != nil {
		return fmt.Errorf("%s: %s: %w", path, text, err)
	}
	if answer.Status != "success" {
		return refused{errors.New(answer.Error)}
	}
	return nil
}

// refused is an error that no waiting helps against.
type refused struct{ error }

// eventually asks until the answer has something in it: Prometheus has to come
// up, and rates need two scrapes.
func (s server) eventually(t *testing.T, ask func() error, enough func() bool) {
	t.Helper()
	for deadline := time.Now().Add(45 * time.Second); ; time.Sleep(200 * time.Millisecond) {
		err := ask()
		if _, ok := errors.AsType[refused](err); ok {
			t.Fatal(err)
		}
		if err == nil && enough() {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("still no answer: %v", err)
		}
	}
}
