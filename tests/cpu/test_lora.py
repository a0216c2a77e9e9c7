"""Adapters against the models they come to when they are merged in float32, and against what they must leave alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from test_attention import NUM_BLOCKS, make_batch, make_tables
from test_native_decoder import Piecewise

from engine.runtime.attention.table import load_backend
from engine.runtime.kv_cache import KVCache
from engine.runtime.lora.adapter import AdapterRows, LoraAdapter
from engine.runtime.models.decoder import Decoder
from tests.cpu import test_models_families as families
from tests.cpu.lora_folders import load_adapter, merge, save_adapter

CPU = torch.device("cpu")
NAMES = ("llama", "llama-tied-biased", "qwen2", "qwen3", "gemma2", "olmo2", "phi3", "granite")
LENGTH = 12


def forward(
    model: Decoder,
    prompts: Sequence[tuple[torch.Tensor, LoraAdapter | None]],
    *,
    in_one_call: bool = True,
    last_rows: bool = False,
) -> list[torch.Tensor]:
    """Logits of prompts that are one batch over one pool: of all positions, or of each prompt's last three, twice."""
    backend = load_backend("auto", CPU)
    cache = KVCache(model.attention_specs, backend, num_blocks=NUM_BLOCKS, block_size=4, dtype=model.dtype, device=CPU)
    steps = [(0, len(ids)) for ids, _ in prompts]
    batch = make_batch(steps, make_tables(steps, 4, is_scattered=True), 4)
    batch.ids = torch.cat([ids for ids, _ in prompts])
    backend.prepare(batch)
    rows = torch.arange(len(batch.ids)).split([length for _, length in steps])
    wanted = [own[-3:].repeat(2) if last_rows else own for own in rows]
    adapters = {adapter for _, adapter in prompts if adapter is not None}
    groups = [
        AdapterRows(each, torch.cat([own for own, (_, adapter) in zip(rows, prompts, strict=True) if adapter is each]))
        for each in adapters
    ]
    with torch.inference_mode():
        hidden = model.forward(
            batch.ids,
            batch.positions,
            cache if in_one_call else Piecewise(cache),
            torch.cat(wanted) if last_rows else None,
            groups,
        )
        return list(model.logits(hidden).split([len(own) for own in wanted]))


def prompts_of(adapters: Sequence[LoraAdapter | None]) -> list[tuple[torch.Tensor, LoraAdapter | None]]:
    generator = torch.Generator().manual_seed(3)
    return [(torch.randint(3, 128, (LENGTH - i,), generator=generator), own) for i, own in enumerate(adapters)]


@pytest.mark.parametrize("name", NAMES)
def test_what_is_added_is_what_merged_weights_have_more(name: str, tmp_path: Path) -> None:
    """Several adapters and the base model in one batch, in one native call and operation by operation."""
    theirs = families.save_tiny(families.CASES[name], tmp_path / "model")
    folders = [
        save_adapter(theirs, tmp_path / "all", seed=1),
        save_adapter(theirs, tmp_path / "some", rank=3, seed=2, targets=("v_proj", "o_proj", "qkv_proj", "up_proj")),
    ]
    model = families.load(tmp_path / "model")
    first, second = (load_adapter(model, folder) for folder in folders)
    prompts = prompts_of([first, None, second, first, None, second])
    plain = families.save_tiny(families.CASES[name], tmp_path / "model")
    merged = [families.save_tiny(families.CASES[name], tmp_path / "model") for _ in folders]
    for each, folder in zip(merged, folders, strict=True):
        merge(each, folder)
    oracle = {first: merged[0], None: plain, second: merged[1]}
    for in_one_call in (True, False):
        for last_rows in (False, True):
            found = forward(model, prompts, in_one_call=in_one_call, last_rows=last_rows)
            for (ids, adapter), ours in zip(prompts, found, strict=True):
                with torch.no_grad():
                    expected = oracle[adapter](ids[None], use_cache=False).logits[0]
                if last_rows:
                    expected = expected[-3:].repeat(2, 1)
                torch.testing.assert_close(ours, expected, atol=2e-4, rtol=2e-4)
    with torch.no_grad():
        apart = [each(prompts[0][0][None]).logits for each in (plain, *merged)]
    assert min((apart[i] - apart[j]).abs().max() for i, j in ((0, 1), (0, 2), (1, 2))) > 0.05
