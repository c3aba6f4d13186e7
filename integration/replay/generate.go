package main

import (
	"math"
	"math/rand/v2"
	"slices"
)

// generated are the workloads that come with the project, by name. Their
// requests are drawn from a fixed seed: the same at every run.
var generated = map[string]func(*writer){
	"chat":    chat,
	"agents":  agents,
	"hot":     hot,
	"tenants": tenants,
	"bursts":  bursts,
	"unique":  unique,
}

const generatedBlock = 256 // tokens

// generate draws a workload.
func generate(name string, seed uint64) *trace {
	w := &writer{rng: newRand(seed)}
	generated[name](w)
	slices.SortStableFunc(w.rows, func(a, b row) int {
		if a.T < b.T {
			return -1
		}
		return 1
	})
	return newTrace(name, generatedBlock, w.rows)
}

// writer makes up requests.
type writer struct {
	rng     *rand.Rand
	rows    []row
	block   int64
	session int64
}

// text is a prompt so far.
type text struct {
	tokens int
	blocks []int64
}

// more returns a text with fresh tokens after it.
func (w *writer) more(t text, tokens int) text {
	t.blocks = slices.Clone(t.blocks)
	t.tokens += tokens
	for len(t.blocks) < t.tokens/generatedBlock {
		w.block++
		t.blocks = append(t.blocks, w.block)
	}
	return t
}

// about draws a length of that median, most within half and twice of it.
func (w *writer) about(tokens float64) int {
	return 1 + int(tokens*math.Exp(0.6*w.rng.NormFloat64()))
}

func (w *writer) send(at float64, t text, output int, session int64) {
	w.rows = append(w.rows, row{T: at, In: t.tokens, Out: output, H: t.blocks, S: session})
}

// talk is a conversation: questions and answers with pauses between.
func (w *writer) talk(at float64, t text, turns int, question, answer, pause float64) {
	w.session++
	for range turns {
		t = w.more(t, w.about(question))
		out := w.about(answer)
		w.send(at, t, out, w.session)
		t = w.more(t, out)
		at += float64(out)*0.02 + pause*w.rng.ExpFloat64()
	}
}

// chat: conversations of several turns under 20 system prompts.
func chat(w *writer) {
	apps := make([]text, 0, 20)
	for range 20 {
		apps = append(apps, w.more(text{}, 300+w.rng.IntN(2500)))
	}
	for range 700 {
		w.talk(w.rng.Float64()*1800, apps[w.rng.IntN(len(apps))], 3+w.rng.IntN(10), 250, 250, 25)
	}
}

// agents: long sessions of tool calls, which all start with the same tools.
func agents(w *writer) {
	tools := w.more(text{}, 14_000)
	for range 90 {
		w.talk(w.rng.Float64()*1500, tools, 30+w.rng.IntN(30), 1200, 150, 4)
	}
}

// hot: one system prompt in every request.
func hot(w *writer) {
	system := w.more(text{}, 4000)
	for range 7000 {
		w.send(w.rng.Float64()*1500, w.more(system, w.about(400)), w.about(150), -1)
	}
}

// tenants: many with their own long prompt, some far more active than others.
func tenants(w *writer) {
	own := make([]text, 0, 150)
	for range 150 {
		own = append(own, w.more(text{}, 6000))
	}
	pick := rand.NewZipf(w.rng, 1.2, 4, uint64(len(own)-1))
	for range 6000 {
		w.send(w.rng.Float64()*1500, w.more(own[pick.Uint64()], w.about(500)), w.about(150), -1)
	}
}

// bursts: conversations that come in waves, and documents that 16 requests ask
// about at once.
func bursts(w *writer) {
	wave := func() float64 { return math.Floor(w.rng.Float64()*15)*100 + 40*w.rng.Float64() }
	for range 500 {
		w.talk(wave(), w.more(text{}, w.about(800)), 2+w.rng.IntN(6), 300, 250, 15)
	}
	for range 60 {
		document, at := w.more(text{}, w.about(10_000)), wave()
		for range 16 {
			w.send(at+0.01*w.rng.Float64(), w.more(document, w.about(80)), w.about(200), -1)
		}
	}
}

// unique: nothing is ever asked twice; the control.
func unique(w *writer) {
	for range 5000 {
		w.send(w.rng.Float64()*1500, w.more(text{}, w.about(3000)), w.about(200), -1)
	}
}

func newRand(seed uint64) *rand.Rand { return rand.New(rand.NewPCG(seed, 1)) }
