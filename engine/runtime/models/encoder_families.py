"""The families of encoders, each as its differences from BERT. No torch: config.json is read without it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from engine.files.hf_config import HFConfig
from engine.runtime.layers.rope_config import RopeConfig
from engine.runtime.models import common_settings as common

_ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "silu": "silu",
    "relu": "relu",
}


class HeadPart(NamedTuple):
    """A part of a classifier's head: a product by its name in the checkpoint, or a norm."""

    name: str
    activation: str = ""
    has_bias: bool = True
    is_norm: bool = False
    is_last: bool = False  # it has a row for each label


_BERT_HEAD = HeadPart("pooler.dense", "tanh"), HeadPart("classifier", is_last=True)
_ROBERTA_HEAD = HeadPart("classifier.dense", "tanh"), HeadPart("classifier.out_proj", is_last=True)
DECODER_HEAD = (HeadPart("score", has_bias=False, is_last=True),)
REWARD_HEAD = HeadPart("score.0", "relu"), HeadPart("score.2", is_last=True)
DECODER_HEADS = {"eurobert": (HeadPart("dense", "gelu"), HeadPart("classifier", is_last=True))}


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderConfig:
    """One encoder."""

    vocab_size: int
    hidden_size: int
    width: int  # of the MLP
    num_heads: int
    max_positions: int
    norm_eps: float
    activation: str
    ropes: tuple[RopeConfig | None, ...]  # of each layer
    reaches: tuple[int | None, ...]  # of each layer, as in an AttentionSpec
    is_gated: bool = False
    is_pre_norm: bool = False  # norms come before the parts of a layer, and behind the last
    num_position_rows: int = 0  # of a table of positions
    first_position: int = 0  # the row of the first one
    num_types: int = 0
    qkv_bias: bool = True
    o_bias: bool = True
    up_bias: bool = True
    down_bias: bool = True
    norm_bias: bool = True
    num_distances: int = 0  # buckets of distances, each of which adds a number to a head's scores
    head: tuple[HeadPart, ...] = _BERT_HEAD

    @property
    def num_weights(self) -> int:
        """Return the elements of all matrices."""
        layer = self.hidden_size * (4 * self.hidden_size + (2 + self.is_gated) * self.width)
        return self.hidden_size * (self.vocab_size + self.num_position_rows) + len(self.ropes) * layer


def bert(hf: HFConfig) -> EncoderConfig:
    """BERT: MiniLM, BGE, E5, and others of its layout."""
    num_layers = hf.size("num_hidden_layers")
    hf.require(hf.text("position_embedding_type", "absolute") == "absolute", "position_embedding_type", "'absolute'")
    hf.refuse("is_decoder", "an encoder attends both ways")
    return EncoderConfig(
        vocab_size=hf.size("vocab_size"),
        hidden_size=hf.size("hidden_size"),
        width=hf.size("intermediate_size"),
        num_heads=hf.size("num_attention_heads"),
        max_positions=hf.size("max_position_embeddings"),
        norm_eps=hf.positive("layer_norm_eps", 1e-12),
        activation=hf.chosen("hidden_act", _ACTIVATIONS, "gelu"),
        ropes=(None,) * num_layers,
        reaches=(None,) * num_layers,
        num_position_rows=hf.size("num_position_rows", hf.size("max_position_embeddings")),
        num_types=hf.integer("type_vocab_size", 2),
    )


def roberta(hf: HFConfig) -> EncoderConfig:
    """RoBERTa and XLM-R: positions begin behind the padding's row."""
    first = hf.integer("pad_token_id", 1) + 1
    own = replace(bert(hf), first_position=first, head=_ROBERTA_HEAD)
    return replace(own, max_positions=own.num_position_rows - first)


def distilbert(hf: HFConfig) -> EncoderConfig:
    """DistilBERT: no token types; other names for the layers of a head."""
    names = {"hidden_size": "dim", "intermediate_size": "hidden_dim", "num_hidden_layers": "n_layers",
             "num_attention_heads": "n_heads", "hidden_act": "activation"}  # fmt: skip
    own = bert(_renamed(hf, names))
    return replace(own, num_types=0, head=(HeadPart("pre_classifier", "relu"), HeadPart("classifier", is_last=True)))


def mpnet(hf: HFConfig) -> EncoderConfig:
    """MPNet: scores depend on distances, too."""
    buckets = hf.size("relative_attention_num_buckets", 32)
    return replace(roberta(hf), num_types=0, num_distances=buckets)


def nomic_bert(hf: HFConfig) -> EncoderConfig:
    """NomicBERT: rotated, gated, without biases; its first checkpoints spell their config as GPT-2 does."""
    names = {"hidden_size": "n_embd", "intermediate_size": "n_inner", "num_hidden_layers": "n_layer",
             "num_attention_heads": "n_head", "max_position_embeddings": "n_positions",
             "layer_norm_eps": "layer_norm_epsilon", "rope_theta": "rotary_emb_base"}  # fmt: skip
    _require(hf, rotary_emb_fraction=1.0, rotary_emb_interleaved=False, prenorm=False, num_experts=0)
    own = _rotated(_renamed(hf, names), theta=1000.0, activation="silu", has_biases=False)
    if not hf.has("rotary_scaling_factor"):
        return own
    # The rope of a text that is longer than those of the training depends on its length.
    return replace(own, max_positions=min(own.max_positions, hf.size("max_trained_positions", 2048)))


def gte(hf: HFConfig) -> EncoderConfig:
    """GTE's own encoder: rotated and gated, with biases but for gates and ups."""
    own = _rotated(hf, theta=160_000.0, activation="gelu", has_biases=True)
    return replace(own, num_types=hf.integer("type_vocab_size", 1))


def new(hf: HFConfig) -> EncoderConfig:
    """GTE's own encoder as its authors publish it, whose rope may be stretched."""
    _require(hf, position_embedding_type="rope", layer_norm_type="layer_norm", logn_attention_scale=False)
    scaling, theta = hf.section("rope_scaling"), hf.positive("rope_theta", 10_000.0)
    if scaling.text("type", "") != "ntk":
        return gte(HFConfig({**hf.values, "rope_theta": theta}, hf.source))
    _require(scaling, mixed_b=None)
    factor, width = scaling.positive("factor"), hf.size("hidden_size") // hf.size("num_attention_heads")
    linear = {"type": "linear", "factor": factor ** (2 / width)}  # with the longer base: NTK as its authors compute it
    return gte(HFConfig({**hf.values, "rope_theta": theta * factor, "rope_scaling": linear}, hf.source))


def modernbert(hf: HFConfig) -> EncoderConfig:
    """ModernBERT: norms before parts, windows, two ropes."""
    every, num_layers = hf.size("global_attn_every_n_layers", 3), hf.size("num_hidden_layers")
    types = [common.SLIDING if i % every else common.FULL for i in range(num_layers)]
    ropes = common.ropes_by_type(
        _renamed(hf, {"rope_theta": "global_rope_theta"}, num_key_value_heads=hf.size("num_attention_heads")),
        types, local_theta=hf.positive("local_rope_theta", 10_000.0), theta=160_000.0,
    )  # fmt: skip
    reach, bias, mlp_bias = hf.size("local_attention", 128) // 2, hf.flag("attention_bias"), hf.flag("mlp_bias")
    kinds = common.layer_types(hf, types)
    has_bias = hf.flag("classifier_bias")
    activation = hf.chosen("classifier_activation", _ACTIVATIONS, "gelu")
    return EncoderConfig(
        vocab_size=hf.size("vocab_size"),
        hidden_size=hf.size("hidden_size"),
        width=hf.size("intermediate_size"),
        num_heads=hf.size("num_attention_heads"),
        max_positions=hf.size("max_position_embeddings"),
        norm_eps=hf.positive("norm_eps", 1e-5),
        activation=hf.chosen("hidden_activation", _ACTIVATIONS, "gelu"),
        ropes=tuple(ropes),
        reaches=tuple(reach if kind == common.SLIDING else None for kind in kinds),
        is_gated=True,
        is_pre_norm=True,
        qkv_bias=bias,
        o_bias=bias,
        up_bias=mlp_bias,
        down_bias=mlp_bias,
        norm_bias=hf.flag("norm_bias"),
        head=(HeadPart("head.dense", activation, has_bias=has_bias), HeadPart("head.norm", is_norm=True),
              HeadPart("classifier", is_last=True)),
    )  # fmt: skip


ENCODERS: Mapping[str, Callable[[HFConfig], EncoderConfig]] = {
    "bert": bert,
    "roberta": roberta,
    "xlm-roberta": roberta,
    "camembert": roberta,
    "distilbert": distilbert,
    "mpnet": mpnet,
    "nomic_bert": nomic_bert,
    "gte": gte,
    "new": new,
    "modernbert": modernbert,
}


def read_encoder(hf: HFConfig) -> EncoderConfig:
    """Return the settings of an encoder. Raises ModelLoadError."""
    own = ENCODERS[hf.text("model_type")](hf)
    hf.require(own.hidden_size % own.num_heads == 0, "hidden_size", f"a multiple of its {own.num_heads} heads")
    return own


def _require(hf: HFConfig, **wanted: object) -> None:
    """Raise ModelLoadError for a config that has other values."""
    for key, value in wanted.items():
        hf.require(not hf.has(key) or hf.values[key] == value, key, repr(value))


def _rotated(hf: HFConfig, *, theta: float, activation: str, has_biases: bool) -> EncoderConfig:
    num_layers = hf.size("num_hidden_layers")
    own = bert(HFConfig({**hf.values, "hidden_act": "gelu", "position_embedding_type": "absolute"}, hf.source))
    return replace(
        own,
        activation=hf.chosen("hidden_act", _ACTIVATIONS, activation),
        ropes=(common.rope(hf, theta=theta),) * num_layers,
        is_gated=True,
        num_position_rows=0,
        qkv_bias=has_biases,
        o_bias=has_biases,
        up_bias=False,
        down_bias=has_biases,
    )


def _renamed(hf: HFConfig, names: Mapping[str, str], **more: object) -> HFConfig:
    """Return a config that has the usual names for other ones, where it lacks the usual."""
    found = {ours: hf.values[theirs] for ours, theirs in names.items() if hf.has(theirs)}
    return HFConfig({**found, **{key: each for key, each in hf.values.items() if each is not None}, **more}, hf.source)
