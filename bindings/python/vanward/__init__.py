"""Vanward: verification of speculated tokens, sparse KV selection, attention, exact repair and KV prefetch.

    with vanward.Session() as session:
        session.verify(draft=draft, target=target, accepted=accepted, next_token=next_token)

Arrays are anything with the buffer protocol (numpy) or __dlpack__ (torch, on any device), and are never copied. What a
call computes, and the shape and dtype of each argument, is documented once, in vanward.h.
"""

from ._abi import ABI_VERSION
from ._abi import lib as _lib
from ._arguments import (
    AttentionPartials,
    AttentionState,
    BlockList,
    Call,
    Holt,
    Index,
    Int4KV,
    PagedKV,
    PredictorState,
    Remainder,
    Rope,
)
from ._enums import (
    Acceptance,
    BudgetPays,
    Check,
    Coding,
    DecoderMode,
    Device,
    Finish,
    GatherEngine,
    IndexKind,
    LogLevel,
    Predict,
    RepairMode,
    RopeStyle,
    SampleStatus,
    SelectMethod,
    SelectStatus,
    SlotCoding,
    Status,
    Strategy,
    StreamRole,
    TopKOrder,
    Walk,
)
from ._budget import Budget, BudgetAnswer
from ._compactor import Compactor
from ._decoder import Decoder, DecoderInfo, DecoderPolicy
from ._errors import Error, FileError, InvalidArgument, OutOfMemory
from ._forecast import Forecast, ForecastInfo
from ._kv_cache import KvCache, KvCacheLayer, KvCacheSizes, KvCacheStats
from ._session import Info, Session
from ._tensor import bfloat16, float8_e4m3fn, float8_e5m2, pinned

__version__: str = _lib.vwd_version().decode()
"""Of the library that was found."""

__all__ = [
    "ABI_VERSION",
    "Acceptance",
    "AttentionPartials",
    "AttentionState",
    "BlockList",
    "Budget",
    "BudgetAnswer",
    "BudgetPays",
    "Call",
    "Check",
    "Coding",
    "Compactor",
    "Decoder",
    "DecoderInfo",
    "DecoderMode",
    "DecoderPolicy",
    "Device",
    "Error",
    "FileError",
    "Finish",
    "Forecast",
    "ForecastInfo",
    "GatherEngine",
    "Holt",
    "Index",
    "IndexKind",
    "Info",
    "Int4KV",
    "InvalidArgument",
    "KvCache",
    "KvCacheLayer",
    "KvCacheSizes",
    "KvCacheStats",
    "LogLevel",
    "OutOfMemory",
    "PagedKV",
    "Predict",
    "PredictorState",
    "Remainder",
    "RepairMode",
    "Rope",
    "RopeStyle",
    "SampleStatus",
    "SelectMethod",
    "SelectStatus",
    "Session",
    "SlotCoding",
    "Status",
    "Strategy",
    "StreamRole",
    "TopKOrder",
    "Walk",
    "bfloat16",
    "float8_e4m3fn",
    "float8_e5m2",
    "pinned",
]
