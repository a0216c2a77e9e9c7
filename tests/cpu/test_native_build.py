"""Where the native library comes from, with compilers that are scripts."""

from __future__ import annotations

import ctypes
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from pkgutil import resolve_name

import pytest

from engine.core.errors import ConfigError, ModelLoadError
from engine.runtime.layers import layer
from engine.runtime.native import build, library, structs
from engine.sources.model_source import find_model
from tests.patience import PATIENCE_S

ROOT = Path(__file__).parents[2]
Compiler = Callable[[str], Path]
WRITES_ITS_OUTPUT = """
while [ "$1" != -o ]; do shift; done
echo compiled > "$2"
"""


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Compiler:
    """Makes a script the only compiler, and an empty folder the cache; returns the log of its calls."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(build, "source_digest", lambda machine="": "0123456789abcdef")

    def install(script: str) -> Path:
        path, log = tmp_path / "cc", tmp_path / "calls"
        path.write_text(f"#!/bin/sh\necho called >> '{log}'\n{script}")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setattr(build.shutil, "which", lambda name: str(path) if name == "cc" else None)
        return log

    return install


def test_compiles_once(compiler: Compiler) -> None:
    log = compiler(WRITES_ITS_OUTPUT)
    first = build.find_library("portable")
    assert first is not None
    assert first.read_text() == "compiled\n"
    calls = log.read_text()
    assert build.find_library("portable") == first
    assert log.read_text() == calls
    assert list(first.parent.iterdir()) == [first]


def test_libraries_that_are_compiled_together_share_what_is_the_same(compiler: Compiler, tmp_path: Path) -> None:
    log = compiler(WRITES_ITS_OUTPUT)
    made = build.compile_libraries(str(tmp_path / "cc"), ["portable", build.CHOOSER, "avx2"], machine="x86_64")
    assert len({path.read_text() for path in made}) == 1
    kernels = len(list(Path(build.__file__).parent.glob("kernels_*.c")))
    others = len(list(Path(build.__file__).parent.glob("*.c"))) - kernels + 1  # the table of structures
    num_calls = 2 * kernels + others + len(made)
    assert len(log.read_text().splitlines()) == num_calls
    build.compile_libraries(str(tmp_path / "cc"), ["avx512", "avx512vnni"], machine="x86_64")
    num_more = len(log.read_text().splitlines()) - num_calls
    assert num_more == (kernels + 2) + (others - 1) + 2  # of the kernels products with bytes and attention differ


def test_another_compiler_or_other_sources_compile_anew(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler(WRITES_ITS_OUTPUT)
    first = build.find_library("portable")
    compiler(WRITES_ITS_OUTPUT + "# newer\n")
    second = build.find_library("portable")
    monkeypatch.setattr(build, "source_digest", lambda machine: "fedcba9876543210")
    assert len({first, second, build.find_library("portable"), build.find_library("avx2")}) == 4


def test_every_compiled_file_is_reported(compiler: Compiler) -> None:
    compiler(WRITES_ITS_OUTPUT)
    seen: list[tuple[int, int]] = []
    build.find_library("portable", lambda *counts: seen.append(counts))
    num_files = len(list(Path(build.__file__).parent.glob("*.c")))  # the table of structures, but not the chooser
    assert seen == [(number, num_files) for number in range(num_files + 1)]


def test_a_start_that_is_stopped_waits_for_the_files_that_have_begun(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = compiler(WRITES_ITS_OUTPUT)
    monkeypatch.setattr(build, "usable_cpus", lambda: 1)

    def stop(done: int, _: int) -> None:
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build.find_library("portable", stop)
    num_files = len(list(Path(build.__file__).parent.glob("*.c")))
    assert len(log.read_text().splitlines()) < num_files
    assert list(build._cache_of(str(build.find_compiler())).iterdir()) == []


COMPILES = """
import sys
from pathlib import Path
from engine.runtime.native import build
target = Path(sys.argv[1])
with build._alone_in(target.parent):
    print("begun", flush=True)
    sys.stdin.read()
    target.write_text("theirs")
"""


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_start_waits_for_another_that_compiles(compiler: Compiler, is_killed: bool) -> None:
    log = compiler(WRITES_ITS_OUTPUT)
    folder = build._cache_of(str(build.find_compiler()))
    folder.mkdir(parents=True)
    target = folder / build.library_name("portable")
    command = [sys.executable, "-c", COMPILES, str(target)]
    with (
        subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other,
        ThreadPoolExecutor() as here,
    ):
        assert other.stdin is not None
        assert other.stdout is not None
        other.stdout.readline()
        found = here.submit(build.find_library, "portable")
        if is_killed:
            other.kill()
        other.stdin.close()
        assert found.result(PATIENCE_S) == target
    assert log.exists() == is_killed
    assert target.read_text() == ("compiled\n" if is_killed else "theirs")


def test_a_compiler_that_fails_leaves_nothing(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = compiler("echo 'no such option' >&2; exit 1")
    assert build.find_library("portable") is None
    assert "not compiled" in caplog.text
    assert "failed: no such option" in caplog.text
    assert build.why_no_kernels().endswith("a warning in the log says")
    [folder] = (tmp_path / "cache" / "quire").iterdir()
    assert list(folder.iterdir()) == []
    assert build.machine_isas.__wrapped__() == ()
    monkeypatch.setattr(library, "_loaded", {})
    assert library._load(build.Isa.PORTABLE) is None
    calls = log.read_text()
    assert library._load(build.Isa.PORTABLE) is None, "it is not tried again"
    assert log.read_text() == calls


def test_a_library_that_cannot_be_loaded_is_reported(compiler: Compiler, caplog: pytest.LogCaptureFixture) -> None:
    compiler(WRITES_ITS_OUTPUT)
    assert build.machine_isas.__wrapped__() == ()
    assert library._open(build.Isa.PORTABLE, False, lambda *_: None) is None
    assert caplog.text.count("The CPU kernels are not used") == 2


def test_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "source_digest", lambda machine: "0123456789abcdef")
    monkeypatch.setattr(build.shutil, "which", lambda _: None)
    assert build.find_library("portable") is None
    assert "no C compiler" in build.why_no_kernels()


def test_a_cache_that_cannot_be_made(compiler: Compiler, tmp_path: Path) -> None:
    compiler(WRITES_ITS_OUTPUT)
    (tmp_path / "cache").write_text("a file where the folder should be")
    assert build.find_library("portable") is None


def test_a_user_without_a_home_keeps_nothing(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compiler(WRITES_ITS_OUTPUT)
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "")
    monkeypatch.setattr(Path, "expanduser", lambda _: (_ for _ in ()).throw(RuntimeError))
    assert build.find_library("portable") is None
    assert "their folder is /dev/null/quire, or in XDG_CACHE_HOME" in caplog.text
    with pytest.raises(ModelLoadError, match="'~nobody/x' does not exist"):
        find_model("~nobody/x")


def test_a_packaged_library_comes_first(compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = compiler(WRITES_ITS_OUTPUT)
    monkeypatch.setattr(build, "_HERE", tmp_path)
    packaged = tmp_path / "quire_cpu-0123456789abcdef-portable.so"
    packaged.write_text("packaged")
    assert build.find_library("portable") == packaged
    assert not log.exists()


def test_a_file_that_is_no_library_is_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"not machine code")
    for module in (library, build):
        monkeypatch.setattr(module, "find_library", lambda *_: broken)
    assert library._open(build.Isa.PORTABLE, False, lambda *_: None) is None
    assert build.machine_isas.__wrapped__() == ()


@pytest.fixture
def loaded() -> Iterator[library.Library]:
    found = library.native()
    if found is None:
        pytest.skip("no native library and no C compiler")
    yield found
    library.choose_kernels("auto")


def test_kernels_can_be_chosen(loaded: library.Library) -> None:
    library.choose_kernels("portable")
    chosen = library.native()
    assert chosen is not None
    assert chosen.isa is build.Isa.PORTABLE
    library.choose_kernels("off")
    assert library.native() is None
    library.choose_kernels("auto")
    assert library.native() is loaded


def test_the_best_set_is_the_fastest(loaded: library.Library) -> None:
    """Intel's processors multiply pairs of bfloat16 slower than floats."""
    is_intel = "GenuineIntel" in Path("/proc/cpuinfo").read_text(encoding="utf-8")
    rest = [
        isa
        for isa in build.machine_isas()
        if (isa is not build.Isa.AMX or build.tiles_fit()) and not (is_intel and isa is build.Isa.AVX512BF16)
    ]
    assert loaded.isa is build.best_isa() is max(rest)


def test_kernels_that_this_machine_does_not_have_are_refused(
    loaded: library.Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "machine_isas", lambda: (build.Isa.PORTABLE, build.Isa.AVX2))
    with pytest.raises(
        ConfigError, match=r"'avx512bf16'\. This machine, or its system, has no AVX512BF16; its best is AVX2"
    ):
        library.choose_kernels("avx512bf16")
    monkeypatch.setattr(library, "machine_isas", tuple)
    monkeypatch.setattr(library, "_loaded", {(build.Isa.AVX2, False): None})
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
        ("gemm_args", cut, "only one of both has the field next of struct gemm_args"),
    ],
)
def test_a_mirror_that_differs_from_its_structure_is_refused(
    name: str, change: Callable[[type[ctypes.Structure]], type[ctypes.Structure]], why: str
) -> None:
    resolve_name(layer.MIXERS["attention"])
    path = build.best_library()
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
