#define _POSIX_C_SOURCE 200809L
#include "pool.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>

/* A decode step makes over a hundred short runs: threads look for the next one for a moment before they sleep. */
enum { SPINS = 4000 };

typedef struct {
  pool *owner;
  pthread_t thread;
  int part;
} worker;

struct pool {
  int threads;
  worker *workers; /* [threads - 1]; the caller is the last part */
  pthread_mutex_t lock;
  pthread_cond_t begin, done;
  atomic_uint round;  /* raised to start a run, written under the lock */
  atomic_int pending; /* workers still in it */
  bool stop;
  int items;
  pool_work work;
  void *context;
};

static void run_part(pool *p, int part) {
  int begin = (int)((long long)p->items * part / p->threads),
      end = (int)((long long)p->items * (part + 1) / p->threads);
  if (begin < end) p->work(p->context, begin, end);
}

static unsigned next_round(pool *p, unsigned seen) {
  for (int i = 0; i < SPINS; i++)
    if (atomic_load_explicit(&p->round, memory_order_acquire) != seen) return seen + 1;
  pthread_mutex_lock(&p->lock);
  while (atomic_load_explicit(&p->round, memory_order_acquire) == seen) pthread_cond_wait(&p->begin, &p->lock);
  pthread_mutex_unlock(&p->lock);
  return seen + 1;
}

static void *work_loop(void *argument) {
  worker *self = argument;
  pool *p = self->owner;
  for (unsigned seen = 0;;) {
    seen = next_round(p, seen);
    if (p->stop) return NULL;
    run_part(p, self->part);
    if (atomic_fetch_sub_explicit(&p->pending, 1, memory_order_acq_rel) > 1) continue;
    pthread_mutex_lock(&p->lock);
    pthread_cond_signal(&p->done);
    pthread_mutex_unlock(&p->lock);
  }
}

static void start_round(pool *p) {
  pthread_mutex_lock(&p->lock);
  atomic_store_explicit(&p->pending, p->threads - 1, memory_order_relaxed);
  atomic_fetch_add_explicit(&p->round, 1, memory_order_release);
  pthread_cond_broadcast(&p->begin);
  pthread_mutex_unlock(&p->lock);
}

static void wait_for_workers(pool *p) {
  for (int i = 0; i < SPINS; i++)
    if (atomic_load_explicit(&p->pending, memory_order_acquire) == 0) return;
  pthread_mutex_lock(&p->lock);
  while (atomic_load_explicit(&p->pending, memory_order_acquire) > 0) pthread_cond_wait(&p->done, &p->lock);
  pthread_mutex_unlock(&p->lock);
}

pool *pool_new(int threads) {
  pool *p = calloc(1, sizeof *p);
  if (!p) return NULL;
  p->workers = calloc((size_t)threads, sizeof *p->workers);
  pthread_mutex_init(&p->lock, NULL);
  pthread_cond_init(&p->begin, NULL);
  pthread_cond_init(&p->done, NULL);
  for (p->threads = 1; p->workers && p->threads < threads; p->threads++) {
    worker *w = &p->workers[p->threads - 1];
    *w = (worker){.owner = p, .part = p->threads - 1};
    if (pthread_create(&w->thread, NULL, work_loop, w) != 0) break; /* fewer threads do the same work */
  }
  if (p->workers) return p;
  pool_free(p);
  return NULL;
}

void pool_free(pool *p) {
  if (!p) return;
  p->stop = true;
  start_round(p);
  for (int i = 0; i + 1 < p->threads; i++) pthread_join(p->workers[i].thread, NULL);
  pthread_cond_destroy(&p->begin);
  pthread_cond_destroy(&p->done);
  pthread_mutex_destroy(&p->lock);
  free(p->workers);
  free(p);
}

void pool_run(pool *p, int items, pool_work work, void *context) {
  p->items = items;
  p->work = work;
  p->context = context;
  start_round(p);
  run_part(p, p->threads - 1);
  wait_for_workers(p);
}
