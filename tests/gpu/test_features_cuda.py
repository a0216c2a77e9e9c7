"""Codes, adapters, grammars and drafts on a CUDA device: answers are those of a CPU, which has neither kernels nor drafts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.cpu.test_models_families import CASES, ONCE_ON_A_GPU, write_tiny
from tests.free_drafts import FREE_DRAFTS
from tests.gpu.features import FEATURES
from tests.gpu.test_engine_cuda import answers, build

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device"),
]


@pytest.mark.parametrize("name", FEATURES)
def test_cuda_says_what_the_cpu_says_of(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.startup.speculation.measure_draft_costs", lambda *_, **__: FREE_DRAFTS)
    feature = FEATURES[name](tmp_path)

    expected = answers(build(feature.model, "cpu", **feature.expected), feature.asks)
    engine = build(feature.model, "cuda", **feature.settings)
    assert answers(engine, feature.asks) == expected
    assert (engine.stats.spec_accepted_tokens > 0) == ("speculative_config" in feature.settings)


@pytest.mark.parametrize("name", ONCE_ON_A_GPU)
def test_cuda_says_what_the_cpu_says_of_a_family(name: str, tmp_path: Path) -> None:
    write_tiny(CASES[name], tmp_path)
    assert answers(build(tmp_path, "cuda")) == answers(build(tmp_path, "cpu"))
