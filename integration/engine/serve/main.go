// Command serve runs one simulated engine; see package engine.
//
//	go run github.com/prefix-affinity/caddy/integration/engine/serve -listen 127.0.0.1:8001
package main

import (
	"errors"
	"flag"
	"fmt"
	"log"
	"net/http"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/prefix-affinity/caddy/integration/engine"
)

func main() {
	listen := flag.String("listen", "127.0.0.1:8001", "`address` to serve on; port 0 takes a free one")
	control := flag.String("control", "", "second `address` for /control and /stats, in reach while the engine takes no connections")
	var cfg engine.Config
	flag.StringVar(&cfg.Name, "name", "", "value of the x-inference-pod response header; not sent if empty")
	flag.StringVar(&cfg.Model, "model", "simulated", "model listed by /v1/models")
	flag.IntVar(&cfg.CapacityTokens, "capacity", 100_000, "KV memory in `tokens`")
	flag.Float64Var(&cfg.PrefillRate, "prefill", 10_000, "prefill speed in `tokens/s`")
	flag.DurationVar(&cfg.InterToken, "inter-token", 10*time.Millisecond, "`time` between two tokens of an answer")
	flag.IntVar(&cfg.MaxRunning, "max-running", 64, "`requests` in prefill and decode at once")
	flag.IntVar(&cfg.MaxWaiting, "max-waiting", 0, "queued `requests` beyond which a 429 is sent; 0: no limit")
	flag.IntVar(&cfg.OutputTokens, "output", 64, "`tokens` of an answer where the request doesn't say")
	flag.BoolVar(&cfg.Preamble, "preamble", false, "send the role chunk of a stream before the prefill")
	flag.Func("cached", "report cached tokens: asked (default), always or never", func(s string) error {
		switch s {
		case "asked":
			cfg.Cached = engine.CachedAsked
		case "always":
			cfg.Cached = engine.CachedAlways
		case "never":
			cfg.Cached = engine.CachedNever
		default:
			return errors.New("use asked, always or never")
		}
		return nil
	})
	flag.BoolVar(&cfg.DropZero, "drop-zero", false, "leave cached tokens out where there are none")
	flag.StringVar(&cfg.CachedTokensHeader, "cached-tokens-header", "", "also report cached tokens in a response header of this `name`")
	flag.StringVar(&cfg.QueueDepthHeader, "queue-depth-header", "", "also report waiting requests in a response header of this `name`")
	flag.Parse()
	if flag.NArg() > 0 {
		fmt.Fprintf(os.Stderr, "unknown argument %q: use flags only\n", flag.Arg(0))
		flag.Usage()
		os.Exit(2)
	}

	e, err := engine.Start(*listen, cfg)
	if err != nil {
		log.Fatal(err)
	}
	log.Printf("engine on %s", e.URL())
	if *control != "" {
		server := &http.Server{Addr: *control, Handler: e.Control(), ReadHeaderTimeout: time.Minute}
		go func() { log.Fatal(server.ListenAndServe()) }()
	}
	stop := make(chan os.Signal, 1)
	signal.Notify(stop, os.Interrupt, syscall.SIGTERM)
	<-stop
	if err := e.Close(); err != nil {
		log.Fatal(err)
	}
}
