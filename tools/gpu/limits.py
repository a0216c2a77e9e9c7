"""The least time that a GPU needs for the work of a model.

A limit counts what cannot be avoided: weights and K/V are read once at the measured copy bandwidth, products run at the
measured matrix rate, one after the other. Launches, softmax, norms and sampling cost nothing here, so no engine reaches
a limit. Seconds, bytes and floating-point operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from loadtest.shapes import Shape

LINEAR_BYTES = 2.0  # of a weight in bfloat16
KV_BYTES = 2.0


class Rates(NamedTuple):
    """The measured rates of the GPU."""

    copy_bytes_per_s: float  # bytes read and bytes written, together
    bf16_flops: float


def attention_flops(num_heads: int, head_dim: int, query_lens: Sequence[int]) -> float:
    """Return the operations of causal attention over whole prompts in one layer."""
    return sum(2.0 * num_heads * head_dim * length * length for length in query_lens)


class Limits:
    """The least seconds for the work of a shape on a GPU."""

    def __init__(
        self, shape: Shape, rates: Rates, *, linear_bytes: float = LINEAR_BYTES, kv_bytes: float = KV_BYTES
    ) -> None:
        self._shape, self._rates = shape, rates
        self._weight_bytes = shape.decode_weights * linear_bytes
        self._kv_bytes = 2 * shape.layers * shape.kv_heads * shape.head_dim * kv_bytes

    def decode_step_s(self, batch: int, total_context: float) -> float:
        """Return the seconds of a decode step; `total_context` is the sum over the batch."""
        read_s = self._weight_bytes / self._rates.copy_bytes_per_s
        multiply_s = 2.0 * self._shape.decode_weights * batch / self._rates.bf16_flops
        return max(read_s, multiply_s) + total_context * self._kv_bytes / self._rates.copy_bytes_per_s

    def prefill_s(self, lens: Sequence[int]) -> float:
        """Return the seconds of whole prompts that are limited by products."""
        shape = self._shape
        flops = 2.0 * shape.layer_weights * sum(lens)
        flops += shape.layers * attention_flops(shape.heads, shape.head_dim, lens)
        return flops / self._rates.bf16_flops

    def generate_s(self, prompt_lens: Sequence[int], output_lens: Sequence[int]) -> float:
        """Return the seconds of all prompts, then of all answers side by side."""
        total = self.prefill_s(prompt_lens)
        for step in range(1, max(output_lens)):  # the prompt's step draws the first token
            contexts = [prompt + step for prompt, output in zip(prompt_lens, output_lens, strict=True) if output > step]
            total += self.decode_step_s(len(contexts), sum(contexts))
        return total
