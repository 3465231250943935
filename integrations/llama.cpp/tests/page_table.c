/*
 * What a page table of single tokens costs: attention of one query over 4,096 tokens that lie in a range of rows, or anywhere. Prints
 * the least CPU time of 30 runs, on one thread.
 */
#define _GNU_SOURCE
#include "vanward.h"

#include <stdio.h>
#include <stdlib.h>
#include <time.h>

enum { TOKENS = 4096, KV_HEADS = 3, GROUP = 3, DIM = 64, BLOCK = 16, SELECTED = 64, RUNS = 30 };

static double cpu_seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static vwd_tensor view(void *data, uint8_t code, uint8_t bits, int32_t rank, const int64_t *shape) {
    vwd_tensor t = VWD_TENSOR_INIT;
    t.data = data;
    t.device_type = 1;
    t.dtype_code = code;
    t.dtype_bits = bits;
    t.ndim = rank;
    int64_t stride = 1;
    for (int32_t i = rank; i-- > 0; stride *= shape[i]) {
        t.shape[i] = shape[i];
        t.strides[i] = stride;
    }
    return t;
}
#define VIEW(data, code, bits, ...)                                                                                            \
    view(data, code, bits, sizeof((int64_t[]){__VA_ARGS__}) / sizeof(int64_t), (int64_t[]){__VA_ARGS__})

static uint16_t keys[TOKENS * KV_HEADS * DIM], values[TOKENS * KV_HEADS * DIM];
static float queries[KV_HEADS * GROUP * DIM], out[KV_HEADS * GROUP * DIM];
static int32_t table[TOKENS], length = TOKENS, ids[KV_HEADS * SELECTED], counts[KV_HEADS];

int main(void) {
    vwd_session_options options = VWD_SESSION_OPTIONS_INIT;
    options.device = VWD_DEVICE_CPU;
    options.threads = 1;
    vwd_session *session = NULL;
    if (vwd_session_create(&options, &session) != VWD_OK) {
        return 1;
    }
    for (size_t i = 0; i < sizeof keys / sizeof *keys; ++i) { /* between 2^-7 and .5 */
        keys[i] = (uint16_t)(0x2000 + rand() % 0x1800);
        values[i] = (uint16_t)(0x2000 + rand() % 0x1800);
    }
    for (size_t i = 0; i < sizeof queries / sizeof *queries; ++i) {
        queries[i] = (float)rand() / (float)RAND_MAX;
    }
    for (int32_t t = 0; t < TOKENS; ++t) {
        table[t] = t;
    }
    for (int h = 0; h < KV_HEADS; ++h) {
        counts[h] = SELECTED;
        for (int j = 0; j < SELECTED; ++j) {
            ids[h * SELECTED + j] = j * (TOKENS / BLOCK / SELECTED);
        }
    }
    for (int is_sparse = 0; is_sparse < 2; ++is_sparse) {
        for (int has_table = 0; has_table < 2; ++has_table) {
            vwd_paged_kv kv = VWD_PAGED_KV_INIT;
            kv.k = has_table ? VIEW(keys, 2, 16, TOKENS, 1, KV_HEADS, DIM) : VIEW(keys, 2, 16, 1, TOKENS, KV_HEADS, DIM);
            kv.v = has_table ? VIEW(values, 2, 16, TOKENS, 1, KV_HEADS, DIM) : VIEW(values, 2, 16, 1, TOKENS, KV_HEADS, DIM);
            if (has_table) {
                kv.page_table = VIEW(table, 0, 32, 1, TOKENS);
            }
            kv.seq_lens = VIEW(&length, 0, 32, 1);
            vwd_attention_args args = VWD_ATTENTION_ARGS_INIT;
            args.kv = &kv;
            args.q = VIEW(queries, 2, 32, 1, KV_HEADS * GROUP, DIM);
            args.out = VIEW(out, 2, 32, 1, KV_HEADS * GROUP, DIM);
            if (is_sparse) {
                args.block_size = BLOCK;
                args.list.ids = VIEW(ids, 0, 32, 1, KV_HEADS, SELECTED);
                args.list.counts = VIEW(counts, 0, 32, 1, KV_HEADS);
            }
            double least = 1;
            for (int run = 0; run < RUNS; ++run) {
                double begin = cpu_seconds();
                if (vwd_attention(session, &args, NULL) != VWD_OK) {
                    char text[512];
                    vwd_last_error(text, sizeof text);
                    fprintf(stderr, "%s\n", text);
                    return 1;
                }
                double spent = cpu_seconds() - begin;
                least = spent < least ? spent : least;
            }
            printf("%s, %s: %.0f µs\n", is_sparse ? "64 blocks of 16" : "every token", has_table ? "a page table, P = 1" : "a range of rows", 1e6 * least);
        }
    }
    vwd_session_release(session);
    return 0;
}
