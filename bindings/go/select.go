package vanward

// #include "calls.h"
// #cgo noescape index_update
// #cgo nocallback index_update
// #cgo noescape index_update_layers
// #cgo nocallback index_update_layers
// #cgo noescape channel_importance
// #cgo nocallback channel_importance
// #cgo noescape select_blocks
// #cgo nocallback select_blocks
// #cgo noescape select_blocks_scratch
// #cgo nocallback select_blocks_scratch
// #cgo noescape select_tokens
// #cgo nocallback select_tokens
// #cgo noescape select_tokens_scratch
// #cgo nocallback select_tokens_scratch
// #cgo noescape topk
// #cgo nocallback topk
import "C"

// IndexUpdateArgs are the arguments of Session.IndexUpdate; vwd_index_update documents them.
//
//	Builds or extends the summaries of tokens begin[i] … seq_lens[i]−1 of each sequence from their post-RoPE keys.
//
//	MINMAX: every block that holds a token of the range is summarised from all its tokens below seq_lens[i]; a zero is +0.
//	The extremes of FP8 keys are rounded to the dtype of key_max.
//	MEAN: every window that ends inside the range: the float32 sum of its keys in the order of the tokens, times 1/window,
//	rounded to the dtype of means.
//	LABEL: every token of the range. From lo (a zero is +0) and hi, the smallest and largest of its r channels x, in float32:
//	  label_min = float16(lo), label_scale = float16((hi − lo) / 15), both clamped to ±65504, the scale also to 0 or above;
//	  code = clamp(rne((x − label_min) / label_scale), 0, 15) against the stored values, and 0 where label_scale is 0.
//	AXIS: every block as for MINMAX, from its n tokens k_t. With μ their mean, x_t = k_t − μ and W_c = axis_weights_c²:
//	  z = W∘x_t of the token whose Σ_c W_c·x_tc² is the largest (ties to the lower); three times u_t = x_t·z,
//	  b = Σ_t u_t·x_t and z = W∘b / |u|. Stored are μ − axis_centre and r·b / |u| with
//	  r = max(1.15 / √n, 0.6·max_t |u_t| / |u|), all 0 where |u| is 0.
//	  In INT4 each group of 32 channels has the scale, minimum and codes that a label of those channels would have; a group
//	  that holds a number that is not finite has scale 0 and minimum NaN. Sums are in float32, with fused products, in an
//	  order that depends on nothing but D and S: tokens are summed in eight sums, which are then added up.
//	All rounding is to nearest, ties to even. NaN is ignored in maxima and minima and has code 0; without any number max is
//	−inf, min +inf, label_min NaN and label_scale 0. A channel outside 0 … D−1 reads as 0. A token without a page is
//	left out of maxima and minima, and makes means, labels and AXIS NaN: such summaries are selected last.
//	Extending token by token gives the same bits as building at once, also after tokens were removed and replaced.
//
//	An FP8 key is summarised as its stored value times its scale, rounded to float32.
//
//	k           [pages, P, Hk, D]  float32, float16, bfloat16, float8_e4m3fn or float8_e5m2; D a multiple of 8, 16 … 576.
//	                               See vwd_paged_kv for pages and lengths.
//	k_scale     [1], [Hk] or [pages, P, Hk]  float32, optional (absent: 1), and only for keys in FP8.
//	page_table  [B, max_pages]     int32, optional.
//	seq_lens    [B]                int32. End of the range.
//	begin       [B]                int32, optional (absent: 0). Clamped to 0 … seq_lens[i]. A session that checks
//	                               contents refuses a −1 page of tokens before it in its block.
//	index                          The summaries, out; table, channels, axis_weights and axis_centre are inputs. A
//	                               summary without a row is not stored.
//
//	Enqueues on stream and returns; on a CPU session the result is there on return. Does not allocate or synchronise; may
//	be captured. Thread-safe; calls on one stream are ordered by the caller. Tensors are borrowed until the stream passes
//	this point.
//	Errors: INVALID_ARGUMENT (the message names the argument), UNSUPPORTED, DRIVER, INTERNAL.
type IndexUpdateArgs struct {
	Index     Index
	K         Tensor
	KScale    Tensor
	PageTable Tensor
	SeqLens   Tensor
	Begin     Tensor
}

// IndexUpdate builds or extends the summaries of tokens Begin … SeqLens−1 of each sequence.
func (s *Session) IndexUpdate(args IndexUpdateArgs, stream Stream) error {
	var l lowering
	defer l.release()
	c, index := args.lower(&l)
	return s.run(&l, func(h *C.vwd_session) C.outcome { return C.index_update(h, &c, &index, stream.c()) })
}

// IndexUpdateLayers does IndexUpdate for each of up to 256 updates, none of which is enqueued where one of them is wrong. On a GPU
// layers that differ in nothing but where their memory lies share launches; vwd_index_update_layers says when to call it.
func (s *Session) IndexUpdateLayers(updates []IndexUpdateArgs, stream Stream) error {
	var l lowering
	defer l.release()
	count, c := l.uint32("count", len(updates)), l.updates(updates)
	return s.run(&l, func(h *C.vwd_session) C.outcome { return C.index_update_layers(h, c, count, stream.c()) })
}

func (args IndexUpdateArgs) lower(l *lowering) (C.vwd_index_update_args, C.vwd_index) {
	return C.vwd_index_update_args{
		struct_size: C.sizeof_vwd_index_update_args,
		k:           l.tensor("k", args.K),
		k_scale:     l.tensor("k_scale", args.KScale),
		page_table:  l.tensor("page_table", args.PageTable),
		seq_lens:    l.tensor("seq_lens", args.SeqLens),
		begin:       l.tensor("begin", args.Begin),
	}, l.index(args.Index)
}

// ChannelImportanceArgs are the arguments of Session.ChannelImportance; vwd_channel_importance documents them.
//
//	Chooses the r key channels that decide the scores of each KV head (Double Sparsity: Yang et al. 2024, section 3.2), and
//	finds the channel weights and the centre of the keys for AXIS.
//
//	importance[h, c] = mean over the G query heads of h of max_t |q[t, ·, c]|, times max_t |k[t, h, c]|, in float32: the sum
//	in the order of the heads, divided by G, times the maximum of the keys. NaN is ignored in maxima. The r channels of largest
//	importance are chosen, ties to the lower channel.
//
//	weights[h, c] = mean over the tokens and the G query heads of h of |q[t, ·, c]|, centre[h, c] = mean over the tokens of
//	k[t, h, c], in float32, for AXIS, from any text or from the prompt. A NaN counts as 0, and so does a mean of no tokens.
//
//	q           [Tq, Hq, D]  float32, float16 or bfloat16; D a multiple of 8, 16 … 576. Sample of post-RoPE queries.
//	k           [Tk, Hk, D]  dtype of q. Sample of post-RoPE keys.
//	channels    [Hk, r]      int32, out, optional, ascending. r even, 2 … D.
//	importance  [Hk, D]      float32, out, optional.
//	weights     [Hk, D]      float32, out, optional.
//	centre      [Hk, D]      float32, out, optional.
//
//	Enqueues on stream and returns; on a CPU session the result is there on return. Does not allocate or synchronise; may
//	be captured. Thread-safe; calls on one stream are ordered by the caller. Tensors are borrowed until the stream passes
//	this point.
//	Errors: INVALID_ARGUMENT (the message names the argument), UNSUPPORTED, DRIVER, INTERNAL.
type ChannelImportanceArgs struct {
	Q          Tensor
	K          Tensor
	Channels   Tensor
	Importance Tensor
	Weights    Tensor
	Centre     Tensor
}

// ChannelImportance chooses the key channels that decide the scores of each KV head, and finds weights and centre for AXIS.
func (s *Session) ChannelImportance(args ChannelImportanceArgs, stream Stream) error {
	var l lowering
	defer l.release()
	c := args.lower(&l)
	return s.run(&l, func(h *C.vwd_session) C.outcome { return C.channel_importance(h, &c, stream.c()) })
}

func (args ChannelImportanceArgs) lower(l *lowering) C.vwd_channel_importance_args {
	return C.vwd_channel_importance_args{
		struct_size: C.sizeof_vwd_channel_importance_args,
		q:           l.tensor("q", args.Q),
		k:           l.tensor("k", args.K),
		channels:    l.tensor("channels", args.Channels),
		importance:  l.tensor("importance", args.Importance),
		weights:     l.tensor("weights", args.Weights),
		centre:      l.tensor("centre", args.Centre),
	}
}

// SelectBlocksArgs are the arguments of Session.SelectBlocks; vwd_select_blocks documents them.
//
//	Scores the blocks of every sequence and selects the exact top k per sequence and KV head; ties go to the lower block.
//
//	Scores s[i, g, j] of block j, with h over the G query heads of KV head g:
//	  MINMAX        Σ_h Σ_c max(q_hc, 0)·key_max_c + min(q_hc, 0)·key_min_c
//	  MEAN_SOFTMAX  max over the windows w that overlap j of Σ_h softmax_w(scale·q_h·means_w)
//	  MEAN_DOT      max over the windows w that overlap j of q_g·means_w
//	  LABEL_MASS    Σ_h Σ_{t in j} softmax_t(scale·q̃_h·k̃_t) over the tokens t of all candidates, q̃ and k̃ on the label's
//	                channels; 0 for a candidate without labels, −inf for a block that is no candidate
//	  AXIS          Σ_h softmax_j(scale·q_h·mean_j + ln(2·cosh(scale·q_h·axis_j))) over the blocks
//	A score that would be NaN is −inf, and so is the score of a block without a summary (MEAN: without a complete window for
//	which the index has a row). In a softmax a window, token or block (AXIS) that has no summary, or whose product is not
//	finite, weighs nothing; such a window is −inf for MEAN_DOT, and such a block scores −inf for AXIS. If any of the G query
//	heads holds a NaN, every block scores −inf.
//	min(n_i, max(budget, forced)) blocks of the n_i = ⌈len/block_size⌉ are selected: the forced blocks (the first init_blocks
//	and the last local_blocks), then the best. So k counts the forced blocks. n_i and the forced blocks follow from seq_lens
//	alone, whatever the sizes of index and scores. −0 and +0 are equal.
//
//	Query positions: row r of sequence i is at token position p = seq_lens[i] − q_lens[i] + r, because seq_lens counts the rows
//	themselves. It does not see blocks that begin past p (they score −inf), nor windows and labels that reach past p. If each
//	row has its own list, len is p + 1. If the rows share a list, a block's score is the largest of its scores for the rows.
//	Rows from q_lens[i] on are not read, their lists are empty, and so is a shared list without rows.
//
//	method                             One of VWD_SELECT_*; index.kind must be the kind that the method reads.
//	block_size                         S, tokens of a block; MINMAX, AXIS: equal to index.block_size.
//	k                                  Budget of every list. k and init_blocks + local_blocks fit in selected's cap. At
//	                                   least 1 where there are neither budgets nor forced blocks, unless cap is 0.
//	scale                              Factor on q·k, above 0; 0 means 1/√D. MINMAX and MEAN_DOT ignore it.
//	index                              As filled by `vwd_index_update`.
//	q           [B, (Q,) Hq, D]        float32, float16 or bfloat16; D a multiple of 8, 16 … 576. MEAN_DOT: Hq is Hk,
//	                                   one Forecast vector per KV head.
//	q_lens      [B]                    int32, optional: rows of each sequence; absent: Q. Clamped to 0 … Q.
//	seq_lens    [B]                    int32. Clamped to 0 and above.
//	budgets     [B]                    int32, optional: k of each sequence's lists; clamped to 0 … cap.
//	candidates  [B, (Q,) Hk, cap2]     LABEL_MASS: the blocks to weigh, of selected's rank. Other methods: absent.
//	selected    [B, (Q,) Hk, cap]      Out, ascending. Q only if q has it: each row's own lists, otherwise shared ones.
//	scores      [B, (Q,) Hk, max_blocks]  float32, out, optional. Scores of the blocks below min(n_i, max_blocks), for
//	                                   each of selected's lists; the other columns are not written.
//	status      [B, (Q,) Hk]           uint32, out, optional: VWD_SELECT_* bits of each of selected's lists; 0 for rows from
//	                                   q_lens[i] on.
//	log_mass    [B, (Q,) Hq]           float32, out, optional, AXIS alone: for each row and query head the natural logarithm of
//	                                   Σ_j S·e^(scale·q·μ_j)·cosh(0.7·scale·q·axis_j), with μ_j = mean_j + index.axis_centre,
//	                                   over the blocks j that are whole for the row ((j + 1)·S ≤ p + 1), have a summary and
//	                                   are not in the row's list: an estimate of Σ e^s over the tokens that the list leaves
//	                                   out, for `vwd_attention`. −inf where there are none, for rows from q_lens[i] on, and for
//	                                   all heads of a group of which one holds a NaN; blocks whose product is not finite weigh
//	                                   nothing. The index has the centre with which it was made. Neither list nor scores change.
//	Lists have no slots.
//
//	Enqueues on stream and returns; on a CPU session the result is there on return. Does not synchronise, nor allocate
//	once its scratch is there; may be captured. Thread-safe; calls on one stream are ordered by the caller. Tensors are
//	borrowed until the stream passes this point; inputs are not written.
//	Errors: INVALID_ARGUMENT (the message names the argument), OUT_OF_SCRATCH (CUDA), OUT_OF_MEMORY (scratch),
//	UNSUPPORTED (CUDA: more than 32 positions share a list, and other limits in docs/abi.md), DRIVER, INTERNAL.
type SelectBlocksArgs struct {
	Method      SelectMethod
	BlockSize   int
	K           int
	InitBlocks  int
	LocalBlocks int
	Scale       float32
	Index       Index
	Q           Tensor
	QLens       Tensor
	SeqLens     Tensor
	Budgets     Tensor
	Candidates  BlockList
	Selected    BlockList
	Scores      Tensor
	Status      Tensor // uint32: see SelectStatus
	LogMass     Tensor // float32: the mass of what the lists leave out
}

// SelectBlocks scores the blocks of every sequence and selects the exact best.
func (s *Session) SelectBlocks(args SelectBlocksArgs, stream Stream) error {
	var l lowering
	defer l.release()
	c, index := args.lower(&l)
	return s.run(&l, func(h *C.vwd_session) C.outcome { return C.select_blocks(h, &c, &index, stream.c()) })
}

// SelectBlocksScratch is how many bytes of scratch the call takes on a stream; 0 on a CPU session.
func (s *Session) SelectBlocksScratch(args SelectBlocksArgs) (uint64, error) {
	var l lowering
	defer l.release()
	var bytes C.uint64_t
	c, index := args.lower(&l)
	err := s.run(&l, func(h *C.vwd_session) C.outcome { return C.select_blocks_scratch(h, &c, &index, &bytes) })
	return uint64(bytes), err
}

func (args SelectBlocksArgs) lower(l *lowering) (C.vwd_select_blocks_args, C.vwd_index) {
	return C.vwd_select_blocks_args{
		struct_size:  C.sizeof_vwd_select_blocks_args,
		method:       C.uint32_t(args.Method),
		block_size:   l.uint32("block_size", args.BlockSize),
		k:            l.uint32("k", args.K),
		init_blocks:  l.uint32("init_blocks", args.InitBlocks),
		local_blocks: l.uint32("local_blocks", args.LocalBlocks),
		scale:        C.float(args.Scale),
		q:            l.tensor("q", args.Q),
		q_lens:       l.tensor("q_lens", args.QLens),
		seq_lens:     l.tensor("seq_lens", args.SeqLens),
		budgets:      l.tensor("budgets", args.Budgets),
		candidates:   l.blockList("candidates.ids", "candidates.counts", "candidates.slots", args.Candidates),
		selected:     l.blockList("selected.ids", "selected.counts", "selected.slots", args.Selected),
		scores:       l.tensor("scores", args.Scores),
		status:       l.tensor("status", args.Status),
		log_mass:     l.tensor("log_mass", args.LogMass),
	}, l.index(args.Index)
}

// SelectTokensArgs are the arguments of Session.SelectTokens; vwd_select_tokens documents them.
//
//	Selects the exact top k tokens inside candidate blocks by their INT4 labels (AsyncTLS: Hu et al. 2026, the second level).
//
//	α_t = mean over the G query heads of softmax_t(scale·q̃_h·k̃_t) over all tokens of the candidates; ties go to the lower
//	token. A token without a label, or whose product is not finite, has α = 0; if one of the G query heads holds a NaN, every
//	token has α = 0. The first init_tokens and the last local_tokens of a sequence are forced: they are always selected,
//	candidates or not, and follow from seq_lens alone. max(min(candidate tokens ∪ forced, budget), forced) tokens are selected
//	in all. So k counts the forced tokens. Query positions as for `vwd_select_blocks`: tokens past p weigh nothing, and if the
//	rows share a list α_t is the largest of its values for the rows.
//
//	block_size                      S, tokens of a candidate block.
//	k                               Budget of every list. k and init_tokens + local_tokens fit in selected's cap. At least
//	                                1 where there are neither budgets nor forced tokens, unless cap is 0.
//	scale                           Factor on q·k, above 0; 0 means 1/√D.
//	index                           kind LABEL.
//	q           [B, (Q,) Hq, D]     float32, float16 or bfloat16; D a multiple of 8, 16 … 576.
//	q_lens      [B]                 int32, optional: rows of each sequence; absent: Q. Clamped to 0 … Q.
//	seq_lens    [B]                 int32. Clamped to 0 and above.
//	budgets     [B]                 int32, optional: k of each sequence's lists; clamped to 0 … cap.
//	candidates  [B, (Q,) Hk, cap2]  Blocks to choose from, of selected's rank.
//	selected    [B, (Q,) Hk, cap]   Out, ascending token positions. Q only if q has it: each row's own lists.
//	scores      [B, (Q,) Hk, cap]   float32, out, optional. α of each selected token; 0 for a forced token that is in no
//	                                candidate block.
//	status      [B, (Q,) Hk]        uint32, out, optional: VWD_SELECT_* bits of each of selected's lists; 0 for rows from
//	                                q_lens[i] on.
//	Lists have no slots.
//
//	Enqueues on stream and returns; on a CPU session the result is there on return. Does not synchronise, nor allocate
//	once its scratch is there; may be captured. Thread-safe; calls on one stream are ordered by the caller. Tensors are
//	borrowed until the stream passes this point; inputs are not written.
//	Errors: INVALID_ARGUMENT (the message names the argument), OUT_OF_SCRATCH (CUDA), OUT_OF_MEMORY (scratch),
//	UNSUPPORTED (CUDA: more than 32 positions share a list, and other limits in docs/abi.md), DRIVER, INTERNAL.
type SelectTokensArgs struct {
	BlockSize   int
	K           int
	InitTokens  int
	LocalTokens int
	Scale       float32
	Index       Index
	Q           Tensor
	QLens       Tensor
	SeqLens     Tensor
	Budgets     Tensor
	Candidates  BlockList
	Selected    BlockList
	Scores      Tensor
	Status      Tensor // uint32: see SelectStatus
}

// SelectTokens selects the exact best tokens inside candidate blocks by their INT4 labels.
func (s *Session) SelectTokens(args SelectTokensArgs, stream Stream) error {
	var l lowering
	defer l.release()
	c, index := args.lower(&l)
	return s.run(&l, func(h *C.vwd_session) C.outcome { return C.select_tokens(h, &c, &index, stream.c()) })
}

// SelectTokensScratch is how many bytes of scratch the call takes on a stream; 0 on a CPU session.
func (s *Session) SelectTokensScratch(args SelectTokensArgs) (uint64, error) {
	var l lowering
	defer l.release()
	var bytes C.uint64_t
	c, index := args.lower(&l)
	err := s.run(&l, func(h *C.vwd_session) C.outcome { return C.select_tokens_scratch(h, &c, &index, &bytes) })
	return uint64(bytes), err
}

func (args SelectTokensArgs) lower(l *lowering) (C.vwd_select_tokens_args, C.vwd_index) {
	return C.vwd_select_tokens_args{
		struct_size:  C.sizeof_vwd_select_tokens_args,
		block_size:   l.uint32("block_size", args.BlockSize),
		k:            l.uint32("k", args.K),
		init_tokens:  l.uint32("init_tokens", args.InitTokens),
		local_tokens: l.uint32("local_tokens", args.LocalTokens),
		scale:        C.float(args.Scale),
		q:            l.tensor("q", args.Q),
		q_lens:       l.tensor("q_lens", args.QLens),
		seq_lens:     l.tensor("seq_lens", args.SeqLens),
		budgets:      l.tensor("budgets", args.Budgets),
		candidates:   l.blockList("candidates.ids", "candidates.counts", "candidates.slots", args.Candidates),
		selected:     l.blockList("selected.ids", "selected.counts", "selected.slots", args.Selected),
		scores:       l.tensor("scores", args.Scores),
		status:       l.tensor("status", args.Status),
	}, l.index(args.Index)
}

// TopKArgs are the arguments of Session.TopK; vwd_topk documents them.
//
//	Selects the exact top k of each row of scores; ties go to the lower index.
//
//	Row r has lens[r] scores, ordered by descending score and, among equal scores, by ascending index. The first
//	counts[r] = min(k, lens[r]) are selected. −0 and +0 are equal, and NaN counts as −inf: a NaN or −inf is selected only if
//	there are too few other scores. The result is the same on every backend, device and run.
//
//	k                  Budget of every row, at most cap; at least 1 where there are no budgets, unless cap is 0.
//	order              VWD_TOPK_ASCENDING: by index. VWD_TOPK_BEST_FIRST: in the order above.
//	scores   [R, n]    float32, float16 or bfloat16.
//	lens     [R]       int32, optional: scores of each row; absent: n. Clamped to 0 … n.
//	budgets  [R]       int32, optional: k of each row; clamped to 0 … cap.
//	ids      [R, cap]  int32, out. Columns from counts[r] on are not written, in values likewise.
//	counts   [R]       int32, out.
//	values   [R, cap]  dtype of scores, out, optional: the selected scores as they are stored, NaN included.
//
//	Enqueues on stream and returns; on a CPU session the result is there on return. Does not synchronise, nor allocate
//	once its scratch is there; may be captured. On CUDA a stream whose arena is too small, or that has none when it is captured, takes
//	long rows by a slower kernel without scratch. Thread-safe; calls on one stream are ordered by the caller. Tensors are borrowed until
//	the stream passes this point; inputs are not written.
//	Errors: INVALID_ARGUMENT (the message names the argument), OUT_OF_MEMORY (scratch of a CPU session), UNSUPPORTED (CUDA:
//	VWD_TOPK_BEST_FIRST of more than 4096), DRIVER, INTERNAL.
type TopKArgs struct {
	K       int
	Order   TopKOrder
	Scores  Tensor
	Lens    Tensor
	Budgets Tensor
	IDs     Tensor
	Counts  Tensor
	Values  Tensor
}

// TopK selects the exact best of each row of scores.
func (s *Session) TopK(args TopKArgs, stream Stream) error {
	var l lowering
	defer l.release()
	c := args.lower(&l)
	return s.run(&l, func(h *C.vwd_session) C.outcome { return C.topk(h, &c, stream.c()) })
}

func (args TopKArgs) lower(l *lowering) C.vwd_topk_args {
	return C.vwd_topk_args{
		struct_size: C.sizeof_vwd_topk_args,
		k:           l.uint32("k", args.K),
		order:       C.uint32_t(args.Order),
		scores:      l.tensor("scores", args.Scores),
		lens:        l.tensor("lens", args.Lens),
		budgets:     l.tensor("budgets", args.Budgets),
		ids:         l.tensor("ids", args.IDs),
		counts:      l.tensor("counts", args.Counts),
		values:      l.tensor("values", args.Values),
	}
}
