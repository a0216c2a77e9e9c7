"""The contract of schemes: a matrix stored as several tensors a part, with exceptions by name, is loaded by one class."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.core.errors import ModelLoadError
from engine.files.quant_config import QuantConfig
from engine.runtime.models.load import choose_scheme
from engine.runtime.schemes import SCHEMES
from engine.runtime.schemes.linear import Bundle, Circumstances, Scheme
from engine.runtime.weights.stored.storage import Storage
from tests.cpu.test_models_families import CASES, load, logits_of, write_tiny

IDS = torch.arange(3, 23)


class ScaledScheme(Scheme):
    """Rows divided by scales, which are stored beside them; the head is stored as it is."""

    @classmethod
    def is_default(cls, here: Circumstances) -> bool:
        return here.is_own

    def shapes(self, name: str, num_rows: int, num_inputs: int) -> Mapping[str, tuple[int, ...]]:
        if name in ("lm_head", "model.embed_tokens"):
            return super().shapes(name, num_rows, num_inputs)
        return {".weight_packed": (num_rows, num_inputs), ".weight_scale": (num_rows, 1)}

    def dequantise(self, bundle: Bundle, rows: Tensor) -> None:
        if ".weight" in bundle.tensors:
            super().dequantise(bundle, rows)
            return
        scales = torch.empty(bundle.num_rows, 1)
        bundle.tensors[".weight_scale"].copy_to(scales)
        bundle.tensors[".weight_packed"].copy_to(rows)
        rows.mul_(scales)


def scale(folder: Path) -> dict[str, Tensor]:
    """Store a checkpoint's matrices as ScaledScheme has them, each row with another power of two."""
    stored: dict[str, Tensor] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            scales = 2.0 ** torch.randint(-3, 4, (tensor.shape[0], 1))
            stored[f"{name}_packed"], stored[f"{name}_scale"] = tensor / scales, scales
        else:
            stored[name] = tensor
    return stored


@pytest.mark.parametrize("name", ["llama", "llama-tied-biased", "phi3"])
def test_a_scheme_is_one_class_and_one_line(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tiny(CASES[name], tmp_path)
    expected = logits_of(load(tmp_path), IDS, [20])
    stored = scale(tmp_path)
    save_file(stored, tmp_path / "model.safetensors")
    monkeypatch.setitem(SCHEMES, "scaled", f"{__name__}:ScaledScheme")
    torch.testing.assert_close(logits_of(load(tmp_path), IDS, [20]), expected, atol=0, rtol=0)

    lost = "model.layers.1.self_attn.o_proj.weight_scale"
    save_file({name: tensor for name, tensor in stored.items() if name != lost}, tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError, match=rf"it lacks '{lost}'"):
        load(tmp_path)


FAST, SLOW = SimpleNamespace(prefers_codes=True), SimpleNamespace(prefers_codes=False)
CHOICES: dict[str, tuple[dict[str, Any], str]] = {
    "a quantised checkpoint": ({}, "StoredScheme"),
    "without fast kernels": ({"library": SLOW}, "Scheme"),
    "without kernels": ({"library": None}, "Scheme"),
    "with --dtype": ({"is_dtype_named": True}, "Scheme"),
    "by transformers": ({"is_own": False}, "Scheme"),
    "on CUDA": ({"device": torch.device("cuda"), "library": None}, "StoredScheme"),
    "on CUDA with --dtype": ({"device": torch.device("cuda"), "is_dtype_named": True}, "StoredScheme"),
    "on CUDA by transformers": ({"device": torch.device("cuda"), "is_own": False}, "Scheme"),
    "plain weights": ({"storage": Storage()}, "Scheme"),
    "plain weights on CUDA": ({"storage": Storage(), "device": torch.device("cuda")}, "Scheme"),
    "a GGUF file": ({"storage": Storage(), "has_gguf_rows": True}, "GGUFScheme"),
    "a GGUF file on CUDA": (
        {"storage": Storage(), "has_gguf_rows": True, "device": torch.device("cuda")},
        "Scheme",
    ),
}


@pytest.mark.parametrize("name", CHOICES)
def test_auto_keeps_weights_as_stored_where_that_is_fast(name: str) -> None:
    changes, chosen = CHOICES[name]
    plain: dict[str, Any] = {
        "has_gguf_rows": False,
        "is_dtype_named": False,
        "device": torch.device("cpu"),
        "dtype": torch.bfloat16,
        "is_own": True,
        "library": FAST,
        "storage": Storage(QuantConfig("awq", "config.json", (), None)),
    }
    assert type(choose_scheme("auto", Circumstances(**plain | changes))).__name__ == chosen
