/*
 * How many slots a layer needs: the hit rate of a trace of selections against the capacity, by the cache's own rule.
 *
 *     cache_sim [TRACE]
 *
 * TRACE has a line for each list, "KV head: block block …", and an empty line after each step. Without one, a trace is made
 * whose lists keep four of five blocks from step to step. What counts is a cache of short blocks on a CPU session, which hits
 * and misses as one of any size would.
 *
 * Shown: more slots never hit less here, and slots for every block miss each block once.
 */
#include "common.h"

enum { D = 16, AHEAD = 2 /* the newest blocks are in the tail: two that no list names */ };

/* Lists of all steps, each KV head's padded to `cap`. */
typedef struct {
  int steps, heads, cap, blocks;
  int32_t *ids, *counts;
} trace;

static int larger(int a, int b) { return a > b ? a : b; }

static trace room_for(int steps, int heads, int cap) {
  trace t = {steps, heads, cap, 0, ints((size_t)steps * heads * cap), ints((size_t)steps * heads)};
  return t;
}

static void add(trace *t, int step, int head, int32_t id) {
  size_t list = (size_t)step * t->heads + head;
  t->ids[list * t->cap + t->counts[list]++] = id;
  t->blocks = larger(t->blocks, id + 1);
}

/* One number of the file after the other; ' ' between blocks, ':' after a head, '\n' at the end of a list or, alone, a step. */
static int next(FILE *file, long *number) {
  int c = fgetc(file);
  while (c == ' ' || c == '\t' || c == '\r') c = fgetc(file);
  if (c == EOF || c == '\n') return c;
  ungetc(c, file);
  CHECK(fscanf(file, "%ld", number) == 1 && *number >= 0 && *number < 1 << 24);
  c = fgetc(file);
  if (c == ':') return ':';
  ungetc(c, file);
  return ' ';
}

/* Reads twice: first how much there is. */
static trace read_trace(const char *path) {
  FILE *file = fopen(path, "r");
  CHECK(file != NULL);
  trace t = {0, 0, 0, 0, NULL, NULL};
  for (int pass = 0; pass < 2; pass++) {
    int step = 0, lists = 0, head = 0, heads = 0, cap = 0, in_list = 0, count = 0, what;
    long number = 0;
    rewind(file);
    while ((what = next(file, &number)) != EOF) {
      if (what == ':') {
        head = (int)number;
        heads = larger(heads, head + 1);
        in_list = 1;
        count = 0;
        lists++;
      } else if (what == ' ') {
        CHECK(in_list);
        cap = larger(cap, ++count);
        if (pass) add(&t, step, head, (int32_t)number);
      } else {
        if (!in_list && lists > 0) {
          step++;
          lists = 0;
        }
        in_list = 0;
      }
    }
    if (!pass) t = room_for(step + (lists > 0), heads, cap);
  }
  fclose(file);
  return t;
}

static trace made(void) {
  enum { STEPS = 60, HEADS = 2, K = 24, BLOCKS = 400 };
  trace t = room_for(STEPS, HEADS, K);
  uint64_t seed = 5;
  int32_t lists[HEADS][K];
  for (int step = 0; step < STEPS; step++) {
    for (int head = 0; head < HEADS; head++) {
      for (int j = 0; j < K; j++) {
        if (step == 0 || uniform(&seed) > 0.6f) {
          const float u = uniform(&seed); /* some blocks are wanted more often than others */
          lists[head][j] = (int32_t)(u * u * (BLOCKS - 1));
        }
        add(&t, step, head, lists[head][j]);
      }
    }
  }
  return t;
}

/* Hits of all entries, with so many slots. */
static double hit_rate(const vwd_session *session, const trace *t, int slots) {
  vwd_kv_cache_options options = VWD_KV_CACHE_OPTIONS_INIT;
  options.layers = 1;
  options.kv_heads = (uint32_t)t->heads;
  options.block_size = 1;
  options.key_dim = options.value_dim = D;
  options.dtype_code = FLOAT;
  options.dtype_bits = 16;
  options.max_sequences = 1;
  options.max_blocks = options.host_blocks = (uint32_t)(t->blocks + AHEAD);
  options.slots = (uint32_t)slots;
  options.hold = 1;
  vwd_kv_cache *cache = NULL;
  CALL(vwd_kv_cache_create(session, &options, &cache));
  uint32_t sequence = 0;
  CALL(vwd_kv_cache_add(cache, &sequence, NULL));
  CALL(vwd_kv_cache_extend(cache, sequence, options.max_blocks, NULL));
  int32_t number = 0, begin = 0;
  float *zeros = floats((size_t)options.max_blocks * t->heads * D / 2);
  vwd_kv_cache_append_args append = VWD_KV_CACHE_APPEND_ARGS_INIT;
  append.sequences = i32(&number, 1, 1);
  append.begin = i32(&begin, 1, 1);
  append.k = append.v = array(zeros, FLOAT, 16, 4, 1, t->blocks + AHEAD, t->heads, D);
  CALL(vwd_kv_cache_append(cache, &append, NULL));

  int32_t *found = ints((size_t)t->heads * t->cap);
  for (int step = 0; step < t->steps; step++) {
    size_t first = (size_t)step * t->heads;
    vwd_kv_cache_resolve_args resolve = VWD_KV_CACHE_RESOLVE_ARGS_INIT;
    resolve.sequences = append.sequences;
    resolve.wanted.ids = i32(t->ids + first * t->cap, 3, 1, t->heads, t->cap);
    resolve.wanted.counts = i32(t->counts + first, 2, 1, t->heads);
    resolve.wanted.slots = i32(found, 3, 1, t->heads, t->cap);
    CALL(vwd_kv_cache_resolve(cache, &resolve, NULL));
    CALL(vwd_kv_cache_wait(cache, 0, NULL));
  }
  vwd_kv_cache_stats stats = VWD_KV_CACHE_STATS_INIT;
  CALL(vwd_kv_cache_info(cache, &stats));
  vwd_kv_cache_release(cache);
  free(zeros);
  free(found);
  return stats.hits + stats.misses == 0 ? 1 : (double)stats.hits / (double)(stats.hits + stats.misses);
}

int main(int argc, char **argv) {
  vwd_session *session = cpu_session();
  trace t = argc > 1 ? read_trace(argv[1]) : made();
  CHECK(t.heads > 0 && t.cap > 0);
  const int step = t.heads * t.cap, all = larger(t.heads * t.blocks, step);
  printf("%d steps, %d KV heads, up to %d of %d blocks each\n", t.steps, t.heads, t.cap, t.blocks);
  printf("     slots   of a step   of all   hits\n");
  double before = 0;
  for (int slots = step, last = 0; !last; slots += larger(slots / 2, 1)) {
    last = slots >= all;
    if (last) slots = all;
    double rate = hit_rate(session, &t, slots);
    printf("%10d %10.2f× %7.1f%% %5.1f%%\n", slots, (double)slots / step, 100.0 * slots / all, 100 * rate);
    if (argc == 1) CHECK(rate >= before - 0.01); /* least recently used: more slots hold all that fewer do */
    before = rate;
  }
  if (argc == 1) CHECK(before > 0.7);
  vwd_session_release(session);
  free(t.ids);
  free(t.counts);
  return 0;
}
