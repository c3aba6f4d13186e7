// Package affinity decides which replica of an LLM engine a request goes to.
//
// It keeps, per replica, a picture of the prefix cache (what of which prompt is
// still held), an account of the load in prompt tokens of work, and what it
// learns from the responses: the cache's capacity and the prefill speed. The
// rule that weighs them is in rule.go.
//
// It knows nothing of HTTP or Caddy, starts no goroutines and has no clock: the
// caller says what time it is. Everything exported is safe for concurrent use.
// A decision takes a few microseconds and holds no lock over the whole index:
// one lock per replica's index, and a short one over the loads.
package affinity

import "fmt"

// BytesPerToken is how many prompt bytes count as one token wherever this
// package speaks of tokens. Inside it measures in bytes. What the engines count
// differs, but the differences cancel: cached tokens are taken as a share of
// the prompt's, and capacities are learned in the same unit they are used in.
const BytesPerToken = 4

// Rule holds the knobs of one policy.
type Rule struct {
	// MinMatchTokens: a shorter match is not worth following, and no reason to
	// call a request anything but cold.
	MinMatchTokens int
	// Alpha weighs uncached tokens against the queue; 0: by the load.
	Alpha float64
	// CapacityTokens is the KV cache of one replica; 0: learned.
	CapacityTokens int
	// Shadow leaves every choice to the fallback; what the rule would have chosen
	// is only told.
	Shadow bool
	// Rendezvous places what nobody holds by hash as far as the load allows, so
	// that gateways which don't talk tend to agree. Without it the replica that
	// got least lately has it, which is better where there is one gateway.
	Rendezvous bool
}

// minMatch is MinMatchTokens in bytes.
func (r *Rule) minMatch() uint32 { return uint32(max(r.MinMatchTokens, 1) * BytesPerToken) }

// State says whether a candidate may be chosen. Of a later one none is chosen
// while there are others.
type State uint8

const (
	Available   State = iota
	Drained           // keeps the conversations that only it holds, gets nothing new
	Failed            // already failed this request
	Unavailable       // unhealthy, full or its circuit open: never chosen
)

// Candidate is a replica among which to choose.
type Candidate struct {
	Replica *Replica
	State   State
	// InFlight is how many requests others count on this replica; where it is
	// higher than our own count it holds.
	InFlight int
}

// Choice is what was decided and why.
type Choice struct {
	Candidate     int // index into the candidates; -1: none is available
	Reason        Reason
	PromptTokens  int
	MatchedTokens int // of the prompt, believed cached at the chosen replica
	Holder        int // the candidate with the longest match, available or not; -1: nobody
	HolderTokens  int // its length
}

// Reason says why a replica was chosen.
type Reason uint8

const (
	Affinity  Reason = iota // it holds the longest match
	Overflow                // a longer match was passed over because of load
	Unhealthy               // the longest match is on a replica that is not available, or whose connections failed lately
	Cold                    // nobody has a match worth following
	NoKey                   // the request has no prompt to go by
	Session                 // the client's session or the response it refers to is there
	Gone                    // the response it refers to is on a replica that is not available
)

var reasons = [...]string{"affinity", "overflow", "unhealthy", "cold", "no_key", "session", "gone"}

func (r Reason) String() string {
	if int(r) < len(reasons) {
		return reasons[r]
	}
	return fmt.Sprintf("reason(%d)", uint8(r))
}

// Outcome says how an attempt ended.
type Outcome uint8

const (
	Served   Outcome = iota // a 2xx to its end
	Aborted                 // given up by the client
	Lost                    // the replica failed: no connection, one that broke, a 5xx but 501
	Refused                 // 429 or 503
	Rejected                // any other answer than a 2xx: the request is to blame
)
