/* Drafts from the text itself, and how many drafts are worth their verification. */
#ifndef ENGINE_LOOKUP_H
#define ENGINE_LOOKUP_H

#include <stdbool.h>
#include <stdint.h>

/* What followed the text's last three tokens, or two, when they last occurred: at most `most` tokens, and how many. */
int look_up(const int32_t *text, int count, int32_t *draft, int most);

/* The number of drafts, up to `most`, that gives most tokens in the time, if each is accepted with probability p behind accepted
 * ones: γ drafts give Σ_{j ≤ γ} p^j tokens in the time 1 + γ·cost. *rate is the tokens in time 1. */
int drafts_worth(float p, float cost, int most, float *rate);

/* --- Trees: what followed the last tokens in several places --- */

enum { LOOKUP_PLACES = 8, LOOKUP_NODES = 16 };

/* Where the text's last three tokens occurred before, and then where its last two did: the latest places first. */
typedef struct {
  int count;
  int next[LOOKUP_PLACES];     /* the token that followed, by its place in the text */
  float weight[LOOKUP_PLACES]; /* how much a place says of what follows now */
} occurrences;

void find_occurrences(const int32_t *text, int count, occurrences *out);

/* A tree of what followed in these places, and how many nodes it has beside the root, at most `most` and
 * LOOKUP_NODES − 1. Node 0 is the root, the text's last token; node n has token draft[n − 1] and the parent parents[n]. If the next token is one of those that followed with probability p, and
 * each of these as likely as its places have weight, a node is reached with the product of both along its path. The nodes that are reached
 * most often come first, as long as each gives more tokens in the time: one in 1, and `cost` for each node.
 * From node `narrow` on no branch begins or goes on: only a tree that has none has more nodes. *rate is the tokens in time 1. */
int grow_tree(const occurrences *places, const int32_t *text, int count, int most, int narrow, float p, float cost, int32_t *draft,
              int32_t *parents, float *rate);

/* How the places fared, now that the text has `count` tokens more: how many of them, one after the other, were among those that
 * followed. *refused: the one behind these was not, though some place had a token for it. */
int occurrences_fared(const occurrences *places, const int32_t *text, int before, int count, bool *refused);

#endif
