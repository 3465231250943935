// Attention over a cache on the wrapped device of apart.cpp, asked for without llama.cpp: in each case something writes the mask, or the numbers of
// the rows, and the next step has to see what is there. VANWARD_GGML_CHECK compares it with what the device has.

#include "ggml-backend-impl.h"

#include <cstdio>
#include <cstring>
#include <functional>
#include <vector>

#define CHECK(what)                                           \
    do {                                                      \
        if (!(what)) {                                        \
            printf("line %d: not so: %s\n", __LINE__, #what); \
            return 1;                                         \
        }                                                     \
    } while (0)

namespace {

constexpr int64_t DIM = 32, HEADS = 2, CELLS = 256, ROWS = 2;
constexpr size_t CACHE_BYTES = DIM * HEADS * CELLS * 2, PIECE = 4096;
constexpr uint16_t HIDDEN = 0xfc00;

uint64_t count_of(const char *name) {
    static void *found = ggml_backend_reg_get_proc_address(ggml_backend_reg_by_name("Vanward"), "vanward_ggml_counter");
    return reinterpret_cast<uint64_t (*)(const char *)>(found)(name);
}

/** A layer with its cache, and a step of two rows of one sequence. */
struct Example {
    ggml_backend_t backend;
    ggml_context *context;
    ggml_backend_buffer_t cache, inputs = nullptr;
    ggml_tensor *keys, *values, *rows, *numbers, *mask, *other_mask, *queries, *write_keys, *write_values, *attention, *covering;
    ggml_cgraph *graph, *covering_graph;
    int64_t tokens = 100;
    std::vector<uint16_t> entries = std::vector<uint16_t>(CELLS * ROWS);

    Example() {
        ggml_backend_dev_t device = ggml_backend_reg_dev_get(ggml_backend_reg_by_name("Vanward"), 0);
        backend = ggml_backend_dev_init(device, nullptr);
        context = ggml_init({1 << 20, nullptr, true});
        keys = ggml_new_tensor_3d(context, GGML_TYPE_F16, DIM * HEADS, CELLS, 1);
        values = ggml_new_tensor_3d(context, GGML_TYPE_F16, DIM * HEADS, CELLS, 1);
        ggml_set_name(keys, "cache_k_l0");
        ggml_set_name(values, "cache_v_l0");
        cache = ggml_backend_alloc_buffer(backend, 2 * CACHE_BYTES);
        char *base = static_cast<char *>(ggml_backend_buffer_get_base(cache));
        ggml_backend_tensor_alloc(cache, keys, base);
        ggml_backend_tensor_alloc(cache, values, base + CACHE_BYTES);
        ggml_backend_buffer_clear(cache, 0);
        make();
    }
    ~Example() {
        ggml_backend_free(backend);
        ggml_backend_buffer_free(inputs);
        ggml_backend_buffer_free(cache);
        ggml_free(context);
    }
    Example(const Example &) = delete;
    Example &operator=(const Example &) = delete;

    /** The graph and its buffer, anew. */
    void make() {
        ggml_backend_buffer_free(inputs);
        inputs = ggml_backend_alloc_buffer(backend, 16 * PIECE);
        ggml_backend_buffer_clear(inputs, 0);
        size_t used = 0;
        auto place = [&](ggml_tensor *tensor) {
            ggml_backend_tensor_alloc(inputs, tensor, static_cast<char *>(ggml_backend_buffer_get_base(inputs)) + used);
            used += (ggml_nbytes(tensor) + PIECE - 1) / PIECE * PIECE;
            return tensor;
        };
        auto view = [&](ggml_tensor *root) {
            ggml_tensor *made = ggml_view_4d(context, root, DIM, CELLS, HEADS, 1, root->nb[1], DIM * 2, root->nb[2], 0);
            ggml_backend_view_init(made);
            return made;
        };
        rows = place(ggml_new_tensor_2d(context, GGML_TYPE_F32, DIM * HEADS, ROWS));
        numbers = place(ggml_new_tensor_1d(context, GGML_TYPE_I64, ROWS));
        mask = place(ggml_new_tensor_4d(context, GGML_TYPE_F16, CELLS, ROWS, 1, 1));
        other_mask = place(ggml_new_tensor_4d(context, GGML_TYPE_F16, CELLS, ROWS, 1, 1));
        queries = place(ggml_new_tensor_4d(context, GGML_TYPE_F32, DIM, ROWS, HEADS, 1));
        write_keys = ggml_set_rows(context, keys, rows, numbers);
        write_values = ggml_set_rows(context, values, rows, numbers);
        ggml_backend_view_init(write_keys);
        ggml_backend_view_init(write_values);
        attention = place(ggml_flash_attn_ext(context, queries, view(keys), view(values), mask, .2f, 0, 0));
        // What ends where the mask was, as ggml gives room away that nobody needs any more.
        covering = ggml_cont(context, other_mask);
        ggml_backend_tensor_alloc(inputs, covering, mask->data);
        graph = ggml_new_graph_custom(context, 16, false);
        covering_graph = ggml_new_graph_custom(context, 16, false);
        for (ggml_cgraph *each : {graph, covering_graph}) {
            for (ggml_tensor *node : {write_keys, write_values, attention}) {
                ggml_build_forward_expand(each, node);
            }
        }
        ggml_build_forward_expand(covering_graph, covering);
    }

    /** The mask of two more tokens, or with a cell of them hidden. */
    const uint16_t *next_mask(int64_t hidden = -1) {
        tokens += hidden < 0 ? ROWS : 0;
        for (int64_t r = 0; r < ROWS; ++r) {
            for (int64_t c = 0; c < CELLS; ++c) {
                entries[static_cast<size_t>(r * CELLS + c)] = c < tokens - ROWS + 1 + r && c != hidden ? 0 : HIDDEN;
            }
        }
        return entries.data();
    }
    size_t mask_bytes() const { return entries.size() * 2; }
    void write_inputs() {
        const int64_t cells[ROWS] = {tokens, tokens + 1};
        ggml_backend_tensor_set(numbers, cells, 0, sizeof cells);
        ggml_backend_tensor_set(mask, next_mask(), 0, mask_bytes());
    }
    /** Whether a graph is computed and so many inputs are known, and so many read back. */
    bool computes(ggml_cgraph *which, uint64_t known, uint64_t read) {
        const uint64_t known_before = count_of("kept_inputs"), read_before = count_of("read_inputs"), steps = count_of("eager");
        const bool done = ggml_backend_graph_compute(backend, which) == GGML_STATUS_SUCCESS;
        const uint64_t known_here = count_of("kept_inputs") - known_before, read_here = count_of("read_inputs") - read_before;
        for (const char *wrong : {"wrong_inputs", "wrong_tokens", "wrong_outputs", "wrong_summaries", "errors", "passed"}) {
            if (count_of(wrong) != 0) {
                printf("%s\n", wrong);
                return false;
            }
        }
        printf("known %d, read %d\n", static_cast<int>(known_here), static_cast<int>(read_here));
        return done && count_of("eager") == steps + 1 && known_here == known && read_here == read;
    }
};

}  // namespace

extern "C" int apart_inputs();

int apart_inputs() {
    Example example;
    ggml_tensor *mask = example.mask;
    // The first step has no sequence that a write would change; what was not asked for is not followed.
    example.write_inputs();
    CHECK(example.computes(example.graph, 0, 1));
    example.write_inputs();
    CHECK(example.computes(example.graph, 1, 1));
    example.write_inputs();
    CHECK(example.computes(example.graph, 2, 0));

    // Nothing was written since the graph before, or one of both.
    CHECK(example.computes(example.graph, 0, 2));
    ggml_backend_tensor_set(mask, example.next_mask(10), 0, example.mask_bytes());
    CHECK(example.computes(example.graph, 1, 1));

    // After it was written, something else wrote there.
    const std::function<void()> writes[] = {
        [&] { ggml_backend_tensor_set(mask, example.next_mask(20), 40, 2); },
        [&] { ggml_backend_tensor_set(mask, example.next_mask(30), 0, example.mask_bytes() / 2); },
        [&] { ggml_backend_tensor_memset(mask, 0, 2 * static_cast<size_t>(example.tokens - 1), 2); },
        [&] { ggml_backend_tensor_set_async(example.backend, mask, example.next_mask(40), 0, example.mask_bytes()); },
        [&] { ggml_backend_tensor_set_2d_async(example.backend, mask, example.next_mask(50), 0, 2 * CELLS, 2, 2 * CELLS, 2 * CELLS); },
        [&] {
            ggml_backend_tensor_set(example.other_mask, example.next_mask(60), 0, example.mask_bytes());
            ggml_backend_tensor_copy_async(example.backend, example.backend, example.other_mask, mask);
        },
        [&] {
            ggml_backend_tensor_set(example.other_mask, example.next_mask(70), 0, example.mask_bytes());
            ggml_backend_tensor_copy(example.other_mask, mask);
        },
    };
    for (const auto &write : writes) {
        example.write_inputs();
        write();
        CHECK(example.computes(example.graph, 1, 1));
        example.write_inputs();
        CHECK(example.computes(example.graph, 2, 0));
    }
    example.write_inputs();
    ggml_backend_buffer_clear(example.inputs, 0);  // every cell is visible, and row 0 is written
    CHECK(example.computes(example.graph, 0, 2));

    // A graph writes over the mask once its attentions are over.
    example.write_inputs();
    ggml_backend_tensor_set(example.other_mask, example.next_mask(80), 0, example.mask_bytes());
    CHECK(example.computes(example.covering_graph, 2, 0));
    CHECK(example.computes(example.graph, 0, 2));

    // Other buffers, perhaps at the same address, in which nothing is followed yet; more of them than are followed.
    for (int i = 0; i < 10; ++i) {
        example.write_inputs();
        example.make();
        example.write_inputs();
        CHECK(example.computes(example.graph, 0, 2));
        example.write_inputs();
        CHECK(example.computes(example.graph, 2, 0));
    }
    return 0;
}
