// Writes into a cache's buffer from outside of graphs: each of a buffer's functions does what it did, and the summaries of what it wrote are forgotten.

#include "cache.h"
#include "check.h"
#include "counters.h"
#include "ggml-backend-impl.h"
#include "watch.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>

using namespace vanward;

namespace {

constexpr int64_t CHANNELS = 32, CELLS = 128, STREAMS = 2, ROW = CHANNELS * 2;

/** Two layers' keys and one layer's values in one buffer, and a sequence of 100 tokens in the second stream. */
struct Example {
    std::vector<char> bytes = std::vector<char>(3 * CELLS * STREAMS * ROW);
    ggml_backend_buffer buffer = {};
    ggml_tensor tensors[3] = {};  // keys, keys, values
    std::shared_ptr<Cache> cache;
    Sequence *sequence = nullptr;

    Example() {
        buffer.iface.memset_tensor = [](ggml_backend_buffer_t, ggml_tensor *tensor, uint8_t value, size_t offset, size_t size) {
            memset(static_cast<char *>(tensor->data) + offset, value, size);
        };
        buffer.iface.set_tensor = [](ggml_backend_buffer_t, ggml_tensor *tensor, const void *data, size_t offset, size_t size) {
            memcpy(static_cast<char *>(tensor->data) + offset, data, size);
        };
        buffer.iface.set_tensor_2d = [](ggml_backend_buffer_t, ggml_tensor *tensor, const void *data, size_t offset, size_t size, size_t copies,
                                        size_t stride_tensor, size_t stride_data) {
            for (size_t i = 0; i < copies; ++i) {
                memcpy(static_cast<char *>(tensor->data) + offset + i * stride_tensor, static_cast<const char *>(data) + i * stride_data, size);
            }
        };
        buffer.iface.cpy_tensor = [](ggml_backend_buffer_t, const ggml_tensor *from, ggml_tensor *to) {
            memcpy(to->data, from->data, static_cast<size_t>(to->ne[1]) * to->nb[1]);
            return true;
        };
        buffer.iface.clear = [](ggml_backend_buffer_t self, uint8_t value) { static_cast<Example *>(self->context)->bytes.assign(3 * CELLS * STREAMS * ROW, value); };
        buffer.context = this;
        for (int i = 0; i < 3; ++i) {
            snprintf(tensors[i].name, sizeof tensors[i].name, "cache_%c_l%d", i == 2 ? 'v' : 'k', i % 2);
            shape(tensors[i], bytes.data() + i * CELLS * STREAMS * ROW, CELLS, STREAMS);
        }
        cache = cache_of(&tensors[0], this, host_memory());
        cache->layer(&tensors[0]);
        cache->layer(&tensors[1]);
        std::vector<uint16_t> entries(CELLS, 0xfc00);  // −∞
        std::fill_n(entries.begin(), 100, 0);
        ggml_tensor mask = {};
        mask.data = entries.data();
        mask.ne[0] = CELLS;
        mask.ne[1] = mask.ne[2] = mask.ne[3] = 1;
        mask.nb[1] = mask.nb[2] = mask.nb[3] = CELLS * 2;
        const std::vector<Placed> *placed = cache->place(&mask, 1, 1, 1, CELLS);
        CHECK(placed != nullptr && placed->size() == 1 && (*placed)[0].sequence->size() == 100);
        sequence = (*placed)[0].sequence;
        watch(&buffer);
        watch(&buffer);
    }
    ~Example() { release_caches(this); }
    Example(const Example &) = delete;
    Example &operator=(const Example &) = delete;

    /** A tensor of float16, or a view of one. */
    void shape(ggml_tensor &tensor, void *data, int64_t cells, int64_t streams) {
        tensor.type = GGML_TYPE_F16;
        tensor.data = data;
        tensor.buffer = &buffer;
        const int64_t extents[] = {CHANNELS, cells, streams, 1};
        size_t stride = 2;
        for (int i = 0; i < GGML_MAX_DIMS; ++i) {
            tensor.ne[i] = extents[i];
            tensor.nb[i] = stride;
            stride *= static_cast<size_t>(extents[i]);
        }
    }
    Known &known(int layer) { return cache->layer(&tensors[layer]).of(*sequence); }
    void summarise() { known(0).summarised = known(1).summarised = 100; }
    /** Whether so many tokens of each layer's are summarised; all are, after it. */
    bool has(int64_t first, int64_t second) {
        const bool is_so = known(0).summarised == first && known(1).summarised == second;
        summarise();
        return is_so;
    }
    char *row(int64_t number) { return bytes.data() + number * ROW; }
};

void writes() {
    Example example;
    const ggml_backend_buffer_i &calls = example.buffer.iface;
    ggml_backend_buffer_t buffer = &example.buffer;
    ggml_tensor *keys = &example.tensors[0], *second = &example.tensors[1], *values = &example.tensors[2];
    std::vector<char> data(CELLS * ROW, 5);
    const size_t stream = CELLS * ROW;
    example.summarise();

    // One row of one layer; a part of one, up to the end of the one before.
    calls.set_tensor(buffer, keys, data.data(), stream + 40 * ROW, ROW);
    CHECK(example.row(CELLS + 40)[0] == 5 && example.row(CELLS + 41)[0] == 0);
    CHECK(example.has(40, 100));
    calls.set_tensor(buffer, second, data.data(), stream + 40 * ROW - 2, 4);
    CHECK(example.has(100, 39));
    // The other stream, rows that are no tokens, and values.
    calls.set_tensor(buffer, keys, data.data(), 0, stream);
    calls.set_tensor(buffer, keys, data.data(), stream + 100 * ROW, 28 * ROW);
    calls.set_tensor(buffer, values, data.data(), stream, stream);
    CHECK(example.has(100, 100));
    // Strided columns: from the first row on.
    calls.set_tensor_2d(buffer, keys, data.data(), stream + 7 * ROW, 2, 3, ROW, 2);
    CHECK(example.row(CELLS + 9)[1] == 5 && example.row(CELLS + 9)[2] == 0);
    CHECK(example.has(7, 100));
    calls.memset_tensor(buffer, keys, 9, stream + 70 * ROW, 10 * ROW);
    CHECK(example.row(CELLS + 79)[0] == 9);
    CHECK(example.has(70, 100));
    // A copy from stream to stream, through views of them.
    ggml_tensor from = {}, to = {};
    example.shape(from, second->data, CELLS, 1);
    example.shape(to, static_cast<char *>(second->data) + stream, CELLS, 1);
    static_cast<char *>(second->data)[3 * ROW] = 77;
    CHECK(calls.cpy_tensor(buffer, &from, &to));
    CHECK(static_cast<char *>(to.data)[3 * ROW] == 77);
    CHECK(example.has(100, 0));
    // What does not go through the buffer's functions, and is told.
    overwritten(second, stream + 30 * ROW, ROW);
    CHECK(example.has(100, 30));
    overwritten(&to);
    CHECK(example.has(100, 0));
    calls.clear(buffer, 1);
    CHECK(example.row(0)[0] == 1);
    CHECK(example.has(0, 0));
    CHECK(counters.stale == 61 + 100 + 70 + 100);  // of the middle layer

    // A buffer goes on after the cache in it is forgotten; and one that lacks functions does so watched.
    release_caches(&example);
    calls.set_tensor(buffer, keys, data.data(), 0, ROW);
    CHECK(example.row(0)[0] == 5);
    ggml_backend_buffer bare = {};
    bare.iface.clear = [](ggml_backend_buffer_t, uint8_t) {};
    watch(&bare);
    CHECK(bare.iface.set_tensor == nullptr && bare.iface.set_tensor_2d == nullptr && bare.iface.cpy_tensor == nullptr);
}

}  // namespace

int main() {
    writes();
    return 0;
}
