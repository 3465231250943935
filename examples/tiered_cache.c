/*
 * Decoding beyond what the device may hold: all KV in host memory, a few slots where attention reads.
 *
 * Shown: vwd_kv_cache takes a prompt in chunks and then token by token; each step's selection is resolved to slots, what is
 * there is attended at once, and repair folds in what had to travel. The result is attention over the same blocks of the
 * whole KV, bit for bit in what it covers. A fork shares the prompt, and a sequence that finds no room leaves the others
 * as they are.
 */
#include "common.h"

enum {
  HK = 2, G = 2, HQ = HK * G, D = 32,
  S = 16,            /* tokens of a block */
  PROMPT = 700, CHUNK = 200, STEPS = 40,
  T = PROMPT + STEPS, BLOCKS = (T + S - 1) / S,
  K = 6,             /* blocks selected for each KV head */
  SLOTS = 2 * HK * K /* the selections of two steps: a quarter of the blocks */
};

static vwd_session *session;
static vwd_kv_cache *cache;
static float *keys, *values; /* [T, HK, D]: what the cache is compared with */
static float *key_max, *key_min; /* [BLOCKS, HK, D] */
static vwd_kv_cache_layer slots = VWD_KV_CACHE_LAYER_INIT;

/* Tokens begin … begin + count − 1 of the sequence. */
static void append(int32_t sequence, int32_t begin, int count) {
  CALL(vwd_kv_cache_extend(cache, (uint32_t)sequence, (uint64_t)(begin + count), NULL));
  size_t first = (size_t)begin * HK * D;
  vwd_kv_cache_append_args append = VWD_KV_CACHE_APPEND_ARGS_INIT;
  append.sequences = i32(&sequence, 1, 1);
  append.begin = i32(&begin, 1, 1);
  append.k = f32(keys + first, 4, 1, count, HK, D);
  append.v = f32(values + first, 4, 1, count, HK, D);
  CALL(vwd_kv_cache_append(cache, &append, NULL));
}

static vwd_index summaries(void) {
  vwd_index index = VWD_INDEX_INIT;
  index.kind = VWD_INDEX_MINMAX;
  index.block_size = S;
  index.key_max = f32(key_max, 4, 1, BLOCKS, HK, D);
  index.key_min = f32(key_min, 4, 1, BLOCKS, HK, D);
  return index;
}

/* Summarises the prompt, whose keys are at hand; later each new token, from the sequence's newest blocks. */
static void summarise(const vwd_index *index, vwd_tensor k, vwd_tensor page_table, int32_t begin, int32_t len) {
  vwd_index_update_args update = VWD_INDEX_UPDATE_ARGS_INIT;
  update.index = index;
  update.k = k;
  update.page_table = page_table;
  update.seq_lens = i32(&len, 1, 1);
  update.begin = i32(&begin, 1, 1);
  CALL(vwd_index_update(session, &update, NULL));
}

/* One row of a table. */
static vwd_tensor row(vwd_tensor table, int32_t n) {
  table.data = (int32_t *)table.data + n * table.strides[0];
  table.shape[0] = 1;
  return table;
}

typedef struct {
  int32_t ids[HK * K], counts[HK], slots[HK * K];
} list;

static vwd_block_list view(list *of, int with_slots) {
  vwd_block_list list = VWD_BLOCK_LIST_INIT;
  list.ids = i32(of->ids, 3, 1, HK, K);
  list.counts = i32(of->counts, 2, 1, HK);
  if (with_slots) list.slots = i32(of->slots, 3, 1, HK, K);
  return list;
}

/* Attention over the selected blocks, with those that are there first. Returns how many had to travel. */
static int attend(int32_t sequence, int32_t len, float *q, list *selected, float *out) {
  list resident;
  int32_t missed[HK];
  vwd_kv_cache_resolve_args resolve = VWD_KV_CACHE_RESOLVE_ARGS_INIT;
  resolve.sequences = i32(&sequence, 1, 1);
  resolve.wanted = view(selected, 1);
  resolve.resident = view(&resident, 1);
  resolve.missed_counts = i32(missed, 2, 1, HK);
  CALL(vwd_kv_cache_resolve(cache, &resolve, NULL));
  CALL(vwd_kv_cache_fetch(cache, 0, NULL)); /* on a GPU the copies run beside what follows */

  vwd_paged_kv kv = VWD_PAGED_KV_INIT;
  kv.k = slots.k;
  kv.v = slots.v;
  kv.seq_lens = i32(&len, 1, 1);
  float acc[HQ * D], m[HQ], l[HQ];
  vwd_attention_args attention = VWD_ATTENTION_ARGS_INIT;
  attention.block_size = S;
  attention.kv = &kv;
  attention.q = f32(q, 3, 1, HQ, D);
  attention.list = view(&resident, 1);
  attention.out = f32(out, 3, 1, HQ, D);
  attention.state.acc = f32(acc, 3, 1, HQ, D);
  attention.state.m = f32(m, 2, 1, HQ);
  attention.state.l = f32(l, 2, 1, HQ);
  CALL(vwd_attention(session, &attention, NULL));

  CALL(vwd_kv_cache_wait(cache, 0, NULL));
  vwd_repair_args repair = VWD_REPAIR_ARGS_INIT;
  repair.mode = VWD_REPAIR_SUPERSET; /* what is resident was selected: nothing has to be taken out */
  repair.block_size = S;
  repair.kv = &kv;
  repair.q = attention.q;
  repair.predicted = view(&resident, 0);
  repair.selected = view(selected, 1);
  repair.predicted_state = attention.state;
  repair.out = attention.out;
  CALL(vwd_repair(session, &repair, NULL));
  return missed[0] + missed[1];
}

/* The same over the whole KV. */
static void attend_whole(int32_t len, float *q, list *selected, float *out) {
  vwd_paged_kv kv = VWD_PAGED_KV_INIT;
  kv.k = f32(keys, 4, 1, T, HK, D);
  kv.v = f32(values, 4, 1, T, HK, D);
  kv.seq_lens = i32(&len, 1, 1);
  vwd_attention_args attention = VWD_ATTENTION_ARGS_INIT;
  attention.block_size = S;
  attention.kv = &kv;
  attention.q = f32(q, 3, 1, HQ, D);
  attention.list = view(selected, 0);
  attention.out = f32(out, 3, 1, HQ, D);
  CALL(vwd_attention(session, &attention, NULL));
}

int main(void) {
  session = cpu_session();
  vwd_kv_cache_options options = VWD_KV_CACHE_OPTIONS_INIT;
  options.layers = 1;
  options.kv_heads = HK;
  options.block_size = S;
  options.key_dim = options.value_dim = D;
  options.dtype_code = FLOAT;
  options.dtype_bits = 32;
  options.max_sequences = 2;
  options.max_blocks = BLOCKS;
  options.host_blocks = BLOCKS + 1;
  options.slots = SLOTS;
  vwd_kv_cache_sizes sizes = VWD_KV_CACHE_SIZES_INIT;
  CALL(vwd_kv_cache_capacity(&options, &sizes));
  CALL(vwd_kv_cache_create(session, &options, &cache));
  CALL(vwd_kv_cache_view(cache, 0, &slots));

  keys = floats((size_t)T * HK * D);
  values = floats((size_t)T * HK * D);
  key_max = floats((size_t)BLOCKS * HK * D);
  key_min = floats((size_t)BLOCKS * HK * D);
  uint64_t seed = 11;
  for (int n = 0; n < T * HK * D; n++) {
    keys[n] = uniform(&seed);
    values[n] = uniform(&seed);
  }

  uint32_t sequence = 0, fork = 0;
  CALL(vwd_kv_cache_add(cache, &sequence, NULL));
  for (int32_t begin = 0; begin < PROMPT; begin += CHUNK) {
    append((int32_t)sequence, begin, begin + CHUNK < PROMPT ? CHUNK : PROMPT - begin);
  }
  const vwd_index index = summaries();
  const vwd_tensor no_table = VWD_TENSOR_INIT;
  summarise(&index, f32(keys, 4, 1, T, HK, D), no_table, 0, PROMPT);

  float q[HQ * D], out[HQ * D], whole[HQ * D];
  for (int n = 0; n < HQ * D; n++) q[n] = uniform(&seed);
  int travelled = 0;
  for (int32_t len = PROMPT + 1; len <= T; len++) {
    append((int32_t)sequence, len - 1, 1);
    summarise(&index, slots.tail_k, row(slots.tail_table, (int32_t)sequence), len - 1, len);
    for (int n = 0; n < HQ * D; n++) q[n] += 0.1f * uniform(&seed); /* the selection drifts from step to step */
    list selected;
    vwd_select_blocks_args select = VWD_SELECT_BLOCKS_ARGS_INIT;
    select.method = VWD_SELECT_MINMAX;
    select.block_size = S;
    select.k = K;
    select.init_blocks = 1;
    select.local_blocks = 2;
    select.index = &index;
    select.q = f32(q, 3, 1, HQ, D);
    select.seq_lens = i32(&len, 1, 1);
    select.selected = view(&selected, 0);
    CALL(vwd_select_blocks(session, &select, NULL));
    travelled += attend((int32_t)sequence, len, q, &selected, out);
    attend_whole(len, q, &selected, whole);
    CHECK(relative_error(out, whole, HQ * D) < 1e-6); /* float32 sums, joined in another order */
  }

  /* A second sequence begins with the same prompt: one block more, for the tokens past its whole blocks. */
  vwd_kv_cache_stats before = VWD_KV_CACHE_STATS_INIT, after = VWD_KV_CACHE_STATS_INIT;
  CALL(vwd_kv_cache_info(cache, &before));
  CALL(vwd_kv_cache_fork(cache, sequence, PROMPT, &fork, NULL));
  CALL(vwd_kv_cache_info(cache, &after));
  CHECK(after.blocks_in_use == before.blocks_in_use + 1 && after.blocks_free == 0);
  /* There is no room for more; both sequences stay as they are. */
  CHECK(vwd_kv_cache_extend(cache, fork, T, NULL) == VWD_ERROR_OUT_OF_MEMORY);
  CALL(vwd_kv_cache_free(cache, sequence, NULL));
  CALL(vwd_kv_cache_extend(cache, fork, T, NULL));

  printf("%d tokens in %d KiB of slots and tails; of %d blocks selected %d travelled\n", T,
         (int)(sizes.total_slots * sizes.run_bytes >> 10), STEPS * HK * K, travelled);
  CHECK(travelled > 0 && travelled < STEPS * HK * K / 2);
  vwd_kv_cache_release(cache);
  vwd_session_release(session);
  free(keys);
  free(values);
  free(key_max);
  free(key_min);
  return 0;
}
