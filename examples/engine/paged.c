/* Keys and values in pages, which sequences share page by page. */
#include <string.h>

#include "batch_inside.h"

static bool create(batch *b, vwd_decoder_options *options, batch_error *error) {
  const model_shape *s = &b->shape;
  b->tables = calloc((size_t)b->o.rows * (size_t)b->max_pages, sizeof *b->tables);
  vwd_tensor *caches = calloc(2 * (size_t)s->layers, sizeof *caches);
  if (!b->tables || !caches || !pages_init(&b->pages, s, b->o.pages))
    return free(caches), batch_fail(error, "out of memory: %lld pages of keys and values", b->o.pages, 0, 0);
  options->page_size = PAGE_TOKENS;
  options->pages = (uint32_t)b->o.pages;
  bool ok = batch_called(vwd_decoder_create(b->session, options, &b->decoder), "vwd_decoder_create", error);
  for (int l = 0; l < s->layers; l++) {
    const size_t layer = pages_layer(&b->pages, l);
    caches[2 * l] = TENSOR(b->pages.k + layer, FLOAT16, b->o.pages, PAGE_TOKENS, s->kv_heads, s->head_dim);
    caches[2 * l + 1] = TENSOR(b->pages.v + layer, FLOAT16, b->o.pages, PAGE_TOKENS, s->kv_heads, s->head_dim);
  }
  vwd_compactor_options compactor = VWD_COMPACTOR_OPTIONS_INIT;
  compactor.cache_count = 2 * (uint32_t)s->layers;
  compactor.caches = caches;
  ok = ok && batch_called(vwd_compactor_create(b->session, &compactor, &b->compactor), "vwd_compactor_create", error);
  free(caches);
  return ok;
}

static void release(batch *b) {
  vwd_compactor_release(b->compactor);
  pages_free(&b->pages);
  free(b->tables);
}

/* Children go before their parents, so that they are the first to be forgotten. */
static void leave(batch *b, sequence *s) {
  while (s->pages > 0) pages_leave(&b->pages, s->table[--s->pages]);
  s->known = s->cached = 0;
}

static bool take(batch *b, sequence *s, int64_t tokens) {
  while (s->pages < pages_of(tokens)) {
    int32_t page = pages_take(&b->pages);
    if (page < 0) return false;
    s->table[s->pages++] = page;
  }
  return true;
}

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

/* Behind the known pages it copies what is known of the page that follows. */
static bool enter(batch *b, sequence *s) {
  const int64_t shared = b->n.shared_tokens;
  share(b, s);
  const int running = b->sequences - batch_waiting(b);
  if (pages_available(&b->pages) < pages_of(s->count) - s->pages + running) {
    b->n.shared_tokens = shared;
    return leave(b, s), false;
  }
  take(b, s, s->count);
  const int most = shareable(s), part = s->cached < most
      ? pages_copy_part(&b->pages, s->table[s->known], s->known ? s->table[s->known - 1] : -1, s->text + s->cached, most - s->cached)
      : 0;
  s->cached += part;
  b->n.shared_tokens += part;
  return true;
}

static void publish(batch *b, sequence *s) {
  const int most = s->how == BATCH_SPARSE ? smaller(s->cached, s->prompt) : s->cached;
  for (; (s->known + 1) * PAGE_TOKENS <= most; s->known++) {
    const int32_t parent = s->known ? s->table[s->known - 1] : -1;
    s->table[s->known] = pages_publish(&b->pages, s->table[s->known], parent, s->text + s->known * PAGE_TOKENS);
    if (b->pages.page[s->table[s->known]].summarised != b) s->unsummarised = smaller(s->unsummarised, s->known * PAGE_TOKENS);
  }
}

/* A member makes summaries of its own pages, and of those that it shares with whoever wrote them elsewhere, unless another member has made
 * them. */
static int32_t add(batch *b, sequence *s, int n, uint32_t mode, int first, int count) {
  (void)mode;
  int32_t *table = b->tables + (size_t)n * (size_t)b->max_pages;
  memcpy(table, s->table, (size_t)s->pages * sizeof *table);
  for (int p = s->pages; p < b->max_pages; p++) table[p] = -1;
  int begin = smaller(first, s->unsummarised);
  while (begin < first && b->pages.page[s->table[begin / PAGE_TOKENS]].summarised == b) begin += PAGE_TOKENS;
  if (begin > first) begin = first;
  for (int p = begin / PAGE_TOKENS; p <= (first + count - 1) / PAGE_TOKENS; p++) b->pages.page[s->table[p]].summarised = b;
  s->unsummarised = INT32_MAX;
  return begin;
}

static vwd_tensor table_of(const batch *b, const group *g) {
  return TENSOR(b->tables + (size_t)g->first_member * (size_t)b->max_pages, INT32, g->batch, b->max_pages);
}

static void place(const batch *b, const group *g, vwd_decoder_step *step) { step->page_table = table_of(b, g); }

static void place_layer(const batch *b, int layer, vwd_decoder_attend_args *args) {
  const model_shape *s = &b->shape;
  const size_t first = pages_layer(&b->pages, layer);
  args->k = TENSOR(b->pages.k + first, FLOAT16, b->o.pages, PAGE_TOKENS, s->kv_heads, s->head_dim);
  args->v = TENSOR(b->pages.v + first, FLOAT16, b->o.pages, PAGE_TOKENS, s->kv_heads, s->head_dim);
}

/* Summaries from the first token that is not cached on are of nodes that were moved. The next step makes them again, of what was accepted: this
 * sequence's, or that of one that shares these pages. */
static void moved(batch *b, sequence *s) {
  s->unsummarised = smaller(s->unsummarised, s->cached);
  for (int p = s->cached / PAGE_TOKENS; p < s->pages; p++) b->pages.page[s->table[p]].summarised = NULL;
}

static bool compact(batch *b, const group *g, vwd_tensor path, vwd_tensor accepted) {
  vwd_compact_args args = VWD_COMPACT_ARGS_INIT;
  args.page_table = table_of(b, g);
  args.bases = TENSOR(b->roots + g->first_member, INT32, g->batch);
  args.path = path;
  args.accepted = accepted;
  if (!batch_called(vwd_compact(b->compactor, &args, NULL), "vwd_compact", &b->error)) return false;
  for (int n = g->first_member; n < g->first_member + g->batch; n++) moved(b, &b->slots[b->member_slot[n]]);
  return true;
}

static void count(const batch *b, batch_counters *out) {
  out->evictions = b->pages.evictions;
  out->free_pages = pages_available(&b->pages);
  out->known_pages = b->pages.known_count;
}

const store paged_store = {MAX_ROWS, create, release, enter, share, take, leave, publish, add, place, place_layer, compact, count};
