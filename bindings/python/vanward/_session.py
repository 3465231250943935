"""The session: one method per call of vanward.h, which documents what each computes and the shape of each argument.

Every call that enqueues comes twice: `verify(...)` runs, `prepare_verify(...)` returns a `Call` to run again and again.
Streams are addresses: torch.cuda.current_stream().cuda_stream, or 0.
"""

from __future__ import annotations

import ctypes
import inspect
import types
from collections.abc import Callable, Sequence
from ctypes import CFUNCTYPE, POINTER, byref, c_char_p, c_double, c_uint8, c_uint32, c_void_p, sizeof
from typing import Any, NamedTuple, ParamSpec, TypeVar

from . import _header
from ._abi import lib
from ._arguments import (
    Array,
    AttentionPartials,
    AttentionState,
    BlockList,
    Call,
    Holt,
    Index,
    PagedKV,
    Remainder,
    PredictorState,
    arguments,
    count,
    documented,
    whole,
)
from ._enums import (
    Acceptance,
    Check,
    Device,
    GatherEngine,
    LogLevel,
    RepairMode,
    SelectMethod,
    StreamRole,
    TopKOrder,
    Walk,
)
from ._errors import invoke

P = ParamSpec("P")
T = TypeVar("T")

_LOG = CFUNCTYPE(None, c_void_p, c_uint32, c_char_p)


def sample_flags(target_probabilities: bool, draft_probabilities: bool, temperature_last: bool) -> int:
    return (
        (_header.VWD_SAMPLE_TARGET_PROBABILITIES if target_probabilities else 0)
        | (_header.VWD_SAMPLE_DRAFT_PROBABILITIES if draft_probabilities else 0)
        | (_header.VWD_SAMPLE_TEMPERATURE_LAST if temperature_last else 0)
    )


def at_once(prepare: Callable[P, Call]) -> Callable[P, None]:
    """The call that `prepare` prepares, run."""
    prepared = _renamed(prepare, "")

    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        prepared(*args, **kwargs)()

    return _described(run, prepared, None)


def scratch_of(prepare: Callable[P, Call]) -> Callable[P, int]:
    """The bytes of scratch that the call takes on a stream; 0 on a CPU session."""
    prepared = _renamed(prepare, "_scratch")

    def ask(*args: P.args, **kwargs: P.kwargs) -> int:
        return prepared(*args, **kwargs).scratch()

    return _described(ask, prepared, int)


def _renamed(prepare: Callable[P, Call], suffix: str) -> Callable[P, Call]:
    """The same function under the name of the method that it serves: errors about its arguments carry it."""
    assert isinstance(prepare, types.FunctionType)
    name = prepare.__name__.removeprefix("prepare_") + suffix
    renamed = types.FunctionType(prepare.__code__, prepare.__globals__, name)
    renamed.__kwdefaults__ = prepare.__kwdefaults__
    renamed.__qualname__ = prepare.__qualname__.removesuffix(prepare.__name__) + name
    renamed.__doc__ = prepare.__doc__
    renamed.__annotations__ = prepare.__annotations__
    return renamed


def _described(method: Callable[P, T], like: Callable[P, Call], result: Any) -> Callable[P, T]:
    method.__name__, method.__qualname__, method.__doc__ = like.__name__, like.__qualname__, like.__doc__
    method.__signature__ = inspect.signature(like).replace(return_annotation=result)  # type: ignore[attr-defined]
    return method


class Info(NamedTuple):
    """vwd_session_details."""

    device: Device
    device_id: int
    device_name: str
    threads: int
    driver_version: int
    compute_capability: int
    multiprocessors: int
    kernels: int
    load_microseconds: int
    scratch_bytes: int
    scratch_peak: int
    pinned_in_use: int
    pinned_peak: int
    pinned_cached: int


@documented
class Session:
    """What calls run on. Close it, or use it as a context manager, when the device has passed its last call."""

    handle: int | None = None  # where a constructor fails, close() finds nothing to release
    # What the library calls to log, in calls of the session and of all that is made with it, which keeps it, too.
    _log: Any = None

    def __init__(
        self,
        device: Device | str = Device.AUTO,
        *,
        device_id: int = 0,
        threads: int = 0,
        scratch_bytes: int = 0,
        pinned_limit: int = 0,
        log: Callable[[LogLevel, str], None] | None = None,
        log_level: LogLevel | str | int = 0,
        variants: str | None = None,
        check: Check | str | int = 0,
        delay_microseconds: int = 0,
        invariant_batch: int = 0,
    ):
        """`log` takes lines of what the session does, on the thread that calls it; it calls no method of the session. `check`:
        "contents" has each call read the contents of its tensors first, and name the first element that is wrong.
        `delay_microseconds` is for tests: most of the random delays of work that overlaps on CUDA. `invariant_batch`, where it is not 0,
        makes the session batch-invariant: on CUDA attention and repair choose kernels, and split lists, as for so many sequences whatever a
        call has, and every sequence has the same bits in every batch. A CPU session is so always."""
        wanted = dict(
            device=device,
            device_id=device_id,
            threads=threads,
            scratch_bytes=scratch_bytes,
            pinned_limit=pinned_limit,
            log_level=log_level,
            check=check,
            delay_microseconds=delay_microseconds,
            invariant_batch=invariant_batch,
        )
        options = arguments(_header.vwd_session_options, [], inputs=wanted, outputs={})
        if log is not None:
            self._log = _LOG(lambda _, level, text: log(LogLevel(level), text.decode("utf-8")))
            options.log = ctypes.cast(self._log, c_void_p)
        if variants is not None:
            options.variants = variants.encode("utf-8")
        handle = c_void_p()
        invoke("session_create", byref(options), byref(handle))
        self.handle = handle.value

    def close(self) -> None:
        """Releases the session; again does nothing, and calls after it fail."""
        handle, self.handle = self.handle, None
        lib.vwd_session_release(handle)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def info(self) -> Info:
        details = _header.vwd_session_details(struct_size=sizeof(_header.vwd_session_details))
        invoke("session_info", self.handle, byref(details))
        values = {name: getattr(details, name) for name in Info._fields}
        values["device"] = Device(details.device)
        values["device_name"] = details.device_name.decode("utf-8", "replace")
        return Info(**values)

    def reserve(self, scratch_bytes: int, *, stream: int = 0) -> None:
        """vwd_session_reserve."""
        invoke("session_reserve", self.handle, stream, whole("session_reserve", "scratch_bytes", scratch_bytes))

    def forget_stream(self, *, stream: int) -> None:
        """vwd_session_forget_stream: lets a stream's scratch arena go."""
        invoke("session_forget_stream", self.handle, stream)

    def stream(self, role: StreamRole | str) -> int:
        """vwd_session_stream: the address of one of the session's own streams; 0 on a CPU session."""
        stream = c_void_p()
        number = whole("session_stream", "role", role, (1 << 32) - 1)
        invoke("session_stream", self.handle, number, byref(stream))
        return stream.value or 0

    def pinned_alloc(self, size: int) -> ctypes.Array[c_uint8]:
        """vwd_pinned_alloc: bytes that numpy.frombuffer and torch.frombuffer take. Gone after pinned_free or close."""
        memory = POINTER(c_uint8 * whole("pinned_alloc", "size", size))()
        invoke("pinned_alloc", self.handle, size, byref(memory))
        return memory.contents

    def pinned_free(self, memory: ctypes.Array[c_uint8], *, stream: int = 0) -> None:
        invoke("pinned_free", self.handle, ctypes.addressof(memory), stream)

    # --- verify and pack ---------------------------------------------------------------------------------------------

    def prepare_verify(
        self,
        *,
        draft: Array,
        target: Array,
        accepted: Array,
        next_token: Array,
        draft_lens: Array | None = None,
        mismatch: Array | None = None,
        committed: Array | None = None,
        stop: Array | None = None,
        ignore_stop: Array | None = None,
        remaining: Array | None = None,
        min_remaining: Array | None = None,
        committed_len: Array | None = None,
        finish: Array | None = None,
        draft_ends: Array | None = None,
        bonus: Array | None = None,
        stream: int = 0,
    ) -> Call:
        """vwd_verify: accepts the leading draft tokens that the target agrees with."""
        return Call(
            self,
            _header.vwd_verify_args,
            stream,
            inputs=dict(
                draft=draft,
                target=target,
                draft_lens=draft_lens,
                stop=stop,
                ignore_stop=ignore_stop,
                remaining=remaining,
                min_remaining=min_remaining,
                draft_ends=draft_ends,
                bonus=bonus,
            ),
            outputs=dict(
                accepted=accepted,
                next_token=next_token,
                mismatch=mismatch,
                committed=committed,
                committed_len=committed_len,
                finish=finish,
            ),
        )

    def prepare_pack(
        self,
        *,
        rows: Sequence[Array],
        packed: Sequence[Array],
        accepted: Array,
        offsets: Array,
        stream: int = 0,
    ) -> Call:
        """vwd_pack: packs the accepted rows of every sequence into one contiguous run, for several tensors."""
        return Call(
            self,
            _header.vwd_pack_args,
            stream,
            inputs=dict(tensor_count=_pairs("pack", rows, packed), rows=rows, accepted=accepted),
            outputs=dict(packed=packed, offsets=offsets),
        )

    def prepare_verify_pack(
        self,
        *,
        rows: Sequence[Array],
        packed: Sequence[Array],
        draft: Array,
        target: Array,
        accepted: Array,
        next_token: Array,
        offsets: Array,
        draft_lens: Array | None = None,
        mismatch: Array | None = None,
        committed: Array | None = None,
        stop: Array | None = None,
        ignore_stop: Array | None = None,
        remaining: Array | None = None,
        min_remaining: Array | None = None,
        committed_len: Array | None = None,
        finish: Array | None = None,
        stream: int = 0,
    ) -> Call:
        """vwd_verify_pack: verify, and pack of what it accepted."""
        return Call(
            self,
            _header.vwd_verify_pack_args,
            stream,
            inputs=dict(
                tensor_count=_pairs("verify_pack", rows, packed),
                rows=rows,
                draft=draft,
                target=target,
                draft_lens=draft_lens,
                stop=stop,
                ignore_stop=ignore_stop,
                remaining=remaining,
                min_remaining=min_remaining,
            ),
            outputs=dict(
                packed=packed,
                accepted=accepted,
                next_token=next_token,
                offsets=offsets,
                mismatch=mismatch,
                committed=committed,
                committed_len=committed_len,
                finish=finish,
            ),
        )

    def prepare_verify_sample(
        self,
        *,
        target: Array,
        next_token: Array,
        rule: Acceptance | str = Acceptance.AUTO,
        target_probabilities: bool = False,
        draft_probabilities: bool = False,
        temperature_last: bool = False,
        draft: Array | None = None,
        draft_lens: Array | None = None,
        target_begin: Array | None = None,
        draft_rows: Array | None = None,
        draft_map: Array | None = None,
        temperature: Array | None = None,
        top_k: Array | None = None,
        top_p: Array | None = None,
        min_p: Array | None = None,
        seeds: Array | None = None,
        positions: Array | None = None,
        stop: Array | None = None,
        ignore_stop: Array | None = None,
        remaining: Array | None = None,
        min_remaining: Array | None = None,
        accepted: Array | None = None,
        committed: Array | None = None,
        committed_len: Array | None = None,
        finish: Array | None = None,
        status: Array | None = None,
        logprobs: Array | None = None,
        stream: int = 0,
    ) -> Call:
        """vwd_verify_sample: samples one token of each request, after verifying its draft tokens."""
        return Call(
            self,
            _header.vwd_verify_sample_args,
            stream,
            inputs=dict(
                flags=sample_flags(target_probabilities, draft_probabilities, temperature_last),
                rule=rule,
                draft=draft,
                draft_lens=draft_lens,
                target=target,
                target_begin=target_begin,
                draft_rows=draft_rows,
                draft_map=draft_map,
                temperature=temperature,
                top_k=top_k,
                top_p=top_p,
                min_p=min_p,
                seeds=seeds,
                positions=positions,
                stop=stop,
                ignore_stop=ignore_stop,
                remaining=remaining,
                min_remaining=min_remaining,
            ),
            outputs=dict(
                next_token=next_token,
                accepted=accepted,
                committed=committed,
                committed_len=committed_len,
                finish=finish,
                status=status,
                logprobs=logprobs,
            ),
        )

    # --- index and select --------------------------------------------------------------------------------------------

    # --- draft trees ---------------------------------------------------------------------------------------------------

    def prepare_tree_prepare(
        self,
        *,
        parents: Array | None = None,
        first_child: Array | None = None,
        next_sibling: Array | None = None,
        node_counts: Array | None = None,
        bases: Array | None = None,
        tree_parents: Array | None = None,
        depths: Array | None = None,
        positions: Array | None = None,
        ranks: Array | None = None,
        mask: Array | None = None,
        status: Array | None = None,
        stream: int = 0,
    ) -> Call:
        """vwd_tree_prepare: makes of a draft tree what attention, positions and verification take."""
        return Call(
            self,
            _header.vwd_tree_prepare_args,
            stream,
            inputs=dict(
                parents=parents,
                first_child=first_child,
                next_sibling=next_sibling,
                node_counts=node_counts,
                bases=bases,
            ),
            outputs=dict(
                tree_parents=tree_parents,
                depths=depths,
                positions=positions,
                ranks=ranks,
                mask=mask,
                status=status,
            ),
        )

    def prepare_verify_tree(
        self,
        *,
        tokens: Array,
        parents: Array,
        accepted: Array,
        path: Array,
        next_token: Array,
        target: Array | None = None,
        logits: Array | None = None,
        node_counts: Array | None = None,
        committed: Array | None = None,
        status: Array | None = None,
        stop: Array | None = None,
        ignore_stop: Array | None = None,
        remaining: Array | None = None,
        min_remaining: Array | None = None,
        committed_len: Array | None = None,
        finish: Array | None = None,
        walk: Walk | str = Walk.GREEDY,
        target_probabilities: bool = False,
        draft_probabilities: bool = False,
        temperature_last: bool = False,
        draft_rows: Array | None = None,
        draft_map: Array | None = None,
        temperature: Array | None = None,
        top_k: Array | None = None,
        top_p: Array | None = None,
        min_p: Array | None = None,
        seeds: Array | None = None,
        positions: Array | None = None,
        stream: int = 0,
    ) -> Call:
        """vwd_verify_tree: the path of nodes that the target agrees with, and the token that follows it."""
        return Call(
            self,
            _header.vwd_verify_tree_args,
            stream,
            inputs=dict(
                flags=sample_flags(target_probabilities, draft_probabilities, temperature_last),
                walk=walk,
                tokens=tokens,
                parents=parents,
                node_counts=node_counts,
                target=target,
                logits=logits,
                stop=stop,
                ignore_stop=ignore_stop,
                remaining=remaining,
                min_remaining=min_remaining,
                draft_rows=draft_rows,
                draft_map=draft_map,
                temperature=temperature,
                top_k=top_k,
                top_p=top_p,
                min_p=min_p,
                seeds=seeds,
                positions=positions,
            ),
            outputs=dict(
                accepted=accepted,
                path=path,
                next_token=next_token,
                committed=committed,
                status=status,
                committed_len=committed_len,
                finish=finish,
            ),
        )

    def prepare_index_update(
        self,
        *,
        index: Index,
        k: Array,
        seq_lens: Array,
        k_scale: Array | None = None,
        page_table: Array | None = None,
        begin: Array | None = None,
        stream: int = 0,
    ) -> Call:
        """vwd_index_update: builds or extends the summaries of tokens begin … seq_lens−1."""
        return Call(
            self,
            _header.vwd_index_update_args,
            stream,
            inputs=dict(k=k, k_scale=k_scale, page_table=page_table, seq_lens=seq_lens, begin=begin),
            outputs=dict(index=index),
        )

    def prepare_index_update_layers(self, *, updates: Sequence[Call], stream: int = 0) -> Call:
        """vwd_index_update_layers: updates of several layers, each as prepare_index_update gives it, on one stream."""
        struct = _header.vwd_index_update_args
        return Call.of_several(self, "index_update_layers", struct, "updates", updates, stream)

    def prepare_channel_importance(
        self,
        *,
        q: Array,
        k: Array,
        channels: Array | None = None,
        importance: Array | None = None,
        weights: Array | None = None,
        centre: Array | None = None,
        stream: int = 0,
    ) -> Call:
        """vwd_channel_importance: chooses the key channels that decide the scores, and finds what AXIS takes."""
        return Call(
            self,
            _header.vwd_channel_importance_args,
            stream,
            inputs=dict(q=q, k=k),
            outputs=dict(channels=channels, importance=importance, weights=weights, centre=centre),
        )

    def prepare_select_blocks(
        self,
        *,
        method: SelectMethod | str,
        block_size: int,
        k: int,
        index: Index,
        q: Array,
        seq_lens: Array,
        selected: BlockList,
        init_blocks: int = 0,
        local_blocks: int = 0,
        scale: float = 0.0,
        q_lens: Array | None = None,
        budgets: Array | None = None,
        candidates: BlockList | None = None,
        scores: Array | None = None,
        status: Array | None = None,
        log_mass: Array | None = None,
        stream: int = 0,
    ) -> Call:
        """vwd_select_blocks: scores the blocks of every sequence and selects the exact best."""
        return Call(
            self,
            _header.vwd_select_blocks_args,
            stream,
            inputs=dict(
                method=method,
                block_size=block_size,
                k=k,
                init_blocks=init_blocks,
                local_blocks=local_blocks,
                scale=scale,
                index=index,
                q=q,
                q_lens=q_lens,
                seq_lens=seq_lens,
                budgets=budgets,
                candidates=candidates,
            ),
            outputs=dict(selected=selected, scores=scores, status=status, log_mass=log_mass),
        )

    def prepare_select_tokens(
        self,
        *,
        block_size: int,
        k: int,
        index: Index,
        q: Array,
        seq_lens: Array,
        candidates: BlockList,
        selected: BlockList,
        init_tokens: int = 0,
        local_tokens: int = 0,
        scale: float = 0.0,
        q_lens: Array | None = None,
        budgets: Array | None = None,
        scores: Array | None = None,
        status: Array | None = None,
        stream: int = 0,
    ) -> Call:
        """vwd_select_tokens: selects the exact best tokens inside candidate blocks by their INT4 labels."""
        return Call(
            self,
            _header.vwd_select_tokens_args,
            stream,
            inputs=dict(
                block_size=block_size,
                k=k,
                init_tokens=init_tokens,
                local_tokens=local_tokens,
                scale=scale,
                index=index,
                q=q,
                q_lens=q_lens,
                seq_lens=seq_lens,
                budgets=budgets,
                candidates=candidates,
            ),
            outputs=dict(selected=selected, scores=scores, status=status),
        )

    def prepare_topk(
        self,
        *,
        k: int,
        scores: Array,
        ids: Array,
        counts: Array,
        order: TopKOrder | str = TopKOrder.ASCENDING,
        lens: Array | None = None,
        budgets: Array | None = None,
        values: Array | None = None,
        stream: int = 0,
    ) -> Call:
        """vwd_topk: selects the exact best of each row of scores, ties to the lower index."""
        return Call(
            self,
            _header.vwd_topk_args,
            stream,
            inputs=dict(k=k, order=order, scores=scores, lens=lens, budgets=budgets),
            outputs=dict(ids=ids, counts=counts, values=values),
        )

    # --- attention, repair, prefetch ---------------------------------------------------------------------------------

    def prepare_attention(
        self,
        *,
        kv: PagedKV,
        q: Array,
        out: Array,
        block_size: int = 0,
        partial_blocks: int = 0,
        scale: float = 0.0,
        soft_cap: float = 0.0,
        window: int = 0,
        keep_rows: bool = False,
        q_lens: Array | None = None,
        list: BlockList | None = None,
        sinks: Array | None = None,
        lse: Array | None = None,
        state: AttentionState | None = None,
        partials: AttentionPartials | None = None,
        tree: Array | None = None,
        remainder: Remainder | None = None,
        log_mass: Array | None = None,
        stream: int = 0,
    ) -> Call:
        """vwd_attention: attends over a list of blocks, a list of tokens, or everything."""
        return Call(
            self,
            _header.vwd_attention_args,
            stream,
            inputs=dict(
                flags=_header.VWD_ATTENTION_KEEP_ROWS if keep_rows else 0,
                block_size=block_size,
                partial_blocks=partial_blocks,
                scale=scale,
                soft_cap=soft_cap,
                window=window,
                kv=kv,
                q=q,
                q_lens=q_lens,
                list=list,
                sinks=sinks,
                tree=tree,
                remainder=remainder,
                log_mass=log_mass,
            ),
            outputs=dict(out=out, lse=lse, state=state, partials=partials),
        )

    def prepare_kv_quantize(
        self,
        *,
        layers: Sequence[PagedKV],
        begin: Array | None = None,
        stream: int = 0,
    ) -> Call:
        """vwd_kv_quantize: codes whole blocks of keys and values in INT4, from each layer's k and v to its int4."""
        return Call(
            self,
            _header.vwd_kv_quantize_args,
            stream,
            inputs=dict(begin=begin),
            outputs=dict(layer_count=count("kv_quantize", "layers", layers), layers=layers),
        )

    def prepare_remainder_update(
        self,
        *,
        block_size: int,
        kv: PagedKV,
        remainder: Remainder,
        begin: Array | None = None,
        stream: int = 0,
    ) -> Call:
        """vwd_remainder_update: extends means and covariance by the blocks of each sequence that became whole."""
        return Call(
            self,
            _header.vwd_remainder_update_args,
            stream,
            inputs=dict(block_size=block_size, kv=kv, begin=begin),
            outputs=dict(remainder=remainder),
        )

    def prepare_kv_weights(
        self,
        *,
        block_size: int,
        q: Array,
        k: Array,
        weights: Array,
        stream: int = 0,
    ) -> Call:
        """vwd_kv_weights: finds the weights of key channels for INT4 from a sample of queries and keys."""
        return Call(
            self,
            _header.vwd_kv_weights_args,
            stream,
            inputs=dict(block_size=block_size, q=q, k=k),
            outputs=dict(weights=weights),
        )

    def prepare_merge_states(
        self,
        *,
        inputs: Sequence[AttentionState],
        sinks: Array | None = None,
        out: Array | None = None,
        lse: Array | None = None,
        state: AttentionState | None = None,
        stream: int = 0,
    ) -> Call:
        """vwd_merge_states: joins attention states over disjoint sets of tokens."""
        return Call(
            self,
            _header.vwd_merge_states_args,
            stream,
            inputs=dict(input_count=count("merge_states", "inputs", inputs), inputs=inputs, sinks=sinks),
            outputs=dict(out=out, lse=lse, state=state),
        )

    def prepare_repair(
        self,
        *,
        mode: RepairMode | str,
        block_size: int,
        kv: PagedKV,
        q: Array,
        predicted: BlockList,
        selected: BlockList,
        out: Array,
        partial_blocks: int = 0,
        scale: float = 0.0,
        soft_cap: float = 0.0,
        window: int = 0,
        keep_rows: bool = False,
        q_lens: Array | None = None,
        predicted_state: AttentionState | None = None,
        predicted_partials: AttentionPartials | None = None,
        sinks: Array | None = None,
        lse: Array | None = None,
        state: AttentionState | None = None,
        missed_counts: Array | None = None,
        tree: Array | None = None,
        stream: int = 0,
    ) -> Call:
        """vwd_repair: turns attention over predicted blocks into attention over the selected ones."""
        return Call(
            self,
            _header.vwd_repair_args,
            stream,
            inputs=dict(
                flags=_header.VWD_ATTENTION_KEEP_ROWS if keep_rows else 0,
                mode=mode,
                block_size=block_size,
                partial_blocks=partial_blocks,
                scale=scale,
                soft_cap=soft_cap,
                window=window,
                kv=kv,
                q=q,
                q_lens=q_lens,
                predicted=predicted,
                selected=selected,
                predicted_state=predicted_state,
                predicted_partials=predicted_partials,
                sinks=sinks,
                tree=tree,
            ),
            outputs=dict(out=out, lse=lse, state=state, missed_counts=missed_counts),
        )

    def prepare_gather_blocks(
        self,
        *,
        source: Array,
        target: Array,
        source_ids: Array,
        target_ids: Array | None = None,
        count: Array | None = None,
        engine: GatherEngine | str = GatherEngine.AUTO,
        stream: int = 0,
    ) -> Call:
        """vwd_gather_blocks: copies listed blocks."""
        return Call(
            self,
            _header.vwd_gather_blocks_args,
            stream,
            inputs=dict(engine=engine, source=source, source_ids=source_ids, target_ids=target_ids, count=count),
            outputs=dict(target=target),
        )

    # --- predict -----------------------------------------------------------------------------------------------------

    def prepare_predictor_reset(self, *, state: PredictorState, rows: Array | None = None, stream: int = 0) -> Call:
        """vwd_predictor_reset: forgets what was seen of some sequences."""
        return Call(self, _header.vwd_predictor_reset_args, stream, inputs=dict(rows=rows), outputs=dict(state=state))

    def prepare_predictor_predict(
        self,
        *,
        block_size: int,
        k: int,
        state: PredictorState,
        seq_lens: Array,
        predicted: BlockList,
        init_blocks: int = 0,
        local_blocks: int = 0,
        ratio: float = 0.0,
        holt: Holt | None = None,
        budgets: Array | None = None,
        scores: Array | None = None,
        sequences: Array | None = None,
        stream: int = 0,
    ) -> Call:
        """vwd_predictor_predict: predicts which blocks the coming selection will choose."""
        return Call(
            self,
            _header.vwd_predictor_predict_args,
            stream,
            inputs=dict(
                block_size=block_size,
                k=k,
                init_blocks=init_blocks,
                local_blocks=local_blocks,
                ratio=ratio,
                holt=holt,
                state=state,
                seq_lens=seq_lens,
                budgets=budgets,
                sequences=sequences,
            ),
            outputs=dict(predicted=predicted, scores=scores),
        )

    def prepare_predictor_update(
        self,
        *,
        block_size: int,
        state: PredictorState,
        seq_lens: Array,
        scores: Array,
        holt: Holt | None = None,
        sequences: Array | None = None,
        stream: int = 0,
    ) -> Call:
        """vwd_predictor_update: folds the true scores of a step into the state."""
        return Call(
            self,
            _header.vwd_predictor_update_args,
            stream,
            inputs=dict(block_size=block_size, holt=holt, seq_lens=seq_lens, scores=scores, sequences=sequences),
            outputs=dict(state=state),
        )

    def predictor_calibrate(
        self,
        *,
        k: int,
        scores: Array,
        block_counts: Array,
        init_blocks: int = 0,
        local_blocks: int = 0,
        ratio: float = 0.0,
        grid: Sequence[Holt] | None = None,
    ) -> tuple[Holt, float]:
        """vwd_predictor_calibrate: the smoothing factors that would have predicted best, and their hit rate."""
        keep: list[Any] = []
        args = arguments(
            _header.vwd_predictor_calibrate_args,
            keep,
            inputs=dict(
                k=k,
                init_blocks=init_blocks,
                local_blocks=local_blocks,
                ratio=ratio,
                grid_count=count("predictor_calibrate", "grid", grid or ()),
                grid=grid,
                scores=scores,
                block_counts=block_counts,
            ),
            outputs={},
        )
        best, rate = _header.vwd_holt(), c_double()
        invoke("predictor_calibrate", self.handle, byref(args), byref(best), byref(rate))
        return Holt(best.alpha, best.beta, best.gamma), rate.value

    verify = at_once(prepare_verify)
    pack = at_once(prepare_pack)
    verify_pack = at_once(prepare_verify_pack)
    verify_sample = at_once(prepare_verify_sample)
    tree_prepare = at_once(prepare_tree_prepare)
    verify_tree = at_once(prepare_verify_tree)
    index_update = at_once(prepare_index_update)
    index_update_layers = at_once(prepare_index_update_layers)
    channel_importance = at_once(prepare_channel_importance)
    select_blocks = at_once(prepare_select_blocks)
    select_tokens = at_once(prepare_select_tokens)
    topk = at_once(prepare_topk)
    attention = at_once(prepare_attention)
    kv_quantize = at_once(prepare_kv_quantize)
    kv_weights = at_once(prepare_kv_weights)
    remainder_update = at_once(prepare_remainder_update)
    merge_states = at_once(prepare_merge_states)
    repair = at_once(prepare_repair)
    gather_blocks = at_once(prepare_gather_blocks)
    predictor_reset = at_once(prepare_predictor_reset)
    predictor_predict = at_once(prepare_predictor_predict)
    predictor_update = at_once(prepare_predictor_update)

    attention_scratch = scratch_of(prepare_attention)
    verify_sample_scratch = scratch_of(prepare_verify_sample)
    verify_tree_scratch = scratch_of(prepare_verify_tree)
    repair_scratch = scratch_of(prepare_repair)
    select_blocks_scratch = scratch_of(prepare_select_blocks)
    select_tokens_scratch = scratch_of(prepare_select_tokens)


def _pairs(call: str, rows: Sequence[Array], packed: Sequence[Array]) -> int:
    tensors = count(call, "rows", rows)
    if count(call, "packed", packed) != tensors:
        raise ValueError(f"{call}: packed: {len(packed)} tensors; expected {tensors}, as many as rows")
    return tensors
