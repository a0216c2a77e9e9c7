"""Measures each format of weights on this machine: speed, memory, and time to the first token.

    python -m tools formats --models-dir DIR --llama-server FILE

A format's file is written if it is missing, and deleted afterwards. Quire and llama-server (for formats that it reads) start one after the other
from a cached file and stay; then rounds of 1, of 8, ... concurrent requests are sent to them in turns. Ratios are medians
over rounds, so that a drift of the machine's speed affects both.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import signal
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from statistics import median
from typing import NamedTuple

from loadtest.arguments import positive_int
from loadtest.bench import closed_loop
from loadtest.client import Client, ClientError, Outcome, Target
from loadtest.compare import PeerAsking
from loadtest.comparison import QUIRE, describe_host
from loadtest.output import markdown, save_json
from loadtest.peers.process import PeerError, ServerProcess, free_port, running
from loadtest.peers.table import DEFAULT_EXECUTABLES, FORMATS, PEERS, Setup, file_of
from loadtest.shapes import COMPARED
from loadtest.workload import Job, Length, synthetic
from tools.loading import read_through

_PEER = "llama-server"
_PROMPT, _CONTEXT = 16, 512
_START_LIMIT_S = 300.0


class Row(NamedTuple):
    """The figures of one format; those of servers are by name."""

    format: str
    file_bytes: int
    ready_s: dict[str, float]
    peak_bytes: dict[str, int]
    rates: dict[str, dict[int, list[float]]]  # decoded tokens a second of each round, by concurrency
    error: str = ""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `formats`."""
    parser.add_argument("--models-dir", type=Path, metavar="DIR", required=True, help="where files are kept")
    parser.add_argument("--llama-server", type=Path, metavar="FILE", help="llama.cpp's; without it Quire runs alone")
    parser.add_argument("--model", choices=tuple(COMPARED), default="qwen2.5-1.5b", help="default %(default)s")
    parser.add_argument("--formats", nargs="+", choices=("bf16", *FORMATS), metavar="NAME", help="default: all")
    parser.add_argument(
        "--concurrency", nargs="+", type=positive_int, default=(1, 8), metavar="N", help="requests; default 1 8"
    )
    parser.add_argument("--rounds", type=positive_int, default=5, metavar="N", help="default %(default)s")
    parser.add_argument("--tokens", type=positive_int, default=48, metavar="N", help="of an answer; default 48")
    parser.add_argument("--num-threads", type=positive_int, metavar="N", default=os.cpu_count(), help="one a core")
    parser.add_argument("--keep", action="store_true", help="do not delete the files that it wrote")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")


def run(options: argparse.Namespace) -> int:
    """Measure one format after another, and print each row when it is known."""
    from engine.sources.model_source import find_model
    from loadtest.peers.models import prepare

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    source, rows = Path(find_model(None).path), []
    host = describe_host()
    print(f"{options.model}, {host['cpu']}, {host['cores']} cores, {host['date'][:10]}, commit {host['commit']}")
    executables = DEFAULT_EXECUTABLES | ({_PEER: str(options.llama_server)} if options.llama_server else {})
    for number, name in enumerate(options.formats or ("bf16", *FORMATS)):
        servers = {peer: file for peer in executables if (file := file_of(peer, name))}
        paths = [options.models_dir / options.model / file for file in servers.values()]
        missing = {path for path in paths if not path.exists()}
        prepare(COMPARED[options.model], source, options.models_dir, sorted(set(servers.values())), lambda _: None)
        rows.append(_measure(options, name, servers, executables))
        for path in () if options.keep else missing:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        lines = list(markdown(_head(options.concurrency), [_cells(rows[-1])]))
        print("\n".join(lines[2 if number else 0 :]), flush=True)
        save_json(options.json, {"host": host, "model": options.model, "rows": [row._asdict() for row in rows]})
    return int(any(row.error for row in rows))


def _measure(options: argparse.Namespace, name: str, files: dict[str, str], executables: dict[str, str]) -> Row:
    folder = (options.models_dir / options.model).absolute()
    row = Row(
        name,
        _weights(folder / files[QUIRE]).stat().st_size,
        {},
        {},
        {peer: {level: [] for level in options.concurrency} for peer in files},
    )
    started: dict[str, ServerProcess] = {}
    try:
        with ExitStack() as stack:
            logs = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            for peer, file in files.items():
                read_through(_weights(folder / file))
                setup = Setup(folder, free_port(), name, options.num_threads, max(options.concurrency), _CONTEXT, 1)
                command = next(each for each in PEERS if each.name == peer).command(executables[peer], setup)
                first = PeerAsking(options.model).body(Job("time year people", 1))
                started[peer] = stack.enter_context(running(command, setup.port, logs / peer, first, _START_LIMIT_S))
                row.ready_s[peer] = started[peer].ready_s
            for number in range(-1, options.rounds):  # the first is a warm-up
                for level in options.concurrency:
                    for peer in sorted(files, reverse=bool(number % 2)):
                        rate = asyncio.run(_drive(started[peer].port, options, level, number))
                        row.rates[peer][level] += [rate] if number >= 0 else []
            row.peak_bytes.update({peer: server.peak_rss_bytes for peer, server in started.items()})
    except (PeerError, ClientError) as error:
        return row._replace(error=str(error))
    return row


async def _drive(port: int, options: argparse.Namespace, level: int, number: int) -> float:
    """Return the tokens a second that `level` concurrent answers have together."""
    length = Length(_PROMPT, _PROMPT)
    jobs = synthetic(level, prompt=length, output=Length(options.tokens, options.tokens), seed=100 * number + level)
    with closing(Client(Target.local(port))) as client:
        outcomes = await closed_loop(client, PeerAsking(options.model), jobs, level)
    if errors := [outcome.error for outcome in outcomes if outcome.error]:
        raise ClientError(f"{level} at once: {errors[0]}")
    return decode_rate(outcomes)


def decode_rate(outcomes: Sequence[Outcome]) -> float:
    """Return the tokens a second while all answers were running."""
    begin = max(outcome.chunks[0] for outcome in outcomes)
    end = min(outcome.chunks[-1] for outcome in outcomes)
    if end <= begin:
        raise ClientError("the answers did not run at the same time")
    chunks = sum(begin < at <= end for outcome in outcomes for at in outcome.chunks)
    tokens = sum(outcome.completion_tokens or len(outcome.chunks) for outcome in outcomes)
    return chunks / (end - begin) * tokens / sum(len(outcome.chunks) for outcome in outcomes)


def _head(levels: Sequence[int]) -> list[str]:
    rates = [cell for level in levels for cell in (f"tok/s at {level}", "/ llama")]
    return ["format", "GB", *rates, "first token, s", "llama", "peak GB", "llama"]


def _cells(row: Row) -> list[str]:
    if row.error:
        blanks = ["-"] * (len(_head(list(row.rates[QUIRE]))) - 3)
        return [row.format, f"{row.file_bytes / 1e9:.2f}", row.error.splitlines()[0], *blanks]
    ours, theirs, cells = row.rates[QUIRE], row.rates.get(_PEER), [row.format, f"{row.file_bytes / 1e9:.2f}"]
    for level in ours:
        ratios = [one / other for one, other in zip(ours[level], theirs[level], strict=True)] if theirs else []
        cells += [f"{median(ours[level]):.1f}", f"{median(ratios):.2f}" if ratios else "-"]
    for figures, scale in ((row.ready_s, 1.0), (row.peak_bytes, 1e9)):
        cells += [f"{figures[peer] / scale:.2f}" if peer in figures else "-" for peer in (QUIRE, _PEER)]
    return cells


def _weights(path: Path) -> Path:
    return path / "model.safetensors" if path.is_dir() else path
