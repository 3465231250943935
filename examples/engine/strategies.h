/* One generation in progress, and the calls of Vanward that its strategy is made of. */
#ifndef ENGINE_STRATEGIES_H
#define ENGINE_STRATEGIES_H

#include "decoder.h"

typedef struct {
  int32_t *ids, *counts; /* [kv_heads, cap], [kv_heads] */
  int heads, cap;
} list;

/* Attention of one row per entry of a list, kept for the repair. */
typedef struct {
  float *acc, *m, *l; /* [heads, cap, head_dim], [heads, cap], [heads, cap] */
} partials;

/* Scores smoothed by vwd_predictor_*. */
typedef struct {
  float *level, *trend; /* [layers, kv_heads, max_pages] */
  vwd_holt holt;
} predictor;

typedef struct {
  decoder *d;
  strategy how;
  sequence seq;
  counters n;
  list selected;       /* the true blocks */
  list coarse, tokens; /* two-level: candidate blocks, and the tokens read out of them */
  list guess[2];       /* of this layer and the next, by parity */
  float *scores;       /* [kv_heads, max_pages] of the true selection */
  float *forecast_q;   /* [heads, head_dim] */
  float *last_q;       /* [layers, heads, head_dim] of the token before, ahead of rotary embedding */
  partials partial;
  predictor predictor;
  tail tail;          /* of the modes with a tail, and what follows: */
  float *log_mass[2]; /* [heads], of this layer and the next, by parity: the weight of what a list leaves out */
  partials state;     /* [heads, 1, …] of the list, which the term joins */
  int32_t *missed; /* [kv_heads] */
} run;

bool run_init(run *r, decoder *d, strategy how);
/* Room for what attend_with_tail reads and writes besides a tail. */
bool run_join_tail(run *r);
void run_free(run *r);

/* What model_forward calls, with the run as its context, for one row. */
attention_fn strategy_attention(strategy how);

bool list_init(list *l, int heads, int cap);
void list_free(list *l);
int predicted_blocks(const decoder *d, float ratio); /* ⌈ratio·k⌉ */

/* A predictor that has seen the prompt's score rows. */
bool predictor_init(predictor *p, const decoder *d, vwd_holt holt);
void predictor_free(predictor *p);
bool predict(const decoder *d, const predictor *p, int layer, const int32_t *seq_len, float ratio, list *out);
bool learn(const decoder *d, const predictor *p, int layer, const int32_t *seq_len, const float *scores);

/* Queries of the next layer from what enters this one and from the next layer's at the token before, which this layer's
 * then become for the coming token. */
bool forecast_queries(run *r, const attention_call *call);

/* Summaries of tokens that have entered the cache: blocks, and labels where the mode reads them. */
bool summarize(run *r, int layer, int64_t begin, int64_t end);

/* The pass's token enters the cache. */
bool append(run *r, const attention_call *call);
/* By any summaries, of blocks of any size. */
bool select_from(run *r, const vwd_index *index, uint32_t method, int block, const int32_t *seq_len, const float *q, int k,
                 list *out, float *scores, float *log_mass);
/* By AXIS, and the weight of what is left out if log_mass is not NULL. */
bool select_by_axis(run *r, int layer, const int32_t *seq_len, const float *q, int k, list *out, float *log_mass);
bool select_blocks(run *r, int layer, const int32_t *seq_len, const float *q, int k, list *out, float *scores);
bool attend_list(run *r, const attention_call *call, const int32_t *seq_len, const list *l, int block_size, bool keep);
/* Attention over the list, and one term for what it leaves out, whose weight is that of the layer's last selection. */
bool attend_with_tail(run *r, const attention_call *call, const int32_t *seq_len, const list *l, const tail *t, int block_size);

#endif
