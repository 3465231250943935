package server

import (
	"encoding/json"
	"strings"
)

// promptTokens are those of /v1/completions' prompt: a text, or token ids.
func promptTokens(m Model, f *fields) ([]int32, error) {
	var text string
	var texts []string
	var ids []*float64
	switch {
	case len(f.Prompt) == 0 || string(f.Prompt) == "null":
		return nil, invalid("prompt", "missing; expected a string or an array of token ids")
	case json.Unmarshal(f.Prompt, &text) == nil:
		return encode(m, "prompt", text)
	case json.Unmarshal(f.Prompt, &ids) == nil:
		return tokens(ids, m.Vocabulary())
	case json.Unmarshal(f.Prompt, &texts) == nil:
		if len(texts) != 1 {
			return nil, invalid("prompt", "%d prompts; expected one", len(texts))
		}
		return encode(m, "prompt", texts[0])
	default:
		return nil, invalid("prompt", "%s; expected a string or an array of token ids", shortened(string(f.Prompt)))
	}
}

func encode(m Model, field, text string) ([]int32, error) {
	ids, err := m.Encode(text)
	if err != nil {
		return nil, invalid(field, "%v", err)
	}
	return ids, nil
}

// The roles of a conversation, with what ChatML calls them.
var roles = map[string]string{"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}

// What SmolLM2 was told in training where nothing else was said.
const defaultSystem = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"

// chatTokens put a conversation into ChatML: <|im_start|>role, newline, words, <|im_end|>, newline; the answer's header stays
// open. The words of a message are never read as control tokens.
func chatTokens(m Model, f *fields) ([]int32, error) {
	start, hasStart := m.Control("<|im_start|>")
	end, hasEnd := m.Control("<|im_end|>")
	if !hasStart || !hasEnd {
		return nil, invalid("messages", "the model %s has no chat format that this server knows; use /v1/completions", m.Name())
	}
	if len(f.Messages) == 0 {
		return nil, invalid("messages", "none; expected at least one")
	}
	var prompt []int32
	put := func(field, role, words string) error {
		ids, err := encode(m, field, role+"\n"+words)
		if err != nil {
			return err
		}
		newline, err := encode(m, field, "\n")
		prompt = append(append(append(append(prompt, start), ids...), end), newline...)
		return err
	}
	for i, message := range f.Messages {
		role, known := roles[message.Role]
		if !known {
			return nil, invalid("messages", "role %q of message %d; expected system, user or assistant", message.Role, i)
		}
		if i == 0 && role != "system" {
			if err := put("messages", "system", defaultSystem); err != nil {
				return nil, err
			}
		}
		words, err := wordsOf(message, i)
		if err != nil {
			return nil, err
		}
		if err := put("messages", role, words); err != nil {
			return nil, err
		}
	}
	header, err := encode(m, "messages", "assistant\n")
	return append(append(prompt, start), header...), err
}

// wordsOf a message are a string, or the texts of an array of parts.
func wordsOf(message message, at int) (string, error) {
	var text string
	if len(message.Content) > 0 && message.Content[0] == '"' && json.Unmarshal(message.Content, &text) == nil {
		return text, nil
	}
	var parts []struct {
		Type string  `json:"type"`
		Text *string `json:"text"`
	}
	if json.Unmarshal(message.Content, &parts) != nil || parts == nil {
		return "", invalid("messages", "content of message %d; expected a string or an array of parts", at)
	}
	var words strings.Builder
	for _, part := range parts {
		if part.Type != "text" || part.Text == nil {
			return "", invalid("messages", "a part of type %q in message %d; this server knows only text", part.Type, at)
		}
		words.WriteString(*part.Text)
	}
	return words.String(), nil
}
