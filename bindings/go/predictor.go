package vanward

// #include "calls.h"
// #cgo noescape predictor_reset
// #cgo nocallback predictor_reset
// #cgo noescape predictor_predict
// #cgo nocallback predictor_predict
// #cgo noescape predictor_update
// #cgo nocallback predictor_update
import "C"

// PredictorResetArgs are the arguments of Session.PredictorReset; vwd_predictor_reset documents them.
type PredictorResetArgs struct {
	State PredictorState
	Rows  Tensor
}

// PredictorReset forgets what was seen of some sequences.
func (s *Session) PredictorReset(args PredictorResetArgs, stream Stream) error {
	var l lowering
	defer l.release()
	c := args.lower(&l)
	return s.run(&l, func(h *C.vwd_session) C.outcome { return C.predictor_reset(h, &c, stream.c()) })
}

func (args PredictorResetArgs) lower(l *lowering) C.vwd_predictor_reset_args {
	return C.vwd_predictor_reset_args{
		struct_size: C.sizeof_vwd_predictor_reset_args,
		state:       l.predictorState(args.State),
		rows:        l.tensor("rows", args.Rows),
	}
}

// PredictorPredictArgs are the arguments of Session.PredictorPredict; vwd_predictor_predict documents them.
type PredictorPredictArgs struct {
	BlockSize   int
	K           int
	InitBlocks  int
	LocalBlocks int
	Ratio       float32
	Holt        Holt
	State       PredictorState
	SeqLens     Tensor
	Budgets     Tensor
	Predicted   BlockList
	Scores      Tensor
}

// PredictorPredict predicts which blocks the coming selection will choose.
func (s *Session) PredictorPredict(args PredictorPredictArgs, stream Stream) error {
	var l lowering
	defer l.release()
	c := args.lower(&l)
	return s.run(&l, func(h *C.vwd_session) C.outcome { return C.predictor_predict(h, &c, stream.c()) })
}

func (args PredictorPredictArgs) lower(l *lowering) C.vwd_predictor_predict_args {
	return C.vwd_predictor_predict_args{
		struct_size:  C.sizeof_vwd_predictor_predict_args,
		block_size:   l.uint32("block_size", args.BlockSize),
		k:            l.uint32("k", args.K),
		init_blocks:  l.uint32("init_blocks", args.InitBlocks),
		local_blocks: l.uint32("local_blocks", args.LocalBlocks),
		ratio:        C.float(args.Ratio),
		holt:         args.Holt.c(),
		state:        l.predictorState(args.State),
		seq_lens:     l.tensor("seq_lens", args.SeqLens),
		budgets:      l.tensor("budgets", args.Budgets),
		predicted:    l.blockList("predicted.ids", "predicted.counts", "predicted.slots", args.Predicted),
		scores:       l.tensor("scores", args.Scores),
	}
}

// PredictorUpdateArgs are the arguments of Session.PredictorUpdate; vwd_predictor_update documents them.
type PredictorUpdateArgs struct {
	BlockSize int
	Holt      Holt
	State     PredictorState
	SeqLens   Tensor
	Scores    Tensor
}

// PredictorUpdate folds the true scores of a step into the state.
func (s *Session) PredictorUpdate(args PredictorUpdateArgs, stream Stream) error {
	var l lowering
	defer l.release()
	c := args.lower(&l)
	return s.run(&l, func(h *C.vwd_session) C.outcome { return C.predictor_update(h, &c, stream.c()) })
}

func (args PredictorUpdateArgs) lower(l *lowering) C.vwd_predictor_update_args {
	return C.vwd_predictor_update_args{
		struct_size: C.sizeof_vwd_predictor_update_args,
		block_size:  l.uint32("block_size", args.BlockSize),
		holt:        args.Holt.c(),
		state:       l.predictorState(args.State),
		seq_lens:    l.tensor("seq_lens", args.SeqLens),
		scores:      l.tensor("scores", args.Scores),
	}
}

// PredictorCalibrateArgs are the arguments of Session.PredictorCalibrate; vwd_predictor_calibrate documents them.
type PredictorCalibrateArgs struct {
	K           int
	InitBlocks  int
	LocalBlocks int
	Ratio       float32
	Grid        []Holt // nil: a grid of the library's
	Scores      Tensor
	BlockCounts Tensor
}

// PredictorCalibrate picks the smoothing factors that would have predicted a history of scores best, and says how well.
func (s *Session) PredictorCalibrate(args PredictorCalibrateArgs) (best Holt, hitRate float64, err error) {
	var l lowering
	defer l.release()
	c := args.lower(&l)
	var holt C.vwd_holt
	var rate C.double
	err = s.run(&l, func(h *C.vwd_session) C.outcome { return C.predictor_calibrate(h, &c, &holt, &rate) })
	return Holt{float32(holt.alpha), float32(holt.beta), float32(holt.gamma)}, float64(rate), err
}

func (args PredictorCalibrateArgs) lower(l *lowering) C.vwd_predictor_calibrate_args {
	return C.vwd_predictor_calibrate_args{
		struct_size:  C.sizeof_vwd_predictor_calibrate_args,
		k:            l.uint32("k", args.K),
		init_blocks:  l.uint32("init_blocks", args.InitBlocks),
		local_blocks: l.uint32("local_blocks", args.LocalBlocks),
		ratio:        C.float(args.Ratio),
		grid_count:   l.uint32("grid_count", len(args.Grid)),
		grid:         l.grid(args.Grid),
		scores:       l.tensor("scores", args.Scores),
		block_counts: l.tensor("block_counts", args.BlockCounts),
	}
}
