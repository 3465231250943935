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
)

// SelectMethod is how blocks are scored.
type SelectMethod uint32

const (
	SelectMinMax      SelectMethod = C.VWD_SELECT_MINMAX
	SelectMeanSoftmax SelectMethod = C.VWD_SELECT_MEAN_SOFTMAX
	SelectMeanDot     SelectMethod = C.VWD_SELECT_MEAN_DOT
	SelectLabelMass   SelectMethod = C.VWD_SELECT_LABEL_MASS
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
type BlockList struct {
	IDs    Tensor
	Counts Tensor
	Slots  Tensor // of Attention and Repair: the page of a pool in which each entry lies
}

// PagedKV is vwd_paged_kv: keys and values of one layer.
type PagedKV struct {
	K         Tensor
	V         Tensor
	PageTable Tensor
	SeqLens   Tensor
	KScale    Tensor // of 8-bit floats
	VScale    Tensor
}

// Index is vwd_index: summaries of the keys of one layer.
type Index struct {
	Kind       IndexKind
	BlockSize  int
	Window     int
	Stride     int
	Table      Tensor
	KeyMax     Tensor
	KeyMin     Tensor
	Means      Tensor
	Labels     Tensor
	LabelScale Tensor
	LabelMin   Tensor
	Channels   Tensor
}

// AttentionState is vwd_attention_state: what attention knows before it divides.
type AttentionState struct {
	Acc Tensor
	M   Tensor
	L   Tensor
}

// AttentionPartials is vwd_attention_partials: a state per entry of a block list.
type AttentionPartials struct {
	Acc Tensor
	M   Tensor
	L   Tensor
}

// PredictorState is vwd_predictor_state: smoothed scores of one layer.
type PredictorState struct {
	Level Tensor
	Trend Tensor
}

// Holt is vwd_holt: smoothing factors. {1, 0, 0} predicts the previous step's scores again.
type Holt struct {
	Alpha float32
	Beta  float32
	Gamma float32
}

// Rope is vwd_rope: rotary position embedding.
type Rope struct {
	Style           RopeStyle
	RotaryDim       int
	Theta           float32
	AttentionFactor float32
	InvFreq         Tensor
}
