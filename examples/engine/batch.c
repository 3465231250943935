#include "batch.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "draws.h"
#include "linear.h"
#include "lookup.h"
#include "pages.h"
#include "view.h"

_Static_assert((int)BATCH_PAGE == (int)PAGE_TOKENS, "one size of pages");

static const int64_t DEFAULT_BYTES = INT64_C(1) << 30; /* of keys and values */

typedef struct {
  int64_t id; /* 0: the slot is free */
  batch_how how;
  batch_sampling sampling;
  batch_finish finish;
  int32_t stop;
  int32_t *text;            /* [max_tokens] */
  int prompt, count, limit; /* tokens of the prompt; of the text so far; of the text at its longest */
  bool waiting;             /* preempted: it has no pages */
  int32_t *table;           /* [max_pages] */
  int pages, known;         /* pages that it uses, and how many of them, from the first on, are known ones */
  int cached;               /* tokens whose keys and values are in the pages */
  int unsummarised;         /* the first token of shared pages whose summaries are yet to be made; INT32_MAX: none */
  /* This step's: */
  int rows; /* positions of the pass: a piece of the prompt, or the last token and its drafts */
  int drafts, found_count;
  int32_t draft[BATCH_MAX_DRAFTS], found[BATCH_MAX_DRAFTS]; /* what lookup found may be drafted or not */
  bool by_self;                                             /* sparse steps draft */
} sequence;

/* Rows of a pass that are alike: one vwd_decoder_step, whose tensors are plain views of the model's buffers. */
typedef struct {
  uint32_t mode;
  int positions, batch, first; /* the first row of the pass */
  int32_t *table, *seq_lens, *begin;
  int shortest;
} group;

struct batch {
  model *model;
  model_shape shape;
  vwd_session *session;
  vwd_decoder *decoder;
  /* [2 · rows]: of each slot's drafts by sparse steps, then of its drafts by lookup. */
  const int32_t *draft_lens;
  const float *acceptance;
  batch_options o;
  pages pages;
  int max_pages;
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
  int32_t *tables;           /* [members, max_pages] */
  int32_t seq_lens[MAX_ROWS], begins[MAX_ROWS];
  uint16_t *new_k, *new_v; /* [MAX_ROWS, kv_heads, head_dim] */
  batch_error error;
};

static int smaller(int a, int b) { return a < b ? a : b; }

static int pages_of(int64_t tokens) { return (int)((tokens + PAGE_TOKENS - 1) / PAGE_TOKENS); }

static bool fail(batch_error *error, const char *format, long long found, long long least, long long most) {
  snprintf(error->text, sizeof error->text, format, found, least, most);
  return false;
}

static bool called(vwd_status status, const char *call, batch_error *error) {
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
  if (o->rows < 1 || o->rows > MAX_ROWS) return fail(error, "rows: %lld; expected %lld to %lld", o->rows, 1, MAX_ROWS);
  if (o->max_tokens < 2 || o->max_tokens > b->shape.context)
    return fail(error, "max_tokens: %lld; expected %lld to the model's context, %lld", o->max_tokens, 2, b->shape.context);
  if (o->chunk < 1 || o->chunk > MAX_ROWS) return fail(error, "chunk: %lld; expected %lld to %lld", o->chunk, 1, MAX_ROWS);
  if (o->max_drafts < 1 || o->max_drafts > BATCH_MAX_DRAFTS)
    return fail(error, "max_drafts: %lld; expected %lld to %lld", o->max_drafts, 1, BATCH_MAX_DRAFTS);
  if (o->dense_layers < 0 || o->dense_layers > b->shape.layers)
    return fail(error, "dense_layers: %lld; expected %lld to the model's layers, %lld", o->dense_layers, 0, b->shape.layers);
  b->max_pages = pages_of(o->max_tokens);
  if (o->pages == 0) {
    int64_t bytes = (int64_t)b->shape.layers * PAGE_TOKENS * b->shape.kv_heads * b->shape.head_dim * 2 * (int64_t)sizeof(uint16_t);
    int64_t all = (int64_t)o->rows * b->max_pages, most = DEFAULT_BYTES / bytes;
    if (most < b->max_pages) most = b->max_pages;
    o->pages = (int)(all < most ? all : most);
  }
  if (o->pages < b->max_pages)
    return fail(error, "pages: %lld; expected at least those of max_tokens, %lld", o->pages, b->max_pages, 0);
  return true;
}

static bool create_decoder(batch *b, batch_error *error) {
  const model_shape *s = &b->shape;
  const batch_options *o = &b->o;
  vwd_decoder_options options = VWD_DECODER_OPTIONS_INIT;
  options.layers = (uint32_t)s->layers;
  options.max_rows = (uint32_t)o->rows;
  options.max_positions = MAX_ROWS;
  options.max_sequences = 2 * options.max_rows;
  options.query_heads = (uint32_t)s->heads;
  options.kv_heads = (uint32_t)s->kv_heads;
  options.key_dim = options.value_dim = (uint32_t)s->head_dim;
  options.dtype_code = FLOAT16 >> 8;
  options.dtype_bits = FLOAT16 & 0xFF;
  options.page_size = options.block_size = PAGE_TOKENS;
  options.pages = (uint32_t)o->pages;
  options.max_draft = (uint32_t)o->max_drafts;
  options.draft_cost = o->draft_cost;
  vwd_decoder_policy *policies = calloc((size_t)s->layers, sizeof *policies);
  if (!policies) return fail(error, "out of memory", 0, 0, 0);
  for (int l = o->dense_layers; l < s->layers; l++)
    policies[l] = (vwd_decoder_policy){.method = o->method,
                                       .k = (uint32_t)o->k,
                                       .init_blocks = (uint32_t)o->init_blocks,
                                       .local_blocks = (uint32_t)o->local_blocks,
                                       .dense_below = (uint32_t)o->dense_below};
  options.policy_count = options.layers;
  options.policies = policies;
  bool ok = called(vwd_decoder_create(b->session, &options, &b->decoder), "vwd_decoder_create", error);
  free(policies);
  vwd_decoder_details details = VWD_DECODER_DETAILS_INIT;
  ok = ok && called(vwd_decoder_info(b->decoder, &details), "vwd_decoder_info", error);
  b->draft_lens = details.draft_lens.data;
  b->acceptance = details.acceptance.data;
  return ok;
}

static bool allocate(batch *b) {
  const batch_options *o = &b->o;
  size_t rows = (size_t)o->rows, kv = (size_t)MAX_ROWS * (size_t)(b->shape.kv_heads * b->shape.head_dim);
  b->slots = calloc(rows, sizeof *b->slots);
  b->order = calloc(rows, sizeof *b->order);
  b->tables = calloc(rows * (size_t)b->max_pages, sizeof *b->tables);
  b->new_k = calloc(kv, sizeof *b->new_k);
  b->new_v = calloc(kv, sizeof *b->new_v);
  bool ok = b->slots && b->order && b->tables && b->new_k && b->new_v && pages_init(&b->pages, &b->shape, o->pages);
  for (int i = 0; ok && i < o->rows; i++) {
    b->slots[i].text = calloc((size_t)o->max_tokens, sizeof(int32_t));
    b->slots[i].table = calloc((size_t)b->max_pages, sizeof(int32_t));
    ok = b->slots[i].text && b->slots[i].table;
  }
  return ok;
}

batch *batch_create(model *m, vwd_session *session, const batch_options *options, batch_error *error) {
  batch *b = calloc(1, sizeof *b);
  if (!b) return fail(error, "out of memory", 0, 0, 0), NULL;
  b->model = m;
  b->shape = model_get_shape(m);
  b->session = session;
  if (complete(b, options, error)) {
    if (!allocate(b)) fail(error, "out of memory: %lld pages of keys and values", b->o.pages, 0, 0);
    else if (create_decoder(b, error)) return b;
  }
  batch_free(b);
  return NULL;
}

void batch_free(batch *b) {
  if (!b) return;
  for (int i = 0; b->slots && i < b->o.rows; i++) free(b->slots[i].text), free(b->slots[i].table);
  vwd_decoder_release(b->decoder);
  pages_free(&b->pages);
  free(b->slots);
  free(b->order);
  free(b->tables);
  free(b->new_k);
  free(b->new_v);
  free(b);
}

/* --- Sequences --- */

/* Children go before their parents, so that they are the first to be forgotten. */
static void leave_pages(batch *b, sequence *s) {
  while (s->pages > 0) pages_leave(&b->pages, s->table[--s->pages]);
  s->known = s->cached = 0;
}

static bool take_pages(batch *b, sequence *s, int64_t tokens) {
  while (s->pages < pages_of(tokens)) {
    int32_t page = pages_take(&b->pages);
    if (page < 0) return false;
    s->table[s->pages++] = page;
  }
  return true;
}

/* Tokens that may be shared: not the last one, whose logits are wanted, nor those that sparse steps computed. */
static int shareable(const sequence *s) {
  return s->how == BATCH_SPARSE && s->count > s->prompt ? s->prompt : s->count - 1;
}

/* Shares known pages in place of those that are yet to be filled, such as another sequence has filled since. */
static void share(batch *b, sequence *s) {
  const int most = shareable(s);
  int32_t page;
  while (s->cached == s->known * PAGE_TOKENS &&
         pages_share(&b->pages, s->known ? s->table[s->known - 1] : -1, s->text + s->cached,
                     smaller(PAGE_TOKENS, most - s->cached), &page)) {
    if (s->known < s->pages) pages_leave(&b->pages, s->table[s->known]);
    else s->pages++;
    if (b->pages.page[page].summarised != b) s->unsummarised = smaller(s->unsummarised, s->cached);
    s->table[s->known++] = page;
    s->cached += PAGE_TOKENS;
    b->n.shared_tokens += PAGE_TOKENS;
  }
}

static int waiting(const batch *b) {
  int count = 0;
  for (int i = 0; i < b->sequences; i++) count += b->slots[b->order[i]].waiting;
  return count;
}

/* Pages for the text so far: known ones, a copy of what is known of the page behind them, and new ones. False, and nothing
 * changed, where that leaves less than a page for each sequence that runs: one of them would soon have to give its own back. */
static bool enter(batch *b, sequence *s) {
  const int64_t shared = b->n.shared_tokens;
  s->unsummarised = INT32_MAX;
  share(b, s);
  const int running = b->sequences - waiting(b);
  if (pages_available(&b->pages) < pages_of(s->count) - s->pages + running) {
    b->n.shared_tokens = shared;
    return leave_pages(b, s), false;
  }
  take_pages(b, s, s->count);
  const int most = shareable(s), part = s->cached < most
      ? pages_copy_part(&b->pages, s->table[s->known], s->known ? s->table[s->known - 1] : -1, s->text + s->cached, most - s->cached)
      : 0;
  s->cached += part;
  b->n.shared_tokens += part;
  s->waiting = false;
  return true;
}

batch_admission batch_admit(batch *b, const batch_request *r, int64_t *id, batch_error *error) {
  if (r->count < 1 || r->max_new < 1 || (int64_t)r->count + r->max_new > b->o.max_tokens)
    return fail(error, "%lld prompt tokens and %lld new ones; expected at least one of each, together at most %lld", r->count,
                r->max_new, b->o.max_tokens),
           BATCH_REFUSED;
  if ((int)r->how < 0 || r->how >= BATCH_HOWS)
    return fail(error, "how: %lld; expected a BATCH_ value", (long long)r->how, 0, 0), BATCH_REFUSED;
  for (int i = 0; i < r->count; i++)
    if (r->tokens[i] < 0 || r->tokens[i] >= b->shape.vocab)
      return fail(error, "token %lld at %lld of the prompt; the model has %lld", r->tokens[i], i, b->shape.vocab), BATCH_REFUSED;
  if (!draws_can(&r->sampling, error->text, sizeof error->text)) return BATCH_REFUSED;
  if (b->broken) return fail(error, "the batch has failed, and can only be freed", 0, 0, 0), BATCH_REFUSED;
  if (b->sequences == b->o.rows || waiting(b)) return BATCH_FULL;
  int at = 0;
  while (b->slots[at].id) at++;
  sequence *s = &b->slots[at];
  *s = (sequence){.text = s->text,
                  .table = s->table,
                  .how = r->how,
                  .sampling = r->sampling,
                  .stop = r->stop,
                  .prompt = r->count,
                  .count = r->count,
                  .limit = r->count + r->max_new};
  memcpy(s->text, r->tokens, (size_t)r->count * sizeof *s->text);
  if (!enter(b, s)) return BATCH_FULL;
  const int32_t numbers[2] = {at, b->o.rows + at};
  vwd_decoder_reset_args reset = VWD_DECODER_RESET_ARGS_INIT;
  reset.sequences = TENSOR(numbers, INT32, 2);
  if (!called(vwd_decoder_reset(b->decoder, &reset, NULL), "vwd_decoder_reset", error)) return leave_pages(b, s), BATCH_REFUSED;
  *id = s->id = ++b->last_id;
  b->order[b->sequences++] = at;
  return BATCH_ADMITTED;
}

static void end(batch *b, int place) {
  sequence *s = &b->slots[b->order[place]];
  leave_pages(b, s);
  s->id = 0;
  b->sequences--;
  memmove(b->order + place, b->order + place + 1, (size_t)(b->sequences - place) * sizeof *b->order);
}

bool batch_cancel(batch *b, int64_t id) {
  for (int i = 0; i < b->sequences; i++)
    if (b->slots[b->order[i]].id == id) return end(b, i), true;
  return false;
}

/* Pages for more tokens of the sequence at a place in the order; those of the youngest are given back for it. False if that
 * is the sequence itself, which then waits. */
static bool make_room(batch *b, int place, int64_t tokens) {
  sequence *s = &b->slots[b->order[place]];
  while (!take_pages(b, s, tokens)) {
    int last = b->sequences - 1;
    while (last > place && b->slots[b->order[last]].waiting) last--;
    sequence *victim = &b->slots[b->order[last]];
    leave_pages(b, victim);
    victim->waiting = true;
    b->n.preemptions++;
    if (victim == s) return false;
  }
  return true;
}

/* A token to decode, and nothing else to compute before it. */
static bool is_decoding(const sequence *s) { return !s->waiting && s->cached == s->count - 1; }

/* Blocks of a list. Sequences of no more tokens attend densely in any mode. */
static int list_blocks(const batch *b) {
  const int forced = b->o.init_blocks + b->o.local_blocks;
  return b->o.k > forced ? b->o.k : forced;
}

static int always_dense(const batch *b) {
  const int covered = list_blocks(b) * PAGE_TOKENS;
  return covered > b->o.dense_below - 1 ? covered : b->o.dense_below - 1;
}

/* --- A pass through the model --- */

static bool attend(void *context, const attention_call *call) {
  batch *b = context;
  const model_shape *s = &b->shape;
  const int count = call->n * s->kv_heads * s->head_dim;
  for (int i = 0; i < count; i++) b->new_k[i] = float_to_half(call->k[i]), b->new_v[i] = float_to_half(call->v[i]);
  for (int i = 0; i < b->group_count; i++) {
    const group *g = &b->groups[i];
    const int64_t rows = g->batch, positions = g->positions;
    const size_t kv = (size_t)(g->first * s->kv_heads * s->head_dim), q = (size_t)(g->first * s->heads * s->head_dim);
    if (call->layer == 0 || b->group_count > 1) { /* the decoder knows one step at a time */
      vwd_decoder_step step = VWD_DECODER_STEP_INIT;
      step.mode = g->mode;
      step.positions = (uint32_t)positions;
      step.shortest = (uint32_t)g->shortest;
      step.page_table = TENSOR(g->table, INT32, rows, b->max_pages);
      step.seq_lens = TENSOR(g->seq_lens, INT32, rows);
      step.begin = TENSOR(g->begin, INT32, rows);
      if (!called(vwd_decoder_begin(b->decoder, &step, NULL), "vwd_decoder_begin", &b->error)) return false;
    }
    const size_t layer = pages_layer(&b->pages, call->layer);
    vwd_decoder_attend_args args = VWD_DECODER_ATTEND_ARGS_INIT;
    args.layer = (uint32_t)call->layer;
    args.k = TENSOR(b->pages.k + layer, FLOAT16, b->o.pages, PAGE_TOKENS, s->kv_heads, s->head_dim);
    args.v = TENSOR(b->pages.v + layer, FLOAT16, b->o.pages, PAGE_TOKENS, s->kv_heads, s->head_dim);
    args.new_k = TENSOR(b->new_k + kv, FLOAT16, rows, positions, s->kv_heads, s->head_dim);
    args.new_v = TENSOR(b->new_v + kv, FLOAT16, rows, positions, s->kv_heads, s->head_dim);
    args.q = TENSOR(call->q + q, FLOAT32, rows, positions, s->heads, s->head_dim);
    args.out = TENSOR(call->out + q, FLOAT32, rows, positions, s->heads, s->head_dim);
    if (!called(vwd_decoder_attend(b->decoder, &args, NULL), "vwd_decoder_attend", &b->error)) return false;
  }
  return true;
}

/* Keys and values of a token in a layer. */
static int64_t token_bytes(const batch *b) {
  return (int64_t)b->shape.kv_heads * b->shape.head_dim * 2 * (int64_t)sizeof(uint16_t);
}

/* Bytes of a block's summary in a layer: two values in float16 for each channel, or two INT4 ones and scales for 32. */
static int64_t summary_bytes(const batch *b) {
  const int dim = b->shape.head_dim;
  return b->shape.kv_heads * (b->o.method == VWD_SELECT_AXIS ? dim + (dim + 31) / 32 * 4 * 2 : dim * 4);
}

/* A dense member reads its keys and values once for all its positions. */
static void count_bytes(batch *b, uint32_t mode, int tokens) {
  const int sparse_layers = mode == VWD_DECODER_DENSE || tokens <= always_dense(b) ? 0 : b->shape.layers - b->o.dense_layers;
  const int blocks = pages_of(tokens), listed = list_blocks(b) * PAGE_TOKENS - (blocks * PAGE_TOKENS - tokens);
  b->n.kv_bytes += ((b->shape.layers - sparse_layers) * (int64_t)tokens + sparse_layers * (int64_t)listed) * token_bytes(b);
  b->n.index_bytes += (int64_t)sparse_layers * blocks * summary_bytes(b);
}

static void start_pass(batch *b) { b->rows = b->wanted_count = b->group_count = b->members = 0; }

/* The first token whose summaries a member makes: of its own pages, and of those that it shares with whoever wrote them
 * elsewhere, unless another member has made them. */
static int summarise_from(batch *b, sequence *s, int first, int count) {
  int begin = smaller(first, s->unsummarised);
  while (begin < first && b->pages.page[s->table[begin / PAGE_TOKENS]].summarised == b) begin += PAGE_TOKENS;
  if (begin > first) begin = first;
  for (int p = begin / PAGE_TOKENS; p <= (first + count - 1) / PAGE_TOKENS; p++) b->pages.page[s->table[p]].summarised = b;
  s->unsummarised = INT32_MAX;
  return begin;
}

/* Adds to the pass the tokens first … first + count − 1 of a sequence's text, its drafts behind it. Members that are alike
 * follow one another. */
static void add_member(batch *b, int slot, uint32_t mode, int first, int count) {
  sequence *s = &b->slots[slot];
  group *g = b->group_count > 0 ? &b->groups[b->group_count - 1] : NULL;
  const int n = b->members++;
  if (!g || g->mode != mode || g->positions != count) {
    g = &b->groups[b->group_count++];
    *g = (group){mode, count, 0, b->rows, b->tables + (size_t)n * (size_t)b->max_pages, b->seq_lens + n, b->begins + n, INT32_MAX};
  }
  g->batch++;
  if (is_decoding(s)) count_bytes(b, mode, first + count);
  int32_t *table = b->tables + (size_t)n * (size_t)b->max_pages;
  memcpy(table, s->table, (size_t)s->pages * sizeof *table);
  for (int p = s->pages; p < b->max_pages; p++) table[p] = -1;
  b->seq_lens[n] = first + count;
  if (first + count < g->shortest) g->shortest = first + count;
  b->begins[n] = summarise_from(b, s, first, count);
  b->member_slot[n] = slot;
  for (int i = 0; i < count; i++, b->rows++) {
    int at = first + i;
    b->tokens[b->rows] = at < s->count ? s->text[at] : s->draft[at - s->count];
    b->positions[b->rows] = at;
  }
}

static void want(batch *b, int row) { b->wanted[b->wanted_count++] = row; }

static const float *run_pass(batch *b) {
  const model_pass pass = {b->tokens, b->positions, b->rows, b->wanted, b->wanted_count};
  b->n.passes++;
  return model_forward(b->model, &pass, attend, b);
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
    if (s->how != BATCH_SELF) {
      s->found_count = look_up(s->text, s->count, s->found, room);
      s->drafts = drafts_worth(b->acceptance[b->o.rows + slot], b->o.position_cost, s->found_count, &by_lookup);
      memcpy(s->draft, s->found, sizeof s->draft);
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
    start_pass(b);
    for (int i = 0; i < b->sequences; i++) {
      sequence *s = &b->slots[b->order[i]];
      if (!s->by_self || s->drafts <= done) continue;
      want(b, b->rows);
      add_member(b, b->order[i], VWD_DECODER_SPARSE, s->cached + done, 1);
    }
    if (b->members == 0) return true;
    const float *logits = run_pass(b);
    if (!logits) return false;
    draws d = {0};
    for (int n = 0; n < b->members; n++) {
      const sequence *s = &b->slots[b->member_slot[n]];
      draws_add(&d, &s->sampling, s->stop, n, s->count + done, 1);
    }
    const vwd_status status = draws_run(&d, b->session, logits, b->wanted_count, b->shape.vocab, NULL, NULL, 0);
    if (!called(status, "vwd_verify_sample", &b->error)) return false;
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

static void resume(batch *b) {
  for (int i = 0; i < b->sequences; i++)
    if (b->slots[b->order[i]].waiting && !enter(b, &b->slots[b->order[i]])) return;
}

/* Rows of each sequence in the step's pass: one of each that decodes, then drafts, then pieces of prompts. */
static void plan(batch *b) {
  int rows = 0, decoding = 0, taking_in = 0;
  for (int i = 0; i < b->sequences; i++) {
    sequence *s = &b->slots[b->order[i]];
    s->rows = s->drafts = s->found_count = 0;
    s->by_self = false;
    if (s->waiting || (is_decoding(s) && !make_room(b, i, s->count))) continue;
    decoding += is_decoding(s);
    taking_in += !is_decoding(s);
  }
  if (decoding > 0) plan_drafts(b, (MAX_ROWS - decoding) / (taking_in > 0 ? 2 : 1) / decoding);
  for (int i = 0; i < b->sequences; i++) {
    sequence *s = &b->slots[b->order[i]];
    if (!is_decoding(s)) continue;
    /* Drafts take pages that are free, and nobody's. */
    while (s->drafts > 0 && !take_pages(b, s, s->count + s->drafts)) s->drafts--;
    s->rows = 1 + s->drafts;
    rows += s->rows;
  }
  int chunk = smaller(b->o.chunk, MAX_ROWS - rows);
  for (int i = 0; i < b->sequences && chunk > 0; i++) {
    sequence *s = &b->slots[b->order[i]];
    if (s->waiting || is_decoding(s)) continue;
    share(b, s);
    /* A sparse sequence that was preempted takes its own tokens in as it made them. */
    s->rows = smaller(chunk, s->count - s->cached);
    if (s->how == BATCH_SPARSE) s->rows = s->cached < s->prompt ? smaller(s->rows, s->prompt - s->cached) : 1;
    chunk -= s->rows;
  }
}

static uint32_t mode_of(const sequence *s) {
  return s->how == BATCH_SPARSE && s->cached >= s->prompt ? VWD_DECODER_SPARSE : VWD_DECODER_DENSE;
}

/* The pass of a step: members of one mode and number of rows side by side. */
static void gather(batch *b) {
  start_pass(b);
  for (int rows = 1; rows <= MAX_ROWS; rows++) {
    for (uint32_t mode = VWD_DECODER_SPARSE; mode <= VWD_DECODER_DENSE; mode++) {
      for (int i = 0; i < b->sequences; i++) {
        sequence *s = &b->slots[b->order[i]];
        if (s->waiting || s->rows != rows || mode_of(s) != mode) continue;
        if (is_decoding(s))
          for (int row = 0; row < rows; row++) want(b, b->rows + row);
        else if (s->cached + rows == s->count) want(b, b->rows + rows - 1);
        add_member(b, b->order[i], mode, s->cached, rows);
      }
    }
  }
}

/* Tells the decoder how drafts fared. */
static bool accept(batch *b, verification *v) {
  vwd_decoder_accept_args args = VWD_DECODER_ACCEPT_ARGS_INIT;
  args.draft = TENSOR(v->draft, INT32, v->rows, v->width);
  args.target = TENSOR(v->target, INT32, v->rows, v->width + 1);
  args.draft_lens = TENSOR(v->lens, INT32, v->rows);
  args.sequences = TENSOR(v->sequence, INT32, v->rows);
  args.accepted = TENSOR(v->accepted, INT32, v->rows);
  args.next_token = TENSOR(v->next, INT32, v->rows);
  return v->rows == 0 || called(vwd_decoder_accept(b->decoder, &args, NULL), "vwd_decoder_accept", &b->error);
}

static void add_row(verification *v, const int32_t *draft, int drafts, const int32_t *target, int choices, int sequence) {
  const int n = v->rows++;
  v->lens[n] = drafts;
  v->sequence[n] = sequence;
  for (int i = 0; i < v->width; i++) v->draft[n * v->width + i] = i < drafts ? draft[i] : -1;
  for (int i = 0; i <= v->width; i++) v->target[n * (v->width + 1) + i] = i < choices ? target[i] : -1;
}

/* Draws the next tokens of all members, verifying their drafts. A member that is taking in its prompt draws none. */
static bool verify(batch *b, const float *logits, draws *d, int width) {
  verification v = {.width = width}, fared = {.width = width};
  *d = (draws){0};
  for (int n = 0, begin = 0; n < b->members; n++) {
    const sequence *s = &b->slots[b->member_slot[n]];
    const int choices = is_decoding(s) ? s->rows : s->cached + s->rows == s->count;
    add_row(&v, s->draft, s->drafts, NULL, 0, -1);
    draws_add(d, &s->sampling, s->stop, choices > 0 ? begin : 0, s->count, choices > 0 ? s->limit - s->count : 0);
    begin += choices;
  }
  if (b->wanted_count == 0) return true;
  const vwd_status status = draws_run(d, b->session, logits, b->wanted_count, b->shape.vocab, v.draft, v.lens, width);
  if (!called(status, "vwd_verify_sample", &b->error)) return false;
  for (int n = 0; n < b->members; n++) {
    const int slot = b->member_slot[n];
    const sequence *s = &b->slots[slot];
    if (d->remaining[n] > 0 && d->finish[n] == VWD_FINISH_NONE && d->next[n] < 0)
      return fail(&b->error, "no token can be drawn at position %lld: no logit is a number", d->positions[n] + d->committed_len[n], 0, 0);
    add_row(&fared, s->draft, s->drafts, d->committed + n * (width + 1), d->committed_len[n],
            s->by_self ? slot : s->found_count > 0 ? b->o.rows + slot : -1);
  }
  return accept(b, &fared);
}

/* Full pages become known, those of sparse steps aside. */
static void publish(batch *b, sequence *s) {
  const int most = s->how == BATCH_SPARSE ? smaller(s->cached, s->prompt) : s->cached;
  for (; (s->known + 1) * PAGE_TOKENS <= most; s->known++) {
    const int32_t parent = s->known ? s->table[s->known - 1] : -1;
    s->table[s->known] = pages_publish(&b->pages, s->table[s->known], parent, s->text + s->known * PAGE_TOKENS);
    if (b->pages.page[s->table[s->known]].summarised != b) s->unsummarised = smaller(s->unsummarised, s->known * PAGE_TOKENS);
  }
}

static void end_finished(batch *b) {
  for (int i = 0; i < b->sequences;) {
    if (b->slots[b->order[i]].finish != BATCH_RUNNING) end(b, i);
    else i++;
  }
}

static int step(batch *b, batch_event *events) {
  resume(b);
  plan(b);
  if (!draft(b)) return -1;
  gather(b);
  if (b->members == 0) return 0;
  const float *logits = run_pass(b);
  if (!logits) return -1;
  draws d;
  if (!verify(b, logits, &d, b->o.max_drafts)) return -1;
  verification unused = {.width = b->o.max_drafts}; /* what lookup found while sparse steps drafted: its estimate stays up to date */
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
      if (s->by_self && s->found_count > 0)
        add_row(&unused, s->found, smaller(s->found_count, written - first), s->text + s->count - (written - first), written - first,
                b->o.rows + b->member_slot[n]);
      s->cached = smaller(s->cached, s->count); /* a stop token among the drafts ends the text */
    }
    publish(b, s);
  }
  if (!accept(b, &unused)) return -1;
  b->n.steps++;
  end_finished(b);
  return written;
}

int batch_step(batch *b, batch_event *events, int capacity, batch_error *error) {
  if (capacity < batch_max_events(b))
    return fail(error, "room for %lld events; expected batch_max_events, %lld", capacity, batch_max_events(b), 0), -1;
  if (b->broken) return fail(error, "the batch has failed, and can only be freed", 0, 0, 0), -1;
  int count = step(b, events);
  b->broken = count < 0;
  if (b->broken) *error = b->error;
  return count;
}

void batch_count(const batch *b, batch_counters *out) {
  *out = b->n;
  out->evictions = b->pages.evictions;
  out->sequences = b->sequences;
  out->waiting = waiting(b);
  out->pages = b->o.pages;
  out->free_pages = pages_available(&b->pages);
  out->known_pages = b->pages.known_count;
}
