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
}

// Forecast holds linear maps, one per layer, that forecast the next layer's queries. It outlives its session.
type Forecast struct {
	handle handle[*C.vwd_forecast]
}

// NewForecast creates empty maps.
func (s *Session) NewForecast(options ForecastOptions) (*Forecast, error) {
	var l lowering
	c := C.vwd_forecast_options{
		struct_size: C.sizeof_vwd_forecast_options,
		layers:      l.uint32("options.layers", options.Layers),
		input_dim:   l.uint32("options.input_dim", options.InputDim),
		q_heads:     l.uint32("options.q_heads", options.QHeads),
		head_dim:    l.uint32("options.head_dim", options.HeadDim),
		ridge:       C.float(options.Ridge),
	}
	f := &Forecast{}
	err := s.run(&l, func(h *C.vwd_session) C.outcome { return C.forecast_create(h, &c, &f.handle.c) })
	if err != nil {
		return nil, err
	}
	return f, nil
}

// LoadForecast reads maps that Save, or a training script, wrote.
func (s *Session) LoadForecast(path string) (*Forecast, error) {
	var l lowering
	cPath := l.path(path)
	defer C.free(unsafe.Pointer(cPath))
	f := &Forecast{}
	err := s.run(&l, func(h *C.vwd_session) C.outcome { return C.forecast_load(h, cPath, &f.handle.c) })
	if err != nil {
		return nil, err
	}
	return f, nil
}

// Close releases the maps once calls in progress have returned. Closing again does nothing; calls after it fail.
func (f *Forecast) Close() error {
	if f != nil {
		f.handle.close(func(c *C.vwd_forecast) { C.vwd_forecast_release(c) })
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
		Ridge: float32(d.ridge), Solved: int(d.solved), Rank: int(d.rank),
		MapBytes: uint64(d.map_bytes), SumBytes: uint64(d.sum_bytes),
	}, err
}

// Accumulate adds activations of one layer to the map's sums: x [N, InputDim] and pre-RoPE queries q
// [N, QHeads, HeadDim].
func (f *Forecast) Accumulate(layer int, x, q Tensor) error {
	var l lowering
	defer l.release()
	c := C.vwd_forecast_accumulate_args{
		struct_size: C.sizeof_vwd_forecast_accumulate_args,
		layer:       l.uint32("layer", layer),
		x:           l.tensor("x", x),
		q:           l.tensor("q", q),
	}
	return f.run(&l, func(h *C.vwd_forecast) C.outcome { return C.forecast_accumulate(h, &c) })
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
type ProjectArgs struct {
	Layer     int
	Rope      Rope
	X         Tensor
	Positions Tensor
	Q         Tensor
}

// Project forecasts the next layer's queries.
func (f *Forecast) Project(args ProjectArgs, stream Stream) error {
	var l lowering
	defer l.release()
	c := C.vwd_forecast_project_args{
		struct_size: C.sizeof_vwd_forecast_project_args,
		layer:       l.uint32("layer", args.Layer),
		rope: C.vwd_rope{
			style:            C.uint32_t(args.Rope.Style),
			rotary_dim:       l.uint32("rope.rotary_dim", args.Rope.RotaryDim),
			theta:            C.float(args.Rope.Theta),
			attention_factor: C.float(args.Rope.AttentionFactor),
			inv_freq:         l.tensor("rope.inv_freq", args.Rope.InvFreq),
		},
		x:         l.tensor("x", args.X),
		positions: l.tensor("positions", args.Positions),
		q:         l.tensor("q", args.Q),
	}
	return f.run(&l, func(h *C.vwd_forecast) C.outcome { return C.forecast_project(h, &c, stream.c()) })
}

// path is a C string; C would read one with a NUL inside as another.
func (l *lowering) path(path string) *C.char {
	if strings.IndexByte(path, 0) >= 0 {
		l.fail("path", "a NUL byte inside")
	}
	return C.CString(path)
}
