/*
 * Speculative decoding with draft trees: several continuations are drafted, the model runs over all of them at once, and the path that it
 * agrees with is kept.
 *
 * Shown: vwd_tree_prepare gives positions and masks, vwd_attention attends for all nodes in one call, vwd_verify_tree walks the tree by the
 * logits, and vwd_compact moves the rows of accepted nodes to where a chain would have written them. The text is that of one token at a time,
 * greedily and where tokens are sampled.
 */
#include "common.h"

enum { V = 24, H = 2, D = 16, P = 4, PAGES = 16, LENGTH = 40, N = 7 };

/* One layer, whose tables stand for weights. */
static float key_of[V][H][D], value_of[V][H][D], query_of[V][H][D], output_of[V][H][D];

static const vwd_tensor NONE = VWD_TENSOR_INIT;

typedef struct {
  float k[PAGES][P][H][D], v[PAGES][P][H][D];
  int32_t table[PAGES];
  int32_t tokens[LENGTH + N];  /* of the text; the last one has no row in the cache yet */
  int32_t length;              /* of the text */
} sequence;

/* A key depends on its position, as a rotated one does. */
static void write_row(sequence *s, int row, int token, int position) {
  for (int h = 0; h < H; h++) {
    for (int d = 0; d < D; d++) {
      s->k[s->table[row / P]][row % P][h][d] = key_of[token][h][d] + 0.3f * cosf((float)position * (float)(d + 1));
      s->v[s->table[row / P]][row % P][h][d] = value_of[token][h][d];
    }
  }
}

/* Runs the model over `count` tokens behind the first `base` ones, whose positions and mask are given. */
static void run(vwd_session *session, sequence *s, int base, int count, int32_t *tokens, const int32_t *positions, vwd_tensor tree,
                float logits[N][V]) {
  float q[N][H][D], out[N][H][D];
  for (int n = 0; n < count; n++) {
    write_row(s, base + n, tokens[n], positions[n]);
    memcpy(q[n], query_of[tokens[n]], sizeof q[n]);
  }
  int32_t seq_len = base + count;
  vwd_paged_kv kv = VWD_PAGED_KV_INIT;
  kv.k = f32(&s->k[0][0][0][0], 4, PAGES, P, H, D);
  kv.v = f32(&s->v[0][0][0][0], 4, PAGES, P, H, D);
  kv.page_table = i32(s->table, 2, 1, PAGES);
  kv.seq_lens = i32(&seq_len, 1, 1);
  vwd_attention_args attention = VWD_ATTENTION_ARGS_INIT;
  attention.kv = &kv;
  attention.q = f32(&q[0][0][0], 4, 1, count, H, D);
  attention.out = f32(&out[0][0][0], 4, 1, count, H, D);
  attention.tree = tree;
  CALL(vwd_attention(session, &attention, NULL));
  for (int n = 0; n < count; n++) {
    for (int t = 0; t < V; t++) {
      logits[n][t] = 0;
      for (int i = 0; i < H * D; i++) logits[n][t] += (&out[n][0][0])[i] * (&output_of[t][0][0])[i];
    }
  }
}

static int largest(const float *logits) {
  int best = 0;
  for (int t = 1; t < V; t++) {
    if (logits[t] > logits[best]) best = t;
  }
  return best;
}

static void begin(sequence *s, vwd_session *session) {
  memset(s, 0, sizeof *s);
  for (int p = 0; p < PAGES; p++) s->table[p] = (p * 5 + 3) % PAGES;
  float logits[N][V];
  for (int t = 0; t < 3; t++) {
    int32_t token = t, position = t;
    run(session, s, t, 1, &token, &position, NONE, logits);
    s->tokens[t] = t;
  }
  s->tokens[3] = largest(logits[0]);
  s->length = 4;
}

/* Decodes a text one token at a time and by trees. Temperature 0 is greedy. */
static void decode(vwd_session *session, float temperature, uint64_t *random) {
  static sequence chain, tree;
  int64_t seed = 42;
  float logits[N][V];

  /* The text, one token at a time. */
  begin(&chain, session);
  while (chain.length < LENGTH) {
    const int base = chain.length - 1;
    const int32_t position = base;
    run(session, &chain, base, 1, &chain.tokens[base], &position, NONE, logits);
    vwd_verify_sample_args sample = VWD_VERIFY_SAMPLE_ARGS_INIT;
    sample.target = f32(&logits[0][0], 2, 1, V);
    sample.temperature = f32(&temperature, 1, 1);
    sample.seeds = array(&seed, SIGNED, 64, 1, 1);
    sample.positions = i32(&chain.length, 1, 1);
    sample.next_token = i32(&chain.tokens[chain.length], 1, 1);
    CALL(vwd_verify_sample(session, &sample, NULL));
    chain.length++;
  }

  /* The same by trees: two guesses after the root, two after each of them. The guesses are often the text's next token. */
  begin(&tree, session);
  vwd_tensor caches[] = {f32(&tree.k[0][0][0][0], 4, PAGES, P, H, D), f32(&tree.v[0][0][0][0], 4, PAGES, P, H, D)};
  vwd_compactor_options options = VWD_COMPACTOR_OPTIONS_INIT;
  options.cache_count = 2;
  options.caches = caches;
  vwd_compactor *compactor = NULL;
  CALL(vwd_compactor_create(session, &options, &compactor));
  int32_t parents[N] = {-1, 0, 0, 1, 1, 2, 2};
  int steps = 0, moved = 0;
  while (tree.length < LENGTH) {
    int32_t base = tree.length - 1, tokens[N], positions[N], accepted, path[N], next_token, committed[N];
    uint32_t mask[N];
    for (int n = 0; n < N; n++) {
      const int ahead = n == 0 ? 0 : n < 3 ? 1 : 2;
      const int right = chain.tokens[base + ahead < LENGTH ? base + ahead : LENGTH - 1];
      tokens[n] = n == 0 || uniform(random) > 0.1f ? right : (right + n) % V;
    }
    vwd_tree_prepare_args prepare = VWD_TREE_PREPARE_ARGS_INIT;
    prepare.parents = i32(parents, 2, 1, N);
    prepare.bases = i32(&base, 1, 1);
    prepare.positions = i32(positions, 2, 1, N);
    prepare.mask = array(mask, UNSIGNED, 32, 3, 1, N, 1);
    CALL(vwd_tree_prepare(session, &prepare, NULL));

    run(session, &tree, base, N, tokens, positions, prepare.mask, logits);

    vwd_verify_tree_args verify = VWD_VERIFY_TREE_ARGS_INIT;
    verify.tokens = i32(tokens, 2, 1, N);
    verify.parents = prepare.parents;
    verify.logits = f32(&logits[0][0], 3, 1, N, V);
    verify.accepted = i32(&accepted, 1, 1);
    verify.path = i32(path, 2, 1, N);
    verify.next_token = i32(&next_token, 1, 1);
    verify.committed = i32(committed, 2, 1, N);
    verify.walk = VWD_WALK_COUPLED;
    verify.temperature = f32(&temperature, 1, 1);
    verify.seeds = array(&seed, SIGNED, 64, 1, 1);
    verify.positions = i32(&tree.length, 1, 1);
    CALL(vwd_verify_tree(session, &verify, NULL));

    vwd_compact_args compact = VWD_COMPACT_ARGS_INIT;
    compact.page_table = i32(tree.table, 2, 1, PAGES);
    compact.bases = prepare.bases;
    compact.path = verify.path;
    compact.accepted = verify.accepted;
    CALL(vwd_compact(compactor, &compact, NULL));

    for (int j = 0; j <= accepted; j++) {
      tree.tokens[tree.length + j] = committed[j];
      moved += path[j] != j;
    }
    tree.length += accepted + 1;
    steps++;
  }

  for (int t = 0; t < LENGTH; t++) CHECK(tree.tokens[t] == chain.tokens[t]);
  /* Rows of tokens that both have lie where the chain wrote them. */
  for (int row = 0; row < LENGTH - 1; row++) {
    CHECK(memcmp(tree.k[tree.table[row / P]][row % P], chain.k[chain.table[row / P]][row % P], sizeof chain.k[0][0]) == 0);
    CHECK(memcmp(tree.v[tree.table[row / P]][row % P], chain.v[chain.table[row / P]][row % P], sizeof chain.v[0][0]) == 0);
  }
  CHECK(steps < LENGTH - 4 && moved > 0);
  printf("temperature %g: %d tokens in %d runs of the model, %d rows moved\n", (double)temperature, LENGTH - 4, steps, moved);
  vwd_compactor_release(compactor);
}

int main(void) {
  vwd_session *session = cpu_session();
  uint64_t random = 7;
  float *tables[] = {&key_of[0][0][0], &value_of[0][0][0], &query_of[0][0][0], &output_of[0][0][0]};
  for (int n = 0; n < 4; n++) {
    for (int i = 0; i < V * H * D; i++) tables[n][i] = uniform(&random);
  }
  decode(session, 0, &random);
  decode(session, 1, &random);
  vwd_session_release(session);
  return 0;
}
