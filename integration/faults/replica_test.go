package faults

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os/exec"
	"path/filepath"
	"runtime"
	"syscall"
	"testing"
	"time"

	"github.com/prefix-affinity/caddy/integration/engine"
	"github.com/prefix-affinity/caddy/integration/harness"
)

// replica is a simulated engine in a process of its own, so that it can be
// killed and frozen.
type replica struct {
	name, addr, control string

	program string
	cmd     *exec.Cmd   // nil: it does not run
	hole    []io.Closer // what vanish has left at its address
}

// buildEngine makes the program that replicas run.
func buildEngine(t *testing.T) string {
	t.Helper()
	program := filepath.Join(t.TempDir(), "engine")
	if out, err := exec.CommandContext(t.Context(), "go", "build", "-o", program, "../engine/serve").CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	return program
}

func newReplica(t *testing.T, program, name string) *replica {
	t.Helper()
	r := &replica{name: name, program: program}
	for _, addr := range []*string{&r.addr, &r.control} {
		var err error
		if *addr, err = lastingAddr(); err != nil {
			t.Fatal(err)
		}
	}
	r.start(t)
	t.Cleanup(func() { r.kill(t) })
	return r
}

// start runs the engine with an empty cache: roomy and quick at prefill, so that
// streams last as long as their tokens take.
func (r *replica) start(t *testing.T) {
	t.Helper()
	r.appear()
	r.cmd = exec.Command(r.program, "-name", r.name, "-listen", r.addr, "-control", r.control, // #nosec G204 -- built here
		"-capacity", "4000000", "-prefill", "1000000", "-max-running", "1000",
		"-inter-token", interToken.String(), "-output", fmt.Sprint(outputTokens))
	if err := r.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	eventually(t, r.name+" to listen", func() bool {
		res, err := http.Get("http://" + r.control + "/stats")
		if err != nil {
			return false
		}
		_ = res.Body.Close()
		return true
	})
}

// lastingAddr returns an address that nobody else takes while its owner is down. On
// Linux all of 127.0.0.0/8 is this machine, and other packages' tests, which run
// beside this one and take hundreds of ports, have the first address only.
func lastingAddr() (string, error) {
	addr, err := harness.FreeAddr()
	if err != nil || runtime.GOOS != "linux" {
		return addr, err
	}
	_, port, err := net.SplitHostPort(addr)
	return net.JoinHostPort("127.0.0.86", port), err
}

// kill is kill -9.
func (r *replica) kill(t *testing.T) {
	t.Helper()
	r.appear()
	if r.cmd == nil {
		return
	}
	if err := r.cmd.Process.Kill(); err != nil {
		t.Error(err)
	}
	_ = r.cmd.Wait() // killed
	r.cmd = nil
}

// vanish kills the replica and has the kernel drop whatever asks for a
// connection to it, as if its machine were gone: somebody else listens there, and
// the queue of those that he has not accepted is full.
func (r *replica) vanish(t *testing.T) {
	t.Helper()
	r.kill(t)
	l, err := net.Listen("tcp", r.addr)
	if err != nil {
		t.Fatal(err)
	}
	r.hole = []io.Closer{l}
	raw, err := l.(*net.TCPListener).SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	var short error
	if err := errors.Join(raw.Control(func(fd uintptr) { short = syscall.Listen(int(fd), 0) }), short); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the queue to be full", func() bool {
		conn, err := net.DialTimeout("tcp", r.addr, 100*time.Millisecond)
		if err == nil {
			r.hole = append(r.hole, conn)
		}
		return err != nil
	})
}

// appear gives the address of a replica that has vanished back.
func (r *replica) appear() {
	for _, c := range r.hole {
		_ = c.Close() // it has done nothing that could fail late
	}
	r.hole = nil
}

func (r *replica) signal(t *testing.T, s syscall.Signal) {
	t.Helper()
	if err := r.cmd.Process.Signal(s); err != nil {
		t.Error(err)
	}
}

// set replaces the engine's faults.
func (r *replica) set(t *testing.T, f engine.Faults) {
	t.Helper()
	// All fields, those without a fault too: what is left out would stay.
	body := fmt.Sprintf(`{"slow":%g,"hang":%t,"fail_status":%d,"die_midstream":%t,"fail_share":%g,"unhealthy":%t,"refuse":%t,"reset":%t,"blackhole":%t}`,
		f.Slow, f.Hang, f.FailStatus, f.DieMidstream, f.FailShare, f.Unhealthy, f.Refuse, f.Reset, f.Blackhole)
	res, err := http.Post("http://"+r.control+"/control", "application/json", bytes.NewBufferString(body))
	if err != nil {
		t.Error(err)
		return
	}
	defer res.Body.Close()
	if answer, _ := io.ReadAll(res.Body); res.StatusCode != http.StatusOK {
		t.Errorf("%s: status %d: %s", body, res.StatusCode, answer)
	}
}

func (r *replica) stats(t *testing.T) (s engine.Stats) {
	t.Helper()
	res, err := http.Get("http://" + r.control + "/stats")
	if err != nil {
		t.Error(err)
		return s
	}
	defer res.Body.Close()
	if err := json.NewDecoder(res.Body).Decode(&s); err != nil {
		t.Error(err)
	}
	return s
}

// eventually waits for something that must come to pass; how long it takes is
// no matter.
func eventually(t *testing.T, what string, happened func() bool) {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); !happened(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("still waiting for: %s", what)
		}
	}
}
