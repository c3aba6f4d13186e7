package prefixhash

import "strings"

// endpoint is what a path says about a body whose shape fits several APIs.
type endpoint uint8

const (
	anyAPI    endpoint = iota
	noPrompt           // generates nothing, or no text
	ollamaAPI          // streams unless told otherwise
	streamAPI          // always streams
)

// endpointOf judges by the last segments of a path: what comes before is the
// operator's choice.
func endpointOf(path string) endpoint {
	path = strings.TrimRight(path, "/")
	slash := strings.LastIndexByte(path, '/')
	last, before := path[slash+1:], path[:max(slash, 0)]
	switch last {
	case "embeddings", "embedding", "embed", "embed_all", "embed_sparse", "encode",
		"pooling", "score", "similarity", "classify", "predict", "moderations",
		"rerank", "reranking", "count_tokens", "input_tokens", "tokenize",
		"detokenize", "render", "apply-template", "speech", "transcriptions",
		"translations", "generations", "edits", "videos", "models":
		return noPrompt
	case "create", "show", "pull", "push", "copy", "delete":
		if strings.HasSuffix(before, "/api") {
			return noPrompt // Ollama's model management
		}
	case "chat", "generate":
		if strings.HasSuffix(before, "/api") {
			return ollamaAPI
		}
	case "generate_stream":
		return streamAPI
	}
	return anyAPI
}
