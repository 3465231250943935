"""Statuses and what is raised for them."""

from __future__ import annotations

import contextlib
import ctypes
import re
from collections.abc import Iterator
from typing import Any

from ._abi import lib
from ._enums import Status


class Error(RuntimeError):
    """A call did nothing: `status` says why, `message` what was found and what was expected, `call` which one it was."""

    def __init__(self, status: int, message: str, call: str):
        super().__init__(f"{call}: {message}")
        self.status = Status(status)
        self.message = message
        self.call = call

    def __reduce__(self) -> Any:
        """For workers that send it home."""
        return type(self), (self.status, self.message, self.call)


class InvalidArgument(Error, ValueError):
    """An argument breaks the contract; the message names it."""


class FileError(Error, OSError):
    """A file could not be read or written, or holds something else; `errno` where the system gave one."""

    def __init__(self, status: int, message: str, call: str):
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


@contextlib.contextmanager
def naming(call: str) -> Iterator[None]:
    """Puts the name of the call before what is said of its arguments."""
    try:
        yield
    except (TypeError, ValueError) as error:
        error.args = (f"{call}: {error}",)
        raise


def invoke(call: str, *arguments: Any) -> None:
    """Calls vwd_<call>."""
    check(getattr(lib, f"vwd_{call}")(*arguments), call)


def check(status: int, call: str) -> None:
    """Raises the failure of this thread's last call, under that call's name."""
    if status == Status.OK:
        return
    size = lib.vwd_last_error(None, 0) + 1
    buffer = ctypes.create_string_buffer(size)
    lib.vwd_last_error(buffer, size)
    message = buffer.value.decode("utf-8", "replace").removeprefix(f"vwd_{call}: ")
    raise _RAISED.get(Status(status), Error)(status, message, call)
