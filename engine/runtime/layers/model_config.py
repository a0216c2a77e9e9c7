"""The numbers and choices that define a decoder of the Llama lineage.

The layers and decoder.py read nothing else. models/families.py fills in a ModelConfig from a checkpoint's config.json;
no later code reads that file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

from engine.core.errors import ConfigError
from engine.runtime.activation import Activation, Clamp
from engine.runtime.layers.rope_config import RopeConfig
from engine.runtime.routing import RouterConfig


class NormPlacement(Enum):
    """What a layer normalises: the inputs of attention and MLP, their outputs, or both."""

    PRE = auto()
    POST = auto()
    SANDWICH = auto()


class QKNorm(Enum):
    """How queries and keys are normalised before rotation: by head, or all heads as one."""

    NONE = auto()
    HEAD = auto()
    FULL = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class MoEConfig:
    """A mixture of experts in place of an MLP."""

    router: RouterConfig
    width: int  # of an expert
    activation: Activation
    clamp: Clamp | None = None  # replaces activation(gate) * up
    has_bias: bool = False  # of every expert's three matrices
    shared_width: int = 0  # of the expert that serves every token; 0 without one
    has_shared_gate: bool = False  # sigmoid(w x) multiplies the shared expert's output
    is_beside_mlp: bool = False  # the layer has a dense MLP, too (layers/mixture.py)
    latent_width: int = 0  # of what experts read and write; 0: the model's

    def num_weights(self, hidden_size: int) -> int:
        """Return the elements of all matrices of one layer's mixture."""
        experts = self.router.num_experts * self.width * (self.latent_width or hidden_size)
        others = self.router.num_experts + self.has_shared_gate + 2 * self.latent_width
        return (2 + self.activation.is_gated) * (experts + self.shared_width * hidden_size) + others * hidden_size


Mixtures = Sequence[MoEConfig | None]  # one a layer, None for a dense MLP


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentConfig:
    """Multi-head latent attention (MLA): sizes of its vectors.

    A token's keys and values of all heads are products with one latent of `rank` numbers. Beside it, all heads share one
    key of `rope_dim` rotated numbers.
    """

    rank: int
    nope_dim: int  # of a head's query and key, without positions
    rope_dim: int
    value_dim: int
    query_rank: int | None  # None: queries are one product with the hidden state
    is_interleaved: bool  # rotated pairs are neighbours, not halves
    has_split_kv: bool = False  # the checkpoint has k_b_proj, transposed by head, and v_b_proj instead of kv_b_proj

    def num_weights(self, hidden_size: int, num_heads: int) -> int:
        """Return the elements of a layer's matrices."""
        query = num_heads * (self.nope_dim + self.rope_dim)
        queries = query * hidden_size if self.query_rank is None else self.query_rank * (hidden_size + query)
        latents = hidden_size * (self.rank + self.rope_dim) + num_heads * (self.nope_dim + self.value_dim) * self.rank
        return queries + latents + num_heads * self.value_dim * hidden_size


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadsConfig:
    """A layer's heads; with latents `num_kv_heads` is 1, and `head_dim` that of a row of the pool."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    latent: LatentConfig | None = None
    values_are_keys: bool = False  # the checkpoint has one matrix for both, which is loaded twice
    is_gated: bool = False  # q_proj has a gate behind each head's query; its sigmoid multiplies what the head read
    has_head_gates: bool = False  # the same with one number for each head, from g_proj

    def num_weights(self, hidden_size: int) -> int:
        """Return the elements of a mixer's matrices."""
        if self.latent is not None:
            return self.latent.num_weights(hidden_size, self.num_heads)
        return hidden_size * ((2 + self.is_gated) * self.num_heads + 2 * self.num_kv_heads) * self.head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaConfig:
    """Gated DeltaNet: a matrix for each value head, in place of keys and values of all positions."""

    num_k_heads: int
    num_v_heads: int
    k_dim: int
    v_dim: int
    kernel: int  # tokens that the convolution reads
    is_tiled: bool = False  # value head h reads key head h % num_k_heads, as in GGUF files; else neighbours share one
    has_fused_rows: bool = False  # the checkpoint has in_proj_qkvz, with all rows of a key head together
    has_fused_gates: bool = False  # and in_proj_ba

    @property
    def shared(self) -> int:
        """Return how many neighbouring value heads read the same key head."""
        return 1 if self.is_tiled else self.num_v_heads // self.num_k_heads

    @property
    def channels(self) -> int:
        """Return the width of queries, keys and values, which the convolution reads."""
        return 2 * self.num_k_heads * self.k_dim + self.num_v_heads * self.v_dim

    def num_weights(self, hidden_size: int) -> int:
        """Return the elements of a mixer's matrices."""
        return hidden_size * (self.channels + 2 * self.num_v_heads * (self.v_dim + 1)) + self.kernel * self.channels


@dataclass(frozen=True, slots=True, kw_only=True)
class MambaConfig:
    """Mamba-2: a matrix for each head, in place of keys and values of all positions."""

    num_heads: int
    head_dim: int
    num_groups: int  # of heads that share what enters and leaves their matrices
    state_dim: int
    kernel: int  # tokens that the convolution reads
    has_conv_bias: bool
    has_bias: bool  # of both projections
    step_limit: tuple[float, float]
    has_norm: bool = True  # of gated results
    scales: tuple[float, ...] = (1.0,) * 5  # of projected gates, x, B, C and steps
    num_sharing: int = 1  # ranks that have heads of the same group

    @property
    def width(self) -> int:
        """Return the width of all heads."""
        return self.num_heads * self.head_dim

    @property
    def shared(self) -> int:
        """Return how many neighbouring heads are a group."""
        return self.num_heads // self.num_groups

    @property
    def channels(self) -> int:
        """Return the width of what the convolution reads."""
        return self.width + 2 * self.num_groups * self.state_dim

    def num_weights(self, hidden_size: int) -> int:
        """Return the elements of a mixer's matrices."""
        return hidden_size * (2 * self.width + self.channels + self.num_heads) + self.kernel * self.channels


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortConvConfig:
    """A convolution over the last tokens between two gates (LFM2)."""

    channels: int
    kernel: int  # tokens that it reads
    has_bias: bool = False  # of the convolution and of both matrices

    def num_weights(self, hidden_size: int) -> int:
        """Return the elements of a mixer's matrices."""
        return (4 * hidden_size + self.kernel) * self.channels


@dataclass(frozen=True, slots=True, kw_only=True)
class AltUpConfig:
    """Several residual streams (layers/altup.py)."""

    num_streams: int
    rank: int  # of the product beside attention
    scales_output: bool


RecurrentConfig = DeltaConfig | MambaConfig | ShortConvConfig


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """One layer's settings. `window` None attends to everything; `rope` None: no positions."""

    heads: HeadsConfig
    window: int | None
    rope: RopeConfig | None
    moe: MoEConfig | None = None  # None: a dense MLP
    mixer: str = "attention"  # a name in MIXERS (layer.py); "": the layer has a feed-forward alone
    beside: str = ""  # a second mixer, which reads the same rows; both results are added
    mixer_scales: tuple[float, float] = (1.0, 1.0)  # of the results of both
    recurrent: RecurrentConfig | None = None  # of a mixer without attention
    source: int | None = None  # the layer whose keys and values it reads; None: it has its own
    width: int | None = None  # of its MLP, if not the model's intermediate size
    sparsity: float = 0.0  # the share of its MLP's gates that are 0 (layers/altup.py)
    has_feed_forward: bool = True
    is_causal: bool = False  # as in an AttentionSpec
    reach: int | None = None  # likewise

    @property
    def mixers(self) -> tuple[str, ...]:
        """Return the names of its mixers: none, one or two."""
        return tuple(name for name in (self.mixer, self.beside) if name)

    @property
    def has_mlp(self) -> bool:
        """Return whether it has a dense MLP."""
        return self.has_feed_forward and (self.moe is None or self.moe.is_beside_mlp)

    @property
    def feed_forward(self) -> str:
        """Return a name in FEED_FORWARDS (layer.py); "" for none."""
        if not self.has_feed_forward:
            return ""
        if self.moe is None:
            return "mlp"
        return "beside" if self.moe.is_beside_mlp else "mixture"


def narrow_latents(setting: str) -> ConfigError:
    """Return the error for a --kv-cache-dtype that a pool of latents cannot have."""
    return ConfigError(
        f"--kv-cache-dtype is {setting!r}, and the model caches latents (MLA), which are narrow in int8 on a CPU only; "
        "leave it out."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """One model. Sizes are elements; multipliers are 1 where a family has none."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    max_positions: int
    layers: tuple[LayerConfig, ...]
    norm_eps: float
    activation: Activation
    tied_head: bool  # the LM head is the embedding
    has_head: bool = True  # False: the checkpoint was saved without one, and the model makes vectors alone
    both_ways: bool = False  # each token attends to those behind it, too

    attention_scale: float | None = None  # None: head_dim ** -0.5 of each layer
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: QKNorm = QKNorm.NONE
    qkv_clip: float | None = None  # queries, keys and values are clamped to -clip .. clip before rotation (OLMoE)
    has_sinks: bool = False  # each head has a score that joins the softmax and carries no value (gpt-oss)
    norm_placement: NormPlacement = NormPlacement.PRE
    norm_offset: bool = False  # norms scale by 1 + weight, in float32 (Gemma)
    wide_norms: bool = False  # norms scale by the weight in float32 (Gemma 4)
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    feed_forward_multiplier: float = 1.0  # of what feed-forwards read
    logit_multiplier: float = 1.0
    num_mtp_layers: int = 0  # that the checkpoint has behind the last, for later tokens; models/mtp.py
    value_norm: bool = False  # values are normalised by head, without a weight
    layer_inputs: int = 0  # the width of what a layer takes in for each token (layers/altup.py); 0: nothing
    num_input_rows: int | None = None  # of the table of these inputs; a further token has those of the first
    altup: AltUpConfig | None = None
    has_layer_scale: bool = False  # a number multiplies the stream behind each layer
    merged_checkpoint: bool = False  # the checkpoint itself holds q, k, v (and gate, up) as one matrix (Phi-3)

    @property
    def num_weights(self) -> int:
        """Return the elements of all matrices, which are nearly all of the allocation."""
        mixers = [
            (layer.heads if layer.recurrent is None or name == "attention" else layer.recurrent).num_weights(
                self.hidden_size
            )
            for layer in self.layers
            for name in layer.mixers
        ]
        unit = (2 + self.activation.is_gated) * self.hidden_size
        mlps = [
            (layer.moe.num_weights(self.hidden_size) if layer.moe else 0)
            + (unit * (layer.width or self.intermediate_size) if layer.has_mlp else 0)
            for layer in self.layers
        ]
        inputs = len(self.layers) * self.layer_inputs * (self.vocab_size + 3 * self.hidden_size)
        embeddings = self.vocab_size * (1 if self.tied_head or not self.has_head else 2)
        return self.hidden_size * embeddings + inputs + sum(mixers) + sum(mlps)
