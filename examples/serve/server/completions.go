package server

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"time"
)

// A form is what the two kinds of completions differ in.
type form struct {
	id, object, chunk string
	fields            []string
	prompt            func(Model, *fields) ([]int32, error)
	maxTokens         int // where a request does not say; further limits apply
	whole, piece      func(c *choice, text string)
	opening           *choice // of the first piece of a stream
}

const unlimited = 1 << 30

var textForm = form{
	id: "cmpl-", object: "text_completion", chunk: "text_completion", fields: ofPrompt, prompt: promptTokens, maxTokens: 16,
	whole: func(c *choice, text string) { c.Text = &text },
	piece: func(c *choice, text string) { c.Text = &text },
}

var chatForm = form{
	id: "chatcmpl-", object: "chat.completion", chunk: "chat.completion.chunk", fields: ofChat, prompt: chatTokens, maxTokens: unlimited,
	whole: func(c *choice, text string) { c.Message = &words{Role: "assistant", Content: &text} },
	piece: func(c *choice, text string) {
		c.Delta = &words{}
		if text != "" {
			c.Delta.Content = &text
		}
	},
	opening: &choice{Delta: &words{Role: "assistant", Content: new(string)}},
}

// The JSON of an answer, and of a piece of a streamed one.
type reply struct {
	ID      string   `json:"id"`
	Object  string   `json:"object"`
	Created int64    `json:"created"`
	Model   string   `json:"model"`
	Choices []choice `json:"choices"`
	Usage   *usage   `json:"usage,omitempty"`
}

type choice struct {
	Index        int       `json:"index"`
	Text         *string   `json:"text,omitempty"`
	Message      *words    `json:"message,omitempty"`
	Delta        *words    `json:"delta,omitempty"`
	TokenIDs     []int32   `json:"token_ids,omitempty"`
	Logprobs     *struct{} `json:"logprobs"`
	FinishReason *Finish   `json:"finish_reason"`
}

type words struct {
	Role    string  `json:"role,omitempty"`
	Content *string `json:"content,omitempty"`
}

type usage struct {
	PromptTokens     int           `json:"prompt_tokens"`
	CompletionTokens int           `json:"completion_tokens"`
	TotalTokens      int           `json:"total_tokens"`
	PromptDetails    promptDetails `json:"prompt_tokens_details"`
}

type promptDetails struct {
	CachedTokens int `json:"cached_tokens"`
}

// errDone ends a request in the engine whose text has ended by a stop string.
var errDone = errors.New("a stop string is complete")

// An answer is a request on its way: tokens come out of the loop, text leaves.
type answer struct {
	form   form
	fields *fields
	stream *Stream
	text   textStream
	cancel context.CancelCauseFunc
	reply  reply
	usage  usage
}

// complete serves one request of either form.
func (s *Server) complete(w http.ResponseWriter, r *http.Request, form form) {
	a, err := s.begin(w, r, form)
	if err != nil {
		s.refuse(w, err)
		return
	}
	defer a.cancel(context.Canceled)
	if a.fields.Stream {
		s.sendPieces(w, a)
	} else {
		s.sendWhole(w, a)
	}
}

// begin reads the request, checks it and queues it.
func (s *Server) begin(w http.ResponseWriter, r *http.Request, form form) (*answer, error) {
	body, err := s.read(w, r)
	if err != nil {
		return nil, err
	}
	f, err := parse(body, form.fields)
	if err != nil {
		return nil, err
	}
	if f.Model != "" && f.Model != s.model.Name() {
		return nil, refused(http.StatusNotFound, "invalid_request_error", "model_not_found", "model: "+shortened(f.Model)+"; this server has "+s.model.Name())
	}
	prompt, err := form.prompt(s.model, f)
	if err != nil {
		return nil, err
	}
	room := s.options.Context - len(prompt)
	if len(prompt) == 0 {
		return nil, invalid("prompt", "no tokens; expected at least one")
	}
	if room < 1 {
		return nil, invalid("prompt", "%d tokens; a request has room for %d, the answer included", len(prompt), s.options.Context).coded("context_length_exceeded")
	}
	most, err := f.maxTokens(form.maxTokens, s.options.MaxTokens, room)
	if err != nil {
		return nil, err
	}
	if most > room {
		return nil, invalid("max_tokens", "%d behind a prompt of %d tokens; a request has room for %d", most, len(prompt), s.options.Context).coded("context_length_exceeded")
	}
	stops, err := f.stops()
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancelCause(r.Context())
	stream, err := s.loop.Submit(ctx, Job{Prompt: prompt, MaxTokens: most})
	if err != nil {
		cancel(err)
		return nil, err
	}
	return &answer{
		form: form, fields: f, stream: stream, text: textStream{stops: stops}, cancel: cancel,
		reply: reply{ID: form.id + s.newID(), Created: time.Now().Unix(), Model: s.model.Name()},
		usage: usage{PromptTokens: len(prompt)},
	}, nil
}

// read takes the body in, within limits of size and time. The time ends with the body: the answer has its own.
func (s *Server) read(w http.ResponseWriter, r *http.Request) ([]byte, error) {
	connection := http.NewResponseController(w)
	connection.SetReadDeadline(time.Now().Add(s.options.ReadTimeout))
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, s.options.MaxBody))
	if err != nil {
		w.Header().Set("Connection", "close") // the rest of the body is not read
	}
	var tooLarge *http.MaxBytesError
	var timeout interface{ Timeout() bool }
	switch {
	case errors.As(err, &tooLarge):
		return nil, refused(http.StatusRequestEntityTooLarge, "invalid_request_error", "body_too_large", "body: larger than "+byteCount(s.options.MaxBody))
	case errors.As(err, &timeout) && timeout.Timeout():
		return nil, refused(http.StatusRequestTimeout, "invalid_request_error", "body_too_late", "body: not complete after "+s.options.ReadTimeout.String())
	case err != nil:
		return nil, invalid("body", "%v", err)
	}
	connection.SetReadDeadline(time.Time{})
	return body, nil
}

// A part is what has become certain of an answer since the last part.
type part struct {
	text string
	ids  []int32
	last bool
}

// next waits for a token and takes along what has arrived beside it.
func (a *answer) next(m Model) part {
	var p part
	for token, more := <-a.stream.Tokens; ; {
		if !more {
			p.text += a.text.finish()
			p.last = true
			return p
		}
		p.ids = append(p.ids, token)
		a.usage.CompletionTokens++
		p.text += a.text.push(m.Bytes(token))
		if a.text.stopped {
			a.cancel(errDone)
			p.last = true
			return p
		}
		select {
		case token, more = <-a.stream.Tokens:
		default:
			return p
		}
	}
}

// result is how the request ended, valid behind the last part.
func (a *answer) result() Result {
	if a.text.stopped {
		return Result{Finish: FinishStop}
	}
	return a.stream.Result
}

func (a *answer) total() *usage {
	u := a.usage
	u.PromptDetails.CachedTokens = a.stream.Shared
	u.TotalTokens = u.PromptTokens + u.CompletionTokens
	return &u
}

// choice shows the tokens only to those who asked for them.
func (a *answer) choice(ids []int32, finish *Finish) choice {
	c := choice{FinishReason: finish}
	if a.fields.ReturnTokenIDs {
		c.TokenIDs = ids
	}
	return c
}

func (s *Server) sendWhole(w http.ResponseWriter, a *answer) {
	var whole part
	for !whole.last {
		p := a.next(s.model)
		whole = part{whole.text + p.text, append(whole.ids, p.ids...), p.last}
	}
	result := a.result()
	if result.Err != nil {
		s.refuse(w, result.Err)
		return
	}
	c := a.choice(whole.ids, &result.Finish)
	a.form.whole(&c, whole.text)
	a.reply.Object, a.reply.Choices, a.reply.Usage = a.form.object, []choice{c}, a.total()
	http.NewResponseController(w).SetWriteDeadline(time.Now().Add(s.options.WriteTimeout))
	writeJSON(w, http.StatusOK, a.reply)
}

// sendPieces streams an answer as server-sent events. Nothing is sent before the first token, so that a request that is refused
// while it waits has a status of its own.
func (s *Server) sendPieces(w http.ResponseWriter, a *answer) {
	events := &eventWriter{w: w, connection: http.NewResponseController(w), timeout: s.options.WriteTimeout}
	a.reply.Object = a.form.chunk
	for {
		p := a.next(s.model)
		failed := p.last && a.result().Err != nil
		if failed && !events.begun {
			s.refuse(w, a.result().Err)
			return
		}
		if !a.sendPart(events, p) {
			return // the client is gone
		}
		switch {
		case failed:
			events.send(failureOf(a.result().Err).body())
			return
		case p.last:
			a.sendEnd(events)
			return
		}
	}
}

// sendPart is false where the client cannot be reached any more.
func (a *answer) sendPart(events *eventWriter, p part) bool {
	if !events.begun && a.form.opening != nil && !a.send(events, *a.form.opening) {
		return false
	}
	c := a.choice(p.ids, nil)
	if p.text == "" && len(c.TokenIDs) == 0 {
		return true
	}
	a.form.piece(&c, p.text)
	return a.send(events, c)
}

// sendEnd says why the answer ends, and what it took where the client wants to know.
func (a *answer) sendEnd(events *eventWriter) {
	finish := a.result().Finish
	end := a.choice(nil, &finish)
	a.form.piece(&end, "")
	if !a.send(events, end) {
		return
	}
	if o := a.fields.StreamOptions; o != nil && o.IncludeUsage {
		a.reply.Usage = a.total()
		if !a.send(events) {
			return
		}
	}
	events.sendText("[DONE]")
}

func (a *answer) send(events *eventWriter, choices ...choice) bool {
	a.reply.Choices = append([]choice{}, choices...) // [] where there are none, not null
	return events.send(a.reply)
}

// An eventWriter writes server-sent events, each within a time limit.
type eventWriter struct {
	w          http.ResponseWriter
	connection *http.ResponseController
	timeout    time.Duration
	begun      bool
}

// send is false where the client cannot be reached any more.
func (e *eventWriter) send(value any) bool {
	text, err := json.Marshal(value)
	return err == nil && e.sendText(string(text))
}

func (e *eventWriter) sendText(text string) bool {
	if !e.begun {
		e.begun = true
		header := e.w.Header()
		header.Set("Content-Type", "text/event-stream")
		header.Set("Cache-Control", "no-cache")
		header.Set("X-Accel-Buffering", "no") // a proxy in between passes each event on
		e.w.WriteHeader(http.StatusOK)
	}
	e.connection.SetWriteDeadline(time.Now().Add(e.timeout))
	if _, err := io.WriteString(e.w, "data: "+text+"\n\n"); err != nil {
		return false
	}
	return e.connection.Flush() == nil
}
