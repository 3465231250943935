"""Statuses and what is raised for them."""

from __future__ import annotations

import ctypes

from ._abi import lib
from ._enums import Status


class Error(RuntimeError):
    """A call did nothing: `status` says why, `message` what was found and what was expected."""

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = Status(status)
        self.message = message


class InvalidArgument(Error, ValueError):
    """An argument breaks the contract; the message names it."""


def check(status: int) -> None:
    """Raises the failure of this thread's last call."""
    if status == Status.OK:
        return
    size = lib.vwd_last_error(None, 0) + 1
    buffer = ctypes.create_string_buffer(size)
    lib.vwd_last_error(buffer, size)
    message = buffer.value.decode("utf-8", "replace")
    raise (InvalidArgument if status == Status.INVALID_ARGUMENT else Error)(status, message)
