"""Models with something beside a family's layers, which tests/gpu/ serves on a device: codes, adapters, grammars, drafts.

Each is saved as a tiny checkpoint of random weights, and named by the engine on a CPU whose answers are the same.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file

from engine.adapters import LoadedAdapter
from engine.core.types import GrammarKey
from engine.loop import Engine
from engine.settings.engine_config import LoraModule
from tests.cpu import packers, test_mtp
from tests.cpu.eagle3_drafts import LAYER, bigram_draft, bigram_target, write_draft
from tests.cpu.lora_folders import save_adapter
from tests.cpu.test_constraint import END, StepGrammar
from tests.cpu.test_models_families import CASES, save_tiny, write_tiny
from tests.cpu.test_stored import BLOCKS

VOCAB = 128


class Feature(NamedTuple):
    """A saved model: settings of the engine on the device, of the one on a CPU, and what every other request asks for."""

    model: Path
    settings: dict[str, Any]
    expected: dict[str, Any]
    wishes: Callable[[Engine], dict[str, Any]] = lambda engine: {}

    def asks(self, engine: Engine, index: int) -> dict[str, Any]:
        """Return what a request asks for beside the usual."""
        return self.wishes(engine) if index % 2 else {}


def _awq(folder: Path) -> Feature:
    packers.save(folder, packers.awq(32), hidden=64, inner=96)
    return Feature(folder, {}, {"quantization": "none"})


def _block_fp8(folder: Path) -> Feature:
    packers.save(folder, packers.fp8("block", ".weight_scale_inv", BLOCKS))
    return Feature(folder, {}, {"quantization": "none"})


def _lora(folder: Path) -> Feature:
    model = save_tiny(CASES["qwen3"], folder / "model")
    module = LoraModule("adapter", str(save_adapter(model, folder / "adapter")))

    def take(engine: Engine) -> dict[str, Any]:
        found = engine.adapters.get("adapter")
        assert isinstance(found, LoadedAdapter)
        return {"adapter": found.adapter}

    return Feature(folder / "model", *[{"lora_modules": (module,)}] * 2, take)


def _grammar(folder: Path) -> Feature:
    write_tiny(CASES["qwen3"], folder)
    grammar, key = StepGrammar(reach=3, vocab_size=VOCAB), GrammarKey(b"steps")
    wishes = {"grammar": key, "eos_token_ids": frozenset({END}), "allowed_token_ids": None, "bad_words": ()}

    def take(engine: Engine) -> dict[str, Any]:
        engine._resources.grammars.hold = lambda _: grammar  # type: ignore[method-assign]  # as if it was compiled
        return wishes

    return Feature(folder, {}, {}, take)


def _eagle3(folder: Path) -> Feature:
    (folder / "target").mkdir()
    config = {**LAYER, "vocab_size": VOCAB, "num_hidden_layers": 7, "max_position_embeddings": 256}
    (folder / "target" / "config.json").write_text(json.dumps(config))
    kept = torch.arange(3, VOCAB, 4)
    tensors = bigram_target(VOCAB, 7, kept)
    save_file(tensors, folder / "target" / "model.safetensors")
    draft = write_draft(folder / "draft", bigram_draft(tensors, kept, noise=0.015), VOCAB, {}, layout="speculators")
    return Feature(folder / "target", {"speculative_config": {"model": draft, "num_speculative_tokens": 3}}, {})


def _mtp(name: str, folder: Path) -> Feature:
    test_mtp.save(test_mtp.CASES[name], folder)
    return Feature(folder, {"speculative_config": {"method": "mtp", "num_speculative_tokens": 2}}, {})


FEATURES: dict[str, Callable[[Path], Feature]] = {
    "AWQ": _awq,
    "FP8 in blocks": _block_fp8,
    "LoRA": _lora,
    "a grammar": _grammar,
    "EAGLE-3": _eagle3,
    "MTP": partial(_mtp, "deepseek_v3"),
    "MTP over states": partial(_mtp, "qwen3_5"),  # which take in a step's drafts in the next
}
