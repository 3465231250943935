package server

import (
	"context"
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
	if f.Model != "" {
		if err := s.checkModel(f.Model); err != nil {
			return nil, err
		}
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
		return nil, invalid("prompt", "%d tokens; a request has room for %d, the answer included", len(prompt), s.options.Context).
			coded("context_length_exceeded")
	}
	most, err := f.maxTokens(form.maxTokens, s.options.MaxTokens, room)
	if err != nil {
		return nil, err
	}
	if most > room {
		return nil, invalid("max_tokens", "%d behind a prompt of %d tokens; a request has room for %d", most, len(prompt), s.options.Context).
			coded("context_length_exceeded")
	}
	stops, err := f.stops()
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancelCause(r.Context())
	stream, err := s.loop.Submit(ctx, Job{Prompt: prompt, MaxTokens: most, Sampling: f.sampling()})
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
		return nil, refused(http.StatusRequestEntityTooLarge, "invalid_request_error", "body_too_large",
			"body: larger than "+byteCount(s.options.MaxBody))
	case errors.As(err, &timeout) && timeout.Timeout():
		return nil, refused(http.StatusRequestTimeout, "invalid_request_error", "body_too_late",
			"body: not complete after "+s.options.ReadTimeout.String())
	case err != nil:
		return nil, invalid("body", "%v", err)
	}
	connection.SetReadDeadline(time.Time{})
	return body, nil
}
