#define _POSIX_C_SOURCE 200809L
#include "gguf.h"

#include <fcntl.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64, VALUE_TYPES };
static const size_t value_bytes[VALUE_TYPES] = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};

typedef struct {
  gguf_string key;
  uint32_t type;  /* of the value, or of the elements of an array */
  uint64_t count; /* 1 for a scalar */
  const uint8_t *values;
} entry;

struct gguf {
  void *mapping; /* NULL when the bytes are borrowed */
  const uint8_t *end;
  size_t size;
  size_t entry_count, tensor_count;
  entry *entries;
  gguf_tensor *tensors;
};

/* A cursor that fails once and stays failed, so that a truncated file is one check at the end. */
typedef struct {
  const uint8_t *at, *end;
  bool failed;
} cursor;

static const uint8_t *take(cursor *c, uint64_t bytes) {
  if (c->failed || bytes > (uint64_t)(c->end - c->at)) {
    c->failed = true;
    return NULL;
  }
  const uint8_t *from = c->at;
  c->at += bytes;
  return from;
}

static uint64_t take_uint(cursor *c, size_t bytes) {
  uint64_t value = 0;
  const uint8_t *from = take(c, bytes);
  for (size_t i = 0; from && i < bytes; i++) value |= (uint64_t)from[i] << (8 * i);
  return value;
}

static gguf_string take_string(cursor *c) {
  uint64_t length = take_uint(c, 8);
  const uint8_t *text = take(c, length);
  return text ? (gguf_string){(const char *)text, (size_t)length} : (gguf_string){"", 0};
}

static void skip_values(cursor *c, uint32_t type, uint64_t count) {
  if (type == STRING) {
    for (uint64_t i = 0; i < count && !c->failed; i++) take_string(c);
  } else if (type < VALUE_TYPES && value_bytes[type] && count <= (uint64_t)(c->end - c->at)) {
    take(c, count * value_bytes[type]);
  } else {
    c->failed = true; /* an unknown type, an array of arrays, or an absurd count */
  }
}

static entry take_entry(cursor *c) {
  entry e = {.key = take_string(c), .type = (uint32_t)take_uint(c, 4), .count = 1};
  if (e.type == ARRAY) {
    e.type = (uint32_t)take_uint(c, 4);
    e.count = take_uint(c, 8);
  }
  e.values = c->at;
  skip_values(c, e.type, e.count);
  return e;
}

size_t gguf_row_bytes(uint32_t type, int64_t cols) {
  size_t n = (size_t)cols;
  switch (type) {
  case GGUF_F32: return n * 4;
  case GGUF_F16: return n * 2;
  case GGUF_Q4_0: return n % 32 ? 0 : n / 32 * 18;
  case GGUF_Q4_1: return n % 32 ? 0 : n / 32 * 20;
  case GGUF_Q8_0: return n % 32 ? 0 : n / 32 * 34;
  default: return 0;
  }
}

/* Leaves the tensor's offset in `offset`: where the data section begins is known only after the last description. */
static gguf_tensor take_tensor(cursor *c, uint64_t *offset) {
  gguf_tensor t = {.name = take_string(c), .rows = 1};
  uint32_t dims = (uint32_t)take_uint(c, 4);
  if (dims < 1 || dims > 4) c->failed = true;
  for (uint32_t d = 0; d < dims && !c->failed; d++) {
    uint64_t length = take_uint(c, 8);
    if (length == 0 || length > INT32_MAX || t.rows > INT32_MAX) c->failed = true;
    else if (d == 0) t.cols = (int64_t)length;
    else t.rows *= (int64_t)length;
  }
  t.type = (uint32_t)take_uint(c, 4);
  *offset = take_uint(c, 8);
  return t;
}

static bool parse(gguf *file, cursor *c) {
  const uint8_t *begin = c->at;
  const uint8_t *magic = take(c, 4);
  if (!magic || memcmp(magic, "GGUF", 4) != 0 || take_uint(c, 4) != 3) return false;
  uint64_t tensors = take_uint(c, 8), entries = take_uint(c, 8);
  /* Every entry and tensor takes more than 8 bytes of file, which bounds both counts before anything is allocated. */
  if (c->failed || tensors > file->size / 8 || entries > file->size / 8) return false;
  file->entries = calloc(entries + 1, sizeof *file->entries);
  file->tensors = calloc(tensors + 1, sizeof *file->tensors);
  uint64_t *offsets = calloc(tensors + 1, sizeof *offsets);
  bool ok = file->entries && file->tensors && offsets;
  for (; ok && file->entry_count < entries && !c->failed; file->entry_count++)
    file->entries[file->entry_count] = take_entry(c);
  for (; ok && file->tensor_count < tensors && !c->failed; file->tensor_count++)
    file->tensors[file->tensor_count] = take_tensor(c, &offsets[file->tensor_count]);
  ok = ok && !c->failed;

  uint64_t alignment = (uint64_t)gguf_int(file, "general.alignment", 32);
  ok = ok && alignment > 0 && alignment <= 4096;
  uint64_t data = ok ? ((uint64_t)(c->at - begin) + alignment - 1) / alignment * alignment : 0;
  for (size_t i = 0; ok && i < file->tensor_count; i++) {
    gguf_tensor *t = &file->tensors[i];
    size_t row = gguf_row_bytes(t->type, t->cols);
    if (row == 0) {
      fprintf(stderr, "gguf: tensor %.*s has type %u; this engine reads F32, F16, Q4_0, Q4_1 and Q8_0\n",
              (int)t->name.length, t->name.data, (unsigned)t->type);
      ok = false;
    } else if (data > file->size || offsets[i] % alignment || offsets[i] > file->size - data ||
               (uint64_t)t->rows > (file->size - data - offsets[i]) / row) {
      ok = false;
    } else {
      t->data = begin + data + offsets[i];
    }
  }
  free(offsets);
  return ok;
}

gguf *gguf_parse(const void *bytes, size_t size) {
  gguf *file = calloc(1, sizeof *file);
  if (!file) return NULL;
  file->size = size;
  file->end = (const uint8_t *)bytes + size;
  cursor c = {bytes, file->end, false};
  if (!parse(file, &c)) {
    fprintf(stderr, "gguf: not a complete GGUF version 3 file\n");
    gguf_close(file);
    return NULL;
  }
  return file;
}

gguf *gguf_open(const char *path) {
  int fd = open(path, O_RDONLY);
  struct stat info;
  void *bytes = MAP_FAILED;
  if (fd >= 0 && fstat(fd, &info) == 0 && (!S_ISREG(info.st_mode) || info.st_size == 0)) {
    fprintf(stderr, "%s: %s\n", path, S_ISREG(info.st_mode) ? "empty" : "not a file");
    close(fd);
    return NULL;
  }
  if (fd >= 0) bytes = mmap(NULL, (size_t)info.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
  if (fd >= 0) close(fd);
  if (bytes == MAP_FAILED) {
    perror(path);
    return NULL;
  }
  gguf *file = gguf_parse(bytes, (size_t)info.st_size);
  if (file) file->mapping = bytes;
  else munmap(bytes, (size_t)info.st_size);
  return file;
}

void gguf_close(gguf *file) {
  if (!file) return;
  if (file->mapping) munmap(file->mapping, file->size);
  free(file->entries);
  free(file->tensors);
  free(file);
}

static bool equals(gguf_string text, const char *name) {
  return text.length == strlen(name) && memcmp(text.data, name, text.length) == 0;
}

static const entry *find_entry(const gguf *file, const char *key) {
  for (size_t i = 0; i < file->entry_count; i++)
    if (equals(file->entries[i].key, key)) return &file->entries[i];
  return NULL;
}

int64_t gguf_int(const gguf *file, const char *key, int64_t fallback) {
  const entry *e = find_entry(file, key);
  if (!e || e->count != 1 || e->type == F32 || e->type == F64 || e->type == STRING) return fallback;
  cursor c = {e->values, file->end, false};
  uint64_t value = take_uint(&c, value_bytes[e->type]);
  switch (e->type) { /* signed types extend their sign */
  case I8: return (int8_t)value;
  case I16: return (int16_t)value;
  case I32: return (int32_t)value;
  default: return (int64_t)value;
  }
}

double gguf_float(const gguf *file, const char *key, double fallback) {
  const entry *e = find_entry(file, key);
  if (!e || e->type != F32 || e->count != 1) return fallback;
  float value;
  memcpy(&value, e->values, sizeof value);
  return value;
}

gguf_string gguf_text(const gguf *file, const char *key) {
  const entry *e = find_entry(file, key);
  if (!e || e->type != STRING || e->count != 1) return (gguf_string){"", 0};
  cursor c = {e->values, file->end, false};
  return take_string(&c);
}

size_t gguf_strings(const gguf *file, const char *key, gguf_string **out) {
  const entry *e = find_entry(file, key);
  *out = NULL;
  if (!e || e->type != STRING) return 0;
  *out = calloc(e->count + 1, sizeof **out);
  if (!*out) return 0;
  cursor c = {e->values, file->end, false};
  for (uint64_t i = 0; i < e->count; i++) (*out)[i] = take_string(&c);
  return e->count;
}

size_t gguf_ints(const gguf *file, const char *key, int32_t **out) {
  const entry *e = find_entry(file, key);
  *out = NULL;
  if (!e || e->type != I32) return 0;
  *out = malloc(e->count * sizeof **out + 1);
  if (!*out) return 0;
  memcpy(*out, e->values, e->count * sizeof **out); /* metadata is not aligned in the file */
  return e->count;
}

const gguf_tensor *gguf_find(const gguf *file, const char *name) {
  for (size_t i = 0; i < file->tensor_count; i++)
    if (equals(file->tensors[i].name, name)) return &file->tensors[i];
  return NULL;
}
