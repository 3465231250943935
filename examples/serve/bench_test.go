package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
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
	benchPrompt = "Write a long story about the keeper of a lighthouse, his daughter, and a storm that lasts for three days."
	fewTokens   = 8
	manyTokens  = 136
	pairs       = 5
)

// A cost is what decoding took: tokens per second, and seconds of processor time per token, which hardly depend on what else the
// machine does.
type cost struct{ speed, cpu float64 }

// One client beside the C engine's own loop, one thread each, in pairs that alternate. Prompts are not counted.
func TestOneClientBesideTheEngine(t *testing.T) {
	if *enginePath == "" || *modelPath == "" {
		t.Skip("needs -engine and -model: see make bench-serve")
	}
	for _, c := range []struct{ how, mode string }{{"dense", "dense"}, {"lookup", "lookup"}} {
		t.Run(c.how, func(t *testing.T) {
			served := launch(t, "--threads 1 --model "+*modelPath+" --how "+c.how)
			var speeds, cpus []float64
			for n := range pairs + 1 {
				engine, server := engineCost(t, c.mode), served.cost(t)
				if n == 0 {
					continue // the model had to be read
				}
				t.Logf("engine %5.1f tokens/s and %5.2f ms of a processor per token, server %5.1f and %5.2f",
					engine.speed, 1e3*engine.cpu, server.speed, 1e3*server.cpu)
				speeds, cpus = append(speeds, server.speed/engine.speed), append(cpus, engine.cpu/server.cpu)
			}
			t.Logf("%s: the server has %.2f of the engine's tokens per second, and %.2f by processor time (medians)", c.how, median(speeds), median(cpus))
			if median(cpus) < .9 {
				t.Error("expected at least .9 by processor time")
			}
			served.stop(t)
		})
	}
}

func median(values []float64) float64 {
	return slices.Sorted(slices.Values(values))[len(values)/2]
}

// engineCost is what the C engine prints, and the difference of two runs in processor time.
func engineCost(t *testing.T, mode string) cost {
	t.Helper()
	path := filepath.Join(t.TempDir(), "prompt.txt")
	if err := os.WriteFile(path, []byte(benchPrompt), 0o600); err != nil {
		t.Fatal(err)
	}
	run := func(tokens int) (speed, cpu float64) {
		engine := exec.Command(*enginePath, "--model", *modelPath, "--prompt", path, "--tokens", strconv.Itoa(tokens), "--mode", mode, "--threads", "1")
		output, err := engine.Output()
		found := regexp.MustCompile(`(?m)^([\d.]+) tokens a second`).FindSubmatch(output)
		if err != nil || found == nil {
			t.Fatalf("%v: %s", err, output)
		}
		speed, _ = strconv.ParseFloat(string(found[1]), 64)
		return speed, (engine.ProcessState.UserTime() + engine.ProcessState.SystemTime()).Seconds()
	}
	_, before := run(fewTokens)
	speed, after := run(manyTokens)
	return cost{speed, (after - before) / (manyTokens - fewTokens)}
}

// cost is that of an answer, from its first token to its last.
func (p *process) cost(t *testing.T) cost {
	t.Helper()
	body, _ := json.Marshal(map[string]any{
		"messages": []map[string]string{{"role": "user", "content": benchPrompt}}, "max_tokens": manyTokens, "stream": true, "return_token_ids": true,
	})
	response, err := http.Post(p.url+"/v1/chat/completions", "application/json", bytes.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	var first, last time.Time
	var before, after float64
	counted, count := 0, 0 // tokens of the first event; of all
	for lines := bufio.NewScanner(response.Body); lines.Scan(); {
		var event struct {
			Choices []struct {
				TokenIDs []int32 `json:"token_ids"`
			}
		}
		if json.Unmarshal([]byte(strings.TrimPrefix(lines.Text(), "data: ")), &event) != nil || len(event.Choices) == 0 || len(event.Choices[0].TokenIDs) == 0 {
			continue
		}
		last, after = time.Now(), p.processorSeconds(t)
		count += len(event.Choices[0].TokenIDs)
		if counted == 0 {
			first, before, counted = last, after, count
		}
	}
	if count != manyTokens {
		t.Fatalf("status %d, %d tokens", response.StatusCode, count)
	}
	return cost{float64(count-counted) / last.Sub(first).Seconds(), (after - before) / float64(count-counted)}
}

func (p *process) processorSeconds(t *testing.T) float64 {
	t.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", p.Process.Pid))
	fields := strings.Fields(string(text[bytes.LastIndexByte(text, ')')+1:]))
	if err != nil || len(fields) < 13 {
		t.Fatalf("%v: %s", err, text)
	}
	user, _ := strconv.ParseFloat(fields[11], 64)
	system, _ := strconv.ParseFloat(fields[12], 64)
	return (user + system) / 100 // a hundred ticks a second, on every Linux that Go knows
}
