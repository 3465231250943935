/*
 * A session, and what a failed call says.
 *
 * Shown: a session tells what it runs on; a call that fails returns a status, names the argument, what it found and what
 * it expected, and writes nothing; a GPU that is absent is a status, not an abort.
 */
#include "common.h"

/* The last call failed with this status, and its message holds these words. */
static void expect(vwd_status status, vwd_status expected, const char *words) {
  char message[512];
  size_t length = vwd_last_error(message, sizeof message);
  CHECK(status == expected);
  CHECK(length == strlen(message));
  if (strstr(message, words) == NULL) {
    fprintf(stderr, "the message does not mention '%s': %s\n", words, message);
    exit(1);
  }
  printf("status %d: %s\n", (int)status, message);
}

int main(void) {
  /* The header this was compiled with and the library it runs with agree. */
  CHECK(vwd_abi_version() == VWD_ABI_VERSION);
  CHECK(vwd_last_error(NULL, 0) == 0);

  vwd_session_options options = VWD_SESSION_OPTIONS_INIT;
  options.device = VWD_DEVICE_CPU;
  options.threads = 2;
  options.pinned_limit = 1 << 20;
  vwd_session *session = NULL;
  CALL(vwd_session_create(&options, &session));

  vwd_session_details details = VWD_SESSION_DETAILS_INIT;
  CALL(vwd_session_info(session, &details));
  CHECK(details.device == VWD_DEVICE_CPU);
  CHECK(details.threads == 2);
  printf("vanward %s on %s, %u threads\n", vwd_version(), details.device_name, (unsigned)details.threads);

  /* A shape that does not fit: the message names it, the outputs stay as they were. */
  int32_t draft[2][3] = {{1, 2, 3}, {4, 5, 6}}, target[2][4] = {{1, 2, 3, 4}, {4, 5, 6, 7}};
  int32_t accepted[2] = {-7, -7}, next_token[2] = {-7, -7};
  vwd_verify_args args = VWD_VERIFY_ARGS_INIT;
  args.draft = i32(&draft[0][0], 2, 2, 3);
  args.target = i32(&target[0][0], 2, 2, 3);
  args.accepted = i32(accepted, 1, 2);
  args.next_token = i32(next_token, 1, 2);
  expect(vwd_verify(session, &args, NULL), VWD_ERROR_INVALID_ARGUMENT, "target");
  CHECK(accepted[0] == -7 && accepted[1] == -7 && next_token[0] == -7 && next_token[1] == -7);

  /* The message stays until the next failure and is cut to the buffer. */
  args.target = i32(&target[0][0], 2, 2, 4);
  CALL(vwd_verify(session, &args, NULL));
  CHECK(accepted[0] == 3 && next_token[0] == 4);
  char cut[16];
  CHECK(vwd_last_error(cut, sizeof cut) > sizeof cut);
  CHECK(strlen(cut) < sizeof cut && strncmp(cut, "vwd_verify: tar", 15) == 0);

  /* An argument that is missing, a struct that was not initialised, an output that overlaps an input. */
  args.accepted.data = NULL;
  expect(vwd_verify(session, &args, NULL), VWD_ERROR_INVALID_ARGUMENT, "accepted");
  args.accepted.data = accepted;
  args.struct_size = 0;
  expect(vwd_verify(session, &args, NULL), VWD_ERROR_INVALID_ARGUMENT, "struct_size");
  args.struct_size = sizeof args;
  args.accepted.data = draft;
  expect(vwd_verify(session, &args, NULL), VWD_ERROR_INVALID_ARGUMENT, "overlap");
  expect(vwd_verify(NULL, &args, NULL), VWD_ERROR_INVALID_ARGUMENT, "session");

  /* Host memory from the session's pool, up to its limit; what was handed out stays valid. */
  void *memory = NULL, *more = NULL;
  CALL(vwd_pinned_alloc(session, 1 << 20, &memory));
  memset(memory, 1, 1 << 20);
  expect(vwd_pinned_alloc(session, 1, &more), VWD_ERROR_OUT_OF_MEMORY, "limit");
  CHECK(more == NULL);
  CALL(vwd_pinned_free(session, memory, NULL));

  /* A CUDA session works or says why not. */
  options.device = VWD_DEVICE_CUDA;
  vwd_session *cuda = NULL;
  vwd_status status = vwd_session_create(&options, &cuda);
  if (status != VWD_OK) {
    expect(status, VWD_ERROR_UNAVAILABLE, "");
    CHECK(cuda == NULL);
  }
  vwd_session_release(cuda); /* NULL is a no-op */
  vwd_session_release(session);
  return 0;
}
