package integration

import (
	"bytes"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prefix-affinity/caddy/integration/engine"
	"github.com/prefix-affinity/caddy/integration/harness"
	"github.com/prefix-affinity/caddy/selector/affinity"
)

// gateway is a Caddy in a process of its own, with one site.
type gateway struct {
	*harness.Process
	*site
}

func newGateway(t *testing.T, start func(caddyfile string) (*harness.Process, error), upstreams string, options ...string) *gateway {
	t.Helper()
	g := &gateway{site: newSiteAt(t)}
	var err error
	if g.Process, err = start(g.file(proxyTo(upstreams, policy(options...)))); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if t.Failed() {
			log, _ := g.Process.Log()
			t.Logf("caddy's log ends:\n%s", log[max(0, len(log)-4000):])
		}
		if err := g.Process.Close(); err != nil {
			t.Error(err)
		}
	})
	g.up(t)
	return g
}

// up waits until the site can be reached.
func (g *gateway) up(t *testing.T) {
	t.Helper()
	eventually(t, "the site to be there", func() bool {
		res, err := http.Get(g.URL + "/up")
		if err != nil {
			return false
		}
		res.Body.Close()
		return true
	})
}

// restart ends the gateway and starts it again.
func (g *gateway) restart(t *testing.T, end func() error) {
	t.Helper()
	if err := end(); err != nil {
		t.Fatal(err)
	}
	http.DefaultClient.CloseIdleConnections()
	if err := g.Process.Start(); err != nil {
		t.Fatal(err)
	}
	g.up(t)
}

// log is what a gateway has logged.
func (g *gateway) log(t *testing.T) string {
	t.Helper()
	log, err := g.Process.Log()
	if err != nil {
		t.Fatal(err)
	}
	return log
}

// restored starts the gateway again after end, and waits until it has read the
// snapshot, or given up.
func (g *gateway) restored(t *testing.T, end func() error) {
	t.Helper()
	before := len(g.log(t))
	g.restart(t, end)
	eventually(t, "the file to be read", func() bool {
		return strings.Contains(g.log(t)[before:], "learned before the restart")
	})
}

// snapshot is the file of a gateway.
func (g *gateway) snapshot() string { return filepath.Join(g.Data(), "prefix_affinity", "snapshot") }

// written waits until a snapshot has everything that has happened so far.
func (g *gateway) written(t *testing.T) {
	t.Helper()
	for i := range 2 { // the first may have begun before
		asked := time.Now()
		g.ask(t, chat(false, words(fmt.Sprintf("wait %d", i), 1000)))
		eventually(t, "a snapshot", func() bool {
			info, err := os.Stat(g.snapshot())
			return err == nil && info.ModTime().After(asked)
		})
	}
}

func TestRestartKeepsConversations(t *testing.T) {
	fleet := harness.TestFleet(t, 4, roomy)
	g := newGateway(t, harness.StartProcess, fleet.Upstreams(), "snapshot 1s")
	conversations := newConversations(200)
	everyone(t, g.site, conversations)
	everyone(t, g.site, conversations)
	stayed := func(how string) {
		t.Helper()
		before := fleet.Stats()
		n := everyone(t, g.site, conversations)
		var cached, prompts int64
		for i, s := range fleet.Stats() {
			cached, prompts = cached+s.CachedTokens-before[i].CachedTokens, prompts+s.PromptTokens-before[i].PromptTokens
		}
		t.Logf("%s: %d of 200 conversations stayed, %d of %d prompt tokens cached", how, n, cached, prompts)
		if n < 180 {
			t.Errorf("%s: %d of 200 conversations stayed on their replica, want 90 %%", how, n)
		}
	}

	g.written(t)
	g.restart(t, g.Kill)
	stayed("after kill -9")
	if info, err := os.Stat(g.snapshot()); err != nil || runtime.GOOS != "windows" && info.Mode().Perm() != 0o600 {
		t.Errorf("the file's mode: %v, %v", info, err)
	}
	g.restart(t, g.Process.Stop)
	stayed("after a clean stop")

	// Who is being served when Caddy stops is known too, and so are drains.
	drained := fleet[0].Addr()
	res, err := http.Post(g.Process.Admin+"/prefix_affinity/drain?upstream="+drained, "", nil)
	if err != nil || res.StatusCode != http.StatusOK {
		t.Fatal(res, err)
	}
	res.Body.Close()
	set := func(f engine.Faults) {
		t.Helper()
		for _, e := range fleet {
			if err := e.SetFaults(f); err != nil {
				t.Fatal(err)
			}
		}
	}
	set(engine.Faults{Slow: 100})
	prompt := words("in flight", 8000)
	req, err := http.NewRequest(http.MethodPost, g.URL+chatPath, strings.NewReader(chat(true, prompt)))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/json")
	if res, err = http.DefaultClient.Do(req); err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	if _, err := io.ReadFull(res.Body, make([]byte, 300)); err != nil { // the first output is there
		t.Fatal(err)
	}
	set(engine.Faults{Hang: true})
	at := decisionOf(t, res).upstream
	g.restored(t, g.Process.Stop)
	set(engine.Faults{})
	if d := g.ask(t, chat(false, prompt)); d.upstream != at || d.reason != "affinity" {
		t.Errorf("%+v, but the prompt was sent to %s", d, at)
	}
	for i := range 20 {
		if d := g.ask(t, chat(false, words(fmt.Sprintf("new %d", i), 3000))); d.upstream == drained {
			t.Fatalf("a new prompt went to the drained upstream: %+v", d)
		}
	}
}

// files returns what a gateway keeps, by name. The lock file holds nothing.
func (g *gateway) files(t *testing.T) map[string]string {
	t.Helper()
	files := make(map[string]string)
	dir := filepath.Dir(g.snapshot())
	entries, err := os.ReadDir(dir)
	if err != nil && !os.IsNotExist(err) {
		t.Fatal(err)
	}
	for _, e := range entries {
		content, err := os.ReadFile(filepath.Join(dir, e.Name()))
		if err != nil {
			t.Fatal(err)
		}
		info, err := e.Info()
		if err != nil {
			t.Fatal(err)
		}
		if !strings.HasSuffix(e.Name(), ".lock") {
			files[e.Name()] = info.ModTime().String() + string(content)
		}
	}
	return files
}

// A process that has to do with a seed of the day leaves the snapshot to the one
// that has the right seed again.
func TestLostSeed(t *testing.T) {
	fleet := harness.TestFleet(t, 4, roomy)
	g := newGateway(t, harness.StartProcess, fleet.Upstreams(), "snapshot 1s")
	conversations := newConversations(8)
	everyone(t, g.site, conversations)
	if err := g.Process.Stop(); err != nil {
		t.Fatal(err)
	}
	seed := filepath.Join(g.Data(), "prefix_affinity", "seed")
	kept, before := g.files(t), len(g.log(t))
	secret, err := os.ReadFile(seed)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(seed, []byte("x\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	g.restart(t, func() error { return nil })
	g.ask(t, chat(false, words("meanwhile", 2000)))
	time.Sleep(2 * time.Second) // for a snapshot
	if err := g.Process.Stop(); err != nil {
		t.Fatal(err)
	}
	if log := g.log(t)[before:]; strings.Count(log, "seed can't be kept") != 1 {
		t.Errorf("the log does not say once that there is no seed:\n%s", log)
	}
	if g.files(t)["snapshot"] != kept["snapshot"] {
		t.Error("the snapshot is another one")
	}
	if err := os.WriteFile(seed, secret, 0o600); err != nil {
		t.Fatal(err)
	}
	stayed := func(after string) {
		t.Helper()
		for _, c := range conversations {
			if at, d := c.at, c.turn(t, g.site, false); d.upstream != at || d.reason != "affinity" {
				t.Errorf("%s: %s: %+v after %s", after, c.name, d, at)
			}
		}
	}
	g.restored(t, func() error { return nil })
	stayed("with the seed again")

	// What somebody deletes meanwhile is made again.
	if err := os.RemoveAll(filepath.Dir(seed)); err != nil {
		t.Fatal(err)
	}
	g.ask(t, chat(false, words("after that", 2000)))
	g.restored(t, g.Process.Stop)
	stayed("without the directory")
}

// A snapshot is written by the one Caddy that has served requests, and by nobody
// else.
func TestOnlyOneWritesSnapshots(t *testing.T) {
	up := newScripted(t, yes).addr()
	g := newGateway(t, harness.StartProcess, up, "snapshot 1h")
	g.ask(t, chat(false, words("kept", 2000)))
	if err := g.Process.Stop(); err != nil {
		t.Fatal(err)
	}
	kept := g.files(t)
	if kept["snapshot"] == "" || kept["seed"] == "" || len(kept) != 2 {
		t.Fatalf("files after a stop: %v", slices.Sorted(maps.Keys(kept)))
	}
	same := func(after string) {
		t.Helper()
		if now := g.files(t); !maps.Equal(now, kept) {
			t.Errorf("%s the files %v are not as they were", after, slices.Sorted(maps.Keys(now)))
		}
	}
	validate := func() {
		t.Helper()
		config := filepath.Join(t.TempDir(), "Caddyfile")
		if err := os.WriteFile(config, []byte(g.file(proxyTo(up, policy("snapshot 1s")))), 0o600); err != nil {
			t.Fatal(err)
		}
		if out, err := g.Command("validate", "--config", config).CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
	}
	validate()
	same("after caddy validate")
	if err := g.Process.Start(); err != nil {
		t.Fatal(err)
	}
	g.up(t) // a request, but for no prompt: it counts
	validate()
	bad := g.file("bind 192.0.2.1\n\t" + proxyTo(up, policy("snapshot 1s"))) // nobody's address
	if err := g.Process.Reload(bad); err == nil {
		t.Error("a site was bound to an address that this machine does not have")
	}
	same("after a failed load")

	second := newGateway(t, g.Beside, up, "snapshot 1s")
	for i := range 3 {
		second.ask(t, chat(false, words(fmt.Sprintf("second %d", i), 2000)))
	}
	eventually(t, "the second one to notice the first", func() bool {
		return strings.Contains(second.log(t), "another Caddy on this machine writes the snapshot")
	})
	if err := second.Process.Stop(); err != nil {
		t.Fatal(err)
	}
	same("after a second Caddy")
	if err := g.Process.Stop(); err != nil {
		t.Fatal(err)
	}

	idle := newGateway(t, harness.StartProcess, up, "snapshot off")
	idle.ask(t, chat(false, words("not kept", 2000)))
	if err := idle.Process.Stop(); err != nil {
		t.Fatal(err)
	}
	if files := idle.files(t); files["snapshot"] != "" {
		t.Error("snapshot off writes a snapshot")
	}
}

// A snapshot that is of no use costs one warning.
func TestUselessSnapshots(t *testing.T) {
	up := newScripted(t, yes).addr()
	g := newGateway(t, harness.StartProcess, up, "snapshot 1h")
	body := chat(false, words("kept", 4000))
	g.ask(t, body)
	if err := g.Process.Stop(); err != nil {
		t.Fatal(err)
	}
	good, err := os.ReadFile(g.snapshot())
	if err != nil {
		t.Fatal(err)
	}
	var old, foreign bytes.Buffer
	fleet := affinity.NewFleet()
	index := map[string]*affinity.Index{"of another seed": affinity.NewIndex(fleet, 1000)}
	if err := fleet.WriteSnapshot(&old, time.Now().Add(-25*time.Hour), index, nil); err != nil {
		t.Fatal(err)
	}
	if err := fleet.WriteSnapshot(&foreign, time.Now(), index, nil); err != nil {
		t.Fatal(err)
	}
	corrupt := slices.Clone(good)
	corrupt[len(corrupt)/2] ^= 1
	for _, test := range []struct {
		name, reason string
		file         []byte
		warnings     int
	}{
		{"good", "affinity", good, 0},
		{"corrupt", "cold", corrupt, 1},
		{"truncated", "cold", good[:len(good)-1], 1},
		{"empty", "cold", nil, 1},
		{"text", "cold", []byte(strings.Repeat("not a snapshot\n", 10)), 1},
		{"another version", "cold", append([]byte("prefix_affinity\xff"), good[16:]...), 1},
		{"old", "cold", old.Bytes(), 1},
		{"foreign", "cold", foreign.Bytes(), 1},
	} {
		if err := os.WriteFile(g.snapshot(), test.file, fs.FileMode(0o600)); err != nil {
			t.Fatal(err)
		}
		before := len(g.log(t))
		g.restored(t, func() error { return nil }) // it has stopped
		if d := g.ask(t, body); d.reason != test.reason {
			t.Errorf("%s: %+v", test.name, d)
		}
		if err := g.Process.Stop(); err != nil {
			t.Fatal(err)
		}
		log := g.log(t)[before:]
		if n := strings.Count(log, `"level":"warn","ts"`) - strings.Count(log, "exiting; byeee"); n != test.warnings {
			t.Errorf("%s: %d warnings, want %d:\n%s", test.name, n, test.warnings, log)
		}
		if named := strings.Contains(log, `it starts anew`) && strings.Contains(log, `"policy":"reverse_proxy 127.0.0.1:`); named != (test.name == "foreign") {
			t.Errorf("%s: a policy is named: %t\n%s", test.name, named, log)
		}
		if now, err := os.ReadFile(g.snapshot()); err != nil || bytes.Equal(now, test.file) {
			t.Errorf("%s: no new snapshot was written: %v", test.name, err)
		}
	}
}

// There is one interval for all policies. Reloads may change it, and don't put
// snapshots off.
func TestSnapshotInterval(t *testing.T) {
	up := newScripted(t, yes).addr()
	two := func(first, second string) string {
		return "handle /a/* {\n\t\t" + proxyTo(up, policy("block_size 512", first)) + "\n\t}\n\thandle {\n\t\t" + proxyTo(up, policy(second)) + "\n\t}"
	}
	s := newSiteOf(t, two("snapshot 2s", "snapshot 2s"))
	s.ask(t, chat(false, words("one", 2000)))
	if err := s.Reload(s.file(two("snapshot 2s", "snapshot 3s"))); err == nil || !strings.Contains(err.Error(), "snapshot is '3s' here and '2s' in another policy") {
		t.Errorf("different intervals: %v", err)
	}
	if err := s.Reload(s.file(two("snapshot 2s", "snapshot off"))); err == nil {
		t.Error("one policy with snapshots and one without were loaded")
	}
	if err := s.Reload(s.file(two("snapshot off", ""))); err == nil || !strings.Contains(err.Error(), "snapshot is 'left out' here and 'off' in another policy") {
		t.Errorf("off, and on by default: %v", err)
	}
	s.reloadTo(t, two("snapshot 2s", "")) // follows the other
	snapshot := filepath.Join(os.Getenv("XDG_DATA_HOME"), "caddy", "prefix_affinity", "snapshot")
	reloads := 0
	eventually(t, "a snapshot amid reloads", func() bool {
		reloads++
		s.reloadTo(t, fmt.Sprintf("header X-Version %d\n\t", reloads)+two("snapshot 2s", "snapshot 2s"))
		_, err := os.Stat(snapshot)
		return err == nil
	})
	s.reloadTo(t, two("snapshot 1s", "snapshot 1s"))
	s.ask(t, chat(false, words("two", 2000)))
	s.reloadTo(t, two("snapshot off", "snapshot off"))
	s.reloadTo(t, two("snapshot 1h", "snapshot 1h"))
	if d := s.ask(t, chat(false, words("one", 2000))); d.reason != "affinity" {
		t.Errorf("reloads have forgotten: %+v", d)
	}
}
