"""Chooses experts for tokens, and sorts the choices by expert.

Each is one launch, whatever the number of tokens, and nothing is read back to the host, so a CUDA graph can hold both.
layers/mixture.py defines the arithmetic. Engine thread.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.runtime.routing import GroupScoring, RouterConfig, Scoring

_MOST_PAIRS = 4096  # that a program of the sort reads at a time
_SMALLEST_SUM = tl.constexpr(1e-20)  # as in layers/mixture.py


class Order(NamedTuple):
    """Pairs of a token and one of its experts, sorted by expert, and cut into tiles of one expert each.

    Pair p is token p // num_chosen, rank p % num_chosen.
    """

    pairs: Tensor  # [pairs] int32, sorted; pairs of one expert keep their order
    places: Tensor  # [pairs] int32, where each pair is in `pairs`
    ends: Tensor  # [experts] int32, where each expert's pairs end
    tiles: Tensor  # [most tiles, 3] int32: expert, first sorted pair, end
    num_tiles: Tensor  # [1] int32; entries of `tiles` after them are undefined
    rows: int  # pairs of a tile, at most


def route(logits: Tensor, correction: Tensor | None, config: RouterConfig) -> tuple[Tensor, Tensor]:
    """Return float32 weights and int32 experts [T, num_chosen] of float32 logits [T, experts], the best first."""
    num_tokens, num_experts = logits.shape
    assert logits.is_contiguous()
    assert logits.dtype == torch.float32
    chosen = torch.empty((num_tokens, config.num_chosen), dtype=torch.int32, device=logits.device)
    weights = torch.empty(chosen.shape, dtype=torch.float32, device=logits.device)
    if num_tokens:
        _route_kernel[(num_tokens,)](
            logits,
            correction,
            weights,
            chosen,
            config.scale,
            NUM_CHOSEN=config.num_chosen,
            NUM_GROUPS=config.num_groups,
            NUM_CHOSEN_GROUPS=config.num_chosen_groups,
            WIDTH=num_experts // config.num_groups,
            IS_SIGMOID=config.scoring is Scoring.SIGMOID,
            IS_NORMALISED=config.is_normalised,
            IS_TOP2=config.group_scoring is GroupScoring.TOP2,
            BLOCK_G=triton.next_power_of_2(config.num_groups),
            BLOCK_W=triton.next_power_of_2(num_experts // config.num_groups),
            BLOCK_C=triton.next_power_of_2(config.num_chosen),
            num_warps=1,  # sums within a warp need no shared memory. To be tuned on a GPU, with 2 and 4.
        )
    return weights, chosen


def sort_by_expert(chosen: Tensor, num_experts: int, rows: int) -> Order:
    """Return the order of chosen experts [T, num_chosen] int32, in tiles of at most `rows` pairs."""
    num_pairs, device = chosen.numel(), chosen.device
    assert chosen.is_contiguous()
    pairs, places = torch.empty((2, num_pairs), dtype=torch.int32, device=device).unbind(0)
    ends = torch.empty(num_experts, dtype=torch.int32, device=device)
    num_tiles = torch.empty(1, dtype=torch.int32, device=device)
    # Every expert with pairs can end with a tile that is not full.
    most_tiles = min(num_experts, num_pairs) + num_pairs // rows
    tiles = torch.empty((most_tiles, 3), dtype=torch.int32, device=device)
    block = min(triton.next_power_of_2(max(num_pairs, 32)), _MOST_PAIRS)
    _sort_kernel[(num_experts,)](
        chosen,
        pairs,
        places,
        ends,
        tiles,
        num_tiles,
        num_pairs,
        NUM_EXPERTS=num_experts,
        ROWS=rows,
        BLOCK_E=triton.next_power_of_2(num_experts),
        BLOCK_P=block,
        num_warps=8 if block > 1024 else 4,
    )
    return Order(pairs, places, ends, tiles, num_tiles, rows)


@triton.jit
def _best(choice, index, is_free):
    """Return the highest free choice and its place; the lowest of equal ones."""
    best = tl.max(tl.where(is_free, choice, -float("inf")))
    return best, tl.min(tl.where(is_free & (choice == best), index, 1 << 30))


@triton.jit
def _group_scores(choice, index, is_inside, IS_TOP2: tl.constexpr):
    """Return the score of each group [BLOCK_G, 1] of choices [BLOCK_G, BLOCK_W]."""
    choice = tl.where(is_inside, choice, -float("inf"))
    first = tl.max(choice, 1, keep_dims=True)
    if IS_TOP2:
        at = tl.min(tl.where(choice == first, index, 1 << 30), 1, keep_dims=True)
        first += tl.max(tl.where(index == at, -float("inf"), choice), 1, keep_dims=True)
    return first


@triton.jit
def _route_kernel(
    logits_ptr,
    correction_ptr,
    weights_ptr,
    chosen_ptr,
    scale,
    NUM_CHOSEN: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    NUM_CHOSEN_GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,
    IS_SIGMOID: tl.constexpr,
    IS_NORMALISED: tl.constexpr,
    IS_TOP2: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """One program for each token; experts are [groups, experts of a group]."""
    token = tl.program_id(0).to(tl.int64)
    group, member = tl.arange(0, BLOCK_G)[:, None], tl.arange(0, BLOCK_W)[None, :]
    index = group * WIDTH + member
    is_free = (group < NUM_GROUPS) & (member < WIDTH)
    logits = tl.load(logits_ptr + token * (NUM_GROUPS * WIDTH) + index, is_free, -float("inf"))
    scores = logits
    if IS_SIGMOID:
        scores = tl.sigmoid(logits)
    choice = scores
    if correction_ptr is not None:
        choice += tl.load(correction_ptr + index, is_free, 0.0)
    choice = tl.where(choice == choice, choice, float("inf"))  # NaN is the largest, as in a sort
    if NUM_GROUPS > 1:
        group_scores = _group_scores(choice, index, is_free, IS_TOP2)
        is_group_free = group < NUM_GROUPS
        for _ in tl.static_range(NUM_CHOSEN_GROUPS):
            _, best_group = _best(group_scores, group, is_group_free)
            is_group_free &= group != best_group
        choice = tl.where(is_group_free, -float("inf"), choice)
    if not IS_SIGMOID:
        scores = tl.exp(logits - tl.max(logits))
    ranks = tl.arange(0, BLOCK_C)
    weights, chosen = tl.zeros([BLOCK_C], tl.float32), tl.zeros([BLOCK_C], tl.int32)
    for rank in tl.static_range(NUM_CHOSEN):
        _, expert = _best(choice, index, is_free)
        is_free &= index != expert
        weight = tl.sum(tl.where(index == expert, scores, 0.0))
        weights, chosen = tl.where(ranks == rank, weight, weights), tl.where(ranks == rank, expert, chosen)
    if IS_NORMALISED:
        weights = weights / (tl.sum(weights) + _SMALLEST_SUM)
    elif not IS_SIGMOID:
        weights = weights / tl.sum(scores)
    at = token * NUM_CHOSEN + ranks
    tl.store(weights_ptr + at, weights * scale, ranks < NUM_CHOSEN)
    tl.store(chosen_ptr + at, chosen, ranks < NUM_CHOSEN)


@triton.jit(do_not_specialize=["num_pairs"], do_not_specialize_on_alignment=["places_ptr"])
def _sort_kernel(
    chosen_ptr,
    pairs_ptr,
    places_ptr,
    ends_ptr,
    tiles_ptr,
    num_tiles_ptr,
    num_pairs,
    NUM_EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """One program for each expert, which counts all experts' pairs and writes its own."""
    expert, experts = tl.program_id(0), tl.arange(0, BLOCK_E)
    counts = tl.zeros([BLOCK_E], tl.int32)
    for start in range(0, num_pairs, BLOCK_P):
        at = start + tl.arange(0, BLOCK_P)
        owners = tl.load(chosen_ptr + at, at < num_pairs, 0)
        counts += tl.histogram(owners, BLOCK_E, at < num_pairs)
    first = tl.sum(tl.where(experts < expert, counts, 0))
    first_tile = tl.sum(tl.where(experts < expert, tl.cdiv(counts, ROWS), 0))
    end = first + tl.sum(tl.where(experts == expert, counts, 0))
    num_tiles = tl.cdiv(end - first, ROWS)
    tl.store(ends_ptr + expert, end)
    if expert == NUM_EXPERTS - 1:
        tl.store(num_tiles_ptr, first_tile + num_tiles)
    for tile in range(num_tiles):
        to = tiles_ptr + (first_tile + tile) * 3
        tl.store(to, expert)
        tl.store(to + 1, first + tile * ROWS)
        tl.store(to + 2, tl.minimum(first + tile * ROWS + ROWS, end))
    position = first
    if num_tiles > 0:
        for start in range(0, num_pairs, BLOCK_P):
            at = start + tl.arange(0, BLOCK_P)
            is_own = (tl.load(chosen_ptr + at, at < num_pairs, -1) == expert).to(tl.int32)
            place = position + tl.cumsum(is_own, 0) - 1
            tl.store(pairs_ptr + place, at, is_own > 0)
            tl.store(places_ptr + at, place, is_own > 0)
            position += tl.sum(is_own)
