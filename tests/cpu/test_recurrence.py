"""Recurrent layers against the recurrences of their papers in float64: transformers' code rounds inside, and has its own chunks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.numpy import load_file

from engine.runtime.layers.model_config import DeltaConfig, MambaConfig, ShortConvConfig
from tests.cpu.dense_attention import DenseAttention
from tests.cpu.test_models_families import CASES, load, write_tiny

Floats = NDArray[np.float64]


def silu(x: Floats) -> Floats:
    return x / (1 + np.exp(-x))


def convolved(x: Floats, taps: Floats) -> Floats:
    """Sums over the last inputs of each channel, with its taps [channels, kernel]."""
    padded = np.concatenate((np.zeros((taps.shape[1] - 1, x.shape[1])), x))
    return np.stack([np.einsum("kc,ck->c", padded[t : t + taps.shape[1]], taps) for t in range(len(x))])


def mamba(x: Floats, tensors: dict[str, Floats], sizes: MambaConfig, eps: float) -> Floats:
    """The mixer's outputs [T, hidden] for x [T, hidden], from `y_t = sum over s <= t of C_t' (product of decays) B_s dt_s x_s`."""
    taps, groups = tensors["conv1d.weight"][:, 0], sizes.num_groups * sizes.state_dim
    rows = x @ tensors["in_proj.weight"].T + tensors.get("in_proj.bias", 0.0)
    z, raw, dt = np.split(rows, [sizes.width, sizes.width + sizes.channels], 1)
    mixed = convolved(raw, taps) + tensors.get("conv1d.bias", 0.0)
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


def delta(x: Floats, tensors: dict[str, Floats], sizes: DeltaConfig, eps: float) -> Floats:
    """The mixer's outputs, from `S_t = S_{t-1} alpha_t (1 - beta_t k_t k_t') + beta_t v_t k_t'` of each head."""
    qkv, z, b, a = (x @ tensors[f"in_proj_{name}.weight"].T for name in ("qkv", "z", "b", "a"))
    mixed, keys = silu(convolved(qkv, tensors["conv1d.weight"][:, 0])), sizes.num_k_heads * sizes.k_dim
    q, k = (part.reshape(len(x), -1, sizes.k_dim) for part in (mixed[:, :keys], mixed[:, keys : 2 * keys]))
    q, k = (part / np.sqrt((part**2).sum(-1, keepdims=True) + 1e-6) for part in (q, k))
    v = mixed[:, 2 * keys :].reshape(len(x), -1, sizes.v_dim)
    alpha = np.exp(-np.exp(tensors["A_log"]) * np.log1p(np.exp(a + tensors["dt_bias"])))
    beta, out = 1 / (1 + np.exp(-b)), np.zeros_like(v)
    for head in range(sizes.num_v_heads):
        s, own = np.zeros((sizes.v_dim, sizes.k_dim)), head // sizes.shared
        for t in range(len(x)):
            key = k[t, own]
            s = alpha[t, head] * s @ (np.eye(sizes.k_dim) - beta[t, head] * np.outer(key, key))
            s += beta[t, head] * np.outer(v[t, head], key)
            out[t, head] = s @ q[t, own] / np.sqrt(sizes.k_dim)
    normed = out / np.sqrt((out**2).mean(-1, keepdims=True) + eps) * tensors["norm.weight"]
    return (normed.reshape(len(x), -1) * silu(z)) @ tensors["out_proj.weight"].T


def short_conv(x: Floats, tensors: dict[str, Floats], sizes: ShortConvConfig, eps: float) -> Floats:
    """The mixer's outputs: a gate before the convolution and one behind it."""
    b, c, rows = np.split(x @ tensors["in_proj.weight"].T, 3, 1)
    return c * convolved(b * rows, tensors["conv.weight"][:, 0]) @ tensors["out_proj.weight"].T


LAYERS: dict[str, tuple[str, Callable[..., Floats]]] = {
    "granitemoehybrid-mamba": ("mamba", mamba),
    "granitemoehybrid-mamba-dense": ("mamba", mamba),
    "qwen3_5": ("linear_attn", delta),
    "lfm2": ("conv", short_conv),
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_is_the_recurrence_of_the_paper(name: str, tmp_path: Path) -> None:
    write_tiny(CASES[name], tmp_path)
    part, oracle = LAYERS[name]
    prefix, model = f"model.layers.0.{part}.", load(tmp_path)
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
