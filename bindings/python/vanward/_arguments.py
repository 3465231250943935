"""Argument structs from Python objects: the groups that calls share, and how a ctypes struct is filled by name."""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping, Sequence
from ctypes import POINTER, Structure, byref, c_float, c_int32, c_uint32, c_uint64, pointer, sizeof
from dataclasses import dataclass
from typing import Any

from . import _header
from ._abi import lib
from ._enums import IndexKind, RopeStyle, of_name
from ._errors import check
from ._tensor import view

Array = Any
"""Anything with the buffer protocol or __dlpack__; None where an optional tensor is absent."""


@dataclass
class BlockList:
    """vwd_block_list: ids [B, Hk, cap] and counts [B, Hk], or [B, Q, …] where each query position has its own list."""

    ids: Array
    counts: Array
    slots: Array = None


@dataclass
class PagedKV:
    """vwd_paged_kv: k [pages, P, Hk, D], v [pages, P, Hk, Dv], seq_lens [B], page_table [B, max_pages], scales of FP8."""

    k: Array
    v: Array
    seq_lens: Array
    page_table: Array = None
    k_scale: Array = None
    v_scale: Array = None


@dataclass
class Index:
    """vwd_index: summaries of one layer's keys; a kind names the fields that it uses."""

    kind: IndexKind | str
    block_size: int = 0
    window: int = 0
    stride: int = 0
    table: Array = None
    key_max: Array = None
    key_min: Array = None
    means: Array = None
    labels: Array = None
    label_scale: Array = None
    label_min: Array = None
    channels: Array = None


@dataclass
class AttentionState:
    """vwd_attention_state: acc [B, (Q,) Hq, Dv], m and l [B, (Q,) Hq]."""

    acc: Array
    m: Array
    l: Array  # noqa: E741


@dataclass
class AttentionPartials(AttentionState):
    """vwd_attention_partials: a state per entry of a list."""


@dataclass
class PredictorState:
    """vwd_predictor_state: level and trend [B, Hk, max_blocks]."""

    level: Array
    trend: Array


@dataclass
class Holt:
    """vwd_holt: smoothing factors; these predict the previous step's scores again."""

    alpha: float = 1.0
    beta: float = 0.0
    gamma: float = 0.0


@dataclass
class Rope:
    """vwd_rope; zeros mean the defaults."""

    style: RopeStyle | str = RopeStyle.HALVES
    rotary_dim: int = 0
    theta: float = 0.0
    attention_factor: float = 0.0
    inv_freq: Array = None


_GROUPS = {
    _header.vwd_block_list: BlockList,
    _header.vwd_paged_kv: PagedKV,
    _header.vwd_index: Index,
    _header.vwd_attention_state: AttentionState,
    _header.vwd_attention_partials: AttentionPartials,
    _header.vwd_predictor_state: PredictorState,
    _header.vwd_holt: Holt,
    _header.vwd_rope: Rope,
}
_BY_POINTER = [POINTER(struct) for struct in _GROUPS if hasattr(struct, "struct_size")]
_INDEX_INPUTS = ("table", "channels")  # read, even where the index is written
_RANGES = {c_uint32: (0, (1 << 32) - 1), c_uint64: (0, (1 << 64) - 1), c_int32: (-(1 << 31), (1 << 31) - 1)}


class _Lowering:
    """Fills a struct by field names. What must outlive the struct goes into `keep`."""

    def __init__(self, keep: list[Any], writable: bool):
        self.keep, self.writable = keep, writable

    def fill(self, struct: Structure, values: Mapping[str, Any], prefix: str = "") -> None:
        types = _types(type(struct))
        for name, value in values.items():
            if value is None:
                continue
            kind, path = types[name], prefix + name
            if kind is _header.vwd_tensor:
                setattr(struct, name, self.tensor(value, path, self.writable and name not in _INDEX_INPUTS))
            elif kind in _RANGES:
                setattr(struct, name, integer(value, path, *_RANGES[kind]))
            elif kind is c_float:
                setattr(struct, name, number(value, path))
            elif kind in _GROUPS:
                self.group(getattr(struct, name), value, path)
            elif kind in _BY_POINTER:
                setattr(struct, name, self.pointer(kind._type_, value, path))
            else:
                setattr(struct, name, self.array(kind._type_, value, path))

    def tensor(self, value: Any, path: str, writable: bool) -> _header.vwd_tensor:
        try:
            tensor, owner = view(value, writable)
        except BufferError as error:  # such as torch's, of a tensor that requires a gradient
            raise TypeError(f"{path}: {error}") from error
        except (TypeError, ValueError) as error:
            error.args = (f"{path}: {error}",)
            raise
        self.keep.append(owner)
        return tensor

    def group(self, struct: Structure, value: Any, path: str) -> None:
        expected = _GROUPS[type(struct)]
        if type(value) is not expected:
            raise TypeError(f"{path}: {type(value).__name__}; expected {expected.__name__}")
        self.fill(struct, vars(value), path + ".")

    def pointer(self, kind: Any, value: Any, path: str) -> Any:
        struct = kind(struct_size=sizeof(kind))
        self.group(struct, value, path)
        self.keep.append(struct)
        return pointer(struct)

    def array(self, kind: Any, values: Sequence[Any], path: str) -> Any:
        array = (kind * len(values))()
        for i, value in enumerate(values):
            if kind is _header.vwd_tensor:
                array[i] = self.tensor(value, f"{path}[{i}]", self.writable)
            else:
                self.group(array[i], value, f"{path}[{i}]")
        self.keep.append(array)
        return array


def integer(value: Any, path: str, least: int, most: int) -> int:
    """An integer as it is: nothing is rounded."""
    if isinstance(value, str):
        return of_name(value, path)
    try:
        exact = operator.index(value)
    except TypeError:
        raise TypeError(f"{path}: {value!r}; expected an integer") from None
    if not least <= exact <= most:
        raise ValueError(f"{path}: {exact}; expected {least} to {most}")
    return exact


def number(value: Any, path: str) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise TypeError(f"{path}: {value!r}; expected a number") from None


@functools.cache
def _types(struct: type[Structure]) -> dict[str, Any]:
    return dict(struct._fields_)  # type: ignore[arg-type]


def arguments(struct: type[Structure], keep: list[Any], inputs: dict[str, Any], outputs: dict[str, Any]) -> Any:
    """A struct with its size and fields set; None leaves one zero. Outputs refuse read-only memory."""
    args = struct(struct_size=sizeof(struct))
    _Lowering(keep, writable=False).fill(args, inputs)
    _Lowering(keep, writable=True).fill(args, outputs)
    return args


class Call:
    """A call whose arguments are converted: calling it is one foreign call.

    It keeps its arrays alive and sees their present contents, so it can be called again and again, timed, and captured
    in a CUDA graph. `stream` replaces the stream that it was prepared for.
    """

    __slots__ = ("_name", "_function", "_owner", "_reference", "_stream", "_keep", "args")

    def __init__(
        self, owner: Any, struct: type[Structure], stream: int, inputs: dict[str, Any], outputs: dict[str, Any]
    ):
        self._name = struct.__name__.removesuffix("_args")
        self._function = getattr(lib, self._name)
        self._owner = owner
        self._stream = stream
        self._keep: list[Any] = []
        self.args = arguments(struct, self._keep, inputs, outputs)
        self._reference = byref(self.args)

    def __call__(self, stream: int | None = None) -> None:
        stream = self._stream if stream is None else stream
        status = self._function(self._owner.handle, self._reference, stream)
        if status:
            check(status)

    def scratch(self) -> int:
        """Bytes of scratch that it takes on a stream; 0 on a CPU session. Of attention, repair and selection."""
        size = c_uint64()
        check(getattr(lib, f"{self._name}_scratch")(self._owner.handle, self._reference, byref(size)))
        return size.value
