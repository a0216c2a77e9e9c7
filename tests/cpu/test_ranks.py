"""Models on 2 and 4 ranks, in processes of one thread each, against the same models on one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.cpu import ranks
from tests.cpu.test_models_families import CASES, save_tiny, write_tiny
from tests.forked import CONTEXT
from tests.patience import PATIENCE_S

# One of each family, and those that differ in what is divided: merged matrices, biases, latents, experts. Gemma 4's
# layers differ in their heads, which ranks refuse.
NAMES = sorted({case.build().model_type: name for name, case in reversed(CASES.items())}.values())
NAMES = [name for name in NAMES if not name.startswith(("gemma3n", "gemma4"))]
ROUNDED = ["llama", "gemma2", "qwen2-moe", "gpt-oss", "deepseek_v2"]
NAMES += [
    "qwen3_5",
    "granitemoehybrid-mamba-dense",
    "nemotron_h-latent",
    "llama-tied-biased",
    "deepseek_v2-lite",
    "deepseek_v3-halves-biased",
]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[Any, Any]]:
    """What rank 0 of each size found for each model; all are computed by one set of processes."""
    folder = tmp_path_factory.mktemp("ranks")
    for name in ("2", "4"):
        (folder / name).mkdir()
    for name in NAMES:
        write_tiny(CASES[name], folder / name)
    for name in ROUNDED:
        save_tiny(CASES[name], folder / f"{name}-rounded").bfloat16().float().save_pretrained(
            folder / f"{name}-rounded"
        )
    receive, send = CONTEXT.Pipe(duplex=False)
    workers = [
        CONTEXT.Process(target=ranks.work, args=(rank, folder, NAMES, [f"{name}-rounded" for name in ROUNDED], send))
        for rank in range(4)
    ]
    for worker in workers:
        worker.start()
    send.close()
    try:
        assert receive.poll(PATIENCE_S), "the ranks did not answer"
        assert receive.recv()
        yield torch.load(folder / "found.pt")
        for worker in workers:
            worker.join(PATIENCE_S)
            assert worker.exitcode == 0
    finally:
        for worker in workers:
            worker.kill()
            worker.join()


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", NAMES)
def test_ranks_say_what_one_process_says(found: dict[Any, Any], name: str, size: int) -> None:
    expected, tokens, logits, found_tokens, is_same_alone = found[name, size]
    torch.testing.assert_close(logits, expected, atol=2e-5, rtol=1e-5)
    assert expected.std() > 0.1
    assert found_tokens == tokens
    assert is_same_alone


@pytest.mark.parametrize("name", NAMES)
def test_torch_and_gloo_say_the_same(found: dict[Any, Any], name: str) -> None:
    expected, logits = found[name, 0]
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ROUNDED)
def test_bfloat16_is_as_near_the_truth_as_one_process(found: dict[Any, Any], name: str) -> None:
    """Sums over ranks are float32, and so is the stream: ranks add no rounding. The truth is float32, the same weights.

    The lower quartile of tokens counts: rounding changes an expert where two are nearly equal.
    """
    (exact, _), (one, _), ranks_found = found[f"{name}-rounded", "rounded"]
    for ours, is_same_alone in ranks_found.values():
        error, its_error = ((logits - exact).square().mean(-1).quantile(0.25) for logits in (ours, one))
        assert 0 < error < 1.5 * its_error
        assert is_same_alone
