"""Which part of each tensor a rank holds.

A part of a layer says how its matrices are divided, in the notation of `tp_plan`. One plan serves all families, because Quire
has one spelling of their names. Used once, while a model is loaded.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple

import torch

from engine.core.errors import ConfigError
from engine.runtime.layers.model_config import (
    DeltaConfig,
    HeadsConfig,
    LayerConfig,
    MambaConfig,
    ModelConfig,
    RecurrentConfig,
    ShortConvConfig,
)
from engine.runtime.parallel.group import Group
from engine.runtime.weights.checkpoint import Cut, Span, StoredTensor, cut


class Division(NamedTuple):
    """How ranks divide a module's matrix, and along what; a fused matrix has several parts."""

    style: str  # colwise: the outputs; rowwise: the inputs, whose products are summed over the ranks
    axes: tuple[str, ...]


Plan = Mapping[str, Division]  # by the names of a part's modules; all other tensors are replicated
REPLICATED = Division("replicated", ())


def colwise(*axes: str) -> Division:
    """Divide the outputs."""
    return Division("colwise", axes)


def rowwise(axis: str) -> Division:
    """Divide the inputs."""
    return Division("rowwise", (axis,))


# The sides of a packed module's tensors: outputs, inputs.
_SIDES = {
    ".weight": "oi", ".bias": "o", ".weight_packed": "oi", ".weight_scale": "oi", ".weight_scale_inv": "oi",
    ".weight_zero_point": "oi", ".weight_g_idx": "i", ".qweight": "io", ".qzeros": "io", ".scales": "io", ".g_idx": "i",
    ".SCB": "o", "_blocks": "oi", "_scales": "oi",
}  # fmt: skip
_GROUPS = (".g_idx", ".weight_g_idx")  # the group of each input
_DOWN = re.compile(r"\.mlp\.(experts\.\d+\.|shared_expert\.)?down_proj(\D+)$")


class Shards:
    """One rank's part of a model; `blocks` are those of `blocks_of`."""

    def __init__(self, config: ModelConfig, group: Group, blocks: Mapping[str, int] = MappingProxyType({})) -> None:
        """Raises ConfigError for a model that cannot be divided by so many ranks."""
        self.group = group
        rank, size = group.rank, group.size
        if any(layer.width or layer.source is not None or layer.feed_forward == "beside" for layer in config.layers):
            raise _refusal(size, "its layers share keys and values, or have MLPs of other widths or beside experts")
        if config.altup is not None:
            raise _refusal(size, "it has several residual streams")
        whole = {layer.heads for layer in config.layers}
        if len(whole) > 1:
            raise _refusal(size, "its layers have different heads")
        self._heads = whole.pop()
        heads, kv_heads = _heads(self._heads, rank, size)
        self._shares = {"heads": heads, "kv_heads": kv_heads}
        for recurrent in {layer.recurrent for layer in config.layers if layer.recurrent is not None}:
            self._shares |= _recurrent_shares(recurrent, rank, size)
            if self._heads.num_kv_heads > size and self._heads.num_kv_heads % size:
                raise _refusal(size, "its blocks, and so its recurrent states, would not be of one size on all ranks")
        mixtures = {layer.moe for layer in config.layers if layer.moe is not None}
        is_dense = any(layer.has_mlp for layer in config.layers)
        for name, widths in (
            ("width", {config.intermediate_size} if is_dense else set()),
            ("expert_width", {moe.width for moe in mixtures}),
            ("shared_width", {moe.shared_width for moe in mixtures} - {0}),
        ):
            if len(widths) > 1:
                raise _refusal(size, f"its mixtures have different widths, {sorted(widths)}")
            for width in widths:
                self._shares[name] = _width(width, rank, size, blocks.get(name, 1))
        self.num_logits = -(-config.vocab_size // size)  # columns that each rank sends
        first = rank * self.num_logits
        if config.vocab_size <= self.num_logits * (size - 1):
            raise _refusal(size, f"its vocabulary has {config.vocab_size} tokens")
        self.vocabulary = Cut(first, min(self.num_logits, config.vocab_size - first), config.vocab_size)
        self._shares["vocabulary"] = self.vocabulary
        self.config = replace(
            config,
            intermediate_size=self._shares["width"].num if is_dense else config.intermediate_size,
            layers=tuple(self._local(layer) for layer in config.layers),
        )

    def _local_recurrent(self, recurrent: RecurrentConfig) -> RecurrentConfig:
        """Return this rank's sizes of a layer with a state."""
        shares = self._shares
        if isinstance(recurrent, ShortConvConfig):
            return replace(recurrent, channels=shares["channels"].num)
        if isinstance(recurrent, DeltaConfig):
            num_keys = shares["delta_keys"].num // recurrent.k_dim
            return replace(recurrent, num_k_heads=num_keys, num_v_heads=shares["delta_heads"].num)
        num_groups = shares["mamba_groups"].num // recurrent.state_dim
        num_sharing = max(self.group.size // recurrent.num_groups, 1)
        return replace(recurrent, num_heads=shares["mamba_heads"].num, num_groups=num_groups, num_sharing=num_sharing)

    def _local(self, layer: LayerConfig) -> LayerConfig:
        num_kv = self._shares["kv_heads"].num if layer.heads.latent is None else 1
        layer = replace(layer, heads=replace(layer.heads, num_heads=self._shares["heads"].num, num_kv_heads=num_kv))
        if layer.recurrent is not None:
            layer = replace(layer, recurrent=self._local_recurrent(layer.recurrent))
        if layer.moe is None:
            return layer
        shared = self._shares["shared_width"].num if layer.moe.shared_width else 0
        return replace(layer, moe=replace(layer.moe, width=self._shares["expert_width"].num, shared_width=shared))

    @property
    def full_norm_widths(self) -> tuple[int, int]:
        """Return the width of all query heads, and of all key heads, as often as ranks hold them."""
        whole = self._heads
        return whole.num_heads * whole.head_dim, max(whole.num_kv_heads, self.group.size) * whole.head_dim

    def spans(self, division: Division, num_rows: int, num_inputs: int = 0) -> list[Span]:
        """Return the parts of a module of which this rank has `num_rows` and `num_inputs` in all."""
        style, axes = division
        shares = [self._shares[axis] for axis in axes]
        if style == "rowwise":
            unit = num_inputs // shares[0].num
            return [Span(inputs=Cut(unit * shares[0].first, num_inputs, unit * shares[0].total))]
        unit = num_rows // sum(share.num for share in shares) if shares else 0
        spans, before, total = [], 0, unit * sum(share.total for share in shares)
        for share in shares:
            spans.append(Span(Cut(before + unit * share.first, unit * share.num, total)))
            before += unit * share.total
        return spans or [Span()]

    def slices(
        self, name: str, division: Division, span: Span, stored: Mapping[str, StoredTensor]
    ) -> dict[str, StoredTensor]:
        """Return the rank's parts of a module's tensors, by the endings of their names. Raises ConfigError."""
        if span.rows is None and span.inputs is None:
            return dict(stored)
        if len(division.axes) > 1 and set(stored) != {".weight"}:
            raise self._cannot(name, "it is quantised, and has several matrices in one")
        found = {}
        for end, tensor in stored.items():
            if end in _GROUPS:
                if span.inputs is None:
                    found[end] = tensor
                elif not _is_in_order(tensor):
                    raise self._cannot(name, "its inputs are in the order of their activations (g_idx)")
                continue
            if math.prod(tensor.shape) == 1:  # a scale of the whole matrix
                found[end] = tensor
                continue
            if end not in _SIDES or len(tensor.shape) > 3:
                raise self._cannot(name, f"its {end.removeprefix('.')!r} is not in rows of outputs and inputs")
            cuts = []
            for side, dim in zip(_SIDES[end], tensor.shape, strict=False):
                whole = span.rows if side == "o" else span.inputs
                cuts.append(
                    None
                    if whole is None or dim == 1
                    else self._scaled(name, whole, dim, tensor.block if side == "i" else 1)
                )
            found[end] = cut(tensor, *cuts)
        return found

    def _scaled(self, name: str, whole: Cut, dim: int, block: int) -> Cut:
        """Return a cut along a side of which the stored tensor has `dim`. Raises ConfigError."""
        if dim > whole.total:
            raise self._cannot(name, "its codes are not in rows of outputs and inputs")
        scaled = whole.scaled(dim)
        if scaled is None or whole.first % block or whole.num % block:
            size = whole.total // dim if scaled is None else block
            raise self._cannot(name, f"{size} numbers are stored together, and the cut is inside")
        return scaled

    def _cannot(self, name: str, reason: str) -> ConfigError:
        return _refusal(self.group.size, f"{name} cannot be divided: {reason}")


def _refusal(size: int, reason: str) -> ConfigError:
    return ConfigError(f"--tensor-parallel-size is {size}, and the model does not allow it: {reason}; choose another.")


def _heads(whole: HeadsConfig, rank: int, size: int) -> tuple[Cut, Cut]:
    """Return a rank's query heads, and the key and value heads that these read. Raises ConfigError."""
    num_heads, num_kv = whole.num_heads, whole.num_kv_heads if whole.latent is None else whole.num_heads
    if num_kv >= size:  # the first ranks have one more
        kv = _divided(num_kv, rank, size)
        ratio = num_heads // num_kv
        return Cut(kv.first * ratio, kv.num * ratio, num_heads), kv
    if size % num_kv or num_heads % size:
        raise _refusal(size, f"it has {num_heads} heads, and {num_kv} of keys and values")
    num = num_heads // size
    return Cut(rank * num, num, num_heads), Cut(rank * num_kv // size, 1, num_kv)


def _recurrent_shares(recurrent: RecurrentConfig, rank: int, size: int) -> dict[str, Cut]:
    """Return a rank's parts of a layer with a state. Raises ConfigError."""
    if isinstance(recurrent, DeltaConfig):
        return _delta_shares(recurrent, rank, size)
    if isinstance(recurrent, MambaConfig):
        return _mamba_shares(recurrent, rank, size)
    if recurrent.channels % size:
        raise _refusal(size, f"its convolutions have {recurrent.channels} channels")
    return {"channels": _divided(recurrent.channels, rank, size)}


def _delta_shares(delta: DeltaConfig, rank: int, size: int) -> dict[str, Cut]:
    """Return a rank's value heads, and the rows of its keys and values. Raises ConfigError."""
    if delta.is_tiled:
        raise _refusal(size, "a GGUF file has the heads of its recurrent layers in another order; take its safetensors")
    if delta.num_k_heads < size:
        raise _refusal(size, f"its recurrent layers have {delta.num_k_heads} heads of keys")
    keys, shared = _divided(delta.num_k_heads, rank, size), delta.num_v_heads // delta.num_k_heads
    units = {"delta_groups": 1, "delta_keys": delta.k_dim, "delta_heads": shared, "delta_values": shared * delta.v_dim}
    return {axis: Cut(*(unit * number for number in keys)) for axis, unit in units.items()}


def _mamba_shares(mamba: MambaConfig, rank: int, size: int) -> dict[str, Cut]:
    """Return a rank's heads and groups; one group may be shared by all ranks. Raises ConfigError."""
    num_heads, num_groups = mamba.num_heads, mamba.num_groups
    if num_heads % size or (num_groups % size and num_groups > 1):
        raise _refusal(size, f"its Mamba-2 layers have {num_heads} heads in {num_groups} groups")
    heads = _divided(num_heads, rank, size)
    groups = Cut(0, 1, 1) if num_groups == 1 else _divided(num_groups, rank, size)
    units = {
        "mamba_heads": (heads, 1),
        "mamba_values": (heads, mamba.head_dim),
        "mamba_groups": (groups, mamba.state_dim),
    }
    return {axis: Cut(*(unit * number for number in cut)) for axis, (cut, unit) in units.items()}


def _width(width: int, rank: int, size: int, block: int) -> Cut:
    """Return a rank's part of an MLP's width: in equal parts if blocks allow it. Raises ConfigError."""
    unit = max(block, 2)  # the native library's products have an even number of inputs
    if width % (unit * size) == 0:
        return Cut(rank * (width // size), width // size, width)
    if width % unit or width // unit < size:
        raise _refusal(size, f"an MLP's width of {width} has too few blocks of {unit}")
    units = _divided(width // unit, rank, size)
    return Cut(units.first * unit, units.num * unit, width)


def _divided(num: int, rank: int, size: int) -> Cut:
    """Return a rank's units; the first ranks have one more if they do not divide."""
    each, more = divmod(num, size)
    return Cut(rank * each + min(rank, more), each + (rank < more), num)


def _is_in_order(groups: StoredTensor) -> bool:
    """Return whether inputs are in the order of their groups, or these were never set."""
    found = torch.empty(groups.shape, dtype=torch.int32)
    groups.copy_to(found)
    return int(found.min()) < 0 or bool((found[1:] >= found[:-1]).all())


def blocks_of(config: ModelConfig, tensors: Iterable[StoredTensor]) -> dict[str, int]:
    """Return how many inputs of the second matrices of MLPs are stored together at most, by the axes of plans."""
    moe = next((layer.moe for layer in config.layers if layer.moe is not None), None)
    widths = {"width": config.intermediate_size}
    if moe is not None:
        widths |= {"expert_width": moe.width, "shared_width": moe.shared_width}
    blocks = dict.fromkeys(widths, 1)
    for tensor in tensors:
        found = _DOWN.search(tensor.name)
        if found is None or found[2] not in _SIDES or found[2] in _GROUPS or len(tensor.shape) < 2:
            continue
        axis = {"experts": "expert_width", "shared_expert": "shared_width"}.get((found[1] or "").split(".")[0], "width")
        dim = tensor.shape[_SIDES[found[2]].index("i")]
        together = -(-widths[axis] // dim) if dim > 1 else 1  # the last group may be smaller
        blocks[axis] = max(blocks[axis], tensor.block, 1 << (together - 1).bit_length())
    return blocks
