/*
 * Speculative decoding, the part after the target model has run: which draft tokens hold, and their KV rows in one run.
 *
 * Shown: vwd_verify_pack gives, for each sequence, the length of the common prefix, the token that follows it and the
 * rows of the accepted tokens behind each other; vwd_verify followed by vwd_pack gives the same. Stop tokens and lengths
 * end requests in the same call. Drafts of different lengths may also lie one after the other.
 */
#include "common.h"

enum { B = 3, GAMMA = 4, H = 2, D = 8, ROW = H * D, CAP = B * GAMMA };

int main(void) {
  vwd_session *session = cpu_session();

  int32_t draft[B][GAMMA] = {{11, 12, 13, 14}, {21, 22, 23, 24}, {31, 32, 33, 34}};
  /* The target agrees with 2 of sequence 0, with all of sequence 1; of sequence 2 only 3 tokens were drafted. */
  int32_t target[B][GAMMA + 1] = {{11, 12, 99, 14, 15}, {21, 22, 23, 24, 25}, {31, 32, 33, 98, 97}};
  int32_t draft_lens[B] = {4, 4, 3};
  const int32_t expected_accepted[B] = {2, 4, 3};
  const int32_t expected_next[B] = {99, 25, 98};
  const int32_t expected_committed[B][GAMMA + 1] = {{11, 12, 99, -1, -1}, {21, 22, 23, 24, 25}, {31, 32, 33, 98, -1}};

  /* KV rows that the target model wrote for the draft tokens. */
  float k[B][GAMMA][ROW], v[B][GAMMA][ROW], packed_k[CAP][ROW], packed_v[CAP][ROW];
  uint64_t seed = 1;
  for (int i = 0; i < B; i++) {
    for (int t = 0; t < GAMMA; t++) {
      for (int c = 0; c < ROW; c++) {
        k[i][t][c] = uniform(&seed);
        v[i][t][c] = uniform(&seed);
      }
    }
  }

  /* Any number of tensors goes in one call: K and V here, those of every layer in an engine. */
  vwd_tensor rows[] = {f32(&k[0][0][0], 4, B, GAMMA, H, D), f32(&v[0][0][0], 4, B, GAMMA, H, D)};
  vwd_tensor packed[] = {f32(&packed_k[0][0], 3, CAP, H, D), f32(&packed_v[0][0], 3, CAP, H, D)};
  int32_t accepted[B], next_token[B], offsets[B + 1], committed[B][GAMMA + 1];

  vwd_verify_pack_args args = VWD_VERIFY_PACK_ARGS_INIT;
  args.draft = i32(&draft[0][0], 2, B, GAMMA);
  args.target = i32(&target[0][0], 2, B, GAMMA + 1);
  args.draft_lens = i32(draft_lens, 1, B);
  args.accepted = i32(accepted, 1, B);
  args.next_token = i32(next_token, 1, B);
  args.committed = i32(&committed[0][0], 2, B, GAMMA + 1);
  args.offsets = i32(offsets, 1, B + 1);
  args.tensor_count = 2;
  args.rows = rows;
  args.packed = packed;
  CALL(vwd_verify_pack(session, &args, NULL));

  CHECK(memcmp(accepted, expected_accepted, sizeof accepted) == 0);
  CHECK(memcmp(next_token, expected_next, sizeof next_token) == 0);
  CHECK(memcmp(committed, expected_committed, sizeof committed) == 0);
  int row = 0;
  for (int i = 0; i < B; i++) {
    CHECK(offsets[i] == row);
    for (int t = 0; t < accepted[i]; t++, row++) {
      CHECK(memcmp(packed_k[row], k[i][t], sizeof k[i][t]) == 0);
      CHECK(memcmp(packed_v[row], v[i][t], sizeof v[i][t]) == 0);
    }
    printf("sequence %d: %d of %d draft tokens hold, then token %d\n", i, accepted[i], draft_lens[i], next_token[i]);
  }
  CHECK(offsets[B] == row);

  /* The same in two calls. */
  int32_t accepted_alone[B], next_alone[B], offsets_alone[B + 1];
  float packed_alone[CAP][ROW];
  vwd_verify_args verify = VWD_VERIFY_ARGS_INIT;
  verify.draft = args.draft;
  verify.target = args.target;
  verify.draft_lens = args.draft_lens;
  verify.accepted = i32(accepted_alone, 1, B);
  verify.next_token = i32(next_alone, 1, B);
  CALL(vwd_verify(session, &verify, NULL));

  vwd_tensor packed_alone_view = f32(&packed_alone[0][0], 3, CAP, H, D);
  vwd_pack_args pack = VWD_PACK_ARGS_INIT;
  pack.tensor_count = 1;
  pack.rows = rows;
  pack.packed = &packed_alone_view;
  pack.accepted = verify.accepted;
  pack.offsets = i32(offsets_alone, 1, B + 1);
  CALL(vwd_pack(session, &pack, NULL));

  CHECK(memcmp(accepted_alone, accepted, sizeof accepted) == 0);
  CHECK(memcmp(next_alone, next_token, sizeof next_token) == 0);
  CHECK(memcmp(offsets_alone, offsets, sizeof offsets) == 0);
  CHECK(memcmp(packed_alone, packed_k, (size_t)row * sizeof packed_k[0]) == 0);

  /* Sequence 0 ends at its stop token, the second that it commits; sequence 1 may have three tokens more. What the cut
   * drops is not packed, and there is no next token then. */
  int32_t stop[1] = {12}, remaining[B] = {100, 3, 100}, committed_len[B];
  uint8_t finish[B];
  args.stop = i32(stop, 1, 1);
  args.remaining = i32(remaining, 1, B);
  args.committed_len = i32(committed_len, 1, B);
  args.finish = array(finish, UNSIGNED, 8, 1, B);
  CALL(vwd_verify_pack(session, &args, NULL));
  CHECK(accepted[0] == 2 && committed_len[0] == 2 && next_token[0] == -1 && finish[0] == VWD_FINISH_STOP);
  CHECK(accepted[1] == 3 && committed_len[1] == 3 && next_token[1] == -1 && finish[1] == VWD_FINISH_LENGTH);
  CHECK(accepted[2] == 3 && committed_len[2] == 4 && next_token[2] == 98 && finish[2] == VWD_FINISH_NONE);
  CHECK(offsets[B] == 8 && memcmp(packed_k[2], k[1][0], 3 * sizeof k[1][0]) == 0);

  /* The same drafts one after the other, of 4, 4 and 3 tokens, with the tokens that follow them in a tensor of their own. */
  int32_t flat_draft[11] = {11, 12, 13, 14, 21, 22, 23, 24, 31, 32, 33};
  int32_t flat_target[11] = {11, 12, 99, 14, 21, 22, 23, 24, 31, 32, 33};
  int32_t draft_ends[B] = {4, 8, 11}, bonus[B] = {15, 25, 98};
  vwd_verify_args flat = VWD_VERIFY_ARGS_INIT;
  flat.draft = i32(flat_draft, 1, 11);
  flat.target = i32(flat_target, 1, 11);
  flat.draft_ends = i32(draft_ends, 1, B);
  flat.bonus = i32(bonus, 1, B);
  flat.accepted = i32(accepted, 1, B);
  flat.next_token = i32(next_token, 1, B);
  CALL(vwd_verify(session, &flat, NULL));
  CHECK(memcmp(accepted, expected_accepted, sizeof accepted) == 0);
  CHECK(memcmp(next_token, expected_next, sizeof next_token) == 0);

  vwd_session_release(session);
  return 0;
}
