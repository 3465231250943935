#ifndef VANWARD_DLPACK_H
#define VANWARD_DLPACK_H

/*
 * DLTensor to vwd_tensor and back, inline. Nothing to link, nothing to vendor.
 *
 * Where <dlpack/dlpack.h> (0.6 or later) was included before this header, or can be found, vwd_dltensor is its
 * DLTensor. Elsewhere it is a struct of our own with the same fields in the same places.
 *
 * These are no calls of the library: vwd_last_error does not know their failures.
 */

#include "vanward.h"

#if !defined(DLPACK_DLPACK_H_) && defined(__has_include)
#  if __has_include(<dlpack/dlpack.h>)
#    include <dlpack/dlpack.h>
#  endif
#endif

#ifdef DLPACK_DLPACK_H_
typedef DLTensor vwd_dltensor;
typedef DLDeviceType vwd_dldevice_type;
#else
typedef int32_t vwd_dldevice_type;
typedef struct {
  vwd_dldevice_type device_type;
  int32_t device_id;
} vwd_dldevice;
typedef struct {
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;
} vwd_dldatatype;
typedef struct {
  void *data;
  vwd_dldevice device;
  int32_t ndim;
  vwd_dldatatype dtype;
  int64_t *shape;
  int64_t *strides;
  uint64_t byte_offset;
} vwd_dltensor;
#endif

/**
 * Views a DLTensor. Strides NULL means compact and row-major; byte_offset is added to data.
 *
 * source  Borrowed for the call; what it points to stays its owner's.
 * target  Out, written only on success.
 *
 * Errors: INVALID_ARGUMENT (source or target NULL, ndim negative, shape NULL), UNSUPPORTED (ndim above 5, lanes not 1).
 */
static inline vwd_status vwd_tensor_from_dlpack(const vwd_dltensor *source, vwd_tensor *target) {
  if (source == NULL || target == NULL || source->ndim < 0 || (source->ndim > 0 && source->shape == NULL)) {
    return VWD_ERROR_INVALID_ARGUMENT;
  }
  if (source->ndim > 5 || source->dtype.lanes != 1) {
    return VWD_ERROR_UNSUPPORTED;
  }
  vwd_tensor tensor = VWD_TENSOR_INIT;
  if (source->data != NULL) {
    tensor.data = (char *)source->data + source->byte_offset;
  }
  tensor.device_type = (int32_t)source->device.device_type;
  tensor.device_id = source->device.device_id;
  tensor.dtype_code = source->dtype.code;
  tensor.dtype_bits = source->dtype.bits;
  tensor.lanes = 1;
  tensor.ndim = source->ndim;
  uint64_t compact = 1; /* unsigned: a hostile shape wraps here and is refused by the call */
  for (int32_t d = source->ndim - 1; d >= 0; --d) {
    tensor.shape[d] = source->shape[d];
    tensor.strides[d] = source->strides != NULL ? source->strides[d] : (int64_t)compact;
    compact *= (uint64_t)source->shape[d];
  }
  *target = tensor;
  return VWD_OK;
}

/**
 * Describes a vwd_tensor as a DLTensor, whose shape and strides point into source.
 *
 * source  Outlives target.
 * target  Out, written only on success.
 *
 * Errors: INVALID_ARGUMENT (source or target NULL, ndim outside 0 … 5).
 */
static inline vwd_status vwd_tensor_to_dlpack(vwd_tensor *source, vwd_dltensor *target) {
  if (source == NULL || target == NULL || source->ndim < 0 || source->ndim > 5) {
    return VWD_ERROR_INVALID_ARGUMENT;
  }
  target->data = source->data;
  target->device.device_type = (vwd_dldevice_type)source->device_type;
  target->device.device_id = source->device_id;
  target->ndim = source->ndim;
  target->dtype.code = source->dtype_code;
  target->dtype.bits = source->dtype_bits;
  target->dtype.lanes = 1;
  target->shape = source->shape;
  target->strides = source->strides;
  target->byte_offset = 0;
  return VWD_OK;
}

#endif /* VANWARD_DLPACK_H */
