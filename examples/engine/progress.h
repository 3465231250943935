#ifndef ENGINE_PROGRESS_H
#define ENGINE_PROGRESS_H

/* Called after every step, and once more with done = total at the end. */
typedef void (*progress_fn)(void *context, int done, int total);

#endif
