/* Sequences in a batch, which differ in how they draft: what that gains, and that it changes nothing in the text. */
#ifndef ENGINE_DRAFTING_H
#define ENGINE_DRAFTING_H

#include "batch.h"
#include "progress.h"

/* What one sequence gave. */
typedef struct {
  int32_t *tokens; /* [limit] */
  int count;
  double seconds, cpu_seconds; /* without the prompt and the first token; of all threads, those that wait actively included */
  batch_counters n;
} drafted_text;

/* Continues one prompt in each way, sampled alike, or in one alone if `only` is not −1, one after the other; all but the first share its pages.
 * False on failure, which is said. */
bool continue_all(model *m, vwd_session *session, const batch_options *options, const int32_t *prompt, int count, int32_t stop,
                  int limit, const batch_sampling *sampling, int only, drafted_text out[BATCH_HOWS], double *prompt_seconds,
                  progress_fn progress, void *context);

typedef struct {
  int texts, tokens; /* compared, of each way that drafts */
  int different;     /* texts that are not those of dense attention */
  double seconds;
  batch_counters n;
} drafting_check;

/* Continues pieces of a text, of different lengths, by `limit` tokens each: densely, with trees by lookup, with drafts by sparse steps, and
 * with those or drafts by lookup, all in one batch. CHECKED_WAYS of them draft. */
enum { CHECKED_WAYS = 3 };
bool check_drafts(model *m, vwd_session *session, const batch_options *options, const int32_t *text, int count, int pieces,
                  int limit, const batch_sampling *sampling, drafting_check *out, progress_fn progress, void *context);

#endif
