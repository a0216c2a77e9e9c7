"""Drives the daemon over HTTP: closed loops of one to many streams."""

from __future__ import annotations

import asyncio
from dataclasses import asdict

from loadtest.bench import Level, measure
from loadtest.daemon import daemon
from loadtest.gpu.figures import Figure, PartError
from loadtest.gpu.models import write_model
from loadtest.gpu.task import Task
from loadtest.workload import Length, synthetic

_PROMPT, _ANSWER = 512, 128
_LEVELS = (1, 8, 32, 128, 256)


def run(task: Task, shape_name: str) -> None:
    """Start the daemon, sweep, stop it."""
    folder = write_model(task.shape(shape_name), task.scratch / "models")
    flags = [str(folder), "--load-format", "dummy", "--dtype", "bfloat16"]
    with daemon([*flags, "--max-model-len", "256" if task.is_rehearsal else "4096"]) as port:
        _sweep(task, shape_name, port)


def _sweep(task: Task, shape_name: str, port: int) -> None:
    """Measure level by level; each is written when it is done."""
    prompt, answer, levels = (16, 48, (1, 2)) if task.is_rehearsal else (_PROMPT, _ANSWER, _LEVELS)
    words, tokens = Length(prompt, prompt), Length(answer, answer)
    limits, points = task.limits(task.shape(shape_name)), []
    for num in levels:
        jobs = synthetic(max(4, (2 if task.is_rehearsal else 3) * num), prompt=words, output=tokens, seed=num)
        warm_up = synthetic(2, prompt=words, output=tokens, seed=-num)
        (point,) = asyncio.run(measure(port, warm_up, Level(f"concurrency {num}", num, num, jobs)))
        if point.num_failed:
            raise PartError(f"{point.num_failed} requests of {num} concurrent ones failed: {point.errors}")
        points.append(asdict(point))
        limit = num * answer / limits.generate_s([prompt] * num, [answer] * num)
        name = f"{shape_name}: HTTP, {num} concurrent"
        task.notebook.figure(Figure(name, point.output_tokens_per_s, "tok/s", limit))
        task.notebook.figure(Figure(f"{name}, median TPOT", 1e3 * point.tpot_s.p50, "ms", less_is_better=True))
        task.notebook.detail("points", points)
