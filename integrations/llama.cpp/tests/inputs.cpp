// What the host wrote into the inputs of graphs: when it is known, when it has to be read back, and how masks are followed by it.
// `llama-inputs known|masks|sets`; and `llama-inputs times`, medians of what the host spends on a mask of 1 MB.

#include "cache.h"
#include "check.h"
#include "ggml-backend-impl.h"
#include "options.h"
#include "watch.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>

using namespace vanward;

namespace {

/** A buffer of bytes, and an asynchronous way past its functions. */
struct Device {
    std::vector<char> bytes;
    ggml_backend_buffer buffer = {};

    explicit Device(size_t size) : bytes(size) { make(); }
    /** A buffer at the same addresses: that of the host's object, and those of the bytes. */
    void make() {
        buffer = {};
        buffer.context = this;
        buffer.iface.memset_tensor = [](ggml_backend_buffer_t, ggml_tensor *tensor, uint8_t value, size_t offset, size_t size) {
            memset(static_cast<char *>(tensor->data) + offset, value, size);
        };
        buffer.iface.set_tensor = [](ggml_backend_buffer_t, ggml_tensor *tensor, const void *data, size_t offset, size_t size) {
            memcpy(static_cast<char *>(tensor->data) + offset, data, size);
        };
        buffer.iface.set_tensor_2d = [](ggml_backend_buffer_t, ggml_tensor *, const void *, size_t, size_t, size_t, size_t, size_t) {};
        buffer.iface.cpy_tensor = [](ggml_backend_buffer_t, const ggml_tensor *, ggml_tensor *) { return false; };
        buffer.iface.clear = [](ggml_backend_buffer_t, uint8_t) {};
    }
    /** Entries of 16 bits from a byte on. */
    ggml_tensor tensor(size_t begin, int64_t cells, int64_t rows) {
        ggml_tensor made = {};
        made.type = GGML_TYPE_F16;
        made.buffer = &buffer;
        made.data = bytes.data() + begin;
        const int64_t extents[] = {cells, rows, 1, 1};
        size_t stride = 2;
        for (int i = 0; i < GGML_MAX_DIMS; ++i) {
            made.ne[i] = extents[i];
            made.nb[i] = stride;
            stride *= static_cast<size_t>(extents[i]);
        }
        return made;
    }
    void set(ggml_tensor &tensor, const void *data, size_t offset, size_t size) { buffer.iface.set_tensor(&buffer, &tensor, data, offset, size); }
};

void known() {
    Device device(1 << 16);
    ggml_tensor mask = device.tensor(4096, 512, 4), other = device.tensor(16384, 512, 1);
    const size_t all = 4096;
    std::vector<char> data(all, 5);
    std::shared_ptr<Inputs> inputs = inputs_of(&device.buffer);
    CHECK(inputs_of(&device.buffer) == inputs);
    auto write = [&] {
        data[0] += 1;
        device.set(mask, data.data(), 0, all);
    };
    auto is_known = [&] {
        const Kept *kept = inputs->find(&mask, all);
        return kept != nullptr && kept->size() == all && memcmp(kept->data(), device.bytes.data() + 4096, all) == 0;
    };

    // Followed once it was asked for; then each write is known, for one graph, and what was handed over may change after it.
    write();
    CHECK(!is_known());
    write();
    data[1] += 1;
    CHECK(is_known());
    CHECK(is_known());
    CHECK(inputs->find(&mask, all + 1) == nullptr);
    CHECK(inputs->find(&mask, 10) != nullptr);
    inputs->expire();
    CHECK(!is_known());
    write();
    CHECK(is_known());

    // Whatever else touches it.
    struct Touch {
        const char *name;
        std::function<void()> touch;
        bool stays;
    };
    ggml_tensor before = device.tensor(4096 - 64, 33, 1), behind = device.tensor(8192, 64, 1), last = device.tensor(8190, 64, 1);
    ggml_backend_buffer_i &calls = device.buffer.iface;
    const Touch touches[] = {
        {"a part of it", [&] { device.set(mask, data.data(), 2, 2); }, false},
        {"its first bytes", [&] { device.set(mask, data.data(), 0, all - 2); }, false},
        {"a tensor that ends in it", [&] { device.set(before, data.data(), 0, 66); }, false},
        {"a tensor that begins in it", [&] { device.set(last, data.data(), 0, 128); }, false},
        {"a tensor that ends before it", [&] { device.set(before, data.data(), 0, 64); }, true},
        {"a tensor behind it", [&] { device.set(behind, data.data(), 0, 128); }, true},
        {"another one", [&] { device.set(other, data.data(), 0, 1024); }, true},
        {"set_tensor_2d", [&] { calls.set_tensor_2d(&device.buffer, &mask, data.data(), 64, 2, 3, 64, 2); }, false},
        {"set_tensor_2d of nothing", [&] { calls.set_tensor_2d(&device.buffer, &mask, data.data(), 64, 2, 0, 64, 2); }, true},
        {"memset_tensor", [&] { calls.memset_tensor(&device.buffer, &mask, 0, 100, 2); }, false},
        {"cpy_tensor", [&] { calls.cpy_tensor(&device.buffer, &other, &mask); }, false},
        {"cpy_tensor elsewhere", [&] { calls.cpy_tensor(&device.buffer, &mask, &other); }, true},
        {"clear", [&] { calls.clear(&device.buffer, 0); }, false},
        {"an asynchronous write", [&] { overwritten(&mask, 8, 8); }, false},
        {"an asynchronous copy", [&] { overwritten(&mask); }, false},
        {"an asynchronous copy elsewhere", [&] { overwritten(&other); }, true},
        {"a graph", [&] { inputs->expire(); }, false},
    };
    for (const Touch &each : touches) {
        printf("%s\n", each.name);
        write();
        CHECK(is_known());
        each.touch();
        CHECK((inputs->find(&mask, all) != nullptr) == each.stays);
        write();
        CHECK(is_known());
    }
    printf("asynchronous, past a buffer that is not watched\n");
    Device unwatched(64);
    ggml_tensor small = unwatched.tensor(0, 8, 1);
    overwritten(&small);

    // An input of another size at the same address; and the mask of a prompt, which has more rows than a step.
    printf("sizes\n");
    ggml_tensor smaller = device.tensor(4096, 256, 4);
    device.set(smaller, data.data(), 0, 2048);
    CHECK(inputs->find(&smaller, 2048) != nullptr && inputs->find(&mask, all) == nullptr);
    write();
    CHECK(is_known());
    ggml_tensor prompt = device.tensor(4096, 8, options.rows + 1);
    device.set(prompt, data.data(), 0, 16 * static_cast<size_t>(options.rows + 1));
    CHECK(inputs->find(&prompt, 16) == nullptr);
    ggml_tensor largest = device.tensor(4096, 8, options.rows);
    device.set(largest, data.data(), 0, 16 * static_cast<size_t>(options.rows));
    CHECK(inputs->find(&largest, 16) != nullptr);

    // Another buffer at the same address: nothing of the one before is known in it, and its writes are followed once it is asked for.
    printf("another buffer\n");
    write();
    CHECK(is_known());
    device.make();
    std::shared_ptr<Inputs> anew = inputs_of(&device.buffer);
    CHECK(anew != inputs && anew->find(&mask, all) == nullptr);
    write();
    CHECK(anew->find(&mask, all) != nullptr);
    inputs = anew;

    // As many as are followed; one that was not asked for in the last graph makes room.
    printf("many\n");
    inputs->forget();
    CHECK(!is_known());
    inputs->expire();
    std::vector<ggml_tensor> many;
    for (size_t i = 0; i < Inputs::FOLLOWED + 1; ++i) {
        many.push_back(device.tensor(16384 + 64 * i, 8, 1));
        CHECK(inputs->find(&many.back(), 16) == nullptr);
    }
    for (size_t i = 0; i < many.size(); ++i) {  // the first one takes the room of the mask
        device.set(many[i], data.data(), 0, 16);
        CHECK((inputs->find(&many[i], 16) != nullptr) == (i < Inputs::FOLLOWED));
    }
    write();
    CHECK(!is_known());  // all others are in use
    inputs->expire();
    CHECK(!is_known());
    write();
    CHECK(is_known());
    inputs->expire();
    CHECK(inputs->find(&many[1], 16) == nullptr && inputs->find(&other, 512) == nullptr);  // which takes the room of the one behind it
    device.set(many[1], data.data(), 0, 16);
    CHECK(inputs->find(&many[1], 16) != nullptr);

    // As many bytes as are kept.
    printf("large\n");
    const size_t half = Inputs::MOST_BYTES / 2;
    Device large(2 * Inputs::MOST_BYTES);
    inputs = inputs_of(&large.buffer);
    std::vector<char> zeros(Inputs::MOST_BYTES + 16);
    ggml_tensor first = large.tensor(0, static_cast<int64_t>(half) / 2, 1), second = large.tensor(half, static_cast<int64_t>(half) / 2, 1);
    ggml_tensor third = large.tensor(2 * half, 8, 1), never = large.tensor(2 * half + 64, 8, 1), whole = large.tensor(0, static_cast<int64_t>(half) + 8, 1);
    for (ggml_tensor *each : {&never, &first, &second, &third}) {
        CHECK(inputs->find(each, 16) == nullptr);
    }
    large.set(first, zeros.data(), 0, half);
    large.set(second, zeros.data(), 0, half);
    large.set(third, zeros.data(), 0, 16);
    CHECK(inputs->find(&first, half) != nullptr && inputs->find(&second, half) != nullptr && inputs->find(&third, 16) == nullptr);
    large.set(whole, zeros.data(), 0, Inputs::MOST_BYTES + 16);
    CHECK(inputs->find(&whole, 16) == nullptr);
    // One that a later graph asked for takes the room of the one that was asked for longest ago.
    inputs->expire();
    CHECK(inputs->find(&second, half) == nullptr);
    inputs->expire();
    CHECK(inputs->find(&third, 16) == nullptr);
    large.set(first, zeros.data(), 0, half);
    large.set(second, zeros.data(), 0, half);
    large.set(third, zeros.data(), 0, 16);
    CHECK(inputs->find(&second, half) != nullptr);
    large.set(second, zeros.data(), 0, half);
    CHECK(inputs->find(&third, 16) != nullptr && inputs->find(&second, half) != nullptr && inputs->find(&first, 0) == nullptr);
    CHECK(inputs->bytes() == half + 16);
}

uint64_t random_state = 1;
size_t below(size_t n) {
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return static_cast<size_t>(random_state >> 33) % n;
}

/** A mask whose changes are known is followed as one that is read whole, whatever changes: entries, extents, strides, where it lies. */
void masks() {
    Visible by_changes;
    std::vector<uint16_t> entries(8 * 9000);
    Kept kept[2];
    size_t rows = 4, cells = 8000, gap = 0, planes = 1;
    bool takes_all = true, is_packed = false;
    std::vector<uint16_t> unknown;
    for (int round = 0; round < 4000; ++round) {
        const size_t what = below(60);
        planes = what == 0 ? 1 + below(2) : planes;
        rows = what <= 1 ? 1 + below(8 / planes) : std::min(rows, 8 / planes);
        cells = what == 2 ? 100 + below(7900) : cells;
        gap = what == 3 ? 64 * below(16) : gap;
        takes_all ^= what == 4;
        is_packed ^= what == 6;
        if (what == 5) {
            std::fill(entries.begin(), entries.end(), below(2) == 0 ? 0 : 0xfc00);
        }
        const size_t stride = cells + std::min(gap, 9000 - cells), plane = takes_all && !is_packed ? entries.size() / planes : rows * stride;
        const size_t count = takes_all ? entries.size() : planes * plane;
        for (size_t changes = below(4); changes-- > 0;) {
            entries[below(count)] = below(200) == 0 ? 0x3c00 : below(2) == 0 ? 0 : 0xfc00;
        }
        // Sometimes it changes without being followed, lies elsewhere, or is one that is not known.
        Kept &here = kept[below(10) == 0];
        here.take(entries.data(), count * 2);
        if (below(5) == 0) {
            continue;
        }
        const bool is_known = below(20) != 0;
        unknown = entries;
        unknown[below(count)] ^= 0xfc00;
        ggml_tensor mask = {};
        mask.data = is_known ? const_cast<char *>(here.data()) : reinterpret_cast<char *>(unknown.data());
        mask.ne[0] = static_cast<int64_t>(cells);
        mask.ne[1] = static_cast<int64_t>(rows);
        mask.ne[2] = 1;
        mask.ne[3] = static_cast<int64_t>(planes);
        mask.nb[0] = 2;
        mask.nb[1] = stride * 2;
        mask.nb[2] = mask.nb[3] = plane * 2;
        const int asked = static_cast<int>(below(30) == 0 ? 1 + below(rows) : rows), streams = static_cast<int>(planes == 1 ? 1 + below(40) / 39 : planes);
        by_changes.follow(&mask, asked, streams, mask.ne[0], is_known ? &here : nullptr);
        Visible whole;
        whole.follow(&mask, asked, streams, mask.ne[0]);
        CHECK(by_changes.is_known() == whole.is_known());
        const std::vector<RowGroup> expected = whole.groups(streams), found = by_changes.groups(streams);
        CHECK(!whole.is_known() || expected.size() == found.size());
        for (size_t i = 0; whole.is_known() && i < expected.size(); ++i) {
            const RowGroup &a = expected[i], &b = found[i];
            CHECK(a.stream == b.stream && a.first_row == b.first_row && a.rows == b.rows && a.added == b.added);
            CHECK(a.last->is_within(*b.last) && b.last->is_within(*a.last) && a.first->is_within(*b.first) && b.first->is_within(*a.first));
        }
    }
}

/** Sets of several pieces and of unequal sizes, by single elements. */
void sets() {
    for (int round = 0; round < 2000; ++round) {
        const size_t sizes[] = {below(12000), below(12000)};
        const bool is_same_size = below(2) == 0;
        Bits a(sizes[0]), b(is_same_size ? sizes[0] : sizes[1]);
        const size_t most = below(3) == 0 ? 0 : below(3) == 0 ? 12000 : below(4);
        for (size_t i = 0; i < sizes[0]; ++i) {
            if (below(2) == 0) {
                a.add(i);
                if (i / 64 < b.word_count()) {
                    b.add(i);
                }
            }
        }
        for (size_t i = 0; i < most; ++i) {
            if (sizes[0] > 0) {
                a.add(below(sizes[0]));
            }
            if (b.word_count() > 0) {
                b.add(below(b.word_count() * 64));
            }
        }
        std::vector<size_t> expected, found;
        for (size_t i = 0; i < a.word_count() * 64; ++i) {
            if (a.has(i) && !b.has(i)) {
                expected.push_back(i);
            }
        }
        a.each_not_in(b, [&](size_t i) { found.push_back(i); });
        CHECK(found == expected);
        CHECK(a.is_within(b) == expected.empty());
        const size_t enough = 1 + below(5), counted = a.count_not_in(b, enough);
        CHECK(counted == expected.size() || (counted >= enough && counted < expected.size()));
    }
}

/** What the host spends on the mask of a step: four sequences of 32,768 tokens in one cache, a row each. */
void times() {
    constexpr size_t ROWS = 4, DEPTH = 32768, STEPS = 200, CELLS = (ROWS * (DEPTH + STEPS) + 255) / 256 * 256;
    Device device(ROWS * CELLS * 2);
    ggml_tensor mask = device.tensor(0, CELLS, ROWS), keys = {};
    keys.type = GGML_TYPE_F16;
    keys.ne[0] = 8;
    keys.ne[1] = CELLS;
    keys.ne[2] = keys.ne[3] = 1;
    strcpy(keys.name, "cache_k_l0");
    for (bool is_known : {false, true}) {
        std::vector<uint16_t> entries(ROWS * CELLS, 0xfc00);
        for (size_t i = 0; i < ROWS * DEPTH; ++i) {
            entries[i / DEPTH * CELLS + i] = 0;
        }
        Cache cache(CELLS, 1, host_memory());
        cache.layer(&keys);
        Inputs inputs;
        inputs.find(&mask, 1);
        std::vector<double> writes, places;
        auto timed = [](std::vector<double> &times, const auto &what) {
            const auto begin = std::chrono::steady_clock::now();
            what();
            times.push_back(std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - begin).count());
        };
        for (size_t i = 0; i < STEPS; ++i) {
            for (size_t row = 0; row < ROWS; ++row) {
                entries[row * CELLS + ROWS * (DEPTH + i) + row] = 0;
            }
            memcpy(device.bytes.data(), entries.data(), device.bytes.size());
            const Kept *kept = nullptr;
            if (is_known) {
                timed(writes, [&] { inputs.written(&mask, entries.data(), 0, device.bytes.size()); });
                kept = inputs.find(&mask, device.bytes.size());
                CHECK(kept != nullptr);
            }
            ggml_tensor shown = mask;
            shown.data = kept == nullptr ? mask.data : const_cast<char *>(kept->data());
            const std::vector<Placed> *placed = nullptr;
            timed(places, [&] { placed = cache.place(&shown, ROWS, 0, 1, CELLS, kept); });
            CHECK(placed != nullptr && placed->size() == ROWS && (*placed)[3].sequence->size() == static_cast<int64_t>(DEPTH + i + 1));
            inputs.expire();
        }
        for (auto &[name, all] : {std::pair<const char *, std::vector<double> &>("kept as it is written", writes), {"rows placed", places}}) {
            if (!all.empty()) {
                std::sort(all.begin(), all.end());
                printf("%s, %s: %.1f us\n", is_known ? "known" : "read back", name, all[STEPS / 2]);
            }
        }
    }
}

}  // namespace

int main(int argc, char **argv) {
    if (argc != 2) {
        return 2;
    }
    const struct {
        const char *name;
        void (*play)();
    } parts[] = {{"known", known}, {"masks", masks}, {"sets", sets}, {"times", times}};
    for (const auto &part : parts) {
        if (strcmp(argv[1], part.name) == 0) {
            part.play();
            return 0;
        }
    }
    return 2;
}
