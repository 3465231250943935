"""Forecasts: linear maps from one layer's residual stream to the next layer's queries."""

from __future__ import annotations

import os
from ctypes import byref, c_void_p, sizeof
from typing import Any, NamedTuple

from . import _header
from ._abi import lib
from ._arguments import Array, Call, Rope, arguments, documented, path_of, whole
from ._errors import invoke
from ._session import Session, at_once


class ForecastInfo(NamedTuple):
    """vwd_forecast_details."""

    memory: bool
    layers: int
    input_dim: int
    q_heads: int
    head_dim: int
    ridge: float
    solved: int
    rank: int
    map_bytes: int
    sum_bytes: int


@documented
class Forecast:
    """Maps that are fitted with accumulate and solve, or loaded. May outlive its session."""

    handle: int | None = None  # where a constructor fails, close() finds nothing to release

    def __init__(
        self,
        session: Session,
        *,
        layers: int,
        input_dim: int,
        q_heads: int,
        head_dim: int,
        ridge: float = 0.0,
        memory: bool = False,
    ):
        flags = _header.VWD_FORECAST_MEMORY if memory else 0
        sizes = dict(flags=flags, layers=layers, input_dim=input_dim, q_heads=q_heads, head_dim=head_dim, ridge=ridge)
        options = arguments(_header.vwd_forecast_options, [], inputs=sizes, outputs={})
        handle = c_void_p()
        invoke("forecast_create", session.handle, byref(options), byref(handle))
        self.handle, self._log = handle.value, session._log

    @classmethod
    def load(cls, session: Session, path: str | os.PathLike[str]) -> Forecast:
        """vwd_forecast_load."""
        forecast = cls.__new__(cls)
        forecast.handle = None
        handle = c_void_p()
        invoke("forecast_load", session.handle, path_of("forecast_load", path), byref(handle))
        forecast.handle, forecast._log = handle.value, session._log
        return forecast

    def close(self) -> None:
        """Releases the maps; again does nothing, and calls after it fail."""
        handle, self.handle = self.handle, None
        lib.vwd_forecast_release(handle)

    def __enter__(self) -> Forecast:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def info(self) -> ForecastInfo:
        details = _header.vwd_forecast_details(struct_size=sizeof(_header.vwd_forecast_details))
        invoke("forecast_info", self.handle, byref(details))
        memory = bool(details.flags & _header.VWD_FORECAST_MEMORY)
        return ForecastInfo(memory, *(getattr(details, name) for name in ForecastInfo._fields[1:]))

    def accumulate(self, *, layer: int, x: Array, q: Array, previous: Array | None = None) -> None:
        """vwd_forecast_accumulate: adds activations of one layer, in host memory, to the map's sums."""
        keep: list[Any] = []
        inputs = dict(layer=layer, x=x, previous=previous, q=q)
        args = arguments(_header.vwd_forecast_accumulate_args, keep, inputs=inputs, outputs={})
        invoke("forecast_accumulate", self.handle, byref(args))

    def solve(self, rank: int = 0) -> None:
        """vwd_forecast_solve: fits every map that has sums; rank 0 keeps the maps whole."""
        invoke("forecast_solve", self.handle, whole("forecast_solve", "rank", rank, (1 << 32) - 1))

    def save(self, path: str | os.PathLike[str]) -> None:
        """vwd_forecast_save: writes the maps to a safetensors file."""
        invoke("forecast_save", self.handle, path_of("forecast_save", path))

    def prepare_project(
        self,
        *,
        layer: int,
        x: Array,
        positions: Array,
        q: Array,
        rope: Rope | None = None,
        previous: Array | None = None,
        stream: int = 0,
    ) -> Call:
        """vwd_forecast_project: forecasts the next layer's queries."""
        return Call(
            self,
            _header.vwd_forecast_project_args,
            stream,
            inputs=dict(layer=layer, rope=rope, x=x, previous=previous, positions=positions),
            outputs=dict(q=q),
        )

    project = at_once(prepare_project)

