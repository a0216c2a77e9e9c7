"""The kernels draw what sampling/draw.py draws in torch, penalise as sampling/sampler.py does, and follow the
distribution asked for. Tiles are made small, so that a small vocabulary has many and a filter has too many to copy."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.core.types import SamplingParams
from engine.runtime.cuda import sampling, sampling_filter
from engine.runtime.cuda.sampling import IN_PROMPT, Penalties, sample
from engine.runtime.cuda.sampling_row import Draws, exact_noise, fast_noise
from engine.runtime.sampling.draw import _draw_in_torch
from engine.runtime.sampling.sampler import Penalized, apply_penalties
from engine.runtime.sampling.wish import Wish
from engine.runtime.transfer import Drawn

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FILTERS: list[dict[str, float]] = [
    {},
    {"temperature": 0.0},
    {"temperature": 1e-5},
    {"temperature": 0.3},
    {"temperature": 2.0},
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 200},
    {"top_k": 2**31 - 1},
    {"top_p": 1e-9},
    {"top_p": 0.5},
    {"top_p": 0.99},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"temperature": 1.4, "top_k": 40, "top_p": 0.9, "min_p": 0.01},
    {"temperature": 0.7, "top_p": 0.8, "min_p": 0.1},
]


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other random numbers every time, printed for a failure; memory that is handed out holds what must not be read."""
    print(f"torch.manual_seed({torch.seed() % 2**32})")
    torch.manual_seed(torch.initial_seed() % 2**32)
    empty = torch.empty

    def poisoned(*args: object, **kwargs: object) -> Tensor:
        out: Tensor = empty(*args, **kwargs)  # type: ignore[call-overload]
        return out.fill_(math.nan) if out.is_floating_point() else out.fill_(0 if out.dtype == torch.bool else -77)

    monkeypatch.setattr(torch, "empty", poisoned)


def cut(monkeypatch: pytest.MonkeyPatch, tile: int, capacity: int) -> None:
    monkeypatch.setattr(sampling, "_TILE", tile)
    monkeypatch.setattr(sampling_filter, "_CAPACITY", capacity)


def wish(seed: int, position: int = 5, **filters: float) -> Wish:
    return Wish(**{"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | filters, seed=seed, position=position)  # type: ignore[arg-type]


def lowest_score(min_p: float) -> float:
    return math.log(min_p) if min_p > 0 else -math.inf


def draws_of(wishes: Sequence[Wish]) -> Draws:
    def column(values: list[float], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=DEVICE)

    seeds = [(w.seed + 2**63) % 2**64 - 2**63 for w in wishes]
    return Draws(
        column([w.temperature for w in wishes], torch.float32),
        column([w.top_k for w in wishes], torch.int32),
        column([w.top_p for w in wishes], torch.float64),
        column([lowest_score(w.min_p) for w in wishes], torch.float32),
        column(seeds, torch.int64),
        column([w.position for w in wishes], torch.int64),
    )


def check(logits: Tensor, wishes: list[Wish]) -> list[int]:
    """Ours draws torch's ids; and what is saved where the host knows no row to need it changes nothing."""
    logits = logits.to(DEVICE)
    expected = _draw_in_torch(logits.clone(), wishes)
    is_drawing = any(w.temperature > 0 for w in wishes)
    is_ranking = any(w.top_k > 0 or w.top_p < 1 for w in wishes)
    found = sample(logits, draws_of(wishes), is_drawing=is_drawing, is_ranking=is_ranking)
    assert found.ids.tolist() == expected.ids.tolist()
    assert found.is_finite.all()
    assert expected.is_finite.all()
    return found.ids.tolist()


@pytest.mark.parametrize(
    ("vocab_size", "tile", "capacity"), [(1, 32, 32), (7, 32, 32), (333, 128, 48), (1000, 512, 500)]
)
@pytest.mark.parametrize("spread", [0.0, 3.0])
def test_the_same_tokens_as_in_torch(
    monkeypatch: pytest.MonkeyPatch, spread: float, vocab_size: int, tile: int, capacity: int
) -> None:
    """Rounded to bfloat16, so that many scores are equal; all scores equal at a spread of 0."""
    cut(monkeypatch, tile, capacity)
    kinds = list(itertools.product(FILTERS, range(2)))
    logits = (torch.randn(len(kinds), vocab_size) * spread).bfloat16().float()
    seeds = torch.randint(-(2**63), 2**63 - 1, (len(kinds),)).tolist()
    found = check(
        logits, [wish(seed, abs(seed) % 9999, **filters) for (filters, _), seed in zip(kinds, seeds, strict=True)]
    )
    for row, (filters, _) in enumerate(kinds):
        if filters.get("top_k") == 1 or filters.get("temperature") == 0 or filters.get("min_p") == 1:
            assert logits[row, found[row]] == logits[row].max()


def test_tiles_as_large_as_they_are() -> None:
    logits = torch.randn(2, 30_001) * 3
    check(logits, [wish(0, temperature=1.3), wish(1, top_k=50, top_p=0.95)])


def test_many_seeds_without_filters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows alike and greedy alone, which skip what they do not need."""
    cut(monkeypatch, 128, 64)
    logits = torch.randn(1, 200).expand(60, -1)
    assert len(set(check(logits, [wish(seed) for seed in range(60)]))) > 30
    check(torch.randn(20, 200), [wish(seed, temperature=0.0) for seed in range(20)])
    assert sample(torch.empty(0, 10, device=DEVICE), draws_of([])).ids.tolist() == []


@pytest.mark.parametrize("capacity", [16, 3000])
def test_a_nucleus_far_below_the_best_digits(monkeypatch: pytest.MonkeyPatch, capacity: int) -> None:
    """One token weighs almost all, and the border lies among scores that differ in their last bits."""
    cut(monkeypatch, 1024, capacity)
    logits = torch.full((5, 3000), -9.0) + torch.arange(3000) * 1e-6
    logits[:, 17] = 3.0
    check(logits, [wish(seed, top_p=0.999 + 0.00016 * seed) for seed in range(5)])
    check(logits, [wish(seed, top_k=2 + 560 * seed, temperature=2.0) for seed in range(5)])


def kept(logits: Tensor, wishes: Sequence[Wish]) -> Tensor:
    """Which tokens each row may draw, by the kernels' limits."""
    logits, draws = logits.to(DEVICE), draws_of(wishes)
    peaks = torch.stack([part.amax(-1) for part in logits.split(sampling._TILE, 1)], 1).contiguous()
    limits = sampling_filter.find_limits(logits, draws, peaks, sampling._TILE)
    scores = (logits - logits.amax(-1, keepdim=True)) / draws.temperature[:, None]
    return (scores.view(torch.int32) & 0x7FFFFFFF) <= limits[:, None]


@pytest.mark.parametrize("capacity", [20, 500])
def test_a_filter_keeps_the_defined_tokens(monkeypatch: pytest.MonkeyPatch, capacity: int) -> None:
    """Not only those that happen to be drawn."""
    cut(monkeypatch, 256, capacity)
    logits = torch.randn(2, 500) * 2
    logits[1] = logits[1].round()  # many equal
    for top_k, top_p, min_p in itertools.product((0, 10, 499), (1.0, 0.8), (0.0, 0.02)):
        if top_k == 0 and top_p == 1:
            continue
        found = kept(logits, [wish(0, top_k=top_k, top_p=top_p, min_p=min_p)] * 2)
        for row, mask in zip(logits, found, strict=True):
            probs = torch.softmax(row.double(), -1)
            probs[row < row.max() + lowest_score(min_p)] = 0
            if top_k:
                probs[row < row.sort(descending=True).values[top_k - 1]] = 0
            best = (probs / probs.sum()).sort(descending=True)
            last = int((best.values.cumsum(-1) - best.values < top_p).nonzero().max())
            expected = (probs > 0) & (row >= row[best.indices[last]])
            assert mask.tolist() == expected.tolist()


@pytest.mark.parametrize("capacity", [100, 4000])
def test_a_nucleus_of_thousands_ends_at_the_right_token(monkeypatch: pytest.MonkeyPatch, capacity: int) -> None:
    """top_p lies in the middle of a token's mass, which is some 0.0003 of the whole."""
    cut(monkeypatch, 2048, capacity)
    sizes = torch.randint(1, 3000, (5,)).tolist()
    logits = (torch.randn(5, 3000) * 0.1).double()
    probs = torch.softmax(logits, -1).sort(-1, descending=True).values
    middles = probs.cumsum(-1) - probs / 2
    wishes = [wish(0, top_p=middles[row, size - 1].item()) for row, size in enumerate(sizes)]
    assert kept(logits.float(), wishes).sum(-1).tolist() == sizes


def test_tokens_ruled_out_are_never_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    cut(monkeypatch, 256, 64)
    logits = torch.full((16, 500), -math.inf)
    logits[:, 250:260] = 0.0
    found = check(logits, [wish(seed, top_k=400 * (seed % 2)) for seed in range(16)])
    assert set(found) <= set(range(250, 260))
    assert len(set(found)) > 3


def test_rows_that_are_void_give_some_id_and_spoil_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    cut(monkeypatch, 32, 32)
    logits = torch.randn(6, 100)
    wishes = [wish(row, top_p=0.8, top_k=30) for row in range(5)] + [wish(5, temperature=0.0)]
    expected = check(logits, wishes)
    logits[1], logits[2, 4], logits[3], logits[5, 99] = math.nan, math.inf, -math.inf, math.nan
    in_torch, drawn = _draw_in_torch(logits.clone(), wishes), sample(logits.to(DEVICE), draws_of(wishes))
    assert drawn.is_finite.tolist() == in_torch.is_finite.tolist() == [True, False, False, False, True, False]
    found = drawn.ids.tolist()
    assert all(0 <= token < 100 for token in found)
    assert (found[0], found[4]) == (expected[0], expected[4])


def test_rows_that_lie_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    cut(monkeypatch, 64, 64)
    logits = torch.randn(4, 300)[:, :201]
    check(logits, [wish(seed, top_p=0.9, top_k=20 * (seed % 2)) for seed in range(4)])


def penalize(logits: Tensor, rows: list[Penalized]) -> tuple[Penalties, Tensor]:
    """The same penalties as counts, and the logits as torch penalises them."""
    counts = torch.zeros(len(rows), logits.shape[1], dtype=torch.int32, device=DEVICE)
    lines = torch.full((len(logits),), -1, dtype=torch.int32, device=DEVICE)
    amounts = torch.ones(3, len(logits), device=DEVICE)
    for line, (row, params, ids, num_prompt) in enumerate(rows):
        counts[line].index_fill_(0, ids[:num_prompt], IN_PROMPT)
        counts[line].index_add_(0, ids[num_prompt:], torch.ones_like(ids[num_prompt:], dtype=torch.int32))
        lines[row] = line
        penalties = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
        amounts[:, row] = torch.tensor(penalties, device=DEVICE)
    expected = logits.clone()
    apply_penalties(expected, rows)
    return Penalties(counts, lines, *amounts.unbind(0)), expected


def test_penalties(monkeypatch: pytest.MonkeyPatch) -> None:
    cut(monkeypatch, 64, 64)
    logits = torch.randn(7, 150, device=DEVICE) * 4
    rows = []
    for row, changes in ((0, (1.3, 0.0, 0.0)), (2, (1.0, 0.6, 0.0)), (3, (1.0, 0.0, -0.7)), (6, (0.8, 0.2, 1.1))):
        params = SamplingParams(
            max_tokens=64, repetition_penalty=changes[0], frequency_penalty=changes[1], presence_penalty=changes[2]
        )
        rows.append(Penalized(row, params, torch.randint(0, 150, (90,), device=DEVICE), 30))
    penalties, expected = penalize(logits, rows)
    wishes = [wish(row, temperature=row % 3 * 0.5, top_p=0.9) for row in range(7)]
    before = logits.clone()
    found = sample(logits, draws_of(wishes), penalties)
    torch.testing.assert_close(logits, expected, rtol=1e-6, atol=2e-5)
    assert torch.equal(logits[[1, 4, 5]], before[[1, 4, 5]])
    again: Drawn = _draw_in_torch(logits.clone(), wishes)
    assert found.ids.tolist() == again.ids.tolist()


@triton.jit
def _noise_kernel(hashes_ptr, fast_ptr, exact_ptr):
    at = tl.arange(0, 1024)
    hashes = tl.load(hashes_ptr + at).to(tl.uint32)
    tl.store(fast_ptr + at, fast_noise(hashes))
    tl.store(exact_ptr + at, exact_noise(hashes))


def test_noise_is_accurate_at_both_ends() -> None:
    """Fast noise to what candidates are told apart by, exact noise to the last digits; math has the definition."""
    middle, most = 1 << 30, (1 << 31) - 1
    hashes = [0, 1, 2, 63, 64, 65, 1 << 20, middle - 1, middle, middle + 1, most - 65, most - 1, most]
    hashes += torch.randint(0, most, (1024 - len(hashes),)).tolist()
    fast, exact = torch.empty(1024, device=DEVICE), torch.empty(1024, dtype=torch.float64, device=DEVICE)
    _noise_kernel[(1,)](torch.tensor(hashes, device=DEVICE), fast, exact)
    expected = torch.tensor([-math.log(-math.log1p(-(h + 0.5) * 2.0**-31)) for h in hashes], dtype=torch.float64)
    torch.testing.assert_close(exact.cpu(), expected, rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(fast.cpu().double(), expected, rtol=3e-7, atol=5e-7)


def chi_square_tail(statistic: float, freedom: int) -> float:
    """P(chi-square with `freedom` degrees > statistic), Wilson and Hilferty's normal approximation."""
    z = ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))
    return 0.5 * math.erfc(z / math.sqrt(2))


def test_the_drawn_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the softmax in float64, over seeds and positions."""
    cut(monkeypatch, 32, 32)
    num = (
        300  # the interpreter takes 10 ms for each; tests/cpu counts torch's draws, which are the same, by the thousand
    )
    logits = torch.randn(8)
    drawn = check(logits.expand(num, -1), [wish(i // 20, i % 20, temperature=1.5) for i in range(num)])
    counts = torch.bincount(torch.tensor(drawn), minlength=8)
    expected = torch.softmax(logits.double() / 1.5, -1) * num
    assert chi_square_tail(((counts - expected) ** 2 / expected).sum().item(), 7) > 1e-5
