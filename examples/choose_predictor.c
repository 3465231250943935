/*
 * Which predictor of the next selection to take: the previous step's scores, Holt's smoothing of them, or a forecast's queries.
 *
 * Shown: score rows of a prompt's last positions, by the layer's own queries and by those that a forecast projects from the residual
 * stream, and vwd_predictor_calibrate, which rates all three on the same steps. Queries of the first prompt follow what changes slowly,
 * those of the second one what the residual stream says of the token. The first is predicted by past scores, the second by the forecast.
 */
#include "common.h"

enum {
  T = 48,         /* positions whose scores are kept */
  LEARNT = 160,   /* positions of other text that the forecast was fitted on */
  WIDTH = 24,     /* of the residual stream */
  HQ = 4, HK = 2, D = 16,
  S = 8, BLOCKS = 64,
  K = 10
};

static vwd_session *session;
static float to_q[HQ * D][WIDTH];

/* Residual streams x [count, WIDTH] and queries q [count, HQ, D] of a text; `share` of a query comes from x, the rest changes slowly. */
static void text(int count, float share, uint64_t *seed, float *x, float *q) {
  float slow[HQ * D];
  for (int c = 0; c < HQ * D; c++) slow[c] = 2 * uniform(seed);
  for (int t = 0; t < count; t++) {
    for (int c = 0; c < WIDTH; c++) x[t * WIDTH + c] = uniform(seed);
    for (int c = 0; c < HQ * D; c++) {
      slow[c] += 0.2f * uniform(seed);
      float sum = 0;
      for (int n = 0; n < WIDTH; n++) sum += to_q[c][n] * x[t * WIDTH + n];
      q[t * HQ * D + c] = share * sum + (1 - share) * slow[c];
    }
  }
}

static vwd_forecast *forecast_of(float share, uint64_t *seed) {
  vwd_forecast_options options = VWD_FORECAST_OPTIONS_INIT;
  options.layers = 1;
  options.input_dim = WIDTH;
  options.q_heads = HQ;
  options.head_dim = D;
  vwd_forecast *forecast = NULL;
  CALL(vwd_forecast_create(session, &options, &forecast));
  float *x = floats(LEARNT * WIDTH), *q = floats(LEARNT * HQ * D);
  text(LEARNT, share, seed, x, q);
  vwd_forecast_accumulate_args args = VWD_FORECAST_ACCUMULATE_ARGS_INIT;
  args.x = f32(x, 2, LEARNT, WIDTH);
  args.q = f32(q, 3, LEARNT, HQ, D);
  CALL(vwd_forecast_accumulate(forecast, &args));
  CALL(vwd_forecast_solve(forecast, 0));
  free(q);
  free(x);
  return forecast;
}

/* Summaries of the prompt's blocks, which every row reads: their batch has a stride of 0. */
static vwd_index index_of_prompt(uint64_t *seed, float *key_max, float *key_min) {
  float *keys = floats(BLOCKS * S * HK * D);
  int32_t len = BLOCKS * S;
  for (int j = 0; j < BLOCKS; j++) {
    for (int c = 0; c < HK * D; c++) {
      float middle = uniform(seed);
      for (int t = j * S; t < (j + 1) * S; t++) keys[t * HK * D + c] = middle + 0.2f * uniform(seed);
    }
  }
  vwd_index index = VWD_INDEX_INIT;
  index.kind = VWD_INDEX_MINMAX;
  index.block_size = S;
  index.key_max = f32(key_max, 4, 1, BLOCKS, HK, D);
  index.key_min = f32(key_min, 4, 1, BLOCKS, HK, D);
  vwd_index_update_args args = VWD_INDEX_UPDATE_ARGS_INIT;
  args.index = &index;
  args.k = f32(keys, 4, 1, BLOCKS * S, HK, D);
  args.seq_lens = i32(&len, 1, 1);
  CALL(vwd_index_update(session, &args, NULL));
  free(keys);
  index.key_max.shape[0] = index.key_min.shape[0] = T;
  index.key_max.strides[0] = index.key_min.strides[0] = 0;
  return index;
}

/* The score rows [T, HK, BLOCKS] of queries [T, HQ, D]. */
static void score(const vwd_index *index, float *q, float *scores) {
  int32_t *ids = ints(T * HK * K), *counts = ints(T * HK), *lens = ints(T);
  for (int t = 0; t < T; t++) lens[t] = BLOCKS * S;
  vwd_select_blocks_args args = VWD_SELECT_BLOCKS_ARGS_INIT;
  args.method = VWD_SELECT_MINMAX;
  args.block_size = S;
  args.k = K;
  args.init_blocks = args.local_blocks = 1;
  args.index = index;
  args.q = f32(q, 3, T, HQ, D);
  args.seq_lens = i32(lens, 1, T);
  args.selected.ids = i32(ids, 3, T, HK, K);
  args.selected.counts = i32(counts, 2, T, HK);
  args.scores = f32(scores, 3, T, HK, BLOCKS);
  CALL(vwd_select_blocks(session, &args, NULL));
  free(lens);
  free(counts);
  free(ids);
}

/* The hit rate of the best point: of a given one, or of the built-in grid where it is NULL. */
static double rate(vwd_tensor scores, const vwd_holt *point, vwd_holt *best) {
  int32_t *counts = ints(T * 2);
  for (int n = 0; n < T * 2; n++) counts[n] = BLOCKS;
  vwd_predictor_calibrate_args args = VWD_PREDICTOR_CALIBRATE_ARGS_INIT;
  args.k = K;
  args.init_blocks = args.local_blocks = 1;
  args.ratio = 1.25f;
  args.grid = point;
  args.grid_count = point ? 1 : 0;
  args.scores = scores;
  args.block_counts = i32(counts, 2, (int)scores.shape[0], (int)scores.shape[1]);
  double hit_rate = 0;
  CALL(vwd_predictor_calibrate(session, &args, best, &hit_rate));
  free(counts);
  return hit_rate;
}

/* The name of the best predictor. */
static const char *choose(float share) {
  uint64_t seed = 11;
  for (int c = 0; c < HQ * D; c++) {
    for (int n = 0; n < WIDTH; n++) to_q[c][n] = 0.5f * uniform(&seed);
  }
  float *key_max = floats(BLOCKS * HK * D), *key_min = floats(BLOCKS * HK * D);
  const vwd_index index = index_of_prompt(&seed, key_max, key_min);
  vwd_forecast *forecast = forecast_of(share, &seed);
  float *x = floats(T * WIDTH), *q = floats(T * HQ * D), *foreseen = floats(T * HQ * D);
  text(T, share, &seed, x, q);
  int32_t positions[T] = {0}; /* no rotary embedding */
  vwd_forecast_project_args project = VWD_FORECAST_PROJECT_ARGS_INIT;
  project.x = f32(x, 2, T, WIDTH);
  project.positions = i32(positions, 1, T);
  project.q = f32(foreseen, 3, T, HQ, D);
  CALL(vwd_forecast_project(forecast, &project, NULL));

  /* Rows of the forecast's queries, then those of the layer's own. */
  float *scores = floats(2 * T * HK * BLOCKS), *own = scores + T * HK * BLOCKS;
  score(&index, foreseen, scores);
  score(&index, q, own);

  const vwd_holt previous = {1, 0, 0};
  vwd_holt point, ignored;
  double by_previous = rate(f32(own, 4, 1, T, HK, BLOCKS), &previous, &ignored);
  double by_holt = rate(f32(own, 4, 1, T, HK, BLOCKS), NULL, &point);

  /* A forecast's row and the true one are a history of two steps. The first position has no step before it, and is left out here, too. */
  vwd_tensor pairs = f32(scores + HK * BLOCKS, 4, T - 1, 2, HK, BLOCKS);
  pairs.strides[0] = HK * BLOCKS;
  pairs.strides[1] = T * HK * BLOCKS;
  double by_forecast = rate(pairs, &previous, &ignored);

  const char *best = by_forecast > by_holt ? "forecast" : by_holt > by_previous ? "Holt" : "previous step";
  printf("%.0f %% of a query from the residual stream: previous step %.3f, Holt (alpha %.1f) %.3f, forecast %.3f: %s\n", 100 * share,
         by_previous, point.alpha, by_holt, by_forecast, best);
  CHECK(by_holt >= by_previous);
  free(scores);
  free(foreseen);
  free(q);
  free(x);
  vwd_forecast_release(forecast);
  free(key_min);
  free(key_max);
  return best;
}

int main(void) {
  session = cpu_session();
  CHECK(strcmp(choose(0.3f), "forecast") != 0);
  CHECK(strcmp(choose(0.8f), "forecast") == 0);
  vwd_session_release(session);
  return 0;
}
