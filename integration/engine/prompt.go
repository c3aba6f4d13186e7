package engine

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/cespare/xxhash/v2"
)

// The engine's tokenizer cuts the rendered prompt every BytesPerToken bytes,
// about what real ones make of English text, and its cache works on blocks of
// BlockTokens tokens, vLLM's default.
const (
	BytesPerToken = 4
	BlockTokens   = 16

	blockBytes  = BytesPerToken * BlockTokens
	imageTokens = 256 // what one image takes up in a prompt
)

// Prompt is a request's prompt as the engine sees it: rendered and tokenized.
type Prompt struct {
	Tokens int      // all of it, the last one perhaps short
	Blocks []uint64 // chained hashes of its full blocks: equal hashes, equal prefixes

	root uint64 // what the chain starts from: the model and its cache salt
	tail []byte // text after the last full block
	seed uint64 // of the answer
}

// Tokenize renders and tokenizes the body of a request to path, which is
// /v1/chat/completions or /v1/completions.
func Tokenize(path string, body []byte) (Prompt, error) {
	var r request
	if err := json.Unmarshal(body, &r); err != nil {
		return Prompt{}, fmt.Errorf("body is not a request: %w", err)
	}
	return r.prompt(path)
}

// After returns the hashes of the blocks that complete while the engine
// generates output behind the prompt. The next turn of a conversation matches
// them if it repeats the output word for word.
func (p Prompt) After(output string) []uint64 {
	return chain(nil, p.last(), append(bytes.Clone(p.tail), output...))
}

// Answer is what an engine answers to the prompt in so many tokens. Equal
// prompts have equal answers.
func (p Prompt) Answer(tokens int) string { return string(p.output(nil, 0, tokens)) }

// last is the end of the chain so far.
func (p Prompt) last() uint64 {
	if n := len(p.Blocks); n > 0 {
		return p.Blocks[n-1]
	}
	return p.root
}

// output returns the tokens from..to of the answer: one made-up syllable each.
func (p Prompt) output(dst []byte, from, to int) []byte {
	const consonants, vowels = "bdfgklmnprstvz", "aeiou"
	for i := from; i < to; i++ {
		x := (p.seed + uint64(i)) * 0x9e3779b97f4a7c15 // #nosec G115 -- i counts tokens
		x ^= x >> 29
		dst = append(dst,
			consonants[x%uint64(len(consonants))],
			vowels[(x>>8)%uint64(len(vowels))],
			consonants[(x>>16)%uint64(len(consonants))], ' ')
	}
	return dst
}

// chain appends to blocks the hashes of text's full blocks, linked to last.
func chain(blocks []uint64, last uint64, text []byte) []uint64 {
	var link [8 + blockBytes]byte
	for ; len(text) >= blockBytes; text = text[blockBytes:] {
		binary.LittleEndian.PutUint64(link[:], last)
		copy(link[8:], text)
		last = xxhash.Sum64(link[:])
		blocks = append(blocks, last)
	}
	return blocks
}

// request holds the fields of a body that change what the engine does.
type request struct {
	Model         string          `json:"model"`
	Messages      []message       `json:"messages"`
	Prompt        json.RawMessage `json:"prompt"`
	Tools         json.RawMessage `json:"tools"`
	ToolChoice    json.RawMessage `json:"tool_choice"`
	CacheSalt     string          `json:"cache_salt"`
	N             int             `json:"n"`
	Stream        bool            `json:"stream"`
	StreamOptions *struct {
		IncludeUsage bool `json:"include_usage"`
	} `json:"stream_options"`
	MaxTokens           int  `json:"max_tokens"`
	MaxCompletionTokens int  `json:"max_completion_tokens"`
	MinTokens           int  `json:"min_tokens"`
	IgnoreEOS           bool `json:"ignore_eos"`
}

type message struct {
	Role      string          `json:"role"`
	Name      string          `json:"name"`
	Content   json.RawMessage `json:"content"`
	ToolCalls json.RawMessage `json:"tool_calls"`
}

// prompt renders and tokenizes the request.
func (r *request) prompt(path string) (Prompt, error) {
	var text []byte
	var err error
	if path == completionsPath {
		text, err = renderCompletion(r.Prompt)
	} else {
		text, err = r.renderChat()
	}
	if err != nil {
		return Prompt{}, err
	}
	if len(text) == 0 {
		return Prompt{}, errors.New("prompt is empty")
	}
	root := xxhash.Sum64String(r.Model + "\x00" + r.CacheSalt)
	full := len(text) / blockBytes * blockBytes
	return Prompt{
		Tokens: (len(text) + BytesPerToken - 1) / BytesPerToken,
		Blocks: chain(make([]uint64, 0, len(text)/blockBytes), root, text),
		root:   root,
		tail:   text[full:],
		seed:   xxhash.Sum64(text),
	}, nil
}

// renderChat writes the conversation the way ChatML templates do: the tools,
// then each message between marks, then the mark that lets the model speak.
func (r *request) renderChat() ([]byte, error) {
	if len(r.Messages) == 0 {
		return nil, errors.New("messages is empty")
	}
	var b bytes.Buffer
	if present(r.Tools) {
		b.WriteString("<|im_start|>tools\n")
		if err := json.Compact(&b, r.Tools); err != nil {
			return nil, fmt.Errorf("tools: %w", err)
		}
		b.WriteString("<|im_end|>\n")
	}
	for i, m := range r.Messages {
		if m.Role == "" {
			return nil, fmt.Errorf("messages[%d] has no role", i)
		}
		b.WriteString("<|im_start|>" + m.Role)
		if m.Name != "" {
			b.WriteString(" name=" + m.Name)
		}
		b.WriteByte('\n')
		if err := renderContent(&b, m.Content); err != nil {
			return nil, fmt.Errorf("messages[%d]: %w", i, err)
		}
		if present(m.ToolCalls) {
			b.WriteString("<tool_calls>")
			if err := json.Compact(&b, m.ToolCalls); err != nil {
				return nil, fmt.Errorf("messages[%d]: tool_calls: %w", i, err)
			}
		}
		b.WriteString("<|im_end|>\n")
	}
	b.WriteString("<|im_start|>assistant\n")
	return b.Bytes(), nil
}

// renderContent writes a message's content, a string or a list of parts.
func renderContent(b *bytes.Buffer, content json.RawMessage) error {
	if !present(content) {
		return nil
	}
	if content[0] == '"' {
		var s string
		if err := json.Unmarshal(content, &s); err != nil {
			return fmt.Errorf("content: %w", err)
		}
		b.WriteString(s)
		return nil
	}
	var parts []struct {
		Type     string          `json:"type"`
		Text     string          `json:"text"`
		ImageURL json.RawMessage `json:"image_url"`
	}
	if err := json.Unmarshal(content, &parts); err != nil {
		return fmt.Errorf("content: %w", err)
	}
	for _, p := range parts {
		switch p.Type {
		case "text":
			b.WriteString(p.Text)
		case "image_url":
			digest := binary.BigEndian.AppendUint64(nil, xxhash.Sum64(p.ImageURL))
			b.Write(bytes.Repeat(digest, imageTokens*BytesPerToken/len(digest)))
		default:
			return fmt.Errorf("content part of type %q: use text or image_url", p.Type)
		}
	}
	return nil
}

// renderCompletion takes a prompt that is a string, a list of token ids, or a
// list that holds one of either.
func renderCompletion(prompt json.RawMessage) ([]byte, error) {
	if !present(prompt) {
		return nil, errors.New("prompt is missing")
	}
	var s string
	if json.Unmarshal(prompt, &s) == nil {
		return []byte(s), nil
	}
	var ids []uint32
	if json.Unmarshal(prompt, &ids) == nil {
		text := make([]byte, 0, len(ids)*BytesPerToken)
		for _, id := range ids {
			text = binary.BigEndian.AppendUint32(text, id)
		}
		return text, nil
	}
	var batch []json.RawMessage
	if err := json.Unmarshal(prompt, &batch); err != nil {
		return nil, fmt.Errorf("prompt: %w", err)
	}
	if len(batch) != 1 || !present(batch[0]) || (batch[0][0] != '"' && batch[0][0] != '[') {
		return nil, errors.New("prompt: send one text or one list of token ids a request")
	}
	return renderCompletion(batch[0])
}

func present(v json.RawMessage) bool { return len(v) > 0 && !bytes.Equal(v, []byte("null")) }
