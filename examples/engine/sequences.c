/* Sequences of a batch: the pages that they use, share, publish and give back, how they come and how they go. */
#include <string.h>

#include "batch_inside.h"
#include "draws.h"

/* Children go before their parents, so that they are the first to be forgotten. */
static void leave_pages(batch *b, sequence *s) {
  while (s->pages > 0) pages_leave(&b->pages, s->table[--s->pages]);
  s->known = s->cached = 0;
}

bool batch_take_pages(batch *b, sequence *s, int64_t tokens) {
  while (s->pages < pages_of(tokens)) {
    int32_t page = pages_take(&b->pages);
    if (page < 0) return false;
    s->table[s->pages++] = page;
  }
  return true;
}

/* Tokens that may be shared: not the last one, whose logits are wanted, nor those that sparse steps computed. */
static int shareable(const sequence *s) {
  return s->how == BATCH_SPARSE && s->count > s->prompt ? s->prompt : s->count - 1;
}

void batch_share(batch *b, sequence *s) {
  const int most = shareable(s);
  int32_t page;
  while (s->cached == s->known * PAGE_TOKENS &&
         pages_share(&b->pages, s->known ? s->table[s->known - 1] : -1, s->text + s->cached,
                     smaller(PAGE_TOKENS, most - s->cached), &page)) {
    if (s->known < s->pages) pages_leave(&b->pages, s->table[s->known]);
    else s->pages++;
    if (b->pages.page[page].summarised != b) s->unsummarised = smaller(s->unsummarised, s->cached);
    s->table[s->known++] = page;
    s->cached += PAGE_TOKENS;
    b->n.shared_tokens += PAGE_TOKENS;
  }
}

int batch_waiting(const batch *b) {
  int count = 0;
  for (int i = 0; i < b->sequences; i++) count += b->slots[b->order[i]].waiting;
  return count;
}

bool batch_enter(batch *b, sequence *s) {
  const int64_t shared = b->n.shared_tokens;
  s->unsummarised = INT32_MAX;
  batch_share(b, s);
  const int running = b->sequences - batch_waiting(b);
  if (pages_available(&b->pages) < pages_of(s->count) - s->pages + running) {
    b->n.shared_tokens = shared;
    return leave_pages(b, s), false;
  }
  batch_take_pages(b, s, s->count);
  const int most = shareable(s), part = s->cached < most
      ? pages_copy_part(&b->pages, s->table[s->known], s->known ? s->table[s->known - 1] : -1, s->text + s->cached, most - s->cached)
      : 0;
  s->cached += part;
  b->n.shared_tokens += part;
  s->waiting = false;
  return true;
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
  if (!batch_enter(b, s)) return BATCH_FULL;
  const int32_t numbers[2] = {at, b->o.rows + at};
  vwd_decoder_reset_args reset = VWD_DECODER_RESET_ARGS_INIT;
  reset.sequences = TENSOR(numbers, INT32, 2);
  if (!batch_called(vwd_decoder_reset(b->decoder, &reset, NULL), "vwd_decoder_reset", error)) return leave_pages(b, s), BATCH_REFUSED;
  *id = s->id = ++b->last_id;
  b->order[b->sequences++] = at;
  return BATCH_ADMITTED;
}

void batch_end(batch *b, int place) {
  sequence *s = &b->slots[b->order[place]];
  leave_pages(b, s);
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
  while (!batch_take_pages(b, s, tokens)) {
    int last = b->sequences - 1;
    while (last > place && b->slots[b->order[last]].waiting) last--;
    sequence *victim = &b->slots[b->order[last]];
    leave_pages(b, victim);
    victim->waiting = true;
    b->n.preemptions++;
    if (victim == s) return false;
  }
  return true;
}

void batch_publish(batch *b, sequence *s) {
  const int most = s->how == BATCH_SPARSE ? smaller(s->cached, s->prompt) : s->cached;
  for (; (s->known + 1) * PAGE_TOKENS <= most; s->known++) {
    const int32_t parent = s->known ? s->table[s->known - 1] : -1;
    s->table[s->known] = pages_publish(&b->pages, s->table[s->known], parent, s->text + s->known * PAGE_TOKENS);
    if (b->pages.page[s->table[s->known]].summarised != b) s->unsummarised = smaller(s->unsummarised, s->known * PAGE_TOKENS);
  }
}
