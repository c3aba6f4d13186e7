package integration

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"testing"
)

const (
	chatPath = "/v1/chat/completions"
	embPath  = "/v1/embeddings"
)

// decision is what the header X-Prefix-Affinity tells.
type decision struct {
	reason, upstream string
	matched, prompt  int // tokens
}

func decisionOf(t *testing.T, res *http.Response) decision {
	t.Helper()
	value := res.Header.Get("X-Prefix-Affinity")
	reason, parameters, _ := strings.Cut(value, ";")
	d := decision{reason: reason}
	if _, err := fmt.Sscanf(strings.ReplaceAll(parameters, ";", " "), "upstream=%q matched=%d prompt=%d", &d.upstream, &d.matched, &d.prompt); err != nil {
		t.Errorf("status %d, X-Prefix-Affinity %q: %v", res.StatusCode, value, err)
	}
	return d
}

// ask sends a chat request that must be served, and returns what was decided.
func (s *site) ask(t *testing.T, body string) decision {
	t.Helper()
	res, _ := s.post(t, chatPath, body)
	if res.StatusCode != http.StatusOK {
		t.Errorf("status %d", res.StatusCode)
	}
	return decisionOf(t, res)
}

// conversation is a client's history with a model. It opens with as much as an
// application's instructions: a replica is not left over a few requests more or
// less for what that holds, as it rightly is for a match of some hundred tokens.
type conversation struct {
	name     string
	messages []string
	at       string // upstream of the last turn
}

// turn asks the next question, keeps the answer, and returns what was decided.
func (c *conversation) turn(t *testing.T, s *site, stream bool) decision {
	t.Helper()
	size := 1500
	if len(c.messages) == 0 {
		size = 8000
	}
	c.messages = append(c.messages, words(fmt.Sprintf("%s turn %d", c.name, len(c.messages)/2), size))
	res, body := s.post(t, chatPath, chat(stream, c.messages...))
	if res.StatusCode != http.StatusOK {
		t.Errorf("%s: status %d", c.name, res.StatusCode)
	}
	c.messages = append(c.messages, answerOf(t, res, body))
	d := decisionOf(t, res)
	c.at = d.upstream
	return d
}

// newConversations makes n conversations about different things.
func newConversations(n int) []*conversation {
	all := make([]*conversation, n)
	for i := range all {
		all[i] = &conversation{name: fmt.Sprintf("client %d", i)}
	}
	return all
}

// answerOf puts the text of an answer together, which must be complete.
func answerOf(t *testing.T, res *http.Response, body string) string {
	t.Helper()
	type message struct {
		Content string `json:"content"`
	}
	type answer struct {
		Choices []struct {
			Message, Delta message
		} `json:"choices"`
	}
	events := []string{body}
	if strings.HasPrefix(res.Header.Get("Content-Type"), "text/event-stream") {
		var whole bool
		if body, whole = strings.CutSuffix(body, "data: [DONE]\n\n"); !whole {
			t.Errorf("the stream has no end: %q", body[max(0, len(body)-200):])
		}
		events = strings.Split(strings.TrimSuffix(body, "\n\n"), "\n\n")
	}
	var text strings.Builder
	for _, event := range events {
		var a answer
		if err := json.Unmarshal([]byte(strings.TrimPrefix(event, "data: ")), &a); err != nil {
			t.Errorf("%v in %q", err, event)
		}
		for _, choice := range a.Choices {
			text.WriteString(choice.Message.Content + choice.Delta.Content)
		}
	}
	return text.String()
}

// burst sends all bodies at once to gates that answer none before they have
// them all, and returns how many each got.
func (s *site) burst(t *testing.T, g *gates, bodies []string) []int {
	t.Helper()
	var wg sync.WaitGroup
	defer wg.Wait()
	for _, body := range bodies {
		wg.Go(func() { s.ask(t, body) })
	}
	return g.take(t, len(bodies))
}

// equalPrompts makes n prompts of the same length that share nothing.
func equalPrompts(name string, n, size int, stream bool) []string {
	bodies := make([]string, n)
	for i := range bodies {
		bodies[i] = chat(stream, words(fmt.Sprintf("%s %03d", name, i), size))
	}
	return bodies
}

// wantEven checks that each of n upstreams got its share, give or take slack.
func wantEven(t *testing.T, got []int, slack int) {
	t.Helper()
	sum := 0
	for _, n := range got {
		sum += n
	}
	for _, n := range got {
		if share := sum / len(got); n < share-slack || n > share+slack {
			t.Errorf("requests per upstream: %v, want %d +- %d each", got, share, slack)
			return
		}
	}
}
