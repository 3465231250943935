/* vanward-engine: one prompt, continued in every mode, and tables of what each cost. Returns 0 only if the modes that must give
 * the same tokens do. */
#define _POSIX_C_SOURCE 200809L
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "decoder.h"
#include "drafting.h"
#include "tiny.h"
#include "tokenizer.h"

#ifndef ENGINE_PROMPT
#define ENGINE_PROMPT "prompt.txt"
#endif

typedef struct {
  const char *option, *title;
} mode_name;

/* Decoded by the batch. */
static const mode_name hows[BATCH_HOWS] = {
    [BATCH_DENSE] = {"dense", "dense"},
    [BATCH_SPARSE] = {"sparse", "sparse"},
    [BATCH_LOOKUP] = {"lookup", "dense, drafted by prompt lookup"},
    [BATCH_LOOKUP_TREE] = {"lookup-tree", "dense, drafted by lookup trees"},
    [BATCH_SELF] = {"self", "SELF: dense, drafted by sparse"},
    [BATCH_SELF_LOOKUP] = {"self-lookup", "SELF, or lookup where it pays"},
};

/* Made of single calls. */
static const mode_name names[STRATEGIES] = {
    [DENSE] = {"dense-calls", "dense"},
    [SPARSE] = {"sparse-calls", "sparse: blocks by min and max"},
    [BY_AXIS] = {"axis", "sparse: blocks by axes"},
    [WITH_TAIL] = {"tail", "blocks by axes, the rest a term"},
    [TWO_LEVEL] = {"two-level", "two levels: blocks, INT4 tokens"},
    [FORESEEN] = {"foreseen", "sparse, foreseen by the Forecast"},
    [FORESEEN_TAIL] = {"foreseen-tail", "foreseen by axes, the rest a term"},
    [PREVIOUS] = {"previous", "sparse, guessed: last step"},
    [HOLT] = {"holt", "sparse, guessed: Holt"},
    [FORECAST] = {"forecast", "sparse, guessed: Forecast"},
};

/* How sparse steps of the batch attend with --host-kv. */
static const struct {
  const char *name;
  uint32_t strategy;
} strategies[] = {{"serial", VWD_STRATEGY_SERIAL}, {"async-tls", VWD_STRATEGY_ASYNC_TLS}, {"sparda", VWD_STRATEGY_SPARDA}, {"vanward", VWD_STRATEGY_VANWARD}};

enum { PIECES = 20 }; /* of the text that --check-self reads */
static const float ratios[RATIOS] = {1.0f, 1.25f, 1.5f};

typedef struct {
  const char *model, *prompt, *trace;
  bool tiny, accuracy, loss, check, drafts, calls; /* the last two: which table to make */
  bool int4;                                        /* keep whole pages so, in single calls */
  int tokens, threads;
  int how, only; /* the one mode to run, of the batch or of the calls, or −1 */
  selection select;
  batch_options batch;
  batch_sampling sampling;
} options;

/* What a run of the program holds. */
typedef struct {
  void *tiny_bytes;
  gguf *file;
  pool *threads;
  tokenizer *tokenizer;
  model *model;
  vwd_session *session;
  decoder decoder;
  int32_t *prompt;
  int prompt_count;
  drafted_text drafted[BATCH_HOWS];
  generation made[STRATEGIES];
  double agreement[STRATEGIES]; /* share of choices equal to dense attention's in the same state */
  double named[PREDICTORS][RATIOS];
} program;

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static void progress(void *title, int done, int total) {
  if (!isatty(STDERR_FILENO)) return;
  fprintf(stderr, "\r%-36s %d/%d tokens", (const char *)title, done, total);
  if (done == total) fprintf(stderr, "\r%60s\r", "");
}

static void usage(FILE *out) {
  fprintf(out,
          "usage: vanward-engine --model FILE.gguf | --tiny  [option value]...\n"
          "  --model FILE   a Llama model in F32, F16, Q4_0, Q4_1 or Q8_0\n"
          "  --tiny         random weights instead: every step is taken, and the text is noise\n"
          "  --prompt FILE  the user's message; default %s\n"
          "  --tokens N     how many to generate, 2 to 4096; default 128\n"
          "  --threads N    1 to 256; default: as many as there are processors\n"
          "  --k BLOCKS     blocks of %d tokens that sparse attention reads, 2 to 1024; default 32 for drafts, 64 for single calls\n"
          "  --kv TYPE      f16, or int4: single calls keep whole pages in INT4; default f16\n"
          "  --host-kv      keys and values in host memory, and in slots what sparse steps read; of what the batch decodes\n"
          "  --slots N      with --host-kv: tokens of a layer that there are slots for; default an eighth of all\n"
          "  --strategy S   with --host-kv: serial, async-tls, or vanward, which fetches what it predicts; default serial\n"
          "  --temperature T  sample; default 0: the likeliest token. These five are of what the batch decodes, --calls is greedy\n"
          "  --top-p P      draw from the fewest likeliest tokens that have this part of the mass, 0 to 1; 0 and 1: from all\n"
          "  --top-k K      draw from so many likeliest tokens; 0: from all\n"
          "  --min-p P      draw from tokens at least this part as likely as the likeliest, 0 to 1\n"
          "  --seed N       the same seed gives the same text; default 0\n"
          "what to do; default: both tables\n"
          "  --drafts       continue the prompt by vwd_decoder, densely, sparsely and with drafts, and compare speed and text\n"
          "  --calls        continue it by single calls: two levels of selection, guesses and their repair\n"
          "  --mode NAME    one mode alone, and what it needs\n"
          "  --check-self   continue %d pieces of the prompt by --tokens each, default 500; drafts must not change a token\n"
          "  --loss         what the model makes of the prompt's last --tokens, densely and sparsely, with keys and values of 16 bits and in INT4;\n"
          "                 with --mode axis, tail or foreseen-tail: densely and so\n"
          "  --trace FILE   write which blocks each of the prompt's last --tokens selects by AXIS, and which were foreseen, in some layers\n"
          "  --accuracy     how far attention over selected blocks is from dense attention, on the prompt's end\n"
          "modes:\n",
          ENGINE_PROMPT, PAGE, PIECES);
  for (int i = 0; i < BATCH_HOWS; i++) fprintf(out, "  %-15s%s\n", hows[i].option, hows[i].title);
  for (int i = BY_AXIS; i < STRATEGIES; i++) fprintf(out, "  %-15s%s\n", names[i].option, names[i].title);
}

static bool find_mode(const char *name, options *o) {
  for (int m = 0; m < BATCH_HOWS; m++)
    if (strcmp(name, hows[m].option) == 0) return o->how = m, true;
  for (int m = BY_AXIS; m < STRATEGIES; m++)
    if (strcmp(name, names[m].option) == 0) return o->only = m, true;
  return false;
}

/* A whole number in the range, and nothing else. */
static bool number(const char *option, const char *text, int least, int most, int *out) {
  char *end;
  long value = strtol(text, &end, 10);
  if (end == text || *end || value < least || value > most) {
    fprintf(stderr, "%s: \"%s\"; expected %d to %d\n", option, text, least, most);
    return false;
  }
  *out = (int)value;
  return true;
}

static bool real(const char *option, const char *text, float most, float *out) {
  char *end;
  const float value = strtof(text, &end);
  if (end == text || *end || !(value >= 0 && value <= most)) {
    fprintf(stderr, "%s: \"%s\"; expected 0 to %g\n", option, text, (double)most);
    return false;
  }
  *out = value;
  return true;
}

static bool seed(const char *option, const char *text, uint64_t *out) {
  char *end;
  errno = 0;
  *out = strtoull(text, &end, 10);
  if (*text >= '0' && *text <= '9' && !*end && errno == 0) return true;
  fprintf(stderr, "%s: \"%s\"; expected 0 to 2^64 - 1\n", option, text);
  return false;
}

static bool kv_type(const char *text, bool *int4) {
  *int4 = strcmp(text, "int4") == 0;
  if (*int4 || strcmp(text, "f16") == 0) return true;
  fprintf(stderr, "--kv: \"%s\"; expected f16 or int4\n", text);
  return false;
}

static bool find_strategy(const char *name, uint32_t *out) {
  for (size_t i = 0; i < sizeof strategies / sizeof *strategies; i++)
    if (strcmp(name, strategies[i].name) == 0) return *out = strategies[i].strategy, true;
  fprintf(stderr, "--strategy: \"%s\"; expected serial, async-tls or vanward\n", name);
  return false;
}

static bool set(options *o, const char *option, const char *value, int *k) {
  if (strcmp(option, "--model") == 0) return (o->model = value) != NULL;
  if (strcmp(option, "--trace") == 0) return (o->trace = value) != NULL;
  if (strcmp(option, "--prompt") == 0) return (o->prompt = value) != NULL;
  if (strcmp(option, "--tokens") == 0) return number(option, value, 2, 4096, &o->tokens);
  if (strcmp(option, "--threads") == 0) return number(option, value, 1, 256, &o->threads);
  if (strcmp(option, "--k") == 0) return number(option, value, 2, 1024, k);
  if (strcmp(option, "--temperature") == 0) return real(option, value, 1e4f, &o->sampling.temperature);
  if (strcmp(option, "--top-p") == 0) return real(option, value, 1, &o->sampling.top_p);
  if (strcmp(option, "--top-k") == 0) return number(option, value, 0, 1 << 20, &o->sampling.top_k);
  if (strcmp(option, "--min-p") == 0) return real(option, value, 1, &o->sampling.min_p);
  if (strcmp(option, "--seed") == 0) return seed(option, value, &o->sampling.seed);
  if (strcmp(option, "--slots") == 0) return number(option, value, 1, 1 << 30, &o->batch.slots);
  if (strcmp(option, "--strategy") == 0) return find_strategy(value, &o->batch.strategy);
  if (strcmp(option, "--kv") == 0) return kv_type(value, &o->int4);
  if (strcmp(option, "--mode") == 0 && find_mode(value, o)) return true;
  fprintf(stderr, "%s %s: unknown\n", option, value);
  return false;
}

/* False where something is wrong, which is said. */
static bool parse(int count, char **words, options *o) {
  int k = 0;
  *o = (options){.prompt = ENGINE_PROMPT, .how = -1, .only = -1};
  for (int i = 1; i < count; i++) {
    if (strcmp(words[i], "--tiny") == 0) o->tiny = true;
    else if (strcmp(words[i], "--accuracy") == 0) o->accuracy = true;
    else if (strcmp(words[i], "--loss") == 0) o->loss = true;
    else if (strcmp(words[i], "--check-self") == 0) o->check = true;
    else if (strcmp(words[i], "--drafts") == 0) o->drafts = true;
    else if (strcmp(words[i], "--calls") == 0) o->calls = true;
    else if (strcmp(words[i], "--host-kv") == 0) o->batch.host_kv = true;
    else if (i + 1 == count) return fprintf(stderr, "%s: unknown, or without its value\n", words[i]), false;
    else if (!set(o, words[i], words[i + 1], &k)) return false;
    else i++;
  }
  if (!o->model == !o->tiny) return fprintf(stderr, "expected either --model or --tiny\n"), false;
  if (o->int4 && (o->how >= 0 || o->accuracy || o->loss || o->trace || o->check || o->drafts || (!o->calls && o->only < 0)))
    return fprintf(stderr, "--kv int4 is for --calls and its modes; vwd_decoder, which decodes the others, keeps keys as they are\n"), false;
  if (o->batch.host_kv && (o->calls || o->only >= 0 || o->int4 || o->accuracy || o->loss || o->trace))
    return fprintf(stderr, "--host-kv is for what the batch decodes: --drafts, its modes and --check-self\n"), false;
  if (!o->batch.host_kv && (o->batch.slots != 0 || o->batch.strategy != VWD_STRATEGY_SERIAL))
    return fprintf(stderr, "--slots and --strategy are for --host-kv\n"), false;
  if (o->loss && (o->how >= 0 || (o->only >= 0 && o->only != BY_AXIS && o->only != WITH_TAIL && o->only != FORESEEN_TAIL)))
    return fprintf(stderr, "--loss takes the modes axis, tail and foreseen-tail\n"), false;
  if (o->int4 && o->only == TWO_LEVEL)
    return fprintf(stderr, "--kv int4: lists of tokens need keys and values of 16 bits; two-level is made of them\n"), false;
  if (o->threads == 0) o->threads = (int)sysconf(_SC_NPROCESSORS_ONLN);
  if (o->tokens == 0) o->tokens = o->check ? 500 : 128;
  if (!o->drafts && !o->calls) o->drafts = true, o->calls = !o->batch.host_kv;
  o->batch.rows = o->check ? 6 : 1;
  o->batch.k = k > 0 ? k : o->tiny ? 16 : 32;
  if (k == 0) k = o->tiny ? 16 : 64; /* the first block and the last are always among them */
  int local = k < 16 ? 1 : k / 8;
  o->select = (selection){.k = k,
                          .init = 1,
                          .local = local,
                          .coarse = k + k / 2,
                          .tokens = (1 + local) * PAGE + k * PAGE * 3 / 16,
                          .ratio = 1.25f};
  return true;
}

/* What the modes that are to run read of the prompt. */
static preparation prepared(const options *o) {
  if (o->accuracy) return (preparation){.labels = true};
  if (o->trace) return (preparation){.axes = true, .forecast = true};
  if (o->loss) return (preparation){.summaries = true, .axes = true, .codes = true, .forecast = true};
  bool all = o->only < 0;
  return (preparation){.summaries = true,
                       .codes = o->int4,
                       .axes = all || o->only == BY_AXIS || o->only == WITH_TAIL || o->only == FORESEEN_TAIL,
                       .labels = (all && !o->int4) || o->only == TWO_LEVEL,
                       .holt = all || o->only == HOLT || o->only == PREVIOUS,
                       .forecast = all || o->only == FORECAST || o->only == FORESEEN || o->only == FORESEEN_TAIL};
}

static char *read_text(const char *path, size_t *length) {
  FILE *file = fopen(path, "rb");
  struct stat info;
  char *text = NULL;
  if (!file || fstat(fileno(file), &info) != 0) {
    perror(path);
  } else if (!S_ISREG(info.st_mode) || info.st_size == 0) {
    fprintf(stderr, "%s: %s\n", path, S_ISREG(info.st_mode) ? "empty" : "not a file");
  } else if ((text = malloc((size_t)info.st_size))) {
    *length = fread(text, 1, (size_t)info.st_size, file);
  }
  if (file) fclose(file);
  return text;
}

/* ChatML as SmolLM2 was trained on: <|im_start|>role, newline, words, <|im_end|>, newline. */
static int put_message(const tokenizer *t, const char *role, const char *words, size_t length, int32_t *out,
                       int capacity) {
  size_t header = strlen(role) + 1, count = 0, room = (size_t)capacity;
  char *text = malloc(header + length);
  if (!text || capacity < 4) return capacity;
  memcpy(text, role, header - 1);
  text[header - 1] = '\n';
  if (length) memcpy(text + header, words, length);
  out[count++] = tokenizer_id(t, "<|im_start|>");
  count += tokenizer_encode(t, text, header + length, out + count, room - count);
  free(text);
  if (!length || count + 2 > room) return (int)(count < room ? count : room); /* the answer's header stays open */
  out[count++] = tokenizer_id(t, "<|im_end|>");
  count += tokenizer_encode(t, "\n", 1, out + count, room - count);
  return (int)count;
}

static int32_t *make_prompt(const program *p, const options *o, int *count) {
  static const char system[] = "You are a helpful AI assistant named SmolLM, trained by Hugging Face";
  size_t length = 0;
  char *text = read_text(o->prompt, &length);
  int capacity = (int)length + 256, n = 0;
  int32_t *tokens = text ? malloc((size_t)capacity * sizeof *tokens) : NULL;
  if (tokens) {
    const size_t most = o->check ? 16000 : 1000; /* of a tiny model, whose vocabulary is bytes */
    if (o->tiny && length > most) length = most;
    if (o->check || o->loss || o->trace) { /* the text as it is */
      n = (int)tokenizer_encode(p->tokenizer, text, length, tokens, (size_t)capacity);
      free(text);
      return *count = n < capacity ? n : capacity, tokens;
    }
    n += put_message(p->tokenizer, "system", system, sizeof system - 1, tokens + n, capacity - n);
    n += put_message(p->tokenizer, "user", text, length, tokens + n, capacity - n);
    n += put_message(p->tokenizer, "assistant", NULL, 0, tokens + n, capacity - n);
  }
  free(text);
  *count = n;
  return tokens;
}

static bool load(program *p, const options *o) {
  size_t size = 0;
  if (o->tiny) p->tiny_bytes = tiny_gguf(&size);
  p->file = o->tiny ? (p->tiny_bytes ? gguf_parse(p->tiny_bytes, size) : NULL) : gguf_open(o->model);
  p->threads = pool_new(o->threads);
  if (!p->file || !p->threads) return false;
  p->tokenizer = tokenizer_new(p->file);
  p->model = model_new(p->file, p->threads);
  vwd_session_options session = VWD_SESSION_OPTIONS_INIT;
  session.device = VWD_DEVICE_CPU; /* the engine's memory is the host's */
  session.threads = (uint32_t)o->threads;
  return p->tokenizer && p->model && succeeded(vwd_session_create(&session, &p->session), "vwd_session_create");
}

static void unload(program *p) {
  for (int m = 0; m < STRATEGIES; m++) free(p->made[m].tokens);
  for (int m = 0; m < BATCH_HOWS; m++) free(p->drafted[m].tokens);
  free(p->prompt);
  decoder_free(&p->decoder);
  vwd_session_release(p->session);
  model_free(p->model);
  tokenizer_free(p->tokenizer);
  pool_free(p->threads);
  gguf_close(p->file);
  free(p->tiny_bytes);
}

/* Bytes that no terminal shows become '?': a random model has plenty. */
static void print_text(const program *p, const options *o, const char *title, const int32_t *tokens, int length) {
  printf("--- %s\n", title);
  for (int i = 0; i < length; i++) {
    char bytes[256];
    size_t count = tokenizer_decode(p->tokenizer, tokens[i], bytes, sizeof bytes);
    for (size_t b = 0; b < count; b++) {
      unsigned char c = (unsigned char)bytes[b];
      putchar((c < ' ' && c != '\n') || c == 0x7F || (o->tiny && c > 0x7F) ? '?' : c);
    }
  }
  printf("\n\n");
  fflush(stdout);
}

static bool same(const generation *a, const generation *b) {
  return a->count == b->count && memcmp(a->tokens, b->tokens, (size_t)a->count * sizeof *a->tokens) == 0;
}

static bool prepare(program *p, const options *o) {
  /* Accuracy, loss and traces are of the prompt's own end. */
  const bool reads_end = o->accuracy || o->loss || o->trace;
  if (reads_end && p->prompt_count <= o->tokens)
    return fprintf(stderr, "a prompt of %d tokens; expected more than the %d of --tokens\n", p->prompt_count, o->tokens), false;
  int count = reads_end ? p->prompt_count - o->tokens : p->prompt_count;
  double begin = now();
  if (!decoder_init(&p->decoder, p->session, p->model, o->select, prepared(o), p->prompt, count, o->tokens,
                                  tokenizer_id(p->tokenizer, "<|im_end|>"), progress, "prompt"))
    return false;
  const decoder *d = &p->decoder;
  int blocks = (count + PAGE - 1) / PAGE, k = o->select.k < blocks ? o->select.k : blocks;
  printf("%d prompt tokens taken in, in %.1f s. Sparse attention reads %d of its %d blocks of %d tokens", count,
         now() - begin, k, blocks, PAGE);
  if (d->prepare.labels)
    printf("; two levels read %d tokens out of %d blocks", o->select.tokens < count ? o->select.tokens : count,
           o->select.coarse < blocks ? o->select.coarse : blocks);
  if (d->prepare.holt)
    printf("; guesses are %.2f times as large (Holt's factors, picked on the prompt: %.2f, %.2f, %.2f)",
           (double)o->select.ratio, (double)d->holt.alpha, (double)d->holt.beta, (double)d->holt.gamma);
  printf(".\n\n");
  return true;
}

static bool run_mode(program *p, const options *o, strategy m) {
  generation *g = &p->made[m];
  g->tokens = calloc((size_t)o->tokens, sizeof *g->tokens);
  if (!g->tokens || !generate(&p->decoder, m, NULL, o->tokens, g, progress, (void *)(uintptr_t)names[m].title))
    return false;
  if (o->only >= 0 || m == DENSE || m == SPARSE || m == TWO_LEVEL || m == FORESEEN) print_text(p, o, names[m].title, g->tokens, g->count);
  return true;
}

/* Reads dense attention's tokens and compares what this mode would have said at each. */
static bool compare_with_dense(program *p, strategy m) {
  const generation *dense = &p->made[DENSE];
  generation replay = {.tokens = calloc((size_t)dense->count, sizeof(int32_t))};
  bool ok = replay.tokens &&
            generate(&p->decoder, m, dense->tokens, dense->count, &replay, progress, "comparing with dense attention");
  int equal = 0;
  for (int i = 1; ok && i < dense->count; i++) equal += replay.tokens[i] == dense->tokens[i];
  p->agreement[m] = dense->count > 1 ? (double)equal / (dense->count - 1) : 1;
  free(replay.tokens);
  return ok;
}

static void print_percent(bool known, double share) {
  if (known) printf("%8.1f%%", 100 * share);
  else printf("%9s", "");
}

static void print_table(const program *p) {
  printf("%-33s%9s%9s%9s%9s%27s%9s\n", "", "tokens", "KV read", "+ index", "choices", "true blocks guessed at r =", "repaired");
  printf("%-33s%9s%9s%9s%9s%9.4g%9.4g%9.4g%9s\n", "mode", "per s", "of dense", "", "as dense", (double)ratios[0],
         (double)ratios[1], (double)ratios[2], "at 1.25");
  for (int m = 0; m < STRATEGIES; m++) {
    const generation *g = &p->made[m];
    const counters *n = &g->n;
    if (g->count == 0) continue;
    bool guesses = m >= PREVIOUS;
    printf("%-33s%9.1f", names[m].title, (g->count - 1) / g->seconds);
    print_percent(true, (double)n->kv_bytes / (double)n->dense_bytes);
    print_percent(n->index_bytes > 0, (double)(n->kv_bytes + n->index_bytes) / (double)n->dense_bytes);
    print_percent(p->made[DENSE].count > 0 && m != DENSE, p->agreement[m < PREVIOUS ? m : SPARSE]);
    for (int r = 0; r < RATIOS; r++)
      print_percent(guesses && p->named[m - PREVIOUS][0] > 0, guesses ? p->named[m - PREVIOUS][r] : 0);
    print_percent(n->selected > 0, n->selected ? (double)n->missed / (double)n->selected : 0);
    printf("\n");
  }
  printf("\nKV read counts what attention reads; index, the summaries and labels that selection reads besides.\n"
         "Choices as dense: the mode reads dense attention's text and chooses at every token; the guessed modes choose as sparse "
         "does.\n"
         "True blocks count the forced ones. The Forecast says nothing about the first layer, which is left out of its "
         "row.\n\n");
}

/* Repaired guesses change nothing but the time, and lists of all blocks are the same, foreseen or not. */
static bool check_guesses(const program *p, const options *o) {
  bool all = true, covers = o->select.k * PAGE >= p->prompt_count + o->tokens;
  for (int m = covers ? BY_AXIS : PREVIOUS; m < STRATEGIES; m++) {
    const generation *sparse = &p->made[SPARSE];
    if (p->made[m].count == 0 || sparse->count == 0 || m == TWO_LEVEL) continue;
    bool ok = same(&p->made[m], sparse);
    printf("%s  \"%s\" gives the %d tokens of \"%s\"\n", ok ? "holds " : "BROKEN", names[m].title, sparse->count,
           names[SPARSE].title);
    all = all && ok;
  }
  return all;
}

/* --- Drafts --- */

static double speed(const drafted_text *d) { return d->count > 1 ? (d->count - 1) / d->seconds : 0; }

static int equal(const drafted_text *a, const drafted_text *b) {
  int n = 0;
  while (n < a->count && n < b->count && a->tokens[n] == b->tokens[n]) n++;
  return n;
}

static void print_drafting(const program *p) {
  const drafted_text *dense = &p->drafted[BATCH_DENSE];
  printf("%-33s%8s%8s%9s%9s%9s%9s%9s%9s%10s\n", "", "tokens", "times", "CPU ms", "drafted", "accepted", "passes", "KV read", "+ index",
         "tokens");
  printf("%-33s%8s%8s%9s%9s%9s%9s%9s%9s%10s\n", "mode", "per s", "dense", "a token", "", "", "a token", "of dense", "", "as dense");
  for (int m = 0; m < BATCH_HOWS; m++) {
    const drafted_text *d = &p->drafted[m];
    const batch_counters *n = &d->n;
    const int steps = d->count > 1 ? d->count - 1 : 1;
    printf("%-33s%8.1f%8.2f%9.2f", hows[m].title, speed(d), speed(d) / speed(dense), 1e3 * d->cpu_seconds / steps);
    if (n->drafted > 0) printf("%9lld%8.1f%%", (long long)n->drafted, 100 * (double)n->accepted / (double)n->drafted);
    else printf("%18s", "");
    printf("%9.2f", (double)n->passes / steps);
    print_percent(true, (double)n->kv_bytes / (double)n->dense_bytes);
    print_percent(n->index_bytes > 0, (double)(n->kv_bytes + n->index_bytes) / (double)n->dense_bytes);
    printf("%5d/%d\n", equal(d, dense), dense->count);
  }
  printf("\nKV read counts what attention reads for the tokens that are kept, drafts and their verification included; index, the "
         "summaries that\nselection reads besides. Tokens as dense: those ahead of the first that dense decoding chose otherwise.\n");
  const batch_counters *trees = &p->drafted[BATCH_LOOKUP_TREE].n;
  printf("%lld of %lld steps of lookup trees drafted several branches, and %lld of the %lld accepted tokens were not on the first.\n\n",
         (long long)trees->branched, (long long)trees->steps, (long long)trees->off_first, (long long)trees->accepted);
}

/* Drafts change nothing but the time. */
static bool check_drafting(const program *p) {
  const drafted_text *dense = &p->drafted[BATCH_DENSE], *self = &p->drafted[BATCH_SELF];
  bool all = true;
  for (int m = BATCH_LOOKUP; m < BATCH_HOWS; m++) {
    bool ok = p->drafted[m].count == dense->count && equal(&p->drafted[m], dense) == dense->count;
    printf("%s  \"%s\" gives the %d tokens of \"%s\"\n", ok ? "holds " : "BROKEN", hows[m].title, dense->count, hows[BATCH_DENSE].title);
    all = all && ok;
  }
  if (all && !p->tiny_bytes && dense->count > 1)
    printf("\nSELF drafts by attention over %.1f%% of the keys and values, verifies by dense attention, and writes dense decoding's text at "
           "%.2f times its speed.\n",
           100 * (double)p->drafted[BATCH_SPARSE].n.kv_bytes / (double)p->drafted[BATCH_SPARSE].n.dense_bytes, speed(self) / speed(dense));
  printf("\n");
  return all;
}

static void print_slots(const options *o, const batch_counters *n) {
  if (!o->batch.host_kv) return;
  const double lists = (double)(n->slot_hits + n->slot_misses);
  printf("Keys and values are in host memory: %.1f%% of the blocks that were asked for were in no slot, and %.1f MB were copied to slots.\n",
         lists > 0 ? 100 * (double)n->slot_misses / lists : 0, 1e-6 * (double)n->fetched_bytes);
}

static bool run_drafts(program *p, const options *o) {
  double seconds = 0;
  printf("One sequence by vwd_decoder: a prompt of %d tokens, continued by up to %d in %d ways. Sparse steps read %d blocks of %d "
         "tokens for a KV head.\n\n",
         p->prompt_count, o->tokens, BATCH_HOWS, o->batch.k, PAGE);
  fflush(stdout);
  if (!continue_all(p->model, p->session, &o->batch, p->prompt, p->prompt_count, tokenizer_id(p->tokenizer, "<|im_end|>"),
                    o->tokens, &o->sampling, o->how, p->drafted, &seconds, progress, "decoding"))
    return false;
  const int shown[] = {o->how >= 0 ? o->how : BATCH_DENSE, BATCH_SPARSE};
  for (int i = 0; i < (o->how >= 0 ? 1 : 2); i++)
    print_text(p, o, hows[shown[i]].title, p->drafted[shown[i]].tokens, p->drafted[shown[i]].count);
  printf("The prompt was taken in in %.1f s.\n", seconds);
  print_slots(o, &p->drafted[o->how >= 0 ? o->how : BATCH_SPARSE].n);
  if (o->how >= 0) return printf("%.1f tokens a second.\n", speed(&p->drafted[o->how])), true;
  print_drafting(p);
  return check_drafting(p);
}

static bool run_check(program *p, const options *o) {
  drafting_check c;
  printf("%d pieces of a text of %d tokens, continued by %d each: densely, with trees by lookup, with SELF, and with SELF or lookup; %d "
         "sequences at once.\n",
         PIECES, p->prompt_count, o->tokens, o->batch.rows);
  fflush(stdout);
  if (!check_drafts(p->model, p->session, &o->batch, p->prompt, p->prompt_count, PIECES, o->tokens, &o->sampling, &c, progress, "decoding"))
    return false;
  const batch_counters *n = &c.n;
  printf("%lld steps; %lld tokens drafted, %lld accepted; of these by sparse steps %lld, %lld. %lld trees had several branches; %lld "
         "accepted tokens were not on the first.\n",
         (long long)n->steps, (long long)n->drafted, (long long)n->accepted, (long long)n->self_drafted, (long long)n->self_accepted,
         (long long)n->branched, (long long)n->off_first);
  print_slots(o, n);
  printf("%s  drafts give dense decoding's tokens: %d of %d texts, %d tokens of each way\n", c.different ? "BROKEN" : "holds ",
         CHECKED_WAYS * c.texts - c.different, CHECKED_WAYS * c.texts, c.tokens);
  return c.different == 0;
}

static bool print_accuracy(program *p, const options *o) {
  accuracy a;
  const int32_t *end = p->prompt + p->prompt_count - o->tokens;
  if (!measure_accuracy(&p->decoder, end, o->tokens, &a, progress, "measuring accuracy")) return false;
  printf("Attention over %d selected tokens beside dense attention: |difference| / |dense|, mean of the prompt's last %d "
         "tokens and all layers\n\n%-16s",
         o->select.k * PAGE, o->tokens, "blocks of");
  for (int s = 0; s < SIZES; s++) printf("%9d", a.size[s]);
  printf("\n");
  for (int m = 0; m < RECIPES; m++) {
    printf("%-16s", a.name[m]);
    for (int s = 0; s < SIZES; s++) printf("%9.4f", a.error[s][m]);
    printf("\n");
  }
  return true;
}

/* All ways, or dense attention and the one that --mode names; beside the term for the rest also the same blocks without it. */
static bool read_for_loss(const options *o, strategy how) {
  return o->only < 0 || how == DENSE || how == (strategy)o->only || (o->only == WITH_TAIL && how == BY_AXIS);
}

/* The prompt's last tokens read one by one, densely and sparsely, with exact keys and values and in INT4. */
static bool print_loss(program *p, const options *o) {
  enum { EXACT_WAYS = 5, WAYS = 10 };
  static const struct {
    const char *title;
    strategy how;
    int like; /* the same with 16 bits, or without the tail */
  } ways[WAYS] = {{"dense, 16 bits", DENSE, 0},
                  {"sparse, 16 bits", SPARSE, 1},
                  {"by axes, 16 bits", BY_AXIS, 2},
                  {"axes, tail, 16 bits", WITH_TAIL, 2},
                  {"foreseen, tail, 16 bits", FORESEEN_TAIL, 4},
                  {"dense, INT4", DENSE, 0},
                  {"sparse, INT4", SPARSE, 1},
                  {"by axes, INT4", BY_AXIS, 2},
                  {"axes, tail, INT4", WITH_TAIL, 3},
                  {"foreseen, tail, INT4", FORESEEN_TAIL, 4}};
  const int32_t *end = p->prompt + p->prompt_count - o->tokens;
  generation g[WAYS] = {0};
  bool ok = true, read[WAYS];
  for (int w = 0; w < WAYS; w++) read[w] = read_for_loss(o, ways[w].how);
  printf("%d tokens read after %d: the loss of each and the choices that dense attention of 16 bits makes, too\n\n%-24s%10s%12s%12s%12s\n",
         o->tokens - 1, p->prompt_count - o->tokens, "", "loss", "over dense", "choices", "ms a token");
  for (int w = 0; ok && w < WAYS; w++) {
    if (w == EXACT_WAYS) ok = decoder_code(&p->decoder);
    if (!read[w]) continue;
    g[w].tokens = calloc((size_t)o->tokens, sizeof *g[w].tokens);
    ok = ok && g[w].tokens && generate(&p->decoder, ways[w].how, end, o->tokens, &g[w], progress, (void *)(uintptr_t)ways[w].title);
    if (!ok) break;
    int same = 0;
    for (int i = 1; i < g[w].count; i++) same += g[w].tokens[i] == g[0].tokens[i];
    printf("%-24s%10.4f%11.2f%%%11.1f%%%12.1f\n", ways[w].title, g[w].loss, 100 * (g[w].loss / g[0].loss - 1), 100.0 * same / (g[w].count - 1),
           1e3 * g[w].seconds / (g[w].count - 1));
    fflush(stdout);
  }
  /* Far more than either costs, and what reading a page that was given up would exceed. */
  bool holds = ok;
  for (int w = 0; w < WAYS; w++) holds = holds && (!read[w] || g[w].loss < 1.05 * g[ways[w].like].loss + 1e-9);
  if (ok) printf("\n%s  neither INT4 nor the tail adds 5 %% to the loss\n", holds ? "holds " : "BROKEN");
  /* A tiny model's keys and values are nearly normal, as the term takes them to be. */
  for (int dense = 0; ok && o->tiny && dense < WAYS; dense += EXACT_WAYS) {
    const int axes = dense + 2, tail = dense + 3;
    if (!read[tail]) continue;
    const bool closer = fabs(g[tail].loss - g[dense].loss) < .6 * fabs(g[axes].loss - g[dense].loss);
    printf("%s  the tail brings the loss closer to that of dense attention, %s\n", closer ? "holds " : "BROKEN", dense ? "INT4" : "16 bits");
    holds = holds && closer;
  }
  for (int w = 0; w < WAYS; w++) free(g[w].tokens);
  return holds;
}

static bool run_calls(program *p, const options *o) {
  if (o->only < 0)
    printf("The same by single calls, in %d ways that differ in what attention reads. The text of %s comes first, then a table.\n\n",
           STRATEGIES - o->int4, o->int4 ? "three" : "four");
  fflush(stdout);
  bool ok = prepare(p, o) && (!o->int4 || decoder_code(&p->decoder));
  for (int m = 0; ok && m < STRATEGIES; m++)
    if ((o->only < 0 && !(o->int4 && m == TWO_LEVEL)) || o->only == m) ok = run_mode(p, o, (strategy)m);
  if (ok && o->only < 0)
    ok = compare_with_dense(p, SPARSE) && compare_with_dense(p, BY_AXIS) && compare_with_dense(p, WITH_TAIL) && compare_with_dense(p, FORESEEN) && compare_with_dense(p, FORESEEN_TAIL) &&
         (o->int4 || compare_with_dense(p, TWO_LEVEL)) &&
         measure_predictors(&p->decoder, p->made[SPARSE].tokens, p->made[SPARSE].count, ratios, p->named, progress,
                            "measuring predictors");
  if (!ok) return false;
  print_table(p);
  return check_guesses(p, o);
}

static bool run_all(program *p, const options *o) {
  if (!load(p, o) || !(p->prompt = make_prompt(p, o, &p->prompt_count))) return false;
  if (o->accuracy) return prepare(p, o) && print_accuracy(p, o);
  if (o->loss) return prepare(p, o) && print_loss(p, o);
  if (o->trace)
    return prepare(p, o) && write_trace(&p->decoder, p->prompt + p->prompt_count - o->tokens, o->tokens, o->trace, progress, "tracing");
  if (o->check) return run_check(p, o);
  if (o->how >= 0) return run_drafts(p, o);
  if (o->only >= 0) return run_calls(p, o);
  return (!o->drafts || run_drafts(p, o)) && (!o->calls || run_calls(p, o));
}

int main(int count, char **words) {
  options o;
  if (count == 2 && (strcmp(words[1], "--help") == 0 || strcmp(words[1], "-h") == 0)) return usage(stdout), 0;
  if (!parse(count, words, &o)) return usage(stderr), 2;
  if (o.tiny)
    printf("A tiny random model stands in for a real one: every step is taken, but its text is noise and its figures "
           "mean nothing.\n");
  double begin = now();
  program p = {0};
  bool ok = run_all(&p, &o);
  if (ok) printf("%.1f s in all.\n", now() - begin);
  unload(&p);
  return ok ? 0 : 1;
}
