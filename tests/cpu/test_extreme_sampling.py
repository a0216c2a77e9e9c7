"""Sampling parameters at the ends of what a float can be: each is refused, or draws a token from finite scores."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from engine.core.errors import ConfigError
from engine.core.scheduling.beams import BeamSearch
from engine.core.types import SamplingParams
from engine.runtime.sampling import draw as module
from engine.runtime.sampling.sampler import Sampler
from engine.text.fields.sampling import check_defaults
from engine.text.requests.chat_preprocessor import GREEDY_BELOW, beam_params
from engine.text.types import SamplingDefaults
from server.answers.body import SamplingBody
from tests.cpu.test_sampler import CPU, draw, piece

TINY = (5e-324, 1e-300, 1.4e-45, 1e-45, 1.2e-38, 1e-30, 1e-8, 1e-5, 9e-6)
FLOATS = (0.0, -0.0, *TINY, *(-x for x in TINY), 0.01, 1.0, 2.0, 100.0, 1e7, 3.4e38, 1e39, 1e308, math.inf, math.nan)
FIELDS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
VOCAB = 400


def body(**fields: Any) -> SamplingBody | None:
    """The fields of a request, or None for a 400."""
    try:
        return SamplingBody.model_validate(fields)
    except ValidationError:
        return None


def params(asked: SamplingBody, seed: int) -> SamplingParams:
    named = {name: getattr(asked, name) for name in FIELDS if getattr(asked, name) is not None}
    if named.get("temperature", 1.0) < GREEDY_BELOW:
        named["temperature"] = 0.0
    bias = tuple((int(token), value) for token, value in asked.logit_bias.items())
    return SamplingParams(max_tokens=64, seed=seed, logit_bias=bias, **named)


def hard_logits() -> list[torch.Tensor]:
    """Flat, peaked, tiny and as far apart as bfloat16 and float16 hold them."""
    torch.manual_seed(0)
    plain = torch.randn(VOCAB)
    return [
        torch.zeros(VOCAB),
        plain,
        plain * 65504 / 4,
        plain * 1e-38,
        torch.where(plain > 0, 65504.0, -65504.0),
        torch.full((VOCAB,), 1e30),
    ]


def check_draws(asked: SamplingBody) -> None:
    """The sampled text repeats tokens, so that penalties apply many times over."""
    tokens = [1] * 40 + list(range(30))
    for row, logits in enumerate(hard_logits()):
        sampled = draw(Sampler(CPU), [piece(0, params(asked, row), tokens=tokens)], logits[None])
        assert sampled.is_finite.all(), (asked.model_dump(exclude_defaults=True), row)
        assert 0 <= int(sampled.ids[0]) < VOCAB


@pytest.fixture(params=["native", "torch"], autouse=True)
def _drawing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "torch":
        monkeypatch.setattr(module, "native", lambda: None)


@pytest.mark.parametrize("name", FIELDS)
def test_every_float_is_refused_or_draws(name: str) -> None:
    taken = [asked for value in FLOATS for scale in (1, -1) if (asked := body(**{name: scale * value})) is not None]
    assert taken, "some values are valid"
    for asked in taken:
        check_draws(asked)
        check_draws(asked.model_copy(update={"temperature": 1e-5}))


def test_logit_biases_are_refused_or_draw() -> None:
    taken = [asked for value in FLOATS for scale in (1, -1) if (asked := body(logit_bias={"3": scale * value}))]
    assert taken
    for asked in taken:
        check_draws(asked)
    everywhere = body(logit_bias={str(token): -100.0 for token in range(VOCAB)}, temperature=1e-5)
    assert everywhere is not None
    check_draws(everywhere)


def test_the_ends_of_all_ranges_together_draw() -> None:
    for factor in (0.01, 100.0):
        for penalty in (-2.0, 2.0):
            asked = body(
                temperature=1e-5, top_p=5e-324, min_p=5e-324, repetition_penalty=factor, presence_penalty=penalty,
                frequency_penalty=penalty, logit_bias={"1": 100.0, "2": -100.0},
            )  # fmt: skip
            assert asked is not None
            check_draws(asked)


def test_every_length_penalty_is_refused_or_gives_finite_scores() -> None:
    taken = 0
    for value in (*FLOATS, 10.0):
        asked = body(use_beam_search=True, n=2, temperature=0, length_penalty=value)
        if asked is not None:
            taken += 1
            search = BeamSearch(SamplingParams(max_tokens=1 << 20, temperature=0.0, beam=beam_params(asked)))
            assert math.isfinite(search._score(-1e6, 1 << 20))
            assert math.isfinite(search._score(-1e6, 1))
    assert taken > 10


@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p", "repetition_penalty"])
def test_a_model_recommends_only_what_may_be_asked_for(name: str) -> None:
    check_defaults(SamplingDefaults(**{name: 1.0}))
    for value in (-1.0, 1e-300 if name == "repetition_penalty" else 1e300, math.nan, math.inf, "high"):
        with pytest.raises(ConfigError, match=f"generation_config.json has {name}"):
            check_defaults(SamplingDefaults(**{name: value}))
