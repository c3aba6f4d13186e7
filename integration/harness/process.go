package harness

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"

	caddycmd "github.com/caddyserver/caddy/v2/cmd"
)

// asCaddy is the variable that makes a program a Caddy.
const asCaddy = "PREFIX_AFFINITY_AS_CADDY"

// BeCaddy turns the program into the caddy command if Command started it, and
// else returns. Programs and test binaries that use Command or StartProcess call
// it first of all, in main or TestMain; the Caddy has the modules that they
// import.
func BeCaddy() {
	if os.Getenv(asCaddy) != "" {
		caddycmd.Main()
		os.Exit(0)
	}
}

// Command is a caddy command with arguments, in a process of its own.
func Command(args ...string) *exec.Cmd {
	cmd := exec.Command(os.Args[0], args...) // #nosec G204 G702 -- itself
	cmd.Env = append(os.Environ(), asCaddy+"=1")
	return cmd
}

// Process is a running Caddy in a process of its own, so that it can be killed
// and its memory and CPU time are its own. There can be several at a time.
type Process struct {
	instance

	data   string        // where its modules keep theirs
	cmd    *exec.Cmd     // nil: it doesn't run
	gone   chan struct{} // closed when it has ended
	stderr bytes.Buffer
}

// StartProcess runs a Caddyfile as StartCaddy does.
func StartProcess(caddyfile string) (*Process, error) { return startProcess(caddyfile, "") }

// Beside runs another Caddy that keeps its data where p does.
func (p *Process) Beside(caddyfile string) (*Process, error) { return startProcess(caddyfile, p.data) }

func startProcess(caddyfile, data string) (*Process, error) {
	i, err := newInstance()
	if err != nil {
		return nil, err
	}
	p := &Process{instance: i, data: cmp.Or(data, i.dir)}
	config, err := p.Config(caddyfile)
	if err == nil {
		err = os.WriteFile(p.configFile(), config, 0o600)
	}
	if err == nil {
		err = p.Start()
	}
	if err != nil {
		return nil, errors.Join(err, p.Close())
	}
	return p, nil
}

func (p *Process) configFile() string { return filepath.Join(p.dir, "caddy.json") }

// Data is the directory where its modules keep their data.
func (p *Process) Data() string { return filepath.Join(p.data, "caddy") }

// Command is a caddy command that has the same directories.
func (p *Process) Command(args ...string) *exec.Cmd {
	cmd := Command(args...)
	cmd.Env = append(cmd.Env, "XDG_DATA_HOME="+p.data, "XDG_CONFIG_HOME="+p.data)
	return cmd
}

// Start runs the Caddy again after Stop or Kill, with the files it left and the
// configuration that it had first.
func (p *Process) Start() error {
	cmd, gone := p.Command("run", "--config", p.configFile()), make(chan struct{})
	p.stderr.Reset()
	cmd.Stderr = &p.stderr
	if err := cmd.Start(); err != nil {
		return err
	}
	p.cmd, p.gone = cmd, gone
	go func() {
		_ = cmd.Wait() // how it ended is in its state
		close(gone)
	}()
	for deadline := time.After(time.Minute); ; {
		if resp, err := admin.Get(p.Admin + "/config/"); err == nil {
			_ = resp.Body.Close()
			return nil
		}
		select {
		case <-time.After(20 * time.Millisecond):
		case <-gone:
			return p.end(syscall.SIGKILL)
		case <-deadline:
			return errors.New("caddy did not start within a minute")
		}
	}
}

// Stop ends Caddy as a service manager does, and waits.
func (p *Process) Stop() error { return p.end(syscall.SIGTERM) }

// Kill ends Caddy as a crash does, and waits.
func (p *Process) Kill() error { return p.end(syscall.SIGKILL) }

// end sends a signal and waits. It reports a process that has ended by itself.
func (p *Process) end(s os.Signal) error {
	if p.cmd == nil {
		return nil
	}
	cmd := p.cmd
	select {
	case <-p.gone:
		p.cmd = nil
		log, _ := p.Log() // not there if it ended early
		return fmt.Errorf("caddy has ended: %s: %s%s", cmd.ProcessState, &p.stderr, log[max(0, len(log)-4000):])
	default:
	}
	if err := cmd.Process.Signal(s); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return err
	}
	<-p.gone
	p.cmd = nil
	return nil
}

// Close kills Caddy, if it still runs, and removes its files.
func (p *Process) Close() error { return errors.Join(p.Kill(), os.RemoveAll(p.dir)) }
