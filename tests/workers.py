"""Runs the files of tests in several processes, which are forks of the one that has collected them.

    pytest -p tests.workers --workers 4

Collecting all tests takes a core twenty seconds, most of it imports; a fork begins with all that. It takes the next file
when it has run one, so that a file's fixtures are made once, and tells its parent what became of each test.

What has threads must not be made when a file is imported: a fork has none of them.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain, pairwise
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path

import pytest

INDEX_BYTES = 4

Files = list[list[pytest.Item]]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--workers", type=int, default=0, help="processes that run files of tests; 0: this one runs them")


def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Run the tests in forks; without --workers, or where there are none to run, leave that to pytest."""
    options = session.config.option
    if not options.workers or options.collectonly or session.testsfailed or not session.items:
        return None
    by_file: dict[Path, list[pytest.Item]] = {}
    for item in session.items:
        by_file.setdefault(item.path, []).append(item)
    files = list(by_file.values())
    queue, end = os.pipe()  # of the numbers of files; who reads one runs the file
    os.write(end, b"".join(number.to_bytes(INDEX_BYTES, "big") for number in range(len(files))))
    os.close(end)
    folder = session.config._tmp_path_factory.getbasetemp()
    running: dict[Connection, int] = {}  # by the pipe that its reports come through, the id of a process
    sys.stdout.flush()  # else each fork would write it, too
    for number in range(options.workers):
        reports, end_of_worker = Pipe(duplex=False)
        process = os.fork()
        if process == 0:
            _become_worker(session.config, end_of_worker, folder / f"worker{number}")
            _work(session, _taken(files, queue))
            return True
        end_of_worker.close()
        running[reports] = process
    os.close(queue)
    if terminal := session.config.pluginmanager.getplugin("terminalreporter"):
        terminal.showfspath = False  # tests of several files come in turns
    _report(session, running)
    return True


class _Reporter:
    """Sends what becomes of tests to the parent: hooks to call, and their arguments."""

    def __init__(self, config: pytest.Config, parent: Connection) -> None:
        self._config, self._parent = config, parent

    def pytest_runtest_logstart(self, nodeid: str, location: tuple[str, int | None, str]) -> None:
        self._parent.send(("pytest_runtest_logstart", {"nodeid": nodeid, "location": location}))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._parent.send(("pytest_runtest_logreport", data))

    def pytest_runtest_logfinish(self, nodeid: str, location: tuple[str, int | None, str]) -> None:
        self._parent.send(("pytest_runtest_logfinish", {"nodeid": nodeid, "location": location}))


def _become_worker(config: pytest.Config, parent: Connection, folder: Path) -> None:
    """Part with what the parent goes on using: its terminal, its files of captured output, its temporary folder.

    What modules have opened that tells of their process (/proc/self/statm) tells of this one from now on.
    """
    for number, path in _open_files():
        if path.startswith(f"/proc/{os.getppid()}/"):
            opened = os.open(path.replace(str(os.getppid()), "self", 1), os.O_RDONLY)
            os.dup2(opened, number, inheritable=False)
            os.close(opened)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell has its jobs in the background ignore
    capture = config.pluginmanager.getplugin("capturemanager")
    capture.stop_global_capturing()
    capture.start_global_capturing()
    capture.suspend_global_capture()
    config.pluginmanager.unregister(name="terminalreporter")
    config.pluginmanager.register(_Reporter(config, parent))
    config.workerinput = {}  # by which plugins know that another process writes their files
    config._tmp_path_factory._given_basetemp = folder
    config._tmp_path_factory._basetemp = None


def _open_files() -> Iterator[tuple[int, str]]:
    for link in list(Path("/proc/self/fd").iterdir()):
        with suppress(FileNotFoundError):  # the one by which they are listed
            yield int(link.name), str(link.readlink())


def _taken(files: Files, queue: int) -> Iterator[pytest.Item]:
    """The tests of files that no other process has taken."""
    while number := os.read(queue, INDEX_BYTES):
        yield from files[int.from_bytes(number, "big")]


def _work(session: pytest.Session, items: Iterator[pytest.Item]) -> None:
    for item, following in pairwise(chain(items, [None])):
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if session.shouldfail:
            raise session.Failed(session.shouldfail)


def _report(session: pytest.Session, running: dict[Connection, int]) -> None:
    """Tell pytest what the workers tell, until each has ended. One that crashes ends the run."""
    hook = session.config.hook
    begun: dict[Connection, str] = {}
    left = {item.nodeid for item in session.items}
    try:
        while running and not session.shouldfail:
            for reports in wait(list(running)):
                try:
                    name, arguments = reports.recv()
                except EOFError:
                    status = os.waitstatus_to_exitcode(os.waitpid(running.pop(reports), 0)[1])
                    if reports in begun:
                        session.shouldfail = f"a worker ended with status {status} in {begun[reports]}"
                    continue
                if name == "pytest_runtest_logstart":
                    begun[reports] = arguments["nodeid"]
                elif name == "pytest_runtest_logfinish":
                    left.discard(begun.pop(reports))
                else:
                    arguments = {"report": hook.pytest_report_from_serializable(config=session.config, data=arguments)}
                getattr(hook, name)(**arguments)
    finally:
        for reports, process in running.items():
            reports.close()
            os.kill(process, signal.SIGINT)
        for process in running.values():
            os.waitpid(process, 0)
    if left and not session.shouldfail:
        session.shouldfail = f"{len(left)} of {len(session.items)} tests were not run"
    if session.shouldfail:
        raise session.Failed(session.shouldfail)
