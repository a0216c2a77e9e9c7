"""The decisions of `quire tune`, in order; a Probe makes the measurements.

1. The prompt chunk of a step: the fewest tokens that compute at nearly the best rate. With a target, a chunk takes at
   most half of it, since sequences that decode beside a prompt wait for the whole step.
2. The number of sequences: with a target, the most that decode beside such a chunk within it, by binary search; without
   one, the fewest that reach nearly the best rate.
3. The tokens of a step: all sequences and the chunk; with a target, no more than prompts alone compute within it.
4. The block size: the smallest that is nearly as fast as the fastest. Smaller blocks waste less memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

from loadtest.errors import LoadtestError
from loadtest.tuning.probe import Load, Probe

NEARLY = 0.97  # of the best rate; repeated measurements differ by as much
_SMALLEST_CHUNK = 16
_SEQS_GRAIN = 4  # of the search, beyond the first few sequences
_CHUNK_GRAIN = 8
_BLOCK_ROUNDS = 2  # the best counts: disturbances only slow a step down

Report = Callable[[str], None]
OpenProbe = Callable[[int], AbstractContextManager[Probe]]  # for a block size


class Goal(NamedTuple):
    """The length of the sequences, and the longest acceptable gap in seconds."""

    context: int
    target_s: float | None = None


class BlockFigure(NamedTuple):
    """The rates of a block size in decoding and in prompts, at the chosen batch."""

    block_size: int
    decode_tokens_per_s: float
    prompt_tokens_per_s: float


@dataclass(slots=True)
class Tuned:
    """The chosen settings, and the measurements behind them."""

    max_num_seqs: int
    chunk: int
    max_num_batched_tokens: int
    block_size: int
    step_s: float  # all sequences decoding
    full_step_s: float  # beside a part of a prompt
    seconds: dict[Load, float] = field(default_factory=dict)
    blocks: list[BlockFigure] = field(default_factory=list)
    spread: float = 0.0  # of the steps of one load, relative; the median of all loads


def tune(open_probe: OpenProbe, goal: Goal, block_sizes: Sequence[int], largest_chunk: int, report: Report) -> Tuned:
    """Return the best settings; the first block size serves the other searches."""
    with open_probe(block_sizes[0]) as probe:
        longest = probe.config.max_model_len
        if goal.context >= longest:
            raise LoadtestError(
                f"--context is {goal.context}, and the longest sequence here has {longest} tokens; lower it."
            )
        chunk = _find_chunk(probe, goal, largest_chunk, report)
        num_seqs = _find_num_seqs(probe, goal, chunk, report)
        tuned = Tuned(
            max_num_seqs=num_seqs,
            chunk=chunk,
            max_num_batched_tokens=_find_num_tokens(probe, goal, num_seqs, chunk),
            block_size=block_sizes[0],
            step_s=probe.step_s(Load(num_seqs, goal.context)),
            full_step_s=probe.step_s(Load(num_seqs, goal.context, chunk)),
            seconds=probe.seconds,
            spread=median(probe.spreads),
        )
    if len(block_sizes) > 1:
        tuned.blocks = _measure_blocks(open_probe, goal, tuned, block_sizes, report)
        tuned.block_size = choose_block(tuned.blocks)
    return tuned


def _find_chunk(probe: Probe, goal: Goal, largest_chunk: int, report: Report) -> int:
    most = min(largest_chunk, probe.config.max_model_len)

    def rate(chunk: int) -> float:
        seconds = probe.step_s(Load(0, 0, chunk))
        report(f"a prompt's {chunk} tokens: {seconds * 1e3:.1f} ms, {chunk / seconds:,.0f} tokens/s")
        return chunk / seconds

    chunk = knee(rate, doublings(min(_SMALLEST_CHUNK, most), most), NEARLY)
    target_s = goal.target_s
    if target_s is None:
        return chunk
    fitting = largest(lambda n: probe.step_s(Load(0, 0, n)) <= target_s / 2, 1, chunk, grain=min(_CHUNK_GRAIN, chunk))
    if not fitting:
        least = min(_CHUNK_GRAIN, chunk)
        raise LoadtestError(
            f"--target-itl-ms is {target_s * 1e3:g}, and half of it is less than the "
            f"{probe.step_s(Load(0, 0, least)) * 1e3:.1f} ms that {least} tokens of a prompt take here; set it higher."
        )
    return fitting


def _find_num_seqs(probe: Probe, goal: Goal, chunk: int, report: Report) -> int:
    most = probe.most_sequences(goal.context)
    if most < 1:
        raise LoadtestError(
            f"--context is {goal.context}, and the KV pool has no room for two such sequences; "
            "lower it, or raise --kv-cache-memory-bytes."
        )

    def step_s(num_seqs: int, beside: int) -> float:
        seconds = probe.step_s(Load(num_seqs, goal.context, beside))
        prompt = f" beside {beside} of a prompt" if beside else ""
        report(f"{num_seqs} sequences{prompt}: {seconds * 1e3:.1f} ms, {num_seqs / seconds:,.0f} tokens/s")
        return seconds

    target_s = goal.target_s
    if target_s is None:
        return knee(lambda num_seqs: num_seqs / step_s(num_seqs, 0), doublings(1, most), NEARLY)
    num_seqs = largest(lambda num_seqs: step_s(num_seqs, chunk) <= target_s, 1, most, grain=_SEQS_GRAIN) or largest(
        lambda num_seqs: step_s(num_seqs, chunk) <= target_s, 1, min(most, _SEQS_GRAIN - 1)
    )
    if not num_seqs:
        raise LoadtestError(
            f"--target-itl-ms is {target_s * 1e3:g}, and one sequence at a context of {goal.context} tokens beside "
            f"{chunk} tokens of a prompt takes {step_s(1, chunk) * 1e3:.1f} ms here; set it higher."
        )
    return num_seqs


def _find_num_tokens(probe: Probe, goal: Goal, num_seqs: int, chunk: int) -> int:
    target_s, most = goal.target_s, num_seqs + chunk
    if target_s is None:
        return most
    fitting = largest(lambda n: probe.step_s(Load(0, 0, n)) <= target_s, chunk, most, grain=_CHUNK_GRAIN)
    return max(fitting, num_seqs + 1)


def _measure_blocks(
    open_probe: OpenProbe, goal: Goal, tuned: Tuned, block_sizes: Sequence[int], report: Report
) -> list[BlockFigure]:
    best: dict[int, BlockFigure] = {}
    for block_size in _BLOCK_ROUNDS * [*block_sizes]:
        with open_probe(block_size) as probe:
            figure = _measure_block(probe, goal, tuned)
        report(
            f"blocks of {block_size}: {figure.decode_tokens_per_s:,.0f} tokens/s decoding, "
            f"{figure.prompt_tokens_per_s:,.0f} of prompts"
        )
        before = best.get(block_size, figure)
        best[block_size] = BlockFigure(
            block_size,
            max(figure.decode_tokens_per_s, before.decode_tokens_per_s),
            max(figure.prompt_tokens_per_s, before.prompt_tokens_per_s),
        )
    return list(best.values())


def _measure_block(probe: Probe, goal: Goal, tuned: Tuned) -> BlockFigure:
    num_seqs = min(tuned.max_num_seqs, probe.most_sequences(goal.context))
    return BlockFigure(
        probe.config.block_size,
        num_seqs / probe.step_s(Load(num_seqs, goal.context)),
        tuned.chunk / probe.step_s(Load(0, 0, tuned.chunk)),
    )


def choose_block(figures: Sequence[BlockFigure]) -> int:
    """Return the smallest block size that is nearly the fastest."""
    decode = max(figure.decode_tokens_per_s for figure in figures)
    prompt = max(figure.prompt_tokens_per_s for figure in figures)
    good = [
        figure.block_size
        for figure in figures
        if figure.decode_tokens_per_s >= NEARLY * decode and figure.prompt_tokens_per_s >= NEARLY * prompt
    ]
    return min(good) if good else max(figures, key=lambda figure: figure.decode_tokens_per_s).block_size


def largest(is_good: Callable[[int], bool], low: int, high: int, *, grain: int = 1) -> int:
    """Return the largest good multiple of `grain` from `low` to `high`, or 0.

    All values below a good one must be good. Each value is measured once.
    """
    first, last = -(-low // grain), high // grain
    if first > last or not is_good(first * grain):
        return 0
    while first < last:
        middle = (first + last + 1) // 2
        if is_good(middle * grain):
            first = middle
        else:
            last = middle - 1
    return first * grain


def knee(rate: Callable[[int], float], sizes: Sequence[int], share: float) -> int:
    """Return the smallest size whose rate is at least `share` of the best."""
    rates = [rate(size) for size in sizes]
    best = max(rates)
    return next(size for size, found in zip(sizes, rates, strict=True) if found >= share * best)


def doublings(low: int, high: int) -> list[int]:
    """Return low, twice that, and so on, ending with `high`."""
    sizes = []
    while low < high:
        sizes.append(low)
        low *= 2
    return [*sizes, high]
