package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"sync/atomic"
	"time"
)

// foreign are upstreams of the APIs that the simulated engines don't speak: the
// Responses API, Anthropic's Messages, Ollama's chat, embeddings.
type foreign struct{ servers []*http.Server }

func newForeign(n int) (*foreign, error) {
	f := new(foreign)
	var ids atomic.Int64
	for range n {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			f.close()
			return nil, err
		}
		server := &http.Server{Addr: l.Addr().String(), ReadHeaderTimeout: time.Minute, Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			speak(w, r, ids.Add(1))
		})}
		f.servers = append(f.servers, server)
		go func() {
			if err := server.Serve(l); !errors.Is(err, http.ErrServerClosed) {
				fmt.Fprintln(os.Stderr, err)
			}
		}()
	}
	return f, nil
}

func (f *foreign) addrs() (addrs []string) {
	for _, s := range f.servers {
		addrs = append(addrs, s.Addr)
	}
	return addrs
}

func (f *foreign) close() {
	for _, s := range f.servers {
		_ = s.Close()
	}
}

// speak answers in the path's API, in pieces if it is to be a stream.
func speak(w http.ResponseWriter, r *http.Request, id int64) {
	var asked struct {
		Stream bool `json:"stream"`
	}
	n := counter(0)
	err := json.NewDecoder(io.TeeReader(r.Body, &n)).Decode(&asked)
	if _, rest := io.Copy(&n, r.Body); err != nil || rest != nil {
		w.WriteHeader(http.StatusBadRequest)
		return
	}
	tokens := int(n) / 4
	var pieces []string
	contentType := "text/event-stream"
	switch event := "event: %s\ndata: %s\n\n"; r.URL.Path {
	case "/v1/responses":
		done := fmt.Sprintf(`{"id":"resp_%d","object":"response","usage":{"input_tokens":%d,"input_tokens_details":{"cached_tokens":%d},"output_tokens":3}}`, id, tokens, tokens/2)
		if pieces = []string{done}; asked.Stream {
			pieces = []string{
				fmt.Sprintf(event, "response.created", fmt.Sprintf(`{"type":"response.created","response":{"id":"resp_%d"}}`, id)),
				fmt.Sprintf(event, "response.output_text.delta", `{"type":"response.output_text.delta","delta":"so it is"}`),
				fmt.Sprintf(event, "response.completed", `{"type":"response.completed","response":`+done+`}`),
			}
		}
	case "/v1/messages":
		usage := fmt.Sprintf(`{"input_tokens":%d,"cache_read_input_tokens":%d,"output_tokens":3}`, tokens/2, tokens/2)
		if pieces = []string{`{"id":"msg_1","type":"message","role":"assistant","content":[{"type":"text","text":"so it is"}],"usage":` + usage + `}`}; asked.Stream {
			pieces = []string{
				fmt.Sprintf(event, "message_start", `{"type":"message_start","message":{"id":"msg_1","role":"assistant","content":[]}}`),
				fmt.Sprintf(event, "content_block_delta", `{"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":"so it is"}}`),
				fmt.Sprintf(event, "message_delta", `{"type":"message_delta","delta":{"stop_reason":"end_turn"},"usage":`+usage+`}`),
				fmt.Sprintf(event, "message_stop", `{"type":"message_stop"}`),
			}
		}
	case "/api/chat":
		contentType = "application/x-ndjson"
		pieces = []string{
			`{"message":{"role":"assistant","content":"so it is"},"done":false}` + "\n",
			fmt.Sprintf(`{"message":{"role":"assistant","content":""},"done":true,"prompt_eval_count":%d}`+"\n", tokens),
		}
	default:
		pieces = []string{`{"object":"list","data":[{"object":"embedding","index":0,"embedding":[0.5]}],"usage":{"prompt_tokens":5}}`}
	}
	if len(pieces) == 1 {
		contentType = "application/json"
	}
	w.Header().Set("Content-Type", contentType)
	for _, piece := range pieces {
		if _, err := io.WriteString(w, piece); err != nil {
			return // the client has left
		}
		_ = http.NewResponseController(w).Flush()
		time.Sleep(time.Millisecond)
	}
}

// counter counts the bytes written to it.
type counter int64

func (c *counter) Write(p []byte) (int, error) {
	*c += counter(len(p))
	return len(p), nil
}
