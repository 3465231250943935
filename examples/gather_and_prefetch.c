/*
 * KV that lives in host memory and is fetched by blocks into a small pool of slots, ahead of its use.
 *
 * Shown: vwd_gather_blocks copies listed blocks; attention reads them where they landed, through a page table, and gives
 * what it gives over the whole KV; blocks that a prediction names travel before the selection is known, which leaves few
 * to wait for.
 */
#include "common.h"

enum {
  HK = 2, G = 2, HQ = HK * G, D = 64,
  S = 16,             /* tokens of a block, and of a page */
  T = 1000, BLOCKS = (T + S - 1) / S,
  K = 8, CAP = 10,    /* blocks selected and predicted for each KV head */
  SLOTS = 40,         /* room for one selection and one prediction */
  STEPS = 24,
  HALF = S * HK * D,  /* elements of a block's keys; its values follow: one block is one contiguous run */
  RUN = 2 * HALF
};

static vwd_session *session;
static float *pool;  /* [BLOCKS, RUN], host memory from the session: pinned where there is a GPU */
static float *slots; /* [SLOTS, RUN], where attention reads */
static int32_t slot_of[BLOCKS], block_in[SLOTS], last_use[SLOTS];
static int32_t now; /* steps so far; what was wanted at this one is not evicted */

/* Keys or values of `count` blocks in runs: [count, S, HK, D], one run apart. */
static vwd_tensor half_of(float *runs, int count, int values) {
  vwd_tensor t = f32(runs + values * HALF, 4, count, S, HK, D);
  t.strides[0] = RUN;
  return t;
}

/* Brings the blocks of all lists into slots; returns how many had to travel. */
static int fetch(const int32_t *ids, const int32_t *counts, int cap) {
  int32_t from[BLOCKS], to[BLOCKS];
  int travelling = 0;
  for (int pass = 0; pass < 2; pass++) { /* first hold what is there, then replace what is not wanted */
    for (int g = 0; g < HK; g++) {
      for (int j = 0; j < counts[g]; j++) {
        int32_t block = ids[g * cap + j];
        if (pass == 1 && slot_of[block] < 0) {
          int slot = 0;
          for (int s = 1; s < SLOTS; s++) {
            if (last_use[s] < last_use[slot]) slot = s;
          }
          CHECK(last_use[slot] < now);
          if (block_in[slot] >= 0) slot_of[block_in[slot]] = -1;
          block_in[slot] = block;
          slot_of[block] = slot;
          from[travelling] = block;
          to[travelling++] = slot;
        }
        if (slot_of[block] >= 0) last_use[slot_of[block]] = now;
      }
    }
  }
  int32_t count[1] = {travelling};
  vwd_gather_blocks_args gather = VWD_GATHER_BLOCKS_ARGS_INIT;
  gather.source = f32(pool, 2, BLOCKS, RUN);
  gather.target = f32(slots, 2, SLOTS, RUN);
  gather.source_ids = i32(from, 1, BLOCKS);
  gather.target_ids = i32(to, 1, BLOCKS);
  gather.count = i32(count, 1, 1);
  CALL(vwd_gather_blocks(session, &gather, NULL));
  for (int n = 0; n < travelling; n++) {
    CHECK(memcmp(slots + (size_t)to[n] * RUN, pool + (size_t)from[n] * RUN, RUN * sizeof(float)) == 0);
  }
  return travelling;
}

int main(void) {
  session = cpu_session();
  void *memory = NULL;
  CALL(vwd_pinned_alloc(session, (uint64_t)BLOCKS * RUN * sizeof(float), &memory));
  pool = (float *)memory;
  slots = floats((size_t)SLOTS * RUN);
  float *q = floats(HQ * D), *out = floats(HQ * D), *reference = floats(HQ * D);
  uint64_t seed = 5;
  for (int n = 0; n < BLOCKS * RUN; n++) pool[n] = uniform(&seed);
  for (int n = 0; n < HQ * D; n++) q[n] = uniform(&seed);
  int32_t seq_lens[1] = {T}, in_order[BLOCKS];
  for (int b = 0; b < BLOCKS; b++) {
    in_order[b] = b;
    slot_of[b] = -1;
  }
  for (int s = 0; s < SLOTS; s++) block_in[s] = -1;

  vwd_paged_kv in_pool = VWD_PAGED_KV_INIT;
  in_pool.k = half_of(pool, BLOCKS, 0);
  in_pool.v = half_of(pool, BLOCKS, 1);
  in_pool.page_table = i32(in_order, 2, 1, BLOCKS);
  in_pool.seq_lens = i32(seq_lens, 1, 1);

  /* Page p of the sequence is the slot that holds block p; blocks that are elsewhere have slot −1. */
  vwd_paged_kv in_slots = in_pool;
  in_slots.k = half_of(slots, SLOTS, 0);
  in_slots.v = half_of(slots, SLOTS, 1);
  in_slots.page_table = i32(slot_of, 2, 1, BLOCKS);

  float *key_max = floats(BLOCKS * HK * D), *key_min = floats(BLOCKS * HK * D);
  vwd_index index = VWD_INDEX_INIT;
  index.kind = VWD_INDEX_MINMAX;
  index.block_size = S;
  index.key_max = f32(key_max, 4, 1, BLOCKS, HK, D);
  index.key_min = f32(key_min, 4, 1, BLOCKS, HK, D);
  vwd_index_update_args update = VWD_INDEX_UPDATE_ARGS_INIT;
  update.index = &index;
  update.k = in_pool.k;
  update.page_table = in_pool.page_table;
  update.seq_lens = in_pool.seq_lens;
  CALL(vwd_index_update(session, &update, NULL));

  float level[HK * BLOCKS], trend[HK * BLOCKS], scores[HK * BLOCKS];
  int32_t predicted_ids[HK * CAP], predicted_counts[HK], selected_ids[HK * K], selected_counts[HK];

  vwd_predictor_reset_args reset = VWD_PREDICTOR_RESET_ARGS_INIT;
  reset.state.level = f32(level, 3, 1, HK, BLOCKS);
  reset.state.trend = f32(trend, 3, 1, HK, BLOCKS);
  CALL(vwd_predictor_reset(session, &reset, NULL));

  vwd_predictor_predict_args predict = VWD_PREDICTOR_PREDICT_ARGS_INIT;
  predict.block_size = S;
  predict.k = K;
  predict.ratio = 1.25f;
  predict.init_blocks = 1;
  predict.local_blocks = 1;
  predict.holt.alpha = 1;
  predict.state = reset.state;
  predict.seq_lens = in_pool.seq_lens;
  predict.predicted.ids = i32(predicted_ids, 3, 1, HK, CAP);
  predict.predicted.counts = i32(predicted_counts, 2, 1, HK);

  vwd_select_blocks_args select = VWD_SELECT_BLOCKS_ARGS_INIT;
  select.method = VWD_SELECT_MINMAX;
  select.block_size = S;
  select.k = K;
  select.init_blocks = 1;
  select.local_blocks = 1;
  select.index = &index;
  select.q = f32(q, 3, 1, HQ, D);
  select.seq_lens = in_pool.seq_lens;
  select.selected.ids = i32(selected_ids, 3, 1, HK, K);
  select.selected.counts = i32(selected_counts, 2, 1, HK);
  select.scores = f32(scores, 3, 1, HK, BLOCKS);

  vwd_predictor_update_args learn = VWD_PREDICTOR_UPDATE_ARGS_INIT;
  learn.block_size = S;
  learn.holt = predict.holt;
  learn.state = reset.state;
  learn.seq_lens = in_pool.seq_lens;
  learn.scores = select.scores;

  vwd_attention_args attend = VWD_ATTENTION_ARGS_INIT;
  attend.block_size = S;
  attend.q = select.q;
  attend.list = select.selected;

  int early = 0, late = 0, late_at_first = 0;
  for (now = 1; now <= STEPS; now++) {
    CALL(vwd_predictor_predict(session, &predict, NULL));
    early += fetch(predicted_ids, predicted_counts, CAP); /* before q of this step exists */
    CALL(vwd_select_blocks(session, &select, NULL));
    late += fetch(selected_ids, selected_counts, K);
    if (now == 1) late_at_first = late;

    attend.kv = &in_slots;
    attend.out = f32(out, 3, 1, HQ, D);
    CALL(vwd_attention(session, &attend, NULL));

    attend.kv = &in_pool;
    attend.out = f32(reference, 3, 1, HQ, D);
    CALL(vwd_attention(session, &attend, NULL));
    CHECK(memcmp(out, reference, HQ * D * sizeof(float)) == 0);

    CALL(vwd_predictor_update(session, &learn, NULL));
    for (int n = 0; n < HQ * D; n++) q[n] += 0.4f * uniform(&seed);
  }
  late -= late_at_first; /* nothing is known before the first step */
  printf("%d blocks travelled ahead of their selection, %d after it, in %d steps\n", early, late, STEPS);
  CHECK(late < STEPS); /* less than one of the 16 that a step reads */

  free(key_min);
  free(key_max);
  free(reference);
  free(out);
  free(q);
  free(slots);
  CALL(vwd_pinned_free(session, pool, NULL));
  vwd_session_release(session);
  return 0;
}
