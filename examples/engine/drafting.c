#define _POSIX_C_SOURCE 200809L
#include "drafting.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static double read_clock(clockid_t clock) {
  struct timespec t;
  clock_gettime(clock, &t);
  return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static double now(void) { return read_clock(CLOCK_MONOTONIC); }

static bool said(const batch_error *error) { return fprintf(stderr, "batch: %s\n", error->text), false; }

/* What was counted since `before`. */
static batch_counters since(const batch *b, const batch_counters *before) {
  batch_counters n;
  batch_count(b, &n);
  n.steps -= before->steps;
  n.passes -= before->passes;
  n.new_tokens -= before->new_tokens;
  n.drafted -= before->drafted;
  n.accepted -= before->accepted;
  n.self_drafted -= before->self_drafted;
  n.self_accepted -= before->self_accepted;
  n.branched -= before->branched;
  n.off_first -= before->off_first;
  n.kv_bytes -= before->kv_bytes;
  n.index_bytes -= before->index_bytes;
  n.dense_bytes -= before->dense_bytes;
  n.slot_hits -= before->slot_hits;
  n.slot_misses -= before->slot_misses;
  n.fetched_bytes -= before->fetched_bytes;
  return n;
}

static bool continue_one(batch *b, const batch_request *r, drafted_text *out, double *prompt_seconds, progress_fn progress,
                         void *context) {
  batch_event events[MAX_ROWS];
  batch_error error;
  batch_counters before;
  int64_t id;
  if (batch_admit(b, r, &id, &error) != BATCH_ADMITTED) return said(&error);
  double begin = now(), cpu = 0;
  out->count = 0;
  for (bool running = true; running;) {
    const bool first = out->count == 0;
    const int count = batch_step(b, events, MAX_ROWS, &error);
    if (count < 0) return said(&error);
    for (int i = 0; i < count; i++) {
      out->tokens[out->count++] = events[i].token;
      running = events[i].finish == BATCH_RUNNING;
    }
    if (count > 0 && first) {
      *prompt_seconds = now() - begin;
      begin = now();
      cpu = read_clock(CLOCK_PROCESS_CPUTIME_ID);
      batch_count(b, &before);
    }
    if (count > 0) progress(context, out->count, r->max_new);
  }
  out->seconds = now() - begin;
  out->cpu_seconds = read_clock(CLOCK_PROCESS_CPUTIME_ID) - cpu;
  out->n = since(b, &before);
  progress(context, r->max_new, r->max_new);
  return true;
}

bool continue_all(model *m, vwd_session *session, const batch_options *options, const int32_t *prompt, int count, int32_t stop,
                  int limit, const batch_sampling *sampling, int only, drafted_text out[BATCH_HOWS], double *prompt_seconds,
                  progress_fn progress, void *context) {
  batch_error error;
  batch *b = batch_create(m, session, options, &error);
  if (!b) return said(&error);
  bool ok = true;
  double seconds, *first = prompt_seconds;
  for (int how = 0; ok && how < BATCH_HOWS; how++) {
    if (only >= 0 && how != only) continue;
    const batch_request r = {prompt, count, limit, stop, (batch_how)how, *sampling};
    out[how].tokens = calloc((size_t)limit, sizeof(int32_t));
    ok = out[how].tokens && continue_one(b, &r, &out[how], first, progress, context);
    first = &seconds;
  }
  batch_free(b);
  return ok;
}

/* --- The check --- */

enum { WAYS = 1 + CHECKED_WAYS };
static const batch_how ways[WAYS] = {BATCH_DENSE, BATCH_LOOKUP_TREE, BATCH_SELF, BATCH_SELF_LOOKUP};

/* From half to one and a half times the mean length. */
static void piece(int count, int pieces, int i, int *begin, int *length) {
  const int mean = count / pieces;
  *length = mean / 2 + (pieces > 1 ? mean * i / (pieces - 1) : 0);
  *begin = pieces > 1 ? (int)((int64_t)(count - *length) * i / (pieces - 1)) : 0;
}

bool check_drafts(model *m, vwd_session *session, const batch_options *options, const int32_t *text, int count, int pieces,
                  int limit, const batch_sampling *sampling, drafting_check *out, progress_fn progress, void *context) {
  batch_error error;
  batch *b = batch_create(m, session, options, &error);
  if (!b) return said(&error);
  const int all = pieces * WAYS;
  int32_t *tokens = calloc((size_t)(all * limit), sizeof *tokens); /* [pieces, WAYS, limit] */
  int *received = calloc((size_t)all, sizeof *received);
  const double begin = now();
  *out = (drafting_check){.texts = pieces, .tokens = pieces * limit};
  bool ok = tokens && received;
  /* Ids count from 1 in the order of admission: text i / WAYS in way i % WAYS has id i + 1. */
  for (int next = 0, done = 0; ok && done < all * limit;) {
    for (batch_admission answer = BATCH_ADMITTED; ok && next < all && answer == BATCH_ADMITTED;) {
      int64_t id;
      int from, length;
      piece(count, pieces, next / WAYS, &from, &length);
      batch_request r = {text + from, length, limit, -1, ways[next % WAYS], *sampling};
      r.sampling.seed += (uint64_t)(next / WAYS); /* a seed for each text, the same in each way */
      answer = batch_admit(b, &r, &id, &error);
      if (answer == BATCH_ADMITTED) next++;
      else if (answer == BATCH_REFUSED) ok = said(&error);
    }
    batch_event events[MAX_ROWS];
    const int n = ok ? batch_step(b, events, MAX_ROWS, &error) : 0;
    if (n < 0) ok = said(&error);
    for (int i = 0; i < n; i++) {
      const int at = (int)events[i].id - 1;
      tokens[at * limit + received[at]++] = events[i].token;
      done++;
    }
    if (n > 0) progress(context, done, all * limit);
  }
  for (int i = 0; ok && i < all; i++)
    out->different += memcmp(tokens + i * limit, tokens + i / WAYS * WAYS * limit, (size_t)limit * sizeof *tokens) != 0;
  batch_count(b, &out->n);
  out->seconds = now() - begin;
  free(tokens);
  free(received);
  batch_free(b);
  return ok;
}
