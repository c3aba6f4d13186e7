package main

import (
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/prefix-affinity/caddy/prefixhash"
	"github.com/prefix-affinity/caddy/selector/affinity"
)

// product is the project's own routing code before the simulated replicas, with
// what a gateway sees, or what spoils it.
type product struct {
	gateways int     // each with a random share of the requests
	sync     float64 // seconds until they know what another one did; < 0: never
	told     float64 // capacity in the config, as a multiple of the truth; 0: learned
	reports  float64 // share of the responses that report cached tokens
	lies     float64 // share of the reports that say 0
	off      float64 // reported tokens are off by up to this share
	streams  float64 // share of the requests whose first output is seen
	unseen   float64 // share of the requests that go past the gateway, at random
	poll     float64 // seconds between readings of the replicas' queues; 0: they are not read
	rule     affinity.Rule

	gates  []*gateway
	chains map[*traced][]prefixhash.Block
	rogue  roundRobin

	restarts tally
	suspects []suspect // by replica
}

// tally counts what the first gateway noticed of the restarts that were injected.
// A response shows one if it found less than 5 % of a match of at least 1,024
// tokens that was predicted and that the cache would have held: all prompts sent
// to the replica since the match was last used were shorter than its memory.
type tally struct {
	injected int
	shown    int // by 8 responses, or noticed before
	noticed  int
	within   int // of these, by no more than 8 responses
	wrong    int // noticed where there was none
}

// suspect is a replica whose last restart, at a time, was shown by so many
// responses and not noticed.
type suspect struct {
	restarted bool
	at        float64
	shown     int
	tokens    int           // of all prompts sent to it
	used      map[int32]int // that count when a block was last used
}

// sent is what is kept of a request under way.
type sent struct {
	*affinity.Attempt

	gate  int
	at    float64
	match int  // tokens predicted
	held  bool // the cache holds them, if it was not lost
}

type gateway struct {
	fleet *affinity.Fleet
	index *affinity.Index
	cands []affinity.Candidate

	tell []func(affinity.Event) // its peers
}

// Note implements affinity.Journal.
func (g *gateway) Note(e affinity.Event) {
	for _, tell := range g.tell {
		tell(e)
	}
}

// newProduct returns the product as it is by default, but for options of the
// form name or name=value with + between them.
func newProduct(options string) (*product, error) {
	p := &product{gateways: 1, sync: -1, reports: 1, streams: 1, rule: affinity.Rule{MinMatchTokens: 64}}
	if options == "" {
		return p, nil
	}
	numbers := map[string]*float64{
		"told": &p.told, "reports": &p.reports, "lies": &p.lies, "off": &p.off, "streams": &p.streams,
		"unseen": &p.unseen, "poll": &p.poll, "sync": &p.sync, "alpha": &p.rule.Alpha,
	}
	for option := range strings.SplitSeq(options, "+") {
		name, value, ok := strings.Cut(option, "=")
		v := 1.0
		if ok {
			var err error
			if v, err = strconv.ParseFloat(value, 64); err != nil {
				return nil, fmt.Errorf("option '%s': '%s' is not a number", name, value)
			}
		}
		switch at := numbers[name]; {
		case at != nil:
			*at = v
		case name == "gateways":
			p.gateways = int(v)
		case name == "rendezvous":
			p.rule.Rendezvous = true
		case name == "min_match":
			p.rule.MinMatchTokens = int(v)
		default:
			return nil, fmt.Errorf("unknown option '%s'", name)
		}
	}
	return p, nil
}

var epoch = time.Unix(1_700_000_000, 0)

func (s *sim) clock() time.Time { return epoch.Add(time.Duration(s.now * float64(time.Second))) }

func (p *product) start(s *sim) {
	if p.told > 0 {
		p.rule.CapacityTokens = int(p.told * float64(s.capacity))
	}
	for range p.gateways {
		f := affinity.NewFleet()
		g := &gateway{fleet: f, index: affinity.NewIndex(f, 1<<30)}
		for i := range s.replicas {
			g.cands = append(g.cands, affinity.Candidate{Replica: f.Replica(fmt.Sprintf("10.0.0.%d:8000", i+1))})
		}
		p.gates = append(p.gates, g)
	}
	for range s.replicas {
		p.suspects = append(p.suspects, suspect{used: map[int32]int{}})
	}
	if p.sync >= 0 {
		p.connect(s)
	}
	if p.poll > 0 {
		p.readQueues(s)
	}
	p.chains = make(map[*traced][]prefixhash.Block, len(s.jobs))
}

// readQueues tells the gateways how many requests wait at each replica, as its metrics
// do: without the one that it prefills. Then it does so again and again.
func (p *product) readQueues(s *sim) {
	for _, g := range p.gates {
		for i, r := range s.replicas {
			g.cands[i].Replica.ReportLoad(s.clock(), float64(len(r.queue)))
		}
	}
	s.later(p.poll, func() { p.readQueues(s) })
}

// connect lets every gateway know late what the others do.
func (p *product) connect(s *sim) {
	for _, g := range p.gates {
		for _, other := range p.gates {
			if other == g {
				continue
			}
			peer := other.index.NewPeer()
			g.tell = append(g.tell, func(e affinity.Event) {
				s.later(p.sync, func() { peer.Apply(s.clock(), e) })
			})
		}
		g.index.SetJournal(g)
	}
}

// key makes a request's key: a block of the trace is a block of the prompt, and
// what is left of the prompt is a short block that nobody shares.
func (p *product) key(s *sim, q *traced) prefixhash.Key {
	chain, ok := p.chains[q]
	if !ok {
		h := uint64(0)
		for i, b := range q.blocks {
			h = mix(h ^ uint64(b))
			chain = append(chain, prefixhash.Block{Hash: h, End: uint32((i + 1) * s.trace.blockTokens * affinity.BytesPerToken)})
		}
		if n := len(q.blocks) * s.trace.blockTokens; n < q.prompt {
			chain = append(chain, prefixhash.Block{Hash: mix(h ^ mix(uint64(q.id)+1<<41)), End: uint32(q.prompt * affinity.BytesPerToken)})
		}
		p.chains[q] = chain
	}
	return prefixhash.Key{Blocks: chain, Bytes: q.prompt * affinity.BytesPerToken, Stream: p.streamed(q), Judged: true}
}

func (p *product) streamed(q *traced) bool { return chance(q.id, 1) < p.streams }

func (p *product) pick(s *sim, j *job) int {
	if p.gates == nil {
		p.start(s)
	}
	if chance(j.id, 2) < p.unseen {
		return p.rogue.pick(s, j)
	}
	gate := int(mix(uint64(j.id)+99) % uint64(p.gateways))
	g := p.gates[gate]
	for i, r := range s.replicas {
		g.cands[i].State = affinity.Available
		if !r.up {
			g.cands[i].State = affinity.Unavailable
		}
	}
	key := p.key(s, j.traced)
	choice, attempt := g.index.Route(s.clock(), &key, g.cands, &p.rule, nil)
	u := &p.suspects[choice.Candidate]
	n := min(choice.MatchedTokens/s.trace.blockTokens, len(j.blocks))
	j.note = sent{attempt, gate, s.now, choice.MatchedTokens, n > 0 && u.tokens-u.used[j.blocks[n-1]] < s.replicas[choice.Candidate].cache.size*s.trace.blockTokens}
	u.tokens += j.prompt
	return choice.Candidate
}

func (p *product) output(s *sim, j *job) {
	if a, ok := j.note.(sent); ok && p.streamed(j.traced) {
		a.Confirm(s.clock(), true)
		a.FirstOutput(s.clock())
	}
}

func (p *product) ended(s *sim, j *job) {
	a, ok := j.note.(sent)
	if !ok {
		return
	}
	a.Confirm(s.clock(), p.streamed(j.traced))
	if chance(j.id, 3) < p.reports {
		cached := float64(j.cached) * (1 + p.off*(2*chance(j.id, 4)-1))
		if chance(j.id, 5) < p.lies {
			cached = 0
		}
		found := int(min(cached, float64(j.prompt)))
		noticed := a.Report(j.prompt, found)
		if a.gate == 0 {
			p.watch(j.replica.id, a, found, noticed)
		}
	}
	if !p.streamed(j.traced) && chance(j.id, 6) < p.reports {
		a.Answered(s.clock(), j.prompt, j.cached, j.output)
	}
	u := &p.suspects[j.replica.id]
	for _, b := range j.blocks {
		u.used[b] = u.tokens
	}
	a.Finish(s.clock(), affinity.Served, 0)
}

// restarted notes that a replica lost its cache.
func (p *product) restarted(s *sim, r *replica) {
	if p.gates == nil {
		return
	}
	p.restarts.injected++
	u := &p.suspects[r.id]
	u.restarted, u.at, u.shown = true, s.now, 0
}

// watch counts whether a restart was noticed when a response was reported.
func (p *product) watch(replica int, a sent, found int, noticed bool) {
	u := &p.suspects[replica]
	if u.restarted && a.at >= u.at && a.held && a.match >= 1024 && float64(found) < 0.05*float64(a.match) {
		if u.shown++; u.shown == 8 {
			p.restarts.shown++
		}
	}
	switch {
	case noticed && u.restarted:
		p.restarts.noticed++
		if u.shown < 8 {
			p.restarts.shown++
		}
		if u.shown <= 8 {
			p.restarts.within++
		}
		u.restarted = false
	case noticed:
		p.restarts.wrong++
	}
}

func (p *product) lost(s *sim, j *job) {
	if a, ok := j.note.(sent); ok {
		a.Finish(s.clock(), affinity.Lost, 0)
	}
	j.note = nil
}
