/*
 * Sparse decode attention over a paged KV cache: index → select → attention.
 *
 * Shown: with a budget of every block the result is that of dense attention; with a small one the selection finds the
 * blocks that matter, the result is softmax attention over exactly those, and it is near the dense one although it reads
 * a fraction of the keys and values.
 */
#include "common.h"

enum {
  B = 2,                  /* sequences */
  HK = 2, G = 4,          /* KV heads, query heads of each */
  HQ = HK * G, D = 64,
  P = 16,                 /* tokens of a page of the cache */
  S = 32,                 /* tokens of a selection block: two pages */
  PAGES_OF_ONE = 64,      /* pages of one sequence at most */
  PAGES = B * PAGES_OF_ONE,
  BLOCKS = PAGES_OF_ONE * P / S,
  BUDGET = 6
};

static const int32_t lengths[B] = {1000, 645}; /* the last blocks are partial */

static vwd_session *session;
static float *q, *k, *v;
static int32_t *page_table, *seq_lens;

/* The channels of token t of sequence i and KV head g in k or v. */
static float *token(float *cache, int i, int t, int g) {
  int page = page_table[i * PAGES_OF_ONE + t / P];
  return cache + (((size_t)page * P + t % P) * HK + g) * D;
}

/* Random keys; of every sequence and KV head, four blocks hold some keys that its queries look for. */
static void fill(void) {
  uint64_t seed = 7;
  for (int page = 0; page < PAGES; page++) page_table[page] = (page * 37 + 11) % PAGES; /* pages lie anywhere */
  for (size_t n = 0; n < (size_t)PAGES * P * HK * D; n++) {
    k[n] = uniform(&seed);
    v[n] = uniform(&seed);
  }
  for (int i = 0; i < B; i++) {
    seq_lens[i] = lengths[i];
    for (int g = 0; g < HK; g++) {
      float wanted[D];
      for (int c = 0; c < D; c++) wanted[c] = 2 * uniform(&seed);
      for (int h = g * G; h < (g + 1) * G; h++) {
        for (int c = 0; c < D; c++) q[(i * HQ + h) * D + c] = wanted[c] + 0.3f * uniform(&seed);
      }
      for (int n = 0; n < 16; n++) {
        int block = 3 + 4 * (n / 4) + g, t = block * S + 7 * (n % 4);
        memcpy(token(k, i, t, g), wanted, sizeof wanted);
      }
    }
  }
}

static vwd_paged_kv paged_kv(void) {
  vwd_paged_kv kv = VWD_PAGED_KV_INIT;
  kv.k = f32(k, 4, PAGES, P, HK, D);
  kv.v = f32(v, 4, PAGES, P, HK, D);
  kv.page_table = i32(page_table, 2, B, PAGES_OF_ONE);
  kv.seq_lens = i32(seq_lens, 1, B);
  return kv;
}

/* softmax(q·k/√D)·v over the listed blocks of one query head, in double precision; all blocks where ids is NULL. */
static void expected(int i, int h, const int32_t *ids, int count, double *out) {
  double sum = 0, score[BLOCKS * S];
  int tokens[BLOCKS * S], n = 0;
  for (int j = 0; j < count; j++) {
    int begin = (ids == NULL ? j : ids[j]) * S;
    for (int t = begin; t < begin + S && t < lengths[i]; t++) tokens[n++] = t;
  }
  double largest = -INFINITY;
  for (int j = 0; j < n; j++) {
    const float *key = token(k, i, tokens[j], h / G);
    score[j] = 0;
    for (int c = 0; c < D; c++) score[j] += (double)q[(i * HQ + h) * D + c] * key[c] / sqrt((double)D);
    if (score[j] > largest) largest = score[j];
  }
  for (int c = 0; c < D; c++) out[c] = 0;
  for (int j = 0; j < n; j++) {
    double weight = exp(score[j] - largest);
    sum += weight;
    for (int c = 0; c < D; c++) out[c] += weight * token(v, i, tokens[j], h / G)[c];
  }
  for (int c = 0; c < D; c++) out[c] /= sum;
}

int main(void) {
  session = cpu_session();
  q = floats(B * HQ * D);
  k = floats((size_t)PAGES * P * HK * D);
  v = floats((size_t)PAGES * P * HK * D);
  page_table = ints(PAGES);
  seq_lens = ints(B);
  fill();

  /* Index: the largest and smallest key of every block, in memory of ours. An engine extends it as tokens come. */
  float *key_max = floats((size_t)B * BLOCKS * HK * D), *key_min = floats((size_t)B * BLOCKS * HK * D);
  vwd_index index = VWD_INDEX_INIT;
  index.kind = VWD_INDEX_MINMAX;
  index.block_size = S;
  index.key_max = f32(key_max, 4, B, BLOCKS, HK, D);
  index.key_min = f32(key_min, 4, B, BLOCKS, HK, D);
  const vwd_paged_kv kv = paged_kv();
  vwd_index_update_args update = VWD_INDEX_UPDATE_ARGS_INIT;
  update.index = &index;
  update.k = kv.k;
  update.page_table = kv.page_table;
  update.seq_lens = kv.seq_lens;
  CALL(vwd_index_update(session, &update, NULL));

  /* Dense attention, to compare with. */
  float *dense = floats(B * HQ * D), *sparse = floats(B * HQ * D);
  vwd_attention_args attention = VWD_ATTENTION_ARGS_INIT;
  attention.kv = &kv;
  attention.q = f32(q, 3, B, HQ, D);
  attention.out = f32(dense, 3, B, HQ, D);
  CALL(vwd_attention(session, &attention, NULL));

  /* Select, then attend to the list where it lies. */
  int32_t ids[B][HK][BLOCKS], counts[B][HK];
  vwd_select_blocks_args select = VWD_SELECT_BLOCKS_ARGS_INIT;
  select.method = VWD_SELECT_MINMAX;
  select.block_size = S;
  select.init_blocks = 1;
  select.local_blocks = 1;
  select.index = &index;
  select.q = attention.q;
  select.seq_lens = kv.seq_lens;
  select.selected.ids = i32(&ids[0][0][0], 3, B, HK, BLOCKS);
  select.selected.counts = i32(&counts[0][0], 2, B, HK);
  attention.block_size = S;
  attention.list = select.selected;
  attention.out = f32(sparse, 3, B, HQ, D);

  select.k = BLOCKS;
  CALL(vwd_select_blocks(session, &select, NULL));
  CALL(vwd_attention(session, &attention, NULL));
  for (int i = 0; i < B; i++) CHECK(counts[i][0] == (lengths[i] + S - 1) / S);
  CHECK(relative_error(sparse, dense, B * HQ * D) < 1e-5);

  select.k = BUDGET;
  CALL(vwd_select_blocks(session, &select, NULL));
  CALL(vwd_attention(session, &attention, NULL));
  for (int i = 0; i < B; i++) {
    for (int g = 0; g < HK; g++) {
      int last = (lengths[i] - 1) / S;
      CHECK(counts[i][g] == BUDGET);
      /* The first block, the four that hold wanted keys, the last: ascending. */
      const int32_t best[BUDGET] = {0, 3 + g, 7 + g, 11 + g, 15 + g, last};
      CHECK(memcmp(ids[i][g], best, sizeof best) == 0);
    }
    for (int h = 0; h < HQ; h++) {
      double out[D];
      expected(i, h, ids[i][h / G], counts[i][h / G], out);
      for (int c = 0; c < D; c++) CHECK(fabs(out[c] - sparse[(i * HQ + h) * D + c]) < 1e-5);
      expected(i, h, NULL, BLOCKS, out);
      for (int c = 0; c < D; c++) CHECK(fabs(out[c] - dense[(i * HQ + h) * D + c]) < 1e-5);
    }
  }
  double error = relative_error(sparse, dense, B * HQ * D);
  printf("%d of %d and %d tokens read; error against dense attention %.4f\n", BUDGET * S, lengths[0], lengths[1], error);
  CHECK(error < 0.02);

  free(sparse);
  free(dense);
  free(key_min);
  free(key_max);
  free(seq_lens);
  free(page_table);
  free(v);
  free(k);
  free(q);
  vwd_session_release(session);
  return 0;
}
