package vanward

import (
	"math"
	"testing"
)

// Every call once, on numbers that can be checked by hand; steps_test.go has those of caches, decoders, and what predicts for them.

func near(t *testing.T, what string, found []float32, expected, tolerance float64) {
	t.Helper()
	for _, x := range found {
		if math.Abs(float64(x)-expected) > tolerance || math.IsNaN(float64(x)) {
			t.Errorf("%s: found %v, expected %v", what, found, expected)
			return
		}
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// One sequence of 6 tokens in 3 blocks of 2, one KV head of 16 channels under two query heads. Channel 0 of key t is t,
// every channel of value t is t: scores and averages are sums of small integers.
const (
	tokens   = 6
	block    = 2
	channels = 16
	heads    = 2
)

type sequence struct {
	k, v, q []float32
	lens    []int32
}

func newSequence() sequence {
	s := sequence{make([]float32, tokens*channels), make([]float32, tokens*channels), make([]float32, heads*channels),
		[]int32{tokens}}
	for t := range tokens {
		s.k[t*channels] = float32(t)
		for c := range channels {
			s.v[t*channels+c] = float32(t)
		}
	}
	return s
}

func (s sequence) kv() PagedKV {
	return PagedKV{K: Of(s.k, 1, tokens, 1, channels), V: Of(s.v, 1, tokens, 1, channels), SeqLens: Of(s.lens)}
}

func (s sequence) queries() Tensor { return Of(s.q, 1, heads, channels) }

// A list of one sequence and one KV head.
func list(ids, count []int32) BlockList {
	return BlockList{IDs: Of(ids, 1, 1, len(ids)), Counts: Of(count, 1, 1)}
}

func TestVerifyAndPack(t *testing.T) {
	s := cpuSession(t)
	accepted, next, committed, offsets := make([]int32, 2), make([]int32, 2), make([]int32, 8), make([]int64, 3)
	mismatch := make([]bool, 2)
	verify := VerifyArgs{
		Draft: Of([]int32{5, 6, 7, 1, 9, 3}, 2, 3), Target: Of([]int32{5, 6, 7, 8, 1, 2, 3, 4}, 2, 4),
		Accepted: Of(accepted), NextToken: Of(next), Mismatch: Of(mismatch), Committed: Of(committed, 2, 4),
	}
	must(t, s.Verify(verify, 0))
	equal(t, "accepted", accepted, 3, 1)
	equal(t, "next_token", next, 8, 2)
	equal(t, "mismatch", mismatch, false, true)
	equal(t, "committed", committed, 5, 6, 7, 8, 1, 2, -1, -1)

	packed, bytes := []float32{-1, -1, -1, -1, -1}, make([]uint8, 5)
	rows := []Tensor{Of([]float32{10, 11, 12, 20, 21, 22}, 2, 3), Of([]uint8{1, 2, 3, 4, 5, 6}, 2, 3)}
	into := []Tensor{Of(packed), Of(bytes)}
	must(t, s.Pack(PackArgs{Rows: rows, Packed: into, Accepted: Of(accepted), Offsets: Of(offsets)}, 0))
	equal(t, "packed", packed, 10, 11, 12, 20, -1)
	equal(t, "packed bytes", bytes, 1, 2, 3, 4, 0)
	equal(t, "offsets", offsets, 0, 3, 4)

	clear(accepted)
	clear(packed)
	must(t, s.VerifyPack(VerifyPackArgs{
		Rows: rows, Packed: into, Draft: verify.Draft, Target: verify.Target, Accepted: verify.Accepted,
		NextToken: verify.NextToken, Offsets: Of(offsets),
	}, 0))
	equal(t, "packed", packed, 10, 11, 12, 20, 0)
	equal(t, "accepted", accepted, 3, 1)

	// A stop token ends the first request, its length the second.
	clear(packed)
	length, finish := make([]int32, 2), make([]uint8, 2)
	must(t, s.VerifyPack(VerifyPackArgs{
		Rows: rows, Packed: into, Draft: verify.Draft, Target: verify.Target, Accepted: verify.Accepted,
		NextToken: verify.NextToken, Offsets: Of(offsets), Stop: Of([]int64{6}), Remaining: Of([]int32{9, 1}),
		CommittedLen: Of(length), Finish: Of(finish),
	}, 0))
	equal(t, "packed", packed, 10, 11, 20, 0, 0)
	equal(t, "accepted", accepted, 2, 1)
	equal(t, "next_token", next, -1, -1)
	equal(t, "committed_len", length, 2, 1)
	equal(t, "finish", finish, 1, 2)

	// Drafts of two tokens and of one, one after the other.
	must(t, s.Verify(VerifyArgs{
		Draft: Of([]int32{5, 6, 7}), Target: Of([]int32{5, 6, 8}), DraftEnds: Of([]int32{2, 3}), Bonus: Of([]int32{20, 21}),
		Accepted: Of(accepted), NextToken: Of(next),
	}, 0))
	equal(t, "accepted", accepted, 2, 0)
	equal(t, "next_token", next, 20, 8)
}

func TestVerifySample(t *testing.T) {
	s := cpuSession(t)
	next, accepted, committed, finish := make([]int32, 1), make([]int32, 1), make([]int32, 3), make([]uint8, 1)
	// A token of each row has all mass: 2, then 1, then 1.
	args := VerifySampleArgs{
		Draft: Of([]int32{2, 0}, 1, 2), Target: Of([]float32{-1000, -1000, 0, -1000, 0, -1000, -1000, 0, -1000}, 1, 3, 3),
		Seeds: Of([]int64{7}), Positions: Of([]int64{0}), Stop: Of([]int32{1}), NextToken: Of(next), Accepted: Of(accepted),
		Committed: Of(committed, 1, 3), Finish: Of(finish),
	}
	bytes, err := s.VerifySampleScratch(args)
	must(t, err)
	equal(t, "scratch", []uint64{bytes}, 0)
	must(t, s.VerifySample(args, 0))
	equal(t, "committed", committed, 2, 1, -1)
	equal(t, "accepted", accepted, 1)
	equal(t, "next_token", next, 1)
	equal(t, "finish", finish, 1)
}

func TestTreesArePreparedVerifiedAndCompacted(t *testing.T) {
	s := cpuSession(t)
	// The root has two children, and the second of them a child.
	parents, mask, positions := Of([]int32{-1, 0, 0, 2}, 1, 4), make([]uint32, 4), make([]int32, 4)
	must(t, s.TreePrepare(TreePrepareArgs{
		Parents: parents, Bases: Of([]int32{2}), Positions: Of(positions, 1, 4), Mask: Of(mask, 1, 4, 1),
	}, 0))
	equal(t, "mask", mask, 1, 3, 5, 13)
	equal(t, "positions", positions, 2, 3, 3, 4)

	accepted, path, next := make([]int32, 1), make([]int32, 4), make([]int32, 1)
	must(t, s.VerifyTree(VerifyTreeArgs{
		Tokens: Of([]int32{9, 5, 6, 7}, 1, 4), Parents: parents, Target: Of([]int32{6, 1, 7, 8}, 1, 4),
		Accepted: Of(accepted), Path: Of(path, 1, 4), NextToken: Of(next),
	}, 0))
	equal(t, "accepted", accepted, 2)
	equal(t, "path", path, 0, 2, 3, -1)
	equal(t, "next_token", next, 8)

	// A token of each row has all mass, so that sampling draws it.
	logits := make([]float32, 4*9)
	for n, token := range []int{6, 1, 7, 8} {
		for j := 0; j < 9; j++ {
			if j != token {
				logits[9*n+j] = -1000
			}
		}
	}
	for _, walk := range []Walk{WalkCoupled, WalkIndependent, WalkDistinct} {
		args := VerifyTreeArgs{
			Tokens: Of([]int32{9, 5, 6, 7}, 1, 4), Parents: parents, Logits: Of(logits, 1, 4, 9),
			Accepted: Of(accepted), Path: Of(path, 1, 4), NextToken: Of(next),
			Walk: walk, Seeds: Of([]int64{7}), Positions: Of([]int64{0}),
		}
		bytes, err := s.VerifyTreeScratch(args)
		must(t, err)
		equal(t, "scratch", []uint64{bytes}, 0)
		must(t, s.VerifyTree(args, 0))
		equal(t, "path", path, 0, 2, 3, -1)
		equal(t, "next_token", next, 8)
	}

	k, scale := []int32{0, 1, 2, 3, 4, 5}, []float32{10, 11, 12, 13, 14, 15}
	c, err := s.NewCompactor(CompactorOptions{Caches: []Tensor{Of(k, 3, 2), Of(scale, 3, 2, 1)}})
	must(t, err)
	args := CompactArgs{PageTable: Of([]int32{0, 1, 2}, 1, 3), Bases: Of([]int32{2}), Path: Of(path, 1, 4)}
	must(t, c.Compact(args, 0))
	equal(t, "keys", k, 0, 1, 2, 4, 5, 5)
	equal(t, "scales", scale, 10, 11, 12, 14, 15, 15)
	must(t, c.Close())
	if err := c.Compact(args, 0); err == nil {
		t.Error("a closed compactor moves rows")
	}
}

func TestOneCallUpdatesTheSummariesOfSeveralLayers(t *testing.T) {
	s := cpuSession(t)
	var alone, together [2][]float32
	var updates [2]IndexUpdateArgs
	for n := range updates {
		seq := newSequence()
		for i := range seq.k {
			seq.k[i] = float32(math.Sin(float64(i + 1000*n)))
		}
		update := func(keyMax *[]float32) IndexUpdateArgs {
			*keyMax = make([]float32, 3*channels)
			return IndexUpdateArgs{K: seq.kv().K, SeqLens: Of(seq.lens), Index: Index{
				Kind: IndexMinMax, BlockSize: block, KeyMax: Of(*keyMax, 1, 3, 1, channels),
				KeyMin: Of(make([]float32, 3*channels), 1, 3, 1, channels),
			}}
		}
		must(t, s.IndexUpdate(update(&alone[n]), 0))
		updates[n] = update(&together[n])
	}
	must(t, s.IndexUpdateLayers(updates[:], 0))
	for n := range updates {
		equal(t, "summaries of a layer", together[n], alone[n]...)
	}
	must(t, s.IndexUpdateLayers(nil, 0))

	clear(together[0])
	updates[1].SeqLens = Tensor{}
	wantInvalid(t, s.IndexUpdateLayers(updates[:], 0), "updates[1].seq_lens: ")
	equal(t, "summaries after an error", together[0], make([]float32, 3*channels)...)
	wantInvalid(t, s.IndexUpdateLayers(make([]IndexUpdateArgs, 300), 0), "count: 300; expected 0 to 256")
}

func TestSummariseSelectAttendRepair(t *testing.T) {
	s, seq := cpuSession(t), newSequence()
	keyMax, keyMin := make([]float32, 3*channels), make([]float32, 3*channels)
	index := Index{
		Kind: IndexMinMax, BlockSize: block, KeyMax: Of(keyMax, 1, 3, 1, channels), KeyMin: Of(keyMin, 1, 3, 1, channels),
	}
	must(t, s.IndexUpdate(IndexUpdateArgs{K: seq.kv().K, SeqLens: Of(seq.lens), Index: index}, 0))
	equal(t, "summary", []float32{keyMax[0], keyMax[32], keyMin[32]}, 1, 5, 4)

	// Two heads that ask for channel 0 score block j at 2·(2j + 1).
	seq.q[0], seq.q[channels] = 1, 1
	ids, count, scores := make([]int32, 2), make([]int32, 1), make([]float32, 3)
	selected := list(ids, count)
	must(t, s.SelectBlocks(SelectBlocksArgs{
		Method: SelectMinMax, BlockSize: block, K: 2, Q: seq.queries(), Index: index, SeqLens: Of(seq.lens),
		Selected: selected, Scores: Of(scores, 1, 1, 3),
	}, 0))
	equal(t, "ids", ids, 1, 2)
	equal(t, "scores", scores, 2, 6, 10)

	// A query of zeros weighs all tokens alike: attention is the mean of the values listed.
	clear(seq.q)
	out, lse := make([]float32, heads*channels), make([]float32, heads)
	acc, m, l := make([]float32, heads*channels), make([]float32, heads), make([]float32, heads)
	state := AttentionState{Acc: Of(acc, 1, heads, channels), M: Of(m, 1, heads), L: Of(l, 1, heads)}
	partials := AttentionPartials{
		Acc: Of(make([]float32, 2*heads*channels), 1, heads, 2, channels),
		M:   Of(make([]float32, 2*heads), 1, heads, 2),
		L:   Of(make([]float32, 2*heads), 1, heads, 2),
	}
	predicted := list([]int32{0, 1}, []int32{2})
	must(t, s.Attention(AttentionArgs{
		BlockSize: block, Q: seq.queries(), KV: seq.kv(), List: predicted, Out: Of(out, 1, heads, channels),
		LSE: Of(lse, 1, heads), State: state, Partials: partials,
	}, 0))
	near(t, "out", out, 1.5, 1e-6)
	near(t, "lse", lse, math.Log(4), 1e-6)

	missed := make([]int32, 1)
	repair := RepairArgs{
		Mode: RepairExact, BlockSize: block, Q: seq.queries(), KV: seq.kv(), Predicted: predicted, Selected: selected,
		PredictedPartials: partials, Out: Of(out, 1, heads, channels), MissedCounts: Of(missed, 1, 1),
	}
	must(t, s.Repair(repair, 0))
	near(t, "exact", out, 3.5, 1e-6)
	equal(t, "missed", missed, 1)

	repair.Mode, repair.PredictedPartials, repair.PredictedState = RepairSuperset, AttentionPartials{}, state
	must(t, s.Repair(repair, 0))
	near(t, "superset", out, 2.5, 1e-6)

	// Merged with itself a state keeps its output and doubles its weight.
	must(t, s.MergeStates(MergeStatesArgs{
		Inputs: []AttentionState{state, state}, Out: Of(out, 1, heads, channels), LSE: Of(lse, 1, heads),
	}, 0))
	near(t, "merged", out, 1.5, 1e-6)
	near(t, "merged lse", lse, math.Log(8), 1e-6)
}

// Queries of zeros weigh all that they see alike, and a sink of 0 counts as one token of value 0.
func TestQueryPositionsWindowsSinksAndScales(t *testing.T) {
	s, seq := cpuSession(t), newSequence()
	const rows = 2
	q, out := make([]float32, rows*heads*channels), make([]float32, rows*heads*channels)
	args := AttentionArgs{
		KV: seq.kv(), Q: Of(q, 1, rows, heads, channels), Window: 3, Sinks: Of(make([]float32, heads)),
		Out: Of(out, 1, rows, heads, channels),
	}
	must(t, s.Attention(args, 0))
	near(t, "tokens 2, 3, 4", out[:heads*channels], 9.0/4, 1e-6)
	near(t, "tokens 3, 4, 5", out[heads*channels:], 12.0/4, 1e-6)

	args.QLens = Of([]int32{1})
	must(t, s.Attention(args, 0))
	near(t, "the only row", out[:heads*channels], 12.0/4, 1e-6)
	near(t, "a row that is not there", out[heads*channels:], 0, 0)

	ones := make([]Float8E5M2, tokens*channels)
	for i := range ones {
		ones[i] = 15 << 2 // exponent 0 in a bias of 15, no mantissa
	}
	bytes := Of(ones, 1, tokens, 1, channels)
	args.KV = PagedKV{K: bytes, V: bytes, SeqLens: Of(seq.lens), VScale: Of([]float32{2.5})}
	args.Sinks = Tensor{}
	must(t, s.Attention(args, 0))
	near(t, "values of 1, scaled", out[:heads*channels], 2.5, 1e-6)
}

func TestInt4KeysAndValues(t *testing.T) {
	s := cpuSession(t)
	const tokens, dim = 35, 64
	k, v, q := make([]float32, tokens*dim), make([]float32, tokens*dim), make([]float32, dim)
	for i := range k {
		k[i], v[i] = float32(math.Sin(float64(i))), float32(math.Sin(1.7*float64(i)))
	}
	codes := func() []uint8 { return make([]uint8, 32*dim/2) }
	keys, coded, weights := codes(), []int32{0}, make([]float32, dim)
	kv := PagedKV{
		K: Of(k, 1, tokens, 1, dim), V: Of(v, 1, tokens, 1, dim), SeqLens: Of([]int32{tokens}),
		Int4: &Int4KV{
			BlockSize: 16, K: Of(keys, 1, 32, 1, dim/2), V: Of(codes(), 1, 32, 1, dim/2),
			KScale: Of(make([]Float8E4M3, 32), 1, 32, 1), VScale: Of(make([]Float8E4M3, 32), 1, 32, 1),
			CodedLens: Of(coded), Means: Of(make([]float32, 2*dim), 1, 2, 1, dim), Weights: Of(weights, 1, dim),
		},
	}
	must(t, s.KVWeights(KVWeightsArgs{
		BlockSize: 16, Q: Of(k, tokens, 1, dim), K: Of(k, tokens, 1, dim), Weights: Of(weights, 1, dim),
	}, 0))
	near(t, "weights of equal channels", weights, 1, 0.3)
	must(t, s.KVQuantize(KVQuantizeArgs{Layers: []PagedKV{kv}}, 0))
	if coded[0] != 32 || keys[0] == 0 && keys[1] == 0 && keys[2] == 0 {
		t.Errorf("coded %d tokens; the first codes are %v", coded[0], keys[:3])
	}
	// A query of zeros averages all values.
	out := [2][]float32{make([]float32, dim), make([]float32, dim)}
	must(t, s.Attention(AttentionArgs{KV: kv, Q: Of(q, 1, 1, dim), Out: Of(out[0], 1, 1, dim)}, 0))
	exact := PagedKV{K: kv.K, V: kv.V, SeqLens: kv.SeqLens}
	must(t, s.Attention(AttentionArgs{KV: exact, Q: Of(q, 1, 1, dim), Out: Of(out[1], 1, 1, dim)}, 0))
	for c := range dim {
		near(t, "mean of coded values", out[0][c:c+1], float64(out[1][c]), 0.15)
	}
	err := s.KVQuantize(KVQuantizeArgs{Layers: []PagedKV{{K: kv.K, V: kv.V, SeqLens: kv.SeqLens}}}, 0)
	if err == nil {
		t.Error("a layer without Int4 was accepted")
	}
}

func TestWhatAListLeavesOutIsOneTerm(t *testing.T) {
	s := cpuSession(t)
	const tokens, dim = 12, 16
	k, v, q := make([]float32, tokens*dim), make([]float32, tokens*dim), make([]float32, dim)
	for i := range v {
		v[i] = float32(i / dim)
	}
	kv := PagedKV{K: Of(k, 1, tokens, 1, dim), V: Of(v, 1, tokens, 1, dim), SeqLens: Of([]int32{tokens})}
	counted, mean := []int32{0}, make([]float32, dim)
	remainder := &Remainder{
		Tokens: Of(counted, 1, 1), MeanK: Of(make([]float32, dim), 1, 1, dim), MeanV: Of(mean, 1, 1, dim),
		Covariance: Of(make([]float32, dim*dim), 1, 1, dim, dim),
	}
	must(t, s.RemainderUpdate(RemainderUpdateArgs{BlockSize: 4, KV: kv, Remainder: remainder}, 0))
	equal(t, "tokens behind the first block", counted, 8)
	near(t, "mean of their values", mean, 7.5, 1e-6)

	// A query of zeros weighs the listed tokens 0 … 3 alike, and the others as log_mass says.
	out, m, l := make([]float32, dim), make([]float32, 1), make([]float32, 1)
	must(t, s.Attention(AttentionArgs{
		BlockSize: 4, KV: kv, Q: Of(q, 1, 1, dim), Out: Of(out, 1, 1, dim),
		List:      BlockList{IDs: Of([]int32{0}, 1, 1, 1), Counts: Of([]int32{1}, 1, 1)},
		State:     AttentionState{Acc: Of(make([]float32, dim), 1, 1, dim), M: Of(m, 1, 1), L: Of(l, 1, 1)},
		Remainder: remainder, LogMass: Of([]float32{float32(math.Log(8))}, 1, 1),
	}, 0))
	near(t, "mean of all values", out, 5.5, 1e-5)
}

func TestChannelsLabelsAndTokens(t *testing.T) {
	s, seq := cpuSession(t), newSequence()
	for i := range seq.q {
		seq.q[i] = 1
	}
	chosen, importance := make([]int32, 2), make([]float32, channels)
	must(t, s.ChannelImportance(ChannelImportanceArgs{
		Q: seq.queries(), K: Of(seq.k, tokens, 1, channels),
		Channels: Of(chosen, 1, 2), Importance: Of(importance, 1, channels),
	}, 0))
	equal(t, "channels", chosen, 0, 1)
	equal(t, "importance", importance[:2], 5, 0)

	labels, minimum := make([]uint8, tokens), make([]Half, tokens)
	index := Index{
		Kind: IndexLabel, Labels: Of(labels, 1, tokens, 1, 1), LabelScale: Of(make([]Half, tokens), 1, tokens, 1),
		LabelMin: Of(minimum, 1, tokens, 1), Channels: Of(chosen, 1, 2),
	}
	must(t, s.IndexUpdate(IndexUpdateArgs{K: seq.kv().K, SeqLens: Of(seq.lens), Index: index}, 0))
	if labels[5] != 0x0f || minimum[5] != 0 { // channel 0, the largest, in the low bits; channel 1, zero, above
		t.Error(labels, minimum)
	}

	ids, count := make([]int32, 3), make([]int32, 1)
	must(t, s.SelectTokens(SelectTokensArgs{
		BlockSize: block, K: 3, Q: seq.queries(), Index: index, SeqLens: Of(seq.lens),
		Candidates: list([]int32{0, 2}, []int32{2}), Selected: list(ids, count),
	}, 0))
	equal(t, "tokens", ids, 1, 4, 5)
}

func TestTopK(t *testing.T) {
	s := cpuSession(t)
	ids, counts, values := []int32{-1, -1, -1}, make([]int32, 1), make([]float32, 3)
	args := TopKArgs{
		K: 3, Scores: Of([]float32{1, 5, 2, 5, 4}, 1, 5), IDs: Of(ids, 1, 3), Counts: Of(counts), Values: Of(values, 1, 3),
	}
	must(t, s.TopK(args, 0))
	equal(t, "ascending", ids, 1, 3, 4)
	args.Order, args.Lens = TopKBestFirst, Of([]int32{3})
	must(t, s.TopK(args, 0))
	equal(t, "best first", ids, 1, 2, 0)
	equal(t, "values", values, 5, 2, 1)
	equal(t, "counts", counts, 3)
}

func TestGather(t *testing.T) {
	s := cpuSession(t)
	target := []int32{-1, -1, -1, -1}
	must(t, s.GatherBlocks(GatherBlocksArgs{
		Source: Of([]int32{0, 1, 2, 3, 4, 5}, 3, 2), Target: Of(target, 2, 2),
		SourceIDs: Of([]int32{2, -1, 0}), TargetIDs: Of([]int32{0, 1, 1}),
	}, 0))
	equal(t, "target", target, 4, 5, 0, 1)
}
