/* Which blocks each step selects, and which a layer ahead foresees: a file that says what a cache of a few slots would miss. */
#include <stdio.h>

#include "strategies.h"

/* Every fifth layer is enough to tell, and keeps the file small. */
enum { APART = 5, FIRST = 2 };

typedef struct {
  run run;
  list ahead[2]; /* foreseen for this layer and the next, by parity */
  FILE *out;
} trace;

static void write_list(FILE *out, const list *l, int head) {
  for (int i = 0; i < l->counts[head]; i++) fprintf(out, " %d", (int)l->ids[head * l->cap + i]);
}

/* The foreseen list: of the tokens before this one, whose block comes last. */
static bool foresee(trace *t, const attention_call *call) {
  run *r = &t->run;
  const int32_t before = call->positions[0], block = before / PAGE;
  const int next = call->layer + 1;
  list *ahead = &t->ahead[next % 2];
  if (!forecast_queries(r, call)) return false;
  if (next == r->d->shape.layers) return true;
  if (!select_by_axis(r, next, &before, r->forecast_q, predicted_blocks(r->d, r->d->select.ratio), ahead, NULL)) return false;
  for (int h = 0; h < ahead->heads; h++) {
    int32_t *ids = ahead->ids + h * ahead->cap, *count = &ahead->counts[h];
    if (*count == 0 || ids[*count - 1] != block) ids[(*count)++] = block;
  }
  return true;
}

static bool attend(void *context, const attention_call *call) {
  trace *t = context;
  run *r = &t->run;
  const int32_t seq_len = call->positions[0] + 1;
  if (!foresee(t, call) || !append(r, call) ||
      !select_by_axis(r, call->layer, &seq_len, call->q, r->d->select.k, &r->selected, NULL))
    return false;
  for (int h = 0; call->layer % APART == FIRST && h < r->selected.heads; h++) {
    fprintf(t->out, "%d %d:", call->layer, h);
    write_list(t->out, &r->selected, h);
    fprintf(t->out, " |");
    write_list(t->out, &t->ahead[call->layer % 2], h);
    fprintf(t->out, "\n");
  }
  return attend_list(r, call, &seq_len, &r->selected, PAGE, false);
}

bool write_trace(decoder *d, const int32_t *tokens, int count, const char *path, progress_fn progress, void *context) {
  trace t = {.out = fopen(path, "w")};
  if (!t.out) return perror(path), false;
  const int cap = predicted_blocks(d, d->select.ratio) + 1;
  bool ok = run_init(&t.run, d, BY_AXIS);
  for (int n = 0; ok && n < 2; n++) ok = list_init(&t.ahead[n], d->shape.kv_heads, cap);
  fprintf(t.out,
          "# Blocks of %d tokens that each step after %d tokens selects by AXIS, %d for a KV head, and those that its Forecast foresees a layer ahead.\n"
          "# A line for a layer and KV head, \"layer head: selected | foreseen\"; an empty line ends a step.\n",
          PAGE, d->prompt_count, d->select.k);
  for (int i = 0; ok && i < count; i++) {
    sequence *seq = &t.run.seq;
    ok = sequence_reserve(seq, seq->length + 1) && model_forward_run(d->model, &tokens[i], 1, seq->length, true, attend, &t);
    seq->length++;
    fprintf(t.out, "\n");
    progress(context, i + 1, count);
  }
  run_free(&t.run);
  for (int n = 0; n < 2; n++) list_free(&t.ahead[n]);
  const bool written = !ferror(t.out);
  if (fclose(t.out) != 0 || !written) return perror(path), false;
  return ok;
}
