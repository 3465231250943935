package vanward

import (
	"testing"
	"unsafe"
)

// Keys grow with the token, and values are its number. The list that is made ahead has the block of the new token, the one before it, and the
// newest or the oldest of the others, as the query says that selects; a query of zeros gives the mean of their tokens.
func TestDecoderForesees(t *testing.T) {
	const tokens, dim = 16, 16
	s := cpuSession(t)
	k, v := make([]float32, tokens*dim), make([]float32, tokens*dim)
	for i := range v {
		v[i] = float32(i / dim)
	}
	for i := range tokens {
		k[i*dim] = float32(i)
	}
	decoder, err := s.NewDecoder(DecoderOptions{
		Layers: 1, MaxRows: 1, QueryHeads: 1, KVHeads: 1, KeyDim: dim, ValueDim: dim, DType: F32, PageSize: 4, Pages: 4, BlockSize: 4,
		Policy: DecoderPolicy{Method: SelectMinMax, K: 2, Ratio: 1, Strategy: StrategyForeseen},
	})
	must(t, err)
	defer decoder.Close()
	for _, step := range []struct {
		tokens  int
		begin   Tensor
		towards float32
		mean    float64
	}{
		// The prompt, of which the decoder writes the last token; then the token of a new block, twice.
		{tokens: 12, begin: Of([]int32{0})},
		{tokens: 13, towards: 1, mean: (4 + 5 + 6 + 7 + 8 + 9 + 10 + 11 + 12) / 9.0},
		{tokens: 13, towards: -1, mean: (0 + 1 + 2 + 3 + 8 + 9 + 10 + 11 + 12) / 9.0},
	} {
		must(t, decoder.Begin(DecoderStep{
			SeqLens: Of([]int32{int32(step.tokens)}), PageTable: Of([]int32{0, 1, 2, 3}, 1, 4), Begin: step.begin,
		}, 0))
		ahead, newK, newV := make([]float32, dim), make([]float32, dim), make([]float32, dim)
		ahead[0], newK[0] = step.towards, float32(step.tokens-1)
		for c := range newV {
			newV[c] = newK[0]
		}
		must(t, decoder.Foresee(nil, DecoderForeseeArgs{Q: Of(ahead, 1, 1, dim)}, 0))
		zeros, out := make([]float32, dim), make([]float32, dim)
		must(t, decoder.Attend(DecoderAttendArgs{
			K: Of(k, 4, 4, 1, dim), V: Of(v, 4, 4, 1, dim), NewK: Of(newK, 1, 1, dim), NewV: Of(newV, 1, 1, dim),
			Q: Of(zeros, 1, 1, dim), Out: Of(out, 1, 1, dim),
		}, 0))
		if step.towards != 0 {
			near(t, "mean of the foreseen tokens", out, step.mean, 1e-5)
		}
	}
	wantInvalid(t, decoder.Foresee(nil, DecoderForeseeArgs{}, 0), "q: absent without a forecast")
}

func TestDecoderAcceptsAndResets(t *testing.T) {
	s := cpuSession(t)
	decoder, err := s.NewDecoder(DecoderOptions{
		Layers: 1, MaxRows: 1, MaxPositions: 3, MaxSequences: 2, QueryHeads: 1, KVHeads: 1, KeyDim: 16, ValueDim: 16, DType: F32,
		PageSize: 4, Pages: 1, BlockSize: 4, Policy: DecoderPolicy{Method: SelectMinMax, K: 1},
	})
	must(t, err)
	defer decoder.Close()
	accepted, next, committed := make([]int32, 1), make([]int32, 1), make([]int32, 3)
	must(t, decoder.Accept(DecoderAcceptArgs{
		Draft: Of([]int32{5, 6}, 1, 2), Target: Of([]int32{5, 7, 8}, 1, 3), Sequences: Of([]int32{1}), Accepted: Of(accepted),
		NextToken: Of(next), Committed: Of(committed, 1, 3),
	}, 0))
	equal(t, "accepted", accepted, 1)
	equal(t, "next_token", next, 7)
	equal(t, "committed", committed, 5, 7, -1)
	counts := func() []int32 {
		info, err := decoder.Info()
		must(t, err)
		return append(ints(info.Drafted), ints(info.Accepted)...)
	}
	equal(t, "drafted and accepted of each sequence", counts(), 0, 2, 0, 1)
	info, err := decoder.Info()
	must(t, err)
	equal(t, "the shape of drafted", info.Drafted.Shape(), 2)
	equal(t, "the strides of drafted", info.Drafted.Strides(), 1)
	if info.Drafted.Memory() != HostMemory || info.Drafted.DType() != I32 {
		t.Error(info.Drafted.Memory(), info.Drafted.DType())
	}
	must(t, decoder.Reset(DecoderResetArgs{Sequences: Of([]int32{0})}, 0))
	equal(t, "the same after a reset of the other one", counts(), 0, 2, 0, 1)
	must(t, decoder.Reset(DecoderResetArgs{Sequences: Of([]int32{1})}, 0))
	equal(t, "the same after a reset", counts(), 0, 0, 0, 0)
}

// ints views a tensor in memory of the library's.
func ints(t Tensor) []int32 {
	address := t.Address()
	return unsafe.Slice(*(**int32)(unsafe.Pointer(&address)), t.Shape()[0])
}
