package integration

import (
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/prefix-affinity/caddy/integration/engine"
	"github.com/prefix-affinity/caddy/integration/harness"
)

// asSession sends a body with a session header and returns what was decided.
func (s *site) asSession(t *testing.T, header, id, path, body string) string {
	t.Helper()
	return s.explained(t, http.MethodPost, header, id, path, body)
}

// explained returns how a request was decided.
func (s *site) explained(t *testing.T, method, header, id, path, body string) string {
	t.Helper()
	req, err := http.NewRequest(method, s.URL+path, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/json")
	if header != "" {
		req.Header.Set(header, id)
	}
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	if _, err := io.Copy(io.Discard, res.Body); err != nil || res.StatusCode != http.StatusOK {
		t.Errorf("status %d, %v", res.StatusCode, err)
	}
	return res.Header.Get("X-Prefix-Affinity")
}

// chosen returns the upstream of an explanation.
func chosen(explanation string) string {
	_, rest, _ := strings.Cut(explanation, `upstream="`)
	upstream, _, _ := strings.Cut(rest, `"`)
	return upstream
}

// A session whose prompts are too short to match stays together, by each of the
// names that clients give it; other sessions are elsewhere.
func TestSessionsStayTogether(t *testing.T) {
	fleet := harness.TestFleet(t, 4, fast)
	s := newSite(t, fleet.Upstreams(), policy())
	short := func(i int) string { return chat(true, fmt.Sprintf("question %d", i)) }
	for _, header := range []string{"X-Claude-Code-Session-Id", "session-id", "X-Session-Id", "x-session-affinity", ""} {
		used := map[string]bool{}
		for session := range 8 {
			id := fmt.Sprintf("%s-%d", header, session)
			var at string
			for i := range 5 {
				body := short(i)
				if header == "" {
					body = strings.Replace(body, `"model":"m"`, fmt.Sprintf(`"model":"m","prompt_cache_key":%q`, id), 1)
				}
				explanation := s.asSession(t, header, id, "/v1/chat/completions", body)
				if i == 0 {
					at = chosen(explanation)
					used[at] = true
				} else if chosen(explanation) != at || !strings.HasPrefix(explanation, "session;") {
					t.Errorf("%s: request %d: %s, want session and %s", id, i, explanation, at)
				}
			}
		}
		if len(used) < 2 {
			t.Errorf("%q: all sessions are on %v", header, used)
		}
	}
}

// storing is an API whose answers are kept under an id.
type storing struct {
	path     string
	question string // body of a request, from stream and what is asked
	followUp string // the same, going on from an id
	bare     string // a follow-up that asks nothing new; empty where there is none
	answer   string // body, from an id
	events   string // the same as a stream
}

var storingAPIs = map[string]storing{
	"responses": {
		"/v1/responses",
		`{"model":"m","stream":%t,"input":%q}`,
		`{"model":"m","stream":%t,"input":%q,"previous_response_id":%q}`,
		`{"model":"m","stream":%t,"previous_response_id":%q}`,
		`{"id":%q,"object":"response","status":"completed","output":[]}`,
		event(`{"type":"response.created","response":{"id":%[1]q,"object":"response"}}`) + event(`{"type":"response.completed","response":{"id":%[1]q,"object":"response"}}`),
	},
	"messages": {
		"/v1/messages",
		`{"model":"m","stream":%t,"max_tokens":9,"messages":[{"role":"user","content":%q}]}`,
		`{"model":"m","stream":%t,"max_tokens":9,"messages":[{"role":"user","content":%q}],"thread":{"type":"continue","previous_message_id":%q}}`,
		"",
		`{"id":%q,"type":"message","role":"assistant","content":[{"type":"text","text":"yes"}]}`,
		event(`{"type":"message_start","message":{"id":%[1]q,"type":"message","content":[]}}`) + event(`{"type":"message_stop"}`),
	},
}

// serve answers with the ids name_1, name_2 and so on, and remembers nothing.
func (api storing) serve(name string, stream bool) http.HandlerFunc {
	var count atomic.Int64
	return func(w http.ResponseWriter, _ *http.Request) {
		id := fmt.Sprintf("%s_%d", name, count.Add(1))
		if !stream {
			w.Header().Set("Content-Type", "application/json")
			fmt.Fprintf(w, api.answer, id)
			return
		}
		w.Header().Set("Content-Type", "text/event-stream")
		fmt.Fprintf(w, api.events, id)
	}
}

// A request that continues a stored answer goes to the upstream that stored it,
// and when that is gone to the fallback with a reason of its own.
func TestStoredAnswersGoBack(t *testing.T) {
	for name, api := range storingAPIs {
		for _, stream := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s/stream=%t", name, stream), func(t *testing.T) { storedAnswersGoBack(t, api, stream) })
		}
	}
}

func storedAnswersGoBack(t *testing.T, api storing, stream bool) {
	var addrs []string
	var ups []*recorder
	for i := range 3 {
		up := newRecorder(t, api.serve(fmt.Sprint("at", i), stream))
		ups, addrs = append(ups, up), append(addrs, up.addr())
	}
	s := newSite(t, strings.Join(addrs, " "), policy()+"fail_duration 1m\n\t\tlb_retries 2")
	ask := func(format string, args ...any) string {
		return s.asSession(t, "", "", api.path, fmt.Sprintf(format, append([]any{stream}, args...)...))
	}
	var at []int
	for i := range 9 {
		at = append(at, slices.Index(addrs, chosen(ask(api.question, fmt.Sprintf("start %d", i)))))
	}
	seen := [3]int{}
	for i, k := range at {
		seen[k]++ // each upstream's answers are numbered
		explanation := ask(api.followUp, fmt.Sprintf("go on %d", i), fmt.Sprintf("at%d_%d", k, seen[k]))
		if chosen(explanation) != addrs[k] || !strings.HasPrefix(explanation, "session;") {
			t.Errorf("follow-up of an answer of upstream %d: %s", k, explanation)
		}
	}
	first := fmt.Sprintf("at%d_1", at[0])
	// One that brings nothing of its own has no prompt, but a place.
	if api.bare != "" {
		if bare := ask(api.bare, first); chosen(bare) != addrs[at[0]] || !strings.HasPrefix(bare, "session;") {
			t.Errorf("a follow-up without input: %s", bare)
		}
	}
	// Whatever is done with one is done there.
	if api.path == "/v1/responses" {
		for _, r := range []struct{ method, path, body string }{
			{http.MethodGet, "", ""},
			{http.MethodDelete, "", ""},
			{http.MethodGet, "/input_items", ""},
			{http.MethodPost, "/cancel", ""},
			{http.MethodPost, "/cancel", "{}"},
		} {
			for range 3 {
				explanation := s.explained(t, r.method, "", "", api.path+"/"+first+r.path, r.body)
				if chosen(explanation) != addrs[at[0]] || !strings.HasPrefix(explanation, "session;") {
					t.Errorf("%s of %s: %s", r.method, r.path, explanation)
				}
			}
		}
	}
	ups[at[0]].Close()
	for range 2 {
		explanation := ask(api.followUp, "and now", first)
		if chosen(explanation) == addrs[at[0]] || !strings.HasPrefix(explanation, "gone;") {
			t.Errorf("follow-up after the upstream is gone: %s", explanation)
		}
	}
}

// Tenants that must not share a prompt don't, nor do they see that others have it.
func TestScopesDontShare(t *testing.T) {
	fleet := harness.TestFleet(t, 1, engine.Config{PrefillRate: 1e6})
	s := newSite(t, fleet.Upstreams(), policy("scope {http.request.header.X-Tenant}"))
	prompt := chat(true, words("shared", 4000))
	for i, tenant := range []string{"a", "b", "a", "b"} {
		explanation := s.asSession(t, "X-Tenant", tenant, "/v1/chat/completions", prompt)
		if want := [...]string{"cold;", "cold;", "affinity;", "affinity;"}[i]; !strings.HasPrefix(explanation, want) {
			t.Errorf("request %d of tenant %s: %s, want %s", i, tenant, explanation, want)
		}
	}
	// A misspelt placeholder must not put all tenants together.
	s.reload(t, fleet.Upstreams(), policy("scope {http.request.headers.X-Tenant}"))
	for _, tenant := range []string{"a", "b"} {
		if explanation := s.asSession(t, "X-Tenant", tenant, "/v1/chat/completions", prompt); !strings.HasPrefix(explanation, "no_key;") {
			t.Errorf("tenant %s without a scope that can be told: %s", tenant, explanation)
		}
	}
}
