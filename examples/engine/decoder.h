/* The engine's decode loop: one prefilled prompt, generated from in several ways that differ only in what attention
 * reads. */
#ifndef ENGINE_DECODER_H
#define ENGINE_DECODER_H

#include "kv.h"
#include "progress.h"
#include "tail.h"

/* From PREVIOUS on guesses are repaired; FORESEEN attends them as they are, FORESEEN_TAIL by axes and with what they leave out as a term. */
typedef enum { DENSE, SPARSE, BY_AXIS, WITH_TAIL, TWO_LEVEL, FORESEEN, FORESEEN_TAIL, PREVIOUS, HOLT, FORECAST, STRATEGIES } strategy;
enum { SAMPLE = 128, RATIOS = 3, PREDICTORS = 3 };

/* Sizes of the selections, in blocks of PAGE tokens. */
typedef struct {
  int k;           /* blocks that sparse attention reads, per KV head */
  int init, local; /* forced among them: the first ones, and the last ones with the partial tail */
  int coarse;      /* two-level: candidate blocks */
  int tokens;      /* two-level: tokens read out of them */
  float ratio;     /* speculation attends ⌈ratio·k⌉ predicted blocks */
} selection;

/* What the prompt leaves behind besides keys and values: what the modes that are to run read. */
typedef struct {
  bool summaries, axes, labels, holt, forecast, codes;
} preparation;

typedef struct {
  model *model;
  model_shape shape;
  vwd_session *session;
  selection select;
  preparation prepare;
  int32_t end_token;

  kv_cache cache;
  sequence prompt;
  tail tail; /* of the prompt */
  int32_t *prompt_tokens;
  int prompt_count;
  int32_t first_token; /* the model's answer to the prompt */

  /* Learned from the prefill. */
  vwd_forecast *forecast; /* [layers − 1] maps: from the residual stream of layer l, and the queries of layer l + 1 at the
                             token before, to those of layer l + 1; all queries are ahead of rotary embedding */
  vwd_holt holt;
  double holt_hit_rate;
  int samples;              /* the prompt's last tokens, at most SAMPLE */
  float *sample_q;          /* [layers, SAMPLE, heads, head_dim] */
  float *sample_k;          /* [layers, SAMPLE, kv_heads, head_dim] */
  float *sample_scores;     /* [layers, SAMPLE, kv_heads, max_pages] */
  float *previous_residual; /* [MAX_ROWS, hidden]: what entered the layer before */
  float *last_q;            /* [layers, heads, head_dim]: the prompt's last token's, ahead of rotary embedding */
  float *pass_q;            /* [1 + MAX_ROWS, heads, head_dim]: a pass's, behind those of the token before it */
} decoder;

typedef struct {
  int64_t kv_bytes, index_bytes, dense_bytes;
  int64_t selected, missed; /* blocks of the true sets that a prediction was made for, and those it lacked */
} counters;

typedef struct {
  int32_t *tokens;
  int count;
  double seconds;
  double loss; /* with forced tokens: -ln p, the mean over those that were chosen between */
  counters n;
} generation;

/* Takes the prompt in and prepares what the strategies need. The session and model are borrowed. */
bool decoder_init(decoder *d, vwd_session *session, model *m, selection s, preparation what, const int32_t *prompt,
                  int count, int max_new, int32_t end_token, progress_fn progress, void *context);
void decoder_free(decoder *d);

/* From here on whole pages are kept in INT4, those of the prompt at once. What was prepared of exact keys stays as it is. */
bool decoder_code(decoder *d);

/* Generates up to `limit` tokens into out->tokens, greedily. With `forced` tokens it reads those instead of its own
 * choices, so that every choice can be compared with the one that was made in the same state. */
bool generate(decoder *d, strategy how, const int32_t *forced, int limit, generation *out, progress_fn progress,
              void *context);

/* Reads `count` tokens as SPARSE does and asks each predictor (PREVIOUS, HOLT, FORECAST) at each ratio before every
 * selection: the share of the true blocks that it names. */
bool measure_predictors(decoder *d, const int32_t *tokens, int count, const float ratios[RATIOS],
                        double share[PREDICTORS][RATIOS], progress_fn progress, void *context);

/* How far attention over selected blocks is from dense attention, relative to its size: the mean over all layers of the
 * steps that read `tokens`, by block size and method, each with as many tokens selected as SPARSE selects. Needs the
 * sample that labels need. */
enum { SIZES = 3, RECIPES = 5 };
typedef struct {
  int size[SIZES];
  const char *name[RECIPES];
  double error[SIZES][RECIPES];
} accuracy;
bool measure_accuracy(decoder *d, const int32_t *tokens, int count, accuracy *out, progress_fn progress, void *context);

/* Writes the blocks that the steps which read `tokens` select by AXIS, and those that are foreseen, of some layers. */
bool write_trace(decoder *d, const int32_t *tokens, int count, const char *path, progress_fn progress, void *context);

/* --- shared by prefill.c and strategies.c --- */

vwd_tensor q_view(const decoder *d, const float *q, int rows);
size_t q_count(const decoder *d); /* floats of a token's queries in one layer */
/* Summaries of the tokens begin … end − 1, of the kind and behind the table that `index` names. */
bool update_index(const decoder *d, int layer, const sequence *s, const vwd_index *index, int64_t begin, int64_t end);
bool attend_dense(const decoder *d, const sequence *s, const int32_t *seq_lens, const attention_call *call);
int blocks_of(int64_t tokens);

#endif
