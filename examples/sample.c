/*
 * Sampling with drafts and without: one call for both, and one text for a seed.
 *
 * Shown: vwd_verify_sample draws a text token by token, at a temperature and with top-p. The same seed gives the same text when a
 * drafter guesses four tokens at a time, whatever it guesses; good guesses take fewer steps. A stop token ends it.
 */
#include "common.h"

enum { V = 1000, GAMMA = 4, LENGTH = 60, STOP = 7 };

/* A toy of a language model: logits that follow from the token before. */
static void model(int64_t token, float logits[V]) {
  uint64_t seed = (uint64_t)token * 2654435761u + 1;
  for (int j = 0; j < V; j++) logits[j] = 6 * uniform(&seed);
  logits[(token * 31 + 17) % V] += 8;
}

/* Samples until a stop token or LENGTH tokens, with `drafts` guesses a step. Returns how many tokens there are. */
static int generate(vwd_session *session, int drafts, int64_t text[LENGTH], int *steps) {
  static float logits[GAMMA + 1][V];
  int64_t token = 1, stop = STOP, draft[GAMMA], committed[GAMMA + 1], next, seed = 2026, position;
  float temperature = 0.9f, top_p = 0.95f;
  int32_t remaining, len;
  uint8_t finish = VWD_FINISH_NONE;

  vwd_verify_sample_args args = VWD_VERIFY_SAMPLE_ARGS_INIT;
  args.draft = array(draft, SIGNED, 64, 2, 1, drafts);
  args.target = f32(&logits[0][0], 3, 1, drafts + 1, V);
  args.temperature = f32(&temperature, 1, 1);
  args.top_p = f32(&top_p, 1, 1);
  args.seeds = array(&seed, SIGNED, 64, 1, 1);
  args.positions = array(&position, SIGNED, 64, 1, 1);
  args.stop = array(&stop, SIGNED, 64, 1, 1);
  args.remaining = i32(&remaining, 1, 1);
  args.next_token = array(&next, SIGNED, 64, 1, 1);
  args.committed = array(committed, SIGNED, 64, 2, 1, drafts + 1);
  args.committed_len = i32(&len, 1, 1);
  args.finish = array(&finish, UNSIGNED, 8, 1, 1);

  int n = 0;
  for (*steps = 0; finish == VWD_FINISH_NONE; ++*steps) {
    /* The drafter knows the likeliest successor; the target's rows follow from what it guessed. */
    int64_t before = token;
    for (int r = 0; r <= drafts; r++) {
      model(before, logits[r]);
      before = (before * 31 + 17) % V;
      if (r < drafts) draft[r] = before;
    }
    position = n;
    remaining = LENGTH - n;
    CALL(vwd_verify_sample(session, &args, NULL));
    CHECK(len >= 1);
    for (int r = 0; r < len; r++) text[n++] = token = committed[r];
  }
  CHECK(finish == (token == STOP ? VWD_FINISH_STOP : VWD_FINISH_LENGTH));
  return n;
}

int main(void) {
  vwd_session *session = cpu_session();
  int64_t plain[LENGTH], drafted[LENGTH];
  int plain_steps, steps;
  int n = generate(session, 0, plain, &plain_steps);
  CHECK(plain_steps == n);
  for (int drafts = 1; drafts <= GAMMA; drafts++) {
    CHECK(generate(session, drafts, drafted, &steps) == n);
    CHECK(memcmp(drafted, plain, (size_t)n * sizeof plain[0]) == 0);
    CHECK(steps < plain_steps);
    printf("%d draft tokens: the same %d tokens in %d steps\n", drafts, n, steps);
  }
  vwd_session_release(session);
  return 0;
}
