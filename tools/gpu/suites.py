"""Runs the tests on the device, in several processes.

A process that exceeds its time is interrupted, and pytest reports the tests until then. Warnings are not errors here:
the versions of the machine's packages may deprecate what the tests use.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ET  # of files that pytest has just written
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from tools.gpu.figures import Figure
from tools.gpu.task import Task

SHARE_VARIABLE = "GPU_TEST_SHARE"  # "2/12": every twelfth test from the third
_MOST_PROCESSES = 12
# On a device that is made of a CPU: all tests are collected, and these run.
_REHEARSED_ENGINE = (
    "-p",
    "tests.fake_cuda",
    "-k",
    "(graphs and depth1) or (preempted and depth0) or come_back or (tower and Qwen) or mpnet",
)
_REHEARSED_KERNELS = ("-p", "tests.fake_cuda", "-k", "this_machine_has_triton or large_numbers or ranks")
_GRACE_S = 8.0  # after an interrupt; less than that of a part
_INTERRUPTED = 2  # pytest's exit status


class _Process(NamedTuple):
    """One pytest, and the report that it writes."""

    handle: subprocess.Popen[bytes]
    report: Path


def run_engine(task: Task) -> None:
    """Run tests/gpu, those of memory last and alone."""
    memory = "tests/gpu/test_memory_cuda.py"
    chosen = _REHEARSED_ENGINE if task.is_rehearsal else ()
    _run(task, ["tests/gpu", f"--ignore={memory}", *chosen], 2 if task.is_rehearsal else _num_processes())
    if not task.is_rehearsal:  # of a device that is made of a CPU nothing can be taken
        _run(task, [memory], 1)


def run_kernels(task: Task) -> None:
    """Run tests/kernels; Triton's compiler needs a core a process."""
    chosen = _REHEARSED_KERNELS if task.is_rehearsal else ()
    # It compiles all kernels for three kinds of GPUs, a minute of three cores: this one's are compiled where they are launched.
    others = "--ignore=tests/kernels/test_triton_compiles.py"
    _run(task, ["tests/kernels", others, *chosen], 2 if task.is_rehearsal else _num_processes())


def _num_processes() -> int:
    return max(1, min(_MOST_PROCESSES, (os.cpu_count() or 2) - 2))


def pytest_configure() -> None:
    """As a pytest plugin: accept interrupts, which background shells ignore."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[object]) -> None:
    """As a pytest plugin: keep this process's share of the tests."""
    share = os.environ.get(SHARE_VARIABLE)
    if share:
        index, _, num = share.partition("/")
        items[:] = items[int(index) :: int(num)]


def _run(task: Task, arguments: Sequence[str], num_processes: int) -> None:
    processes = [_start(task, arguments, index, num_processes) for index in range(num_processes)]
    try:
        for process in processes:
            process.handle.wait()
    finally:  # also if the part exceeds its time
        _interrupt(processes)
        _report(task, arguments[0], processes)


def _start(task: Task, arguments: Sequence[str], index: int, num: int) -> _Process:
    report = task.scratch / f"{task.name}-{Path(arguments[0]).stem}-{index}.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "tools.gpu.suites"]
    command += ["-o", "addopts=", "-W", "default", "--tb=short", f"--junitxml={report}", *arguments]
    environ = os.environ | {SHARE_VARIABLE: f"{index}/{num}"}
    with report.with_suffix(".log").open("wb") as log:
        return _Process(subprocess.Popen(command, env=environ, stdout=log, stderr=subprocess.STDOUT), report)  # noqa: S603 - ours


def _interrupt(processes: Sequence[_Process]) -> None:
    running = [process.handle for process in processes if process.handle.poll() is None]
    for handle in running:
        handle.send_signal(signal.SIGINT)
    deadline = time.monotonic() + _GRACE_S
    for handle in running:
        with suppress(subprocess.TimeoutExpired):
            handle.wait(max(0.0, deadline - time.monotonic()))
        handle.kill()


def _report(task: Task, name: str, processes: Sequence[_Process]) -> None:
    counts: Counter[str] = Counter()
    for handle, report in processes:
        status = handle.wait()
        if status not in (0, 1, 5):  # passed, some failed, none in this share
            outcome = "was interrupted" if status == _INTERRUPTED else f"ended with status {status}"
            task.notebook.fail(f"{name}: pytest {outcome}:\n{task.log_tail(report.with_suffix('.log'))}")
        if report.exists():
            counts += _read(task, report)
            # The report has the interrupted test as passed.
            counts["passed"] -= status == _INTERRUPTED
    task.notebook.detail(f"{name}: outcomes", dict(counts))
    for outcome in ("passed", "failed", "skipped"):
        less = outcome != "passed"
        task.notebook.figure(Figure(f"{name}: {outcome}", counts[outcome], "tests", less_is_better=less))


def _read(task: Task, report: Path) -> Counter[str]:
    counts: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    for case in ET.parse(report).getroot().iter("testcase"):  # noqa: S314 - our own pytest's
        name = f"{case.get('classname')}::{case.get('name')}"
        wrong = [child for child in case if child.tag in ("failure", "error")]
        skipped = case.find("skipped")
        if wrong:
            error = (wrong[0].text or wrong[0].get("message") or "").strip()[-1500:]
            task.notebook.fail(f"{name}\n{error}")
            counts["failed"] += 1
        elif skipped is not None:
            counts["skipped"] += 1
            reasons[str(skipped.get("message"))] += 1
        else:
            counts["passed"] += 1
    for reason, num in reasons.items():
        task.notebook.note(f"{num} skipped: {reason}")
    return counts
