package share

import (
	"encoding/hex"
	"math/rand/v2"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/prefix-affinity/caddy/prefixhash"
	"github.com/prefix-affinity/caddy/selector/affinity"
)

var testParams = Params{KeyVersion: 3, BlockSize: 256, Seed: [8]byte{1, 2, 3, 4, 5, 6, 7, 8}}

// golden is what a batch looks like. If it must change, so must version.
var goldenHeader = header{gateway: 0xaabbccdd11223344, sequence: 300, params: testParams}

var goldenEvents = []affinity.Event{
	{
		Kind: affinity.Sent, Attempt: 1000, Replica: "10.0.0.1:8000", Session: 0x1111, Candidates: 8, Judged: true, Stream: true,
		PromptTokens: 100.25, UncachedTokens: 36.25,
		Blocks: []prefixhash.Block{{Hash: 0xfedcba9876543210, End: 256}, {Hash: 1, End: 401}},
	},
	{Kind: affinity.Sent, Attempt: 1001, Replica: "10.0.0.2:8000", Candidates: 8, PromptTokens: 1, UncachedTokens: 1},
	{Kind: affinity.Confirmed, Attempt: 1000, Stream: true},
	{Kind: affinity.Output, Attempt: 1000, Took: 123456 * time.Microsecond},
	{Kind: affinity.Reported, Attempt: 1000, Share: 0.75},
	{Kind: affinity.Learned, Session: 0x2222, Replica: "10.0.0.1:8000"},
	{Kind: affinity.Finished, Attempt: 1001, Outcome: affinity.Refused, RetryAfter: 1500 * time.Millisecond},
	{Kind: affinity.Finished, Attempt: 1000, Outcome: affinity.Served},
}

const golden = "7061" + "01" + "aabbccdd11223344" + "ac02" + "00" + "03" + "8002" + "0102030405060708" +
	"70" + "d00f" + "00" + "0d" + "31302e302e302e313a38303030" + "9103" + "9101" + "08" + "0000000000001111" +
	"02" + "fedcba9876543210" + "8002" + "0000000000000001" + "9101" +
	"00" + "02" + "00" + "0d" + "31302e302e302e323a38303030" + "04" + "04" + "08" + "00" +
	"11" + "01" +
	"02" + "00" + "c0c407" +
	"03" + "00" + "808003" +
	"05" + "0000000000002222" + "01" +
	"34" + "02" + "dc0b" +
	"04" + "01" + "00"

func encode(h header, events []affinity.Event) []byte {
	var c encoder
	b := appendHeader(nil, &h)
	for i := range events {
		b = c.append(b, &events[i])
	}
	return b
}

func decode(b []byte) (h header, events []affinity.Event, err error) {
	var d decoder
	if h, err = d.header(b); err != nil {
		return h, nil, err
	}
	for {
		var e affinity.Event
		ok, err := d.next(&e)
		if !ok {
			return h, events, err
		}
		if len(e.Blocks) == 0 {
			e.Blocks = nil
		}
		e.Blocks = append([]prefixhash.Block(nil), e.Blocks...)
		events = append(events, e)
	}
}

func TestGolden(t *testing.T) {
	if got := hex.EncodeToString(encode(goldenHeader, goldenEvents)); got != golden {
		t.Errorf("encoded:\n%s\nwant:\n%s", got, golden)
	}
	b, err := hex.DecodeString(golden)
	if err != nil {
		t.Fatal(err)
	}
	h, events, err := decode(b)
	if err != nil || h != goldenHeader || !reflect.DeepEqual(events, goldenEvents) {
		t.Errorf("decoded: %+v\n%+v\n%v", h, events, err)
	}
	for n := range b { // cut off anywhere: an error, or fewer events
		_, events, err := decode(b[:n])
		if err == nil && n < 25 || len(events) >= len(goldenEvents) {
			t.Errorf("cut at %d: %d events, %v", n, len(events), err)
		}
	}
}

func TestRoundTrip(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	addrs := []string{"a:1", "b:1", strings.Repeat("c", maxAddress)}
	for range 200 {
		h := header{gateway: rng.Uint64(), sequence: rng.Uint64(), bye: rng.IntN(2) == 0, params: testParams}
		var events []affinity.Event
		for range rng.IntN(20) {
			e := affinity.Event{Kind: affinity.EventKind(rng.IntN(6)), Attempt: rng.Uint64()}
			switch e.Kind {
			case affinity.Sent:
				e.Replica, e.Session = addrs[rng.IntN(3)], rng.Uint64()*uint64(rng.IntN(2))
				e.PromptTokens, e.UncachedTokens = float64(rng.IntN(1<<30))/4, float64(rng.IntN(1<<30))/4
				e.Candidates, e.Judged, e.Stream = rng.IntN(100), rng.IntN(2) == 0, rng.IntN(2) == 0
				end := uint32(0)
				for range rng.IntN(30) {
					end += 1 + uint32(rng.IntN(1<<uint(rng.IntN(20))))
					e.Blocks = append(e.Blocks, prefixhash.Block{Hash: rng.Uint64(), End: end})
				}
			case affinity.Confirmed:
				e.Stream = rng.IntN(2) == 0
			case affinity.Output:
				e.Took = time.Duration(rng.IntN(1e6)) * time.Microsecond
			case affinity.Reported:
				e.Share = float64(rng.IntN(shareSteps+1)) / shareSteps
			case affinity.Finished:
				e.Outcome = affinity.Outcome(rng.IntN(5))
				e.RetryAfter = time.Duration(rng.IntN(1e5)) * time.Millisecond
			case affinity.Learned:
				e.Attempt, e.Session, e.Replica = 0, rng.Uint64(), addrs[rng.IntN(3)]
			}
			events = append(events, e)
		}
		got, back, err := decode(encode(h, events))
		if err != nil || got != h || !reflect.DeepEqual(back, events) {
			t.Fatalf("%+v %v\n%+v\nwant\n%+v", got, err, back, events)
		}
	}
}

func TestBadBatches(t *testing.T) {
	good := encode(goldenHeader, nil)
	sent := func(rest ...byte) []byte {
		return append(append([]byte(nil), good...), append([]byte{0, 2, 0, 1, 'a'}, rest...)...)
	}
	for name, b := range map[string][]byte{
		"empty":                 nil,
		"text":                  []byte("some other program's entry of the stream"),
		"another version":       append([]byte("pa\x02"), good[3:]...),
		"no such kind":          append(append([]byte(nil), good...), 0x0f, 0),
		"no such outcome":       append(append([]byte(nil), good...), 0x54, 0, 0),
		"no such replica":       append(append([]byte(nil), good...), 0, 2, 7),
		"replica without name":  append(append([]byte(nil), good...), 0, 2, 0, 0),
		"prompt too long":       sent(0xff, 0xff, 0xff, 0xff, 0xff, 0x7f),
		"more blocks than fit":  sent(4, 4, 1, 0xff, 0x7f),
		"block of no bytes":     sent(4, 4, 1, 1, 1, 2, 3, 4, 5, 6, 7, 8, 0),
		"blocks beyond the end": sent(4, 4, 1, 2, 1, 2, 3, 4, 5, 6, 7, 8, 0xff, 0xff, 0xff, 0xff, 0x0f, 1, 2, 3, 4, 5, 6, 7, 8, 1),
	} {
		if _, events, err := decode(b); err == nil {
			t.Errorf("%s: no error, %+v", name, events)
		}
	}
	h, _, err := decode(append([]byte("pa\x02"), good[3:]...))
	if h.gateway != goldenHeader.gateway || !strings.Contains(err.Error(), "another version") {
		t.Errorf("another version: gateway %x, %v", h.gateway, err)
	}
}

// FuzzDecode: whatever a stream holds can be read or is an error, within memory
// of its own size, and applying it leaves an index that works.
func FuzzDecode(f *testing.F) {
	f.Add(encode(goldenHeader, goldenEvents))
	f.Add(encode(goldenHeader, goldenEvents[:1]))
	f.Add([]byte("pa\x01"))
	f.Fuzz(func(t *testing.T, b []byte) {
		var d decoder
		if _, err := d.header(b); err != nil {
			return
		}
		fleet := affinity.NewFleet()
		index := affinity.NewIndex(fleet, 4096)
		peer := index.NewPeer()
		now := time.Unix(1e9, 0)
		for {
			var e affinity.Event
			if ok, _ := d.next(&e); !ok {
				break
			}
			if len(e.Blocks) > len(b)/9 {
				t.Fatalf("%d blocks of %d bytes", len(e.Blocks), len(b))
			}
			peer.Apply(now, e)
		}
		key := prefixhash.Key{Blocks: []prefixhash.Block{{Hash: 1, End: 256}}, Bytes: 256, Judged: true}
		_, a := index.Route(now, &key, []affinity.Candidate{{Replica: fleet.Replica("a")}, {Replica: fleet.Replica("10.0.0.1:8000")}}, &affinity.Rule{}, nil)
		a.Finish(now, affinity.Served, 0)
		peer.Expire(now)
		for _, r := range fleet.Snapshot(now) {
			if r.InFlight != 0 || r.Waiting != 0 || r.PromptTokens != 0 {
				t.Fatalf("left in the account: %+v", r)
			}
		}
	})
}
