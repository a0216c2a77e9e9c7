"""Divides a model's layers into groups with a page table each, whose blocks have the same bytes.

The layers with full attention are the first group. Those with one sliding window would be another, but their number is
different. So they are divided once more, into groups of as many layers as the first has: then a block of any group serves
any other, and one pool of blocks holds all. Two layers of different groups have the same place in a block. A group with
fewer layers leaves places of its blocks unused.

A model whose layers all have windows, whose layers differ in size, or whose windows no sequence fills is one group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from engine.runtime.kv_layout import AttentionSpec

TILE_KEYS = 128  # most keys that a kernel reads at once; before a window it reads up to so many, with weight 0
EVERY = 1 << 30  # positions that a group keeps, if that is all
# Largest share of a block's places that may be unused: in groups with windows, which hold few blocks, and in others.
_MAX_UNUSED = 0.2
_MAX_UNUSED_FULL = 0.05


class LayerGroups(NamedTuple):
    """The group and the place in a block of each layer, and the positions that each group after the first keeps."""

    group_of: tuple[int, ...]
    place_of: tuple[int, ...]
    windows: tuple[int, ...] = ()

    @property
    def layers_at(self) -> list[int]:
        """Return a layer for each place."""
        return [self.place_of.index(place) for place in range(max(self.place_of, default=-1) + 1)]


def one_group(num_layers: int) -> LayerGroups:
    """Return all layers as one group that keeps every position."""
    return LayerGroups((0,) * num_layers, tuple(range(num_layers)))


def group_layers(specs: Sequence[AttentionSpec], max_model_len: int, num_heads: int = 0) -> LayerGroups:
    """Return the groups of a pool's layers; the last `num_heads` are a drafter's, which keep every position.

    A window that sequences of `max_model_len` positions do not fill is full attention.
    """
    target = len(specs) - num_heads
    layers: dict[int, list[int]] = {0: []}  # by the positions that they keep; 0 is all
    for index, spec in enumerate(specs):
        kept = 0 if spec.window is None or index >= target else spec.window + TILE_KEYS - 1
        layers.setdefault(kept if kept < max_model_len else 0, []).append(index)
    full, *others = layers.values()
    kinds = {(spec.num_kv_heads, spec.head_dim, spec.value_dim) for spec in specs}
    if not (full and others) or len(kinds) > 1:
        return one_group(len(specs))
    size = _layers_a_block(len(full), [len(each) for each in others])
    if num_heads and size < len(full):  # a drafter knows the first group's tables only
        return one_group(len(specs))
    parts = [(window, each[at : at + size]) for window, each in layers.items() for at in range(0, len(each), size)]
    windows = tuple(window or EVERY for window, _ in parts[1:])  # full attention may take more than one group
    group_of, place_of = [0] * len(specs), [0] * len(specs)
    for group, (_, part) in enumerate(parts):
        for place, layer in enumerate(part):
            group_of[layer], place_of[layer] = group, place
    return LayerGroups(tuple(group_of), tuple(place_of), windows)


def _layers_a_block(num_full: int, others: Sequence[int]) -> int:
    """Return how many layers a block holds: as many as leave few places unused, because each group costs time."""

    def unused(num: int, size: int) -> float:
        return -(-num // size) * size / num - 1

    for size in range(num_full, 0, -1):
        if unused(num_full, size) <= _MAX_UNUSED_FULL and all(unused(num, size) <= _MAX_UNUSED for num in others):
            return size
    return 1


def regroup(specs: Sequence[AttentionSpec], windows: Sequence[int]) -> LayerGroups:
    """Return the groups that another rank, with other heads of the same layers, has made with these windows."""
    limited = [window for window in windows if window < EVERY]
    return group_layers(specs, max(limited) + 1) if limited else one_group(len(specs))
