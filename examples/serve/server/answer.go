package server

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"time"
)

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
