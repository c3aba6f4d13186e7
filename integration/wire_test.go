package integration

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
)

// sideBySide are two proxies, each before its own upstreams, told apart by the
// header Side.
func sideBySide(ours, stock, more string) string {
	side := func(name, upstreams, lb string) string {
		return fmt.Sprintf("@%s header Side %s\n\treverse_proxy @%s %s {\n\t\t%s\n\t\t%s\n\t}\n\t", name, name, name, upstreams, lb, more)
	}
	return side("ours", ours, "lb_policy prefix_affinity") + side("stock", stock, "lb_policy least_conn")
}

// fails is how many failures Caddy counts against an upstream.
func (s *site) fails(t *testing.T, addr string) int {
	t.Helper()
	res, err := http.Get(s.Admin + "/reverse_proxy/upstreams")
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	var upstreams []struct {
		Address string `json:"address"`
		Fails   int    `json:"fails"`
	}
	if err := json.NewDecoder(res.Body).Decode(&upstreams); err != nil {
		t.Fatal(err)
	}
	for _, up := range upstreams {
		if up.Address == addr {
			return up.Fails
		}
	}
	t.Errorf("no upstream %s", addr)
	return 0
}

// Whatever a client does wrong, or slowly, it gets the status that it gets from
// stock Caddy, no upstream takes half a body for a whole one, and none is blamed.
// Where a client's connection fails amid its body, stock Caddy says 499, 502 or 504,
// as chance has it, and counts the latter two as failures of the upstream, as it does
// with its 502 where the body can't be read. Ours says 499 (client closed request)
// and 400.
func TestClientsMisbehave(t *testing.T) {
	ok := func(w http.ResponseWriter, r *http.Request) { _, _ = fmt.Fprintf(w, "%s %s", r.Method, r.URL.Path) }
	up, stockUp := newRecorder(t, ok), newRecorder(t, ok)
	s := newSiteWith(t, "timeouts {\n\t\t\tread_body 1s\n\t\t}", "request_body {\n\t\tmax_size 64KiB\n\t}\n\t"+
		sideBySide(up.addr(), stockUp.addr(), "lb_retries 2\n\t\tfail_duration 1h\n\t\tmax_fails 1000000"))
	body := chat(false, words("wire", 2000))
	if len(body) < 2000 {
		t.Fatal(len(body))
	}
	half := body[:1000]
	chunk := func(s string) string { return fmt.Sprintf("%x\r\n%s\r\n", len(s), s) }
	length := func(n any) string { return fmt.Sprintf("Content-Length: %v\r\n", n) }
	const chunked, last = "Transfer-Encoding: chunked\r\n", "Connection: close\r\n"

	// post is a request; a step that is a duration is a pause, closeWrite ends
	// what the client sends.
	type closeWrite struct{}
	post := func(headers, body string) string {
		return "POST " + chatPath + " HTTP/1.1\r\nHost: " + s.addr + "\r\nSide: %s\r\nContent-Type: application/json\r\n" + headers + "\r\n" + body
	}
	binary := func(headers, body string) string { // which passes without being held
		return strings.Replace(post(headers, body), "application/json", "application/octet-stream", 1)
	}
	get := func(headers string) string {
		return "GET /v1/models HTTP/1.1\r\nHost: " + s.addr + "\r\nSide: %s\r\n" + headers + "\r\n"
	}
	slowly := func(s string) (steps []any) {
		for part := range slices.Chunk([]byte(s), 300) {
			steps = append(steps, string(part), 5*time.Millisecond)
		}
		return steps
	}
	for _, test := range []struct {
		name      string
		steps     []any
		want      string // statuses, where they are known for sure
		responses int    // 0: one
	}{
		{"sound/announced", []any{post(length(len(body))+last, body)}, "200", 1},
		{"sound/chunked", []any{post(chunked+last, chunk(half)+chunk(body[1000:])+"0\r\n\r\n")}, "200", 1},
		{"sound/trailers", []any{post(chunked+"Trailer: X-Sum\r\n"+last, chunk(body)+"0\r\nX-Sum: 1\r\n\r\n")}, "200", 1},
		{"sound/HTTP 1.0", []any{strings.Replace(post(length(len(body)), body), "HTTP/1.1", "HTTP/1.0", 1)}, "200", 1},
		{"sound/no body", []any{post(length(0)+last, "")}, "200", 1},
		{"slow/announced", append([]any{post(length(len(body))+last, "")}, slowly(body)...), "200", 1},
		{"slow/chunked", append(append([]any{post(chunked+last, "")}, slowly(chunk(body))...), "0\r\n\r\n"), "200", 1},
		{"slow/headers", append(slowly(post(length(len(body))+last, "")), body), "200", 1},
		{"stops/announced", []any{post(length(len(body)), half)}, "", 1},
		{"stops/chunked", []any{post(chunked, chunk(half))}, "", 1},
		{"stops/in a chunk", []any{post(chunked, "fff\r\n"+half)}, "", 1},
		{"stops/at once", []any{post(length(len(body)), "")}, "", 1},
		{"leaves/announced", []any{post(length(len(body)), half), closeWrite{}}, "", 1},
		{"leaves/chunked", []any{post(chunked, chunk(half)), closeWrite{}}, "", 1},
		{"length/too short", []any{post(length(1000), body)}, "", 1},
		{"length/not a number", []any{post(length("many"), body)}, "400", 1},
		{"length/negative", []any{post(length(-1), body)}, "400", 1},
		{"length/two", []any{post(length(10)+length(11), body)}, "400", 1},
		{"length/with chunks", []any{post(length(10)+chunked+last, chunk(body)+"0\r\n\r\n")}, "", 1},
		{"length/over the limit", []any{post(length(70_000)+last, words("x", 70_000))}, "", 1},
		{"chunks/over the limit", []any{post(chunked+last, chunk(words("x", 70_000))+"0\r\n\r\n")}, "", 1},
		{"chunks/garbage size", []any{post(chunked, "zz\r\n"+half)}, "400", 1},
		{"chunks/garbage after one", []any{post(chunked, chunk(half)+"garbage\r\n\r\n")}, "400", 1},
		{"chunks/size too large", []any{post(chunked, "ffffffffffffffffff\r\n"+half)}, "400", 1},
		{"binary/sound", []any{binary(chunked+last, chunk(body)+"0\r\n\r\n")}, "200", 1},
		{"binary/garbage size", []any{binary(chunked, chunk(half)+"zz\r\n"+half)}, "400", 1},
		{"binary/over the limit", []any{binary(chunked+last, chunk(words("x", 70_000))+"0\r\n\r\n")}, "", 1},
		{"stops/binary", []any{binary(length(len(body)), half)}, "", 1},
		{"leaves/binary", []any{binary(length(len(body)), half), closeWrite{}}, "", 1},
		{"chunks/unknown coding", []any{post("Transfer-Encoding: gzip, chunked\r\n", chunk(half))}, "501", 1},
		{"continue/sent when asked", []any{post("Expect: 100-continue\r\n"+length(len(body))+last, ""), 50 * time.Millisecond, body}, "100 100 200", 1},
		{"continue/sent at once", []any{post("Expect: 100-continue\r\n"+length(len(body))+last, body)}, "", 1},
		{"continue/never sent", []any{post("Expect: 100-continue\r\n"+length(len(body)), "")}, "", 1},
		{"continue/something else", []any{post("Expect: money\r\n"+length(len(body))+last, body)}, "417", 1},
		{"pipelined/three", []any{post(length(len(body)), body) + post(chunked, chunk(body)+"0\r\n\r\n") + post(length(len(body))+last, body)}, "200 200 200", 3},
		{"pipelined/mixed", []any{get("") + post(length(len(body)), body) + get(last)}, "200 200 200", 3},
		{"pipelined/in pieces", []any{post(length(len(body)), half), 20 * time.Millisecond, body[1000:] + get("")[:10], 20 * time.Millisecond, get("")[10:] + get(last)}, "200 200 200", 3},
		{"pipelined/the second broken", []any{post(length(len(body)), body) + post(chunked, "zz\r\n"+half)}, "200 400", 2},
	} {
		t.Run(test.name, func(t *testing.T) {
			send := func(side string) []string {
				c, err := net.Dial("tcp", s.addr)
				if err != nil {
					t.Error(err)
					return nil
				}
				defer c.Close()
				for _, step := range test.steps {
					switch step := step.(type) {
					case string:
						_, _ = io.WriteString(c, strings.ReplaceAll(step, "%s", side)) // the server may have had enough
					case time.Duration:
						time.Sleep(step)
					case closeWrite:
						_ = c.(*net.TCPConn).CloseWrite()
					}
				}
				return statuses(c, max(test.responses, 1))
			}
			fails := s.fails(t, up.addr())
			ours := send("ours")
			if got := strings.Join(ours, " "); test.want != "" && got != test.want {
				t.Errorf("statuses %q, want %q", got, test.want)
			}
			const times = 30
			var again, stock [times][]string
			var wg sync.WaitGroup
			for i := range times {
				wg.Go(func() { again[i] = final(send("ours")) })
				wg.Go(func() { stock[i] = final(send("stock")) })
			}
			wg.Wait()
			for _, other := range again {
				if !slices.Equal(other, final(ours)) {
					t.Errorf("statuses %q, then %q", ours, other)
				}
			}
			failed := strings.HasPrefix(test.name, "stops/") || strings.HasPrefix(test.name, "leaves/") || test.name == "continue/never sent"
			for _, one := range stock {
				switch {
				case slices.Equal(one, final(ours)):
				case strings.HasSuffix(test.want, "400") && strings.Join(one, " ") == strings.Replace(test.want, "400", "502", 1):
				case failed && slices.Equal(final(ours), []string{"499"}) && len(one) == 1 && slices.Contains([]string{"502", "504"}, one[0]):
				default:
					t.Errorf("statuses %q, from stock Caddy %q", ours, one)
				}
			}
			if n := s.fails(t, up.addr()) - fails; n > 0 {
				t.Errorf("the upstream is blamed %d times", n)
			}
			s.settled(t)
			bodies, errs := up.take()
			for i, got := range bodies {
				if errs[i] == nil && got != "" && got != body && got != half {
					t.Errorf("an upstream took %d bytes for a body", len(got))
				}
			}
		})
	}
}

// What is wrong with a body beyond max_body, which is not held, is no upstream's
// fault either.
func TestClientsMisbehaveLate(t *testing.T) {
	up := newRecorder(t, func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusNoContent) })
	s := newSite(t, up.addr(), policy("max_body 4KiB")+"\n\t\tlb_retries 2\n\t\tfail_duration 1h\n\t\tmax_fails 1000000")
	body := chat(false, words("late", 100_000))
	head := "POST " + chatPath + " HTTP/1.1\r\nHost: " + s.addr + "\r\nContent-Type: application/json\r\n"
	for _, test := range []struct{ name, request, want string }{
		{"announced/whole", head + fmt.Sprintf("Content-Length: %d\r\n\r\n%s", len(body), body), "204"},
		{"announced/cut", head + fmt.Sprintf("Content-Length: %d\r\n\r\n%s", 2*len(body), body), "499"},
		{"chunked/cut", head + fmt.Sprintf("Transfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n", len(body), body), "499"},
		{"chunked/garbage", head + fmt.Sprintf("Transfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\nzz\r\n", len(body), body), "400"},
	} {
		t.Run(test.name, func(t *testing.T) {
			c, err := net.Dial("tcp", s.addr)
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			_, _ = io.WriteString(c, test.request) // the server may have had enough
			if test.want == "499" {
				_ = c.(*net.TCPConn).CloseWrite()
			}
			if got := strings.Join(statuses(c, 1), " "); got != test.want {
				t.Errorf("status %q, want %q", got, test.want)
			}
			if n := s.fails(t, up.addr()); n > 0 {
				t.Errorf("the upstream is blamed %d times", n)
			}
			s.settled(t)
		})
	}
}

// statuses reads n responses on a connection, and the interim ones before them.
func statuses(c net.Conn, n int) (all []string) {
	_ = c.SetReadDeadline(time.Now().Add(time.Minute))
	for r := bufio.NewReader(c); n > 0; {
		res, err := http.ReadResponse(r, &http.Request{Method: http.MethodPost})
		if err == nil {
			_, err = io.Copy(io.Discard, res.Body)
			all = append(all, fmt.Sprint(res.StatusCode))
			if res.StatusCode >= 200 {
				n--
			}
		}
		if err != nil {
			return append(all, err.Error())
		}
	}
	return all
}

// final leaves out the interim responses.
func final(statuses []string) []string {
	return slices.DeleteFunc(slices.Clone(statuses), func(s string) bool { return strings.HasPrefix(s, "1") })
}

// The same over HTTP/2: streams that are reset at any time, and bodies that are
// not as long as announced.
func TestHTTP2ClientsMisbehave(t *testing.T) {
	streams := func(w http.ResponseWriter, _ *http.Request) { answer(w, true) }
	up := newRecorder(t, streams)
	s := newSiteOf(t, sideBySide(up.addr(), newRecorder(t, streams).addr(), "lb_retries 2"))
	body := chat(true, words("frames", 2000))
	for _, test := range []struct {
		name   string
		length int // announced; -1: not
		sent   string
		reset  bool // instead of an end
	}{
		{"sound/announced", len(body), body, false},
		{"sound/not announced", -1, body, false},
		{"reset/before the body", len(body), "", true},
		{"reset/in the body", len(body), body[:1000], true},
		{"reset/after the body", len(body), body, true},
		{"length/too long", len(body), body[:1000], false},
		{"length/too short", 1000, body, false},
	} {
		t.Run(test.name, func(t *testing.T) {
			send := func(side string) string {
				c := newFramer(t, s.addr)
				defer c.conn.Close()
				headers := []string{":method", "POST", ":scheme", "http", ":authority", s.addr, ":path", chatPath, "content-type", "application/json", "side", side}
				if test.length >= 0 {
					headers = append(headers, "content-length", fmt.Sprint(test.length))
				}
				c.headers(t, 1, false, headers...)
				if test.sent != "" {
					_ = c.WriteData(1, !test.reset, []byte(test.sent))
				}
				if test.reset {
					_ = c.WriteRSTStream(1, http2.ErrCodeCancel)
				}
				// The connection goes on, whatever became of the stream.
				c.headers(t, 3, true, ":method", "GET", ":scheme", "http", ":authority", s.addr, ":path", "/v1/models", "side", side)
				if test.reset { // whether an answer is on its way then is chance
					return c.ends(t, 3)[3]
				}
				ends := c.ends(t, 1, 3)
				return ends[1] + ", then " + ends[3]
			}
			ours, stock := send("ours"), send("stock")
			if want := strings.Replace(stock, "502", "400", 1); ours != want { // it is the client's fault: see TestClientsMisbehave
				t.Errorf("%q, from stock Caddy %q", ours, stock)
			}
			t.Logf("%q", ours)
			s.settled(t)
			bodies, errs := up.take()
			for i, got := range bodies {
				if errs[i] == nil && got != "" && got != body && got != body[:1000] {
					t.Errorf("an upstream took %d bytes for a body", len(got))
				}
			}
		})
	}
}

// framer speaks HTTP/2 frame by frame.
type framer struct {
	*http2.Framer

	conn net.Conn
}

func newFramer(t *testing.T, addr string) *framer {
	t.Helper()
	c, err := net.Dial("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	_ = c.SetDeadline(time.Now().Add(time.Minute))
	f := &framer{http2.NewFramer(c, c), c}
	f.ReadMetaHeaders = hpack.NewDecoder(4096, nil)
	_, err = io.WriteString(c, http2.ClientPreface)
	if err = errors.Join(err, f.WriteSettings()); err != nil {
		t.Fatal(err)
	}
	return f
}

// headers opens a stream with names and values.
func (f *framer) headers(t *testing.T, stream uint32, end bool, fields ...string) {
	t.Helper()
	var block bytes.Buffer
	enc := hpack.NewEncoder(&block)
	for i := 0; i < len(fields); i += 2 {
		_ = enc.WriteField(hpack.HeaderField{Name: fields[i], Value: fields[i+1]})
	}
	if err := f.WriteHeaders(http2.HeadersFrameParam{StreamID: stream, BlockFragment: block.Bytes(), EndHeaders: true, EndStream: end}); err != nil {
		t.Error(err)
	}
}

// ends reads until the given streams have ended, and returns how each did.
func (f *framer) ends(t *testing.T, streams ...uint32) map[uint32]string {
	t.Helper()
	ends := make(map[uint32]string)
	for len(streams) > 0 {
		frame, err := f.ReadFrame()
		if err != nil {
			t.Errorf("the connection ended after %v: %v", ends, err)
			return ends
		}
		id, over := frame.Header().StreamID, false
		switch frame := frame.(type) {
		case *http2.SettingsFrame:
			if !frame.IsAck() {
				_ = f.WriteSettingsAck()
			}
		case *http2.MetaHeadersFrame:
			ends[id] += frame.PseudoValue("status")
			over = frame.StreamEnded()
		case *http2.DataFrame:
			over = frame.StreamEnded()
		case *http2.RSTStreamFrame:
			if frame.ErrCode != http2.ErrCodeNo { // after a whole answer
				ends[id] += " " + frame.ErrCode.String()
			}
			over = true
		}
		if over {
			streams = slices.DeleteFunc(streams, func(s uint32) bool { return s == id })
		}
	}
	return ends
}
