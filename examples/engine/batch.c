/* A batch's creation, and its steps: what each sequence drafts, the pass that computes it, and what becomes of that. */
#include <stdio.h>
#include <string.h>

#include "batch_inside.h"
#include "draws.h"
#include "lookup.h"

static const int64_t DEFAULT_BYTES = INT64_C(1) << 30; /* of keys and values */

bool batch_fail(batch_error *error, const char *format, long long found, long long least, long long most) {
  snprintf(error->text, sizeof error->text, format, found, least, most);
  return false;
}

bool batch_called(vwd_status status, const char *call, batch_error *error) {
  if (status == VWD_OK) return true;
  char message[200];
  vwd_last_error(message, sizeof message);
  snprintf(error->text, sizeof error->text, "%s: %s", call, message);
  return false;
}

/* --- Creation --- */

static bool complete(batch *b, const batch_options *given, batch_error *error) {
  batch_options *o = &b->o;
  *o = *given;
  if (o->rows == 0) o->rows = 8;
  if (o->max_tokens == 0) o->max_tokens = b->shape.context;
  if (o->chunk == 0) o->chunk = MAX_ROWS;
  if (o->max_drafts == 0) o->max_drafts = 8;
  if (o->method == 0) o->method = VWD_SELECT_AXIS;
  if (o->k == 0) o->k = 32;
  if (o->init_blocks == 0) o->init_blocks = 1;
  if (o->local_blocks == 0) o->local_blocks = 2;
  if (o->draft_cost == 0) o->draft_cost = 0.6f;
  if (o->position_cost == 0) o->position_cost = 0.2f;
  if (o->rows < 1 || o->rows > MAX_ROWS) return batch_fail(error, "rows: %lld; expected %lld to %lld", o->rows, 1, MAX_ROWS);
  if (o->max_tokens < 2 || o->max_tokens > b->shape.context)
    return batch_fail(error, "max_tokens: %lld; expected %lld to the model's context, %lld", o->max_tokens, 2, b->shape.context);
  if (o->chunk < 1 || o->chunk > MAX_ROWS) return batch_fail(error, "chunk: %lld; expected %lld to %lld", o->chunk, 1, MAX_ROWS);
  if (o->max_drafts < 1 || o->max_drafts > BATCH_MAX_DRAFTS)
    return batch_fail(error, "max_drafts: %lld; expected %lld to %lld", o->max_drafts, 1, BATCH_MAX_DRAFTS);
  if (o->dense_layers < 0 || o->dense_layers > b->shape.layers)
    return batch_fail(error, "dense_layers: %lld; expected %lld to the model's layers, %lld", o->dense_layers, 0, b->shape.layers);
  if (!o->host_kv && (o->slots != 0 || o->strategy != VWD_STRATEGY_SERIAL))
    return batch_fail(error, "slots: %lld, strategy: %lld; both are for host_kv", o->slots, o->strategy, 0);
  b->max_pages = pages_of(o->max_tokens);
  if (o->pages == 0) {
    int64_t bytes = (int64_t)b->shape.layers * PAGE_TOKENS * b->shape.kv_heads * b->shape.head_dim * 2 * (int64_t)sizeof(uint16_t);
    int64_t all = (int64_t)o->rows * b->max_pages, most = DEFAULT_BYTES / bytes;
    if (most < b->max_pages) most = b->max_pages;
    o->pages = (int)(all < most ? all : most);
  }
  if (o->pages < b->max_pages)
    return batch_fail(error, "pages: %lld; expected at least those of max_tokens, %lld", o->pages, b->max_pages, 0);
  return true;
}

static bool create_decoder(batch *b, batch_error *error) {
  const model_shape *s = &b->shape;
  const batch_options *o = &b->o;
  vwd_decoder_options options = VWD_DECODER_OPTIONS_INIT;
  options.layers = (uint32_t)s->layers;
  options.max_rows = (uint32_t)o->rows;
  options.max_positions = (uint32_t)b->store->most_rows;
  options.max_sequences = 2 * options.max_rows; /* whose drafts are counted */
  options.query_heads = (uint32_t)s->heads;
  options.kv_heads = (uint32_t)s->kv_heads;
  options.key_dim = options.value_dim = (uint32_t)s->head_dim;
  options.dtype_code = FLOAT16 >> 8;
  options.dtype_bits = FLOAT16 & 0xFF;
  options.block_size = PAGE_TOKENS;
  options.max_draft = (uint32_t)o->max_drafts;
  options.draft_cost = o->draft_cost;
  vwd_decoder_policy *policies = calloc((size_t)s->layers, sizeof *policies);
  if (!policies) return batch_fail(error, "out of memory", 0, 0, 0);
  for (int l = o->dense_layers; l < s->layers; l++)
    policies[l] = (vwd_decoder_policy){.method = o->method,
                                       .k = (uint32_t)o->k,
                                       .init_blocks = (uint32_t)o->init_blocks,
                                       .local_blocks = (uint32_t)o->local_blocks,
                                       .dense_below = (uint32_t)o->dense_below};
  options.policy_count = options.layers;
  options.policies = policies;
  bool ok = b->store->create(b, &options, error);
  free(policies);
  vwd_decoder_details details = VWD_DECODER_DETAILS_INIT;
  ok = ok && batch_called(vwd_decoder_info(b->decoder, &details), "vwd_decoder_info", error);
  if (!ok) return false;
  b->draft_lens = (const int32_t *)details.draft_lens.data + b->first_drafter;
  b->acceptance = (const float *)details.acceptance.data + b->first_drafter;
  return true;
}

static bool allocate(batch *b) {
  const batch_options *o = &b->o;
  size_t rows = (size_t)o->rows, kv = (size_t)MAX_ROWS * (size_t)(b->shape.kv_heads * b->shape.head_dim);
  b->slots = calloc(rows, sizeof *b->slots);
  b->order = calloc(rows, sizeof *b->order);
  b->new_k = calloc(kv, sizeof *b->new_k);
  b->new_v = calloc(kv, sizeof *b->new_v);
  bool ok = b->slots && b->order && b->new_k && b->new_v;
  for (int i = 0; ok && i < o->rows; i++) {
    b->slots[i].text = calloc((size_t)o->max_tokens, sizeof(int32_t));
    b->slots[i].table = calloc((size_t)b->max_pages, sizeof(int32_t));
    ok = b->slots[i].text && b->slots[i].table;
  }
  return ok;
}

batch *batch_create(model *m, vwd_session *session, const batch_options *options, batch_error *error) {
  batch *b = calloc(1, sizeof *b);
  if (!b) return batch_fail(error, "out of memory", 0, 0, 0), NULL;
  b->model = m;
  b->shape = model_get_shape(m);
  b->session = session;
  b->store = options->host_kv ? &tiered_store : &paged_store;
  if (complete(b, options, error)) {
    if (!allocate(b)) batch_fail(error, "out of memory", 0, 0, 0);
    else if (create_decoder(b, error)) return b;
  }
  batch_free(b);
  return NULL;
}

void batch_free(batch *b) {
  if (!b) return;
  for (int i = 0; b->slots && i < b->o.rows; i++) free(b->slots[i].text), free(b->slots[i].table);
  vwd_decoder_release(b->decoder);
  b->store->release(b);
  free(b->slots);
  free(b->order);
  free(b->new_k);
  free(b->new_v);
  free(b);
}

/* --- Drafts --- */

/* Rows of drafts and what the model makes of them, [rows, width] and [rows, width + 1], and whose they are. */
typedef struct {
  int rows, width;
  int32_t draft[MAX_ROWS * BATCH_MAX_DRAFTS], target[MAX_ROWS * (BATCH_MAX_DRAFTS + 1)];
  int32_t lens[MAX_ROWS], sequence[MAX_ROWS], accepted[MAX_ROWS], next[MAX_ROWS];
} verification;

static bool drafts_itself(const sequence *s) { return s->how == BATCH_SELF || s->how == BATCH_SELF_LOOKUP; }

/* Tokens to draft of each sequence, at most `most` each; lookup drafts them at once. */
static void plan_drafts(batch *b, int most) {
  for (int i = 0; i < b->sequences; i++) {
    sequence *s = &b->slots[b->order[i]];
    if (!is_decoding(s) || s->how == BATCH_DENSE || s->how == BATCH_SPARSE) continue;
    int room = smaller(smaller(b->o.max_drafts, most), s->limit - s->count - 1);
    const int slot = b->order[i];
    float by_lookup = 1, by_self = 1;
    if (s->how == BATCH_LOOKUP) {
      s->found_count = look_up(s->text, s->count, s->draft, room);
      s->drafts = drafts_worth(b->acceptance[b->o.rows + slot], b->o.position_cost, s->found_count, &by_lookup);
    } else if (s->how != BATCH_SELF) {
      by_lookup = trees_plan(b, slot, room);
    }
    if (drafts_itself(s) && s->count > always_dense(b)) {
      drafts_worth(b->acceptance[slot], b->o.draft_cost, room, &by_self);
      if (s->drafts > 0 && by_lookup >= by_self) continue;
      s->drafts = smaller(room, b->draft_lens[slot]);
      s->by_self = true;
    }
  }
}

/* A pass for each token that is drafted, of all sequences that draft one more. */
static bool draft(batch *b) {
  for (int done = 0;; done++) {
    pass_start(b);
    for (int i = 0; i < b->sequences; i++) {
      sequence *s = &b->slots[b->order[i]];
      if (!s->by_self || s->drafts <= done) continue;
      pass_want(b, b->rows);
      pass_add(b, b->order[i], VWD_DECODER_SPARSE, s->cached + done, 1);
    }
    if (b->members == 0) return true;
    const float *logits = pass_run(b);
    if (!logits) return false;
    draws d = {0};
    for (int n = 0; n < b->members; n++) {
      const sequence *s = &b->slots[b->member_slot[n]];
      draws_add(&d, &s->sampling, s->stop, n, s->count + done, 1);
    }
    const vwd_status status = draws_run(&d, b->session, logits, b->wanted_count, b->shape.vocab, NULL, NULL, 0);
    if (!batch_called(status, "vwd_verify_sample", &b->error)) return false;
    for (int n = 0; n < b->members; n++) {
      sequence *s = &b->slots[b->member_slot[n]];
      s->draft[done] = d.next[n];
      if (d.committed_len[n] == 0) s->drafts = done; /* no token can be drawn */
      else if (d.finish[n] == VWD_FINISH_STOP) s->drafts = done + 1;
    }
  }
}

/* --- A step --- */

int batch_max_events(const batch *b) { return smaller(MAX_ROWS, b->o.rows * (b->o.max_drafts + 1)); }

/* Rows of each sequence in the step's pass: one of each that decodes, then drafts, then pieces of prompts. */
static void plan(batch *b) {
  int rows = 0, decoding = 0, taking_in = 0;
  for (int i = 0; i < b->sequences; i++) {
    sequence *s = &b->slots[b->order[i]];
    s->rows = s->drafts = s->found_count = s->places.count = 0;
    s->by_self = false;
    if (s->waiting || (is_decoding(s) && !batch_make_room(b, i, s->count))) continue;
    decoding += is_decoding(s);
    taking_in += !is_decoding(s);
  }
  if (decoding > 0) plan_drafts(b, (MAX_ROWS - decoding) / (taking_in > 0 ? 2 : 1) / decoding);
  for (int i = 0; i < b->sequences; i++) {
    sequence *s = &b->slots[b->order[i]];
    if (!is_decoding(s)) continue;
    /* Drafts take pages that are free, and nobody's. */
    while (s->drafts > 0 && !b->store->take(b, s, s->count + s->drafts)) s->drafts--;
    s->rows = 1 + s->drafts;
    rows += s->rows;
  }
  int chunk = smaller(b->o.chunk, MAX_ROWS - rows);
  for (int i = 0; i < b->sequences && chunk > 0; i++) {
    sequence *s = &b->slots[b->order[i]];
    if (s->waiting || is_decoding(s)) continue;
    b->store->share(b, s);
    /* A sparse sequence that was preempted takes its own tokens in as it made them. */
    s->rows = smaller(chunk, s->count - s->cached);
    if (s->how == BATCH_SPARSE) s->rows = s->cached < s->prompt ? smaller(s->rows, s->prompt - s->cached) : 1;
    chunk -= s->rows;
  }
}

static uint32_t mode_of(const sequence *s) {
  return s->how == BATCH_SPARSE && s->cached >= s->prompt ? VWD_DECODER_SPARSE : VWD_DECODER_DENSE;
}

/* The pass of a step: members of one mode and number of rows side by side, trees behind chains. */
static void gather(batch *b) {
  pass_start(b);
  for (int rows = 1; rows <= MAX_ROWS; rows++) {
    for (uint32_t mode = VWD_DECODER_SPARSE; mode <= VWD_DECODER_DENSE; mode++) {
      for (int i = 0; i < 2 * b->sequences; i++) {
        const int slot = b->order[i % b->sequences];
        sequence *s = &b->slots[slot];
        if (s->waiting || s->rows != rows || mode_of(s) != mode || is_tree(s) != (i >= b->sequences)) continue;
        if (is_decoding(s))
          for (int row = 0; row < rows; row++) pass_want(b, b->rows + row);
        else if (s->cached + rows == s->count) pass_want(b, b->rows + rows - 1);
        pass_add(b, slot, mode, s->cached, rows);
      }
    }
  }
}

/* Tells the decoder how drafts fared. */
static bool accept(batch *b, verification *v) {
  for (int n = 0; n < v->rows; n++)
    if (v->sequence[n] >= 0) v->sequence[n] += b->first_drafter;
  vwd_decoder_accept_args args = VWD_DECODER_ACCEPT_ARGS_INIT;
  args.draft = TENSOR(v->draft, INT32, v->rows, v->width);
  args.target = TENSOR(v->target, INT32, v->rows, v->width + 1);
  args.draft_lens = TENSOR(v->lens, INT32, v->rows);
  args.sequences = TENSOR(v->sequence, INT32, v->rows);
  args.accepted = TENSOR(v->accepted, INT32, v->rows);
  args.next_token = TENSOR(v->next, INT32, v->rows);
  return v->rows == 0 || batch_called(vwd_decoder_accept(b->decoder, &args, NULL), "vwd_decoder_accept", &b->error);
}

static void add_row(verification *v, const int32_t *draft, int drafts, const int32_t *target, int choices, int sequence) {
  const int n = v->rows++;
  v->lens[n] = drafts;
  v->sequence[n] = sequence;
  for (int i = 0; i < v->width; i++) v->draft[n * v->width + i] = i < drafts ? draft[i] : -1;
  for (int i = 0; i <= v->width; i++) v->target[n * (v->width + 1) + i] = i < choices ? target[i] : -1;
}

/* How the places of a tree fared, as a chain: the tokens that were among those that followed, and one that was not. */
static void add_places(verification *v, const sequence *s, const int32_t *new, int count, int sequence) {
  int32_t chain[BATCH_MAX_DRAFTS];
  bool refused;
  int n = occurrences_fared(&s->places, s->text, s->count - count, smaller(count, v->width), &refused);
  memcpy(chain, new, (size_t)n * sizeof *chain);
  if (refused) chain[n++] = -1;
  add_row(v, chain, n, new, count, sequence);
}

/* Draws the next tokens of all members, verifying their drafts. A member that is taking in its prompt draws none. */
static bool verify(batch *b, const float *logits, draws *d, int width) {
  verification v = {.width = width}, fared = {.width = width};
  int first_logits[MAX_ROWS];
  *d = (draws){0};
  for (int n = 0, begin = 0; n < b->members; n++) {
    const sequence *s = &b->slots[b->member_slot[n]];
    const int choices = is_decoding(s) ? s->rows : s->cached + s->rows == s->count, drawn = is_tree(s) ? 0 : choices;
    add_row(&v, s->draft, is_tree(s) ? 0 : s->drafts, NULL, 0, -1);
    draws_add(d, &s->sampling, s->stop, drawn > 0 ? begin : 0, s->count, drawn > 0 ? s->limit - s->count : 0);
    first_logits[n] = begin;
    begin += choices;
  }
  if (b->wanted_count == 0) return true;
  const vwd_status status = draws_run(d, b->session, logits, b->wanted_count, b->shape.vocab, v.draft, v.lens, width);
  if (!batch_called(status, "vwd_verify_sample", &b->error)) return false;
  for (int i = 0; i < b->group_count; i++) {
    const group *g = &b->groups[i];
    const float *of_group = logits + (size_t)first_logits[g->first_member] * (size_t)b->shape.vocab;
    if (g->trees && !trees_verify(b, g, of_group, d, width)) return false;
  }
  for (int n = 0; n < b->members; n++) {
    const int slot = b->member_slot[n];
    const sequence *s = &b->slots[slot];
    if (d->remaining[n] > 0 && d->finish[n] == VWD_FINISH_NONE && d->next[n] < 0)
      return batch_fail(&b->error, "no token can be drawn at position %lld: no logit is a number", d->positions[n] + d->committed_len[n], 0, 0);
    if (is_tree(s)) continue; /* its row follows once the text has what was committed */
    add_row(&fared, s->draft, s->drafts, d->committed + n * (width + 1), d->committed_len[n],
            s->by_self ? slot : s->found_count > 0 ? b->o.rows + slot : -1);
  }
  return accept(b, &fared);
}


static void end_finished(batch *b) {
  for (int i = 0; i < b->sequences;) {
    if (b->slots[b->order[i]].finish != BATCH_RUNNING) batch_end(b, i);
    else i++;
  }
}

static int step(batch *b, batch_event *events) {
  batch_resume(b);
  plan(b);
  if (b->broken) return -1;
  if (!draft(b)) return -1;
  gather(b);
  if (b->members == 0) return 0;
  const float *logits = pass_run(b);
  if (!logits) return -1;
  draws d;
  if (!verify(b, logits, &d, b->o.max_drafts)) return -1;
  /* How the places of trees fared, also where sparse steps drafted instead: the estimate of lookup stays up to date. */
  verification looked_up = {.width = b->o.max_drafts};
  int written = 0;
  for (int n = 0; n < b->members; n++) {
    sequence *s = &b->slots[b->member_slot[n]];
    bool decoding = is_decoding(s), chooses = decoding || s->cached + s->rows == s->count;
    b->n.drafted += s->drafts;
    b->n.accepted += d.accepted[n];
    b->n.self_drafted += s->by_self ? s->drafts : 0;
    b->n.self_accepted += s->by_self ? d.accepted[n] : 0;
    s->cached += decoding ? 1 + d.accepted[n] : s->rows;
    b->n.prompt_tokens += decoding ? 0 : s->rows;
    if (chooses) {
      const int first = written;
      for (int i = 0; i < d.committed_len[n]; i++) {
        const int32_t token = s->text[s->count++] = d.committed[n * (b->o.max_drafts + 1) + i];
        events[written++] = (batch_event){s->id, token, BATCH_RUNNING};
      }
      s->finish = events[written - 1].finish = (batch_finish)d.finish[n];
      b->n.new_tokens += written - first;
      for (int at = s->count - (written - first); at < s->count; at++) b->n.dense_bytes += at * token_bytes(b) * b->shape.layers;
      const int32_t *new = s->text + s->count - (written - first);
      if (s->places.count > 0) add_places(&looked_up, s, new, written - first, b->o.rows + b->member_slot[n]);
      s->cached = smaller(s->cached, s->count); /* a stop token among the drafts ends the text */
    }
    b->store->publish(b, s);
  }
  if (!accept(b, &looked_up)) return -1;
  b->n.steps++;
  end_finished(b);
  return written;
}

int batch_step(batch *b, batch_event *events, int capacity, batch_error *error) {
  if (capacity < batch_max_events(b))
    return batch_fail(error, "room for %lld events; expected batch_max_events, %lld", capacity, batch_max_events(b), 0), -1;
  if (b->broken) return batch_fail(error, "the batch has failed, and can only be freed", 0, 0, 0), -1;
  int count = step(b, events);
  b->broken = count < 0;
  if (b->broken) *error = b->error;
  return count;
}

void batch_count(const batch *b, batch_counters *out) {
  *out = b->n;
  out->sequences = b->sequences;
  out->waiting = batch_waiting(b);
  out->pages = b->o.pages;
  b->store->count(b, out);
}
