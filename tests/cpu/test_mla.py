"""Multi-head latent attention: the traps, the pool, and the same bits in any batch.

tests/cpu/test_models_families.py compares whole models with transformers, test_attention.py the backends with their
definition.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, DeepseekV3Config

from engine.core.errors import ConfigError
from engine.core.scheduling.scheduler import Scheduler
from engine.core.stats import PreemptionKind
from engine.runtime.attention.table import load_backend
from engine.runtime.kv_layout import AttentionSpec, from_pool, to_pool
from engine.runtime.layers.latent import LatentAttention
from engine.runtime.layers.model_config import ModelConfig
from engine.runtime.layers.parts import Maker
from engine.runtime.models.decoder import Decoder
from engine.runtime.models.families import read_config
from engine.runtime.native.library import Library, native
from engine.runtime.pool.groups import one_group
from engine.runtime.pool.kv_cache import KVCache
from engine.runtime.pool.pool_size import resolve_kv_dtype
from engine.runtime.schemes.linear import Scheme
from engine.runtime.weights.checkpoint import StoredTensor
from engine.settings.engine_config import EngineConfig
from engine.startup.model_check import check_model
from tests.cpu.model_driver import Served, make_runner, request, serve, settings
from tests.cpu.packers import fp8
from tests.cpu.test_attention import empty_pools, make_batch, make_tables
from tests.cpu.test_models_families import CASES, load, logits_of, write_tiny
from tests.reference_attention import dense_attention

CPU = torch.device("cpu")
V2_LITE = {
    "model_type": "deepseek_v2",
    "vocab_size": 102_400,
    "hidden_size": 2048,
    "intermediate_size": 10_944,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "max_position_embeddings": 163_840,
    "rope_theta": 10_000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 4096,
    },
}


def config_of(**changes: Any) -> ModelConfig:
    return read_config(V2_LITE | changes, "config.json")


def spec_of(config: ModelConfig) -> AttentionSpec:
    heads = config.layers[0].heads
    assert heads.latent is not None
    return AttentionSpec(heads.num_heads, 1, heads.head_dim, config.attention_scale, value_dim=heads.latent.rank)


class Weights:
    """Random weights of one layer of attention, in float64, and the layer filled with them in any type."""

    def __init__(self, config: ModelConfig) -> None:
        latent = config.layers[0].heads.latent
        assert latent is not None
        self.config, self.latent = config, latent
        make = Maker(torch.float64, CPU, Scheme(), loads=[], targets={})
        LatentAttention(config, 0, make, 0)
        torch.manual_seed(4)
        self.tensors: dict[str, Tensor] = {}
        for name, shape in (item for part in make.loads for item in part.shapes.items()):
            noise = torch.randn(shape, dtype=torch.float64)
            self.tensors[name.removeprefix("self_attn.")] = 1 + noise / 5 if "norm" in name else noise / shape[1] ** 0.5

    def layer(self, dtype: torch.dtype) -> LatentAttention:
        make = Maker(dtype, CPU, Scheme(), loads=[], targets={})
        layer = LatentAttention(self.config, 0, make, 0)
        stored = {
            name: StoredTensor(name, tuple(x.shape), x.nbytes, "", lambda to, x=x: to.copy_(x))
            for name, x in self.tensors.items()
        }
        for part in make.loads:
            part.take({name: stored[name.removeprefix("self_attn.")] for name in part.shapes})
        return layer

    def naive(self, x: Tensor, angles: Tensor) -> Tensor:
        """The definition: keys and values of every head expanded, and complex numbers rotated pair by pair."""
        w, latent, heads = self.tensors, self.latent, self.config.layers[0].heads.num_heads
        rank, nope, num = latent.rank, latent.nope_dim, len(x)

        def norm(x: Tensor, name: str) -> Tensor:
            return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * w[name]

        q = (
            x @ w["q_proj.weight"].T
            if latent.query_rank is None
            else (norm(x @ w["q_a_proj.weight"].T, "q_a_layernorm.weight") @ w["q_b_proj.weight"].T)
        )
        q = q.view(num, heads, -1)
        row = x @ w["kv_a_proj_with_mqa.weight"].T
        expanded = (norm(row[:, :rank], "kv_a_layernorm.weight") @ w["kv_b_proj.weight"].T).view(num, heads, -1)

        def turn(x: Tensor) -> Tensor:
            first, second = x.chunk(2, -1) if not latent.is_interleaved else (x[..., 0::2], x[..., 1::2])
            return torch.view_as_real(
                torch.complex(first, second) * torch.polar(torch.ones_like(angles), angles)[:, None]
            ).flatten(-2)

        shared = turn(row[:, None, rank:]).expand(-1, heads, -1)
        queries = torch.cat((q[..., :nope], turn(q[..., nope:])), -1)
        keys = torch.cat((expanded[..., :nope], shared), -1)
        scores = torch.einsum("qhd,khd->hqk", queries, keys) * self.config.attention_scale
        scores = scores.masked_fill(torch.ones(num, num, dtype=torch.bool).triu(1), -torch.inf)
        mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), expanded[..., nope:])
        return mixed.flatten(1) @ w["o_proj.weight"].T


class OverOwnRows:
    """Attention over the rows of one call, in float64 or by a backend over a pool."""

    from_projected = None
    paged_step = None

    def __init__(self, spec: AttentionSpec, backend: str | None = None) -> None:
        self.spec, self.backend = spec, backend

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.backend is None:
            return dense_attention(self.spec, q, k, v, 0)
        backend, steps = load_backend(self.backend, CPU), [(0, len(q))]
        backend.prepare(make_batch(steps, make_tables(steps, 16, is_scattered=True), 16))
        pools = empty_pools(backend, self.spec, 96, 16, q.dtype)
        return backend.attend(self.spec, q, k, v, *pools)


def run(weights: Weights, x: Tensor, angles: Tensor, dtype: torch.dtype, backend: str | None = None) -> Tensor:
    cos, sin = (
        part.to(dtype) for part in (torch.cat((angles, angles), -1).cos(), torch.cat((-angles.sin(), angles.sin()), -1))
    )
    with torch.inference_mode():
        return weights.layer(dtype)(x.to(dtype), (cos, sin), OverOwnRows(spec_of(weights.config), backend))


@pytest.mark.parametrize("is_interleaved", [True, False])
@pytest.mark.parametrize("query_rank", [None, 48])
def test_absorbed_is_naive(query_rank: int | None, is_interleaved: bool) -> None:
    """In float64, to its last digits: nothing but the order of sums differs."""
    config = config_of(model_type="deepseek_v3", hidden_size=96, num_attention_heads=6, q_lora_rank=query_rank,
                       rope_interleave=is_interleaved, kv_lora_rank=40, qk_nope_head_dim=20, qk_rope_head_dim=8,
                       v_head_dim=28, n_routed_experts=256, num_experts_per_tok=8)  # fmt: skip
    weights = Weights(config)
    x, angles = torch.randn(30, 96, dtype=torch.float64), torch.rand(30, 4, dtype=torch.float64) * 6
    expected = weights.naive(x, angles)
    torch.testing.assert_close(run(weights, x, angles, torch.float64), expected, atol=1e-12, rtol=1e-12)
    assert expected.std() > 0.1


@pytest.mark.parametrize(
    "backend", ["torch", pytest.param("cpu_native", marks=pytest.mark.skipif(native() is None, reason="no library"))]
)
def test_bfloat16_is_bounded(backend: str) -> None:
    """With the sizes of V2-Lite's heads, rounding costs less than a hundredth of the results."""
    weights = Weights(config_of(hidden_size=256))
    x, angles = torch.randn(50, 256, dtype=torch.float64), torch.rand(50, 32, dtype=torch.float64) * 6
    expected = weights.naive(x, angles)
    found = run(weights, x, angles, torch.bfloat16, backend).double()
    assert (found - expected).square().mean() < 1e-4 * expected.square().mean()
    exact = run(weights, x, angles, torch.float32, backend).double()
    assert (exact - expected).square().mean() < 1e-11 * expected.square().mean()


@pytest.mark.parametrize(
    ("rope", "scale"),
    [
        (V2_LITE["rope_scaling"], 192**-0.5 * (0.1 * 0.707 * 3.6888794541139363 + 1) ** 2),
        ({**V2_LITE["rope_scaling"], "mscale": 1.0, "mscale_all_dim": 1.0}, 0.1352337788608801),  # V3's
        ({"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096}, 192**-0.5),
        (None, 192**-0.5),
    ],
)
def test_yarn_enters_the_scale(rope: dict[str, Any] | None, scale: float) -> None:
    config = config_of(rope_scaling=rope)
    assert config.attention_scale == pytest.approx(scale, rel=1e-12)
    assert config.layers[0].rope is not None
    magnitude = config.layers[0].rope.frequencies(4096).magnitude
    is_in_scale = rope is not None and "mscale_all_dim" in rope
    assert magnitude == pytest.approx(1.0 if is_in_scale or rope is None else 0.1 * 3.6888794541139363 + 1)


def test_a_token_takes_576_numbers_a_layer() -> None:
    config = config_of()
    specs = [spec_of(config)] * 27
    assert config.layers[0].heads.head_dim == 576
    assert one_group(specs, torch.bfloat16).cuts[-1] == 27 * 576 * 2
    for name in ("torch", *(["cpu_native"] if native() else [])):
        pool = KVCache(
            specs[:2], load_backend(name, CPU), num_blocks=3, block_size=16, dtype=torch.bfloat16, device=CPU
        )
        assert sum(view.nbytes for view in pool.blocks) == 3 * 16 * 2 * 576 * 2


def test_sizes_and_weights_of_v2_lite() -> None:
    """15.7 billion parameters, as published."""
    assert config_of().num_weights == pytest.approx(15.7e9, rel=5e-3)


def test_fp8_latents_are_refused_before_weights_are_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(V2_LITE))
    asked = EngineConfig(model=str(tmp_path), load_format="dummy", kv_cache_dtype="fp8")
    with pytest.raises(ConfigError, match=r"--kv-cache-dtype is 'fp8', and the model caches latents \(MLA\)"):
        check_model(asked)
    assert check_model(replace(asked, kv_cache_dtype="int8")).is_native


def test_narrow_pools_are_for_a_cpu() -> None:
    specs = [spec_of(config_of())]
    with pytest.raises(ConfigError, match=r"latents \(MLA\)"):
        resolve_kv_dtype("fp8", torch.bfloat16, specs)
    cuda = torch.device("cuda")
    with pytest.raises(ConfigError, match="in int8 on a CPU only"):
        KVCache(specs, load_backend("torch", CPU), num_blocks=1, block_size=16, dtype=torch.int8, device=cuda)
    assert resolve_kv_dtype("int8", torch.bfloat16, specs) is torch.int8
    assert resolve_kv_dtype("auto", torch.bfloat16, specs) is torch.bfloat16


def test_a_bias_without_a_query_latent_is_refused() -> None:
    with pytest.raises(Exception, match="attention_bias"):
        config_of(attention_bias=True)


@pytest.mark.parametrize("is_int8", [False, True])
def test_every_instruction_set(library: Library, is_int8: bool) -> None:
    """Prompt, chunk and decode, in float32 and bfloat16: contexts that end inside a tile, blocks shorter than one."""
    torch.manual_seed(1)
    spec = AttentionSpec(10, 1, 72, 0.2, value_dim=56)
    for block_size, dtype in ((16, torch.bfloat16), (32, torch.float32), (4, torch.bfloat16), (1, torch.float32)):
        backend = load_backend("cpu_native", CPU)
        keys, queries = (torch.randn(150, heads, 72).to(dtype) for heads in (1, 10))
        length = min(150, 95 * block_size)
        tables = make_tables([(0, length)], block_size, is_scattered=True)
        pools = empty_pools(backend, spec, 96, block_size, torch.int8 if is_int8 else dtype)
        stored = from_pool(to_pool(keys, torch.int8, 56), torch.float32, 56) if is_int8 else keys
        for begin, end in ((0, length - 40), (length - 40, length - 1), (length - 1, length)):
            backend.prepare(make_batch([(begin, end - begin)], tables, block_size))
            out = backend.attend(spec, queries[begin:end], keys[begin:end], keys[begin:end], *pools)
            expected = dense_attention(spec, queries[begin:end], stored[:end], stored[:end, :, :56], begin)
            tolerance = 2e-5 if dtype is torch.float32 else 2e-2
            torch.testing.assert_close(out, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_rows_are_those_of_torch(library: Library, dtype: torch.dtype) -> None:
    """Numbers and scales to the bit, where either part decides the scale; NaN and infinity are found again."""
    torch.manual_seed(0)
    spec, backend = AttentionSpec(1, 1, 40, 1.0, value_dim=24), load_backend("cpu_native", CPU)
    rows = (torch.randn(64, 1, 40) * 10.0 ** torch.randint(-4, 4, (64, 1, 1))).to(dtype)
    rows[:32, :, 24:] *= 10.0 ** torch.randint(-4, 4, (32, 1, 1)).to(dtype)
    rows[5], rows[6, 0, 39], rows[7, 0, 0] = 0, torch.nan, -torch.inf
    pool, values = empty_pools(backend, spec, 1, 64, torch.int8)
    backend.prepare(make_batch([(0, 64)], [[0]], 64))
    backend.attend(spec, rows, rows, rows, pool, values)
    expected, flat = to_pool(rows, torch.int8, 24)[:, 0], pool.flatten()
    stored = flat[: 64 * 56].view(28, 64, 2).permute(1, 0, 2).reshape(64, 56)
    scales = flat[64 * 56 :].view(torch.float32)
    assert scales[6:8].isnan().all()
    whole = torch.arange(64).sub(6).gt(1) | torch.arange(64).lt(6)
    assert torch.equal(scales[whole], expected[whole, 56:].view(torch.float32)[:, 0])
    assert torch.equal(stored[whole], expected[whole, :56])


def test_narrow_latents_are_accurate() -> None:
    """Rotated numbers forty times as large as the latent cost a row with one scale all its digits."""
    torch.manual_seed(3)
    spec = AttentionSpec(8, 1, 576, 0.02, value_dim=512)
    keys, queries = torch.randn(300, 1, 576), torch.randn(40, 8, 576)
    keys[..., 512:] *= 40
    queries[..., 512:] /= 40

    def error(stored: Tensor) -> float:
        expected, found = (dense_attention(spec, queries, x, x[..., :512], 260) for x in (keys, stored))
        return float((found - expected).square().mean() / expected.square().mean())

    assert error(from_pool(to_pool(keys, torch.int8, 512), torch.float32, 512)) < 2e-4
    assert error(from_pool(to_pool(keys, torch.int8), torch.float32)) > 0.05
    assert spec.pool_dim(torch.int8) == 644
    assert spec.bytes_a_token(torch.int8) == 644


def test_split_kv_b_is_the_same_model(tmp_path: Path) -> None:
    """GGUF files hold the part for keys transposed, and the part for values beside it."""
    write_tiny(CASES["deepseek_v3"], tmp_path)
    ids = torch.randint(3, 128, (20,), generator=torch.Generator().manual_seed(1))
    expected = logits_of(load(tmp_path), ids, [20])
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    for name in [name for name in tensors if "kv_b_proj" in name]:
        keys, values = tensors.pop(name).view(4, 12 + 16, 24).split((12, 16), 1)
        tensors[name.replace("kv_b", "k_b")] = keys.mT.reshape(4 * 24, 12).contiguous()
        tensors[name.replace("kv_b", "v_b")] = values.reshape(4 * 16, 24).contiguous()
    save_file(tensors, file)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"kv_b_split": True}))
    torch.testing.assert_close(logits_of(load(tmp_path), ids, [20]), expected, atol=1e-6, rtol=1e-6)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    folder = tmp_path_factory.mktemp("deepseek")
    write_tiny(CASES["deepseek_v3"], folder)
    return load(folder, quantization="int8") if native() else load(folder)


def said(served: Served) -> dict[tuple[str, int], tuple[list[int], list[float]]]:
    """Ids and log probabilities, to the last bit."""
    return {
        key: (served.ids[key], [entry.logprob for event in events for entry in event.logprobs or ()])
        for key, events in served.events.items()
    }


@pytest.mark.skipif(native() is None, reason="the native kernels promise the same bits")
@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.int8])
def test_text_is_the_same_alone_busy_chunked_preempted_swapped_and_on_a_hit(
    tiny: Decoder, kv_dtype: torch.dtype
) -> None:
    asked = [
        request(f"{i}-{kind}", [(7 * i + j) % 120 + 3 for j in range(length)], max_tokens=8, seed=i, logprobs=1,
                temperature=temperature, n=n)
        for i, length in enumerate((5, 23, 41))
        for kind, temperature, n in (("greedy", 0.0, 1), ("sampled", 1.0, 2))
    ]  # fmt: skip
    alone = {}
    for one in asked:
        alone |= said(serve(tiny, settings(), [one], runner=make_runner(tiny, settings(), kv_dtype=kv_dtype)))
    regimes = {
        "busy": settings(max_num_seqs=12),
        "chunked": settings(max_num_batched_tokens=11),
        "preempting": settings(num_blocks=15, max_model_len=60),
        "swapping": settings(num_blocks=15, max_model_len=60, num_host_blocks=60),
        "uncached": settings(enable_prefix_caching=False),
    }
    for name, config in regimes.items():
        if kv_dtype is torch.int8 and name not in ("chunked", "swapping"):
            continue
        scheduler = Scheduler(config)
        served = serve(
            tiny, config, asked, apart=1, scheduler=scheduler, runner=make_runner(tiny, config, kv_dtype=kv_dtype)
        )
        assert said(served) == alone, name
        preempted = scheduler.stats.preempted
        assert (preempted[PreemptionKind.RECOMPUTE] > 0) == (name == "preempting")
        assert (preempted[PreemptionKind.SWAP] > 0) == (name == "swapping")


def test_fp8_blocks_of_every_part(tmp_path: Path) -> None:
    """The parts of the first product have ragged last blocks of their own, and kv_b is dequantised, not packed."""
    config = DeepseekV3Config(
        vocab_size=128, hidden_size=256, intermediate_size=384, num_hidden_layers=2, num_attention_heads=4,
        first_k_dense_replace=2, q_lora_rank=192, kv_lora_rank=128, qk_rope_head_dim=32, qk_nope_head_dim=64,
        v_head_dim=64, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        model.model.embed_tokens.weight.normal_(std=0.3)
        model.lm_head.weight.normal_(std=0.05)
    model.save_pretrained(tmp_path)
    packing = fp8("block", ".weight_scale_inv", {"quant_method": "fp8", "weight_block_size": [128, 128]})
    stored, rng = {}, np.random.default_rng(0)
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if not module.endswith(("_proj", "_with_mqa")):
            stored[name] = tensor
            continue
        packed, weight = packing.pack(rng, *tensor.shape)
        stored |= {module + ending: each.contiguous() for ending, each in packed.items()}
        with torch.no_grad():
            model.get_parameter(name).copy_(torch.from_numpy(weight.copy()))
    save_file(stored, tmp_path / "model.safetensors")
    values = json.loads((tmp_path / "config.json").read_text()) | {"quantization_config": packing.config}
    (tmp_path / "config.json").write_text(json.dumps(values))
    ids = torch.arange(3, 43)
    with torch.no_grad():
        expected = model(ids[None], use_cache=False).logits[0].log_softmax(-1)
    found = logits_of(load(tmp_path, quantization="none"), ids, [40]).log_softmax(-1)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
    assert expected.std() > 0.1
