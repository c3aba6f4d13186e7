package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"runtime"
	"runtime/metrics"
	"strings"
	"syscall"
	"time"

	"github.com/caddyserver/caddy/v2"

	"github.com/prefix-affinity/caddy/integration/harness"
)

// policy is one of the ways to balance that are compared.
type policy struct{ name, proxy string }

var (
	leastConn = policy{"least_conn", "lb_policy least_conn"}
	buffering = policy{"least_conn + request_buffers", "lb_policy least_conn\n\t\trequest_buffers 8MiB"}
	affinity  = policy{"prefix_affinity", "lb_policy prefix_affinity"}
)

// proxy is a Caddy with one policy, in a process of its own.
type proxy struct {
	policy
	*harness.Process

	addr string
}

// start runs Caddy before the upstreams.
func (p policy) start(upstreams []string) (*proxy, error) {
	addr, err := harness.FreeAddr()
	if err != nil {
		return nil, err
	}
	process, err := harness.StartProcess(fmt.Sprintf("{\n\tservers {\n\t\tprotocols h1 h2c\n\t}\n\tlog {\n\t\tlevel ERROR\n\t}\n}\n"+
		"http://%s {\n\treverse_proxy %s {\n\t\t%s\n\t\ttransport http {\n\t\t\tdial_timeout 1m\n\t\t}\n\t}\n}\n", addr, strings.Join(upstreams, " "), p.proxy))
	if err != nil {
		return nil, err
	}
	return &proxy{p, process, addr}, nil
}

// usage is what the process has used.
type usage struct {
	CPU       time.Duration // by getrusage
	RSS       int64         // bytes, where /proc tells it
	HeapInuse uint64        // bytes
	Allocs    uint64        // objects so far
	Allocated uint64        // bytes so far
	LockWait  float64       // seconds that goroutines were blocked on mutexes
}

// used asks the process what it has used; collected, after a garbage collection
// that empties its pools.
func (x *proxy) used() (usage, error)      { return x.ask("") }
func (x *proxy) collected() (usage, error) { return x.ask("?collect=true") }

func (x *proxy) ask(query string) (u usage, err error) {
	res, err := http.Get(x.Admin + usagePath + query)
	if err != nil {
		return u, err
	}
	defer res.Body.Close()
	return u, json.NewDecoder(res.Body).Decode(&u)
}

// usageAPI is the other end, a route of the admin endpoint: the Caddy that is
// measured is this program.
type usageAPI struct{}

const usagePath = "/bench/usage"

func init() { caddy.RegisterModule(usageAPI{}) }

func (usageAPI) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "admin.api.bench_usage", New: func() caddy.Module { return usageAPI{} }}
}

func (usageAPI) Routes() []caddy.AdminRoute {
	return []caddy.AdminRoute{{Pattern: usagePath, Handler: caddy.AdminHandlerFunc(func(w http.ResponseWriter, r *http.Request) error {
		if r.URL.Query().Has("collect") {
			for range 2 { // what is in a pool survives one
				runtime.GC()
			}
		}
		return json.NewEncoder(w).Encode(ownUsage())
	})}}
}

func ownUsage() (u usage) {
	var r syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &r); err == nil {
		u.CPU = time.Duration(r.Utime.Nano() + r.Stime.Nano())
	}
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	u.HeapInuse, u.Allocs, u.Allocated = m.HeapInuse, m.Mallocs, m.TotalAlloc
	wait := []metrics.Sample{{Name: "/sync/mutex/wait/total:seconds"}}
	metrics.Read(wait)
	u.LockWait = wait[0].Value.Float64()
	if stat, err := os.ReadFile("/proc/self/statm"); err == nil {
		var size int64
		if _, err := fmt.Sscan(string(stat), &size, &u.RSS); err == nil {
			u.RSS *= int64(os.Getpagesize())
		}
	}
	return u
}

// startAll runs a Caddy for each policy.
func startAll(policies []policy, upstreams []string) (all []*proxy, stop func(), err error) {
	stop = func() {
		for _, x := range all {
			_ = x.Close()
		}
	}
	for _, p := range policies {
		x, err := p.start(upstreams)
		if err != nil {
			stop()
			return nil, nil, err
		}
		all = append(all, x)
	}
	return all, stop, nil
}

// serve runs upstreams and returns their addresses.
func serve(n int, handler http.HandlerFunc) (addrs []string, stop func(), err error) {
	var servers []*http.Server
	stop = func() {
		for _, s := range servers {
			_ = s.Close()
		}
	}
	for range n {
		listener, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			stop()
			return nil, nil, err
		}
		server := &http.Server{Handler: handler, ReadHeaderTimeout: time.Minute}
		servers, addrs = append(servers, server), append(addrs, listener.Addr().String())
		go func() {
			if err := server.Serve(listener); !errors.Is(err, http.ErrServerClosed) {
				fmt.Fprintln(os.Stderr, err)
			}
		}()
	}
	return addrs, stop, nil
}
