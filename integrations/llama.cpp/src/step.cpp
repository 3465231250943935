#include "step.h"

#include <algorithm>
#include <cstring>

namespace vanward {

void Description::add_place(const ggml_tensor &tensor) {
    add(tensor.data);
    add(static_cast<int>(tensor.type));
    for (int i = 0; i < GGML_MAX_DIMS; ++i) {
        add(tensor.ne[i]);
        add(static_cast<uint64_t>(tensor.nb[i]));
    }
}

void Description::add(const ggml_tensor &node) {
    add(static_cast<int>(node.op));
    add(node.flags);
    add_place(node);
    constexpr size_t PARAMETERS = sizeof node.op_params / (sizeof(uint64_t));
    static_assert(sizeof node.op_params % sizeof(uint64_t) == 0, "parameters are whole words");
    const size_t at = words_.size();
    words_.resize(at + PARAMETERS);
    memcpy(words_.data() + at, node.op_params, sizeof node.op_params);
    for (const ggml_tensor *source : node.src) {
        add(source != nullptr);
        if (source != nullptr) {
            add_place(*source);
        }
    }
}

Step &Steps::of(const Shape &shape) {
    auto found = std::find_if(steps_.begin(), steps_.end(), [&](const auto &each) { return each->shape() == shape; });
    if (found == steps_.end()) {
        if (steps_.size() == KEPT) {
            steps_.pop_back();
        }
        steps_.push_back(std::make_unique<Step>(shape));
        found = steps_.end() - 1;
    }
    std::rotate(steps_.begin(), found, found + 1);
    return *steps_.front();
}

}  // namespace vanward
