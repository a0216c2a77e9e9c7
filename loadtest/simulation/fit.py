"""Fits StepCosts to measured steps: non-negative least squares.

A table is a sum of ramps. A ramp is 0 before a point, 1 from the next one on and linear between them. With weights of 0
or more the sum never falls: despite noise, more rows never take less time.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from loadtest.simulation.costs import StepCosts, Table
from loadtest.simulation.measure import Shape

_SWEEPS = 20_000
_ROWS_AT = (0, 1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024, 2048, 4096, 8192)
_SAMPLES_AT = (0, 1, 4, 16, 32, 64, 128, 256)

Matrix = NDArray[np.float64]


def fit(shapes: Sequence[Shape], seconds: Sequence[float]) -> StepCosts:
    """Return the costs that predict the measured steps best."""
    rows_at = _points(_ROWS_AT, max(shape.num_tokens for shape in shapes))
    samples_at = _points(_SAMPLES_AT, max(_num_samples(shape) for shape in shapes))
    design = np.array([_features(shape, rows_at, samples_at) for shape in shapes])
    weights = non_negative(design / np.array(seconds)[:, None], np.ones(len(seconds)))
    num_rows = len(rows_at)
    base, steps, rest = weights[0], weights[1:num_rows], weights[num_rows:]
    rows = np.cumsum([base, *steps])
    samples = np.cumsum([0.0, *rest[:-2]])
    context_s, pair_s = rest[-2:]
    return StepCosts(
        rows=Table(rows_at, tuple(rows.tolist())),
        samples=Table(samples_at, tuple(samples.tolist())),
        decode_context_s=float(context_s),
        prefill_pair_s=float(pair_s),
    )


def _points(at: Sequence[int], most: int) -> tuple[int, ...]:
    return (*(point for point in at if point < most), most)


def _num_samples(shape: Shape) -> int:
    return len(shape.contexts) + len(shape.chunks)


def _features(shape: Shape, rows_at: Sequence[int], samples_at: Sequence[int]) -> list[float]:
    """Return the base, the ramps of both tables, the context and the pairs."""
    pairs = sum(count * (start + (count + 1) / 2) for start, count in shape.chunks)
    ramps = [*_ramps(shape.num_tokens, rows_at), *_ramps(_num_samples(shape), samples_at)]
    return [1.0, *ramps, float(sum(shape.contexts)), pairs]


def _ramps(count: int, at: Sequence[int]) -> list[float]:
    return [min(max((count - low) / (high - low), 0.0), 1.0) for low, high in pairwise(at)]


def non_negative(design: Matrix, wanted: Matrix) -> Matrix:
    """Return the x >= 0 that minimizes |design x - wanted|, by coordinate descent."""
    scale = np.linalg.norm(design, axis=0)
    scale[scale == 0] = 1.0
    scaled = design / scale
    gram, slope = scaled.T @ scaled, scaled.T @ wanted
    found = np.zeros(len(scale))
    for _ in range(_SWEEPS):
        most = 0.0
        for column in range(len(found)):
            if not gram[column, column]:
                continue
            value = max(found[column] + (slope[column] - gram[column] @ found) / gram[column, column], 0.0)
            most = max(most, abs(value - found[column]))
            found[column] = value
        if most < 1e-9:
            break
    return np.asarray(found / scale)


def least_deviations(design: Sequence[Sequence[float]], wanted: Sequence[float]) -> list[float]:
    """Return the x >= 0 with the least absolute deviations."""
    matrix, target = np.array(design), np.array(wanted)
    found = non_negative(matrix, target)
    for _ in range(30):
        weights = np.sqrt(1.0 / np.maximum(np.abs(matrix @ found - target), 1e-4))
        found = non_negative(matrix * weights[:, None], target * weights)
    return [float(each) for each in found]
