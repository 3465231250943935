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
//
//	Forgets the scores of some sequences: level = −inf, trend = 0.
//
//	state             Level and trend, out.
//	rows   [n]        int32, optional (absent: every sequence). Rows outside 0 … N−1 are skipped.
//
//	Enqueues on stream and returns; on a CPU session the result is there on return. Does not allocate or synchronise; may
//	be captured. Thread-safe; calls on one stream are ordered by the caller. Tensors are borrowed until the stream passes
//	this point.
//	Errors: INVALID_ARGUMENT (the message names the argument), UNSUPPORTED, DRIVER, INTERNAL.
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
//
//	Predicts which blocks the coming selection will choose (PRR: Wang et al. 2026): the top ⌈ratio·k⌉ of
//	ŝ = level + gamma·trend.
//
//	Forced blocks, ties and counts are as in `vwd_select_blocks`; a block whose level is not finite has ŝ = −inf.
//
//	block_size                           S.
//	k                                    Budget of the selection that is predicted. k and ⌈ratio·k⌉ count the forced
//	                                     blocks. Neither ⌈ratio·k⌉ nor init_blocks + local_blocks exceeds predicted's cap.
//	ratio                                r ≥ 1; 0 means 1. ⌈r·k⌉ forgives the float's rounding (one part in a million).
//	holt                                 Smoothing factors, of which gamma is read.
//	state                                Level and trend of N sequences, input.
//	seq_lens    [B]                      int32: lengths at the coming step; n_i = ⌈len/S⌉ is clamped to max_blocks.
//	budgets     [B]                      int32, optional: k of each sequence; ⌈r·k⌉ is clamped to 0 … cap.
//	predicted   [B, Hk, cap]             Out, ascending; without slots.
//	scores      [B, Hk, max_blocks]      float32, out, optional: ŝ of blocks below n_i.
//	sequences   [B]                      int32, optional (absent: row i is sequence i, and B is N): the sequence of the state
//	                                     that each row is. Of one with another number forced blocks alone are
//	                                     predicted.
//
//	Enqueues on stream and returns; on a CPU session the result is there on return. Does not synchronise, nor allocate
//	once its scratch is there, of which CUDA takes none; may be captured. Thread-safe; calls on one stream are ordered by the caller.
//	Tensors are borrowed until the stream passes this point; inputs are not written.
//	Errors: INVALID_ARGUMENT (the message names the argument), OUT_OF_MEMORY (scratch of a CPU session), UNSUPPORTED, DRIVER, INTERNAL.
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
	Sequences   Tensor
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
		sequences:    l.tensor("sequences", args.Sequences),
	}
}

// PredictorUpdateArgs are the arguments of Session.PredictorUpdate; vwd_predictor_update documents them.
//
//	Folds the true scores of a step into the state (PRR, Holt 1957).
//
//	L' = alpha·s + (1−alpha)·L, T' = beta·(L'−L) + (1−beta)·T. A block whose level, trend or score is not finite starts again:
//	L' = s, T' = 0.
//
//	block_size                       S.
//	holt                             Smoothing factors, of which alpha and beta are read.
//	state                            Level and trend of N sequences, in and out.
//	seq_lens  [B]                    int32: lengths at this step; blocks at or past ⌈len/S⌉ do not change.
//	scores    [B, Hk, max_blocks]    float32, as `vwd_select_blocks` wrote them.
//	sequences [B]                    int32, optional (absent: row i is sequence i, and B is N): the sequence of the state that
//	                                 each row is, distinct. A row with another number changes nothing.
//
//	Enqueues on stream and returns; on a CPU session the result is there on return. Does not allocate or synchronise; may
//	be captured. Thread-safe; calls on one stream are ordered by the caller. Tensors are borrowed until the stream passes
//	this point; inputs are not written.
//	Errors: INVALID_ARGUMENT (the message names the argument), UNSUPPORTED, DRIVER, INTERNAL.
type PredictorUpdateArgs struct {
	BlockSize int
	Holt      Holt
	State     PredictorState
	SeqLens   Tensor
	Scores    Tensor
	Sequences Tensor
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
		sequences:   l.tensor("sequences", args.Sequences),
	}
}

// PredictorCalibrateArgs are the arguments of Session.PredictorCalibrate; vwd_predictor_calibrate documents them.
//
//	Picks the smoothing factors that would have predicted a history of score rows best (PRR: calibration on the prefill).
//
//	For every point of the grid the predictor runs through each history: it predicts step t from the steps before t, then
//	takes the scores of t. The share of step t that it hits is
//	  Σ_{j in P̂} w_j / Σ_j w_j,  w_j = max(s_j − c, 0),
//	where P̂ is the predicted list and c the best score that the true selection of step t leaves out. A block weighs as much as
//	its score exceeds c, so that the share does not depend on the scores' offset and scale, and swapping blocks of equal score
//	costs nothing. Forced blocks and scores that are not finite do not count. The hit rate is the mean share over heads and
//	steps. The first step of a history is skipped, and so are steps whose selection leaves no block out or only takes scores
//	equal to c. Ties between points go to the earlier point.
//
//	Each w_j counts as a whole number of a unit that suits the step: a power of two of which the n scores that are not forced add up to
//	at most 2^63, so that what is dropped is below n² / 2^61 of a step's largest weight. The result has the same bits on every backend.
//
//	Scores from elsewhere, such as those of a forecast's queries, are rated on the same steps by histories of two: their row, and the true
//	one. With {1, 0, 0} for a grid the hit rate is that of the lists that those rows select.
//
//	k, init_blocks, local_blocks, ratio    As in `vwd_predictor_predict`.
//	grid          [grid_count]             Host array, optional (NULL: a built-in grid that starts with {1, 0, 0}).
//	scores        [N, T, Hk, nb]           float32. Score rows of N histories of T steps. Every second, or every tenth, row of more
//	                                       is a stride of T.
//	block_counts  [N, T]                   int32. Blocks that exist at each step, clamped to 0 … nb.
//	holt                                         Out: the best point.
//	hit_rate                                     Out, may be NULL: hit rate of the best point, 0 … 1; 0 if every step is skipped.
//
//	On CUDA the call runs on a stream of its own: streams that write the tensors have passed. Its memory there is 24 bytes for each row of
//	scores, and 8 for each point, history, head and block, of as many points at once as 256 MiB hold, or of one.
//
//	Blocks until done and may allocate; not for capture. Thread-safe. Tensors are borrowed during the call.
//	Errors: INVALID_ARGUMENT (the message names the argument), OUT_OF_MEMORY, UNSUPPORTED, DRIVER, INTERNAL.
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
