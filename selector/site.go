package selector

import (
	"slices"
	"strings"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
)

// sites names the places in the running configuration where the policy's handler
// is, as whoever wrote it knows them: by host, path and listener, such as
// "llm.example.com/v1/* on :443". There are none while the configuration is being
// loaded.
func (p *Policy) sites() []string {
	app, err := caddy.ActiveContext().AppIfConfigured("http")
	if err != nil || p.observer == nil {
		return nil
	}
	w := siteWalk{wanted: p.observer.handler}
	for _, server := range app.(*caddyhttp.App).Servers {
		w.server = server
		w.routes(server.Routes, "", "", 0)
		if server.Errors != nil {
			w.routes(server.Errors.Routes, "", "", 0)
		}
	}
	slices.Sort(w.found)
	return slices.Compact(w.found)
}

// siteWalk looks for a handler in the routes of a server.
type siteWalk struct {
	wanted *reverseproxy.Handler
	server *caddyhttp.Server
	found  []string
}

// maxRouteDepth ends the walk where a named route invokes itself.
const maxRouteDepth = 20

// routes walks through routes inside others that match hosts and paths.
func (w *siteWalk) routes(routes caddyhttp.RouteList, hosts, paths string, depth int) {
	if depth > maxRouteDepth {
		return
	}
	for i := range routes {
		w.route(&routes[i], hosts, paths, depth)
	}
}

func (w *siteWalk) route(route *caddyhttp.Route, hosts, paths string, depth int) {
	for _, set := range route.MatcherSets {
		for _, matcher := range set {
			switch m := matcher.(type) {
			case *caddyhttp.MatchHost:
				hosts = strings.Join(*m, ",")
			case *caddyhttp.MatchPath:
				paths = strings.Join(*m, ",")
			}
		}
	}
	for _, handler := range route.Handlers {
		switch h := handler.(type) {
		case *caddyhttp.Subroute:
			w.routes(h.Routes, hosts, paths, depth+1)
			if h.Errors != nil {
				w.routes(h.Errors.Routes, hosts, paths, depth+1)
			}
		case *caddyhttp.Invoke:
			if named := w.server.NamedRoutes[h.Name]; named != nil && depth < maxRouteDepth {
				w.route(named, hosts, paths, depth+1)
			}
		case *reverseproxy.Handler:
			if h == w.wanted {
				w.found = append(w.found, strings.TrimPrefix(hosts+paths+" on "+strings.Join(w.server.Listen, ","), " "))
			}
			for _, response := range h.HandleResponse {
				w.routes(response.Routes, hosts, paths, depth+1)
			}
		}
	}
}
