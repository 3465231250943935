/*
 * Where the steps of a llama-server spend their time. Preloaded, it stands before those functions of llama.cpp that the server calls in each step, and
 * calls them. Steps that gave logits are appended to the file that VANWARD_STEPS names, a line each: us in llama_process, which decodes; us until
 * llama_synchronize returns behind it; us from then to the next llama_process; rows of logits that were read; and Vanward's counters so far.
 */
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#define EXPORTED __attribute__((visibility("default")))

static FILE *file;
static int is_under_way, is_synchronized, rows;
static double begun, processed, synchronized;

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return 1e6 * (double)t.tv_sec + 1e-3 * (double)t.tv_nsec;
}

static void *next(void **found, const char *name) {
    if (*found == NULL && (*found = dlsym(RTLD_NEXT, name)) == NULL) {
        fprintf(stderr, "there is no %s\n", name);
        abort();
    }
    return *found;
}

static void print_counters(void) {
    static const char *const names[] = {"sparse", "dense", "selected_beside", "replayed", "read_ns", "plan_ns", "launch_ns"};
    static uint64_t (*count_of)(const char *);
    if (count_of == NULL) {
        void *(*find)(const char *) = NULL, *(*address)(void *, const char *) = NULL;
        *(void **)&find = dlsym(RTLD_DEFAULT, "ggml_backend_reg_by_name");
        *(void **)&address = dlsym(RTLD_DEFAULT, "ggml_backend_reg_get_proc_address");
        void *registry = find == NULL || address == NULL ? NULL : find("Vanward");
        if (registry != NULL) {
            *(void **)&count_of = address(registry, "vanward_ggml_counter");
        }
    }
    for (size_t i = 0; count_of != NULL && i < sizeof names / sizeof *names; ++i) {
        fprintf(file, " %s=%llu", names[i], (unsigned long long)count_of(names[i]));
    }
}

EXPORTED int32_t llama_process(void *context, int type, void *batch) {
    static void *found;
    int32_t (*process)(void *, int, void *) = NULL;
    *(void **)&process = next(&found, "llama_process");
    const double begin = now();
    if (file == NULL) {
        const char *path = getenv("VANWARD_STEPS");
        file = fopen(path == NULL ? "/dev/null" : path, "w");
        if (file == NULL) {
            abort();
        }
        setvbuf(file, NULL, _IOLBF, 1 << 12);
    }
    if (is_under_way && is_synchronized && rows > 0) {
        fprintf(file, "step %.1f %.1f %.1f %d", processed - begun, synchronized - processed, begin - synchronized, rows);
        print_counters();
        fprintf(file, "\n");
    }
    is_under_way = 1;
    is_synchronized = rows = 0;
    begun = now();
    const int32_t status = process(context, type, batch);
    processed = now();
    return status;
}

EXPORTED void llama_synchronize(void *context) {
    static void *found;
    void (*synchronize)(void *) = NULL;
    *(void **)&synchronize = next(&found, "llama_synchronize");
    synchronize(context);
    if (!is_synchronized) {
        synchronized = now();
        is_synchronized = 1;
    }
}

EXPORTED float *llama_get_logits_ith(void *context, int32_t i) {
    static void *found;
    float *(*get)(void *, int32_t) = NULL;
    *(void **)&get = next(&found, "llama_get_logits_ith");
    ++rows;
    return get(context, i);
}
