/* A pass through the model: rows of sequences, and attention for them by vwd_decoder. */
#include <string.h>

#include "batch_inside.h"
#include "linear.h"

int always_dense(const batch *b) {
  const int covered = list_blocks(b) * PAGE_TOKENS;
  return covered > b->o.dense_below - 1 ? covered : b->o.dense_below - 1;
}

/* --- A pass through the model --- */

/* Some of the positions of each member of a group: `from` … `from` + `count` − 1. */
typedef struct {
  const group *of;
  int from, count;
  int32_t lens[MAX_ROWS], begins[MAX_ROWS];
} part;

static part part_of(const batch *b, const group *g, int from) {
  part p = {.of = g, .from = from, .count = smaller(b->store->most_rows, g->positions - from)};
  for (int n = 0; n < g->batch; n++) {
    p.lens[n] = b->seq_lens[g->first_member + n] - (g->positions - from - p.count);
    p.begins[n] = from == 0 ? b->begins[g->first_member + n] : p.lens[n] - p.count;
  }
  return p;
}

static bool begin_step(batch *b, const part *p) {
  const group *g = p->of;
  const bool whole = p->count == g->positions; /* the decoder then reads the lengths in every layer */
  vwd_decoder_step step = VWD_DECODER_STEP_INIT;
  step.mode = g->mode;
  step.positions = (uint32_t)p->count;
  step.shortest = (uint32_t)(g->shortest - (g->positions - p->from - p->count));
  b->store->place(b, g, &step);
  step.seq_lens = TENSOR(whole ? b->seq_lens + g->first_member : p->lens, INT32, g->batch);
  step.begin = TENSOR(whole ? b->begins + g->first_member : p->begins, INT32, g->batch);
  if (g->trees) step.tree = TENSOR(b->masks + g->first, UINT32, g->batch, g->positions, 1);
  return batch_called(vwd_decoder_begin(b->decoder, &step, NULL), "vwd_decoder_begin", &b->error);
}

/* The rows of a part, [members, positions, heads, head_dim], among those of the pass, [rows of the pass, heads, head_dim]. */
static vwd_tensor rows_of(const part *p, const void *rows, int dtype, int heads, int dim) {
  const size_t row = (size_t)heads * (size_t)dim * (size_t)(dtype & 0xFF) / 8;
  vwd_tensor t = TENSOR((const char *)rows + (size_t)(p->of->first + p->from) * row, dtype, p->of->batch, p->count, heads, dim);
  t.strides[0] = (int64_t)p->of->positions * heads * dim;
  return t;
}

static bool attend(void *context, const attention_call *call) {
  batch *b = context;
  const model_shape *s = &b->shape;
  const int count = call->n * s->kv_heads * s->head_dim;
  for (int i = 0; i < count; i++) b->new_k[i] = float_to_half(call->k[i]), b->new_v[i] = float_to_half(call->v[i]);
  for (int i = 0; i < b->group_count; i++) {
    const group *g = &b->groups[i];
    for (int from = 0; from < g->positions; from += b->store->most_rows) {
      const part p = part_of(b, g, from);
      const bool is_only = b->group_count == 1 && p.count == g->positions;
      if ((call->layer == 0 || !is_only) && !begin_step(b, &p)) return false; /* the decoder knows one step at a time */
      vwd_decoder_attend_args args = VWD_DECODER_ATTEND_ARGS_INIT;
      args.layer = (uint32_t)call->layer;
      b->store->place_layer(b, call->layer, &args);
      args.new_k = rows_of(&p, b->new_k, FLOAT16, s->kv_heads, s->head_dim);
      args.new_v = rows_of(&p, b->new_v, FLOAT16, s->kv_heads, s->head_dim);
      args.q = rows_of(&p, call->q, FLOAT32, s->heads, s->head_dim);
      args.out = rows_of(&p, call->out, FLOAT32, s->heads, s->head_dim);
      if (!batch_called(vwd_decoder_attend(b->decoder, &args, NULL), "vwd_decoder_attend", &b->error)) return false;
    }
  }
  return true;
}

/* What nodes of trees see, and their positions, which are those of their depths. */
static bool prepare_trees(batch *b) {
  for (int i = 0; i < b->group_count; i++) {
    const group *g = &b->groups[i];
    if (!g->trees) continue;
    vwd_tree_prepare_args args = VWD_TREE_PREPARE_ARGS_INIT;
    args.parents = TENSOR(b->parents + g->first, INT32, g->batch, g->positions);
    args.bases = TENSOR(b->roots + g->first_member, INT32, g->batch);
    args.positions = TENSOR(b->positions + g->first, INT32, g->batch, g->positions);
    args.mask = TENSOR(b->masks + g->first, UINT32, g->batch, g->positions, 1);
    if (!batch_called(vwd_tree_prepare(b->session, &args, NULL), "vwd_tree_prepare", &b->error)) return false;
  }
  return true;
}

int64_t token_bytes(const batch *b) {
  return (int64_t)b->shape.kv_heads * b->shape.head_dim * 2 * (int64_t)sizeof(uint16_t);
}

/* Bytes of a block's summary in a layer: two values in float16 for each channel, or two INT4 ones and scales for 32. */
static int64_t summary_bytes(const batch *b) {
  const int dim = b->shape.head_dim;
  return b->shape.kv_heads * (b->o.method == VWD_SELECT_AXIS ? dim + (dim + 31) / 32 * 4 * 2 : dim * 4);
}

/* A dense member reads its keys and values once for all its positions. */
static void count_bytes(batch *b, uint32_t mode, int tokens) {
  const int sparse_layers = mode == VWD_DECODER_DENSE || tokens <= always_dense(b) ? 0 : b->shape.layers - b->o.dense_layers;
  const int blocks = pages_of(tokens), listed = list_blocks(b) * PAGE_TOKENS - (blocks * PAGE_TOKENS - tokens);
  b->n.kv_bytes += ((b->shape.layers - sparse_layers) * (int64_t)tokens + sparse_layers * (int64_t)listed) * token_bytes(b);
  b->n.index_bytes += (int64_t)sparse_layers * blocks * summary_bytes(b);
}

void pass_start(batch *b) { b->rows = b->wanted_count = b->group_count = b->members = 0; }

void pass_add(batch *b, int slot, uint32_t mode, int first, int count) {
  sequence *s = &b->slots[slot];
  group *g = b->group_count > 0 ? &b->groups[b->group_count - 1] : NULL;
  const int n = b->members++;
  const bool tree = is_tree(s);
  if (!g || g->mode != mode || g->positions != count || g->trees != tree) {
    g = &b->groups[b->group_count++];
    *g = (group){.mode = mode, .trees = tree, .positions = count, .first = b->rows, .first_member = n, .shortest = INT32_MAX};
  }
  g->batch++;
  if (is_decoding(s)) count_bytes(b, mode, first + count);
  b->seq_lens[n] = first + count;
  if (first + count < g->shortest) g->shortest = first + count;
  b->begins[n] = b->store->add(b, s, n, mode, first, count);
  b->roots[n] = first;
  b->member_slot[n] = slot;
  for (int i = 0; i < count; i++, b->rows++) {
    int at = first + i;
    b->tokens[b->rows] = at < s->count ? s->text[at] : s->draft[at - s->count];
    b->positions[b->rows] = at;
    b->parents[b->rows] = tree ? s->parents[i] : i - 1;
  }
}

void pass_want(batch *b, int row) { b->wanted[b->wanted_count++] = row; }

const float *pass_run(batch *b) {
  if (!prepare_trees(b)) return NULL;
  const model_pass pass = {b->tokens, b->positions, b->rows, b->wanted, b->wanted_count};
  b->n.passes++;
  return model_forward(b->model, &pass, attend, b);
}
