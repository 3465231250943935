/* Pages of keys and values, and which of them are known: full ones that stand for the tokens that they hold and all before
 * these, so that another sequence that begins so shares them. A known page that no sequence uses stays until its room is
 * needed; the one that was used least recently goes first. */
#ifndef ENGINE_PAGES_H
#define ENGINE_PAGES_H

#include <stdbool.h>
#include <stdint.h>

#include "model.h"

enum { PAGE_TOKENS = 16 };

/* Known pages are a tree: a child follows its parent in the text of a sequence. −1 is none. */
typedef struct {
  int32_t users; /* sequences; whoever uses a known page uses those before it */
  int32_t parent, child, sibling;
  bool known, idle; /* idle: known, and without users */
  int64_t used;     /* when the last user left */
  const void *summarised; /* whose summaries of it are made: those that hold for its tokens */
  int32_t tokens[PAGE_TOKENS];
} page;

typedef struct {
  int layers, kv_heads, head_dim, count;
  uint16_t *k, *v; /* [layers, count, PAGE_TOKENS, kv_heads, head_dim] float16 */
  page *page;
  int32_t *free_pages; /* a stack */
  int free_count, idle_count, known_count;
  int32_t first_child; /* of the tree's root */
  int64_t clock, evictions;
} pages;

bool pages_init(pages *p, const model_shape *shape, int count);
void pages_free(pages *p);

/* Pages that pages_take can give. */
int pages_available(const pages *p);
/* A page with one user; −1 if none is left. */
int32_t pages_take(pages *p);
void pages_leave(pages *p, int32_t at);

/* Shares the known pages that the text behind `parent` begins with, at most `count` tokens of it: fills table and returns how
 * many pages. */
int pages_share(pages *p, int32_t parent, const int32_t *text, int count, int32_t *table);
/* Copies to page `to` what a known page behind `parent` has of the text that follows there: the number of tokens. */
int pages_copy_part(pages *p, int32_t to, int32_t parent, const int32_t *text, int count);
/* Makes a full page known, whose tokens are the text behind `parent`. Where such a page is known already, that one is
 * shared instead, and `at` given back: the result is the page to use. */
int32_t pages_publish(pages *p, int32_t at, int32_t parent, const int32_t *text);

/* Elements ahead of a layer's first page. */
static inline size_t pages_layer(const pages *p, int layer) {
  return (size_t)layer * (size_t)p->count * PAGE_TOKENS * (size_t)p->kv_heads * (size_t)p->head_dim;
}

#endif
