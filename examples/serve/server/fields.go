package server

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"unicode/utf8"
)

// The fields that both kinds of completions have, and the few of one kind alone. A field that would change the answer and is not
// among them is refused, unless it has the value that changes nothing: an answer is never silently another one than was asked for.
type fields struct {
	Model          string          `json:"model"`
	MaxTokens      *int            `json:"max_tokens"`
	Stream         bool            `json:"stream"`
	StreamOptions  *streamOptions  `json:"stream_options"`
	Stop           json.RawMessage `json:"stop"`
	Temperature    *float64        `json:"temperature"`
	TopP           *float64        `json:"top_p"`
	Seed           *int64          `json:"seed"`
	TopK           *int32          `json:"top_k"`            // not OpenAI's
	MinP           *float64        `json:"min_p"`            // not OpenAI's
	ReturnTokenIDs bool            `json:"return_token_ids"` // not OpenAI's: the answer's token ids, too

	Prompt json.RawMessage `json:"prompt"` // /v1/completions

	Messages            []message `json:"messages"`              // /v1/chat/completions
	MaxCompletionTokens *int      `json:"max_completion_tokens"` // the newer name of max_tokens
}

type streamOptions struct {
	IncludeUsage bool `json:"include_usage"`
}

type message struct {
	Role    string          `json:"role"`
	Content json.RawMessage `json:"content"`
}

var (
	common   = []string{"model", "max_tokens", "stream", "stream_options", "stop", "temperature", "top_p", "seed", "top_k", "min_p", "return_token_ids"}
	ofPrompt = append(slices.Clone(common), "prompt")
	ofChat   = append(slices.Clone(common), "messages", "max_completion_tokens")

	// Fields without an influence on the answer.
	ignored = []string{"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"}

	// Fields that are taken with the value that asks for nothing.
	neutral = map[string][]string{
		"n": {"1"}, "best_of": {"1"}, "echo": {"false"}, "suffix": {`""`}, "logprobs": {"false"}, "top_logprobs": {"0"},
		"presence_penalty": {"0", "0.0"}, "frequency_penalty": {"0", "0.0"}, "logit_bias": {"{}"},
		"tools": {"[]"}, "tool_choice": {`"none"`, `"auto"`}, "response_format": {`{"type":"text"}`},
	}
)

// parse reads a request's body, which may have the fields `known`.
func parse(body []byte, known []string) (*fields, error) {
	if !utf8.Valid(body) {
		return nil, invalid("body", "not UTF-8")
	}
	found := map[string]json.RawMessage{}
	if err := json.Unmarshal(body, &found); err != nil {
		return nil, invalid("body", "expected a JSON object: %v", err)
	}
	for _, name := range slices.Sorted(maps.Keys(found)) {
		if err := checkField(name, found[name], known); err != nil {
			return nil, err
		}
	}
	maps.DeleteFunc(found, func(name string, _ json.RawMessage) bool { return !slices.Contains(known, name) })
	kept, err := json.Marshal(found)
	if err != nil {
		return nil, invalid("body", "%v", err)
	}
	f := &fields{}
	decoder := json.NewDecoder(bytes.NewReader(kept))
	decoder.DisallowUnknownFields() // inside messages and options
	if err := decoder.Decode(f); err != nil {
		return nil, wrongType(err)
	}
	return f, f.check()
}

func checkField(name string, value json.RawMessage, known []string) error {
	if slices.Contains(known, name) || slices.Contains(ignored, name) || string(value) == "null" {
		return nil
	}
	expected, isNeutral := neutral[name]
	if !isNeutral {
		return invalid(shortened(name), "unknown field").coded("unknown_field")
	}
	var compact bytes.Buffer
	json.Compact(&compact, value)
	if slices.Contains(expected, compact.String()) {
		return nil
	}
	return invalid(name, "%s; this server knows only %s", shortened(compact.String()), expected[0]).coded("unsupported_value")
}

// wrongType says which field does not have its type.
func wrongType(err error) error {
	if e, is := err.(*json.UnmarshalTypeError); is && e.Field != "" {
		return invalid(e.Field, "%s; expected %s", e.Value, kindOf(e.Type.String()))
	}
	return invalid("body", "%s", strings.TrimPrefix(err.Error(), "json: "))
}

func kindOf(goType string) string {
	switch {
	case strings.Contains(goType, "int"):
		return "a whole number"
	case strings.Contains(goType, "float"):
		return "a number"
	case strings.Contains(goType, "bool"):
		return "true or false"
	case strings.HasPrefix(goType, "[]"):
		return "an array"
	case strings.Contains(goType, "string"):
		return "a string"
	default:
		return "an object"
	}
}

func (f *fields) check() error {
	for _, part := range []struct {
		name  string
		value *float64
		most  float64
	}{{"temperature", f.Temperature, 2}, {"top_p", f.TopP, 1}, {"min_p", f.MinP, 1}} {
		if part.value != nil && (*part.value < 0 || *part.value > part.most) {
			return invalid(part.name, "%v; expected 0 to %v", *part.value, part.most)
		}
	}
	if f.TopK != nil && *f.TopK < 0 {
		return invalid("top_k", "%d; expected at least 0", *f.TopK)
	}
	if f.StreamOptions != nil && !f.Stream {
		return invalid("stream_options", "given without stream: true")
	}
	if f.MaxTokens != nil && f.MaxCompletionTokens != nil && *f.MaxTokens != *f.MaxCompletionTokens {
		return invalid("max_tokens", "%d, and max_completion_tokens %d; expected one of them", *f.MaxTokens, *f.MaxCompletionTokens)
	}
	return nil
}

// sampling is greedy unless a temperature is given. Without a seed it has a random one.
func (f *fields) sampling() Sampling {
	s := Sampling{Seed: rand.Uint64()}
	if f.Seed != nil {
		s.Seed = uint64(*f.Seed)
	}
	if f.Temperature != nil {
		s.Temperature = float32(*f.Temperature)
	}
	if f.TopP != nil { // 0 keeps the likeliest token; to the engine it is off
		s.TopP = max(float32(*f.TopP), math.SmallestNonzeroFloat32)
	}
	if f.MinP != nil {
		s.MinP = float32(*f.MinP)
	}
	if f.TopK != nil {
		s.TopK = *f.TopK
	}
	return s
}

// maxTokens is how many tokens are asked for; absent: how many where the request does not say.
func (f *fields) maxTokens(absent, limit, room int) (int, error) {
	name, value := "max_tokens", f.MaxTokens
	if f.MaxCompletionTokens != nil {
		name, value = "max_completion_tokens", f.MaxCompletionTokens
	}
	if value == nil {
		return min(absent, limit, room), nil
	}
	if *value < 1 || *value > limit {
		return 0, invalid(name, "%d; expected 1 to %d", *value, limit)
	}
	return *value, nil
}

// stops are the strings at which an answer ends: up to four, none empty.
func (f *fields) stops() ([]string, error) {
	var one string
	var several []string
	switch {
	case len(f.Stop) == 0 || string(f.Stop) == "null":
		return nil, nil
	case json.Unmarshal(f.Stop, &one) == nil:
		several = []string{one}
	case json.Unmarshal(f.Stop, &several) != nil:
		return nil, invalid("stop", "%s; expected a string or an array of strings", shortened(string(f.Stop)))
	}
	if len(several) > 4 {
		return nil, invalid("stop", "%d strings; expected at most 4", len(several))
	}
	for i, s := range several {
		if s == "" || len(s) > 256 {
			return nil, invalid("stop", "string %d has %d bytes; expected 1 to 256", i, len(s))
		}
	}
	return several, nil
}

func shortened(value string) string {
	if len(value) <= 40 {
		return value
	}
	return strings.ToValidUTF8(value[:40], "") + "…"
}

// tokens reads ids of tokens, each below the size of the vocabulary.
func tokens(values []*float64, vocabulary int) ([]int32, error) {
	ids := make([]int32, len(values))
	for i, v := range values {
		if v == nil || *v != math.Trunc(*v) || *v < 0 || *v >= float64(vocabulary) {
			found := "null"
			if v != nil {
				found = fmt.Sprint(*v)
			}
			return nil, invalid("prompt", "token %d is %s; expected a whole number from 0 to %d", i, found, vocabulary-1)
		}
		ids[i] = int32(*v)
	}
	return ids, nil
}
