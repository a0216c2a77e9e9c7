"""What must be settled before any test module is imported.

Triton decides when it is imported whether its kernels run on a device or under its interpreter, and others than our tests
import it (torch's compiler does). So without a device the interpreter is chosen here; tests/kernels/ mends what it lacks.

torch computes on one thread, because a model of a test is too small for two, and two workers of pytest have two cores: their
threads would wait for each other most of the time. Tests that need more threads set them; the native library's stay as they are.

Bytecode is kept even where the environment says otherwise: every worker collects all files, and hundreds of child processes
import the same packages, which would otherwise be compiled each time.

No test may depend on the machine's speed: Hypothesis gets no deadline, and httpx waits as long as every other test does. It
reads its certificates once: it would do so for each request without a client, which takes longer than most requests.
Nothing that collecting tests makes is garbage: the modules and items of ten thousand tests are most of a process, and no pass
of the garbage collector looks at them again.

The native library is compiled before any worker needs it, once and in any time. Tests of it are skipped only where there is
no compiler: a library that does not compile ends the run.

`make clients` runs tests in an environment without most of these libraries.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Generator, Iterable
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from typing import Any

import pytest

from tests.patience import PATIENCE_S

sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

if find_spec("torch"):
    import torch

    torch.set_num_threads(1)
    if find_spec("triton") and not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"

if find_spec("hypothesis"):
    from hypothesis import HealthCheck, settings

    settings.register_profile("anywhere", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("anywhere")

if find_spec("httpx"):
    from httpx._config import DEFAULT_TIMEOUT_CONFIG  # the one object behind every `timeout` that is not given: 5 s
    from httpx._transports import default

    default.create_ssl_context = cache(default.create_ssl_context)
    for phase in ("connect", "read", "write", "pool"):
        setattr(DEFAULT_TIMEOUT_CONFIG, phase, PATIENCE_S)


def pytest_configure(config: pytest.Config) -> None:
    """Compile the native library, if this process is not a worker."""
    if hasattr(config, "workerinput") or not find_spec("torch"):
        return
    from engine.runtime.native import build
    from tests.cpu.tile_model import known_to_build

    compiler = build.find_compiler()
    if compiler is None:
        return

    def compile_missing(names: Iterable[str]) -> None:
        build.compile_libraries(compiler, [name for name in names if build.installed_library(name) is None])

    build._TIME_LIMIT_S = 24 * 3600  # a daemon that starts gives up sooner
    try:  # all that the wheel has, because libraries that are compiled together share most of their files
        with suppress(RuntimeError), known_to_build():  # an old compiler does not know them all
            compile_missing(build.all_names())
        compile_missing(["portable", *(isa.name.lower() for isa in build.machine_isas())])
    except RuntimeError as error:
        pytest.exit(f"the native library does not compile: {error}", returncode=1)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
