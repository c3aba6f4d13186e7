package workload

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"net/http"
	"slices"
	"sync"
	"time"
)

// Result is what the clients of a played plan saw.
type Result struct {
	TTFT    []time.Duration // of every request, in ascending order
	Elapsed time.Duration
}

// MeanTTFT is the average time to the first output token.
func (r Result) MeanTTFT() time.Duration {
	var sum time.Duration
	for _, t := range r.TTFT {
		sum += t
	}
	return sum / time.Duration(len(r.TTFT))
}

// QuantileTTFT is the time that a share q of the requests had their first
// output token within.
func (r Result) QuantileTTFT(q float64) time.Duration {
	return r.TTFT[max(0, int(math.Ceil(q*float64(len(r.TTFT))))-1)]
}

// Play sends the plan's requests to a base URL: every conversation thinks for
// meanPause on average, sends a turn, and reads the answer to its end before it
// goes on; half-way through, the burst is sent too. done is called after every
// answer, by several goroutines at once. Play ends early, with the error, when
// a request fails.
func (p *Plan) Play(ctx context.Context, url string, meanPause time.Duration, done func()) (Result, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	transport := &http.Transport{MaxIdleConnsPerHost: p.Requests()}
	defer transport.CloseIdleConnections()
	client := &http.Client{Transport: transport}

	var mu sync.Mutex
	var result Result
	send := func(r Request) bool {
		a, err := Ask(ctx, client, url+path, r.Body, http.Header{"X-Forwarded-For": {r.Client}})
		if err == nil && a.Text != r.Answer {
			err = fmt.Errorf("answer %q instead of %q", a.Text, r.Answer)
		}
		if err != nil {
			cancel(err) // the first one counts
			return false
		}
		mu.Lock()
		result.TTFT = append(result.TTFT, a.TTFT)
		mu.Unlock()
		done()
		return true
	}
	pause := func(factor float64) bool {
		select {
		case <-time.After(time.Duration(factor * float64(meanPause))):
			return true
		case <-ctx.Done():
			return false
		}
	}

	begin := time.Now()
	var wg sync.WaitGroup
	for _, turns := range p.Conversations {
		wg.Go(func() {
			for _, r := range turns {
				if !pause(r.Pause) || !send(r) {
					return
				}
			}
		})
	}
	for _, r := range p.Burst {
		wg.Go(func() {
			if pause(float64(p.shape.Turns) / 2) {
				send(r)
			}
		})
	}
	wg.Wait()
	result.Elapsed = time.Since(begin)
	slices.Sort(result.TTFT)
	return result, context.Cause(ctx)
}

// Answer is a streamed chat completion as its client received it.
type Answer struct {
	Text    string
	TTFT    time.Duration // until the first output token
	Replica string        // the engine's x-inference-pod
}

// Ask sends a streamed chat completion and reads the answer to its end.
func Ask(ctx context.Context, client *http.Client, url string, body []byte, header http.Header) (Answer, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url, bytes.NewReader(body))
	if err != nil {
		return Answer{}, err
	}
	maps.Copy(req.Header, header)
	req.Header.Set("Content-Type", "application/json")
	begin := time.Now()
	resp, err := client.Do(req)
	if err != nil {
		return Answer{}, err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		text, err := io.ReadAll(io.LimitReader(resp.Body, 1000))
		return Answer{}, errors.Join(fmt.Errorf("%s: %s", resp.Status, text), err)
	}
	a := Answer{Replica: resp.Header.Get("X-Inference-Pod")}
	lines := bufio.NewScanner(resp.Body)
	for lines.Scan() {
		data, ok := bytes.CutPrefix(lines.Bytes(), []byte("data: "))
		if !ok {
			continue
		}
		if string(data) == "[DONE]" {
			// Read on to the end of the body, so that the connection is used again.
			_, err := io.Copy(io.Discard, resp.Body)
			return a, err
		}
		var chunk struct {
			Choices []struct {
				Delta struct{ Content string }
			}
		}
		if err := json.Unmarshal(data, &chunk); err != nil {
			return a, fmt.Errorf("event %q: %w", data, err)
		}
		for _, c := range chunk.Choices {
			if a.Text == "" && c.Delta.Content != "" {
				a.TTFT = time.Since(begin)
			}
			a.Text += c.Delta.Content
		}
	}
	return a, errors.Join(errors.New("the stream ended before [DONE]"), lines.Err())
}
