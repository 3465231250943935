package vanward

// #include "calls.h"
// #cgo noescape attention
// #cgo nocallback attention
// #cgo noescape attention_scratch
// #cgo nocallback attention_scratch
// #cgo noescape merge_states
// #cgo nocallback merge_states
// #cgo noescape repair
// #cgo nocallback repair
// #cgo noescape repair_scratch
// #cgo nocallback repair_scratch
import "C"

// AttentionArgs are the arguments of Session.Attention; vwd_attention documents them.
type AttentionArgs struct {
	BlockSize     int
	PartialBlocks int
	Scale         float32
	SoftCap       float32
	Window        int
	KV            PagedKV
	Q             Tensor
	QLens         Tensor
	List          BlockList
	Sinks         Tensor
	Out           Tensor
	LSE           Tensor
	State         AttentionState
	Partials      AttentionPartials
}

// Attention attends over a list of blocks, a list of tokens, or everything.
func (s *Session) Attention(args AttentionArgs, stream Stream) error {
	var l lowering
	defer l.release()
	c, kv := args.lower(&l)
	return s.run(&l, func(h *C.vwd_session) C.outcome { return C.attention(h, &c, &kv, stream.c()) })
}

// AttentionScratch is how many bytes of scratch the call takes on a stream; 0 on a CPU session.
func (s *Session) AttentionScratch(args AttentionArgs) (uint64, error) {
	var l lowering
	defer l.release()
	var bytes C.uint64_t
	c, kv := args.lower(&l)
	err := s.run(&l, func(h *C.vwd_session) C.outcome { return C.attention_scratch(h, &c, &kv, &bytes) })
	return uint64(bytes), err
}

func (args AttentionArgs) lower(l *lowering) (C.vwd_attention_args, C.vwd_paged_kv) {
	return C.vwd_attention_args{
		struct_size:    C.sizeof_vwd_attention_args,
		block_size:     l.uint32("block_size", args.BlockSize),
		partial_blocks: l.uint32("partial_blocks", args.PartialBlocks),
		scale:          C.float(args.Scale),
		soft_cap:       C.float(args.SoftCap),
		window:         l.uint32("window", args.Window),
		q:              l.tensor("q", args.Q),
		q_lens:         l.tensor("q_lens", args.QLens),
		list:           l.blockList("list.ids", "list.counts", "list.slots", args.List),
		sinks:          l.tensor("sinks", args.Sinks),
		out:            l.tensor("out", args.Out),
		lse:            l.tensor("lse", args.LSE),
		state:          l.state("state.acc", "state.m", "state.l", args.State),
		partials:       l.partials("partials.acc", "partials.m", "partials.l", args.Partials),
	}, l.pagedKV(args.KV)
}

// MergeStatesArgs are the arguments of Session.MergeStates; vwd_merge_states documents them.
type MergeStatesArgs struct {
	Inputs []AttentionState
	Sinks  Tensor
	Out    Tensor
	LSE    Tensor
	State  AttentionState
}

// MergeStates joins attention states over disjoint sets of tokens.
func (s *Session) MergeStates(args MergeStatesArgs, stream Stream) error {
	var l lowering
	defer l.release()
	c := args.lower(&l)
	return s.run(&l, func(h *C.vwd_session) C.outcome { return C.merge_states(h, &c, stream.c()) })
}

func (args MergeStatesArgs) lower(l *lowering) C.vwd_merge_states_args {
	return C.vwd_merge_states_args{
		struct_size: C.sizeof_vwd_merge_states_args,
		input_count: l.uint32("input_count", len(args.Inputs)),
		inputs:      l.states(args.Inputs),
		sinks:       l.tensor("sinks", args.Sinks),
		out:         l.tensor("out", args.Out),
		lse:         l.tensor("lse", args.LSE),
		state:       l.state("state.acc", "state.m", "state.l", args.State),
	}
}

// RepairArgs are the arguments of Session.Repair; vwd_repair documents them.
type RepairArgs struct {
	Mode              RepairMode
	BlockSize         int
	PartialBlocks     int
	Scale             float32
	SoftCap           float32
	Window            int
	KV                PagedKV
	Q                 Tensor
	QLens             Tensor
	Predicted         BlockList
	Selected          BlockList
	PredictedState    AttentionState
	PredictedPartials AttentionPartials
	Sinks             Tensor
	Out               Tensor
	LSE               Tensor
	State             AttentionState
	MissedCounts      Tensor
}

// Repair turns attention over predicted blocks into attention over the selected ones.
func (s *Session) Repair(args RepairArgs, stream Stream) error {
	var l lowering
	defer l.release()
	c, kv := args.lower(&l)
	return s.run(&l, func(h *C.vwd_session) C.outcome { return C.repair(h, &c, &kv, stream.c()) })
}

// RepairScratch is how many bytes of scratch the call takes on a stream; 0 on a CPU session.
func (s *Session) RepairScratch(args RepairArgs) (uint64, error) {
	var l lowering
	defer l.release()
	var bytes C.uint64_t
	c, kv := args.lower(&l)
	err := s.run(&l, func(h *C.vwd_session) C.outcome { return C.repair_scratch(h, &c, &kv, &bytes) })
	return uint64(bytes), err
}

func (args RepairArgs) lower(l *lowering) (C.vwd_repair_args, C.vwd_paged_kv) {
	return C.vwd_repair_args{
		struct_size:     C.sizeof_vwd_repair_args,
		mode:            C.uint32_t(args.Mode),
		block_size:      l.uint32("block_size", args.BlockSize),
		partial_blocks:  l.uint32("partial_blocks", args.PartialBlocks),
		scale:           C.float(args.Scale),
		soft_cap:        C.float(args.SoftCap),
		window:          l.uint32("window", args.Window),
		q:               l.tensor("q", args.Q),
		q_lens:          l.tensor("q_lens", args.QLens),
		predicted:       l.blockList("predicted.ids", "predicted.counts", "predicted.slots", args.Predicted),
		selected:        l.blockList("selected.ids", "selected.counts", "selected.slots", args.Selected),
		predicted_state: l.state("predicted_state.acc", "predicted_state.m", "predicted_state.l", args.PredictedState),
		predicted_partials: l.partials(
			"predicted_partials.acc", "predicted_partials.m", "predicted_partials.l", args.PredictedPartials),
		sinks:         l.tensor("sinks", args.Sinks),
		out:           l.tensor("out", args.Out),
		lse:           l.tensor("lse", args.LSE),
		state:         l.state("state.acc", "state.m", "state.l", args.State),
		missed_counts: l.tensor("missed_counts", args.MissedCounts),
	}, l.pagedKV(args.KV)
}
