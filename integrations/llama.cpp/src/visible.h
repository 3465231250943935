// What the mask of an attention says: which cells each query row sees.
#pragma once

#include "bits.h"
#include "ggml.h"
#include "inputs.h"

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
    const Bits *first = nullptr, *last = nullptr;
    /** The cells that rows 1 … rows − 1 see and the row before does not. */
    std::vector<int32_t> added;
};

/**
 * The rows of a mask, [cells, ≥ rows, 1, planes] in float16. From step to step few entries change: what did not is compared with what it was, and not
 * read again.
 */
class Visible {
  public:
    /** Follows the mask of a node of so many streams. Returns whether it is another one than before. `kept`: what it lies in, or NULL. */
    bool follow(const ggml_tensor *mask, int rows, int streams, int64_t cells, const Kept *kept = nullptr);
    /** False where the mask holds another number than 0 and −∞: a bias, which is not a matter of visibility. */
    bool is_known() const { return is_known_; }
    /** The rows in groups, until they are followed again. */
    std::vector<RowGroup> groups(int streams) const;

  private:
    bool is_known_ = false;
    int rows_of_plane_ = 0, planes_ = 0;
    int64_t cells_ = 0;
    std::vector<uint16_t> entries_;
    std::vector<Bits> rows_;
    /** What the mask lay in, its version, and the strides of rows and planes in it. */
    uint64_t kept_name_ = 0, kept_version_ = 0;
    size_t kept_strides_[2] = {};
};

}  // namespace vanward
