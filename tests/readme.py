"""What README.md and the READMEs of the bindings tell a new user to type, typed: in a folder of its own, into a prefix with a space in its
name. A program is a block whose first line names its file; the block of commands after it runs it, and "It prints `…`" says what it prints.

    tests/readme.py SCRATCH

Run by `make test-install`. Needs a C and a C++ compiler, Go, pkg-config, and a package index for pip.
"""

import os
import re
import shutil
import subprocess
import sys
import textwrap
import unittest
from html.parser import HTMLParser
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = {"c": "README.md", "cpp": "bindings/cpp/README.md", "go": "bindings/go/README.md", "python": "bindings/python/README.md"}
README = ROOT.joinpath("README.md").read_text()
SCRATCH = Path(sys.argv.pop()).resolve()
PREFIX = SCRATCH / "first contact"
SHOWN_PREFIX = "/opt/vanward"


def sh(commands, folder):
    """Runs shell commands; stdout. Prefixes with spaces take the form that README.md has for them."""
    commands = re.sub(r"^(cc|c\+\+) (.*)$", r'eval "\1 \2"', commands, flags=re.M)
    shell = ["bash", "-euo", "pipefail", "-c", commands]
    done = subprocess.run(shell, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True)
    if done.returncode:
        raise AssertionError(f"{commands}\nexit status {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    return done.stdout


def blocks(language, text=README):
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.M | re.S)


def programs(language):
    """Of a page: each program's file name, its text, the commands that stand after it, and what it prints."""
    page = ROOT.joinpath(PAGES[language]).read_text()
    block = rf"^```{language}\n(?=\S+ (\w+\.\w+))(.*?)^```$(.*?)^```sh\n(.*?)^```$"
    for match in re.finditer(block, page, re.M | re.S):
        name, text, between, commands = match.groups()
        near = page[page.rfind("\n## ", 0, match.start()) + 1:match.start()] + between
        yield name, text, commands, re.findall(r"It prints `(.*?)`", near)[-1]


def setUpModule():
    """The block that installs, for another prefix; then what it exports."""
    shutil.rmtree(SCRATCH, ignore_errors=True)
    SCRATCH.mkdir(parents=True)
    install = next(block for block in blocks("sh") if SHOWN_PREFIX in block)
    install = install.replace(f"PREFIX={SHOWN_PREFIX}", f"PREFIX='{PREFIX}'")
    sh(install + 'env -0 > "$PREFIX/environment"\n', ROOT)
    for variable in Path(PREFIX, "environment").read_text().split("\0"):
        name, _, value = variable.partition("=")
        ENVIRONMENT[name] = value


class QuickStart(unittest.TestCase):
    def run_programs(self, language, wanted):
        """The folder of the last one."""
        found = list(programs(language))
        self.assertEqual([name for name, *_ in found], wanted)
        for name, text, commands, prints in found:
            folder = SCRATCH / f"{language} {Path(name).stem}"
            folder.mkdir()
            folder.joinpath(name).write_text(text)
            printed = sh(commands, folder).splitlines()
            self.assertTrue(printed)
            for line in printed:  # how many were missed depends on the random numbers
                self.assertRegex(line, "^" + re.sub(r"^\d+ of 64", r"\\d+ of 64", re.escape(prints).replace("\\ ", " ")) + "$")
        return folder

    def test_every_program_is_typed(self):
        """But for gpu.py, which the bundle for a machine with a GPU types."""
        for page in set(PAGES.values()):
            text = ROOT.joinpath(page).read_text()
            typed = [language for language, at in PAGES.items() if at == page]
            self.assertEqual(len(re.findall(r"^```(?:c|cpp|go|python)$", text, re.M)),
                             sum(len(list(programs(language))) for language in typed) + text.count("\n# gpu.py\n"), page)

    def test_c_shared_and_static(self):
        folder = self.run_programs("c", ["quick.c"])
        needed = {path.name: sh(f"readelf -d {path.name}", folder) for path in folder.glob("quick*") if not path.suffix}
        self.assertEqual({name: "libvanward.so" in text for name, text in needed.items()},
                         {"quick": True, "quick-static": False})

    def test_cpp(self):
        self.run_programs("cpp", ["verify.cpp", "quick.cpp"])

    def test_go(self):
        self.run_programs("go", ["verify.go", "quick.go"])

    def test_python(self):
        folder = self.run_programs("python", ["verify.py", "quick.py"])
        carried = {path.name for path in folder.glob("env/lib/*/site-packages/vanward-*.dist-info/licenses/*")}
        self.assertEqual(carried, {"LICENSE", "THIRD-PARTY"})

    def test_the_program_for_a_gpu_compiles(self):
        gpu = [text for text in blocks("python") if text.startswith("# gpu.py")]
        self.assertEqual(len(gpu), 1)
        compile(gpu[0], "gpu.py", "exec")


class Pages(unittest.TestCase):
    def test_the_first_page_says_in_60_lines_of_200_how_to_start(self):
        lines = README.splitlines()
        self.assertLessEqual(len(lines), 200)
        first_screen = "\n".join(lines[:60])
        for said in ["**What it gains.**", "**How to start.**", "make demo", "## Can I use it", "make install"]:
            self.assertIn(said, first_screen)

    def test_links_between_files_lead_somewhere(self):
        for page in sh("git ls-files '*.md'", ROOT).splitlines():
            text = re.sub(r"^```.*?^```$|`[^`]*`", "", ROOT.joinpath(page).read_text(), flags=re.M | re.S)
            for target in re.findall(r"\]\(([^)\s#]+)", text):
                if "://" not in target:
                    self.assertTrue(ROOT.joinpath(page).parent.joinpath(target).exists(), f"{page}: {target}")


class Fragments(unittest.TestCase):
    def test_those_of_engine_md_are_the_examples(self):
        source = ROOT.joinpath("examples/batching.cpp").read_text()
        marked = [textwrap.dedent(text) for text in re.findall(r"// \[(?!end).*?\]\n(.*?)^ *// \[end\]$", source, re.M | re.S)]
        self.assertEqual(sorted(blocks("cpp", ROOT.joinpath("docs/engine.md").read_text())), sorted(marked))


class Links(HTMLParser):
    """Of a page: where it leads, and the places in it."""

    def __init__(self, page):
        super().__init__()
        self.targets, self.places = [], set()
        self.feed(page.read_text())

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        self.places.add(values.get("id"))
        if tag == "a" and "href" in values:
            self.targets.append(values["href"])


class Reference(unittest.TestCase):
    def test_every_page_of_docs_is_there_and_leads_somewhere(self):
        sh("make reference", ROOT)
        folder = Path(ROOT, ENVIRONMENT.get("CARGO_TARGET_DIR", "target"), "doc")
        names = ["index" if path.stem == "README" else path.stem for path in ROOT.glob("docs/*.md")]
        checked = 0
        for name in names:
            for target in Links(folder / f"{name}.html").targets:
                path, _, place = target.partition("#")
                file = re.sub(r"https://github.com/vanward/vanward/blob/main/", f"{ROOT}/", path)
                if file.startswith("https:"):
                    continue
                checked += 1
                page = folder / file if path else folder / f"{name}.html"
                self.assertTrue(page.exists(), f"{name}: {target}")
                if place and page.suffix == ".html":
                    self.assertIn(place, Links(page).places, f"{name}: {target}")
        self.assertGreater(checked, len(names))


class Tree(unittest.TestCase):
    def test_nothing_is_left_in_the_checkout(self):
        if not ROOT.joinpath(".git").exists():
            self.skipTest("not a checkout")
        self.assertEqual(sh("git status --porcelain --untracked-files=all", ROOT), BEFORE)

    def test_uninstall_leaves_no_file(self):
        Path(PREFIX, "environment").unlink()
        sh("make uninstall", ROOT)
        self.assertEqual([path for path in PREFIX.rglob("*") if not path.is_dir()], [])


if __name__ == "__main__":
    # Without what the make that runs this was told.
    ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("MAKE") and name != "DESTDIR"}
    BEFORE = sh("git status --porcelain --untracked-files=all", ROOT) if ROOT.joinpath(".git").exists() else ""
    unittest.main(verbosity=2)
