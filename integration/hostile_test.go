package integration

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"hash/crc64"
	"io"
	"io/fs"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prefix-affinity/caddy/integration/engine"
	"github.com/prefix-affinity/caddy/integration/harness"
)

// twins is a site that has the same upstream behind prefix_affinity and, for
// requests with a header Stock, behind least_conn.
type twins struct {
	*site

	client *http.Client
}

func newTwins(t *testing.T, upstream string) *twins {
	t.Helper()
	w := &twins{client: &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 64}}}
	w.site = newSiteOf(t, "@stock header Stock *\n\thandle @stock {\n\t\t"+proxyTo(upstream, "lb_policy least_conn")+"\n\t}\n\thandle {\n\t\t"+proxyTo(upstream, policy("max_body 1MiB"))+"\n\t}")
	t.Cleanup(w.client.CloseIdleConnections)
	return w
}

// sent is a request of which only the body matters.
type sent struct {
	name, path                 string
	contentType, encoding, tag string
	chunked                    bool
	length                     int64
	body                       func() io.Reader
}

func text(name, body string) sent {
	return sent{
		name: name, path: chatPath, contentType: "application/json", length: int64(len(body)),
		body: func() io.Reader { return strings.NewReader(body) },
	}
}

// compare sends a request both ways; all that the client gets must be the same.
func (w *twins) compare(t *testing.T, s *sent) {
	t.Helper()
	var answers [2]string
	for i := range answers {
		req, err := http.NewRequest(http.MethodPost, w.URL+s.path, s.body())
		if err != nil {
			t.Fatal(err)
		}
		req.ContentLength = s.length
		if s.chunked {
			req.ContentLength = -1
		}
		req.Header.Set("Content-Type", s.contentType)
		req.Header.Set("Tag", s.tag)
		if s.encoding != "" {
			req.Header.Set("Content-Encoding", s.encoding)
		}
		if i == 1 {
			req.Header.Set("Stock", "1")
		}
		res, err := w.client.Do(req)
		if err != nil {
			t.Errorf("%s: %v", s.name, err)
			return
		}
		body, err := io.ReadAll(res.Body)
		_ = res.Body.Close()
		if decided := res.Header.Get("X-Prefix-Affinity") != ""; decided == (i == 1) {
			t.Errorf("%s: went the wrong way", s.name)
		}
		answers[i] = fmt.Sprintf("status %d, %s: %v, %q", res.StatusCode, res.Header.Get("Content-Type"), err, body)
	}
	if answers[0] != answers[1] {
		t.Errorf("%s: %.300s, with least_conn %.300s", s.name, answers[0], answers[1])
	}
}

var crc = crc64.MakeTable(crc64.ISO)

// mirror answers with what it has received.
func mirror(w http.ResponseWriter, r *http.Request) {
	sum := crc64.New(crc)
	n, err := io.Copy(sum, r.Body)
	fmt.Fprintf(w, "%s: %d bytes, %x, %v, %s, %s", r.URL, n, sum.Sum64(), err, r.Header.Get("Content-Encoding"), r.TransferEncoding)
}

// literals returns the texts in a package's tests: what its tests and fuzzers
// start from, and what fuzzing has found.
func literals(t *testing.T, dir string) (all []string) {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(dir, "*_test.go"))
	if err != nil || len(files) == 0 {
		t.Fatalf("no tests in %s: %v", dir, err)
	}
	for _, file := range files {
		tree, err := parser.ParseFile(token.NewFileSet(), file, nil, parser.SkipObjectResolution)
		if err != nil {
			t.Fatal(err)
		}
		ast.Inspect(tree, func(n ast.Node) bool {
			if l, ok := n.(*ast.BasicLit); ok && l.Kind == token.STRING {
				if text, err := strconv.Unquote(l.Value); err == nil && len(text) > 8 {
					all = append(all, text)
				}
			}
			return true
		})
	}
	found := 0
	err = filepath.WalkDir(filepath.Join(dir, "testdata", "fuzz"), func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		file, err := os.ReadFile(path)
		for line := range strings.Lines(string(file)) {
			_, value, ok := strings.Cut(strings.TrimSuffix(line, ")\n"), "(")
			if text, err := strconv.Unquote(value); ok && err == nil {
				all, found = append(all, text), found+1
			}
		}
		return err
	})
	if err != nil || found == 0 {
		t.Fatalf("no corpus in %s: %v", dir, err)
	}
	return all
}

// in lets several goroutines do something n times in all.
func in(n int, do func(i int)) {
	var wg sync.WaitGroup
	var next atomic.Int64
	for range 8 {
		wg.Go(func() {
			for i := int(next.Add(1)) - 1; i < n; i = int(next.Add(1)) - 1 {
				do(i)
			}
		})
	}
	wg.Wait()
}

// Whatever the body, it arrives as it does with least_conn, and so does the answer.
func TestHostileBodies(t *testing.T) {
	upstream := httptest.NewServer(http.HandlerFunc(mirror))
	t.Cleanup(upstream.Close)
	w := newTwins(t, upstream.Listener.Addr().String())
	corpus := literals(t, filepath.Join("..", "prefixhash"))

	t.Run("corpus", func(t *testing.T) {
		in(len(corpus), func(i int) {
			s := text(fmt.Sprintf("%.60q", corpus[i]), corpus[i])
			w.compare(t, &s)
		})
		t.Logf("%d bodies", len(corpus))
	})
	t.Run("random", func(t *testing.T) {
		n := 1000
		if long {
			n = 10_000
		}
		in(n, func(i int) {
			s := randomBody(rand.New(rand.NewPCG(uint64(i), 1)), corpus)
			s.name = fmt.Sprintf("seed %d", i)
			w.compare(t, &s)
		})
		t.Logf("%d bodies", n)
	})
	t.Run("bombs", func(t *testing.T) {
		all := bombs()
		for i := range all {
			for _, chunked := range []bool{false, true} {
				all[i].chunked = chunked
				w.compare(t, &all[i])
			}
		}
		t.Logf("%d bodies", 2*len(all))
	})
	w.settled(t)
}

func randomBody(rng *rand.Rand, corpus []string) sent {
	pick := func() []byte { return []byte(corpus[rng.IntN(len(corpus))]) }
	var body []byte
	switch rng.IntN(6) {
	case 0:
		body = randomBytes(rng, rng.IntN(8<<10))
	case 1:
		body = append([]byte(`{"messages":[`), randomBytes(rng, rng.IntN(1<<10))...)
	case 2:
		body = pick()
		body = body[:rng.IntN(len(body))]
	case 3:
		a, b := pick(), pick()
		body = append(a[:rng.IntN(len(a))], b[rng.IntN(len(b)):]...)
	default:
		body = pick()
		for range 1 + rng.IntN(20) {
			body[rng.IntN(len(body))] = byte(rng.Uint32())
		}
	}
	s := text("", string(body))
	s.chunked = rng.IntN(2) == 0
	s.path = []string{chatPath, "/", "/v1/completions", "/v1/messages", "/v1/responses", "/api/chat", "/generate", "/infill"}[rng.IntN(8)]
	if rng.IntN(3) == 0 {
		s.contentType = []string{"", "text/plain", "application/x-ndjson", "application/json; charset=utf-16", "multipart/form-data; boundary=x", "a/b/c;;=", "\t"}[rng.IntN(7)]
		s.encoding = []string{"", "gzip", "identity", "br, gzip"}[rng.IntN(4)]
	}
	return s
}

func randomBytes(rng *rand.Rand, n int) []byte {
	b := make([]byte, 0, n+8)
	for len(b) < n {
		b = binary.LittleEndian.AppendUint64(b, rng.Uint64())
	}
	return b[:n]
}

// bombs are small to write and large to read.
func bombs() []sent {
	const n = 1_000_000
	repeat := strings.Repeat
	var keys strings.Builder
	for i := range n {
		fmt.Fprintf(&keys, `"%d":0,`, i)
	}
	all := []sent{
		text("depth/lists", `{"messages":`+repeat("[", n)+repeat("]", n)+`}`),
		text("depth/lists never closed", repeat("[", n)),
		text("depth/objects", `{"messages":["x"],"tools":[`+repeat(`{"a":`, n/4)+"1"+repeat("}", n/4)+`]}`),
		text("width/messages", `{"messages":[`+repeat(`{},`, n)+`{}]}`),
		text("width/prompts", `{"prompt":[`+repeat(`"",`, n)+`"x"]}`),
		text("width/numbers", `{"prompt":[`+repeat("1,", n)+"1]}"),
		text("keys/top", `{`+keys.String()+`"messages":["x"]}`),
		text("keys/in a tool", `{"messages":["x"],"tools":[{"name":"f","parameters":{`+keys.String()+`"x":0}}]}`),
		text("keys/equal", `{`+repeat(`"messages":["x"],`, n/4)+`"messages":["y"]}`),
		text("strings/escapes", `{"prompt":"`+repeat(`\ud83d`, n)+`"}`),
		text("strings/never closed", `{"prompt":"`+repeat(`\\`, n)),
		text("numbers/one", `{"prompt":[`+repeat("1", n)+`]}`),
	}
	for _, size := range []int64{1<<20 - 1, 1 << 20, 1<<20 + 1, 100 << 20} { // around max_body and far beyond
		const head, tail = `{"messages":[{"role":"user","content":"`, `"}]}`
		all = append(all, sent{
			name: fmt.Sprintf("strings/%d bytes", size), path: chatPath, contentType: "application/json", length: size,
			body: func() io.Reader {
				return io.MultiReader(strings.NewReader(head), io.LimitReader(endless("say "), size-int64(len(head+tail))), strings.NewReader(tail))
			},
		})
	}
	return all
}

// endless repeats a text.
type endless string

func (e endless) Read(p []byte) (n int, err error) {
	for n+len(e) <= len(p) {
		n += copy(p[n:], e)
	}
	if n == 0 {
		n = copy(p, e)
	}
	return n, nil
}

// Whatever the engine answers, the client gets it as it does with least_conn.
func TestHostileAnswers(t *testing.T) {
	answers := literals(t, filepath.Join("..", "selector", "signal"))
	upstream := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		var i int
		var kind string
		if _, err := fmt.Sscan(r.Header.Get("Tag"), &i, &kind); err != nil {
			t.Error(err)
		}
		w.Header().Set("Content-Type", kind)
		// ORCA and the like must be a header's value at least.
		w.Header().Set("Endpoint-Load-Metrics", strings.Map(func(r rune) rune { return max(r, ' ') }, answers[i]))
		half := len(answers[i]) / 2
		_, _ = io.WriteString(w, answers[i][:half])
		_ = http.NewResponseController(w).Flush()
		_, _ = io.WriteString(w, answers[i][half:])
	}))
	t.Cleanup(upstream.Close)
	w := newTwins(t, upstream.Listener.Addr().String())
	kinds := []string{"application/json", "text/event-stream", "application/x-ndjson"}
	in(len(answers)*len(kinds), func(n int) {
		s := text(fmt.Sprintf("%.60q", answers[n/len(kinds)]), chat(true, "hello"))
		s.tag = fmt.Sprint(n/len(kinds), " ", kinds[n%len(kinds)])
		w.compare(t, &s)
	})
	t.Logf("%d answers", len(answers)*len(kinds))
	w.settled(t)
}

// truthful is an engine with a cache for everything, that reports how much of a
// prompt it has seen at the start of an earlier one.
type truthful struct {
	mu   sync.Mutex
	seen [][]byte
}

func (e *truthful) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(r.Body)
	if err != nil {
		return
	}
	cached := 0
	e.mu.Lock()
	for _, old := range e.seen {
		n := 0
		for n < min(len(old), len(body)) && old[n] == body[n] {
			n++
		}
		cached = max(cached, n)
	}
	e.seen = append(e.seen, body)
	e.mu.Unlock()
	w.Header().Set("Content-Type", "application/json")
	fmt.Fprintf(w, `{"choices":[{"message":{"content":"yes"}}],"usage":{"prompt_tokens":%d,"prompt_tokens_details":{"cached_tokens":%d}}}`, len(body)/4, cached/4)
}

// collidingPrompts are two prompts of token ids that xxhash64 can't tell apart
// under half of its seeds: bit 63 of a word of 8 bytes flipped, and 2^30*P1/P2
// taken from the word 32 bytes later.
func collidingPrompts(n uint64) (a, b string) {
	const p1, p2 = 0x9e3779b185ebca87, 0xc2b2ae3d27d4eb4f
	inverse := uint64(1)
	for range 6 {
		inverse *= 2 - p2*inverse
	}
	difference := uint64(1) << 30
	difference *= p1
	difference *= inverse
	words := make([]uint64, 300)
	for i := range words {
		words[i] = uint64(i)*0x0101010101010101 + n<<20
	}
	prompt := func() string {
		var ids strings.Builder
		for _, w := range words {
			fmt.Fprintf(&ids, ",%d,%d", w&0xffffffff, w>>32)
		}
		// The text lets the other words begin where xxhash64's do.
		return `{"model":"m","prompt":["123456"` + ids.String() + `]}`
	}
	a = prompt()
	at := 40
	words[at] ^= 1 << 63
	words[at+4] -= difference
	return a, prompt()
}

// Prompts built to collide misplace nobody, and what the engines say of them
// moves no estimate that others depend on.
func TestCollidingPrompts(t *testing.T) {
	var addrs []string
	for range 2 {
		upstream := httptest.NewServer(new(truthful))
		t.Cleanup(upstream.Close)
		addrs = append(addrs, upstream.Listener.Addr().String())
	}
	s := newSite(t, strings.Join(addrs, " "), policy())
	victims := newConversations(8)
	everyone(t, s, victims)
	everyone(t, s, victims)
	const pairs = 200
	collided := 0
	for n := range uint64(pairs) {
		a, b := collidingPrompts(n)
		s.ask(t, a)
		// The two are alike up to word 40 of 300.
		if d := s.ask(t, b); d.matched > d.prompt/5 {
			collided++
		}
		if n%4 == 0 { // the sender may go on about it
			s.ask(t, b)
			s.ask(t, a)
		}
	}
	if collided > 0 {
		t.Errorf("%d of %d pairs collide", collided, pairs)
	}
	for _, u := range s.upstreams(t, addrs...) {
		if u.CacheCapacityTokens != 0 || u.Generation != 0 {
			t.Errorf("%s has a capacity of %d tokens and has restarted %d times, it is said", u.Address, u.CacheCapacityTokens, u.Generation)
		}
	}
	if stayed := everyone(t, s, victims); stayed != len(victims) {
		t.Errorf("%d of %d conversations of others stayed where they were", stayed, len(victims))
	}
}

// Clients that leave a queue and come back, or have the engine truncate their
// prompts, don't make its cache look small.
func TestAbsentPromptsAreNoEvidence(t *testing.T) {
	fleet := harness.TestFleet(t, 1, quick)
	s := newSite(t, fleet.Upstreams(), policy())
	victims := newConversations(4)
	everyone(t, s, victims)
	everyone(t, s, victims)
	for i := range 40 {
		body := chat(true, words(fmt.Sprintf("left %d", i), 3000))
		if err := fleet[0].SetFaults(engine.Faults{Hang: true}); err != nil {
			t.Fatal(err)
		}
		req, err := http.NewRequest(http.MethodPost, s.URL+chatPath, strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Content-Type", "application/json")
		res, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		_ = res.Body.Close() // with the headers of a stream, and nothing else
		eventually(t, "the engine to know", func() bool { s := fleet[0].Stats(); return s.Waiting+s.Running == 0 })
		if err := fleet[0].SetFaults(engine.Faults{}); err != nil {
			t.Fatal(err)
		}
		s.quiet(t)
		if d := s.ask(t, body); d.matched != 0 {
			t.Fatalf("a prompt that was never computed is believed to be cached: %+v", d)
		}
	}
	if u := s.upstreams(t, fleet[0].Addr())[0]; u.CacheCapacityTokens != 0 || u.Generation != 0 {
		t.Errorf("%+v", u)
	}
	if stayed := everyone(t, s, victims); stayed != len(victims) {
		t.Errorf("%d of %d conversations of others stayed where they were", stayed, len(victims))
	}
}

// Senders that announce 8 MiB and send 1 KB take memory for what they sent.
func TestStingySenders(t *testing.T) {
	upstream := httptest.NewServer(http.HandlerFunc(mirror))
	t.Cleanup(upstream.Close)
	s := newProcess(t, proxyTo(upstream.Listener.Addr().String(), policy()))
	for i := range 200 {
		s.ask(t, chat(false, words(fmt.Sprint(i), 2000)))
	}
	before := s.footprint(t)
	const senders = 500
	head := "POST " + chatPath + " HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 8388608\r\n\r\n"
	var conns []net.Conn
	for range senders {
		c, err := net.Dial("tcp", s.addr)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		conns = append(conns, c)
		if _, err := io.WriteString(c, head+`{"messages":["`+strings.Repeat("x", 1010)); err != nil {
			t.Fatal(err)
		}
	}
	var after footprint
	eventually(t, "all senders to be attended to", func() bool {
		after = s.footprint(t)
		return after.goroutines >= before.goroutines+senders
	})
	t.Logf("%+v before, %+v with %d senders", before, after, senders)
	rss := 20.0
	if harness.Race { // the detector has memory of its own
		rss *= 6
	}
	if after.rssMB > before.rssMB+rss || after.heapMB > before.heapMB+45 { // 64 KiB each
		t.Errorf("the memory grew from %+v to %+v", before, after)
	}
	for _, c := range conns {
		_ = c.Close()
	}
	s.settled(t)
}

// Unique prompts without end take the memory that README.md tells, and no more.
func TestUniquePromptsAreBounded(t *testing.T) {
	prompts, index, bytes := 3000, 1<<16, 16<<10
	if long {
		prompts, index = 100_000, 2<<20
	}
	var addrs []string
	for range 4 {
		upstream := httptest.NewServer(http.HandlerFunc(mirror))
		t.Cleanup(upstream.Close)
		addrs = append(addrs, upstream.Listener.Addr().String())
	}
	s := newProcess(t, proxyTo(strings.Join(addrs, " "), policy(fmt.Sprintf("index_size %d", index))))
	client := &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 8}}
	defer client.CloseIdleConnections()
	ask := func(name string) {
		body := chat(false, words(name, bytes))
		send(t, client, s.URL+chatPath, strings.NewReader(body), int64(len(body)))
	}
	in(200, func(i int) { ask(fmt.Sprintf("first %d", i)) })
	before := s.footprint(t)
	in(prompts, func(i int) { ask(fmt.Sprintf("prompt %d", i)) })
	after := s.footprint(t)
	blocks := 0
	for _, u := range s.upstreams(t, addrs...) {
		blocks += u.IndexBlocks
	}
	t.Logf("%d prompts of %d KB: %d of %d blocks, heap %.1f to %.1f MB, memory %.1f to %.1f MB",
		prompts, bytes>>10, blocks, index, before.heapMB, after.heapMB, before.rssMB, after.rssMB)
	if blocks > index || blocks < index*9/10 {
		t.Errorf("%d blocks in an index of %d", blocks, index)
	}
	// Up to 100 bytes a block, and in the process half of that again, which the
	// collector leaves free, beside what the bodies in flight take.
	most := float64(index) * 100 / (1 << 20)
	if after.heapMB > before.heapMB+most+5 || after.rssMB > before.rssMB+1.5*most+25 {
		t.Errorf("the memory grew from %+v to %+v, want %.0f MB at most", before, after, most)
	}
}

// Names that clients choose are no names of anything that is kept for long.
func TestManyNames(t *testing.T) {
	n := 400
	if long {
		n = 10_000
	}
	upstream := httptest.NewServer(http.HandlerFunc(mirror))
	t.Cleanup(upstream.Close)
	live := upstream.Listener.Addr().String()
	port := netip.MustParseAddrPort(live).Port()
	// As many addresses as requests, of which only one has somebody listening.
	var made atomic.Uint32
	address := func() netip.AddrPort {
		i := made.Add(1)
		return netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 1 + byte(i>>16), byte(i >> 8), byte(i)}), port)
	}
	names := newNameServer(t)
	names.next = func() []netip.AddrPort {
		return []netip.AddrPort{netip.MustParseAddrPort(live), address(), address()}
	}
	options := policy("scope {http.request.header.Authorization}", "index_size 4096", "fallback first")
	s := newSiteOf(t, fmt.Sprintf("handle /named/* {\n\t\treverse_proxy {\n\t\t\tdynamic a {\n\t\t\t\tname many.test\n\t\t\t\tport %d\n\t\t\t\trefresh 1ms\n\t\t\t\tresolvers %s\n\t\t\t\tversions ipv4\n\t\t\t}\n\t\t\tlb_retries 3\n\t\t\t%s\n\t\t}\n\t}\n\thandle /told/* {\n\t\t%s\n\t}\n\thandle {\n\t\t%s\n\t}",
		port, names.conn.LocalAddr(), options, proxyTo("{http.request.header.Upstream}", options), proxyTo(live, options)))

	client := &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 8}}
	defer client.CloseIdleConnections()
	ask := func(i int, path string) int {
		body := fmt.Sprintf(`{"model":"model %d","messages":[{"role":"user","content":%q}]}`, i, words(fmt.Sprint("words ", i%10), 1000))
		req, err := http.NewRequest(http.MethodPost, s.URL+path+chatPath, strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Content-Type", "application/json")
		req.Header.Set("Authorization", fmt.Sprint("Bearer ", i))
		req.Header.Set("X-Session-Id", fmt.Sprint("session ", i))
		req.Header.Set("Upstream", address().String())
		res, err := client.Do(req)
		if err != nil {
			t.Error(err)
			return 0
		}
		_, err = io.Copy(io.Discard, res.Body)
		if err := errors.Join(err, res.Body.Close()); err != nil {
			t.Error(err)
		}
		return res.StatusCode
	}
	// series counts the policy's, and the upstreams among their labels.
	series := func() (n int, upstreams map[string]bool) {
		metrics, err := s.Metrics()
		if err != nil {
			t.Fatal(err)
		}
		upstreams = make(map[string]bool)
		for name, family := range metrics {
			if !strings.HasPrefix(name, "caddy_prefix_affinity_") {
				continue
			}
			n += len(family.GetMetric())
			for _, m := range family.GetMetric() {
				for _, label := range m.GetLabel() {
					if label.GetName() == "upstream" {
						upstreams[label.GetValue()] = true
					}
				}
			}
		}
		return n, upstreams
	}

	ask(0, "")
	ask(0, "/told")
	before, _ := series()
	in(n, func(i int) {
		if status := ask(i, ""); status != http.StatusOK {
			t.Errorf("status %d", status)
		}
		ask(i, "/told") // nobody is there
	})
	after, upstreams := series()
	if after > before || len(upstreams) != 2 {
		t.Errorf("%d series before, %d after %d models, scopes, sessions and upstreams: %v", before, after, n, upstreams)
	}
	if u := s.upstreams(t, live)[0]; u.IndexBlocks > 4096 {
		t.Errorf("%d blocks in an index of 4096", u.IndexBlocks)
	}

	in(n, func(i int) {
		if status := ask(i, "/named"); status != http.StatusOK {
			t.Errorf("status %d", status)
		}
	})
	time.Sleep(1100 * time.Millisecond) // whatever was a candidate within the last second is kept
	if status := ask(n, "/named"); status != http.StatusOK {
		t.Errorf("status %d", status)
	}
	after, upstreams = series()
	var known []json.RawMessage
	s.admin(t, http.MethodGet, "upstreams", "", &known)
	t.Logf("%d requests and %d addresses: %d upstreams are known, %d in %d series", 3*n, made.Load(), len(known), len(upstreams), after)
	const most = 1024 + 8 // and the candidates of the requests in flight
	if len(known) > most || len(upstreams) > most+1 {
		t.Errorf("%d upstreams are known, %d have series", len(known), len(upstreams))
	}
	s.settled(t)
}
