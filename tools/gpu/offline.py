"""Measures the engine without HTTP, on random weights.

Each part builds one engine. Prompts are new random ids each time, so that the prefix cache finds nothing.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from types import MappingProxyType
from typing import NamedTuple

import torch

from engine.core.errors import ConfigError, QuireError
from tools.gpu import names
from tools.gpu.drive import Drive, Step
from tools.gpu.figures import Figure, PartError, read_findings
from tools.gpu.models import write_model
from tools.gpu.profile_steps import Tracer
from tools.gpu.task import Task
from tools.gpu.workload import draw_requests, nano_vllm

_MAX_MODEL_LEN = 16384
_SETTLED = 4  # steps in which all decode, before one counts


class Sizes(NamedTuple):
    """The sizes of the measurements."""

    batches: tuple[int, ...] = (1, 32, 128, 256)
    prompt_len: int = 960
    answer_len: int = 128  # so that contexts are about 1024
    prefills: tuple[tuple[int, int], ...] = ((64, 1024), (8, 8192))  # prompts, tokens each
    traced_batch: int = 256
    traced_prompt: int = 128


_TINY = Sizes((1, 2), 24, 24, ((4, 64),), 2, 8)


def run(task: Task, shape_name: str) -> None:
    """Measure one shape in bfloat16."""
    with closing(_Measure(task, shape_name, shape_name)) as measure:
        measure.warm_up()
        for figures in (measure.throughput, measure.decode_steps, measure.prefills, measure.idle):
            measure.attempt(figures)


def run_variant(task: Task, shape_name: str, label: str, settings: dict[str, str], itemsizes: dict[str, float]) -> None:
    """Measure the workload with narrower numbers, and its gain."""
    try:
        measure = _Measure(task, shape_name, label, settings, itemsizes)
    except ConfigError as error:
        task.notebook.note(f"Not measured: {error}")
        return
    with closing(measure):
        measure.warm_up()
        value = measure.throughput()
        measure.decode_steps()
    found = {figure.name: figure.value for figure in read_findings(task.scratch / f"{shape_name}.json").figures}
    base = found.get(names.throughput(shape_name))
    if base:
        task.notebook.figure(Figure(names.gain(label), value / base, "x"))


class _Measure:
    """One engine and its measurements."""

    def __init__(
        self,
        task: Task,
        shape_name: str,
        label: str,
        settings: Mapping[str, str] = MappingProxyType({}),
        itemsizes: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        self._notebook, self._label = task.notebook, label
        self._shape = task.shape(shape_name)
        self._limits = task.limits(self._shape, **itemsizes)
        self._is_rehearsal = task.is_rehearsal
        self._sizes = _TINY if task.is_rehearsal else Sizes()
        self._rng = random.Random(1)
        max_len = 256 if task.is_rehearsal else _MAX_MODEL_LEN
        folder = write_model(self._shape, task.scratch / "models")
        self._drive = Drive(folder, max_model_len=max_len, dtype="bfloat16", **settings)
        self._notebook.detail("build_s", self._drive.build_s)

    def close(self) -> None:
        self._drive.stop()

    def warm_up(self) -> None:
        """Compute every kind of step once, so that everything is compiled."""
        num = max(self._sizes.batches)
        list(self._drive.run(self._prompts(num, 16), [4 + index % 16 for index in range(num)], temperature=0.6))
        for _, length in self._sizes.prefills:
            list(self._drive.run(self._prompts(2, length), [2, 2]))

    def attempt(self, figures: Callable[[], object]) -> None:
        """Make one measurement; an error does not stop the next ones."""
        try:
            figures()
        except (PartError, QuireError) as error:
            self._notebook.fail(f"{figures.__name__}: {error}")

    def throughput(self) -> float:
        """Measure output tokens a second from the first request to the last answer."""
        work = nano_vllm() if not self._is_rehearsal else draw_requests(6, 4, 12, highest_id=self._shape.vocab - 1)
        begun = self._drive.engine.clock()
        steps = list(self._drive.run(work.prompts, work.output_lens, temperature=0.6))
        seconds = self._drive.engine.clock() - begun
        if sum(step.num_tokens for step in steps) != sum(work.output_lens):
            raise PartError("The engine returned a wrong number of tokens.")
        value = sum(work.output_lens) / seconds
        limit = sum(work.output_lens) / self._limits.generate_s(work.prompt_lens, work.output_lens)
        self._notebook.figure(Figure(names.throughput(self._label), value, "tok/s", limit))
        preemptions = self._drive.engine.stats.preemptions
        self._notebook.detail("workload", {"seconds": seconds, "steps": len(steps), "preemptions": preemptions})
        self._memory()
        return value

    def decode_steps(self) -> None:
        """Measure the milliseconds of decode steps."""
        sizes = self._sizes
        for batch in sizes.batches:
            steps = self._drive.run(self._prompts(batch, sizes.prompt_len), [sizes.answer_len] * batch)
            seconds = _step_s(steps, batch)
            context = batch * (sizes.prompt_len + sizes.answer_len / 2)
            limit = 1e3 * self._limits.decode_step_s(batch, context)
            self._notebook.figure(
                Figure(names.decode_step(self._label, batch), seconds * 1e3, "ms", limit, less_is_better=True)
            )

    def prefills(self) -> None:
        """Measure the rate of many prompts, and the first token of one alone."""
        for num, length in self._sizes.prefills:
            begun = self._drive.engine.clock()
            list(self._drive.run(self._prompts(num, length), [1] * num))
            seconds = self._drive.engine.clock() - begun
            limit = length / self._limits.prefill_s([length])
            self._notebook.figure(Figure(names.prefill(self._label, length), num * length / seconds, "tok/s", limit))
            alone = []
            for _ in range(3):
                begun = self._drive.engine.clock()
                list(self._drive.run(self._prompts(1, length), [1]))
                alone.append(self._drive.engine.clock() - begun)
            limit = 1e3 * self._limits.prefill_s([length])
            name = f"{self._label}: first token of {length}"
            self._notebook.figure(Figure(name, statistics.median(alone) * 1e3, "ms", limit, less_is_better=True))

    def idle(self) -> None:
        """Measure the share of a decode run in which the GPU is idle."""
        batch, length = self._sizes.traced_batch, self._sizes.traced_prompt
        step_s = _step_s(self._drive.run(self._prompts(batch, length), [160] * batch), batch)
        tracer = Tracer(batch)
        list(self._drive.run(self._prompts(batch, length), [160] * batch, on_step=tracer))
        traced = tracer.read()
        if traced is None:  # on a CPU a step is one call, of the native library
            tell = self._notebook.note if self._is_rehearsal else self._notebook.fail
            tell("The profiler saw nothing in the traced steps.")
            return
        figure = Figure(names.idle(self._label), 100 * traced.idle_share, "%", less_is_better=True)
        self._notebook.figure(figure)
        self._notebook.detail(
            "idle",
            {
                "method": "torch.profiler, device activity: 1 - union of kernels and copies / span of the traced steps",
                "batch": batch,
                "step_ms": step_s * 1e3,
                "traced_ms": traced.span_s * 1e3,
                "busy_ms": traced.busy_s * 1e3,
                "activities": traced.num_activities,
                "busy_by_name": traced.by_name,
            },
        )

    def _memory(self) -> None:
        if torch.cuda.is_available():
            free, total = torch.cuda.mem_get_info()
            self._notebook.figure(Figure(names.memory(self._label), 100 * (1 - free / total), "%", less_is_better=True))

    def _prompts(self, num: int, length: int) -> list[list[int]]:
        return [[self._rng.randrange(self._shape.vocab) for _ in range(length)] for _ in range(num)]


def _step_s(steps: Iterator[Step], batch: int) -> float:
    """Return the mean seconds of the steps in which all of `batch` decode."""
    times = [step.time_s for step in steps if step.num_tokens == batch]
    times = times[_SETTLED:]
    if len(times) < 2:
        raise PartError(f"There were no steps in which all {batch} sequences decoded.")
    return (times[-1] - times[0]) / (len(times) - 1)
