/* The prompt's way in: dense attention over growing lengths, and everything that is learned on the way. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "codes.h"
#include "decoder.h"

int blocks_of(int64_t tokens) { return (int)((tokens + PAGE - 1) / PAGE); }

size_t q_count(const decoder *d) { return (size_t)d->shape.heads * (size_t)d->shape.head_dim; }

vwd_tensor q_view(const decoder *d, const float *q, int rows) {
  return TENSOR(q, FLOAT32, rows, d->shape.heads, d->shape.head_dim);
}

bool update_index(const decoder *d, int layer, const sequence *s, const vwd_index *index, int64_t begin, int64_t end) {
  const int32_t from = (int32_t)begin, to = (int32_t)end;
  vwd_paged_kv kv = kv_view(s, layer, &to, 1);
  vwd_index_update_args args = VWD_INDEX_UPDATE_ARGS_INIT;
  args.index = index;
  args.k = kv.k;
  args.page_table = kv.page_table;
  args.seq_lens = kv.seq_lens;
  args.begin = TENSOR(&from, INT32, 1);
  return succeeded(vwd_index_update(d->session, &args, NULL), "vwd_index_update");
}

bool attend_dense(const decoder *d, const sequence *s, const int32_t *seq_lens, const attention_call *call) {
  const vwd_paged_kv kv = kv_view(s, call->layer, seq_lens, call->n);
  vwd_attention_args args = VWD_ATTENTION_ARGS_INIT;
  args.kv = &kv;
  args.q = q_view(d, call->q, call->n);
  args.out = q_view(d, call->out, call->n);
  return succeeded(vwd_attention(d->session, &args, NULL), "vwd_attention");
}

/* Queries and keys of the prompt's last tokens: what the label channels and the predictor are fitted on. */
static void keep_sample(decoder *d, const attention_call *call) {
  size_t q = (size_t)d->shape.heads * (size_t)d->shape.head_dim,
         kv = (size_t)d->shape.kv_heads * (size_t)d->shape.head_dim;
  int64_t first = d->prompt_count - d->samples;
  for (int row = 0; row < call->n; row++) {
    int64_t at = call->positions[0] + row - first;
    if (at < 0) continue;
    size_t index = (size_t)call->layer * SAMPLE + (size_t)at;
    memcpy(d->sample_q + index * q, call->q + (size_t)row * q, q * sizeof(float));
    memcpy(d->sample_k + index * kv, call->k + (size_t)row * kv, kv * sizeof(float));
  }
}

/* Map l − 1 learns this layer's queries from the residual stream one layer back and from the queries one token back. */
static bool feed_forecast(decoder *d, const attention_call *call) {
  size_t row = q_count(d), n = (size_t)call->n;
  float *last = d->last_q + (size_t)call->layer * row; /* zeros ahead of the first token */
  if (call->layer > 0) {
    memcpy(d->pass_q, last, row * sizeof(float));
    memcpy(d->pass_q + row, call->q_plain, n * row * sizeof(float));
    vwd_forecast_accumulate_args args = VWD_FORECAST_ACCUMULATE_ARGS_INIT;
    args.layer = (uint32_t)call->layer - 1;
    args.x = TENSOR(d->previous_residual, FLOAT32, call->n, d->shape.hidden);
    args.previous = q_view(d, d->pass_q, call->n);
    args.q = q_view(d, d->pass_q + row, call->n);
    if (!succeeded(vwd_forecast_accumulate(d->forecast, &args), "vwd_forecast_accumulate")) return false;
  }
  memcpy(last, call->q_plain + (n - 1) * row, row * sizeof(float));
  memcpy(d->previous_residual, call->residual, (size_t)call->n * (size_t)d->shape.hidden * sizeof(float));
  return true;
}

static bool attend_prompt(void *context, const attention_call *call) {
  decoder *d = context;
  int32_t seq_lens[MAX_ROWS];
  for (int row = 0; row < call->n; row++) seq_lens[row] = call->positions[0] + row + 1;
  kv_write(&d->prompt, call->layer, call->positions[0], call->n, call->k, call->v);
  vwd_index index = kv_minmax(&d->cache, call->layer, d->prompt.table, 1);
  if (d->prepare.labels || d->prepare.holt || d->prepare.codes || d->prepare.axes) keep_sample(d, call);
  if (d->prepare.summaries &&
      !update_index(d, call->layer, &d->prompt, &index, call->positions[0], call->positions[0] + call->n))
    return false;
  return attend_dense(d, &d->prompt, seq_lens, call) && (!d->prepare.forecast || feed_forecast(d, call));
}

/* Label channels from the sample, then INT4 labels of the whole prompt. */
static bool label_layer(decoder *d, int layer) {
  const model_shape *s = &d->shape;
  vwd_index index = kv_label(&d->cache, layer, d->prompt.table, 1);
  vwd_channel_importance_args args = VWD_CHANNEL_IMPORTANCE_ARGS_INIT;
  args.q = q_view(d, d->sample_q + (size_t)layer * SAMPLE * (size_t)(s->heads * s->head_dim), d->samples);
  args.k = TENSOR(d->sample_k + (size_t)layer * SAMPLE * (size_t)(s->kv_heads * s->head_dim), FLOAT32, d->samples,
                  s->kv_heads, s->head_dim);
  args.channels = index.channels;
  return succeeded(vwd_channel_importance(d->session, &args, NULL), "vwd_channel_importance") &&
         update_index(d, layer, &d->prompt, &index, 0, d->prompt_count);
}

/* Channel weights and centre from the sample, then summaries by AXIS, means and covariance of the whole prompt. */
static bool axis_layer(decoder *d, int layer) {
  const model_shape *s = &d->shape;
  const size_t first = (size_t)layer * SAMPLE;
  const vwd_index index = axes_index(&d->cache, layer, d->prompt.table, 1);
  vwd_channel_importance_args args = VWD_CHANNEL_IMPORTANCE_ARGS_INIT;
  args.q = q_view(d, d->sample_q + first * q_count(d), d->samples);
  args.k = TENSOR(d->sample_k + first * (size_t)(s->kv_heads * s->head_dim), FLOAT32, d->samples, s->kv_heads, s->head_dim);
  args.weights = index.axis_weights;
  args.centre = index.axis_centre;
  return succeeded(vwd_channel_importance(d->session, &args, NULL), "vwd_channel_importance") &&
         update_index(d, layer, &d->prompt, &index, 0, d->prompt_count) &&
         tail_extend(&d->tail, d->session, s, &d->prompt, layer, (int32_t)d->prompt_count, PAGE);
}

/* Score rows of the sample, as selection would have seen them: one history of `samples` steps per layer. */
static bool score_layer(decoder *d, int layer, const int32_t *seq_lens) {
  const model_shape *s = &d->shape;
  int cap = d->select.k;
  int32_t *ids = calloc((size_t)d->samples * (size_t)s->kv_heads * (size_t)cap, sizeof *ids);
  int32_t *counts = calloc((size_t)d->samples * (size_t)s->kv_heads, sizeof *counts);
  const vwd_index index = kv_minmax(&d->cache, layer, d->prompt.table, d->samples);
  vwd_select_blocks_args args = VWD_SELECT_BLOCKS_ARGS_INIT;
  args.method = VWD_SELECT_MINMAX;
  args.block_size = PAGE;
  args.k = (uint32_t)cap;
  args.init_blocks = (uint32_t)d->select.init;
  args.local_blocks = (uint32_t)d->select.local;
  args.index = &index;
  args.q = q_view(d, d->sample_q + (size_t)layer * SAMPLE * (size_t)(s->heads * s->head_dim), d->samples);
  args.seq_lens = TENSOR(seq_lens, INT32, d->samples);
  args.selected.ids = TENSOR(ids, INT32, d->samples, s->kv_heads, cap);
  args.selected.counts = TENSOR(counts, INT32, d->samples, s->kv_heads);
  args.scores = TENSOR(d->sample_scores + (size_t)layer * SAMPLE * (size_t)(s->kv_heads * d->cache.max_pages), FLOAT32,
                       d->samples, s->kv_heads, d->cache.max_pages);
  bool ok = ids && counts && succeeded(vwd_select_blocks(d->session, &args, NULL), "vwd_select_blocks");
  free(ids);
  free(counts);
  return ok;
}

static bool calibrate(decoder *d) {
  const model_shape *s = &d->shape;
  int32_t *seq_lens = calloc((size_t)d->samples, sizeof *seq_lens);
  int32_t *block_counts = calloc((size_t)s->layers * SAMPLE, sizeof *block_counts);
  bool ok = seq_lens && block_counts;
  for (int t = 0; ok && t < d->samples; t++) {
    seq_lens[t] = d->prompt_count - d->samples + t + 1;
    for (int l = 0; l < s->layers; l++) block_counts[l * SAMPLE + t] = blocks_of(seq_lens[t]);
  }
  for (int l = 0; ok && l < s->layers; l++) ok = score_layer(d, l, seq_lens);
  vwd_predictor_calibrate_args args = VWD_PREDICTOR_CALIBRATE_ARGS_INIT;
  args.k = (uint32_t)d->select.k;
  args.ratio = d->select.ratio;
  args.scores = TENSOR(d->sample_scores, FLOAT32, s->layers, SAMPLE, s->kv_heads, d->cache.max_pages);
  args.block_counts = TENSOR(block_counts, INT32, s->layers, SAMPLE);
  args.scores.shape[1] = args.block_counts
                             .shape[1] = d->samples; /* a short prompt leaves the end of each history unused */
  ok = ok &&
       succeeded(vwd_predictor_calibrate(d->session, &args, &d->holt, &d->holt_hit_rate), "vwd_predictor_calibrate");
  free(seq_lens);
  free(block_counts);
  return ok;
}

static bool prefill(decoder *d, progress_fn progress, void *context) {
  const float *logits = NULL;
  for (int at = 0; at < d->prompt_count; at += MAX_ROWS) {
    int n = d->prompt_count - at < MAX_ROWS ? d->prompt_count - at : MAX_ROWS;
    logits = model_forward_run(d->model, d->prompt_tokens + at, n, at, true, attend_prompt, d);
    if (!logits) return false;
    progress(context, at + n, d->prompt_count);
  }
  d->first_token = model_best(d->model, logits);
  d->prompt.length = d->prompt_count;
  return true;
}

static bool create_forecast(decoder *d) {
  if (d->shape.layers < 2) return false;
  vwd_forecast_options options = VWD_FORECAST_OPTIONS_INIT;
  options.flags = VWD_FORECAST_MEMORY;
  options.layers = (uint32_t)d->shape.layers - 1;
  options.input_dim = (uint32_t)d->shape.hidden;
  options.q_heads = (uint32_t)d->shape.heads;
  options.head_dim = (uint32_t)d->shape.head_dim;
  return succeeded(vwd_forecast_create(d->session, &options, &d->forecast), "vwd_forecast_create");
}

bool decoder_init(decoder *d, vwd_session *session, model *m, selection s, preparation what, const int32_t *prompt,
                  int count, int max_new, int32_t end_token, progress_fn progress, void *context) {
  *d = (decoder){.model = m,
                 .shape = model_get_shape(m),
                 .session = session,
                 .select = s,
                 .prepare = what,
                 .end_token = end_token,
                 .prompt_count = count};
  const model_shape *shape = &d->shape;
  size_t samples = (size_t)shape->layers * SAMPLE, tokens = (size_t)count + (size_t)max_new;
  if (count < 1 || tokens > (size_t)shape->context) {
    fprintf(stderr, "prompt of %d tokens and %d new ones: the model has a context of %d\n", count, max_new,
            shape->context);
    return false;
  }
  d->samples = count < SAMPLE ? count : SAMPLE;
  d->prompt_tokens = malloc((size_t)count * sizeof *prompt);
  d->previous_residual = calloc((size_t)MAX_ROWS * (size_t)shape->hidden, sizeof(float));
  d->sample_q = calloc(samples * (size_t)(shape->heads * shape->head_dim), sizeof(float));
  d->sample_k = calloc(samples * (size_t)(shape->kv_heads * shape->head_dim), sizeof(float));
  d->last_q = calloc((size_t)shape->layers * q_count(d), sizeof(float));
  d->pass_q = calloc((1 + MAX_ROWS) * q_count(d), sizeof(float));
  if (!d->prompt_tokens || !d->previous_residual || !d->sample_q || !d->sample_k || !d->last_q || !d->pass_q)
    return false;
  memcpy(d->prompt_tokens, prompt, (size_t)count * sizeof *prompt);
  if (!kv_init(&d->cache, shape, (int)tokens, max_new + 2 * PAGE) || !sequence_init(&d->prompt, &d->cache) ||
      !sequence_reserve(&d->prompt, count) || (what.forecast && !create_forecast(d)))
    return false;
  d->sample_scores = calloc(samples * (size_t)(shape->kv_heads * d->cache.max_pages), sizeof(float));
  bool ok = d->sample_scores && prefill(d, progress, context);
  for (int l = 0; what.labels && ok && l < shape->layers; l++) ok = label_layer(d, l);
  if (what.axes) ok = ok && axes_init(&d->cache) && tail_init(&d->tail, shape);
  for (int l = 0; what.axes && ok && l < shape->layers; l++) ok = axis_layer(d, l);
  return ok && (!what.holt || calibrate(d)) &&
         (!what.forecast || succeeded(vwd_forecast_solve(d->forecast, 0), "vwd_forecast_solve"));
}

/* What coding costs is spread over a key's channels as the prompt's last tokens say. */
static bool weigh_channels(decoder *d, int layer) {
  const model_shape *s = &d->shape;
  const size_t first = (size_t)layer * SAMPLE;
  vwd_kv_weights_args args = VWD_KV_WEIGHTS_ARGS_INIT;
  args.block_size = PAGE;
  args.q = q_view(d, d->sample_q + first * q_count(d), d->samples);
  args.k = TENSOR(d->sample_k + first * (size_t)(s->kv_heads * s->head_dim), FLOAT32, d->samples, s->kv_heads, s->head_dim);
  args.weights = codes_weights(&d->cache, layer);
  return succeeded(vwd_kv_weights(d->session, &args, NULL), "vwd_kv_weights");
}

bool decoder_code(decoder *d) {
  bool ok = codes_init(&d->cache);
  for (int l = 0; ok && l < d->shape.layers; l++) ok = weigh_channels(d, l);
  return ok && codes_extend(&d->prompt, d->session);
}

void decoder_free(decoder *d) {
  vwd_forecast_release(d->forecast);
  tail_free(&d->tail);
  sequence_free(&d->prompt);
  kv_free(&d->cache);
  void *parts[] = {d->prompt_tokens,     d->sample_q, d->sample_k, d->sample_scores,
                   d->previous_residual, d->last_q,   d->pass_q};
  for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) free(parts[i]);
  *d = (decoder){0};
}
