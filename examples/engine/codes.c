#include "codes.h"

#include <stdio.h>
#include <stdlib.h>

enum { LAYERS_A_CALL = 48 };

bool codes_init(kv_cache *c) {
  if (c->head_dim < 64 || c->head_dim > 256 || c->head_dim % 16 != 0) {
    fprintf(stderr, "keys of %d channels cannot be kept in INT4; expected a multiple of 16, 64 to 256\n", c->head_dim);
    return false;
  }
  kv_codes *codes = calloc(1, sizeof *codes);
  if (!codes) return false;
  c->codes = codes;
  const size_t pages = (size_t)c->layers * (size_t)c->pages, heads = (size_t)c->kv_heads, dim = (size_t)c->head_dim;
  codes->k = calloc(pages * PAGE * heads, dim / 2);
  codes->v = calloc(pages * PAGE * heads, dim / 2);
  codes->k_scale = calloc(pages * PAGE, heads);
  codes->v_scale = calloc(pages * PAGE, heads);
  codes->means = calloc(pages * heads * dim, sizeof *codes->means);
  codes->weights = calloc((size_t)c->layers * heads * dim, sizeof *codes->weights);
  codes->views = calloc((size_t)c->layers, sizeof *codes->views);
  return codes->k && codes->v && codes->k_scale && codes->v_scale && codes->means && codes->weights && codes->views;
}

void codes_free(kv_cache *c) {
  if (!c->codes) return;
  void *parts[] = {c->codes->k,     c->codes->v,       c->codes->k_scale, c->codes->v_scale,
                   c->codes->means, c->codes->weights, c->codes->views,   c->codes};
  for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) free(parts[i]);
  c->codes = NULL;
}

vwd_tensor codes_weights(const kv_cache *c, int layer) {
  return TENSOR(c->codes->weights + (size_t)layer * (size_t)(c->kv_heads * c->head_dim), FLOAT32, c->kv_heads, c->head_dim);
}

const vwd_int4_kv *codes_view(const sequence *s, int layer, int rows) {
  const kv_cache *c = s->cache;
  const kv_codes *codes = c->codes;
  const int pages = c->pages, heads = c->kv_heads, dim = c->head_dim;
  const size_t page = (size_t)layer * (size_t)pages, scale = page * PAGE * (size_t)heads;
  vwd_int4_kv view = VWD_INT4_KV_INIT;
  view.block_size = PAGE;
  view.exact_tokens = EXACT;
  view.k = TENSOR(codes->k + scale * (size_t)dim / 2, UINT8, pages, PAGE, heads, dim / 2);
  view.v = TENSOR(codes->v + scale * (size_t)dim / 2, UINT8, pages, PAGE, heads, dim / 2);
  view.k_scale = TENSOR(codes->k_scale + scale, FLOAT8_E4M3, pages, PAGE, heads);
  view.v_scale = TENSOR(codes->v_scale + scale, FLOAT8_E4M3, pages, PAGE, heads);
  view.page_table = kv_table(c, s->table, rows);
  view.coded_lens = TENSOR(&s->coded, INT32, rows);
  view.coded_lens.strides[0] = 0;
  view.means = TENSOR(codes->means + page * (size_t)(heads * dim), FLOAT16, pages, 1, heads, dim);
  view.mean_table = view.page_table;
  view.weights = codes_weights(c, layer);
  codes->views[layer] = view;
  return &codes->views[layer];
}

/* Attention that read a coded token's exact key would be NaN. */
static void give_up(const sequence *s, int64_t begin, int64_t end) {
  enum { NOT_A_NUMBER = 0x7e00 };
  const kv_cache *c = s->cache;
  const size_t page = (size_t)PAGE * (size_t)(c->kv_heads * c->head_dim);
  for (int layer = 0; layer < c->layers; layer++)
    for (int64_t p = begin / PAGE; p < end / PAGE; p++) {
      const size_t at = ((size_t)layer * (size_t)c->pages + (size_t)s->table[p]) * page;
      for (size_t i = 0; i < page; i++) c->k[at + i] = c->v[at + i] = NOT_A_NUMBER;
    }
}

bool codes_extend(sequence *s, const vwd_session *session) {
  const kv_cache *c = s->cache;
  const int32_t length = (int32_t)s->length - EXACT, begin = s->coded > EXACT ? s->coded : EXACT;
  if (length < begin + PAGE) return true;
  vwd_paged_kv kv[LAYERS_A_CALL];
  const vwd_paged_kv *layers[LAYERS_A_CALL];
  for (int first = 0; first < c->layers; first += LAYERS_A_CALL) {
    const int count = c->layers - first < LAYERS_A_CALL ? c->layers - first : LAYERS_A_CALL;
    for (int n = 0; n < count; n++) {
      kv[n] = kv_view(s, first + n, &length, 1);
      kv[n].int4 = codes_view(s, first + n, 1);
      layers[n] = &kv[n];
    }
    vwd_kv_quantize_args args = VWD_KV_QUANTIZE_ARGS_INIT;
    args.layer_count = (uint32_t)count;
    args.layers = layers;
    args.begin = TENSOR(&begin, INT32, 1);
    if (!succeeded(vwd_kv_quantize(session, &args, NULL), "vwd_kv_quantize")) return false;
  }
  const int32_t own = s->shared * PAGE; /* who shares a page may still read it */
  give_up(s, begin > own ? begin : own, s->coded);
  return true;
}

double codes_token_bytes(const kv_cache *c) { return c->head_dim + 2 + (double)c->head_dim * sizeof(uint16_t) / PAGE; }
