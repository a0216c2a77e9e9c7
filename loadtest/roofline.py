"""The machine's own limits, measured in the run that they stand beside: bytes read a second, and multiplications.

roofline.c is compiled by the machine's `cc` into a temporary folder; ctypes releases the interpreter lock, so Python
threads are the cores. Without a compiler there are no limits to compare with.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Barrier

_READ_BYTES = 256 << 20  # a core's, far beyond its caches
_TILE_BYTES = 1 << 16  # at least what roofline.c multiplies
_TIMES = 20_000  # tile products a measurement: some milliseconds, so that one of the repeats is undisturbed
_REPEATS = 30


@dataclass(frozen=True, slots=True)
class Roofline:
    """Limits of `num_threads` cores together; None where the processor has no such instruction or nothing measured."""

    source: str
    num_threads: int
    read_bytes_per_s: float | None
    bf16_flops: float | None
    int8_ops: float | None


def measure(num_threads: int) -> Roofline:
    """Measure for some seconds. Limits that cannot be measured are None."""
    if compiler := shutil.which("cc"):
        with tempfile.TemporaryDirectory() as folder:
            if library := _compile(compiler, Path(folder)):
                return _measure_c(library, num_threads)
    return Roofline("no C compiler", num_threads, None, None, None)


def _compile(compiler: str, folder: Path) -> ctypes.CDLL | None:
    target = folder / "roofline.so"
    source = Path(__file__).with_suffix(".c")
    command = [compiler, "-O3", "-march=native", "-std=gnu11", "-shared", "-fPIC", str(source), "-o", str(target)]
    if subprocess.run(command, capture_output=True, check=False).returncode:  # noqa: S603 - found by which
        return None
    library = ctypes.CDLL(str(target))
    library.roof_read.argtypes = [ctypes.c_void_p, ctypes.c_int64]
    library.roof_bf16.argtypes = library.roof_int8.argtypes = [ctypes.c_void_p, ctypes.c_int64]
    for function in (library.roof_read, library.roof_bf16, library.roof_int8):
        function.restype = ctypes.c_int64
    return library


def _measure_c(library: ctypes.CDLL, num_threads: int) -> Roofline:
    def read() -> Callable[[], int]:
        buffer = _ones(_READ_BYTES)
        return lambda: int(library.roof_read(ctypes.addressof(buffer), len(buffer)))

    def multiply(function: Callable[[int, int], int]) -> Callable[[], Callable[[], int]]:
        tiles = _ones(_TILE_BYTES)
        return lambda: lambda: int(function(ctypes.addressof(tiles), _TIMES))

    return Roofline(
        "roofline.c",
        num_threads,
        _rate(read, num_threads),
        _rate(multiply(library.roof_bf16), num_threads),
        _rate(multiply(library.roof_int8), num_threads),
    )


def _ones(num_bytes: int) -> ctypes.Array[ctypes.c_char]:
    """Return written memory: untouched pages would all be one page of zeros."""
    buffer = (ctypes.c_char * num_bytes)()
    ctypes.memset(buffer, 1, num_bytes)
    return buffer


def _rate(make: Callable[[], Callable[[], int]], num_threads: int) -> float | None:
    """Return the rate of all threads together, the best of some repeats, since other work only lowers it."""
    barrier = Barrier(num_threads)

    def work() -> list[tuple[int, float]]:
        run = make()
        measured = []
        for _ in range(_REPEATS):
            barrier.wait()
            started = time.perf_counter()
            done = run()
            measured.append((done, time.perf_counter() - started))
        return measured

    with ThreadPoolExecutor(num_threads) as pool:
        threads = [future.result() for future in [pool.submit(work) for _ in range(num_threads)]]
    rates = [sum(done for done, _ in repeat) / max(took for _, took in repeat) for repeat in zip(*threads, strict=True)]
    return max(rates) or None
