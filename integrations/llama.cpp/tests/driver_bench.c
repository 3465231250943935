/* Commands that time steps, or compare their results, for several settings of Vanward on one cache. */
#include "driver.h"

/* ---- bench ---- */

/* Sets the options VANWARD_GGML_* of a variant, such as "minmax/BUDGET=4096/STRATEGY=sparse", and returns its name. DENSE_BELOW is 0 if `sparse`. */
static const char *become(char *variant, bool sparse) {
    static const char *const changed[] = {"ENABLED", "STRATEGY", "BUDGET", "DENSE_BELOW", "DENSE_LAYERS", "ROWS", "GRAPHS", "BESIDE"};
    char name[64];
    for (size_t i = 0; i < sizeof changed / sizeof *changed; ++i) {
        snprintf(name, sizeof name, "VANWARD_GGML_%s", changed[i]);
        unsetenv(name);
    }
    if (sparse) {
        setenv("VANWARD_GGML_DENSE_BELOW", "0", 1);
    }
    char *saved = NULL;
    const char *variant_name = strtok_r(variant, "/", &saved);
    for (char *option; (option = strtok_r(NULL, "/", &saved)) != NULL;) {
        char *equals = strchr(option, '=');
        if (equals == NULL) {
            fail("variants=NAME/OPTION=VALUE/…,…");
        }
        *equals = 0;
        snprintf(name, sizeof name, "VANWARD_GGML_%s", option);
        setenv(name, equals + 1, 1);
    }
    void *registry = ggml_backend_reg_by_name("Vanward");
    const char *(*read_options)(void) = NULL;
    if (registry != NULL) {
        *(void **)&read_options = ggml_backend_reg_get_proc_address(registry, "vanward_ggml_read_options");
        const char *error = read_options();
        if (error != NULL) {
            fail(error);
        }
    }
    return variant_name;
}

static int deepest_of(const char *list) { return atoi(strrchr(list, ',') == NULL ? list : strrchr(list, ',') + 1); }

static int by_size(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

/* gpu/trace.c, which records what a GPU does. */
static struct {
    const char *(*start)(void);
    void (*begin)(void);
    void (*end)(FILE *file, const char *label);
    FILE *file;
} tracer;

/* Before the backends are loaded. */
void start_tracer(void) {
    void *library = dlopen(tracer_path, RTLD_NOW | RTLD_LOCAL);
    tracer.file = trace_path == NULL ? NULL : fopen(trace_path, "w");
    if (library == NULL || tracer.file == NULL) {
        fail(library == NULL ? dlerror() : "trace=FILE cannot be written");
    }
    *(void **)&tracer.start = dlsym(library, "tracer_start");
    *(void **)&tracer.begin = dlsym(library, "tracer_begin");
    *(void **)&tracer.end = dlsym(library, "tracer_end");
    const char *error = tracer.start();
    if (error != NULL) {
        fprintf(stderr, "nothing is traced: %s\n", error);
        exit(1);
    }
}

/* A step of all sequences, the i-th one after `here` tokens of each. The time until its logits are there, in ms. */
static double step(struct llama_context *context, struct llama_batch *batch, const llama_token *tokens, int here, int i) {
    const double begin = wall_seconds();
    for (int s = 0; s < sequences; ++s) {
        push(batch, tokens[7 * s + here + i], here + i, s, true);
    }
    if (decode(context, batch) != 0) {
        fail("a token could not be decoded");
    }
    llama_get_logits_ith(context, sequences - 1);
    return 1e3 * (wall_seconds() - begin);
}

/* What a sequence has in the cache of one context becomes what it has in another one's. */
static void copy_state(struct llama_context *from, struct llama_context *to, llama_seq_id id) {
    const size_t bytes = llama_state_seq_get_size(from, id);
    uint8_t *state = malloc(bytes);
    if (state == NULL || llama_state_seq_get_data(from, state, bytes, id) != bytes || llama_state_seq_set_data(to, state, bytes, id) == 0) {
        fail("a sequence's state could not be copied");
    }
    free(state);
}

/* What the host spent so far in a part of the steps on a GPU. */
static uint64_t host_ns(const char *part) {
    char name[32];
    snprintf(name, sizeof name, "%s_ns", part);
    return counter(name);
}

/* Removes from the cache what a variant's steps put there. */
static void go_back(struct llama_context *context, int here) {
    for (int s = 0; s < sequences; ++s) {
        llama_memory_seq_rm(llama_get_memory(context), s, here, -1);
    }
}

/* Wall time of a step at each depth for each variant, on one cache; the first sequence's last logits of each are appended to a file. */
void bench(void) {
    int n = 0, done = 0;
    llama_token *tokens = read_tokens(&n);
    context_size = context_size != 0 ? context_size : sequences * (deepest_of(depths) + warm + count + 256);
    struct llama_context *context = new_context(model), *prompter = context;
    struct llama_model *prompters_model = NULL;
    const int left = prompter_name != NULL ? 2 : 0; /* tokens that the context computes itself, as Vanward waits for writes of a context */
    if (prompter_name != NULL) {
        prompters_model = load_model(prompter_name);
        prompter = new_context(prompters_model);
    }
    struct llama_batch batch = llama_batch_init(ubatch, 0, 1);
    FILE *logits = logits_path == NULL ? NULL : fopen(logits_path, "wb");
    double *times = malloc((size_t)count * sizeof *times);
    char *all_depths = strdup(depths), *saved = NULL;
    for (char *depth_text = strtok_r(all_depths, ",", &saved); depth_text != NULL; depth_text = strtok_r(NULL, ",", &saved)) {
        const int here = atoi(depth_text);
        double begin = wall_seconds();
        for (int s = 0; s < sequences; ++s) {
            prefill_from(prompter, &batch, tokens + 7 * s, done, here - left, s);
        }
        llama_synchronize(prompter);
        for (int s = 0; s < sequences && prompter != context; ++s) {
            copy_state(prompter, context, s);
            prefill_from(context, &batch, tokens + 7 * s, here - left, here, s);
        }
        printf("prompt %d tokens %d seconds %.3f\n", here, sequences * (here - done), wall_seconds() - begin);
        done = here - left;
        char *all_variants = strdup(variants), *saved_variant = NULL;
        for (char *variant = strtok_r(all_variants, ",", &saved_variant); variant != NULL; variant = strtok_r(NULL, ",", &saved_variant)) {
            const char *name = become(variant, true);
            static const char *const parts[] = {"read", "plan", "launch"};
            uint64_t spent_before[3] = {0};
            double sum = 0;
            for (int i = 0; i < warm + count; ++i) {
                for (size_t part = 0; part < 3 && i == warm; ++part) {
                    spent_before[part] = host_ns(parts[part]);
                }
                const double spent = step(context, &batch, tokens, here, i);
                if (i >= warm) {
                    times[i - warm] = spent;
                    sum += spent;
                }
            }
            if (logits != NULL) {
                fwrite(llama_get_logits_ith(context, 0), sizeof(float), (size_t)vocabulary, logits);
            }
            for (int i = 0; i < traced && tracer.file != NULL; ++i) {
                char label[128];
                tracer.begin();
                const double spent = step(context, &batch, tokens, here, warm + count + i);
                snprintf(label, sizeof label, "%s\t%d\t%d\t%.4f", name, here, i, spent);
                tracer.end(tracer.file, label);
            }
            qsort(times, (size_t)count, sizeof *times, by_size);
            printf("bench %s %d median_ms %.4f least_ms %.4f mean_ms %.4f\n", name, here, times[count / 2], times[0], sum / count);
            printf("host %s %d", name, here);
            for (size_t part = 0; part < 3; ++part) {
                printf(" %s_us %.1f", parts[part], 1e-3 * (double)(host_ns(parts[part]) - spent_before[part]) / count);
            }
            printf("\n");
            print_counters();
            fflush(stdout);
            go_back(context, here);
        }
        free(all_variants);
    }
    if (logits != NULL) {
        fclose(logits);
    }
    if (tracer.file != NULL) {
        fclose(tracer.file);
    }
    if (prompter != context) {
        llama_free(prompter);
        llama_model_free(prompters_model);
    }
    free(times);
    free(all_depths);
    llama_batch_free(batch);
    llama_free(context);
    free(tokens);
}

/* Stock and variants by turns, with a warm-up each time. */
void beside(void) {
    enum { MOST = 8 };
    int n = 0, done = 0;
    llama_token *tokens = read_tokens(&n);
    context_size = context_size != 0 ? context_size : sequences * (deepest_of(depths) + warm + count + 256);
    struct llama_model *stock_model = load_model(stock_name);
    struct llama_context *context = new_context(model), *stock = new_context(stock_model);
    struct llama_batch batch = llama_batch_init(ubatch, 0, 1);
    double *times = malloc((size_t)(MOST * turns * count) * sizeof *times);
    char *all_depths = strdup(depths), *saved = NULL;
    for (char *depth_text = strtok_r(all_depths, ",", &saved); depth_text != NULL; depth_text = strtok_r(NULL, ",", &saved)) {
        const int here = atoi(depth_text);
        for (int s = 0; s < sequences; ++s) {
            prefill_from(stock, &batch, tokens + 7 * s, done, here, s);
            prefill_from(context, &batch, tokens + 7 * s, done, here, s);
        }
        done = here;
        int known = 0;
        char names[MOST][64];
        for (int turn = 0; turn < turns; ++turn) {
            char *all = NULL, *saved_variant = NULL;
            if (asprintf(&all, "stock,%s", variants) < 0) {
                fail("no memory");
            }
            known = 0;
            for (char *variant = strtok_r(all, ",", &saved_variant); variant != NULL && known < MOST; variant = strtok_r(NULL, ",", &saved_variant)) {
                struct llama_context *its = known == 0 ? stock : context;
                snprintf(names[known], sizeof names[known], "%s", known == 0 ? variant : become(variant, false));
                double *here_times = times + (known * turns + turn) * count;
                for (int i = -warm; i < count; ++i) {
                    const double spent = step(its, &batch, tokens, here, warm + i);
                    here_times[i < 0 ? 0 : i] = spent;
                }
                go_back(its, here);
                ++known;
            }
            free(all);
        }
        for (int v = 0; v < known; ++v) {
            printf("beside %s %d turns", names[v], here);
            for (int turn = 0; turn < turns; ++turn) {
                double *here_times = times + (v * turns + turn) * count;
                qsort(here_times, (size_t)count, sizeof *times, by_size);
                printf(" %.4f", here_times[count / 2]);
            }
            double *all_times = times + v * turns * count, sum = 0;
            for (int i = 0; i < turns * count; ++i) {
                sum += all_times[i];
            }
            qsort(all_times, (size_t)(turns * count), sizeof *times, by_size);
            printf(" median_ms %.4f least_ms %.4f mean_ms %.4f\n", all_times[turns * count / 2], all_times[0], sum / (turns * count));
        }
        print_counters();
        fflush(stdout);
    }
    free(times);
    free(all_depths);
    llama_batch_free(batch);
    llama_free(context);
    llama_free(stock);
    llama_model_free(stock_model);
    free(tokens);
}

/*
 * Steps of all sequences from the same depth on for each variant: how many logits differ from the first variant's, and the first sequence's top
 * tokens. A depth below 0 is counted from the text's end, up to which the steps go; the tokens that they are given are printed, too.
 */
void compare(void) {
    int n = 0;
    llama_token *tokens = read_tokens(&n);
    if (depth < 0) {
        count = -depth;
        depth += n;
        printf("given");
        for (int i = depth; i < n; ++i) {
            printf(" %d", tokens[i]);
        }
        printf("\n");
    }
    context_size = context_size != 0 ? context_size : sequences * (depth + count + 256);
    int *tops = malloc((size_t)count * sizeof *tops);
    struct llama_context *context = new_context(model);
    struct llama_batch batch = llama_batch_init(ubatch, 0, 1);
    for (int s = 0; s < sequences; ++s) {
        prefill_from(context, &batch, tokens + 7 * s, 0, depth, s);
    }
    const size_t row = (size_t)vocabulary;
    float *expected = NULL;
    char *all_variants = strdup(variants), *saved = NULL;
    for (char *variant = strtok_r(all_variants, ",", &saved); variant != NULL; variant = strtok_r(NULL, ",", &saved)) {
        const char *name = become(variant, true);
        const bool is_first = expected == NULL;
        if (is_first) {
            expected = malloc((size_t)(count * sequences) * row * sizeof *expected);
        }
        int first_step = -1;
        uint64_t differ = 0;
        double sum = 0;
        for (int i = 0; i < count; ++i) {
            for (int s = 0; s < sequences; ++s) {
                push(&batch, tokens[7 * s + depth + i], depth + i, s, true);
            }
            if (decode(context, &batch) != 0) {
                fail("a token could not be decoded");
            }
            for (int s = 0; s < sequences; ++s) {
                const float *found = llama_get_logits_ith(context, s);
                tops[i] = s == 0 ? top_of(found) : tops[i];
                float *wanted = expected + (size_t)(i * sequences + s) * row;
                if (is_first) {
                    memcpy(wanted, found, row * sizeof *wanted);
                }
                for (size_t t = 0; t < row; ++t) {
                    const bool equal = memcmp(found + t, wanted + t, sizeof *found) == 0;
                    differ += !equal;
                    first_step = !equal && first_step < 0 ? i : first_step;
                    sum += (double)found[t] * (double)found[t];
                }
            }
        }
        printf("compare %s depth %d steps %d sequences %d logits_differ %llu first_step %d sum %.10e\n", name, depth, count, sequences,
               (unsigned long long)differ, first_step, sum);
        printf("tops %s", name);
        for (int i = 0; i < count; ++i) {
            printf(" %d", tops[i]);
        }
        printf("\n");
        print_counters();
        fflush(stdout);
        for (int s = 0; s < sequences; ++s) {
            llama_memory_seq_rm(llama_get_memory(context), s, depth, -1);
        }
    }
    free(all_variants);
    free(expected);
    free(tops);
    llama_batch_free(batch);
    llama_free(context);
    free(tokens);
}
