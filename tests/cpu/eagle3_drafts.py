"""EAGLE-3 drafts for tests: checkpoints, and the published formulas in float32, of whole sequences and without a cache.

Shares no code with the engine.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, WIDTH = 32, 8, 4, 8, 48
THETA, EPS = 10000.0, 1e-5
LAYER = {
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": WIDTH,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": 16,  # no limit
    "rope_theta": THETA,
    "rms_norm_eps": EPS,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}


def random_tensors(
    vocab_size: int,
    draft_vocab_size: int,
    num_states: int,
    *,
    num_layers: int = 1,
    options: Mapping[str, Any],
    seed: int,
) -> dict[str, Tensor]:
    """Return a draft's tensors by the speculators library's names."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=generator) / columns**0.5

    def norm(size: int) -> Tensor:
        return 1 + 0.3 * torch.randn(size, generator=generator)

    tensors = {"fc.weight": matrix(HIDDEN, num_states * HIDDEN), "norm.weight": norm(HIDDEN)}
    for layer in range(num_layers):
        at, inputs = f"layers.{layer}.", HIDDEN if layer else 2 * HIDDEN
        for name, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            tensors[f"{at}self_attn.{name}_proj.weight"] = 2 * matrix(heads * HEAD_DIM, inputs)
        if options.get("model_type") == "qwen3":
            tensors |= {f"{at}self_attn.{name}_norm.weight": norm(HEAD_DIM) for name in "qk"}
        tensors[at + "self_attn.o_proj.weight"] = matrix(HIDDEN, HEADS * HEAD_DIM)
        tensors |= {f"{at}mlp.{name}_proj.weight": matrix(WIDTH, HIDDEN) for name in ("gate", "up")}
        tensors[at + "mlp.down_proj.weight"] = matrix(HIDDEN, WIDTH)
        norms = ("input_layernorm", "post_attention_layernorm", *(() if layer else ("hidden_norm",)))
        tensors |= {f"{at}{name}.weight": norm(HIDDEN) for name in norms}
    tensors["lm_head.weight"] = 4 * matrix(draft_vocab_size, HIDDEN)
    if options.get("norm_before_fc"):
        tensors["input_norm.weight"] = norm(num_states * HIDDEN)
    if options.get("fc_norm"):
        tensors |= {f"fc_norm.{index}.weight": norm(HIDDEN) for index in range(num_states)}
    if draft_vocab_size < vocab_size:
        kept = torch.randperm(vocab_size, generator=generator)[:draft_vocab_size].sort().values
        tensors["d2t"] = kept - torch.arange(draft_vocab_size)
        tensors["t2d"] = torch.zeros(vocab_size, dtype=torch.bool).index_fill_(0, kept, value=True)
    return tensors


def write_draft(
    folder: Path, tensors: Mapping[str, Tensor], vocab_size: int, options: Mapping[str, Any], *, layout: str
) -> str:
    """Write a checkpoint in the layout `original` or `speculators`; returns its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    options = dict(options)
    num_layers = 1 + sum("post_attention_layernorm" in name for name in tensors) - 1
    model_type = options.pop("model_type", "llama")
    layer = {**LAYER, "vocab_size": vocab_size, "model_type": model_type, "num_hidden_layers": num_layers}
    draft = {"draft_vocab_size": len(tensors["lm_head.weight"])}
    if layout == "original":
        nested = {key: options.pop(key) for key in ("eagle_aux_hidden_state_layer_ids",) if key in options}
        config = {"architectures": ["LlamaForCausalLMEagle3"], **layer, **draft, **options, "eagle_config": nested}
        tensors = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in tensors.items()}
    else:
        config = {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "speculators_config": {"algorithm": "eagle3", "proposal_methods": [{"speculative_tokens": 3}]},
            "transformer_layer_config": layer,
            "target_hidden_size": None,
            **draft,
            **options,
        }
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return str(folder)


class Oracle:
    """The published forward pass over all rows of one sequence."""

    def __init__(self, tensors: Mapping[str, Tensor], options: Mapping[str, Any], embedding: Tensor) -> None:
        self._tensors = {
            name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()
        }
        self._options, self._embedding = options, tensors.get("embed_tokens.weight", embedding).double()

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * self._tensors[name + ".weight"]

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return x @ self._tensors[name + ".weight"].T

    def project(self, states: Sequence[Tensor]) -> Tensor:
        """Return g of the target's states, low to high."""
        parts = [state.double() for state in states]
        if self._options.get("fc_norm"):
            parts = [self._norm(f"fc_norm.{index}", part) for index, part in enumerate(parts)]
        joined = torch.cat(parts, -1)
        if self._options.get("norm_before_fc"):
            joined = self._norm("input_norm", joined)
        return self._linear("fc", joined)

    def forward(self, ids: Tensor, states: Tensor) -> Tensor:
        """Return the next states of rows 0 .. T - 1."""
        normed = self._norm("layers.0.hidden_norm", states.double())
        joined = torch.cat((self._norm("layers.0.input_layernorm", self._embedding[ids]), normed), -1)
        x = normed if self._options.get("norm_before_residual", True) else states.double()
        for layer in range(sum(name.endswith("post_attention_layernorm.weight") for name in self._tensors)):
            at = f"layers.{layer}."
            x = x + self._attend(at, joined if layer == 0 else self._norm(at + "input_layernorm", x))
            inner = self._norm(at + "post_attention_layernorm", x)
            gate = self._linear(at + "mlp.gate_proj", inner)
            x = x + self._linear(
                at + "mlp.down_proj", gate * torch.sigmoid(gate) * self._linear(at + "mlp.up_proj", inner)
            )
        return self._norm("norm", x) if self._options.get("norm_output") else x

    def logits(self, states: Tensor, vocab_size: int) -> Tensor:
        """Return logits over the target's vocabulary."""
        normed = states if self._options.get("norm_output") else self._norm("norm", states)
        drafted = self._linear("lm_head", normed)
        logits = torch.full((len(drafted), vocab_size), -torch.inf, dtype=torch.float64)
        offsets = self._tensors.get("d2t", torch.zeros(drafted.shape[1], dtype=torch.int64)).tolist()
        logits[:, [index + offset for index, offset in enumerate(offsets)]] = drafted
        return logits

    def _attend(self, at: str, x: Tensor) -> Tensor:
        q = self._linear(at + "self_attn.q_proj", x).view(len(x), -1, HEAD_DIM)
        k = self._linear(at + "self_attn.k_proj", x).view(len(x), -1, HEAD_DIM)
        v = self._linear(at + "self_attn.v_proj", x).view(len(x), -1, HEAD_DIM)
        if f"{at}self_attn.q_norm.weight" in self._tensors:
            q, k = self._norm(at + "self_attn.q_norm", q), self._norm(at + "self_attn.k_norm", k)
        q, k = _rotate(q), _rotate(k)
        k, v = (each.repeat_interleave(q.shape[1] // k.shape[1], 1) for each in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / HEAD_DIM**0.5
        hidden = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        return self._linear(at + "self_attn.o_proj", torch.einsum("hqk,khd->qhd", weights, v).flatten(1))


def _rotate(x: Tensor) -> Tensor:
    half = HEAD_DIM // 2
    inverse = THETA ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = torch.arange(len(x), dtype=torch.float64)[:, None, None] * inverse
    first, second = x[..., :half], x[..., half:]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


# A target whose next token depends on the last two, and a draft that is right by construction. The stream of the target
# holds [code of the token, code of the token before, constants]; all codes have one length, so norms only scale. Queries
# and keys are constants, and the rotation lets a position see itself alone, or the one before alone.
CODE = 14
_CONSTANT, _BEFORE, _SHARP = 2.0, 0.7, 20.0
_FIRST, _SECOND, _LAST = slice(0, CODE), slice(CODE, 2 * CODE), slice(2 * CODE, HIDDEN)
_RMS_TOKEN = ((CODE + 4 * _CONSTANT**2) / HIDDEN) ** 0.5
_RMS_STATE = ((CODE * (1 + _BEFORE**2) + 4 * _CONSTANT**2) / HIDDEN) ** 0.5


def _sharp(num_heads: int, inputs: int, position: int = 0) -> Tensor:
    """Return a projection whose heads are one constant vector, turned by a position."""
    vector = torch.full((1, 1, HEAD_DIM), _SHARP)
    half, angles = HEAD_DIM // 2, position * THETA ** (-torch.arange(HEAD_DIM // 2) / (HEAD_DIM // 2))
    first, second = vector[..., :half], vector[..., half:]
    turned = torch.cat((first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()), -1)
    weight = torch.zeros(num_heads * HEAD_DIM, inputs)
    weight[:, _LAST] = (turned.flatten() / (4 * _CONSTANT / _RMS_TOKEN)).repeat(num_heads)[:, None]
    return weight


def _out(rows: slice) -> Tensor:
    """Return the projection of values of all query heads to some dimensions of the stream."""
    num = rows.stop - rows.start
    weight = torch.zeros(HIDDEN, HEADS, HEAD_DIM)
    group = HEADS // KV_HEADS
    for index in range(num):
        weight[rows.start + index, index // HEAD_DIM * group : (index // HEAD_DIM + 1) * group, index % HEAD_DIM] = (
            1 / group
        )
    return weight.flatten(1)


def bigram_target(vocab_size: int, num_layers: int, kept: Tensor) -> dict[str, Tensor]:
    """Return the tensors of a llama that chooses among the `kept` tokens."""
    generator = torch.Generator().manual_seed(11)
    codes = torch.tensor([[1.0 if token >> bit & 1 else -1.0 for bit in range(CODE)] for token in range(vocab_size)])
    codes = codes @ torch.linalg.qr(torch.randn(CODE, CODE, generator=generator))[0]
    table = torch.zeros(vocab_size, HIDDEN)
    table[:, _FIRST], table[:, _LAST] = codes, _CONSTANT
    head = torch.zeros(vocab_size, HIDDEN)
    head[:, _LAST] = -3.0  # other tokens are never chosen
    head[kept] = 0.6 * torch.randn(len(kept), HIDDEN, generator=generator)
    tensors = {"model.embed_tokens.weight": table, "lm_head.weight": head, "model.norm.weight": torch.ones(HIDDEN)}
    for layer in range(num_layers):
        at = f"model.layers.{layer}."
        value = torch.zeros(KV_HEADS * HEAD_DIM, HIDDEN)
        value[range(CODE), range(CODE)] = _BEFORE * _RMS_TOKEN
        out = _out(slice(CODE, 2 * CODE)) if layer == 0 else torch.zeros(HIDDEN, HEADS * HEAD_DIM)
        tensors |= {
            at + "self_attn.q_proj.weight": _sharp(HEADS, HIDDEN, -1),
            at + "self_attn.k_proj.weight": _sharp(KV_HEADS, HIDDEN),
            at + "self_attn.v_proj.weight": value,
            at + "self_attn.o_proj.weight": out,
            at + "mlp.gate_proj.weight": torch.zeros(WIDTH, HIDDEN),
            at + "mlp.up_proj.weight": torch.zeros(WIDTH, HIDDEN),
            at + "mlp.down_proj.weight": torch.zeros(HIDDEN, WIDTH),
            at + "input_layernorm.weight": torch.ones(HIDDEN),
            at + "post_attention_layernorm.weight": torch.ones(HIDDEN),
        }
    return tensors


def bigram_draft(target: Mapping[str, Tensor], kept: Tensor, *, noise: float = 0.0) -> dict[str, Tensor]:
    """Return the tensors of a draft of that target, right but for the noise, in a vocabulary of `kept` tokens."""
    generator = torch.Generator().manual_seed(13)
    vocab_size = len(target["lm_head.weight"])
    tensors = random_tensors(vocab_size, len(kept), 3, options={}, seed=1)
    value = torch.zeros(KV_HEADS * HEAD_DIM, 2 * HIDDEN)
    own, before = range(CODE), range(CODE, 2 * CODE)
    value[own, own] = _RMS_TOKEN / _RMS_STATE
    value[own, [HIDDEN + index for index in own]] = -1.0
    value[before, [HIDDEN + index for index in own]] = _BEFORE
    value[before, [HIDDEN + index for index in before]] = -1.0
    at = "layers.0."
    tensors |= {
        "fc.weight": torch.cat((torch.zeros(HIDDEN, HIDDEN), torch.eye(HIDDEN), torch.zeros(HIDDEN, HIDDEN)), 1),
        at + "self_attn.q_proj.weight": _sharp(HEADS, 2 * HIDDEN),
        at + "self_attn.k_proj.weight": _sharp(KV_HEADS, 2 * HIDDEN),
        at + "self_attn.v_proj.weight": value,
        at + "self_attn.o_proj.weight": _out(slice(0, 2 * CODE)),
        at + "mlp.down_proj.weight": torch.zeros(HIDDEN, WIDTH),
        "lm_head.weight": target["lm_head.weight"][kept],
        "d2t": kept - torch.arange(len(kept)),
        "t2d": torch.zeros(vocab_size, dtype=torch.bool).index_fill_(0, kept, value=True),
    }
    tensors |= {name: torch.ones_like(each) for name, each in tensors.items() if "norm" in name}
    for name in ("fc.weight", at + "self_attn.v_proj.weight", at + "mlp.down_proj.weight"):
        tensors[name] += noise * torch.randn(tensors[name].shape, generator=generator)
    return tensors
