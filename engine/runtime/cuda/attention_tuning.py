"""The table of the attention kernels' sizes: tiles, warps, load stages, and splits.

A size changes a result only by the order of its sums. The sizes were chosen by reasoning, and to compile for
capabilities 8.0, 9.0 and 10.0 with at most 72 bytes of spilled registers (`python -m tools.kernel_resources` prints it),
except for prompts over a narrow pool with a head_dim of 256, which spill 136, and latents and a head_dim of 512 in
float32. No GPU has measured them yet. `bash loadtest/gpu.sh --tune` tries neighbouring sizes on a GPU and prints the best, to be entered here. Host code without
state: any thread.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple


class DecodeTile(NamedTuple):
    """Keys that a program of the decode kernel holds at a time, and its resources."""

    keys: int
    warps: int
    stages: int  # stages of loads; those of the block table take half of them


class PromptTile(NamedTuple):
    """Rows (queries times heads of a kv head) and keys of a tile of the prompt kernel."""

    rows: int
    keys: int
    warps: int
    stages: int


class Cut(NamedTuple):
    """When a context is split between programs, so that the whole device is busy."""

    programs_per_sm: int  # wanted programs, if contexts are long enough
    min_keys: int  # least keys of a part: fewer are not worth a partial result
    max_keys: int  # most keys of a part: more would keep one program busy long after the others


class Tuning(NamedTuple):
    """All sizes for one kind of layer on one kind of GPU."""

    decode: DecodeTile
    short: PromptTile  # for steps whose slices fit this tile: a turn of a chat, a few drafted tokens
    long: PromptTile
    decode_cut: Cut
    prompt_cut: Cut


# A decode's part writes and reads again as much as 2 * group rows of float32, a few keys' worth: 128 keys pay for that.
# A prompt's part does so for its whole tile, 64 KiB of 128 x 128, which is what 256 keys are read for: twice that pays.
_DECODE_CUT, _PROMPT_CUT = Cut(2, 128, 8192), Cut(2, 512, 8192)
_LARGE_SHARED_MEMORY = ((9, 0), (10, 0), (10, 3))  # 227 KiB a block. Others have from 99 (8.6, 8.9, 12.0) to 163 (8.0)


@cache
def choose_tuning(
    head_dim: int, itemsize: int, capability: tuple[int, int], *, has_narrow_pool: bool = False
) -> Tuning:
    """Return the table's entry. `itemsize` is the queries'; float32 is for comparisons.

    Decode: two tiles of K and V in flight, 64 KiB, times two programs an SM. Little's law asks for less: 4.8 TB/s times
    a latency of 0.7 us is 25 KiB an SM. A narrow pool's tile has twice the keys in as many bytes. Prompts: rows as many
    as keep the accumulator in registers, since K and V are read once a tile of rows; keys as many as fit 99 KiB of
    shared memory with the next tile on its way, so that one entry runs on every GPU, except a head_dim of 256, which
    large shared memory takes better.
    """
    cuts = _DECODE_CUT, _PROMPT_CUT
    if head_dim > 256:  # 32 rows are as many registers as 128 rows of 128
        tile = PromptTile(32, 32, 8, 2) if itemsize == 2 else PromptTile(16, 16, 8, 1)
        return Tuning(DecodeTile(32, 8, 3) if itemsize == 2 else DecodeTile(16, 8, 1), tile, tile, *cuts)
    is_small = head_dim <= 128
    if itemsize == 2:
        keys = (64 if is_small else 32) * (2 if has_narrow_pool else 1)
        decode = DecodeTile(keys, 4, 5)
        if is_small and has_narrow_pool and capability != (9, 0):  # where conversions take the registers of 128 rows
            return Tuning(decode, PromptTile(64, 64, 4, 3), PromptTile(64, 64, 8, 3), *cuts)
        if is_small:
            keys = 64 if capability in _LARGE_SHARED_MEMORY else 32
            return Tuning(decode, PromptTile(64, 64, 4, 3), PromptTile(128, keys, 8, 3), *cuts)
        if capability in _LARGE_SHARED_MEMORY:
            return Tuning(decode, PromptTile(64, 32, 8, 3), PromptTile(128, 32, 8, 3), *cuts)
        return Tuning(decode, PromptTile(64, 32, 8, 3), PromptTile(64, 32, 8, 3), *cuts)
    if head_dim <= 64:
        return Tuning(DecodeTile(32, 4, 3), PromptTile(32, 32, 8, 3), PromptTile(32, 32, 8, 3), *cuts)
    if is_small:
        return Tuning(DecodeTile(32, 4, 3), PromptTile(16, 32, 4, 3), PromptTile(16, 32, 4, 3), *cuts)
    return Tuning(DecodeTile(16, 8, 3), PromptTile(16, 16, 8, 1), PromptTile(16, 16, 8, 1), *cuts)


class LatentTuning(NamedTuple):
    """Sizes for a layer of latents, whose rows are heads, or queries times heads."""

    decode: PromptTile
    prompt: PromptTile
    decode_cut: Cut
    prompt_cut: Cut


@cache
def choose_latent_tuning(num_heads: int, itemsize: int, capability: tuple[int, int]) -> LatentTuning:
    """Return the sizes for rows of 576 numbers, of which 512 are values.

    A key of 1152 bytes serves all heads, so many rows share a read of it: 64, whose accumulator fills 128 registers of
    256 threads. Fewer heads take fewer rows. Where shared memory is small, fewer keys are on their way. In float32 no
    tile fits the registers: kernels spill kilobytes a thread, and are correct but slow.
    """
    if itemsize == 4:
        tile = PromptTile(16, 16, 8, 1)
        return LatentTuning(tile, tile, _DECODE_CUT, _PROMPT_CUT)
    is_large = capability in _LARGE_SHARED_MEMORY
    keys, stages = (32, 3) if is_large else (16, 2)
    prompt = PromptTile(64 if is_large else 32, keys, 8, 2)
    decode = PromptTile(16, keys, 4, stages) if num_heads <= 16 else prompt
    return LatentTuning(decode, prompt, _DECODE_CUT, _PROMPT_CUT)
