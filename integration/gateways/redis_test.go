package gateways

import (
	"io"
	"net"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/prefix-affinity/caddy/integration/harness"
)

// redisServer is a Redis of the test's own, without files.
type redisServer struct {
	addr string
	args []string
	cmd  *exec.Cmd
}

// newRedis starts one, with more arguments.
func newRedis(t *testing.T, args ...string) *redisServer {
	t.Helper()
	addr, err := harness.FreeAddr()
	if err != nil {
		t.Fatal(err)
	}
	r := &redisServer{addr: addr, args: args}
	r.start(t)
	t.Cleanup(func() {
		if r.cmd != nil {
			r.kill(t)
		}
	})
	return r
}

func (r *redisServer) start(t *testing.T) {
	t.Helper()
	program, err := exec.LookPath("redis-server")
	if err != nil {
		t.Skip("redis-server is not installed")
	}
	_, port, err := net.SplitHostPort(r.addr)
	if err != nil {
		t.Fatal(err)
	}
	args := append([]string{"--bind", "127.0.0.1", "--port", port, "--save", "", "--appendonly", "no"}, r.args...)
	r.cmd = exec.Command(program, args...) // #nosec G204 -- as installed
	r.cmd.Dir = t.TempDir()
	if err := r.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "redis answers", func() bool { return strings.HasPrefix(r.say("PING"), "+PONG") })
}

// say sends a command and returns the beginning of the answer.
func (r *redisServer) say(command string) string {
	conn, err := net.Dial("tcp", r.addr)
	if err != nil {
		return err.Error()
	}
	defer conn.Close()
	if _, err := io.WriteString(conn, command+"\r\n"); err != nil {
		return err.Error()
	}
	answer := make([]byte, 100)
	n, _ := conn.Read(answer)
	return string(answer[:n])
}

func (r *redisServer) kill(t *testing.T) {
	t.Helper()
	if err := r.cmd.Process.Kill(); err != nil {
		t.Error(err)
	}
	_ = r.cmd.Wait() // killed
	r.cmd = nil
}

func (r *redisServer) signal(t *testing.T, s syscall.Signal) {
	t.Helper()
	if err := r.cmd.Process.Signal(s); err != nil {
		t.Error(err)
	}
}

// garbage listens where Redis was, and answers what no Redis does.
func (r *redisServer) garbage(t *testing.T) (end func()) {
	t.Helper()
	l, err := net.Listen("tcp", r.addr)
	if err != nil {
		t.Fatal(err)
	}
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer conn.Close()
				for buf := make([]byte, 1000); ; {
					if _, err := conn.Read(buf); err != nil {
						return
					}
					if _, err := io.WriteString(conn, "HTTP/1.1 400 Bad Request\r\n*-7\r\n$x\r\n"); err != nil {
						return
					}
				}
			}()
		}
	}()
	return func() { _ = l.Close() }
}

func eventually(t *testing.T, what string, happened func() bool) {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); !happened(); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("still waiting for: %s", what)
		}
	}
}
