"""The sampler: exact where it must be, distributed as asked where it is random, and blind to its batch mates."""

from __future__ import annotations

import math

import pytest
import torch

from engine.core.rows import SequenceSlice
from engine.core.step import Sample
from engine.core.types import SamplingParams
from engine.runtime.sampling.draw import gumbel_noise, make_key, to_keys
from engine.runtime.sampling.sampler import Sampled, Sampler, _rows

CPU = torch.device("cpu")


def params(**fields: object) -> SamplingParams:
    return SamplingParams(max_tokens=64, **fields)  # type: ignore[arg-type]


def piece(
    slot: int,
    sampling: SamplingParams,
    *,
    tokens: list[int] | None = None,
    num_prompt: int = 1,
    seq_id: int | None = None,
    seeds: tuple[int, ...] | None = None,
    end: int | None = None,
) -> SequenceSlice:
    """The last position of a sequence of `tokens`; `end` one more than their number means its last id is not known."""
    tokens = [1] if tokens is None else tokens
    stop = len(tokens) if end is None else end
    samples = tuple(Sample(slot + i, seed) for i, seed in enumerate(seeds or (sampling.seed,)))
    return SequenceSlice(slot, slot if seq_id is None else seq_id, num_prompt, sampling, tokens, samples, stop - 1, 1)


def draw(
    sampler: Sampler, pieces: list[SequenceSlice], logits: torch.Tensor, last: torch.Tensor | None = None
) -> Sampled:
    last_ids = torch.zeros(4096, dtype=torch.int64) if last is None else last
    return sampler.sample(pieces, logits.clone(), last_ids)


def draw_many(sampling: dict, logits: torch.Tensor, num: int) -> torch.Tensor:
    """Counts of each token over `num` seeds."""
    pieces = [piece(i, params(seed=i, **sampling)) for i in range(num)]
    ids = draw(Sampler(CPU), pieces, logits.expand(num, -1)).ids
    return torch.bincount(ids, minlength=logits.shape[-1])


def chi_square_tail(statistic: float, freedom: int) -> float:
    """P(chi-square with `freedom` degrees > statistic), Wilson and Hilferty's normal approximation."""
    z = ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))
    return 0.5 * math.erfc(z / math.sqrt(2))


def exact(
    logits: torch.Tensor, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> torch.Tensor:
    """The distribution by definition, token by token."""
    probs = torch.softmax(logits.double() / temperature, -1)
    order = probs.argsort(descending=True).tolist()
    kept = [token for token in order if probs[token] >= min_p * probs.max()]
    kept = kept[: top_k or None]
    mass = sum(float(probs[token]) for token in kept)
    nucleus, before = [], 0.0
    for token in kept:
        if nucleus and before >= top_p * mass:
            break
        nucleus.append(token)
        before += float(probs[token])
    out = torch.zeros_like(probs)
    out[nucleus] = probs[nucleus]
    return out / out.sum()


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 0.6},
        {"temperature": 2.5},
        {"top_k": 5},
        {"top_p": 0.7},
        {"min_p": 0.2},
        {"temperature": 1.3, "top_k": 12, "top_p": 0.8},
        {"temperature": 0.8, "top_k": 20, "top_p": 0.95, "min_p": 0.05},
    ],
    ids=str,
)
def test_draws_follow_the_distribution(sampling: dict) -> None:
    torch.manual_seed(0)
    logits, num = torch.randn(30) * 1.5, 4000
    counts, probs = draw_many(sampling, logits, num), exact(logits, **sampling)
    assert counts[probs == 0].sum() == 0
    expected = (probs * num)[probs > 0]
    seen = counts[probs > 0].double()
    # Cells with few expected draws are merged, as the test asks for.
    rare = expected < 5
    expected = torch.cat([expected[~rare], expected[rare].sum().reshape(1) + 1e-9])
    seen = torch.cat([seen[~rare], seen[rare].sum().reshape(1)])
    statistic = float(((seen - expected) ** 2 / expected.clamp(min=1e-3)).sum())
    assert chi_square_tail(statistic, len(expected) - 1) > 1e-4


def test_draws_at_successive_positions_are_independent() -> None:
    """One seed, many positions: the pairs of neighbours fill their table evenly."""
    logits, num = torch.zeros(8), 6400
    pieces = [piece(i, params(seed=11), tokens=[1] * (i + 1)) for i in range(num)]
    ids = draw(Sampler(CPU), pieces, logits.expand(num, -1), torch.zeros(num, dtype=torch.int64)).ids
    pairs = torch.bincount(ids[:-1] * 8 + ids[1:], minlength=64).double()
    statistic = float(((pairs - (num - 1) / 64) ** 2 / ((num - 1) / 64)).sum())
    assert chi_square_tail(statistic, 63) > 1e-4


def test_noise_is_gumbel_and_finite() -> None:
    noise = gumbel_noise(
        to_keys([make_key(seed, 0) for seed in range(4)], CPU), torch.arange(50_000, dtype=torch.int32)
    ).double()
    assert noise.isfinite().all()
    assert abs(noise.mean() - 0.5772) < 0.01
    assert abs(noise.var() - math.pi**2 / 6) < 0.03
    assert torch.corrcoef(noise).fill_diagonal_(0).abs().max() < 0.02
    # The far tail, where draws among a large vocabulary are decided: P(noise > 9) is 1.23e-4.
    assert 10 <= int((noise > 9).sum()) <= 42


MIXES = [
    {"temperature": 0.0},
    {"temperature": 0.0, "repetition_penalty": 1.4},
    {"seed": 5},
    {"seed": 6, "top_p": 0.8},
    {"seed": 7, "top_k": 3, "presence_penalty": 0.5},
    {"seed": 8, "min_p": 0.1, "frequency_penalty": 0.7},
    {"seed": 9, "logit_bias": ((3, 4.0), (4, -100.0)), "temperature": 1.7},
    {"seed": 2**63 + 5, "min_tokens": 9, "eos_token_ids": frozenset({1, 2})},
    {"seed": -1, "logprobs": 3},
]


def test_a_row_does_not_see_its_batch() -> None:
    """Every kind of row draws the same token alone, in a mixed batch and in another place of it."""
    torch.manual_seed(4)
    logits = torch.randn(len(MIXES), 300) * 2
    tokens = [5, 6, 7, 7, 8, 9, 9, 9]
    pieces = [piece(i, params(**mix), tokens=tokens, num_prompt=3) for i, mix in enumerate(MIXES)]
    together = draw(Sampler(CPU), pieces, logits).ids.tolist()
    reverse = draw(Sampler(CPU), pieces[::-1], logits.flip(0)).ids.tolist()
    alone = [draw(Sampler(CPU), [each], logits[i : i + 1]).ids.item() for i, each in enumerate(pieces)]
    assert together == alone == reverse[::-1]


def test_seed_and_position_change_the_draw() -> None:
    logits = torch.zeros(1, 1000)
    base = draw(Sampler(CPU), [piece(0, params(seed=1), tokens=[4, 4])], logits).ids.item()
    other_seed = draw(Sampler(CPU), [piece(0, params(seed=2), tokens=[4, 4])], logits).ids.item()
    other_position = draw(Sampler(CPU), [piece(0, params(seed=1), tokens=[4, 4, 4])], logits).ids.item()
    other_tokens = draw(Sampler(CPU), [piece(3, params(seed=1), tokens=[9, 9])], logits).ids.item()
    assert len({base, other_seed, other_position}) == 3
    assert other_tokens == base


def test_greedy_is_the_exact_argmax() -> None:
    logits = torch.randn(40, 1000)
    pieces = [piece(i, params(temperature=0.0)) for i in range(40)]
    assert torch.equal(draw(Sampler(CPU), pieces, logits).ids, logits.argmax(-1))


@pytest.mark.parametrize("vocab_size", [50, 5000])
def test_top_p_agrees_with_its_definition(vocab_size: int) -> None:
    """Flat distributions need far more tokens than the first width looked at; sharp ones but a few."""
    for scale in (0.01, 1.0, 8.0):
        logits = torch.randn(vocab_size, generator=torch.Generator().manual_seed(1)) * scale
        counts = draw_many({"top_p": 0.5}, logits, 300)
        allowed = exact(logits, top_p=0.5) > 0
        assert counts[~allowed].sum() == 0, scale
        assert (counts > 0).sum() > min(int(allowed.sum()), 30) // 2


@pytest.mark.parametrize("top_p", [1e-9, 1e-60], ids=["small", "nothing in float32"])
def test_tiny_top_p_is_greedy(top_p: float) -> None:
    logits = torch.randn(20, 200)
    pieces = [piece(i, params(seed=i, top_p=top_p)) for i in range(20)]
    assert torch.equal(draw(Sampler(CPU), pieces, logits).ids, logits.argmax(-1))


def edited(sampling: dict, tokens: list[int], num_prompt: int, logits: torch.Tensor) -> list[float]:
    """The logits after everything but temperature and the draw."""
    sampler = Sampler(CPU)
    pieces = [piece(0, params(**sampling), tokens=tokens, num_prompt=num_prompt)]
    out = logits.clone()[None]
    for edit in (sampler._edit, sampler._penalise):
        edit(out, _rows(pieces), torch.zeros(1, dtype=torch.int64))
    return out[0].tolist()


def test_penalties_by_definition() -> None:
    """Repetition over prompt and answer, presence and frequency over the answer alone; then logit_bias is in too."""
    logits = torch.tensor([2.0, -1.0, 0.5, 3.0, -2.0, 1.0])
    tokens, num_prompt = [0, 1, 1, 3, 3, 3, 4], 3  # prompt 0 1 1, answer 3 3 3 4
    got = edited(
        {"repetition_penalty": 2.0, "presence_penalty": 0.25, "frequency_penalty": 0.5, "logit_bias": ((5, 1.5), (0, 1.0))},
        tokens, num_prompt, logits,
    )  # fmt: skip
    expected = [3.0 / 2, -1.0 * 2, 0.5, 3.0 / 2 - 3 * 0.5 - 0.25, -2.0 * 2 - 0.5 - 0.25, 2.5]
    assert got == pytest.approx(expected)


def test_min_tokens_bans_the_ends_until_then() -> None:
    sampling = {"temperature": 0.0, "min_tokens": 2, "eos_token_ids": frozenset({3}), "stop_token_ids": frozenset({2})}
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0]])
    for num_generated, expected in ((0, 1), (1, 1), (2, 3)):
        tokens = [0] * (5 + num_generated)
        drawn = draw(Sampler(CPU), [piece(0, params(**sampling), tokens=tokens, num_prompt=5)], logits)
        assert drawn.ids.tolist() == [expected]


def test_bad_words_and_allowed_tokens_by_definition() -> None:
    """A word is banned by its last token, where the answer ends with the others; whoever knows the last of these."""
    logits = torch.linspace(0, 1, 10)  # greedy takes 9, then 8, ...
    last = torch.full((4,), 5)

    def drawn(answer: list[int], *, is_last_known: bool = True, **wish: object) -> int:
        tokens = [9, 5, *answer]
        known = tokens if is_last_known else tokens[:-1]
        one = piece(0, params(temperature=0.0, **wish), tokens=known, num_prompt=2, end=len(tokens))
        return int(draw(Sampler(CPU), [one], logits[None], last.clone()).ids)

    assert drawn([], bad_words=((9,),)) == 8
    assert drawn([], bad_words=((5, 9),)) == 9, "the prompt does not count"
    for is_last_known in (True, False):
        assert drawn([5], bad_words=((5, 9),), is_last_known=is_last_known) == 8
        assert drawn([5], bad_words=((4, 9),), is_last_known=is_last_known) == 9
        assert drawn([5], bad_words=((4, 9), (5, 9), (5, 8)), is_last_known=is_last_known) == 7
        assert drawn([3, 5], bad_words=((3, 5, 9), (4, 5, 8)), is_last_known=is_last_known) == 8
        assert drawn([3, 5], bad_words=((2, 3, 5, 9),), is_last_known=is_last_known) == 9
    assert drawn([], allowed_token_ids=frozenset({1, 4})) == 4
    assert drawn([], allowed_token_ids=frozenset({1, 4}), bad_words=((4,),), logit_bias=((8, 90.0),)) == 1
    owner = Sampler(CPU)
    for seq_id, token in ((1, 4), (2, 3), (2, 3)):  # a slot changes hands
        one = piece(0, params(temperature=0.0, allowed_token_ids=frozenset({token})), seq_id=seq_id)
        assert int(draw(owner, [one], logits[None]).ids) == token
    nothing = piece(0, params(temperature=0.0, allowed_token_ids=frozenset({4}), bad_words=((4,),)))
    assert not draw(Sampler(CPU), [nothing], logits[None]).is_finite


def test_an_end_token_beyond_the_models_vocabulary_touches_no_other_row() -> None:
    """A tokenizer may know more tokens than the model has logits for."""
    sampling = {"temperature": 0.0, "min_tokens": 9, "eos_token_ids": frozenset({4, 400})}
    logits = torch.tensor([[1.0, 0.0, 0.0, 0.0], [5.0, 1.0, 0.0, 0.0]])
    drawn = draw(Sampler(CPU), [piece(0, params(**sampling)), piece(1, params(temperature=0.0))], logits)
    assert drawn.ids.tolist() == [0, 0]


def test_history_follows_a_sequence_through_overlap_preemption_and_a_new_tenant() -> None:
    """A greedy row with a heavy frequency penalty walks down the ranking; its history must never lose or add a token."""
    logits = torch.tensor([[5.0, 4.0, 3.0, 2.0, 1.0, 0.0]])
    heavy = params(temperature=0.0, frequency_penalty=100.0)
    last = torch.zeros(2, dtype=torch.int64)
    sampler, tokens = Sampler(CPU), [5, 5]

    first = draw(sampler, [piece(0, heavy, tokens=tokens, num_prompt=2, seq_id=1)], logits, last).ids.item()
    # Overlap: the next step is planned before the host knows `first`.
    second = draw(sampler, [piece(0, heavy, tokens=tokens, num_prompt=2, seq_id=1, end=3)], logits, last).ids.item()
    tokens += [first]
    third = draw(sampler, [piece(0, heavy, tokens=tokens, num_prompt=2, seq_id=1, end=4)], logits, last).ids.item()
    assert [first, second, third] == [0, 1, 2]
    # The slot changes hands, and the first sequence resumes in another one.
    tokens += [second, third]
    newcomer = draw(sampler, [piece(0, heavy, tokens=[1, 0], num_prompt=1, seq_id=2)], logits, last).ids.item()
    resumed = draw(sampler, [piece(1, heavy, tokens=tokens, num_prompt=2, seq_id=1)], logits, last).ids.item()
    assert (newcomer, resumed) == (1, 3)


def test_a_fork_draws_differently_by_seed_from_the_same_row() -> None:
    sampling = params(seed=3)
    logits = torch.zeros(3, 500)
    ids = draw(
        Sampler(CPU), [piece(4, sampling, seeds=(3, 4, 5))], logits, last := torch.zeros(8, dtype=torch.int64)
    ).ids
    assert len(set(ids.tolist())) == 3
    assert torch.equal(last[4:7], ids)


def test_logprobs_are_of_the_raw_distribution() -> None:
    torch.manual_seed(8)
    logits = torch.randn(3, 50)
    asked = params(temperature=0.0, logprobs=2, logit_bias=((7, 100.0),))
    pieces = [piece(0, params(temperature=0.0)), piece(1, asked), piece(2, params(temperature=0.0, logprobs=0))]
    out = draw(Sampler(CPU), pieces, logits)
    assert out.logprobs is not None
    assert list(out.logprob_rows) == [1, 2]
    entry, plain = out.logprobs.to_types([2, 0])
    expected = torch.log_softmax(logits[1], -1)
    order = expected.argsort(descending=True).tolist()
    assert entry.token_id == 7
    assert entry.logprob == pytest.approx(expected[7].item(), abs=1e-6)
    assert entry.rank == order.index(7) + 1
    assert [token for token, _ in entry.top] == order[:2]
    assert plain.token_id == logits[2].argmax()
    assert (plain.rank, plain.top) == (1, ())


@pytest.mark.parametrize("bad", [math.nan, math.inf, "all -inf"])
def test_a_row_that_is_not_finite_is_reported_alone(bad: float | str) -> None:
    torch.manual_seed(2)
    logits = torch.randn(3, 40)
    pieces = [piece(i, params(seed=i, top_p=0.9, top_k=7)) for i in range(3)]
    good = draw(Sampler(CPU), pieces, logits).ids.tolist()
    if isinstance(bad, str):
        logits[1] = -math.inf
    else:
        logits[1, 5] = bad
    out = draw(Sampler(CPU), pieces, logits)
    assert out.is_finite.tolist() == [True, False, True]
    assert [out.ids[0], out.ids[2]] == [good[0], good[2]]


def test_masked_logits_are_no_fault() -> None:
    """A model may rule tokens out with -inf of its own."""
    logits = torch.full((1, 10), -math.inf)
    logits[0, 6] = 1.0
    out = draw(Sampler(CPU), [piece(0, params(seed=1, top_p=0.5))], logits)
    assert (out.ids.item(), out.is_finite.item()) == (6, True)
