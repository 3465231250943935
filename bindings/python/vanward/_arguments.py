"""Argument structs from Python objects: the groups that calls share, and how a ctypes struct is filled by name.

Groups allocate what a call writes: `BlockList.empty(q, …)` and its like take the shape from the arrays that they are used
with, and make arrays of the same library on the same device.
"""

from __future__ import annotations

import functools
import math
import operator
import os
import re
from collections.abc import Mapping, Sequence
from ctypes import POINTER, Array as CArray, Structure, byref, c_float, c_int32, c_uint32, c_uint64, pointer, sizeof
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from . import _header
from ._abi import lib
from ._allocate import full, same, shape
from ._docs import DOCS
from ._enums import IndexKind, RopeStyle, of_name
from ._errors import check, invoke, naming
from ._tensor import View, view

if TYPE_CHECKING:
    from typing_extensions import Buffer

    class _Exporter(Protocol):
        def __dlpack__(self, *args: Any, **kwargs: Any) -> Any: ...

    Array = Buffer | _Exporter | View
else:
    Array = Any
"""Anything with the buffer protocol or __dlpack__. The fields of groups are what they were given."""


T = TypeVar("T")


def documented(kind: type[T]) -> type[T]:
    """What is said to be a call or a struct of vanward.h by its first word carries the header's comment, too."""
    for described in [kind, *vars(kind).values()]:
        of_class_method = getattr(described, "__func__", described)
        name = re.match(r"vwd_\w+", getattr(of_class_method, "__doc__", None) or "")
        if name:
            of_class_method.__doc__ += f"\n\n{DOCS[name[0]]}"
    return kind


@documented
@dataclass
class BlockList:
    """vwd_block_list: ids [B, Hk, cap] and counts [B, Hk], or [B, Q, …] where each query position has its own list."""

    ids: Any
    counts: Any
    slots: Any = None

    @classmethod
    def empty(cls, q: Array, *, kv_heads: int, capacity: int, each_row: bool = False) -> BlockList:
        """Room for `capacity` blocks (or tokens) of each sequence and KV head; `each_row`: of each query position, too."""
        rows = shape(q)[: 2 if each_row else 1] + (kv_heads,)
        return cls(full(q, rows + (capacity,), "int32"), full(q, rows, "int32"))

    def scores(self, blocks: int) -> Any:
        """Room for the scores of as many blocks as a sequence may have: select_blocks(scores=…)."""
        return full(self.ids, shape(self.ids)[:-1] + (blocks,), "float32")

    def status(self) -> Any:
        """Room for the bits of SelectStatus of each list: select_blocks(status=…)."""
        return full(self.ids, shape(self.ids)[:-1], "uint32")


@documented
@dataclass
class PagedKV:
    """vwd_paged_kv: k [pages, P, Hk, D], v [pages, P, Hk, Dv], seq_lens [B], page_table [B, max_pages], scales of FP8; int4: what is coded."""

    k: Any
    v: Any
    seq_lens: Any
    page_table: Any = None
    k_scale: Any = None
    v_scale: Any = None
    int4: Int4KV | None = None


@documented
@dataclass
class Int4KV:
    """vwd_int4_kv: codes k [pages, P, Hk, D/2] and v, scales [pages, P, Hk], coded_lens [B], means [mean_pages, rows, Hk, D]."""

    block_size: int
    k: Any
    v: Any
    k_scale: Any
    v_scale: Any
    coded_lens: Any
    means: Any
    exact_tokens: int = 0
    page_table: Any = None
    mean_table: Any = None
    weights: Any = None


@documented
@dataclass
class Remainder:
    """vwd_remainder: tokens [N, Hk], mean_k [N, Hk, D], mean_v [N, Hk, Dv], covariance [N, Hk, D, Dv], rows [B]."""

    tokens: Any
    mean_k: Any
    mean_v: Any
    covariance: Any
    rows: Any = None

    @classmethod
    def empty(cls, k: Array, v: Array, *, sequences: int) -> Remainder:
        """Room for so many sequences, of no tokens yet; k [pages, P, Hk, D] and v [pages, P, Hk, Dv] are keys and values."""
        (kv_heads, dim), value_dim = shape(k)[2:], shape(v)[3]
        rows = (sequences, kv_heads)
        means = (full(k, rows + (n,), "float32") for n in (dim, value_dim))
        return cls(full(k, rows, "int32"), *means, full(k, rows + (dim, value_dim), "float32"))


@documented
@dataclass
class Index:
    """vwd_index: summaries of one layer's keys; a kind names the fields that it uses."""

    kind: IndexKind | str
    block_size: int = 0
    window: int = 0
    stride: int = 0
    table: Any = None
    key_max: Any = None
    key_min: Any = None
    means: Any = None
    labels: Any = None
    label_scale: Any = None
    label_min: Any = None
    channels: Any = None
    axes: Any = None
    axis_range: Any = None
    axis_weights: Any = None
    axis_centre: Any = None

    @classmethod
    def minmax(cls, k: Array, *, batch: int, tokens: int, block_size: int) -> Index:
        """Room for the extremes of every block of `batch` sequences of at most `tokens`, in the dtype of k.

        k is [pages, P, Hk, D] of 16 or 32 bits; for keys in FP8 pass any array of the dtype that is to be stored.
        """
        rows = (batch, -(-tokens // block_size), *shape(k)[2:])
        return cls(IndexKind.MINMAX, block_size=block_size, key_max=same(k, rows), key_min=same(k, rows))

    @classmethod
    def mean(cls, k: Array, *, batch: int, tokens: int, window: int = 32, stride: int = 16) -> Index:
        """Room for the mean of every full window of `batch` sequences of at most `tokens`, in the dtype of k."""
        rows = (batch, max(0, tokens - window) // stride + 1, *shape(k)[2:])
        return cls(IndexKind.MEAN, window=window, stride=stride, means=same(k, rows))

    @classmethod
    def axis(
        cls,
        k: Array,
        *,
        batch: int,
        tokens: int,
        block_size: int,
        int4: bool = True,
        weights: Array | None = None,
        centre: Array | None = None,
    ) -> Index:
        """Room for the mean and the axis of every block of `batch` sequences of at most `tokens`, in INT4 or in the dtype of k.

        k is [pages, P, Hk, D]; weights and centre are [Hk, D] as channel_importance wrote them.
        """
        kv_heads, dim = shape(k)[2:]
        rows = (batch, -(-tokens // block_size), kv_heads)
        axes = full(k, rows + (dim,), "uint8") if int4 else same(k, rows + (2 * dim,))
        ranges = full(k, rows + (4 * -(-dim // _AXIS_GROUP),), "float16") if int4 else None
        made = cls(IndexKind.AXIS, block_size=block_size, axes=axes, axis_range=ranges)
        made.axis_weights, made.axis_centre = weights, centre
        return made

    @classmethod
    def label(cls, channels: Array, *, batch: int, tokens: int) -> Index:
        """Room for the INT4 labels of every token of `batch` sequences; channels [Hk, r] as channel_importance wrote them."""
        kv_heads, r = shape(channels)
        rows = (batch, tokens, kv_heads)
        labels = full(channels, rows + (r // 2,), "uint8")
        scale, least = (full(channels, rows, "float16") for _ in range(2))
        return cls(IndexKind.LABEL, labels=labels, label_scale=scale, label_min=least, channels=channels)


@documented
@dataclass
class AttentionState:
    """vwd_attention_state: acc [B, (Q,) Hq, Dv], m and l [B, (Q,) Hq]."""

    acc: Any
    m: Any
    l: Any  # noqa: E741

    @classmethod
    def empty(cls, q: Array, *, value_dim: int | None = None) -> AttentionState:
        """The state of no tokens, for the queries q; `value_dim` where values are not as wide as keys."""
        *rows, dim = shape(q)
        return cls(*_states(q, tuple(rows), value_dim or dim))


@documented
@dataclass
class AttentionPartials(AttentionState):
    """vwd_attention_partials: a state per entry of a list, acc [B, (Q,) Hq, groups, Dv]."""

    @classmethod
    def empty(  # type: ignore[override]
        cls, q: Array, *, list: BlockList, partial_blocks: int = 1, value_dim: int | None = None
    ) -> AttentionPartials:
        """A state of no tokens for each entry of the list, or for each group of `partial_blocks` entries."""
        *rows, dim = shape(q)
        groups = -(-shape(list.ids)[-1] // max(partial_blocks, 1))
        return cls(*_states(q, (*rows, groups), value_dim or dim))


@documented
@dataclass
class PredictorState:
    """vwd_predictor_state: level and trend [B, Hk, max_blocks]."""

    level: Any
    trend: Any

    @classmethod
    def empty(cls, like: Array, *, batch: int, kv_heads: int, blocks: int) -> PredictorState:
        """The state of sequences that were not seen yet, as predictor_reset leaves it; arrays of the library of `like`."""
        rows = (batch, kv_heads, blocks)
        return cls(full(like, rows, "float32", -math.inf), full(like, rows, "float32"))


@documented
@dataclass
class Holt:
    """vwd_holt: smoothing factors; these predict the previous step's scores again."""

    alpha: float = 1.0
    beta: float = 0.0
    gamma: float = 0.0


@documented
@dataclass
class Rope:
    """vwd_rope; zeros mean the defaults."""

    style: RopeStyle | str = RopeStyle.HALVES
    rotary_dim: int = 0
    theta: float = 0.0
    attention_factor: float = 0.0
    inv_freq: Any = None


def _states(q: Array, rows: tuple[int, ...], dim: int) -> tuple[Array, Array, Array]:
    return full(q, (*rows, dim), "float32"), full(q, rows, "float32", -math.inf), full(q, rows, "float32")


_GROUPS = {
    _header.vwd_block_list: BlockList,
    _header.vwd_paged_kv: PagedKV,
    _header.vwd_int4_kv: Int4KV,
    _header.vwd_remainder: Remainder,
    _header.vwd_index: Index,
    _header.vwd_attention_state: AttentionState,
    _header.vwd_attention_partials: AttentionPartials,
    _header.vwd_predictor_state: PredictorState,
    _header.vwd_holt: Holt,
    _header.vwd_rope: Rope,
}
_BY_POINTER = [POINTER(struct) for struct in _GROUPS if hasattr(struct, "struct_size")]
# Read, even where what they are part of is written.
_INPUTS = ("table", "channels", "axis_weights", "axis_centre", "page_table", "seq_lens", "mean_table")
_AXIS_GROUP = 32  # channels that share a scale and a minimum in INT4
_RANGES = {c_uint32: (0, (1 << 32) - 1), c_uint64: (0, (1 << 64) - 1), c_int32: (-(1 << 31), (1 << 31) - 1)}


class _Lowering:
    """Fills a struct by field names. What must outlive the struct goes into `keep`."""

    def __init__(self, keep: list[Any], writable: bool):
        self.keep, self.writable = keep, writable

    def fill(self, struct: Structure, values: Mapping[str, Any], prefix: str = "") -> None:
        types = _types(type(struct))
        for name, value in values.items():
            path = prefix + name
            if name not in types:
                known = ", ".join(field for field in types if field not in ("struct_size", "flags", "reserved"))
                raise TypeError(f"{path}: no such field; expected one of {known}")
            if value is None:
                continue
            kind = types[name]
            if kind is _header.vwd_tensor:
                setattr(struct, name, self.tensor(value, path, self.writable and name not in _INPUTS))
            elif kind in _RANGES:
                setattr(struct, name, integer(value, path, *_RANGES[kind]))
            elif kind is c_float:
                setattr(struct, name, number(value, path))
            elif kind in _GROUPS:
                self.group(getattr(struct, name), value, path)
            elif issubclass(kind, CArray):
                setattr(struct, name, kind(*self.numbers(kind, value, path)))
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

    def numbers(self, kind: Any, values: Sequence[Any], path: str) -> list[Any]:
        if len(values) > kind._length_:
            raise ValueError(f"{path}: {len(values)} values; expected at most {kind._length_}")
        if kind._type_ is c_float:
            return [number(value, f"{path}[{i}]") for i, value in enumerate(values)]
        return [integer(value, f"{path}[{i}]", *_RANGES[kind._type_]) for i, value in enumerate(values)]

    def array(self, kind: Any, values: Sequence[Any], path: str) -> Any:
        array = (kind * len(values))()
        for i, value in enumerate(values):
            if kind is _header.vwd_tensor:
                array[i] = self.tensor(value, f"{path}[{i}]", self.writable)
            elif kind in _BY_POINTER:
                array[i] = self.pointer(kind._type_, value, f"{path}[{i}]")
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
        bound = f"at least {least}" if exact < least else f"at most {most}"
        raise ValueError(f"{path}: {exact}; expected {bound}")
    return exact


def whole(call: str, name: str, value: Any, most: int = (1 << 64) - 1) -> int:
    """A number that a call takes by itself."""
    with naming(call):
        return integer(value, name, 0, most)


def path_of(call: str, path: str | os.PathLike[str]) -> bytes:
    """The name of a file as C takes it."""
    with naming(f"{call}: path"):
        encoded = os.fsencode(path)
        if b"\0" in encoded:
            raise ValueError("a NUL inside")
    return encoded


def count(call: str, name: str, values: Any) -> int:
    """How many there are of what a call takes several of."""
    if not isinstance(values, Sequence):
        raise TypeError(f"{call}: {name}: {type(values).__name__}; expected a list")
    return len(values)


def number(value: Any, path: str) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise TypeError(f"{path}: {value!r}; expected a number") from None


@functools.cache
def _types(struct: type[Structure]) -> dict[str, Any]:
    return dict(struct._fields_)  # type: ignore[arg-type]


def name_of(struct: type[Structure]) -> str:
    """Of the call that takes these arguments, or makes something of these options."""
    return struct.__name__.removeprefix("vwd_").removesuffix("_args").replace("_options", "_create")


def arguments(
    struct: type[Structure], keep: list[Any], inputs: dict[str, Any], outputs: dict[str, Any], call: str | None = None
) -> Any:
    """A struct with its size and fields set; None leaves one zero. Outputs refuse read-only memory."""
    args = struct(struct_size=sizeof(struct))
    with naming(call or name_of(struct)):
        _Lowering(keep, writable=False).fill(args, inputs)
        _Lowering(keep, writable=True).fill(args, outputs)
    return args


class Call:
    """A call whose arguments are converted: calling it is one foreign call.

    It keeps its arrays alive and sees their present contents, so it can be called again and again, timed, and captured
    in a CUDA graph. `stream` replaces the stream that it was prepared for.
    """

    __slots__ = ("_name", "_function", "_owner", "_beside", "_passed", "_stream", "_keep", "args")

    def __init__(
        self,
        owner: Any,
        struct: type[Structure],
        stream: int,
        inputs: dict[str, Any],
        outputs: dict[str, Any],
        beside: tuple[Any, ...] = (),
    ):
        """`beside` are further objects whose handles the call takes, or None."""
        self._prepare(name_of(struct), owner, stream, beside)
        self.args = arguments(struct, self._keep, inputs, outputs)
        self._passed: tuple[Any, ...] = (byref(self.args),)

    @classmethod
    def of_several(
        cls, owner: Any, name: str, struct: type[Structure], array: str, calls: Sequence[Call], stream: int
    ) -> Call:
        """A call of several prepared ones: it takes an array of pointers to their arguments, and how many they are."""
        call = cls.__new__(cls)
        call._prepare(name, owner, stream, ())
        call.args = (POINTER(struct) * count(name, array, calls))()
        for n, one in enumerate(calls):
            if not isinstance(one, Call) or type(one.args) is not struct:
                expected = f"what prepare_{name_of(struct)} gives"
                raise TypeError(f"{name}: {array}[{n}]: {type(one).__name__}; expected {expected}")
            call.args[n] = pointer(one.args)
            call._keep.append(one)
        call._passed = (call.args, len(calls))
        return call

    def _prepare(self, name: str, owner: Any, stream: int, beside: tuple[Any, ...]) -> None:
        self._name = name
        self._function = getattr(lib, f"vwd_{name}")
        self._owner = owner
        self._beside = beside
        self._stream = whole(name, "stream", stream)
        self._keep: list[Any] = []

    def __call__(self, stream: int | None = None) -> None:
        stream = self._stream if stream is None else stream
        beside = (other and other.handle for other in self._beside)
        status = self._function(self._owner.handle, *beside, *self._passed, stream)
        if status:
            check(status, self._name)

    def scratch(self) -> int:
        """Bytes of scratch that it takes on a stream; 0 on a CPU session. Of calls that vanward.h has a `…_scratch` for."""
        needed = c_uint64()
        invoke(f"{self._name}_scratch", self._owner.handle, *self._passed, byref(needed))
        return needed.value
