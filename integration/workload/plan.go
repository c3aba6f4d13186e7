// Package workload plans and plays the traffic of an LLM service: tenants with
// long system prompts, conversations whose history grows with every turn, and a
// burst of requests that share one long document.
//
// A plan is made before it is played, answers included, because package
// engine's are known in advance. So every policy can be given the same traffic,
// and what an infinite cache would save of it can be computed.
package workload

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"strings"
	"time"

	"github.com/prefix-affinity/caddy/integration/engine"
)

// Shape says what traffic to plan. All figures but Seed must be positive.
type Shape struct {
	Tenants       int // each with a system prompt of its own
	SystemTokens  int
	Conversations int // dealt out among the tenants and clients
	Turns         int
	TurnTokens    int // mean of what a user says, from half to one and a half of it
	AnswerTokens  int // mean of an answer, likewise
	Siblings      int // requests of the burst
	SharedTokens  int // the document that they share
	Clients       int // addresses that all this comes from
	Seed          uint64
}

// Plan is traffic to be played.
type Plan struct {
	Conversations [][]Request
	Burst         []Request // to be sent at once

	shape  Shape
	ideal  totals
	unique int
}

// Request is one streamed chat completion.
type Request struct {
	Body   []byte
	Client string  // address it comes from
	Answer string  // what an engine will say
	Pause  float64 // time to think before it, as a multiple of the mean
}

type totals struct{ prompt, cached int }

const path = "/v1/chat/completions"

// New plans traffic. Equal shapes give equal plans.
func New(shape Shape) (*Plan, error) {
	w := writer{rand.New(rand.NewPCG(shape.Seed, 0))} // #nosec G404 -- to be repeatable
	p := &Plan{shape: shape}
	cache := make(map[uint64]bool) // shared by all, and infinite
	systems := make([]string, shape.Tenants)
	for i := range systems {
		systems[i] = w.text(shape.SystemTokens)
	}
	for i := range shape.Conversations {
		var turns []Request
		history := []message{{"system", systems[i%len(systems)]}}
		for turn := range shape.Turns {
			history = append(history, message{"user", w.text(w.about(shape.TurnTokens))})
			r, err := p.request(cache, history, w.about(shape.AnswerTokens))
			if err != nil {
				return nil, err
			}
			r.Client = client(i % shape.Clients)
			r.Pause = 0.5 + w.Float64()
			if turn == 0 { // from the start on, conversations are at any point of a turn
				r.Pause = 1.5 * w.Float64()
			}
			turns = append(turns, r)
			history = append(history, message{"assistant", r.Answer})
		}
		p.Conversations = append(p.Conversations, turns)
	}
	document := w.text(shape.SharedTokens)
	for i := range shape.Siblings {
		question := []message{{"system", document}, {"user", w.text(w.about(shape.AnswerTokens))}}
		r, err := p.request(cache, question, w.about(shape.AnswerTokens))
		if err != nil {
			return nil, err
		}
		r.Client = client(i % shape.Clients)
		p.Burst = append(p.Burst, r)
	}
	p.unique = len(cache) * engine.BlockTokens
	return p, nil
}

type message struct {
	Role    string `json:"role"`
	Content string `json:"content"`
}

// request makes a request and accounts for it as if cache had served it.
func (p *Plan) request(cache map[uint64]bool, messages []message, answerTokens int) (Request, error) {
	body, err := json.Marshal(map[string]any{
		"model": "simulated", "messages": messages, "max_tokens": answerTokens, "ignore_eos": true,
		"stream": true, "stream_options": map[string]any{"include_usage": true},
	})
	if err != nil {
		return Request{}, err
	}
	prompt, err := engine.Tokenize(path, body)
	if err != nil {
		return Request{}, err
	}
	cached := 0
	for cached < (prompt.Tokens-1)/engine.BlockTokens && cache[prompt.Blocks[cached]] {
		cached++
	}
	p.ideal.prompt += prompt.Tokens
	p.ideal.cached += cached * engine.BlockTokens
	answer := prompt.Answer(answerTokens)
	for _, blocks := range [][]uint64{prompt.Blocks, prompt.After(answer)} {
		for _, b := range blocks {
			cache[b] = true
		}
	}
	return Request{Body: body, Answer: answer}, nil
}

// Requests is how many there are in all.
func (p *Plan) Requests() int { return p.shape.Conversations*p.shape.Turns + len(p.Burst) }

// UniqueTokens is what a cache must hold to keep all prompts and answers.
func (p *Plan) UniqueTokens() int { return p.unique }

// IdealHitRatio is the share of the prompt tokens that one cache for all
// replicas that never forgets would serve.
func (p *Plan) IdealHitRatio() float64 { return float64(p.ideal.cached) / float64(p.ideal.prompt) }

// PromptTokens is the length of all prompts together.
func (p *Plan) PromptTokens() int { return p.ideal.prompt }

// MeanPause is how long users must think between turns for the conversations
// to keep the replicas' prefill busy for a share load of the time, given the
// ideal hit ratio and no queues. prefillRate is one replica's, in tokens/s.
func (p *Plan) MeanPause(load float64, replicas int, prefillRate float64, interToken time.Duration) (time.Duration, error) {
	uncached := float64(p.ideal.prompt-p.ideal.cached) / float64(p.Requests()) // a request
	cycle := float64(p.shape.Conversations) * uncached / (load * float64(replicas) * prefillRate)
	pause := cycle - uncached/prefillRate - float64(p.shape.AnswerTokens)*interToken.Seconds()
	if pause <= 0 {
		return 0, fmt.Errorf("%d conversations can't bring a load of %g: plan more of them", p.shape.Conversations, load)
	}
	return time.Duration(pause * float64(time.Second)), nil
}

// client names addresses that are reserved for documentation.
func client(i int) string { return fmt.Sprintf("192.0.2.%d", i+1) }

// writer makes up text.
type writer struct{ *rand.Rand }

// about returns a number from half of mean to one and a half of it.
func (w writer) about(mean int) int { return mean/2 + w.IntN(mean+1) }

// text returns so many tokens of words.
func (w writer) text(tokens int) string {
	const letters = "etaoinshrdlucmfwypvbgk"
	var b strings.Builder
	for b.Len() < tokens*engine.BytesPerToken {
		for range 2 + w.IntN(7) {
			b.WriteByte(letters[min(w.IntN(len(letters)), w.IntN(len(letters)))])
		}
		b.WriteByte(' ')
	}
	return b.String()[:tokens*engine.BytesPerToken]
}
