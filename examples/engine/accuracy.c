/* What selection costs: attention over the selected blocks beside dense attention, on the model's own activations. */
#include <math.h>
#include <stdlib.h>

#include "strategies.h"

typedef struct {
  uint32_t kind, method;
  int dtype;
  const char *name;
  bool tail; /* with what the list leaves out as a term */
} recipe;

static const recipe recipes[RECIPES] = {
    {VWD_INDEX_MINMAX, VWD_SELECT_MINMAX, FLOAT16, "MINMAX", false},
    {VWD_INDEX_MEAN, VWD_SELECT_MEAN_SOFTMAX, FLOAT16, "MEAN_SOFTMAX", false},
    {VWD_INDEX_AXIS, VWD_SELECT_AXIS, FLOAT16, "AXIS, float16", false},
    {VWD_INDEX_AXIS, VWD_SELECT_AXIS, UINT8, "AXIS, INT4", false},
    {VWD_INDEX_AXIS, VWD_SELECT_AXIS, UINT8, "... and the tail", true},
};
static const int sizes[SIZES] = {PAGE, 2 * PAGE, 4 * PAGE};

/* Summaries of all layers, for one block size. */
typedef struct {
  const recipe *how;
  int block;
  vwd_index first;      /* of layer 0 */
  void *parts[2];       /* [layers, 1, rows, kv_heads, …] */
  size_t part_bytes[2]; /* of a layer */
  list selected;
  tail tail; /* where the recipe has one */
  double error;
} contender;

typedef struct {
  run run;
  contender all[SIZES][RECIPES];
  float *weights, *centre; /* [layers, kv_heads, head_dim], of AXIS */
  float *sparse;           /* [heads, head_dim] */
  int64_t count;           /* layers and steps */
} trial;

static vwd_tensor learned(const trial *t, float *values, int layer) {
  const model_shape *s = &t->run.d->shape;
  return TENSOR(values + (size_t)layer * (size_t)(s->kv_heads * s->head_dim), FLOAT32, s->kv_heads, s->head_dim);
}

static vwd_index of_layer(const trial *t, const contender *c, int layer) {
  vwd_index index = c->first;
  vwd_tensor *fields[2] = {&index.key_max, &index.key_min};
  if (c->how->kind == VWD_INDEX_MEAN) fields[0] = &index.means;
  if (c->how->kind == VWD_INDEX_AXIS) {
    index.axis_weights = learned(t, t->weights, layer);
    index.axis_centre = learned(t, t->centre, layer);
    fields[0] = &index.axes, fields[1] = &index.axis_range;
  }
  for (int n = 0; n < 2; n++)
    if (c->parts[n]) fields[n]->data = (char *)c->parts[n] + (size_t)layer * c->part_bytes[n];
  return index;
}

/* The tensor of layer 0, and room for all layers. */
static bool place(contender *c, int part, vwd_tensor *field, int dtype, int layers, int rows, int heads, int last) {
  c->part_bytes[part] = (size_t)rows * (size_t)heads * (size_t)last * (size_t)(dtype & 0xff) / 8;
  c->parts[part] = calloc((size_t)layers, c->part_bytes[part]);
  *field = TENSOR(c->parts[part], dtype, 1, rows, heads, last);
  return c->parts[part] != NULL;
}

static bool contender_init(contender *c, const decoder *d, const recipe *how, int block) {
  const model_shape *s = &d->shape;
  int rows = d->cache.max_pages * PAGE / block + 1, dim = s->head_dim;
  *c = (contender){.how = how, .block = block, .first = VWD_INDEX_INIT};
  c->first.kind = how->kind;
  bool ok = list_init(&c->selected, s->kv_heads, d->select.k * PAGE / block) && (!how->tail || tail_init(&c->tail, s));
  if (how->kind == VWD_INDEX_MEAN)
    return ok && place(c, 0, &c->first.means, how->dtype, s->layers, d->cache.max_pages + 1, s->kv_heads, dim);
  c->first.block_size = (uint32_t)block;
  if (how->kind == VWD_INDEX_MINMAX)
    return ok && place(c, 0, &c->first.key_max, how->dtype, s->layers, rows, s->kv_heads, dim) &&
           place(c, 1, &c->first.key_min, how->dtype, s->layers, rows, s->kv_heads, dim);
  bool int4 = how->dtype == UINT8;
  return ok && place(c, 0, &c->first.axes, how->dtype, s->layers, rows, s->kv_heads, int4 ? dim : 2 * dim) &&
         (!int4 || place(c, 1, &c->first.axis_range, FLOAT16, s->layers, rows, s->kv_heads, 4 * ((dim + 31) / 32)));
}

static bool extend(trial *t, int layer, int64_t begin, int64_t end) {
  const decoder *d = t->run.d;
  bool ok = true;
  for (int n = 0; n < SIZES * RECIPES && ok; n++) {
    contender *c = &t->all[n / RECIPES][n % RECIPES];
    const vwd_index index = of_layer(t, c, layer);
    ok = update_index(d, layer, &t->run.seq, &index, begin, end) &&
         (!c->how->tail || tail_extend(&c->tail, d->session, &d->shape, &t->run.seq, layer, (int32_t)end, c->block));
  }
  return ok;
}

/* Adds |sparse − dense| / |dense| over all heads. */
static bool compare(trial *t, contender *c, const attention_call *call, const int32_t *seq_len) {
  const decoder *d = t->run.d;
  const vwd_index index = of_layer(t, c, call->layer);
  if (!select_from(&t->run, &index, c->how->method, c->block, seq_len, call->q, d->select.k * PAGE / c->block,
                   &c->selected, NULL, c->how->tail ? t->run.log_mass[call->layer % 2] : NULL))
    return false;
  attention_call sparse = *call;
  sparse.out = t->sparse;
  if (!(c->how->tail ? attend_with_tail(&t->run, &sparse, seq_len, &c->selected, &c->tail, c->block)
                     : attend_list(&t->run, &sparse, seq_len, &c->selected, c->block, false)))
    return false;
  double apart = 0, size = 0;
  for (size_t i = 0; i < q_count(d); i++) {
    double dense = call->out[i], difference = t->sparse[i] - dense;
    apart += difference * difference, size += dense * dense;
  }
  c->error += sqrt(apart / size);
  return true;
}

static bool attend(void *context, const attention_call *call) {
  trial *t = context;
  run *r = &t->run;
  const int32_t seq_len = call->positions[0] + 1;
  kv_write(&r->seq, call->layer, call->positions[0], 1, call->k, call->v);
  bool ok = extend(t, call->layer, call->positions[0], seq_len) && attend_dense(r->d, &r->seq, &seq_len, call);
  for (int n = 0; ok && n < SIZES * RECIPES; n++) ok = compare(t, &t->all[n / RECIPES][n % RECIPES], call, &seq_len);
  t->count++;
  return ok;
}

/* Learns weights and centres from the prompt's last tokens. */
static bool learn_axes(trial *t, int layer) {
  const decoder *d = t->run.d;
  const model_shape *s = &d->shape;
  size_t first = (size_t)layer * SAMPLE;
  vwd_channel_importance_args args = VWD_CHANNEL_IMPORTANCE_ARGS_INIT;
  args.q = q_view(d, d->sample_q + first * q_count(d), d->samples);
  args.k = TENSOR(d->sample_k + first * (size_t)(s->kv_heads * s->head_dim), FLOAT32, d->samples, s->kv_heads,
                  s->head_dim);
  args.weights = learned(t, t->weights, layer);
  args.centre = learned(t, t->centre, layer);
  return succeeded(vwd_channel_importance(d->session, &args, NULL), "vwd_channel_importance");
}

static bool trial_init(trial *t, decoder *d) {
  size_t channels = (size_t)(d->shape.layers * d->shape.kv_heads * d->shape.head_dim);
  *t = (trial){.weights = calloc(channels, sizeof(float)),
               .centre = calloc(channels, sizeof(float)),
               .sparse = calloc(q_count(d), sizeof(float))};
  bool ok = run_init(&t->run, d, DENSE) && run_join_tail(&t->run) && t->weights && t->centre && t->sparse;
  for (int n = 0; ok && n < SIZES * RECIPES; n++)
    ok = contender_init(&t->all[n / RECIPES][n % RECIPES], d, &recipes[n % RECIPES], sizes[n / RECIPES]);
  for (int l = 0; ok && l < d->shape.layers; l++) ok = learn_axes(t, l) && extend(t, l, 0, t->run.seq.length);
  return ok;
}

static void trial_free(trial *t) {
  for (int n = 0; n < SIZES * RECIPES; n++) {
    contender *c = &t->all[n / RECIPES][n % RECIPES];
    list_free(&c->selected);
    tail_free(&c->tail);
    free(c->parts[0]);
    free(c->parts[1]);
  }
  free(t->weights);
  free(t->centre);
  free(t->sparse);
  run_free(&t->run);
}

bool measure_accuracy(decoder *d, const int32_t *tokens, int count, accuracy *out, progress_fn progress,
                      void *context) {
  trial t;
  bool ok = trial_init(&t, d);
  for (int i = 0; ok && i < count; i++) {
    sequence *seq = &t.run.seq;
    ok = sequence_reserve(seq, seq->length + 1) &&
         model_forward_run(d->model, &tokens[i], 1, seq->length, true, attend, &t);
    seq->length++;
    progress(context, i + 1, count);
  }
  for (int n = 0; n < SIZES * RECIPES; n++) {
    const contender *c = &t.all[n / RECIPES][n % RECIPES];
    out->size[n / RECIPES] = c->block;
    out->name[n % RECIPES] = c->how->name;
    out->error[n / RECIPES][n % RECIPES] = c->error / (double)(t.count ? t.count : 1);
  }
  trial_free(&t);
  return ok;
}
