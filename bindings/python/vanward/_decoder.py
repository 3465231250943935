"""The decoder: the attention of decode steps on the engine's own paged keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import byref, c_void_p, sizeof
from typing import Any, NamedTuple

from . import _header
from ._abi import lib
from ._arguments import Array, Call, Holt, Rope, arguments, documented
from ._budget import Budget
from ._enums import DecoderMode, Predict, Strategy
from ._errors import invoke
from ._forecast import Forecast
from ._kv_cache import _DTYPES, KvCache
from ._session import Session, at_once, scratch_of


@documented
class DecoderPolicy(NamedTuple):
    """vwd_decoder_policy: how a layer's sparse rows attend."""

    method: int = 0
    k: int = 0
    init_blocks: int = 0
    local_blocks: int = 0
    dense_below: int = 0
    window: int = 0
    strategy: int | Strategy = 0
    predict: int | Predict = 0
    ratio: float = 0.0
    holt: Holt | None = None

    def _c(self) -> _header.vwd_decoder_policy:
        policy = _header.vwd_decoder_policy(*self[:-1])
        if self.holt is not None:
            policy.holt = _header.vwd_holt(self.holt.alpha, self.holt.beta, self.holt.gamma)
        return policy


@documented
class DecoderInfo(NamedTuple):
    """vwd_decoder_details: what a decoder keeps; the arrays are valid until close."""

    bytes: int
    draft_lens: Array
    acceptance: Array
    drafted: Array
    accepted: Array
    selected: Array
    predicted: Array
    missed: Array
    fetched: Array | None
    fallback_layers: int
    fallbacks: int


class _Foresight(Call):
    """A call that may read its arrays beside the caller's stream: its decoder keeps them."""

    __slots__ = ()

    def __call__(self, stream: int | None = None) -> None:
        super().__call__(stream)
        self._owner._foreseen = self._keep, self._beside


@documented
class Decoder:
    """The attention of decode steps. It may outlive its session, and the tiered cache that has its keys and values.

    Options are the fields of vwd_decoder_options, with dtype "float32", "float16", "bfloat16", "float8_e4m3fn" or
    "float8_e5m2" in place of its code and bits, and policies a sequence of DecoderPolicy, one for each layer. With a budget
    layers of PRR and FORESEEN are SERIAL in steps in which they do not pay; the decoder keeps it alive.
    """

    handle: int | None = None  # where a constructor fails, close() finds nothing to release

    def __init__(
        self,
        session: Session,
        *,
        dtype: str,
        policy: DecoderPolicy | None = None,
        policies: Sequence[DecoderPolicy] = (),
        cache: KvCache | None = None,
        budget: Budget | None = None,
        **options: Any,
    ):
        if dtype not in _DTYPES:
            raise ValueError(f"decoder_create: dtype: {dtype!r}; expected one of {', '.join(_DTYPES)}")
        code, bits = _DTYPES[dtype]
        self._keep: list[Any] = []
        self._foreseen: tuple[Any, ...] = ()
        fields = dict(options, dtype_code=code, dtype_bits=bits)
        c = arguments(_header.vwd_decoder_options, self._keep, inputs=fields, outputs={})
        if policy is not None:
            c.policy = policy._c()
        if policies:
            array = (_header.vwd_decoder_policy * len(policies))(*(p._c() for p in policies))
            c.policies, c.policy_count = array, len(policies)
        if budget is not None:
            if not budget.handle:
                raise ValueError("decoder_create: budget: closed")
            c.budget = budget.handle
        handle = c_void_p()
        if cache is None:
            invoke("decoder_create", session.handle, byref(c), byref(handle))
        else:
            invoke("decoder_create_on_cache", session.handle, byref(c), cache.handle, byref(handle))
        self.handle, self._log = handle.value, session._log

    def close(self) -> None:
        """Releases the decoder; again does nothing, and calls after it fail."""
        handle, self.handle = self.handle, None
        lib.vwd_decoder_release(handle)

    def __enter__(self) -> Decoder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def begin(
        self,
        *,
        seq_lens: Array,
        page_table: Array | None = None,
        q_lens: Array | None = None,
        begin: Array | None = None,
        modes: Array | None = None,
        sequences: Array | None = None,
        tree: Array | None = None,
        mode: int | DecoderMode = 0,
        positions: int = 0,
        shortest: int = 0,
        longest: int = 0,
        stream: int = 0,
    ) -> None:
        """vwd_decoder_begin: begins a step. Its arrays are kept until the next one."""
        keep: list[Any] = []
        inputs = dict(
            seq_lens=seq_lens,
            page_table=page_table,
            q_lens=q_lens,
            begin=begin,
            modes=modes,
            sequences=sequences,
            tree=tree,
            mode=int(mode),
            positions=positions,
            shortest=shortest,
            longest=longest,
        )
        step = arguments(_header.vwd_decoder_step, keep, inputs=inputs, outputs={})
        invoke("decoder_begin", self.handle, byref(step), stream)
        self._step = keep

    def prepare_foresee(
        self,
        *,
        layer: int,
        forecast: Forecast | None = None,
        map: int = 0,
        rope: Rope | None = None,
        x: Array | None = None,
        previous: Array | None = None,
        q: Array | None = None,
        stream: int = 0,
    ) -> Call:
        """vwd_decoder_foresee: selects for a layer of the step before its queries are there.

        The decoder keeps the forecast and the arrays until the next call of it. Until then, or the next attend or begin, x and previous
        are not written.
        """
        inputs = dict(layer=layer, map=map, rope=rope, x=x, previous=previous, q=q)
        return _Foresight(self, _header.vwd_decoder_foresee_args, stream, inputs=inputs, outputs={}, beside=(forecast,))

    def prepare_attend(
        self,
        *,
        layer: int,
        k: Array | None = None,
        v: Array | None = None,
        k_scale: Array | None = None,
        v_scale: Array | None = None,
        new_k: Array | None = None,
        new_v: Array | None = None,
        q: Array | None = None,
        sinks: Array | None = None,
        out: Array | None = None,
        stream: int = 0,
    ) -> Call:
        """vwd_decoder_attend: writes the new keys and values, selects and attends in one layer of the step."""
        inputs = dict(layer=layer, k_scale=k_scale, v_scale=v_scale, new_k=new_k, new_v=new_v, q=q, sinks=sinks)
        outputs = dict(k=k, v=v, out=out)
        return Call(self, _header.vwd_decoder_attend_args, stream, inputs=inputs, outputs=outputs)

    def prepare_accept(
        self,
        *,
        draft: Array,
        target: Array,
        accepted: Array,
        next_token: Array,
        draft_lens: Array | None = None,
        sequences: Array | None = None,
        committed: Array | None = None,
        stream: int = 0,
    ) -> Call:
        """vwd_decoder_accept: verifies drafted tokens, and keeps what was accepted of each sequence's."""
        return Call(
            self,
            _header.vwd_decoder_accept_args,
            stream,
            inputs=dict(draft=draft, target=target, draft_lens=draft_lens, sequences=sequences),
            outputs=dict(accepted=accepted, next_token=next_token, committed=committed),
        )

    def prepare_reset(self, *, sequences: Array | None = None, stream: int = 0) -> Call:
        """vwd_decoder_reset: forgets what is known of some sequences' drafts."""
        inputs = dict(sequences=sequences)
        return Call(self, _header.vwd_decoder_reset_args, stream, inputs=inputs, outputs={})

    foresee = at_once(prepare_foresee)
    attend = at_once(prepare_attend)
    accept = at_once(prepare_accept)
    reset = at_once(prepare_reset)

    attend_scratch = scratch_of(prepare_attend)

    def info(self) -> DecoderInfo:
        """vwd_decoder_info: the decoder's memory, and views of what it keeps of each sequence."""
        details = _header.vwd_decoder_details(struct_size=sizeof(_header.vwd_decoder_details))
        invoke("decoder_info", self.handle, byref(details))
        info = DecoderInfo(*(getattr(details, name) for name in DecoderInfo._fields))
        return info if info.fetched is not None and info.fetched.data else info._replace(fetched=None)
