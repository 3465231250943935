/* The decode loop of the modes that are made of single calls: one token a step. */
#define _POSIX_C_SOURCE 200809L
#include <math.h>
#include <time.h>

#include "codes.h"
#include "strategies.h"

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static int64_t dense_bytes(const decoder *d, int64_t tokens) {
  return tokens * d->shape.layers * d->shape.kv_heads * d->shape.head_dim * 2 * (int64_t)sizeof(uint16_t);
}

/* -ln of the probability that the logits give a token. */
static double surprise(const float *logits, int count, int32_t token) {
  double most = logits[0], sum = 0;
  for (int i = 1; i < count; i++) most = fmax(most, (double)logits[i]);
  for (int i = 0; i < count; i++) sum += exp((double)logits[i] - most);
  return most + log(sum) - (double)logits[token];
}

bool generate(decoder *d, strategy how, const int32_t *forced, int limit, generation *out, progress_fn progress,
              void *context) {
  run r;
  bool ok = run_init(&r, d, how);
  int32_t token = forced ? forced[0] : d->first_token;
  out->tokens[0] = d->first_token;
  out->count = 1;
  double begin = now(), loss = 0;
  while (ok && out->count < limit && token != d->end_token) {
    ok = sequence_reserve(&r.seq, r.seq.length + 1);
    const float *logits = ok ? model_forward_run(d->model, &token, 1, r.seq.length, true, strategy_attention(how), &r) : NULL;
    if (!(ok = logits != NULL)) break;
    r.n.dense_bytes += dense_bytes(d, ++r.seq.length);
    if (d->cache.codes && !(ok = codes_extend(&r.seq, d->session))) break;
    out->tokens[out->count] = model_best(d->model, logits);
    if (forced) loss += surprise(logits, d->shape.vocab, forced[out->count]);
    token = forced ? forced[out->count] : out->tokens[out->count];
    progress(context, ++out->count, limit);
  }
  out->seconds = now() - begin;
  progress(context, limit, limit);
  out->n = r.n;
  out->loss = out->count > 1 ? loss / (out->count - 1) : 0;
  run_free(&r);
  return ok;
}
