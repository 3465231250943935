package vanward

// #include "calls.h"
// #cgo noescape budget_ask
// #cgo nocallback budget_ask
import "C"

import (
	"fmt"
	"unsafe"
)

// BudgetOptions are those of NewBudget and LoadBudget; vwd_budget_options documents them.
type BudgetOptions struct {
	QueryHeads    int
	KVHeads       int
	KeyDim        int
	ValueDim      int
	DType         DType
	PageSize      int
	BlockSize     int
	Method        SelectMethod
	K             int
	InitBlocks    int
	LocalBlocks   int
	RepairMode    RepairMode
	PartialBlocks int
	MaxDraft      int
	Contexts      []int
	Batches       []int
	Ratios        []float32
	Samples       int
	LimitBytes    uint64
}

// Budget holds measured times of a shape on a device, and tells what speculation they pay for. It does not need its session any
// more.
type Budget struct {
	handle handle[*C.vwd_budget]
}

// NewBudget measures one: vwd_budget_profile documents it.
func (s *Session) NewBudget(options BudgetOptions, stream Stream) (*Budget, error) {
	var l lowering
	c := options.lower(&l)
	b := &Budget{}
	err := s.run(&l, func(h *C.vwd_session) C.outcome { return C.budget_profile(h, &c, stream.c(), &b.handle.c) })
	if err != nil {
		return nil, err
	}
	return b, nil
}

// LoadBudget reads one that Save wrote, if it is of this shape and of the session's device.
func (s *Session) LoadBudget(options BudgetOptions, path string) (*Budget, error) {
	var l lowering
	c, cPath := options.lower(&l), l.path(path)
	defer C.free(unsafe.Pointer(cPath))
	b := &Budget{}
	err := s.run(&l, func(h *C.vwd_session) C.outcome { return C.budget_load(h, &c, cPath, &b.handle.c) })
	if err != nil {
		return nil, err
	}
	return b, nil
}

func (options BudgetOptions) lower(l *lowering) C.vwd_budget_options {
	c := C.vwd_budget_options{
		struct_size:    C.sizeof_vwd_budget_options,
		query_heads:    l.uint32("options.query_heads", options.QueryHeads),
		kv_heads:       l.uint32("options.kv_heads", options.KVHeads),
		key_dim:        l.uint32("options.key_dim", options.KeyDim),
		value_dim:      l.uint32("options.value_dim", options.ValueDim),
		dtype_code:     C.uint32_t(options.DType >> 8),
		dtype_bits:     C.uint32_t(options.DType & 0xff),
		page_size:      l.uint32("options.page_size", options.PageSize),
		block_size:     l.uint32("options.block_size", options.BlockSize),
		method:         C.uint32_t(options.Method),
		k:              l.uint32("options.k", options.K),
		init_blocks:    l.uint32("options.init_blocks", options.InitBlocks),
		local_blocks:   l.uint32("options.local_blocks", options.LocalBlocks),
		repair_mode:    C.uint32_t(options.RepairMode),
		partial_blocks: l.uint32("options.partial_blocks", options.PartialBlocks),
		max_draft:      l.uint32("options.max_draft", options.MaxDraft),
		samples:        l.uint32("options.samples", options.Samples),
		limit_bytes:    C.uint64_t(options.LimitBytes),
	}
	l.numbers("options.contexts", c.contexts[:], options.Contexts)
	l.numbers("options.batches", c.batches[:], options.Batches)
	l.floats("options.ratios", c.ratios[:], options.Ratios)
	return c
}

// Save writes the budget to a safetensors file.
func (b *Budget) Save(path string) error {
	var l lowering
	cPath := l.path(path)
	defer C.free(unsafe.Pointer(cPath))
	return b.run(&l, func(h *C.vwd_budget) C.outcome { return C.budget_save(h, cPath) })
}

// BudgetQuestion is the question of Budget.Ask; vwd_budget_question documents it. Coverages belong to CoverageRatios.
type BudgetQuestion struct {
	Context        int
	Batch          int
	Acceptance     float32
	MaxDraft       int
	RestUs         float32
	RestPositionUs float32
	Margin         float32
	CoverageRatios []float32
	Coverages      []float32
}

func (q BudgetQuestion) lower(l *lowering) C.vwd_budget_question {
	c := C.vwd_budget_question{
		struct_size:      C.sizeof_vwd_budget_question,
		context:          l.uint32("question.context", q.Context),
		batch:            l.uint32("question.batch", q.Batch),
		acceptance:       C.float(q.Acceptance),
		max_draft:        l.uint32("question.max_draft", q.MaxDraft),
		rest_us:          C.float(q.RestUs),
		rest_position_us: C.float(q.RestPositionUs),
		margin:           C.float(q.Margin),
	}
	l.floats("question.coverage_ratios", c.coverage_ratios[:], q.CoverageRatios)
	l.floats("question.coverages", c.coverages[:], q.Coverages)
	return c
}

// BudgetPays are the strategies that pay; 0: dense steps are the fastest.
type BudgetPays uint32

const (
	BudgetSparse BudgetPays = C.VWD_BUDGET_SPARSE
	BudgetPrr    BudgetPays = C.VWD_BUDGET_PRR
	BudgetSelf   BudgetPays = C.VWD_BUDGET_SELF
)

// BudgetAnswer is vwd_budget_answer, which documents it.
type BudgetAnswer struct {
	Pays                BudgetPays
	Extrapolated        bool
	Gamma               int
	HiddenRatio         float32
	Ratio               float32
	SparseGain          float32
	PrrGain             float32
	SelfGain            float32
	BreakEvenCoverage   float32
	BreakEvenAcceptance float32
	SelectUs            float32
	AttendUs            float32
	GuessUs             float32
	RepairUs            float32
	DenseUs             float32
	VerifyUs            float32
}

// Ask tells which speculation pays, and how much of it.
func (b *Budget) Ask(question BudgetQuestion) (BudgetAnswer, error) {
	var l lowering
	c, a := question.lower(&l), C.vwd_budget_answer{struct_size: C.sizeof_vwd_budget_answer}
	err := b.run(&l, func(h *C.vwd_budget) C.outcome { return C.budget_ask(h, &c, &a) })
	return BudgetAnswer{
		Pays: BudgetPays(a.pays), Extrapolated: a.extrapolated != 0, Gamma: int(a.gamma),
		HiddenRatio: float32(a.hidden_ratio), Ratio: float32(a.ratio),
		SparseGain: float32(a.sparse_gain), PrrGain: float32(a.prr_gain), SelfGain: float32(a.self_gain),
		BreakEvenCoverage: float32(a.break_even_coverage), BreakEvenAcceptance: float32(a.break_even_acceptance),
		SelectUs: float32(a.select_us), AttendUs: float32(a.attend_us), GuessUs: float32(a.guess_us),
		RepairUs: float32(a.repair_us), DenseUs: float32(a.dense_us), VerifyUs: float32(a.verify_us),
	}, err
}

// Close releases the budget once calls in progress have returned. Closing again does nothing; calls after it fail.
func (b *Budget) Close() error {
	if b != nil {
		b.handle.close(func(c *C.vwd_budget) { C.vwd_budget_release(c) })
	}
	return nil
}

func (b *Budget) run(l *lowering, call func(*C.vwd_budget) C.outcome) error {
	if l.err != nil {
		return l.err
	}
	if b == nil {
		return invalid("budget", "nil")
	}
	return b.handle.use("budget", call)
}

// numbers fills an array that ends at its first 0.
func (l *lowering) numbers(name string, to []C.uint32_t, from []int) {
	if l.fits(name, len(from), len(to)) {
		for i, n := range from {
			to[i] = l.uint32(name, n)
		}
	}
}

func (l *lowering) floats(name string, to []C.float, from []float32) {
	if l.fits(name, len(from), len(to)) {
		for i, x := range from {
			to[i] = C.float(x)
		}
	}
}

func (l *lowering) fits(name string, count, most int) bool {
	if count > most {
		l.fail(name, fmt.Sprintf("%d values; expected at most %d", count, most))
	}
	return count <= most
}
