#include "draws.h"

#include <math.h>
#include <stdio.h>

#include "view.h"

bool draws_can(const batch_sampling *how, char *why, size_t room) {
  const struct {
    const char *name;
    float value, most;
  } parts[] = {{"temperature", how->temperature, INFINITY}, {"top_p", how->top_p, 1}, {"min_p", how->min_p, 1}};
  for (int i = 0; i < 3; i++) {
    if (isfinite(parts[i].value) && parts[i].value >= 0 && parts[i].value <= parts[i].most) continue;
    snprintf(why, room, "%s: %g; expected a finite number from 0%s", parts[i].name, (double)parts[i].value,
             isfinite(parts[i].most) ? " to 1" : " on");
    return false;
  }
  if (how->top_k >= 0) return true;
  snprintf(why, room, "top_k: %lld; expected at least 0", (long long)how->top_k);
  return false;
}

void draws_add(draws *d, const batch_sampling *how, int32_t stop, int begin, int position, int remaining) {
  const int n = d->rows++;
  d->temperature[n] = how->temperature;
  d->top_p[n] = how->top_p > 0 ? how->top_p : 1;
  d->min_p[n] = how->min_p;
  d->top_k[n] = how->top_k;
  d->seeds[n] = how->seed;
  d->begin[n] = begin;
  d->positions[n] = position;
  d->stop[n] = stop;
  d->remaining[n] = remaining;
}

vwd_status draws_run(draws *d, vwd_session *session, const float *logits, int rows, int vocab, const int32_t *drafts, const int32_t *lens,
                     int width) {
  vwd_verify_sample_args args = VWD_VERIFY_SAMPLE_ARGS_INIT;
  args.rule = VWD_ACCEPT_COUPLED;
  if (drafts) {
    args.draft = TENSOR(drafts, INT32, d->rows, width);
    args.draft_lens = TENSOR(lens, INT32, d->rows);
  }
  args.target = TENSOR(logits, FLOAT32, rows, vocab);
  args.target_begin = TENSOR(d->begin, INT32, d->rows);
  args.temperature = TENSOR(d->temperature, FLOAT32, d->rows);
  args.top_k = TENSOR(d->top_k, INT32, d->rows);
  args.top_p = TENSOR(d->top_p, FLOAT32, d->rows);
  args.min_p = TENSOR(d->min_p, FLOAT32, d->rows);
  args.seeds = TENSOR(d->seeds, UINT64, d->rows);
  args.positions = TENSOR(d->positions, INT32, d->rows);
  args.stop = TENSOR(d->stop, INT32, d->rows, 1);
  args.remaining = TENSOR(d->remaining, INT32, d->rows);
  args.next_token = TENSOR(d->next, INT32, d->rows);
  args.accepted = TENSOR(d->accepted, INT32, d->rows);
  args.committed = TENSOR(d->committed, INT32, d->rows, width + 1);
  args.committed_len = TENSOR(d->committed_len, INT32, d->rows);
  args.finish = TENSOR(d->finish, UINT8, d->rows);
  return vwd_verify_sample(session, &args, NULL);
}
