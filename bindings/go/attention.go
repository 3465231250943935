package vanward

// #include "calls.h"
// #cgo noescape attention
// #cgo nocallback attention
// #cgo noescape merge_states
// #cgo nocallback merge_states
// #cgo noescape repair
// #cgo nocallback repair
import "C"

// AttentionArgs are the arguments of Session.Attention; vwd_attention documents them.
type AttentionArgs struct {
	BlockSize     int
	PartialBlocks int
	Scale         float32
	Q             Tensor
	KV            PagedKV
	List          BlockList
	Out           Tensor
	LSE           Tensor
	State         AttentionState
	Partials      AttentionPartials
}

// Attention attends over a list of blocks, a list of tokens, or everything.
func (s *Session) Attention(args AttentionArgs, stream Stream) error {
	var l lowering
	defer l.release()
	c := C.vwd_attention_args{
		struct_size:    C.sizeof_vwd_attention_args,
		block_size:     l.uint32("block_size", args.BlockSize),
		partial_blocks: l.uint32("partial_blocks", args.PartialBlocks),
		scale:          C.float(args.Scale),
		q:              l.tensor("q", args.Q),
		kv:             l.pagedKV(args.KV),
		list:           l.blockList("list.ids", "list.counts", args.List),
		out:            l.tensor("out", args.Out),
		lse:            l.tensor("lse", args.LSE),
		state:          l.state("state.acc", "state.m", "state.l", args.State),
		partials:       l.partials("partials.acc", "partials.m", "partials.l", args.Partials),
	}
	return s.run(&l, func(h *C.vwd_session) C.outcome { return C.attention(h, &c, stream.c()) })
}

// MergeStatesArgs are the arguments of Session.MergeStates; vwd_merge_states documents them.
type MergeStatesArgs struct {
	Inputs []AttentionState
	Out    Tensor
	LSE    Tensor
	State  AttentionState
}

// MergeStates joins attention states over disjoint sets of tokens.
func (s *Session) MergeStates(args MergeStatesArgs, stream Stream) error {
	var l lowering
	defer l.release()
	c := C.vwd_merge_states_args{
		struct_size: C.sizeof_vwd_merge_states_args,
		input_count: l.uint32("input_count", len(args.Inputs)),
		inputs:      l.states(args.Inputs),
		out:         l.tensor("out", args.Out),
		lse:         l.tensor("lse", args.LSE),
		state:       l.state("state.acc", "state.m", "state.l", args.State),
	}
	return s.run(&l, func(h *C.vwd_session) C.outcome { return C.merge_states(h, &c, stream.c()) })
}

// RepairArgs are the arguments of Session.Repair; vwd_repair documents them.
type RepairArgs struct {
	Mode              RepairMode
	BlockSize         int
	PartialBlocks     int
	Scale             float32
	Q                 Tensor
	KV                PagedKV
	Predicted         BlockList
	Selected          BlockList
	PredictedState    AttentionState
	PredictedPartials AttentionPartials
	Out               Tensor
	LSE               Tensor
	State             AttentionState
	MissedCounts      Tensor
}

// Repair turns attention over predicted blocks into attention over the selected ones.
func (s *Session) Repair(args RepairArgs, stream Stream) error {
	var l lowering
	defer l.release()
	c := C.vwd_repair_args{
		struct_size:     C.sizeof_vwd_repair_args,
		mode:            C.uint32_t(args.Mode),
		block_size:      l.uint32("block_size", args.BlockSize),
		partial_blocks:  l.uint32("partial_blocks", args.PartialBlocks),
		scale:           C.float(args.Scale),
		q:               l.tensor("q", args.Q),
		kv:              l.pagedKV(args.KV),
		predicted:       l.blockList("predicted.ids", "predicted.counts", args.Predicted),
		selected:        l.blockList("selected.ids", "selected.counts", args.Selected),
		predicted_state: l.state("predicted_state.acc", "predicted_state.m", "predicted_state.l", args.PredictedState),
		predicted_partials: l.partials(
			"predicted_partials.acc", "predicted_partials.m", "predicted_partials.l", args.PredictedPartials),
		out:           l.tensor("out", args.Out),
		lse:           l.tensor("lse", args.LSE),
		state:         l.state("state.acc", "state.m", "state.l", args.State),
		missed_counts: l.tensor("missed_counts", args.MissedCounts),
	}
	return s.run(&l, func(h *C.vwd_session) C.outcome { return C.repair(h, &c, stream.c()) })
}
