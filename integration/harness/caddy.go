// Package harness runs what an end-to-end test needs: simulated engines and a
// real Caddy with its standard modules, in one process or in one of its own, on
// loopback sockets, leaving nothing behind. The plugin's own module is there if its package is
// imported too, so tests of any package can use this one.
package harness

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig"
	_ "github.com/caddyserver/caddy/v2/modules/standard"
	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
)

// Caddy is the process's running Caddy. There can be one at a time, because
// Caddy's own state is global; tests that use it can't run in parallel within a
// package.
type Caddy struct {
	instance

	home map[string]string // environment to restore
}

// instance is a Caddy in this process or another one.
type instance struct {
	Admin string // base URL of its admin endpoint

	dir string // all its files
}

// admin is for the admin endpoint: each reload closes its connections, so a kept
// one could end under a request.
var admin = &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}

func newInstance() (instance, error) {
	addr, err := FreeAddr()
	if err != nil {
		return instance{}, err
	}
	dir, err := os.MkdirTemp("", "prefix-affinity-")
	return instance{Admin: "http://" + addr, dir: dir}, err
}

// StartCaddy runs a Caddyfile. The addresses of its sites are the caller's: see
// FreeAddr. Unless the Caddyfile says otherwise, the admin endpoint goes to a
// free port, data to a temporary directory and the log to a file there.
func StartCaddy(caddyfile string) (*Caddy, error) {
	i, err := newInstance()
	if err != nil {
		return nil, err
	}
	c := &Caddy{instance: i, home: make(map[string]string)}
	for _, name := range []string{"XDG_DATA_HOME", "XDG_CONFIG_HOME"} {
		c.home[name] = os.Getenv(name)
		if err := os.Setenv(name, c.dir); err != nil {
			return nil, err
		}
	}
	config, err := c.Config(caddyfile)
	if err == nil {
		err = caddy.Load(config, true)
	}
	if err != nil {
		return nil, errors.Join(err, c.Stop())
	}
	return c, nil
}

// Reload replaces the configuration through the admin endpoint. It tries again
// where the connection ends without an answer: the endpoint that the last reload
// replaced may have taken it.
func (i *instance) Reload(caddyfile string) error {
	config, err := i.Config(caddyfile)
	if err != nil {
		return err
	}
	resp, err := admin.Post(i.Admin+"/load", "application/json", bytes.NewReader(config))
	for tries := 0; errors.Is(err, io.EOF) && tries < 10; tries++ {
		time.Sleep(100 * time.Millisecond)
		resp, err = admin.Post(i.Admin+"/load", "application/json", bytes.NewReader(config))
	}
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		answer, err := io.ReadAll(resp.Body)
		return errors.Join(fmt.Errorf("POST /load: %s: %s", resp.Status, answer), err)
	}
	return nil
}

// Config adapts a Caddyfile to the JSON that is loaded at the start and by Reload.
func (i *instance) Config(caddyfile string) ([]byte, error) {
	adapted, _, err := caddyconfig.GetAdapter("caddyfile").Adapt([]byte(caddyfile), map[string]any{"filename": "Caddyfile"})
	if err != nil {
		return nil, err
	}
	var config map[string]any
	if err := json.Unmarshal(adapted, &config); err != nil {
		return nil, err
	}
	i.contain(config)
	return json.Marshal(config)
}

// contain keeps a configuration from touching the machine, where it doesn't
// say otherwise itself.
func (i *instance) contain(config map[string]any) {
	endpoint := object(config, "admin")
	setDefault(endpoint, "listen", i.Admin[len("http://"):])
	object(endpoint, "config")["persist"] = false
	setDefault(config, "storage", map[string]any{"module": "file_system", "root": i.dir})
	setDefault(object(object(object(config, "logging"), "logs"), "default"), "writer",
		map[string]any{"output": "file", "filename": i.logFile(), "roll": false})
}

func object(parent map[string]any, key string) map[string]any {
	setDefault(parent, key, map[string]any{})
	return parent[key].(map[string]any)
}

func setDefault(m map[string]any, key string, value any) {
	if m[key] == nil {
		m[key] = value
	}
}

func (i *instance) logFile() string { return filepath.Join(i.dir, "caddy.log") }

// Log returns what Caddy logged so far, a JSON object a line.
func (i *instance) Log() (string, error) {
	log, err := os.ReadFile(i.logFile())
	return string(log), err
}

// Metrics returns the metrics of Caddy and its modules by name, and those of the
// process it runs in.
func (i *instance) Metrics() (map[string]*dto.MetricFamily, error) {
	resp, err := admin.Get(i.Admin + "/metrics")
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	parser := expfmt.NewTextParser(model.UTF8Validation)
	return parser.TextToMetricFamilies(resp.Body)
}

// Stop ends Caddy and removes its files.
func (c *Caddy) Stop() error {
	// Caddy's own Stop would leave the admin endpoint up.
	bare, err := json.Marshal(map[string]any{
		"admin":   map[string]any{"disabled": true, "config": map[string]any{"persist": false}},
		"storage": map[string]any{"module": "file_system", "root": c.dir},
		"logging": map[string]any{"logs": map[string]any{"default": map[string]any{"level": "ERROR"}}},
	})
	if err == nil {
		err = caddy.Load(bare, true)
	}
	err = errors.Join(err, caddy.Stop(), os.RemoveAll(c.dir))
	for name, value := range c.home {
		err = errors.Join(err, os.Setenv(name, value))
	}
	return err
}

// given are the addresses that FreeAddr has returned.
var given sync.Map

// FreeAddr returns a loopback address that nobody listens on. Its port is not of
// those that systems give to outgoing connections (32768 and up on Linux, 49152
// elsewhere): one of these could have it before, or again between, its owner listens.
// No address is returned twice, because two that Caddy listens on may be the same: it
// shares ports, and answers on either.
func FreeAddr() (string, error) {
	const first, ports, tries = 10000, 22000, 100
	var err error
	for range tries {
		var l net.Listener
		addr := fmt.Sprintf("127.0.0.1:%d", first+rand.N(ports))
		if _, again := given.LoadOrStore(addr, true); again {
			err = fmt.Errorf("%s was given out already", addr)
			continue
		}
		if l, err = net.Listen("tcp", addr); err == nil {
			return l.Addr().String(), l.Close()
		}
	}
	return "", err
}
