"""Runs the parts of `bash loadtest/gpu.sh`, each in a process with a time limit.

All results so far are written after each part. A part that fails or exceeds its time does not stop the others; the exit
status is then 1. This process never imports torch, so that a GPU error cannot end it.
"""

from __future__ import annotations

import argparse
import contextlib
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
from loadtest.gpu.figures import PartError, read_findings
from loadtest.gpu.parts import MACHINE, PARTS, TUNE, Part
from loadtest.gpu.report import NO_GPU, Results
from loadtest.gpu.task import Task

_RESULTS = ROOT / "loadtest" / "results"
_GRACE_S = 25.0  # after SIGTERM
_LEAST_S = 12.0  # a part is not begun with less time left


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
    deadline = time.monotonic() + options.limit
    names = [TUNE.name] if options.tune else options.only or [part.name for part in PARTS]
    with tempfile.TemporaryDirectory(prefix="quire-gpu-") as scratch:
        for part in (*PARTS, TUNE):
            if part.name not in names and part.name != MACHINE:
                continue
            _run(part, Path(scratch), options, deadline, results)
            results.write(options.out)
            if part.name == MACHINE and results.gpu == NO_GPU and not options.rehearse:
                print("torch sees no CUDA device here; --rehearse runs this without one.", file=sys.stderr)
                return 2
    print("\n" + "\n".join(results.table()))
    print(f"\nwritten: {options.out}")
    return int(any(status != "done" for status in results.statuses.values()))


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    names = [part.name for part in (*PARTS, TUNE)]
    parser = argparse.ArgumentParser(prog="loadtest/gpu.sh", description="Measure one GPU.")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where results go")
    parser.add_argument("--rehearse", action="store_true", help="run everything on a CPU, with tiny shapes")
    parser.add_argument("--only", nargs="+", choices=names, metavar="PART", help=f"some of {', '.join(names)}")
    parser.add_argument("--tune", action="store_true", help="search tile sizes for attention, nothing else")
    parser.add_argument("--limit", type=float, default=480.0, metavar="S", help="for all; default %(default)g")
    parser.add_argument("--commit", metavar="HASH", help="if the folder has no git history")
    parser.add_argument("--part", choices=names, help=argparse.SUPPRESS)
    parser.add_argument("--scratch", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def _run(part: Part, scratch: Path, options: argparse.Namespace, deadline: float, results: Results) -> None:
    left = deadline - time.monotonic()
    if left < _LEAST_S:
        results.statuses[part.name] = "not begun"
        return
    print(f"\n== {part.name} ({left:.0f} s left)", flush=True)
    command = [sys.executable, "-m", "loadtest.gpu", "--part", part.name, "--scratch", str(scratch)]
    command += ["--out", str(options.out), *(["--rehearse"] if options.rehearse else [])]
    begun = time.monotonic()
    # In a new session, so that its children are stopped with it.
    process = subprocess.Popen(command, start_new_session=True)  # noqa: S603 - our module
    try:
        status = "done" if process.wait(min(part.budget_s, left)) == 0 else "failed"
    except subprocess.TimeoutExpired:
        status = "out of time"
    finally:
        _stop(process)
    results.seconds[part.name] = time.monotonic() - begun
    results.statuses[part.name] = status
    results.findings[part.name] = read_findings(scratch / f"{part.name}.json")
    print(f"== {part.name}: {status}, {results.seconds[part.name]:.0f} s", flush=True)


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


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
