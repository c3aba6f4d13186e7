package harness

import (
	"net/http"
	"time"

	"go.uber.org/goleak"
)

// Leak returns an error that shows the goroutines that are left when everything
// was stopped. Caddy ends its servers in the background, so it waits for them.
func Leak() (leak error) {
	http.DefaultClient.CloseIdleConnections()
	for deadline := time.Now().Add(30 * time.Second); time.Now().Before(deadline); {
		if leak = goleak.Find(); leak == nil {
			break
		}
	}
	return leak
}
