package server

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"sync/atomic"
	"time"
)

// Options are the limits of a server. Zero means the default.
type Options struct {
	Context      int           // tokens of a request, prompt and answer; the model's context
	Queue        int           // requests that may wait for room in the engine; 128
	MaxTokens    int           // of an answer; 1024
	MaxBody      int64         // bytes of a request; 256 KiB
	Buffer       int           // tokens that a client may lag behind before its request is ended; 256
	ReadTimeout  time.Duration // for a request's body; 10 s
	WriteTimeout time.Duration // for each write to a client; 10 s
	Log          *slog.Logger  // a line per request; nil: none
}

// A Server answers the usual requests for completions with one engine.
type Server struct {
	model   Model
	options Options
	loop    *Loop
	metrics *metrics
	begun   time.Time
	ids     atomic.Int64
}

// New starts the goroutine that owns the engine, until Drain.
func New(model Model, engine Engine, o Options) *Server {
	o.Context = min(orDefault(o.Context, model.Context()), model.Context())
	o.Queue = orDefault(o.Queue, 128)
	o.MaxTokens = orDefault(o.MaxTokens, 1024)
	o.MaxBody = orDefault(o.MaxBody, 256<<10)
	o.Buffer = orDefault(o.Buffer, 256)
	o.ReadTimeout = orDefault(o.ReadTimeout, 10*time.Second)
	o.WriteTimeout = orDefault(o.WriteTimeout, 10*time.Second)
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	s := &Server{model: model, options: o, metrics: newMetrics(), begun: time.Now()}
	s.metrics.engine(engine.Counters(), 0)
	s.loop = newLoop(engine, model.End(), o.Queue, o.Buffer, s.metrics)
	go s.loop.run()
	return s
}

func orDefault[T comparable](value, fallback T) T {
	var zero T
	if value == zero {
		return fallback
	}
	return value
}

// Drain refuses new requests, ends those that wait, lets those that run finish until ctx is done, and closes the engine.
func (s *Server) Drain(ctx context.Context) { s.loop.Drain(ctx) }

// Done is closed once the engine is closed: after Drain, or because it failed.
func (s *Server) Done() <-chan struct{} { return s.loop.done }

// Err is why the engine failed, valid once Done is closed.
func (s *Server) Err() error { return s.loop.err }

// Handler has the server's routes.
func (s *Server) Handler() http.Handler {
	mux := http.NewServeMux()
	route := func(method, path string, handle http.HandlerFunc) {
		mux.HandleFunc(path, func(w http.ResponseWriter, r *http.Request) {
			if r.Method != method && (method != http.MethodGet || r.Method != http.MethodHead) {
				w.Header().Set("Allow", method)
				refused(http.StatusMethodNotAllowed, "invalid_request_error", "method_not_allowed", r.Method+"; expected "+method).write(w)
				return
			}
			handle(w, r)
		})
	}
	route(http.MethodPost, "/v1/completions", func(w http.ResponseWriter, r *http.Request) { s.complete(w, r, textForm) })
	route(http.MethodPost, "/v1/chat/completions", func(w http.ResponseWriter, r *http.Request) { s.complete(w, r, chatForm) })
	route(http.MethodGet, "/v1/models", s.listModels)
	route(http.MethodGet, "/v1/models/{model}", s.showModel)
	route(http.MethodGet, "/healthz", s.health)
	route(http.MethodGet, "/metrics", s.showMetrics)
	mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		refused(http.StatusNotFound, "invalid_request_error", "not_found", "no such path: "+shortened(r.URL.Path)).write(w)
	})
	return s.recorded(mux)
}

// recorded counts responses and logs them.
func (s *Server) recorded(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		begin := time.Now()
		recorder := &recorder{ResponseWriter: w, status: http.StatusOK}
		http.NewResponseController(w).SetWriteDeadline(begin.Add(s.options.WriteTimeout)) // not that of the connection's last request
		next.ServeHTTP(recorder, r)
		path := r.Pattern
		if path == "/" {
			path = "other"
		}
		s.metrics.responded(path, recorder.status)
		s.options.Log.Info("request", "method", r.Method, "path", path, "status", recorder.status, "took", time.Since(begin).Round(time.Millisecond))
	})
}

type recorder struct {
	http.ResponseWriter
	status int
}

func (r *recorder) WriteHeader(status int) {
	r.status = status
	r.ResponseWriter.WriteHeader(status)
}

// Unwrap lets http.ResponseController reach the connection.
func (r *recorder) Unwrap() http.ResponseWriter { return r.ResponseWriter }

// The status that is recorded where the client has gone before it had an answer.
const clientGone = 499

// refuse answers with an error, unless nobody is there to read it.
func (s *Server) refuse(w http.ResponseWriter, err error) {
	if errors.Is(err, context.Canceled) {
		if recorder, is := w.(*recorder); is {
			recorder.status = clientGone
		}
		return
	}
	f := failureOf(err)
	if f.status == http.StatusInternalServerError {
		s.options.Log.Error("failed", "error", err)
	}
	http.NewResponseController(w).SetWriteDeadline(time.Now().Add(s.options.WriteTimeout))
	f.write(w)
}

func (s *Server) listModels(w http.ResponseWriter, r *http.Request) {
	writeJSON(w, http.StatusOK, map[string]any{"object": "list", "data": []any{s.aboutModel()}})
}

func (s *Server) showModel(w http.ResponseWriter, r *http.Request) {
	if err := s.checkModel(r.PathValue("model")); err != nil {
		s.refuse(w, err)
		return
	}
	writeJSON(w, http.StatusOK, s.aboutModel())
}

func (s *Server) aboutModel() any {
	return map[string]any{
		"id": s.model.Name(), "object": "model", "created": s.begun.Unix(), "owned_by": "vanward", "max_model_len": s.options.Context,
	}
}

func (s *Server) checkModel(name string) error {
	if name == s.model.Name() {
		return nil
	}
	return refused(http.StatusNotFound, "invalid_request_error", "model_not_found", "model: "+shortened(name)+"; this server has "+s.model.Name())
}

// health is 200 while requests are taken.
func (s *Server) health(w http.ResponseWriter, r *http.Request) {
	if s.loop.isClosing() {
		refused(http.StatusServiceUnavailable, "server_error", "stopping", "the server takes no requests any more").write(w)
		return
	}
	writeJSON(w, http.StatusOK, map[string]string{"status": "ok"})
}

func (s *Server) showMetrics(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Content-Type", "text/plain; version=0.0.4")
	s.metrics.write(w, s.loop.queued.Load())
}

func (s *Server) newID() string { return fmt.Sprintf("%x-%d", s.begun.UnixNano(), s.ids.Add(1)) }

func byteCount(n int64) string { return fmt.Sprintf("%d bytes", n) }
