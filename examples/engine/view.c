#include "view.h"

#include <stdio.h>

vwd_tensor tensor(const void *data, int dtype, int ndim, const int64_t *shape) {
  vwd_tensor t = VWD_TENSOR_INIT;
  t.data = (void *)(uintptr_t)data; /* inputs are not written; the struct has no const twin */
  t.device_type = 1;
  t.dtype_code = (uint8_t)(dtype >> 8);
  t.dtype_bits = (uint8_t)dtype;
  t.lanes = 1;
  t.ndim = ndim;
  int64_t stride = 1;
  for (int d = ndim - 1; d >= 0; stride *= shape[d--]) {
    t.shape[d] = shape[d];
    t.strides[d] = stride;
  }
  return t;
}

bool succeeded(vwd_status status, const char *call) {
  if (status == VWD_OK) return true;
  char message[512];
  vwd_last_error(message, sizeof message);
  fprintf(stderr, "%s: status %d: %s\n", call, (int)status, message);
  return false;
}
