package server

import (
	"context"
	"errors"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// Why an answer was not finished.
var (
	ErrQueueFull = errors.New("too many requests are waiting")
	ErrStopping  = errors.New("the server is stopping")
	ErrSlow      = errors.New("the client reads more slowly than tokens are made")
)

// A Loop is the one goroutine that owns an engine. Requests come by a channel and tokens leave by a channel of each request, so
// that nothing outside ever makes the engine wait.
type Loop struct {
	engine  Engine
	ends    []int32
	buffer  int
	limit   int64
	metrics *metrics

	arrivals chan *Stream
	queued   atomic.Int64  // in arrivals and in waiting
	draining chan struct{} // closed: no request is taken in any more
	aborting chan struct{} // closed: those that run are ended, too
	done     chan struct{} // closed: the engine is closed
	err      error         // why the engine failed; valid once done is closed

	mu      sync.Mutex
	closing bool // no request is taken in any more
	abort   sync.Once

	// The goroutine's own.
	waiting []*Stream // in the order of arrival
	running map[int64]*Stream
}

// A Stream is a request in the loop. Tokens arrive in order and the channel is closed behind the last one; then Result is valid.
type Stream struct {
	Tokens chan int32
	Shared int // tokens of the prompt that the prefix cache had; valid from the first token on
	Result Result

	ctx                       context.Context
	job                       Job
	count                     int
	arrived, admitted, latest time.Time
}

// A Result is how a request ended: finished, or by an error.
type Result struct {
	Finish Finish
	Err    error
}

func newLoop(engine Engine, ends []int32, queue, buffer int, m *metrics) *Loop {
	return &Loop{
		engine: engine, ends: ends, buffer: buffer, limit: int64(queue), metrics: m,
		arrivals: make(chan *Stream, queue),
		draining: make(chan struct{}), aborting: make(chan struct{}), done: make(chan struct{}),
		running: map[int64]*Stream{},
	}
}

// Submit queues a job. The request ends early once ctx is done.
func (l *Loop) Submit(ctx context.Context, job Job) (*Stream, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closing {
		return nil, ErrStopping
	}
	if l.queued.Load() >= l.limit {
		return nil, ErrQueueFull
	}
	s := &Stream{Tokens: make(chan int32, min(l.buffer, job.MaxTokens)), ctx: ctx, job: job, arrived: time.Now()}
	l.queued.Add(1)
	l.arrivals <- s // has room: it holds as many as may be queued
	return s, nil
}

// Drain ends requests that wait, lets those that run finish until ctx is done, and closes the engine.
func (l *Loop) Drain(ctx context.Context) {
	if l.refuse() {
		close(l.draining)
	}
	select {
	case <-l.done:
	case <-ctx.Done():
		l.abort.Do(func() { close(l.aborting) })
		<-l.done
	}
}

// refuse makes Submit fail from now on; false where it did already.
func (l *Loop) refuse() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	was := l.closing
	l.closing = true
	return !was
}

func (l *Loop) isClosing() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.closing
}

func (l *Loop) run() {
	runtime.LockOSThread() // the engine's calls stay on one thread, whose caches and accelerator's context they share
	defer close(l.done)
	defer l.engine.Close()
	for l.receive() {
		l.dropCancelled()
		l.admit()
		if len(l.running) > 0 {
			begin := time.Now()
			events, err := l.engine.Step()
			if err != nil {
				l.fail(err)
				return
			}
			l.metrics.step(time.Since(begin))
			l.deliver(events)
		}
		l.metrics.engine(l.engine.Counters(), len(l.running))
	}
}

// receive takes in what has arrived, and waits for it where there is nothing else to do. False: the loop ends.
func (l *Loop) receive() bool {
	if len(l.running) == 0 && len(l.waiting) == 0 {
		select {
		case s := <-l.arrivals:
			l.waiting = append(l.waiting, s)
		case <-l.draining:
		}
	}
	stopping := isClosed(l.draining) // asked first: what is sent before draining is closed is found below
	l.collect()
	if !stopping {
		return true
	}
	l.endWaiting(ErrStopping)
	if isClosed(l.aborting) {
		l.endRunning(ErrStopping)
	}
	return len(l.running) > 0
}

func (l *Loop) collect() {
	for {
		select {
		case s := <-l.arrivals:
			l.waiting = append(l.waiting, s)
		default:
			return
		}
	}
}

func (l *Loop) dropCancelled() {
	for id, s := range l.running {
		if s.ctx.Err() != nil {
			l.engine.Cancel(id)
			delete(l.running, id)
			l.end(s, Result{Err: context.Cause(s.ctx)})
		}
	}
	l.waiting = slices.DeleteFunc(l.waiting, func(s *Stream) bool {
		if s.ctx.Err() == nil {
			return false
		}
		l.queued.Add(-1)
		l.end(s, Result{Err: context.Cause(s.ctx)})
		return true
	})
}

// admit hands the engine as many requests as it has room for, in the order of arrival.
func (l *Loop) admit() {
	for len(l.waiting) > 0 {
		s := l.waiting[0]
		admission, err := l.engine.Admit(s.job)
		if errors.Is(err, ErrFull) && len(l.running) > 0 {
			return
		}
		l.waiting = slices.Delete(l.waiting, 0, 1)
		l.queued.Add(-1)
		if err != nil {
			l.end(s, Result{Err: err})
			continue
		}
		s.admitted = time.Now()
		s.Shared = admission.Shared
		l.running[admission.ID] = s
		l.metrics.admitted(s)
	}
}

func (l *Loop) deliver(events []Event) {
	for _, e := range events {
		s, running := l.running[e.ID]
		if !running {
			continue // ended by an earlier event of the step
		}
		result := Result{Finish: e.Finish}
		if result.Finish == "" && slices.Contains(l.ends, e.Token) {
			result.Finish = FinishStop
		}
		select {
		case s.Tokens <- e.Token:
			l.metrics.token(s)
		default:
			result = Result{Err: ErrSlow}
		}
		if result == (Result{}) {
			continue
		}
		if e.Finish == "" {
			l.engine.Cancel(e.ID)
		}
		delete(l.running, e.ID)
		l.end(s, result)
	}
}

func (l *Loop) end(s *Stream, result Result) {
	s.Result = result
	l.metrics.ended(s)
	close(s.Tokens)
}

func (l *Loop) endWaiting(err error) {
	for _, s := range l.waiting {
		l.queued.Add(-1)
		l.end(s, Result{Err: err})
	}
	l.waiting = nil
}

func (l *Loop) endRunning(err error) {
	for id, s := range l.running {
		l.engine.Cancel(id)
		l.end(s, Result{Err: err})
	}
	clear(l.running)
}

// fail ends every request: an engine that has failed is not asked again.
func (l *Loop) fail(err error) {
	l.refuse()
	l.err = err
	l.collect()
	l.endWaiting(err)
	l.endRunning(err)
}

func isClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}
