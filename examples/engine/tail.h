/* Selection by AXIS, and what it leaves out as one more term of attention (docs/remainder.md): the weight of the term comes from the
 * summaries, and its value from means and a covariance that are kept of each sequence. */
#ifndef ENGINE_TAIL_H
#define ENGINE_TAIL_H

#include "kv.h"

/* Summaries by AXIS of all pages of a cache, in INT4, and what they were made with. */
struct kv_axes {
  uint8_t *values;         /* [layers, pages, 1, kv_heads, head_dim] two INT4 a byte: mean, then axis */
  uint16_t *range;         /* [layers, pages, 1, kv_heads, 4 · groups of 32 channels] float16 */
  float *weights, *centre; /* [layers, kv_heads, head_dim] */
};

/* Room for them; until then a cache has none. */
bool axes_init(kv_cache *c);
void axes_free(kv_cache *c);
void axes_copy_page(kv_cache *c, int layer, int32_t to, int32_t from);
vwd_index axes_index(const kv_cache *c, int layer, const int32_t *table, int rows);
/* Bytes of a page's summary of one KV head. */
int64_t axes_bytes(const kv_cache *c);

/* Means and covariance of a sequence's keys and values. */
typedef struct {
  int32_t *tokens;        /* [layers, kv_heads] */
  float *mean_k, *mean_v; /* [layers, kv_heads, head_dim] */
  float *covariance;      /* [layers, kv_heads, head_dim, head_dim] */
} tail;

bool tail_init(tail *t, const model_shape *s);
/* As for a fork of the sequence. */
void tail_copy(tail *to, const tail *from, const model_shape *s);
void tail_free(tail *t);
vwd_remainder tail_view(const tail *t, const model_shape *s, int layer);
/* Bytes of what attention reads of it for a KV head of a layer. */
int64_t tail_bytes(const model_shape *s);
/* Takes in the blocks of a layer that have become full. */
bool tail_extend(tail *t, const vwd_session *session, const model_shape *shape, const sequence *s, int layer, int32_t seq_len, int block);

#endif
