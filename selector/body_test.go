package selector

import (
	"bytes"
	"context"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/iotest"
	"time"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
)

func hold(body io.ReadCloser, size, limit int64, wanted func([]byte) bool) *held {
	h := new(held)
	h.read(body, size, limit, wanted)
	return h
}

func text(n int) string { return strings.Repeat("0123456789abcdef", n/16+1)[:n] }

func TestHoldReplaysEveryByte(t *testing.T) {
	failure := errors.New("connection reset")
	readers := map[string]func(string) io.Reader{
		"whole":    func(s string) io.Reader { return strings.NewReader(s) },
		"one-byte": func(s string) io.Reader { return iotest.OneByteReader(strings.NewReader(s)) },
		"halves":   func(s string) io.Reader { return iotest.HalfReader(strings.NewReader(s)) },
		"data+eof": func(s string) io.Reader { return iotest.DataErrReader(strings.NewReader(s)) },
		"error":    func(s string) io.Reader { return io.MultiReader(strings.NewReader(s), iotest.ErrReader(failure)) },
	}
	for name, reader := range readers {
		for _, size := range []int{0, 1, 4095, 4096, 4097, 65535, 65536, 65537, 300_000} {
			for _, announced := range []int64{-1, int64(size)} {
				want := text(size)
				h := hold(io.NopCloser(reader(want)), announced, 100_000, always)
				for attempt := range 3 {
					b := h.open()
					if b == nil {
						if size < 100_000 || attempt == 0 {
							t.Fatalf("%s/%d: attempt %d has no body", name, size, attempt)
						}
						continue
					}
					got, err := io.ReadAll(b)
					if name == "error" && err != failure { //nolint:errorlint // the very error must come through
						t.Errorf("%s/%d: attempt %d ended with %v", name, size, attempt, err)
					}
					if name != "error" && err != nil {
						t.Errorf("%s/%d: attempt %d: %v", name, size, attempt, err)
					}
					if string(got) != want {
						t.Errorf("%s/%d: attempt %d got %d bytes", name, size, attempt, len(got))
					}
					_ = b.Close()
				}
				if whole := size < 100_000 && name != "error"; h.whole() != whole {
					t.Errorf("%s/%d: whole = %v", name, size, h.whole())
				}
			}
		}
	}
}

func TestHoldStopsWhereNotWanted(t *testing.T) {
	want := "<xml>" + text(50_000)
	h := hold(io.NopCloser(iotest.OneByteReader(strings.NewReader(want))), -1, 1<<20, func(b []byte) bool { return b[0] == '{' })
	if len(h.bytes) != 1 {
		t.Errorf("read %d bytes of a body that nobody wants", len(h.bytes))
	}
	if got, err := io.ReadAll(h.open()); err != nil || string(got) != want {
		t.Errorf("got %d bytes, %v", len(got), err)
	}
}

// A retry after part of the tail went out would be spliced together from two
// pieces: there must be none.
func TestNoAttemptAfterTheTailWasTouched(t *testing.T) {
	h := hold(io.NopCloser(strings.NewReader(text(9000))), -1, 4096, always)
	first, second := h.open(), h.open()
	if _, err := io.CopyN(io.Discard, first, 4096); err != nil {
		t.Fatal(err)
	}
	if third := h.open(); third == nil {
		t.Fatal("the tail is untouched, yet there is no body")
	}
	if _, err := io.CopyN(io.Discard, second, 4097); err != nil {
		t.Fatal(err)
	}
	if h.open() != nil {
		t.Error("a body was built from a tail that is half gone")
	}
}

func TestClosedBodyReadsNothing(t *testing.T) {
	h := hold(io.NopCloser(strings.NewReader(text(5000))), 5000, 1<<20, always)
	b := h.open()
	_ = b.Close()
	_ = b.Close()
	if n, err := b.Read(make([]byte, 10)); n != 0 || !errors.Is(err, errRevoked) {
		t.Errorf("read %d bytes, %v", n, err)
	}
	if h.refs.Load() != 1 {
		t.Errorf("%d holders left, want the request alone", h.refs.Load())
	}
	h.release()
	if h.open() != nil {
		t.Error("opened a body whose memory went back to the pool")
	}
}

// writes counts the writes to a connection.
type writes struct {
	net.Conn

	n *atomic.Int32
}

func (w writes) Write(p []byte) (int, error) {
	w.n.Add(1)
	return w.Conn.Write(p)
}

// A short request leaves in one piece, where net/http sends the headers of what
// it can't tell not to block ahead.
func TestShortRequestsLeaveInOnePiece(t *testing.T) {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		got, err := io.ReadAll(r.Body)
		if err == nil {
			_, err = w.Write(got)
		}
		if err != nil {
			t.Error(err)
		}
	}))
	defer server.Close()
	var n atomic.Int32
	transport := &http.Transport{DialContext: func(ctx context.Context, network, addr string) (net.Conn, error) {
		c, err := new(net.Dialer).DialContext(ctx, network, addr)
		return writes{c, &n}, err
	}}
	defer transport.CloseIdleConnections()
	for size, pieces := range map[int]int32{1: 1, 3000: 1, packedBytes: 2, 2 * packedBytes: 2} {
		want := text(size)
		h := hold(io.NopCloser(strings.NewReader(want)), int64(size), 1<<20, always)
		req, err := http.NewRequest(http.MethodPost, server.URL, h.open())
		if err != nil {
			t.Fatal(err)
		}
		req.ContentLength = int64(size)
		n.Store(0)
		res, err := transport.RoundTrip(req)
		if err != nil {
			t.Fatal(err)
		}
		got, err := io.ReadAll(res.Body)
		_ = res.Body.Close()
		if err != nil || string(got) != want {
			t.Errorf("%d bytes: %d arrived, %v", size, len(got), err)
		}
		if n.Load() != pieces {
			t.Errorf("%d bytes left in %d pieces, want %d", size, n.Load(), pieces)
		}
		h.release()
	}
}

// Many holders come and go at once; the memory must not be returned (and given
// to somebody else) while one of them still reads.
func TestHeldMemoryIsNotSharedWithTheNext(t *testing.T) {
	var wg sync.WaitGroup
	for g := range 8 {
		wg.Go(func() {
			rng := rand.New(rand.NewPCG(uint64(g), 1))
			for range 300 {
				want := bytes.Repeat([]byte{byte('a' + g)}, 1+rng.IntN(20_000))
				h := hold(io.NopCloser(bytes.NewReader(want)), int64(len(want)), 1<<20, always)
				var attempts sync.WaitGroup
				for range 3 {
					b := h.open()
					attempts.Go(func() {
						if got, err := io.ReadAll(b); err != nil || !bytes.Equal(got, want) {
							t.Errorf("got %d of %d bytes, %v", len(got), len(want), err)
						}
						_ = b.Close()
					})
				}
				h.release()
				attempts.Wait()
			}
		})
	}
	wg.Wait()
}

// A sender that announces much and sends little must not be given much memory.
func TestMemoryGrowsWithWhatArrives(t *testing.T) {
	for _, sent := range []int{0, 1000, 70_000} {
		h := hold(io.NopCloser(io.MultiReader(strings.NewReader(text(sent)), iotest.ErrReader(io.ErrUnexpectedEOF))), 8<<20, 8<<20, always)
		if most := max(trustedBytes, growthFactor*sent); len(h.page.buf) > 2*most {
			t.Errorf("%d bytes sent, %d held", sent, len(h.page.buf))
		}
	}
}

type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

// The memory of a body goes back as soon as no retry can need it: with the first
// byte of the answer, or when the client leaves.
func TestMemoryIsReleasedAtTheFirstByte(t *testing.T) {
	p := newTestPolicy(t, Config{})
	pool := upstreams(2)
	body := `{"model":"m","messages":[{"role":"user","content":"` + text(50_000) + `"}]}`
	send := func() (q *request, res *http.Response, end func()) {
		r, end := newTestRequest(t, http.MethodPost, body)
		if p.Select(pool, r, nil) == nil {
			t.Fatal("nothing selected")
		}
		o := &observer{policy: p, RoundTripper: roundTripper(func(req *http.Request) (*http.Response, error) {
			got, err := io.ReadAll(req.Body)
			if err := errors.Join(err, req.Body.Close()); err != nil || string(got) != body {
				t.Errorf("the upstream got %d bytes, %v", len(got), err)
			}
			return &http.Response{
				StatusCode: http.StatusOK, Header: http.Header{"Content-Type": {"text/event-stream"}},
				Body: io.NopCloser(strings.NewReader("data: {}\n\ndata: [DONE]\n\n")),
			}, nil
		})}
		res, err := o.RoundTrip(r) //nolint:bodyclose // the caller does
		if err != nil {
			t.Fatal(err)
		}
		return caddyhttp.GetVar(r.Context(), trailVar).(*trail).find(p, r), res, end
	}
	t.Run("answer", func(t *testing.T) {
		q, res, end := send()
		defer end()
		if q.held.page == nil {
			t.Fatal("the headers of an answer may still lead to a retry, yet the body is gone")
		}
		if _, err := res.Body.Read(make([]byte, 1)); err != nil {
			t.Fatal(err)
		}
		if q.held.page != nil || q.blocks != nil {
			t.Error("the answer is on its way, yet the body or its key is kept")
		}
		if err := res.Body.Close(); err != nil {
			t.Error(err)
		}
	})
	t.Run("client leaves", func(t *testing.T) {
		q, res, end := send()
		defer res.Body.Close()
		end()
		for deadline := time.Now().Add(time.Minute); q.held.refs.Load() > 0; time.Sleep(time.Millisecond) {
			if time.Now().After(deadline) {
				t.Fatal("nobody can answer, yet the body is kept")
			}
		}
	})
}
