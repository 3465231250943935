/* The older keys and values of a kv_cache in INT4: what vwd_kv_quantize makes of whole pages, and attention reads in their place. The first
 * EXACT tokens stay as they are, attention's sink among them, and so do the newest EXACT ones, which weigh most. A coded block is one page. */
#ifndef ENGINE_CODES_H
#define ENGINE_CODES_H

#include "kv.h"

enum { EXACT = 64 }; /* whole pages */

struct kv_codes {
  uint8_t *k, *v;             /* [layers, pages, PAGE, kv_heads, head_dim / 2] two INT4 a byte */
  uint8_t *k_scale, *v_scale; /* [layers, pages, PAGE, kv_heads] float8_e4m3fn */
  uint16_t *means;            /* [layers, pages, 1, kv_heads, head_dim] float16 */
  float *weights;             /* [layers, kv_heads, head_dim], of key channels */
  vwd_int4_kv *views;         /* [layers] of the last kv_view of each */
};

/* Room for the codes of all pages; until then a cache has none. False, with words, where the model's heads cannot be coded. */
bool codes_init(kv_cache *c);
void codes_free(kv_cache *c);

/* [kv_heads, head_dim], for vwd_kv_weights to fill. */
vwd_tensor codes_weights(const kv_cache *c, int layer);

/* The view of one layer's codes, for kv_view. The next one of that layer overwrites it. */
const vwd_int4_kv *codes_view(const sequence *s, int layer, int rows);

/* Codes the whole pages of a sequence that EXACT tokens have followed, in every layer, and gives up what they
 * held unless it is shared: from then on it is NaN. */
bool codes_extend(sequence *s, const vwd_session *session);

/* Bytes of a coded token of one KV head, its part of the page's mean included. */
double codes_token_bytes(const kv_cache *c);

#endif
