/* vanward_dlpack.h as C11 and as C++17, with dlpack.h (WITH_DLPACK) and without. Returns how many checks failed. */
#ifdef WITH_DLPACK
#  include <dlpack/dlpack.h>
#endif
#include "vanward_dlpack.h"

#include <stdio.h>
#include <string.h>

static int failures;
#define CHECK(condition) \
  do { \
    if (!(condition)) { \
      ++failures; \
      fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
    } \
  } while (0)

static vwd_dltensor compact_4_by_3(float *data, int64_t *shape) {
  vwd_dltensor source;
  memset(&source, 0, sizeof source);
  shape[0] = 4;
  shape[1] = 3;
  source.data = data;
  source.device.device_type = (vwd_dldevice_type)1;
  source.ndim = 2;
  source.dtype.code = 2;
  source.dtype.bits = 32;
  source.dtype.lanes = 1;
  source.shape = shape;
  return source;
}

static void null_strides_mean_compact_and_the_byte_offset_moves_data(void) {
  float data[16];
  int64_t shape[2];
  vwd_dltensor source = compact_4_by_3(data, shape);
  source.byte_offset = 2 * sizeof(float);
  vwd_tensor tensor = VWD_TENSOR_INIT;
  CHECK(vwd_tensor_from_dlpack(&source, &tensor) == VWD_OK);
  CHECK(tensor.data == data + 2);
  CHECK(tensor.device_type == 1 && tensor.dtype_code == 2 && tensor.dtype_bits == 32 && tensor.lanes == 1);
  CHECK(tensor.ndim == 2 && tensor.shape[0] == 4 && tensor.shape[1] == 3);
  CHECK(tensor.strides[0] == 3 && tensor.strides[1] == 1);
}

static void given_strides_are_kept_and_come_back(void) {
  float data[32];
  int64_t shape[2], strides[2] = {1, -8};
  vwd_dltensor source = compact_4_by_3(data, shape), again = source;
  source.strides = strides;
  vwd_tensor tensor = VWD_TENSOR_INIT;
  CHECK(vwd_tensor_from_dlpack(&source, &tensor) == VWD_OK);
  CHECK(tensor.strides[0] == 1 && tensor.strides[1] == -8);
  CHECK(vwd_tensor_to_dlpack(&tensor, &again) == VWD_OK);
  CHECK(again.data == data && again.ndim == 2 && again.byte_offset == 0);
  CHECK((int32_t)again.device.device_type == 1 && again.dtype.code == 2 && again.dtype.bits == 32);
  CHECK(again.dtype.lanes == 1 && again.shape[1] == 3 && again.strides[1] == -8);
}

static void what_does_not_fit_is_refused_and_writes_nothing(void) {
  float data[16];
  int64_t shape[6] = {1, 1, 1, 1, 1, 1};
  vwd_dltensor good = compact_4_by_3(data, shape), source = good;
  vwd_tensor tensor, before;
  memset(&tensor, 0x5a, sizeof tensor);
  memcpy(&before, &tensor, sizeof tensor);

  source.ndim = 6;
  CHECK(vwd_tensor_from_dlpack(&source, &tensor) == VWD_ERROR_UNSUPPORTED);
  source = good;
  source.dtype.lanes = 4;
  CHECK(vwd_tensor_from_dlpack(&source, &tensor) == VWD_ERROR_UNSUPPORTED);
  source = good;
  source.ndim = -1;
  CHECK(vwd_tensor_from_dlpack(&source, &tensor) == VWD_ERROR_INVALID_ARGUMENT);
  source = good;
  source.shape = NULL;
  CHECK(vwd_tensor_from_dlpack(&source, &tensor) == VWD_ERROR_INVALID_ARGUMENT);
  CHECK(vwd_tensor_from_dlpack(NULL, &tensor) == VWD_ERROR_INVALID_ARGUMENT);
  CHECK(vwd_tensor_from_dlpack(&good, NULL) == VWD_ERROR_INVALID_ARGUMENT);
  CHECK(memcmp(&before, &tensor, sizeof tensor) == 0);

  vwd_dltensor target;
  CHECK(vwd_tensor_to_dlpack(&tensor, &target) == VWD_ERROR_INVALID_ARGUMENT);
}

static void the_fields_lie_where_dlpack_has_them(void) {
  CHECK(offsetof(vwd_dltensor, device) == sizeof(void *));
  CHECK(offsetof(vwd_dltensor, ndim) == sizeof(void *) + 8);
  CHECK(offsetof(vwd_dltensor, dtype) == sizeof(void *) + 12);
  CHECK(offsetof(vwd_dltensor, shape) == sizeof(void *) + 16);
  CHECK(offsetof(vwd_dltensor, byte_offset) == 3 * sizeof(void *) + 16);
}

int main(void) {
  null_strides_mean_compact_and_the_byte_offset_moves_data();
  given_strides_are_kept_and_come_back();
  what_does_not_fit_is_refused_and_writes_nothing();
  the_fields_lie_where_dlpack_has_them();
  return failures;
}
