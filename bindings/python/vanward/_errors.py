"""Statuses and what is raised for them."""

from __future__ import annotations

import ctypes
import re

from ._abi import lib
from ._enums import Status


class Error(RuntimeError):
    """A call did nothing: `status` says why, `message` what was found and what was expected."""

    def __init__(self, status: int, message: str, call: str = ""):
        super().__init__(f"{call}: {message}" if call else message)
        self.status = Status(status)
        self.message = message


class InvalidArgument(Error, ValueError):
    """An argument breaks the contract; the message names it."""


class FileError(Error, OSError):
    """A file could not be read or written, or holds something else; `errno` where the system gave one."""

    def __init__(self, status: int, message: str, call: str = ""):
        super().__init__(status, message, call)
        number = re.search(r"\(os error (\d+)\)", message)
        self.errno = int(number[1]) if number else None


class OutOfMemory(Error, MemoryError):
    """Host or device memory could not be had."""


_RAISED = {
    Status.INVALID_ARGUMENT: InvalidArgument,
    Status.OUT_OF_MEMORY: OutOfMemory,
    Status.IO: FileError,
}


def check(status: int, call: str = "") -> None:
    """Raises the failure of this thread's last call, under that call's name."""
    if status == Status.OK:
        return
    size = lib.vwd_last_error(None, 0) + 1
    buffer = ctypes.create_string_buffer(size)
    lib.vwd_last_error(buffer, size)
    message = buffer.value.decode("utf-8", "replace")
    raise _RAISED.get(Status(status), Error)(status, message, call)
