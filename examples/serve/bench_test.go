package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"flag"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"
)

var (
	enginePath = flag.String("engine", "", "vanward-engine: the C engine's own loop, to be compared with")
	modelPath  = flag.String("model", "", "the model of both")
)

const (
	benchToken = 96
	pairs      = 9
)

// Tokens per second of one client, from the first token to the last, beside the C engine's own loop with the same prompt, in pairs
// that alternate.
func TestOneClientBesideTheEngine(t *testing.T) {
	if *enginePath == "" || *modelPath == "" {
		t.Skip("needs -engine and -model: see make bench-serve")
	}
	for _, c := range []struct{ how, mode string }{{"dense", "dense"}, {"lookup", "dense-drafts"}} {
		t.Run(c.how, func(t *testing.T) {
			prompt := benchPrompt(t)
			served := launch(t, "--model "+*modelPath+" --how "+c.how)
			var engine, server, ratios []float64
			for n := range pairs + 1 {
				e, s := engineSpeed(t, c.mode, prompt), clientSpeed(t, served.url, prompt)
				if n == 0 {
					continue // the prompt has not been taken in, nor the model read
				}
				engine, server, ratios = append(engine, e), append(server, s), append(ratios, s/e)
			}
			t.Logf("%s: engine %.1f tokens/s, server %.1f, ratio %.2f (medians; ratios %.2f)", c.how, median(engine), median(server), median(ratios), ratios)
			if median(ratios) < .9 {
				t.Errorf("ratio %.2f; expected at least .9", median(ratios))
			}
			served.stop(t)
		})
	}
}

func median(values []float64) float64 {
	return slices.Sorted(slices.Values(values))[len(values)/2]
}

// benchPrompt is a file with a prompt whose answer is long.
func benchPrompt(t *testing.T) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "prompt.txt")
	if err := os.WriteFile(path, []byte("Write a long story about the keeper of a lighthouse, his daughter, and a storm that lasts for three days."), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// engineSpeed is what the C engine prints for a mode.
func engineSpeed(t *testing.T, mode, prompt string) float64 {
	t.Helper()
	output, err := exec.Command(*enginePath, "--model", *modelPath, "--prompt", prompt, "--tokens", strconv.Itoa(benchToken), "--mode", mode).Output()
	found := regexp.MustCompile(`(?m)^dense(?:, drafted: prompt lookup)? +([\d.]+)`).FindSubmatch(output)
	if err != nil || found == nil {
		t.Fatalf("%v: %s", err, output)
	}
	speed, _ := strconv.ParseFloat(string(found[1]), 64)
	return speed
}

func clientSpeed(t *testing.T, url, promptPath string) float64 {
	t.Helper()
	prompt, err := os.ReadFile(promptPath)
	if err != nil {
		t.Fatal(err)
	}
	body, _ := json.Marshal(map[string]any{
		"messages": []map[string]string{{"role": "user", "content": string(prompt)}}, "max_tokens": benchToken, "stream": true, "return_token_ids": true,
	})
	response, err := http.Post(url+"/v1/chat/completions", "application/json", bytes.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	var first, last time.Time
	before, count := 0, 0 // tokens of the first event; of all
	for lines := bufio.NewScanner(response.Body); lines.Scan(); {
		var p struct {
			Choices []struct {
				TokenIDs []int32 `json:"token_ids"`
			}
		}
		if json.Unmarshal([]byte(strings.TrimPrefix(lines.Text(), "data: ")), &p) != nil || len(p.Choices) == 0 || len(p.Choices[0].TokenIDs) == 0 {
			continue
		}
		last = time.Now()
		count += len(p.Choices[0].TokenIDs)
		if before == 0 {
			first, before = last, count
		}
	}
	if count != benchToken {
		t.Fatalf("status %d, %d tokens", response.StatusCode, count)
	}
	return float64(count-before) / last.Sub(first).Seconds()
}
