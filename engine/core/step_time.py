"""How long a step takes, learned from the steps that were: a linear model, fitted anew with each of them.

    seconds = fixed + chunked * (1 with prompts, else 0) + a * decodes + b * decode context + c * prompt tokens + d * prompt context

A Kalman filter over coefficients that drift slowly, in relative errors: a step of 100 ms that is 5 ms off weighs as one of
10 ms that is 0.5 ms off. An outlier moves little: a step that took far too long enters with the small weight of a long step,
and the error of one that was far too short is bounded. Engine thread; knows no clock, only the seconds it is told.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf, sqrt
from operator import mul
from typing import NamedTuple

from engine.core.step import SequenceSlice

# What one unit of each feature costs beside the fixed part, in orders of magnitude: they start as far as they may reach.
# Measured: SmolLM2-135M on two cores 1 : 0 : 0.12 : 1e-4 : 0.06 : 3e-5; figures for an 8B model on a GPU are less, but the first.
_SCALES = (1.0, 0.05, 0.1, 1e-4, 0.05, 3e-5)
_SURE = 10.0  # so many times its scale a coefficient may be at first
_DRIFT = 0.002  # of its scale a coefficient may wander in a step: 50 steps make up for a change
_NOISE = 0.1  # of a step's seconds are chance
_MIN_CHUNKS = 4  # steps with prompts before anything is said about them


class Load(NamedTuple):
    """What a step computes. A context is a sum over tokens: of the positions each of them attends to."""

    num_decodes: int = 0
    decode_context: int = 0
    num_prompt_tokens: int = 0
    prompt_context: float = 0.0

    def with_chunk(self, start: int, count: int) -> Load:
        """And `count` positions of a prompt from `start`."""
        tokens, context = self.num_prompt_tokens + count, self.prompt_context + count * (start + count / 2)
        return self._replace(num_prompt_tokens=tokens, prompt_context=context)

    @property
    def features(self) -> tuple[float, ...]:
        return (
            1.0,
            float(self.num_prompt_tokens > 0),
            float(self.num_decodes),
            float(self.decode_context),
            float(self.num_prompt_tokens),
            self.prompt_context,
        )


class Costs(NamedTuple):
    """Seconds that a step's parts take, none of them negative; whatever is made of them only grows with the load."""

    fixed_s: float
    chunked_s: float
    decode_s: float
    context_s: float
    token_s: float
    pair_s: float

    def chunk_s(self, start: int, count: int) -> float:
        """What so many positions of a prompt add to a step that has prompts already."""
        return count * (self.token_s + self.pair_s * (start + count / 2))


def decode_load(slices: Sequence[SequenceSlice]) -> Load:
    """That of slices of one token each."""
    return Load(len(slices), sum([piece.start for piece in slices]))


class StepTime:
    """learn from what steps took; then ask what one will take, or how much of a prompt fits so many seconds."""

    __slots__ = ("_costs", "_covariance", "_limits", "_num_chunks", "weights")

    def __init__(self) -> None:
        self.weights = [0.0] * len(_SCALES)
        self._covariance: list[list[float]] = []  # empty until the first step tells the order of magnitude
        self._limits: list[float] = []  # of its diagonal
        self._num_chunks = 0
        self._costs: Costs | None = None  # by these weights, if anybody has asked

    @property
    def is_known(self) -> bool:
        """True once there is enough to go by."""
        return self._num_chunks >= _MIN_CHUNKS

    def learn(self, load: Load, seconds: float) -> None:
        """A step of this load took so long."""
        if seconds <= 0:
            return
        features = load.features
        if not self._covariance:
            self._limits = [(_SURE * scale * seconds) ** 2 for scale in _SCALES]
            self._covariance = [[limit * (i == j) for j in range(len(_SCALES))] for i, limit in enumerate(self._limits)]
        self._num_chunks += load.num_prompt_tokens > 0
        expected = _dot(self.weights, features)
        unit = max(seconds, expected)
        row = [feature / unit for feature in features]
        spread = [_dot(line, row) for line in self._covariance]
        total = _NOISE**2 + _dot(row, spread)
        error = (seconds - expected) / unit
        self.weights = [weight + s * error / total for weight, s in zip(self.weights, spread, strict=True)]
        self._settle(spread, total)
        self._costs = None

    def seconds(self, load: Load) -> float:
        """What a step of this load will take."""
        return max(_dot(self.weights, load.features), 0.0)

    @property
    def costs(self) -> Costs:
        """Of each part, where that is known.

        Steps that are much alike do not tell one part from another, and some weight comes out below 0. It is taken to be
        0, and the others to be what they are likeliest to be then, so that together they still say what was seen.
        """
        if self._costs is None:
            self._costs = Costs(*_non_negative(self.weights, self._covariance))
        return self._costs

    @property
    def fixed_s(self) -> float:
        """What a step with prompts costs, however little is in it."""
        return max(self.weights[0] + self.weights[1], 0.0)

    @property
    def chunked_s(self) -> float:
        """What the presence of prompts costs, however few, if they go through all layers."""
        return max(self.weights[1], 0.0)

    def chunk_s(self, start: int, count: int) -> float:
        """What so many positions of a prompt add to a step that has prompts already."""
        token_s, context_s = self._prompt_costs
        return count * (token_s + context_s * (start + count / 2))

    def tokens_within(self, seconds: float, start: int) -> float:
        """How many positions of a prompt, from `start`, can be added for so many seconds; 0 for none or less."""
        if seconds <= 0 or seconds == inf:
            return max(seconds, 0.0)
        token_s, context_s = self._prompt_costs
        slope = token_s + context_s * start
        root = slope + sqrt(slope * slope + 2 * context_s * seconds)
        return 2 * seconds / root if root > 0 else inf

    @property
    def _prompt_costs(self) -> tuple[float, float]:
        return max(self.weights[4], 0.0), max(self.weights[5], 0.0)

    def _settle(self, spread: list[float], total: float) -> None:
        """Be surer of what was just seen, and less sure of everything by a little, but never less than at first."""
        covariance, limits = self._covariance, self._limits
        shrink = []
        for i, line in enumerate(covariance):
            gain = spread[i] / total
            covariance[i] = line = [value - gain * s for value, s in zip(line, spread, strict=True)]
            line[i] += limits[i] * (_DRIFT / _SURE) ** 2
            shrink.append(sqrt(limits[i] / line[i]) if line[i] > limits[i] else 1.0)
        if min(shrink) < 1.0:
            self._covariance = [
                [value * shrink[i] * shrink[j] for j, value in enumerate(line)] for i, line in enumerate(covariance)
            ]


def _non_negative(weights: list[float], covariance: list[list[float]]) -> list[float]:
    """The mean of a normal distribution under the condition that what is negative is 0: the worst first, until none is."""
    for _ in weights:
        if (worst := min(weights)) >= 0.0:
            break
        at = weights.index(worst)
        line = covariance[at]
        gain = [other[at] / line[at] if line[at] > 0.0 else 0.0 for other in covariance]
        weights = [weight - share * worst for weight, share in zip(weights, gain, strict=True)]
        weights[at] = 0.0
        covariance = [
            [value - share * other for value, other in zip(row, line, strict=True)]
            for share, row in zip(gain, covariance, strict=True)
        ]
    return [max(weight, 0.0) for weight in weights]  # a 0 may come out as less by rounding


def _dot(left: Iterable[float], right: Iterable[float]) -> float:
    total: float = sum(map(mul, left, right))  # two fifths of the time of a list: eight of them were half of `learn`
    return total
