"""The tests on the device: tests/kernels in several processes side by side, tests/gpu in one, which measures memory.

pytest is told to treat warnings as what they are: these tests run on whatever versions a machine has, and another
version's deprecations are no fault of a kernel.
"""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as ET  # of files that our own pytest has just written
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from loadtest.gpu.figures import Figure
from loadtest.gpu.task import Task

SHARE_VARIABLE = "GPU_TEST_SHARE"  # "2/12": every twelfth test from the third
_MOST_PROCESSES = 12


def run_kernels(task: Task) -> None:
    """tests/kernels; most of their time is Triton's compiler, which has one core a process."""
    num = 2 if task.is_rehearsal else max(1, min(_MOST_PROCESSES, (os.cpu_count() or 2) - 2))
    chosen = ["-k", "this_machine_has_triton or large_numbers"] if task.is_rehearsal else []
    _run(task, ["tests/kernels", *chosen], num)


def run_engine(task: Task) -> None:
    """tests/gpu."""
    _run(task, ["tests/gpu"], 1)


def pytest_collection_modifyitems(items: list[object]) -> None:
    """As a pytest plugin: keep this process's share of the tests."""
    share = os.environ.get(SHARE_VARIABLE)
    if share:
        index, _, num = share.partition("/")
        items[:] = items[int(index) :: int(num)]


def _run(task: Task, arguments: Sequence[str], num_processes: int) -> None:
    processes = []
    for index in range(num_processes):
        report = task.scratch / f"{task.name}-{index}.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "loadtest.gpu.suites"]
        command += ["-o", "addopts=", "-W", "default", "--tb=short", f"--junitxml={report}", *arguments]
        environ = os.environ | {SHARE_VARIABLE: f"{index}/{num_processes}"}
        with report.with_suffix(".log").open("wb") as log:
            process = subprocess.Popen(command, env=environ, stdout=log, stderr=subprocess.STDOUT)  # noqa: S603 - ours
        processes.append((process, report))
    try:
        statuses = [process.wait() for process, _ in processes]
    finally:
        for process, _ in processes:
            if process.poll() is None:
                process.kill()
    counts: Counter[str] = Counter()
    for status, (_, report) in zip(statuses, processes, strict=True):
        if status not in (0, 1, 5):  # passed, some failed, none in this share
            task.notebook.fail(f"pytest ended with status {status}:\n{task.log_tail(report.with_suffix('.log'))}")
        if report.exists():
            counts += _read(task, report)
    task.notebook.detail("outcomes", dict(counts))
    for outcome in ("passed", "failed", "skipped"):
        less = outcome != "passed"
        task.notebook.figure(Figure(f"{arguments[0]}: {outcome}", counts[outcome], "tests", less_is_better=less))


def _read(task: Task, report: Path) -> Counter[str]:
    counts: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    for case in ET.parse(report).getroot().iter("testcase"):  # noqa: S314 - our own pytest's
        name = f"{case.get('classname')}::{case.get('name')}"
        wrong = [child for child in case if child.tag in ("failure", "error")]
        skipped = case.find("skipped")
        if wrong:
            told = (wrong[0].text or wrong[0].get("message") or "").strip()[-1500:]
            task.notebook.fail(f"{name}\n{told}")
            counts["failed"] += 1
        elif skipped is not None:
            counts["skipped"] += 1
            reasons[str(skipped.get("message"))] += 1
        else:
            counts["passed"] += 1
    for reason, num in reasons.items():
        task.notebook.note(f"{num} skipped: {reason}")
    return counts
