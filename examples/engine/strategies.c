/* What attention reads in each mode. */
#include "strategies.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "codes.h"

/* --- Lists --- */

bool list_init(list *l, int heads, int cap) {
  *l = (list){calloc((size_t)heads * (size_t)cap, sizeof(int32_t)), calloc((size_t)heads, sizeof(int32_t)), heads, cap};
  return l->ids && l->counts;
}

void list_free(list *l) {
  free(l->ids);
  free(l->counts);
}

static vwd_block_list list_view(const list *l) {
  vwd_block_list view = VWD_BLOCK_LIST_INIT;
  view.ids = TENSOR(l->ids, INT32, 1, l->heads, l->cap);
  view.counts = TENSOR(l->counts, INT32, 1, l->heads);
  return view;
}

int predicted_blocks(const decoder *d, float ratio) { return (int)ceilf(ratio * (float)d->select.k); }

/* --- Bytes: K and V of a token, and what selection reads, per KV head --- */

/* The few exact tokens of a cache in INT4 are counted as coded. */
static int64_t token_bytes(const decoder *d) {
  return d->cache.codes ? (int64_t)codes_token_bytes(&d->cache) : (int64_t)d->shape.head_dim * 2 * (int64_t)sizeof(uint16_t);
}

static int64_t summary_bytes(const decoder *d) { return (int64_t)d->shape.head_dim * 2 * (int64_t)sizeof(uint16_t); }

/* The tail is in every list, and only its filled slots are read. */
static void count_blocks(run *r, const list *l, int32_t seq_len) {
  for (int h = 0; h < l->heads; h++)
    r->n.kv_bytes += ((int64_t)l->counts[h] * PAGE - (blocks_of(seq_len) * PAGE - seq_len)) * token_bytes(r->d);
}

/* --- One call of Vanward each --- */

bool select_from(run *r, const vwd_index *index, uint32_t method, int block, const int32_t *seq_len, const float *q, int k,
                 list *out, float *scores, float *log_mass) {
  const decoder *d = r->d;
  vwd_select_blocks_args args = VWD_SELECT_BLOCKS_ARGS_INIT;
  args.method = method;
  args.block_size = (uint32_t)block;
  args.k = (uint32_t)k;
  args.init_blocks = (uint32_t)d->select.init;
  args.local_blocks = (uint32_t)((d->select.local * PAGE + block - 1) / block);
  args.index = index;
  args.q = q_view(d, q, 1);
  args.seq_lens = TENSOR(seq_len, INT32, 1);
  args.selected = list_view(out);
  if (scores) args.scores = TENSOR(scores, FLOAT32, 1, d->shape.kv_heads, d->cache.max_pages);
  if (log_mass) args.log_mass = TENSOR(log_mass, FLOAT32, 1, d->shape.heads);
  return succeeded(vwd_select_blocks(d->session, &args, NULL), "vwd_select_blocks");
}

bool select_blocks(run *r, int layer, const int32_t *seq_len, const float *q, int k, list *out, float *scores) {
  const vwd_index index = kv_minmax(&r->d->cache, layer, r->seq.table, 1);
  r->n.index_bytes += (int64_t)blocks_of(*seq_len) * r->d->shape.kv_heads * summary_bytes(r->d);
  return select_from(r, &index, VWD_SELECT_MINMAX, PAGE, seq_len, q, k, out, scores, NULL);
}

bool select_by_axis(run *r, int layer, const int32_t *seq_len, const float *q, int k, list *out, float *log_mass) {
  const vwd_index index = axes_index(&r->d->cache, layer, r->seq.table, 1);
  r->n.index_bytes += (int64_t)blocks_of(*seq_len) * r->d->shape.kv_heads * axes_bytes(&r->d->cache);
  return select_from(r, &index, VWD_SELECT_AXIS, PAGE, seq_len, q, k, out, NULL, log_mass);
}

static bool select_tokens(run *r, int layer, const int32_t *seq_len, const float *q) {
  const decoder *d = r->d;
  const vwd_index index = kv_label(&d->cache, layer, r->seq.table, 1);
  vwd_select_tokens_args args = VWD_SELECT_TOKENS_ARGS_INIT;
  args.block_size = PAGE;
  args.k = (uint32_t)d->select.tokens;
  args.init_tokens = (uint32_t)(d->select.init * PAGE);
  args.local_tokens = (uint32_t)(d->select.local * PAGE);
  args.index = &index;
  args.q = q_view(d, q, 1);
  args.seq_lens = TENSOR(seq_len, INT32, 1);
  args.candidates = list_view(&r->coarse);
  args.selected = list_view(&r->tokens);
  for (int h = 0; h < r->coarse.heads; h++) /* INT4 labels, scale and minimum of every candidate token */
    r->n.index_bytes += (int64_t)r->coarse.counts[h] * PAGE * (d->cache.label_channels / 2 + 4);
  return succeeded(vwd_select_tokens(d->session, &args, NULL), "vwd_select_tokens");
}

static vwd_attention_partials partials_view(const run *r, const list *l) {
  const model_shape *s = &r->d->shape;
  return (vwd_attention_partials){TENSOR(r->partial.acc, FLOAT32, 1, s->heads, l->cap, s->head_dim),
                                  TENSOR(r->partial.m, FLOAT32, 1, s->heads, l->cap),
                                  TENSOR(r->partial.l, FLOAT32, 1, s->heads, l->cap)};
}

bool attend_list(run *r, const attention_call *call, const int32_t *seq_len, const list *l, int block_size, bool keep) {
  const vwd_paged_kv kv = kv_view(&r->seq, call->layer, seq_len, 1);
  vwd_attention_args args = VWD_ATTENTION_ARGS_INIT;
  args.block_size = (uint32_t)block_size;
  args.kv = &kv;
  args.q = q_view(r->d, call->q, 1);
  args.list = list_view(l);
  args.out = q_view(r->d, call->out, 1);
  if (keep) args.partials = partials_view(r, l);
  return succeeded(vwd_attention(r->d->session, &args, NULL), "vwd_attention");
}

bool attend_with_tail(run *r, const attention_call *call, const int32_t *seq_len, const list *l, const tail *t, int block_size) {
  const model_shape *s = &r->d->shape;
  const vwd_paged_kv kv = kv_view(&r->seq, call->layer, seq_len, 1);
  const vwd_remainder remainder = tail_view(t, s, call->layer);
  vwd_attention_args args = VWD_ATTENTION_ARGS_INIT;
  args.block_size = (uint32_t)block_size;
  args.kv = &kv;
  args.q = q_view(r->d, call->q, 1);
  args.list = list_view(l);
  args.remainder = &remainder;
  args.log_mass = TENSOR(r->log_mass[call->layer % 2], FLOAT32, 1, s->heads);
  args.state.acc = TENSOR(r->state.acc, FLOAT32, 1, s->heads, s->head_dim);
  args.state.m = TENSOR(r->state.m, FLOAT32, 1, s->heads);
  args.state.l = TENSOR(r->state.l, FLOAT32, 1, s->heads);
  args.out = q_view(r->d, call->out, 1);
  r->n.index_bytes += (int64_t)s->kv_heads * tail_bytes(s);
  return succeeded(vwd_attention(r->d->session, &args, NULL), "vwd_attention");
}

static bool repair(run *r, const attention_call *call, const int32_t *seq_len, const list *guess) {
  const vwd_paged_kv kv = kv_view(&r->seq, call->layer, seq_len, 1);
  vwd_repair_args args = VWD_REPAIR_ARGS_INIT;
  args.mode = VWD_REPAIR_EXACT;
  args.block_size = PAGE;
  args.kv = &kv;
  args.q = q_view(r->d, call->q, 1);
  args.predicted = list_view(guess);
  args.selected = list_view(&r->selected);
  args.predicted_partials = partials_view(r, guess);
  args.out = q_view(r->d, call->out, 1);
  args.missed_counts = TENSOR(r->missed, INT32, 1, r->d->shape.kv_heads);
  if (!succeeded(vwd_repair(r->d->session, &args, NULL), "vwd_repair")) return false;
  for (int h = 0; h < r->selected.heads; h++) {
    r->n.selected += r->selected.counts[h];
    r->n.missed += r->missed[h];
    r->n.kv_bytes += (int64_t)r->missed[h] * PAGE * token_bytes(r->d);
  }
  return true;
}

static vwd_predictor_state predictor_view(const decoder *d, const predictor *p, int layer) {
  size_t at = (size_t)layer * (size_t)(d->shape.kv_heads * d->cache.max_pages);
  return (vwd_predictor_state){TENSOR(p->level + at, FLOAT32, 1, d->shape.kv_heads, d->cache.max_pages),
                               TENSOR(p->trend + at, FLOAT32, 1, d->shape.kv_heads, d->cache.max_pages)};
}

bool predict(const decoder *d, const predictor *p, int layer, const int32_t *seq_len, float ratio, list *out) {
  vwd_predictor_predict_args args = VWD_PREDICTOR_PREDICT_ARGS_INIT;
  args.block_size = PAGE;
  args.k = (uint32_t)d->select.k;
  args.init_blocks = (uint32_t)d->select.init;
  args.local_blocks = (uint32_t)d->select.local;
  args.ratio = ratio;
  args.holt = p->holt;
  args.state = predictor_view(d, p, layer);
  args.seq_lens = TENSOR(seq_len, INT32, 1);
  args.predicted = list_view(out);
  return succeeded(vwd_predictor_predict(d->session, &args, NULL), "vwd_predictor_predict");
}

bool learn(const decoder *d, const predictor *p, int layer, const int32_t *seq_len, const float *scores) {
  vwd_predictor_update_args args = VWD_PREDICTOR_UPDATE_ARGS_INIT;
  args.block_size = PAGE;
  args.holt = p->holt;
  args.state = predictor_view(d, p, layer);
  args.seq_lens = TENSOR(seq_len, INT32, 1);
  args.scores = TENSOR(scores, FLOAT32, 1, d->shape.kv_heads, d->cache.max_pages);
  return succeeded(vwd_predictor_update(d->session, &args, NULL), "vwd_predictor_update");
}

bool forecast_queries(run *r, const attention_call *call) {
  const decoder *d = r->d;
  float *last = r->last_q + (size_t)call->layer * q_count(d);
  memcpy(last, call->q_plain, q_count(d) * sizeof(float));
  if (call->layer + 1 == d->shape.layers) return true;
  const int32_t position = call->positions[0];
  vwd_rope rope = VWD_ROPE_INIT;
  rope.style = VWD_ROPE_INTERLEAVED;
  rope.theta = d->shape.rope_base;
  vwd_forecast_project_args args = VWD_FORECAST_PROJECT_ARGS_INIT;
  args.layer = (uint32_t)call->layer;
  args.rope = &rope;
  args.x = TENSOR(call->residual, FLOAT32, 1, d->shape.hidden);
  args.previous = q_view(d, last + q_count(d), 1);
  args.positions = TENSOR(&position, INT32, 1);
  args.q = q_view(d, r->forecast_q, 1);
  return succeeded(vwd_forecast_project(d->forecast, &args, NULL), "vwd_forecast_project");
}

/* --- Attention of each mode --- */

static bool has_tail(strategy how) { return how == WITH_TAIL || how == FORESEEN_TAIL; }

bool summarize(run *r, int layer, int64_t begin, int64_t end) {
  if (r->how == DENSE) return true;
  const kv_cache *c = &r->d->cache;
  if (r->how == BY_AXIS || has_tail(r->how)) {
    const vwd_index axes = axes_index(c, layer, r->seq.table, 1);
    return update_index(r->d, layer, &r->seq, &axes, begin, end) &&
           (r->how == BY_AXIS || tail_extend(&r->tail, r->d->session, &r->d->shape, &r->seq, layer, (int32_t)end, PAGE));
  }
  vwd_index blocks = kv_minmax(c, layer, r->seq.table, 1), labels = kv_label(c, layer, r->seq.table, 1);
  return update_index(r->d, layer, &r->seq, &blocks, begin, end) &&
         (r->how != TWO_LEVEL || update_index(r->d, layer, &r->seq, &labels, begin, end));
}

/* The token enters the cache. */
bool append(run *r, const attention_call *call) {
  const int64_t position = call->positions[0];
  kv_write(&r->seq, call->layer, position, 1, call->k, call->v);
  return summarize(r, call->layer, position, position + 1);
}

static bool dense(void *context, const attention_call *call) {
  run *r = context;
  const int32_t seq_len = call->positions[0] + 1;
  r->n.kv_bytes += seq_len * r->d->shape.kv_heads * token_bytes(r->d);
  return append(r, call) && attend_dense(r->d, &r->seq, &seq_len, call);
}

static bool sparse(void *context, const attention_call *call) {
  run *r = context;
  const int32_t seq_len = call->positions[0] + 1;
  if (!append(r, call) || !select_blocks(r, call->layer, &seq_len, call->q, r->d->select.k, &r->selected, NULL)) return false;
  count_blocks(r, &r->selected, seq_len);
  return attend_list(r, call, &seq_len, &r->selected, PAGE, false);
}

static bool by_axis(void *context, const attention_call *call) {
  run *r = context;
  const int32_t seq_len = call->positions[0] + 1;
  const bool tail = has_tail(r->how);
  if (!append(r, call) || !select_by_axis(r, call->layer, &seq_len, call->q, r->d->select.k, &r->selected, tail ? r->log_mass[call->layer % 2] : NULL))
    return false;
  count_blocks(r, &r->selected, seq_len);
  return tail ? attend_with_tail(r, call, &seq_len, &r->selected, &r->tail, PAGE) : attend_list(r, call, &seq_len, &r->selected, PAGE, false);
}

static bool two_level(void *context, const attention_call *call) {
  run *r = context;
  const int32_t seq_len = call->positions[0] + 1;
  if (!append(r, call) || !select_blocks(r, call->layer, &seq_len, call->q, r->d->select.coarse, &r->coarse, NULL) ||
      !select_tokens(r, call->layer, &seq_len, call->q))
    return false;
  for (int h = 0; h < r->tokens.heads; h++) r->n.kv_bytes += r->tokens.counts[h] * token_bytes(r->d);
  return attend_list(r, call, &seq_len, &r->tokens, 1, false);
}

/* Guesses the next layer's blocks while this one has yet to begin. */
static bool forecast_next(run *r, const attention_call *call) {
  const int32_t seq_len = call->positions[0] + 1;
  int next = call->layer + 1;
  if (!forecast_queries(r, call)) return false;
  return next == r->d->shape.layers ||
         select_blocks(r, next, &seq_len, r->forecast_q, predicted_blocks(r->d, r->d->select.ratio),
                       &r->guess[next % 2], NULL);
}

/* Attends the guess and repairs it. On one CPU these are steps; on a device the guess is attended while selection runs.
 */
static bool speculative(void *context, const attention_call *call) {
  run *r = context;
  const decoder *d = r->d;
  const int32_t seq_len = call->positions[0] + 1;
  list *guess = &r->guess[call->layer % 2];
  bool guessed = r->how != FORECAST || call->layer > 0; /* nothing runs ahead of the first layer */
  if (r->how == FORECAST && !forecast_next(r, call)) return false;
  if (r->how != FORECAST && !predict(d, &r->predictor, call->layer, &seq_len, d->select.ratio, guess)) return false;
  if (!append(r, call)) return false;
  if (guessed) {
    count_blocks(r, guess, seq_len);
    if (!attend_list(r, call, &seq_len, guess, PAGE, true)) return false;
  }
  if (!select_blocks(r, call->layer, &seq_len, call->q, d->select.k, &r->selected, r->scores))
    return false;
  if (r->how != FORECAST && !learn(d, &r->predictor, call->layer, &seq_len, r->scores)) return false;
  if (guessed) return repair(r, call, &seq_len, guess);
  count_blocks(r, &r->selected, seq_len);
  return attend_list(r, call, &seq_len, &r->selected, PAGE, false);
}

/* Selects for the next layer from the tokens before this one, of which it has summaries; the new token's block comes last. */
static bool foresee_next(run *r, const attention_call *call) {
  const int32_t before = call->positions[0], block = before / PAGE;
  const int next = call->layer + 1;
  list *guess = &r->guess[next % 2];
  if (!forecast_queries(r, call)) return false;
  if (next == r->d->shape.layers) return true;
  const int k = predicted_blocks(r->d, r->d->select.ratio);
  if (!(r->how == FORESEEN ? select_blocks(r, next, &before, r->forecast_q, k, guess, NULL)
                           : select_by_axis(r, next, &before, r->forecast_q, k, guess, r->log_mass[next % 2])))
    return false;
  for (int h = 0; h < guess->heads; h++) {
    int32_t *ids = guess->ids + (size_t)h * (size_t)guess->cap, *count = &guess->counts[h];
    if (*count == 0 || ids[*count - 1] != block) ids[(*count)++] = block;
  }
  return true;
}

/* Attends the list that was selected a layer ahead, as it is: selection is not waited for. */
static bool foreseen(void *context, const attention_call *call) {
  run *r = context;
  const int32_t seq_len = call->positions[0] + 1;
  list *guess = &r->guess[call->layer % 2];
  const bool tail = r->how == FORESEEN_TAIL;
  if (!foresee_next(r, call)) return false;
  if (call->layer == 0) return tail ? by_axis(r, call) : sparse(r, call); /* nothing runs ahead of the first layer */
  if (!append(r, call)) return false;
  count_blocks(r, guess, seq_len);
  return tail ? attend_with_tail(r, call, &seq_len, guess, &r->tail, PAGE) : attend_list(r, call, &seq_len, guess, PAGE, false);
}

attention_fn strategy_attention(strategy how) {
  switch (how) {
  case DENSE: return dense;
  case BY_AXIS:
  case WITH_TAIL: return by_axis;
  case TWO_LEVEL: return two_level;
  case FORESEEN:
  case FORESEEN_TAIL: return foreseen;
  case PREVIOUS:
  case HOLT:
  case FORECAST: return speculative;
  default: return sparse;
  }
}

/* --- Lifetime --- */

bool predictor_init(predictor *p, const decoder *d, vwd_holt holt) {
  const model_shape *s = &d->shape;
  size_t row = (size_t)(s->kv_heads * d->cache.max_pages), count = (size_t)s->layers * row;
  *p = (predictor){calloc(count, sizeof(float)), calloc(count, sizeof(float)), holt};
  bool ok = p->level && p->trend;
  for (int l = 0; ok && l < s->layers; l++) {
    vwd_predictor_reset_args args = VWD_PREDICTOR_RESET_ARGS_INIT;
    args.state = predictor_view(d, p, l);
    ok = succeeded(vwd_predictor_reset(d->session, &args, NULL), "vwd_predictor_reset");
    for (int t = 0; ok && t < d->samples; t++) {
      const int32_t seq_len = d->prompt_count - d->samples + t + 1;
      ok = learn(d, p, l, &seq_len, d->sample_scores + ((size_t)l * SAMPLE + (size_t)t) * row);
    }
  }
  return ok;
}

void predictor_free(predictor *p) {
  free(p->level);
  free(p->trend);
}

bool run_join_tail(run *r) {
  const size_t heads = (size_t)r->d->shape.heads;
  for (int n = 0; n < 2; n++) r->log_mass[n] = calloc(heads, sizeof *r->log_mass[n]);
  r->state = (partials){calloc(q_count(r->d), sizeof(float)), calloc(heads, sizeof(float)), calloc(heads, sizeof(float))};
  return r->log_mass[0] && r->log_mass[1] && r->state.acc && r->state.m && r->state.l;
}

bool run_init(run *r, decoder *d, strategy how) {
  const model_shape *s = &d->shape;
  const selection *select = &d->select;
  int guess = predicted_blocks(d, select->ratio) + (how == FORESEEN || how == FORESEEN_TAIL); /* and the new token's block */
  size_t entries = (size_t)(s->heads * guess);
  *r = (run){.d = d, .how = how};
  r->scores = calloc((size_t)(s->kv_heads * d->cache.max_pages), sizeof(float));
  r->forecast_q = calloc(q_count(d), sizeof(float));
  r->last_q = calloc((size_t)s->layers * q_count(d), sizeof(float));
  if (r->last_q) memcpy(r->last_q, d->last_q, (size_t)s->layers * q_count(d) * sizeof(float));
  r->partial = (partials){calloc(entries * (size_t)s->head_dim, sizeof(float)), calloc(entries, sizeof(float)),
                          calloc(entries, sizeof(float))};
  r->missed = calloc((size_t)s->kv_heads, sizeof *r->missed);
  if (has_tail(how)) {
    if (!run_join_tail(r) || !tail_init(&r->tail, s)) return false;
    tail_copy(&r->tail, &d->tail, s);
  }
  vwd_holt holt = how == HOLT ? d->holt : (vwd_holt){1, 0, 0};
  return r->scores && r->forecast_q && r->last_q && r->partial.acc && r->partial.m && r->partial.l && r->missed &&
         sequence_fork(&r->seq, &d->prompt) && list_init(&r->selected, s->kv_heads, select->k) &&
         list_init(&r->coarse, s->kv_heads, select->coarse) &&
         list_init(&r->tokens, s->kv_heads, select->tokens) &&
         list_init(&r->guess[0], s->kv_heads, guess) && list_init(&r->guess[1], s->kv_heads, guess) &&
         ((how != HOLT && how != PREVIOUS) || predictor_init(&r->predictor, d, holt));
}

void run_free(run *r) {
  sequence_free(&r->seq);
  list *lists[] = {&r->selected, &r->coarse, &r->tokens, &r->guess[0], &r->guess[1]};
  for (size_t i = 0; i < sizeof lists / sizeof *lists; i++) list_free(lists[i]);
  void *parts[] = {r->scores,    r->forecast_q, r->last_q,    r->partial.acc, r->partial.m, r->partial.l,
                   r->state.acc, r->state.m,    r->state.l, r->log_mass[0], r->log_mass[1], r->missed};
  for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) free(parts[i]);
  tail_free(&r->tail);
  predictor_free(&r->predictor);
}
