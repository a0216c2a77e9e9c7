"""Finding a model, choosing its type and its code, dummy weights, and configs that cannot be served."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - its name everywhere
import transformers

from engine.core.errors import ModelLoadError
from engine.files.hf_config import HFConfig
from engine.runtime.models.config_file import servable
from engine.runtime.models.decoder import Decoder
from engine.runtime.models.families import read_config
from engine.runtime.models.load import load_model, resolve_dtype
from engine.runtime.models.transformers_adapter import TransformersModel, read_foreign_config
from engine.runtime.native import build
from engine.runtime.schemes import linear
from engine.settings.engine_config import EngineConfig
from engine.sources.model_source import fetch
from engine.system.host_limits import multiplies_bfloat16
from tests.cpu.test_models_families import CASES, SIZES, load, logits_of, write_tiny

CPU = torch.device("cpu")
IDS = torch.arange(3, 23)
LLAMA = SIZES | {"model_type": "llama", "rms_norm_eps": 1e-5}


def write_config(folder: Path, **values: Any) -> str:
    (folder / "config.json").write_text(json.dumps(LLAMA | values))
    return str(folder)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"hidden_act": "relu2"}, "'hidden_act' is 'relu2'; Quire needs one of silu"),
        ({"hidden_size": None}, "'hidden_size' is missing"),
        ({"hidden_size": "big"}, "'hidden_size' is 'big'; Quire needs an integer"),
        ({"num_attention_heads": 0}, "'num_attention_heads' is 0; Quire needs an integer of at least 1"),
        ({"num_key_value_heads": 3}, "4 attention heads cannot share 3 key/value heads"),
        ({"rope_scaling": {"type": "spiral", "factor": 2.0}}, "'type' is 'spiral'; Quire needs one of default"),
        ({"rope_parameters": {"rope_type": "linear"}}, "rope_parameters: 'factor' is missing"),
        (
            {"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}},
            r"'short_factor' is \[1.0\]; Quire needs 8 numbers",
        ),
        ({"model_type": "gemma2", "use_bidirectional_attention": True}, "needs causal attention"),
        ({"model_type": "gemma2", "layer_types": ["full_attention", "conv", "conv"]}, "'layer_types' is"),
        ({"model_type": "smollm3", "no_rope_layers": [1]}, "'no_rope_layers' is .*3 entries"),
        ({"model_type": "vision"}, "'model_type' is 'vision'; Quire needs one of llama"),
    ],
)
def test_a_config_that_cannot_be_served_is_refused_by_name(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ModelLoadError, match=sentence):
        read_config(LLAMA | changes, "config.json")


OVERRIDES = {"rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 2.0}, "max_position_embeddings": 640}


@pytest.mark.parametrize("is_own", [True, False])
def test_overrides_compute_what_an_edited_config_computes(is_own: bool, tmp_path: Path) -> None:
    """In either spelling of rope, and in both implementations."""
    plain, edited = tmp_path / "plain", tmp_path / "edited"
    for folder in (plain, edited):
        write_tiny(CASES["llama"], folder)
    values = json.loads((edited / "config.json").read_text())
    values.pop("rope_parameters", None)
    values.pop("rope_scaling", None)
    (edited / "config.json").write_text(json.dumps(values | OVERRIDES))
    if is_own:
        outputs = [
            logits_of(load(folder, hf_overrides=overrides), IDS, [20])
            for folder, overrides in ((plain, OVERRIDES), (edited, None), (plain, None))
        ]
        assert torch.equal(outputs[0], outputs[1])
        assert not torch.equal(outputs[0], outputs[2])
        assert load(plain, hf_overrides=OVERRIDES).max_model_len == 640
    else:
        configs = [read_foreign_config(plain, OVERRIDES), read_foreign_config(edited)]
        assert configs[0].rope_parameters == configs[1].rope_parameters
        assert [each.max_position_embeddings for each in configs] == [640, 640]
        assert read_foreign_config(plain).rope_parameters != configs[0].rope_parameters


def test_a_wrapper_of_gemma_4_as_transformers_saves_it_is_read() -> None:
    """In its published depth; the layers of wide heads are numbered in digits of one length."""
    for kind, window in (("Gemma4Config", 512), ("Gemma4UnifiedConfig", 1024)):
        values = json.loads(getattr(transformers, kind)().to_json_string())
        found = read_config(servable(HFConfig(values, "saved")).values, "saved")
        assert {(layer.heads.head_dim, layer.window) for layer in found.layers} == {(256, window), (512, None)}
        del values["text_config"]["sliding_window"]
        assert read_config(servable(HFConfig(values, "shorter")).values, "shorter") == found


@pytest.mark.parametrize(("num_layers", "wide"), [(7, ("5", "6")), (12, ("05", "11"))])
def test_both_spellings_of_wider_heads_are_read(num_layers: int, wide: tuple[str, str]) -> None:
    """transformers wrote them once for all layers with full attention, and writes them layer by layer since 5.23."""
    sizes = LLAMA | {"model_type": "gemma4_text", "num_hidden_layers": num_layers, "hidden_size_per_layer_input": 0}
    old = {"global_head_dim": 64, "attention_k_eq_v": True, "num_global_key_value_heads": 1}
    each = {"head_dim": 64, "num_key_value_heads": 1}
    new = {"attention_k_eq_v": True, "per_layer_config": dict.fromkeys(wide, each)}
    found = read_config(sizes | old, "old")
    assert found == read_config(sizes | new, "new")
    assert [i for i, layer in enumerate(found.layers) if layer.heads.head_dim == 64] == [*map(int, wide)]
    for wrong in (
        {wide[0]: each},
        {"0": each},
        {"x": each},
        {"9" * 5000: each},
        {wide[0]: each, wide[1]: {"head_dim": 32}},
    ):
        with pytest.raises(ModelLoadError, match="'per_layer_config' is"):
            read_config(sizes | {"per_layer_config": wrong}, "wrong")
    with pytest.raises(ModelLoadError, match="'use_bidirectional_attention' is"):
        read_config(sizes | {"use_bidirectional_attention": "all"}, "both ways")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"rope_theta": 5e5}, {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
        (
            {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0}},
        ),
        (
            {
                "model_type": "gemma3_text",
                "sliding_window": 8,
                "rope_theta": 2e6,
                "rope_local_base_freq": 2e4,
                "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            },
            {
                "model_type": "gemma3_text",
                "sliding_window": 8,
                "rope_parameters": {
                    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 2e6},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
                },
            },
        ),
    ],
)
def test_both_spellings_of_rope_are_read(old: dict[str, Any], new: dict[str, Any]) -> None:
    sizes = LLAMA | {"num_hidden_layers": 7}
    assert read_config(sizes | old, "old") == read_config(sizes | new, "new")


def test_unreadable_quantised_checkpoints_are_refused(tmp_path: Path) -> None:
    write_tiny(CASES["llama"], tmp_path)
    write_config(tmp_path, quantization_config={"quant_method": "hqq"})
    for impl in ("quire", "transformers"):
        with pytest.raises(ModelLoadError, match="quantization_config: the weights are quantized by 'hqq'"):
            load(tmp_path, model_impl=impl)
    write_config(tmp_path, quantization_config={"quant_method": "gptq", "bits": 4})
    with pytest.raises(ModelLoadError, match="transformers' code runs this model, which cannot read them"):
        load(tmp_path, model_impl="transformers")


def test_the_code_that_serves_a_model(tmp_path: Path) -> None:
    write_tiny(CASES["llama"], tmp_path)
    kinds = {}
    for impl in ("auto", "quire", "transformers"):
        config = EngineConfig(model=str(tmp_path), model_impl=impl)
        kinds[impl] = type(load_model(config, CPU, torch.float32, lambda progress: None))
    assert kinds == {"auto": Decoder, "quire": Decoder, "transformers": TransformersModel}


def test_dummy_weights_need_only_a_config(tmp_path: Path) -> None:
    write_config(tmp_path)
    first, again, other = (load(tmp_path, load_format="dummy", seed=seed) for seed in (1, 1, 2))
    logits = logits_of(first, IDS, [20])
    assert logits.isfinite().all()
    assert logits.std() > 0
    torch.testing.assert_close(logits_of(again, IDS, [20]), logits, atol=0, rtol=0)
    assert not torch.equal(logits_of(other, IDS, [20]), logits)


@pytest.mark.parametrize("kernel", ["native", "plain"])
def test_a_packed_weight_multiplies_alike(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if kernel != "native":
        monkeypatch.setattr(linear, "native", lambda: None)
    generator = torch.Generator().manual_seed(0)
    weight, bias, x = (torch.randn(*shape, generator=generator) for shape in ((48, 32), (48,), (5, 32)))
    for dtype in (torch.float32, torch.bfloat16):
        product = linear.Linear(linear.pack(weight.to(dtype), bias.to(dtype)))
        assert isinstance(product.product, linear.Dense) == (kernel == "plain")
        expected = F.linear(x.to(dtype), weight.to(dtype), bias.to(dtype))
        torch.testing.assert_close(product(x.to(dtype)), expected)
        assert product(x[:0].to(dtype)).shape == (0, 48)


@pytest.mark.parametrize(
    ("stored", "asked", "device", "chosen"),
    [
        ("bfloat16", "float32", "cpu", torch.float32),
        ("bfloat16", "auto", "cuda", torch.bfloat16),
        ("float16", "auto", "cuda", torch.float16),
        ("float32", "auto", "cpu", torch.float32),
    ],
)
def test_dtype(stored: str, asked: str, device: str, chosen: torch.dtype, tmp_path: Path) -> None:
    for key in ("dtype", "torch_dtype"):
        write_config(tmp_path, **{key: stored})
        config = EngineConfig(model=str(tmp_path), dtype=asked)
        assert resolve_dtype(config, torch.device(device)) == chosen


def test_a_cpu_takes_one_of_the_two_types_it_computes_in(tmp_path: Path) -> None:
    config = EngineConfig(model=write_config(tmp_path, dtype="float16"))
    assert resolve_dtype(config, CPU) in (torch.bfloat16, torch.float32)


def test_where_a_model_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert fetch(str(tmp_path)) == tmp_path
    (tmp_path / "notes.txt").write_text("no model")
    for name, sentence in {
        str(tmp_path / "nowhere"): "does not exist",
        "./nowhere": "does not exist",
        "nowhere.gguf": "does not exist",
        str(tmp_path / "notes.txt"): r"is a \.txt file; name a model folder or a \.gguf file",
    }.items():
        with pytest.raises(ModelLoadError, match=sentence):
            fetch(name)


@pytest.mark.parametrize(
    ("features", "chosen"),
    [
        ("flags : sse4_2 avx2 fma", torch.float32),
        ("flags : avx512f avx512_bf16", torch.bfloat16),
        ("Features : fp asimd bf16", torch.bfloat16),
        (None, torch.float32),
    ],
)
def test_torch_takes_bfloat16_where_the_cpu_multiplies_it(
    features: str | None, chosen: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "proc").mkdir()
    if features:
        (tmp_path / "proc/cpuinfo").write_text(features)
    monkeypatch.setattr(build, "multiplies_bfloat16", lambda: multiplies_bfloat16(tmp_path))
    write_config(tmp_path, dtype="bfloat16")
    assert resolve_dtype(EngineConfig(model=str(tmp_path), cpu_kernels="off"), CPU) == chosen
    monkeypatch.setattr(build, "find_compiler", lambda: None)
    monkeypatch.setattr(build, "best_library", lambda: None)
    assert resolve_dtype(EngineConfig(model=str(tmp_path)), CPU) == chosen


def test_kernels_take_bfloat16_on_every_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "multiplies_bfloat16", lambda: False)
    monkeypatch.setattr(build, "find_compiler", lambda: "cc")
    config = EngineConfig(model=write_config(tmp_path, dtype="bfloat16"))
    assert resolve_dtype(config, CPU) == torch.bfloat16
