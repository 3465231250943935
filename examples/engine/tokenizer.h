/* Byte-level BPE with the vocabulary, merges and pre-tokenizer that the model file brings. */
#ifndef ENGINE_TOKENIZER_H
#define ENGINE_TOKENIZER_H

#include "gguf.h"

typedef struct tokenizer tokenizer;

/* Borrows `file`. Prints the reason to stderr and returns NULL on failure. */
tokenizer *tokenizer_new(const gguf *file);
void tokenizer_free(tokenizer *t);

/* Tokens of plain text, at most `capacity`; returns how many the text has. Control tokens are never produced. */
size_t tokenizer_encode(const tokenizer *t, const char *text, size_t length, int32_t *out, size_t capacity);

/* The id of a token by its exact text, control tokens included; -1 where there is none. */
int32_t tokenizer_id(const tokenizer *t, const char *text);

/* Bytes of one token, at most `capacity`; returns how many. A control token has none. */
size_t tokenizer_decode(const tokenizer *t, int32_t token, char *out, size_t capacity);

#endif
