"""The tiered KV cache: all keys and values in host memory, what is being read in slots on the device."""

from __future__ import annotations

from ctypes import byref, c_uint32, c_void_p, sizeof
from typing import Any, NamedTuple

from . import _header
from ._abi import lib
from ._arguments import Array, BlockList, Call, arguments, integer
from ._errors import check
from ._session import Session, at_once

_DTYPES = {"float32": (2, 32), "float16": (2, 16), "bfloat16": (4, 16), "float8_e4m3fn": (10, 8), "float8_e5m2": (12, 8)}
_LARGEST = (1 << 64) - 1


class KvCacheSizes(NamedTuple):
    """vwd_kv_cache_sizes."""

    run_bytes: int
    host_bytes: int
    device_bytes: int
    total_slots: int
    largest_selection: int


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


class KvCacheLayer(NamedTuple):
    """vwd_kv_cache_layer: where a layer's slots lie, as arrays that the calls of this package take."""

    k: Array
    v: Array
    k_scale: Array
    v_scale: Array
    tail_k: Array
    tail_v: Array
    tail_k_scale: Array
    tail_v_scale: Array
    tail_table: Array


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
    slots: int,
    token_scales: bool = False,
    hold: int = 0,
) -> Any:
    if dtype not in _DTYPES:
        raise ValueError(f"dtype: {dtype!r}; expected one of {', '.join(_DTYPES)}")
    code, bits = _DTYPES[dtype]
    fields = dict(layers=layers, kv_heads=kv_heads, block_size=block_size, key_dim=key_dim, value_dim=value_dim)
    fields.update(dtype_code=code, dtype_bits=bits, token_scales=int(token_scales), max_sequences=max_sequences)
    fields.update(max_blocks=max_blocks, host_blocks=host_blocks, slots=slots, hold=hold)
    return arguments(_header.vwd_kv_cache_options, [], inputs=fields, outputs={})


class KvCache:
    """vwd_kv_cache, made with the fields of vwd_kv_cache_options; dtype is a name. May outlive its session."""

    def __init__(self, session: Session, **options: Any):
        self.handle: int | None = None
        handle = c_void_p()
        check(lib.vwd_kv_cache_create(session.handle, byref(_options(**options)), byref(handle)))
        self.handle = handle.value

    @staticmethod
    def capacity(**options: Any) -> KvCacheSizes:
        """vwd_kv_cache_capacity: what a cache of these options takes."""
        sizes = _header.vwd_kv_cache_sizes(struct_size=sizeof(_header.vwd_kv_cache_sizes))
        check(lib.vwd_kv_cache_capacity(byref(_options(**options)), byref(sizes)))
        return KvCacheSizes(*(getattr(sizes, name) for name in KvCacheSizes._fields))

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
        check(lib.vwd_kv_cache_add(self.handle, byref(sequence), stream))
        return sequence.value

    def extend(self, sequence: int, tokens: int, *, stream: int = 0) -> None:
        """vwd_kv_cache_extend: makes room for so many tokens in all."""
        check(lib.vwd_kv_cache_extend(self.handle, _sequence(sequence), _tokens(tokens), stream))

    def fork(self, sequence: int, tokens: int, *, stream: int = 0) -> int:
        """vwd_kv_cache_fork: the number of a new sequence that begins with the first tokens of another."""
        made = c_uint32()
        check(lib.vwd_kv_cache_fork(self.handle, _sequence(sequence), _tokens(tokens), byref(made), stream))
        return made.value

    def truncate(self, sequence: int, tokens: int, *, stream: int = 0) -> None:
        """vwd_kv_cache_truncate: cuts a sequence to its first tokens."""
        check(lib.vwd_kv_cache_truncate(self.handle, _sequence(sequence), _tokens(tokens), stream))

    def free(self, sequence: int, *, stream: int = 0) -> None:
        """vwd_kv_cache_free: ends a sequence."""
        check(lib.vwd_kv_cache_free(self.handle, _sequence(sequence), stream))

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
        inputs = dict(layer=layer, sequences=sequences, begin=begin, lens=lens, k=k, v=v, k_scale=k_scale, v_scale=v_scale)
        return Call(self, _header.vwd_kv_cache_append_args, stream, inputs=inputs, outputs={})

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
    resolve = at_once(prepare_resolve)

    def fetch(self, layer: int, *, stream: int = 0) -> None:
        """vwd_kv_cache_fetch: makes the copies that resolves of the layer have asked for."""
        check(lib.vwd_kv_cache_fetch(self.handle, _layer(layer), stream))

    def wait(self, layer: int, *, stream: int = 0) -> None:
        """vwd_kv_cache_wait: makes the stream wait for the layer's copies."""
        check(lib.vwd_kv_cache_wait(self.handle, _layer(layer), stream))

    # --- what there is -----------------------------------------------------------------------------------------------

    def view(self, layer: int) -> KvCacheLayer:
        """vwd_kv_cache_view: the layer's slots, for PagedKV and index_update. Valid until close."""
        view = _header.vwd_kv_cache_layer(struct_size=sizeof(_header.vwd_kv_cache_layer))
        check(lib.vwd_kv_cache_view(self.handle, _layer(layer), byref(view)))
        tensors = (getattr(view, name) for name in KvCacheLayer._fields)
        return KvCacheLayer(*(tensor if tensor.data else None for tensor in tensors))

    def info(self) -> KvCacheStats:
        """vwd_kv_cache_info: counters, without synchronising."""
        stats = _header.vwd_kv_cache_stats(struct_size=sizeof(_header.vwd_kv_cache_stats))
        check(lib.vwd_kv_cache_info(self.handle, byref(stats)))
        return KvCacheStats(*(getattr(stats, name) for name in KvCacheStats._fields))


def _sequence(number: int) -> int:
    return integer(number, "sequence", 0, (1 << 32) - 1)


def _tokens(number: int) -> int:
    return integer(number, "tokens", 0, _LARGEST)


def _layer(number: int) -> int:
    return integer(number, "layer", 0, (1 << 32) - 1)
