// Package cengine puts the C engine of examples/engine behind the server's interfaces: its model and tokenizer, and its batch over
// vwd_decoder.
package cengine

// #cgo LDFLAGS: -lvanward-engine-parts -lvanward -lm -lpthread
// #include "engine.h"
import "C"

import (
	"errors"
	"fmt"
	"strings"
	"unsafe"

	"github.com/vanward/vanward/examples/serve/server"
)

// Options of an engine, as batch.h has them; zero means its default.
type Options struct {
	Rows      int // jobs at once
	MaxTokens int // of one job, prompt and answer
	Pages     int // of 16 tokens
	Chunk     int // prompt tokens of a step
	MaxDrafts int // of a job in a step
	Blocks    int // of 16 tokens, that a sparse step reads for each KV head
	How       How

	HostKV   bool     // keys and values in host memory, and in slots what sparse steps read
	Slots    int      // with HostKV: tokens of a layer that there are slots for
	Strategy Strategy // with HostKV: how sparse steps attend
}

// A Strategy is how sparse steps attend on a tiered cache. Vanward has the text of Serial.
type Strategy uint32

const (
	Serial   Strategy = C.VWD_STRATEGY_SERIAL
	AsyncTLS Strategy = C.VWD_STRATEGY_ASYNC_TLS
	Vanward  Strategy = C.VWD_STRATEGY_VANWARD
)

// ParseStrategy knows serial, async-tls and vanward.
func ParseStrategy(name string) (Strategy, error) {
	switch name {
	case "serial":
		return Serial, nil
	case "async-tls":
		return AsyncTLS, nil
	case "vanward":
		return Vanward, nil
	}
	return 0, fmt.Errorf("%q; expected serial, async-tls or vanward", name)
}

// How tokens are computed. All but Sparse give the text of dense attention.
type How int

const (
	Dense      How = C.BATCH_DENSE
	Sparse     How = C.BATCH_SPARSE
	Lookup     How = C.BATCH_LOOKUP
	Self       How = C.BATCH_SELF
	SelfLookup How = C.BATCH_SELF_LOOKUP
	LookupTree How = C.BATCH_LOOKUP_TREE
)

var hows = map[string]How{"dense": Dense, "sparse": Sparse, "lookup": Lookup, "lookup-tree": LookupTree, "self": Self, "self-lookup": SelfLookup}

// ParseHow knows dense, sparse, lookup, lookup-tree, self and self-lookup.
func ParseHow(name string) (How, error) {
	how, known := hows[name]
	if !known {
		return 0, fmt.Errorf("%q; expected dense, sparse, lookup, lookup-tree, self or self-lookup", name)
	}
	return how, nil
}

// An Engine is a batch. It implements server.Engine.
type Engine struct {
	batch  *C.batch
	how    How
	end    int32
	made   []C.batch_event // by a step
	events []server.Event
}

// New makes an engine on a model, which outlives it.
func New(m *Model, o Options) (*Engine, error) {
	var why C.batch_error
	options := C.batch_options{
		rows: C.int(o.Rows), max_tokens: C.int(o.MaxTokens), pages: C.int(o.Pages), chunk: C.int(o.Chunk), max_drafts: C.int(o.MaxDrafts),
		k: C.int(o.Blocks), host_kv: C.bool(o.HostKV), slots: C.int(o.Slots), strategy: C.uint32_t(o.Strategy),
	}
	batch := C.batch_create(m.model, m.session, &options, &why)
	if batch == nil {
		return nil, errors.New(text(&why))
	}
	most := int(C.batch_max_events(batch))
	return &Engine{batch: batch, how: o.How, end: m.ends[0], made: make([]C.batch_event, most), events: make([]server.Event, 0, most)}, nil
}

func text(why *C.batch_error) string {
	return strings.TrimSpace(C.GoString(&why.text[0]))
}

// Admit copies the prompt, so that no memory of Go's is kept.
func (e *Engine) Admit(job server.Job) (server.Admission, error) {
	before := e.Counters().SharedTokens
	var id C.int64_t
	var why C.batch_error
	prompt := (*C.int32_t)(unsafe.Pointer(&job.Prompt[0]))
	how := job.Sampling
	sampling := C.batch_sampling{
		temperature: C.float(how.Temperature), top_p: C.float(how.TopP), min_p: C.float(how.MinP), top_k: C.int(how.TopK), seed: C.uint64_t(how.Seed),
	}
	switch C.admit(e.batch, prompt, C.int(len(job.Prompt)), C.int(job.MaxTokens), C.int32_t(e.end), C.batch_how(e.how), sampling, &id, &why) {
	case C.BATCH_ADMITTED:
		return server.Admission{ID: int64(id), Shared: int(e.Counters().SharedTokens - before)}, nil
	case C.BATCH_FULL:
		return server.Admission{}, server.ErrFull
	default:
		return server.Admission{}, server.Refusal(text(&why))
	}
}

func (e *Engine) Cancel(id int64) { C.batch_cancel(e.batch, C.int64_t(id)) }

func (e *Engine) Step() ([]server.Event, error) {
	var why C.batch_error
	n := C.batch_step(e.batch, &e.made[0], C.int(len(e.made)), &why)
	if n < 0 {
		return nil, errors.New(text(&why))
	}
	e.events = e.events[:0]
	for _, made := range e.made[:n] {
		e.events = append(e.events, server.Event{ID: int64(made.id), Token: int32(made.token), Finish: finishes[made.finish]})
	}
	return e.events, nil
}

var finishes = map[C.batch_finish]server.Finish{
	C.BATCH_RUNNING: "", C.BATCH_STOPPED: server.FinishStop, C.BATCH_LENGTH: server.FinishLength,
}

func (e *Engine) Counters() server.Counters {
	var c C.batch_counters
	C.batch_count(e.batch, &c)
	return server.Counters{
		Steps: int64(c.steps), PromptTokens: int64(c.prompt_tokens), SharedTokens: int64(c.shared_tokens), NewTokens: int64(c.new_tokens),
		Drafted: int64(c.drafted), Accepted: int64(c.accepted), Preemptions: int64(c.preemptions), Evictions: int64(c.evictions),
		Sequences: int(c.sequences), Preempted: int(c.waiting), Pages: int(c.pages), FreePages: int(c.free_pages), SharedPages: int(c.known_pages),
		SlotHits: int64(c.slot_hits), SlotMisses: int64(c.slot_misses), FetchedBytes: int64(c.fetched_bytes),
	}
}

func (e *Engine) Close() {
	C.batch_free(e.batch)
	e.batch = nil
}
