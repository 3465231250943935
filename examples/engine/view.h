/* Views of the engine's memory, as Vanward takes them. */
#ifndef ENGINE_VIEW_H
#define ENGINE_VIEW_H

#include <stdbool.h>
#include <stdint.h>
#include <vanward.h>

enum { FLOAT32 = 0x0220, FLOAT16 = 0x0210, INT32 = 0x0020, UINT32 = 0x0120, UINT64 = 0x0140, UINT8 = 0x0108, FLOAT8_E4M3 = 0x0a08 }; /* DLPack's code and bits */

/* Packed, in C order. */
vwd_tensor tensor(const void *data, int dtype, int ndim, const int64_t *shape);
#define TENSOR(data, dtype, ...) \
  tensor(data, dtype, (int)(sizeof((int64_t[]){__VA_ARGS__}) / sizeof(int64_t)), (const int64_t[]){__VA_ARGS__})

/* False, with the call's name and Vanward's message on stderr, unless status is VWD_OK. */
bool succeeded(vwd_status status, const char *call);

#endif
