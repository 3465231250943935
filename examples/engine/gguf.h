/* Reader for GGUF v3 model files: typed metadata and tensors, all of it pointing into the mapped file. */
#ifndef ENGINE_GGUF_H
#define ENGINE_GGUF_H

#include <stddef.h>
#include <stdint.h>

/* Tensor element types, numbered as in the file. The others are refused by gguf_row_bytes. */
enum { GGUF_F32 = 0, GGUF_F16 = 1, GGUF_Q4_0 = 2, GGUF_Q4_1 = 3, GGUF_Q8_0 = 8 };

typedef struct {
  const char *data; /* not NUL-terminated */
  size_t length;
} gguf_string;

typedef struct {
  gguf_string name;
  uint32_t type;
  int64_t rows, cols; /* cols is the contiguous dimension */
  const void *data;
} gguf_tensor;

typedef struct gguf gguf;

/* Both print the reason to stderr and return NULL on failure. gguf_parse borrows `bytes`, which must outlive the
 * result. */
gguf *gguf_open(const char *path);
gguf *gguf_parse(const void *bytes, size_t size);
void gguf_close(gguf *file);

/* Metadata by key. A missing key or another type gives the fallback (or count 0). */
int64_t gguf_int(const gguf *file, const char *key, int64_t fallback);
double gguf_float(const gguf *file, const char *key, double fallback);
gguf_string gguf_text(const gguf *file, const char *key);
size_t gguf_strings(const gguf *file, const char *key, gguf_string **out); /* the caller frees *out */
size_t gguf_ints(const gguf *file, const char *key, int32_t **out);

/* NULL where there is no such tensor. */
const gguf_tensor *gguf_find(const gguf *file, const char *name);

/* Bytes of one row of `cols` elements; 0 for a type this engine does not read. */
size_t gguf_row_bytes(uint32_t type, int64_t cols);

#endif
