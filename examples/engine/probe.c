/* How many of the true blocks each predictor names before the selection is known. */
#include <stdlib.h>

#include "strategies.h"

typedef struct {
  run run;
  const float *ratios;
  predictor smooth[2];      /* previous step's scores, Holt */
  list smoothed;            /* their guess */
  list forecast[2][RATIOS]; /* of this layer and the next, by parity */
  int64_t named[PREDICTORS][RATIOS], all[PREDICTORS];
} probe;

/* Entries of `truth` that `guess` has; both ascend. */
static int64_t common(const list *truth, const list *guess) {
  int64_t count = 0;
  for (int h = 0; h < truth->heads; h++) {
    const int32_t *t = truth->ids + h * truth->cap, *g = guess->ids + h * guess->cap;
    for (int i = 0, j = 0; i < truth->counts[h] && j < guess->counts[h];) {
      count += t[i] == g[j];
      if (t[i] <= g[j]) i++;
      else j++;
    }
  }
  return count;
}

static bool attend(void *context, const attention_call *call) {
  probe *p = context;
  run *r = &p->run;
  const decoder *d = r->d;
  const int32_t seq_len = call->positions[0] + 1;
  int next = call->layer + 1;
  bool ok = forecast_queries(r, call);
  for (int i = 0; ok && next < d->shape.layers && i < RATIOS; i++)
    ok = select_blocks(r, next, &seq_len, r->forecast_q, predicted_blocks(d, p->ratios[i]),
                       &p->forecast[next % 2][i], NULL);
  ok = ok && append(r, call) &&
       select_blocks(r, call->layer, &seq_len, call->q, d->select.k, &r->selected, r->scores);
  if (!ok) return false;

  int64_t selected = 0;
  for (int h = 0; h < r->selected.heads; h++) selected += r->selected.counts[h];
  for (int s = 0; ok && s < 2; s++) {
    for (int i = 0; ok && i < RATIOS; i++) {
      p->smoothed.cap = predicted_blocks(d, p->ratios[i]);
      ok = predict(d, &p->smooth[s], call->layer, &seq_len, p->ratios[i], &p->smoothed);
      p->named[s][i] += common(&r->selected, &p->smoothed);
    }
    p->all[s] += selected;
    ok = ok && learn(d, &p->smooth[s], call->layer, &seq_len, r->scores);
  }
  for (int i = 0; call->layer > 0 && i < RATIOS; i++)
    p->named[2][i] += common(&r->selected, &p->forecast[call->layer % 2][i]);
  p->all[2] += call->layer > 0 ? selected : 0;
  return ok && attend_list(r, call, &seq_len, &r->selected, PAGE, false);
}

static bool probe_init(probe *p, decoder *d, const float ratios[RATIOS]) {
  *p = (probe){.ratios = ratios};
  bool ok = run_init(&p->run, d, SPARSE) && predictor_init(&p->smooth[0], d, (vwd_holt){1, 0, 0}) &&
            predictor_init(&p->smooth[1], d, d->holt);
  int most = 0;
  for (int i = 0; ok && i < RATIOS; i++) {
    int cap = predicted_blocks(d, ratios[i]);
    most = cap > most ? cap : most;
    ok = list_init(&p->forecast[0][i], d->shape.kv_heads, cap) &&
         list_init(&p->forecast[1][i], d->shape.kv_heads, cap);
  }
  return ok && list_init(&p->smoothed, d->shape.kv_heads, most);
}

static void probe_free(probe *p) {
  run_free(&p->run);
  for (int s = 0; s < 2; s++) predictor_free(&p->smooth[s]);
  for (int i = 0; i < RATIOS; i++) list_free(&p->forecast[0][i]), list_free(&p->forecast[1][i]);
  list_free(&p->smoothed);
}

bool measure_predictors(decoder *d, const int32_t *tokens, int count, const float ratios[RATIOS],
                        double share[PREDICTORS][RATIOS], progress_fn progress, void *context) {
  probe p;
  bool ok = probe_init(&p, d, ratios);
  for (int i = 0; ok && i + 1 < count; i++) {
    sequence *seq = &p.run.seq;
    ok = sequence_reserve(seq, seq->length + 1) &&
         model_forward_run(d->model, &tokens[i], 1, seq->length, true, attend, &p);
    seq->length++;
    progress(context, i + 2, count);
  }
  for (int s = 0; s < PREDICTORS; s++)
    for (int i = 0; i < RATIOS; i++) share[s][i] = p.all[s] ? (double)p.named[s][i] / (double)p.all[s] : 0;
  probe_free(&p);
  return ok;
}
