/* What the Go side calls: the C engine's own headers, and a session with the reason where there is none. */
#ifndef SERVE_ENGINE_H
#define SERVE_ENGINE_H

#include <stdlib.h>

#include "batch.h"
#include "gguf.h"
#include "model.h"
#include "pool.h"
#include "tiny.h"
#include "tokenizer.h"

/* One function, so that the message is read on the thread that failed. */
static inline vwd_session *open_session(uint32_t threads, batch_error *why) {
  vwd_session *session = NULL;
  vwd_session_options options = VWD_SESSION_OPTIONS_INIT;
  options.device = VWD_DEVICE_CPU; /* the engine's memory is the host's */
  options.threads = threads;
  if (vwd_session_create(&options, &session) == VWD_OK) return session;
  vwd_last_error(why->text, sizeof why->text);
  return NULL;
}

/* A request is filled in C: Go may not pass a struct that points to its memory. */
static inline batch_admission admit(batch *b, const int32_t *prompt, int count, int max_new, int32_t stop, batch_how how,
                                    batch_sampling sampling, int64_t *id, batch_error *why) {
  const batch_request request = {.tokens = prompt, .count = count, .max_new = max_new, .stop = stop, .how = how, .sampling = sampling};
  return batch_admit(b, &request, id, why);
}

#endif
