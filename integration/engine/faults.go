package engine

import (
	"encoding/json"
	"fmt"
	"log"
	"net"
	"net/http"
	"sync"
	"sync/atomic"
)

// Faults is what goes wrong with an engine; the zero value is a sound one.
// A request under way keeps the FailStatus and DieMidstream it arrived under,
// everything else acts at once.
type Faults struct {
	Slow float64 `json:"slow,omitempty"` // prefill and decode take so many times as long; 0: 1
	Hang bool    `json:"hang,omitempty"` // headers of streams are sent, then nothing until this is lifted

	FailStatus   int     `json:"fail_status,omitempty"`   // status of failed requests, 4xx or 5xx
	DieMidstream bool    `json:"die_midstream,omitempty"` // connections are cut after half of the answer's tokens
	FailShare    float64 `json:"fail_share,omitempty"`    // how many requests the two hit, evenly spread; 0: all
	Unhealthy    bool    `json:"unhealthy,omitempty"`     // /health answers 503

	// Each of these closes every connection first; the cache stays.
	Refuse    bool `json:"refuse,omitempty"`    // new connections are refused
	Reset     bool `json:"reset,omitempty"`     // new connections are taken and reset
	Blackhole bool `json:"blackhole,omitempty"` // new connections are taken and never answered
}

// cutOff says whether the engine can't be reached.
func (f Faults) cutOff() bool { return f.Refuse || f.Reset || f.Blackhole }

func (f Faults) validate() error {
	switch {
	case f.Slow < 0:
		return fmt.Errorf("slow %g: use a factor above 0", f.Slow)
	case f.FailStatus != 0 && (f.FailStatus < 400 || f.FailStatus > 599):
		return fmt.Errorf("fail_status %d: use a status from 400 to 599", f.FailStatus)
	case f.FailShare < 0 || f.FailShare > 1:
		return fmt.Errorf("fail_share %g: use a share from 0 to 1", f.FailShare)
	}
	return nil
}

// Faults returns the present ones.
func (e *Engine) Faults() Faults { return *e.faults.Load() }

// SetFaults replaces the present faults by f. It must not be called after Close.
func (e *Engine) SetFaults(f Faults) error {
	if err := f.validate(); err != nil {
		return fmt.Errorf("engine: faults: %w", err)
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	e.faults.Store(&f)
	switch {
	case f.Hang:
		e.sched.setSpeed(0)
	case f.Slow > 0:
		e.sched.setSpeed(1 / f.Slow)
	default:
		e.sched.setSpeed(1)
	}
	if f.cutOff() {
		if err := e.hangUp(); err != nil {
			return fmt.Errorf("engine: closing connections: %w", err)
		}
	}
	if !f.Refuse && e.server == nil {
		if err := e.listen(); err != nil {
			return fmt.Errorf("engine: listening again: %w", err)
		}
		e.serve()
	}
	if !f.Blackhole && e.socket != nil {
		e.socket.dropSwallowed()
	}
	return nil
}

// hits says whether the next request is one of those that FailStatus and
// DieMidstream apply to.
func (e *Engine) hits(f *Faults) bool {
	if f.FailStatus == 0 && !f.DieMidstream {
		return false
	}
	if f.FailShare == 0 {
		return true
	}
	n := float64(e.hit.Add(1))
	return int64(n*f.FailShare) > int64((n-1)*f.FailShare)
}

// Control answers POST /control, a JSON object with the fields of [Faults] to
// change and "restart": true to restart first, and GET /stats. The engine serves
// both itself too; a server of its own keeps them in reach while the engine
// takes no connections.
func (e *Engine) Control() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("POST /control", e.control)
	mux.HandleFunc("GET /stats", func(w http.ResponseWriter, _ *http.Request) {
		writeJSON(w, http.StatusOK, e.Stats())
	})
	return mux
}

func (e *Engine) control(w http.ResponseWriter, r *http.Request) {
	change := struct {
		*Faults
		Restart bool `json:"restart"`
	}{Faults: new(e.Faults())}
	dec := json.NewDecoder(r.Body)
	dec.DisallowUnknownFields()
	if err := dec.Decode(&change); err != nil {
		writeError(w, http.StatusBadRequest, "control: "+err.Error())
		return
	}
	if err := change.validate(); err != nil {
		writeError(w, http.StatusBadRequest, "control: "+err.Error())
		return
	}
	if change.Restart {
		e.Restart()
	}
	if change.cutOff() { // answer while this connection lasts
		writeJSON(w, http.StatusOK, change.Faults)
		_ = http.NewResponseController(w).Flush() // the client may have left
	}
	if err := e.SetFaults(*change.Faults); err != nil {
		log.Printf("control: %v", err)
		writeError(w, http.StatusInternalServerError, "control: "+err.Error())
		return
	}
	if !change.cutOff() {
		writeJSON(w, http.StatusOK, change.Faults)
	}
}

// socket is a listener that can mistreat new connections.
type socket struct {
	net.Listener
	faults *atomic.Pointer[Faults]

	mu        sync.Mutex
	swallowed []net.Conn
}

// Accept returns the next connection that is meant to be served.
func (s *socket) Accept() (net.Conn, error) {
	for {
		c, err := s.Listener.Accept()
		if err != nil {
			return nil, err
		}
		switch f := s.faults.Load(); {
		case f.Reset:
			if t, ok := c.(*net.TCPConn); ok {
				_ = t.SetLinger(0) // the close becomes a reset
			}
			_ = c.Close()
		case f.Blackhole:
			s.mu.Lock()
			s.swallowed = append(s.swallowed, c)
			s.mu.Unlock()
		default:
			return c, nil
		}
	}
}

func (s *socket) dropSwallowed() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, c := range s.swallowed {
		_ = c.Close()
	}
	s.swallowed = nil
}
