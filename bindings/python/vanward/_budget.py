"""The speculation budget: times measured once for a shape on a device, and what they pay for."""

from __future__ import annotations

import os
from collections.abc import Mapping
from ctypes import byref, c_void_p, sizeof
from typing import Any, NamedTuple

from . import _header
from ._abi import lib
from ._arguments import arguments, documented, path_of, whole
from ._enums import BudgetPays
from ._errors import invoke
from ._kv_cache import _DTYPES
from ._session import Session


@documented
class BudgetAnswer(NamedTuple):
    """vwd_budget_answer: the strategies that pay, and the times behind that."""

    pays: BudgetPays
    extrapolated: bool
    gamma: int
    hidden_ratio: float
    ratio: float
    sparse_gain: float
    prr_gain: float
    self_gain: float
    break_even_coverage: float
    break_even_acceptance: float
    select_us: float
    attend_us: float
    guess_us: float
    repair_us: float
    dense_us: float
    verify_us: float


@documented
class Budget:
    """Measured by profile, or loaded. It does not need its session any more.

    Options are the fields of vwd_budget_options, with dtype "float32", "float16", "bfloat16", "float8_e4m3fn" or
    "float8_e5m2" in place of its code and bits, and contexts, batches and ratios as lists.
    """

    handle: int | None = None  # where a constructor fails, close() finds nothing to release

    def __init__(self, handle: int | None):
        self.handle = handle

    @classmethod
    def profile(cls, session: Session, *, dtype: str, stream: int = 0, **options: Any) -> Budget:
        """vwd_budget_profile."""
        c, handle = _options("budget_profile", dtype, options), c_void_p()
        stream = whole("budget_profile", "stream", stream)
        invoke("budget_profile", session.handle, byref(c), stream, byref(handle))
        return cls(handle.value)

    @classmethod
    def load(cls, session: Session, path: str | os.PathLike[str], *, dtype: str, **options: Any) -> Budget:
        """vwd_budget_load."""
        c, handle = _options("budget_load", dtype, options), c_void_p()
        invoke("budget_load", session.handle, byref(c), path_of("budget_load", path), byref(handle))
        return cls(handle.value)

    def save(self, path: str | os.PathLike[str]) -> None:
        """vwd_budget_save."""
        invoke("budget_save", self.handle, path_of("budget_save", path))

    def ask(
        self,
        context: int,
        *,
        batch: int = 1,
        acceptance: float = 0.0,
        max_draft: int = 0,
        rest_us: float = 0.0,
        rest_position_us: float = 0.0,
        margin: float = 0.0,
        coverage: Mapping[float, float] | None = None,
    ) -> BudgetAnswer:
        """vwd_budget_ask: `coverage` maps ratios to the share of the selected blocks that guesses cover."""
        known = sorted((coverage or {}).items())
        fields = dict(
            context=context,
            batch=batch,
            acceptance=acceptance,
            max_draft=max_draft,
            rest_us=rest_us,
            rest_position_us=rest_position_us,
            margin=margin,
            coverage_ratios=[ratio for ratio, _ in known],
            coverages=[share for _, share in known],
        )
        question = arguments(_header.vwd_budget_question, [], inputs=fields, outputs={}, call="budget_ask")
        answer = _header.vwd_budget_answer(struct_size=sizeof(_header.vwd_budget_answer))
        invoke("budget_ask", self.handle, byref(question), byref(answer))
        pays, extrapolated = BudgetPays(answer.pays), bool(answer.extrapolated)
        return BudgetAnswer(pays, extrapolated, *(getattr(answer, name) for name in BudgetAnswer._fields[2:]))

    def close(self) -> None:
        """Releases the budget; again does nothing, and calls after it fail."""
        handle, self.handle = self.handle, None
        lib.vwd_budget_release(handle)

    def __enter__(self) -> Budget:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


def _options(call: str, dtype: str, options: dict[str, Any]) -> Any:
    if dtype not in _DTYPES:
        raise ValueError(f"{call}: dtype: {dtype!r}; expected one of {', '.join(_DTYPES)}")
    code, bits = _DTYPES[dtype]
    fields = dict(options, dtype_code=code, dtype_bits=bits)
    return arguments(_header.vwd_budget_options, [], inputs=fields, outputs={}, call=call)
