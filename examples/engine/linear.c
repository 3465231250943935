#include "linear.h"

#include <assert.h>
#include <string.h>

#if defined(__x86_64__) && defined(__GNUC__)
#define HAVE_AVX2 1
#include <immintrin.h>
#define AVX2 __attribute__((target("avx2,fma,f16c")))
#endif

#if defined(__GNUC__)
#define INLINE static inline __attribute__((always_inline))
#else
#define INLINE static inline
#endif

/* Rows unpacked at a time: eight rows of 1536 floats stay in the second-level cache. */
enum { TILE = 8, BLOCK = 32, MAX_COLS = 8192, MAX_TARGETS = 3 };

float half_to_float(uint16_t half) {
  uint32_t sign = (uint32_t)(half & 0x8000) << 16, rest = half & 0x7FFF, bits;
  float value;
  if (rest >= 0x7C00) {
    bits = sign | 0x7F800000 | (rest & 0x3FF) << 13;
  } else if (rest >= 0x400) {
    bits = sign | ((rest << 13) + 0x38000000);
  } else { /* subnormal: rest · 2⁻²⁴ */
    value = (float)rest * 0x1p-24f;
    memcpy(&bits, &value, 4);
    bits |= sign;
  }
  memcpy(&value, &bits, 4);
  return value;
}

uint16_t float_to_half(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  uint32_t sign = bits >> 16 & 0x8000, magnitude = bits & 0x7FFFFFFF;
  if (magnitude > 0x7F800000) return (uint16_t)(sign | 0x7E00);
  if (magnitude >= 0x477FF000) return (uint16_t)(sign | 0x7C00); /* rounds past 65504 */
  if (magnitude < 0x38800000) { /* adding ½ leaves the subnormal in the low bits, rounded */
    float rounded;
    memcpy(&rounded, &magnitude, 4);
    rounded += 0.5f;
    memcpy(&bits, &rounded, 4);
    return (uint16_t)(sign | (bits - 0x3F000000));
  }
  magnitude += 0xFFF + (magnitude >> 13 & 1) - 0x38000000;
  return (uint16_t)(sign | magnitude >> 13);
}

static uint16_t read_u16(const uint8_t *from) { return (uint16_t)(from[0] | from[1] << 8); }

INLINE void unpack_row(uint32_t type, const uint8_t *restrict from, int64_t cols, float *restrict out) {
  if (type == GGUF_F32) {
    memcpy(out, from, (size_t)cols * sizeof *out);
  } else if (type == GGUF_F16) {
    for (int64_t i = 0; i < cols; i++) out[i] = half_to_float(read_u16(from + 2 * i));
  } else if (type == GGUF_Q8_0) { /* scale, 32 bytes */
    for (int64_t b = 0; b < cols / BLOCK; b++, from += 34, out += BLOCK) {
      float scale = half_to_float(read_u16(from));
      for (int i = 0; i < BLOCK; i++) out[i] = scale * (float)(int8_t)from[2 + i];
    }
  } else { /* scale, (minimum,) 16 bytes: low nibbles are the first half of the block */
    int head = type == GGUF_Q4_1 ? 4 : 2;
    for (int64_t b = 0; b < cols / BLOCK; b++, from += head + BLOCK / 2, out += BLOCK) {
      float scale = half_to_float(read_u16(from));
      float minimum = type == GGUF_Q4_1 ? half_to_float(read_u16(from + 2)) : -8.0f * scale;
      for (int i = 0; i < BLOCK / 2; i++) out[i] = scale * (float)(from[head + i] & 15) + minimum;
      for (int i = 0; i < BLOCK / 2; i++) out[i + BLOCK / 2] = scale * (float)(from[head + i] >> 4) + minimum;
    }
  }
}

static const uint8_t *row_at(const gguf_tensor *w, int64_t row) {
  return (const uint8_t *)w->data + (size_t)row * gguf_row_bytes(w->type, w->cols);
}

void dequantize_row(const gguf_tensor *w, int64_t row, float *out) {
  unpack_row(w->type, row_at(w, row), w->cols, out);
}

#if HAVE_AVX2
AVX2 INLINE __m256 half_avx2(const uint8_t *from) { /* in all lanes */
  return _mm256_broadcastss_ps(_mm_cvtph_ps(_mm_cvtsi32_si128(read_u16(from))));
}

/* A block of one of the types that most weights have, as 4 · 8 floats. */
AVX2 INLINE void unpack_block_avx2(uint32_t type, const uint8_t *from, __m256 out[4]) {
  const __m256 scale = half_avx2(from);
  if (type == GGUF_Q8_0) {
    for (int i = 0; i < 4; i++) {
      const __m128i bytes = _mm_loadl_epi64((const __m128i *)(const void *)(from + 2 + 8 * i));
      out[i] = _mm256_mul_ps(scale, _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)));
    }
    return;
  }
  const __m128i low = _mm_set1_epi8(15), packed = _mm_loadu_si128((const __m128i *)(const void *)(from + 4));
  const __m128i levels[2] = {_mm_and_si128(packed, low), _mm_and_si128(_mm_srli_epi16(packed, 4), low)};
  const __m256 minimum = half_avx2(from + 2);
  for (int i = 0; i < 4; i++) {
    const __m128i eight = i % 2 ? _mm_srli_si128(levels[i / 2], 8) : levels[i / 2];
    out[i] = _mm256_fmadd_ps(scale, _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(eight)), minimum);
  }
}

AVX2 INLINE void unpack_row_avx2(uint32_t type, const uint8_t *from, int64_t cols, float *out) {
  const int64_t bytes = type == GGUF_Q4_1 ? 20 : 34;
  for (int64_t b = 0; b < cols / BLOCK; b++, from += bytes, out += BLOCK) {
    __m256 w[4];
    unpack_block_avx2(type, from, w);
    for (int i = 0; i < 4; i++) _mm256_storeu_ps(out + 8 * i, w[i]);
  }
}

/* The order of summation, in both versions: eight lanes over the columns, then (0+4)+(2+6), (1+5)+(3+7), their sum. */
AVX2 INLINE float sum_avx2(__m256 s) {
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
  __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

/* `rows` weights against `tokens` inputs at once; these counts change the speed, not the sums. */
AVX2 INLINE void dots_avx2(const float *w, const float *x, int64_t cols, float *y, int64_t y_stride, int rows,
                           int tokens) {
  __m256 sum[TILE * 3];
  for (int i = 0; i < rows * tokens; i++) sum[i] = _mm256_setzero_ps();
  for (int64_t c = 0; c < cols; c += 8) {
    __m256 in[3];
    for (int t = 0; t < tokens; t++) in[t] = _mm256_loadu_ps(x + t * cols + c);
    for (int r = 0; r < rows; r++) {
      __m256 weight = _mm256_loadu_ps(w + r * cols + c);
      for (int t = 0; t < tokens; t++) sum[r * tokens + t] = _mm256_fmadd_ps(weight, in[t], sum[r * tokens + t]);
    }
  }
  for (int r = 0; r < rows; r++) {
    for (int t = 0; t < tokens; t++) y[t * y_stride + r] = sum_avx2(sum[r * tokens + t]);
  }
}

/* A row tile against all tokens: four rows by three tokens fill the registers; a lone token takes eight rows. */
AVX2 static void tile_avx2(const gguf_tensor *weight, int64_t row, int rows, float *w, const float *x, int n,
                           float *y) {
  int64_t cols = weight->cols, stride = weight->rows;
  const uint32_t type = weight->type;
  for (int r = 0; r < rows; r++) {
    if (type == GGUF_Q4_1) unpack_row_avx2(GGUF_Q4_1, row_at(weight, row + r), cols, w + r * cols);
    else if (type == GGUF_Q8_0) unpack_row_avx2(GGUF_Q8_0, row_at(weight, row + r), cols, w + r * cols);
    else unpack_row(type, row_at(weight, row + r), cols, w + r * cols);
  }
  int t = 0, r;
  for (; t + 3 <= n; t += 3) {
    for (r = 0; r + 4 <= rows; r += 4)
      dots_avx2(w + r * cols, x + t * cols, cols, y + t * stride + row + r, stride, 4, 3);
    for (; r < rows; r++) dots_avx2(w + r * cols, x + t * cols, cols, y + t * stride + row + r, stride, 1, 3);
  }
  for (; t < n; t++) {
    for (r = 0; r + 8 <= rows; r += 8)
      dots_avx2(w + r * cols, x + t * cols, cols, y + t * stride + row + r, stride, 8, 1);
    for (; r < rows; r++) dots_avx2(w + r * cols, x + t * cols, cols, y + t * stride + row + r, stride, 1, 1);
  }
}
#endif

static void tile_portable(const gguf_tensor *weight, int64_t row, int rows, float *w, const float *x, int n, float *y) {
  int64_t cols = weight->cols;
  for (int r = 0; r < rows; r++) {
    unpack_row(weight->type, row_at(weight, row + r), cols, w);
    for (int t = 0; t < n; t++) {
      float s[8] = {0};
      for (int64_t c = 0; c < cols; c += 8)
        for (int i = 0; i < 8; i++) s[i] += w[c + i] * x[t * cols + c + i];
      y[t * weight->rows + row + r] = ((s[0] + s[4]) + (s[2] + s[6])) + ((s[1] + s[5]) + (s[3] + s[7]));
    }
  }
}

typedef struct {
  const linear_target *targets;
  int count, n;
  const float *x;
} job;

static int tiles_of(const gguf_tensor *w) { return (int)((w->rows + TILE - 1) / TILE); }

static void run_tiles(void *context, int begin, int end) {
  const job *j = context;
  _Alignas(32) float w[TILE * MAX_COLS];
  for (int i = 0; i < j->count; i++) {
    const gguf_tensor *weight = j->targets[i].weight;
    int tiles = tiles_of(weight), first = begin < 0 ? 0 : begin, last = end < tiles ? end : tiles;
    for (int tile = first; tile < last; tile++) {
      int64_t row = (int64_t)tile * TILE;
      int rows = (int)(weight->rows - row < TILE ? weight->rows - row : TILE);
#if HAVE_AVX2
      if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
        tile_avx2(weight, row, rows, w, j->x, j->n, j->targets[i].y);
        continue;
      }
#endif
      tile_portable(weight, row, rows, w, j->x, j->n, j->targets[i].y);
    }
    begin -= tiles;
    end -= tiles;
  }
}

void linear(pool *p, const linear_target *targets, int count, const float *x, int n) {
  job j = {targets, count, n, x};
  int tiles = 0;
  for (int i = 0; i < count; i++) {
    assert(targets[i].weight->cols == targets[0].weight->cols && targets[i].weight->cols <= MAX_COLS);
    tiles += tiles_of(targets[i].weight);
  }
  pool_run(p, tiles, run_tiles, &j);
}
