"""What README.md tells a new user to type, typed: in a folder of its own, into a prefix with a space in its name.

    tests/readme.py SCRATCH

Run by `make test-install`. Needs a C and a C++ compiler, Go, pkg-config, and a package index for pip.
"""

import os
import re
import shutil
import subprocess
import sys
import unittest
from html.parser import HTMLParser
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
README = ROOT.joinpath("README.md").read_text()
PRINTED = re.search(r"It prints `\d+ of (.*)`", README)[1]
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


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.M | re.S)


def program(language):
    """Its name, its text, and the commands that stand after it."""
    block = rf"^```{language}\n(\S+ quick\S*.*?)^```\n.*?^```sh\n(.*?)^```$"
    text, commands = re.search(block, README, re.M | re.S).groups()
    return re.search(r"quick\.\w+", text)[0], text, commands


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
    def run_program(self, language):
        name, text, commands = program(language)
        folder = SCRATCH / language
        folder.mkdir()
        folder.joinpath(name).write_text(text)
        printed = sh(commands, folder).splitlines()
        self.assertTrue(printed)
        for line in printed:
            self.assertRegex(line, rf"^\d+ of {re.escape(PRINTED)}$")
        return folder

    def test_c_shared_and_static(self):
        folder = self.run_program("c")
        needed = {path.name: sh(f"readelf -d {path.name}", folder) for path in folder.glob("quick*") if not path.suffix}
        self.assertEqual({name: "libvanward.so" in text for name, text in needed.items()},
                         {"quick": True, "quick-static": False})

    def test_cpp(self):
        self.run_program("cpp")

    def test_go(self):
        self.run_program("go")

    def test_python(self):
        folder = self.run_program("python")
        carried = {path.name for path in folder.glob("env/lib/*/site-packages/vanward-*.dist-info/licenses/*")}
        self.assertEqual(carried, {"LICENSE", "THIRD-PARTY"})

    def test_the_program_for_a_gpu_compiles(self):
        gpu = [text for text in blocks("python") if text.startswith("# gpu.py")]
        self.assertEqual(len(gpu), 1)
        compile(gpu[0], "gpu.py", "exec")


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
