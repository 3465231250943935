/* What the files of the driver share: its arguments, and calls of llama.cpp. */
#ifndef DRIVER_H
#define DRIVER_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "llama_api.h"

/* ---- arguments; driver.c has their defaults ---- */

extern const char *model_path, *text_path;
extern int depth, count, threads, batch_rows, context_size, seed, operations, verbose;
extern const char *device_name, *prompter_name, *depths, *variants, *logits_path;
extern const char *tracer_path, *trace_path, *stock_name, *state_path;
extern int turns;
extern int ubatch, warm, traced;
extern int type_k, flash, unified, sequences, swa_full, random_text;
extern int embeds, pooling;
extern int forget; /* the step before which `score` has Vanward forget its summaries; 0: none */
extern int unsaved; /* the last tokens of a prompt, which its state lacks */
extern int retries; /* of batches that could not be computed, over the whole run */

extern struct llama_model *model;
extern int vocabulary;

/* ---- driver_llama.c ---- */

double cpu_seconds(void);
double wall_seconds(void);
_Noreturn void fail(const char *what);
void on_log(int level, const char *text, void *context);
/* One of Vanward's counters; 0 without Vanward. */
uint64_t counter(const char *name);
void print_counters(void);
/* Has Vanward forget what it summarised. */
void forget_summaries(void);
/* The model on the devices of these names, or on all of them. */
struct llama_model *load_model(const char *device_names);
struct llama_context *new_context(struct llama_model *of);
llama_token *read_tokens(int *n);
void push(struct llama_batch *batch, llama_token token, llama_pos pos, llama_seq_id id, bool output);
int decode(struct llama_context *context, struct llama_batch *batch);
/* What a decoder with an encoder attends to: the first tokens of the text, encoded. */
void encode_if_needed(struct llama_context *context, struct llama_batch *batch, const llama_token *tokens);
void prefill_from(struct llama_context *context, struct llama_batch *batch, const llama_token *tokens, int from, int n, llama_seq_id id);
void prefill(struct llama_context *context, struct llama_batch *batch, const llama_token *tokens, int n, llama_seq_id id);
int top_of(const float *logits);
/* −ln of the probability of `token`; `top` becomes the most probable one, `lead` what its logit is ahead of the next. */
double loss_of(const float *logits, llama_token token, int *top, float *lead);

/* ---- driver_runs.c ---- */

void score(bool by_line);
void random_run(void);
void restore(void);
void nodes(void);
void cases(void);
void embed(void);

/* ---- driver_bench.c ---- */

/* Before the backends are loaded. */
void start_tracer(void);
void bench(void);
void beside(void);
void compare(void);

#endif
