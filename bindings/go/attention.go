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
//	Decode attention of a sequence's query positions over a list of blocks, a list of tokens, or all tokens.
//
//	out[i, h] = Σ_t softmax_t(s_t) v_t with s_t = scale·q_h·k_t, over the tokens t of the list of KV head h / G that the query
//	position sees. Row r < q_lens[i] of the Q rows of a sequence is at token position p = seq_lens[i] − q_lens[i] + r, because
//	seq_lens counts the rows themselves. It sees the tokens 0 … p; with a window w it sees the tokens p − w + 1 … p. Rows at or
//	past q_lens, unless flags has VWD_ATTENTION_KEEP_ROWS, and rows that see no token of their list get out 0, lse −inf and the
//	empty state. Speculative attention is this call over a predicted list, with state or partials kept for `vwd_repair`.
//
//	flags                          0, or VWD_ATTENTION_KEEP_ROWS: out, lse and state of rows at or past q_lens stay as they are.
//	block_size                     Tokens of a block of the list, S; 1 for a list of tokens; 0 without a list. With a
//	                               page_table, S divides P or P divides S; with slots, S divides P.
//	partial_blocks                 Entries of the list that share one partial; 0 means 1.
//	scale                          Factor on q·k, above 0; 0 means 1/√D, and is not allowed if D ≠ Dv.
//	soft_cap                       c: s becomes c·tanh(s / c), before any token is masked. 0: no soft cap.
//	window                         w, in tokens. 0: no window.
//	q         [B, Hq, D]           float32, float16 or bfloat16. Hq = G·Hk, any G ≥ 1. Q = 1.
//	       or [B, Q, Hq, D]
//	q_lens    [B]                  int32, optional (absent: Q). Rows of each sequence; clamped to 0 … Q.
//	kv                             Keys and values.
//	list      [B, Hk, cap]         Optional (no tensor given: every token). The positions of a sequence share a list of
//	       or [B, Q, Hk, cap]      rank 3, and its tokens are read once for all of them; with rank 4 each position has
//	                               its own list (q of rank 4). With slots kv is a pool [slots, P, 1, D] without
//	                               page_table, and Hk is the list's.
//	sinks     [Hq]                 float32, optional: out = acc / (l + e^(sink − m)). +inf: out 0; −inf: no sink.
//	                               The soft cap does not apply to sinks; lse, state and partials do not include them.
//	out       [B, Hq, Dv]          dtype of q, or float32; out.
//	       or [B, Q, Hq, Dv]
//	lse       [B, Hq]              float32, out, optional. Natural logarithm of Σ e^s.
//	       or [B, Q, Hq]
//	state                          Out, optional (all three or none).
//	partials                       Out, optional (all three or none); needs a list. Partials of entries past the count
//	                               are not written. Keeping them may change the last bits of out.
//	tree      [B, Q, ⌈Q/32⌉]       uint32, optional (absent: a chain), with q of rank 4: the rows are nodes of a draft tree, as
//	                               mask of `vwd_tree_prepare` has them. Of the rows r and before, row r sees those whose bit is
//	                               set, bit j mod 32 of word j / 32 for row j; further bits are not read. The depth of a row
//	                               is the number of them, less one. With a window w, row r of depth d sees what is at p − w + 1
//	                               or later with p = seq_lens[i] − q_lens[i] + d, where tokens of the tree are at their depth.
//	remainder                      Optional (NULL: none), with log_mass: what the list leaves out becomes one more term. Row r and
//	                               query head h join the state m = log_mass[i, r, h], l = 1, acc = t with
//	                               t = mean_v + ½·scale·covarianceᵀ·q_h to theirs, in float32; out, lse and state have the
//	                               term in them. Needs a list, and state. `vwd_merge_states` joins that state to those of
//	                               other tokens; `vwd_repair` would count missed blocks twice. Not with partials, soft_cap,
//	                               window or tree.
//	                               Nothing is joined where log_mass is not finite, tokens of the row is not above 0, or the
//	                               sequence has no row, nor to rows at or past q_lens.
//	log_mass  [B, Hq]              float32, optional, of `vwd_select_blocks` with the same scale. Only with remainder.
//	       or [B, Q, Hq]
//
//	Queries of float32 beside keys of 16 bits are rounded to the keys' type by CUDA kernels on tensor cores; others, and the CPU, read them
//	as they are.
//
//	FP8 keys and values: s_t = scale·k_scale_t·(q·k_t), and v_scale_t multiplies v_t. Masked tokens are not multiplied, so
//	bytes and scales of tokens that no row sees may be NaN. A NaN in a token affects only the rows that see it; on
//	CUDA it may reach all rows of the query positions that share a list with one that sees it.
//
//	On the CPU results do not depend on batch, neighbours, other positions or threads.
//
//	Enqueues on stream and returns; on a CPU session the result is there on return. Does not synchronise, nor allocate
//	once its scratch is there; may be captured. Thread-safe; calls on one stream are ordered by the caller. Tensors are
//	borrowed until the stream passes this point; inputs are not written.
//	Errors: INVALID_ARGUMENT (the message names the argument), OUT_OF_SCRATCH (CUDA), OUT_OF_MEMORY (scratch),
//	UNSUPPORTED (CUDA: partials of heads of more than 256 channels, and other limits in docs/abi.md), DRIVER, INTERNAL.
type AttentionArgs struct {
	BlockSize     int
	PartialBlocks int
	Scale         float32
	SoftCap       float32
	Window        int
	KeepRows      bool // flag VWD_ATTENTION_KEEP_ROWS
	KV            PagedKV
	Q             Tensor
	QLens         Tensor
	List          BlockList
	Sinks         Tensor
	Out           Tensor
	LSE           Tensor
	State         AttentionState
	Partials      AttentionPartials
	Tree          Tensor     // which rows each row sees: Mask of TreePrepare
	Remainder     *Remainder // what the list leaves out; nil: nothing
	LogMass       Tensor     // of SelectBlocks, with Remainder
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

func keepRows(keep bool) C.uint32_t {
	if keep {
		return C.VWD_ATTENTION_KEEP_ROWS
	}
	return 0
}

func (args AttentionArgs) lower(l *lowering) (C.vwd_attention_args, C.vwd_paged_kv) {
	return C.vwd_attention_args{
		struct_size:    C.sizeof_vwd_attention_args,
		flags:          keepRows(args.KeepRows),
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
		tree:           l.tensor("tree", args.Tree),
		remainder:      l.remainder(args.Remainder),
		log_mass:       l.tensor("log_mass", args.LogMass),
	}, l.pagedKV(args.KV)
}

// MergeStatesArgs are the arguments of Session.MergeStates; vwd_merge_states documents them.
//
//	Joins attention states over disjoint sets of tokens (Flash-Decoding: Dao et al. 2023).
//
//	m' = max_n m_n, l' = Σ_n l_n e^(m_n−m'), acc' = Σ_n acc_n e^(m_n−m'), out = acc' / (l' + e^(sink − m')),
//	lse = m' + ln l'. An empty state changes nothing. States are joined in the order given.
//
//	input_count            Number of states, 1 … 16.
//	inputs  [n]            Host array of states [B, Hq, Dv], [B, Hq], [B, Hq], or all with Q after B. Dv a multiple of
//	                       8, 16 … 576.
//	sinks   [Hq]           float32, optional; as in `vwd_attention`. They enter out alone.
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
//	Turns attention over predicted blocks into attention over the selected blocks, at a cost that follows the missed blocks.
//
//	The call finds the missed blocks, selected ∖ predicted, attends them and joins the result. SUPERSET (PRR) starts from
//	predicted_state; its result covers predicted ∪ selected. EXACT joins the partials of predicted ∩ selected with the
//	attention of the missed blocks; it attends a group of partial_blocks entries again if the group holds a block predicted
//	in vain. On the CPU, with block_size ≥ 8 and partial_blocks ≤ 1, EXACT equals `vwd_attention` over selected bit for bit.
//
//	Query positions, masks, the soft cap and sinks mean what they mean in `vwd_attention`. A block is missed if it is selected,
//	not predicted, and begins below seq_lens (if each position has its own lists: at or before the position).
//
//	mode                              VWD_REPAIR_SUPERSET or VWD_REPAIR_EXACT.
//	block_size, partial_blocks,       As in the call of `vwd_attention` that made the state or partials.
//	scale, soft_cap, window
//	q, q_lens, kv                     As in that call.
//	predicted  [B, Hk, cap]           The list of that call, without slots.
//	        or [B, Q, Hk, cap]
//	selected   [B, Hk, cap2]          The selected list, of the rank of predicted; with slots if kv is a pool.
//	        or [B, Q, Hk, cap2]
//	predicted_state                   SUPERSET: the state that `vwd_attention` wrote. EXACT: absent.
//	predicted_partials                EXACT: the partials that `vwd_attention` wrote. SUPERSET: absent.
//	sinks      [Hq]                   float32, optional. They enter out alone, so every call is given them.
//	out        [B, Hq, Dv]            dtype of q, or float32; out.
//	        or [B, Q, Hq, Dv]
//	lse        [B, Hq]                float32, out, optional.
//	        or [B, Q, Hq]
//	state                             Out, optional (all three or none); may be predicted_state itself.
//	tree  [B, Q, ⌈Q/32⌉]              uint32, optional: as in `vwd_attention`.
//	missed_counts  [B, Hk]            int32, out, optional: number of missed blocks of each list; where rows have lists of their
//	            or [B, Q, Hk]         own, 0 from q_lens[i] on.
//
//	Enqueues on stream and returns; on a CPU session the result is there on return. Does not synchronise, nor allocate
//	once its scratch is there; may be captured. Thread-safe; calls on one stream are ordered by the caller. Tensors are
//	borrowed until the stream passes this point; inputs are not written.
//	Errors: INVALID_ARGUMENT (the message names the argument), OUT_OF_SCRATCH (CUDA), OUT_OF_MEMORY (scratch),
//	UNSUPPORTED (CUDA: lists that its shared memory cannot hold; docs/abi.md), DRIVER, INTERNAL.
type RepairArgs struct {
	Mode              RepairMode
	BlockSize         int
	PartialBlocks     int
	Scale             float32
	SoftCap           float32
	Window            int
	KeepRows          bool // flag VWD_ATTENTION_KEEP_ROWS
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
	Tree              Tensor // as in AttentionArgs
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
		flags:           keepRows(args.KeepRows),
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
		tree:          l.tensor("tree", args.Tree),
	}, l.pagedKV(args.KV)
}
