package server

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
)

// metrics are what /metrics shows, in Prometheus' text format.
type metrics struct {
	mu        sync.Mutex
	responses map[response]int64
	ends      map[string]int64
	counters  Counters
	running   int

	queueTime, firstToken, nextToken, stepTime histogram
}

type response struct {
	path   string
	status int
}

func newMetrics() *metrics {
	seconds := []float64{.005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60}
	m := &metrics{responses: map[response]int64{}, ends: map[string]int64{}}
	for _, h := range []*histogram{&m.queueTime, &m.firstToken, &m.nextToken, &m.stepTime} {
		*h = histogram{bounds: seconds, counts: make([]int64, len(seconds)+1)}
	}
	return m
}

func (m *metrics) responded(path string, status int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.responses[response{path, status}]++
}

func (m *metrics) admitted(s *Stream) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.queueTime.observe(s.admitted.Sub(s.arrived))
}

func (m *metrics) token(s *Stream) {
	m.mu.Lock()
	defer m.mu.Unlock()
	now := time.Now()
	if s.count == 0 {
		m.firstToken.observe(now.Sub(s.arrived))
	} else {
		m.nextToken.observe(now.Sub(s.latest))
	}
	s.count++
	s.latest = now
}

func (m *metrics) step(took time.Duration) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.stepTime.observe(took)
}

func (m *metrics) ended(s *Stream) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.ends[reasonOf(s.Result)]++
}

func (m *metrics) engine(c Counters, running int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.counters, m.running = c, running
}

func reasonOf(r Result) string {
	switch {
	case r.Err == nil:
		return string(r.Finish)
	case errors.Is(r.Err, errDone):
		return "stop"
	case errors.Is(r.Err, ErrSlow):
		return "slow"
	case errors.Is(r.Err, ErrStopping):
		return "stopping"
	case errors.Is(r.Err, context.Canceled):
		return "cancelled"
	default:
		return "error"
	}
}

// write shows everything. What is asked of the loop and of Go's runtime comes beside what was counted.
func (m *metrics) write(w io.Writer, waiting int64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	name := func(name, kind, help string) {
		fmt.Fprintf(w, "# HELP serve_%s %s\n# TYPE serve_%s %s\n", name, help, name, kind)
	}
	number := func(title, kind, help string, value int64) {
		name(title, kind, help)
		fmt.Fprintf(w, "serve_%s %d\n", title, value)
	}

	name("http_responses_total", "counter", "Responses by path and status.")
	byPath := func(a, b response) int {
		if a.path != b.path {
			return strings.Compare(a.path, b.path)
		}
		return a.status - b.status
	}
	for _, r := range slices.SortedFunc(maps.Keys(m.responses), byPath) {
		fmt.Fprintf(w, "serve_http_responses_total{path=%q,code=\"%d\"} %d\n", r.path, r.status, m.responses[r])
	}
	name("requests_ended_total", "counter", "Requests that were queued, by the reason of their end.")
	for _, reason := range slices.Sorted(maps.Keys(m.ends)) {
		fmt.Fprintf(w, "serve_requests_ended_total{reason=%q} %d\n", reason, m.ends[reason])
	}

	c := m.counters
	number("requests_waiting", "gauge", "Requests that wait for room in the engine.", waiting)
	number("requests_running", "gauge", "Requests in the engine.", int64(m.running))
	number("requests_preempted", "gauge", "Requests in the engine that gave their pages back for now.", int64(c.Preempted))
	number("pages", "gauge", "Pages of the engine's cache.", int64(c.Pages))
	number("pages_in_use", "gauge", "Pages that requests use.", int64(c.Pages-c.FreePages))
	number("pages_shared", "gauge", "Pages, in use or not, whose contents a prompt may share.", int64(c.SharedPages))

	number("steps_total", "counter", "Steps of the engine.", c.Steps)
	number("prompt_tokens_total", "counter", "Tokens of prompts that were computed.", c.PromptTokens)
	number("prompt_tokens_shared_total", "counter", "Tokens of prompts that were found in the prefix cache.", c.SharedTokens)
	number("generated_tokens_total", "counter", "Tokens that were generated.", c.NewTokens)
	number("draft_tokens_total", "counter", "Tokens that were drafted.", c.Drafted)
	number("draft_tokens_accepted_total", "counter", "Drafted tokens that were right.", c.Accepted)
	number("preemptions_total", "counter", "Times that a request gave its pages back and was computed again.", c.Preemptions)
	number("evictions_total", "counter", "Pages of the prefix cache, or with --host-kv sequences, whose room was needed.", c.Evictions)
	number("slot_hits_total", "counter", "Blocks of keys and values that were in slots when they were asked for, with --host-kv.", c.SlotHits)
	number("slot_misses_total", "counter", "Blocks of keys and values that were in no slot, with --host-kv.", c.SlotMisses)
	number("fetched_bytes_total", "counter", "Bytes of keys and values that were copied from host memory to slots, with --host-kv.", c.FetchedBytes)

	for _, h := range []struct {
		name, help string
		*histogram
	}{
		{"queue_seconds", "From arrival to the engine.", &m.queueTime},
		{"first_token_seconds", "From arrival to the first token.", &m.firstToken},
		{"next_token_seconds", "From one token of an answer to the next.", &m.nextToken},
		{"step_seconds", "A step of the engine.", &m.stepTime},
	} {
		name(h.name, "histogram", h.help)
		h.write(w, "serve_"+h.name)
	}

	var memory runtime.MemStats
	runtime.ReadMemStats(&memory)
	number("go_goroutines", "gauge", "Goroutines.", int64(runtime.NumGoroutine()))
	number("go_heap_bytes", "gauge", "Go's heap in use.", int64(memory.HeapInuse))
	number("resident_memory_bytes", "gauge", "Memory of the process, the engine's included; 0 where it is not known.", residentBytes())
}

func residentBytes() int64 {
	var size, resident int64
	text, _ := os.ReadFile("/proc/self/statm")
	fmt.Sscan(string(text), &size, &resident)
	return resident * int64(os.Getpagesize())
}

// A histogram counts durations by upper bounds in seconds; the last count is of those above all bounds.
type histogram struct {
	bounds []float64
	counts []int64
	sum    float64
}

func (h *histogram) observe(d time.Duration) {
	seconds := d.Seconds()
	at, _ := slices.BinarySearch(h.bounds, seconds)
	h.counts[at]++
	h.sum += seconds
}

func (h *histogram) write(w io.Writer, name string) {
	total := int64(0)
	for i, bound := range h.bounds {
		total += h.counts[i]
		fmt.Fprintf(w, "%s_bucket{le=%q} %d\n", name, strconv.FormatFloat(bound, 'g', -1, 64), total)
	}
	total += h.counts[len(h.bounds)]
	fmt.Fprintf(w, "%s_bucket{le=\"+Inf\"} %d\n%s_sum %g\n%s_count %d\n", name, total, name, h.sum, name, total)
}
