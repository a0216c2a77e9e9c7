"""Where the native library comes from, with compilers that are scripts."""

from __future__ import annotations

import ctypes
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from pkgutil import resolve_name

import pytest

from engine.core.errors import ConfigError
from engine.runtime.layers import layer
from engine.runtime.native import build, library, structs

Compiler = Callable[[str], Path]
WRITES_ITS_OUTPUT = """
while [ "$1" != -o ]; do shift; done
echo compiled > "$2"
"""


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Compiler:
    """Makes a script the only compiler, and an empty folder the cache; returns the log of its calls."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(build, "_failed", set())
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


def test_every_compiled_file_is_reported(compiler: Compiler) -> None:
    compiler(WRITES_ITS_OUTPUT)
    seen: list[tuple[int, int]] = []
    build.find_library(lambda *counts: seen.append(counts))
    num_files = len(list(Path(build.__file__).parent.glob("*.c"))) + 1  # the table of structures
    assert seen == [(number, num_files) for number in range(num_files + 1)]


def test_a_compiler_that_fails_leaves_nothing_and_is_not_tried_again(compiler: Compiler, tmp_path: Path) -> None:
    log = compiler("echo 'no such option' >&2; exit 1")
    assert build.must_compile()
    assert build.find_library() is None
    assert list((tmp_path / "cache" / "quire").iterdir()) == []
    calls = log.read_text()
    assert not build.must_compile()
    assert build.find_library() is None
    assert log.read_text() == calls


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
    monkeypatch.setattr(library, "find_library", lambda: broken)
    assert library._load.__wrapped__() is None


@pytest.fixture
def loaded() -> Iterator[library.Library]:
    found = library.native()
    if found is None:
        pytest.skip("no native library and no C compiler")
    yield found
    library.choose_kernels("auto")


def test_kernels_can_be_chosen(loaded: library.Library) -> None:
    library.choose_kernels("portable")
    assert library.native() is loaded
    assert loaded.isa is library.Isa.PORTABLE
    library.choose_kernels("off")
    assert library.native() is None
    library.choose_kernels("auto")
    assert loaded.isa is loaded.best_isa


def test_kernels_that_this_machine_does_not_have_are_refused(
    loaded: library.Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loaded, "_use_isa", lambda isa: 3)
    with pytest.raises(ConfigError, match=r"--cpu-kernels is 'avx512bf16'\. This machine has no AVX512BF16"):
        library.choose_kernels("avx512bf16")
    monkeypatch.setattr(library, "_load", lambda: None)
    with pytest.raises(ConfigError, match="'avx2', but there are no native kernels"):
        library.choose_kernels("avx2")
    library.choose_kernels("off")
    monkeypatch.undo()


def swapped(mirror: type[ctypes.Structure], first: int, second: int) -> type[ctypes.Structure]:
    """A copy of a mirror with two fields in each other's place."""
    fields = list(mirror._fields_)
    fields[first], fields[second] = fields[second], fields[first]
    return type("Swapped", (ctypes.Structure,), {"_fields_": fields})


def cut(mirror: type[ctypes.Structure]) -> type[ctypes.Structure]:
    return type("Cut", (ctypes.Structure,), {"_fields_": mirror._fields_[:-1]})


@pytest.mark.parametrize(
    ("name", "change", "why"),
    [
        ("pool", lambda mirror: swapped(mirror, 0, 1), "field k of struct pool has 8 bytes at 8, and 8 at 0 in C"),
        ("decoder", lambda mirror: swapped(mirror, 3, 4), "of struct decoder has"),
        ("attention", lambda mirror: swapped(mirror, 0, 1), "of struct attention has"),
        ("draw", lambda mirror: swapped(mirror, 1, 3), "field temperature of struct draw has"),
        ("gemm_args", cut, "only one of both has the field addends of struct gemm_args"),
    ],
)
def test_a_mirror_that_differs_from_its_structure_is_refused(
    name: str, change: Callable[[type[ctypes.Structure]], type[ctypes.Structure]], why: str
) -> None:
    resolve_name(layer.MIXERS["attention"])
    path = build.find_library()
    if path is None:
        pytest.skip("no C compiler")
    functions = ctypes.CDLL(str(path))
    structs.check_layout(functions)
    with pytest.raises(ConfigError, match=why):
        structs.check_layout(functions, {**structs.MIRRORS, name: change(structs.MIRRORS[name])})
    with pytest.raises(ConfigError, match="only the sources have struct unknown"):
        structs.check_layout(functions, {"unknown": structs.MIRRORS[name]})


def test_every_shared_structure_has_a_mirror() -> None:
    # The mirrors of parts are made by their modules.
    for place in (*layer.MIXERS.values(), *layer.FEED_FORWARDS.values(), "engine.runtime.layers.altup"):
        resolve_name(place)
    assert structs.MIRRORS.keys() == structs.shared_structs().keys()
    for mirror in structs.MIRRORS.values():
        with pytest.raises(AttributeError):
            mirror().no_such_field = 1  # which ctypes would keep beside the structure, silently
