package integration

import (
	"bytes"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"testing/iotest"
)

// clients by protocol.
func clients() map[string]*http.Client {
	h2 := new(http.Protocols)
	h2.SetUnencryptedHTTP2(true)
	return map[string]*http.Client{
		"h1": {Transport: new(http.Transport)},
		"h2": {Transport: &http.Transport{Protocols: h2}},
	}
}

// Every attempt gets the body byte for byte: announced and chunked, HTTP/1.1
// and 2, request_buffers on and off, after a refused connection and after a 503.
func TestBodyReachesEveryAttemptWhole(t *testing.T) {
	for _, buffers := range []string{"", "request_buffers 1MiB\n\t\t"} {
		busy := newRecorder(t, status(http.StatusServiceUnavailable))
		ok := newRecorder(t, status(http.StatusOK))
		for kind, first := range map[string]string{"dial": deadAddr(t), "503": busy.addr()} {
			// The fallback `first` makes every cold request try the bad one first.
			s := newSite(t, first+" "+ok.addr(), buffers+`lb_policy prefix_affinity {
			fallback first
			max_body 4MiB
		}
		lb_retries 2
		lb_retry_match {
			expression `+"`{rp.status_code} == 503`"+`
		}`)
			for protocol, client := range clients() {
				for _, size := range []int{100, 4000, 40_000, 900_000, 2_000_000} {
					for _, chunked := range []bool{false, true} {
						name := fmt.Sprintf("%s/%s/%s/%d/chunked=%t", strings.Fields(buffers + " plain")[0], kind, protocol, size, chunked)
						body := chat(true, words(name, size))
						length := int64(len(body))
						if chunked {
							length = -1
						}
						res, _ := send(t, client, s.URL+"/v1/chat/completions", iotest.HalfReader(strings.NewReader(body)), length)
						if res.StatusCode != http.StatusOK {
							t.Errorf("%s: status %d", name, res.StatusCode)
						}
						got, errs := ok.take()
						for i := range got {
							if errs[i] == nil && got[i] != body {
								t.Errorf("%s: the second upstream got %d of %d bytes as if they were all", name, len(got[i]), len(body))
							}
						}
						if len(got) != 1 {
							t.Errorf("%s: %d attempts reached the second upstream", name, len(got))
						}
						if tried, _ := busy.take(); kind == "503" && (len(tried) != 1 || tried[0] != body) {
							t.Errorf("%s: the first upstream was tried %d times", name, len(tried))
						}
					}
				}
			}
			stop(t, s)
		}
	}
}

// A body longer than max_body is known by its head. Once a part of its tail was
// sent, no attempt may be made of what is left (1.54 of 1.97 MB would arrive
// and be answered with 200).
func TestBodyIsNeverSpliced(t *testing.T) {
	// Answers before it has read everything, as a busy engine does.
	partly := newRecorder(t, status(http.StatusOK))
	partly.Config.Handler = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.CopyN(io.Discard, r.Body, 1_100_000)
		w.WriteHeader(http.StatusServiceUnavailable)
	})
	ok := newRecorder(t, status(http.StatusOK))
	s := newSite(t, partly.addr()+" "+ok.addr(), `lb_policy prefix_affinity {
			fallback first
			max_body 1MiB
		}
		lb_retries 3
		lb_retry_match {
			expression `+"`{rp.status_code} == 503`"+`
		}`)
	for protocol, client := range clients() {
		for _, chunked := range []bool{false, true} {
			body := chat(true, words(protocol, 1_966_080))
			length := int64(len(body))
			if chunked {
				length = -1
			}
			req, err := http.NewRequest(http.MethodPost, s.URL+"/v1/chat/completions", strings.NewReader(body))
			if err != nil {
				t.Fatal(err)
			}
			req.ContentLength = length
			req.Header.Set("Content-Type", "application/json")
			res, err := client.Do(req)
			if err == nil { // a reset connection is a fair answer as well
				if res.StatusCode == http.StatusOK {
					t.Errorf("%s/chunked=%t: answered with 200", protocol, chunked)
				}
				res.Body.Close()
			}
			bodies, errs := ok.take()
			for i := range bodies {
				if errs[i] == nil {
					t.Errorf("%s/chunked=%t: the second upstream took %d of %d bytes for a request", protocol, chunked, len(bodies[i]), len(body))
				}
			}
		}
	}
}

// A long body whose first attempt could not even connect is sent whole.
func TestLongBodyAfterRefusedConnection(t *testing.T) {
	ok := newRecorder(t, status(http.StatusOK))
	s := newSite(t, deadAddr(t)+" "+ok.addr(), "lb_policy prefix_affinity {\n\t\t\tfallback first\n\t\t\tmax_body 64KiB\n\t\t}\n\t\tlb_retries 2")
	body := chat(true, words("long", 3_000_000))
	for protocol, client := range clients() {
		for _, length := range []int64{int64(len(body)), -1} {
			if res, _ := send(t, client, s.URL, io.MultiReader(strings.NewReader(body)), length); res.StatusCode != http.StatusOK {
				t.Errorf("%s: status %d", protocol, res.StatusCode)
			}
			if got, errs := ok.take(); len(got) != 1 || got[0] != body || errs[0] != nil {
				t.Errorf("%s: the body did not arrive whole", protocol)
			}
		}
	}
}

// Whatever is not a prompt is passed on as it came.
func TestForeignBodiesPassUntouched(t *testing.T) {
	up := newRecorder(t, status(http.StatusOK))
	s := newSite(t, up.addr(), "lb_policy prefix_affinity")
	for _, test := range []struct{ name, method, contentType, encoding, body string }{
		{"empty/post", "POST", "application/json", "", ""},
		{"not-json/text", "POST", "text/plain", "", words("plain", 100_000)},
		{"not-json/broken", "POST", "application/json", "", `{"model":"m","messages":[{"role":`},
		{"not-json/nul", "POST", "application/json", "", "{\x00\xff\xfe}"},
		{"not-json/bom", "POST", "application/json", "", "\xef\xbb\xbf" + chat(false, "hello")},
		{"no-prompt/embeddings", "POST", "application/json", "", `{"model":"m","input":["a","b"]}`},
		{"no-prompt/array", "POST", "application/json", "", `[1,2,3]`},
		{"encoded/gzip", "POST", "application/json", "gzip", "\x1f\x8b not really"},
		{"form/multipart", "POST", "multipart/form-data; boundary=x", "", "--x\r\n\r\nhello\r\n--x--\r\n"},
		{"method/put", "PUT", "application/json", "", chat(false, "hello")},
		{"method/delete", "DELETE", "application/json", "", chat(false, "hello")},
		{"deep/100k", "POST", "application/json", "", `{"messages":` + strings.Repeat("[", 100_000) + strings.Repeat("]", 100_000) + "}"},
	} {
		t.Run(test.name, func(t *testing.T) {
			req, err := http.NewRequest(test.method, s.URL+"/v1/chat/completions", strings.NewReader(test.body))
			if err != nil {
				t.Fatal(err)
			}
			req.Header.Set("Content-Type", test.contentType)
			if test.encoding != "" {
				req.Header.Set("Content-Encoding", test.encoding)
			}
			res, err := http.DefaultClient.Do(req)
			if err != nil {
				t.Fatal(err)
			}
			res.Body.Close()
			if got, errs := up.take(); res.StatusCode != http.StatusOK || len(got) != 1 || got[0] != test.body || errs[0] != nil {
				t.Errorf("status %d, %d requests, not the same body", res.StatusCode, len(got))
			}
		})
	}
}

// stop ends a site before the test does, because there can be one at a time.
func stop(t *testing.T, s *site) {
	t.Helper()
	s.stopped = true
	if err := s.Stop(); err != nil {
		t.Error(err)
	}
}

// A short request reaches its upstream in one piece. Where the body is streamed,
// net/http sends the headers ahead, for a system call and a packet more.
func TestShortRequestsArriveInOnePiece(t *testing.T) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	var whole, pieces atomic.Int32
	go func() {
		for {
			c, err := listener.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				for buf := make([]byte, 64<<10); ; {
					n, err := c.Read(buf)
					if err != nil {
						return
					}
					pieces.Add(1)
					if !bytes.HasSuffix(buf[:n], []byte("}")) {
						continue // there is more to come
					}
					if bytes.HasPrefix(buf[:n], []byte("POST ")) {
						whole.Add(1)
					}
					_, _ = io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}")
				}
			}()
		}
	}()
	s := newSite(t, listener.Addr().String(), policy())
	const n = 50
	for i := range n {
		s.ask(t, chat(false, words(fmt.Sprintf("question %d", i), 2000)))
	}
	if whole.Load() != n {
		t.Errorf("%d of %d requests came in one piece, %d pieces in all", whole.Load(), n, pieces.Load())
	}
}
