"""The constants of vanward.h, by family. Where a call takes one, its name in small letters will do: mode="exact"."""

from __future__ import annotations

import enum
import operator
from typing import Any

from . import _header as c


class Status(enum.IntEnum):
    OK = c.VWD_OK
    INVALID_ARGUMENT = c.VWD_ERROR_INVALID_ARGUMENT
    UNAVAILABLE = c.VWD_ERROR_UNAVAILABLE
    UNSUPPORTED = c.VWD_ERROR_UNSUPPORTED
    OUT_OF_MEMORY = c.VWD_ERROR_OUT_OF_MEMORY
    OUT_OF_SCRATCH = c.VWD_ERROR_OUT_OF_SCRATCH
    DRIVER = c.VWD_ERROR_DRIVER
    IO = c.VWD_ERROR_IO
    INTERNAL = c.VWD_ERROR_INTERNAL


class Device(enum.IntEnum):
    AUTO = c.VWD_DEVICE_AUTO
    CPU = c.VWD_DEVICE_CPU
    CUDA = c.VWD_DEVICE_CUDA


class StreamRole(enum.IntEnum):
    SELECT = c.VWD_STREAM_SELECT
    SPECULATE = c.VWD_STREAM_SPECULATE
    PREFETCH = c.VWD_STREAM_PREFETCH
    WRITE_BACK = c.VWD_STREAM_WRITE_BACK


class LogLevel(enum.IntEnum):
    WARNING = c.VWD_LOG_WARNING
    INFO = c.VWD_LOG_INFO
    DEBUG = c.VWD_LOG_DEBUG


class Check(enum.IntEnum):
    CONTENTS = c.VWD_CHECK_CONTENTS
    NOTHING = c.VWD_CHECK_NOTHING


class Acceptance(enum.IntEnum):
    AUTO = c.VWD_ACCEPT_AUTO
    COUPLED = c.VWD_ACCEPT_COUPLED
    REJECTION = c.VWD_ACCEPT_REJECTION
    GREEDY = c.VWD_ACCEPT_GREEDY


class Walk(enum.IntEnum):
    """How verify_tree finds the next node."""

    GREEDY = c.VWD_WALK_GREEDY
    COUPLED = c.VWD_WALK_COUPLED
    INDEPENDENT = c.VWD_WALK_INDEPENDENT
    DISTINCT = c.VWD_WALK_DISTINCT


class SampleStatus(enum.IntFlag):
    """Bits of the status words that verify_sample writes: SampleStatus(status[i])."""

    NAN = c.VWD_SAMPLE_NAN
    NO_TOKEN = c.VWD_SAMPLE_NO_TOKEN
    NO_RESIDUAL = c.VWD_SAMPLE_NO_RESIDUAL
    NO_ROW = c.VWD_SAMPLE_NO_ROW


class Finish(enum.IntEnum):
    """What verify_sample writes to finish."""

    NONE = c.VWD_FINISH_NONE
    STOP = c.VWD_FINISH_STOP
    LENGTH = c.VWD_FINISH_LENGTH


class DecoderMode(enum.IntEnum):
    SKIP = c.VWD_DECODER_SKIP
    SPARSE = c.VWD_DECODER_SPARSE
    DENSE = c.VWD_DECODER_DENSE


class Strategy(enum.IntEnum):
    SERIAL = c.VWD_STRATEGY_SERIAL
    PRR = c.VWD_STRATEGY_PRR
    FORESEEN = c.VWD_STRATEGY_FORESEEN
    ASYNC_TLS = c.VWD_STRATEGY_ASYNC_TLS
    SPARDA = c.VWD_STRATEGY_SPARDA
    VANWARD = c.VWD_STRATEGY_VANWARD


class Predict(enum.IntEnum):
    SCORES = c.VWD_PREDICT_SCORES
    FORESEEN = c.VWD_PREDICT_FORESEEN


class BudgetPays(enum.IntFlag):
    """The strategies that a budget's answer says pay; none: dense steps are the fastest."""

    SPARSE = c.VWD_BUDGET_SPARSE
    PRR = c.VWD_BUDGET_PRR
    SELF = c.VWD_BUDGET_SELF


class IndexKind(enum.IntEnum):
    MINMAX = c.VWD_INDEX_MINMAX
    MEAN = c.VWD_INDEX_MEAN
    LABEL = c.VWD_INDEX_LABEL
    AXIS = c.VWD_INDEX_AXIS


class SelectMethod(enum.IntEnum):
    MINMAX = c.VWD_SELECT_MINMAX
    MEAN_SOFTMAX = c.VWD_SELECT_MEAN_SOFTMAX
    MEAN_DOT = c.VWD_SELECT_MEAN_DOT
    LABEL_MASS = c.VWD_SELECT_LABEL_MASS
    AXIS = c.VWD_SELECT_AXIS


class SelectStatus(enum.IntFlag):
    """Bits of the status words that a selection writes: SelectStatus(status[i, h])."""

    NAN = c.VWD_SELECT_NAN
    NO_SUMMARY = c.VWD_SELECT_NO_SUMMARY
    CLAMPED = c.VWD_SELECT_CLAMPED

    @classmethod
    def _missing_(cls, value: Any) -> Any:
        """Of several bits, or none, in whatever kind of integer the array holds."""
        return super()._missing_(operator.index(value))


class RepairMode(enum.IntEnum):
    SUPERSET = c.VWD_REPAIR_SUPERSET
    EXACT = c.VWD_REPAIR_EXACT


class Coding(enum.IntEnum):
    EXACT = c.VWD_CODING_EXACT
    INT4 = c.VWD_CODING_INT4


class SlotCoding(enum.IntEnum):
    AS_STORED = c.VWD_SLOTS_AS_STORED
    DECODED = c.VWD_SLOTS_DECODED


class TopKOrder(enum.IntEnum):
    ASCENDING = c.VWD_TOPK_ASCENDING
    BEST_FIRST = c.VWD_TOPK_BEST_FIRST


class GatherEngine(enum.IntEnum):
    AUTO = c.VWD_GATHER_AUTO
    KERNEL = c.VWD_GATHER_KERNEL
    COPY_ENGINE = c.VWD_GATHER_COPY_ENGINE


class RopeStyle(enum.IntEnum):
    HALVES = c.VWD_ROPE_HALVES
    INTERLEAVED = c.VWD_ROPE_INTERLEAVED


# By the name of the argument that takes one.
_TAKEN = {
    "device": Device,
    "log_level": LogLevel,
    "check": Check,
    "role": StreamRole,
    "kind": IndexKind,
    "method": SelectMethod,
    "order": TopKOrder,
    "mode": RepairMode,
    "rule": Acceptance,
    "walk": Walk,
    "repair_mode": RepairMode,
    "engine": GatherEngine,
    "style": RopeStyle,
    "coding": Coding,
    "slot_coding": SlotCoding,
}


def of_name(value: str, path: str) -> int:
    """The constant that an argument's text names."""
    family = _TAKEN.get(path.rpartition(".")[2])
    if family is None:
        raise TypeError(f"{path}: {value!r}; expected an integer")
    try:
        return family[value.upper()]
    except KeyError:
        names = ", ".join(member.name.lower() for member in family)
        raise ValueError(f"{path}: {value!r}; expected one of {names}") from None
