#include "pages.h"

#include <stdlib.h>
#include <string.h>

enum { NONE = -1 };

bool pages_init(pages *p, const model_shape *shape, int count) {
  *p = (pages){.layers = shape->layers,
               .kv_heads = shape->kv_heads,
               .head_dim = shape->head_dim,
               .count = count,
               .first_child = NONE};
  size_t elements = pages_layer(p, p->layers);
  p->k = calloc(elements, sizeof *p->k);
  p->v = calloc(elements, sizeof *p->v);
  p->page = calloc((size_t)count, sizeof *p->page);
  p->free_pages = calloc((size_t)count, sizeof *p->free_pages);
  if (!p->k || !p->v || !p->page || !p->free_pages) {
    pages_free(p);
    return false;
  }
  /* Handed out in a scattered order, as after hours of serving: nothing may rely on neighbouring pages. */
  for (int third = 0; third < 3; third++)
    for (int i = third; i < count; i += 3) p->free_pages[p->free_count++] = i;
  return true;
}

void pages_free(pages *p) {
  free(p->k);
  free(p->v);
  free(p->page);
  free(p->free_pages);
  *p = (pages){0};
}

/* The first page of those behind a parent. */
static int32_t *first_behind(pages *p, int32_t parent) { return parent == NONE ? &p->first_child : &p->page[parent].child; }

/* Forgets the known page that has been idle for longest. None is known behind it: its users would use it, too, and of the
 * idle ones the one in front is given back no earlier than those behind it. */
static int32_t evict(pages *p) {
  int32_t oldest = NONE;
  for (int32_t i = 0; i < p->count; i++)
    if (p->page[i].idle && p->page[i].child == NONE && (oldest == NONE || p->page[i].used < p->page[oldest].used)) oldest = i;
  if (oldest == NONE) return NONE;
  int32_t *link = first_behind(p, p->page[oldest].parent);
  while (*link != oldest) link = &p->page[*link].sibling;
  *link = p->page[oldest].sibling;
  p->page[oldest].known = p->page[oldest].idle = false;
  p->known_count--;
  p->idle_count--;
  p->evictions++;
  return oldest;
}

int pages_available(const pages *p) { return p->free_count + p->idle_count; }

int32_t pages_take(pages *p) {
  int32_t at = p->free_count > 0 ? p->free_pages[--p->free_count] : evict(p);
  if (at == NONE) return NONE;
  p->page[at].users = 1;
  p->page[at].summarised = NULL;
  return at;
}

static void use(pages *p, int32_t at) {
  if (p->page[at].idle) p->idle_count--;
  p->page[at].idle = false;
  p->page[at].users++;
}

void pages_leave(pages *p, int32_t at) {
  page *left = &p->page[at];
  if (--left->users > 0) return;
  if (!left->known) {
    p->free_pages[p->free_count++] = at;
    return;
  }
  left->idle = true;
  left->used = p->clock++;
  p->idle_count++;
}

static int common(const int32_t *a, const int32_t *b, int count) {
  int n = 0;
  while (n < count && a[n] == b[n]) n++;
  return n;
}

/* The page behind a parent that has most of the text's first tokens. */
static int32_t find(pages *p, int32_t parent, const int32_t *text, int count, int *same) {
  int32_t best = NONE;
  *same = 0;
  if (count > PAGE_TOKENS) count = PAGE_TOKENS;
  for (int32_t i = *first_behind(p, parent); i != NONE && *same < count; i = p->page[i].sibling) {
    int n = common(p->page[i].tokens, text, count);
    if (n > *same) *same = n, best = i;
  }
  return best;
}

int pages_share(pages *p, int32_t parent, const int32_t *text, int count, int32_t *table) {
  int shared = 0;
  for (; (shared + 1) * PAGE_TOKENS <= count; table[shared++] = parent) {
    int same;
    parent = find(p, parent, text + shared * PAGE_TOKENS, PAGE_TOKENS, &same);
    if (same < PAGE_TOKENS) break;
    use(p, parent);
  }
  return shared;
}

int pages_copy_part(pages *p, int32_t to, int32_t parent, const int32_t *text, int count) {
  int same;
  int32_t from = find(p, parent, text, count, &same);
  size_t row = (size_t)p->kv_heads * (size_t)p->head_dim, block = PAGE_TOKENS * row;
  for (int l = 0; same > 0 && l < p->layers; l++) {
    size_t layer = pages_layer(p, l);
    memcpy(p->k + layer + (size_t)to * block, p->k + layer + (size_t)from * block, (size_t)same * row * sizeof *p->k);
    memcpy(p->v + layer + (size_t)to * block, p->v + layer + (size_t)from * block, (size_t)same * row * sizeof *p->v);
  }
  return same;
}

int32_t pages_publish(pages *p, int32_t at, int32_t parent, const int32_t *text) {
  int same;
  int32_t twin = find(p, parent, text, PAGE_TOKENS, &same), *first = first_behind(p, parent);
  if (same == PAGE_TOKENS) {
    use(p, twin);
    pages_leave(p, at);
    return twin;
  }
  page *new = &p->page[at];
  new->known = true;
  new->parent = parent;
  new->child = NONE;
  new->sibling = *first;
  *first = at;
  memcpy(new->tokens, text, sizeof new->tokens);
  p->known_count++;
  return at;
}
