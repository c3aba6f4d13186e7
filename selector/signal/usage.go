package signal

// Usage is what a response said about its tokens. A negative field was not said.
// PromptTokens includes the cached ones, whatever the API's own convention.
type Usage struct {
	PromptTokens int
	CachedTokens int
	OutputTokens int
}

// figure is one count that some engine writes somewhere in a response body.
type figure uint8

const (
	promptTokens     figure = iota // usage.prompt_tokens (OpenAI): cached ones included
	inputTokens                    // usage.input_tokens: Responses API includes cached ones, Anthropic's does not
	detailsCached                  // usage.{prompt,input}_tokens_details.cached_tokens
	cacheRead                      // usage.cache_read_input_tokens (Anthropic)
	cacheCreation                  // usage.cache_creation_input_tokens (Anthropic)
	cacheHit                       // usage.prompt_cache_hit_tokens (DeepSeek)
	cacheMiss                      // usage.prompt_cache_miss_tokens (DeepSeek)
	metaPrompt                     // meta_info.prompt_tokens (SGLang /generate)
	metaCached                     // meta_info.cached_tokens
	tierDevice                     // sglext.cached_tokens_details.device (SGLang, on request)
	tierHost                       // sglext.cached_tokens_details.host
	tierStorage                    // sglext.cached_tokens_details.storage
	timingsCached                  // timings.cache_n (llama.cpp)
	timingsPrompt                  // timings.prompt_n: the rest of the prompt
	tokensEvaluated                // tokens_evaluated (llama.cpp /completion): the whole prompt
	evalCount                      // prompt_eval_count (Ollama): cached ones included
	evalCached                     // prompt_eval_cached_count (Ollama)
	completionTokens               // usage.completion_tokens (OpenAI)
	outputTokens                   // usage.output_tokens (Responses API, Anthropic)
	metaCompletion                 // meta_info.completion_tokens (SGLang /generate)
	timingsPredicted               // timings.predicted_n (llama.cpp)
	tokensPredicted                // tokens_predicted (llama.cpp /completion)
	evalOutput                     // eval_count (Ollama)
	figureCount
)

// maxFigure bounds a count of tokens; more is no count.
const maxFigure = 1<<31 - 1

// figures holds each count plus one, so that the zero value says nothing.
type figures [figureCount]int

// set notes a count. A later one corrects an earlier one (vLLM's message_start
// counts the whole prompt as input, its message_delta only the uncached part),
// but a zero doesn't: streams fill in zeros where they know nothing.
func (f *figures) set(which figure, n int) {
	if n > 0 || f[which] == 0 {
		f[which] = n + 1
	}
}

// get returns a count, or -1 where it was not said.
func (f *figures) get(which figure) int { return f[which] - 1 }

// usage brings the APIs' conventions together.
func (f *figures) usage() Usage {
	u := Usage{PromptTokens: f.prompt(), CachedTokens: f.cached(), OutputTokens: f.output()}
	if u.PromptTokens == 0 {
		u.PromptTokens = -1 // no prompt has no tokens: a field that was never filled in
	}
	if u.PromptTokens >= 0 && u.CachedTokens > u.PromptTokens {
		u.CachedTokens = -1 // one of the two is wrong
	}
	return u
}

func (f *figures) prompt() int {
	if n := f.get(promptTokens); n >= 0 {
		return n
	}
	if n := f.get(inputTokens); n >= 0 {
		if f.get(detailsCached) >= 0 {
			return n
		}
		return n + max(0, f.get(cacheRead)) + max(0, f.get(cacheCreation))
	}
	if hit, miss := f.get(cacheHit), f.get(cacheMiss); hit >= 0 && miss >= 0 {
		return hit + miss
	}
	if n := f.get(metaPrompt); n >= 0 {
		return n
	}
	// Without cache_n, prompt_n leaves an unknown number of cached tokens out.
	if cached, rest := f.get(timingsCached), f.get(timingsPrompt); cached >= 0 && rest >= 0 {
		return cached + rest
	}
	if n := f.get(tokensEvaluated); n >= 0 {
		return n
	}
	return f.get(evalCount)
}

func (f *figures) output() int {
	for _, which := range [...]figure{completionTokens, outputTokens, metaCompletion, timingsPredicted, tokensPredicted, evalOutput} {
		if n := f.get(which); n >= 0 {
			return n
		}
	}
	return -1
}

func (f *figures) cached() int {
	for _, which := range [...]figure{detailsCached, cacheRead, cacheHit, metaCached, timingsCached, evalCached} {
		if n := f.get(which); n >= 0 {
			return n
		}
	}
	device, host, storage := f.get(tierDevice), f.get(tierHost), f.get(tierStorage)
	if device < 0 && host < 0 && storage < 0 {
		return -1
	}
	return max(0, device) + max(0, host) + max(0, storage)
}
