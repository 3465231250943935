/*
 * Selection in two levels: many candidate blocks by their extremes, then single tokens by INT4 labels of their keys.
 *
 * Shown: where the tokens that matter lie one in each of many blocks, a second level over four times as many blocks reads
 * a quarter of the tokens of a selection of whole blocks, and comes nearer to dense attention.
 */
#include "common.h"

enum {
  HK = 2, G = 4, HQ = HK * G, D = 64,
  T = 2048, S = 32, BLOCKS = T / S,
  K = 6,                /* budget of the one-level selection, in blocks */
  CANDIDATES = 4 * K,   /* of the two-level one */
  TOKENS = K * S / 4,   /* and its tokens */
  R = D / 2             /* channels of a label */
};

int main(void) {
  vwd_session *session = cpu_session();
  uint64_t seed = 11;
  float *q = floats(HQ * D), *k = floats(T * HK * D), *v = floats(T * HK * D);
  int32_t seq_lens[1] = {T};
  for (int n = 0; n < T * HK * D; n++) {
    k[n] = uniform(&seed);
    v[n] = uniform(&seed);
  }
  for (int g = 0; g < HK; g++) { /* 16 tokens that the queries of KV head g look for, in 16 blocks */
    float wanted[D];
    for (int c = 0; c < D; c++) wanted[c] = 2 * uniform(&seed);
    for (int h = g * G; h < (g + 1) * G; h++) {
      for (int c = 0; c < D; c++) q[h * D + c] = wanted[c] + 0.3f * uniform(&seed);
    }
    for (int n = 0; n < 16; n++) memcpy(k + ((size_t)((3 * n + 5 + g) * S + n) * HK + g) * D, wanted, sizeof wanted);
  }

  vwd_paged_kv kv = VWD_PAGED_KV_INIT;
  kv.k = f32(k, 4, 1, T, HK, D);
  kv.v = f32(v, 4, 1, T, HK, D);
  kv.seq_lens = i32(seq_lens, 1, 1);

  /* Both indexes over the same keys. The labels keep the R channels that decide the scores. */
  float *key_max = floats(BLOCKS * HK * D), *key_min = floats(BLOCKS * HK * D);
  vwd_index extremes = VWD_INDEX_INIT;
  extremes.kind = VWD_INDEX_MINMAX;
  extremes.block_size = S;
  extremes.key_max = f32(key_max, 4, 1, BLOCKS, HK, D);
  extremes.key_min = f32(key_min, 4, 1, BLOCKS, HK, D);
  vwd_index_update_args update = VWD_INDEX_UPDATE_ARGS_INIT;
  update.index = &extremes;
  update.k = kv.k;
  update.seq_lens = kv.seq_lens;
  CALL(vwd_index_update(session, &update, NULL));

  int32_t channels[HK][R];
  vwd_channel_importance_args importance = VWD_CHANNEL_IMPORTANCE_ARGS_INIT;
  importance.q = f32(q, 3, 1, HQ, D);
  importance.k = f32(k, 3, T, HK, D);
  importance.channels = i32(&channels[0][0], 2, HK, R);
  CALL(vwd_channel_importance(session, &importance, NULL));

  uint8_t *codes = (uint8_t *)calloc(T * HK, R / 2);
  uint16_t *label_scale = (uint16_t *)calloc(T * HK, 2), *label_min = (uint16_t *)calloc(T * HK, 2);
  CHECK(codes != NULL && label_scale != NULL && label_min != NULL);
  vwd_index labels = VWD_INDEX_INIT;
  labels.kind = VWD_INDEX_LABEL;
  labels.labels = array(codes, UNSIGNED, 8, 4, 1, T, HK, R / 2);
  labels.label_scale = array(label_scale, FLOAT, 16, 3, 1, T, HK);
  labels.label_min = array(label_min, FLOAT, 16, 3, 1, T, HK);
  labels.channels = importance.channels;
  update.index = &labels;
  CALL(vwd_index_update(session, &update, NULL));

  /* Dense. */
  float *dense = floats(HQ * D), *of_blocks = floats(HQ * D), *of_tokens = floats(HQ * D);
  vwd_attention_args attention = VWD_ATTENTION_ARGS_INIT;
  attention.kv = &kv;
  attention.q = f32(q, 3, 1, HQ, D);
  attention.out = f32(dense, 3, 1, HQ, D);
  CALL(vwd_attention(session, &attention, NULL));

  /* One level: K blocks. */
  int32_t block_ids[HK][CANDIDATES], block_counts[HK];
  vwd_select_blocks_args blocks = VWD_SELECT_BLOCKS_ARGS_INIT;
  blocks.method = VWD_SELECT_MINMAX;
  blocks.block_size = S;
  blocks.k = K;
  blocks.index = &extremes;
  blocks.q = attention.q;
  blocks.seq_lens = kv.seq_lens;
  blocks.selected.ids = i32(&block_ids[0][0], 3, 1, HK, CANDIDATES);
  blocks.selected.counts = i32(block_counts, 2, 1, HK);
  CALL(vwd_select_blocks(session, &blocks, NULL));
  attention.block_size = S;
  attention.list = blocks.selected;
  attention.out = f32(of_blocks, 3, 1, HQ, D);
  CALL(vwd_attention(session, &attention, NULL));

  /* Two levels: CANDIDATES blocks, and TOKENS tokens of theirs. A list of tokens has blocks of one token. */
  int32_t token_ids[HK][TOKENS], token_counts[HK];
  blocks.k = CANDIDATES;
  CALL(vwd_select_blocks(session, &blocks, NULL));
  vwd_select_tokens_args tokens = VWD_SELECT_TOKENS_ARGS_INIT;
  tokens.block_size = S;
  tokens.k = TOKENS;
  tokens.index = &labels;
  tokens.q = attention.q;
  tokens.seq_lens = kv.seq_lens;
  tokens.candidates = blocks.selected;
  tokens.selected.ids = i32(&token_ids[0][0], 3, 1, HK, TOKENS);
  tokens.selected.counts = i32(token_counts, 2, 1, HK);
  CALL(vwd_select_tokens(session, &tokens, NULL));
  attention.block_size = 1;
  attention.list = tokens.selected;
  attention.out = f32(of_tokens, 3, 1, HQ, D);
  CALL(vwd_attention(session, &attention, NULL));

  for (int g = 0; g < HK; g++) {
    CHECK(block_counts[g] == CANDIDATES && token_counts[g] == TOKENS);
    int found = 0;
    for (int j = 0; j < TOKENS; j++) {
      CHECK(j == 0 || token_ids[g][j - 1] < token_ids[g][j]);
      for (int n = 0; n < 16; n++) found += token_ids[g][j] == (3 * n + 5 + g) * S + n;
    }
    CHECK(found == 16);
  }
  double one = relative_error(of_blocks, dense, HQ * D), two = relative_error(of_tokens, dense, HQ * D);
  printf("of %d tokens: %d in blocks, error %.3f; %d by labels, error %.3f\n", T, K * S, one, TOKENS, two);
  CHECK(two < 0.05 && two < one / 4);

  free(of_tokens);
  free(of_blocks);
  free(dense);
  free(label_min);
  free(label_scale);
  free(codes);
  free(key_min);
  free(key_max);
  free(v);
  free(k);
  free(q);
  vwd_session_release(session);
  return 0;
}
