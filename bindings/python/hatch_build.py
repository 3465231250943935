"""A wheel that carries the library, where VANWARD_WHEEL_LIBRARY names it; otherwise one that looks for it elsewhere."""

import os
import re
from pathlib import Path

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class Library(BuildHookInterface):
    def initialize(self, version, build_data):
        library = os.environ.get("VANWARD_WHEEL_LIBRARY")
        if not library:
            return
        minors = map(int, re.findall(rb"GLIBC_2\.(\d+)", Path(library).read_bytes()))
        build_data["force_include"][os.path.realpath(library)] = f"vanward/{Path(library).name}"
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-manylinux_2_{max(minors)}_{os.uname().machine}"
