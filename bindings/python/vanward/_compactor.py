"""The compactor: rows of accepted tree nodes move to where a sequence's tokens follow each other."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import byref, c_void_p
from typing import Any

from . import _header
from ._abi import lib
from ._arguments import Array, Call, arguments, count, documented
from ._errors import invoke
from ._session import Session, at_once


@documented
class Compactor:
    """The paged caches [pages, P, …] of all layers, which it keeps alive. It may outlive its session."""

    handle: int | None = None  # where a constructor fails, close() finds nothing to release

    def __init__(self, session: Session, caches: Sequence[Array]):
        self._keep: list[Any] = []
        options = arguments(
            _header.vwd_compactor_options,
            self._keep,
            inputs=dict(cache_count=count("compactor_create", "caches", caches)),
            outputs=dict(caches=caches),
        )
        handle = c_void_p()
        invoke("compactor_create", session.handle, byref(options), byref(handle))
        self.handle, self._log = handle.value, session._log

    def close(self) -> None:
        """Releases the compactor; again does nothing, and calls after it fail."""
        handle, self.handle = self.handle, None
        lib.vwd_compactor_release(handle)

    def __enter__(self) -> Compactor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def prepare_compact(
        self,
        *,
        bases: Array,
        path: Array,
        page_table: Array | None = None,
        accepted: Array | None = None,
        stream: int = 0,
    ) -> Call:
        """vwd_compact: moves the rows of accepted tree nodes, in place and in all caches at once."""
        inputs = dict(page_table=page_table, bases=bases, path=path, accepted=accepted)
        return Call(self, _header.vwd_compact_args, stream, inputs=inputs, outputs={})

    compact = at_once(prepare_compact)
