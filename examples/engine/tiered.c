/* Keys and values in a tiered cache: all of them in host memory, and in slots of device memory what sparse steps read.
 *
 * The cache shares the whole blocks of a sequence with those that are forked from it. So a sequence that has gone is kept, cut after its
 * last known block, until its room is needed; one that begins as it does, or as one that runs, is a fork. A block is a page of the batch. */
#include <string.h>

#include "batch_inside.h"

/* Numbers of the cache for each row: one that runs, and some that are kept. */
enum { NONE = -1, NUMBERS_PER_ROW = 4 };

/* A sequence of the cache. */
typedef struct {
  bool kept;       /* for others to fork; else it is of a sequence that runs, or of none */
  int32_t *blocks; /* [max_pages], by numbers of our own: forks have the same ones */
  int count;
  int32_t *text; /* [max_tokens], of a kept one */
  int tokens;
  int64_t used; /* when it was kept, or forked */
} holder;

struct tiered {
  vwd_kv_cache *cache;
  holder *holders; /* [numbers] */
  int numbers;
  /* The holders of each block, [pages], those of them that run, and whether it is known. */
  int32_t *users, *runners;
  bool *known;
  int32_t *free_blocks; /* a stack */
  int free_count, running_count, known_count;
  int64_t clock, evictions;
};

static bool failed(batch *b, vwd_status status, const char *call) {
  if (batch_called(status, call, &b->error)) return false;
  b->broken = true;
  return true;
}

/* --- Creation --- */

/* Entries of the lists of a KV head for which a step has slots at once; docs/decoder.md has them. */
static int entries(const batch *b) {
  const int list = list_blocks(b), ahead = (5 * list + 3) / 4 + 1;
  return b->o.strategy == VWD_STRATEGY_VANWARD ? ahead : b->o.strategy == VWD_STRATEGY_ASYNC_TLS ? 2 * list + 1 : list > 2 ? list : 2;
}

/* Completes the options, or says what is wrong with them. */
static bool complete(batch *b, batch_error *error) {
  batch_options *o = &b->o;
  if (o->strategy == VWD_STRATEGY_SPARDA)
    return batch_fail(error, "strategy: SPARDA reads foreseen lists, and a batch has no forecast to foresee by", 0, 0, 0);
  if (o->strategy != VWD_STRATEGY_SERIAL && o->strategy != VWD_STRATEGY_ASYNC_TLS && o->strategy != VWD_STRATEGY_VANWARD)
    return batch_fail(error, "strategy: %lld; expected SERIAL, ASYNC_TLS or VANWARD with host_kv", o->strategy, 0, 0);
  if (o->strategy == VWD_STRATEGY_ASYNC_TLS && o->dense_below > 0)
    return batch_fail(error, "dense_below: %lld; ASYNC_TLS attends sparsely however few tokens there are", o->dense_below, 0, 0);
  const int64_t least = (int64_t)o->rows * entries(b) * PAGE_TOKENS, some = (int64_t)o->pages * PAGE_TOKENS / 8;
  if (o->slots == 0) o->slots = (int)(some > least ? some : least);
  if (o->slots < least)
    return batch_fail(error, "slots: room for %lld tokens; expected at least %lld, what steps of %lld sequences read at once", o->slots, least,
                      o->rows);
  return true;
}

static bool allocate(batch *b, struct tiered *t) {
  t->numbers = NUMBERS_PER_ROW * b->o.rows;
  t->holders = calloc((size_t)t->numbers, sizeof *t->holders);
  t->users = calloc((size_t)b->o.pages, sizeof *t->users);
  t->runners = calloc((size_t)b->o.pages, sizeof *t->runners);
  t->known = calloc((size_t)b->o.pages, sizeof *t->known);
  t->free_blocks = calloc((size_t)b->o.pages, sizeof *t->free_blocks);
  bool ok = t->holders && t->users && t->runners && t->known && t->free_blocks;
  for (int n = 0; ok && n < t->numbers; n++) {
    t->holders[n].blocks = calloc((size_t)b->max_pages, sizeof(int32_t));
    t->holders[n].text = calloc((size_t)b->o.max_tokens, sizeof(int32_t));
    ok = t->holders[n].blocks && t->holders[n].text;
  }
  for (int i = 0; ok && i < b->o.pages; i++) t->free_blocks[t->free_count++] = i;
  return ok;
}

static bool create(batch *b, vwd_decoder_options *options, batch_error *error) {
  if (!complete(b, error)) return false;
  struct tiered *t = b->tiered = calloc(1, sizeof *t);
  if (!t || !allocate(b, t)) return batch_fail(error, "out of memory", 0, 0, 0);
  vwd_kv_cache_options cache = VWD_KV_CACHE_OPTIONS_INIT;
  cache.layers = options->layers;
  cache.kv_heads = options->kv_heads;
  cache.block_size = options->block_size;
  cache.key_dim = options->key_dim;
  cache.value_dim = options->value_dim;
  cache.dtype_code = options->dtype_code;
  cache.dtype_bits = options->dtype_bits;
  cache.max_sequences = (uint32_t)t->numbers;
  cache.max_blocks = (uint32_t)b->max_pages;
  cache.host_blocks = (uint32_t)b->o.pages;
  cache.slots = (uint32_t)pages_of(b->o.slots) * cache.kv_heads;
  if (!batch_called(vwd_kv_cache_create(b->session, &cache, &t->cache), "vwd_kv_cache_create", error)) return false;
  /* What is known of drafts lies behind what is known of the cache's sequences. */
  b->first_drafter = t->numbers;
  options->max_sequences += cache.max_sequences;
  for (int l = b->o.dense_layers; l < b->shape.layers; l++) {
    vwd_decoder_policy *policy = (vwd_decoder_policy *)&options->policies[l];
    policy->strategy = b->o.strategy;
    /* As on pages: a list that would have all blocks is none. */
    if (b->o.strategy != VWD_STRATEGY_ASYNC_TLS) policy->dense_below = (uint32_t)always_dense(b) + 1;
  }
  return batch_called(vwd_decoder_create_on_cache(b->session, options, t->cache, &b->decoder), "vwd_decoder_create_on_cache", error);
}

static void release(batch *b) {
  struct tiered *t = b->tiered;
  if (!t) return;
  vwd_kv_cache_release(t->cache);
  for (int n = 0; t->holders && n < t->numbers; n++) free(t->holders[n].blocks), free(t->holders[n].text);
  free(t->holders);
  free(t->users);
  free(t->runners);
  free(t->known);
  free(t->free_blocks);
  free(t);
}

/* --- Blocks and those who hold them --- */

static void hold(struct tiered *t, holder *h, int32_t block, bool runs) {
  h->blocks[h->count++] = block;
  t->users[block]++;
  if (runs && t->runners[block]++ == 0) t->running_count++;
}

static void stop_running(struct tiered *t, int32_t block) {
  if (--t->runners[block] == 0) t->running_count--;
}

static void let_go(struct tiered *t, holder *h, bool runs) {
  const int32_t block = h->blocks[--h->count];
  if (runs) stop_running(t, block);
  if (--t->users[block] > 0) return;
  if (t->known[block]) t->known_count--;
  t->known[block] = false;
  t->free_blocks[t->free_count++] = block;
}

/* Ends a sequence of the cache. */
static void end(batch *b, int number, bool runs) {
  struct tiered *t = b->tiered;
  holder *h = &t->holders[number];
  while (h->count > 0) let_go(t, h, runs);
  h->kept = false;
  failed(b, vwd_kv_cache_free(t->cache, (uint32_t)number, NULL), "vwd_kv_cache_free");
}

/* Ends the kept sequence that was used least recently, but not the one whose number is given. False if there is none. */
static bool evict(batch *b, int but) {
  struct tiered *t = b->tiered;
  int oldest = NONE;
  for (int n = 0; n < t->numbers; n++)
    if (t->holders[n].kept && n != but && (oldest == NONE || t->holders[n].used < t->holders[oldest].used)) oldest = n;
  if (oldest == NONE) return false;
  end(b, oldest, false);
  t->evictions++;
  return !b->broken;
}

/* --- Sharing --- */

static int common(const int32_t *a, const int32_t *b, int count) {
  int n = 0;
  while (n < count && a[n] == b[n]) n++;
  return n;
}

/* The tokens of a sequence that others may share: not those that sparse steps computed. */
static int known_tokens(const sequence *s) { return s->how == BATCH_SPARSE ? smaller(s->cached, s->prompt) : s->cached; }

/* The sequence of the cache that has most of the text's first tokens, at least a page: their number, or 0. */
static int find(const batch *b, const sequence *s, int *parent) {
  const struct tiered *t = b->tiered;
  const int most = shareable(s);
  int best = PAGE_TOKENS - 1;
  *parent = NONE;
  for (int i = 0; i < b->sequences; i++) {
    const sequence *other = &b->slots[b->order[i]];
    if (other == s || other->waiting) continue;
    const int same = common(s->text, other->text, smaller(most, known_tokens(other)));
    if (same > best) best = same, *parent = other->number;
  }
  for (int n = 0; n < t->numbers; n++) {
    const holder *h = &t->holders[n];
    const int same = h->kept ? common(s->text, h->text, smaller(most, h->tokens)) : 0;
    if (same > best) best = same, *parent = n;
  }
  return *parent == NONE ? 0 : best;
}

static bool take(batch *b, sequence *s, int64_t tokens) {
  struct tiered *t = b->tiered;
  holder *h = &t->holders[s->number];
  const int blocks = pages_of(tokens);
  if (blocks <= h->count) return true;
  vwd_status status;
  do status = vwd_kv_cache_extend(t->cache, (uint32_t)s->number, (uint64_t)tokens, NULL);
  while (status == VWD_ERROR_OUT_OF_MEMORY && evict(b, NONE));
  if (status == VWD_ERROR_OUT_OF_MEMORY || b->broken || failed(b, status, "vwd_kv_cache_extend")) return false;
  while (h->count < blocks) hold(t, h, t->free_blocks[--t->free_count], true);
  return true;
}

/* Begins a sequence of the cache, with the first `shared` tokens of another one, or fewer if there is no room for a copy of the last of their
 * blocks. */
static bool begin(batch *b, sequence *s, int parent, int shared) {
  struct tiered *t = b->tiered;
  uint32_t number = 0;
  vwd_status status;
  for (;;) {
    status = shared > 0 ? vwd_kv_cache_fork(t->cache, (uint32_t)parent, (uint64_t)shared, &number, NULL)
                        : vwd_kv_cache_add(t->cache, &number, NULL);
    if (status != VWD_ERROR_OUT_OF_MEMORY) break;
    if (evict(b, parent)) continue;
    if (shared == 0 || b->broken) break;
    shared = shared % PAGE_TOKENS > 0 ? shared / PAGE_TOKENS * PAGE_TOKENS : 0;
    if (shared == 0) parent = NONE;
  }
  if (b->broken || failed(b, status, shared > 0 ? "vwd_kv_cache_fork" : "vwd_kv_cache_add")) return false;
  holder *h = &t->holders[number];
  for (int i = 0; i < shared / PAGE_TOKENS; i++) hold(t, h, t->holders[parent].blocks[i], true);
  if (shared % PAGE_TOKENS > 0) hold(t, h, t->free_blocks[--t->free_count], true);
  if (parent != NONE) t->holders[parent].used = t->clock++;
  s->number = (int)number;
  s->is_new = true;
  s->cached = shared;
  s->known = shared / PAGE_TOKENS;
  const int32_t forgotten = s->number;
  vwd_decoder_reset_args reset = VWD_DECODER_RESET_ARGS_INIT;
  reset.sequences = TENSOR(&forgotten, INT32, 1);
  return !failed(b, vwd_decoder_reset(b->decoder, &reset, NULL), "vwd_decoder_reset");
}

/* Gives the sequence blocks for its text so far, for which there is room. */
static bool take_all(batch *b, sequence *s) {
  if (take(b, s, s->count)) return true;
  if (!b->broken) failed(b, VWD_ERROR_OUT_OF_MEMORY, "vwd_kv_cache_extend");
  return false;
}

static bool enter(batch *b, sequence *s) {
  const struct tiered *t = b->tiered;
  int parent, shared = find(b, s, &parent), left = b->o.pages - t->running_count;
  for (int i = 0; i < shared / PAGE_TOKENS; i++) left -= t->runners[t->holders[parent].blocks[i]] == 0;
  s->number = NONE;
  if (left < pages_of(s->count) - shared / PAGE_TOKENS + b->sequences - batch_waiting(b)) return false;
  if (!begin(b, s, parent, shared) || !take_all(b, s)) return false;
  b->n.shared_tokens += s->cached;
  return true;
}

/* Shares blocks of another sequence's text, which was computed beside this one's: a fork takes the place of what this one has. */
static void share(batch *b, sequence *s) {
  const int had = s->cached;
  int parent, shared = find(b, s, &parent);
  if (shared < had + PAGE_TOKENS) return;
  end(b, s->number, true);
  if (b->broken || !begin(b, s, parent, shared) || !take_all(b, s)) return;
  b->n.shared_tokens += s->cached > had ? s->cached - had : 0;
}

static void publish(batch *b, sequence *s) {
  struct tiered *t = b->tiered;
  const holder *h = &t->holders[s->number];
  for (; (s->known + 1) * PAGE_TOKENS <= known_tokens(s); s->known++) {
    bool *known = &t->known[h->blocks[s->known]];
    t->known_count += !*known;
    *known = true;
  }
}

static void leave(batch *b, sequence *s) {
  struct tiered *t = b->tiered;
  const int number = s->number, tokens = known_tokens(s) / PAGE_TOKENS * PAGE_TOKENS;
  s->number = NONE;
  s->cached = s->known = 0;
  if (number == NONE) return;
  holder *h = &t->holders[number];
  bool is_new = tokens > 0;
  for (int n = 0; n < t->numbers; n++) {
    holder *other = &t->holders[n];
    const int same = other->kept ? common(other->text, s->text, smaller(other->tokens, tokens)) : 0;
    if (!other->kept || same < smaller(other->tokens, tokens)) continue;
    if (other->tokens < tokens) end(b, n, false);
    else is_new = false, other->used = t->clock++;
  }
  if (!is_new) {
    end(b, number, true);
    return;
  }
  failed(b, vwd_kv_cache_truncate(t->cache, (uint32_t)number, (uint64_t)tokens, NULL), "vwd_kv_cache_truncate");
  while (h->count > tokens / PAGE_TOKENS) let_go(t, h, true);
  for (int i = 0; i < h->count; i++) stop_running(t, h->blocks[i]);
  memcpy(h->text, s->text, (size_t)tokens * sizeof *h->text);
  h->tokens = tokens;
  h->kept = true;
  h->used = t->clock++;
}

/* --- The pass --- */

/* Tokens are summarised as they are written. A `begin` before them says that a sequence has no past: what it attended to last, or what was
 * foreseen. */
static int32_t add(batch *b, sequence *s, int n, uint32_t mode, int first, int count) {
  (void)count;
  b->numbers[n] = s->number;
  if (!s->is_new || mode != VWD_DECODER_SPARSE) return first;
  s->is_new = false;
  return first - 1;
}

static void place(const batch *b, const group *g, vwd_decoder_step *step) {
  step->sequences = TENSOR(b->numbers + g->first_member, INT32, g->batch);
}

static void place_layer(const batch *b, int layer, vwd_decoder_attend_args *args) { (void)b, (void)layer, (void)args; }

/* Makes the summaries of blocks that accepted nodes have filled, by a step without tokens; the next pass makes that of the last block. It is too
 * late for these: `begin` reaches as far back as the tails of all layers do, and where a pass has several groups, the first layers' tails have
 * moved on when a later layer's step begins. And a sequence that ends has no next pass. */
static bool summarise(batch *b, const group *g, const int32_t *accepted) {
  const int32_t none[MAX_ROWS] = {0};
  int32_t lens[MAX_ROWS];
  bool filled = false;
  for (int n = 0; n < g->batch; n++) {
    const int root = b->roots[g->first_member + n];
    lens[n] = root + 1 + accepted[n];
    filled = filled || lens[n] / PAGE_TOKENS > root / PAGE_TOKENS;
  }
  if (!filled) return true;
  vwd_decoder_step step = VWD_DECODER_STEP_INIT;
  step.mode = VWD_DECODER_DENSE;
  place(b, g, &step);
  step.seq_lens = TENSOR(lens, INT32, g->batch);
  step.q_lens = TENSOR(none, INT32, g->batch);
  step.begin = TENSOR(b->roots + g->first_member, INT32, g->batch);
  if (!batch_called(vwd_decoder_begin(b->decoder, &step, NULL), "vwd_decoder_begin", &b->error)) return false;
  for (int l = b->o.dense_layers; l < b->shape.layers; l++) {
    vwd_decoder_attend_args args = VWD_DECODER_ATTEND_ARGS_INIT;
    args.layer = (uint32_t)l;
    if (!batch_called(vwd_decoder_attend(b->decoder, &args, NULL), "vwd_decoder_attend", &b->error)) return false;
  }
  return true;
}

static bool compact(batch *b, const group *g, vwd_tensor path, vwd_tensor accepted) {
  vwd_kv_cache_compact_args args = VWD_KV_CACHE_COMPACT_ARGS_INIT;
  args.sequences = TENSOR(b->numbers + g->first_member, INT32, g->batch);
  args.bases = TENSOR(b->roots + g->first_member, INT32, g->batch);
  args.path = path;
  args.accepted = accepted;
  return batch_called(vwd_kv_cache_compact(b->tiered->cache, &args, NULL), "vwd_kv_cache_compact", &b->error) && summarise(b, g, accepted.data);
}

static void count(const batch *b, batch_counters *out) {
  const struct tiered *t = b->tiered;
  vwd_kv_cache_stats stats = VWD_KV_CACHE_STATS_INIT;
  if (vwd_kv_cache_info(t->cache, &stats) == VWD_OK) {
    out->slot_hits = (int64_t)stats.hits;
    out->slot_misses = (int64_t)stats.misses;
    out->fetched_bytes = (int64_t)stats.bytes_fetched;
  }
  out->evictions = t->evictions;
  out->free_pages = b->o.pages - t->running_count;
  out->known_pages = t->known_count;
}

const store tiered_store = {PAGE_TOKENS, create, release, enter, share, take, leave, publish, add, place, place_layer, compact, count};
