package measure

import (
	"encoding/base64"
	"encoding/json"
	"math/rand/v2"
	"strconv"
	"strings"
	"unicode/utf8"
)

// Chat is the body of a chat completion. Its tools and its system prompt, a
// quarter of its text, are the same for all conversations.
type Chat struct {
	Bytes        int // about
	Conversation uint64
	Escaped      bool // what is not ASCII, 6 % of the words, is spelled \uXXXX
	Images       bool // two images fill it but for 16 KiB
	ToolsLast    bool // tools come after the messages
}

// JSON spells the body.
func (c Chat) JSON() []byte {
	type object = map[string]any
	shared := writer{rand.New(rand.NewPCG(1, 2))}
	var body struct {
		Model    string `json:"model"`
		Tools    any    `json:"tools,omitempty"`
		Messages []any  `json:"messages"`
		Late     any    `json:"late,omitempty"`
		Stream   bool   `json:"stream"`
	}
	body.Model, body.Stream = "m", true
	tools := make([]any, 0, 13)
	for i := range 1 + min(c.Bytes/8192, 12) {
		tools = append(tools, object{"type": "function", "function": object{
			"name": "tool_" + strconv.Itoa(i), "description": shared.text(min(c.Bytes/64, 200)),
			"parameters": object{"type": "object", "properties": object{
				"path": object{"type": "string", "description": shared.text(min(c.Bytes/64, 60))}, "count": object{"type": "integer"},
			}, "required": []string{"path"}},
		}})
	}
	if c.ToolsLast {
		body.Late = tools
	} else {
		body.Tools = tools
	}
	left := max(c.Bytes-200-len(tools)*(200+min(c.Bytes/64, 260)), 100)
	if c.Images {
		left = 16 << 10
	}
	body.Messages = append(body.Messages, object{"role": "system", "content": shared.text(left / 4)})
	own := writer{rand.New(rand.NewPCG(3, c.Conversation))}
	if c.Images {
		raw := make([]byte, c.Bytes/2*3/4)
		for range 2 {
			for i := range raw {
				raw[i] = byte(own.Uint32())
			}
			url := "data:image/png;base64," + base64.StdEncoding.EncodeToString(raw)
			body.Messages = append(body.Messages, object{"role": "user", "content": []any{
				object{"type": "text", "text": own.text(200)}, object{"type": "image_url", "image_url": object{"url": url}},
			}})
		}
	}
	roles := [...]string{"user", "assistant"}
	for i, left := 0, left-left/4; left > 0; i++ {
		n := min(left, 200+own.IntN(3000))
		body.Messages = append(body.Messages, object{"role": roles[i%2], "content": own.text(n * 9 / 10)}) // the rest is for names and quotes
		left -= n
	}
	out, err := json.Marshal(body)
	if err != nil {
		panic(err) // strings and numbers only
	}
	out = []byte(strings.Replace(string(out), `"late":`, `"tools":`, 1))
	if c.Escaped {
		out = escape(out)
	}
	return out
}

type writer struct{ *rand.Rand }

// text makes n bytes of text, more or less.
func (w writer) text(n int) string {
	var b strings.Builder
	for b.Len() < n {
		switch r := w.IntN(100); {
		case r < 6:
			b.WriteString(foreign[w.IntN(len(foreign))])
		case r < 9:
			b.WriteString("\n")
		case r < 10:
			b.WriteString(`"quoted"`)
		default:
			b.WriteString(words[w.IntN(len(words))])
		}
		b.WriteByte(' ')
	}
	return b.String()
}

var (
	foreign = []string{"größer", "naïve", "日本語", "привет", "☕", "été"}
	words   = strings.Fields(`the of and to in is that it was for on are as with his they at be this from have or by one had
		not but what all were when we there can an your which their said if do will each about how up out them then she many some
		so these would other into has more her two like him see time could no make than first been its who now people my made over
		did down only way find use may water long little very after words called just where most know`)
)

// escape spells JSON in ASCII.
func escape(body []byte) []byte {
	out := make([]byte, 0, len(body)*5/4)
	for _, r := range string(body) {
		if r < utf8.RuneSelf {
			out = append(out, byte(r))
			continue
		}
		q := strconv.QuoteToASCII(string(r)) // none of ours needs a surrogate pair
		out = append(out, q[1:len(q)-1]...)
	}
	return out
}
