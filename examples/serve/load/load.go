// Package load is many clients of a server: they stream or wait, cancel and disconnect at random, and compare every answer with the
// one that a client alone had.
package load

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
)

// A Case is a request and, after Learn, its answer.
type Case struct {
	Path   string // "/v1/completions" or "/v1/chat/completions"
	Body   map[string]any
	Answer Answer
}

// An Answer is what a client has of a finished request.
type Answer struct {
	Text   string
	Tokens []int32
	Finish string
}

func (a Answer) equals(b Answer) bool {
	return a.Text == b.Text && a.Finish == b.Finish && slices.Equal(a.Tokens, b.Tokens)
}

// A Report counts how requests ended.
type Report struct {
	Finished, Cancelled, Refused, Stopped int
	Tokens                                int
	Wrong                                 []string // the first few answers that differ from those of a client alone, and other faults
}

func (r *Report) add(o Report) {
	r.Finished += o.Finished
	r.Cancelled += o.Cancelled
	r.Refused += o.Refused
	r.Stopped += o.Stopped
	r.Tokens += o.Tokens
	r.Wrong = append(r.Wrong, o.Wrong...)
	r.Wrong = r.Wrong[:min(len(r.Wrong), 10)]
}

func (r Report) String() string {
	return fmt.Sprintf("%d finished with %d tokens, %d cancelled, %d refused while the queue was full, %d ended by the stop, %d wrong",
		r.Finished, r.Tokens, r.Cancelled, r.Refused, r.Stopped, len(r.Wrong))
}

// Options of Run.
type Options struct {
	Clients  int
	Cancel   float64         // the share of requests that are cancelled on the way
	Seed     int64           // of what clients pick
	Stopping <-chan struct{} // closed: the server is told to stop, and requests may be ended by that
}

// errRefused is an answer with status 429, errStopped what a server that stops gives.
var (
	errRefused = errors.New("refused")
	errStopped = errors.New("stopped")
)

// Learn asks each case alone, one after the other, and keeps the answers.
func Learn(ctx context.Context, url string, cases []Case) error {
	client := &http.Client{Transport: &http.Transport{}}
	defer client.CloseIdleConnections()
	for i := range cases {
		answer, err := ask(ctx, client, url, cases[i], false, -1)
		if err != nil {
			return fmt.Errorf("case %d: %w", i, err)
		}
		cases[i].Answer = answer
	}
	return nil
}

// Run has clients ask random cases until ctx is done. Each has a connection of its own.
func Run(ctx context.Context, url string, cases []Case, o Options) Report {
	var total Report
	var mu sync.Mutex
	var clients sync.WaitGroup
	for n := range o.Clients {
		clients.Add(1)
		go func() {
			defer clients.Done()
			report := run(ctx, url, cases, o, rand.New(rand.NewSource(o.Seed+int64(n))))
			mu.Lock()
			defer mu.Unlock()
			total.add(report)
		}()
	}
	clients.Wait()
	return total
}

func run(ctx context.Context, url string, cases []Case, o Options, random *rand.Rand) Report {
	var report Report
	client := &http.Client{Transport: &http.Transport{}}
	defer client.CloseIdleConnections()
	for ctx.Err() == nil {
		n := random.Intn(len(cases))
		c := cases[n]
		stream, cancelAfter := random.Intn(2) == 0, -1
		if random.Float64() < o.Cancel {
			cancelAfter = random.Intn(1 + 2*len(c.Answer.Tokens))
		}
		// A request that has begun is seen through, unless it is one of those that are cancelled.
		answer, err := ask(context.WithoutCancel(ctx), client, url, c, stream, cancelAfter)
		switch {
		case err == nil && answer.equals(c.Answer):
			report.Finished++
			report.Tokens += len(answer.Tokens)
		case err == nil:
			report.Wrong = append(report.Wrong, fmt.Sprintf("case %d (stream %v): %+v; alone %+v", n, stream, answer, c.Answer))
		case errors.Is(err, context.Canceled) && cancelAfter >= 0:
			report.Cancelled++
		case errors.Is(err, errRefused):
			report.Refused++
			time.Sleep(time.Duration(random.Intn(200)) * time.Millisecond)
		case stopping(o.Stopping): // 503, an event with the error, or no connection at all
			report.Stopped++
			return report
		default:
			report.Wrong = append(report.Wrong, fmt.Sprintf("case %d (stream %v): %v", n, stream, err))
		}
	}
	return report
}

func stopping(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// ask makes one request. With cancelAfter ≥ 0 the client goes away after so many milliseconds, or events of a stream.
func ask(ctx context.Context, client *http.Client, url string, c Case, stream bool, cancelAfter int) (Answer, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	if cancelAfter >= 0 && (!stream || cancelAfter == 0) {
		defer time.AfterFunc(time.Duration(cancelAfter)*time.Millisecond, cancel).Stop()
	}
	fields := map[string]any{"return_token_ids": true, "stream": stream}
	for name, value := range c.Body {
		fields[name] = value
	}
	body, err := json.Marshal(fields)
	if err != nil {
		return Answer{}, err
	}
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, url+c.Path, bytes.NewReader(body))
	if err != nil {
		return Answer{}, err
	}
	request.Header.Set("Content-Type", "application/json")
	response, err := client.Do(request)
	if err != nil {
		return Answer{}, err
	}
	defer response.Body.Close()
	switch {
	case response.StatusCode == http.StatusTooManyRequests:
		return Answer{}, errRefused
	case response.StatusCode == http.StatusServiceUnavailable:
		return Answer{}, errStopped
	case response.StatusCode != http.StatusOK:
		text, _ := io.ReadAll(response.Body)
		return Answer{}, fmt.Errorf("status %d: %s", response.StatusCode, text)
	case stream:
		return readEvents(response.Body, cancelAfter, cancel)
	}
	var whole piece
	if err := json.NewDecoder(response.Body).Decode(&whole); err != nil {
		return Answer{}, err
	}
	var answer Answer
	return answer, whole.addTo(&answer)
}

// A piece is what an answer, or an event of a streamed one, has of interest here.
type piece struct {
	Choices []struct {
		Text           string
		Message, Delta struct{ Content string }
		TokenIDs       []int32 `json:"token_ids"`
		FinishReason   string  `json:"finish_reason"`
	}
	Error *struct{ Message, Code string }
}

func (p *piece) addTo(a *Answer) error {
	if p.Error != nil {
		return fmt.Errorf("%w: %s", errStopped, p.Error.Message)
	}
	for _, c := range p.Choices {
		a.Text += c.Text + c.Message.Content + c.Delta.Content
		a.Tokens = append(a.Tokens, c.TokenIDs...)
		a.Finish += c.FinishReason
	}
	return nil
}

// readEvents reads server-sent events up to [DONE], or until `cancelAfter` of them have come.
func readEvents(from io.Reader, cancelAfter int, cancel func()) (Answer, error) {
	var answer Answer
	lines := bufio.NewScanner(from)
	for count := 0; lines.Scan(); {
		data, isData := strings.CutPrefix(lines.Text(), "data: ")
		if !isData {
			continue
		}
		if data == "[DONE]" {
			return answer, nil
		}
		var p piece
		if err := json.Unmarshal([]byte(data), &p); err != nil {
			return answer, fmt.Errorf("event %q: %w", data, err)
		}
		if err := p.addTo(&answer); err != nil {
			return answer, err
		}
		if count++; count == cancelAfter {
			cancel()
			return answer, context.Canceled
		}
	}
	if err := lines.Err(); err != nil {
		return answer, err
	}
	return answer, errors.New("the stream ends without [DONE]")
}

// Metrics reads the server's metrics that have no labels.
func Metrics(url string) (map[string]float64, error) {
	response, err := http.Get(url + "/metrics")
	if err != nil {
		return nil, err
	}
	defer response.Body.Close()
	values := map[string]float64{}
	lines := bufio.NewScanner(response.Body)
	for lines.Scan() {
		name, value, _ := strings.Cut(lines.Text(), " ")
		if number, err := strconv.ParseFloat(value, 64); err == nil && !strings.ContainsAny(name, "#{") {
			values[name] = number
		}
	}
	return values, lines.Err()
}
