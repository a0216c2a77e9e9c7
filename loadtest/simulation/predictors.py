"""What sjf may go by in a simulation, beside what it learns: what clients allow, and the truth, which nobody has."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from engine.core.length_predictor import LengthPredictor, Predictor
from engine.core.types import Request
from loadtest.simulation.trace import TraceRequest


class MaxTokens:
    """Every answer is as long as it may be."""

    def predict(self, request: Request) -> float:
        return float(request.params.max_tokens)

    def learn(self, request: Request, num_tokens: int, *, is_cut: bool) -> None:
        """Nothing to learn."""


class Oracle:
    """Every answer is as long as it will be."""

    def __init__(self, rows: Sequence[TraceRequest]) -> None:
        self._rows = rows

    def predict(self, request: Request) -> float:
        return float(self._rows[int(request.request_id)].output_tokens)  # as trace.to_request names them

    def learn(self, request: Request, num_tokens: int, *, is_cut: bool) -> None:
        """Nothing to learn."""


class Watched:
    """Another predictor, whose predictions are kept, by row."""

    def __init__(self, inner: Predictor) -> None:
        self.predicted: dict[int, float] = {}
        self._inner = inner

    def predict(self, request: Request) -> float:
        found = self.predicted[int(request.request_id)] = self._inner.predict(request)
        return found

    def learn(self, request: Request, num_tokens: int, *, is_cut: bool) -> None:
        self._inner.learn(request, num_tokens, is_cut=is_cut)


PREDICTORS: Mapping[str, Callable[[Sequence[TraceRequest]], Predictor]] = {
    "max_tokens": lambda _: MaxTokens(),
    "learned": lambda _: LengthPredictor(),
    "oracle": Oracle,
}
