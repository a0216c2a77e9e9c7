"""Blocking calls beside the event loop, and calls of other projects' code."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from engine.core.errors import ModelLoadError
from engine.system.calls import foreign_code, on_thread
from tests.patience import PATIENCE_S

ROOT = Path(__file__).parents[2]


async def test_results_and_errors_arrive() -> None:
    assert await asyncio.wrap_future(on_thread("call", lambda: divmod(7, 2))) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        await asyncio.wrap_future(on_thread("call", lambda: divmod(7, 0)))


async def test_the_result_of_a_cancelled_call_is_dropped() -> None:
    go, gone = threading.Event(), threading.Event()

    def call() -> None:
        go.wait()
        gone.set()

    task = asyncio.ensure_future(asyncio.wrap_future(on_thread("call", call)))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    go.set()
    await asyncio.to_thread(gone.wait)


def test_the_process_ends_while_a_call_hangs() -> None:
    code = """
import asyncio, threading
from engine.core.errors import ModelLoadError
from engine.system.calls import foreign_code, on_thread
async def main():
    task = asyncio.ensure_future(asyncio.wrap_future(on_thread("call", threading.Event().wait)))
    await asyncio.sleep(0)
    task.cancel()
asyncio.run(main())
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=PATIENCE_S, check=True)


def test_any_error_of_foreign_code_is_the_refusal_unless_it_is_passed() -> None:
    def refuse(error: Exception) -> ModelLoadError:
        return ModelLoadError(f"it cannot be read: {error}.")

    with pytest.raises(ModelLoadError, match="it cannot be read: 'x'") as refused, foreign_code(refuse):
        {}["x"]
    assert isinstance(refused.value.__cause__, KeyError)
    with pytest.raises(MemoryError), foreign_code(refuse, (MemoryError,)):
        raise MemoryError
    with pytest.raises(KeyboardInterrupt), foreign_code(refuse):
        raise KeyboardInterrupt
