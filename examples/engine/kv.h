/* Paged keys and values in float16 with their block summaries, and sequences that share prompt pages. Every tensor that
 * Vanward reads or writes here is a plain view of this memory. A selection block is one page. */
#ifndef ENGINE_KV_H
#define ENGINE_KV_H

#include <stdbool.h>
#include <vanward.h>

#include "model.h"
#include "view.h"

#ifndef ENGINE_PAGE
#define ENGINE_PAGE 16
#endif
enum { PAGE = ENGINE_PAGE }; /* 16, 32 or 64 tokens */

typedef struct kv_codes kv_codes;
typedef struct kv_axes kv_axes;

typedef struct {
  int layers, kv_heads, head_dim, label_channels;
  int pages;         /* of the pool */
  int max_pages;     /* of one sequence */
  uint16_t *k, *v;   /* [layers, pages, PAGE, kv_heads, head_dim] float16 */
  uint16_t *key_max; /* [layers, pages, 1, kv_heads, head_dim] float16 */
  uint16_t *key_min;
  uint8_t *labels;       /* [layers, pages, PAGE, kv_heads, label_channels / 2] two INT4 a byte */
  uint16_t *label_scale; /* [layers, pages, PAGE, kv_heads] float16 */
  uint16_t *label_min;
  int32_t *channels;   /* [layers, kv_heads, label_channels] */
  int32_t *free_pages; /* a stack */
  int free_count;
  kv_codes *codes; /* older keys and values in INT4, or NULL */
  kv_axes *axes;   /* summaries by AXIS, or NULL */
} kv_cache;

typedef struct {
  kv_cache *cache;
  int32_t *table;       /* [max_pages] */
  int pages, shared;    /* the first `shared` pages belong to the sequence this one was forked from */
  int64_t length;       /* tokens in the cache */
  int32_t coded;        /* the first ones of these, read in INT4 but for the very first */
} sequence;

bool kv_init(kv_cache *c, const model_shape *shape, int max_tokens, int spare_tokens);
void kv_free(kv_cache *c);

bool sequence_init(sequence *s, kv_cache *c);
/* Shares the full pages of `from`, which must outlive the fork, and copies its partial last page. */
bool sequence_fork(sequence *s, const sequence *from);
void sequence_free(sequence *s);
/* Pages for `tokens` in all. */
bool sequence_reserve(sequence *s, int64_t tokens);

/* Rows [n, kv_heads, head_dim] to the slots of positions position … position + n − 1. */
void kv_write(const sequence *s, int layer, int64_t position, int n, const float *k,
              const float *v);

/* Views. `rows` query positions share one table (stride 0) and differ in seq_lens. */
vwd_tensor kv_table(const kv_cache *c, const int32_t *table, int rows);
vwd_paged_kv kv_view(const sequence *s, int layer, const int32_t *seq_lens, int rows);
vwd_index kv_minmax(const kv_cache *c, int layer, const int32_t *table, int rows);
vwd_index kv_label(const kv_cache *c, int layer, const int32_t *table, int rows);

#endif
