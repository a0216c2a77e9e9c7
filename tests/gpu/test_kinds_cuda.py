"""Encoders, vision towers, and two models under one scheduler on a CUDA device: answers are those of a CPU."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from engine.arbiter import Arbiter
from quire import LLM
from tests.cpu import test_encoders, test_images
from tests.cpu.test_models_families import CASES, write_tiny
from tests.gpu.test_engine_cuda import IS_INTERPRETED, Heard, answers, asked, build

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device"),
]
ROOM = {"kv_cache_memory_bytes": 1 << 22, "max_num_seqs": 4}


@pytest.mark.parametrize("name", ["bert", "mpnet", "modernbert", "gemma3"])
def test_vectors_are_those_of_a_cpu(name: str, tmp_path: Path) -> None:
    test_encoders.save_published(tmp_path, name)
    prompts = test_encoders.given(test_encoders.PROMPTS[:5])

    def vectors(device: str) -> list[list[float]]:
        with LLM(str(tmp_path), dtype="float32", device=device, max_num_batched_tokens=48, **ROOM) as llm:
            means, firsts = (
                llm.embed(prompts, pooling=pooling, normalize=False, progress=False) for pooling in ("mean", "cls")
            )
            return test_encoders.numbers([*means, *firsts])

    for ours, theirs in zip(vectors("cuda"), vectors("cpu"), strict=True):
        assert ours == pytest.approx(theirs, abs=1e-4)


@pytest.mark.parametrize("name", ["Qwen3VLConfig", "Gemma3Config"])
def test_images_go_through_a_tower_on_the_device(name: str, tmp_path: Path) -> None:
    """Of Gemma's each token sees all of its image, for which torch's attention takes the kernels' place."""
    path, is_both_ways = test_images.vision(tmp_path, name).path, name in test_images.CONFIGS_BOTH_WAYS
    prompts = test_images.SQUARES if is_both_ways else test_images.PROMPTS
    requests = [test_images.ask(f"{i}", ids, max_tokens=3 + i) for i, (ids, _) in enumerate(prompts)]
    backend = "torch" if is_both_ways else "auto"
    made = partial(build, path, max_model_len=128, image_cache_memory=1 << 20, attention_backend=backend)
    assert Heard(made("cuda"), requests).wait() == Heard(made("cpu"), requests).wait()


def test_two_models_take_turns(tmp_path: Path) -> None:
    """One thread launches the steps of both, and each has its own graphs and pool."""
    folders = tmp_path / "one", tmp_path / "other"
    for name, folder in zip(("qwen3", "lfm2"), folders, strict=True):
        write_tiny(CASES[name], folder)
    wishes = {"max_tokens": 2} if IS_INTERPRETED else {}
    expected = [answers(build(folder, "cpu"), lambda engine, i: wishes) for folder in folders]
    arbiter = Arbiter()
    engines = [build(folder, "cuda", arbiter=arbiter) for folder in folders]
    heard = [Heard(engine, asked(engine, lambda engine, i: wishes)) for engine in engines]
    assert [each.wait() for each in heard] == expected
