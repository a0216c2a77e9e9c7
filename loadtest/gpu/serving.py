"""The daemon under `quire bench`: HTTP and text included, closed loops of one to many streams on this machine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from loadtest.gpu.figures import Figure, PartError
from loadtest.gpu.models import write_model
from loadtest.gpu.task import Task
from loadtest.peers.process import Command, PeerError, free_port, running

_START_LIMIT_S = 90.0
_PROMPT, _ANSWER = 512, 128
_LEVELS = (1, 8, 32, 128, 256)


def run(task: Task, shape_name: str) -> None:
    """Start it, sweep, stop it."""
    shape = task.shape(shape_name)
    folder = write_model(shape, task.scratch / "models")
    port, log = free_port(), task.scratch / f"{task.name}.log"
    server = [sys.executable, "-m", "server", "serve", str(folder), "--load-format", "dummy", "--dtype", "bfloat16"]
    server += ["--port", str(port), "--max-model-len", "256" if task.is_rehearsal else "4096"]
    first = {"model": shape.name, "prompt": "time year", "max_tokens": 1}
    try:
        with running(Command(server, {}), port, log, first, _START_LIMIT_S) as process:
            task.notebook.detail("ready_s", process.ready_s)
            _sweep(task, shape_name, port)
    except PeerError as error:
        raise PartError(f"The server did not serve: {error}") from None


def _sweep(task: Task, shape_name: str, port: int) -> None:
    """Level by level, so that those that are done are on the disk if the time is up."""
    prompt, answer, levels = (16, 48, (1, 2)) if task.is_rehearsal else (_PROMPT, _ANSWER, _LEVELS)
    limits, points = task.limits(task.shape(shape_name)), []
    for level in levels:
        out = task.scratch / f"{task.name}-{level}.json"
        command = [
            sys.executable,
            "-m",
            "loadtest",
            "bench",
            "--base-url",
            f"http://127.0.0.1:{port}",
            "--json",
            str(out),
        ]
        command += ["--concurrency", str(level), "--input-len", str(prompt), "--output-len", str(answer)]
        command += ["--num-prompts", str(max(4, (2 if task.is_rehearsal else 3) * level)), "--seed", str(level)]
        _bench(command, out.with_suffix(".log"))
        point = json.loads(out.read_text(encoding="utf-8"))["points"][0]
        points.append(point)
        limit = level * answer / limits.generate_s([prompt] * level, [answer] * level)
        name = f"{shape_name}: HTTP, {level} at once"
        task.notebook.figure(Figure(name, point["output_tokens_per_s"], "tok/s", limit))
        task.notebook.figure(
            Figure(f"{name}, time a token, median", 1e3 * point["tpot_s"]["p50"], "ms", less_is_better=True)
        )
        task.notebook.detail("points", points)


def _bench(command: list[str], log: Path) -> None:
    with log.open("wb") as file:
        status = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, check=False).returncode  # noqa: S603
    if status:
        told = log.read_text(encoding="utf-8", errors="replace")[-2000:]
        raise PartError(f"`quire bench` ended with status {status}.\n{told}")
