/* Draws of tokens by vwd_verify_sample: a row for each sequence that draws, plain or from verified drafts. */
#ifndef ENGINE_DRAWS_H
#define ENGINE_DRAWS_H

#include <stdbool.h>
#include <stddef.h>

#include "batch.h"
#include "model.h"

/* What the rows ask for, and what they commit. */
typedef struct {
  int rows;
  float temperature[MAX_ROWS], top_p[MAX_ROWS], min_p[MAX_ROWS];
  int32_t top_k[MAX_ROWS], begin[MAX_ROWS], positions[MAX_ROWS], stop[MAX_ROWS], remaining[MAX_ROWS];
  uint64_t seeds[MAX_ROWS];
  int32_t next[MAX_ROWS], accepted[MAX_ROWS], committed[MAX_ROWS * (BATCH_MAX_DRAFTS + 1)], committed_len[MAX_ROWS];
  uint8_t finish[MAX_ROWS];
} draws;

/* Whether every value is in its range; else why not. */
bool draws_can(const batch_sampling *how, char *why, size_t room);

/* A row that draws the token at `position`, from row `begin` of the logits on, and at most `remaining` tokens. */
void draws_add(draws *d, const batch_sampling *how, int32_t stop, int begin, int position, int remaining);

/* Draws by coupling: a token depends on its logits, the seed and its position, and not on drafts. logits [rows, vocab];
 * drafts [d->rows, width] and their lengths, or null. */
vwd_status draws_run(draws *d, vwd_session *session, const float *logits, int rows, int vocab, const int32_t *drafts, const int32_t *lens,
                     int width);

#endif
