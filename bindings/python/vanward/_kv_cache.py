"""The tiered KV cache: all keys and values in host memory, what is being read in slots on the device."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import addressof, byref, c_float, c_uint32, c_uint64, c_void_p, sizeof
from typing import Any, NamedTuple

from . import _header
from ._abi import lib
from ._allocate import shape
from ._arguments import Array, BlockList, Call, Int4KV, arguments, documented, whole
from ._enums import Coding, SlotCoding
from ._errors import invoke
from ._session import Session, at_once

_DTYPES = {
    "float32": (2, 32),
    "float16": (2, 16),
    "bfloat16": (4, 16),
    "float8_e4m3fn": (10, 8),
    "float8_e5m2": (12, 8),
}
_MOST = (1 << 32) - 1


@documented
class KvCacheSizes(NamedTuple):
    """vwd_kv_cache_sizes."""

    run_bytes: int
    host_bytes: int
    device_bytes: int
    total_slots: int
    largest_selection: int
    slot_bytes: int


@documented
class KvCacheStats(NamedTuple):
    """vwd_kv_cache_stats."""

    sequences: int
    blocks_in_use: int
    blocks_free: int
    host_bytes: int
    device_bytes: int
    hits: int
    misses: int
    bytes_fetched: int
    bytes_written_back: int
    evictions: int
    unused: int
    waits: int
    dropped_tokens: int


@documented
class KvCacheLayer(NamedTuple):
    """vwd_kv_cache_layer: where a layer's slots lie, as arrays that the calls of this package take."""

    k: Array
    v: Array
    k_scale: Array | None
    v_scale: Array | None
    tail_k: Array
    tail_v: Array
    tail_k_scale: Array | None
    tail_v_scale: Array | None
    tail_table: Array
    int4_k: Array | None
    int4_v: Array | None
    int4_k_scale: Array | None
    int4_v_scale: Array | None
    int4_means: Array | None
    weights: Array | None

    @property
    def int4(self) -> Int4KV | None:
        """What PagedKV takes beside the slots of lists, of a cache with coding="int4" and slots as stored."""
        if self.int4_k is None:
            return None
        return Int4KV(
            block_size=shape(self.int4_k)[1],
            k=self.int4_k,
            v=self.int4_v,
            k_scale=self.int4_k_scale,
            v_scale=self.int4_v_scale,
            coded_lens=None,
            means=self.int4_means,
            weights=self.weights,
        )


def _options(
    *,
    layers: int,
    kv_heads: int,
    block_size: int,
    key_dim: int,
    value_dim: int,
    dtype: str,
    max_sequences: int,
    max_blocks: int,
    host_blocks: int,
    slots: int = 0,
    token_scales: bool = False,
    hold: int = 0,
    layer_slots: Sequence[int] | None = None,
    coding: Coding | str = "exact",
    weights: Sequence[float] | None = None,
    slot_coding: SlotCoding | str = "as_stored",
) -> Any:
    if dtype not in _DTYPES:
        raise ValueError(f"kv_cache_create: dtype: {dtype!r}; expected one of {', '.join(_DTYPES)}")
    code, bits = _DTYPES[dtype]
    fields = dict(layers=layers, kv_heads=kv_heads, block_size=block_size, key_dim=key_dim, value_dim=value_dim)
    fields.update(dtype_code=code, dtype_bits=bits, token_scales=int(token_scales), max_sequences=max_sequences)
    fields.update(max_blocks=max_blocks, host_blocks=host_blocks, slots=slots, hold=hold, coding=coding)
    fields.update(slot_coding=slot_coding)
    options = arguments(_header.vwd_kv_cache_options, [], inputs=fields, outputs={})
    if layer_slots is not None:
        if len(layer_slots) != layers:
            raise ValueError(f"kv_cache_create: layer_slots: {len(layer_slots)} numbers; expected {layers}, one a layer")
        options.layer_slots = _numbers("kv_cache_create", "layer_slots", c_uint32, layer_slots)
    if weights is not None:
        count = layers * kv_heads * key_dim
        if len(weights) != count:
            raise ValueError(f"kv_cache_create: weights: {len(weights)} numbers; expected {count}, [layers, Hk, D]")
        options.weights = (c_float * count)(*weights)
    return options


_options.__qualname__ = "KvCache"  # the name in the TypeError of an option that is missing or unknown


def _numbers(call: str, name: str, kind: Any, values: Sequence[int]) -> Any:
    """An array of C numbers, which a struct's field keeps alive."""
    most = (1 << 8 * sizeof(kind)) - 1
    return (kind * len(values))(*(whole(call, f"{name}[{n}]", value, most) for n, value in enumerate(values)))


@documented
class KvCache:
    """A tiered cache. It may outlive its session.

    layers, kv_heads, block_size (S), key_dim (D), value_dim (Dv)
    dtype          "float32", "float16", "bfloat16", "float8_e4m3fn" or "float8_e5m2".
    token_scales   True: each token of FP8 has scales of its own for each KV head.
    max_sequences  Most sequences at once.
    max_blocks     Most blocks of a sequence.
    host_blocks    Blocks of host memory, each of all layers and KV heads.
    slots          Slots of a layer that blocks are fetched into, each of one block of one KV head.
    layer_slots    Slots of each layer, instead of slots; share_slots shares a number of slots out.
    hold           What the last so many resolves of a layer named stays in its slot; 0 means 2.
    coding         "exact", or "int4": blocks are coded once they are whole.
    weights        With "int4": of key channels, layers · Hk · D numbers; None: 1.
    slot_coding    "as_stored", or with "int4" "decoded": codes are decoded as they arrive in slots.
    """

    handle: int | None = None  # where a constructor fails, close() finds nothing to release

    def __init__(self, session: Session, **options: Any):
        handle = c_void_p()
        invoke("kv_cache_create", session.handle, byref(_options(**options)), byref(handle))
        self.handle, self._log = handle.value, session._log

    @staticmethod
    def capacity(**options: Any) -> KvCacheSizes:
        """vwd_kv_cache_capacity: what a cache of these options takes."""
        sizes = _header.vwd_kv_cache_sizes(struct_size=sizeof(_header.vwd_kv_cache_sizes))
        invoke("kv_cache_capacity", byref(_options(**options)), byref(sizes))
        return KvCacheSizes(*(getattr(sizes, name) for name in KvCacheSizes._fields))

    @staticmethod
    def share_slots(*, total: int, least: int, slots: Sequence[int], misses: Sequence[int]) -> list[int]:
        """vwd_kv_cache_share_slots: layer_slots that have `total` together, by the misses that layers with `slots` have had."""
        call = "kv_cache_share_slots"
        if len(slots) != len(misses):
            raise ValueError(f"{call}: misses: {len(misses)} numbers; expected {len(slots)}, as slots")
        shares = (c_uint32 * max(len(slots), 1))()
        args = _header.vwd_kv_cache_share_args(struct_size=sizeof(_header.vwd_kv_cache_share_args), layers=len(slots))
        args.least, args.total = whole(call, "least", least, _MOST), whole(call, "total", total)
        args.slots = _numbers(call, "slots", c_uint32, slots)
        args.misses = _numbers(call, "misses", c_uint64, misses)
        args.shares = addressof(shares)
        invoke(call, byref(args))
        return list(shares)

    def close(self) -> None:
        """Releases the cache and its sequences; again does nothing, and calls after it fail."""
        handle, self.handle = self.handle, None
        lib.vwd_kv_cache_release(handle)

    def __enter__(self) -> KvCache:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    # --- sequences ---------------------------------------------------------------------------------------------------

    def add(self, *, stream: int = 0) -> int:
        """vwd_kv_cache_add: the number of a new sequence."""
        sequence = c_uint32()
        invoke("kv_cache_add", self.handle, byref(sequence), stream)
        return sequence.value

    def extend(self, sequence: int, tokens: int, *, stream: int = 0) -> None:
        """vwd_kv_cache_extend: makes room for so many tokens in all."""
        invoke("kv_cache_extend", self.handle, *_part("kv_cache_extend", sequence, tokens), stream)

    def fork(self, sequence: int, tokens: int, *, stream: int = 0) -> int:
        """vwd_kv_cache_fork: the number of a new sequence that begins with the first tokens of another."""
        made = c_uint32()
        invoke("kv_cache_fork", self.handle, *_part("kv_cache_fork", sequence, tokens), byref(made), stream)
        return made.value

    def truncate(self, sequence: int, tokens: int, *, stream: int = 0) -> None:
        """vwd_kv_cache_truncate: cuts a sequence to its first tokens."""
        invoke("kv_cache_truncate", self.handle, *_part("kv_cache_truncate", sequence, tokens), stream)

    def free(self, sequence: int, *, stream: int = 0) -> None:
        """vwd_kv_cache_free: ends a sequence."""
        invoke("kv_cache_free", self.handle, whole("kv_cache_free", "sequence", sequence, _MOST), stream)

    # --- calls -------------------------------------------------------------------------------------------------------

    def prepare_append(
        self,
        *,
        layer: int,
        sequences: Array,
        begin: Array,
        k: Array,
        v: Array,
        lens: Array | None = None,
        k_scale: Array | None = None,
        v_scale: Array | None = None,
        stream: int = 0,
    ) -> Call:
        """vwd_kv_cache_append: writes the keys and values of new tokens of one layer."""
        inputs = dict(
            layer=layer, sequences=sequences, begin=begin, lens=lens, k=k, v=v, k_scale=k_scale, v_scale=v_scale
        )
        return Call(self, _header.vwd_kv_cache_append_args, stream, inputs=inputs, outputs={})

    def prepare_compact(
        self,
        *,
        sequences: Array,
        bases: Array,
        path: Array,
        accepted: Array | None = None,
        stream: int = 0,
    ) -> Call:
        """vwd_kv_cache_compact: moves the tokens of accepted tree nodes to where a sequence's tokens follow each other."""
        inputs = dict(sequences=sequences, bases=bases, path=path, accepted=accepted)
        return Call(self, _header.vwd_kv_cache_compact_args, stream, inputs=inputs, outputs={})

    def prepare_resolve(
        self,
        *,
        layer: int,
        sequences: Array,
        wanted: BlockList,
        resident: BlockList | None = None,
        missed_counts: Array | None = None,
        stream: int = 0,
    ) -> Call:
        """vwd_kv_cache_resolve: gives each wanted block a slot, which is written to wanted.slots."""
        return Call(
            self,
            _header.vwd_kv_cache_resolve_args,
            stream,
            inputs=dict(layer=layer, sequences=sequences),
            outputs=dict(wanted=wanted, resident=resident, missed_counts=missed_counts),
        )

    append = at_once(prepare_append)
    compact = at_once(prepare_compact)
    resolve = at_once(prepare_resolve)

    def fetch(self, layer: int, *, stream: int = 0) -> None:
        """vwd_kv_cache_fetch: makes the copies that resolves of the layer have asked for."""
        invoke("kv_cache_fetch", self.handle, whole("kv_cache_fetch", "layer", layer, _MOST), stream)

    def wait(self, layer: int, *, stream: int = 0) -> None:
        """vwd_kv_cache_wait: makes the stream wait for the layer's copies."""
        invoke("kv_cache_wait", self.handle, whole("kv_cache_wait", "layer", layer, _MOST), stream)

    # --- what there is -----------------------------------------------------------------------------------------------

    def view(self, layer: int) -> KvCacheLayer:
        """vwd_kv_cache_view: the layer's slots, for PagedKV and index_update. Valid until close."""
        view = _header.vwd_kv_cache_layer(struct_size=sizeof(_header.vwd_kv_cache_layer))
        invoke("kv_cache_view", self.handle, whole("kv_cache_view", "layer", layer, _MOST), byref(view))
        tensors = (getattr(view, name) for name in KvCacheLayer._fields)
        present: list[Any] = [tensor if tensor.data else None for tensor in tensors]
        return KvCacheLayer(*present)

    def info(self) -> KvCacheStats:
        """vwd_kv_cache_info: counters, without synchronising."""
        stats = _header.vwd_kv_cache_stats(struct_size=sizeof(_header.vwd_kv_cache_stats))
        invoke("kv_cache_info", self.handle, byref(stats))
        return KvCacheStats(*(getattr(stats, name) for name in KvCacheStats._fields))

    def layer_info(self, layer: int) -> KvCacheStats:
        """vwd_kv_cache_layer_info: the counters of one layer, and its bytes."""
        stats = _header.vwd_kv_cache_stats(struct_size=sizeof(_header.vwd_kv_cache_stats))
        number = whole("kv_cache_layer_info", "layer", layer, _MOST)
        invoke("kv_cache_layer_info", self.handle, number, byref(stats))
        return KvCacheStats(*(getattr(stats, name) for name in KvCacheStats._fields))


def _part(call: str, sequence: int, tokens: int) -> tuple[int, int]:
    return whole(call, "sequence", sequence, _MOST), whole(call, "tokens", tokens)
