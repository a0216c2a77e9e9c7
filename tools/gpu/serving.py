"""Drives the daemon over HTTP, and vLLM beside it: closed loops of one to many streams."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path

from loadtest.bench import Asking, Level, Sweep, first_model
from loadtest.client import Client, Target
from loadtest.daemon import daemon
from loadtest.peers.process import Command, free_port, running
from loadtest.report import Point
from loadtest.workload import Job, Length, synthetic
from tools.gpu.figures import Figure, PartError
from tools.gpu.models import write_model
from tools.gpu.task import Task

_PROMPT, _ANSWER = 512, 128
_LEVELS = (1, 8, 32, 128, 256)
_VLLM = "vllm.entrypoints.openai.api_server"
_VLLM_START_S = 150.0  # it compiles the model


def run(task: Task, shape_name: str) -> None:
    """Start the daemon, sweep, stop it."""
    with daemon(_flags(task, shape_name)) as port:
        _sweep(task, shape_name, shape_name, port)


def run_vllm(task: Task, shape_name: str) -> None:
    """Do the same with vLLM and random weights of the same shape, if it is installed."""
    if find_spec("vllm") is None:
        task.notebook.note("Not measured: vLLM is not installed here.")
        return
    model, *flags = _flags(task, shape_name)
    port = free_port()
    argv = [sys.executable, "-m", _VLLM, "--model", model, *flags, "--host", "127.0.0.1", "--port", str(port)]
    command = Command(argv, {"VLLM_NO_USAGE_STATS": "1"})
    first = {"model": model, "prompt": "x", "max_tokens": 1}
    with running(command, port, task.scratch / "vllm.log", first, _VLLM_START_S) as server:
        task.notebook.detail("ready_s", server.ready_s)
        _sweep(task, shape_name, f"vLLM, {shape_name}", port)


def _flags(task: Task, shape_name: str) -> Sequence[str]:
    """Return the model's folder and flags that both servers have."""
    folder: Path = write_model(task.shape(shape_name), task.scratch / "models")
    length = "256" if task.is_rehearsal else "4096"
    return [str(folder), "--load-format", "dummy", "--dtype", "bfloat16", "--max-model-len", length]


async def _measure(port: int, warm_up: Sequence[Job], level: Level) -> list[Point]:
    """Return the point of one level on a local daemon. Raises ClientError."""
    sweep = Sweep()
    with closing(Client(Target.local(port))) as client:
        asking = Asking(await first_model(client))
        await sweep.run(client, asking, warm_up, [level])
    return sweep.points


def _sweep(task: Task, shape_name: str, label: str, port: int) -> None:
    """Measure level by level; each is written when it is done."""
    prompt, answer, levels = (16, 48, (1, 2)) if task.is_rehearsal else (_PROMPT, _ANSWER, _LEVELS)
    words, tokens = Length(prompt, prompt), Length(answer, answer)
    limits, points = task.limits(task.shape(shape_name)), []
    for num in levels:
        jobs = synthetic(max(4, (2 if task.is_rehearsal else 3) * num), prompt=words, output=tokens, seed=num)
        warm_up = synthetic(2, prompt=words, output=tokens, seed=-num)
        (point,) = asyncio.run(_measure(port, warm_up, Level(f"concurrency {num}", num, num, jobs)))
        if point.num_failed:
            raise PartError(f"{point.num_failed} requests of {num} concurrent ones failed: {point.errors}")
        points.append(asdict(point))
        limit = num * answer / limits.generate_s([prompt] * num, [answer] * num)
        name = f"{label}: HTTP, {num} concurrent"
        task.notebook.figure(Figure(name, point.output_tokens_per_s, "tok/s", limit))
        task.notebook.figure(Figure(f"{name}, median TPOT", 1e3 * point.tpot_s.p50, "ms", less_is_better=True))
        task.notebook.detail("points", points)
