/* Drafts from the text itself, and how many drafts are worth their verification. */
#ifndef ENGINE_LOOKUP_H
#define ENGINE_LOOKUP_H

#include <stdint.h>

/* What followed the text's last three tokens, or two, when they last occurred: at most `most` tokens, and how many. */
int look_up(const int32_t *text, int count, int32_t *draft, int most);

/* The number of drafts, up to `most`, that gives most tokens in the time, if each is accepted with probability p behind accepted
 * ones: γ drafts give Σ_{j ≤ γ} p^j tokens in the time 1 + γ·cost. *rate is the tokens in time 1. */
int drafts_worth(float p, float cost, int most, float *rate);

#endif
