/*
 * The speculation budget: times measured once, kept in a file, and what they pay for.
 *
 * Shown: a profile of a small grid, its file, which another shape does not get, and answers for contexts between and past those that
 * were measured. Which strategy pays differs from machine to machine; the answers say by how much it does or does not.
 */
#include "common.h"

enum { HQ = 8, HK = 2, D = 64, P = 16, S = 16, K = 8, MAX_DRAFT = 3 };

static vwd_budget_options shape_and_grid(void) {
  vwd_budget_options options = VWD_BUDGET_OPTIONS_INIT;
  options.query_heads = HQ;
  options.kv_heads = HK;
  options.key_dim = D;
  options.value_dim = D;
  options.dtype_code = FLOAT;
  options.dtype_bits = 32;
  options.page_size = P;
  options.block_size = S;
  options.method = VWD_SELECT_MINMAX;
  options.k = K;
  options.init_blocks = 1;
  options.local_blocks = 1;
  options.max_draft = MAX_DRAFT;
  options.contexts[0] = 128; /* a real grid reaches the contexts that an engine serves */
  options.contexts[1] = 512;
  options.batches[0] = 1;
  options.samples = 3;
  options.limit_bytes = 1 << 20;
  return options;
}

static void report(const vwd_budget *budget, uint32_t context) {
  vwd_budget_question question = VWD_BUDGET_QUESTION_INIT;
  question.context = context;
  question.acceptance = 0.8f;
  question.coverage_ratios[0] = 1; /* what guesses of these ratios cover */
  question.coverages[0] = 0.83f;
  question.coverage_ratios[1] = 1.5f;
  question.coverages[1] = 0.95f;
  vwd_budget_answer answer = VWD_BUDGET_ANSWER_INIT;
  CALL(vwd_budget_ask(budget, &question, &answer));

  printf("%4u tokens%s: dense %.1f us, selection %.1f, attention of %d blocks %.1f; ", (unsigned)context,
         answer.extrapolated ? " (extrapolated)" : "", answer.dense_us, answer.select_us, K, answer.attend_us);
  if (answer.pays == 0) {
    printf("nothing pays\n");
  } else {
    printf("sparse steps %.2f times as fast", answer.sparse_gain);
    if (answer.pays & VWD_BUDGET_PRR) printf(", guesses at r = %.2f %.2f times that", answer.ratio, answer.prr_gain);
    if (answer.pays & VWD_BUDGET_SELF) printf("; %u drafts: %.2f times as many tokens", (unsigned)answer.gamma, answer.self_gain);
    printf("\n");
  }
  CHECK(answer.dense_us > 0 && answer.select_us > 0 && answer.attend_us > 0);
  CHECK(answer.extrapolated == (context > 512));
  CHECK((answer.pays & VWD_BUDGET_SELF) == 0 ? answer.gamma == 0 : answer.gamma >= 1 && answer.gamma <= MAX_DRAFT);
  CHECK((answer.pays & VWD_BUDGET_PRR) == 0 ? answer.ratio == 0 : answer.prr_gain > 1);
  CHECK(answer.break_even_acceptance > 0 && answer.break_even_coverage >= 0);
}

int main(void) {
  vwd_session *session = cpu_session();
  vwd_budget_options options = shape_and_grid();

  vwd_budget *measured = NULL;
  CALL(vwd_budget_profile(session, &options, NULL, &measured));
  char path[64];
  snprintf(path, sizeof path, "budget-%p.safetensors", (void *)session);
  CALL(vwd_budget_save(measured, path));
  vwd_budget_release(measured);

  vwd_budget *loaded = NULL;
  CALL(vwd_budget_load(session, &options, path, &loaded));
  report(loaded, 128);
  report(loaded, 300);
  report(loaded, 4096);

  /* The times of another shape are no times of this one. */
  options.k = K + 1;
  vwd_budget *other = NULL;
  CHECK(vwd_budget_load(session, &options, path, &other) == VWD_ERROR_INVALID_ARGUMENT && other == NULL);
  char words[512];
  vwd_last_error(words, sizeof words);
  CHECK(strstr(words, "options.k: 9; expected 8, with which") != NULL);

  CHECK(remove(path) == 0);
  vwd_budget_release(loaded);
  vwd_session_release(session);
  return 0;
}
