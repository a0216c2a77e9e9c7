"""Percentiles, rates and errors of one measured point.

Times are seconds, and milliseconds in tables. Tokens are counted from the server's usage, never from chunks: a chunk
may carry several tokens. ITL is therefore the time between chunks, with the mean number of tokens a chunk beside it.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from loadtest.client import Outcome
from loadtest.output import in_ms, print_table

QUANTILES = (0.5, 0.9, 0.99)


def percentile(ordered: Sequence[float], quantile: float) -> float:
    """Return the quantile of an ascending sequence, interpolated; NaN if it is empty."""
    if not ordered:
        return math.nan
    position = quantile * (len(ordered) - 1)
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


@dataclass(frozen=True, slots=True)
class Spread:
    """A distribution in five numbers, seconds."""

    mean: float
    p50: float
    p90: float
    p99: float
    count: int

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        ordered = sorted(values)
        mean = sum(ordered) / len(ordered) if ordered else math.nan
        p50, p90, p99 = (percentile(ordered, quantile) for quantile in QUANTILES)
        return cls(mean, p50, p90, p99, len(ordered))


@dataclass(frozen=True, slots=True)
class Point:
    """The load and the results of one point of a sweep; rates are a second."""

    load: str  # "concurrency 16" or "4 requests/s"
    level: float
    duration_s: float
    num_requests: int
    num_failed: int
    num_without_usage: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    tokens_per_chunk: float
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    ttft_s: Spread
    tpot_s: Spread
    itl_s: Spread
    e2e_s: Spread
    finish_reasons: dict[str, int]
    errors: dict[str, int]


def ttfts(outcomes: Iterable[Outcome]) -> list[float]:
    """Return the time to first token of each answer that has one."""
    return [outcome.chunks[0] - outcome.start_s for outcome in outcomes if outcome.chunks]


def gaps(outcomes: Iterable[Outcome]) -> list[float]:
    """Return all times between two chunks of one answer."""
    return [later - earlier for outcome in outcomes for earlier, later in pairwise(outcome.chunks)]


def summarize(load: str, level: float, outcomes: Sequence[Outcome], duration_s: float) -> Point:
    """Return the figures of one point. A failed request is counted as failed only."""
    good = [outcome for outcome in outcomes if not outcome.error]
    counted = [(outcome, outcome.completion_tokens) for outcome in good if outcome.completion_tokens is not None]
    output_tokens = sum(tokens for _, tokens in counted)
    prompt_tokens = sum(outcome.prompt_tokens for outcome in good)
    num_chunks = sum(len(outcome.chunks) for outcome, _ in counted)
    return Point(
        load=load,
        level=level,
        duration_s=duration_s,
        num_requests=len(outcomes),
        num_failed=len(outcomes) - len(good),
        num_without_usage=len(good) - len(counted),
        prompt_tokens=prompt_tokens,
        cached_tokens=sum(outcome.cached_tokens for outcome in good),
        output_tokens=output_tokens,
        tokens_per_chunk=output_tokens / num_chunks if num_chunks else math.nan,
        requests_per_s=len(good) / duration_s,
        output_tokens_per_s=output_tokens / duration_s,
        total_tokens_per_s=(prompt_tokens + output_tokens) / duration_s,
        ttft_s=Spread.of(ttfts(good)),
        tpot_s=Spread.of(
            (outcome.chunks[-1] - outcome.chunks[0]) / (tokens - 1)
            for outcome, tokens in counted
            if tokens > 1 and outcome.chunks
        ),
        itl_s=Spread.of(gaps(good)),
        e2e_s=Spread.of(outcome.end_s - outcome.start_s for outcome in good),
        finish_reasons=dict(Counter(outcome.finish_reason for outcome in good)),
        errors=dict(Counter(outcome.error for outcome in outcomes if outcome.error).most_common()),
    )


def show(points: Sequence[Point]) -> None:
    """Print throughput and latencies, then everything that went wrong."""
    print_table(
        ("load", "done", "failed", "s", "req/s", "out tok/s", "all tok/s", "tok/chunk"),
        (
            (
                point.load,
                point.num_requests - point.num_failed,
                point.num_failed,
                f"{point.duration_s:.1f}",
                f"{point.requests_per_s:.2f}",
                f"{point.output_tokens_per_s:.1f}",
                f"{point.total_tokens_per_s:.1f}",
                f"{point.tokens_per_chunk:.2f}",
            )
            for point in points
        ),
    )
    latencies = []
    for point in points:
        spreads = {"TTFT": point.ttft_s, "TPOT": point.tpot_s, "ITL": point.itl_s, "e2e": point.e2e_s}
        for name, spread in spreads.items():
            figures = (spread.mean, spread.p50, spread.p90, spread.p99)
            latencies.append((point.load, name, *map(in_ms, figures)))
    print_table(("load", "latency, ms", "mean", "p50", "p90", "p99"), latencies, num_names=2)
    print("ITL is the time between two chunks; TPOT counts tokens.")
    for point in points:
        for error, count in _alike(point.errors).items():
            print(f"{point.load}: {count} x {error}")
        if point.cached_tokens:
            cached = f"{point.cached_tokens} of {point.prompt_tokens} prompt tokens"
            print(f"{point.load}: {cached} came from the prefix cache.")
        if point.num_without_usage:
            print(f"{point.load}: {point.num_without_usage} answers carried no usage; their tokens are not counted.")


def _alike(errors: Mapping[str, int]) -> dict[str, int]:
    """Return the counts of errors, those together that differ only in the wait that they advise."""
    counts: Counter[str] = Counter()
    for error, count in errors.items():
        counts[re.sub(r"try again in [\d.]+ s", "try again in ... s", error)] += count
    return dict(counts.most_common())
