package server

import (
	"fmt"
	"math/rand"
	"strings"
	"testing"
	"unicode/utf8"
)

func TestTextHoldsAnIncompleteCharacterBack(t *testing.T) {
	var s textStream
	euro := "€" // three bytes
	got := []string{s.push([]byte("a" + euro[:1])), s.push([]byte(euro[1:2])), s.push([]byte(euro[2:] + "b")), s.finish()}
	if want := []string{"a", "", "€b", ""}; strings.Join(got, "|") != strings.Join(want, "|") {
		t.Errorf("pieces %q; expected %q", got, want)
	}
}

func TestTextEndsBeforeAStopStringThatTokensCut(t *testing.T) {
	s := textStream{stops: []string{"STOP", "END"}}
	got := []string{s.push([]byte("one S")), s.push([]byte("T")), s.push([]byte("OP two")), s.push([]byte("three")), s.finish()}
	if text := strings.Join(got, ""); text != "one " || got[0] != "one " || !s.stopped {
		t.Errorf("pieces %q, stopped %v; expected \"one \" at once and nothing else", got, s.stopped)
	}
}

func TestTextGivesBackWhatOnlyLookedLikeAStopString(t *testing.T) {
	s := textStream{stops: []string{"STOP"}}
	if text := s.push([]byte("a ST")) + s.push([]byte("ART b ST")) + s.finish(); text != "a START b ST" || s.stopped {
		t.Errorf("text %q, stopped %v", text, s.stopped)
	}
}

// The text of random bytes, cut anywhere, is that of the bytes at once, up to the first stop string.
func TestTextDoesNotDependOnHowBytesAreCut(t *testing.T) {
	seed := rand.Int63()
	t.Log("seed", seed)
	random := rand.New(rand.NewSource(seed))
	alphabet := "aab" + "é€😀" + "\xff\xc3\xe2\x82"
	for round := range 2000 {
		bytes := make([]byte, random.Intn(40))
		for i := range bytes {
			bytes[i] = alphabet[random.Intn(len(alphabet))]
		}
		stops := [][]string{nil, {"ab"}, {"ab", "aab", "a€"}, {"aab😀", "ab"}}[random.Intn(4)]
		want := ""
		for at := 0; at < len(bytes); {
			r, size := utf8.DecodeRune(bytes[at:])
			want, at = want+string(r), at+size
		}
		for end := range len(want) + 1 {
			if stop := firstOf(want[:end], stops); stop >= 0 {
				want = want[:stop]
				break
			}
		}
		s, got := textStream{stops: stops}, ""
		for rest := bytes; len(rest) > 0; {
			n := 1 + random.Intn(len(rest))
			got, rest = got+s.push(rest[:n]), rest[n:]
		}
		got += s.finish()
		if got != want {
			t.Fatalf("round %d: bytes %q, stops %q: %s", round, bytes, stops, fmt.Sprintf("%q; expected %q", got, want))
		}
	}
}
