package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prefix-affinity/caddy/integration/engine"
)

// traffic is a number of clients who send one request after the other, of all
// kinds.
type traffic struct {
	url     string
	clients []*client
	protos  []*http.Client
	config  atomic.Int32 // the one that Caddy runs
	ended   atomic.Bool
	wg      sync.WaitGroup

	requests, aborted, failed, broken, wrong atomic.Int64

	mu     sync.Mutex
	causes map[string]int // of failures
	kinds  map[string]int
}

func newTraffic(url string, n int, seed uint64) *traffic {
	h2c := new(http.Protocols)
	h2c.SetUnencryptedHTTP2(true)
	t := &traffic{url: url, causes: make(map[string]int), kinds: make(map[string]int), protos: []*http.Client{
		{Transport: &http.Transport{MaxIdleConnsPerHost: n}},
		{Transport: &http.Transport{Protocols: h2c}},
	}}
	for i := range n {
		t.clients = append(t.clients, &client{
			traffic: t, name: fmt.Sprintf("client-%d", i), http: t.protos[i%len(t.protos)],
			rand: rand.New(rand.NewPCG(seed, uint64(i)+2)), // #nosec G115 G404 -- to be repeatable
		})
	}
	return t
}

// once has every kind of request sent once.
func (t *traffic) once() {
	for i := range kinds {
		t.clients[i%len(t.clients)].send(kinds[i])
	}
	t.hangUp()
}

func (t *traffic) start() {
	for _, c := range t.clients {
		t.wg.Go(func() {
			for !t.ended.Load() {
				c.send(c.any())
			}
		})
	}
}

// stop waits for the last answers.
func (t *traffic) stop() {
	t.ended.Store(true)
	t.wg.Wait()
	t.hangUp()
}

func (t *traffic) hangUp() {
	for _, c := range t.protos {
		c.CloseIdleConnections()
	}
}

func (t *traffic) String() string {
	n := t.requests.Load()
	return fmt.Sprintf("%d requests %v: %d aborted by their clients, %d not answered, %d answers cut off, %d wrong; %v",
		n, t.kinds, t.aborted.Load(), t.failed.Load(), t.broken.Load(), t.wrong.Load(), t.causes)
}

// judge fails where answers are wrong, or so many are missing that the traffic
// was none.
func (t *traffic) judge() error {
	if n := t.wrong.Load(); n > 0 {
		return fmt.Errorf("%d wrong answers", n)
	}
	if lost, n := t.failed.Load()+t.broken.Load(), t.requests.Load(); lost*10 > n {
		return fmt.Errorf("%d of %d requests failed: more than the faults explain", lost, n)
	}
	return nil
}

// kind is a way to use the API.
type kind struct {
	name, path string
	weight     int
	stream     bool
	abort      bool                               // the client leaves at some time
	body       func(c *client) (any, http.Header) // nil: GET
}

var kinds = []kind{
	{name: "chat, streamed", path: chat, weight: 40, stream: true, body: (*client).turn},
	{name: "chat", path: chat, weight: 15, body: (*client).turn},
	{name: "chat, aborted", path: chat, weight: 10, stream: true, abort: true, body: (*client).turn},
	{name: "with an image", path: chat, weight: 4, stream: true, body: (*client).image},
	{name: "completion", path: "/v1/completions", weight: 6, stream: true, body: (*client).completion},
	{name: "Responses", path: "/v1/responses", weight: 6, stream: true, body: (*client).response},
	{name: "Messages", path: "/v1/messages", weight: 6, stream: true, body: (*client).turn},
	{name: "Ollama", path: "/api/chat", weight: 4, stream: true, body: (*client).turn},
	{name: "big body", path: "/v1/messages", weight: 1, body: (*client).big},
	{name: "embeddings", path: "/v1/embeddings", weight: 4, body: (*client).embedding},
	{name: "models", path: "/v1/models", weight: 4},
}

const chat = "/v1/chat/completions"

// client is one of those who talk.
type client struct {
	traffic *traffic
	name    string
	http    *http.Client
	rand    *rand.Rand
	history []message
	talks   int // conversations begun
}

type message struct {
	Role    string `json:"role"`
	Content any    `json:"content"`
}

func (c *client) any() kind {
	sum := 0
	for _, k := range kinds {
		sum += k.weight
	}
	at := c.rand.IntN(sum)
	for _, k := range kinds {
		if at -= k.weight; at < 0 {
			return k
		}
	}
	panic("unreachable")
}

// turn is the next turn of a conversation, or the first of a new one. One of
// eight tenants' system prompts comes first.
func (c *client) turn() (any, http.Header) {
	if len(c.history) == 0 || len(c.history) > 16 || c.rand.IntN(20) == 0 {
		c.talks++
		c.history = []message{{"system", words(fmt.Sprintf("tenant %d", c.rand.IntN(8)), 4000)}}
	}
	if last := c.history[len(c.history)-1]; last.Role == "user" {
		c.history = append(c.history, message{"assistant", "so it is"})
	}
	c.history = append(c.history, message{"user", words(fmt.Sprintf("%s.%d.%d", c.name, c.talks, len(c.history)), 200+c.rand.IntN(2000))})
	header := http.Header{"Authorization": {"Bearer " + c.name[len(c.name)-1:]}}
	if c.rand.IntN(2) == 0 {
		header.Set("X-Session-Id", fmt.Sprintf("%s.%d", c.name, c.talks))
	}
	return map[string]any{"messages": c.history}, header
}

func (c *client) image() (any, http.Header) {
	data := words(fmt.Sprintf("%s image %d", c.name, c.rand.IntN(10)), 100_000)
	return map[string]any{"messages": []message{{"user", []any{
		map[string]any{"type": "text", "text": "What is this?"},
		map[string]any{"type": "image_url", "image_url": map[string]any{"url": "data:image/png;base64," + strings.ReplaceAll(data, " ", "+")}},
	}}}}, nil
}

func (c *client) completion() (any, http.Header) {
	return map[string]any{"prompt": words(fmt.Sprintf("document %d", c.rand.IntN(50)), 6000)}, nil
}

func (c *client) response() (any, http.Header) {
	return map[string]any{"instructions": words("tenant 1", 4000), "input": words(fmt.Sprint(c.rand.Int()), 500)}, nil
}

// big is longer than max_body.
func (c *client) big() (any, http.Header) {
	return map[string]any{"messages": []message{{"user", words(fmt.Sprint(c.rand.Int()), 1_500_000)}}}, nil
}

func (c *client) embedding() (any, http.Header) {
	return map[string]any{"input": words(fmt.Sprint(c.rand.Int()), 300)}, nil
}

// words makes n bytes of text that no other name begins with.
func words(name string, n int) string {
	return strings.Repeat(name+" says so. ", n/(len(name)+10)+1)[:n]
}

// send sends a request and reads the answer, or leaves.
func (c *client) send(k kind) {
	t := c.traffic
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	method, header := http.MethodGet, http.Header{}
	var body []byte
	stream := k.stream && c.rand.IntN(4) > 0
	if k.body != nil {
		method = http.MethodPost
		content, h := k.body(c)
		fields := content.(map[string]any)
		fields["model"], fields["stream"] = "simulated", stream
		if stream && strings.HasPrefix(k.path, "/v1/c") {
			fields["stream_options"] = map[string]any{"include_usage": true}
		}
		var err error
		if body, err = json.Marshal(fields); err != nil {
			panic(err) // plain values
		}
		if h != nil {
			header = h
		}
		header.Set("Content-Type", "application/json")
	}
	if k.abort {
		time.AfterFunc(time.Duration(c.rand.Int64N(int64(50*time.Millisecond))), cancel)
	}
	status, answer, err := exchange(ctx, c.http, method, t.url+k.path, header, body)
	t.requests.Add(1)
	t.mu.Lock()
	defer t.mu.Unlock()
	t.kinds[k.name]++
	switch {
	case ctx.Err() != nil:
		t.aborted.Add(1)
	case status == 0:
		t.failed.Add(1)
		t.causes[cause(err)]++
	case status != http.StatusOK:
		t.failed.Add(1)
		t.causes[fmt.Sprintf("status %d with config %d", status, t.config.Load())]++
	case err != nil, stream && k.path == chat && !bytes.HasSuffix(answer, []byte("data: [DONE]\n\n")):
		t.broken.Add(1)
	case stream && k.path == chat && c.rand.IntN(10) == 0:
		if want, got := expected(body), text(answer); got != want {
			t.wrong.Add(1)
			t.causes[fmt.Sprintf("%q instead of %q", got, want)]++
		}
	}
}

// exchange returns the answer to a request, or what came of it; status 0 if nothing did.
func exchange(ctx context.Context, client *http.Client, method, url string, header http.Header, body []byte) (int, []byte, error) {
	req, err := http.NewRequestWithContext(ctx, method, url, bytes.NewReader(body))
	if err != nil {
		return 0, nil, err
	}
	req.Header = header
	res, err := client.Do(req)
	if err != nil {
		return 0, nil, err
	}
	defer res.Body.Close()
	answer, err := io.ReadAll(res.Body)
	return res.StatusCode, answer, err
}

// cause puts an error without its addresses.
func cause(err error) string {
	for e := err; e != nil; e = errors.Unwrap(e) {
		err = e
	}
	return err.Error()
}

// expected is what an engine answers to a body.
func expected(body []byte) string {
	prompt, err := engine.Tokenize(chat, body)
	if err != nil {
		return err.Error()
	}
	return prompt.Answer(outputTokens)
}

// text puts a streamed answer together.
func text(events []byte) string {
	var b strings.Builder
	for event := range strings.SplitSeq(string(events), "\n\n") {
		var chunk struct {
			Choices []struct {
				Delta struct{ Content string }
			}
		}
		if json.Unmarshal([]byte(strings.TrimPrefix(event, "data: ")), &chunk) == nil && len(chunk.Choices) > 0 {
			b.WriteString(chunk.Choices[0].Delta.Content)
		}
	}
	return b.String()
}
