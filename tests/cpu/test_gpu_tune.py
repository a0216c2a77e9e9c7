"""How `gpu.sh --tune` searches; that it runs at all is rehearsed by the script itself."""

from __future__ import annotations

import math

import pytest

from engine.runtime.cuda.attention_tuning import DecodeTile, Tuning, choose_tuning
from tools.gpu.tune import SEARCHES, climb, ratio

FIELDS = (("keys", (32, 64, 128)), ("warps", (2, 4, 8)))


def test_it_climbs_one_field_after_another_past_sizes_that_the_gpu_cannot_hold() -> None:
    tried = []

    def cost(tile: DecodeTile) -> float:
        tried.append(tile)
        return math.inf if tile.keys == 128 else abs(tile.keys - 32) + abs(tile.warps - 8) + 1.0

    assert climb(DecodeTile(64, 4, 5), FIELDS, cost) == DecodeTile(32, 8, 5)
    assert all(tile.stages == 5 for tile in tried)


def test_what_is_hardly_better_is_left() -> None:
    assert climb(DecodeTile(64, 4, 5), FIELDS, lambda tile: 1.0 - 1e-4 * tile.warps) == DecodeTile(64, 4, 5)


def test_a_ratio_counts_every_load_alike() -> None:
    assert ratio([2.0, 8.0], [1.0, 1.0]) == pytest.approx(4.0)
    assert ratio([1.0, math.inf], [1.0, 1.0]) == math.inf


def test_every_part_of_a_tuning_is_searched_by_fields_that_it_has() -> None:
    tuning = choose_tuning(128, 2, (9, 0))
    assert {search.part for search in SEARCHES} == set(Tuning._fields)
    assert all(hasattr(getattr(tuning, search.part), field) for search in SEARCHES for field, _ in search.fields)
