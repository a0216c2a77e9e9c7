"""An engine whose steps cost exactly what is said, and which has seen enough of them to know it."""

from __future__ import annotations

from collections.abc import Callable

from engine.core.step import StepPlan
from loadtest.fake_runner import FakeRunner
from tests.pure.driver import VOCAB, Driver, config, request

FIXED_S, TOKEN_S, CONTEXT_S = 4e-3, 0.25e-3, 0.1e-6  # about SmolLM2-135M on two cores
STREAMS = 4


def seconds(plan: StepPlan) -> float:
    """What a step takes: linear, so that the model can be exact."""
    context = sum(count * (start + count / 2) for start, count in plan.spans)
    return FIXED_S + TOKEN_S * plan.num_tokens + CONTEXT_S * context


class World:
    """Streams that run for ever, in an engine that has seen enough to know what its steps take."""

    def __init__(
        self, num_streams: int = STREAMS, *, cost: Callable[[StepPlan], float] = seconds, **changes: float | None
    ) -> None:
        sizes = {"num_blocks": 4000, "block_size": 16, "max_model_len": 40_000, "max_num_seqs": 64}
        sizes |= {"max_num_batched_tokens": 512, "enable_prefix_caching": False}
        settings = config(**sizes | changes)  # type: ignore[arg-type]  # checked by the class itself
        self.driver = Driver(settings, cost=cost)
        self.driver.runner = FakeRunner(settings, vocab_size=VOCAB, memory=False)
        for index in range(12):
            self.add(f"warm{index}", 40 * index + 10, max_tokens=3)
            self.run(3)
        self.driver.drain()
        for index in range(num_streams):
            self.add(f"stream{index}", 50, max_tokens=30_000)
        self.run(4)

    def add(self, name: str, num_prompt: int, max_tokens: int = 2, **changes: object) -> None:
        changes = {"arrival_s": self.driver.now, "eos_token_ids": frozenset()} | changes
        self.driver.add(request(name, (1,) * num_prompt, max_tokens=max_tokens, **changes))

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.driver.step()

    def until(self, *names: str, max_steps: int = 20_000) -> list[float]:
        """Run until these have their first tokens; the seconds of each step."""
        taken = []
        while not all((name, 0) in self.driver.streams for name in names):
            before = self.driver.now
            self.driver.step()
            taken.append(self.driver.now - before)
            assert len(taken) < max_steps, "starved"
        return taken


def decode_s(num_streams: int, context: int) -> float:
    """What a step takes in which so many decode."""
    return FIXED_S + num_streams * (TOKEN_S + CONTEXT_S * context)
