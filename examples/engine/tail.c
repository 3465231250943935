#include "tail.h"

#include <stdlib.h>
#include <string.h>

static size_t row_values(const kv_cache *c) { return (size_t)c->kv_heads * (size_t)c->head_dim; }

static size_t row_range(const kv_cache *c) { return (size_t)c->kv_heads * 4 * (size_t)((c->head_dim + 31) / 32); }

int64_t axes_bytes(const kv_cache *c) { return c->head_dim + 4 * ((c->head_dim + 31) / 32) * (int64_t)sizeof(uint16_t); }

bool axes_init(kv_cache *c) {
  const size_t pages = (size_t)c->layers * (size_t)c->pages, channels = (size_t)c->layers * row_values(c);
  kv_axes *axes = calloc(1, sizeof *axes);
  if (!axes) return false;
  c->axes = axes;
  axes->values = calloc(pages, row_values(c));
  axes->range = calloc(pages * row_range(c), sizeof *axes->range);
  axes->weights = calloc(channels, sizeof *axes->weights);
  axes->centre = calloc(channels, sizeof *axes->centre);
  return axes->values && axes->range && axes->weights && axes->centre;
}

void axes_free(kv_cache *c) {
  if (!c->axes) return;
  void *parts[] = {c->axes->values, c->axes->range, c->axes->weights, c->axes->centre, c->axes};
  for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) free(parts[i]);
  c->axes = NULL;
}

void axes_copy_page(kv_cache *c, int layer, int32_t to, int32_t from) {
  const size_t first = (size_t)layer * (size_t)c->pages, a = first + (size_t)to, b = first + (size_t)from;
  memcpy(c->axes->values + a * row_values(c), c->axes->values + b * row_values(c), row_values(c));
  memcpy(c->axes->range + a * row_range(c), c->axes->range + b * row_range(c), row_range(c) * sizeof *c->axes->range);
}

vwd_index axes_index(const kv_cache *c, int layer, const int32_t *table, int rows) {
  const size_t page = (size_t)layer * (size_t)c->pages, channels = (size_t)layer * row_values(c);
  const kv_axes *axes = c->axes;
  vwd_index index = VWD_INDEX_INIT;
  index.kind = VWD_INDEX_AXIS;
  index.block_size = PAGE;
  index.table = kv_table(c, table, rows);
  index.axes = TENSOR(axes->values + page * row_values(c), UINT8, c->pages, 1, c->kv_heads, c->head_dim);
  index.axis_range = TENSOR(axes->range + page * row_range(c), FLOAT16, c->pages, 1, c->kv_heads, 4 * ((c->head_dim + 31) / 32));
  index.axis_weights = TENSOR(axes->weights + channels, FLOAT32, c->kv_heads, c->head_dim);
  index.axis_centre = TENSOR(axes->centre + channels, FLOAT32, c->kv_heads, c->head_dim);
  return index;
}

/* --- Means and covariance --- */

static size_t heads_of(const model_shape *s) { return (size_t)s->layers * (size_t)s->kv_heads; }

bool tail_init(tail *t, const model_shape *s) {
  const size_t heads = heads_of(s), dim = (size_t)s->head_dim;
  *t = (tail){.tokens = calloc(heads, sizeof *t->tokens),
              .mean_k = calloc(heads * dim, sizeof *t->mean_k),
              .mean_v = calloc(heads * dim, sizeof *t->mean_v),
              .covariance = calloc(heads * dim * dim, sizeof *t->covariance)};
  return t->tokens && t->mean_k && t->mean_v && t->covariance;
}

void tail_copy(tail *to, const tail *from, const model_shape *s) {
  const size_t heads = heads_of(s), dim = (size_t)s->head_dim;
  memcpy(to->tokens, from->tokens, heads * sizeof *to->tokens);
  memcpy(to->mean_k, from->mean_k, heads * dim * sizeof *to->mean_k);
  memcpy(to->mean_v, from->mean_v, heads * dim * sizeof *to->mean_v);
  memcpy(to->covariance, from->covariance, heads * dim * dim * sizeof *to->covariance);
}

void tail_free(tail *t) {
  void *parts[] = {t->tokens, t->mean_k, t->mean_v, t->covariance};
  for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) free(parts[i]);
  *t = (tail){0};
}

int64_t tail_bytes(const model_shape *s) { return ((int64_t)s->head_dim + 1) * s->head_dim * (int64_t)sizeof(float); }

vwd_remainder tail_view(const tail *t, const model_shape *s, int layer) {
  const size_t head = (size_t)layer * (size_t)s->kv_heads, dim = (size_t)s->head_dim;
  vwd_remainder view = VWD_REMAINDER_INIT;
  view.tokens = TENSOR(t->tokens + head, INT32, 1, s->kv_heads);
  view.mean_k = TENSOR(t->mean_k + head * dim, FLOAT32, 1, s->kv_heads, s->head_dim);
  view.mean_v = TENSOR(t->mean_v + head * dim, FLOAT32, 1, s->kv_heads, s->head_dim);
  view.covariance = TENSOR(t->covariance + head * dim * dim, FLOAT32, 1, s->kv_heads, s->head_dim, s->head_dim);
  return view;
}

bool tail_extend(tail *t, const vwd_session *session, const model_shape *shape, const sequence *s, int layer, int32_t seq_len, int block) {
  const vwd_remainder remainder = tail_view(t, shape, layer);
  const vwd_paged_kv kv = kv_view(s, layer, &seq_len, 1);
  vwd_remainder_update_args args = VWD_REMAINDER_UPDATE_ARGS_INIT;
  args.block_size = (uint32_t)block;
  args.kv = &kv;
  args.remainder = &remainder;
  return succeeded(vwd_remainder_update(session, &args, NULL), "vwd_remainder_update");
}
