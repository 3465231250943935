"""Arrays beside the caller's: of numpy, torch or cupy, as what they will be used with, and on its device."""

from __future__ import annotations

import importlib
from typing import Any

from ._tensor import View


def shape(array: Any) -> tuple[int, ...]:
    return tuple(_bare(array).shape)


def full(like: Any, shape: tuple[int, ...], dtype: str, value: float = 0) -> Any:
    """An array of its own, of the library and on the device that `like` is of."""
    array = _bare(like)
    if hasattr(array, "new_full"):  # torch, whose dtypes are its module's
        return array.new_full(shape, value, dtype=getattr(importlib.import_module("torch"), dtype))
    return _module(array).full(shape, value, dtype)


def same(like: Any, shape: tuple[int, ...]) -> Any:
    """Zeros of the dtype of `like`, and taken for what it is taken for."""
    array = _bare(like)
    made = array.new_zeros(shape) if hasattr(array, "new_zeros") else _module(array).zeros(shape, array.dtype)
    return View(made, like.dtype, like.device_type) if isinstance(like, View) else made


def _bare(array: Any) -> Any:
    return _bare(array.array) if isinstance(array, View) else array


def _module(array: Any) -> Any:
    """numpy, also for memoryviews and whatever else has no library of its own; or cupy."""
    name = type(array).__module__.partition(".")[0]
    return importlib.import_module(name if name == "cupy" else "numpy")
