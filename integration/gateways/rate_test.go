package gateways

import (
	"encoding/binary"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/cespare/xxhash/v2"
	"go.uber.org/zap"

	"github.com/prefix-affinity/caddy/prefixhash"
	"github.com/prefix-affinity/caddy/selector/affinity"
	"github.com/prefix-affinity/caddy/selector/share"
)

// BenchmarkRate: two gateways without their HTTP decide as fast as they can and
// tell each other through a real Redis; an iteration ends when the other one has
// done the same. Prompts have 64 blocks, some 4,000 tokens.
func BenchmarkRate(b *testing.B) {
	t := new(testing.T) // the server's; it is stopped below
	r := newRedis(t)
	defer r.kill(t)
	type side struct {
		share *share.Share
		index *affinity.Index
		cands []affinity.Candidate
	}
	var sides [2]side
	for i := range sides {
		fleet := affinity.NewFleet()
		s := side{share.New(share.Options{Addresses: []string{r.addr}, Prefix: "rate"}, zap.NewNop), affinity.NewIndex(fleet, 1<<20), nil}
		for i := range 8 {
			s.cands = append(s.cands, affinity.Candidate{Replica: fleet.Replica(fmt.Sprintf("10.0.0.%d:8000", i+1))})
		}
		defer s.share.Join(share.Params{BlockSize: 256}, s.index)()
		defer s.share.Close()
		sides[i] = s
	}
	for sides[0].share.Stats().Peers+sides[1].share.Stats().Peers < 2 {
		time.Sleep(10 * time.Millisecond)
	}
	began := time.Now()
	b.ResetTimer()
	var busy sync.WaitGroup
	for i, s := range sides {
		busy.Go(func() {
			key := prefixhash.Key{Blocks: make([]prefixhash.Block, 64), Bytes: 64 * 256, Stream: true, Judged: true}
			for n := range b.N / 2 {
				for k := range key.Blocks {
					turn := uint64(n)
					if k < 56 {
						turn = uint64(n % 500) // a conversation goes on
					}
					var id [8]byte
					binary.LittleEndian.PutUint64(id[:], turn<<20|uint64(i)<<19|uint64(k))
					key.Blocks[k] = prefixhash.Block{Hash: xxhash.Sum64(id[:]), End: uint32(k+1) * 256}
				}
				now := time.Now()
				_, a := s.index.Route(now, &key, s.cands, &affinity.Rule{MinMatchTokens: 64}, nil)
				a.Confirm(now, true)
				a.FirstOutput(now)
				a.Report(4096, 3000)
				a.Finish(now, affinity.Served, 0)
			}
		})
	}
	busy.Wait()
	told := func(i int) share.Stats { return sides[i].share.Stats() }
	for told(0).EventsReceived+told(1).EventsReceived+told(0).EventsDropped+told(1).EventsDropped < int64(5*(b.N/2*2)) {
		time.Sleep(time.Millisecond)
	}
	b.ReportMetric(float64(b.N)/time.Since(began).Seconds(), "requests/s")
	b.ReportMetric(float64(told(0).BytesSent+told(1).BytesSent)/float64(b.N), "B/request")
	b.ReportMetric(float64(told(0).EventsDropped+told(1).EventsDropped), "dropped")
}
