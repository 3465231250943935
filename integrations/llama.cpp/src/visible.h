// What the mask of an attention says: which cells each query row sees.
#pragma once

#include "bits.h"
#include "ggml.h"

namespace vanward {

/**
 * Consecutive query rows of one stream, each of which sees what the row before sees and one cell more: a sequence's rows of this
 * step.
 */
struct RowGroup {
    /** Stream among those of the node. */
    int stream = 0;
    int first_row = 0;
    int rows = 0;
    /** What the first row sees, and what the last row sees. */
    Bits first, last;
    /** The cells that rows 1 … rows − 1 see and the row before does not. */
    std::vector<int32_t> added;
};

/**
 * Splits the rows of `mask`, [n_kv, ≥ rows, 1, streams] in float16, into groups. Returns false where the mask holds another number
 * than 0 and −∞: a bias, which is not a matter of visibility.
 */
bool split_rows(const ggml_tensor *mask, int rows, int streams, int64_t cells, std::vector<RowGroup> &groups);

}  // namespace vanward
