/* Decodes several sequences at once: continuous batching over one vwd_decoder, and one pool of pages or one tiered cache.
 *
 * A sequence is admitted, takes part in steps, and ends by its stop token, by its length, or by cancellation. A step takes
 * in pieces of prompts and decodes tokens in one forward pass of the model. Full pages of 16 tokens stay known after their
 * sequence has gone, until their room is needed: a prompt that begins as they do shares them. Where pages run out, the
 * youngest sequence gives its own back, waits, and is computed again; its text stays the same.
 *
 * The text of a sequence depends on nothing but its request and the model: not on the sequences beside it, nor on shared
 * pages, preemption, or drafts.
 *
 * A batch has one owner: calls on it never overlap. It allocates nothing in a step. */
#ifndef ENGINE_BATCH_H
#define ENGINE_BATCH_H

#include <stdbool.h>
#include <stdint.h>
#include <vanward.h>

#include "model.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { BATCH_PAGE = 16, BATCH_MAX_DRAFTS = 15 };

/* How the tokens of a sequence are computed. All but BATCH_SPARSE give the text of dense attention, token for token, sampled or
 * not. The
 * prompt is always taken in with dense attention. */
typedef enum {
  BATCH_DENSE,       /* a token a step */
  BATCH_SPARSE,      /* a token a step, from selected blocks */
  BATCH_LOOKUP,      /* drafts: what followed the last few tokens when they last occurred; verified by dense attention */
  BATCH_LOOKUP_TREE, /* drafts: a tree of what followed them wherever they occurred; verified by dense attention */
  BATCH_SELF,        /* drafts: sparse steps; verified by dense attention */
  BATCH_SELF_LOOKUP, /* drafts: a tree by lookup, or sparse steps, whichever promises more tokens in the time */
  BATCH_HOWS
} batch_how;

/* Zero means the default. */
typedef struct {
  int rows;       /* sequences at once, 1 to 64; default 8 */
  int max_tokens; /* of one sequence, prompt and answer; default: the model's context */
  int pages;      /* of all sequences, at least those of max_tokens; default: rows · max_tokens, at most 1 GiB of keys and values */
  int chunk;      /* prompt tokens of a step, of all sequences together, 1 to 64; default 64 */
  int max_drafts; /* of a sequence in a step, 1 to BATCH_MAX_DRAFTS; default 8. Of a tree: its nodes beside the root */
  /* What drafts cost, as a part of the time of a dense pass of one position: a sparse step and a position more to verify; a
   * position more to verify. They decide how many drafts are worth it. Defaults 0.6 and 0.2. */
  float draft_cost, position_cost;
  /* Sparse steps: in every layer, or densely in the first `dense_layers`. */
  uint32_t method; /* VWD_SELECT_AXIS or VWD_SELECT_MINMAX; default AXIS */
  int k;           /* blocks of BATCH_PAGE tokens that a KV head reads, forced ones included; default 32 */
  int init_blocks, local_blocks; /* forced: the first and the last ones; default 1 and 2 */
  int dense_below;               /* shorter sequences attend densely */
  int dense_layers;
  /* Keys and values in host memory, `pages` of them in a vwd_kv_cache, and in slots of device memory what sparse steps read. */
  bool host_kv;
  int slots; /* tokens of a layer that there are slots for; default an eighth of the pages', or what a step of all rows reads at once */
  uint32_t strategy; /* how sparse steps attend: VWD_STRATEGY_SERIAL, or with host_kv ASYNC_TLS or VANWARD, which has SERIAL's text */
} batch_options;

/* How tokens are drawn from the model's logits, by vwd_verify_sample. All zero is greedy decoding. */
typedef struct {
  float temperature; /* 0 is greedy: the likeliest token; finite and not negative */
  float top_p;       /* the fewest likeliest tokens that have this part of the mass, 0 to 1; 0 and 1: all */
  float min_p;       /* tokens at least this part as likely as the likeliest, 0 to 1; 0: all */
  int top_k;         /* so many likeliest tokens, at least 0; 0: all */
  uint64_t seed;     /* the same seed and request give the same text */
} batch_sampling;

typedef struct {
  const int32_t *tokens; /* the prompt, copied */
  int count;             /* at least 1 */
  int max_new;           /* tokens to generate, at least 1; with the prompt at most max_tokens */
  int32_t stop;          /* the token that ends the text; −1: none */
  batch_how how;
  batch_sampling sampling;
} batch_request;

typedef enum { BATCH_ADMITTED, BATCH_FULL, BATCH_REFUSED } batch_admission;

/* As vwd_verify_sample says it. */
typedef enum { BATCH_RUNNING = VWD_FINISH_NONE, BATCH_STOPPED = VWD_FINISH_STOP, BATCH_LENGTH = VWD_FINISH_LENGTH } batch_finish;

/* A token of a sequence, in order. `finish` is set in its last one; a stop token is reported, too. */
typedef struct {
  int64_t id;
  int32_t token;
  batch_finish finish;
} batch_event;

typedef struct {
  /* Since creation. */
  int64_t steps, passes;     /* a step has one pass through the model, and one for each token that it drafts by sparse steps */
  int64_t prompt_tokens;     /* taken in, those computed again after a preemption included */
  int64_t shared_tokens;     /* of prompts, found in known pages */
  int64_t new_tokens;        /* generated */
  int64_t drafted, accepted; /* all drafts */
  int64_t self_drafted, self_accepted; /* those by sparse steps alone */
  int64_t branched, off_first; /* drafted trees of more than one branch; accepted tokens that were not on a tree's first branch */
  int64_t preemptions, evictions;      /* of sequences; of known pages whose room was needed */
  /* Bytes of keys and values that attention read beyond prompts, of summaries that selection read, and what dense steps of
   * one token would have read for the same text. */
  int64_t kv_bytes, index_bytes, dense_bytes;
  /* With host_kv: blocks of lists that were in slots when they were asked for, and those that were not; bytes that were copied to slots. */
  int64_t slot_hits, slot_misses, fetched_bytes;
  /* Now. */
  int sequences, waiting;      /* admitted; of these, preempted */
  int pages, free_pages;       /* of the pool; free ones, and known ones that no sequence uses */
  int known_pages;             /* that a prompt may share */
} batch_counters;

/* What went wrong, in a sentence. */
typedef struct {
  char text[256];
} batch_error;

typedef struct batch batch;

/* The session is a CPU session; both are borrowed. NULL on failure. */
batch *batch_create(model *m, vwd_session *session, const batch_options *options, batch_error *error);
void batch_free(batch *b);

/* Takes a sequence in and gives it an id, from 1 on. BATCH_FULL: no row, or no pages for the prompt, until a sequence ends;
 * ask again after a step. BATCH_REFUSED: never; error says why. */
batch_admission batch_admit(batch *b, const batch_request *request, int64_t *id, batch_error *error);

/* Ends a sequence without an event. False if there is none of that id. */
bool batch_cancel(batch *b, int64_t id);

/* The most events that a step has. */
int batch_max_events(const batch *b);

/* One step of all sequences. Writes its events, those of a sequence in order, and returns how many: 0 where prompts are still
 * taken in, or without sequences. −1 on failure, after which the batch can only be freed; a capacity below batch_max_events
 * also returns −1, and changes nothing. */
int batch_step(batch *b, batch_event *events, int capacity, batch_error *error);

void batch_count(const batch *b, batch_counters *out);

#ifdef __cplusplus
}
#endif

#endif
