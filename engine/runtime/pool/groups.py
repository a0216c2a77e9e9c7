"""Divides a model's layers into groups with a page table each, whose blocks have the same bytes.

The layers of a group keep the same positions, and a block of a group holds as many of its layers as the bytes of a block
allow, each at its own place. So a block of one group serves any other, whatever the sizes of its layers, and one pool of
blocks holds all. The first group has full attention; a kind of layers that does not fit one block takes several groups.
The rest of a block, too small for another layer of the group, is unused. A layer that reads another layer's keys and
values keeps none itself.

In a model whose layers all have windows the first group has no layers, and takes no blocks. A model whose windows no
sequence fills is one group. Layers with recurrent state are in no group: kv_cache.py places that in whole blocks. A model of
such layers alone has the first group without layers, and blocks of a size that states fill.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch

from engine.runtime.kv_layout import LINE, AttentionSpec, RecurrentSpec, StateSpec

NO_GROUP = -1
TILE_KEYS = 128  # most keys that a kernel reads at once; before a window it reads up to so many, with weight 0
EVERY = 1 << 30  # positions that a group keeps, if that is all
# Largest share of a block that may be unused: in groups with windows, which hold few blocks, and in those that keep most.
_MAX_UNUSED = 0.2
_MAX_UNUSED_FULL = 0.05
_MAX_MORE = 1.1  # if more is unused anyway: what sequences hold, of the least that is possible


class LayerGroups(NamedTuple):
    """The group of each layer, its place in a block, and the positions that each group after the first keeps.

    A layer with recurrent state has the group NO_GROUP. Places are bytes a token: those of the layers before it. `cuts` are the places at which no group has a layer's K or V
    on both sides; the last one is the end of a block.
    """

    group_of: tuple[int, ...]
    place_of: tuple[int, ...]
    cuts: tuple[int, ...]
    windows: tuple[int, ...] = ()

    @property
    def has_full(self) -> bool:
        """Return whether the first group has layers."""
        return 0 in self.group_of


def one_group(specs: Sequence[StateSpec], dtype: torch.dtype) -> LayerGroups:
    """Return all layers as one group that keeps every position."""
    return _divided([(EVERY, [index for index, spec in _paged(specs) if spec.source is None])], specs, dtype)


def group_layers(
    specs: Sequence[StateSpec], dtype: torch.dtype, max_model_len: int, *, needs_full: bool = False
) -> LayerGroups:
    """Return the groups of a pool's layers, in a pool of `dtype`.

    A window that sequences of `max_model_len` positions do not fill is full attention. With `needs_full` some layers keep
    every position: all, if none has full attention.
    """
    kept_by: dict[int, int] = {}  # by layer, for all that read its state
    for index, spec in _paged(specs):
        kept, source = EVERY if spec.window is None else spec.window + TILE_KEYS - 1, _source(index, spec)
        kept_by[source] = max(kept_by.get(source, 0), kept if kept < max_model_len else EVERY)
    layers: dict[int, list[int]] = {max(kept_by.values(), default=EVERY): []}
    for index, kept in kept_by.items():
        layers.setdefault(kept, []).append(index)
    has_full = EVERY in layers
    if (has_full and len(layers) == 1) or (needs_full and not has_full):
        return one_group(specs, dtype)
    sizes = [spec.bytes_a_token(dtype) if isinstance(spec, AttentionSpec) else 0 for spec in specs]
    size = _choose_size(layers, sizes, max_model_len)
    parts = [(kept, part) for kept, each in layers.items() for part in _packed(each, sizes, size)]
    held = size * sum(min(kept, max_model_len) for kept, _ in parts)
    if not has_full:
        parts.insert(0, (EVERY, []))
    return _divided(parts, specs, dtype) if held < sum(sizes) * max_model_len else one_group(specs, dtype)


def _paged(specs: Sequence[StateSpec]) -> list[tuple[int, AttentionSpec]]:
    """Return the layers that attend, by number."""
    return [(index, spec) for index, spec in enumerate(specs) if isinstance(spec, AttentionSpec)]


def _source(index: int, spec: AttentionSpec) -> int:
    """Return the layer that keeps what a layer reads."""
    return index if spec.source is None else spec.source


def _choose_size(layers: dict[int, list[int]], sizes: Sequence[int], max_model_len: int) -> int:
    """Return a block's bytes a token: as many as leave few unused, because each group costs time."""

    def unused(kept: int, size: int) -> float:
        used = sum(sizes[layer] for layer in layers[kept])
        return len(_packed(layers[kept], sizes, size)) * size / used - 1

    def held(size: int) -> int:
        """Return what the longest sequence holds."""
        return sum(len(_packed(each, sizes, size)) * size * min(kept, max_model_len) for kept, each in layers.items())

    least, longest = max(sizes), max(layers)
    found = {least, *(size for size in accumulate(sizes[layer] for layer in layers[longest]) if size > least)}
    for size in sorted(found, reverse=True):
        if all(unused(kept, size) <= (_MAX_UNUSED_FULL if kept == longest else _MAX_UNUSED) for kept in layers):
            return size
    enough = _MAX_MORE * min(map(held, found))
    return max(size for size in found if held(size) <= enough)


def _packed(layers: Sequence[int], sizes: Sequence[int], size: int) -> list[list[int]]:
    """Return the layers in parts that fit a block each, in order."""
    parts, room = list[list[int]](), 0
    for layer in layers:
        if not parts or sizes[layer] > room:
            parts.append([])
            room = size
        parts[-1].append(layer)
        room -= sizes[layer]
    return parts


def _divided(parts: Sequence[tuple[int, Sequence[int]]], specs: Sequence[StateSpec], dtype: torch.dtype) -> LayerGroups:
    """Return groups of the positions that they keep and their layers."""
    paged = dict(_paged(specs))
    group_of, place_of, ends, tensors = [NO_GROUP] * len(specs), [0] * len(specs), set[int](), list[tuple[int, int]]()
    for group, (_, part) in enumerate(parts):
        end = 0
        for layer in part:
            group_of[layer], place_of[layer] = group, end
            size = paged[layer].bytes_a_token(dtype) // paged[layer].num_pools
            for _ in range(paged[layer].num_pools):
                tensors.append((end, end + size))
                end += size
            ends.update((place_of[layer] + size, end))
    cuts = sorted(end for end in ends if not any(first < end < last for first, last in tensors))
    if len(paged) < len(specs):  # a state takes whole blocks
        cuts = cuts[-1:] or [_most_bytes(specs)]
    for index, spec in paged.items():
        source = _source(index, spec)
        group_of[index], place_of[index] = group_of[source], place_of[source]
    return LayerGroups(tuple(group_of), tuple(place_of), tuple(cuts), tuple(kept for kept, _ in parts[1:]))


def _most_bytes(specs: Sequence[StateSpec]) -> int:
    """Return the bytes a token of a pool for recurrent states alone: a block is as many of their largest pieces as it has tokens."""
    pieces = [kind.num_bytes for spec in specs if isinstance(spec, RecurrentSpec) for kind in spec.pieces]
    return -(-max(pieces) // LINE) * LINE


def regroup(specs: Sequence[StateSpec], dtype: torch.dtype, windows: Sequence[int]) -> LayerGroups:
    """Return the groups that another rank, with other heads of the same layers, has made with these windows."""
    limited = [window for window in windows if window < EVERY]
    return group_layers(specs, dtype, max(limited) + 1) if limited else one_group(specs, dtype)
