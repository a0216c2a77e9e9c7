"""bad_words and allowed_token_ids through scheduler and runner: in flight, preempted, several choices at once."""

from __future__ import annotations

import random
from collections.abc import Mapping
from functools import cache

import pytest

from engine.core.types import FinishReason, Request
from tests.cpu.model_driver import Served, TinyModel, request, serve, settings

MODEL = TinyModel()
_random = random.Random(5)
PROMPTS = [[_random.randrange(MODEL.vocab_size) for _ in range(length)] for length in (1, 4, 17, 30)]
ALLOWED = frozenset(range(0, MODEL.vocab_size, 2))
REGIMES: Mapping[str, Mapping[str, int]] = {
    "roomy": {},
    "chunked": {"max_num_batched_tokens": 8},
    "tiny_pool": {"num_blocks": 22},
    "swapping": {"num_blocks": 22, "num_host_blocks": 100},
}


def requests(**sampling: object) -> list[Request]:
    asked = {"max_tokens": 14, "temperature": 0.9, "n": 2, **sampling}
    return [request(f"r{i}", prompt, seed=i, **asked) for i, prompt in enumerate(PROMPTS)]


@cache
def plain() -> Served:
    return serve(MODEL, settings(), requests())


@cache
def words() -> tuple[tuple[int, ...], ...]:
    """What the model says if it is let: words of one, two and three tokens."""
    said = list(plain().ids.values())
    return tuple((*ids[3:4],) for ids in said[:1]) + tuple(
        tuple(ids[at : at + length]) for ids in said for at, length in ((1, 2), (5, 3), (9, 2))
    )


def occurrences(ids: list[int]) -> set[tuple[int, ...]]:
    return {word for word in words() for at in range(len(ids)) if tuple(ids[at : at + len(word)]) == word}


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("regime", REGIMES)
def test_bad_words_are_never_said(regime: str, depth: int) -> None:
    config = settings(**REGIMES[regime])
    served = serve(MODEL, config, requests(bad_words=words()), depth=depth, apart=1)
    alone = serve(MODEL, settings(), requests(bad_words=words()))
    assert served.ids == alone.ids
    for key, ids in served.ids.items():
        assert len(ids) == 14
        assert not occurrences(ids)
        # Up to the first bad word of the plain answer nothing changes.
        same = next(at for at in range(15) if occurrences(plain().ids[key][: at + 1]))
        assert ids[:same] == plain().ids[key][:same]
        assert ids[same] != plain().ids[key][same]


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_only_allowed_tokens_are_said(depth: int) -> None:
    served = serve(MODEL, settings(), requests(allowed_token_ids=ALLOWED), depth=depth)
    assert all(set(ids) <= ALLOWED for ids in served.ids.values())
    assert len({tuple(ids) for ids in served.ids.values()}) > 4


def test_an_answer_that_is_left_no_token_ends_alone() -> None:
    """By two words, which no one could have seen in the request."""
    stuck = request("stuck", PROMPTS[1], allowed_token_ids=frozenset({4, 6}), bad_words=((4, 4), (4, 6), (6,)))
    served = serve(MODEL, settings(), [stuck, request("free", PROMPTS[2], allowed_token_ids=ALLOWED)])
    end = served.events["stuck", 0][-1]
    assert end.finish_reason is FinishReason.ERROR
    assert end.error.code == "InvalidRequestError", "it is for the client to mend"
    assert "bad_words" in str(end.error)
    assert served.ids["stuck", 0] == [4]
    assert served.events["free", 0][-1].finish_reason is FinishReason.LENGTH
