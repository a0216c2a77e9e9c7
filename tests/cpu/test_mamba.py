"""Mamba-2 against the recurrence of its paper in float64: transformers' code rounds inside, and bounds steps in chunks alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.numpy import load_file

from engine.runtime.layers.model_config import MambaConfig
from tests.cpu.dense_attention import DenseAttention
from tests.cpu.test_models_families import CASES, load, write_tiny

Floats = NDArray[np.float64]


def silu(x: Floats) -> Floats:
    return x / (1 + np.exp(-x))


def oracle(x: Floats, tensors: dict[str, Floats], sizes: MambaConfig, eps: float) -> Floats:
    """The mixer's outputs [T, hidden] for x [T, hidden], from `y_t = sum over s <= t of C_t' (product of decays) B_s dt_s x_s`."""
    taps, groups = tensors["conv1d.weight"][:, 0], sizes.num_groups * sizes.state_dim
    rows = x @ tensors["in_proj.weight"].T + tensors.get("in_proj.bias", 0.0)
    z, raw, dt = np.split(rows, [sizes.width, sizes.width + sizes.channels], 1)
    padded = np.concatenate((np.zeros((sizes.kernel - 1, sizes.channels)), raw))
    mixed = sum(padded[k : k + len(x)] * taps[:, k] for k in range(sizes.kernel)) + tensors.get("conv1d.bias", 0.0)
    values, b, c = np.split(silu(mixed), [sizes.width, sizes.width + groups], 1)
    dt = np.clip(np.log1p(np.exp(dt + tensors["dt_bias"])), *sizes.step_limit)
    decayed = np.cumsum(-np.exp(tensors["A_log"]) * dt, 0)  # logarithms
    out = np.zeros((len(x), sizes.num_heads, sizes.head_dim))
    for head in range(sizes.num_heads):
        own, group = values[:, head * sizes.head_dim :][:, : sizes.head_dim], head // sizes.shared * sizes.state_dim
        scores = c[:, group : group + sizes.state_dim] @ b[:, group : group + sizes.state_dim].T
        weights = np.tril(scores * np.exp(np.minimum(decayed[:, None, head] - decayed[None, :, head], 0)))
        out[:, head] = weights @ (own * dt[:, head, None]) + tensors["D"][head] * own
    gated = (out.reshape(len(x), -1) * silu(z)).reshape(len(x), sizes.num_groups, -1)
    normed = gated / np.sqrt((gated**2).mean(-1, keepdims=True) + eps)
    return normed.reshape(len(x), -1) * tensors["norm.weight"] @ tensors["out_proj.weight"].T + tensors.get(
        "out_proj.bias", 0.0
    )


@pytest.mark.parametrize("name", ["granitemoehybrid-mamba", "granitemoehybrid-mamba-dense"])
def test_a_layer_is_the_recurrence_of_the_paper(name: str, tmp_path: Path) -> None:
    write_tiny(CASES[name], tmp_path)
    prefix, model = "model.layers.0.mamba.", load(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    tensors = {each.removeprefix(prefix): stored[each].astype(float) for each in stored if each.startswith(prefix)}
    sizes, x = model.config.layers[0].recurrent, torch.randn(70, 64, generator=torch.Generator().manual_seed(2))
    assert sizes is not None
    expected = oracle(x.double().numpy(), tensors, sizes, model.config.norm_eps)
    state = DenseAttention(model.states)
    with torch.inference_mode():
        found = torch.cat([model._layers[0]._mixer(each, None, state, None) for each in x.split((1, 63, 6))])
    assert np.abs(expected).max() > 0.5
    np.testing.assert_allclose(found.double().numpy(), expected, atol=2e-5, rtol=1e-5)
