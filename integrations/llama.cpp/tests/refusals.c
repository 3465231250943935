/*
 * `refusals LIBRARY VERSION`: loads the backend as a ggml would whose backend API has that version, and prints what it logs. Exits
 * with 0 if it gave a registry of that version, with 1 if it refused.
 */
#include <dlfcn.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))

/* The registry of a CPU backend that is there already; its first field is the version. */
static struct {
    int api_version;
    void *calls[8];
} cpu;

static void on_log(int level, const char *text, void *context) {
    (void)level;
    (void)context;
    fputs(text, stdout);
}

#define CALLED_LATER(name)                                                                                                     \
    EXPORT void name(void);                                                                                                    \
    void name(void) { abort(); }

CALLED_LATER(ggml_backend_buffer_free)
CALLED_LATER(ggml_backend_buffer_get_base)
CALLED_LATER(ggml_backend_buffer_get_size)
CALLED_LATER(ggml_backend_buffer_get_type)
CALLED_LATER(ggml_backend_buft_alloc_buffer)
CALLED_LATER(ggml_backend_buft_is_host)
CALLED_LATER(ggml_backend_dev_backend_reg)
CALLED_LATER(ggml_backend_dev_buffer_type)
CALLED_LATER(ggml_backend_dev_description)
CALLED_LATER(ggml_backend_dev_get)
CALLED_LATER(ggml_backend_dev_get_props)
CALLED_LATER(ggml_backend_dev_init)
CALLED_LATER(ggml_backend_dev_name)
CALLED_LATER(ggml_backend_event_free)
CALLED_LATER(ggml_backend_event_new)
CALLED_LATER(ggml_backend_event_record)
CALLED_LATER(ggml_backend_event_wait)
CALLED_LATER(ggml_backend_free)
CALLED_LATER(ggml_backend_graph_compute)
CALLED_LATER(ggml_backend_graph_compute_async)
CALLED_LATER(ggml_backend_reg_dev_count)
CALLED_LATER(ggml_backend_reg_dev_get)
CALLED_LATER(ggml_backend_reg_get_proc_address)
CALLED_LATER(ggml_backend_synchronize)
CALLED_LATER(ggml_fp32_to_bf16_row)
CALLED_LATER(ggml_fp32_to_fp16_row)
CALLED_LATER(ggml_free)
CALLED_LATER(ggml_get_rows)
CALLED_LATER(ggml_graph_add_node)
CALLED_LATER(ggml_graph_clear)
CALLED_LATER(ggml_graph_n_nodes)
CALLED_LATER(ggml_graph_nodes)
CALLED_LATER(ggml_graph_overhead_custom)
CALLED_LATER(ggml_init)
CALLED_LATER(ggml_is_quantized)
CALLED_LATER(ggml_new_graph_custom)
CALLED_LATER(ggml_new_tensor_1d)
CALLED_LATER(ggml_op_name)
CALLED_LATER(ggml_reset)
CALLED_LATER(ggml_type_name)
CALLED_LATER(ggml_view_2d)

EXPORT void *ggml_backend_dev_by_type(int type);
void *ggml_backend_dev_by_type(int type) {
    (void)type;
    return NULL;
}
EXPORT size_t ggml_backend_dev_count(void);
size_t ggml_backend_dev_count(void) { return 0; }
EXPORT size_t ggml_backend_reg_count(void);
size_t ggml_backend_reg_count(void) { return 1; }
EXPORT void *ggml_backend_reg_get(size_t index);
void *ggml_backend_reg_get(size_t index) {
    (void)index;
    return &cpu;
}
EXPORT const char *ggml_version(void);
const char *ggml_version(void) { return "0.99.0"; }
EXPORT void ggml_log_get(void (**callback)(int, const char *, void *), void **context);
void ggml_log_get(void (**callback)(int, const char *, void *), void **context) {
    *callback = on_log;
    *context = NULL;
}

int main(int argc, char **argv) {
    void *library = argc == 3 ? dlopen(argv[1], RTLD_NOW | RTLD_LOCAL) : NULL;
    if (library == NULL) {
        fprintf(stderr, "%s\n", argc == 3 ? dlerror() : "usage: refusals LIBRARY VERSION");
        return 2;
    }
    cpu.api_version = atoi(argv[2]);
    void *(*init)(void);
    *(void **)&init = dlsym(library, "ggml_backend_init");
    int *registry = init();
    return registry == NULL ? 1 : *registry == cpu.api_version ? 0 : 2;
}
