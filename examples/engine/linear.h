/* y = x·Wᵀ for quantized weights. Every output is one dot product summed in one fixed order, so a token's result has
 * the same bits whether it is computed alone, with eight drafts, or in a chunk of the prompt, and on any number of
 * threads. */
#ifndef ENGINE_LINEAR_H
#define ENGINE_LINEAR_H

#include "gguf.h"
#include "pool.h"

typedef struct {
  const gguf_tensor *weight; /* [rows, cols] */
  float *y;                  /* [n, rows], out */
} linear_target;

/* Applies up to three weights with the same number of columns to x [n, cols]. */
void linear(pool *p, const linear_target *targets, int count, const float *x, int n);

/* One row of a weight as floats. */
void dequantize_row(const gguf_tensor *weight, int64_t row, float *out);

float half_to_float(uint16_t half);
uint16_t float_to_half(float value); /* rounds to nearest, ties to even */

#endif
