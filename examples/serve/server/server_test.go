package server

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/vanward/vanward/examples/serve/load"
)

// start serves a fake engine until the test ends.
func start(t *testing.T, engine *fakeEngine, o Options) (*Server, string) {
	t.Helper()
	s := New(fakeModel{context: 512}, engine, o)
	h := httptest.NewServer(s.Handler())
	t.Cleanup(func() {
		ended, cancel := context.WithCancel(context.Background())
		cancel()
		s.Drain(ended)
		h.Close()
		if !engine.closed.Load() {
			t.Error("the engine is still open")
		}
	})
	return s, h.URL
}

func post(t *testing.T, url, body string) (status int, answer string) {
	t.Helper()
	response, err := http.Post(url, "application/json", strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	if err != nil {
		t.Fatal(err)
	}
	return response.StatusCode, string(text)
}

// expected is the fake's answer to a prompt.
func expected(prompt string, most int) (text string, tokens []int32, finish string) {
	ids, _ := fakeModel{}.Encode(prompt)
	var s textStream
	for n := range most {
		token := fakeToken(ids, n)
		tokens = append(tokens, token)
		text += s.push(fakeModel{}.Bytes(token))
		if token == fakeEnd {
			return text + s.finish(), tokens, "stop"
		}
	}
	return text + s.finish(), tokens, "length"
}

func TestCompletionHasTextUsageAndReason(t *testing.T) {
	_, url := start(t, newFake(4, 0), Options{})
	status, body := post(t, url+"/v1/completions", `{"prompt": "hello", "max_tokens": 9, "return_token_ids": true}`)
	var r reply
	if err := json.Unmarshal([]byte(body), &r); status != 200 || err != nil || len(r.Choices) != 1 {
		t.Fatalf("status %d: %s", status, body)
	}
	text, tokens, finish := expected("hello", 9)
	c := r.Choices[0]
	if *c.Text != text || fmt.Sprint(c.TokenIDs) != fmt.Sprint(tokens) || string(*c.FinishReason) != finish {
		t.Errorf("%s; expected text %q, tokens %v, %s", body, text, tokens, finish)
	}
	if want := (usage{5, len(tokens), 5 + len(tokens), promptDetails{4}}); *r.Usage != want || r.Object != "text_completion" || r.Model != "fake" {
		t.Errorf("%s; expected usage %+v", body, want)
	}
}

func TestPromptMayBeTokens(t *testing.T) {
	_, url := start(t, newFake(4, 0), Options{})
	_, ofText := post(t, url+"/v1/completions", `{"prompt": "hi", "max_tokens": 5}`)
	_, ofTokens := post(t, url+"/v1/completions", `{"prompt": [104, 105], "max_tokens": 5}`)
	if choices(t, ofText) != choices(t, ofTokens) {
		t.Errorf("%s\n%s", ofText, ofTokens)
	}
}

func choices(t *testing.T, body string) string {
	t.Helper()
	var r struct{ Choices json.RawMessage }
	if err := json.Unmarshal([]byte(body), &r); err != nil || len(r.Choices) == 0 {
		t.Fatalf("%v: %s", err, body)
	}
	return string(r.Choices)
}

func TestChatPutsMessagesIntoChatML(t *testing.T) {
	f, err := parse([]byte(`{"messages": [{"role": "user", "content": [{"type": "text", "text": "a <|im_end|>"}, {"type": "text", "text": "b"}]}]}`), ofChat)
	if err != nil {
		t.Fatal(err)
	}
	ids, err := chatTokens(fakeModel{}, f)
	var got strings.Builder
	for _, id := range ids {
		if id > 255 {
			fmt.Fprintf(&got, "[%d]", id)
		} else {
			got.WriteByte(byte(id))
		}
	}
	if want := "[256]system\n" + defaultSystem + "[258]\n[256]user\na <|im_end|>b[258]\n[256]assistant\n"; err != nil || got.String() != want {
		t.Errorf("%q, %v; expected %q", got.String(), err, want)
	}
}

func TestStreamSaysTheSameInEvents(t *testing.T) {
	_, url := start(t, newFake(4, time.Millisecond), Options{})
	for _, path := range []string{"/v1/completions", "/v1/chat/completions"} {
		request := `{"prompt": "say", "max_tokens": 40`
		if path != "/v1/completions" {
			request = `{"messages": [{"role": "user", "content": "say"}], "max_tokens": 40`
		}
		_, whole := post(t, url+path, request+"}")
		response, err := http.Post(url+path, "application/json", strings.NewReader(request+`, "stream": true, "stream_options": {"include_usage": true}}`))
		if err != nil {
			t.Fatal(err)
		}
		defer response.Body.Close()
		if kind := response.Header.Get("Content-Type"); kind != "text/event-stream" {
			t.Errorf("content type %q", kind)
		}
		text, last, roles := "", "", 0
		var counted usage
		for lines := bufio.NewScanner(response.Body); lines.Scan(); {
			data, isData := strings.CutPrefix(lines.Text(), "data: ")
			if !isData {
				continue
			}
			last = data
			if strings.Contains(data, `"choices":null`) {
				t.Errorf("event %s; expected an array", data)
			}
			var r reply
			json.Unmarshal([]byte(data), &r)
			if r.Usage != nil {
				counted = *r.Usage
			}
			for _, c := range r.Choices {
				if c.Text != nil {
					text += *c.Text
				}
				if c.Delta != nil && c.Delta.Content != nil {
					text += *c.Delta.Content
				}
				if c.Delta != nil && c.Delta.Role != "" {
					roles++
				}
			}
		}
		var r reply
		json.Unmarshal([]byte(whole), &r)
		want := ""
		if r.Choices[0].Text != nil {
			want = *r.Choices[0].Text
		} else {
			want = *r.Choices[0].Message.Content
			if roles != 1 {
				t.Errorf("%d roles; expected one, in the first event", roles)
			}
		}
		if text != want || last != "[DONE]" || counted != *r.Usage {
			t.Errorf("%s: streamed %q, %+v, last %q; whole %s", path, text, counted, last, whole)
		}
	}
}

func TestStopStringEndsTheAnswerAndTheRequest(t *testing.T) {
	engine := newFake(1, time.Millisecond)
	s, url := start(t, engine, Options{})
	text, _, _ := expected("stop here", 300)
	runes := []rune(text)
	stop := string(runes[4:6])
	at := strings.Index(text, stop)
	request, _ := json.Marshal(map[string]any{"prompt": "stop here", "max_tokens": 300, "stop": stop})
	_, body := post(t, url+"/v1/completions", string(request))
	var r reply
	json.Unmarshal([]byte(body), &r)
	if *r.Choices[0].Text != text[:at] || *r.Choices[0].FinishReason != FinishStop {
		t.Errorf("%s; expected %q", body, text[:at])
	}
	eventually(t, "the request leaves the engine", func() bool { return idle(s) })
}

func idle(s *Server) bool {
	s.metrics.mu.Lock()
	defer s.metrics.mu.Unlock()
	return s.metrics.running == 0 && s.metrics.counters.Sequences == 0 && s.loop.queued.Load() == 0
}

// occupied says whether so many requests run and wait. What a test counts on must last: "slow" and "doomed" have answers of 133 and 62
// tokens, of which a step makes two.
func occupied(s *Server, running int, waiting int64) bool {
	s.metrics.mu.Lock()
	defer s.metrics.mu.Unlock()
	return s.metrics.running == running && s.loop.queued.Load() == waiting
}

func eventually(t *testing.T, what string, holds func() bool) {
	t.Helper()
	for end := time.Now().Add(5 * time.Second); !holds(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("never: " + what)
		}
	}
}

func TestRequestsThatCannotBeServedAreBlamedByField(t *testing.T) {
	_, url := start(t, newFake(1, 0), Options{MaxTokens: 300, MaxBody: 2000})
	for _, c := range []struct {
		path, body string
		status     int
		says       string
	}{
		{"completions", `{"prompt": "a", "temperature": 2.1}`, 400, "temperature: 2.1; expected 0 to 2"},
		{"completions", `{"prompt": "a", "temperature": -1}`, 400, "temperature: -1; expected 0 to 2"},
		{"completions", `{"prompt": "a", "top_p": 1.5}`, 400, "top_p: 1.5; expected 0 to 1"},
		{"completions", `{"prompt": "a", "min_p": -0.5}`, 400, "min_p: -0.5; expected 0 to 1"},
		{"completions", `{"prompt": "a", "top_k": -1}`, 400, "top_k: -1; expected at least 0"},
		{"completions", `{"prompt": "a", "seed": 1.5}`, 400, "seed: number 1.5; expected a whole number"},
		{"completions", `{"prompt": "a", "n": 2}`, 400, "n: 2; this server knows only 1"},
		{"completions", `{"prompt": "a", "logit_bias": {"5": 1}}`, 400, `logit_bias: {\"5\":1}`},
		{"completions", `{"prompt": "a", "max_tokens": 0}`, 400, "max_tokens: 0; expected 1 to 300"},
		{"completions", `{"prompt": "a", "max_tokens": 301}`, 400, "max_tokens: 301; expected 1 to 300"},
		{"completions", `{"prompt": "a", "max_tokens": 1.5}`, 400, "max_tokens: number 1.5; expected a whole number"},
		{"completions", `{"prompt": "a", "stream": "yes"}`, 400, "stream: string; expected true or false"},
		{"completions", `{"prompt": "a", "max_tokns": 4}`, 400, "max_tokns: unknown field"},
		{"completions", `{"prompt": "a", "messages": []}`, 400, "messages: unknown field"},
		{"completions", `{"prompt": "a", "stream_options": {"include_usage": true}}`, 400, "stream_options: given without stream"},
		{"completions", `{"prompt": "a", "stop": ["a", "b", "c", "d", "e"]}`, 400, "stop: 5 strings; expected at most 4"},
		{"completions", `{"prompt": "a", "stop": ""}`, 400, "stop: string 0 has 0 bytes"},
		{"completions", `{"prompt": "a", "stop": 5}`, 400, "stop: 5; expected a string"},
		{"completions", `{"prompt": "a", "model": "other"}`, 404, "model: other; this server has fake"},
		{"completions", `{}`, 400, "prompt: missing"},
		{"completions", `{"prompt": ""}`, 400, "prompt: no tokens"},
		{"completions", `{"prompt": ["a", "b"]}`, 400, "prompt: 2 prompts; expected one"},
		{"completions", `{"prompt": [1, 259]}`, 400, "prompt: token 1 is 259; expected a whole number from 0 to 258"},
		{"completions", `{"prompt": [null]}`, 400, "prompt: token 0 is null"},
		{"completions", `{"prompt": {"a": 1}}`, 400, "prompt: {"},
		{"completions", `{"prompt": "a\u0000"}`, 400, "byte 0 at 1 has no token"},
		{"completions", `{"prompt": "!"}`, 400, "prompts with ! are not for this engine"},
		{"completions", `{"prompt": "` + strings.Repeat("x", 512) + `"}`, 400, "prompt: 512 tokens; a request has room for 512"},
		{"completions", `{"prompt": "` + strings.Repeat("x", 300) + `", "max_tokens": 213}`, 400, "max_tokens: 213 behind a prompt of 300 tokens"},
		{"completions", `{"prompt": "` + strings.Repeat("x", 3000) + `"}`, 413, "body: larger than 2000 bytes"},
		{"completions", "{\"prompt\": \"\xff\"}", 400, "body: not UTF-8"},
		{"completions", `[1]`, 400, "body: expected a JSON object"},
		{"completions", `{"prompt": "a"`, 400, "body: expected a JSON object"},
		{"chat/completions", `{"messages": []}`, 400, "messages: none"},
		{"chat/completions", `{"messages": [{"role": "tool", "content": "a"}]}`, 400, `messages: role \"tool\" of message 0`},
		{"chat/completions", `{"messages": [{"role": "user", "content": null}]}`, 400, "messages: content of message 0"},
		{"chat/completions", `{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}`, 400, `a part of type \"image_url\"`},
		{"chat/completions", `{"messages": [{"role": "user", "content": "a", "name": "b"}]}`, 400, "unknown field"},
		{"chat/completions", `{"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, "max_completion_tokens": 2}`, 400, "max_tokens: 1, and max_completion_tokens 2"},
		{"chat/completions", `{"messages": [{"role": "user", "content": "a"}], "tools": [{}]}`, 400, "tools: [{}]; this server knows only []"},
		{"nowhere", `{}`, 404, "no such path: /v1/nowhere"},
		{"models", `{}`, 405, "POST; expected GET"},
	} {
		status, answer := post(t, url+"/v1/"+c.path, c.body)
		var e struct{ Error *failure }
		err := json.Unmarshal([]byte(answer), &e)
		if status != c.status || err != nil || e.Error == nil || !strings.Contains(answer, c.says) {
			t.Errorf("%s %.60s: status %d: %s; expected %d: %s", c.path, c.body, status, answer, c.status, c.says)
		}
	}
}

func TestTheModelIsListedAndFoundByName(t *testing.T) {
	_, url := start(t, newFake(1, 0), Options{})
	for path, status := range map[string]int{"/v1/models": 200, "/v1/models/fake": 200, "/v1/models/other": 404} {
		response, err := http.Get(url + path)
		if err != nil {
			t.Fatal(err)
		}
		text, _ := io.ReadAll(response.Body)
		response.Body.Close()
		if response.StatusCode != status || !strings.Contains(string(text), "fake") {
			t.Errorf("%s: status %d: %s", path, response.StatusCode, text)
		}
	}
}

func TestFieldsThatAskForNothingAreTaken(t *testing.T) {
	_, url := start(t, newFake(1, 0), Options{})
	status, body := post(t, url+"/v1/completions", `{"prompt": "a", "n": 1, "temperature": 0, "top_p": 0.9, "seed": 3, "user": "u", "logit_bias": {}, "stop": null,
		"presence_penalty": 0.0, "logprobs": null, "stream_options": null}`)
	if status != 200 {
		t.Errorf("status %d: %s", status, body)
	}
}

func TestFullQueueIsRefusedAtOnce(t *testing.T) {
	s, url := start(t, newFake(1, 20*time.Millisecond), Options{Queue: 2})
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	for waiting := range int64(3) {
		go func() {
			request, _ := http.NewRequestWithContext(ctx, "POST", url+"/v1/completions", strings.NewReader(`{"prompt": "slow", "max_tokens": 400}`))
			if response, err := http.DefaultClient.Do(request); err == nil {
				response.Body.Close()
			}
		}()
		eventually(t, "one runs, the others wait", func() bool { return occupied(s, 1, waiting) })
	}
	response, err := http.Post(url+"/v1/completions", "", strings.NewReader(`{"prompt": "one more"}`))
	if err != nil {
		t.Fatal(err)
	}
	response.Body.Close()
	if response.StatusCode != 429 || response.Header.Get("Retry-After") == "" {
		t.Errorf("status %d, Retry-After %q", response.StatusCode, response.Header.Get("Retry-After"))
	}
	cancel()
	eventually(t, "those that wait leave with their clients", func() bool { return idle(s) })
}

// A ResponseWriter whose client reads nothing until it is let go.
type stuck struct {
	header  http.Header
	written chan struct{} // a write has begun
	release chan struct{}
}

func (w *stuck) Header() http.Header { return w.header }
func (w *stuck) WriteHeader(int)     {}
func (w *stuck) Write(b []byte) (int, error) {
	select {
	case w.written <- struct{}{}:
	default:
	}
	<-w.release
	return len(b), nil
}

func TestSlowClientIsEndedAndHoldsNobodyUp(t *testing.T) {
	s, url := start(t, newFake(2, time.Millisecond), Options{Buffer: 4})
	w := &stuck{http.Header{}, make(chan struct{}, 1), make(chan struct{})}
	served := make(chan struct{})
	go func() {
		defer close(served)
		s.Handler().ServeHTTP(w, httptest.NewRequest("POST", "/v1/completions", strings.NewReader(`{"prompt": "slow", "max_tokens": 400, "stream": true}`)))
	}()
	<-w.written
	if status, body := post(t, url+"/v1/completions", `{"prompt": "quick", "max_tokens": 30}`); status != 200 && !strings.Contains(body, "slow_client") {
		t.Errorf("status %d: %s", status, body)
	}
	eventually(t, "the slow one is ended", func() bool { s.metrics.mu.Lock(); defer s.metrics.mu.Unlock(); return s.metrics.ends["slow"] >= 1 })
	close(w.release)
	<-served
}

func TestDisconnectFreesTheEngine(t *testing.T) {
	s, url := start(t, newFake(1, time.Millisecond), Options{})
	connection, err := net.Dial("tcp", strings.TrimPrefix(url, "http://"))
	if err != nil {
		t.Fatal(err)
	}
	body := `{"prompt": "gone", "max_tokens": 400, "stream": true}`
	fmt.Fprintf(connection, "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s", len(body), body)
	connection.Read(make([]byte, 100))
	connection.Close()
	eventually(t, "the request leaves the engine", func() bool { return idle(s) })
	// The engine is free before the request's own goroutine has counted its end.
	eventually(t, "one request is cancelled", func() bool {
		s.metrics.mu.Lock()
		defer s.metrics.mu.Unlock()
		return s.metrics.ends["cancelled"] == 1
	})
}

func TestBodyThatDoesNotArriveIsGivenUp(t *testing.T) {
	_, url := start(t, newFake(1, 0), Options{ReadTimeout: 50 * time.Millisecond})
	connection, err := net.Dial("tcp", strings.TrimPrefix(url, "http://"))
	if err != nil {
		t.Fatal(err)
	}
	defer connection.Close()
	fmt.Fprint(connection, "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
	connection.SetReadDeadline(time.Now().Add(5 * time.Second))
	answer, _ := io.ReadAll(connection)
	if !bytes.HasPrefix(answer, []byte("HTTP/1.1 408 ")) {
		t.Errorf("%q", answer)
	}
}

func TestAnswerMayTakeLongerThanTheBodyHad(t *testing.T) {
	_, url := start(t, newFake(1, 30*time.Millisecond), Options{ReadTimeout: 20 * time.Millisecond, WriteTimeout: 20 * time.Millisecond})
	for range 2 { // on one connection
		if status, body := post(t, url+"/v1/completions", `{"prompt": "patience", "max_tokens": 8}`); status != 200 {
			t.Errorf("status %d: %s", status, body)
		}
		time.Sleep(30 * time.Millisecond)
	}
}

func TestDrainFinishesWhatRunsAndRefusesTheRest(t *testing.T) {
	engine := newFake(1, 10*time.Millisecond)
	s, url := start(t, engine, Options{})
	answers := make(chan int, 2)
	for waiting, prompt := range []string{"slow", "doomed"} { // the second waits behind the first
		go func() {
			status, _ := post(t, url+"/v1/completions", fmt.Sprintf(`{"prompt": %q, "max_tokens": 60}`, prompt))
			answers <- status
		}()
		eventually(t, prompt+" has arrived", func() bool { return occupied(s, 1, int64(waiting)) })
	}
	s.Drain(context.Background())
	if a, b := <-answers, <-answers; a+b != 200+503 {
		t.Errorf("statuses %d and %d; expected 200 for the first and 503 for the second", a, b)
	}
	if status, _ := post(t, url+"/v1/completions", `{"prompt": "late"}`); status != 503 {
		t.Errorf("status %d after the end", status)
	}
	if response, err := http.Get(url + "/healthz"); err != nil || response.StatusCode != 503 {
		t.Errorf("healthz: %v, %v", response, err)
	}
}

func TestDrainEndsWhatRunsAtItsDeadline(t *testing.T) {
	s, url := start(t, newFake(1, 5*time.Millisecond), Options{})
	answer := make(chan string)
	go func() {
		_, body := post(t, url+"/v1/completions", `{"prompt": "long", "max_tokens": 400, "stream": true}`)
		answer <- body
	}()
	eventually(t, "it runs", func() bool { s.metrics.mu.Lock(); defer s.metrics.mu.Unlock(); return s.metrics.counters.NewTokens > 3 })
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Millisecond)
	defer cancel()
	begin := time.Now()
	s.Drain(ctx)
	if took := time.Since(begin); took > time.Second {
		t.Errorf("took %v", took)
	}
	if body := <-answer; !strings.Contains(body, `data: {"error":{"message":"the server is stopping"`) {
		t.Errorf("%q", body)
	}
}

func TestFailedEngineEndsEveryRequest(t *testing.T) {
	engine := newFake(1, 10*time.Millisecond)
	s, url := start(t, engine, Options{})
	answers := make(chan int, 3)
	for range 3 {
		go func() {
			status, _ := post(t, url+"/v1/completions", `{"prompt": "doomed", "max_tokens": 400}`)
			answers <- status
		}()
	}
	eventually(t, "all have arrived", func() bool { return occupied(s, 1, 2) })
	engine.fail.Store(true)
	for range 3 {
		if status := <-answers; status != 500 {
			t.Errorf("status %d; expected 500", status)
		}
	}
	<-s.Done()
	if s.Err() == nil {
		t.Error("no reason")
	}
}

func TestMetricsAreCounted(t *testing.T) {
	_, url := start(t, newFake(1, 0), Options{})
	post(t, url+"/v1/completions", `{"prompt": "count", "max_tokens": 3}`)
	post(t, url+"/v1/completions", `{}`)
	response, err := http.Get(url + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	text, _ := io.ReadAll(response.Body)
	for _, line := range []string{
		`serve_http_responses_total{path="/v1/completions",code="200"} 1`, `serve_http_responses_total{path="/v1/completions",code="400"} 1`,
		`serve_requests_ended_total{reason="length"} 1`, `serve_generated_tokens_total 3`, `serve_first_token_seconds_count 1`,
		`serve_next_token_seconds_bucket{le="+Inf"} 2`, `serve_requests_running 0`, `# TYPE serve_step_seconds histogram`,
	} {
		if !strings.Contains(string(text), line+"\n") {
			t.Errorf("no line %q in\n%s", line, text)
		}
	}
}

// Fifty clients cancel, disconnect and compare; in the end nothing is left behind, and a stop under load is clean.
func TestFiftyClients(t *testing.T) {
	before := runtime.NumGoroutine()
	engine := newFake(8, 200*time.Microsecond)
	s := New(fakeModel{context: 512}, engine, Options{Queue: 30})
	h := httptest.NewServer(s.Handler())
	var cases []load.Case
	for n := range 20 {
		body := map[string]any{"prompt": strings.Repeat("p", n+1), "max_tokens": 1 + n*7%60}
		if n%4 == 3 {
			text, _, _ := expected(body["prompt"].(string), 60)
			body["stop"] = []string{string([]rune(text)[3:5])}
		}
		cases = append(cases, load.Case{Path: "/v1/completions", Body: body})
	}
	if err := load.Learn(t.Context(), h.URL, cases); err != nil {
		t.Fatal(err)
	}
	seed := time.Now().UnixNano()
	t.Log("seed", seed)
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
	defer cancel()
	report := load.Run(ctx, h.URL, cases, load.Options{Clients: 50, Cancel: .3, Seed: seed})
	t.Log(report)
	if len(report.Wrong) > 0 || report.Finished < 50 || report.Cancelled < 10 {
		t.Errorf("%v\n%s", report, strings.Join(report.Wrong, "\n"))
	}
	eventually(t, "nothing is left in the engine", func() bool { return idle(s) })

	stop := make(chan struct{})
	ended := make(chan load.Report)
	go func() {
		ended <- load.Run(t.Context(), h.URL, cases, load.Options{Clients: 50, Cancel: .3, Seed: seed + 1, Stopping: stop})
	}()
	time.Sleep(200 * time.Millisecond)
	close(stop)
	deadline, cancelDrain := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancelDrain()
	s.Drain(deadline)
	if report := <-ended; len(report.Wrong) > 0 || report.Stopped != 50 {
		t.Errorf("%v\n%s", report, strings.Join(report.Wrong, "\n"))
	}
	h.Close()
	http.DefaultClient.CloseIdleConnections()
	eventually(t, "its goroutines end", func() bool { return runtime.NumGoroutine() <= before })
}
