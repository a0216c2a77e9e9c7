"""The shapes of the models of the comparison."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "granite": "GraniteForCausalLM",
    "granitemoe": "GraniteMoeForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "gpt-oss": "GptOssForCausalLM",
}


@dataclass(frozen=True, slots=True)
class Shape:
    """A decoder of the Llama lineage."""

    name: str
    arch: str  # the model type of its config.json
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int  # of one expert in a mixture
    vocab: int
    context: int
    rope_base: float
    norm_eps: float
    bias: bool = False  # of Q, K and V
    is_tied: bool = True
    experts: int = 0
    chosen: int = 0  # experts of a token
    qk_norm: str = ""  # of queries and keys: "whole", or each "head"
    is_embedded: bool = False  # its weights come with Quire; others are random
    stds: tuple[float, float] = (0.02, 0.02)  # of random embeddings, and of random matrices
    more: Mapping[str, Any] = field(default_factory=dict)  # other fields of config.json

    @property
    def layer_weights(self) -> int:
        """Return the weights that every token multiplies."""
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.ffn * max(self.chosen, 1) + self.hidden * self.experts)

    @property
    def decode_weights(self) -> int:
        """Return the weights that a generated token multiplies, which include the head."""
        return self.layer_weights + self.vocab * self.hidden

    def config(self) -> dict[str, Any]:
        """Return its config.json."""
        return {
            "architectures": [_ARCHITECTURES[self.arch]],
            "model_type": self.arch,
            "hidden_size": self.hidden,
            "intermediate_size": self.ffn,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": self.context,
            "rms_norm_eps": self.norm_eps,
            "rope_theta": self.rope_base,
            "vocab_size": self.vocab,
            "tie_word_embeddings": self.is_tied,
            "torch_dtype": "bfloat16",
            **({"num_experts_per_tok": self.chosen} if self.chosen else {}),
            **self.more,
        }


_SHAPES = (
    Shape("smollm2-135m", "llama", 30, 576, 9, 3, 64, 1536, 49152, 8192, 1e5, 1e-5, is_embedded=True),
    Shape("qwen2.5-0.5b", "qwen2", 24, 896, 14, 2, 64, 4864, 151936, 32768, 1e6, 1e-6, bias=True),
    Shape("qwen2.5-1.5b", "qwen2", 28, 1536, 12, 2, 128, 8960, 151936, 32768, 1e6, 1e-6, bias=True),
    Shape(
        "granite-3.1-1b-a400m", "granitemoe", 24, 1024, 16, 8, 64, 512, 49155, 131072, 1.5e6, 1e-6, experts=32, chosen=8,
        more={"num_local_experts": 32, "embedding_multiplier": 12.0, "attention_multiplier": 0.015625,
              "residual_multiplier": 0.22, "logits_scaling": 6.0},
    ),
    Shape(
        "olmoe-1b-7b", "olmoe", 16, 2048, 16, 16, 128, 1024, 50304, 4096, 1e4, 1e-5, is_tied=False, experts=64, chosen=8,
        qk_norm="whole", more={"num_experts": 64, "norm_topk_prob": False},
    ),
    # Those of Red Hat's suite for CPUs (`redhat-et/vllm-cpu-perf-eval`); Llama's without the scaling of its angles.
    Shape("tinyllama-1.1b", "llama", 22, 2048, 32, 4, 64, 5632, 32000, 2048, 1e4, 1e-5, is_tied=False),
    Shape("llama-3.2-1b", "llama", 16, 2048, 32, 8, 64, 8192, 128256, 131072, 5e5, 1e-5),
    Shape("llama-3.2-3b", "llama", 28, 3072, 24, 8, 128, 8192, 128256, 131072, 5e5, 1e-5),
    Shape(
        "granite-3.2-2b", "granite", 40, 2048, 32, 8, 64, 8192, 49155, 131072, 5e6, 1e-5,
        more={"embedding_multiplier": 12.0, "attention_multiplier": 0.015625, "residual_multiplier": 0.22, "logits_scaling": 8.0},
    ),
    Shape("qwen3-0.6b", "qwen3", 28, 1024, 16, 8, 128, 3072, 151936, 40960, 1e6, 1e-6, qk_norm="head"),
    Shape(  # half of its 24 layers; GGUF alone
        "gpt-oss-20b-12", "gpt-oss", 12, 2880, 64, 8, 64, 2880, 201088, 131072, 1.5e5, 1e-5, bias=True, is_tied=False,
        experts=32, chosen=4,
    ),
    Shape("qwen2.5-3b", "qwen2", 36, 2048, 16, 2, 128, 11008, 151936, 32768, 1e6, 1e-6, bias=True),
)  # fmt: skip
HYBRIDS: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("hybrids.json").read_text(encoding="utf-8"))
COMPARED = {shape.name: shape for shape in _SHAPES}
