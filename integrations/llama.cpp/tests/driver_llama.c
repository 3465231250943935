/* Calls of llama.cpp, and what Vanward counted. */
#include "driver.h"

#include <math.h>
#include <time.h>

/* ---- llama.cpp's functions ---- */

#define X(result, name, arguments) result(*name) arguments;
LLAMA_CALLS(X)
#undef X

static void *find_function(void *const *libraries, const char *name) {
    for (int i = 0; i < 3; ++i) {
        void *found = libraries[i] == NULL ? NULL : dlsym(libraries[i], name);
        if (found != NULL) {
            return found;
        }
    }
    fprintf(stderr, "llama.cpp has no function %s\n", name);
    exit(2);
}

void load_llama(const char *const libraries[3], const char *backends) {
    void *handles[3];
    for (int i = 0; i < 3; ++i) {
        handles[i] = dlopen(libraries[i], RTLD_NOW | RTLD_GLOBAL);
        if (handles[i] == NULL) {
            fprintf(stderr, "%s\n", dlerror());
            exit(2);
        }
    }
#define X(result, name, arguments) *(void **)&name = find_function(handles, #name);
    LLAMA_CALLS(X)
#undef X
    ggml_backend_load_all_from_path(backends);
}

void set_flag(struct context_params *parameters, int flag, bool value) {
    const int minor = atoi(strchr(ggml_version(), '.') + 1);
    parameters->tail[(minor >= 26 ? 8 : 0) + 16 + flag] = value;
}

/* ---- times and messages ---- */

void on_log(int level, const char *text, void *context) {
    (void)context;
    static int last;
    last = level == 5 ? last : level; /* 5 continues a line */
    if (verbose > 0 ? last >= 5 - verbose || verbose > 3 : last == 4) {
        fputs(text, stderr);
    }
}

double cpu_seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

double wall_seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

_Noreturn void fail(const char *what) {
    fprintf(stderr, "%s\n", what);
    exit(1);
}

/* ---- Vanward's counters ---- */

uint64_t counter(const char *name) {
    void *registry = ggml_backend_reg_by_name("Vanward");
    uint64_t (*count_of)(const char *) = NULL;
    if (registry != NULL) {
        *(void **)&count_of = ggml_backend_reg_get_proc_address(registry, "vanward_ggml_counter");
    }
    return count_of == NULL ? 0 : count_of(name);
}

void forget_summaries(void) {
    void (*forget_all)(void) = NULL;
    *(void **)&forget_all = ggml_backend_reg_get_proc_address(ggml_backend_reg_by_name("Vanward"), "vanward_ggml_forget_summaries");
    forget_all();
}

void print_counters(void) {
    static const char *const names[] = {"sparse", "dense", "selected_beside", "writes", "passed", "errors", "declined_rows", "declined_short",
                                        "declined_threads", "declined_type", "declined_trained", "declined_early", "stale", "shifts",
                                        "sequences", "summarised", "captured", "updated", "replayed", "eager", "looked_through", "kept_inputs", "read_inputs", "read_ns", "plan_ns",
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
struct llama_model *load_model(const char *device_names) {
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

struct llama_context *new_context(struct llama_model *of) {
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

llama_token *read_tokens(int *n) {
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

void push(struct llama_batch *batch, llama_token token, llama_pos pos, llama_seq_id id, bool output) {
    int i = batch->n_tokens++;
    batch->token[i] = token;
    batch->pos[i] = pos;
    batch->n_seq_id[i] = 1;
    batch->seq_id[i][0] = id;
    batch->logits[i] = output;
}

int decode(struct llama_context *context, struct llama_batch *batch) {
    int status = llama_decode(context, *batch);
    for (; status != 0 && retries > 0; --retries) {
        printf("retried after %d\n", status);
        status = llama_decode(context, *batch);
    }
    batch->n_tokens = 0;
    return status;
}

/* What a decoder with an encoder attends to: the first tokens of the text, encoded. */
void encode_if_needed(struct llama_context *context, struct llama_batch *batch, const llama_token *tokens) {
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

void prefill_from(struct llama_context *context, struct llama_batch *batch, const llama_token *tokens, int from, int n, llama_seq_id id) {
    for (int i = from; i < n;) {
        for (int j = 0; j < ubatch && i < n; ++j, ++i) {
            push(batch, tokens[i], i, id, false);
        }
        if (decode(context, batch) != 0) {
            fail("the prompt could not be decoded");
        }
    }
}

void prefill(struct llama_context *context, struct llama_batch *batch, const llama_token *tokens, int n, llama_seq_id id) {
    prefill_from(context, batch, tokens, 0, n, id);
}

int top_of(const float *logits) {
    int best = 0;
    for (int i = 1; i < vocabulary; ++i) {
        best = logits[i] > logits[best] ? i : best;
    }
    return best;
}

/* −ln of the probability of `token`; `top` becomes the most probable one, `lead` what its logit is ahead of the next. */
double loss_of(const float *logits, llama_token token, int *top, float *lead) {
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
