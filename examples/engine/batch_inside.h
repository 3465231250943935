/* What the files of the batch share: its sequences, and the pass through the model that a step makes ready. Read batch.h first, then
 * sequences.c, pass.c and batch.c. */
#ifndef ENGINE_BATCH_INSIDE_H
#define ENGINE_BATCH_INSIDE_H

#include <stdlib.h>

#include "batch.h"
#include "draws.h"
#include "lookup.h"
#include "pages.h"
#include "store.h"
#include "view.h"

_Static_assert((int)BATCH_PAGE == (int)PAGE_TOKENS, "one size of pages");
_Static_assert((int)BATCH_MAX_DRAFTS + 1 == (int)LOOKUP_NODES, "one size of trees");

struct sequence {
  int64_t id; /* 0: the slot is free */
  batch_how how;
  batch_sampling sampling;
  batch_finish finish;
  int32_t stop;
  int32_t *text;            /* [max_tokens] */
  int prompt, count, limit; /* tokens of the prompt; of the text so far; of the text at its longest */
  bool waiting;             /* preempted: it has no pages */
  int32_t *table;           /* [max_pages], where keys and values are in pages */
  int pages, known;         /* pages that it uses, and how many of them, from the first on, are known ones */
  int number;               /* of its sequence in the tiered cache, where they are there */
  bool is_new;              /* in that cache: no sparse step has been made since it was begun */
  int cached;               /* tokens whose keys and values are in the pages */
  int unsummarised;         /* the first token of shared pages whose summaries are yet to be made; INT32_MAX: none */
  /* This step's: */
  int rows; /* positions of the pass: a piece of the prompt, or the last token and its drafts */
  int drafts, found_count;
  int32_t draft[BATCH_MAX_DRAFTS];       /* of the found_count that lookup found as a chain, the first */
  bool by_self;                          /* sparse steps draft */
  occurrences places;                    /* what a tree was made of, whether it is drafted or not */
  int32_t parents[BATCH_MAX_DRAFTS + 1];                    /* of its nodes: node 0 is the last token, node n draft n − 1 */
};

/* Rows of a pass that are alike: one vwd_decoder_step, whose tensors are plain views of the model's buffers. */
struct group {
  uint32_t mode;
  bool trees; /* the positions of a member are the nodes of a tree */
  int positions, batch;
  int first, first_member; /* the first row of the pass, and the first member */
  int shortest;
};

struct batch {
  model *model;
  model_shape shape;
  vwd_session *session;
  vwd_decoder *decoder;
  const store *store;
  /* [2 · rows]: of each slot's drafts by sparse steps, then of its drafts by lookup. */
  const int32_t *draft_lens;
  const float *acceptance;
  int first_drafter; /* the number of the first of these in the decoder */
  batch_options o;
  int max_pages; /* of a sequence */
  /* Where keys and values are in pages: */
  pages pages;
  vwd_compactor *compactor; /* over keys and values of all layers */
  int32_t *tables;          /* [rows, max_pages], of the members of the pass */
  /* Where they are in a tiered cache: */
  struct tiered *tiered;
  int32_t numbers[MAX_ROWS]; /* of the members of the pass */

  sequence *slots; /* [rows] */
  int *order;      /* [sequences]: slots, the oldest sequence first */
  int sequences;
  int64_t last_id;
  bool broken;
  batch_counters n;

  /* The pass that is made ready. */
  int32_t tokens[MAX_ROWS], positions[MAX_ROWS], wanted[MAX_ROWS];
  int rows, wanted_count;
  group groups[MAX_ROWS];
  int group_count, members;
  int member_slot[MAX_ROWS]; /* the sequences of the pass, one group after the other */
  int32_t seq_lens[MAX_ROWS], begins[MAX_ROWS];
  int32_t roots[MAX_ROWS];   /* [members] positions of the first row of each */
  int32_t parents[MAX_ROWS]; /* of the rows that are nodes of trees */
  uint32_t masks[MAX_ROWS];  /* the rows of its tree that each node sees */
  uint16_t *new_k, *new_v; /* [MAX_ROWS, kv_heads, head_dim] */
  batch_error error;
};

static inline int smaller(int a, int b) { return a < b ? a : b; }

static inline int pages_of(int64_t tokens) { return (int)((tokens + PAGE_TOKENS - 1) / PAGE_TOKENS); }

/* Blocks of a list. */
static inline int list_blocks(const batch *b) {
  const int forced = b->o.init_blocks + b->o.local_blocks;
  return b->o.k > forced ? b->o.k : forced;
}

/* A token to decode, and nothing else to compute before it. */
static inline bool is_decoding(const sequence *s) { return !s->waiting && s->cached == s->count - 1; }

/* Tokens that may be shared: not the last one, whose logits are wanted, nor those that sparse steps computed. */
static inline int shareable(const sequence *s) {
  return s->how == BATCH_SPARSE && s->count > s->prompt ? s->prompt : s->count - 1;
}

/* False, with the words in error. */
bool batch_fail(batch_error *error, const char *format, long long found, long long least, long long most);
/* False, with the call's name and Vanward's message in error, unless status is VWD_OK. */
bool batch_called(vwd_status status, const char *call, batch_error *error);

/* Drafts of this step are a tree. */
static inline bool is_tree(const sequence *s) {
  return (s->how == BATCH_LOOKUP_TREE || s->how == BATCH_SELF_LOOKUP) && !s->by_self && s->drafts > 0;
}

/* --- sequences.c: sequences come and go --- */

int batch_waiting(const batch *b);
/* Sequences that wait go on, the oldest first, as far as there is room. */
void batch_resume(batch *b);
/* Pages for more tokens of the sequence at a place in the order; those of the youngest are given back for it. False if that
 * is the sequence itself, which then waits. */
bool batch_make_room(batch *b, int place, int64_t tokens);
/* Ends the sequence at a place in the order. */
void batch_end(batch *b, int place);

/* --- pass.c: a pass through the model --- */

void pass_start(batch *b);
/* Adds the tokens first … first + count − 1 of a sequence's text, its drafts behind it. Members that are alike follow one another. */
void pass_add(batch *b, int slot, uint32_t mode, int first, int count);
void pass_want(batch *b, int row);
/* Logits of the wanted rows; NULL on failure, which is in b->error. */
const float *pass_run(batch *b);
/* Sequences of no more tokens attend densely in any mode. */
int always_dense(const batch *b);
/* Bytes of the keys and values of a token in a layer. */
int64_t token_bytes(const batch *b);

/* --- trees.c: draft trees --- */

/* Drafts a tree of at most so many nodes beside the root. The tokens that it promises in the time of a pass without drafts. */
float trees_plan(batch *b, int slot, int most);
/* Walks the trees of a group by the logits of its rows, fills in what they commit, and moves the keys and values of accepted nodes
 * to where the text has them. */
bool trees_verify(batch *b, const group *g, const float *logits, draws *d, int width);

#endif
