/*
 * Drives an unmodified llama.cpp through its public API, with or without Vanward's backend in GGML_BACKEND_PATH.
 *
 *   driver GGML_BASE GGML LLAMA BACKENDS MODEL COMMAND [NAME=VALUE …]
 *
 * score   decodes a text with each token given, and prints the loss, the top tokens and what Vanward counted
 * steps   the same, a number of tokens for each line on stdin: for timing programs side by side. With state=FILE the prompt's state is read from
 *         that file, or written to it if there is none, without its last `unsaved` tokens, which are computed in any case
 * random  random operations on caches, for VANWARD_GGML_CHECK=1
 * restore steps of a sequence, whose saved state then replaces one of the same length, for VANWARD_GGML_CHECK=1
 * cases   a short run in each kind of context, whose logits are printed as one number
 * embed   embeddings of a prompt of each sequence, and of steps after it; an encoder has further prompts instead of steps
 * compare steps for several settings of Vanward's options on one cache: how many logits differ, and the top tokens
 * bench   wall time of a step of all sequences at several depths, for several settings of Vanward's options on one cache; with tracer=LIBRARY
 *         and trace=FILE also what the GPU did in some steps more; with prompter=DEVICE prompts are computed there, and their states copied.
 *         Lines `host` have what the host spent in a step on a GPU
 * memory  what the CPU and VANWARD0 report, before there is a model, and once it had a context
 * inputs  what the host writes into a mask, and what else does, through tests/apart_inputs.cpp in the backend of VANWARD_GGML_BACKEND; of no model
 * nodes   which attentions Vanward takes, asked without a model
 * beside  the same times for a model on the devices stock=NAME,… and one on the others, by turns in one process; the options are as they are by
 *         default where variants do not say them
 */
#include "driver.h"

const char *model_path, *text_path;
int depth = 1024, count = 64, threads = 1, batch_rows = 1, context_size = 0, seed = 1, operations = 200, verbose = 0;
const char *device_name, *prompter_name, *depths = "4096", *variants = "stock", *logits_path;
const char *tracer_path, *trace_path, *stock_name = "CUDA0", *state_path;
int turns = 3;
int ubatch = 512, warm = 8, traced = 5;
int type_k = TYPE_F16, flash = FLASH_AUTO, unified = 0, sequences = 1, swa_full = 0, random_text = 0;
int embeds = 0, pooling = POOLING_OF_MODEL;
int forget = 0, unsaved = 0;
int retries = 0; /* of batches that could not be computed, over the whole run */

struct llama_model *model;
int vocabulary;

static void print_memory(void) {
    for (const char *const *name = (const char *const[]){"CPU", "VANWARD0", NULL}; *name != NULL; ++name) {
        void *device = ggml_backend_dev_by_name(*name);
        size_t free = 0, total = 0;
        if (device != NULL) {
            ggml_backend_dev_memory(device, &free, &total);
        }
        printf("memory %s %zu %zu\n", *name, free, total);
    }
}

int main(int argc, char **argv) {
    if (argc < 7) {
        fprintf(stderr, "usage: driver GGML_BASE GGML LLAMA BACKENDS MODEL score|steps|random|restore|cases|embed|bench|beside|compare|memory|inputs|nodes [NAME=VALUE …]\n");
        return 2;
    }
    struct {
        const char *name;
        int *value;
    } numbers[] = {{"depth", &depth}, {"count", &count}, {"threads", &threads}, {"rows", &batch_rows}, {"context", &context_size},
                   {"seed", &seed}, {"operations", &operations}, {"verbose", &verbose}, {"type", &type_k}, {"flash", &flash},
                   {"ubatch", &ubatch}, {"warm", &warm}, {"traced", &traced}, {"unified", &unified}, {"sequences", &sequences},
                   {"swa_full", &swa_full}, {"random_text", &random_text}, {"pooling", &pooling}, {"retries", &retries}, {"turns", &turns},
                   {"forget", &forget}, {"unsaved", &unsaved}};
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
                     {"tracer", &tracer_path}, {"trace", &trace_path}, {"stock", &stock_name}, {"state", &state_path}};
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
    if (strcmp(command, "nodes") == 0) {
        nodes();
        return 0;
    }
    if (strcmp(command, "memory") == 0) {
        print_memory();
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
    } else if (strcmp(command, "memory") == 0) {
        llama_free(new_context(model));
        print_memory();
    } else {
        fail("unknown command");
    }
    llama_model_free(model);
    return 0;
}
