"""Drives a daemon's engine without HTTP, and records when its tokens arrive."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from engine.core.types import Progress, Request, SamplingParams, StepEvents
from engine.settings.engine_config import EngineConfig
from engine.startup.build import build_engine
from tools.gpu.figures import PartError

_PATIENCE_S = 120.0  # without a token for so long, the engine hangs


OnStep = Callable[[int], None]


class Step(NamedTuple):
    """The tokens of one step of the engine."""

    time_s: float  # of time.perf_counter
    num_tokens: int
    num_finished: int


class Drive:
    """One engine; used from one thread."""

    def __init__(self, model: Path, **settings: object) -> None:
        fields = {"model": str(model), "load_format": "dummy"} | settings
        begun = time.perf_counter()
        self.engine = build_engine(EngineConfig(**fields), _say)  # type: ignore[arg-type]  # mixed value types
        self.build_s = time.perf_counter() - begun
        self._events: queue.SimpleQueue[tuple[float, StepEvents]] = queue.SimpleQueue()
        self._num_requests = 0
        self._on_step: OnStep | None = None
        self.engine.start(self._deliver)

    def stop(self) -> None:
        self.engine.stop(0.0)

    def _deliver(self, events: StepEvents) -> None:
        """Take the events of a step, on the engine thread."""
        self._events.put((time.perf_counter(), events))
        if self._on_step is not None:
            self._on_step(len(list(events)))

    def run(
        self,
        prompts: Sequence[Sequence[int]],
        output_lens: Sequence[int],
        *,
        temperature: float = 0.0,
        on_step: OnStep | None = None,
    ) -> Iterator[Step]:
        """Send all requests together and yield the steps. Raises PartError.

        The engine thread calls `on_step` after each step with the number of sequences in it.
        """
        self._on_step = on_step
        requests = [
            Request(
                request_id=str(self._num_requests + index),
                prompt=tuple(prompt),
                params=SamplingParams(max_tokens=length, temperature=temperature, seed=index),
                arrival_s=self.engine.clock(),
            )
            for index, (prompt, length) in enumerate(zip(prompts, output_lens, strict=True))
        ]
        self._num_requests += len(requests)
        self.engine.submit(*requests)
        num_open = len(requests)
        while num_open:
            try:
                time_s, events = self._events.get(timeout=_PATIENCE_S)
            except queue.Empty:
                raise PartError(f"The engine gave no token for {_PATIENCE_S:g} s.") from None
            for event in events:
                if event.error is not None:
                    raise PartError(f"The engine failed a request: {event.error}")
            num_finished = sum(event.finish_reason is not None for event in events)
            num_open -= num_finished
            yield Step(time_s, sum(len(event.token_ids) for event in events), num_finished)


def _say(progress: Progress) -> None:
    if progress.done == progress.total:
        print(f"  {progress.stage}: {progress.detail}", flush=True)
