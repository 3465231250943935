package server

import (
	"errors"
	"fmt"
	"hash/fnv"
	"sync/atomic"
	"time"
)

// A fakeModel has a token for each byte and three control tokens.
type fakeModel struct{ context int }

const fakeEnd = 258

func (m fakeModel) Name() string    { return "fake" }
func (m fakeModel) Vocabulary() int { return 259 }
func (m fakeModel) Context() int    { return m.context }
func (m fakeModel) End() []int32    { return []int32{fakeEnd} }

func (m fakeModel) Encode(text string) ([]int32, error) {
	ids := make([]int32, len(text))
	for i := range text {
		ids[i] = int32(text[i])
	}
	for i := range ids { // range over a string skips bytes inside of characters
		ids[i] = int32(text[i])
		if ids[i] == 0 {
			return nil, fmt.Errorf("byte 0 at %d has no token", i)
		}
	}
	return ids, nil
}

func (m fakeModel) Bytes(token int32) []byte {
	if token > 255 {
		return nil
	}
	return []byte{byte(token)}
}

func (m fakeModel) Control(text string) (int32, bool) {
	id, known := map[string]int32{"<|im_start|>": 256, "<|im_end|>": 258}[text]
	return id, known
}

// fakeToken is the nth token of the answer to a prompt.
func fakeToken(prompt []int32, n int) int32 {
	h := fnv.New32a()
	for _, id := range prompt {
		h.Write([]byte{byte(id), byte(id >> 8)})
	}
	h.Write([]byte{byte(n), byte(n >> 8)})
	if h.Sum32()%97 == 0 {
		return fakeEnd
	}
	return int32(h.Sum32() >> 8 % 256)
}

// A fakeEngine answers with fakeToken, one to three tokens a step, and notices when its owner breaks the contract.
type fakeEngine struct {
	rows  int
	step  time.Duration
	fail  atomic.Bool
	busy  atomic.Bool
	last  int64
	jobs  map[int64]*fakeJob
	count Counters

	closed atomic.Bool
}

type fakeJob struct {
	Job
	made int
}

func newFake(rows int, step time.Duration) *fakeEngine {
	return &fakeEngine{rows: rows, step: step, jobs: map[int64]*fakeJob{}}
}

// alone panics where two calls overlap, or one comes after Close.
func (e *fakeEngine) alone() func() {
	if e.busy.Swap(true) || e.closed.Load() {
		panic("the engine is called by two goroutines, or after Close")
	}
	return func() { e.busy.Store(false) }
}

func (e *fakeEngine) Admit(job Job) (Admission, error) {
	defer e.alone()()
	if job.Prompt[0] == '!' {
		return Admission{}, Refusal("prompts with ! are not for this engine")
	}
	if len(e.jobs) == e.rows {
		return Admission{}, ErrFull
	}
	e.last++
	e.jobs[e.last] = &fakeJob{Job: job}
	return Admission{ID: e.last, Shared: len(job.Prompt) - 1}, nil
}

func (e *fakeEngine) Cancel(id int64) {
	defer e.alone()()
	delete(e.jobs, id)
}

func (e *fakeEngine) Step() ([]Event, error) {
	defer e.alone()()
	if e.fail.Load() {
		return nil, errors.New("a fault of the fake")
	}
	time.Sleep(e.step)
	e.count.Steps++
	var events []Event
	for id, job := range e.jobs {
		for range 1 + (int(id)+job.made)%3 {
			event := Event{ID: id, Token: fakeToken(job.Prompt, job.made)}
			job.made++
			e.count.NewTokens++
			switch {
			case event.Token == fakeEnd:
				event.Finish = FinishStop
			case job.made == job.MaxTokens:
				event.Finish = FinishLength
			}
			events = append(events, event)
			if event.Finish != "" {
				delete(e.jobs, id)
				break
			}
		}
	}
	return events, nil
}

func (e *fakeEngine) Counters() Counters {
	defer e.alone()()
	c := e.count
	c.Sequences, c.Pages, c.FreePages = len(e.jobs), e.rows, e.rows-len(e.jobs)
	return c
}

func (e *fakeEngine) Close() {
	defer e.alone()()
	e.closed.Store(true)
}
