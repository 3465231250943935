/* A GGUF file of a few hundred kilobytes, made in memory: a Llama decoder with random weights and a byte vocabulary.
 * Its text means nothing; it takes every step of the engine where there is no network to fetch a real model from. */
#ifndef ENGINE_TINY_H
#define ENGINE_TINY_H

#include <stddef.h>

/* The same bytes on every machine. The caller frees them; NULL on failure. */
void *tiny_gguf(size_t *size);

#endif
