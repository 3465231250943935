package server

import (
	"strings"
	"unicode/utf8"
)

// A textStream turns the bytes of tokens into text that may be sent: whole characters, and nothing that may yet turn out to be
// the start of a stop string. The text does not depend on how the bytes were cut into tokens.
type textStream struct {
	stops   []string
	bytes   []byte // the start of a character
	pending string // whole characters, a suffix of which may begin a stop string
	stopped bool
}

// push takes the bytes of a token and returns the text that has become certain. Once a stop string is complete, the text ends
// before it and nothing follows.
func (t *textStream) push(bytes []byte) string {
	t.bytes = append(t.bytes, bytes...)
	return t.release(false)
}

// finish returns what was held back. A character that never became whole is U+FFFD.
func (t *textStream) finish() string { return t.release(true) }

func (t *textStream) release(last bool) string {
	if t.stopped {
		return ""
	}
	t.pending += t.characters(last)
	if at := firstOf(t.pending, t.stops); at >= 0 {
		t.stopped = true
		return t.pending[:at]
	}
	certain := len(t.pending)
	if !last {
		certain -= heldBack(t.pending, t.stops)
	}
	text := t.pending[:certain]
	t.pending = t.pending[certain:]
	return text
}

// characters takes the whole characters off the bytes. Each byte that cannot be part of one is U+FFFD.
func (t *textStream) characters(last bool) string {
	var text strings.Builder
	for len(t.bytes) > 0 && (last || utf8.FullRune(t.bytes)) {
		r, size := utf8.DecodeRune(t.bytes)
		text.WriteRune(r)
		t.bytes = t.bytes[size:]
	}
	return text.String()
}

// firstOf is where the stop string begins that is complete first in the text, or −1. Of those that end together it is the longest.
func firstOf(text string, stops []string) int {
	first, end := -1, len(text)+1
	for _, stop := range stops {
		at := strings.Index(text, stop)
		if at >= 0 && (at+len(stop) < end || at+len(stop) == end && at < first) {
			first, end = at, at+len(stop)
		}
	}
	return first
}

// heldBack is the length of the longest end of the text with which a stop string begins.
func heldBack(text string, stops []string) int {
	longest := 0
	for _, stop := range stops {
		for n := min(len(stop)-1, len(text)); n > longest; n-- {
			if strings.HasSuffix(text, stop[:n]) {
				longest = n
			}
		}
	}
	return longest
}
