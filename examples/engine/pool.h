/* A fixed set of threads that run one function over a range of items. */
#ifndef ENGINE_POOL_H
#define ENGINE_POOL_H

typedef struct pool pool;

/* Items [begin, end) of a range; called once per thread that has any. */
typedef void (*pool_work)(void *context, int begin, int end);

/* `threads` counts the caller, who works too. NULL on failure. */
pool *pool_new(int threads);
void pool_free(pool *p);

/* Cuts 0..items evenly, runs the parts and returns when all are done. */
void pool_run(pool *p, int items, pool_work work, void *context);

#endif
