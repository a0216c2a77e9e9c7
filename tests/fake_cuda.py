"""Runs the tests of a GPU on the device of fake_device.py, where there is none: whole engines, and their threads.

    pytest -p tests.fake_cuda tests/gpu

It has no memory limit, and no speed.
"""

from __future__ import annotations

import os
import threading
from contextlib import ExitStack
from dataclasses import replace

_for_good = ExitStack()


def install() -> None:
    """Make the device. Nothing undoes it."""
    os.environ["TRITON_INTERPRET"] = "1"
    from engine.runtime.cuda import available, toolchain
    from tests.fake_device import fake_device, watched
    from tests.kernels import conftest  # noqa: F401 - mends the interpreter, and watches it, while there is no device

    available.has_triton = lambda device: device.type != "cpu"  # as where kernels are compiled
    toolchain.TOOLS.pop("GPU driver")
    run = threading.Thread.run

    def watched_run(self: threading.Thread) -> None:
        with watched():
            run(self)

    threading.Thread.run = watched_run  # type: ignore[method-assign]
    _for_good.enter_context(fake_device())
    _warm_up_shortly()


def _warm_up_shortly() -> None:
    """Have an engine start with steps of a few tokens: the interpreter takes half a minute for hundreds."""
    from engine.startup import build

    full_steps, other_steps = build.full_steps, build.other_steps
    build.full_steps = lambda config, size: full_steps(
        replace(config, max_num_batched_tokens=config.max_num_seqs), size
    )
    build.other_steps = lambda config: other_steps(replace(config, max_num_batched_tokens=8))


install()
