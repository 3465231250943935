#include "lookup.h"

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
