package harness

import (
	"fmt"
	"net/http"
	"os"
	"testing"
	"time"

	"go.uber.org/goleak"
)

// Main is the TestMain of packages that run a Caddy in the test's process: when
// all is over, Caddy must have no goroutine left. Their test binaries can be a
// caddy too, as after BeCaddy.
func Main(m *testing.M) {
	BeCaddy()
	status := m.Run()
	if status == 0 {
		if err := leak(); err != nil {
			fmt.Println(err)
			status = 1
		}
	}
	os.Exit(status)
}

// caddyCleaner looks for idle dynamic upstreams, from the first that a process
// uses to the process's end.
const caddyCleaner = "github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy.(*Upstream).fillDynamicHost.func1.1"

// leak returns an error that shows the goroutines that are left when everything
// was stopped. Caddy ends its servers in the background, so it waits for them.
func leak() (left error) {
	http.DefaultClient.CloseIdleConnections()
	for deadline := time.Now().Add(30 * time.Second); time.Now().Before(deadline); {
		if left = goleak.Find(goleak.IgnoreAnyFunction(caddyCleaner)); left == nil {
			break
		}
	}
	return left
}
