"""Where the native library comes from, with compilers that are scripts."""

from __future__ import annotations

import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.runtime.native import build, library

Compiler = Callable[[str], Path]
WRITES_ITS_OUTPUT = """
while [ "$1" != -o ]; do shift; done
echo compiled > "$2"
"""


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Compiler:
    """Makes a script the only compiler, and an empty folder the cache; returns the log of its calls."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(build, "source_digest", lambda: "0123456789abcdef")

    def install(script: str) -> Path:
        path, log = tmp_path / "cc", tmp_path / "calls"
        path.write_text(f"#!/bin/sh\necho called >> '{log}'\n{script}")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setattr(build.shutil, "which", lambda name: str(path) if name == "cc" else None)
        return log

    return install


def test_compiles_once(compiler: Compiler) -> None:
    log = compiler(WRITES_ITS_OUTPUT)
    first = build.find_library()
    assert first is not None
    assert first.read_text() == "compiled\n"
    calls = log.read_text()
    assert build.find_library() == first
    assert log.read_text() == calls
    assert list(first.parent.iterdir()) == [first]


def test_another_compiler_or_other_sources_compile_anew(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler(WRITES_ITS_OUTPUT)
    first = build.find_library()
    compiler(WRITES_ITS_OUTPUT + "# newer\n")
    second = build.find_library()
    monkeypatch.setattr(build, "source_digest", lambda: "fedcba9876543210")
    assert len({first, second, build.find_library()}) == 3


def test_a_compiler_that_fails_leaves_nothing(compiler: Compiler, tmp_path: Path) -> None:
    compiler("echo 'no such option' >&2; exit 1")
    assert build.find_library() is None
    assert list((tmp_path / "cache" / "quire").iterdir()) == []


def test_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "source_digest", lambda: "0123456789abcdef")
    monkeypatch.setattr(build.shutil, "which", lambda _: None)
    assert build.find_library() is None


def test_a_cache_that_cannot_be_made(compiler: Compiler, tmp_path: Path) -> None:
    compiler(WRITES_ITS_OUTPUT)
    (tmp_path / "cache").write_text("a file where the folder should be")
    assert build.find_library() is None


def test_a_packaged_library_comes_first(compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = compiler(WRITES_ITS_OUTPUT)
    monkeypatch.setattr(build, "_HERE", tmp_path)
    packaged = tmp_path / "quire_cpu-0123456789abcdef.so"
    packaged.write_text("packaged")
    assert build.find_library() == packaged
    assert not log.exists()


def test_a_file_that_is_no_library_is_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"not machine code")
    monkeypatch.delenv("QUIRE_NATIVE", raising=False)
    monkeypatch.setattr(library, "find_library", lambda: broken)
    assert library.native.__wrapped__() is None


@pytest.mark.parametrize(("setting", "expected"), [("off", None), ("portable", library.Isa.PORTABLE), ("huge", None)])
def test_the_setting(monkeypatch: pytest.MonkeyPatch, setting: str, expected: library.Isa | None) -> None:
    if library.native() is None:
        pytest.skip("no native library and no C compiler")
    monkeypatch.setenv("QUIRE_NATIVE", setting)
    loaded = library.native.__wrapped__()
    assert (loaded and loaded.isa) == expected
    library.native().use_isa(library.native().isa)  # the kernels in use are the process's, not the object's
