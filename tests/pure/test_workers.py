"""Runs of tests in forks: each test is told of once, with what it wrote, and none is lost without a word."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

from tests.patience import PATIENCE_S

ROOT = Path(__file__).parents[2]
MANY = """
import os
import pytest

about = os.open("/proc/self/stat", os.O_RDONLY)

@pytest.fixture(scope="session")
def once(tmp_path_factory):
    folder = tmp_path_factory.mktemp("once")
    yield folder
    print("taken down in", folder.parent.name)

def test_folders(once, tmp_path):
    assert tmp_path.parent.name.startswith("worker")

@pytest.mark.parametrize("number", range(9))
def test_output(number):
    os.write(1, b"told of %d;" % number)
    assert number != 7

def test_of_which_process_a_file_tells():
    assert os.read(about, 9).startswith(b"%d " % os.getpid())

@pytest.mark.skip(reason="as told")
def test_skipped():
    pass
"""
BROKEN = """
def test_without(fixture_that_is_not_there):
    pass
"""
CRASHING = """
import os

def test_killed():
    os.kill(os.getpid(), 9)

def test_after():
    pass
"""

ENDING = """
import os

parent = os.getpid()

def pytest_runtest_logfinish():
    if os.getpid() != parent:
        os._exit(0)
"""


def run(folder: Path, *options: str, **files: str) -> tuple[int, str]:
    """Run files of tests by two workers; return the exit status and the output."""
    for name, text in files.items():
        (folder / f"test_{name}.py").write_text(text)
    command = [sys.executable, "-m", "pytest", "-p", "tests.workers", "--workers", "2", "-rs", *options, str(folder)]
    plugins = {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    env = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"} | plugins
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False, timeout=PATIENCE_S)
    return done.returncode, done.stdout


def test_all_are_told_of_once(tmp_path: Path) -> None:
    status, told = run(tmp_path, many=MANY, broken=BROKEN, same=MANY)
    assert status == 1
    assert re.search(r"= 2 failed, 20 passed, 2 skipped, 1 error in ", told), told
    assert re.findall(r"told of \d", told) == ["told of 7"] * 2  # captured, and shown where a test fails
    assert "taken down in worker" not in told  # neither is what fixtures write
    assert "fixture 'fixture_that_is_not_there' not found" in told
    assert "as told" in told
    assert told.count("test session starts") == 1


def test_the_first_failure_ends_a_run_that_asks_for_it(tmp_path: Path) -> None:
    status, told = run(tmp_path, "-x", many=MANY)
    assert status == 1
    assert "= 1 failed, 8 passed in " in told, told


def test_it_ends_the_other_workers_too(tmp_path: Path) -> None:
    waiting = "import signal\n\ndef test_it():\n    while True:\n        signal.pause()\n"
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as a job in the background
    try:
        status, told = run(tmp_path, "-x", failing="def test_it():\n    assert False\n", waiting=waiting)
    finally:
        signal.signal(signal.SIGINT, before)
    assert status == 1
    assert "= 1 failed in " in told, told


def test_a_worker_that_crashes_ends_the_run(tmp_path: Path) -> None:
    status, told = run(tmp_path, crashing=CRASHING)
    assert status == 1
    assert "a worker ended with status -9 in test_crashing.py::test_killed" in told


def test_no_test_is_left_out_without_a_word(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(ENDING)
    status, told = run(tmp_path, crashing=CRASHING.replace("os.kill", "print"))
    assert status == 1
    assert "1 passed" in told
    assert "1 of 2 tests were not run" in told
