// Package server is an HTTP server in front of an engine that decodes several requests at once. Read it in this order: engine
// (what is served), loop (the goroutine that owns the engine), text, fields, prompt, completions and answer (a request's way in and
// out), server (the routes), metrics.
package server

import "errors"

// A Model turns text into tokens and back. Its methods may be called by many goroutines at once.
type Model interface {
	Name() string
	Vocabulary() int
	// Context is the largest number of tokens of a request, prompt and answer together.
	Context() int
	// Encode never gives a control token. It fails where the text has something that no token stands for.
	Encode(text string) ([]int32, error)
	// Bytes are what a token stands for, perhaps a part of a character; none for a control token.
	Bytes(token int32) []byte
	// Control is the id of a control token, such as "<|im_start|>".
	Control(text string) (id int32, known bool)
	// End are the tokens that end an answer, the one that the engine itself knows first.
	End() []int32
}

// An Engine decodes. Its methods are called by one goroutine, on one thread.
type Engine interface {
	// Admit takes a job in. ErrFull: there is room once another job has ended. A Refusal says why there never will be.
	Admit(job Job) (Admission, error)
	// Cancel ends a job without an event. Ids of jobs that have ended are ignored.
	Cancel(id int64)
	// Step computes the next tokens of all jobs. The events are valid until the next call. After an error the engine can only be
	// closed.
	Step() ([]Event, error)
	Counters() Counters
	Close()
}

// A Job is what an engine is asked for. Decoding is greedy; how to sample would stand here.
type Job struct {
	Prompt    []int32
	MaxTokens int
	Sampling  Sampling
}

// Sampling is how tokens are drawn from what the model says. The zero value is greedy decoding.
type Sampling struct {
	Temperature float32 // 0: greedy
	TopP, MinP  float32 // 0: off
	TopK        int32   // 0: off
	Seed        uint64
}

// An Admission is a job in the engine: its id, and how many tokens of its prompt the prefix cache had when it came.
type Admission struct {
	ID     int64
	Shared int
}

// ErrFull is what Admit returns while there is no room beside the jobs in the engine.
var ErrFull = errors.New("the engine is full")

// A Refusal says why an engine can never do a job.
type Refusal string

func (r Refusal) Error() string { return string(r) }

// An Event is one token of a job. The last one says why the job has ended.
type Event struct {
	ID     int64
	Token  int32
	Finish Finish
}

// Finish is why an answer ends, in the words of the API; empty while it goes on.
type Finish string

const (
	FinishStop   Finish = "stop"   // a token that ends the answer, or a stop string
	FinishLength Finish = "length" // as many tokens as were asked for
)

// Counters are what an engine tells of itself. The first ones only grow.
type Counters struct {
	Steps, PromptTokens, SharedTokens, NewTokens, Drafted, Accepted, Preemptions, Evictions int64

	// With keys and values in host memory: blocks that sparse steps asked for and that were in slots of device memory, and those that were not;
	// bytes that were copied to slots. Else 0.
	SlotHits, SlotMisses, FetchedBytes int64

	Sequences, Preempted          int // that are in the engine; of these, those that gave their pages back for now
	Pages, FreePages, SharedPages int // of the pool; that nobody uses; whose contents a prompt may share
}
