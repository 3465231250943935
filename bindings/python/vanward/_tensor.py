"""Anything with the buffer protocol or DLPack as a vwd_tensor. Nothing is copied; a view comes with what keeps it."""

from __future__ import annotations

import ctypes
import math
import sys
from ctypes import (
    POINTER,
    Structure,
    c_char_p,
    c_int,
    c_int32,
    c_int64,
    c_ssize_t,
    c_uint8,
    c_uint16,
    c_uint32,
    c_uint64,
    c_void_p,
    py_object,
)
from typing import Any

from ._header import vwd_tensor

MAX_RANK = 5
CPU, PINNED = 1, 3
_INT, _UINT, _FLOAT, _BFLOAT, _BOOL = 0, 1, 2, 4, 6
_FLOAT8_E4M3FN, _FLOAT8_E5M2 = 10, 12

# --- the buffer protocol (PEP 3118) -----------------------------------------------------------------------------------


class _PyBuffer(Structure):
    _fields_ = [
        ("buf", c_void_p),
        ("obj", c_void_p),
        ("len", c_ssize_t),
        ("itemsize", c_ssize_t),
        ("readonly", c_int),
        ("ndim", c_int),
        ("format", c_char_p),
        ("shape", POINTER(c_ssize_t)),
        ("strides", POINTER(c_ssize_t)),
        ("suboffsets", POINTER(c_ssize_t)),
        ("internal", c_void_p),
    ]


_RECORDS_READ_ONLY = 0x0018 | 0x0004  # PyBUF_STRIDES | PyBUF_FORMAT

_get_buffer = ctypes.pythonapi.PyObject_GetBuffer
_get_buffer.argtypes = [py_object, POINTER(_PyBuffer), c_int]
_check_buffer = ctypes.pythonapi.PyObject_CheckBuffer
_check_buffer.argtypes = [py_object]
_release_buffer = ctypes.pythonapi.PyBuffer_Release
_release_buffer.argtypes = [POINTER(_PyBuffer)]
_release_buffer.restype = None

_KINDS = {_BOOL: "?", _INT: "bhilqn", _UINT: "BHILQN", _FLOAT: "efd"}
_CODE_OF_FORMAT = {character: code for code, characters in _KINDS.items() for character in characters}
_NATIVE_ORDERS = ("", "@", "=", "<" if sys.byteorder == "little" else ">")


class _Buffer:
    """An exported buffer, given back when the last view of it goes."""

    def __init__(self, array: Any):
        self.c = _PyBuffer()
        _get_buffer(array, self.c, _RECORDS_READ_ONLY)

    def __del__(self) -> None:
        _release_buffer(self.c)


def _from_buffer(array: Any, writable: bool) -> tuple[vwd_tensor, Any]:
    buffer = _Buffer(array)
    b = buffer.c
    if writable and b.readonly:
        raise ValueError("read-only memory given for an output")
    text = (b.format or b"B").decode()
    order, character = text[:-1], text[-1:]
    if character not in _CODE_OF_FORMAT or order not in _NATIVE_ORDERS:
        raise TypeError(f"buffer format {text!r} is no element type of a tensor")
    rank, size = b.ndim, b.itemsize
    strides = b.strides[:rank] if b.strides else None
    if strides:
        if any(stride % size for stride in strides):
            raise ValueError(f"strides are no multiples of the element's {size} bytes")
        strides = [stride // size for stride in strides]
    return _tensor(b.buf, CPU, 0, _CODE_OF_FORMAT[character], 8 * size, b.shape[:rank], strides), buffer


# --- DLPack -----------------------------------------------------------------------------------------------------------


class _DLTensor(Structure):
    _fields_ = [
        ("data", c_void_p),
        ("device_type", c_int32),
        ("device_id", c_int32),
        ("ndim", c_int32),
        ("code", c_uint8),
        ("bits", c_uint8),
        ("lanes", c_uint16),
        ("shape", POINTER(c_int64)),
        ("strides", POINTER(c_int64)),
        ("byte_offset", c_uint64),
    ]


class _DLManagedTensor(Structure):
    _fields_ = [("dl_tensor", _DLTensor), ("manager_ctx", c_void_p), ("deleter", c_void_p)]


class _DLManagedTensorVersioned(Structure):
    _fields_ = [
        ("major", c_uint32),
        ("minor", c_uint32),
        ("manager_ctx", c_void_p),
        ("deleter", c_void_p),
        ("flags", c_uint64),
        ("dl_tensor", _DLTensor),
    ]


_FLAG_READ_ONLY = 1

_capsule_is_valid = ctypes.pythonapi.PyCapsule_IsValid
_capsule_is_valid.argtypes = [py_object, c_char_p]
_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.argtypes = [py_object, c_char_p]
_capsule_pointer.restype = c_void_p


def _export(array: Any) -> Any:
    """The capsule. Stream −1: the caller orders the work, and an export must not synchronise or record an event."""
    arguments: dict[str, Any] = {} if array.__dlpack_device__()[0] in (CPU, PINNED) else {"stream": -1}
    try:
        return array.__dlpack__(max_version=(1, 0), **arguments)
    except TypeError:  # from before DLPack 1.0
        return array.__dlpack__(**arguments)


def _from_dlpack(array: Any, writable: bool) -> tuple[vwd_tensor, Any]:
    if hasattr(array, "is_neg") and array.is_neg():
        raise ValueError("its sign is in torch's negative bit; pass resolve_neg()")
    capsule = _export(array)
    managed: _DLManagedTensor | _DLManagedTensorVersioned
    if _capsule_is_valid(capsule, b"dltensor_versioned"):
        managed = versioned = _DLManagedTensorVersioned.from_address(_capsule_pointer(capsule, b"dltensor_versioned"))
        if versioned.major != 1:
            raise TypeError(f"DLPack {versioned.major}.{versioned.minor}; expected version 1")
        if writable and versioned.flags & _FLAG_READ_ONLY:
            raise ValueError("read-only memory given for an output")
    elif _capsule_is_valid(capsule, b"dltensor"):
        managed = _DLManagedTensor.from_address(_capsule_pointer(capsule, b"dltensor"))
    else:
        raise TypeError("__dlpack__ gave no DLPack capsule, or one that was taken already")
    source = managed.dl_tensor
    if source.lanes != 1:
        raise TypeError(f"{source.lanes} lanes an element; expected 1")
    rank = source.ndim
    data = source.data + source.byte_offset if source.data else None
    shape, strides = source.shape[:rank], source.strides[:rank] if source.strides else None
    tensor = _tensor(data, source.device_type, source.device_id, source.code, source.bits, shape, strides)
    return tensor, capsule  # whose destructor runs the deleter, for nobody took the tensor over


# --- both -------------------------------------------------------------------------------------------------------------


def _tensor(
    data: int | None,
    device_type: int,
    device_id: int,
    code: int,
    bits: int,
    shape: list[int],
    strides: list[int] | None,
) -> vwd_tensor:
    """Strides are in elements; without any the tensor is compact and row-major."""
    rank = len(shape)
    if rank > MAX_RANK:
        raise ValueError(f"rank {rank}; expected at most {MAX_RANK}")
    if strides is None:
        strides = [math.prod(shape[d + 1 :]) for d in range(rank)]
    return vwd_tensor(data, device_type, device_id, code, bits, 1, rank, tuple(shape), tuple(strides))


class View:
    """An array that is taken for something that it cannot say of itself; see `bfloat16` and `pinned`."""

    def __init__(self, array: Any, dtype: tuple[str, int, int] | None = None, device_type: int | None = None):
        self.array, self.dtype, self.device_type = array, dtype, device_type


def bfloat16(array: Any) -> View:
    """Takes 16-bit elements, such as numpy's uint16, for bfloat16, which the buffer protocol has no name for."""
    return View(array, dtype=("bfloat16", _BFLOAT, 16))


def float8_e4m3fn(array: Any) -> View:
    """Takes 8-bit elements, such as numpy's uint8, for float8_e4m3fn."""
    return View(array, dtype=("float8_e4m3fn", _FLOAT8_E4M3FN, 8))


def float8_e5m2(array: Any) -> View:
    """Takes 8-bit elements, such as numpy's uint8, for float8_e5m2."""
    return View(array, dtype=("float8_e5m2", _FLOAT8_E5M2, 8))


def pinned(array: Any) -> View:
    """Takes host memory for pinned memory: an array over `Session.pinned_alloc`."""
    return View(array, device_type=PINNED)


def view(array: Any, writable: bool) -> tuple[vwd_tensor, Any]:
    """A tensor, and what must live as long as it is used."""
    if isinstance(array, vwd_tensor):  # memory of the library's own
        return array, array
    if isinstance(array, View):
        given, keep = view(array.array, writable)
        tensor = vwd_tensor.from_buffer_copy(given)  # what the library gave stays as it is
        if array.device_type is not None:
            tensor.device_type = array.device_type
        if array.dtype is not None:
            name, code, bits = array.dtype
            if tensor.dtype_bits != bits:
                raise TypeError(f"{tensor.dtype_bits}-bit elements taken for {name}")
            tensor.dtype_code = code
        return tensor, keep
    has_dlpack = hasattr(array, "__dlpack__")
    if _check_buffer(array):
        try:
            return _from_buffer(array, writable)
        except BufferError:  # jax exports buffers, but not of bfloat16
            if not has_dlpack:
                raise
    if has_dlpack:
        return _from_dlpack(array, writable)
    raise TypeError(f"{type(array).__name__} has neither the buffer protocol nor __dlpack__")
