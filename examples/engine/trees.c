/* Draft trees by prompt lookup: what followed the text's last tokens in several places, verified at once. */
#include <string.h>

#include "batch_inside.h"

/* Tokens that attention takes together. A node has the bits that its text has without drafts where each token of its path lies in one
 * tile, written as a node and moved to where the text has it (docs/trees.md). */
enum { TILE = 64 };

float trees_plan(batch *b, int slot, int most) {
  sequence *s = &b->slots[slot];
  float rate;
  find_occurrences(s->text, s->count, &s->places);
  s->drafts = grow_tree(&s->places, s->text, s->count, most, TILE - (s->count - 1) % TILE, b->acceptance[b->o.rows + slot],
                        b->o.position_cost, s->draft, s->parents, &rate);
  return rate;
}

/* Nodes of the path that are not on the first branch, which goes from each node to its first child. */
static int off_first(const sequence *s, const int32_t *path, int accepted) {
  for (int j = 1; j <= accepted; j++)
    for (int n = path[j - 1] + 1; n < path[j]; n++)
      if (s->parents[n] == path[j - 1]) return accepted - j + 1;
  return 0;
}

static bool is_branched(const sequence *s) {
  for (int n = 2; n <= s->drafts; n++)
    if (s->parents[n] != n - 1) return true;
  return false;
}

bool trees_verify(batch *b, const group *g, const float *logits, draws *d, int width) {
  const int first = g->first_member, batch = g->batch, nodes = g->positions;
  int32_t path[MAX_ROWS * (BATCH_MAX_DRAFTS + 1)];
  for (int n = first; n < first + batch; n++) d->remaining[n] = b->slots[b->member_slot[n]].limit - b->slots[b->member_slot[n]].count;
  vwd_verify_tree_args verify = VWD_VERIFY_TREE_ARGS_INIT;
  verify.walk = VWD_WALK_COUPLED; /* greedy where the temperature is 0 */
  verify.tokens = TENSOR(b->tokens + g->first, INT32, batch, nodes);
  verify.parents = TENSOR(b->parents + g->first, INT32, batch, nodes);
  verify.logits = TENSOR(logits, FLOAT32, batch, nodes, b->shape.vocab);
  verify.temperature = TENSOR(d->temperature + first, FLOAT32, batch);
  verify.top_k = TENSOR(d->top_k + first, INT32, batch);
  verify.top_p = TENSOR(d->top_p + first, FLOAT32, batch);
  verify.min_p = TENSOR(d->min_p + first, FLOAT32, batch);
  verify.seeds = TENSOR(d->seeds + first, UINT64, batch);
  verify.positions = TENSOR(d->positions + first, INT32, batch);
  verify.stop = TENSOR(d->stop + first, INT32, batch, 1);
  verify.remaining = TENSOR(d->remaining + first, INT32, batch);
  verify.next_token = TENSOR(d->next + first, INT32, batch);
  verify.accepted = TENSOR(d->accepted + first, INT32, batch);
  verify.committed = TENSOR(d->committed + (size_t)first * (size_t)(width + 1), INT32, batch, width + 1);
  verify.committed_len = TENSOR(d->committed_len + first, INT32, batch);
  verify.finish = TENSOR(d->finish + first, UINT8, batch);
  verify.path = TENSOR(path, INT32, batch, width + 1);
  if (!batch_called(vwd_verify_tree(b->session, &verify, NULL), "vwd_verify_tree", &b->error)) return false;

  if (!b->store->compact(b, g, verify.path, verify.accepted)) return false;

  for (int n = 0; n < batch; n++) {
    const sequence *s = &b->slots[b->member_slot[first + n]];
    b->n.branched += is_branched(s);
    b->n.off_first += off_first(s, path + n * (width + 1), d->accepted[first + n]);
  }
  return true;
}
