"""Answers that resume from what is left of earlier ones are, bit for bit, those of an engine that keeps nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.core.types import Request, SamplingParams
from tests.cpu.warm import NAMES, Answer, Heard, engine_of, play, save


@pytest.mark.parametrize("name", NAMES)
def test_warm_answers_are_cold_answers(name: str, tmp_path: Path) -> None:
    found = play(name, num_answers=36, seed=1, folder=tmp_path)
    assert not found.wrong
    assert found.has_seen_all()


RECURRENT = ("qwen3_5", "qwen3_5-moe", "qwen3_next", "lfm2", "lfm2-moe", "lfm3", "granitemoehybrid-mamba", "bamba")
RECURRENT += ("granitemoehybrid-mamba-dense", "nemotron_h", "nemotron_h-latent", "falcon_h1", "mamba2")
WINDOWED = ("gemma3n", "gemma4", "gemma4-shared", "gemma4-moe", "gemma4-unified", "granite_swa")
ONE_ORDER = [(name, state_dtype) for name in RECURRENT for state_dtype in ("float32", "bfloat16")]
ONE_ORDER += [(name, "float32") for name in WINDOWED]
PROMPT, NUM_NEW = tuple((7 * at * at + 3 * at) % 120 + 3 for at in range(66)), 30


def answer(heard: Heard, said: tuple[int, ...] = ()) -> Answer:
    """Return how the prompt goes on behind what was said."""
    params = SamplingParams(max_tokens=NUM_NEW - len(said), temperature=1.0, seed=3, logprobs=0)
    request = Request(
        request_id=f"{len(said)} of {len(heard.cached)}", prompt=(*PROMPT, *said), params=params, arrival_s=0
    )
    heard.submit(request)
    assert heard.next_end() == request.request_id
    return heard.answer(request)[0]


@pytest.mark.parametrize(("name", "state_dtype"), ONE_ORDER)
def test_prompt_decode_chunk_and_resume_are_one(name: str, state_dtype: str, tmp_path: Path) -> None:
    """A token is computed as one of a whole prompt, of a chunk of 17, behind a snapshot, or alone."""
    save(name, tmp_path)
    with engine_of(tmp_path, state_dtype=state_dtype, max_num_batched_tokens=128, enable_prefix_caching=False) as (
        _,
        heard,
    ):
        ids, logprobs = answer(heard)
        wholes = [answer(heard, ids[:num]) for num in (13, 22)]
    with engine_of(tmp_path, state_dtype=state_dtype, max_num_batched_tokens=17) as (_, heard):
        assert answer(heard) == (ids, logprobs)
        resumed = [answer(heard, ids[:num]) for num in (22, 13)]
        assert all(num_cached > 0 for num_cached, _ in [*heard.cached.values()][1:])
    for num, (said, numbers) in zip((13, 22, 22, 13), (*wholes, *resumed), strict=True):
        assert said == ids[num:]
        assert numbers == logprobs[num:]
