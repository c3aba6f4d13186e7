package prefixhash

// field is a member of a body that matters. Engines ignore the members they
// don't know, so all are taken from every API.
//
// Left out although they may change a prompt: what changes only its end
// (add_generation_prompt, continue_final_message, echo), and what changes the
// front only on some engines and is seldom varied within a conversation
// (tool_choice, response_format, truncate_prompt_tokens, thinking.budget_tokens).
type field uint8

const (
	// The preamble: what the KV cache depends on without being prompt text,
	// in canonical order.
	fieldModel          field = iota
	fieldLora                 // llama.cpp: list of {id, scale}
	fieldLoraPath             // SGLang
	fieldLoraRequest          // TensorRT-LLM
	fieldAdapterID            // TGI, also within parameters
	fieldCacheSalt            // vLLM, SGLang, TensorRT-LLM
	fieldExtraKey             // SGLang
	fieldSessionParams        // SGLang: the text is appended to a stored session
	fieldChatTemplate         // vLLM, SGLang, llama.cpp, TensorRT-LLM
	fieldTemplateKwargs       // the same
	fieldTemplate             // Ollama
	fieldRaw                  // Ollama: no template
	fieldSpecialTokens        // vLLM: a BOS token at the start
	fieldStoredPrompt         // Responses: {id, version, variables}
	fieldEffort               // reasoning_effort; Responses: reasoning.effort
	fieldThink                // Ollama: think; Anthropic: thinking.type
	fieldMMKwargs             // vLLM: how images become tokens
	fieldMediaKwargs          // vLLM
	fieldFeatures             // vLLM: hashes of the media among token_ids

	// Prompt text.
	fieldDocuments
	fieldTools
	fieldFunctions
	fieldSystem
	fieldInstructions
	fieldMessages
	fieldInput
	fieldPrompt
	fieldText
	fieldInputs
	fieldTextInput
	fieldSuffix
	fieldContext // Ollama: the conversation so far as token ids
	fieldInputPrefix
	fieldInputSuffix
	fieldInputExtra

	// Prompts as tokens or embeddings, in place of text.
	fieldPromptTokenIDs
	fieldInputIDs
	fieldTokenIDs
	fieldPromptEmbeds
	fieldInputEmbeds

	// Media beside a prompt without messages.
	fieldImages
	fieldImageData
	fieldAudioData
	fieldVideoData

	// Sessions and delivery.
	fieldPromptCacheKey
	fieldPreviousResponseID
	fieldConversation
	fieldThread
	fieldStream
	fieldOllama   // a member that only Ollama's API has
	fieldNoPrompt // a member that only APIs without generation have

	// Members under which an engine computes another prompt than the body says,
	// or doesn't look into its cache.
	fieldTruncateTokens // vLLM: only so many tokens at the prompt's end count
	fieldTruncation     // Responses
	fieldPromptLogprobs // vLLM, and so does echo of completions with logprobs
	fieldEcho
	fieldLogprobStart // SGLang
	fieldCachePrompt  // llama.cpp

	// Members whose own members matter.
	fieldParameters
	fieldReasoning
	fieldThinking

	fieldCount
)

var fieldNames = map[string]field{
	"model":                  fieldModel,
	"lora":                   fieldLora,
	"lora_path":              fieldLoraPath,
	"lora_request":           fieldLoraRequest,
	"adapter_id":             fieldAdapterID,
	"cache_salt":             fieldCacheSalt,
	"extra_key":              fieldExtraKey,
	"session_params":         fieldSessionParams,
	"chat_template":          fieldChatTemplate,
	"chat_template_kwargs":   fieldTemplateKwargs,
	"template":               fieldTemplate,
	"raw":                    fieldRaw,
	"add_special_tokens":     fieldSpecialTokens,
	"reasoning_effort":       fieldEffort,
	"think":                  fieldThink,
	"mm_processor_kwargs":    fieldMMKwargs,
	"media_io_kwargs":        fieldMediaKwargs,
	"features":               fieldFeatures,
	"documents":              fieldDocuments,
	"tools":                  fieldTools,
	"functions":              fieldFunctions,
	"system":                 fieldSystem,
	"instructions":           fieldInstructions,
	"messages":               fieldMessages,
	"input":                  fieldInput,
	"prompt":                 fieldPrompt,
	"text":                   fieldText,
	"inputs":                 fieldInputs,
	"text_input":             fieldTextInput,
	"suffix":                 fieldSuffix,
	"context":                fieldContext,
	"input_prefix":           fieldInputPrefix,
	"input_suffix":           fieldInputSuffix,
	"input_extra":            fieldInputExtra,
	"prompt_token_ids":       fieldPromptTokenIDs,
	"input_ids":              fieldInputIDs,
	"token_ids":              fieldTokenIDs,
	"prompt_embeds":          fieldPromptEmbeds,
	"input_embeds":           fieldInputEmbeds,
	"images":                 fieldImages,
	"image_data":             fieldImageData,
	"audio_data":             fieldAudioData,
	"video_data":             fieldVideoData,
	"prompt_cache_key":       fieldPromptCacheKey,
	"previous_response_id":   fieldPreviousResponseID,
	"conversation":           fieldConversation,
	"thread":                 fieldThread,
	"stream":                 fieldStream,
	"keep_alive":             fieldOllama,
	"options":                fieldOllama,
	"encoding_format":        fieldNoPrompt,
	"dimensions":             fieldNoPrompt,
	"voice":                  fieldNoPrompt,
	"truncate_prompt_tokens": fieldTruncateTokens,
	"truncation":             fieldTruncation,
	"prompt_logprobs":        fieldPromptLogprobs,
	"echo":                   fieldEcho,
	"logprob_start_len":      fieldLogprobStart,
	"cache_prompt":           fieldCachePrompt,
	"parameters":             fieldParameters,
	"reasoning":              fieldReasoning,
	"thinking":               fieldThinking,
}

const preambleFields = fieldFeatures + 1

// fields are the members of one body.
type fields [fieldCount]ref

// collect finds the members that matter. Of equal keys the last counts.
func (r *keyer) collect(root ref) {
	r.fields = fields{}
	f := &r.fields
	for k := r.firstKey(root); k != 0; k = r.nextKey(root, k) {
		if at, known := fieldNames[string(r.raw(k))]; known {
			f[at] = k + 1
		}
	}
	f.fallback(r, fieldOllama, f[fieldThink])
	f.fallback(r, fieldAdapterID, r.get(f[fieldParameters], "adapter_id"))
	f.fallback(r, fieldEffort, r.get(f[fieldReasoning], "effort"))
	f.fallback(r, fieldThink, r.get(f[fieldThinking], "type"))
	if r.kind(f[fieldRaw]) != truth {
		f[fieldRaw] = 0
	}
	if r.kind(f[fieldPrompt]) == object && (r.has(f[fieldInput]) || r.has(r.get(f[fieldPrompt], "id"))) {
		f[fieldStoredPrompt], f[fieldPrompt] = f[fieldPrompt], 0
	}
	// Of a body that was cut within its preamble or tools, these are left out:
	// the next turns of that conversation may be cut elsewhere.
	for at := range fieldFunctions + 1 {
		if r.nodes[f[at]].cut {
			f[at] = 0
		}
	}
}

// fallback sets a field that the body doesn't have on its top level.
func (f *fields) fallback(r *keyer, at field, n ref) {
	f[at] = r.either(f[at], n)
}

// generates tells by its shape whether a body asks for text. The input of
// Responses is text or items, that of embeddings may be text, texts or tokens.
func (r *keyer) generates() bool {
	f := &r.fields
	if r.has(f[fieldMessages]) {
		return true
	}
	input := r.first(f[fieldInput])
	return !r.has(f[fieldNoPrompt]) && (input == 0 || r.kind(input) == object)
}

// streams tells whether the answer will be streamed.
func (r *keyer) streams(at endpoint) bool {
	switch r.kind(r.fields[fieldStream]) {
	case truth:
		return true
	case falsehood:
		return false
	}
	return at == streamAPI || at == ollamaAPI || r.fields[fieldOllama] != 0
}

// told tells whether what the engine says about its cache is about the prompt in
// the body. Where it is not, the answer is no evidence: a client that has its
// prompts truncated would make the cache look small to all.
func (r *keyer) told() bool {
	f := &r.fields
	return !r.has(f[fieldTruncateTokens]) && !r.has(r.get(f[fieldParameters], "truncate")) &&
		string(r.short(f[fieldTruncation])) != "auto" &&
		!r.has(f[fieldPromptLogprobs]) && !r.has(f[fieldLogprobStart]) &&
		r.kind(f[fieldEcho]) != truth && r.kind(f[fieldCachePrompt]) != falsehood
}

// named returns the ID of a name in the body, 0 if there is none.
func (r *keyer) named(h *Hasher, scope string, n ref) uint64 {
	name := r.short(n)
	if len(name) == 0 {
		return 0
	}
	d := seeded(h.config.Seed, "id", scope)
	_, _ = d.Write(name)
	return max(d.Sum64(), 1)
}

// previous returns the ID of the stored history that the body continues.
func (r *keyer) previous(h *Hasher, scope string) uint64 {
	f := &r.fields
	conversation := f[fieldConversation]
	if r.kind(conversation) == object {
		conversation = r.get(conversation, "id")
	}
	name := r.either(f[fieldPreviousResponseID], conversation)
	return r.named(h, scope, r.either(name, r.get(f[fieldThread], "previous_message_id")))
}
