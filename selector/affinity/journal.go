package affinity

import (
	"time"

	"github.com/prefix-affinity/caddy/prefixhash"
)

// A Journal is told what happens to an index, so that other gateways before the
// same replicas can do the same to theirs (see Peer). Note is called on the path
// of requests, from many goroutines: it must not wait for anything. The events
// of one attempt come in their order, as far as its methods were called in one.
type Journal interface{ Note(Event) }

// EventKind says what happened.
type EventKind uint8

const (
	Sent      EventKind = iota // an attempt: Route
	Confirmed                  // its 2xx: Attempt.Confirm
	Output                     // its first output: Attempt.FirstOutput
	Reported                   // its cached tokens: Attempt.Report
	Finished                   // its end: Attempt.Finish
	Learned                    // where an id is kept: Index.Learn
)

// Event is something that happened to an index. A kind uses the fields that name
// it.
type Event struct {
	Kind    EventKind
	Attempt uint64 // its number, for all but Learned

	Replica        string             // Sent, Learned: its address
	Session        uint64             // Sent, Learned: the id; 0: none
	Blocks         []prefixhash.Block // Sent: the prompt; not kept
	PromptTokens   float64            // Sent
	UncachedTokens float64            // Sent: as believed
	Candidates     int                // Sent: how many there were to choose from
	Judged         bool               // Sent: what is reported is evidence
	Stream         bool               // Sent, Confirmed: its first output will be seen

	Took       time.Duration // Output: of the prefill; 0: not known
	Share      float64       // Reported: cached, of the prompt
	Outcome    Outcome       // Finished
	RetryAfter time.Duration // Finished
}

// SetJournal lets j know what happens from now on.
func (x *Index) SetJournal(j Journal) { x.journal.Store(&j) }

// EndJournal stops telling j. Attempts sent before go on telling it.
func (x *Index) EndJournal(j Journal) {
	if now := x.journal.Load(); now != nil && *now == j {
		x.journal.CompareAndSwap(now, nil)
	}
}

// announce tells an index's journal that an attempt was sent, and of its events from
// now on.
func (a *Attempt) announce(x *Index, chain []prefixhash.Block, key *prefixhash.Key) {
	j := x.journal.Load()
	if j == nil {
		return
	}
	a.journal, a.id = *j, x.numbers.Add(1)
	a.note(Event{
		Kind: Sent, Replica: a.replica.addr, Blocks: chain, Candidates: a.candidates, Stream: key.Stream, Judged: key.Judged,
		PromptTokens: a.prompt, UncachedTokens: a.uncached, Session: key.Session,
	})
}

// note tells the journal of an event of the attempt.
func (a *Attempt) note(e Event) {
	if a.journal != nil {
		e.Attempt = a.id
		a.journal.Note(e)
	}
}
