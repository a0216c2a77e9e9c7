"""The requests of nano-vllm's benchmark, for which figures are published."""

from __future__ import annotations

import random
from typing import NamedTuple

_TOTALS = (142_827, 133_966)  # prompt and output tokens of the published figures


class Workload(NamedTuple):
    """Prompts as token ids, and the lengths of their answers."""

    prompts: list[list[int]]
    output_lens: list[int]

    @property
    def prompt_lens(self) -> list[int]:
        return [len(prompt) for prompt in self.prompts]


def nano_vllm() -> Workload:
    """Return 256 requests with prompts and answers of 100 to 1024 tokens."""
    work = draw_requests(256, 100, 1024, highest_id=10_000)
    totals = sum(work.prompt_lens), sum(work.output_lens)
    if totals != _TOTALS:
        raise RuntimeError(f"This Python draws {totals} prompt and output tokens instead of {_TOTALS}.")
    return work


def draw_requests(num: int, low: int, high: int, *, highest_id: int) -> Workload:
    """Draw all prompts, then all lengths, in the order of that benchmark."""
    rng = random.Random(0)
    prompts = [[rng.randint(0, highest_id) for _ in range(rng.randint(low, high))] for _ in range(num)]
    return Workload(prompts, [rng.randint(low, high) for _ in range(num)])
