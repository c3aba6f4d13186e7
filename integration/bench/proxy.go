package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"time"

	caddycmd "github.com/caddyserver/caddy/v2/cmd"

	"github.com/prefix-affinity/caddy/integration/harness"
)

// asCaddy makes the program a Caddy with the Caddyfile that it names.
const asCaddy = "BENCH_AS_CADDY"

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

	addr, admin string
	dir         string
	cmd         *exec.Cmd
	ask         io.WriteCloser
	answers     *json.Decoder
}

// usage is what the process has used.
type usage struct {
	CPU       time.Duration // by getrusage
	RSS       int64         // bytes, where /proc tells it
	HeapInuse uint64        // bytes
}

// start runs Caddy before the upstreams.
func (p policy) start(upstreams []string) (*proxy, error) {
	x := &proxy{policy: p}
	var err error
	if x.dir, err = os.MkdirTemp("", "prefix-affinity-bench-"); err != nil {
		return nil, err
	}
	if x.addr, err = harness.FreeAddr(); err != nil {
		return nil, err
	}
	if x.admin, err = harness.FreeAddr(); err != nil {
		return nil, err
	}
	file := filepath.Join(x.dir, "Caddyfile")
	config := fmt.Sprintf("{\n\tadmin %s\n\tpersist_config off\n\tservers {\n\t\tprotocols h1 h2c\n\t}\n\tlog {\n\t\tlevel ERROR\n\t}\n}\n"+
		"http://%s {\n\treverse_proxy %s {\n\t\t%s\n\t\ttransport http {\n\t\t\tdial_timeout 1m\n\t\t}\n\t}\n}\n", x.admin, x.addr, strings.Join(upstreams, " "), p.proxy)
	if err := os.WriteFile(file, []byte(config), 0o600); err != nil {
		return nil, err
	}
	x.cmd = exec.Command(os.Args[0]) //nolint:gosec // itself
	x.cmd.Env = append(os.Environ(), asCaddy+"="+file, "XDG_DATA_HOME="+x.dir, "XDG_CONFIG_HOME="+x.dir)
	x.cmd.Stderr = os.Stderr
	answers, err := x.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	x.answers = json.NewDecoder(answers)
	if x.ask, err = x.cmd.StdinPipe(); err != nil {
		return nil, err
	}
	if err := x.cmd.Start(); err != nil {
		return nil, err
	}
	for range 600 {
		var conn net.Conn
		if conn, err = net.Dial("tcp", x.addr); err == nil {
			return x, conn.Close()
		}
		time.Sleep(50 * time.Millisecond)
	}
	x.stop()
	return nil, fmt.Errorf("caddy did not start: %w", err)
}

func (x *proxy) stop() {
	_ = x.cmd.Process.Kill()
	_ = x.cmd.Wait()
	_ = os.RemoveAll(x.dir)
}

// used asks the process what it has used; collected, after a garbage collection
// that empties its pools.
func (x *proxy) used() (usage, error)      { return x.answer("used") }
func (x *proxy) collected() (usage, error) { return x.answer("collected") }

func (x *proxy) answer(question string) (u usage, err error) {
	_, err = fmt.Fprintln(x.ask, question)
	return u, errors.Join(err, x.answers.Decode(&u))
}

// serveCaddy is the other end: Caddy, and answers on the standard output to
// questions on the standard input, whose end is the process's.
func serveCaddy(config string) {
	go func() {
		answers := json.NewEncoder(os.Stdout)
		for questions := bufio.NewScanner(os.Stdin); questions.Scan(); {
			if questions.Text() == "collected" {
				for range 2 { // what is in a pool survives one
					runtime.GC()
				}
			}
			if err := answers.Encode(ownUsage()); err != nil {
				break
			}
		}
		os.Exit(0)
	}()
	os.Args = []string{"caddy", "run", "--config", config, "--adapter", "caddyfile"}
	caddycmd.Main()
}

func ownUsage() (u usage) {
	var r syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &r); err == nil {
		u.CPU = time.Duration(r.Utime.Nano() + r.Stime.Nano())
	}
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	u.HeapInuse = m.HeapInuse
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
			x.stop()
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
