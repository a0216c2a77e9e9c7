"""Runs the stages of `bash loadtest/gpu.sh`, each part in a process with a time limit.

All results so far are written after each part. A part that fails or exceeds its time does not stop the others, and takes
none of their time; the exit status is then 1. A part may use what the parts before it have left. This process never
imports torch, so that a GPU error cannot end it.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from loadtest.comparison import ROOT, describe_host
from tools.gpu.figures import PartError, read_findings
from tools.gpu.parts import LIMIT_S, MACHINE, PARTS, STAGES, TUNE, Part
from tools.gpu.report import NO_GPU, Results
from tools.gpu.task import Task

_RESULTS = ROOT / "loadtest" / "results"
_GRACE_S = 12.0  # of a part's time, for its end after SIGTERM
_LEAST_S = 20.0  # a part is not begun with less time left
_PR_SET_CHILD_SUBREAPER = 36


def main(argv: Sequence[str] | None = None) -> int:
    """Run the parts in processes, or one of them in this process."""
    options = _parse(argv)
    if options.part:
        return _run_here(options)
    if options.rehearse and options.out.resolve().is_relative_to(_RESULTS):
        print(f"Figures of a rehearsal are not written to {_RESULTS}; name another folder.", file=sys.stderr)
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    host = describe_host()
    results = Results(host | {"commit": options.commit or host["commit"]}, options.rehearse)
    _adopt_orphans()
    with tempfile.TemporaryDirectory(prefix="quire-gpu-") as scratch:
        for parts in _chosen(options):
            deadline = time.monotonic() + options.limit
            for at, part in enumerate(parts):
                coming_s = sum(each.budget_s for each in parts[at + 1 :])
                _run(part, Path(scratch), options, deadline - coming_s, deadline, results)
                results.write(options.out)
                if part is MACHINE and results.gpu == NO_GPU and not options.rehearse:
                    print("torch sees no CUDA device here; --rehearse runs this without one.", file=sys.stderr)
                    return 2
    print("\n" + "\n".join(results.table()))
    print(f"\nwritten: {options.out}")
    return int(any(status != "done" for status in results.statuses.values()))


def _chosen(options: argparse.Namespace) -> list[tuple[Part, ...]]:
    """Return the parts to run, by stages, of which each has the whole limit; the machine's comes first."""
    if options.tune:
        return [(MACHINE, TUNE)]
    if options.only:
        return [tuple(part for part in (*PARTS, TUNE) if part is MACHINE or part.name in options.only)]
    first, *others = [STAGES[name] for name in STAGES if name in (options.stages or STAGES)]
    return [(MACHINE, *first), *others]


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    names = [part.name for part in (*PARTS, TUNE)]
    parser = argparse.ArgumentParser(prog="loadtest/gpu.sh", description="Measure one GPU.")
    parser.add_argument("stages", nargs="*", metavar="STAGE", help=f"{', '.join(STAGES)}; default: all, in this order")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where results go")
    parser.add_argument("--rehearse", action="store_true", help="run everything on a CPU, with tiny shapes")
    parser.add_argument("--only", nargs="+", choices=names, metavar="PART", help=f"some of {', '.join(names)}")
    parser.add_argument("--tune", action="store_true", help="search tile sizes for attention, nothing else")
    parser.add_argument("--limit", type=float, default=LIMIT_S, metavar="S", help="for a stage; default %(default)g")
    parser.add_argument("--commit", metavar="HASH", help="if the folder has no git history")
    parser.add_argument("--part", choices=names, help=argparse.SUPPRESS)
    parser.add_argument("--scratch", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if unknown := set(options.stages) - set(STAGES):
        parser.error(f"unknown stage: {', '.join(sorted(unknown))}; choose from {', '.join(STAGES)}")
    return options


def _run(
    part: Part, scratch: Path, options: argparse.Namespace, share_ends: float, deadline: float, results: Results
) -> None:
    """Run a part until `share_ends`, when the budgets of those after it begin, or for its own budget."""
    begun = time.monotonic()
    limit = min(max(part.budget_s, share_ends - begun), deadline - begun)
    if limit < _LEAST_S:
        results.statuses[part.name] = "not begun"
        return
    print(f"\n== {part.name} (at most {limit:.0f} s)", flush=True)
    process = subprocess.Popen(_command(part, scratch, options), start_new_session=True)  # noqa: S603 - our module
    try:
        status = "done" if process.wait(limit - _GRACE_S) == 0 else "failed"
    except subprocess.TimeoutExpired:
        status = "out of time"
    finally:
        _stop(process)
    results.seconds[part.name] = time.monotonic() - begun
    results.statuses[part.name] = status
    results.findings[part.name] = read_findings(scratch / f"{part.name}.json")
    print(f"== {part.name}: {status}, {results.seconds[part.name]:.0f} s", flush=True)


def _command(part: Part, scratch: Path, options: argparse.Namespace) -> list[str]:
    command = [sys.executable, "-m", "tools.gpu", "--part", part.name, "--scratch", str(scratch)]
    return [*command, "--out", str(options.out), *(["--rehearse"] if options.rehearse else [])]


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End a part with all that it has started, also in other sessions: a daemon would keep the GPU's memory."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_S)
    process.kill()
    process.wait()
    while orphans := _children():
        for pid in orphans:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _adopt_orphans() -> None:
    """Become the parent of all descendants whose parents end."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _children() -> list[int]:
    """Return this process's children."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            _, _, fields = path.read_text().rpartition(") ")
            if int(fields.split()[1]) == os.getpid():
                found.append(int(path.parent.name))
    return found


def _run_here(options: argparse.Namespace) -> int:
    def leave(number: int, _: FrameType | None) -> None:
        raise SystemExit(f"stopped by signal {number}")  # runs the cleanup of the part

    signal.signal(signal.SIGTERM, leave)
    part = next(part for part in (*PARTS, TUNE) if part.name == options.part)
    task = Task(part.name, options.scratch, options.rehearse)
    try:
        part.run(task)
    except PartError as error:
        task.notebook.fail(str(error))
    except Exception as error:  # any error ends only this part
        traceback.print_exc()
        task.notebook.fail(f"{type(error).__name__}: {error}")
    return int(task.notebook.has_failed)


if __name__ == "__main__":
    sys.exit(main())
