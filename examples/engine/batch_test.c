/* Sequences that come and go in a batch have the text that they have alone, on the tiny random model. Returns 0 if all holds. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "batch.h"
#include "linear.h"
#include "tiny.h"

enum { PROMPT = 420, NEW = 60, REQUESTS = 40, MAX_TOKENS = 512 };

static int failures = 0;

static void expect(bool holds, const char *what) {
  if (!holds) failures++;
  printf("%s  %s\n", holds ? "holds " : "BROKEN", what);
}

static void require(bool ok, const char *what) {
  if (ok) return;
  fprintf(stderr, "failed: %s\n", what);
  exit(1);
}

static uint64_t state = 2026;

static int below(int n) { /* SplitMix64 */
  uint64_t z = (state += 0x9e3779b97f4a7c15u);
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
  z = (z ^ z >> 27) * 0x94d049bb133111ebu;
  return (int)((z ^ z >> 31) % (uint64_t)n);
}

/* --- The oracle: attention over all tokens in double precision, one token a pass --- */

typedef struct {
  model_shape shape;
  float *k, *v; /* [layers, MAX_TOKENS, kv_heads, head_dim], rounded to float16 */
} oracle;

static bool attend(void *context, const attention_call *call) {
  oracle *o = context;
  const int dim = o->shape.head_dim, row = o->shape.kv_heads * dim, tokens = call->positions[0] + 1;
  float *k = o->k + (size_t)call->layer * MAX_TOKENS * (size_t)row, *v = o->v + (size_t)call->layer * MAX_TOKENS * (size_t)row;
  for (int i = 0; i < row; i++) {
    k[(tokens - 1) * row + i] = half_to_float(float_to_half(call->k[i]));
    v[(tokens - 1) * row + i] = half_to_float(float_to_half(call->v[i]));
  }
  for (int h = 0; h < o->shape.heads; h++) {
    const int head = h / (o->shape.heads / o->shape.kv_heads) * dim;
    double sum = 0, out[64] = {0};
    for (int t = 0; t < tokens; t++) {
      double score = 0;
      for (int c = 0; c < dim; c++) score += (double)call->q[h * dim + c] * (double)k[t * row + head + c];
      const double weight = exp(score / sqrt(dim));
      sum += weight;
      for (int c = 0; c < dim; c++) out[c] += weight * (double)v[t * row + head + c];
    }
    for (int c = 0; c < dim; c++) call->out[h * dim + c] = (float)(out[c] / sum);
  }
  return true;
}

/* Whether each token has the oracle's largest logit, or one that rounding may have put in its place. */
static bool is_dense_text(model *m, const int32_t *text, int prompt, int count) {
  oracle o = {.shape = model_get_shape(m)};
  const size_t size = (size_t)(o.shape.layers * MAX_TOKENS * o.shape.kv_heads * o.shape.head_dim);
  o.k = calloc(size, sizeof *o.k);
  o.v = calloc(size, sizeof *o.v);
  require(o.k && o.v && o.shape.head_dim <= 64, "an oracle");
  bool ok = true;
  for (int i = 0; i + 1 < count; i++) {
    const float *logits = model_forward_run(m, &text[i], 1, i, true, attend, &o);
    if (i + 1 >= prompt) ok = ok && logits[text[i + 1]] >= logits[model_best(m, logits)] - 1e-3f;
  }
  free(o.k);
  free(o.v);
  return ok;
}

/* --- Requests --- */

typedef struct {
  int32_t tokens[MAX_TOKENS]; /* the prompt, then the text alone */
  int prompt, count;
  batch_how how;
  int32_t stop;
  batch_sampling sampling;
  /* in the batch */
  int64_t id;
  int received;
  bool cancelled, done, ok;
} request;

static batch *create(model *m, vwd_session *session, batch_options options) {
  batch_error error;
  options.max_tokens = MAX_TOKENS;
  options.k = 6; /* so few that some drafts are refused */
  batch *b = batch_create(m, session, &options, &error);
  if (!b) fprintf(stderr, "%s\n", error.text);
  require(b, "batch_create");
  return b;
}

static bool admit(batch *b, request *r, int max_new) {
  batch_error error = {""};
  const batch_request ask = {r->tokens, r->prompt, max_new, r->stop, r->how, r->sampling};
  const batch_admission answer = batch_admit(b, &ask, &r->id, &error);
  require(answer != BATCH_REFUSED, error.text);
  return answer == BATCH_ADMITTED;
}

/* What a request gives in a batch of its own, whose keys and values are in pages unless the options say otherwise. */
static void run_alone_by(model *m, vwd_session *session, request *r, batch_how how, batch_options options) {
  options.rows = 1;
  batch *b = create(m, session, options);
  batch_event events[64];
  batch_error error;
  const batch_how asked = r->how;
  r->how = how;
  require(admit(b, r, NEW), "a place in an empty batch");
  r->how = asked;
  r->count = r->prompt;
  for (bool running = true; running;) {
    const int count = batch_step(b, events, 64, &error);
    require(count >= 0, "batch_step");
    for (int i = 0; i < count; i++) r->tokens[r->count++] = events[i].token, running = events[i].finish == BATCH_RUNNING;
  }
  batch_free(b);
}

static void run_alone(model *m, vwd_session *session, request *r, batch_how how) {
  run_alone_by(m, session, r, how, (batch_options){0});
}

/* Texts of the vocabulary's printable bytes; most begin as an earlier one does, some with all that it gave. */
static void make_request(request *all, int index) {
  request *r = &all[index];
  *r = (request){.prompt = 20 + below(PROMPT - 20), .how = (batch_how)(index % BATCH_HOWS), .stop = -1, .ok = true};
  if (index / BATCH_HOWS % 2) /* half of each way is sampled */
    r->sampling = (batch_sampling){.temperature = 0.5f + 0.25f * (float)below(4), .seed = (uint64_t)below(1 << 30) << 20,
                                   .top_p = below(2) ? 0.9f : 0, .min_p = below(2) ? 0.05f : 0, .top_k = below(2) ? 40 : 0};
  for (int i = 0; i < r->prompt; i++) r->tokens[i] = 40 + below(60);
  if (index > 0 && below(4) > 0) {
    const request *other = &all[below(index)];
    const int most = r->prompt < other->count ? r->prompt : other->count, same = below(2) ? most : below(most);
    memcpy(r->tokens, other->tokens, (size_t)same * sizeof *r->tokens);
  }
}

static void receive(request *all, int requests, const batch_event *event) {
  for (int i = 0; i < requests; i++) {
    request *r = &all[i];
    if (r->id != event->id) continue;
    r->ok = r->ok && !r->done && !r->cancelled && r->prompt + r->received < r->count &&
            r->tokens[r->prompt + r->received] == event->token;
    r->received++;
    r->done = event->finish != BATCH_RUNNING;
    if (r->done) r->ok = r->ok && r->prompt + r->received == r->count;
  }
}

/* All requests, as many at once as there is room for, some of which are cancelled. */
static void run_together(model *m, vwd_session *session, request *all, batch_options options, batch_counters *n) {
  batch *b = create(m, session, options);
  batch_event events[64];
  batch_error error = {""};
  for (int i = 0; i < REQUESTS; i++) all[i].id = all[i].received = all[i].done = all[i].cancelled = 0, all[i].ok = true;
  int next = 0;
  do {
    while (next < REQUESTS && admit(b, &all[next], NEW)) next++;
    const int count = batch_step(b, events, 64, &error);
    require(count >= 0, error.text);
    for (int i = 0; i < count; i++) receive(all, REQUESTS, &events[i]);
    request *r = &all[below(REQUESTS)];
    if (below(40) == 0 && r->id && !r->done && !r->cancelled) r->cancelled = batch_cancel(b, r->id);
    batch_count(b, n);
  } while (next < REQUESTS || n->sequences > 0);
  batch_free(b);
}

/* Tokens that a prompt shares which continues what a sequence gave in the same batch. */
static int64_t shared_with(model *m, vwd_session *session, batch_how how, bool host_kv) {
  batch *b = create(m, session, (batch_options){.rows = 1, .host_kv = host_kv});
  batch_event events[64];
  batch_error error;
  batch_counters n = {0};
  request first = {.prompt = 200, .how = how, .stop = -1};
  for (int i = 0; i < first.prompt; i++) first.tokens[i] = 40 + below(60);
  require(admit(b, &first, NEW), "a place in an empty batch");
  for (first.count = first.prompt; first.count < first.prompt + NEW;) {
    const int count = batch_step(b, events, 64, &error);
    for (int i = 0; i < count; i++) first.tokens[first.count++] = events[i].token;
  }
  request second = first;
  second.how = BATCH_DENSE;
  second.prompt = first.count;
  require(admit(b, &second, NEW), "a place in an empty batch");
  batch_count(b, &n);
  batch_free(b);
  return n.shared_tokens;
}

/* Steps until a prompt of 200 tokens gives one. */
static int prompt_steps(model *m, vwd_session *session, bool host_kv) {
  batch *b = create(m, session, (batch_options){.rows = 1, .host_kv = host_kv});
  batch_event events[64];
  batch_error error = {""};
  request r = {.prompt = 200, .how = BATCH_DENSE, .stop = -1};
  for (int i = 0; i < r.prompt; i++) r.tokens[i] = 40 + i % 60;
  require(admit(b, &r, NEW), "a place in an empty batch");
  int steps = 0, count = 0;
  while (count == 0) count = batch_step(b, events, 64, &error), steps++;
  require(count == 1, error.text);
  batch_free(b);
  return steps;
}

/* Prompts of one length come in one step, in rows that are beside each other. */
static bool have_their_texts(model *m, vwd_session *session, bool host_kv) {
  enum { TEXTS = 3 };
  request all[TEXTS];
  batch *b = create(m, session, (batch_options){.rows = TEXTS, .chunk = 64, .host_kv = host_kv});
  for (int i = 0; i < TEXTS; i++) {
    all[i] = (request){.prompt = 21, .how = BATCH_DENSE, .stop = -1, .ok = true};
    for (int t = 0; t < all[i].prompt; t++) all[i].tokens[t] = 40 + below(60);
    run_alone(m, session, &all[i], BATCH_DENSE);
    require(admit(b, &all[i], NEW), "a place in the batch");
  }
  batch_event events[64];
  batch_error error = {""};
  batch_counters n;
  do {
    const int count = batch_step(b, events, 64, &error);
    require(count >= 0, error.text);
    for (int i = 0; i < count; i++) receive(all, TEXTS, &events[i]);
    batch_count(b, &n);
  } while (n.sequences > 0);
  batch_free(b);
  return all[0].ok && all[1].ok && all[2].ok && all[0].done && all[1].done && all[2].done;
}

/* Texts that often go on otherwise than they did before, drafted by trees, and then continued by sparse steps, which read the summaries of
 * what was moved. The seeds are those of texts in which one summary of other nodes makes another token. */
static void check_trees(model *m, vwd_session *session, bool host_kv, uint64_t seed) {
  enum { TEXTS = 12, SYMBOLS = 5 };
  static request trees[TEXTS], sparse[TEXTS];
  state = seed;
  batch_event events[64];
  batch_error error = {""};
  batch_counters n;
  batch *b = create(m, session, (batch_options){.rows = 4, .max_drafts = 15, .position_cost = 0.01f, .pages = 300, .host_kv = host_kv});
  for (int i = 0; i < TEXTS; i++) {
    request *r = &trees[i];
    *r = (request){.prompt = 150 + 4 * i, .how = BATCH_LOOKUP_TREE, .stop = -1, .ok = true};
    if (i % 3 > 0) r->sampling = (batch_sampling){.temperature = 1, .top_k = 2 + i % 2, .seed = (uint64_t)i};
    for (int t = 0; t < r->prompt; t++) r->tokens[t] = 40 + below(SYMBOLS);
    run_alone(m, session, r, BATCH_DENSE);
    sparse[i] = (request){.prompt = r->count, .how = BATCH_SPARSE, .stop = -1, .ok = true};
    memcpy(sparse[i].tokens, r->tokens, sizeof r->tokens);
    run_alone(m, session, &sparse[i], BATCH_SPARSE);
  }
  bool ok[2] = {true, true};
  for (int part = 0; part < 2; part++) {
    request *all = part == 0 ? trees : sparse;
    int next = 0;
    for (int i = 0; i < TEXTS; i++) all[i].id = 0;
    do {
      while (next < TEXTS && admit(b, &all[next], NEW)) next++;
      const int count = batch_step(b, events, 64, &error);
      require(count >= 0, error.text);
      for (int i = 0; i < count; i++) receive(all, TEXTS, &events[i]);
      batch_count(b, &n);
    } while (next < TEXTS || n.sequences > 0);
    for (int i = 0; i < TEXTS; i++) ok[part] = ok[part] && all[i].ok && all[i].done;
  }
  batch_free(b);
  char what[200];
  snprintf(what, sizeof what, "trees change nothing in the text: %lld had several branches, of %lld accepted tokens %lld were not on the first",
           (long long)n.branched, (long long)n.accepted, (long long)n.off_first);
  expect(ok[0] && n.branched > 0 && n.off_first > 0, what);
  expect(ok[1] && n.shared_tokens > 0, "nor in the summaries of what was accepted");
}

static bool same_text(const request *a, const request *b) {
  return a->count == b->count && memcmp(a->tokens, b->tokens, sizeof a->tokens) == 0;
}

static void check_seeds(model *m, vwd_session *session, const request *sampled) {
  request again = *sampled, other = *sampled, greedy = *sampled, cold = *sampled;
  other.sampling.seed++;
  greedy.sampling = (batch_sampling){0};
  cold.sampling = (batch_sampling){.temperature = 1, .top_k = 1, .seed = 5};
  request *all[] = {&again, &other, &greedy, &cold};
  for (int i = 0; i < 4; i++) run_alone(m, session, all[i], BATCH_DENSE);
  expect(same_text(&again, sampled), "a seed gives its text again");
  expect(!same_text(&other, sampled) && !same_text(&greedy, sampled), "another seed and greedy decoding give others");
  expect(same_text(&cold, &greedy), "the likeliest token alone is greedy decoding");
}

static void check_refusals(model *m, vwd_session *session) {
  const struct {
    batch_sampling sampling;
    const char *name;
  } bad[] = {{{.temperature = -1}, "temperature"}, {{.temperature = NAN}, "temperature"}, {{.temperature = INFINITY}, "temperature"},
             {{.top_p = -0.1f}, "top_p"}, {{.top_p = 1.1f}, "top_p"}, {{.min_p = 2}, "min_p"}, {{.min_p = NAN}, "min_p"}, {{.top_k = -1}, "top_k"}};
  batch *b = create(m, session, (batch_options){.rows = 1});
  const int32_t token = 50;
  bool named = true;
  for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
    batch_error error = {""};
    int64_t id;
    const batch_request ask = {&token, 1, 1, -1, BATCH_DENSE, bad[i].sampling};
    named = named && batch_admit(b, &ask, &id, &error) == BATCH_REFUSED && strncmp(error.text, bad[i].name, strlen(bad[i].name)) == 0;
  }
  batch_free(b);
  expect(named, "values out of range are refused by name");
}

/* What a batch cannot do is said before anything runs. */
static void check_options(model *m, vwd_session *session) {
  const struct {
    batch_options options;
    const char *says;
  } bad[] = {{{.strategy = VWD_STRATEGY_VANWARD}, "strategy"},
             {{.slots = 1024}, "slots"},
             {{.host_kv = true, .strategy = VWD_STRATEGY_SPARDA}, "strategy: SPARDA"},
             {{.host_kv = true, .strategy = VWD_STRATEGY_PRR}, "strategy: 1"},
             {{.host_kv = true, .strategy = VWD_STRATEGY_ASYNC_TLS, .dense_below = 100}, "dense_below: 100"},
             {{.host_kv = true, .rows = 2, .k = 6, .slots = 191}, "slots: room for 191 tokens; expected at least 192"},
             {{.host_kv = true, .max_tokens = MAX_TOKENS, .pages = 31}, "pages: 31"}};
  bool named = true;
  for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
    batch_error error = {""};
    batch *b = batch_create(m, session, &bad[i].options, &error);
    named = named && !b && strstr(error.text, bad[i].says);
    batch_free(b);
  }
  expect(named, "so are options that contradict each other, or leave too little room");
}

int main(void) {
  static request all[REQUESTS];
  size_t size;
  void *bytes = tiny_gguf(&size);
  gguf *file = gguf_parse(bytes, size);
  pool *threads = pool_new(2);
  require(bytes && file && threads, "the tiny model");
  model *m = model_new(file, threads);
  vwd_session_options options = VWD_SESSION_OPTIONS_INIT;
  options.device = VWD_DEVICE_CPU;
  options.threads = 2;
  vwd_session *session;
  require(m && vwd_session_create(&options, &session) == VWD_OK, "a session");

  printf("seed %llu\n", (unsigned long long)state);
  bool dense = true, drafted = true;
  for (int i = 0; i < REQUESTS; i++) {
    make_request(all, i);
    run_alone(m, session, &all[i], all[i].how);
    if (all[i].how == BATCH_SPARSE) continue;
    request twin = all[i];
    run_alone(m, session, &twin, BATCH_DENSE);
    drafted = drafted && same_text(&twin, &all[i]);
    if (i < BATCH_HOWS) dense = dense && is_dense_text(m, twin.tokens, twin.prompt, twin.count);
  }
  expect(dense, "the text is that of dense attention in double precision");
  expect(drafted, "drafts change nothing in the text");
  check_seeds(m, session, &all[BATCH_HOWS]);
  check_refusals(m, session);
  check_trees(m, session, false, 2026);
  check_trees(m, session, true, 2026);
  check_trees(m, session, true, 2114); /* here it is of a block that was filled just before a step of several groups filled the next one */
  check_options(m, session);
  for (int i = 0; i < REQUESTS; i += 3) all[i].stop = all[i].tokens[all[i].prompt + 20]; /* ends there, or where it first came */
  for (int i = 0; i < REQUESTS; i += 3) run_alone(m, session, &all[i], all[i].how);

  for (int host_kv = 0; host_kv < 2; host_kv++) {
    expect(prompt_steps(m, session, host_kv) == 4, "a step takes 64 tokens of a prompt");
    expect(have_their_texts(m, session, host_kv), "and prompts of one length together");
    expect(shared_with(m, session, BATCH_SELF, host_kv) >= 256, "a prompt shares the full pages of a text that it continues");
    expect(shared_with(m, session, BATCH_SPARSE, host_kv) == 192, "though not keys and values of sparse steps");
  }

  batch_counters n;
  const batch_options ways[] = {{.rows = 6},
                                {.rows = 6, .pages = 70, .chunk = 13},
                                {.rows = 16, .pages = 45, .max_drafts = 15},
                                {.rows = 6, .host_kv = true, .slots = 6 * 6 * BATCH_PAGE},
                                {.rows = 16, .host_kv = true, .pages = 40, .max_drafts = 15},
                                {.rows = 6, .host_kv = true, .pages = 70, .chunk = 13, .strategy = VWD_STRATEGY_VANWARD},
                                {.rows = 8, .host_kv = true, .pages = 40, .strategy = VWD_STRATEGY_ASYNC_TLS},
                                {.rows = 5, .method = VWD_SELECT_MINMAX, .pages = 64}};
  for (size_t w = 0; w < sizeof ways / sizeof *ways; w++) {
    /* The SPARSE texts of ASYNC_TLS are its own. They do not depend on the slots. */
    if (ways[w].strategy == VWD_STRATEGY_ASYNC_TLS) {
      const batch_options own = {.host_kv = true, .strategy = VWD_STRATEGY_ASYNC_TLS, .slots = 2 * MAX_TOKENS};
      for (int i = 0; i < REQUESTS; i++)
        if (all[i].how == BATCH_SPARSE) run_alone_by(m, session, &all[i], BATCH_SPARSE, own);
    }
    /* A SPARSE text depends on the method. */
    if (ways[w].method == VWD_SELECT_MINMAX)
      for (int i = 0; i < REQUESTS; i++)
        if (all[i].how == BATCH_SPARSE) all[i].how = BATCH_SELF, run_alone(m, session, &all[i], BATCH_DENSE);
    run_together(m, session, all, ways[w], &n);
    int wrong = 0;
    for (int i = 0; i < REQUESTS; i++) wrong += !all[i].ok || (!all[i].done && !all[i].cancelled);
    char what[300];
    snprintf(what, sizeof what,
             "%d sequences, %d at once, have the text that they have alone%s (%lld steps, %lld preemptions, %lld tokens shared, %lld "
             "known pages forgotten,\n        %lld drafts, %lld accepted; by sparse steps %lld, %lld)",
             REQUESTS, ways[w].rows, ways[w].host_kv ? ", now from host memory" : "", (long long)n.steps, (long long)n.preemptions, (long long)n.shared_tokens,
             (long long)n.evictions, (long long)n.drafted, (long long)n.accepted, (long long)n.self_drafted, (long long)n.self_accepted);
    expect(wrong == 0, what);
    expect(n.free_pages == n.pages, "and give all pages back");
    if (ways[w].host_kv) expect(n.slot_misses > 0 && n.fetched_bytes > 0 && n.slot_hits > n.slot_misses, "though slots have few of the blocks");
    if (ways[w].pages == 40 || ways[w].pages == 45) expect(n.preemptions > 0 && n.evictions > 0 && n.shared_tokens > 0, "where pages ran out, and were shared");
    expect(n.self_drafted > n.self_accepted && n.self_accepted > 0, "though some drafts were refused");
  }

  vwd_session_release(session);
  model_free(m);
  pool_free(threads);
  gguf_close(file);
  free(bytes);
  return failures;
}
