/*
 * Drives an unmodified llama.cpp through its public API, with or without Vanward's backend in GGML_BACKEND_PATH.
 *
 *   driver GGML_BASE GGML LLAMA BACKENDS MODEL COMMAND [NAME=VALUE …]
 *
 * score   decodes a text with each token given, and prints the loss, the top tokens and what Vanward counted
 * steps   the same, a number of tokens for each line on stdin: for timing programs side by side
 * random  random operations on caches, for VANWARD_GGML_CHECK=1
 * restore steps of a sequence, whose saved state then replaces one of the same length, for VANWARD_GGML_CHECK=1
 * cases   a short run in each kind of context, whose logits are printed as one number
 * embed   embeddings of a prompt of each sequence, and of steps after it; an encoder has further prompts instead of steps
 * compare steps for several settings of Vanward's options on one cache: how many logits differ, and the top tokens
 * bench   wall time of a step of all sequences at several depths, for several settings of Vanward's options on one cache; with tracer=LIBRARY
 *         and trace=FILE also what the GPU did in some steps more; with prompter=DEVICE prompts are computed there, and their states copied.
 *         Lines `host` have what the host spent in a step on a GPU
 * inputs  what the host writes into a mask, and what else does, through tests/apart_inputs.cpp in the backend of VANWARD_GGML_BACKEND; of no model
 * beside  the same times for a model on the devices stock=NAME,… and one on the others, by turns in one process; the options are as they are by
 *         default where variants do not say them
 */
#define _GNU_SOURCE
#include "llama_api.h"

#include <math.h>
#include <time.h>

static const char *model_path, *text_path;
static int depth = 1024, count = 64, threads = 1, batch_rows = 1, context_size = 0, seed = 1, operations = 200, verbose = 0;
static const char *device_name, *prompter_name, *depths = "4096", *variants = "stock", *logits_path;
static const char *tracer_path, *trace_path, *stock_name = "CUDA0";
static int turns = 3;
static int ubatch = 512, warm = 8, traced = 5;
static int type_k = TYPE_F16, flash = FLASH_AUTO, unified = 0, sequences = 1, swa_full = 0, random_text = 0;
static int embeds = 0, pooling = POOLING_OF_MODEL;
static int retries = 0; /* of batches that could not be computed, over the whole run */

static struct llama_model *model;
static int vocabulary;

static void on_log(int level, const char *text, void *context) {
    (void)context;
    static int last;
    last = level == 5 ? last : level; /* 5 continues a line */
    if (verbose > 0 ? last >= 5 - verbose || verbose > 3 : last == 4) {
        fputs(text, stderr);
    }
}

static double cpu_seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static double wall_seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static _Noreturn void fail(const char *what) {
    fprintf(stderr, "%s\n", what);
    exit(1);
}

/* ---- Vanward's counters ---- */

static uint64_t counter(const char *name) {
    void *registry = ggml_backend_reg_by_name("Vanward");
    uint64_t (*count_of)(const char *) = NULL;
    if (registry != NULL) {
        *(void **)&count_of = ggml_backend_reg_get_proc_address(registry, "vanward_ggml_counter");
    }
    return count_of == NULL ? 0 : count_of(name);
}

static void print_counters(void) {
    static const char *const names[] = {"sparse", "dense", "writes", "passed", "errors", "declined_rows", "declined_short",
                                        "declined_threads", "declined_type", "declined_trained", "declined_early", "stale", "shifts",
                                        "sequences", "summarised", "captured", "updated", "replayed", "eager", "kept_inputs", "read_inputs", "read_ns", "plan_ns",
                                        "launch_ns", "checked", "wrong_inputs",
                                        "wrong_summaries", "wrong_tokens", "wrong_outputs"};
    printf("counters");
    for (size_t i = 0; i < sizeof names / sizeof *names; ++i) {
        if (counter(names[i]) != 0) {
            printf(" %s=%llu", names[i], (unsigned long long)counter(names[i]));
        }
    }
    printf("\n");
}

/* ---- llama.cpp ---- */

/* The model on the devices of these names, or on all of them. */
static struct llama_model *load_model(const char *device_names) {
    struct model_params parameters = llama_model_default_params();
    void *devices[17] = {NULL};
    if (device_names != NULL) {
        char *names = strdup(device_names);
        int known = 0;
        for (char *name = strtok(names, ","); name != NULL; name = strtok(NULL, ",")) {
            if (known == 16 || (devices[known++] = ggml_backend_dev_by_name(name)) == NULL) {
                fail("device=NAME,…: there is none of that name, or there are more than 16");
            }
        }
        free(names);
        parameters.devices = devices;
    }
    struct llama_model *loaded = llama_model_load_from_file(model_path, parameters);
    if (loaded == NULL) {
        fail("the model cannot be loaded");
    }
    return loaded;
}

static struct llama_context *new_context(struct llama_model *of) {
    struct context_params p = llama_context_default_params();
    p.n_ctx = (uint32_t)(context_size != 0 ? context_size : depth + count + 64);
    p.n_batch = p.n_ubatch = (uint32_t)ubatch;
    p.n_seq_max = (uint32_t)sequences;
    p.n_threads = p.n_threads_batch = threads;
    p.flash_attn_type = flash;
    p.type_k = p.type_v = type_k;
    p.pooling_type = pooling;
    set_flag(&p, FLAG_EMBEDDINGS, embeds != 0);
    set_flag(&p, FLAG_KV_UNIFIED, unified != 0);
    set_flag(&p, FLAG_SWA_FULL, swa_full != 0);
    struct llama_context *context = llama_init_from_model(of, p);
    if (context == NULL) {
        fail("no context");
    }
    return context;
}

static llama_token *read_tokens(int *n) {
    if (random_text) { /* a model without a tokenizer */
        *n = 1 << 18;
        llama_token *tokens = malloc((size_t)*n * sizeof *tokens);
        for (int i = 0; i < *n; ++i) {
            tokens[i] = (llama_token)((uint32_t)i * 2654435761u >> 7) % vocabulary;
        }
        return tokens;
    }
    FILE *file = fopen(text_path, "rb");
    if (file == NULL) {
        fail("text=FILE cannot be read");
    }
    size_t room = 4u << 20;
    char *text = malloc(room);
    size_t bytes = fread(text, 1, room, file);
    fclose(file);
    llama_token *tokens = malloc(bytes * sizeof *tokens);
    *n = llama_tokenize(llama_model_get_vocab(model), text, (int32_t)bytes, tokens, (int32_t)bytes, true, false);
    free(text);
    return tokens;
}

static void push(struct llama_batch *batch, llama_token token, llama_pos pos, llama_seq_id id, bool output) {
    int i = batch->n_tokens++;
    batch->token[i] = token;
    batch->pos[i] = pos;
    batch->n_seq_id[i] = 1;
    batch->seq_id[i][0] = id;
    batch->logits[i] = output;
}

static int decode(struct llama_context *context, struct llama_batch *batch) {
    int status = llama_decode(context, *batch);
    for (; status != 0 && retries > 0; --retries) {
        printf("retried after %d\n", status);
        status = llama_decode(context, *batch);
    }
    batch->n_tokens = 0;
    return status;
}

/* What a decoder with an encoder attends to: the first tokens of the text, encoded. */
static void encode_if_needed(struct llama_context *context, struct llama_batch *batch, const llama_token *tokens) {
    if (!llama_model_has_encoder(model)) {
        return;
    }
    for (int s = 0; s < sequences; ++s) {
        for (int i = 0; i < 40 + s; ++i) {
            push(batch, tokens[i], i, s, true);
        }
    }
    const int status = llama_encode(context, *batch);
    batch->n_tokens = 0;
    if (status != 0) {
        fail("the text could not be encoded");
    }
}

static void prefill_from(struct llama_context *context, struct llama_batch *batch, const llama_token *tokens, int from, int n, llama_seq_id id) {
    for (int i = from; i < n;) {
        for (int j = 0; j < ubatch && i < n; ++j, ++i) {
            push(batch, tokens[i], i, id, false);
        }
        if (decode(context, batch) != 0) {
            fail("the prompt could not be decoded");
        }
    }
}

static void prefill(struct llama_context *context, struct llama_batch *batch, const llama_token *tokens, int n, llama_seq_id id) {
    prefill_from(context, batch, tokens, 0, n, id);
}

static int top_of(const float *logits) {
    int best = 0;
    for (int i = 1; i < vocabulary; ++i) {
        best = logits[i] > logits[best] ? i : best;
    }
    return best;
}

/* −ln of the probability of `token`; `top` becomes the most probable one, `lead` what its logit is ahead of the next. */
static double loss_of(const float *logits, llama_token token, int *top, float *lead) {
    const int best = top_of(logits);
    *lead = INFINITY;
    for (int i = 0; i < vocabulary; ++i) {
        *lead = i != best && logits[best] - logits[i] < *lead ? logits[best] - logits[i] : *lead;
    }
    double sum = 0;
    for (int i = 0; i < vocabulary; ++i) {
        sum += exp((double)logits[i] - (double)logits[best]);
    }
    *top = best;
    return log(sum) + (double)logits[best] - (double)logits[token];
}

/* ---- score and steps ---- */

/* Each token of the text is given; `batch_rows` rows a step, as a draft of batch_rows − 1 tokens that are all accepted. */
static void score(bool by_line) {
    int n = 0;
    llama_token *tokens = read_tokens(&n);
    if (n < depth + count + 1) {
        fail("the text is too short");
    }
    struct llama_context *context = new_context(model);
    struct llama_batch batch = llama_batch_init(512, 0, 1);
    prefill(context, &batch, tokens, depth, 0);
    double loss = 0, spent = 0, wall = 0;
    int at = depth, *tops = malloc((size_t)count * sizeof *tops), wanted = count;
    float *leads = malloc((size_t)count * sizeof *leads);
    if (by_line) {
        printf("ready\n");
        fflush(stdout);
    }
    while (!by_line || scanf("%d", &wanted) == 1) {
        double begin = cpu_seconds(), begin_wall = wall_seconds();
        int first = at;
        for (; at < first + wanted && at < depth + count; at += batch_rows) {
            for (int r = 0; r < batch_rows; ++r) {
                push(&batch, tokens[at + r], at + r, 0, true);
            }
            if (decode(context, &batch) != 0) {
                fail("a token could not be decoded");
            }
            for (int r = 0; r < batch_rows; ++r) {
                loss += loss_of(llama_get_logits_ith(context, r), tokens[at + r + 1], &tops[at + r - depth], &leads[at + r - depth]);
            }
        }
        spent = cpu_seconds() - begin;
        wall = wall_seconds() - begin_wall;
        if (!by_line) {
            break;
        }
        printf("step %d %.6f %.6f\n", at - first, spent, wall);
        fflush(stdout);
    }
    int done = at - depth;
    printf("tokens %d loss %.6f cpu_ms %.3f\n", done, loss / done, 1e3 * spent / done);
    printf("tops");
    for (int i = 0; i < done; ++i) {
        printf(" %d", tops[i]);
    }
    printf("\nleads");
    for (int i = 0; i < done; ++i) {
        printf(" %.3f", (double)leads[i]);
    }
    printf("\n");
    print_counters();
    llama_batch_free(batch);
    llama_free(context);
    free(tops);
    free(leads);
    free(tokens);
}

/* ---- random operations ---- */

static uint64_t random_state;

static int below(int n) {
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return (int)((random_state >> 33) % (uint64_t)n);
}

enum { SEQUENCES = 4 };

struct slots {
    int len[SEQUENCES];
    uint8_t *saved[SEQUENCES];
    size_t saved_bytes[SEQUENCES];
};

/* What an engine does to its cache, in any order. */
static void random_operation(struct llama_context *context, struct llama_batch *batch, struct slots *s, int room) {
    struct llama_memory *memory = llama_get_memory(context);
    const int id = below(SEQUENCES), what = below(100);
    if (what < 55) { /* a step: γ + 1 rows of some sequences */
        for (int i = 0; i < SEQUENCES; ++i) {
            if ((i == id || below(3) == 0) && s->len[i] > 0) {
                int rows = below(3) == 0 ? 1 + below(5) : 1;
                for (int r = 0; r < rows && s->len[i] + r < room; ++r) {
                    push(batch, below(vocabulary), s->len[i] + r, i, true);
                }
            }
        }
        if (batch->n_tokens > 0 && decode(context, batch) != 0) { /* the cache is full */
            for (int i = 0; i < SEQUENCES; ++i) {
                llama_memory_seq_rm(memory, i, s->len[i], -1);
            }
        }
    } else if (what < 67) { /* a prompt, or its continuation */
        int rows = 1 + below(90);
        rows = s->len[id] + rows > room ? room - s->len[id] : rows;
        for (int r = 0; r < rows; ++r) {
            push(batch, below(vocabulary), s->len[id] + r, id, r == rows - 1);
        }
        if (rows > 0 && decode(context, batch) != 0) {
            llama_memory_seq_rm(memory, id, s->len[id], -1);
        }
    } else if (what < 79) { /* rollback */
        int keep = s->len[id] - below(8);
        keep = keep < 0 ? 0 : below(10) == 0 ? below(keep + 1) : keep;
        llama_memory_seq_rm(memory, id, keep, -1);
    } else if (what < 83) { /* the slot is used anew */
        llama_memory_seq_rm(memory, id, -1, -1);
    } else if (what < 87 && s->len[id] > 24 && type_k == TYPE_F16) { /* context shift: keys are rotated at the next step; ggml rotates no bfloat16 */
        int cut = 1 + below(8), keep = 1 + below(4);
        llama_memory_seq_rm(memory, id, keep, keep + cut);
        llama_memory_seq_add(memory, id, keep + cut, -1, -cut);
    } else if (what < 90) { /* one sequence's tokens for another */
        int to = (id + 1 + below(SEQUENCES - 1)) % SEQUENCES;
        llama_memory_seq_rm(memory, to, -1, -1);
        llama_memory_seq_cp(memory, id, to, -1, -1);
    } else if (what < 94) { /* save */
        free(s->saved[id]);
        s->saved_bytes[id] = llama_state_seq_get_size(context, id);
        s->saved[id] = malloc(s->saved_bytes[id] + 1);
        s->saved_bytes[id] = llama_state_seq_get_data(context, s->saved[id], s->saved_bytes[id], id);
    } else if (what < 98) { /* restore, into any sequence */
        int to = below(SEQUENCES);
        if (s->saved[id] != NULL) {
            llama_memory_seq_rm(memory, to, -1, -1);
            if (llama_state_seq_set_data(context, s->saved[id], s->saved_bytes[id], to) == 0) {
                llama_memory_seq_rm(memory, to, -1, -1);
            }
        }
    } else if (below(4) == 0) {
        llama_memory_clear(memory, below(2) == 0);
    }
    for (int i = 0; i < SEQUENCES; ++i) {
        s->len[i] = llama_memory_seq_pos_max(memory, i) + 1;
    }
}

static void random_run(void) {
    const int most_threads = threads;
    sequences = SEQUENCES;
    struct slots slots;
    memset(&slots, 0, sizeof slots);
    random_state = (uint64_t)seed;
    printf("seed %d\n", seed);
    struct llama_batch batch = llama_batch_init(512, 0, 1);
    struct llama_context *context = NULL;
    for (int i = 0; i < operations; ++i) {
        if (context == NULL || below(400) == 0) { /* another context, with another kind of cache */
            if (context != NULL) {
                llama_free(context);
            }
            unified = below(2);
            type_k = below(4) == 0 ? TYPE_BF16 : TYPE_F16;
            threads = 1 + below(most_threads);
            flash = below(2) == 0 ? FLASH_AUTO : FLASH_ON;
            context_size = unified ? 512 : 512 * SEQUENCES;
            for (int s = 0; s < SEQUENCES; ++s) {
                free(slots.saved[s]);
            }
            memset(&slots, 0, sizeof slots);
            context = new_context(model);
        }
        random_operation(context, &batch, &slots, unified ? 200 : 480);
    }
    llama_free(context);
    llama_batch_free(batch);
    for (int s = 0; s < SEQUENCES; ++s) {
        free(slots.saved[s]);
    }
    print_counters();
}

/* ---- restore ---- */

static void some_steps(struct llama_context *context, struct llama_batch *batch, const llama_token *tokens, int from, llama_seq_id id) {
    for (int i = from; i < from + count; ++i) {
        push(batch, tokens[i], i, id, true);
        if (decode(context, batch) != 0) {
            fail("a token could not be decoded");
        }
    }
}

/* Keys change while sequences seem to grow by one token a step: a state is restored, and a sequence copied, over one of the same length. */
static void restore(void) {
    int n = 0;
    const llama_token *tokens = read_tokens(&n);
    sequences = 2;
    struct llama_context *context = new_context(model);
    struct llama_memory *memory = llama_get_memory(context);
    struct llama_batch batch = llama_batch_init(512, 0, 1);
    prefill(context, &batch, tokens, depth, 0);
    some_steps(context, &batch, tokens, depth, 0);
    const size_t bytes = llama_state_seq_get_size(context, 0);
    uint8_t *saved = malloc(bytes);
    llama_state_seq_get_data(context, saved, bytes, 0);
    for (llama_seq_id id = 0; id < 2; ++id) { /* other tokens, as many */
        llama_memory_seq_rm(memory, id, -1, -1);
        prefill(context, &batch, tokens + 1000, depth, id);
        some_steps(context, &batch, tokens + 1000, depth, id);
    }
    print_counters();
    llama_memory_seq_rm(memory, 0, -1, -1);
    if (llama_state_seq_set_data(context, saved, bytes, 0) == 0) {
        fail("the state could not be restored");
    }
    some_steps(context, &batch, tokens, depth + count, 0);
    llama_memory_seq_rm(memory, 0, depth + count, -1);
    llama_memory_seq_rm(memory, 1, -1, -1);
    llama_memory_seq_cp(memory, 0, 1, -1, -1);
    some_steps(context, &batch, tokens, depth + count, 1);
    print_counters();
    free(saved);
    llama_batch_free(batch);
    llama_free(context);
}

/* ---- cases ---- */

/* A prompt of each sequence, then steps of all of them: the last logits' sum of squares. */
static void cases(void) {
    int n = 0;
    llama_token *tokens = read_tokens(&n);
    struct llama_context *context = new_context(model);
    struct llama_batch batch = llama_batch_init(512, 0, 1);
    encode_if_needed(context, &batch, tokens);
    for (int s = 0; s < sequences; ++s) {
        prefill(context, &batch, tokens + 7 * s, depth + 11 * s, s);
    }
    double sum = 0;
    for (int i = 0; i < count; ++i) {
        for (int s = 0; s < sequences; ++s) {
            push(&batch, tokens[7 * s + depth + 11 * s + i], depth + 11 * s + i, s, true);
        }
        if (decode(context, &batch) != 0) {
            fail("a token could not be decoded");
        }
        for (int s = 0; s < sequences; ++s) {
            const float *logits = llama_get_logits_ith(context, s);
            for (int t = 0; t < vocabulary; ++t) {
                sum += (double)logits[t] * (double)logits[t];
            }
        }
    }
    printf("sum %.10e\n", sum / count / sequences / vocabulary);
    print_counters();
    llama_batch_free(batch);
    llama_free(context);
    free(tokens);
}

/* ---- embeddings ---- */

/* Every bit of the numbers is printed. */
static void print_embeddings(struct llama_context *context, const int *last_rows) {
    const int channels = llama_model_n_embd(model);
    for (int s = 0; s < sequences; ++s) {
        const float *found = pooling == POOLING_NONE ? llama_get_embeddings_ith(context, last_rows[s]) : llama_get_embeddings_seq(context, s);
        if (found == NULL) {
            fail("there is no embedding");
        }
        printf("embedding");
        for (int c = 0; c < channels; ++c) {
            printf(" %a", (double)found[c]);
        }
        printf("\n");
    }
}

/* The first call has the prompts of all sequences, each further one `batch_rows` tokens of each; for an encoder, those before them again, too. */
static void embed(void) {
    int n = 0;
    llama_token *tokens = read_tokens(&n);
    embeds = 1;
    struct llama_context *context = new_context(model);
    const bool is_encoder = llama_get_memory(context) == NULL;
    struct llama_batch batch = llama_batch_init(ubatch, 0, 1);
    int last_rows[16];
    if (sequences > 16) {
        fail("embed takes up to 16 sequences");
    }
    for (int i = 0; i <= count; ++i) {
        for (int s = 0; s < sequences; ++s) {
            const int end = depth + 11 * s + i * batch_rows;
            for (int at = i == 0 || is_encoder ? 0 : end - batch_rows; at < end; ++at) {
                push(&batch, tokens[7 * s + at], at, s, true);
            }
            last_rows[s] = batch.n_tokens - 1;
        }
        const int status = is_encoder ? llama_encode(context, batch) : llama_decode(context, batch);
        batch.n_tokens = 0;
        if (status != 0) {
            fail("a batch could not be computed");
        }
        print_embeddings(context, last_rows);
    }
    print_counters();
    llama_batch_free(batch);
    llama_free(context);
    free(tokens);
}

/* ---- bench ---- */

/* Sets the options VANWARD_GGML_* of a variant, such as "minmax/BUDGET=4096/STRATEGY=sparse", and returns its name. DENSE_BELOW is 0 if `sparse`. */
static const char *become(char *variant, bool sparse) {
    static const char *const changed[] = {"ENABLED", "STRATEGY", "BUDGET", "DENSE_BELOW", "DENSE_LAYERS", "GRAPHS"};
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
static void start_tracer(void) {
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
static void bench(void) {
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
static void beside(void) {
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
static void compare(void) {
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

int main(int argc, char **argv) {
    if (argc < 7) {
        fprintf(stderr, "usage: driver GGML_BASE GGML LLAMA BACKENDS MODEL score|steps|random|restore|cases|embed|bench|beside|compare|memory|inputs [NAME=VALUE …]\n");
        return 2;
    }
    struct {
        const char *name;
        int *value;
    } numbers[] = {{"depth", &depth}, {"count", &count}, {"threads", &threads}, {"rows", &batch_rows}, {"context", &context_size},
                   {"seed", &seed}, {"operations", &operations}, {"verbose", &verbose}, {"type", &type_k}, {"flash", &flash},
                   {"ubatch", &ubatch}, {"warm", &warm}, {"traced", &traced}, {"unified", &unified}, {"sequences", &sequences},
                   {"swa_full", &swa_full}, {"random_text", &random_text}, {"pooling", &pooling}, {"retries", &retries}, {"turns", &turns}};
    for (int i = 7; i < argc; ++i) {
        const char *equals = strchr(argv[i], '=');
        bool known = equals != NULL && strncmp(argv[i], "text=", 5) == 0;
        if (known) {
            text_path = equals + 1;
        }
        struct {
            const char *name;
            const char **value;
        } texts[] = {{"device", &device_name}, {"prompter", &prompter_name}, {"depths", &depths}, {"variants", &variants}, {"logits", &logits_path},
                     {"tracer", &tracer_path}, {"trace", &trace_path}, {"stock", &stock_name}};
        for (size_t j = 0; equals != NULL && j < sizeof texts / sizeof *texts; ++j) {
            if (strlen(texts[j].name) == (size_t)(equals - argv[i]) && strncmp(argv[i], texts[j].name, (size_t)(equals - argv[i])) == 0) {
                *texts[j].value = equals + 1;
                known = true;
            }
        }
        for (size_t j = 0; equals != NULL && j < sizeof numbers / sizeof *numbers; ++j) {
            if (strlen(numbers[j].name) == (size_t)(equals - argv[i]) && strncmp(argv[i], numbers[j].name, (size_t)(equals - argv[i])) == 0) {
                *numbers[j].value = atoi(equals + 1);
                known = true;
            }
        }
        if (!known) {
            fprintf(stderr, "unknown argument %s\n", argv[i]);
            return 2;
        }
    }
    model_path = argv[5];
    if (tracer_path != NULL) {
        start_tracer();
    }
    load_llama((const char *const[]){argv[1], argv[2], argv[3]}, argv[4]);
    ggml_log_set(on_log, NULL);
    llama_log_set(on_log, NULL);
    const char *command = argv[6];
    if (strcmp(command, "memory") == 0) {
        for (const char *const *name = (const char *const[]){"CPU", "VANWARD0", NULL}; *name != NULL; ++name) {
            void *device = ggml_backend_dev_by_name(*name);
            size_t free = 0, total = 0;
            if (device != NULL) {
                ggml_backend_dev_memory(device, &free, &total);
            }
            printf("memory %s %zu %zu\n", *name, free, total);
        }
        return 0;
    }
    if (strcmp(command, "inputs") == 0) {
        void *library = dlopen(getenv("VANWARD_GGML_BACKEND"), RTLD_NOW);
        int (*play)(void) = NULL;
        *(void **)&play = library == NULL ? NULL : dlsym(library, "apart_inputs");
        if (play == NULL || play() != 0) {
            fail(play == NULL ? dlerror() : "an input was taken for another one");
        }
        print_counters();
        return 0;
    }
    model = load_model(device_name);
    vocabulary = llama_vocab_n_tokens(llama_model_get_vocab(model));
    if (strcmp(command, "score") == 0 || strcmp(command, "steps") == 0) {
        score(strcmp(command, "steps") == 0);
    } else if (strcmp(command, "random") == 0) {
        random_run();
    } else if (strcmp(command, "restore") == 0) {
        restore();
    } else if (strcmp(command, "cases") == 0) {
        cases();
    } else if (strcmp(command, "embed") == 0) {
        embed();
    } else if (strcmp(command, "bench") == 0) {
        bench();
    } else if (strcmp(command, "beside") == 0) {
        beside();
    } else if (strcmp(command, "compare") == 0) {
        compare();
    } else {
        fail("unknown command");
    }
    llama_model_free(model);
    return 0;
}
