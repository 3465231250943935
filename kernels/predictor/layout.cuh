// Where the fields of src/decode/predictor/cuda.rs lie: `make kernels` writes this, a test compares it.
#pragma once

#include "common/layout.cuh"

VWD_CONSTANT(THREADS, 256)

VWD_CONSTANT(PREDICT_THREADS, 512)
VWD_CONSTANT(CtaTopK<PREDICT_THREADS>::MOST, 8192)

VWD_SIZE(Rows, 32)
VWD_FIELD(Rows, data, 0, 8)
VWD_FIELD(Rows, seq, 8, 8)
VWD_FIELD(Rows, head, 16, 8)
VWD_FIELD(Rows, block, 24, 8)

VWD_SIZE(State, 80)
VWD_FIELD(State, level, 0, 32)
VWD_FIELD(State, trend, 32, 32)
VWD_FIELD(State, sequences, 64, 4)
VWD_FIELD(State, kv_heads, 68, 4)
VWD_FIELD(State, max_blocks, 72, 4)

VWD_SIZE(ResetParams, 104)
VWD_FIELD(ResetParams, state, 0, 80)
VWD_FIELD(ResetParams, rows, 80, 8)
VWD_FIELD(ResetParams, rows_entry, 88, 8)
VWD_FIELD(ResetParams, listed, 96, 8)

VWD_SIZE(Blocks, 40)
VWD_FIELD(Blocks, seq_lens, 0, 8)
VWD_FIELD(Blocks, sequences, 8, 8)
VWD_FIELD(Blocks, seq_lens_seq, 16, 8)
VWD_FIELD(Blocks, sequences_seq, 24, 8)
VWD_FIELD(Blocks, size, 32, 4)

VWD_SIZE(UpdateParams, 168)
VWD_FIELD(UpdateParams, state, 0, 80)
VWD_FIELD(UpdateParams, blocks, 80, 40)
VWD_FIELD(UpdateParams, scores, 120, 32)
VWD_FIELD(UpdateParams, slices, 152, 4)
VWD_FIELD(UpdateParams, alpha, 156, 4)
VWD_FIELD(UpdateParams, beta, 160, 4)

VWD_SIZE(PredictParams, 256)
VWD_FIELD(PredictParams, state, 0, 80)
VWD_FIELD(PredictParams, blocks, 80, 40)
VWD_FIELD(PredictParams, scores, 120, 32)
VWD_FIELD(PredictParams, budgets, 152, 8)
VWD_FIELD(PredictParams, ids, 160, 8)
VWD_FIELD(PredictParams, counts, 168, 8)
VWD_FIELD(PredictParams, budgets_seq, 176, 8)
VWD_FIELD(PredictParams, ids_seq, 184, 8)
VWD_FIELD(PredictParams, ids_head, 192, 8)
VWD_FIELD(PredictParams, ids_entry, 200, 8)
VWD_FIELD(PredictParams, counts_seq, 208, 8)
VWD_FIELD(PredictParams, counts_head, 216, 8)
VWD_FIELD(PredictParams, ratio, 224, 8)
VWD_FIELD(PredictParams, k, 232, 4)
VWD_FIELD(PredictParams, cap, 236, 4)
VWD_FIELD(PredictParams, init, 240, 4)
VWD_FIELD(PredictParams, local, 244, 4)
VWD_FIELD(PredictParams, gamma, 248, 4)
VWD_FIELD(PredictParams, adjacent, 252, 4)
