"""What a decoder of the Llama lineage is, as numbers and choices: all that layers.py and decoder.py look at.

models/families.py fills a ModelConfig in, from a checkpoint's own words; nothing past that point reads a config.json.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from engine.runtime.models.rope_config import RopeConfig


class Activation(Enum):
    """What the gate of an MLP goes through."""

    SILU = auto()
    GELU_TANH = auto()
    GELU = auto()


class NormPlacement(Enum):
    """Where a layer norms: what goes into attention and MLP, what comes out of them, or both."""

    PRE = auto()
    POST = auto()
    SANDWICH = auto()


class QKNorm(Enum):
    """Whether queries and keys are normed before they are rotated: each head alone, or all heads as one vector."""

    NONE = auto()
    HEAD = auto()
    FULL = auto()


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """How one layer differs from its neighbours. `window` None sees everything; `rope` None has no positions."""

    window: int | None
    rope: RopeConfig | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """One model. Sizes are elements; multipliers are 1 where a family has none."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    layers: tuple[LayerConfig, ...]
    norm_eps: float
    activation: Activation
    tied_head: bool  # the LM head is the embedding
    attention_scale: float

    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: QKNorm = QKNorm.NONE
    norm_placement: NormPlacement = NormPlacement.PRE
    norm_offset: bool = False  # norms scale by 1 + weight, in float32 (Gemma)
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logit_multiplier: float = 1.0
    merged_checkpoint: bool = False  # the checkpoint itself holds q, k, v (and gate, up) as one matrix (Phi-3)

    @property
    def num_weights(self) -> int:
        """Elements of the matrices, which are nearly all that is allocated."""
        heads = (2 * self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        layer = self.hidden_size * (heads + 3 * self.intermediate_size)
        return self.vocab_size * self.hidden_size * (1 if self.tied_head else 2) + len(self.layers) * layer
