/* The same text by every strategy of a decoder: SERIAL, PRR, FORESEEN, and drafts that are verified (SELF); and by SERIAL, VANWARD, SPARDA
 * and ASYNC_TLS on a tiered cache, which has slots for a quarter of the blocks.
 *
 * The model is a toy of one layer with random weights: a token's hidden state gives its key, value and queries, and what attention returns
 * decides the next token. All of its text depends on all tokens before. */
#include "common.h"

enum {
  S = 8,           /* tokens of a block, and of a page */
  PAGES = 66,      /* of the one sequence: page p is its p-th */
  PROMPT = 400,
  TOKENS = 120,    /* that are decoded */
  VOCABULARY = 24,
  WIDTH = 16,
  HQ = 2,
  D = 16,
  K = 6,           /* blocks that a selection chooses, of 50 and more */
  AHEAD = 8,       /* blocks of a predicted list, 1.25·K */
  SLOTS = 2 * (AHEAD + 1), /* of the cache: the lists of two steps, with the block of the new token where they are foreseen */
  GAMMA = 4
};

typedef struct {
  float embedding[VOCABULARY][WIDTH];
  float to_q[HQ * D][WIDTH], to_k[D][WIDTH], to_v[D][WIDTH], back[WIDTH][HQ * D];
} model;

typedef struct {
  vwd_decoder *decoder;
  vwd_kv_cache *cache; /* NULL: the keys and values are in pages */
  const model *weights;
  float *keys, *values; /* [PAGES, S, 1, D] */
  int32_t table[PAGES];
  int len;
} sequence;

static void fill(float *weights, int count, float gain, uint64_t *seed) {
  for (int n = 0; n < count; n++) weights[n] = gain * uniform(seed);
}

static float dot(const float *a, const float *b, int count) {
  float sum = 0;
  for (int n = 0; n < count; n++) sum += a[n] * b[n];
  return sum;
}

static vwd_kv_cache *cache_of_one_sequence(const vwd_session *session) {
  vwd_kv_cache_options options = VWD_KV_CACHE_OPTIONS_INIT;
  options.layers = options.kv_heads = options.max_sequences = 1;
  options.block_size = S;
  options.key_dim = options.value_dim = D;
  options.dtype_code = FLOAT;
  options.dtype_bits = 32;
  options.max_blocks = options.host_blocks = PAGES;
  options.slots = SLOTS;
  vwd_kv_cache *cache = NULL;
  uint32_t number;
  CALL(vwd_kv_cache_create(session, &options, &cache));
  CALL(vwd_kv_cache_add(cache, &number, NULL));
  CHECK(number == 0); /* of a row whose step names no sequences */
  return cache;
}

static sequence begin_sequence(const vwd_session *session, const model *weights, uint32_t strategy, int is_tiered) {
  vwd_decoder_options options = VWD_DECODER_OPTIONS_INIT;
  options.layers = 1;
  options.max_rows = 1;
  options.max_positions = GAMMA + 1;
  options.query_heads = HQ;
  options.kv_heads = 1;
  options.key_dim = options.value_dim = D;
  options.dtype_code = FLOAT;
  options.dtype_bits = 32;
  options.block_size = S;
  options.policy.method = VWD_SELECT_MINMAX;
  options.policy.k = K;
  options.policy.init_blocks = options.policy.local_blocks = 1;
  options.policy.strategy = strategy; /* PRR and VANWARD predict from the scores of the step before; lists made ahead have 1.25·K blocks */
  sequence s = {NULL, NULL, weights, NULL, NULL, {0}, 0};
  if (is_tiered) {
    s.cache = cache_of_one_sequence(session);
    CALL(vwd_decoder_create_on_cache(session, &options, s.cache, &s.decoder));
    return s;
  }
  options.page_size = S;
  options.pages = PAGES;
  s.keys = floats(PAGES * S * D);
  s.values = floats(PAGES * S * D);
  for (int p = 0; p < PAGES; p++) s.table[p] = p;
  CALL(vwd_decoder_create(session, &options, &s.decoder));
  return s;
}

static void end_sequence(sequence *s) {
  vwd_decoder_release(s->decoder);
  vwd_kv_cache_release(s->cache);
  free(s->keys);
  free(s->values);
}

/* Runs `count` tokens that follow the first s->len, in one step, and gives the token that the model puts after each of them. */
static void step(sequence *s, uint32_t mode, const int32_t *tokens, int count, int32_t *next, float *out) {
  const model *w = s->weights;
  float q[(GAMMA + 1) * HQ * D], k[(GAMMA + 1) * D], v[(GAMMA + 1) * D], hidden[GAMMA + 1][WIDTH];
  for (int r = 0; r < count; r++) {
    for (int c = 0; c < WIDTH; c++) hidden[r][c] = w->embedding[tokens[r]][c] + sinf(0.3f * (float)(s->len + r) + (float)c);
    for (int c = 0; c < HQ * D; c++) q[r * HQ * D + c] = dot(w->to_q[c], hidden[r], WIDTH);
    for (int c = 0; c < D; c++) k[r * D + c] = dot(w->to_k[c], hidden[r], WIDTH);
    for (int c = 0; c < D; c++) v[r * D + c] = dot(w->to_v[c], hidden[r], WIDTH);
  }
  int32_t len = s->len + count;

  vwd_decoder_step begin = VWD_DECODER_STEP_INIT;
  begin.mode = mode;
  begin.positions = (uint32_t)count;
  if (s->cache)
    CALL(vwd_kv_cache_extend(s->cache, 0, (uint64_t)len, NULL));
  else
    begin.page_table = i32(s->table, 2, 1, PAGES);
  begin.seq_lens = i32(&len, 1, 1);
  CALL(vwd_decoder_begin(s->decoder, &begin, NULL));

  /* An engine calls this a layer earlier, with the residual stream and a forecast. This toy has one layer, and guesses its queries. */
  float guess[HQ * D];
  for (int c = 0; c < HQ * D; c++) guess[c] = q[c] + 0.1f * sinf(12.9f * (float)(c + s->len));
  vwd_decoder_foresee_args foresee = VWD_DECODER_FORESEE_ARGS_INIT;
  foresee.q = f32(guess, 3, 1, HQ, D);
  CALL(vwd_decoder_foresee(s->decoder, NULL, &foresee, NULL));

  vwd_decoder_attend_args attend = VWD_DECODER_ATTEND_ARGS_INIT;
  if (!s->cache) {
    attend.k = f32(s->keys, 4, PAGES, S, 1, D);
    attend.v = f32(s->values, 4, PAGES, S, 1, D);
  }
  attend.new_k = f32(k, 4, 1, count, 1, D);
  attend.new_v = f32(v, 4, 1, count, 1, D);
  attend.q = f32(q, 4, 1, count, HQ, D);
  attend.out = f32(out, 4, 1, count, HQ, D);
  CALL(vwd_decoder_attend(s->decoder, &attend, NULL));

  for (int r = 0; r < count; r++) {
    float best = 0;
    for (int c = 0; c < WIDTH; c++) hidden[r][c] += dot(w->back[c], out + r * HQ * D, HQ * D);
    next[r] = -1;
    for (int t = 0; t < VOCABULARY; t++) {
      const float logit = dot(w->embedding[t], hidden[r], WIDTH);
      if (next[r] < 0 || logit > best) best = logit, next[r] = t;
    }
  }
  s->len += count;
}

/* The prompt's tokens, one by one; the token after them is returned. */
static int32_t prefill(sequence *s, const int32_t *prompt) {
  int32_t next = 0;
  float out[HQ * D];
  for (int t = 0; t < PROMPT; t++) step(s, VWD_DECODER_DENSE, &prompt[t], 1, &next, out);
  return next;
}

static int count_of(vwd_tensor t) { return *(int32_t *)t.data; }

typedef struct {
  int32_t text[TOKENS];
  float out[TOKENS][HQ * D];
  int selected, predicted, missed, fetched;
} result;

/* Decodes by a strategy; with `given` it is told the text, so that results can be compared step by step. */
static void decode(const vwd_session *session, const model *weights, const int32_t *prompt, uint32_t mode, uint32_t strategy,
                   int is_tiered, const int32_t *given, result *made) {
  sequence s = begin_sequence(session, weights, strategy, is_tiered);
  vwd_decoder_details details = VWD_DECODER_DETAILS_INIT;
  CALL(vwd_decoder_info(s.decoder, &details));
  made->text[0] = prefill(&s, prompt);
  made->selected = made->predicted = made->missed = made->fetched = 0;
  for (int n = 0; n < TOKENS; n++) {
    const int32_t token = given ? given[n] : made->text[n];
    int32_t next;
    step(&s, mode, &token, 1, &next, made->out[n]);
    if (n + 1 < TOKENS) made->text[n + 1] = next;
    made->selected += count_of(details.selected);
    made->predicted += count_of(details.predicted);
    made->missed += count_of(details.missed);
    if (is_tiered) made->fetched += count_of(details.fetched);
  }
  end_sequence(&s);
}

/* Drafts by sparse steps, verifies by dense ones. Returns how many steps of either kind it took. */
static int draft_and_verify(const vwd_session *session, const model *weights, const int32_t *prompt, int is_tiered, int32_t *text,
                            int *accepted_in_all) {
  sequence s = begin_sequence(session, weights, VWD_STRATEGY_SERIAL, is_tiered);
  vwd_decoder_details details = VWD_DECODER_DETAILS_INIT;
  CALL(vwd_decoder_info(s.decoder, &details));
  float out[(GAMMA + 1) * HQ * D];
  int written = 1, steps = 0;
  text[0] = prefill(&s, prompt);
  *accepted_in_all = 0;
  while (written < TOKENS) {
    int32_t tokens[GAMMA + 1], target[GAMMA + 1], committed[GAMMA + 1], accepted, next;
    int32_t drafts = count_of(details.draft_lens); /* what the decoder recommends */
    const int verified = s.len;
    tokens[0] = text[written - 1];
    for (int n = 0; n < drafts; n++, steps++) step(&s, VWD_DECODER_SPARSE, &tokens[n], 1, &tokens[n + 1], out);
    s.len = verified;
    for (int n = 0; n <= GAMMA; n++) target[n] = -1;
    step(&s, VWD_DECODER_DENSE, tokens, drafts + 1, target, out); /* replaces what the drafts wrote */
    steps++;
    vwd_decoder_accept_args accept = VWD_DECODER_ACCEPT_ARGS_INIT;
    accept.draft = i32(tokens + 1, 2, 1, GAMMA);
    accept.target = i32(target, 2, 1, GAMMA + 1);
    accept.draft_lens = i32(&drafts, 1, 1);
    accept.accepted = i32(&accepted, 1, 1);
    accept.next_token = i32(&next, 1, 1);
    accept.committed = i32(committed, 2, 1, GAMMA + 1);
    for (int n = drafts; n < GAMMA; n++) tokens[n + 1] = -1;
    CALL(vwd_decoder_accept(s.decoder, &accept, NULL));
    for (int n = 0; n <= accepted && written < TOKENS; n++) text[written++] = committed[n];
    s.len = verified + accepted + 1;
    *accepted_in_all += accepted;
  }
  end_sequence(&s);
  return steps;
}

int main(void) {
  vwd_session *session = cpu_session();
  uint64_t seed = 7;
  model weights;
  fill(&weights.embedding[0][0], VOCABULARY * WIDTH, 1.0f, &seed);
  fill(&weights.to_q[0][0], HQ * D * WIDTH, 0.9f, &seed);
  fill(&weights.to_k[0][0], D * WIDTH, 0.9f, &seed);
  fill(&weights.to_v[0][0], D * WIDTH, 0.6f, &seed);
  fill(&weights.back[0][0], WIDTH * HQ * D, 0.6f, &seed);
  int32_t prompt[PROMPT];
  for (int t = 0; t < PROMPT; t++) prompt[t] = (int32_t)((uniform(&seed) + 1) * 0.499f * VOCABULARY);

  static result dense, serial, prr, foreseen, tiered, vanward, sparda, past;
  decode(session, &weights, prompt, VWD_DECODER_DENSE, VWD_STRATEGY_SERIAL, 0, NULL, &dense);

  /* PRR attends a predicted list while the selection runs, and repairs it exactly: the results are SERIAL's, bit for bit. */
  decode(session, &weights, prompt, VWD_DECODER_SPARSE, VWD_STRATEGY_SERIAL, 0, NULL, &serial);
  decode(session, &weights, prompt, VWD_DECODER_SPARSE, VWD_STRATEGY_PRR, 0, NULL, &prr);
  CHECK(memcmp(serial.out, prr.out, sizeof serial.out) == 0);
  CHECK(memcmp(serial.text, prr.text, sizeof serial.text) == 0);
  CHECK(prr.selected == TOKENS * K && 0 < prr.missed && prr.missed < prr.selected);
  printf("PRR: the text of SERIAL; %d of %d selected blocks were missed and repaired\n", prr.missed, prr.selected);

  /* FORESEEN attends the longer list that was made before the queries were there. Both are told the dense text. */
  decode(session, &weights, prompt, VWD_DECODER_SPARSE, VWD_STRATEGY_SERIAL, 0, dense.text, &serial);
  decode(session, &weights, prompt, VWD_DECODER_SPARSE, VWD_STRATEGY_FORESEEN, 0, dense.text, &foreseen);
  const double of_serial = relative_error(&serial.out[0][0], &dense.out[0][0], TOKENS * HQ * D);
  const double of_foreseen = relative_error(&foreseen.out[0][0], &dense.out[0][0], TOKENS * HQ * D);
  CHECK(foreseen.predicted >= TOKENS * 8 && of_foreseen < of_serial);
  printf("FORESEEN: error %.3f against dense attention, where SERIAL has %.3f\n", of_foreseen, of_serial);

  /* The same blocks, from slots of a tiered cache. SERIAL waits for those that are not there; VANWARD has fetched the predicted ones a step
   * ahead, attends what is there and repairs the rest. The results are those of SERIAL on pages, bit for bit. */
  decode(session, &weights, prompt, VWD_DECODER_SPARSE, VWD_STRATEGY_SERIAL, 1, dense.text, &tiered);
  decode(session, &weights, prompt, VWD_DECODER_SPARSE, VWD_STRATEGY_VANWARD, 1, dense.text, &vanward);
  CHECK(memcmp(serial.out, tiered.out, sizeof serial.out) == 0);
  CHECK(memcmp(serial.out, vanward.out, sizeof serial.out) == 0);
  CHECK(0 < vanward.fetched && vanward.fetched < vanward.selected && 0 < tiered.fetched && tiered.fetched < tiered.selected);
  printf("VANWARD: the results of SERIAL; %d of %d selected blocks were waited for, by SERIAL %d\n", vanward.fetched, vanward.selected,
         tiered.fetched);

  /* SPARDA attends the list that was foreseen, whose blocks have travelled since: FORESEEN's results. ASYNC_TLS attends what the step before
   * selected, while this step's selection travels: nothing is waited for, and the list is a step old. */
  decode(session, &weights, prompt, VWD_DECODER_SPARSE, VWD_STRATEGY_SPARDA, 1, dense.text, &sparda);
  decode(session, &weights, prompt, VWD_DECODER_SPARSE, VWD_STRATEGY_ASYNC_TLS, 1, dense.text, &past);
  CHECK(memcmp(foreseen.out, sparda.out, sizeof foreseen.out) == 0);
  const double of_past = relative_error(&past.out[0][0], &dense.out[0][0], TOKENS * HQ * D);
  CHECK(of_serial < of_past && of_past < 1);
  printf("SPARDA: the results of FORESEEN. ASYNC_TLS: error %.3f against dense attention\n", of_past);

  /* Drafts by sparse attention, verified by dense attention: the dense text, in fewer dense steps. On the cache a dense step reads the blocks
   * in host memory where they lie. */
  int32_t text[TOKENS];
  int accepted;
  for (int is_tiered = 0; is_tiered < 2; is_tiered++) {
    const int steps = draft_and_verify(session, &weights, prompt, is_tiered, text, &accepted);
    CHECK(memcmp(text, dense.text, sizeof text) == 0);
    CHECK(accepted > 0);
    printf("SELF%s: the dense text; %d of %d tokens were drafted, in %d steps\n", is_tiered ? " on the cache" : "", accepted, TOKENS, steps);
  }

  vwd_session_release(session);
  return 0;
}
