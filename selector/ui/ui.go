// Package ui serves a page that shows live, in a browser, what the
// prefix_affinity policies of a running Caddy do.
//
// A browser can't open a page of Caddy's admin endpoint itself: that refuses
// what it sends for a typed address. So a small server of its own has the page,
// and passes the page's calls on to the admin API, those of prefix_affinity and
// no others.
//
// Whoever reaches the server can see and drain upstreams. Web pages can't: a
// request is refused whose Host is a name that the server was not given (a DNS
// name rebound to this address) or that a browser sends for another origin.
package ui

import (
	"context"
	"crypto/sha256"
	_ "embed" // the page
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"html"
	"io"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"strings"
	"time"
)

//go:embed page.html
var page string

const (
	adminTimeout = 10 * time.Second // for an answer of Caddy's
	graceTimeout = 3 * time.Second  // for requests in flight, once the server is to end
)

// Admin is where Caddy's admin endpoint listens, in the terms of net.Dial.
type Admin struct {
	Network string // tcp, unix and the like
	Address string
}

// Run serves the page on a TCP address until ctx is done, then lets requests in
// flight end. The address must name a host: localhost, unless others are to see
// the page. ready is called with the page's URL once it can be opened.
func Run(ctx context.Context, listen string, admin Admin, ready func(url string)) error {
	host, _, err := net.SplitHostPort(listen)
	if err != nil {
		return fmt.Errorf("invalid listen address '%s': %v", listen, err)
	}
	if host == "" {
		return fmt.Errorf("listen address '%s' has no host: use localhost%s, or 0.0.0.0%[1]s where everybody may see and drain upstreams", listen, listen)
	}
	l, err := new(net.ListenConfig).Listen(ctx, "tcp", listen)
	if err != nil {
		return err
	}
	_, port, err := net.SplitHostPort(l.Addr().String())
	if err != nil {
		return errors.Join(err, l.Close())
	}
	transport := admin.transport()
	defer transport.CloseIdleConnections()
	server := &http.Server{
		Handler:           handler(host, admin, transport),
		ReadHeaderTimeout: 5 * time.Second,
		IdleTimeout:       time.Minute,
	}
	ended := make(chan error, 1)
	stop := context.AfterFunc(ctx, func() {
		grace, cancel := context.WithTimeout(context.WithoutCancel(ctx), graceTimeout)
		defer cancel()
		ended <- errors.Join(server.Shutdown(grace), server.Close())
	})
	ready("http://" + net.JoinHostPort(host, port))
	err = server.Serve(l)
	if stop() { // it did not end because it was told to
		return err
	}
	return <-ended
}

// handler answers requests to a server that listens on a host.
func handler(host string, admin Admin, transport http.RoundTripper) http.Handler {
	mux := http.NewServeMux()
	mux.Handle("GET /{$}", servePage(admin))
	forward := forwarder{admin, &http.Client{
		Transport:     transport,
		Timeout:       adminTimeout,
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}}
	mux.Handle("GET /prefix_affinity/upstreams", forward)
	for _, route := range []string{"lookup", "drain", "undrain", "forget"} {
		mux.Handle("POST /prefix_affinity/"+route, forward)
	}
	foreign := http.NewCrossOriginProtection()
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("X-Content-Type-Options", "nosniff")
		w.Header().Set("Cross-Origin-Resource-Policy", "same-origin")
		w.Header().Set("Cache-Control", "no-store")
		if !known(r.Host, host) {
			refuse(w, http.StatusForbidden, fmt.Errorf("host '%s' not allowed: use the address that was given to --listen", r.Host))
			return
		}
		if origin := r.Header.Get("Origin"); origin != "" && !strings.EqualFold(origin, "http://"+r.Host) {
			refuse(w, http.StatusForbidden, fmt.Errorf("origin '%s' not allowed", origin))
			return
		}
		if err := foreign.Check(r); err != nil {
			refuse(w, http.StatusForbidden, err)
			return
		}
		mux.ServeHTTP(w, r)
	})
}

// known reports whether a Host header is one that no DNS record of somebody
// else's can bring here: the server's own, localhost, or an IP address. Any port
// will do, as a tunnel may begin at another one.
func known(header, own string) bool {
	name := header
	if host, _, err := net.SplitHostPort(header); err == nil {
		name = host
	}
	if strings.EqualFold(name, own) || strings.EqualFold(name, "localhost") {
		return true
	}
	_, err := netip.ParseAddr(strings.Trim(name, "[]"))
	return err == nil
}

// servePage serves the page, which may load nothing else and run no script but
// its own.
func servePage(admin Admin) http.HandlerFunc {
	text := strings.Replace(page, "ADMIN", html.EscapeString(admin.Address), 1)
	policy := fmt.Sprintf("default-src 'none'; script-src '%s'; style-src '%s'; img-src data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
		digest(text, "script"), digest(text, "style"))
	return func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/html; charset=utf-8")
		w.Header().Set("Content-Security-Policy", policy)
		w.Header().Set("Referrer-Policy", "same-origin")
		_, _ = io.WriteString(w, text) // a browser that left needs no page
	}
}

// digest names the text of the page's one element of a kind as a content
// security policy does.
func digest(page, element string) string {
	_, rest, _ := strings.Cut(page, "<"+element+">")
	text, _, _ := strings.Cut(rest, "</"+element+">")
	sum := sha256.Sum256([]byte(text))
	return "sha256-" + base64.StdEncoding.EncodeToString(sum[:])
}

// forwarder passes requests on to the admin endpoint: method, path, query, body,
// and of the headers only the one in which a lookup may name a tenant.
type forwarder struct {
	admin  Admin
	client *http.Client
}

func (f forwarder) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	res, err := f.send(r)
	if err != nil {
		refuse(w, http.StatusBadGateway, fmt.Errorf("no answer from Caddy's admin endpoint at %s: %w", f.admin.Address, err))
		return
	}
	defer res.Body.Close()
	w.Header().Set("Content-Type", res.Header.Get("Content-Type"))
	w.WriteHeader(res.StatusCode)
	if _, err := io.Copy(w, res.Body); err != nil {
		panic(http.ErrAbortHandler) // or half an answer would look like one
	}
}

func (f forwarder) send(r *http.Request) (*http.Response, error) {
	to := *r.URL
	to.Scheme, to.Host = "http", f.admin.host()
	req, err := http.NewRequestWithContext(r.Context(), r.Method, to.String(), r.Body) // #nosec G704 -- another's query, never another host or route
	if err != nil {
		return nil, err
	}
	req.ContentLength = r.ContentLength
	if tenant := r.Header.Get("Authorization"); tenant != "" {
		req.Header.Set("Authorization", tenant)
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("Origin", "http://"+to.Host) // the endpoint may insist on one
	res, err := f.client.Do(req)                // #nosec G704 -- likewise
	if failed, ok := errors.AsType[*url.Error](err); ok {
		return nil, failed.Err // the URL is no news
	}
	return res, err
}

// host is what the admin endpoint is called in requests: Caddy wants a loopback
// address where it listens on a socket that has no host.
func (a Admin) host() string {
	if strings.HasPrefix(a.Network, "tcp") {
		return a.Address
	}
	return "127.0.0.1"
}

func (a Admin) transport() *http.Transport {
	return &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, a.Network, a.Address)
		},
		IdleConnTimeout: 30 * time.Second, // Caddy's is a minute
	}
}

// refuse answers with an error as the admin endpoint does.
func refuse(w http.ResponseWriter, status int, err error) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(map[string]string{"error": err.Error()}) // it is the client's loss
}
