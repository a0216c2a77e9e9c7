"""Checks that Triton can compile kernels here, before minutes of loading. Start-up thread.

Triton has its own assembler, but compiles the launch code of a kernel with the machine's C compiler and Python's
headers, and keeps the results in a folder.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path

from engine.core.errors import ConfigError

_WHY = "CUDA kernels are launched through code that is compiled on this machine"
_TIME_LIMIT_S = 60.0  # seconds for a program of one line, on a busy machine


def check_toolchain() -> None:
    """Raise ConfigError if kernels cannot be compiled or kept."""
    compiler, headers = _find_compiler(), Path(_header_folder())
    if not (headers / "Python.h").is_file():
        raise ConfigError(
            f"{_WHY}, and Python's headers are not in {headers}; install them (Debian: python3-dev), or use --device cpu."
        )
    _try_compiler(compiler, headers)
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
