package harness

import (
	"errors"
	"fmt"

	"github.com/prefix-affinity/caddy/integration/engine"
)

// Gateway is a running Caddy whose one site is a reverse_proxy before simulated
// engines.
type Gateway struct {
	*Caddy

	Addr  string // of the site
	Fleet Fleet
}

// StartGateway runs n engines, and a site with the given lines in its
// reverse_proxy.
func StartGateway(n int, cfg engine.Config, proxy string) (*Gateway, error) {
	fleet, err := Engines(n, cfg)
	if err != nil {
		return nil, err
	}
	addr, err := FreeAddr()
	if err != nil {
		return nil, errors.Join(err, fleet.Close())
	}
	c, err := StartCaddy(fmt.Sprintf("http://%s {\n\tbind 127.0.0.1\n\treverse_proxy %s {\n\t\t%s\n\t}\n}\n", addr, fleet.Upstreams(), proxy))
	if err != nil {
		return nil, errors.Join(err, fleet.Close())
	}
	return &Gateway{Caddy: c, Addr: addr, Fleet: fleet}, nil
}

// Close ends Caddy and the engines.
func (g *Gateway) Close() error { return errors.Join(g.Stop(), g.Fleet.Close()) }
