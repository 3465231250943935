"""Unmodified builds of llama.cpp for the tests: fetched once into .cache, by npm and apt, and never built here."""

import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[2]
CACHE = pathlib.Path(os.environ.get("VANWARD_CACHE", ROOT / ".cache")) / "llama.cpp"

NPM_PACKAGE = "@node-llama-cpp/linux-x64@3.22.1"
DEBIAN_PACKAGES = ["libggml0", "libllama0", "libc6", "libstdc++6", "libgcc-s1", "libgomp1", "libssl3t64", "libzstd1", "zlib1g",
                   "libcurl4t64", "llama.cpp-tools"]


class Release:
    """The command that runs a program against a release's libraries, and the driver's arguments that name them."""

    def __init__(self, name, runner, libraries, backends):
        self.name, self.runner, self.libraries, self.backends = name, runner, libraries, backends

    def command(self, driver, model, *arguments, beside=None):
        """`beside` is a folder in which further libraries are found."""
        paths = [*self.libraries, self.backends, model]
        runner = [f"{beside}:{word}" if beside and before == "--library-path" else word for before, word in zip([None, *self.runner], self.runner)]
        return [*runner, str(driver), *map(str, paths), *map(str, arguments)]


class Missing(Exception):
    """A release cannot be had here; the text says why."""


def quiet(command, **options):
    try:
        subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300, **options)
    except (OSError, subprocess.SubprocessError) as error:
        output = getattr(error, "output", None) or str(error)
        raise Missing(f"{' '.join(map(str, command[:3]))}: {output.strip().splitlines()[-1]}") from error


def fetch_into(folder, fill):
    """`folder`, filled once: a folder that is there is whole."""
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as work:
            fill(pathlib.Path(work))
            shutil.copytree(work, folder, symlinks=True)
    return folder


def npm():
    """llama.cpp 0.5.0 with ggml 0.25, backend API 2."""
    if shutil.which("npm") is None:
        raise Missing("npm is not installed")

    def fill(work):
        quiet(["npm", "pack", "--silent", NPM_PACKAGE], cwd=work)
        quiet(["tar", "-xzf", next(work.glob("*.tgz"))], cwd=work)

    folder = fetch_into(CACHE / "npm-3.22.1", fill) / "package/bins/linux-x64"
    return Release("npm 0.5.0", [], [folder / "libggml-base.so", folder / "libggml.v0.5.0.so", folder / "libllama.v0.5.0.so"], folder)


def debian():
    """llama.cpp of Debian sid, 0.7.0 when this was written, with ggml 0.27, backend API 3, and the C library that it needs."""
    if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        raise Missing("apt-get is not installed")

    def fill(work):
        state = work / "state"
        for part in ["lists/partial", "cache/archives/partial"]:
            (state / part).mkdir(parents=True)
        keys = "/usr/share/keyrings/debian-archive-keyring.gpg"
        mirror = debian_mirror()
        (state / "sources.list").write_text(f"deb [signed-by={keys}] {mirror} sid main\n")
        (state / "apt.conf").write_text(
            f'Dir::Etc::sourcelist "{state}/sources.list"; Dir::Etc::sourceparts "/dev/null"; Dir::State::lists "{state}/lists";\n'
            f'Dir::Cache "{state}/cache"; Dir::State::status "/dev/null"; Acquire::Languages "none"; APT::Sandbox::User "root";\n')
        environment = {**os.environ, "APT_CONFIG": str(state / "apt.conf")}
        quiet(["apt-get", "update"], env=environment)
        quiet(["apt-get", "download", *DEBIAN_PACKAGES], env=environment, cwd=state)
        for package in state.glob("*.deb"):
            quiet(["dpkg-deb", "-x", package, work / "root"])
        shutil.rmtree(state)

    libraries = fetch_into(CACHE / "debian-sid", fill) / "root/usr/lib/x86_64-linux-gnu"
    loader = [str(libraries / "ld-linux-x86-64.so.2"), "--library-path", str(libraries)]
    names = ["libggml-base.so.0", "libggml.so.0", "libllama.so.0"]
    if not (libraries / "ggml/backends0").is_dir():
        raise Missing("Debian's backends lie elsewhere than in ggml/backends0")
    return Release("Debian sid", loader, [libraries / name for name in names], libraries / "ggml/backends0")


def debian_mirror():
    """The mirror that this machine is set up with."""
    for path in [*pathlib.Path("/etc/apt/sources.list.d").glob("*.sources"), *pathlib.Path("/etc/apt").glob("sources.list")]:
        for word in path.read_text().split():
            if word.startswith("http") and word.rstrip("/").endswith("/debian"):
                return word
    raise Missing("no source of apt is a mirror of Debian")


def model():
    """SmolLM2-135M, as the demo fetches it."""
    fetched = subprocess.run([ROOT / "examples/engine/fetch_model.sh"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    if fetched.returncode != 0:
        raise Missing("the demo's model cannot be fetched")
    return fetched.stdout.strip()


def tiny(build, architecture="llama", head_dim=32):
    path = pathlib.Path(build) / f"tiny-{architecture}-{head_dim}.gguf"
    if not path.exists():
        subprocess.run([sys.executable, HERE / "tiny_model.py", path, architecture, str(head_dim)], check=True)
    return path


def text(build):
    """Prose of this repository, some 30,000 tokens."""
    path = pathlib.Path(build) / "text.txt"
    pages = [ROOT / "LICENSE", *sorted((ROOT / "docs").glob("*.md"))]
    path.write_text("".join(page.read_text() for page in pages))
    return path
