"""Programs that begin with the imports of a daemon already made: they are forks of one process that has made them.

Imports are two of the three seconds of a core that a start takes, the same ones in every start. What a start imports itself,
and beside what, is tested where exec begins it: tests/daemon/test_package.py, and the table of imports in test_levers.py.
"""

from __future__ import annotations

import atexit
import os
import runpy
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from multiprocessing import get_context
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any

CONTEXT = get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.preloaded"])


class Forked:
    """A running program, with that part of subprocess.Popen which tests of daemons use."""

    def __init__(self, program: str, argv: Sequence[str], cwd: Path, env: Mapping[str, str]) -> None:
        """`program` is a file of Python, or the name of a module."""
        read, write = os.pipe()
        self.stderr = os.fdopen(read)
        self.returncode: int | None = None
        arguments = (program, [*argv], str(cwd), dict(env), DupFd(write))
        self._process = CONTEXT.Process(target=_run, args=arguments)
        self._process.start()
        os.close(write)
        assert self._process.pid is not None
        self.pid = self._process.pid

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end, and return the exit status."""
        self._process.join(timeout)
        self.returncode = self._process.exitcode
        if self.returncode is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout or 0.0)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[None, str]:
        """Wait for its end, and return what it wrote to standard error; it is killed after the timeout."""
        patience = threading.Timer(threading.TIMEOUT_MAX if timeout is None else timeout, self.kill)
        patience.start()
        try:
            written = self.stderr.read()
        finally:
            patience.cancel()
            self.stderr.close()
        self.wait(timeout)
        return None, written

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self._process.is_alive():
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Ask it to end."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it."""
        self.send_signal(signal.SIGKILL)


def _run(program: str, argv: list[str], cwd: str, env: dict[str, str], stderr: Any) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup, beneath which the tests may run, would have it ignored
    end = stderr.detach()
    os.dup2(end, 2)
    os.close(end)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    sys.argv = [program, *argv]
    try:
        if program.endswith(".py"):
            runpy.run_path(program, run_name="__main__")
        else:
            runpy.run_module(program, run_name="__main__", alter_sys=True)
    finally:
        atexit._run_exitfuncs()  # a process that multiprocessing began ends without them
