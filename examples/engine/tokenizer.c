#include "tokenizer.h"

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { CONTROL_TOKEN = 3 };

typedef struct {
  int32_t left, right; /* left < 0: free slot */
  int32_t rank, result;
} merge;

struct tokenizer {
  size_t count, slots, merge_slots; /* slot counts are powers of two */
  gguf_string *text;                /* [count], in the byte-to-unicode alphabet of GPT-2 */
  int32_t *type;                    /* [count] */
  int32_t *by_text;                 /* [slots] open addressing, -1 free */
  merge *merges;                    /* [merge_slots] open addressing */
  bool digits_alone;
  int32_t byte_token[256];
  int16_t byte_of[0x144]; /* code point of the alphabet -> byte, -1 none */
};

static uint64_t hash_bytes(const char *data, size_t length) {
  uint64_t h = 0xcbf29ce484222325u; /* FNV-1a */
  for (size_t i = 0; i < length; i++) h = (h ^ (uint8_t)data[i]) * 0x100000001b3u;
  return h ^ h >> 32;
}

static uint64_t hash_pair(int32_t left, int32_t right) {
  uint64_t h = ((uint64_t)(uint32_t)left << 32 | (uint32_t)right) * 0x9e3779b97f4a7c15u;
  return h ^ h >> 32;
}

static int32_t find_text(const tokenizer *t, const char *data, size_t length) {
  for (uint64_t s = hash_bytes(data, length);; s++) {
    int32_t id = t->by_text[s & (t->slots - 1)];
    if (id < 0) return -1;
    if (t->text[id].length == length && memcmp(t->text[id].data, data, length) == 0) return id;
  }
}

static merge *find_merge(const tokenizer *t, int32_t left, int32_t right) {
  for (uint64_t s = hash_pair(left, right);; s++) {
    merge *m = &t->merges[s & (t->merge_slots - 1)];
    if (m->left < 0 || (m->left == left && m->right == right)) return m;
  }
}

static size_t slots_for(size_t count) {
  size_t slots = 16;
  while (slots < 2 * count) slots *= 2;
  return slots;
}

/* UTF-8 of a code point below 0x800. */
static size_t put_utf8(uint32_t code, char *out) {
  if (code < 0x80) return out[0] = (char)code, 1;
  out[0] = (char)(0xC0 | code >> 6);
  out[1] = (char)(0x80 | (code & 0x3F));
  return 2;
}

/* Code point at text[*at], advancing past it. A malformed byte stands for itself. */
static uint32_t take_utf8(const char *text, size_t length, size_t *at) {
  uint8_t first = (uint8_t)text[(*at)++];
  size_t more = first >= 0xF0 ? 3 : first >= 0xE0 ? 2 : first >= 0xC0 ? 1 : 0;
  uint32_t code = more == 3 ? first & 0x07 : more == 2 ? first & 0x0F : more == 1 ? first & 0x1F : first;
  for (; more && *at < length && ((uint8_t)text[*at] & 0xC0) == 0x80; more--)
    code = code << 6 | ((uint8_t)text[(*at)++] & 0x3F);
  return code;
}

/* GPT-2's alphabet: printable Latin-1 stands for itself, the other bytes follow from U+0100 on. */
static void build_alphabet(tokenizer *t) {
  memset(t->byte_of, -1, sizeof t->byte_of);
  uint32_t next = 0x100;
  for (int byte = 0; byte < 256; byte++) {
    bool printable = (byte >= 0x21 && byte <= 0x7E) || (byte >= 0xA1 && byte != 0xAD);
    uint32_t code = printable ? (uint32_t)byte : next++;
    char text[2];
    t->byte_of[code] = (int16_t)byte;
    t->byte_token[byte] = find_text(t, text, put_utf8(code, text));
  }
}

/* Each merge is the text "left right"; the ranks are their order. */
static bool build_merges(tokenizer *t, const gguf *file) {
  gguf_string *pairs;
  size_t count = gguf_strings(file, "tokenizer.ggml.merges", &pairs);
  t->merge_slots = slots_for(count);
  t->merges = malloc(t->merge_slots * sizeof *t->merges);
  bool ok = t->merges != NULL;
  for (size_t s = 0; ok && s < t->merge_slots; s++) t->merges[s].left = -1;
  for (size_t i = 0; ok && i < count; i++) {
    const char *space = memchr(pairs[i].data, ' ', pairs[i].length);
    char joined[512];
    size_t left = space ? (size_t)(space - pairs[i].data) : 0, right = space ? pairs[i].length - left - 1 : 0;
    ok = space && left + right <= sizeof joined;
    if (!ok) break;
    memcpy(joined, pairs[i].data, left);
    memcpy(joined + left, space + 1, right);
    merge m = {find_text(t, joined, left), find_text(t, space + 1, right), (int32_t)i,
               find_text(t, joined, left + right)};
    ok = m.left >= 0 && m.right >= 0 && m.result >= 0;
    merge *slot = ok ? find_merge(t, m.left, m.right) : NULL;
    if (ok && slot->left < 0) *slot = m;
  }
  free(pairs);
  return ok;
}

static bool text_is(gguf_string text, const char *name) {
  return text.length == strlen(name) && memcmp(text.data, name, text.length) == 0;
}

tokenizer *tokenizer_new(const gguf *file) {
  gguf_string model = gguf_text(file, "tokenizer.ggml.model"), pre = gguf_text(file, "tokenizer.ggml.pre");
  bool digits_alone = text_is(pre, "smollm") || text_is(pre, "starcoder");
  if (!text_is(model, "gpt2") || !(digits_alone || text_is(pre, "gpt-2"))) {
    fprintf(stderr,
            "tokenizer: this engine knows byte-level BPE (gpt2) with pre-tokenizer smollm, starcoder or gpt-2\n");
    return NULL;
  }
  tokenizer *t = calloc(1, sizeof *t);
  if (!t) return NULL;
  t->digits_alone = digits_alone;
  t->count = gguf_strings(file, "tokenizer.ggml.tokens", &t->text);
  bool ok = t->count > 0 && gguf_ints(file, "tokenizer.ggml.token_type", &t->type) == t->count;
  t->slots = slots_for(t->count);
  t->by_text = malloc(t->slots * sizeof *t->by_text);
  ok = ok && t->by_text;
  for (size_t s = 0; ok && s < t->slots; s++) t->by_text[s] = -1;
  for (size_t i = 0; ok && i < t->count; i++) {
    uint64_t s = hash_bytes(t->text[i].data, t->text[i].length);
    while (t->by_text[s & (t->slots - 1)] >= 0) s++;
    t->by_text[s & (t->slots - 1)] = (int32_t)i;
  }
  if (ok) build_alphabet(t);
  ok = ok && build_merges(t, file);
  for (int byte = 0x20; ok && byte < 0x7F; byte++)
    ok = t->byte_token[byte] >= 0; /* SmolLM has no token for some control bytes */
  if (ok) return t;
  fprintf(stderr, "tokenizer: vocabulary or merges are incomplete\n");
  tokenizer_free(t);
  return NULL;
}

void tokenizer_free(tokenizer *t) {
  if (!t) return;
  free(t->text);
  free(t->type);
  free(t->by_text);
  free(t->merges);
  free(t);
}

int32_t tokenizer_id(const tokenizer *t, const char *text) { return find_text(t, text, strlen(text)); }

size_t tokenizer_decode(const tokenizer *t, int32_t token, char *out, size_t capacity) {
  if (token < 0 || (size_t)token >= t->count || t->type[token] == CONTROL_TOKEN) return 0;
  gguf_string text = t->text[token];
  size_t written = 0;
  for (size_t at = 0; at < text.length && written < capacity;) {
    uint32_t code = take_utf8(text.data, text.length, &at);
    if (code < 0x144 && t->byte_of[code] >= 0) out[written++] = (char)t->byte_of[code];
  }
  return written;
}

/* --- Pre-tokenizer ---
 *
 * GPT-2's pattern, 's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+ , with every digit cut
 * out first where the model says so. Unicode's tables would be longer than the rest of this file: beyond ASCII, spaces
 * and the larger blocks of punctuation and symbols are recognised, and everything else counts as a letter. */

typedef enum { LETTER, DIGIT, SPACE, OTHER, END } class;

static class class_at(const char *text, size_t length, size_t at, size_t *next) {
  *next = at;
  if (at >= length) return END;
  uint32_t c = take_utf8(text, length, next);
  if (c < 0x80) {
    if ((c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z')) return LETTER;
    if (c >= '0' && c <= '9') return DIGIT;
    return c == ' ' || (c >= '\t' && c <= '\r') ? SPACE : OTHER;
  }
  if (c == 0x85 || c == 0xA0 || (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F ||
      c == 0x3000)
    return SPACE;
  if (c == 0xAA || c == 0xB5 || c == 0xBA) return LETTER;
  if (c < 0xC0 || c == 0xD7 || c == 0xF7 || (c >= 0x2010 && c <= 0x2BFF) || (c >= 0x3001 && c <= 0x303F) ||
      c >= 0x1F000)
    return OTHER;
  return LETTER;
}

static size_t run_end(const char *text, size_t length, size_t at, class wanted) {
  for (size_t next; class_at(text, length, at, &next) == wanted; at = next) continue;
  return at;
}

static size_t contraction(const char *text, size_t left) {
  static const char *const endings[] = {"'s", "'t", "'re", "'ve", "'m", "'ll", "'d"};
  for (size_t i = 0; i < sizeof endings / sizeof *endings; i++) {
    size_t n = strlen(endings[i]);
    if (n <= left && memcmp(text, endings[i], n) == 0) return n;
  }
  return 0;
}

/* End of the piece that begins at `at`, in a segment that ends at `length`. */
static size_t piece_end(const char *text, size_t length, size_t at) {
  size_t next, short_form = contraction(text + at, length - at);
  if (short_form) return at + short_form;
  class first = class_at(text, length, at, &next);
  if (text[at] == ' ' && next < length) {
    size_t after;
    class second = class_at(text, length, next, &after);
    if (second != SPACE) return run_end(text, length, next, second);
  }
  if (first != SPACE) return run_end(text, length, at, first);
  size_t end = run_end(text, length, at, SPACE), last = at;
  if (end == length) return end;
  for (size_t step = at; step < end;) { /* leave the last space to the word that follows, unless it is the only one */
    last = step;
    class_at(text, length, step, &step);
  }
  return last > at ? last : end;
}

/* Where digits stand alone a segment is one digit, or the text up to the next one; otherwise it is all of the text. */
static size_t segment_end(const tokenizer *t, const char *text, size_t length, size_t at) {
  size_t next;
  if (!t->digits_alone) return length;
  if (class_at(text, length, at, &next) == DIGIT) return next;
  for (; at < length && class_at(text, length, at, &next) != DIGIT; at = next) continue;
  return at;
}

/* --- BPE over one piece: merge the pair of lowest rank, leftmost first, until none is left. --- */
static size_t merge_all(const tokenizer *t, int32_t *symbols, size_t count) {
  for (;;) {
    size_t at = 0;
    const merge *best = NULL;
    for (size_t i = 0; i + 1 < count; i++) {
      const merge *m = find_merge(t, symbols[i], symbols[i + 1]);
      if (m->left >= 0 && (!best || m->rank < best->rank)) best = m, at = i;
    }
    if (!best) return count;
    symbols[at] = best->result;
    memmove(&symbols[at + 1], &symbols[at + 2], (count - at - 2) * sizeof *symbols);
    count--;
  }
}

size_t tokenizer_encode(const tokenizer *t, const char *text, size_t length, int32_t *out, size_t capacity) {
  enum { PIECE = 512 }; /* a longer run of one class is cut here; merges across the cut are lost, the text is not */
  size_t total = 0, segment = 0;
  for (size_t at = 0; at < length;) {
    if (segment <= at) segment = segment_end(t, text, length, at);
    size_t end = piece_end(text, segment, at);
    if (end - at > PIECE) end = at + PIECE;
    int32_t symbols[PIECE];
    size_t count = 0;
    for (; at < end; at++)
      if (t->byte_token[(uint8_t)text[at]] >= 0) symbols[count++] = t->byte_token[(uint8_t)text[at]];
    count = merge_all(t, symbols, count);
    for (size_t i = 0; i < count; i++, total++)
      if (total < capacity) out[total] = symbols[i];
  }
  return total;
}
