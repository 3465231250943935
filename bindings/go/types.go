package vanward

// #include "calls.h"
import "C"

// What several calls share. vanward.h has the shape and dtype of every tensor under the C name of each struct.

// IndexKind is how keys are summarised.
type IndexKind uint32

const (
	IndexMinMax IndexKind = C.VWD_INDEX_MINMAX // per block: largest and smallest key (Quest)
	IndexMean   IndexKind = C.VWD_INDEX_MEAN   // per window: mean key (InfLLM-v2)
	IndexLabel  IndexKind = C.VWD_INDEX_LABEL  // per token: r channels in INT4 (Double Sparsity)
	IndexAxis   IndexKind = C.VWD_INDEX_AXIS   // per block: mean key and the axis of their spread
)

// SelectMethod is how blocks are scored.
type SelectMethod uint32

const (
	SelectMinMax      SelectMethod = C.VWD_SELECT_MINMAX
	SelectMeanSoftmax SelectMethod = C.VWD_SELECT_MEAN_SOFTMAX
	SelectMeanDot     SelectMethod = C.VWD_SELECT_MEAN_DOT
	SelectLabelMass   SelectMethod = C.VWD_SELECT_LABEL_MASS
	SelectAxis        SelectMethod = C.VWD_SELECT_AXIS
)

// SelectStatus are the bits of the status words that a selection writes.
type SelectStatus = uint32

const (
	SelectNaN       SelectStatus = C.VWD_SELECT_NAN        // a NaN was met; what it concerns ranked last
	SelectNoSummary SelectStatus = C.VWD_SELECT_NO_SUMMARY // part of the sequence has no row in the index
	SelectClamped   SelectStatus = C.VWD_SELECT_CLAMPED    // a length, budget or count was out of range
)

// RepairMode is what a repaired result covers.
type RepairMode uint32

const (
	RepairSuperset RepairMode = C.VWD_REPAIR_SUPERSET // predicted ∪ selected
	RepairExact    RepairMode = C.VWD_REPAIR_EXACT    // selected alone
)

// TopKOrder is how the best of a row are put in order.
type TopKOrder uint32

const (
	TopKAscending TopKOrder = C.VWD_TOPK_ASCENDING // by index
	TopKBestFirst TopKOrder = C.VWD_TOPK_BEST_FIRST
)

// GatherEngine is what copies blocks.
type GatherEngine uint32

const (
	GatherAuto       GatherEngine = C.VWD_GATHER_AUTO
	GatherKernel     GatherEngine = C.VWD_GATHER_KERNEL
	GatherCopyEngine GatherEngine = C.VWD_GATHER_COPY_ENGINE
)

// RopeStyle is which channels of a head turn together.
type RopeStyle uint32

const (
	RopeHalves      RopeStyle = C.VWD_ROPE_HALVES      // (c, c + rotary/2): GPT-NeoX, Llama of Hugging Face
	RopeInterleaved RopeStyle = C.VWD_ROPE_INTERLEAVED // (2c, 2c+1): GPT-J, Llama in GGUF
)

// BlockList is vwd_block_list: blocks (or tokens) per sequence and KV head, or per query position.
//
//	A list of blocks (of tokens, if block_size is 1) per sequence and KV head. The struct is final: it does not grow.
//
//	With query positions (q of rank 4) the positions of a sequence share a list, or each position has its own list.
//
//	ids     [B, Hk, cap] or [B, Q, Hk, cap]  int32, ascending. In an input, negative ids, ids past the sequence and repeated ids are
//	                                         skipped.
//	counts  [B, Hk] or [B, Q, Hk]            int32; clamped to 0 … cap. Entries of ids at or past the count are neither read
//	                                         nor written.
//	slots   [B, Hk, cap] or [B, Q, Hk, cap]  int32, optional, and only in inputs of `vwd_attention` and `vwd_repair`: the page
//	                                         in which each entry lies, in place of the page table. k and v are then a pool
//	                                         [slots, P, 1, D] whose pages hold P consecutive tokens of one KV head; S divides
//	                                         P, and an entry's tokens start at row id·S mod P. An entry whose slot is −1 or
//	                                         any other number outside the pool adds nothing. With `vwd_int4_kv` slots go on with its
//	                                         pages after those of the pool.
type BlockList struct {
	IDs    Tensor
	Counts Tensor
	Slots  Tensor // of Attention and Repair: the page of a pool in which each entry lies
}

// PagedKV is vwd_paged_kv: keys and values of one layer.
//
//	Paged keys and values of one layer.
//
//	flags       Must be 0.
//	k           [pages, P, Hk, D]   float32, float16, bfloat16, float8_e4m3fn or float8_e5m2. D a multiple of 8, 16 … 576.
//	v           [pages, P, Hk, Dv]  dtype of k; Dv likewise. May be a view of k's memory (MLA: its first 512 channels).
//	page_table  [B, max_pages]      int32, optional. Page p of sequence i is page_table[i, p]. Absent: sequence i has page i
//	                                and no other, so that k is [B, T, Hk, D]; for lists with slots see `vwd_block_list`. A
//	                                page outside 0 … pages−1 holds no tokens.
//	seq_lens    [B]                 int32. Tokens of each sequence, clamped to 0 … the capacity of its pages; with slots there
//	                                is no upper bound.
//	k_scale     [1], [Hk] or [pages, P, Hk]  float32, optional (absent: 1); FP8 only. Key = stored value · scale.
//	v_scale     [1], [Hk] or [pages, P, Hk]  float32, optional (absent: 1); FP8 only. Value = stored value · scale.
//	int4        Optional (NULL: none), with k and v of 16 or 32 bits: the tokens that are coded in INT4. Only `vwd_attention` and
//	            `vwd_repair` read it. The other tokens are read from k and v, whose pages of coded tokens may be −1.
type PagedKV struct {
	K         Tensor
	V         Tensor
	PageTable Tensor
	SeqLens   Tensor
	KScale    Tensor // of 8-bit floats
	VScale    Tensor
	Int4      *Int4KV // the tokens that are coded; nil: none
}

// Int4KV is vwd_int4_kv: keys and values of one layer in INT4.
//
//	Keys and values of one layer in INT4, in blocks of S tokens, as `vwd_kv_quantize` writes them: (D + Dv) / 2 + 2 bytes a token and
//	KV head, and the mean key of each block.
//
//	Tokens exact_tokens … coded_lens[i]−1 of sequence i are read here, all others from k and v of `vwd_paged_kv`. Where a list has slots, these
//	say which blocks are coded: slots from the number of pages of k in `vwd_paged_kv` on name the pages here, counted from there. A page here
//	is then one block of one KV head (P = S, Hk = 1), means are [pages, 1, 1, D], and exact_tokens, page_table, coded_lens and mean_table are 0
//	or absent; `vwd_kv_cache_view` gives such pages. With c the code of a
//	channel, 0 … 15, and H the Hadamard matrix (Sylvester's, times 1/√n) of the largest power of two n that divides the number of
//	channels, repeated along the diagonal:
//	  key = mean + weights∘(H·(k_scale·(c − 7.5))), value = H·(v_scale·(c − 7.5)).
//
//	flags         Must be 0.
//	block_size    Tokens of a block, S: a multiple of 16, 16 … 128. Lists of a call have the same block size. With a page_table, S
//	              divides P or P divides S.
//	exact_tokens  Tokens at the beginning of each sequence that are not coded; a multiple of S.
//	k             [pages, P, Hk, D/2]     uint8: channel 2i in the low four bits, 2i+1 in the high ones. D a multiple of 16, 64 … 256.
//	v             [pages, P, Hk, Dv/2]    uint8, likewise.
//	k_scale       [pages, P, Hk]          float8_e4m3fn.
//	v_scale       [pages, P, Hk]          float8_e4m3fn.
//	page_table    [B, max_pages]          int32, optional: as in `vwd_paged_kv`, of these pages. A page of coded tokens outside
//	                                      0 … pages−1 holds no tokens.
//	coded_lens    [B]                     int32. Clamped to 0 … seq_lens[i] and the capacity of the pages, and rounded down to whole
//	                                      blocks.
//	means         [mean_pages, rows, Hk, D]  float32, float16 or bfloat16: the mean key of each block. Block j of sequence i is row
//	                                      j % rows of page mean_table[i, j / rows], or row j of page i where mean_table is absent.
//	mean_table    [B, max_mean_pages]     int32, optional. The mean of a block that has no row is 0.
//	weights       [Hk, D]                 float32, Hk as lists have it, optional (absent: 1), from `vwd_kv_weights`. One that is not a finite number above 0
//	                                      counts as 1.
type Int4KV struct {
	BlockSize   int
	ExactTokens int
	K           Tensor
	V           Tensor
	KScale      Tensor
	VScale      Tensor
	PageTable   Tensor
	CodedLens   Tensor
	Means       Tensor
	MeanTable   Tensor
	Weights     Tensor
}

// Remainder is vwd_remainder: means and covariance of the keys and values of each sequence.
//
//	Means and covariance of the keys and values of one layer, in the caller's memory: N rows of each tensor, one for each sequence, kept by
//	`vwd_remainder_update` and read by `vwd_attention`. All are over the tokens of whole blocks without the first block. A sequence is
//	copied, as for a fork, by copying its row of tokens, mean_k, mean_v and covariance.
//
//	flags       Must be 0.
//	rows        [B]               int32, optional: sequence i has row rows[i]. Absent: row i. Outside 0 … N−1: it has none.
//	tokens      [N, Hk]           int32: how many tokens the row is of. 0: none, whatever the other tensors hold. Zero it for a new sequence.
//	mean_k      [N, Hk, D]        float32.
//	mean_v      [N, Hk, Dv]       float32.
//	covariance  [N, Hk, D, Dv]    float32: the mean of (k − mean_k)·(v − mean_v)ᵀ.
type Remainder struct {
	Rows       Tensor
	Tokens     Tensor
	MeanK      Tensor
	MeanV      Tensor
	Covariance Tensor
}

// Index is vwd_index: summaries of the keys of one layer.
//
//	Summaries of the keys of one layer, in the caller's memory. Fields that `kind` does not name stay zero.
//
//	Every tensor is [pages, rows, Hk, …]: summary j of sequence i is row j % rows of page table[i, j / rows], or of page i
//	where `table` is absent. A summary is a block (MINMAX, AXIS), a window (MEAN) or a token (LABEL). A page outside the
//	tensor, and a row past the table, hold no summary.
//
//	flags        Must be 0.
//	kind         One of VWD_INDEX_*.
//	block_size   MINMAX, AXIS: tokens of a block, S.
//	window       MEAN: tokens of a window; 0 means 32.
//	stride       MEAN: tokens from one window to the next; 0 means 16.
//	table        [B, max_index_pages]     int32, optional.
//	key_max      [pages, rows, Hk, D]     MINMAX; the keys' dtype (for FP8 keys: float32, float16 or bfloat16).
//	key_min      [pages, rows, Hk, D]     MINMAX; dtype of key_max.
//	means        [pages, rows, Hk, D]     MEAN; float32, float16 or bfloat16.
//	labels       [pages, rows, Hk, r/2]   LABEL; uint8. Channel 2i in the low four bits, 2i+1 in the high ones.
//	label_scale  [pages, rows, Hk]        LABEL; float16. Key ≈ label_min + label_scale · code.
//	label_min    [pages, rows, Hk]        LABEL; float16.
//	channels     [Hk, r]                  LABEL; int32, from `vwd_channel_importance`. r even, 2 … D.
//	axes         [pages, rows, Hk, 2·D]   AXIS; float32, float16 or bfloat16: the mean key less axis_centre, then the axis.
//	          or [pages, rows, Hk, D]     AXIS; uint8: the same in INT4, value 2i in the low four bits, 2i+1 in the high ones.
//	axis_range   [pages, rows, Hk, 4·⌈D/32⌉]  AXIS in INT4 only; float16: scale and minimum of each group of 32 channels (the
//	                                      last group may have fewer): first the pairs of all groups of the mean, then those of
//	                                      all groups of the axis.
//	axis_weights [Hk, D]                  AXIS; float32, optional: the weight of each channel, see `vwd_channel_importance`.
//	                                      Only `vwd_index_update` reads it. Absent: 1.
//	axis_centre  [Hk, D]                  AXIS; float32, optional: any constant near the mean key. `vwd_index_update` reads it, and
//	                                      `vwd_select_blocks` for log_mass alone. Absent: 0.
type Index struct {
	Kind        IndexKind
	BlockSize   int
	Window      int
	Stride      int
	Table       Tensor
	KeyMax      Tensor
	KeyMin      Tensor
	Means       Tensor
	Labels      Tensor
	LabelScale  Tensor
	LabelMin    Tensor
	Channels    Tensor
	Axes        Tensor
	AxisRange   Tensor
	AxisWeights Tensor
	AxisCentre  Tensor
}

// AttentionState is vwd_attention_state: what attention knows before it divides.
//
//	Attention state per query head: out = acc / l, lse = m + ln l. Natural logarithms, s = scale·q·k.
//	The state of no tokens, the empty state, is acc = 0, m = −inf, l = 0. The struct is final: it does not grow.
//
//	acc  [B, Hq, Dv] or [B, Q, Hq, Dv]  float32. Σ e^(s−m) v
//	m    [B, Hq] or [B, Q, Hq]          float32. max s
//	l    [B, Hq] or [B, Q, Hq]          float32. Σ e^(s−m)
type AttentionState struct {
	Acc Tensor
	M   Tensor
	L   Tensor
}

// AttentionPartials is vwd_attention_partials: a state per entry of a block list.
//
//	Partials: an attention state for each group of `partial_blocks` consecutive entries of a block list. The struct is final:
//	it does not grow.
//
//	acc  [B, Hq, groups, Dv] or [B, Q, Hq, groups, Dv]  float32; groups = ⌈cap / partial_blocks⌉
//	m    [B, Hq, groups] or [B, Q, Hq, groups]          float32
//	l    [B, Hq, groups] or [B, Q, Hq, groups]          float32
type AttentionPartials struct {
	Acc Tensor
	M   Tensor
	L   Tensor
}

// PredictorState is vwd_predictor_state: smoothed scores of one layer.
//
//	Smoothed scores of one layer, in the caller's memory. `vwd_predictor_reset` fills a sequence's rows before its first step.
//	The struct is final: it does not grow.
//
//	level  [N, Hk, max_blocks]  float32, of N sequences. L; not finite until the block has had a finite score.
//	trend  [N, Hk, max_blocks]  float32. T.
type PredictorState struct {
	Level Tensor
	Trend Tensor
}

// Holt is vwd_holt: smoothing factors. {1, 0, 0} predicts the previous step's scores again.
//
//	Smoothing factors. {1, 0, 0} predicts the previous step's scores again; {0, 0, 0} means {1, 0, 0}. The struct is final:
//	it does not grow.
type Holt struct {
	Alpha float32
	Beta  float32
	Gamma float32
}

// Rope is vwd_rope: rotary position embedding.
//
//	Rotary position embedding (Su et al. 2021). Angle of pair c at position t: t·inv_freq[c].
type Rope struct {
	Style           RopeStyle
	RotaryDim       int
	Theta           float32
	AttentionFactor float32
	InvFreq         Tensor
}
