"""The requests that nano-vllm's own benchmark makes, which its users and its forks report. Standard library only."""

from __future__ import annotations

import random
from typing import NamedTuple

_TOTALS = (142_827, 133_966)  # prompt and output tokens; what the published figures are of


class Workload(NamedTuple):
    """Prompts as token ids, and how many tokens each is answered with."""

    prompts: list[list[int]]
    output_lens: list[int]

    @property
    def prompt_lens(self) -> list[int]:
        return [len(prompt) for prompt in self.prompts]


def nano_vllm() -> Workload:
    """256 requests, prompts and answers of 100 to 1024 tokens, from seed 0."""
    work = draw_requests(256, 100, 1024, highest_id=10_000)
    totals = sum(work.prompt_lens), sum(work.output_lens)
    if totals != _TOTALS:
        raise RuntimeError(
            f"This Python draws {totals} prompt and output tokens, not {_TOTALS}: figures do not compare."
        )
    return work


def draw_requests(num: int, low: int, high: int, *, highest_id: int) -> Workload:
    """All prompts first, then all lengths, in the order in which that benchmark draws them."""
    rng = random.Random(0)
    prompts = [[rng.randint(0, highest_id) for _ in range(rng.randint(low, high))] for _ in range(num)]
    return Workload(prompts, [rng.randint(low, high) for _ in range(num)])
