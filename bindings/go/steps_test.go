package vanward

import (
	"errors"
	"math"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
)

// Caches, decoders, and what predicts for them: every call once, on the numbers of calls_test.go.

func TestKvCache(t *testing.T) {
	s := cpuSession(t)
	options := KvCacheOptions{
		Layers: 1, KVHeads: 1, BlockSize: 2, KeyDim: 16, ValueDim: 16, DType: F32,
		MaxSequences: 2, MaxBlocks: 4, HostBlocks: 4, Slots: 4,
	}
	cache, err := s.NewKvCache(options)
	must(t, err)
	defer cache.Close()
	sequence, err := cache.Add(0)
	must(t, err)
	must(t, cache.Extend(sequence, 8, 0))
	rows := make([]float32, 8*16)
	for n := range rows {
		rows[n] = float32(n / 16)
	}
	sequences := Of([]int32{int32(sequence)})
	must(t, cache.Append(KvCacheAppendArgs{
		Sequences: sequences, Begin: Of([]int32{0}), K: Of(rows, 1, 8, 1, 16), V: Of(rows, 1, 8, 1, 16),
	}, 0))

	wanted, missed := list([]int32{0, 3}, []int32{2}), make([]int32, 1)
	wanted.Slots = Of(make([]int32, 2), 1, 1, 2)
	must(t, cache.Resolve(KvCacheResolveArgs{Sequences: sequences, Wanted: wanted, MissedCounts: Of(missed, 1, 1)}, 0))
	equal(t, "missed", missed, 1) // the last block is in the tail
	must(t, cache.Fetch(0, 0))
	must(t, cache.Wait(0, 0))
	view, err := cache.View(0)
	must(t, err)
	out := make([]float32, 16)
	must(t, s.Attention(AttentionArgs{
		BlockSize: 2, KV: PagedKV{K: view.K, V: view.V, SeqLens: Of([]int32{8})}, Q: Of(make([]float32, 16), 1, 1, 16),
		List: wanted, Out: Of(out, 1, 1, 16),
	}, 0))
	equal(t, "mean of the values", out[:1], 3.5)

	fork, err := cache.Fork(sequence, 6, 0)
	must(t, err)
	must(t, cache.Truncate(sequence, 2, 0))
	info, err := cache.Info()
	must(t, err)
	sizes, err := options.Capacity()
	must(t, err)
	if info.Sequences != 2 || info.BlocksInUse != 3 || info.Misses != 1 || info.HostBytes != sizes.HostBytes {
		t.Error(info, sizes)
	}
	of, err := cache.LayerInfo(0)
	must(t, err)
	if of.Misses != 1 || of.HostBytes != info.HostBytes {
		t.Error(of, info)
	}
	shares, err := ShareSlots(KvCacheShareArgs{Least: 1, Total: 300, Slots: []int{100, 100}, Misses: []uint64{399, 99}})
	must(t, err)
	equal(t, "shares", shares, 200, 100)
	twoLayers := options
	twoLayers.Layers, twoLayers.Slots, twoLayers.LayerSlots = 2, 0, shares
	shared, err := s.NewKvCache(twoLayers)
	must(t, err)
	defer shared.Close()
	first, err := shared.View(0)
	must(t, err)
	second, err := shared.View(1)
	must(t, err)
	if n := first.K.shape[0] - second.K.shape[0]; n != 100 {
		t.Error(n)
	}
	twoLayers.Layers = 3
	if _, err := twoLayers.Capacity(); err == nil || !strings.Contains(err.Error(), "layer_slots: 2 numbers") {
		t.Error(err)
	}
	coded := KvCacheOptions{
		Layers: 1, KVHeads: 1, BlockSize: 16, KeyDim: 64, ValueDim: 64, DType: F32, MaxSequences: 1, MaxBlocks: 4, HostBlocks: 4, Slots: 4,
		Coding: KvCacheInt4, Weights: make([]float32, 64),
	}
	inInt4, err := s.NewKvCache(coded)
	must(t, err)
	defer inInt4.Close()
	view, err = inInt4.View(0)
	must(t, err)
	if view.Int4 == nil || view.Int4.BlockSize != 16 || view.Int4.Weights.shape[1] != 64 || view.K.shape[0] != 4 {
		t.Error(view)
	}
	sizes, err = coded.Capacity()
	must(t, err)
	decoded := coded
	decoded.SlotCoding = KvCacheSlotsDecoded
	larger, err := decoded.Capacity()
	must(t, err)
	if sizes.SlotBytes != sizes.RunBytes || larger.RunBytes != sizes.RunBytes || larger.SlotBytes != 16*128*4 {
		t.Error(sizes, larger)
	}
	inSlots, err := s.NewKvCache(decoded)
	must(t, err)
	defer inSlots.Close()
	view, err = inSlots.View(0)
	must(t, err)
	if view.Int4 != nil || view.K.shape[0] != 8 {
		t.Error(view)
	}
	decoded.Coding, decoded.Weights = KvCacheExact, nil
	if _, err := decoded.Capacity(); err == nil || !strings.Contains(err.Error(), "slot_coding") {
		t.Error(err)
	}
	coded.Weights = coded.Weights[1:]
	if _, err := coded.Capacity(); err == nil || !strings.Contains(err.Error(), "weights: 63 numbers") {
		t.Error(err)
	}
	must(t, cache.Free(fork, 0))
	if err := cache.Free(fork, 0); !errors.Is(err, ErrInvalidArgument) {
		t.Error(err)
	}
}

// What is handed to NewDecoder and Begin alone is there when Attend reads it.
func TestDecoderKeepsTheTensorsOfItsStep(t *testing.T) {
	const rows, tokens = 64, 8
	s := cpuSession(t)
	filled := func(n int, value float32) []float32 {
		values := make([]float32, n)
		for i := range values {
			values[i] = value
		}
		return values
	}
	begun := func() *Decoder {
		decoder, err := s.NewDecoder(DecoderOptions{
			Layers: 1, MaxRows: rows, QueryHeads: 1, KVHeads: 1, KeyDim: 16, ValueDim: 16, DType: F32, PageSize: tokens, Pages: rows, BlockSize: tokens,
			Policy: DecoderPolicy{Method: SelectAxis, K: 1}, AxisWeights: Of(filled(16, 1), 1, 1, 16), AxisCentre: Of(filled(16, 0), 1, 1, 16),
		})
		must(t, err)
		lens, table := make([]int32, rows), make([]int32, rows)
		for i := range lens {
			lens[i], table[i] = tokens, int32(i)
		}
		must(t, decoder.Begin(DecoderStep{SeqLens: Of(lens), PageTable: Of(table, rows, 1)}, 0))
		return decoder
	}
	decoder := begun()
	defer decoder.Close()
	runtime.GC()
	runtime.GC()
	var others [][]int32
	for range 4096 {
		others = append(others, make([]int32, rows))
	}
	k, v := filled(rows*tokens*16, 1), filled(rows*tokens*16, 3)
	q, out := filled(rows*16, 1), make([]float32, rows*16)
	must(t, decoder.Attend(DecoderAttendArgs{
		K: Of(k, rows, tokens, 1, 16), V: Of(v, rows, tokens, 1, 16), Q: Of(q, rows, 1, 16), Out: Of(out, rows, 1, 16),
	}, 0))
	for _, x := range out {
		if x != 3 {
			t.Fatalf("%v; expected the mean of threes", x)
		}
	}
	runtime.KeepAlive(others)
}

func TestDecoderOnCache(t *testing.T) {
	const tokens = 40
	s := cpuSession(t)
	for _, strategy := range []Strategy{StrategySerial, StrategyVanward} {
		cache, err := s.NewKvCache(KvCacheOptions{
			Layers: 1, KVHeads: 1, BlockSize: 8, KeyDim: 16, ValueDim: 16, DType: F32,
			MaxSequences: 2, MaxBlocks: 5, HostBlocks: 5, Slots: 14,
		})
		must(t, err)
		decoder, err := s.NewDecoderOnCache(DecoderOptions{
			Layers: 1, MaxRows: 1, QueryHeads: 1, KVHeads: 1, KeyDim: 16, ValueDim: 16, DType: F32, BlockSize: 8,
			Policy: DecoderPolicy{Method: SelectMinMax, K: 5, Strategy: strategy},
		}, cache)
		must(t, err)
		sequence, err := cache.Add(0)
		must(t, err)
		must(t, cache.Extend(sequence, tokens, 0))

		lens, sequences := make([]int32, 1), []int32{int32(sequence)}
		for token := range tokens {
			if token == 16 { // A fork takes the whole blocks out of the tail.
				fork, err := cache.Fork(sequence, 16, 0)
				must(t, err)
				must(t, cache.Free(fork, 0))
			}
			lens[0] = int32(token + 1)
			must(t, decoder.Begin(DecoderStep{SeqLens: Of(lens), Sequences: Of(sequences)}, 0))
			value, zeros, out := make([]float32, 16), make([]float32, 16), make([]float32, 16)
			for c := range value {
				value[c] = float32(token)
			}
			must(t, decoder.Attend(DecoderAttendArgs{
				NewK: Of(zeros, 1, 1, 16), NewV: Of(value, 1, 1, 16), Q: Of(zeros, 1, 1, 16), Out: Of(out, 1, 1, 16),
			}, 0))
			// Every block is in the list, and every score alike: the mean of the values.
			near(t, "mean of the values", out, float64(token)/2, 1e-4)
		}
		info, err := cache.Info()
		must(t, err)
		if info.Misses == 0 {
			t.Error("nothing was fetched")
		}
		must(t, cache.Close()) // the decoder keeps it alive
		must(t, decoder.Close())
	}
}

func TestPredictUpdateCalibrate(t *testing.T) {
	s := cpuSession(t)
	level, trend := []float32{9, 9, 9}, []float32{9, 9, 9}
	state := PredictorState{Level: Of(level, 1, 1, 3), Trend: Of(trend, 1, 1, 3)}
	must(t, s.PredictorReset(PredictorResetArgs{State: state}, 0))
	equal(t, "level", level, float32(math.Inf(-1)), float32(math.Inf(-1)), float32(math.Inf(-1)))

	lens := Of([]int32{tokens})
	must(t, s.PredictorUpdate(PredictorUpdateArgs{
		BlockSize: block, Holt: Holt{Alpha: 1}, State: state, SeqLens: lens, Scores: Of([]float32{3, 1, 2}, 1, 1, 3),
	}, 0))
	equal(t, "level", level, 3, 1, 2)

	ids, count := make([]int32, 2), make([]int32, 1)
	must(t, s.PredictorPredict(PredictorPredictArgs{
		BlockSize: block, K: 2, State: state, SeqLens: lens, Predicted: list(ids, count),
	}, 0))
	equal(t, "predicted", ids, 0, 2)

	// The same scores at each of three steps: what was best stays best.
	holt, rate, err := s.PredictorCalibrate(PredictorCalibrateArgs{
		K: 2, Grid: []Holt{{Alpha: 1}, {Alpha: 0.5}},
		Scores: Of([]float32{3, 1, 2, 3, 1, 2, 3, 1, 2}, 1, 3, 1, 3), BlockCounts: Of([]int32{3, 3, 3}, 1, 3),
	})
	must(t, err)
	if holt != (Holt{Alpha: 1}) || math.Abs(rate-1) > 1e-6 {
		t.Error(holt, rate)
	}
}

func TestForecast(t *testing.T) {
	// x_i is the i-th unit vector and q_i is i + 1 throughout; a linear map fits that up to the ridge of one in a
	// thousand.
	const n = 16
	x, q := make([]float32, n*n), make([]float32, n*n)
	for i := range n {
		x[i*n+i] = 1
		for c := range n {
			q[i*n+c] = float32(i + 1)
		}
	}
	s := cpuSession(t)
	fitted, err := s.NewForecast(ForecastOptions{Layers: 1, InputDim: n, QHeads: 1, HeadDim: n})
	must(t, err)
	defer fitted.Close()
	must(t, fitted.Accumulate(AccumulateArgs{X: Of(x, n, n), Q: Of(q, n, 1, n)}))
	must(t, fitted.Solve(0))
	if info, err := fitted.Info(); err != nil || info.Solved != 1 || info.InputDim != n {
		t.Error(info, err)
	}
	path := filepath.Join(t.TempDir(), "maps.safetensors")
	must(t, fitted.Save(path))
	loaded, err := s.LoadForecast(path)
	must(t, err)
	defer loaded.Close()

	for _, f := range []*Forecast{fitted, loaded} {
		found := make([]float32, n*n)
		must(t, f.Project(ProjectArgs{
			X: Of(x, n, n), Positions: Of(make([]int32, n)), Q: Of(found, n, 1, n), // position 0 does not rotate
		}, 0))
		for i := range found {
			near(t, "q", found[i:i+1], float64(q[i]), 0.02) // 1e-3 of 16, and rounding
		}
	}
}

func TestBudget(t *testing.T) {
	s := cpuSession(t)
	options := BudgetOptions{
		QueryHeads: 2, KVHeads: 1, KeyDim: 16, ValueDim: 16, DType: F32, PageSize: 8, BlockSize: 8, Method: SelectMinMax, K: 2,
		MaxDraft: 2, Contexts: []int{8, 32}, Batches: []int{1}, Ratios: []float32{1, 1.5}, Samples: 1, LimitBytes: 1 << 18,
	}
	measured, err := s.NewBudget(options, 0)
	must(t, err)
	defer measured.Close()
	path := filepath.Join(t.TempDir(), "budget.safetensors")
	must(t, measured.Save(path))
	loaded, err := s.LoadBudget(options, path)
	must(t, err)
	defer loaded.Close()
	question := BudgetQuestion{Context: 20, Acceptance: 0.9, CoverageRatios: []float32{1.5}, Coverages: []float32{0.9}}
	a, err := measured.Ask(question)
	must(t, err)
	b, err := loaded.Ask(question)
	must(t, err)
	if a != b || a.DenseUs <= 0 || a.PrrGain <= 0 || a.SelfGain <= 0 || a.Extrapolated {
		t.Error(a, b)
	}
	// A decoder asks it itself: by the step's longest row, which the table bounds.
	decoderOptions := DecoderOptions{
		Layers: 2, MaxRows: 1, QueryHeads: 2, KVHeads: 1, KeyDim: 16, ValueDim: 16, DType: F32, PageSize: 8, Pages: 4, BlockSize: 8,
		Policy: DecoderPolicy{Method: SelectMinMax, K: 2, Strategy: StrategyPRR}, Budget: loaded, Coverage: 0.5,
	}
	decoder, err := s.NewDecoder(decoderOptions)
	must(t, err)
	defer decoder.Close()
	must(t, decoder.Begin(DecoderStep{SeqLens: Of([]int32{20}, 1), PageTable: Of([]int32{0, 1, 2, 3}, 1, 4), Longest: 20}, 0))
	info, err := decoder.Info()
	must(t, err)
	if info.FallbackLayers > 2 || info.Fallbacks != info.FallbackLayers {
		t.Error(info.FallbackLayers, info.Fallbacks)
	}
	decoderOptions.Policy.K = 3
	_, err = s.NewDecoder(decoderOptions)
	wantInvalid(t, err, "options.policy.k: 3; expected 2, with which options.budget was measured")
	options.K = 3
	_, err = s.LoadBudget(options, path)
	wantInvalid(t, err, "options.k: 3; expected 2, with which")
	options.Contexts = make([]int, 17)
	_, err = s.NewBudget(options, 0)
	wantInvalid(t, err, "options.contexts: 17 values; expected at most 16")
}
