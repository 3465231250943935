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
//
//	Decode attention of a sequence's query positions over a list of blocks, a list of tokens, or everything.
//
//	out[i, h] = Σ_t softmax_t(s_t) v_t with s_t = scale·q_h·k_t, over the tokens t of the list of KV head h / G that the
//	position sees. Of Q positions row r < q_lens[i] stands at p = seq_lens[i] − q_lens[i] + r, for seq_lens counts the rows
//	themselves, and sees the tokens 0 … p; with a window w the tokens p − w + 1 … p, itself included. Rows at or past
//	q_lens, and rows with nothing to attend: out 0, lse −inf, the empty state. Speculative attention is this call over a
//	predicted list with state or partials kept for `vwd_repair`.
//
//	block_size                     Tokens of a block of the list, S; 1 for a list of tokens; 0 without a list. With a
//	                               page_table, S divides P or P divides S; with slots, S divides P.
//	partial_blocks                 Entries of the list that share one partial; 0 means 1.
//	scale                          Of q·k, above 0; 0 means 1/√D, and must be given where D ≠ Dv.
//	soft_cap                       c: s becomes c·tanh(s / c), before anything is masked. 0: none.
//	window                         w, in tokens. 0: none.
//	q         [B, Hq, D]           float32, float16 or bfloat16. Hq = G·Hk, any G ≥ 1. Q = 1.
//	       or [B, Q, Hq, D]
//	q_lens    [B]                  int32, optional (absent: Q). Rows of each sequence; clamped to 0 … Q.
//	kv                             Keys and values.
//	list      [B, Hk, cap]         Optional (no tensor given: every token). Shared by the positions of a sequence,
//	       or [B, Q, Hk, cap]      which then read its tokens once; or each position's own (q of rank 4). With slots
//	                               kv is a pool [slots, P, 1, D] without page_table, and Hk is the list's.
//	sinks     [Hq]                 float32, optional: out = acc / (l + e^(sink − m)). +inf: out 0; −inf: no sink.
//	                               Neither capped, nor in lse, state or partials.
//	out       [B, Hq, Dv]          dtype of q, or float32; out.
//	       or [B, Q, Hq, Dv]
//	lse       [B, Hq]              float32, out, optional. Natural logarithm of Σ e^s.
//	       or [B, Q, Hq]
//	state                          Out, optional (all three or none).
//	partials                       Out, optional (all three or none); needs a list. Entries past the count are not
//	                               written.
//
//	FP8 keys and values: s_t = scale·k_scale_t·(q·k_t), and v_scale_t multiplies v_t; what is masked is not multiplied, so
//	that bytes and scales of tokens that no row sees may be NaN. A NaN in a token spoils the rows that see it, and no other.
//
//	On the CPU results do not depend on batch, neighbours, other positions or threads.
//
//	Enqueues on stream and returns; on a CPU session the result is there on return. Does not synchronise, nor allocate
//	once its scratch is there; may be captured. Thread-safe; calls on one stream are ordered by the caller. Tensors are
//	borrowed until the stream passes this point; inputs are not written.
//	Errors: INVALID_ARGUMENT (the message names the argument), OUT_OF_SCRATCH (CUDA), OUT_OF_MEMORY (scratch),
//	UNSUPPORTED, DRIVER, INTERNAL.
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
//
//	Joins attention states over disjoint sets of tokens (Flash-Decoding: Dao et al. 2023).
//
//	m' = max_n m_n, l' = Σ_n l_n e^(m_n−m'), acc' = Σ_n acc_n e^(m_n−m'), out = acc' / (l' + e^(sink − m')),
//	lse = m' + ln l'. Empty states are neutral; joined in the order given.
//
//	input_count            Number of states, 1 … 16.
//	inputs  [n]            Host array of states [B, Hq, Dv], [B, Hq], [B, Hq], or all with Q after B. Dv a multiple of
//	                       8, 16 … 576.
//	sinks   [Hq]           float32, optional; as in `vwd_attention`, and in out alone.
//	out     [B, Hq, Dv]    float32, float16 or bfloat16, out, optional.
//	     or [B, Q, Hq, Dv]
//	lse     [B, Hq]        float32, out, optional.
//	     or [B, Q, Hq]
//	state                  Out, optional (all three or none). At least one of out, lse and state is given.
//
//	Enqueues on stream and returns; on a CPU session the result is there on return. Does not synchronise, nor allocate
//	once its scratch is there; may be captured. Thread-safe; calls on one stream are ordered by the caller. Tensors are
//	borrowed until the stream passes this point; the array inputs only during the call. Outputs do not overlap inputs.
//	Errors: INVALID_ARGUMENT (the message names the argument), OUT_OF_MEMORY (scratch of a CPU session), UNSUPPORTED,
//	DRIVER, INTERNAL.
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
//
//	Turns attention over predicted blocks into attention over the selected ones, at a cost that follows what was missed.
//
//	The missed set, selected ∖ predicted, is found here, attended and folded in. SUPERSET (PRR) starts from
//	predicted_state; its result covers predicted ∪ selected. EXACT joins the partials of predicted ∩ selected with the
//	missed blocks; a group of partial_blocks that holds a block predicted in vain is attended again. On the CPU, with
//	block_size ≥ 8 and partial_blocks ≤ 1, EXACT equals `vwd_attention` over selected bit for bit.
//
//	Positions, masks, caps and sinks mean what they mean in `vwd_attention`. A block is missed if it is selected, not
//	predicted, and begins below seq_lens (with lists of each position's own: at or before the position).
//
//	mode                              VWD_REPAIR_SUPERSET or VWD_REPAIR_EXACT.
//	block_size, partial_blocks,       As in the call of `vwd_attention` that made the state or partials.
//	scale, soft_cap, window
//	q, q_lens, kv                     Likewise.
//	predicted  [B, Hk, cap]           The list that was attended; without slots.
//	        or [B, Q, Hk, cap]
//	selected   [B, Hk, cap2]          The true list, of the same rank; with slots if kv is a pool that slots name.
//	        or [B, Q, Hk, cap2]
//	predicted_state                   SUPERSET: kept by `vwd_attention`. EXACT: absent.
//	predicted_partials                EXACT: kept by `vwd_attention`. SUPERSET: absent.
//	sinks      [Hq]                   float32, optional; enters out alone, so that it is given in every call.
//	out        [B, Hq, Dv]            dtype of q, or float32; out.
//	        or [B, Q, Hq, Dv]
//	lse        [B, Hq]                float32, out, optional.
//	        or [B, Q, Hq]
//	state                             Out, optional (all three or none); may be predicted_state itself.
//	missed_counts  [B, Hk]            int32, out, optional: size of selected ∖ predicted, of each list.
//	            or [B, Q, Hk]
//
//	Enqueues on stream and returns; on a CPU session the result is there on return. Does not synchronise, nor allocate
//	once its scratch is there; may be captured. Thread-safe; calls on one stream are ordered by the caller. Tensors are
//	borrowed until the stream passes this point; inputs are not written.
//	Errors: INVALID_ARGUMENT (the message names the argument), OUT_OF_SCRATCH (CUDA), OUT_OF_MEMORY (scratch),
//	UNSUPPORTED, DRIVER, INTERNAL.
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
