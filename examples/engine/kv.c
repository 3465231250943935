#include "codes.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "linear.h"
#include "tail.h"

static size_t row_size(const kv_cache *c) { return (size_t)c->kv_heads * (size_t)c->head_dim; }

static size_t slot(const kv_cache *c, int layer, int64_t page, int64_t offset) {
  return ((size_t)layer * (size_t)c->pages + (size_t)page) * PAGE + (size_t)offset;
}

bool kv_init(kv_cache *c, const model_shape *shape, int max_tokens, int spare_tokens) {
  *c = (kv_cache){.layers = shape->layers,
                  .kv_heads = shape->kv_heads,
                  .head_dim = shape->head_dim,
                  .label_channels = shape->head_dim / 2};
  c->max_pages = max_tokens / PAGE + 2;
  c->pages = c->max_pages + spare_tokens / PAGE + 2;
  size_t blocks = (size_t)c->layers * (size_t)c->pages, tokens = blocks * PAGE, heads = (size_t)c->kv_heads;
  c->k = calloc(tokens * row_size(c), sizeof *c->k);
  c->v = calloc(tokens * row_size(c), sizeof *c->v);
  c->key_max = calloc(blocks * row_size(c), sizeof *c->key_max);
  c->key_min = calloc(blocks * row_size(c), sizeof *c->key_min);
  c->labels = calloc(tokens * heads, (size_t)c->label_channels / 2);
  c->label_scale = calloc(tokens * heads, sizeof *c->label_scale);
  c->label_min = calloc(tokens * heads, sizeof *c->label_min);
  c->channels = calloc((size_t)c->layers * heads * (size_t)c->label_channels, sizeof *c->channels);
  c->free_pages = calloc((size_t)c->pages, sizeof *c->free_pages);
  if (!c->k || !c->v || !c->key_max || !c->key_min || !c->labels || !c->label_scale || !c->label_min || !c->channels ||
      !c->free_pages)
    return false;
  /* Handed out in a scattered order, as after hours of serving: nothing may rely on neighbouring pages. */
  for (int third = 0; third < 3; third++)
    for (int i = third; i < c->pages; i += 3) c->free_pages[c->free_count++] = i;
  return true;
}

void kv_free(kv_cache *c) {
  void *parts[] = {c->k,           c->v,         c->key_max,  c->key_min,   c->labels,
                   c->label_scale, c->label_min, c->channels, c->free_pages};
  for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) free(parts[i]);
  codes_free(c);
  axes_free(c);
  *c = (kv_cache){0};
}

bool sequence_init(sequence *s, kv_cache *c) {
  *s = (sequence){.cache = c};
  s->table = calloc((size_t)c->max_pages, sizeof *s->table);
  return s->table != NULL;
}

void sequence_free(sequence *s) {
  for (int p = s->shared; p < s->pages; p++) s->cache->free_pages[s->cache->free_count++] = s->table[p];
  free(s->table);
  *s = (sequence){0};
}

bool sequence_reserve(sequence *s, int64_t tokens) {
  kv_cache *c = s->cache;
  while ((int64_t)s->pages * PAGE < tokens) {
    if (s->pages == c->max_pages || c->free_count == 0) {
      fprintf(stderr, "kv cache: no page left for token %lld\n", (long long)tokens);
      return false;
    }
    s->table[s->pages++] = c->free_pages[--c->free_count];
  }
  return true;
}

static void copy_page(kv_cache *c, int layer, int32_t to, int32_t from) {
  size_t row = row_size(c), heads = (size_t)c->kv_heads, label = heads * (size_t)c->label_channels / 2;
  size_t a = slot(c, layer, to, 0), b = slot(c, layer, from, 0);
  memcpy(c->k + a * row, c->k + b * row, PAGE * row * sizeof *c->k);
  memcpy(c->v + a * row, c->v + b * row, PAGE * row * sizeof *c->v);
  memcpy(c->key_max + a / PAGE * row, c->key_max + b / PAGE * row, row * sizeof *c->key_max);
  memcpy(c->key_min + a / PAGE * row, c->key_min + b / PAGE * row, row * sizeof *c->key_min);
  memcpy(c->labels + a * label, c->labels + b * label, PAGE * label);
  memcpy(c->label_scale + a * heads, c->label_scale + b * heads, PAGE * heads * sizeof *c->label_scale);
  memcpy(c->label_min + a * heads, c->label_min + b * heads, PAGE * heads * sizeof *c->label_min);
  if (c->axes) axes_copy_page(c, layer, to, from);
}

bool sequence_fork(sequence *s, const sequence *from) {
  if (!sequence_init(s, from->cache)) return false;
  s->length = from->length;
  s->coded = from->coded;
  s->pages = s->shared = (int)(from->length / PAGE);
  memcpy(s->table, from->table, (size_t)s->shared * sizeof *s->table);
  if (from->length % PAGE == 0) return true;
  if (!sequence_reserve(s, from->length)) return false;
  for (int l = 0; l < s->cache->layers; l++) copy_page(s->cache, l, s->table[s->shared], from->table[s->shared]);
  return true;
}

void kv_write(const sequence *s, int layer, int64_t position, int n, const float *k,
              const float *v) {
  kv_cache *c = s->cache;
  size_t row = row_size(c);
  for (int64_t p = position; p < position + n; p++, k += row, v += row) {
    size_t at = slot(c, layer, s->table[p / PAGE], p % PAGE) * row;
    for (size_t i = 0; i < row; i++) c->k[at + i] = float_to_half(k[i]), c->v[at + i] = float_to_half(v[i]);
  }
}

vwd_tensor kv_table(const kv_cache *c, const int32_t *table, int rows) {
  vwd_tensor t = TENSOR(table, INT32, rows, c->max_pages);
  t.strides[0] = 0;
  return t;
}

vwd_paged_kv kv_view(const sequence *s, int layer, const int32_t *seq_lens, int rows) {
  const kv_cache *c = s->cache;
  size_t at = slot(c, layer, 0, 0) * row_size(c);
  vwd_paged_kv kv = VWD_PAGED_KV_INIT;
  kv.k = TENSOR(c->k + at, FLOAT16, c->pages, PAGE, c->kv_heads, c->head_dim);
  kv.v = TENSOR(c->v + at, FLOAT16, c->pages, PAGE, c->kv_heads, c->head_dim);
  kv.page_table = kv_table(c, s->table, rows);
  kv.seq_lens = TENSOR(seq_lens, INT32, rows);
  if (s->coded > 0) kv.int4 = codes_view(s, layer, rows);
  return kv;
}

vwd_index kv_minmax(const kv_cache *c, int layer, const int32_t *table, int rows) {
  size_t at = slot(c, layer, 0, 0) / PAGE * row_size(c);
  vwd_index index = VWD_INDEX_INIT;
  index.kind = VWD_INDEX_MINMAX;
  index.block_size = PAGE;
  index.table = kv_table(c, table, rows);
  index.key_max = TENSOR(c->key_max + at, FLOAT16, c->pages, 1, c->kv_heads, c->head_dim);
  index.key_min = TENSOR(c->key_min + at, FLOAT16, c->pages, 1, c->kv_heads, c->head_dim);
  return index;
}

vwd_index kv_label(const kv_cache *c, int layer, const int32_t *table, int rows) {
  size_t at = slot(c, layer, 0, 0) * (size_t)c->kv_heads, half = (size_t)c->label_channels / 2;
  vwd_index index = VWD_INDEX_INIT;
  index.kind = VWD_INDEX_LABEL;
  index.table = kv_table(c, table, rows);
  index.labels = TENSOR(c->labels + at * half, UINT8, c->pages, PAGE, c->kv_heads, c->label_channels / 2);
  index.label_scale = TENSOR(c->label_scale + at, FLOAT16, c->pages, PAGE, c->kv_heads);
  index.label_min = TENSOR(c->label_min + at, FLOAT16, c->pages, PAGE, c->kv_heads);
  index.channels = TENSOR(c->channels + (size_t)layer * (size_t)c->kv_heads * (size_t)c->label_channels, INT32,
                          c->kv_heads, c->label_channels);
  return index;
}
