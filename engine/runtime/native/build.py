"""Finds the native library: in the package, in a cache, or by compiling it.

A file is trusted if its name has the digest of these sources. Compiling happens once a machine and takes some seconds;
the result is renamed into place, so processes that start together do not disturb one another. A failure is a line in
the debug log, and the callers use torch instead. Any thread; knows no torch.

setup.py puts the library into wheels.
"""

from __future__ import annotations

import hashlib
import logging
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import cache
from pathlib import Path

from engine.runtime.native.structs import layout_source
from engine.system.cache_folder import cache_folder

_HERE = Path(__file__).parent
_FLAGS = (
    "-O2",
    "-std=gnu11",
    "-fPIC",
    "-fvisibility=hidden",
    "-fno-math-errno",
    "-Wno-psabi",
    "-Werror=implicit-function-declaration",  # as newer compilers have it, so that older ones hide nothing
)
_COMPILERS = ("cc", "gcc", "clang")
_TIME_LIMIT_S = 300
_failed: set[Path] = set()  # libraries that this process could not compile, and does not try again
_log = logging.getLogger(__name__)

OnCompiled = Callable[[int, int], None]  # called with the files that are compiled, and all


def find_library(on_compiled: OnCompiled = lambda *_: None) -> Path | None:
    """Return the shared library of these sources, None if it is neither found nor compiled."""
    packaged, compiler = _packaged(), find_compiler()
    if packaged.exists():
        return packaged
    if compiler is None:
        _log.debug("no native kernels: none are packaged for this machine, and no compiler was found (%s)", _COMPILERS)
        return None
    try:
        return _compile_cached(compiler, on_compiled)
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        _log.debug("no native kernels: %s", error)
        return None


def must_compile() -> bool:
    """Return whether find_library will compile: a compiler exists, and no library does."""
    compiler = find_compiler()
    return compiler is not None and installed_library() is None and _cached(compiler) not in _failed


def installed_library() -> Path | None:
    """Return the library that needs no compiling: the package's, or the cache's."""
    compiler, packaged = find_compiler(), _packaged()
    if packaged.exists():
        return packaged
    cached = None if compiler is None else _cached(compiler)
    return cached if cached is not None and cached.exists() else None


def _packaged() -> Path:
    return _HERE / f"quire_cpu-{source_digest()}.so"


def find_compiler() -> str | None:
    """Return the path of a C compiler, None without one."""
    return next(filter(None, map(shutil.which, _COMPILERS)), None)


@cache
def source_digest() -> str:
    """Return a digest of the sources, the compiler's options and the kind of machine."""
    digest = hashlib.sha256(" ".join((*_FLAGS, platform.system(), platform.machine())).encode())
    for path in sorted((*_HERE.glob("*.c"), *_HERE.glob("*.h"), _HERE / "structs.py")):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def compile_library(
    compiler: str, target: Path, on_compiled: OnCompiled = lambda *_: None, flags: Sequence[str] = _FLAGS
) -> None:
    """Compile the sources in parallel and link.

    Raises RuntimeError with the compiler's message, OSError, or SubprocessError.
    """
    with tempfile.TemporaryDirectory(dir=target.parent) as folder, ThreadPoolExecutor() as workers:
        layout = Path(folder, "layout.c")
        layout.write_text(layout_source(), encoding="utf-8")
        sources = [*sorted(_HERE.glob("*.c")), layout]
        objects = [str(Path(folder, source.stem + ".o")) for source in sources]
        running = [
            workers.submit(_run, compiler, *flags, f"-I{_HERE}", "-c", "-o", made, str(source))
            for source, made in zip(sources, objects, strict=True)
        ]
        on_compiled(0, len(sources))
        for done, compiled in enumerate(as_completed(running), 1):
            compiled.result()
            on_compiled(done, len(sources))
        made = Path(folder, target.name)
        _run(compiler, "-shared", "-o", str(made), *objects, "-lm")
        made.replace(target)


def _run(*command: str) -> None:
    run = subprocess.run(command, capture_output=True, text=True, timeout=_TIME_LIMIT_S, check=False)  # noqa: S603 - our own
    if run.returncode != 0:
        raise RuntimeError(f"{command[0]} failed: {run.stderr[-2000:]}")


def _cached(compiler: str) -> Path:
    # The compiler is identified by its file: asking for its version would cost every start a process.
    about = Path(compiler).resolve().stat()
    key = hashlib.sha256(f"{compiler} {about.st_size} {about.st_mtime_ns}".encode()).hexdigest()[:8]
    return cache_folder() / f"quire_cpu-{source_digest()}-{key}.so"


def _compile_cached(compiler: str, on_compiled: OnCompiled) -> Path:
    target = _cached(compiler)
    if target in _failed:
        raise RuntimeError("they could not be compiled before")
    if not target.exists():
        _log.debug("compiling native kernels with %s", compiler)
        _failed.add(target)  # unless what follows succeeds
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        compile_library(compiler, target, on_compiled)
        _failed.remove(target)
    return target
