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
	rule     affinity.Rule

	gates  []*gateway
	chains map[*traced][]prefixhash.Block
	rogue  roundRobin
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
		"unseen": &p.unseen, "sync": &p.sync, "alpha": &p.rule.Alpha,
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
	if p.sync >= 0 {
		p.connect(s)
	}
	p.chains = make(map[*traced][]prefixhash.Block, len(s.jobs))
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
	g := p.gates[mix(uint64(j.id)+99)%uint64(p.gateways)]
	for i, r := range s.replicas {
		g.cands[i].State = affinity.Available
		if !r.up {
			g.cands[i].State = affinity.Unavailable
		}
	}
	key := p.key(s, j.traced)
	choice, attempt := g.index.Route(s.clock(), &key, g.cands, &p.rule, nil)
	j.note = attempt
	return choice.Candidate
}

func (p *product) output(s *sim, j *job) {
	if a, ok := j.note.(*affinity.Attempt); ok && p.streamed(j.traced) {
		a.Confirm(s.clock(), true)
		a.FirstOutput(s.clock())
	}
}

func (p *product) ended(s *sim, j *job) {
	a, ok := j.note.(*affinity.Attempt)
	if !ok {
		return
	}
	a.Confirm(s.clock(), p.streamed(j.traced))
	if chance(j.id, 3) < p.reports {
		cached := float64(j.cached) * (1 + p.off*(2*chance(j.id, 4)-1))
		if chance(j.id, 5) < p.lies {
			cached = 0
		}
		a.Report(j.prompt, int(min(cached, float64(j.prompt))))
	}
	a.Finish(s.clock(), affinity.Served, 0)
}

func (p *product) lost(s *sim, j *job) {
	if a, ok := j.note.(*affinity.Attempt); ok {
		a.Finish(s.clock(), affinity.Lost, 0)
	}
	j.note = nil
}
