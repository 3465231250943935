/* Commands that decode texts, do random operations, restore states, and compute embeddings. */
#include "driver.h"

/* ---- score and steps ---- */

/* The state of sequence 0 from the file; false if there is none. */
static bool read_state(struct llama_context *context) {
    FILE *file = state_path == NULL ? NULL : fopen(state_path, "rb");
    if (file == NULL) {
        return false;
    }
    fseek(file, 0, SEEK_END);
    const size_t bytes = (size_t)ftell(file);
    rewind(file);
    uint8_t *state = malloc(bytes);
    if (state == NULL || fread(state, 1, bytes, file) != bytes || llama_state_seq_set_data(context, state, bytes, 0) == 0) {
        fail("the state cannot be restored");
    }
    free(state);
    fclose(file);
    return true;
}

static void write_state(struct llama_context *context) {
    const size_t bytes = llama_state_seq_get_size(context, 0);
    uint8_t *state = malloc(bytes);
    FILE *file = fopen(state_path, "wb");
    if (file == NULL || state == NULL || llama_state_seq_get_data(context, state, bytes, 0) != bytes || fwrite(state, 1, bytes, file) != bytes ||
        fclose(file) != 0) {
        fail("the state cannot be saved");
    }
    free(state);
}

/* Each token of the text is given; `batch_rows` rows a step, as a draft of batch_rows − 1 tokens that are all accepted. */
void score(bool by_line) {
    int n = 0;
    llama_token *tokens = read_tokens(&n);
    if (n < depth + count + 1) {
        fail("the text is too short");
    }
    struct llama_context *context = new_context(model);
    struct llama_batch batch = llama_batch_init(512, 0, 1);
    if (!read_state(context)) {
        prefill(context, &batch, tokens, depth - unsaved, 0);
        if (state_path != NULL) {
            write_state(context);
        }
    }
    prefill_from(context, &batch, tokens, depth - unsaved, depth, 0);
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
            if (forget != 0 && at == depth + forget) {
                forget_summaries();
            }
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

void random_run(void) {
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
void restore(void) {
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

/* ---- nodes ---- */

/* Which attentions Vanward's CPU device takes, each a line `taken NAME 0` or `1`: of a new cache, of one into which keys were restored, and of
 * that by a model that selects tokens itself. The tensors are as llama.cpp makes them. */
void nodes(void) {
    enum { DIM = 64, HEADS = 6, KV_HEADS = 2, CELLS = 256, F16_BYTES = 2 };
    void *device = ggml_backend_dev_by_name("Vanward");
    struct ggml_context *context = ggml_init((struct ggml_init_params){.mem_size = 1 << 16, .no_alloc = true});
    void *roots[2], *views[2];
    for (int i = 0; i < 2; ++i) {
        roots[i] = ggml_set_name(ggml_new_tensor_3d(context, TYPE_F16, DIM * KV_HEADS, CELLS, 1), i == 0 ? "cache_k_l0" : "cache_v_l0");
    }
    void *q = ggml_new_tensor_4d(context, TYPE_F32, DIM, 1, HEADS, 1), *mask = ggml_new_tensor_4d(context, TYPE_F16, CELLS, 1, 1, 1);
    void *buffer = ggml_backend_alloc_ctx_tensors_from_buft(context, ggml_backend_cpu_buffer_type());
    ggml_backend_buffer_clear(buffer, 0);
    for (int i = 0; i < 2; ++i) {
        const size_t head = DIM * F16_BYTES, row = KV_HEADS * head;
        views[i] = ggml_permute(context, ggml_view_4d(context, roots[i], DIM, KV_HEADS, CELLS, 1, head, row, CELLS * row, 0), 0, 2, 1, 3);
    }
    void *attention = ggml_flash_attn_ext(context, q, views[0], views[1], mask, 0.125f, 0, 0);
    printf("taken new %d\n", ggml_backend_dev_supports_op(device, attention));
    ggml_backend_buffer_clear(buffer, 0x3c);
    printf("taken restored %d\n", ggml_backend_dev_supports_op(device, attention));
    ggml_flash_attn_ext_set_n_kv_max(attention, 64);
    printf("taken trained %d\n", ggml_backend_dev_supports_op(device, attention));
    print_counters();
    ggml_backend_buffer_free(buffer);
    ggml_free(context);
}

/* ---- cases ---- */

/* A prompt of each sequence, then steps of all of them: the last logits' sum of squares. */
void cases(void) {
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
void embed(void) {
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
