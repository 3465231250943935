/* The decode loop: one token a step, or a certain one and its drafts. */
#define _POSIX_C_SOURCE 200809L
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "strategies.h"

/* Prompt lookup: what followed the last few tokens when they last occurred. */
typedef struct {
  int32_t *tokens; /* the prompt and all that was generated */
  int count;
} history;

static int look_up(const history *h, int32_t *draft, int limit) {
  for (int size = 3; size >= 2; size--) {
    const int32_t *ending = h->tokens + h->count - size;
    for (int at = h->count - size - 1; at >= 0; at--) {
      if (memcmp(h->tokens + at, ending, (size_t)size * sizeof *ending) != 0) continue;
      int found = h->count - at - size < limit ? h->count - at - size : limit;
      memcpy(draft, h->tokens + at + size, (size_t)found * sizeof *draft);
      return found;
    }
  }
  return 0;
}

/* What vwd_verify_pack moves: K and V of every layer, out of the draft pages into rows that enter the cache. */
typedef struct {
  vwd_tensor *rows, *packed; /* [layers · 2] */
  uint16_t *memory;          /* [layers · 2, GAMMA, kv_heads, head_dim] */
  size_t stride;             /* of the first dimension */
} accepted_rows;

static bool accepted_rows_init(accepted_rows *a, const model_shape *s) {
  size_t tensors = 2 * (size_t)s->layers;
  a->stride = (size_t)GAMMA * (size_t)(s->kv_heads * s->head_dim);
  a->rows = calloc(tensors, sizeof *a->rows);
  a->packed = calloc(tensors, sizeof *a->packed);
  a->memory = calloc(tensors * a->stride, sizeof *a->memory);
  return a->rows && a->packed && a->memory;
}

static void accepted_rows_free(accepted_rows *a) {
  free(a->rows);
  free(a->packed);
  free(a->memory);
}

/* Checks `count` drafts against the model's choices. Accepted K and V enter the cache here, and only these. */
static bool verify(run *r, accepted_rows *a, const int32_t *draft, const int32_t *target, int count, int32_t *accepted,
                   int32_t *next) {
  const decoder *d = r->d;
  const model_shape *s = &d->shape;
  int64_t begin = r->seq.length + 1; /* behind the certain token */
  int32_t offsets[2];
  for (int l = 0; l < s->layers; l++) {
    kv_draft_rows(&d->cache, l, begin, count, &a->rows[2 * l], &a->rows[2 * l + 1]);
    for (int i = 2 * l; i <= 2 * l + 1; i++)
      a->packed[i] = TENSOR(a->memory + (size_t)i * a->stride, FLOAT16, GAMMA, s->kv_heads, s->head_dim);
  }
  vwd_verify_pack_args args = VWD_VERIFY_PACK_ARGS_INIT;
  args.tensor_count = 2 * (uint32_t)s->layers;
  args.rows = a->rows;
  args.packed = a->packed;
  args.draft = TENSOR(draft, INT32, 1, count);
  args.target = TENSOR(target, INT32, 1, count + 1);
  args.accepted = TENSOR(accepted, INT32, 1);
  args.next_token = TENSOR(next, INT32, 1);
  args.offsets = TENSOR(offsets, INT32, 2);
  bool ok = succeeded(vwd_verify_pack(d->session, &args, NULL), "vwd_verify_pack");
  for (int l = 0; ok && l < s->layers && *accepted > 0; l++) {
    kv_write_packed(&r->seq, l, begin, *accepted, a->packed[2 * l].data, a->packed[2 * l + 1].data);
    ok = summarize(r, l, begin, begin + *accepted);
  }
  return ok;
}

static int32_t best(const float *logits, int vocab) {
  int32_t token = 0;
  for (int32_t i = 1; i < vocab; i++)
    if (logits[i] > logits[token]) token = i;
  return token;
}

/* One forward pass from the newest token on. Writes the tokens it yields, at most `limit`; 0 on failure. */
static int step(run *r, accepted_rows *a, const history *h, int limit, int32_t *out) {
  decoder *d = r->d;
  int32_t tokens[MAX_STEP] = {h->tokens[h->count - 1]}, target[MAX_STEP], accepted = 0;
  int drafts = r->how >= DRAFTS ? look_up(h, tokens + 1, limit - 1 < GAMMA ? limit - 1 : GAMMA) : 0;
  if (!sequence_reserve(&r->seq, r->seq.length + 1 + drafts)) return 0;
  const float *logits = model_forward_run(d->model, tokens, 1 + drafts, r->seq.length, false, strategy_attention(r->how),
                                      r);
  if (!logits) return 0;
  for (int row = 0; row <= drafts; row++) target[row] = best(logits + (int64_t)row * d->shape.vocab, d->shape.vocab);
  out[0] = target[0];
  if (drafts) {
    if (!verify(r, a, tokens + 1, target, drafts, &accepted, &out[0])) return 0;
    out[accepted] = out[0];
    memcpy(out, tokens + 1, (size_t)accepted * sizeof *out);
    r->n.draft_steps++;
    r->n.accepted += accepted;
  }
  r->seq.length += 1 + accepted;
  return 1 + accepted;
}

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static int64_t dense_bytes(const decoder *d, int64_t tokens) {
  return tokens * d->shape.layers * d->shape.kv_heads * d->shape.head_dim * 2 * (int64_t)sizeof(uint16_t);
}

bool generate(decoder *d, strategy how, const int32_t *forced, int limit, generation *out, progress_fn progress,
              void *context) {
  run r;
  accepted_rows accepted = {0};
  history h = {malloc((size_t)(d->prompt_count + limit) * sizeof(int32_t)), d->prompt_count};
  bool ok = run_init(&r, d, how) && accepted_rows_init(&accepted, &d->shape) && h.tokens;
  if (ok) {
    memcpy(h.tokens, d->prompt_tokens, (size_t)d->prompt_count * sizeof(int32_t));
    out->tokens[0] = d->first_token;
    h.tokens[h.count++] = forced ? forced[0] : d->first_token;
    out->count = 1;
  }
  double begin = now();
  while (ok && out->count < limit && h.tokens[h.count - 1] != d->end_token) {
    int32_t yield[MAX_STEP];
    int count = step(&r, &accepted, &h, limit - out->count, yield);
    ok = count > 0;
    for (int i = 0; i < count && h.tokens[h.count - 1] != d->end_token; i++) {
      r.n.dense_bytes += dense_bytes(d, h.count);
      h.tokens[h.count++] = forced ? forced[out->count] : yield[i];
      out->tokens[out->count++] = yield[i];
    }
    progress(context, out->count, limit);
  }
  out->seconds = now() - begin;
  progress(context, limit, limit);
  out->n = r.n;
  accepted_rows_free(&accepted);
  run_free(&r);
  free(h.tokens);
  return ok;
}
