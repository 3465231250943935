"""The package against include/vanward.h, by its text and by a C compiler."""

import ctypes
import dataclasses
import inspect
import os
import re
import shutil
import subprocess
import tempfile
import unittest
from pathlib import Path

import vanward
from vanward import _arguments, _header

HEADER = Path(__file__).resolve().parents[3] / "include" / "vanward.h"
CODE = re.sub(r"/\*.*?\*/", "", HEADER.read_text(), flags=re.S)


def structs() -> dict[str, type[ctypes.Structure]]:
    return {
        name: kind
        for name, kind in vars(_header).items()
        if isinstance(kind, type) and issubclass(kind, ctypes.Structure) and name.startswith("vwd_")
    }


class Abi(unittest.TestCase):
    def test_every_size_and_offset_is_the_c_compilers(self):
        lines, expected = [], []
        for name, kind in structs().items():
            lines.append(f'printf("{name} %zu\\n", sizeof({name}));')
            expected.append(f"{name} {ctypes.sizeof(kind)}")
            for field, *_ in kind._fields_:
                place = getattr(kind, field)
                lines.append(
                    f'printf("{name}.{field} %zu %zu\\n", offsetof({name}, {field}), sizeof((({name} *)0)->{field}));'
                )
                expected.append(f"{name}.{field} {place.offset} {place.size}")
        program = f'#include "{HEADER}"\n#include <stdio.h>\nint main(void) {{ {" ".join(lines)} }}\n'
        compiler = os.environ.get("CC") or shutil.which("cc") or "gcc"
        with tempfile.TemporaryDirectory() as folder:
            source, binary = Path(folder, "layout.c"), Path(folder, "layout")
            source.write_text(program)
            subprocess.run([compiler, str(source), "-o", str(binary)], check=True)
            found = subprocess.run([binary], check=True, capture_output=True, text=True).stdout.splitlines()
        self.assertEqual(found, expected)

    def test_every_call_that_takes_arguments_has_a_method_with_each_of_them(self):
        of_the_library = {"struct_size", "flags", "tensor_count", "input_count", "grid_count"}
        for name in re.findall(r"\bvwd_(\w+)_args \*args, ", CODE):
            owners = {"forecast_": vanward.Forecast, "kv_cache_": vanward.KvCache, "decoder_": vanward.Decoder}
            prefix = next((prefix for prefix in owners if name.startswith(prefix)), "")
            owner = vanward.Compactor if name == "compact" else owners.get(prefix, vanward.Session)
            parameters = inspect.signature(getattr(owner, name.removeprefix(prefix))).parameters
            fields = {field for field, *_ in structs()[f"vwd_{name}_args"]._fields_}
            self.assertEqual(set(parameters) - {"self", "stream", "forecast"}, fields - of_the_library, name)

    def test_every_group_has_the_fields_of_its_struct(self):
        for struct, group in _arguments._GROUPS.items():
            fields = {field for field, *_ in struct._fields_} - {"struct_size", "flags"}
            self.assertEqual({field.name for field in dataclasses.fields(group)}, fields)

    def test_every_call_is_in_the_cpp_header_too(self):
        cpp = (HEADER.parents[1] / "bindings" / "cpp" / "vanward.hpp").read_text()
        self.assertEqual([name for name in _header.PROTOTYPES if not re.search(rf"\b{name}\b", cpp)], [])

    def test_every_constant_has_the_headers_value(self):
        enums = [
            ("ERROR", vanward.Status),
            ("DEVICE", vanward.Device),
            ("STREAM", vanward.StreamRole),
            ("LOG", vanward.LogLevel),
            ("CHECK", vanward.Check),
            ("DECODER", vanward.DecoderMode),
            ("STRATEGY", vanward.Strategy),
            ("PREDICT", vanward.Predict),
            ("BUDGET", vanward.BudgetPays),
            ("INDEX", vanward.IndexKind),
            ("SELECT", vanward.SelectMethod),
            ("SELECT", vanward.SelectStatus),
            ("REPAIR", vanward.RepairMode),
            ("CODING", vanward.Coding),
            ("SLOTS", vanward.SlotCoding),
            ("GATHER", vanward.GatherEngine),
            ("ROPE", vanward.RopeStyle),
            ("TOPK", vanward.TopKOrder),
            ("ACCEPT", vanward.Acceptance),
            ("WALK", vanward.Walk),
            ("SAMPLE", vanward.SampleStatus),
            ("FINISH", vanward.Finish),
        ]
        flags = [
            ("ABI", "VERSION"),
            ("FORECAST", "MEMORY"),
            ("ATTENTION", "KEEP_ROWS"),
            ("SAMPLE", "TARGET_PROBABILITIES"),
            ("SAMPLE", "DRAFT_PROBABILITIES"),
            ("SAMPLE", "TEMPERATURE_LAST"),
        ]
        in_header = {
            (family, member): int(value)
            for family, member, value in re.findall(r"#define VWD_([A-Z]+)_([A-Z][A-Z0-9_]*) (\d+)", CODE)
            if (family, member) not in flags
        }
        in_python = {(family, m.name): m.value for family, kind in enums for m in kind if m.name != "OK"}
        self.assertEqual(in_python, in_header)
        self.assertEqual(vanward.ABI_VERSION, int(re.search(r"VWD_ABI_VERSION (\d+)", CODE)[1]))


if __name__ == "__main__":
    unittest.main()
