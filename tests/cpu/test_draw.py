"""The native draw and torch's draw the same tokens, on every instruction set; both hold the definition of the filters."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from engine.runtime.native.library import Library
from engine.runtime.sampling.draw import _draw_in_torch, _draw_natively
from engine.runtime.sampling.wish import Wish

FILTERS = [
    {},
    {"temperature": 0.0},
    {"temperature": 1e-5},
    {"temperature": 0.3},
    {"temperature": 2.0},
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 1000},
    {"top_k": 2**31 - 1},
    {"top_p": 1e-9},
    {"top_p": 0.5},
    {"top_p": 0.99},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"temperature": 1.4, "top_k": 40, "top_p": 0.9, "min_p": 0.01},
]


def wish(seed: int, position: int = 5, **filters: float) -> Wish:
    return Wish(**{"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | filters, seed=seed, position=position)  # type: ignore[arg-type]


def check(library: Library, logits: torch.Tensor, wishes: list[Wish]) -> list[int]:
    ours, torchs = _draw_natively(library, logits.clone(), wishes), _draw_in_torch(logits.clone(), wishes)
    assert ours.ids.tolist() == torchs.ids.tolist()
    assert ours.is_finite.all()
    assert torchs.is_finite.all()
    return ours.ids.tolist()


@pytest.mark.parametrize("vocab_size", [1, 7, 64, 333, 5000])
@pytest.mark.parametrize("spread", [0.0, 1.0, 6.0])
def test_both_draw_the_same(library: Library, spread: float, vocab_size: int) -> None:
    """Rounded to bfloat16, as logits are, so that many scores are equal; all scores equal at a spread of 0."""
    kinds = list(itertools.product(FILTERS, range(6)))
    torch.manual_seed(vocab_size)
    logits = (torch.randn(len(kinds), vocab_size) * spread).bfloat16().float()
    found = check(library, logits, [wish(seed, **filters) for filters, seed in kinds])
    for row, (filters, _) in enumerate(kinds):
        if filters.get("top_k") == 1 or filters.get("temperature") == 0 or filters.get("min_p") == 1:
            assert logits[row, found[row]] == logits[row].max()


def test_a_nucleus_far_below_the_best_digits(library: Library) -> None:
    """One token weighs almost all, and the border lies among scores that differ in their last bits."""
    logits = torch.full((40, 3000), -9.0) + torch.arange(3000) * 1e-6
    logits[:, 17] = 3.0
    check(library, logits, [wish(seed, top_p=0.999 + 0.00002 * seed) for seed in range(40)])
    check(library, logits, [wish(seed, top_k=2 + 70 * seed, temperature=2.0) for seed in range(40)])


def test_tokens_ruled_out_are_never_drawn(library: Library) -> None:
    logits = torch.full((60, 500), -math.inf)
    logits[:, 250:260] = 0.0
    found = check(library, logits, [wish(seed, top_k=400 * (seed % 2)) for seed in range(60)])
    assert set(found) <= set(range(250, 260))
    assert len(set(found)) > 5


def test_rows_that_are_void_give_some_id_and_spoil_no_other(library: Library) -> None:
    torch.manual_seed(1)
    logits = torch.randn(5, 100)
    wishes = [wish(row, top_p=0.8, top_k=30) for row in range(5)]
    expected = check(library, logits, wishes)
    logits[1], logits[2, 4], logits[3] = math.nan, math.inf, -math.inf
    in_torch, drawn = _draw_in_torch(logits.clone(), wishes), _draw_natively(library, logits, wishes)
    assert drawn.is_finite.tolist() == in_torch.is_finite.tolist() == [True, False, False, False, True]
    found = drawn.ids.tolist()
    assert all(0 <= token < 100 for token in found)
    assert (found[0], found[4]) == (expected[0], expected[4])


@pytest.mark.parametrize("at", [0, 1, 15, 16, 31, 1000, 4095])
@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf])
def test_one_logit_that_is_not_finite_is_found_at_every_place(library: Library, at: int, bad: float) -> None:
    logits = torch.randn(3, 4096)
    logits[1, at] = bad
    for filters in ({"temperature": 0.0}, {}, {"top_p": 0.9}):
        wishes = [wish(7, **filters)] * 3
        assert _draw_natively(library, logits.clone(), wishes).is_finite.tolist() == [True, False, True]
        assert _draw_in_torch(logits.clone(), wishes).is_finite.tolist() == [True, False, True]
