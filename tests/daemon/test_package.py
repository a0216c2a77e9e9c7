"""The package: built as for a release, checked, installed where nothing else of this tree can be imported, and served.

The new environment has Quire from its wheel alone. What Quire depends on is the test environment's, so that torch is not
installed a second time.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest
from real_daemon import SMALL, Daemon

from engine.runtime.native.build import all_names, find_compiler, library_name

ROOT = Path(__file__).parents[2]
PARTS = ("engine", "server", "loadtest", "quire", "pyproject.toml", "setup.py", "README.md", "LICENSE")
SUFFIXES = (".py", ".c", ".h", ".json", ".html", ".css", ".js", ".svg", ".woff2")  # of files that running code needs


ARM_COMPILER = """#!/bin/sh
[ "$1" = -dumpmachine ] && echo aarch64-linux-gnu && exit
while [ "$1" != -o ]; do shift; done
echo needs GLIBC_2.17 and GLIBC_2.29 > "$2"
"""


def environment() -> dict[str, str]:
    """The test's variables, without the path to this tree and without settings."""
    kept = {key: value for key, value in os.environ.items() if key != "PYTHONPATH" and not key.startswith("QUIRE_")}
    return kept | {"BUILD_COMMIT": "0123abcd"}


def run(*command: object, folder: Path, **variables: str) -> str:
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=folder, env=environment() | variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def kernels_of(pid: int) -> str:
    """Return the line of a process's memory map that names its native library."""
    lines = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8").splitlines()
    return next((line for line in lines if "quire_cpu-" in line), "")


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an sdist, and of a wheel that is made from it."""
    folder = tmp_path_factory.mktemp("package")
    copy_sources(folder / "sources")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder / "dist", folder / "sources", folder=folder)
    return folder / "dist"


def copy_sources(sources: Path) -> None:
    sources.mkdir()
    for part in PARTS:
        if (ROOT / part).is_dir():
            shutil.copytree(ROOT / part, sources / part, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
        else:
            shutil.copy(ROOT / part, sources / part)


@pytest.fixture(scope="module")
def installed(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of an environment with the wheel."""
    folder = tmp_path_factory.mktemp("installed")
    run(sys.executable, "-m", "venv", "--without-pip", folder, folder=folder)
    [wheel] = dist.glob("*.whl")
    python = folder / "bin/python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel, folder=folder)
    # A path in a .pth file is searched last, and .pth files in it, such as an editable installation's, are not read.
    [site] = folder.glob("lib/python3*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    return folder / "bin"


def test_both_archives_are_valid_and_complete(dist: Path) -> None:
    assert "PASSED" in run(sys.executable, "-m", "twine", "check", "--strict", *dist.iterdir(), folder=dist)
    [wheel], [archive] = dist.glob("*.whl"), dist.glob("*.tar.gz")
    names = zipfile.ZipFile(wheel).namelist()
    libraries = [name for name in names if name.endswith(".so")]
    assert len(libraries) == (len(all_names()) if find_compiler() else 0)
    assert wheel.name.endswith("-py3-none-any.whl") == (not libraries)
    tracked = [name for name in run("git", "ls-files", *PARTS[:4], folder=ROOT).split() if name.endswith(SUFFIXES)]
    assert set(tracked) <= set(names), "a file of the packages is missing"
    vendored = {name.rpartition("licenses/server/page/")[2] for name in names if "licenses/server/page/" in name}
    assert vendored == {f"{folder}/LICENSE" for folder in ("dompurify", "highlight", "katex", "markdown-it")}
    with tarfile.open(archive) as opened:
        inside = {name.partition("/")[2] for name in opened.getnames()}
    assert {*tracked, "engine/commit.txt", "setup.py", "pyproject.toml"} <= inside


def test_a_compiler_for_another_machine_makes_a_wheel_for_it(tmp_path: Path) -> None:
    copy_sources(tmp_path / "sources")
    compiler = tmp_path / "aarch64-cc"
    compiler.write_text(ARM_COMPILER, encoding="utf-8")
    compiler.chmod(0o755)
    run(
        sys.executable, "-m", "build", "--no-isolation", "--wheel", tmp_path / "sources",
        folder=tmp_path, CC=str(compiler), XDG_CACHE_HOME=str(tmp_path),
    )  # fmt: skip
    [wheel] = tmp_path.glob("sources/dist/*.whl")
    assert wheel.name.endswith("-py3-none-manylinux_2_29_aarch64.whl")
    names = {name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".so")}
    assert names == {f"engine/runtime/native/{library_name(name, 'aarch64')}" for name in all_names("aarch64")}


def test_the_installed_command_knows_its_commit(installed: Path, tmp_path: Path) -> None:
    assert run(installed / "quire", "--version", folder=tmp_path).endswith(" (0123abcd)\n")
    where = run(installed / "python", "-c", "import server; print(server.__file__)", folder=tmp_path)
    assert where.startswith(str(installed.parent))


def test_the_installed_command_serves_without_a_compiler(installed: Path, tmp_path: Path) -> None:
    command = [str(installed / "quire"), "serve", "--port", "0", *SMALL]
    variables = environment() | {"PATH": str(installed), "XDG_CACHE_HOME": str(tmp_path)}
    with subprocess.Popen(command, cwd=tmp_path, env=variables, stderr=subprocess.PIPE, text=True) as process:
        try:
            daemon = Daemon(process)
            assert "Paris" in daemon.text()
            if find_compiler() is not None:  # the wheel has kernels
                assert f"{installed.parent}/lib" in kernels_of(process.pid)
            daemon.stop()
        finally:
            process.kill()
