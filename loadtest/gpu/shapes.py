"""The models that are measured, as shapes, and the least time that a card needs for their work. Standard library only.

A limit counts what cannot be avoided: weights and K/V read once at the copy bandwidth that was measured, products at the
matrix rate that was measured, one after the other. Launches, softmax, norms and sampling cost nothing here, so no engine
reaches a limit. Seconds, bytes and floating-point operations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

LINEAR_BYTES = 2.0  # of a weight in bfloat16
KV_BYTES = 2.0


class Rates(NamedTuple):
    """What the card does, as measured on it."""

    copy_bytes_per_s: float  # bytes read and bytes written, together
    bf16_flops: float


@dataclass(frozen=True, slots=True)
class Shape:
    """A decoder of the Llama lineage: `config` is its config.json."""

    name: str
    config: Mapping[str, Any]

    @property
    def num_layers(self) -> int:
        return int(self.config["num_hidden_layers"])

    @property
    def num_heads(self) -> int:
        return int(self.config["num_attention_heads"])

    @property
    def num_kv_heads(self) -> int:
        return int(self.config["num_key_value_heads"])

    @property
    def head_dim(self) -> int:
        return int(self.config["head_dim"])

    @property
    def hidden(self) -> int:
        return int(self.config["hidden_size"])

    @property
    def ffn(self) -> int:
        return int(self.config["intermediate_size"])

    @property
    def vocab(self) -> int:
        return int(self.config["vocab_size"])

    @property
    def layer_weights(self) -> int:
        """What every token multiplies, of a prompt or generated."""
        attention = 2 * self.hidden * self.head_dim * (self.num_heads + self.num_kv_heads)
        return self.num_layers * (attention + 3 * self.hidden * self.ffn)

    @property
    def decode_weights(self) -> int:
        """What a generated token multiplies: the head besides."""
        return self.layer_weights + self.vocab * self.hidden

    @property
    def kv_numbers(self) -> int:
        """Numbers of K and V that one token leaves behind."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim


def attention_flops(num_heads: int, head_dim: int, query_lens: Sequence[int]) -> float:
    """Both products of causal attention over whole prompts, one layer."""
    return sum(2.0 * num_heads * head_dim * length * length for length in query_lens)


class Limits:
    """The least seconds for a shape's work on a card."""

    def __init__(
        self, shape: Shape, rates: Rates, *, linear_bytes: float = LINEAR_BYTES, kv_bytes: float = KV_BYTES
    ) -> None:
        self._shape, self._rates = shape, rates
        self._weight_bytes = shape.decode_weights * linear_bytes
        self._kv_bytes = shape.kv_numbers * kv_bytes

    def decode_step_s(self, batch: int, total_context: float) -> float:
        """One step of `batch` sequences whose contexts add up to `total_context` tokens."""
        read_s = self._weight_bytes / self._rates.copy_bytes_per_s
        multiply_s = 2.0 * self._shape.decode_weights * batch / self._rates.bf16_flops
        return max(read_s, multiply_s) + total_context * self._kv_bytes / self._rates.copy_bytes_per_s

    def prefill_s(self, lens: Sequence[int]) -> float:
        """Whole prompts, large enough together that products and not weights take the time."""
        shape = self._shape
        flops = 2.0 * shape.layer_weights * sum(lens)
        flops += shape.num_layers * attention_flops(shape.num_heads, shape.head_dim, lens)
        return flops / self._rates.bf16_flops

    def generate_s(self, prompt_lens: Sequence[int], output_lens: Sequence[int]) -> float:
        """All prompts first, then all answers side by side until the longest is done."""
        total = self.prefill_s(prompt_lens)
        for step in range(1, max(output_lens)):  # an answer's first token comes of its prompt
            contexts = [prompt + step for prompt, output in zip(prompt_lens, output_lens, strict=True) if output > step]
            total += self.decode_step_s(len(contexts), sum(contexts))
        return total


_COMMON = {
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "head_dim": 128,
    "num_key_value_heads": 8,
    "torch_dtype": "bfloat16",
}
QWEN3_06B = Shape(
    "qwen3-0.6b",
    _COMMON
    | {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "tie_word_embeddings": True,
    },
)
LLAMA_8B = Shape(
    "llama-3.1-8b",
    _COMMON
    | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5e5,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "tie_word_embeddings": False,
    },
)
_TINY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 1024,
}
SHAPES = {shape.name: shape for shape in (QWEN3_06B, LLAMA_8B)}
TINY_SHAPES = {name: Shape(name, {**shape.config, **_TINY}) for name, shape in SHAPES.items()}  # of a rehearsal
