#include "operations.h"

#include "ggml_calls.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <initializer_list>

namespace vanward {

Kind kind_of(const ggml_tensor *op) {
    static std::atomic<Kind> kinds[256];
    const size_t number = static_cast<size_t>(op->op) & 255;
    Kind kind = kinds[number].load(std::memory_order_relaxed);
    if (kind == Kind::unknown) {
        const char *name = ggml.ggml_op_name(op->op);
        auto is = [&](std::initializer_list<const char *> names) {
            return std::any_of(names.begin(), names.end(), [&](const char *each) { return strcmp(each, name) == 0; });
        };
        kind = is({"FLASH_ATTN_EXT"})                                    ? Kind::attention
               : is({"SET_ROWS"})                                        ? Kind::write
               : is({"ROPE"})                                            ? Kind::rotation
               : is({"MUL_MAT_ID"})                                      ? Kind::experts
               : is({"NONE", "VIEW", "RESHAPE", "PERMUTE", "TRANSPOSE"}) ? Kind::view
                                                                         : Kind::other;
        kinds[number].store(kind, std::memory_order_relaxed);
    }
    return kind;
}

bool is_input(const ggml_tensor *tensor) { return strcmp(ggml.ggml_op_name(tensor->op), "NONE") == 0; }

int end_of_queries(ggml_tensor **nodes, int from, int to, const ggml_tensor *q) {
    const ggml_tensor *written = q->view_src != nullptr ? q->view_src : q;
    bool others_follow = false;
    for (int i = to; i > from; --i) {
        const ggml_tensor *node = nodes[i - 1];
        if (kind_of(node) == Kind::view) {
            continue;
        }
        if (node == written || node->view_src == written) {
            return others_follow ? i : 0;
        }
        others_follow = true;
    }
    return 0;
}

}  // namespace vanward
