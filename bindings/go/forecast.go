package vanward

// #include "calls.h"
// #cgo noescape forecast_accumulate
// #cgo nocallback forecast_accumulate
// #cgo noescape forecast_project
// #cgo nocallback forecast_project
import "C"

import (
	"strings"
	"unsafe"
)

// ForecastOptions describe the maps; only Ridge has a default.
type ForecastOptions struct {
	Layers   int
	InputDim int
	QHeads   int
	HeadDim  int
	Ridge    float32
	Memory   bool // maps read the queries at the token before, too
}

// Forecast holds linear maps, one per layer, that forecast the next layer's queries. It outlives its session.
type Forecast struct {
	handle handle[*C.vwd_forecast]
	log    *callback
}

// NewForecast creates empty maps.
func (s *Session) NewForecast(options ForecastOptions) (*Forecast, error) {
	var l lowering
	c := options.lower(&l)
	f := &Forecast{}
	err := s.create(&l, &f.log, func(h *C.vwd_session) C.outcome { return C.forecast_create(h, &c, &f.handle.c) })
	if err != nil {
		return nil, err
	}
	return f, nil
}

func (options ForecastOptions) lower(l *lowering) C.vwd_forecast_options {
	c := C.vwd_forecast_options{
		struct_size: C.sizeof_vwd_forecast_options,
		layers:      l.uint32("options.layers", options.Layers),
		input_dim:   l.uint32("options.input_dim", options.InputDim),
		q_heads:     l.uint32("options.q_heads", options.QHeads),
		head_dim:    l.uint32("options.head_dim", options.HeadDim),
		ridge:       C.float(options.Ridge),
	}
	if options.Memory {
		c.flags = C.VWD_FORECAST_MEMORY
	}
	return c
}

// LoadForecast reads maps that Save, or a training script, wrote.
func (s *Session) LoadForecast(path string) (*Forecast, error) {
	var l lowering
	cPath := l.path(path)
	defer C.free(unsafe.Pointer(cPath))
	f := &Forecast{}
	err := s.create(&l, &f.log, func(h *C.vwd_session) C.outcome { return C.forecast_load(h, cPath, &f.handle.c) })
	if err != nil {
		return nil, err
	}
	return f, nil
}

// Close releases the maps once calls in progress have returned. Closing again does nothing; calls after it fail.
func (f *Forecast) Close() error {
	if f != nil {
		f.handle.close(func(c *C.vwd_forecast) {
			C.vwd_forecast_release(c)
			f.log.free()
		})
	}
	return nil
}

func (f *Forecast) run(l *lowering, call func(*C.vwd_forecast) C.outcome) error {
	if l.err != nil {
		return l.err
	}
	if f == nil {
		return invalid("forecast", "nil")
	}
	return f.handle.use("forecast", call)
}

// ForecastInfo is what a forecast holds.
type ForecastInfo struct {
	Layers   int
	InputDim int
	QHeads   int
	HeadDim  int
	Ridge    float32
	Memory   bool
	Solved   int // maps that are solved or loaded
	Rank     int // largest rank that maps are cut to; 0 where none is
	MapBytes uint64
	SumBytes uint64
}

// Info tells what the forecast holds.
func (f *Forecast) Info() (ForecastInfo, error) {
	d := C.vwd_forecast_details{struct_size: C.sizeof_vwd_forecast_details}
	err := f.run(&lowering{}, func(c *C.vwd_forecast) C.outcome { return C.forecast_info(c, &d) })
	return ForecastInfo{
		Layers: int(d.layers), InputDim: int(d.input_dim), QHeads: int(d.q_heads), HeadDim: int(d.head_dim),
		Ridge: float32(d.ridge), Memory: d.flags&C.VWD_FORECAST_MEMORY != 0, Solved: int(d.solved), Rank: int(d.rank),
		MapBytes: uint64(d.map_bytes), SumBytes: uint64(d.sum_bytes),
	}, err
}

// AccumulateArgs are the arguments of Forecast.Accumulate; vwd_forecast_accumulate documents them.
//
//	Adds activations to the sums X̂ᵀX̂ and X̂ᵀQ of one map, whose inputs are X̂ = [x / rms(x), 1] or, with
//	VWD_FORECAST_MEMORY, [x / rms(x), previous, 1].
//
//	layer                            0 … layers−1.
//	x         [N, input_dim]         float32, float16 or bfloat16. Residual stream that enters the layer, per token.
//	previous  [N, q_heads, head_dim] float32, float16 or bfloat16. Given with VWD_FORECAST_MEMORY and only then: row n is
//	                                 q at the token before token n; zeros for the first token of a sequence. May be
//	                                 the memory of q, one row earlier.
//	q         [N, q_heads, head_dim] float32, float16 or bfloat16. Pre-RoPE queries of the layer that is forecast.
//
//	Activations come in any number of calls, with any N. Blocks until done and may allocate; not for capture. Thread-safe;
//	calls on one forecast wait for each other. Tensors are borrowed during the call and are CPU tensors on any session.
//	Errors: INVALID_ARGUMENT (the message names the argument; a value that is not finite), OUT_OF_MEMORY, INTERNAL. After an
//	error the sums are as they were.
type AccumulateArgs struct {
	Layer    int
	X        Tensor
	Previous Tensor
	Q        Tensor
}

// Accumulate adds activations of one layer to the map's sums.
func (f *Forecast) Accumulate(args AccumulateArgs) error {
	var l lowering
	defer l.release()
	c := args.lower(&l)
	return f.run(&l, func(h *C.vwd_forecast) C.outcome { return C.forecast_accumulate(h, &c) })
}

func (args AccumulateArgs) lower(l *lowering) C.vwd_forecast_accumulate_args {
	return C.vwd_forecast_accumulate_args{
		struct_size: C.sizeof_vwd_forecast_accumulate_args,
		layer:       l.uint32("layer", args.Layer),
		x:           l.tensor("x", args.X),
		previous:    l.tensor("previous", args.Previous),
		q:           l.tensor("q", args.Q),
	}
}

// Solve fits every map that has sums; rank 0 keeps the maps whole.
func (f *Forecast) Solve(rank int) error {
	var l lowering
	r := l.uint32("rank", rank)
	return f.run(&l, func(h *C.vwd_forecast) C.outcome { return C.forecast_solve(h, r) })
}

// Save writes the solved maps to a safetensors file.
func (f *Forecast) Save(path string) error {
	var l lowering
	cPath := l.path(path)
	defer C.free(unsafe.Pointer(cPath))
	return f.run(&l, func(h *C.vwd_forecast) C.outcome { return C.forecast_save(h, cPath) })
}

// ProjectArgs are the arguments of Forecast.Project; vwd_forecast_project documents them.
//
//	Forecasts queries: q[i] = RoPE at positions[i] of W times row i of X̂ (see `vwd_forecast_accumulate`).
//	`vwd_select_blocks` of the next layer takes these queries.
//
//	layer                             0 … layers−1; its map is solved or loaded.
//	rope                              The model's rotary embedding; NULL means all defaults. Angles are computed in
//	                                  double precision.
//	x          [B, input_dim]         float32, float16 or bfloat16.
//	previous   [B, q_heads, head_dim] float32, float16 or bfloat16. Given with VWD_FORECAST_MEMORY and only then: the
//	                                  true pre-RoPE queries of the layer that is forecast at the token before; zeros
//	                                  for the first token of a sequence.
//	positions  [B]                    int32; 0 leaves a row unrotated.
//	q          [B, q_heads, head_dim] float32, float16 or bfloat16, out.
//
//	Enqueues on stream and returns; on a CPU session the result is there on return. Does not synchronise, nor allocate
//	once its scratch is there; may be captured. Thread-safe; calls on one stream are ordered by the caller. Tensors are
//	borrowed until the stream passes this point; inputs are not written.
//	Errors: INVALID_ARGUMENT (the message names the argument), OUT_OF_SCRATCH (CUDA), OUT_OF_MEMORY (scratch),
//	UNSUPPORTED, DRIVER, INTERNAL.
type ProjectArgs struct {
	Layer     int
	Rope      Rope
	X         Tensor
	Previous  Tensor
	Positions Tensor
	Q         Tensor
}

// Project forecasts the next layer's queries.
func (f *Forecast) Project(args ProjectArgs, stream Stream) error {
	var l lowering
	defer l.release()
	c, rope := args.lower(&l)
	return f.run(&l, func(h *C.vwd_forecast) C.outcome { return C.forecast_project(h, &c, &rope, stream.c()) })
}

func (args ProjectArgs) lower(l *lowering) (C.vwd_forecast_project_args, C.vwd_rope) {
	return C.vwd_forecast_project_args{
		struct_size: C.sizeof_vwd_forecast_project_args,
		layer:       l.uint32("layer", args.Layer),
		x:           l.tensor("x", args.X),
		previous:    l.tensor("previous", args.Previous),
		positions:   l.tensor("positions", args.Positions),
		q:           l.tensor("q", args.Q),
	}, l.rope(args.Rope)
}

// path is a C string; C would read one with a NUL inside as another.
func (l *lowering) path(path string) *C.char {
	if strings.IndexByte(path, 0) >= 0 {
		l.fail("path", "a NUL byte inside")
	}
	return C.CString(path)
}
