"""Quantization settings as checkpoints spell them, their places, and the sentences for those that cannot be read."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engine.core.errors import ModelLoadError
from engine.files.hf_config import HFConfig
from engine.files.quant_config import QuantConfig, Settings, read_quantization
from engine.runtime.weights.checkpoint import Header, check_packed

ROOT = Path(__file__).parents[2]
W4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}
LAYER = "model.layers.3.mlp.down_proj"


def compressed(**groups: Any) -> dict[str, Any]:
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}


def read(folder: Path, values: dict[str, Any] | None, **beside: dict[str, Any]) -> QuantConfig | None:
    for name, content in beside.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    config = {} if values is None else {"quantization_config": values}
    return read_quantization(HFConfig(config, "config.json"), folder)


def settings(folder: Path, values: dict[str, Any], name: str = LAYER) -> Settings | None:
    config = read(folder, values)
    assert config is not None
    return config.of(name)


PLACES = {
    "config": ({"quantization_config": GPTQ}, {}),
    "text": ({"text_config": {"quantization_config": GPTQ}}, {}),
    "compression": ({"compression_config": compressed(group_0={"targets": ["Linear"], "weights": W4})}, {}),
    "compression-nested": ({"compression_config": {"quantization_config": GPTQ, "format": "x"}}, {}),
    "AutoGPTQ": ({}, {"quantize_config": {"bits": 4, "group_size": 128, "desc_act": False}}),
    "AutoAWQ": ({}, {"quant_config": {"w_bit": 4, "q_group_size": 128, "zero_point": True, "version": "GEMM"}}),
    "ModelOpt": ({}, {"hf_quant_config": {"producer": {}, "quantization": {"quant_algo": "NVFP4", "group_size": 16}}}),
}


@pytest.mark.parametrize("place", PLACES)
def test_all_places_are_read(place: str, tmp_path: Path) -> None:
    config, files = PLACES[place]
    for name, values in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(values))
    found = read_quantization(HFConfig(config, "config.json"), tmp_path)
    assert found is not None
    expected = {"ModelOpt": Settings(), "AutoAWQ": Settings(4, 128, is_awq=True), "compression": Settings(4, 128)}
    assert found.of(LAYER) == expected.get(place, Settings(4, 128, zero_offset=1))


def test_config_json_comes_first_and_plain_weights_have_none(tmp_path: Path) -> None:
    assert read(tmp_path, None) is None
    found = read(tmp_path, GPTQ | {"bits": 8}, quantize_config={"bits": 4, "group_size": 32})
    assert found is not None
    assert found.default == Settings(8, 128, zero_offset=1)


def test_gptq_formats_and_dynamic_settings(tmp_path: Path) -> None:
    assert settings(tmp_path, GPTQ | {"checkpoint_format": "gptq_v2"}) == Settings(4, 128)
    assert settings(tmp_path, GPTQ | {"group_size": -1}) == Settings(4, 0, zero_offset=1)
    dynamic = GPTQ | {"dynamic": {r"-:.*\.3\.mlp\.down": {}, r"+:.*down": {"bits": 8}, r".*up": {"group_size": 32}}}
    assert settings(tmp_path, dynamic) is None
    assert settings(tmp_path, dynamic, LAYER.replace("3", "4")) == Settings(8, 128, zero_offset=1)
    assert settings(tmp_path, dynamic, LAYER.replace("down", "up")) == Settings(4, 32, zero_offset=1)
    assert settings(tmp_path, dynamic, LAYER.replace("down", "gate")) == Settings(4, 128, zero_offset=1)


def test_auto_round_stores_gptq_or_awq(tmp_path: Path) -> None:
    auto = GPTQ | {"quant_method": "auto-round"}
    assert settings(tmp_path, auto | {"packing_format": "auto_round:auto_gptq"}) == Settings(4, 128, zero_offset=1)
    assert settings(tmp_path, auto | {"packing_format": "auto_round:auto_awq"}) == Settings(4, 128, is_awq=True)


def test_targets_of_compressed_tensors(tmp_path: Path) -> None:
    """An exact name counts before an expression, and that before a class; expressions match from the start."""
    config = compressed(
        linear={"targets": ["Linear"], "weights": W4},
        some={"targets": ["re:.*mlp", "re:down_proj"], "weights": W4 | {"num_bits": 8}},
        one={"targets": [LAYER], "weights": W4 | {"group_size": 32}},
    ) | {"ignore": ["lm_head", "re:.*self_attn"]}
    assert settings(tmp_path, config) == Settings(4, 32)
    assert settings(tmp_path, config, "model.layers.2.mlp.up_proj") == Settings(8, 128)
    assert settings(tmp_path, config, "model.layers.2.other_proj") == Settings(4, 128)
    assert settings(tmp_path, config, "model.layers.2.self_attn.q_proj") is None
    assert settings(tmp_path, config, "lm_head") is None
    assert settings(tmp_path, compressed(W8A16=["Linear"])) == Settings(8, 128)
    blocks = {"targets": ["Linear"], "weights": {"num_bits": 8, "block_structure": "64x32"}}
    assert settings(tmp_path, compressed(group_0=blocks)) == Settings(8, block=(64, 32))


REFUSED = {
    "unknown": ({"quant_method": "hqq"}, "'hqq', which cannot be read; serve the checkpoint"),
    "unnamed": ({"foo": 1}, "'quant_method' is missing; serve the checkpoint"),
    "gptq-marlin": (GPTQ | {"checkpoint_format": "marlin"}, "format 'marlin' is laid out for one kernel"),
    "gptq-planar": (GPTQ | {"format": "gptq_p"}, "format 'gptq_p'"),
    "gptq-bits": (GPTQ | {"bits": 5}, "GPTQ with 5 bits cannot be read, only 2, 3, 4, 8"),
    "gptq-no-bits": ({"quant_method": "gptq"}, "'bits' is missing"),
    "gptq-pattern": (GPTQ | {"dynamic": {"+:(": {}}}, "is no regular expression"),
    "awq-gemv": ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version 'gemv' cannot be read, only 'gemm'"),
    "awq-bits": ({"quant_method": "awq", "bits": 8}, "AWQ with 8 bits cannot be read, only 4"),
    "fp8-e5m2": ({"quant_method": "fp8", "fmt": "e5m2"}, "not e4m3 throughout"),
    "fp8-block": ({"quant_method": "fp8", "weight_block_size": [128]}, "the sides of a block"),
    "modelopt": ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "ModelOpt's 'W4A8_AWQ' cannot be read"),
    "sparse": (compressed() | {"format": "marlin-24"}, "format 'marlin-24' cannot be read"),
    "2of4": (compressed() | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "its weights are sparse"),
    "rotated": (compressed() | {"transform_config": {"config_groups": {"a": {}}}}, "its weights are rotated"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_read_is_refused_in_one_sentence(case: str, tmp_path: Path) -> None:
    values, words = REFUSED[case]
    with pytest.raises(ModelLoadError) as error:
        read(tmp_path, values)
    assert words in str(error.value)
    assert str(error.value).startswith("config.json, quantization_config")
    assert str(error.value).endswith(".")


def test_a_list_of_exceptions_that_contradicts_the_tensors_is_refused(tmp_path: Path) -> None:
    config = read(tmp_path, compressed(group_0={"targets": ["Linear"], "weights": W4}) | {"ignore": [LAYER]})
    assert config is not None
    check_packed(config, {f"{LAYER}.weight": Header("BF16", (8, 8)), "model.norm.weight": Header("BF16", (8,))})
    with pytest.raises(ModelLoadError, match=f"says that '{LAYER}' is not quantised, but it is stored as I32"):
        check_packed(config, {f"{LAYER}.weight_packed": Header("I32", (8, 1))})
    with pytest.raises(ModelLoadError, match=r"'model\.norm\.weight' is stored as I8, and only matrices can be"):
        check_packed(config, {"model.norm.weight": Header("I8", (8,))})
    with pytest.raises(ModelLoadError, match=r"says that 'model\.embed_tokens' is not quantised"):
        check_packed(config, {"model.embed_tokens.weight_packed": Header("I32", (8, 1))})
    with_embedding = read(tmp_path, compressed(group_0={"targets": ["Linear", "Embedding"], "weights": W4}))
    assert with_embedding is not None
    check_packed(with_embedding, {"model.embed_tokens.weight_packed": Header("I32", (8, 1))})


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        ("(", "unclosed group"),
        ("a)|(b", "unopened group"),
        ("(?!a)b", "look-around"),
        (r"(a)\1", "backreferences are not supported"),
        ("a{1000}{1000}", "size limit"),
        ("a" * 2000, "2000 characters; at most 1000"),
    ],
)
@pytest.mark.parametrize("method", ["gptq", "compressed-tensors"])
def test_a_pattern_that_may_take_for_ever_is_refused(tmp_path: Path, method: str, pattern: str, why: str) -> None:
    gptq = {"quant_method": "gptq", "bits": 4, "dynamic": {f"-:{pattern}": {}}}
    values = gptq if method == "gptq" else {"quant_method": method, "ignore": [f"re:{pattern}"], "config_groups": {}}
    with pytest.raises(ModelLoadError, match=why) as caught:
        read(tmp_path, values)
    assert "\n" not in str(caught.value)


def test_patterns_take_linear_time(tmp_path: Path) -> None:
    """Python's `re` would take 2^100 steps for each."""
    values = {"quant_method": "gptq", "bits": 4, "dynamic": {"-:(a+)+$": {}, "-:(a|a)*b": {}, "-:(?:x+x+)+y": {}}}
    for name in ("a" * 100 + "!", "x" * 100):
        assert settings(tmp_path, values, name) is not None
    assert settings(tmp_path, values, "aab") is None


def test_patterns_are_bounded_in_number(tmp_path: Path) -> None:
    dynamic = {f"-:a{i}": {} for i in range(257)}
    with pytest.raises(ModelLoadError, match="257 regular expressions; at most 256"):
        read(tmp_path, {"quant_method": "gptq", "bits": 4, "dynamic": dynamic})
    ignored = [f"re:a{i}" for i in range(257)]
    with pytest.raises(ModelLoadError, match="257 regular expressions; at most 256"):
        read(tmp_path, {"quant_method": "compressed-tensors", "ignore": ignored, "config_groups": {}})


def test_any_values_are_read_or_refused(tmp_path: Path) -> None:
    """A config of wrong types is a ModelLoadError, never another error."""
    values = (
        None,
        True,
        -1,
        0,
        4,
        1 << 70,
        0.5,
        "",
        "x",
        "re:(",
        [],
        ["a"],
        [1],
        [[1]],
        {},
        {"a": 1},
        {"a": {"bits": "x"}},
    )
    keys = {
        "gptq": ("bits", "group_size", "checkpoint_format", "dynamic", "lm_head", "is_marlin_format"),
        "auto-round": ("bits", "packing_format"),
        "awq": ("bits", "w_bit", "version", "group_size", "q_group_size"),
        "fp8": ("fmt", "weight_block_size", "ignored_layers", "modules_to_not_convert", "expert_dtype"),
        "compressed-tensors": ("format", "config_groups", "ignore", "sparsity_config", "transform_config"),
        "modelopt": ("quant_algo", "exclude_modules"),
    }
    base = {"gptq": GPTQ, "auto-round": GPTQ, "modelopt": {"quant_algo": "FP8"}}
    group = {"targets": ["Linear"], "weights": dict(W4)}
    configs: list[Any] = [
        {**base.get(method, {}), "quant_method": method, key: value}
        for method, names in keys.items()
        for key in names
        for value in values
    ]
    configs += [compressed(a=value) for value in values]
    configs += [compressed(a=group | {key: value}) for key in ("targets", "weights", "format") for value in values]
    weights = [W4 | {key: value} for key in ("num_bits", "group_size", "block_structure") for value in values]
    configs += [compressed(a=group | {"weights": each}) for each in weights]
    for config in [*configs, *values]:
        try:
            found = read_quantization(HFConfig({"quantization_config": config}, "config.json"), tmp_path)
        except ModelLoadError:
            continue
        if found is not None:
            found.of(LAYER)


def test_a_contradiction_is_refused_without_torch(tmp_path: Path) -> None:
    header = json.dumps({f"{LAYER}.weight": {"dtype": "F8_E4M3", "shape": [2, 2], "data_offsets": [0, 4]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    config = {"model_type": "llama", "quantization_config": {"quant_method": "fp8", "ignored_layers": [LAYER]}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    code = (
        "import sys; from pathlib import Path; "
        "from engine.runtime.weights.safetensors import SafetensorsCheckpoint as C\n"
        f"try: C(Path({str(tmp_path)!r})).check()\n"
        "except Exception as error: print(type(error).__name__, 'is not quantised' in str(error), 'torch' in sys.modules)"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert output.stdout.strip() == "ModelLoadError True False"
