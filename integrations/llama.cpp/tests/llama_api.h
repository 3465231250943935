/*
 * llama.cpp's public functions that the tests call, as releases 0.5.0 and 0.7.0 have them, loaded at run time: one program then tests
 * any release. Structs that are passed by value are declared up to the last field that a test sets; they lie in memory, so that room
 * behind them does no harm.
 */
#ifndef LLAMA_API_H
#define LLAMA_API_H

#include <dlfcn.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef int32_t llama_token;
typedef int32_t llama_pos;
typedef int32_t llama_seq_id;

struct llama_model;
struct llama_context;
struct llama_vocab;
struct llama_memory;

enum { TYPE_F32 = 0, TYPE_F16 = 1, TYPE_Q8_0 = 8, TYPE_BF16 = 30 };
enum { FLASH_AUTO = -1, FLASH_OFF = 0, FLASH_ON = 1 };
enum { POOLING_OF_MODEL = -1, POOLING_NONE = 0, POOLING_MEAN = 1, POOLING_CLS = 2, POOLING_LAST = 3 };

struct model_params {
    void *const *devices; /* ends with NULL; NULL: all */
    char tail[504];
};

struct context_params {
    uint32_t n_ctx, n_batch, n_ubatch, n_seq_max, n_rs_seq, n_outputs_max, n_outputs_max_per_seq;
    int32_t n_threads, n_threads_batch;
    int32_t ctx_type, rope_scaling_type, pooling_type, attention_type, flash_attn_type;
    float rope[7];
    float defrag_thold;
    void *cb_eval, *cb_eval_user_data;
    int32_t type_k, type_v;
    /* 0.7.0 has eight bytes more here. Then abort_callback, its data, and flags. */
    char tail[512];
};

/* Flags in the tail. */
enum { FLAG_EMBEDDINGS, FLAG_OFFLOAD_KQV, FLAG_NO_PERF, FLAG_OP_OFFLOAD, FLAG_SWA_FULL, FLAG_KV_UNIFIED };

struct llama_batch {
    int32_t n_tokens;
    llama_token *token;
    float *embd;
    llama_pos *pos;
    int32_t *n_seq_id;
    llama_seq_id **seq_id;
    int8_t *logits;
};

struct ggml_context;
struct ggml_init_params {
    size_t mem_size;
    void *mem_buffer;
    bool no_alloc;
};

#define LLAMA_CALLS(X)                                                                                                         \
    X(const char *, ggml_version, (void))                                                                                      \
    X(void, ggml_backend_load_all_from_path, (const char *folder))                                                             \
    X(size_t, ggml_backend_reg_count, (void))                                                                                  \
    X(void, ggml_backend_dev_memory, (void *device, size_t *free, size_t *total))                                              \
    X(void *, ggml_backend_dev_by_name, (const char *name))                                                                    \
    X(void *, ggml_backend_reg_by_name, (const char *name))                                                                    \
    X(void *, ggml_backend_reg_get_proc_address, (void *registry, const char *name))                                           \
    X(struct ggml_context *, ggml_init, (struct ggml_init_params parameters))                                                  \
    X(void, ggml_free, (struct ggml_context * context))                                                                        \
    X(void *, ggml_new_tensor_3d, (struct ggml_context * context, int type, int64_t, int64_t, int64_t))                        \
    X(void *, ggml_new_tensor_4d, (struct ggml_context * context, int type, int64_t, int64_t, int64_t, int64_t))               \
    X(void *, ggml_set_name, (void *tensor, const char *name))                                                                 \
    X(void *, ggml_view_4d,                                                                                                    \
      (struct ggml_context * context, void *of, int64_t, int64_t, int64_t, int64_t, size_t, size_t, size_t, size_t offset))    \
    X(void *, ggml_permute, (struct ggml_context * context, void *of, int, int, int, int))                                     \
    X(void *, ggml_flash_attn_ext,                                                                                             \
      (struct ggml_context * context, void *q, void *k, void *v, void *mask, float scale, float max_bias, float soft_cap))     \
    X(void, ggml_flash_attn_ext_set_n_kv_max, (void *attention, int32_t n_kv_max))                                             \
    X(void *, ggml_backend_cpu_buffer_type, (void))                                                                            \
    X(void *, ggml_backend_alloc_ctx_tensors_from_buft, (struct ggml_context * context, void *type))                           \
    X(void, ggml_backend_buffer_clear, (void *buffer, uint8_t value))                                                          \
    X(void, ggml_backend_buffer_free, (void *buffer))                                                                          \
    X(bool, ggml_backend_dev_supports_op, (void *device, const void *op))                                                      \
    X(void, ggml_log_set, (void (*callback)(int, const char *, void *), void *context))                                        \
    X(void, llama_log_set, (void (*callback)(int, const char *, void *), void *context))                                       \
    X(struct model_params, llama_model_default_params, (void))                                                                 \
    X(struct context_params, llama_context_default_params, (void))                                                             \
    X(struct llama_model *, llama_model_load_from_file, (const char *path, struct model_params parameters))                    \
    X(void, llama_model_free, (struct llama_model * model))                                                                    \
    X(struct llama_context *, llama_init_from_model, (struct llama_model * model, struct context_params parameters))           \
    X(void, llama_free, (struct llama_context * context))                                                                      \
    X(const struct llama_vocab *, llama_model_get_vocab, (const struct llama_model *model))                                    \
    X(int32_t, llama_vocab_n_tokens, (const struct llama_vocab *vocab))                                                        \
    X(int32_t, llama_tokenize,                                                                                                 \
      (const struct llama_vocab *vocab, const char *text, int32_t bytes, llama_token *tokens, int32_t room, bool special,      \
       bool parse))                                                                                                            \
    X(struct llama_batch, llama_batch_init, (int32_t tokens, int32_t embd, int32_t sequences))                                 \
    X(void, llama_batch_free, (struct llama_batch batch))                                                                      \
    X(int32_t, llama_decode, (struct llama_context * context, struct llama_batch batch))                                       \
    X(int32_t, llama_encode, (struct llama_context * context, struct llama_batch batch))                                       \
    X(bool, llama_model_has_encoder, (const struct llama_model *model))                                                        \
    X(int32_t, llama_model_n_embd, (const struct llama_model *model))                                                          \
    X(float *, llama_get_embeddings_ith, (struct llama_context * context, int32_t i))                                          \
    X(float *, llama_get_embeddings_seq, (struct llama_context * context, llama_seq_id id))                                    \
    X(void, llama_synchronize, (struct llama_context * context))                                                               \
    X(float *, llama_get_logits_ith, (struct llama_context * context, int32_t i))                                              \
    X(struct llama_memory *, llama_get_memory, (const struct llama_context *context))                                          \
    X(void, llama_memory_clear, (struct llama_memory * memory, bool data))                                                     \
    X(bool, llama_memory_seq_rm, (struct llama_memory * memory, llama_seq_id id, llama_pos p0, llama_pos p1))                  \
    X(void, llama_memory_seq_cp, (struct llama_memory * memory, llama_seq_id from, llama_seq_id to, llama_pos p0, llama_pos p1)) \
    X(void, llama_memory_seq_keep, (struct llama_memory * memory, llama_seq_id id))                                            \
    X(llama_pos, llama_memory_seq_pos_max, (struct llama_memory * memory, llama_seq_id id))                                     \
    X(void, llama_memory_seq_add, (struct llama_memory * memory, llama_seq_id id, llama_pos p0, llama_pos p1, llama_pos by))   \
    X(size_t, llama_state_seq_get_size, (struct llama_context * context, llama_seq_id id))                                     \
    X(size_t, llama_state_seq_get_data, (struct llama_context * context, uint8_t *to, size_t bytes, llama_seq_id id))          \
    X(size_t, llama_state_seq_set_data, (struct llama_context * context, const uint8_t *from, size_t bytes, llama_seq_id id))

/* Not seen from outside: llama.cpp has functions of these names. */
#define X(result, name, arguments) extern __attribute__((visibility("hidden"))) result(*name) arguments;
LLAMA_CALLS(X)
#undef X

/* Loads ggml and llama.cpp, and the backends of `folder`, as llama.cpp's own programs do. `libraries`: ggml-base, ggml, llama. */
void load_llama(const char *const libraries[3], const char *backends);
void set_flag(struct context_params *parameters, int flag, bool value);

#endif
