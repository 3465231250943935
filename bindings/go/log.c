// The log of a session. Calls of the library are declared not to call back into Go (#cgo nocallback), which ends the program where one does; the
// first call that runs a kernel on a device logs that. So a line goes to Go on a thread of its own, for which the call waits: there are few lines.

#include <pthread.h>

#include "_cgo_export.h"

typedef struct {
  void *context;
  uint32_t level;
  char *text;
} line;

static void *hand_over(void *argument) {
  const line *of = argument;
  vanward_go_log(of->context, of->level, of->text);
  return NULL;
}

void vanward_go_log_line(void *context, uint32_t level, const char *text) {
  line of = {context, level, (char *)text};
  pthread_t thread;
  if (pthread_create(&thread, NULL, hand_over, &of) == 0) {
    pthread_join(thread, NULL);
  }
}
