// Package signal reads what LLM engines say about themselves and about the
// prompts they were sent: load reports in response headers (ParseORCA,
// ParseCount), token counts and the moment of the first output in response
// bodies (Tap), and the engine's own Prometheus text (ParseMetrics).
//
// Guarantees:
//   - A figure that was not said is not zero. Engines leave a count out where
//     it is zero, where a flag is off and where they are too old alike, so every
//     figure here has a value of its own for "not said".
//   - A figure is taken only from the place in the JSON document where an engine
//     puts it, never from text that a model generated.
//   - Whatever comes in, nothing here panics, and memory and time are bounded
//     by what the caller hands over.
//
// Nothing here keeps state between responses. Functions are safe for concurrent
// use; a Tap belongs to one response body at a time.
package signal
