"""The library, its calls declared as vanward.h has them."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

from ._header import PROTOTYPES, VWD_ABI_VERSION

ABI_VERSION = VWD_ABI_VERSION


def _load() -> ctypes.CDLL:
    """The library that VANWARD_LIBRARY names, else the one in the package's folder, else the system's."""
    name = f"libvanward.so.{ABI_VERSION}"
    here = Path(__file__).parent
    candidates = [os.environ.get("VANWARD_LIBRARY"), here / name, here / "libvanward.so"]
    path = next((str(p) for p in candidates if p and (p == candidates[0] or Path(p).exists())), name)
    try:
        library = ctypes.CDLL(path)
    except OSError as error:
        raise ImportError(f"{error}; set VANWARD_LIBRARY to the path of {name}") from None
    library.vwd_abi_version.restype = ctypes.c_uint32
    if library.vwd_abi_version() != ABI_VERSION:
        raise ImportError(f"{path} has ABI {library.vwd_abi_version()}; this package was written for {ABI_VERSION}")
    for call, (result, parameters) in PROTOTYPES.items():
        function = getattr(library, call)
        function.restype, function.argtypes = result, parameters
    return library


lib = _load()
