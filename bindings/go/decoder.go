package vanward

// #include "calls.h"
// #cgo noescape decoder_begin
// #cgo nocallback decoder_begin
// #cgo noescape decoder_foresee
// #cgo nocallback decoder_foresee
// #cgo noescape decoder_attend
// #cgo nocallback decoder_attend
// #cgo noescape decoder_accept
// #cgo nocallback decoder_accept
// #cgo noescape decoder_reset
// #cgo nocallback decoder_reset
import "C"

// DecoderMode says how a row of a step attends.
type DecoderMode uint32

const (
	DecoderSkip   DecoderMode = C.VWD_DECODER_SKIP
	DecoderSparse DecoderMode = C.VWD_DECODER_SPARSE
	DecoderDense  DecoderMode = C.VWD_DECODER_DENSE
)

// Strategy is VWD_STRATEGY_*: how a layer's sparse rows attend.
type Strategy uint32

const (
	StrategySerial   Strategy = C.VWD_STRATEGY_SERIAL
	StrategyPRR      Strategy = C.VWD_STRATEGY_PRR
	StrategyForeseen Strategy = C.VWD_STRATEGY_FORESEEN
	StrategyAsyncTLS Strategy = C.VWD_STRATEGY_ASYNC_TLS
	StrategySparDA   Strategy = C.VWD_STRATEGY_SPARDA
	StrategyVanward  Strategy = C.VWD_STRATEGY_VANWARD
)

// Predict is VWD_PREDICT_*: where PRR's prediction comes from.
type Predict uint32

const (
	PredictScores   Predict = C.VWD_PREDICT_SCORES
	PredictForeseen Predict = C.VWD_PREDICT_FORESEEN
)

// DecoderPolicy is vwd_decoder_policy.
type DecoderPolicy struct {
	Method      SelectMethod
	K           int
	InitBlocks  int
	LocalBlocks int
	DenseBelow  int
	Window      int
	Strategy    Strategy
	Predict     Predict
	Ratio       float32
	Holt        Holt
}

// DecoderOptions are those of NewDecoder; vwd_decoder_options documents them. AxisWeights and AxisCentre in Go's memory stay pinned
// until Close.
type DecoderOptions struct {
	Layers       int
	MaxRows      int
	MaxPositions int
	MaxSequences int
	QueryHeads   int
	KVHeads      int
	KeyDim       int
	ValueDim     int
	DType        DType
	PageSize     int
	Pages        int
	BlockSize    int
	Scale        float32
	SoftCap      float32
	MaxDraft     int
	DraftCost    float32
	MaxTokens    int
	Policy       DecoderPolicy
	Policies     []DecoderPolicy
	AxisWeights  Tensor
	AxisCentre   Tensor
	Budget       *Budget // Optional; the decoder keeps it alive.
	Coverage     float32
	Remainder    bool // Sparse rows attend what their list leaves out, too, as one term.
}

// Decoder runs the attention of decode steps on the engine's own paged keys and values. It outlives its session.
type Decoder struct {
	handle  handle[*C.vwd_decoder]
	options lowering  // pins what lies in Go's memory
	step    *lowering // the same of the last step
	log     *callback
}

// NewDecoder creates a decoder.
func (s *Session) NewDecoder(options DecoderOptions) (*Decoder, error) {
	d := &Decoder{}
	c := options.lower(&d.options)
	err := options.withBudget(&d.options, &c, func() error {
		return s.create(&d.options, &d.log, func(h *C.vwd_session) C.outcome { return C.decoder_create(h, &c, &d.handle.c) })
	})
	if err != nil {
		d.options.release()
		return nil, err
	}
	return d, nil
}

// NewDecoderOnCache creates a decoder whose keys and values are those of a tiered cache, which it keeps alive.
func (s *Session) NewDecoderOnCache(options DecoderOptions, cache *KvCache) (*Decoder, error) {
	d := &Decoder{}
	c := options.lower(&d.options)
	var err error
	used := cache.run(&d.options, func(k *C.vwd_kv_cache) C.outcome {
		err = options.withBudget(&d.options, &c, func() error {
			return s.create(&d.options, &d.log, func(h *C.vwd_session) C.outcome {
				return C.decoder_create_on_cache(h, &c, k, &d.handle.c)
			})
		})
		return C.outcome{}
	})
	if err == nil {
		err = used
	}
	if err != nil {
		d.options.release()
		return nil, err
	}
	return d, nil
}

func (p DecoderPolicy) lower(l *lowering) C.vwd_decoder_policy {
	return C.vwd_decoder_policy{
		method:       C.uint32_t(p.Method),
		k:            l.uint32("policy.k", p.K),
		init_blocks:  l.uint32("policy.init_blocks", p.InitBlocks),
		local_blocks: l.uint32("policy.local_blocks", p.LocalBlocks),
		dense_below:  l.uint32("policy.dense_below", p.DenseBelow),
		window:       l.uint32("policy.window", p.Window),
		strategy:     C.uint32_t(p.Strategy),
		predict:      C.uint32_t(p.Predict),
		ratio:        C.float(p.Ratio),
		holt:         p.Holt.c(),
	}
}

func (options DecoderOptions) lower(l *lowering) C.vwd_decoder_options {
	c := C.vwd_decoder_options{
		struct_size:   C.sizeof_vwd_decoder_options,
		layers:        l.uint32("options.layers", options.Layers),
		max_rows:      l.uint32("options.max_rows", options.MaxRows),
		max_positions: l.uint32("options.max_positions", options.MaxPositions),
		max_sequences: l.uint32("options.max_sequences", options.MaxSequences),
		query_heads:   l.uint32("options.query_heads", options.QueryHeads),
		kv_heads:      l.uint32("options.kv_heads", options.KVHeads),
		key_dim:       l.uint32("options.key_dim", options.KeyDim),
		value_dim:     l.uint32("options.value_dim", options.ValueDim),
		dtype_code:    C.uint32_t(options.DType >> 8),
		dtype_bits:    C.uint32_t(options.DType & 0xff),
		page_size:     l.uint32("options.page_size", options.PageSize),
		pages:         l.uint32("options.pages", options.Pages),
		block_size:    l.uint32("options.block_size", options.BlockSize),
		scale:         C.float(options.Scale),
		soft_cap:      C.float(options.SoftCap),
		max_draft:     l.uint32("options.max_draft", options.MaxDraft),
		draft_cost:    C.float(options.DraftCost),
		max_tokens:    l.uint32("options.max_tokens", options.MaxTokens),
		policy:        options.Policy.lower(l),
		policy_count:  l.uint32("options.policy_count", len(options.Policies)),
		axis_weights:  l.tensor("options.axis_weights", options.AxisWeights),
		axis_centre:   l.tensor("options.axis_centre", options.AxisCentre),
		coverage:      C.float(options.Coverage),
	}
	if options.Remainder {
		c.remainder = 1
	}
	if len(options.Policies) > 0 {
		policies := make([]C.vwd_decoder_policy, len(options.Policies))
		for i, policy := range options.Policies {
			policies[i] = policy.lower(l)
		}
		l.pins.Pin(&policies[0])
		c.policies = &policies[0]
	}
	return c
}

// withBudget makes a call whose options name the budget, which is not closed meanwhile.
func (options DecoderOptions) withBudget(l *lowering, c *C.vwd_decoder_options, call func() error) error {
	if options.Budget == nil {
		return call()
	}
	var err error
	used := options.Budget.run(l, func(h *C.vwd_budget) C.outcome {
		c.budget = h
		err = call()
		return C.outcome{}
	})
	if err == nil {
		err = used
	}
	return err
}

// Close releases the decoder once calls in progress have returned. Closing again does nothing; calls after it fail.
func (d *Decoder) Close() error {
	if d != nil {
		d.handle.close(func(c *C.vwd_decoder) {
			C.vwd_decoder_release(c)
			d.keep(nil)
			d.options.release()
			d.log.free()
		})
	}
	return nil
}

func (d *Decoder) run(l *lowering, call func(*C.vwd_decoder) C.outcome) error {
	if l.err != nil {
		return l.err
	}
	if d == nil {
		return invalid("decoder", "nil")
	}
	return d.handle.use("decoder", call)
}

// DecoderStep is the step of Decoder.Begin; vwd_decoder_begin documents it. Attend reads its tensors after Begin has returned: those in
// Go's memory stay pinned until the next step or Close.
type DecoderStep struct {
	Mode      DecoderMode
	Positions int
	Shortest  int
	Longest   int
	PageTable Tensor
	SeqLens   Tensor
	QLens     Tensor
	Begin     Tensor
	Modes     Tensor
	Sequences Tensor
	Tree      Tensor
}

// Begin begins a step.
func (d *Decoder) Begin(step DecoderStep, stream Stream) error {
	l := &lowering{}
	c := step.lower(l)
	if err := d.run(l, func(h *C.vwd_decoder) C.outcome { return C.decoder_begin(h, &c, stream.c()) }); err != nil {
		l.release()
		return err
	}
	d.keep(l)
	return nil
}

// keep keeps what the last step pins, in place of the step before.
func (d *Decoder) keep(step *lowering) {
	if d.step != nil {
		d.step.release()
	}
	d.step = step
}

func (step DecoderStep) lower(l *lowering) C.vwd_decoder_step {
	return C.vwd_decoder_step{
		struct_size: C.sizeof_vwd_decoder_step,
		mode:        C.uint32_t(step.Mode),
		positions:   l.uint32("positions", step.Positions),
		shortest:    l.uint32("shortest", step.Shortest),
		longest:     l.uint32("longest", step.Longest),
		page_table:  l.tensor("page_table", step.PageTable),
		seq_lens:    l.tensor("seq_lens", step.SeqLens),
		q_lens:      l.tensor("q_lens", step.QLens),
		begin:       l.tensor("begin", step.Begin),
		modes:       l.tensor("modes", step.Modes),
		sequences:   l.tensor("sequences", step.Sequences),
		tree:        l.tensor("tree", step.Tree),
	}
}

// DecoderForeseeArgs are the arguments of Decoder.Foresee; vwd_decoder_foresee documents them. Without a Forecast they have Q, with one
// what it reads.
type DecoderForeseeArgs struct {
	Layer    int
	Map      int
	Rope     Rope
	X        Tensor
	Previous Tensor
	Q        Tensor
}

// Foresee selects for a layer of the step before its queries are there. The forecast may be nil. It is not closed, and what it reads is not
// written, until the stream has passed the decoder's next Attend, Foresee or Begin.
func (d *Decoder) Foresee(forecast *Forecast, args DecoderForeseeArgs, stream Stream) error {
	var l lowering
	defer l.release()
	c, rope := args.lower(&l)
	foresee := func(f *C.vwd_forecast) error {
		return d.run(&l, func(h *C.vwd_decoder) C.outcome { return C.decoder_foresee(h, f, &c, &rope, stream.c()) })
	}
	if forecast == nil {
		return foresee(nil)
	}
	var err error
	used := forecast.run(&l, func(f *C.vwd_forecast) C.outcome {
		err = foresee(f)
		return C.outcome{}
	})
	if err != nil {
		return err
	}
	return used
}

func (args DecoderForeseeArgs) lower(l *lowering) (C.vwd_decoder_foresee_args, C.vwd_rope) {
	return C.vwd_decoder_foresee_args{
		struct_size: C.sizeof_vwd_decoder_foresee_args,
		layer:       l.uint32("layer", args.Layer),
		_map:        l.uint32("map", args.Map),
		x:           l.tensor("x", args.X),
		previous:    l.tensor("previous", args.Previous),
		q:           l.tensor("q", args.Q),
	}, l.rope(args.Rope)
}

// DecoderAttendArgs are the arguments of Decoder.Attend; vwd_decoder_attend documents them.
type DecoderAttendArgs struct {
	Layer  int
	K      Tensor
	V      Tensor
	KScale Tensor
	VScale Tensor
	NewK   Tensor
	NewV   Tensor
	Q      Tensor
	Sinks  Tensor
	Out    Tensor
}

// Attend writes the new keys and values, selects and attends in one layer of the step.
func (d *Decoder) Attend(args DecoderAttendArgs, stream Stream) error {
	var l lowering
	defer l.release()
	c := args.lower(&l)
	return d.run(&l, func(h *C.vwd_decoder) C.outcome { return C.decoder_attend(h, &c, stream.c()) })
}

// Scratch tells how many bytes of scratch Attend takes on a stream.
func (d *Decoder) Scratch(args DecoderAttendArgs) (uint64, error) {
	var l lowering
	defer l.release()
	var bytes C.uint64_t
	c := args.lower(&l)
	err := d.run(&l, func(h *C.vwd_decoder) C.outcome { return C.decoder_attend_scratch(h, &c, &bytes) })
	return uint64(bytes), err
}

func (args DecoderAttendArgs) lower(l *lowering) C.vwd_decoder_attend_args {
	return C.vwd_decoder_attend_args{
		struct_size: C.sizeof_vwd_decoder_attend_args,
		layer:       l.uint32("layer", args.Layer),
		k:           l.tensor("k", args.K),
		v:           l.tensor("v", args.V),
		k_scale:     l.tensor("k_scale", args.KScale),
		v_scale:     l.tensor("v_scale", args.VScale),
		new_k:       l.tensor("new_k", args.NewK),
		new_v:       l.tensor("new_v", args.NewV),
		q:           l.tensor("q", args.Q),
		sinks:       l.tensor("sinks", args.Sinks),
		out:         l.tensor("out", args.Out),
	}
}

// DecoderAcceptArgs are the arguments of Decoder.Accept; vwd_decoder_accept documents them.
type DecoderAcceptArgs struct {
	Draft     Tensor
	Target    Tensor
	DraftLens Tensor
	Sequences Tensor
	Accepted  Tensor
	NextToken Tensor
	Committed Tensor
}

// Accept verifies drafted tokens, and keeps what was accepted of each sequence's.
func (d *Decoder) Accept(args DecoderAcceptArgs, stream Stream) error {
	var l lowering
	defer l.release()
	c := args.lower(&l)
	return d.run(&l, func(h *C.vwd_decoder) C.outcome { return C.decoder_accept(h, &c, stream.c()) })
}

func (args DecoderAcceptArgs) lower(l *lowering) C.vwd_decoder_accept_args {
	return C.vwd_decoder_accept_args{
		struct_size: C.sizeof_vwd_decoder_accept_args,
		draft:       l.tensor("draft", args.Draft),
		target:      l.tensor("target", args.Target),
		draft_lens:  l.tensor("draft_lens", args.DraftLens),
		sequences:   l.tensor("sequences", args.Sequences),
		accepted:    l.tensor("accepted", args.Accepted),
		next_token:  l.tensor("next_token", args.NextToken),
		committed:   l.tensor("committed", args.Committed),
	}
}

// DecoderResetArgs are the arguments of Decoder.Reset; vwd_decoder_reset documents them.
type DecoderResetArgs struct {
	Sequences Tensor
}

// Reset forgets what is known of some sequences' drafts.
func (d *Decoder) Reset(args DecoderResetArgs, stream Stream) error {
	var l lowering
	defer l.release()
	c := args.lower(&l)
	return d.run(&l, func(h *C.vwd_decoder) C.outcome { return C.decoder_reset(h, &c, stream.c()) })
}

func (args DecoderResetArgs) lower(l *lowering) C.vwd_decoder_reset_args {
	return C.vwd_decoder_reset_args{
		struct_size: C.sizeof_vwd_decoder_reset_args,
		sequences:   l.tensor("sequences", args.Sequences),
	}
}

// DecoderInfo is vwd_decoder_details: what a decoder keeps. The tensors are valid until Close.
type DecoderInfo struct {
	Bytes      uint64
	DraftLens  Tensor
	Acceptance Tensor
	Drafted    Tensor
	Accepted   Tensor
	Selected   Tensor
	Predicted  Tensor
	Missed     Tensor
	Fetched    Tensor
	// With a budget: layers that fell back to SERIAL in the last step, and in all steps together.
	FallbackLayers uint64
	Fallbacks      uint64
}

// Info tells what the decoder keeps.
func (d *Decoder) Info() (DecoderInfo, error) {
	c := C.vwd_decoder_details{struct_size: C.sizeof_vwd_decoder_details}
	err := d.run(&lowering{}, func(h *C.vwd_decoder) C.outcome { return C.decoder_info(h, &c) })
	return DecoderInfo{
		Bytes: uint64(c.bytes), DraftLens: tensorOf(c.draft_lens), Acceptance: tensorOf(c.acceptance),
		Drafted: tensorOf(c.drafted), Accepted: tensorOf(c.accepted), Selected: tensorOf(c.selected),
		Predicted: tensorOf(c.predicted), Missed: tensorOf(c.missed), Fetched: tensorOf(c.fetched),
		FallbackLayers: uint64(c.fallback_layers), Fallbacks: uint64(c.fallbacks),
	}, err
}
