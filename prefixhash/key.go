// Package prefixhash turns the body of a request to an LLM engine into its
// prompt key: a chain of block hashes over what the engine's KV cache depends
// on, and nothing else. Equal leading blocks mean equal leading prompt.
//
// # Guarantees
//
// The same prompt gives the same key however its JSON is spelled: white space,
// escapes, order of members that no template prints, the last of equal keys, a
// string or a list of text parts, fields that never reach the model. What changes the prompt
// changes the key from that block on: model, adapter, salt, templates,
// tools and their order, roles, names, text, tool calls and results, media.
//
// Prompt bytes are those of names and marks, and of text as JSON spells it in UTF-8 with the
// fewest escapes: nearly all bodies come in that spelling, and are hashed where they
// lie. So a line feed is two prompt bytes.
//
// A message starts a block and its last block may be short, so a conversation
// of short messages still matches, and turn N+1 matches the whole of turn N.
// The shape of the body decides which API it is (OpenAI chat, completions and
// Responses, Anthropic messages, Ollama, SGLang, llama.cpp, TGI, vLLM and
// TensorRT-LLM extras); its path only settles what the shape leaves open, so
// that APIs may be mounted under any prefix.
//
// Any input is safe: time is linear in the body but for sorting the keys of one
// object, memory is 20 bytes for each JSON value, a chain ends at 65,536
// blocks, nesting deeper than 1,000 levels makes a body unsound, and nothing
// panics. Two different blocks of one length have the same hash with a chance
// of 2^-64 for whoever doesn't know the seed (see nh). A body of which
// only the head was read is keyed by that head, and its blocks are leading
// blocks of the whole body's as far as members come in the head's order.
//
// # Concurrency and cost
//
// A Hasher is safe for concurrent use and allocates nothing in steady state:
// its scratch memory is pooled. A key costs a few times an xxhash64 of the
// body (see the package's benchmarks).
package prefixhash

import (
	"math"
	"regexp"
	"sync"

	"github.com/cespare/xxhash/v2"
)

// DefaultBlockBytes is the length of a block within the first 16 KiB of a
// prompt where Config names none: 64 tokens of English text.
const DefaultBlockBytes = 256

// KeyVersion goes into every hash. It is raised whenever the same body and
// Config give other hashes than before, so that hashes kept across an upgrade
// match nothing instead of something else.
const KeyVersion = 3

// Config shapes the hashes: two keys can agree only if made with equal Configs.
type Config struct {
	// BlockBytes is the length in prompt bytes of a block within the first
	// 16 KiB of a prompt; beyond, blocks are four times as long.
	// 0: DefaultBlockBytes.
	BlockBytes int

	// Seed starts every chain and keys every block. A secret seed keeps
	// outsiders from computing hashes and from building texts that collide.
	Seed uint64

	// Ignore matches volatile text to leave out of the key; nil: none. A match
	// lies within one text and one stretch of 4 KiB of it, which ends after a
	// line where it can; the first 256 matches of a prompt count. Empty
	// matches leave nothing out.
	//
	// The engine still sees that text, so such a request is routed by a key
	// that says more than the engine's cache can hold, and Judged is false.
	// An example: an agent starts its system prompt with a line that changes
	// with every request,
	//
	//	x-agent-billing-header: cch=1a2b;
	//	You are an agent. ...
	//
	// With `x-agent-billing-header: [^\n]*\n` ignored, all its requests have
	// one key and go to one replica. Where the template prints tools first
	// (Hermes, GLM, gpt-oss, Anthropic's own) the engine finds the tools in its
	// cache; where the system prompt comes first (Qwen, Llama) it finds nothing
	// unless the engine takes the line out itself, and the option only keeps
	// the agent from crowding out other prefixes on every replica.
	Ignore *regexp.Regexp
}

// Block is one link of a prompt's chain.
type Block struct {
	Hash uint64 // of this block and, by chaining, everything before it
	End  uint32 // prompt bytes up to and including this block
}

// Key is what routing knows about a prompt.
type Key struct {
	// Blocks is the chain of the request's first prompt. Sum writes into its
	// memory from the start.
	Blocks []Block

	// Bytes is the weight of the whole request in prompt bytes, the load it
	// brings: all prompts of a batch, media at a nominal weight, also where
	// there is no key. Four bytes are about a token.
	Bytes int

	// Session is the ID of the session that the client named in
	// prompt_cache_key; 0: none.
	Session uint64

	// Previous is the ID of the stored history that this request continues:
	// previous_response_id, conversation or thread.previous_message_id. Only
	// the replica that stored it can. 0: none.
	Previous uint64

	// Stream tells that the answer will be streamed, each API's default
	// respected (Ollama streams unless told otherwise).
	Stream bool

	// Judged tells that the engine's prompt is what the key describes. It is
	// false where Ignore matched, the body was cut, a stored history comes
	// first, the chain ended early (65,536 blocks), the request holds several
	// prompts, or it has the engine truncate them or leave its cache alone: what
	// the engine says about its cache is then no evidence about these blocks.
	Judged bool
}

// Cause says why a body has no chain.
type Cause uint8

const (
	Keyed     Cause = iota // it has one
	Empty                  // no body
	NotJSON                // not JSON, or too deep to be read by any engine
	NoPrompt               // JSON, but no prompt in any shape known here
	NotPrompt              // an endpoint that generates nothing: embeddings, rerank, count_tokens
)

// String returns the cause as a metric label.
func (c Cause) String() string {
	switch c {
	case Keyed:
		return "keyed"
	case Empty:
		return "empty"
	case NotJSON:
		return "not_json"
	case NoPrompt:
		return "no_prompt"
	case NotPrompt:
		return "not_prompt"
	}
	return "unknown"
}

// Hasher makes keys. It must not be copied after first use.
type Hasher struct {
	config Config
	key    []uint64  // for nh
	root   uint64    // where there is no scope
	keyers sync.Pool // of *keyer
}

// New returns a Hasher.
func New(config Config) *Hasher {
	if config.BlockBytes <= 0 {
		config.BlockBytes = DefaultBlockBytes
	}
	h := &Hasher{config: config, key: nhKey(config.Seed, coarse*config.BlockBytes), root: chainRoot(config.Seed, "")}
	h.keyers.New = func() any { return new(keyer) }
	return h
}

// Sum keys body into k and says why where k.Blocks stays empty. path is the
// request's URL path. complete is false where body is only the head of a
// longer one. scope is the name of the tenant that shares nothing with others;
// empty: all share.
func (h *Hasher) Sum(k *Key, path string, body []byte, complete bool, scope string) Cause {
	r := h.keyers.Get().(*keyer)
	cause := r.sumInto(h, k, path, body, complete, scope)
	if r.release() {
		h.keyers.Put(r)
	}
	return cause
}

// ID hashes a name that a client or an engine gave to a session or a stored
// response, the way Key.Session and Key.Previous are; never 0. Hash only
// names: an empty one stands for no session.
func (h *Hasher) ID(scope, name string) uint64 {
	d := seeded(h.config.Seed, "id", scope)
	_, _ = d.WriteString(name)
	return max(d.Sum64(), 1)
}

// chainRoot is what the chains of a scope begin with.
func chainRoot(seed uint64, scope string) uint64 {
	d := seeded(seed, "chain", scope)
	return d.Sum64()
}

// seeded returns a digest whose seed depends on all three: what is hashed for
// one use or scope agrees with nothing hashed for another.
func seeded(seed uint64, use, scope string) (d xxhash.Digest) {
	d.ResetWithSeed(seed + KeyVersion)
	_, _ = d.WriteString(use)
	_, _ = d.WriteString("\x00")
	_, _ = d.WriteString(scope)
	d.ResetWithSeed(d.Sum64())
	return d
}

// maxBody is how much of a body is looked at: offsets are 32 bits wide.
const maxBody = math.MaxUint32 - 1
