"""Finds the native library of an instruction set: in the package, in a cache, or by compiling it.

A file is trusted if its name has the digest of these sources. A start compiles only the library that it uses, which takes some
seconds, once a machine; processes that start together wait for the first of them. A failure is a warning in the log, and
the callers use torch instead. Any thread; knows no torch.

setup.py puts the libraries of all instruction sets into wheels.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from enum import IntEnum
from functools import cache, partial
from itertools import chain
from pathlib import Path

from engine.runtime.native.structs import layout_source
from engine.system.cache_folder import cache_folder
from engine.system.host_limits import multiplies_bfloat16, processor_name, usable_cpus
from engine.system.regular_file import read_json


class Isa(IntEnum):
    """Instruction sets, in rising order on most machines, which may lack one that is not their best."""

    PORTABLE = 0
    AVX2 = 1
    AVXVNNI = 2
    AVX512 = 3
    AVX512VNNI = 4
    AVX512BF16 = 5
    AMX = 6
    NEON_DOT = 7
    NEON_BF16 = 8


CHOOSER = "isa"  # the name of a library beside those of instruction sets, which says what the machine has
_HERE = Path(__file__).parent
_MACHINE = platform.machine()
_AVX2 = "-mavx2 -mfma -mf16c -mprfchw"  # Haswell, Zen; where PREFETCHW is missing it does nothing
_AVX512 = f"{_AVX2} -mavx512f -mavx512bw -mavx512dq -mavx512vl"  # Skylake-SP
_AVX512VNNI = f"{_AVX512} -mavx512vnni"  # Cascade Lake, Ice Lake-SP
_AVX512BF16 = f"{_AVX512VNNI} -mavx512bf16"  # Cooper Lake, Zen 4
_OPTIONS: Mapping[str, Mapping[str, str]] = {  # of machines, and of their instruction sets, for kernels_*.c
    "x86_64": {
        "avx2": _AVX2,
        "avxvnni": f"{_AVX2} -mavxvnni",  # Alder Lake
        "avx512": _AVX512,
        "avx512vnni": _AVX512VNNI,
        "avx512bf16": _AVX512BF16,
        "amx": f"{_AVX512BF16} -mamx-tile -mamx-bf16 -mamx-int8",  # Sapphire Rapids
    },
    "aarch64": {  # where "portable" is NEON
        "neon_dot": "-march=armv8.2-a+dotprod",  # Cortex-A76, Neoverse N1
        "neon_bf16": "-march=armv8.2-a+dotprod+i8mm+bf16",  # Neoverse V1 and N2
    },
}
PORTABLE_BITS = "-portable-bits"  # ends the names of libraries that compute the same bits on every instruction set
_FLAGS = (
    "-O2",
    "-std=gnu11",
    "-fPIC",
    "-fvisibility=hidden",
    "-fno-math-errno",
    "-Wno-psabi",
    "-Werror=implicit-function-declaration",  # as newer compilers have it, so that older ones hide nothing
)
# With these GCC takes half the time for the two files that take longest, for code that is 1 to 2 % slower. Attention is not
# among them, which would lose 3 %, nor is packing, 40 %.
_QUICK = (
    "-O1",
    "-fexpensive-optimizations",  # fuses products and sums
    "-fcaller-saves",
    "-fstrict-aliasing",
    "-finline-functions",
    "-finline-small-functions",
    "-falign-loops",
    "-falign-functions",
)
_QUICK_FILES = ("kernels_products.c", "kernels_rows.c")
_USED_BY = dict.fromkeys(("vnni", "amx"), ("kernels_attend.c", "kernels_products.c"))  # other files stay the same
_LONGEST = ("kernels_products.c", "kernels_attend.c", "quant_pack.c", "kernels_rows.c")  # the first to be compiled
_COMPILERS = ("cc", "gcc", "clang")
_TIME_LIMIT_S = 300
_log = logging.getLogger(__name__)

OnCompiled = Callable[[int, int], None]  # called with the files that are compiled, and all


def find_library(name: str, on_compiled: OnCompiled = lambda *_: None) -> Path | None:
    """Return the library of an instruction set, or the chooser; None if it is neither found nor compiled."""
    found, compiler = installed_library(name), find_compiler()
    if found is not None:
        return found
    if compiler is None:
        return None
    try:
        return compile_libraries(compiler, [name], on_compiled)[0]
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        _log.warning(
            "The CPU kernels were not compiled: %s (their folder is %s, or in XDG_CACHE_HOME)", error, cache_folder()
        )
        return None


def type_in_16_bits(setting: str) -> str:
    """Return the dtype of models of 16 bits on this CPU, with a setting of --cpu-kernels.

    Kernels widen bfloat16 in registers, where a machine does not multiply it: half the memory, and decoding is up to 1.6 times
    as fast as in float32. torch's operations are several times slower there.
    """
    has_kernels = setting != "off" and (find_compiler() is not None or best_library() is not None)
    return "bfloat16" if has_kernels or multiplies_bfloat16() else "float32"


def why_no_kernels() -> str:
    """Return why there are no libraries, as the end of a sentence."""
    if find_compiler() is None:
        return "there are no native kernels for this machine and no C compiler to make them; install one (cc, gcc or clang)"
    return "there are no native kernels: --cpu-kernels is off, or they did not compile, as a warning in the log says"


def installed_library(name: str) -> Path | None:
    """Return a library that needs no compiling: the package's, or the cache's."""
    compiler = find_compiler()
    folders = [_HERE] if compiler is None else [_HERE, _cache_of(compiler)]
    return next(filter(Path.exists, (folder / library_name(name) for folder in folders)), None)


@cache
def machine_isas() -> tuple[Isa, ...]:
    """Return what the machine can run and the compiler knows, the fastest last; none without any library."""
    chooser = find_library(CHOOSER)
    try:
        if chooser is not None:
            rank = ctypes.CDLL(str(chooser)).quire_isa_rank
            return tuple(sorted(filter(rank, Isa), key=rank))
    except OSError as error:  # such as a folder from which nothing may be loaded
        _log.warning("The CPU kernels are not used: %s", error)
    return ()


def best_isa() -> Isa | None:
    """Return what `--cpu-kernels auto` stands for: AMX only where a start has found its sums as expected (tiles.py)."""
    return next((isa for isa in reversed(machine_isas()) if isa is not Isa.AMX or tiles_fit()), None)


@cache
def tile_facts() -> dict[str, bool]:
    """Return whether tiles have the sums expected, by the name of a processor."""
    try:
        return dict(read_json(tile_file()))
    except (OSError, ValueError, TypeError):
        return {}


def tiles_fit() -> bool:
    """Return whether a start has found that tiles have the sums expected."""
    return tile_facts().get(processor_name(), False)


def tiles_are_open() -> bool:
    """Return whether the machine has tiles, and no start has looked at their sums."""
    return Isa.AMX in machine_isas() and processor_name() not in tile_facts()


def tile_file() -> Path:
    """Return the file that keeps these facts of this library."""
    return cache_folder() / f"tiles-{source_digest()}.json"


def best_library() -> Path | None:
    """Return the library of that instruction set, if it needs no compiling."""
    isa = best_isa()
    return None if isa is None else installed_library(isa.name.lower())


def find_compiler() -> str | None:
    """Return the path of a C compiler, None without one."""
    return next(filter(None, map(shutil.which, _COMPILERS)), None)


@cache
def source_digest(machine: str = _MACHINE) -> str:
    """Return a digest of the sources, the compiler's options and the kind of machine."""
    digest = hashlib.sha256(f"{_FLAGS} {_QUICK} {_OPTIONS} {platform.system()} {machine}".encode())
    for path in sorted((*_HERE.glob("*.c"), *_HERE.glob("*.h"), _HERE / "structs.py")):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def all_names(machine: str = _MACHINE) -> list[str]:
    """Return the names of the libraries that machines of a kind may need."""
    return [CHOOSER, "portable", *_OPTIONS.get(machine, ())]


def library_name(name: str, machine: str = _MACHINE) -> str:
    """Return the name of a library's file."""
    return f"quire_cpu-{source_digest(machine)}-{name}.so"


def _cache_of(compiler: str) -> Path:
    # The compiler is identified by its file: asking for its version would cost every start a process.
    about = Path(compiler).resolve().stat()
    key = hashlib.sha256(f"{compiler} {about.st_size} {about.st_mtime_ns}".encode()).hexdigest()[:8]
    return cache_folder() / f"compiled-{key}"


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Wait for other processes that compile into a folder; the system ends the wait when they end."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def compile_libraries(
    compiler: str, names: Iterable[str], on_compiled: OnCompiled = lambda *_: None, machine: str = _MACHINE
) -> list[Path]:
    """Return libraries in the cache, of which those that do not exist are compiled, in parallel; what they share, once.

    Raises RuntimeError with the compiler's message, OSError, or SubprocessError.
    """
    folder = _cache_of(compiler)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    made = {name: folder / library_name(name, machine) for name in names}
    command = (compiler, *_FLAGS, f"-I{_HERE}", "-c")
    quick = dict.fromkeys(_QUICK_FILES if "gcc" in Path(compiler).resolve().name else (), _QUICK)
    with (
        _alone_in(folder),
        tempfile.TemporaryDirectory(dir=folder) as scratch,
        ThreadPoolExecutor(usable_cpus()) as workers,
    ):
        missing = {name: _units(name, machine, Path(scratch)) for name, path in made.items() if not path.exists()}
        objects = {unit: str(Path(scratch, f"{number}.o")) for number, unit in enumerate(chain(*missing.values()))}
        running = [
            workers.submit(_run, *command, *quick.get(source.name, ()), *options.split(), "-o", target, str(source))
            for (source, options), target in objects.items()
        ]
        try:
            on_compiled(0, len(running))
            for done, compiled in enumerate(as_completed(running), 1):
                compiled.result()
                on_compiled(done, len(running))
        except BaseException:  # any, such as of a start that is stopped: it waits for the files that have begun
            workers.shutdown(wait=False, cancel_futures=True)
            raise
        for name, units in missing.items():
            linked = Path(scratch, name)
            _run(compiler, "-shared", "-o", str(linked), *(objects[unit] for unit in units), "-lm")
            with linked.open("rb") as file:
                os.fsync(file.fileno())  # else a loss of power leaves the name of an empty file
            linked.replace(made[name])
    return list(made.values())


def _units(name: str, machine: str, scratch: Path) -> list[tuple[Path, str]]:
    """Return the files that a library is compiled of and the options of each, the longest first."""
    chooser, layout = _HERE / "isa.c", scratch / "layout.c"
    if name == CHOOSER:
        return [(chooser, "")]
    layout.write_text(layout_source(), encoding="utf-8")
    isa, is_portable, _ = name.partition(PORTABLE_BITS)
    shared = "-DPORTABLE_BITS -ffp-contract=off" if is_portable else ""
    options = _OPTIONS.get(machine, {}).get(isa, "").split()
    longest = [_HERE / each for each in _LONGEST]
    others = sorted({*_HERE.glob("*.c"), layout} - {*longest, chooser})
    return [(path, " ".join((shared, *filter(partial(_affects, path.name), options)))) for path in (*longest, *others)]


def _affects(file: str, option: str) -> bool:
    """Whether an option for an instruction set changes what a file is compiled to."""
    return file.startswith("kernels_") and all(file in files for word, files in _USED_BY.items() if word in option)


def _run(*command: str) -> None:
    run = subprocess.run(command, capture_output=True, text=True, timeout=_TIME_LIMIT_S, check=False)  # noqa: S603 - our own
    if run.returncode != 0:
        raise RuntimeError(f"{command[0]} failed: {run.stderr[-2000:]}")
