/* What the examples share: views of contiguous arrays, and checks that end the program. C11, and valid C++17. */
#ifndef VANWARD_EXAMPLES_COMMON_H
#define VANWARD_EXAMPLES_COMMON_H

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <vanward.h>

/* Ends the program unless the condition holds. */
#define CHECK(condition) \
  do { \
    if (!(condition)) { \
      fprintf(stderr, "%s:%d: does not hold: %s\n", __FILE__, __LINE__, #condition); \
      exit(1); \
    } \
  } while (0)

/* Ends the program, with the library's words, unless the call succeeds. */
#define CALL(call) \
  do { \
    if ((call) != VWD_OK) { \
      char words_[512]; \
      vwd_last_error(words_, sizeof words_); \
      fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, words_); \
      exit(1); \
    } \
  } while (0)

/* DLPack's codes of element types. */
enum { SIGNED = 0, UNSIGNED = 1, FLOAT = 2 };

/* A row-major array in host memory; extents are ints: array(codes, UNSIGNED, 8, 2, T, R) is a uint8 tensor [T, R]. */
static inline vwd_tensor array_of(void *data, int code, int bits, int ndim, va_list extents) {
  vwd_tensor t = VWD_TENSOR_INIT;
  t.data = data;
  t.device_type = 1; /* kDLCPU */
  t.dtype_code = (uint8_t)code;
  t.dtype_bits = (uint8_t)bits;
  t.ndim = ndim;
  for (int d = 0; d < ndim; d++) t.shape[d] = va_arg(extents, int);
  int64_t stride = 1;
  for (int d = ndim - 1; d >= 0; d--) {
    t.strides[d] = stride;
    stride *= t.shape[d];
  }
  return t;
}

static inline vwd_tensor array(void *data, int code, int bits, int ndim, ...) {
  va_list extents;
  va_start(extents, ndim);
  vwd_tensor t = array_of(data, code, bits, ndim, extents);
  va_end(extents);
  return t;
}

/* i32(accepted, 1, B) is an int32 tensor [B]. */
static inline vwd_tensor i32(int32_t *data, int ndim, ...) {
  va_list extents;
  va_start(extents, ndim);
  vwd_tensor t = array_of(data, SIGNED, 32, ndim, extents);
  va_end(extents);
  return t;
}

/* f32(k, 3, T, H, D) is a float32 tensor [T, H, D]. */
static inline vwd_tensor f32(float *data, int ndim, ...) {
  va_list extents;
  va_start(extents, ndim);
  vwd_tensor t = array_of(data, FLOAT, 32, ndim, extents);
  va_end(extents);
  return t;
}

static inline float *floats(size_t count) {
  float *array = (float *)calloc(count, sizeof(float));
  CHECK(array != NULL);
  return array;
}

static inline int32_t *ints(size_t count) {
  int32_t *array = (int32_t *)calloc(count, sizeof(int32_t));
  CHECK(array != NULL);
  return array;
}

/* Uniform in −1 … 1, the same on every machine (a linear congruential generator; Knuth's MMIX constants). */
static inline float uniform(uint64_t *state) {
  *state = *state * 6364136223846793005u + 1442695040888963407u;
  return (float)(int32_t)(*state >> 32) / 2147483648.0f;
}

/* |a − b| / |b| */
static inline double relative_error(const float *a, const float *b, size_t count) {
  double difference = 0, norm = 0;
  for (size_t i = 0; i < count; i++) {
    difference += ((double)a[i] - b[i]) * ((double)a[i] - b[i]);
    norm += (double)b[i] * b[i];
  }
  return sqrt(difference / norm);
}

static inline vwd_session *cpu_session(void) {
  vwd_session_options options = VWD_SESSION_OPTIONS_INIT;
  options.device = VWD_DEVICE_CPU;
  vwd_session *session = NULL;
  CALL(vwd_session_create(&options, &session));
  return session;
}

#endif
