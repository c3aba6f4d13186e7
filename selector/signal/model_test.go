package signal

import (
	"bytes"
	"encoding/json"
	"regexp"
	"strconv"
	"strings"
)

// The naive model: what a Tap tells, by encoding/json and whole documents.

var figurePaths = map[string]figure{
	"tokens_evaluated":                          tokensEvaluated,
	"prompt_eval_count":                         evalCount,
	"prompt_eval_cached_count":                  evalCached,
	"meta_info.prompt_tokens":                   metaPrompt,
	"meta_info.cached_tokens":                   metaCached,
	"timings.cache_n":                           timingsCached,
	"timings.prompt_n":                          timingsPrompt,
	"timings.predicted_n":                       timingsPredicted,
	"tokens_predicted":                          tokensPredicted,
	"eval_count":                                evalOutput,
	"meta_info.completion_tokens":               metaCompletion,
	"usage.completion_tokens":                   completionTokens,
	"usage.output_tokens":                       outputTokens,
	"sglext.cached_tokens_details.device":       tierDevice,
	"sglext.cached_tokens_details.host":         tierHost,
	"sglext.cached_tokens_details.storage":      tierStorage,
	"usage.prompt_tokens":                       promptTokens,
	"usage.input_tokens":                        inputTokens,
	"usage.cache_read_input_tokens":             cacheRead,
	"usage.cache_creation_input_tokens":         cacheCreation,
	"usage.prompt_cache_hit_tokens":             cacheHit,
	"usage.prompt_cache_miss_tokens":            cacheMiss,
	"usage.prompt_tokens_details.cached_tokens": detailsCached,
	"usage.input_tokens_details.cached_tokens":  detailsCached,
}

var plainCount = regexp.MustCompile(`^([0-9]{1,18})(\.[0-9]+)?$`)

// modelFigures notes the counts of a valid document in their order.
func modelFigures(f *figures, document []byte) {
	d := json.NewDecoder(bytes.NewReader(document))
	d.UseNumber()
	var walk func(path string)
	walk = func(path string) {
		token, err := d.Token()
		if err != nil {
			panic(err) // the document is valid
		}
		switch v := token.(type) {
		case json.Number:
			place := strings.TrimPrefix(path, "$.")
			for _, holder := range []string{"response.", "message."} {
				if rest, found := strings.CutPrefix(place, holder); found && strings.HasPrefix(rest, "usage.") {
					place = rest
				}
			}
			which, known := figurePaths[place]
			if m := plainCount.FindStringSubmatch(v.String()); known && m != nil {
				if n, err := strconv.Atoi(m[1]); err == nil && n <= maxFigure {
					f.set(which, n)
				}
			}
		case json.Delim:
			for d.More() {
				inner := path + "[]"
				if v == '{' {
					name, err := d.Token()
					if err != nil {
						panic(err)
					}
					// No name of interest has a dot.
					inner = path + "." + strings.ReplaceAll(name.(string), ".", "?")
				}
				walk(inner)
			}
			if _, err := d.Token(); err != nil {
				panic(err)
			}
		}
	}
	walk("$")
}

// modelOutput says whether a document is output, as an event or a line.
func modelOutput(document []byte) bool {
	var root map[string]any
	if json.Unmarshal(document, &root) != nil || root == nil {
		return false
	}
	eventType, _ := root["type"].(string)
	if root["error"] != nil || root["prompt_progress"] != nil || root["object"] == "error" || isPreamble([]byte(eventType)) {
		return false
	}
	choices, chunk := root["choices"].([]any)
	if !chunk {
		return true
	}
	if len(choices) == 0 {
		_, usage := root["usage"].(map[string]any)
		return usage
	}
	for _, c := range choices {
		choice, isObject := c.(map[string]any)
		if !isObject {
			return false // no engine's chunk
		}
		if choice["finish_reason"] != nil || generated(choice["text"]) {
			return true
		}
		delta, _ := choice["delta"].(map[string]any)
		for name, v := range delta {
			if name != "role" && generated(v) {
				return true
			}
		}
	}
	return false
}

func generated(v any) bool {
	switch v := v.(type) {
	case nil:
		return false
	case bool:
		return v
	case string:
		return v != ""
	case []any:
		return len(v) > 0
	case map[string]any:
		return len(v) > 0
	}
	return true
}

// repeatsNames says whether an object of the document has a name twice, of which
// encoding/json and the Tap make different things.
func repeatsNames(document []byte) bool {
	d := json.NewDecoder(bytes.NewReader(document))
	var walk func() bool
	walk = func() bool {
		token, _ := d.Token()
		if open, ok := token.(json.Delim); ok {
			names := map[string]bool{}
			for d.More() {
				if open == '{' {
					name, _ := d.Token()
					if names[name.(string)] {
						return true
					}
					names[name.(string)] = true
				}
				if walk() {
					return true
				}
			}
			_, _ = d.Token()
		}
		return false
	}
	return walk()
}
