"""Models that transformers' code runs, served by the real `quire serve`, say what transformers' own `generate` says."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
import torch

from tests.cpu.served_models import save_servable, say, serving
from tests.cpu.test_models_transformers import CASES

PROMPT, NUM_NEW = [5, 17, 99, 3, 64, 23, 41], 12


@pytest.mark.parametrize("name", ["gpt2", "mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_a_daemon_says_what_generate_says(name: str, tmp_path: Path) -> None:
    model = save_servable(CASES[name], tmp_path)
    ids = torch.tensor([PROMPT])
    with torch.no_grad():
        told = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_NEW, min_new_tokens=NUM_NEW, do_sample=False
        )
    expected = say(told[0, len(PROMPT) :])
    with serving(str(tmp_path)) as url:
        body = {"prompt": say(ids[0]), "max_tokens": NUM_NEW, "min_tokens": NUM_NEW, "temperature": 0}
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["text"].split() == expected.split()
