#include "tiny.h"

#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gguf.h"
#include "linear.h"

enum {
  LAYERS = 3,
  HEADS = 4,
  KV_HEADS = 2,
  HEAD_DIM = 64,
  HIDDEN = HEADS * HEAD_DIM,
  FFN = 320,
  CONTEXT = 4096,
  ALIGNMENT = 32
};
enum { META_U32 = 4, META_STRING = 8, META_ARRAY = 9, META_I32 = 5 }; /* value types of GGUF */

static const char *const control[] = {"<|endoftext|>", "<|im_start|>", "<|im_end|>"};
static const char *const merges[] = {"t h", "th e",       "\xC4\xA0 the", "i n", "e r",
                                     "o n", "\xC4\xA0 a", "r e",          "c k", "\xC4\xA0 r"};
enum { CONTROLS = 3, MERGES = sizeof merges / sizeof *merges, VOCAB = CONTROLS + 256 + MERGES };

typedef struct {
  uint8_t *bytes;
  size_t size, capacity;
  bool failed;
  uint64_t random;
} buffer;

static void put(buffer *b, const void *from, size_t bytes) {
  if (b->size + bytes > b->capacity) {
    size_t capacity = 2 * (b->size + bytes);
    uint8_t *grown = realloc(b->bytes, capacity);
    if (!grown) {
      b->failed = true;
      return;
    }
    b->bytes = grown;
    b->capacity = capacity;
  }
  memcpy(b->bytes + b->size, from, bytes);
  b->size += bytes;
}

static void put_uint(buffer *b, uint64_t value, size_t bytes) {
  uint8_t little[8];
  for (size_t i = 0; i < bytes; i++) little[i] = (uint8_t)(value >> (8 * i));
  put(b, little, bytes);
}

static void put_float(buffer *b, float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  put_uint(b, bits, 4);
}

static void put_text(buffer *b, const char *text) {
  put_uint(b, strlen(text), 8);
  put(b, text, strlen(text));
}

static void align(buffer *b) {
  while (b->size % ALIGNMENT && !b->failed) put_uint(b, 0, 1);
}

static void meta_u32(buffer *b, const char *key, uint32_t value) {
  put_text(b, key);
  put_uint(b, META_U32, 4);
  put_uint(b, value, 4);
}

static void meta_text(buffer *b, const char *key, const char *value) {
  put_text(b, key);
  put_uint(b, META_STRING, 4);
  put_text(b, value);
}

static void meta_array(buffer *b, const char *key, uint32_t type, uint64_t count) {
  put_text(b, key);
  put_uint(b, META_ARRAY, 4);
  put_uint(b, type, 4);
  put_uint(b, count, 8);
}

/* One byte in GPT-2's printable alphabet. */
static void put_byte_token(buffer *b, int byte, int *next) {
  bool printable = (byte >= 0x21 && byte <= 0x7E) || (byte >= 0xA1 && byte != 0xAD);
  int code = printable ? byte : (*next)++;
  char text[3] = {(char)code, 0, 0};
  if (code >= 0x80) {
    text[0] = (char)(0xC0 | code >> 6);
    text[1] = (char)(0x80 | (code & 0x3F));
  }
  put_text(b, text);
}

static void put_vocabulary(buffer *b) {
  int next = 0x100;
  meta_text(b, "tokenizer.ggml.model", "gpt2");
  meta_text(b, "tokenizer.ggml.pre", "smollm");
  meta_array(b, "tokenizer.ggml.tokens", META_STRING, VOCAB);
  for (int i = 0; i < CONTROLS; i++) put_text(b, control[i]);
  for (int byte = 0; byte < 256; byte++) put_byte_token(b, byte, &next);
  for (int i = 0; i < MERGES; i++) { /* "left right" without its space */
    char joined[16];
    size_t left = strcspn(merges[i], " ");
    snprintf(joined, sizeof joined, "%.*s%s", (int)left, merges[i], merges[i] + left + 1);
    put_text(b, joined);
  }
  meta_array(b, "tokenizer.ggml.token_type", META_I32, VOCAB);
  for (int i = 0; i < VOCAB; i++) put_uint(b, i < CONTROLS ? 3 : 1, 4);
  meta_array(b, "tokenizer.ggml.merges", META_STRING, MERGES);
  for (int i = 0; i < MERGES; i++) put_text(b, merges[i]);
  meta_u32(b, "tokenizer.ggml.eos_token_id", 2);
}

typedef struct {
  char name[40];
  uint32_t type;
  int rows, cols;
} plan;

static int add_plan(plan *p, int layer, const char *name, uint32_t type, int rows, int cols) {
  *p = (plan){.type = type, .rows = rows, .cols = cols};
  if (layer < 0) snprintf(p->name, sizeof p->name, "%s.weight", name);
  else snprintf(p->name, sizeof p->name, "blk.%d.%s.weight", layer, name);
  return 1;
}

static int plan_tensors(plan *p) {
  int n = add_plan(p, -1, "token_embd", GGUF_Q8_0, VOCAB, HIDDEN);
  n += add_plan(p + n, -1, "output", GGUF_Q8_0, VOCAB, HIDDEN);
  n += add_plan(p + n, -1, "output_norm", GGUF_F32, 1, HIDDEN);
  for (int l = 0; l < LAYERS; l++) {
    n += add_plan(p + n, l, "attn_norm", GGUF_F32, 1, HIDDEN);
    n += add_plan(p + n, l, "attn_q", GGUF_Q4_1, HEADS * HEAD_DIM, HIDDEN);
    n += add_plan(p + n, l, "attn_k", GGUF_Q4_1, KV_HEADS * HEAD_DIM, HIDDEN);
    n += add_plan(p + n, l, "attn_v", GGUF_Q4_1, KV_HEADS * HEAD_DIM, HIDDEN);
    n += add_plan(p + n, l, "attn_output", GGUF_Q4_1, HIDDEN, HEADS * HEAD_DIM);
    n += add_plan(p + n, l, "ffn_norm", GGUF_F32, 1, HIDDEN);
    n += add_plan(p + n, l, "ffn_gate", GGUF_Q4_1, FFN, HIDDEN);
    n += add_plan(p + n, l, "ffn_up", GGUF_Q4_1, FFN, HIDDEN);
    n += add_plan(p + n, l, "ffn_down", GGUF_Q4_1, HIDDEN, FFN);
  }
  return n;
}

/* SplitMix64: sixteen levels' worth of bits a byte. */
static uint8_t random_byte(buffer *b) {
  uint64_t z = (b->random += 0x9e3779b97f4a7c15u);
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
  z = (z ^ z >> 27) * 0x94d049bb133111ebu;
  return (uint8_t)(z >> 56);
}

/* Uniform weights, norms of ones. The layers add little to the stream, so that a token mostly decides its successor and
 * the text soon runs in circles, which gives prompt lookup something to find. */
static void put_weights(buffer *b, const plan *p) {
  float bound = (p->type == GGUF_Q8_0 ? 2.0f : 0.9f) * sqrtf(1.0f / (float)p->cols);
  for (int block = 0; block < p->rows * p->cols / 32; block++) {
    if (p->type == GGUF_F32) {
      for (int i = 0; i < 32; i++) put_float(b, 1.0f);
    } else if (p->type == GGUF_Q8_0) {
      put_uint(b, float_to_half(bound / 127.5f), 2);
      for (int i = 0; i < 32; i++) put_uint(b, random_byte(b), 1);
    } else {
      put_uint(b, float_to_half(bound / 7.5f), 2);
      put_uint(b, float_to_half(-bound), 2);
      for (int i = 0; i < 16; i++) put_uint(b, random_byte(b), 1);
    }
  }
}

void *tiny_gguf(size_t *size) {
  plan tensors[3 + 9 * LAYERS];
  int count = plan_tensors(tensors);
  buffer b = {.random = 2026};
  put(&b, "GGUF", 4);
  put_uint(&b, 3, 4);
  put_uint(&b, (uint64_t)count, 8);
  put_uint(&b, 9 + 6, 8); /* metadata entries: nine here, six of the vocabulary */
  meta_text(&b, "general.architecture", "llama");
  meta_text(&b, "general.name", "tiny random model");
  meta_u32(&b, "llama.block_count", LAYERS);
  meta_u32(&b, "llama.embedding_length", HIDDEN);
  meta_u32(&b, "llama.feed_forward_length", FFN);
  meta_u32(&b, "llama.attention.head_count", HEADS);
  meta_u32(&b, "llama.attention.head_count_kv", KV_HEADS);
  meta_u32(&b, "llama.context_length", CONTEXT);
  meta_u32(&b, "llama.rope.dimension_count", HEAD_DIM);
  put_vocabulary(&b);
  uint64_t offset = 0;
  for (int i = 0; i < count; i++) {
    const plan *p = &tensors[i];
    put_text(&b, p->name);
    put_uint(&b, 2, 4);
    put_uint(&b, (uint64_t)p->cols, 8);
    put_uint(&b, (uint64_t)p->rows, 8);
    put_uint(&b, p->type, 4);
    put_uint(&b, offset, 8);
    offset += (gguf_row_bytes(p->type, p->cols) * (uint64_t)p->rows + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
  }
  align(&b);
  for (int i = 0; i < count; i++) {
    put_weights(&b, &tensors[i]);
    align(&b);
  }
  if (b.failed) {
    free(b.bytes);
    return NULL;
  }
  *size = b.size;
  return b.bytes;
}
