// Package engine is a simulated LLM server: real HTTP in front of a model of
// what makes real engines fast or slow, for testing and sizing what stands
// before them. It speaks the OpenAI API's chat and text completions, streamed
// and not, and answers nonsense, but at the pace and with the cache hits that
// an engine would have:
//
//   - prompts are prefilled one after the other at a rate in tokens/s, less
//     what the prefix cache holds of them;
//   - running requests decode beside it, a token each at every step, at most
//     so many at once and as many as the memory holds;
//   - the prefix cache keeps blocks of 16 tokens, chained, in order of last use;
//     a prompt's blocks can be matched when its prefill ends, an answer's when
//     it does, and the end of a chain goes first. Like vLLM it never counts the
//     last token of a prompt as cached.
//
// Requests get their memory when they are admitted, so none is ever preempted.
// [Faults] make it misbehave, [Stats] say what it received and did.
package engine

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"strconv"
	"sync"
	"sync/atomic"
	"time"
)

// Config is what an engine can do. The zero value is a usable one.
type Config struct {
	Name  string // sent as x-inference-pod with every answer; "": not sent
	Model string // what /v1/models lists, any other works too. "": "simulated"

	CapacityTokens int           // KV memory. 0: 100,000
	PrefillRate    float64       // prompt tokens/s. 0: 10,000
	InterToken     time.Duration // between two tokens of an answer. 0: 10 ms
	MaxRunning     int           // requests in prefill and decode. 0: 64
	MaxWaiting     int           // queued requests; one more gets a 429. 0: no limit

	// OutputTokens is the length of an answer unless the request's max_tokens
	// is less or its min_tokens more; with ignore_eos it is max_tokens. 0: 64.
	OutputTokens int

	// Preamble sends the chunk with the assistant's role before the prefill;
	// otherwise it comes with the first token. Headers of a stream are always
	// sent before.
	Preamble bool

	Cached   CachedReport
	DropZero bool // cached tokens are left out when there are none, as older engines do

	// Names of headers that say how much of the prompt was cached and how many
	// requests were waiting, as gateways add them. Those of a stream hold what is
	// known at its start. "": not sent.
	CachedTokensHeader string
	QueueDepthHeader   string
}

// CachedReport says when the usage of an answer tells the cached tokens.
type CachedReport uint8

const (
	// CachedAsked: in every plain answer, and in streams whose
	// stream_options.include_usage asks for usage.
	CachedAsked CachedReport = iota
	// CachedAlways: streams end with their usage, asked or not.
	CachedAlways
	// CachedNever: usage comes as with CachedAsked, without cached tokens.
	CachedNever
)

func (c Config) withDefaults() Config {
	if c.Model == "" {
		c.Model = "simulated"
	}
	if c.CapacityTokens == 0 {
		c.CapacityTokens = 100_000
	}
	if c.PrefillRate == 0 {
		c.PrefillRate = 10_000
	}
	if c.InterToken == 0 {
		c.InterToken = 10 * time.Millisecond
	}
	if c.MaxRunning == 0 {
		c.MaxRunning = 64
	}
	if c.OutputTokens == 0 {
		c.OutputTokens = 64
	}
	return c
}

// Engine is a running simulated engine. All methods are safe for concurrent use.
type Engine struct {
	cfg   Config
	addr  string
	sched *scheduler
	tally tally

	mu     sync.Mutex // serializes SetFaults and Close
	server *http.Server
	socket *socket

	handlers sync.RWMutex // read-locked by every handler
	closed   bool

	faults  atomic.Pointer[Faults]
	hit     atomic.Int64 // requests that Faults.Share was asked about
	started atomic.Int64 // process start time, Unix nanoseconds
}

// Start runs an engine on a TCP address; port 0 takes a free one.
func Start(addr string, cfg Config) (*Engine, error) {
	if cfg.CapacityTokens < 0 || cfg.PrefillRate < 0 || cfg.InterToken < 0 ||
		cfg.MaxRunning < 0 || cfg.MaxWaiting < 0 || cfg.OutputTokens < 0 {
		return nil, errors.New("engine: negative figure in the config: use 0 for the default")
	}
	cfg = cfg.withDefaults()
	e := &Engine{cfg: cfg, addr: addr}
	e.faults.Store(&Faults{})
	e.started.Store(time.Now().UnixNano())
	if err := e.listen(); err != nil {
		return nil, fmt.Errorf("engine: %w", err)
	}
	e.sched = newScheduler(cfg)
	e.serve()
	return e, nil
}

// Addr is the host and port that the engine listens on.
func (e *Engine) Addr() string { return e.addr }

// URL is the engine's base URL, without a slash at its end.
func (e *Engine) URL() string { return "http://" + e.addr }

// Close ends the engine and every request in it, and waits until all is gone.
func (e *Engine) Close() error {
	e.mu.Lock()
	err := e.hangUp()
	e.mu.Unlock()
	e.sched.crash()
	e.handlers.Lock()
	defer e.handlers.Unlock()
	if !e.closed {
		e.closed = true
		e.sched.close()
	}
	return err
}

// Restart is a crash and a quick start: what runs is cut off, the cache is
// empty, the process start time new. Stats go on.
func (e *Engine) Restart() {
	e.sched.crash()
	e.started.Store(time.Now().UnixNano())
}

// listen opens the socket; e.addr becomes the address it got.
func (e *Engine) listen() error {
	l, err := (&net.ListenConfig{}).Listen(context.Background(), "tcp", e.addr)
	if err != nil {
		return err
	}
	e.addr = l.Addr().String()
	e.socket = &socket{Listener: l, faults: &e.faults}
	return nil
}

// serve answers on the socket until hangUp.
func (e *Engine) serve() {
	protocols := new(http.Protocols)
	protocols.SetHTTP1(true)
	protocols.SetUnencryptedHTTP2(true)
	e.server = &http.Server{
		Handler:           e.handler(),
		Protocols:         protocols,
		ReadHeaderTimeout: time.Minute,
		ErrorLog:          log.New(io.Discard, "", 0), // clients that leave are the point
	}
	go func(server *http.Server, l net.Listener) {
		_ = server.Serve(l) // always ends with hangUp's ErrServerClosed
	}(e.server, e.socket)
}

// hangUp closes the socket and every connection.
func (e *Engine) hangUp() error {
	if e.server == nil {
		return nil
	}
	err := e.server.Close()
	e.socket.dropSwallowed()
	e.server, e.socket = nil, nil
	return err
}

// handler routes everything an engine answers, and the simulator's own routes.
func (e *Engine) handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("POST "+chatPath, e.generate)
	mux.HandleFunc("POST "+completionsPath, e.generate)
	mux.HandleFunc("GET /v1/models", e.models)
	mux.HandleFunc("GET /health", e.health)
	mux.HandleFunc("GET /metrics", e.metrics)
	mux.Handle("/control", e.Control())
	mux.Handle("/stats", e.Control())
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		e.handlers.RLock()
		defer e.handlers.RUnlock()
		if e.closed {
			panic(http.ErrAbortHandler)
		}
		if e.cfg.Name != "" {
			w.Header().Set("X-Inference-Pod", e.cfg.Name)
		}
		mux.ServeHTTP(w, r)
	})
}

func (e *Engine) models(w http.ResponseWriter, _ *http.Request) {
	writeJSON(w, http.StatusOK, map[string]any{
		"object": "list",
		"data": []any{map[string]any{
			"id": e.cfg.Model, "object": "model", "owned_by": "engine", "max_model_len": e.cfg.CapacityTokens,
		}},
	})
}

func (e *Engine) health(w http.ResponseWriter, _ *http.Request) {
	if e.faults.Load().Unhealthy {
		w.WriteHeader(http.StatusServiceUnavailable)
	}
}

func writeJSON(w http.ResponseWriter, status int, v any) {
	body, err := json.Marshal(v)
	if err != nil {
		panic(err) // plain values
	}
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Content-Length", strconv.Itoa(len(body)))
	w.WriteHeader(status)
	_, _ = w.Write(body) // fails only when the client has left
}
