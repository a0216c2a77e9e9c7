"""Checks that Triton can compile and launch kernels here, before minutes of loading. Start-up thread.

Triton has its own assembler, but compiles the launch code of a kernel with the machine's C compiler and Python's
headers, links it with the driver, and keeps the results in a folder. Each `find_` returns what it found for a table, and
raises ConfigError with what to do.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Callable
from pathlib import Path

from engine.core.errors import ConfigError

_WHY = "CUDA kernels are launched through code that is compiled on this machine"
_DRIVER = "libcuda.so.1"
_TIME_LIMIT_S = 60.0  # seconds for a program of one line, on a busy machine


def check_toolchain() -> None:
    """Raise ConfigError if kernels cannot be compiled, launched or kept."""
    for find in TOOLS.values():
        find()


def find_compiler() -> str:
    """Return the compiler and Python's headers, which compile together."""
    compiler, headers = _find_compiler(), Path(_header_folder())
    if not (headers / "Python.h").is_file():
        raise ConfigError(
            f"{_WHY}, and Python's headers are not in {headers}; install them (Debian: python3-dev), or use --device cpu."
        )
    _try_compiler(compiler, headers)
    return f"{compiler}, with Python's headers in {headers}"


def find_assembler() -> str:
    """Return the version of the assembler that Triton runs."""
    path = os.environ.get("TRITON_PTXAS_PATH") or str(_triton_folder() / "backends" / "nvidia" / "bin" / "ptxas")
    try:
        run = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=_TIME_LIMIT_S, check=True)  # noqa: S603 - what Triton runs
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(
            f"CUDA kernels are assembled by {path}, which does not run ({error}); install the package triton again, or set "
            "the environment variable TRITON_PTXAS_PATH to the ptxas of a CUDA toolkit."
        ) from None
    version = re.search(r"release ([\d.]+)", run.stdout)
    return f"ptxas {version[1] if version else 'of an unknown version'}, {path}"


def find_driver() -> str:
    """Return the folder of the driver's library, which Triton looks for in the same places."""
    named = os.environ.get("TRITON_LIBCUDA_PATH")
    folders = [named] if named else [*_linked_folders(), *os.environ.get("LD_LIBRARY_PATH", "").split(":")]
    for folder in filter(None, folders):
        if Path(folder, _DRIVER).exists():
            return f"{_DRIVER} in {folder}"
    places = named or "what `/sbin/ldconfig -p` lists, and not in LD_LIBRARY_PATH"
    raise ConfigError(
        f"CUDA kernels are linked with the driver's {_DRIVER}, which is not in {places}; run ldconfig as root, or set the "
        "environment variable TRITON_LIBCUDA_PATH to its folder."
    )


def find_cache() -> str:
    """Return the folder of compiled kernels, which can be written."""
    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(
            f"Compiled CUDA kernels are kept in {folder}, which cannot be written to ({error.strerror}); set the "
            "environment variable TRITON_CACHE_DIR to a folder that can."
        ) from None
    return str(folder)


TOOLS: dict[str, Callable[[], str]] = {
    "GPU compiler": find_compiler,
    "GPU assembler": find_assembler,
    "GPU driver": find_driver,
    "cache of GPU kernels": find_cache,
}


def _triton_folder() -> Path:
    found = importlib.util.find_spec("triton")
    return Path(found.origin).parent if found is not None and found.origin else Path("triton")


def _linked_folders() -> list[str]:
    """Return the folders in which the linker finds the driver's library."""
    try:
        run = subprocess.run(
            ["/sbin/ldconfig", "-p"], capture_output=True, text=True, timeout=_TIME_LIMIT_S, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(
            f"Triton finds the driver's {_DRIVER} by `/sbin/ldconfig -p`, which does not run ({error}); install it (Debian: "
            "libc-bin), or set the environment variable TRITON_LIBCUDA_PATH to the library's folder."
        ) from None
    return [str(Path(line.split()[-1]).parent) for line in run.stdout.splitlines() if _DRIVER in line]


def cache_folder() -> Path:
    """Return the folder in which Triton keeps what it compiles."""
    named = os.environ.get("TRITON_CACHE_DIR")
    home = os.environ.get("TRITON_HOME") or Path.home()
    return Path(named) if named else Path(home, ".triton", "cache")


def _find_compiler() -> str:
    """Return the compiler that Triton will choose."""
    named = os.environ.get("CC")
    if named is not None:
        if shutil.which(named) is None:
            raise ConfigError(
                f"{_WHY}, and the environment variable CC is {named!r}, which is no command here; set it to a C compiler, "
                "or unset it."
            )
        return named
    found = next(filter(None, map(shutil.which, ("gcc", "clang"))), None)
    if found is None:
        raise ConfigError(
            f"{_WHY}, and it has no C compiler: neither gcc nor clang, nor does the environment variable CC name one; "
            "install one (Debian: gcc libc6-dev), or use --device cpu."
        )
    return found


def _header_folder() -> str:
    """Return the header folder as Triton finds it; Debian's default scheme has no headers."""
    scheme = sysconfig.get_default_scheme()
    return sysconfig.get_paths(scheme="posix_prefix" if scheme == "posix_local" else scheme)["include"]


def _try_compiler(compiler: str, headers: Path) -> None:
    """Raise ConfigError unless the compiler links a library that includes Python's headers."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "probe.c")
        source.write_text("#include <Python.h>\n#include <stdio.h>\n")
        command = [compiler, str(source), "-shared", "-fPIC", f"-I{headers}", "-o", str(Path(folder, "probe.so"))]
        try:
            run = subprocess.run(command, capture_output=True, text=True, timeout=_TIME_LIMIT_S, check=False)  # noqa: S603 - what Triton runs
        except (OSError, subprocess.TimeoutExpired) as error:
            complaint = str(error)
        else:
            if run.returncode == 0:
                return
            lines = [line for line in run.stderr.splitlines() if "error" in line] or run.stderr.splitlines()
            complaint = lines[0] if lines else f"status {run.returncode}"
    raise ConfigError(
        f"{_WHY}, and {compiler} does not compile a library for Python ({complaint}); install what it lacks (Debian: "
        "libc6-dev, python3-dev), or use --device cpu."
    )
