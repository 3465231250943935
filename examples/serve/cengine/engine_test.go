package cengine

import (
	"errors"
	"fmt"
	"math/rand"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/vanward/vanward/examples/serve/server"
)

func open(t *testing.T) *Model {
	t.Helper()
	m, err := OpenModel("", 2)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(m.Close)
	return m
}

func TestTextSurvivesTokens(t *testing.T) {
	m := open(t)
	for _, text := range []string{"", "the rain in the town", "Ünïcode € 😀 \n\t 123", "<|im_end|>"} {
		ids, err := m.Encode(text)
		var bytes []byte
		for _, id := range ids {
			bytes = append(bytes, m.Bytes(id)...)
		}
		if err != nil || string(bytes) != text {
			t.Errorf("%q became %q, %v", text, bytes, err)
		}
	}
	end, known := m.Control("<|im_end|>")
	if !known || m.End()[0] != end || len(m.Bytes(end)) != 0 {
		t.Errorf("<|im_end|> is %d (%v), its bytes %q; tokens that end: %v", end, known, m.Bytes(end), m.End())
	}
}

func TestModelThatCannotBeReadIsAnError(t *testing.T) {
	if _, err := OpenModel("/nowhere.gguf", 1); err == nil || !strings.Contains(err.Error(), "nowhere") {
		t.Errorf("%v", err)
	}
}

func TestOptionsOutOfRangeAreRefused(t *testing.T) {
	if _, err := New(open(t), Options{Rows: 65}); err == nil || !strings.Contains(err.Error(), "rows") {
		t.Errorf("%v; expected the name rows", err)
	}
}

func TestJobThatNeverFitsIsRefused(t *testing.T) {
	e, err := New(open(t), Options{Rows: 1, MaxTokens: 64})
	if err != nil {
		t.Fatal(err)
	}
	defer e.Close()
	var refusal server.Refusal
	if _, err := e.Admit(server.Job{Prompt: make([]int32, 60), MaxTokens: 5}); !errors.As(err, &refusal) {
		t.Errorf("%v; expected a refusal", err)
	}
	if _, err := e.Admit(server.Job{Prompt: make([]int32, 60), MaxTokens: 4}); err != nil {
		t.Error(err)
	}
	if _, err := e.Admit(server.Job{Prompt: make([]int32, 60), MaxTokens: 4}); err != server.ErrFull {
		t.Errorf("%v; expected %v", err, server.ErrFull)
	}
}

// finish steps until all jobs have ended.
func finish(t *testing.T, e *Engine, answers map[int64][]int32) {
	t.Helper()
	for e.Counters().Sequences > 0 {
		collect(t, e, answers)
	}
}

func collect(t *testing.T, e *Engine, answers map[int64][]int32) {
	t.Helper()
	events, err := e.Step()
	if err != nil {
		t.Fatal(err)
	}
	for _, event := range events {
		answers[event.ID] = append(answers[event.ID], event.Token)
	}
}

func randomJob(random *rand.Rand, m *Model) server.Job {
	shared := strings.Repeat("the same beginning again and again ", 4)
	ids, _ := m.Encode(shared[:random.Intn(len(shared))] + fmt.Sprint(random.Intn(6)))
	job := server.Job{Prompt: append([]int32{1}, ids...), MaxTokens: 1 + random.Intn(60)}
	if random.Intn(2) == 0 {
		job.Sampling = server.Sampling{Temperature: .8, TopP: .95, Seed: random.Uint64()}
	}
	return job
}

// Jobs that come, go and are cancelled at random have the tokens that each has alone in an engine of its own.
func TestJobsBesideOthersHaveTheTokensOfJobsAlone(t *testing.T) {
	m := open(t)
	for name, how := range hows {
		if how == Sparse {
			continue // its tokens are not those of dense attention
		}
		for where, hostKV := range map[string]bool{"pages": false, "host memory": true} {
			t.Run(name+" from "+where, func(t *testing.T) { runBesideOthers(t, m, how, hostKV) })
		}
	}
}

func runBesideOthers(t *testing.T, m *Model, how How, hostKV bool) {
	seed := time.Now().UnixNano()
	t.Log("seed", seed)
	random := rand.New(rand.NewSource(seed))
	e, err := New(m, Options{Rows: 6, MaxTokens: 256, Pages: 24, How: how, Chunk: 24, Blocks: 4, HostKV: hostKV})
	if err != nil {
		t.Fatal(err)
	}
	defer e.Close()
	jobs, answers := map[int64]server.Job{}, map[int64][]int32{}
	for begun := 0; begun < 40; {
		job := randomJob(random, m)
		a, err := e.Admit(job)
		if err == nil {
			jobs[a.ID] = job
			begun++
		} else if err != server.ErrFull {
			t.Fatal(err)
		}
		collect(t, e, answers)
		if random.Intn(15) == 0 {
			e.Cancel(a.ID)
			delete(jobs, a.ID)
		}
	}
	finish(t, e, answers)
	c := e.Counters()
	t.Logf("%+v", c)
	if c.FreePages != c.Pages {
		t.Errorf("%d of %d pages are free", c.FreePages, c.Pages)
	}
	for id, job := range jobs {
		if want := aloneTokens(t, m, job); !slices.Equal(answers[id], want) {
			t.Fatalf("%+v: %v; alone %v", job, answers[id], want)
		}
	}
}

func aloneTokens(t *testing.T, m *Model, job server.Job) []int32 {
	t.Helper()
	e, err := New(m, Options{Rows: 1, MaxTokens: 256, How: Dense})
	if err != nil {
		t.Fatal(err)
	}
	defer e.Close()
	a, err := e.Admit(job)
	if err != nil {
		t.Fatal(err)
	}
	answers := map[int64][]int32{}
	finish(t, e, answers)
	return answers[a.ID]
}
