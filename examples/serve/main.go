// Serve answers the usual HTTP requests for completions with the C engine of examples/engine:
//
//	serve --model SmolLM2-135M-Instruct.Q4_1.gguf
//	serve --tiny
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/vanward/vanward/examples/serve/cengine"
	"github.com/vanward/vanward/examples/serve/server"
)

type options struct {
	model, listen string
	tiny, quiet   bool
	threads       int
	grace         time.Duration
	engine        cengine.Options
	server        server.Options
}

func main() {
	o, err := parse(os.Args[1:])
	if errors.Is(err, flag.ErrHelp) {
		return
	}
	if err == nil {
		err = serve(o)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "serve:", err)
		os.Exit(1)
	}
}

func parse(words []string) (*options, error) {
	o := &options{}
	how, strategy := "", ""
	f := flag.NewFlagSet("serve", flag.ContinueOnError)
	f.StringVar(&o.model, "model", "", "a Llama model in GGUF")
	f.BoolVar(&o.tiny, "tiny", false, "random weights instead of a model: every step is taken, and the text is noise")
	f.StringVar(&o.listen, "listen", "127.0.0.1:8080", "address and port")
	f.BoolVar(&o.quiet, "quiet", false, "log no requests")
	f.DurationVar(&o.grace, "grace", 7*time.Second,
		"how long requests that run may go on after SIGTERM or SIGINT; then the server ends with its step, within a second or two")

	f.IntVar(&o.threads, "threads", 0, "threads that compute; 0: one for each processor")
	f.IntVar(&o.engine.Rows, "rows", 8, "requests that are decoded at once, 1 to 64")
	f.IntVar(&o.engine.MaxTokens, "context", 0, "tokens of a request, prompt and answer; 0: the model's context")
	f.IntVar(&o.engine.Pages, "pages", 0, "pages of 16 tokens in the cache; 0: for all rows, at most 1 GiB")
	f.IntVar(&o.engine.Chunk, "chunk", 0, "prompt tokens of a step, 1 to 64; 0: 64")
	f.IntVar(&o.engine.MaxDrafts, "drafts", 0, "tokens that are drafted for a request in a step, 1 to 15; 0: 8")
	f.IntVar(&o.engine.Blocks, "k", 0, "blocks of 16 tokens that sparse steps read; 0: 32")
	f.BoolVar(&o.engine.HostKV, "host-kv", false, "keep keys and values in host memory, and in slots of device memory what sparse steps read")
	f.IntVar(&o.engine.Slots, "slots", 0, "with --host-kv: tokens of a layer that there are slots for; 0: an eighth of those of all pages, or what a step reads")
	f.StringVar(&strategy, "strategy", "serial", "with --host-kv: how sparse steps attend: serial, async-tls, or vanward, which fetches what it predicts")
	f.StringVar(&how, "how", "lookup", "dense, sparse, lookup (drafts from what the request says already), lookup-tree (several such drafts as a tree), self (drafts by sparse steps) or self-lookup")

	f.IntVar(&o.server.MaxTokens, "max-tokens", 1024, "largest answer in tokens")
	f.IntVar(&o.server.Queue, "queue", 128, "requests that may wait; one more is refused with status 429")
	f.Int64Var(&o.server.MaxBody, "max-body", 256<<10, "largest request in bytes")
	f.IntVar(&o.server.Buffer, "buffer", 256, "tokens that a client may lag behind before its request is ended")
	if err := f.Parse(words); err != nil {
		return nil, err
	}
	if f.NArg() > 0 {
		return nil, fmt.Errorf("%s: unknown", f.Arg(0))
	}
	if (o.model == "") == !o.tiny {
		return nil, errors.New("expected either --model FILE or --tiny")
	}
	for name, value := range map[string]int{
		"max-tokens": o.server.MaxTokens, "queue": o.server.Queue, "max-body": int(o.server.MaxBody), "buffer": o.server.Buffer,
	} {
		if value < 1 {
			return nil, fmt.Errorf("--%s %d; expected at least 1", name, value)
		}
	}
	if o.threads < 0 || o.threads > 256 {
		return nil, fmt.Errorf("--threads %d; expected 0 to 256", o.threads)
	}
	if !o.quiet {
		o.server.Log = slog.New(slog.NewTextHandler(os.Stderr, nil))
	}
	o.server.Context = o.engine.MaxTokens
	var err error
	if o.engine.How, err = cengine.ParseHow(how); err != nil {
		return nil, fmt.Errorf("--how %w", err)
	}
	if o.engine.Strategy, err = cengine.ParseStrategy(strategy); err != nil {
		return nil, fmt.Errorf("--strategy %w", err)
	}
	return o, nil
}

// serve runs until SIGTERM or SIGINT and a graceful stop, or until something fails.
func serve(o *options) error {
	model, err := cengine.OpenModel(o.model, o.threads)
	if err != nil {
		return err
	}
	defer model.Close()
	engine, err := cengine.New(model, o.engine)
	if err != nil {
		return err
	}
	s := server.New(model, engine, o.server)
	defer drain(s, 0) // whatever happens, the engine is closed before the model
	listener, err := net.Listen("tcp", o.listen)
	if err != nil {
		return err
	}
	h := &http.Server{Handler: s.Handler(), ReadHeaderTimeout: 10 * time.Second, IdleTimeout: time.Minute, MaxHeaderBytes: 64 << 10}
	failed := make(chan error, 1)
	go func() { failed <- h.Serve(listener) }()
	fmt.Fprintf(os.Stderr, "serve: %s at http://%s\n", model.Name(), listener.Addr())

	told, forget := signal.NotifyContext(context.Background(), syscall.SIGTERM, os.Interrupt)
	select {
	case <-told.Done():
		forget() // a second signal ends the process at once
		fmt.Fprintf(os.Stderr, "serve: stopping; requests that run have %v\n", o.grace)
	case <-s.Done():
		err = fmt.Errorf("the engine failed: %w", s.Err())
	case err = <-failed:
	}
	drain(s, o.grace)
	closeHTTP(h)
	return err
}

func drain(s *server.Server, grace time.Duration) {
	ctx, cancel := context.WithTimeout(context.Background(), grace)
	defer cancel()
	s.Drain(ctx)
}

// closeHTTP gives answers that are complete a second to leave.
func closeHTTP(h *http.Server) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	if h.Shutdown(ctx) != nil {
		h.Close()
	}
}
