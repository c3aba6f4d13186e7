package harness

import (
	"net/http"
	"time"

	"go.uber.org/goleak"
)

// caddyCleaner looks for idle dynamic upstreams, from the first that a process
// uses to the process's end.
const caddyCleaner = "github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy.(*Upstream).fillDynamicHost.func1.1"

// Leak returns an error that shows the goroutines that are left when everything
// was stopped. Caddy ends its servers in the background, so it waits for them.
func Leak() (leak error) {
	http.DefaultClient.CloseIdleConnections()
	for deadline := time.Now().Add(30 * time.Second); time.Now().Before(deadline); {
		if leak = goleak.Find(goleak.IgnoreAnyFunction(caddyCleaner)); leak == nil {
			break
		}
	}
	return leak
}
