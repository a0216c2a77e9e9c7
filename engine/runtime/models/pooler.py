"""Pools final hidden states, and what comes behind: the dense modules of an embedder, or the head of a classifier.

Modules and heads compute in float32, row by row alike. States are summed as integers in units of POOLED_UNIT: a floating
point sum depends on where it is split, and a prompt is split into chunks by each step's budget. Integers add exactly, so a
vector has the same bits alone, in a batch and in chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import tokenizers
import torch
import torch.nn.functional as F  # noqa: N812 - its name everywhere
from torch import Tensor

from engine.core.errors import ModelLoadError
from engine.core.rows import SequenceSlice
from engine.core.step import POOLED_UNIT
from engine.files.hf_config import HFConfig
from engine.files.vector_files import VectorSettings
from engine.runtime.layers.model_config import ModelConfig
from engine.runtime.layers.parts import Load, Maker
from engine.runtime.models.encoder_families import DECODER_HEAD, DECODER_HEADS, REWARD_HEAD, EncoderConfig, HeadPart
from engine.runtime.schemes.linear import pack
from engine.runtime.weights.checkpoint import Cut, StoredTensor, cut
from engine.runtime.weights.safetensors import SafetensorsFile, read_tensors

Part = Callable[[Tensor], Tensor]

ACTIVATIONS: Mapping[str, Part] = {
    "tanh": torch.tanh,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
}


class Pooler:
    """Functions of a pooled state, one after the other; of each token's, whose results are pooled, if it `comes_first`."""

    def __init__(self, size: int, *, comes_first: bool = False) -> None:
        self.parts: list[Part] = []
        self.size, self.comes_first = size, comes_first

    def __call__(self, states: Tensor) -> Tensor:
        """Return [P, size] float32 of states [P, hidden]."""
        x = states.float()
        for part in self.parts:
            x = part(x)
        return x


def make_pooler(
    settings: VectorSettings,
    config: HFConfig,
    own: ModelConfig | EncoderConfig,
    make: Maker,
    path: Path,
) -> Pooler | None:
    """Return what a model has behind pooling, loaded with it by `make`; None for nothing. Raises ModelLoadError."""
    if settings.dense:
        pooler = Pooler(settings.dense[-1].num_outputs)
        for module in settings.dense:
            if isinstance(module.place, str):
                pooler.parts.append(
                    make.linear({module.place: module.num_outputs}, module.num_inputs, bias=module.has_bias)
                )
                continue
            weight, bias = _stored(module.place, (module.num_outputs, module.num_inputs), has_bias=module.has_bias)
            bias = None if bias is None else bias.to(make.device)
            pooler.parts += [pack(weight.to(make.device), bias), *_activation(module.activation)]
        return pooler
    if not settings.labels:
        return None
    hidden = own.hidden_size
    head = own.head if isinstance(own, EncoderConfig) else DECODER_HEADS.get(config.text("model_type"), DECODER_HEAD)
    head = REWARD_HEAD if settings.is_reward else head
    in_file = config.section("parts_behind").values
    if in_file:
        inner = "gelu" if config.text("model_type") == "modernbert" else "tanh"
        head = tuple(
            HeadPart(name, inner if name == "cls" else "", bool(sizes[-1]), name == "cls.norm", name == "cls.output")
            for name, sizes in in_file.items()
        )
    pooler = Pooler(len(settings.labels), comes_first=config.text("classifier_pooling", "") == "late")
    if settings.label_tokens and not in_file:
        _from_tokens(pooler, settings, config, hidden, make, path)
        return pooler
    for part in head:
        if part.is_norm:
            weight = make.tensor(f"{part.name}.weight", hidden)
            norm_bias = make.tensor(f"{part.name}.bias", hidden) if config.flag("norm_bias") else None
            pooler.parts.append(
                partial(F.layer_norm, normalized_shape=(hidden,), weight=weight, bias=norm_bias, eps=own.norm_eps)
            )
            continue
        rows = len(settings.labels) + settings.is_difference if part.is_last else hidden
        pooler.parts += [make.linear({part.name: rows}, hidden, bias=part.has_bias), *_activation(part.activation)]
    if settings.is_difference:  # of the rows of Qwen3-Reranker's yes and no
        pooler.parts.append(lambda scores: scores[:, :1] - scores[:, 1:])
    return pooler


def _activation(name: str) -> list[Part]:
    return [ACTIVATIONS[name]] if name else []


def _stored(folder: Path, shape: tuple[int, int], *, has_bias: bool) -> tuple[Tensor, Tensor | None]:
    """Return the weight and the bias of a dense module. Raises ModelLoadError."""
    found = {
        tensor.name: tensor for tensor in read_tensors(SafetensorsFile(folder / "model.safetensors"), HFConfig({}, ""))
    }
    made = {"linear.weight": torch.empty(shape), **({"linear.bias": torch.empty(shape[0])} if has_bias else {})}
    for name, tensor in made.items():
        if name not in found or found[name].shape != tuple(tensor.shape):
            raise ModelLoadError(f"{folder} lacks {name!r} of shape {list(tensor.shape)}; download the model again.")
        found[name].copy_to(tensor)
    return made["linear.weight"], made.get("linear.bias")


def _from_tokens(
    pooler: Pooler, settings: VectorSettings, config: HFConfig, hidden: int, make: Maker, path: Path
) -> None:
    """Add a product with the rows of some tokens in the LM head, or in the embedding that is one."""
    file = path / "tokenizer.json"
    if not file.is_file():
        raise ModelLoadError(f"'classifier_from_token' needs {file}, which is missing.")
    backend = tokenizers.Tokenizer.from_file(str(file))
    found = [backend.token_to_id(token) for token in settings.label_tokens]
    ids = [token_id for token_id in found if token_id is not None]
    config.require(len(ids) >= len(found), "classifier_from_token", "tokens of the model's tokenizer")
    name = "model.embed_tokens.weight" if config.flag("tie_word_embeddings") else "lm_head.weight"
    shape = config.size("vocab_size"), hidden

    def take(stored: Mapping[str, StoredTensor]) -> None:
        rows = torch.empty(len(ids), hidden)
        for row, token_id in zip(rows, ids, strict=True):
            cut(stored[name], Cut(token_id, 1, shape[0])).copy_to(row[None])
        wanted = rows[1:] - rows[:1] if settings.is_difference else rows
        pooler.parts.append(pack(wanted.to(make.device)))

    make.loads.append(Load({name: shape}, take))


_MOST = 2.0**18  # bound of a valid state: a million of them fit into the 63 bits of a sum


class Pooled(NamedTuple):
    """The sums of P slices."""

    slice_indices: list[int]
    sums: Tensor  # [P, hidden] int64
    is_sane: Tensor  # [P] bool; False if a state was not finite, which makes the sum void

    def to_types(self) -> tuple[Mapping[int, Sequence[int]], list[int]]:
        """Return sums by slice index, and the slices with a void one; tensors on the host."""
        sums = dict(zip(self.slice_indices, self.sums.tolist(), strict=True))
        void = [index for index, sane in zip(self.slice_indices, self.is_sane.tolist(), strict=True) if not sane]
        return {index: total for index, total in sums.items() if index not in void}, void


def pool(
    slices: Sequence[SequenceSlice], first_rows: Sequence[int], hidden: Tensor, pooler: Pooler | None = None
) -> Pooled | None:
    """Sum the states that slices ask for; `hidden` [T, hidden] has all slices' rows.

    With a pooler its result is summed: once for each position, or as often as there are positions.
    """
    indices, sums, extremes = list[int](), list[Tensor](), list[Tensor]()
    for index, (piece, first_row) in enumerate(zip(slices, first_rows, strict=True)):
        positions = piece.pooled_positions
        if not positions:
            continue
        states = hidden[first_row + positions.start : first_row + positions.stop]
        if pooler is not None:
            own = states if pooler.comes_first else states.double().mean(0, keepdim=True)
            states = pooler(own).expand(len(states), -1)
        states = states.to(torch.promote_types(states.dtype, torch.float32))  # in which a unit divides without rounding
        indices.append(index)
        extremes += states.aminmax()
        sums.append((states / POOLED_UNIT).round_().long().sum(0))
    if not indices:
        return None
    is_sane = torch.stack(extremes).abs() < _MOST  # False for NaN as well
    return Pooled(indices, torch.stack(sums), is_sane.view(-1, 2).all(1))
