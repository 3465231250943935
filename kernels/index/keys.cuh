// The keys that summaries are made of: pages of each layer, and which of them each sequence has.
#pragma once

#include "common/eight.cuh"
#include "common/place.cuh"

// How many bytes past those of the first layer the tensors of a layer lie. In all else layers that share a launch are alike.
struct LayerShift {
    int64 keys, scale, first, second, third, channels, weights, centre;
};

// A sequence and KV head of a layer. `keys` and `scale`: how far past data and scale of Keys those of the layer and head lie.
struct Owner {
    uint32 seq, head;
    int64 keys, scale;
};

// Strides are in bytes; those of `scale` are 0 where it does not vary. `data` and `scale` are the first layer's.
struct Keys {
    const char *data, *scale, *table, *seq_lens, *begin;  // begin, table and scale may be null
    int64 page, token, head, channel;
    int64 scale_page, scale_token, scale_head;
    int64 table_seq, table_page, seq_lens_seq, begin_seq;
    uint32 pages, page_size, capacity;  // tokens that a sequence has pages for
    uint32 kv_heads, dim, dtype;
    uint32 adjacent;  // channels lie side by side, rows are aligned to 16 bytes (to 8 where an element has one)
    Divisor page_of;  // page_size

    // The lengths of sequence i as the caller gives them: its tokens, and the first token whose key is new.
    __device__ int2 lengths(uint32 i) const {
        const int32 len = as<int32>(seq_lens + i * seq_lens_seq);
        return make_int2(len, begin ? as<int32>(begin + i * begin_seq) : 0);
    }
    // Guesses the lengths before the wait for the kernel before, which may be writing them.
    __device__ int2 likely_lengths(uint32 i) const {
        const int32 len = load_hint(seq_lens + i * seq_lens_seq);
        return make_int2(len, begin ? load_hint(begin + i * begin_seq) : 0);
    }
    // The lengths within their bounds.
    __device__ uint32 length(const int2 &given, uint32 &first) const {
        const uint32 len = min(uint32(max(given.x, 0)), capacity);
        first = min(uint32(max(given.y, 0)), len);
        return len;
    }
    __device__ uint32 length(uint32 i, uint32 &first) const { return length(lengths(i), first); }
    // The key in row n of a page, and its scale.
    __device__ const char *key(const Owner &of, uint32 page_number, uint32 n) const {
        return data + of.keys + page_number * page + n * token;
    }
    __device__ const char *scale_of(const Owner &of, uint32 page_number, uint32 n) const {
        return scale + of.scale + page_number * scale_page + n * scale_token;
    }
    // The key of token t, and its scale; null where it has no page.
    __device__ const char *find(const Owner &of, uint32 t, float &factor) const {
        uint32 at = of.seq, n = t;
        if (table) {
            const uint32 p = page_of.divide(t);
            at = as<uint32>(table + of.seq * table_seq + p * table_page), n = t - p * page_size;
            if (at >= pages) return nullptr;
        }
        if (scale) factor = as<float>(scale_of(of, at, n));
        return key(of, at, n);
    }
    // The value of a stored element: 8-bit elements are multiplied by their scale.
    __device__ float value(float stored, float factor) const { return scale ? __fmul_rn(stored, factor) : stored; }
};

// A guess of where the keys of the summary that changes lie: a step's token mostly extends the summary that the last one did. The guess is made
// before the kernel waits for the one before it. The keys are then loaded together with the lengths that tell whether it was right.
struct Guess {
    const char *key = nullptr;  // of the first token; null where nothing is guessed
    const char *entry = nullptr;
    uint32 page;

    __device__ Guess(const Keys &k, const Owner &of, uint32 t, uint32 count) : page(of.seq) {
        if (!k.begin || !k.adjacent || k.scale || count > k.capacity || t > k.capacity - count) return;
        const uint32 p = k.table ? k.page_of.divide(t) : 0, n = t - p * k.page_size;
        if (k.table) {
            if (n + count > k.page_size) return;
            entry = k.table + of.seq * k.table_seq + p * k.table_page;
            page = load_hint(entry);
        }
        if (page < k.pages) key = k.key(of, page, n);
    }
    // The page that the table holds after the wait.
    __device__ uint32 page_now() const { return entry ? as<uint32>(entry) : page; }
};

// Eight channels of up to COUNT keys of a sequence and head: begin, begin + step, … below end.
template <uint32 BYTES, uint32 COUNT> struct Fetched {
    Eight<BYTES> eight[COUNT];
    float factor[BYTES == 1 ? COUNT : 1];
    bool exist;

    // Returns true where the keys lie in one page with adjoining channels; then all or none of them exist.
    __device__ bool load(const Keys &k, const Owner &of, uint32 c, uint32 begin, uint32 step, uint32 end) {
        uint32 at = of.seq, n = begin;
        if (!k.adjacent) return false;
        if (k.table) {
            const uint32 p = k.page_of.divide(begin);
            n = begin - p * k.page_size;
            if (n + min((COUNT - 1) * step, end - 1 - begin) >= k.page_size) return false;
            at = as<uint32>(k.table + of.seq * k.table_seq + p * k.table_page);
        }
        exist = at < k.pages;
        if (!exist) return true;
        const char *key = k.key(of, at, n) + c * BYTES, *scale = k.scale_of(of, at, n);
        const int64 key_step = step * k.token, scale_step = step * k.scale_token;
#pragma unroll
        for (uint32 m = 0; m < COUNT; m++, key += key_step, scale += scale_step) {
            if (begin + m * step >= end) break;
            eight[m].load(key);
            if (BYTES == 1 && k.scale) factor[m] = as<float>(scale);
        }
        return true;
    }
    __device__ void widen(const Keys &k, uint32 m, float (&x)[8]) const {
        eight[m].widen(x, k.dtype);
        if (BYTES == 1 && k.scale) {
#pragma unroll
            for (uint32 i = 0; i < 8; i++) x[i] = __fmul_rn(x[i], factor[BYTES == 1 ? m : 0]);
        }
    }
};

// Loads eight channels of a key of any layout; returns false where it does not exist.
template <uint32 BYTES> __device__ inline bool fetch_one(const Keys &k, const Owner &of, uint32 c, uint32 t, float (&x)[8]) {
    float factor;
    const char *key = k.find(of, t, factor);
    if (!key) return false;
    Eight<BYTES> eight;
    eight.gather(key + c * k.channel, k.channel);
    eight.widen(x, k.dtype);
#pragma unroll
    for (uint32 n = 0; n < 8; n++) x[n] = k.value(x[n], factor);
    return true;
}
