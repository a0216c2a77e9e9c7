"""The time of a step by its content, and the time that HTTP adds.

A step takes the sum of four parts: a table over its rows, a table over the rows that are sampled, the context that
decoding sequences read, and the pairs of a chunk's positions and their contexts. Kernels work in tiles, so tables are
linear between measured points.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from engine.core.step import StepPlan
from engine.system.regular_file import read_json
from loadtest.errors import LoadtestError

DEFAULT_COSTS = Path(__file__).with_name("smollm2-135m-two-cores.json")


@dataclass(frozen=True, slots=True)
class Table:
    """A function of a whole number from 0, linear between points and beyond the last."""

    at: tuple[int, ...]
    seconds: tuple[float, ...]

    def __call__(self, count: int) -> float:
        place = min(max(bisect_right(self.at, count), 1), len(self.at) - 1)
        low, high = self.at[place - 1], self.at[place]
        first, last = self.seconds[place - 1], self.seconds[place]
        return first + (last - first) * (count - low) / (high - low)


@dataclass(frozen=True, slots=True)
class Front:
    """The time that HTTP takes from the engine, whose cores it shares."""

    intake_s: float = 0.0  # added by a request to the step after its arrival
    step_s: float = 0.0  # added to any step
    token_s: float = 0.0  # added by a token that is drawn and streamed
    prompt_token_s: float = 0.0  # added by any other token that is computed


@dataclass(frozen=True)
class StepCosts:
    """The seconds of a step; `settings` are those of the measured scheduler."""

    rows: Table
    samples: Table
    decode_context_s: float  # a token of context that a decoding sequence reads
    prefill_pair_s: float  # a position of a prompt's chunk, times the positions it attends to
    front: Front = field(default_factory=Front)
    settings: dict[str, Any] = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=dict)  # where and how it was measured, and how well it fits

    @cached_property
    def _decode_steps(self) -> list[float]:
        """Seconds of decode steps by the number of sequences, without their context."""
        count = int(self.settings.get("max_num_seqs", 256))
        return [self._fixed(num, num) for num in range(count + 1)]

    def _fixed(self, num_tokens: int, num_samples: int) -> float:
        front = self.front
        streamed_s = front.token_s * num_samples + front.prompt_token_s * (num_tokens - num_samples)
        return self.rows(num_tokens) + self.samples(num_samples) + front.step_s + streamed_s

    def decode_step(self, num_seqs: int, context: int) -> float:
        """Return the seconds of a decode step; `context` is the sum of all."""
        known = self._decode_steps
        fixed = known[num_seqs] if num_seqs < len(known) else self._fixed(num_seqs, num_seqs)
        return fixed + self.decode_context_s * context

    def step(self, plan: StepPlan) -> float:
        """Return the seconds of any step."""
        context, pairs = 0, 0.0
        for start, count in plan.spans:
            if count == 1:
                context += start + 1
            else:
                pairs += count * (start + (count + 1) / 2)
        fixed = self._fixed(plan.num_tokens, plan.num_samples)
        return fixed + self.decode_context_s * context + self.prefill_pair_s * pairs

    def save(self, path: Path) -> None:
        """Write the costs as JSON."""
        path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> StepCosts:
        """Read a file of costs. Raises LoadtestError."""
        try:
            document = read_json(path)
            rows, samples = (_table(document.pop(name)) for name in ("rows", "samples"))
            return cls(
                rows=rows,
                samples=samples,
                front=Front(**document.pop("front", {})),
                **{name: value for name, value in document.items() if name != "copies"},  # of older files
            )
        except OSError as error:
            raise LoadtestError(f"the costs {path} cannot be read: {error.strerror}.") from None
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            what = f"{type(error).__name__}: {error}"
            raise LoadtestError(f"{path} does not hold costs as `quire calibrate` writes them ({what}).") from None


def _table(document: dict[str, Sequence[float]]) -> Table:
    at, seconds = tuple(int(count) for count in document["at"]), tuple(document["seconds"])
    if len(at) != len(seconds) or len(at) < 2 or list(at) != sorted(set(at)):
        raise ValueError("a table needs two points or more, in ascending order")
    return Table(at, seconds)
