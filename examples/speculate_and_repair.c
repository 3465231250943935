/*
 * Attention that starts before its blocks are known: predict → attend → select → repair, over some decode steps.
 *
 * Shown: an EXACT repair equals attention over the selected blocks bit for bit, whatever was predicted; a SUPERSET repair
 * covers predicted and selected blocks; what repair attends is what the prediction missed, and a prediction from the
 * scores of earlier steps misses little while the queries drift slowly.
 */
#include "common.h"

enum { HK = 2, G = 3, HQ = HK * G, D = 32, S = 16, T = 900, BLOCKS = (T + S - 1) / S, K = 12, CAP = 16, STEPS = 20 };

/* A block list [1, HK, cap]. */
static vwd_block_list list(int32_t *ids, int32_t *counts, int cap) {
  vwd_block_list l = VWD_BLOCK_LIST_INIT;
  l.ids = i32(ids, 3, 1, HK, cap);
  l.counts = i32(counts, 2, 1, HK);
  return l;
}

static int contains(const int32_t *ids, int count, int32_t id) {
  for (int j = 0; j < count; j++) {
    if (ids[j] == id) return 1;
  }
  return 0;
}

int main(void) {
  vwd_session *session = cpu_session();
  uint64_t seed = 3;

  float *q = floats(HQ * D), *k = floats(T * HK * D), *v = floats(T * HK * D);
  int32_t seq_lens[1] = {T};
  for (int n = 0; n < HQ * D; n++) q[n] = uniform(&seed);
  for (int n = 0; n < T * HK * D; n++) {
    k[n] = uniform(&seed);
    v[n] = uniform(&seed);
  }

  vwd_paged_kv kv = VWD_PAGED_KV_INIT;
  kv.k = f32(k, 4, 1, T, HK, D); /* no page table: sequence i is page i */
  kv.v = f32(v, 4, 1, T, HK, D);
  kv.seq_lens = i32(seq_lens, 1, 1);

  float *key_max = floats(BLOCKS * HK * D), *key_min = floats(BLOCKS * HK * D);
  vwd_index index = VWD_INDEX_INIT;
  index.kind = VWD_INDEX_MINMAX;
  index.block_size = S;
  index.key_max = f32(key_max, 4, 1, BLOCKS, HK, D);
  index.key_min = f32(key_min, 4, 1, BLOCKS, HK, D);
  vwd_index_update_args update = VWD_INDEX_UPDATE_ARGS_INIT;
  update.index = &index;
  update.k = kv.k;
  update.seq_lens = kv.seq_lens;
  CALL(vwd_index_update(session, &update, NULL));

  /* The predictor's state and the lists are ours. */
  float level[HK * BLOCKS], trend[HK * BLOCKS], scores[HK * BLOCKS];
  int32_t predicted_ids[HK][CAP], predicted_counts[HK], selected_ids[HK][K], selected_counts[HK];
  int32_t union_ids[HK][CAP + K], union_counts[HK], missed[HK];
  vwd_block_list predicted = list(&predicted_ids[0][0], predicted_counts, CAP);
  vwd_block_list selected = list(&selected_ids[0][0], selected_counts, K);

  vwd_predictor_reset_args reset = VWD_PREDICTOR_RESET_ARGS_INIT;
  reset.state.level = f32(level, 3, 1, HK, BLOCKS);
  reset.state.trend = f32(trend, 3, 1, HK, BLOCKS);
  CALL(vwd_predictor_reset(session, &reset, NULL));

  vwd_predictor_predict_args predict = VWD_PREDICTOR_PREDICT_ARGS_INIT;
  predict.block_size = S;
  predict.k = K;
  predict.ratio = 1.25f;
  predict.init_blocks = 1;
  predict.local_blocks = 2;
  predict.holt.alpha = 1; /* last step's scores again */
  predict.state = reset.state;
  predict.seq_lens = kv.seq_lens;
  predict.predicted = predicted;

  float *out = floats(HQ * D), *exact = floats(HQ * D), *superset = floats(HQ * D), *reference = floats(HQ * D);
  float *acc = floats(HQ * D), m[HQ], l[HQ];
  float *partial_acc = floats(HQ * CAP * D), partial_m[HQ * CAP], partial_l[HQ * CAP];
  vwd_attention_args speculate = VWD_ATTENTION_ARGS_INIT;
  speculate.block_size = S;
  speculate.kv = &kv;
  speculate.q = f32(q, 3, 1, HQ, D);
  speculate.list = predicted;
  speculate.out = f32(out, 3, 1, HQ, D);
  speculate.state.acc = f32(acc, 3, 1, HQ, D);
  speculate.state.m = f32(m, 2, 1, HQ);
  speculate.state.l = f32(l, 2, 1, HQ);
  speculate.partials.acc = f32(partial_acc, 4, 1, HQ, CAP, D); /* one state per predicted block */
  speculate.partials.m = f32(partial_m, 3, 1, HQ, CAP);
  speculate.partials.l = f32(partial_l, 3, 1, HQ, CAP);

  vwd_select_blocks_args select = VWD_SELECT_BLOCKS_ARGS_INIT;
  select.method = VWD_SELECT_MINMAX;
  select.block_size = S;
  select.k = K;
  select.init_blocks = predict.init_blocks;
  select.local_blocks = predict.local_blocks;
  select.index = &index;
  select.q = speculate.q;
  select.seq_lens = kv.seq_lens;
  select.selected = selected;
  select.scores = f32(scores, 3, 1, HK, BLOCKS);

  vwd_repair_args exact_repair = VWD_REPAIR_ARGS_INIT;
  exact_repair.block_size = S;
  exact_repair.kv = &kv;
  exact_repair.q = speculate.q;
  exact_repair.predicted = predicted;
  exact_repair.selected = selected;
  exact_repair.missed_counts = i32(missed, 2, 1, HK);
  vwd_repair_args superset_repair = exact_repair;
  exact_repair.mode = VWD_REPAIR_EXACT;
  exact_repair.predicted_partials = speculate.partials;
  exact_repair.out = f32(exact, 3, 1, HQ, D);
  superset_repair.mode = VWD_REPAIR_SUPERSET;
  superset_repair.predicted_state = speculate.state;
  superset_repair.out = f32(superset, 3, 1, HQ, D);

  vwd_attention_args attend = VWD_ATTENTION_ARGS_INIT; /* what repair is compared with */
  attend.block_size = S;
  attend.kv = &kv;
  attend.q = speculate.q;
  attend.out = f32(reference, 3, 1, HQ, D);

  vwd_predictor_update_args learn = VWD_PREDICTOR_UPDATE_ARGS_INIT;
  learn.block_size = S;
  learn.holt = predict.holt;
  learn.state = reset.state;
  learn.seq_lens = kv.seq_lens;
  learn.scores = select.scores;

  int missed_in_all = 0;
  for (int step = 0; step < STEPS; step++) {
    /* Before the step's selection is known. On a GPU these two run beside what makes the selection. */
    CALL(vwd_predictor_predict(session, &predict, NULL));
    CALL(vwd_attention(session, &speculate, NULL));

    CALL(vwd_select_blocks(session, &select, NULL));

    CALL(vwd_repair(session, &exact_repair, NULL));
    attend.list = selected;
    CALL(vwd_attention(session, &attend, NULL));
    CHECK(memcmp(exact, reference, HQ * D * sizeof(float)) == 0);

    CALL(vwd_repair(session, &superset_repair, NULL));
    for (int g = 0; g < HK; g++) {
      int wanted_missed = 0;
      union_counts[g] = 0;
      for (int32_t id = 0; id < BLOCKS; id++) {
        int was_predicted = contains(predicted_ids[g], predicted_counts[g], id);
        int was_selected = contains(selected_ids[g], selected_counts[g], id);
        if (was_predicted || was_selected) union_ids[g][union_counts[g]++] = id;
        wanted_missed += was_selected && !was_predicted;
      }
      CHECK(missed[g] == wanted_missed);
      if (step > 0) missed_in_all += missed[g];
    }
    attend.list = list(&union_ids[0][0], union_counts, CAP + K);
    CALL(vwd_attention(session, &attend, NULL));
    CHECK(relative_error(superset, reference, HQ * D) < 1e-5);

    /* After the step: the scores are what the next prediction is made of; the queries drift. */
    CALL(vwd_predictor_update(session, &learn, NULL));
    for (int n = 0; n < HQ * D; n++) q[n] += 0.5f * uniform(&seed);
  }

  int selected_in_all = (STEPS - 1) * HK * K;
  printf("%d of %d selected blocks were predicted\n", selected_in_all - missed_in_all, selected_in_all);
  CHECK(missed_in_all > 0 && missed_in_all < selected_in_all / 5);

  free(partial_acc);
  free(acc);
  free(reference);
  free(superset);
  free(exact);
  free(out);
  free(key_min);
  free(key_max);
  free(v);
  free(k);
  free(q);
  vwd_session_release(session);
  return 0;
}
