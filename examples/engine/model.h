/* A Llama-architecture decoder: everything of the forward pass except attention, which the caller brings. */
#ifndef ENGINE_MODEL_H
#define ENGINE_MODEL_H

#include <stdbool.h>

#include "gguf.h"
#include "pool.h"

enum { MAX_ROWS = 64 }; /* tokens of one forward pass */

typedef struct {
  int layers, hidden, heads, kv_heads, head_dim, ffn, vocab, context;
  float rope_base, norm_epsilon;
} model_shape;

typedef struct model model;

/* What one layer asks of attention for the n rows of a pass. All [n, ...], contiguous. Rotary embedding turns neighbouring
 * channels (2i, 2i+1), as GGUF lays out Llama's heads. */
typedef struct {
  int layer, n;
  const int32_t *positions;
  const float *residual; /* [hidden], as it enters the layer */
  const float *q_plain;  /* [heads, head_dim], before rotary embedding */
  const float *q;        /* [heads, head_dim] */
  const float *k;        /* [kv_heads, head_dim] */
  const float *v;        /* [kv_heads, head_dim] */
  float *out;            /* [heads, head_dim] */
} attention_call;

/* False stops the forward pass. */
typedef bool (*attention_fn)(void *context, const attention_call *call);

/* Borrows both. Prints the reason to stderr and returns NULL on failure. */
model *model_new(const gguf *file, pool *threads);
void model_free(model *m);
model_shape model_get_shape(const model *m);

/* The rows of a forward pass: tokens of any sequences, each at its position there. */
typedef struct {
  const int32_t *tokens, *positions; /* [n] */
  int n;                             /* 1 to MAX_ROWS */
  const int32_t *wanted;             /* [wanted_count] rows whose logits are wanted */
  int wanted_count;
} model_pass;

/* Writes logits [wanted_count, vocab] to the model's buffer and returns it; NULL if attention failed. The bits of a row do
 * not depend on the rows beside it. Tokens are below the vocabulary, positions below the context. */
const float *model_forward(model *m, const model_pass *pass, attention_fn attend, void *context);

/* The same for n consecutive tokens of one sequence from `position` on, with the logits of all of them or of the last. */
const float *model_forward_run(model *m, const int32_t *tokens, int n, int64_t position, bool last_only,
                               attention_fn attend, void *context);

/* The token of the largest logit, the first one of equals. */
int32_t model_best(const model *m, const float *logits);

#endif
