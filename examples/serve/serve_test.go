package main

import (
	"bufio"
	"context"
	"flag"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/vanward/vanward/examples/serve/load"
)

var soak = flag.Duration("soak", 15*time.Second, "how long TestSoak has clients ask")

// raced: the race detector watches. Its own memory grows with what it watches.
var raced = false

// The test's own program is the server where this variable holds the command line.
const commandLine = "SERVE_TEST_COMMAND_LINE"

func TestMain(m *testing.M) {
	if words := os.Getenv(commandLine); words != "" {
		os.Args = append(os.Args[:1], strings.Fields(words)...)
		main()
		return
	}
	flag.Parse()
	os.Exit(m.Run())
}

// A process is a server of its own.
type process struct {
	*exec.Cmd
	url string
}

// launch starts a server on a free port.
func launch(t *testing.T, words string) *process {
	t.Helper()
	p := &process{Cmd: exec.Command(os.Args[0])}
	p.Env = append(os.Environ(), commandLine+"=--quiet --listen 127.0.0.1:0 "+words)
	output, err := p.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := p.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.Process.Kill() })
	address := make(chan string, 1)
	go func() { // what it says stays readable in the test's output
		for lines := bufio.NewScanner(output); lines.Scan(); {
			fmt.Println("  server:", lines.Text())
			if _, url, begun := strings.Cut(lines.Text(), " at http"); begun {
				address <- "http" + url
			}
		}
	}()
	select {
	case p.url = <-address:
	case <-time.After(20 * time.Second):
		t.Fatal("the server does not begin")
	}
	return p
}

// stop tells the server to stop and checks that it does, cleanly and in time.
func (p *process) stop(t *testing.T) {
	t.Helper()
	begin := time.Now()
	if err := p.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- p.Wait() }()
	select {
	case err := <-ended:
		if err != nil {
			t.Errorf("the server ended with %v; expected status 0", err)
		}
		t.Logf("stopped in %v", time.Since(begin).Round(time.Millisecond))
	case <-time.After(10 * time.Second):
		t.Error("the server still runs 10 s after SIGTERM")
	}
}

// cases share beginnings of prompts, differ in length, and end in each way.
func cases() []load.Case {
	preamble := strings.Repeat("A preamble that many requests share, long enough for some pages of the cache. ", 2)
	var all []load.Case
	for n := range 24 {
		words := fmt.Sprintf("%s Request %d asks for something else. %s", preamble[:n*len(preamble)/24], n, strings.Repeat("in the rain ", n%5))
		c := load.Case{Path: "/v1/completions", Body: map[string]any{"prompt": words, "max_tokens": 4 + n*11%90}}
		if n%3 == 2 {
			c = load.Case{Path: "/v1/chat/completions", Body: map[string]any{
				"messages": []map[string]string{{"role": "system", "content": preamble}, {"role": "user", "content": words}}, "max_tokens": 3 + n*7%60,
			}}
		}
		if n%6 == 1 {
			c.Body["stop"] = []string{"e", "qu"}
		}
		if n%2 == 1 { // sampled, among greedy ones
			c.Body["temperature"], c.Body["top_p"], c.Body["seed"] = .5+float64(n)/24, .95, n
		}
		all = append(all, c)
	}
	return all
}

// Fifty clients cancel and disconnect at random. Each answer is that of a client alone at a server that decodes one request at a
// time, a token a step; nothing is left behind in the end, and a stop under load is clean. The cache is so small that requests
// give their pages back.
func TestSoak(t *testing.T) {
	asked := cases()
	alone := launch(t, "--tiny --rows 1 --how dense")
	if err := load.Learn(t.Context(), alone.url, asked); err != nil {
		t.Fatal(err)
	}
	alone.stop(t)

	served := launch(t, "--tiny --rows 8 --how self-lookup --k 4 --context 512 --pages 48 --queue 40 --grace 2s")
	seed := time.Now().UnixNano()
	t.Log("seed", seed)
	ask := func(long time.Duration, stopping <-chan struct{}) load.Report {
		ctx, cancel := context.WithTimeout(t.Context(), long)
		defer cancel()
		seed += 1000
		report := load.Run(ctx, served.url, asked, load.Options{Clients: 50, Cancel: .3, Seed: seed, Stopping: stopping})
		t.Log(report)
		if len(report.Wrong) > 0 {
			t.Errorf("wrong:\n%s", strings.Join(report.Wrong, "\n"))
		}
		return report
	}
	ask(*soak/5, nil) // memory is what it will be
	before := settled(t, served.url)
	report := ask(*soak*4/5, nil)
	after := settled(t, served.url)
	if report.Finished < 50 || report.Cancelled < 10 {
		t.Errorf("%v: too few to tell", report)
	}
	for _, name := range []string{"serve_preemptions_total", "serve_evictions_total", "serve_prompt_tokens_shared_total", "serve_draft_tokens_accepted_total"} {
		if after[name] == 0 {
			t.Errorf("%s is 0; expected the soak to cause some", name)
		}
	}
	for name, most := range map[string]float64{"serve_go_goroutines": 2, "serve_go_heap_bytes": 8 << 20, "serve_resident_memory_bytes": 16 << 20} {
		t.Logf("%s: %.0f, then %.0f", name, before[name], after[name])
		if grown := after[name] - before[name]; grown > most && !(raced && name == "serve_resident_memory_bytes") {
			t.Errorf("%s has grown by %.0f; expected at most %.0f", name, grown, most)
		}
	}

	stopping, ended := make(chan struct{}), make(chan load.Report)
	go func() { ended <- ask(time.Minute, stopping) }()
	time.Sleep(time.Second)
	close(stopping)
	served.stop(t)
	if report := <-ended; report.Stopped != 50 {
		t.Errorf("%d of 50 clients noticed the stop", report.Stopped)
	}
}

// A seed's answer is the same alone and without drafts, and among those of twenty clients with drafts.
func TestSeedsGiveTheirText(t *testing.T) {
	bodies := []map[string]any{{}, {"temperature": 0, "seed": 5}, {"temperature": 1, "top_p": 0, "seed": 6}, {"temperature": 1, "top_k": 1, "seed": 6}}
	for seed := range 4 {
		bodies = append(bodies, map[string]any{"temperature": 1, "seed": seed - 1})
	}
	var asked []load.Case
	for _, body := range bodies {
		body["prompt"], body["max_tokens"] = "The rain in the town, the rain in the", 40
		asked = append(asked, load.Case{Path: "/v1/completions", Body: body})
	}
	alone := launch(t, "--tiny --rows 1 --how dense")
	if err := load.Learn(t.Context(), alone.url, asked); err != nil {
		t.Fatal(err)
	}
	alone.stop(t)
	for i := range asked {
		for j := range i {
			same, greedy := slices.Equal(asked[i].Answer.Tokens, asked[j].Answer.Tokens), i < 4
			if same != greedy {
				t.Errorf("%v and %v: the same text: %v", asked[i].Body, asked[j].Body, same)
			}
		}
	}
	served := launch(t, "--tiny --rows 8 --how self-lookup --k 4 --context 512")
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
	defer cancel()
	report := load.Run(ctx, served.url, asked, load.Options{Clients: 20, Seed: 1})
	if len(report.Wrong) > 0 || report.Finished < 20 {
		t.Errorf("%v\n%s", report, strings.Join(report.Wrong, "\n"))
	}
	served.stop(t)
}

// Keys and values in host memory, with slots for few of them, change no text: sparse steps write what they write from pages, and verified drafts
// what dense steps write. The cache is so small that requests give their pages back.
func TestTextsFromHostMemoryAreThoseFromPages(t *testing.T) {
	for how, ways := range map[string][2]string{
		"sparse": {"--how sparse", "--how sparse --strategy vanward"},
		"self":   {"--how dense", "--how self"},
	} {
		t.Run(how, func(t *testing.T) {
			asked := cases()
			alone := launch(t, "--tiny --rows 1 --k 4 "+ways[0])
			if err := load.Learn(t.Context(), alone.url, asked); err != nil {
				t.Fatal(err)
			}
			alone.stop(t)
			served := launch(t, "--tiny --rows 8 --k 4 --context 512 --pages 40 --host-kv --slots 768 --queue 40 "+ways[1])
			var missing []string
			finished := 0
			for round := int64(1); round <= 10 && (finished < 20 || len(missing) > 0); round++ {
				ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
				report := load.Run(ctx, served.url, asked, load.Options{Clients: 20, Cancel: .1, Seed: round})
				cancel()
				t.Log(report)
				if len(report.Wrong) > 0 {
					t.Fatal(strings.Join(report.Wrong, "\n"))
				}
				finished += report.Finished
				after := settled(t, served.url)
				missing = slices.DeleteFunc([]string{
					"serve_preemptions_total", "serve_slot_misses_total", "serve_slot_hits_total", "serve_fetched_bytes_total", "serve_prompt_tokens_shared_total",
				}, func(name string) bool { return after[name] > 0 })
			}
			if finished < 20 || len(missing) > 0 {
				t.Errorf("%d answers; expected 20, and some of %v", finished, missing)
			}
			served.stop(t)
		})
	}
}

// settled waits until no request is left, and returns the metrics.
func settled(t *testing.T, url string) map[string]float64 {
	t.Helper()
	http.DefaultClient.CloseIdleConnections()
	var m map[string]float64
	for end := time.Now().Add(5 * time.Second); time.Now().Before(end); time.Sleep(50 * time.Millisecond) {
		var err error
		if m, err = load.Metrics(url); err != nil {
			t.Fatal(err)
		}
		if m["serve_requests_running"]+m["serve_requests_waiting"]+m["serve_pages_in_use"] == 0 {
			time.Sleep(200 * time.Millisecond) // connections that clients closed
			m, _ = load.Metrics(url)
			return m
		}
	}
	t.Errorf("%v requests run, %v wait, %v pages are in use; expected none", m["serve_requests_running"], m["serve_requests_waiting"], m["serve_pages_in_use"])
	return m
}

// The commands of README.md, typed.
func TestCommandsOfTheReadme(t *testing.T) {
	if _, err := exec.LookPath("curl"); err != nil {
		t.Skip("curl is not installed")
	}
	page, err := os.ReadFile("README.md")
	if err != nil {
		t.Fatal(err)
	}
	served := launch(t, "--tiny")
	commands := regexp.MustCompile("(?m)^curl (?:.*\\\\\n)*.*$").FindAllString(string(page), -1)
	if len(commands) < 4 {
		t.Fatalf("%d commands; expected at least 4", len(commands))
	}
	for _, command := range commands {
		typed := strings.ReplaceAll(strings.ReplaceAll(command, "http://127.0.0.1:8080", served.url), "curl ", "curl --silent --show-error --max-time 20 ")
		output, err := exec.Command("sh", "-c", typed).CombinedOutput()
		if err != nil || len(output) == 0 || strings.Contains(string(output), `"error"`) {
			t.Errorf("%s\n%v: %s", command, err, output)
		}
	}
	served.stop(t)
}

func TestWrongCommandLinesAreRefused(t *testing.T) {
	for words, says := range map[string]string{
		"":                              "expected either --model FILE or --tiny",
		"--tiny --model x":              "expected either --model FILE or --tiny",
		"--tiny extra":                  "extra: unknown",
		"--tiny --how fast":             `--how "fast"; expected dense`,
		"--tiny --strategy fast":        `--strategy "fast"; expected serial`,
		"--tiny --strategy sparda":      `--strategy "sparda"; expected serial`,
		"--tiny --strategy vanward":     "both are for host_kv",
		"--tiny --host-kv --slots 9":    "slots: room for 9 tokens; expected at least",
		"--tiny --queue 0":              "--queue 0; expected at least 1",
		"--tiny --threads -1":           "--threads -1; expected 0 to 256",
		"--model /nowhere.gguf":         "model nowhere: the file cannot be read",
		"--tiny --rows 65":              "rows",
		"--tiny --listen 127.0.0.1:-80": "listen",
	} {
		server := exec.Command(os.Args[0])
		server.Env = append(os.Environ(), commandLine+"= "+words)
		output, err := server.CombinedOutput()
		if err == nil || !strings.Contains(string(output), says) {
			t.Errorf("%q: %v: %s; expected %q", words, err, output, says)
		}
	}
}
