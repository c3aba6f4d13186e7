package integration

import (
	"fmt"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/prefix-affinity/caddy/integration/engine"
)

// asSession sends a body with a session header and returns what was decided.
func (s *site) asSession(t *testing.T, header, id, path, body string) string {
	t.Helper()
	req, err := http.NewRequest(http.MethodPost, s.URL+path, strings.NewReader(body))
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
	if res.StatusCode != http.StatusOK {
		t.Errorf("status %d", res.StatusCode)
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
	fleet := newFleet(t, 4, fast)
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

// responses answers as the Responses API does, and remembers nothing.
func responses(name string, stream bool, count *atomic.Int64) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		id := fmt.Sprintf("resp_%s_%d", name, count.Add(1))
		if !stream {
			w.Header().Set("Content-Type", "application/json")
			fmt.Fprintf(w, `{"id":%q,"object":"response","status":"completed","output":[]}`, id)
			return
		}
		w.Header().Set("Content-Type", "text/event-stream")
		fmt.Fprintf(w, "event: response.created\ndata: {\"type\":\"response.created\",\"response\":{\"id\":%q,\"object\":\"response\"}}\n\n", id)
		fmt.Fprintf(w, "event: response.completed\ndata: {\"type\":\"response.completed\",\"response\":{\"id\":%q,\"object\":\"response\"}}\n\n", id)
	}
}

// A request that continues a stored response goes to the upstream that stored
// it, and when that is gone to the fallback with a reason of its own.
func TestStoredResponsesGoBack(t *testing.T) {
	for _, stream := range []bool{false, true} {
		var counts [3]atomic.Int64
		var addrs []string
		var ups []*recorder
		for i := range 3 {
			up := newRecorder(t, responses(fmt.Sprint(i), stream, &counts[i]))
			ups, addrs = append(ups, up), append(addrs, up.addr())
		}
		s := newSite(t, strings.Join(addrs, " "), policy()+"fail_duration 1m\n\t\tlb_retries 2")
		ask := func(input, previous string) string {
			body := fmt.Sprintf(`{"model":"m","stream":%t,"input":%q}`, stream, input)
			if previous != "" {
				body = fmt.Sprintf(`{"model":"m","stream":%t,"previous_response_id":%q,"input":%q}`, stream, previous, input)
			}
			return s.asSession(t, "", "", "/v1/responses", body)
		}
		var at []int
		for i := range 9 {
			explanation := ask(fmt.Sprintf("start %d", i), "")
			for k, addr := range addrs {
				if addr == chosen(explanation) {
					at = append(at, k)
				}
			}
		}
		seen := [3]int64{}
		for i, k := range at {
			first := seen[k] + 1 // each upstream's answers are numbered
			explanation := ask(fmt.Sprintf("go on %d", i), fmt.Sprintf("resp_%d_%d", k, first))
			if chosen(explanation) != addrs[k] || !strings.HasPrefix(explanation, "session;") {
				t.Errorf("stream=%t: follow-up of a response of upstream %d: %s", stream, k, explanation)
			}
			seen[k]++
		}
		// One that brings nothing of its own has no prompt, but a place.
		bare := s.asSession(t, "", "", "/v1/responses", fmt.Sprintf(`{"model":"m","stream":%t,"previous_response_id":"resp_%d_1"}`, stream, at[0]))
		if chosen(bare) != addrs[at[0]] || !strings.HasPrefix(bare, "session;") {
			t.Errorf("stream=%t: a follow-up without input: %s", stream, bare)
		}
		ups[at[0]].Close()
		for range 2 {
			explanation := ask("and now", fmt.Sprintf("resp_%d_1", at[0]))
			if chosen(explanation) == addrs[at[0]] || !strings.HasPrefix(explanation, "gone;") {
				t.Errorf("stream=%t: follow-up after the upstream is gone: %s", stream, explanation)
			}
		}
		stop(t, s)
	}
}

// Tenants that must not share a prompt don't, nor do they see that others have it.
func TestScopesDontShare(t *testing.T) {
	fleet := newFleet(t, 1, engine.Config{PrefillRate: 1e6})
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
