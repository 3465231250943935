/* Sequences of a batch: how they come, wait for room, and go. */
#include <string.h>

#include "batch_inside.h"
#include "draws.h"

int batch_waiting(const batch *b) {
  int count = 0;
  for (int i = 0; i < b->sequences; i++) count += b->slots[b->order[i]].waiting;
  return count;
}

/* False where there is no room, or the batch is broken. */
static bool enter(batch *b, sequence *s) {
  s->unsummarised = INT32_MAX;
  if (!b->store->enter(b, s)) return false;
  s->waiting = false;
  return true;
}

void batch_resume(batch *b) {
  for (int i = 0; i < b->sequences; i++)
    if (b->slots[b->order[i]].waiting && !enter(b, &b->slots[b->order[i]])) return;
}

batch_admission batch_admit(batch *b, const batch_request *r, int64_t *id, batch_error *error) {
  if (r->count < 1 || r->max_new < 1 || (int64_t)r->count + r->max_new > b->o.max_tokens)
    return batch_fail(error, "%lld prompt tokens and %lld new ones; expected at least one of each, together at most %lld", r->count,
                r->max_new, b->o.max_tokens),
           BATCH_REFUSED;
  if ((int)r->how < 0 || r->how >= BATCH_HOWS)
    return batch_fail(error, "how: %lld; expected a BATCH_ value", (long long)r->how, 0, 0), BATCH_REFUSED;
  for (int i = 0; i < r->count; i++)
    if (r->tokens[i] < 0 || r->tokens[i] >= b->shape.vocab)
      return batch_fail(error, "token %lld at %lld of the prompt; the model has %lld", r->tokens[i], i, b->shape.vocab), BATCH_REFUSED;
  if (!draws_can(&r->sampling, error->text, sizeof error->text)) return BATCH_REFUSED;
  if (b->broken) return batch_fail(error, "the batch has failed, and can only be freed", 0, 0, 0), BATCH_REFUSED;
  if (b->sequences == b->o.rows || batch_waiting(b)) return BATCH_FULL;
  int at = 0;
  while (b->slots[at].id) at++;
  sequence *s = &b->slots[at];
  *s = (sequence){.text = s->text,
                  .table = s->table,
                  .how = r->how,
                  .sampling = r->sampling,
                  .stop = r->stop,
                  .prompt = r->count,
                  .count = r->count,
                  .limit = r->count + r->max_new};
  memcpy(s->text, r->tokens, (size_t)r->count * sizeof *s->text);
  if (!enter(b, s)) return b->broken ? (*error = b->error, BATCH_REFUSED) : BATCH_FULL;
  const int32_t numbers[2] = {b->first_drafter + at, b->first_drafter + b->o.rows + at};
  vwd_decoder_reset_args reset = VWD_DECODER_RESET_ARGS_INIT;
  reset.sequences = TENSOR(numbers, INT32, 2);
  if (!batch_called(vwd_decoder_reset(b->decoder, &reset, NULL), "vwd_decoder_reset", error)) return b->store->leave(b, s), BATCH_REFUSED;
  *id = s->id = ++b->last_id;
  b->order[b->sequences++] = at;
  return BATCH_ADMITTED;
}

void batch_end(batch *b, int place) {
  sequence *s = &b->slots[b->order[place]];
  b->store->leave(b, s);
  s->id = 0;
  b->sequences--;
  memmove(b->order + place, b->order + place + 1, (size_t)(b->sequences - place) * sizeof *b->order);
}

bool batch_cancel(batch *b, int64_t id) {
  for (int i = 0; i < b->sequences; i++)
    if (b->slots[b->order[i]].id == id) return batch_end(b, i), true;
  return false;
}

bool batch_make_room(batch *b, int place, int64_t tokens) {
  sequence *s = &b->slots[b->order[place]];
  while (!b->store->take(b, s, tokens)) {
    int last = b->sequences - 1;
    while (last > place && b->slots[b->order[last]].waiting) last--;
    sequence *victim = &b->slots[b->order[last]];
    b->store->leave(b, victim);
    victim->waiting = true;
    b->n.preemptions++;
    if (victim == s) return false;
  }
  return true;
}
