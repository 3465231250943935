#include "lookup.h"

#include <math.h>
#include <stddef.h>
#include <string.h>

int look_up(const int32_t *text, int count, int32_t *draft, int most) {
  for (int size = 3; size >= 2; size--) {
    const int32_t *ending = text + count - size;
    for (int at = count - size - 1; at >= 0; at--) {
      if (memcmp(text + at, ending, (size_t)size * sizeof *ending) != 0) continue;
      const int found = count - at - size < most ? count - at - size : most;
      if (found > 0) memcpy(draft, text + at + size, (size_t)found * sizeof *draft);
      return found > 0 ? found : 0;
    }
  }
  return 0;
}

int drafts_worth(float p, float cost, int most, float *rate) {
  float tokens = 1, power = 1;
  int best = 0;
  *rate = 1;
  for (int n = 1; n <= most; n++) {
    tokens += power *= p;
    if (tokens / (1 + (float)n * cost) > *rate) *rate = tokens / (1 + (float)n * cost), best = n;
  }
  return best;
}

/* --- Trees --- */

static void add_occurrences(const int32_t *text, int count, int size, occurrences *out) {
  const int32_t *ending = text + count - size;
  for (int at = count - size - 1; at >= 0 && out->count < LOOKUP_PLACES; at--) {
    if (memcmp(text + at, ending, (size_t)size * sizeof *ending) != 0) continue;
    const bool longer = at > 0 && count > size && text[at - 1] == ending[-1];
    if (size == 2 && longer) continue; /* found by three tokens */
    /* These weights name the next token best among a few that were tried on licences, documents and source code. */
    out->weight[out->count] = (size == 3 ? 4.0f : 1.0f) / sqrtf((float)(1 + out->count));
    out->next[out->count++] = at + size;
  }
}

void find_occurrences(const int32_t *text, int count, occurrences *out) {
  out->count = 0;
  if (count > 3) add_occurrences(text, count, 3, out);
  if (count > 2) add_occurrences(text, count, 2, out);
}

/* A set of places is a word of bits. Those of it that go on with the token that place `first` has at a depth, and their weight. */
static uint32_t that_follow(const occurrences *o, const int32_t *text, int count, uint32_t from, int first, int depth, float *weight) {
  uint32_t same = 0;
  *weight = 0;
  for (int i = 0; i < o->count; i++) {
    const bool follows = from >> i & 1 && o->next[i] + depth < count && text[o->next[i] + depth] == text[o->next[first] + depth];
    if (follows) same |= 1u << i, *weight += o->weight[i];
  }
  return same;
}

/* A node, and what may become its next child. */
typedef struct {
  int depth;
  float reached;
  uint32_t from, left; /* places whose text leads here; of these, those that no child goes on with */
  int child;           /* a place that the child with most weight comes from; −1: none is left */
  float child_reached;
} branch;

static void find_child(const occurrences *o, const int32_t *text, int count, float p, branch *v) {
  float all = 0, most = 0;
  v->child = -1;
  for (int i = 0; i < o->count; i++) {
    if (!(v->from >> i & 1) || o->next[i] + v->depth >= count) continue;
    float weight = 0;
    if (v->left >> i & 1) that_follow(o, text, count, v->left, i, v->depth, &weight);
    if (weight > most) most = weight, v->child = i;
    all += o->weight[i];
  }
  v->child_reached = v->child < 0 ? 0 : v->reached * p * most / all;
}

int grow_tree(const occurrences *o, const int32_t *text, int count, int most, int narrow, float p, float cost, int32_t *draft,
              int32_t *parents, float *rate) {
  branch nodes[LOOKUP_NODES] = {{.depth = 0, .reached = 1, .from = (1u << o->count) - 1, .left = (1u << o->count) - 1}};
  float tokens = 1;
  int n = 1;
  find_child(o, text, count, p, &nodes[0]);
  parents[0] = -1;
  for (; n <= most && n < LOOKUP_NODES; n++) {
    int best = n < narrow ? 0 : n - 1;
    for (int v = best; v < n; v++)
      if (nodes[v].child_reached > nodes[best].child_reached) best = v;
    branch *parent = &nodes[best];
    const float reached = parent->child_reached, time = 1 + (float)(n - 1) * cost;
    const int place = parent->child, depth = parent->depth;
    if (place < 0 || (n >= narrow && depth < n - 1)) break;
    if (reached * time <= tokens * cost) break; /* (tokens + reached) / (time + cost) would be no more than tokens / time */
    float weight;
    const uint32_t from = that_follow(o, text, count, parent->left, place, depth, &weight);
    draft[n - 1] = text[o->next[place] + depth];
    parents[n] = best;
    nodes[n] = (branch){.depth = depth + 1, .reached = reached, .from = from, .left = from};
    find_child(o, text, count, p, &nodes[n]);
    parent->left &= ~from;
    find_child(o, text, count, p, parent);
    tokens += reached;
  }
  *rate = tokens / (1 + (float)(n - 1) * cost);
  return n - 1;
}

int occurrences_fared(const occurrences *o, const int32_t *text, int before, int count, bool *refused) {
  uint32_t from = (1u << o->count) - 1;
  *refused = false;
  for (int n = 0; n < count; n++) {
    uint32_t next = 0, goes_on = 0;
    for (int i = 0; i < o->count; i++) {
      if (!(from >> i & 1) || o->next[i] + n >= before) continue;
      goes_on |= 1u << i;
      if (text[o->next[i] + n] == text[before + n]) next |= 1u << i;
    }
    if (!next) return *refused = goes_on != 0, n;
    from = next;
  }
  return count;
}
