"""What --metrics-compat vllm exports of each completed request beside the engine's own numbers. Event loop.

Names, labels and buckets are vLLM's. Requests are counted as its users do: one of n choices is one request with n
answers. Lines of batches, and requests that were cut short, are left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, Histogram

from engine.core.types import Request
from server.telemetry.timeline import CompletedChoice

_SECONDS = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0,
    7680.0,
)  # fmt: skip
_CHOICES = (1, 2, 5, 10, 20)
_LABELS = ("model_name", "engine")


def steps_to(limit: int) -> Iterator[int]:
    """1, 2, 5, 10, 20, 50, ... up to a limit."""
    scale = 1
    while True:
        for step in (scale, 2 * scale, 5 * scale):
            if step > limit:
                return
            yield step
        scale *= 10


class VllmRequestMetrics:
    """Histograms of requests, each observed once at a request's end."""

    def __init__(self, registry: CollectorRegistry, model_name: str, max_model_len: int) -> None:
        def histogram(name: str, text: str, buckets: Sequence[float]) -> Histogram:
            return Histogram(name, text, _LABELS, buckets=buckets, registry=registry).labels(model_name, "0")

        tokens = tuple(steps_to(max_model_len))
        self._inference = histogram(
            "vllm:request_inference_time_seconds", "First scheduled until the last token, of each choice.", _SECONDS
        )
        self._n = histogram("vllm:request_params_n", "The parameter n of completed requests.", _CHOICES)
        self._max_tokens = histogram(
            "vllm:request_params_max_tokens", "The parameter max_tokens of completed requests.", tokens
        )
        self._longest = histogram(
            "vllm:request_max_num_generation_tokens", "Tokens of the longest choice of completed requests.", tokens
        )

    def ended(self, requests: Sequence[Request], choices: Sequence[CompletedChoice | None]) -> None:
        """Requests that were answered together; `choices` are those of each in turn, None where one was cut short."""
        start = 0
        for request in requests:
            own = choices[start : start + request.params.n]
            start += request.params.n
            completed = [choice for choice in own if choice is not None]
            if len(completed) < len(own):
                continue
            for choice in completed:
                self._inference.observe(choice.inference_s)
            self._n.observe(request.params.n)
            if request.params.max_tokens:
                self._max_tokens.observe(request.params.max_tokens)
            self._longest.observe(max(choice.num_tokens for choice in completed))
