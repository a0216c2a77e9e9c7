"""Measures a start: the time to the first token, and the peak of memory, against llama-server on the same file.

    python -m tools loading --llama-server FILE MODEL.gguf...

Each round starts Quire and llama-server one after the other, with one slot each, in turns; figures are medians over
rounds, and ratios medians of the rounds' ratios. Files are brought into the page cache before, or dropped from it with
--cold. A first start of Quire, which may compile modules and kernels, is not counted.

A virtual machine may give free memory back to its host after some seconds; then fresh memory costs 1 to 2.5 s a gigabyte
instead of 0.1 s. With --touched as much memory as a start needs is used and freed right before it, so that this cost is
not measured.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import NamedTuple

from loadtest.arguments import positive_int
from loadtest.comparison import describe_host
from loadtest.errors import LoadtestError
from loadtest.output import markdown, save_json
from loadtest.peers.process import Command, free_port, running

_CONTEXT, _POOL = 4096, "256MiB"
_MADV_POPULATE_WRITE = 23  # Linux 5.14
_GIB = 1 << 30
_LIMIT_S = 300.0
_PROMPT = "Hello there my friend, tell me about the sea. " * 4
_BODY = {"model": "model", "prompt": _PROMPT, "max_tokens": 1, "temperature": 0}
_QUIRE, _PEER = "quire", "llama-server"
_HEAD = ("file", "GB", "first token, s", "llama-server", "ratio", "peak / file", "of which files", "llama-server")


class Start(NamedTuple):
    """One start: seconds to the first token, and memory at its peak; `file_bytes` of it are pages of files."""

    ready_s: float
    peak_bytes: int
    file_bytes: int


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `loading`."""
    parser.add_argument("files", nargs="+", type=Path, metavar="MODEL.gguf")
    parser.add_argument("--llama-server", type=Path, metavar="FILE", help="llama.cpp's; without it Quire runs alone")
    parser.add_argument("--rounds", type=positive_int, default=5, metavar="N", help="default %(default)s")
    parser.add_argument("--cold", action="store_true", help="drop the file from the page cache before each start")
    parser.add_argument("--touched", action="store_true", help="use memory before each start, so that the host has it")
    parser.add_argument("--num-threads", type=positive_int, metavar="N", default=os.cpu_count(), help="one a core")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")


def run(options: argparse.Namespace) -> int:
    """Measure one file after another, and print each row when it is known."""
    host, rows = describe_host(), {}
    print(f"{host['cpu']}, {host['cores']} cores, {host['date'][:10]}, commit {host['commit']}")
    for number, path in enumerate(options.files):
        if not path.is_file():
            raise LoadtestError(f"{path} is no file; name GGUF files.")
        starts = _measure(options, path.absolute())
        rows[str(path)] = {name: [start._asdict() for start in found] for name, found in starts.items()}
        lines = list(markdown(_HEAD, [cells(path.name, path.stat().st_size, starts)]))
        print("\n".join(lines[2 if number else 0 :]), flush=True)
        save_json(options.json, {"host": host, "cold": options.cold, "touched": options.touched, "files": rows})
    return 0


def _measure(options: argparse.Namespace, path: Path) -> dict[str, list[Start]]:
    names = [_QUIRE, *((_PEER,) if options.llama_server else ())]
    starts: dict[str, list[Start]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as logs:
        for number in range(-1, options.rounds):
            for name in sorted(names, reverse=bool(number % 2)) if number >= 0 else [_QUIRE]:
                (_drop if options.cold else read_through)(path)
                if options.touched:
                    _touch(2 * path.stat().st_size + _GIB)
                port = free_port()
                with running(_command(options, name, path, port), port, Path(logs, name), _BODY, _LIMIT_S) as server:
                    about = memory(Path(f"/proc/{server.pid}/status").read_text())
                    start = Start(server.ready_s, about["VmHWM"], about["RssFile"])
                starts[name] += [start] if number >= 0 else []
    return starts


def _command(options: argparse.Namespace, name: str, path: Path, port: int) -> Command:
    threads = str(options.num_threads)
    if name == _QUIRE:
        argv = [sys.executable, "-m", "server", "serve", str(path), "--served-model-name", "model"]
        argv += ["--max-model-len", str(_CONTEXT), "--max-num-seqs", "1", "--kv-cache-memory-bytes", _POOL]
        argv += ["--num-threads", threads, "--port", str(port)]
        return Command(argv, {"PYTHONDONTWRITEBYTECODE": ""})  # empty is unset: an installed package is compiled
    argv = [str(options.llama_server), "-m", str(path), "--alias", "model", "-np", "1", "-c", str(_CONTEXT)]
    argv += ["-t", threads, "-tb", threads, "--no-warmup", "--host", "127.0.0.1", "--port", str(port)]
    return Command(argv, {})


def memory(status: str) -> dict[str, int]:
    """Return the bytes that a process's status names, by name."""
    pairs = (line.split() for line in status.splitlines() if line.endswith(" kB"))
    return {name.rstrip(":"): int(kib) << 10 for name, kib, _ in pairs}


def cells(name: str, num_bytes: int, starts: Mapping[str, list[Start]]) -> list[str]:
    """Return a row of the table."""
    ours, theirs = starts[_QUIRE], starts.get(_PEER, [])
    ratios = [one.ready_s / other.ready_s for one, other in zip(ours, theirs, strict=False)]
    return [
        name,
        f"{num_bytes / 1e9:.2f}",
        f"{median(start.ready_s for start in ours):.2f}",
        f"{median(start.ready_s for start in theirs):.2f}" if theirs else "-",
        f"{median(ratios):.2f}" if ratios else "-",
        f"{median(start.peak_bytes for start in ours) / num_bytes:.2f}",
        f"{median(start.file_bytes for start in ours) / num_bytes:.2f}",
        f"{median(start.peak_bytes for start in theirs) / num_bytes:.2f}" if theirs else "-",
    ]


def _touch(num_bytes: int) -> None:
    """Use memory in a process that ends."""
    code = f"import mmap\nwith mmap.mmap(-1, {num_bytes}) as memory:\n    memory.madvise({_MADV_POPULATE_WRITE})\n"
    subprocess.run([sys.executable, "-c", code], check=True)  # noqa: S603 - our own


def _drop(path: Path) -> None:
    """Drop a file from the page cache."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_through(path: Path) -> None:
    """Bring a file into the page cache."""
    with path.open("rb") as file:
        while file.read(1 << 24):
            pass
