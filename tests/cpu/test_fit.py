"""`quire fit`: what it counts is what an engine takes, nothing but small files is read, and its steps follow the rates."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from engine.core.errors import ConfigError, ModelLoadError
from engine.core.types import Progress
from engine.files.gguf_kinds import Kind
from engine.runtime.models import load
from engine.runtime.native import build
from engine.runtime.native.library import native
from engine.runtime.native.ops import format_for
from engine.settings.engine_config import EngineConfig
from engine.sources.model_source import find_model
from engine.startup.build import build_engine
from engine.startup.model_check import weight_bytes
from engine.system.cache_folder import cache_folder, foreseen, keep_foreseen
from loadtest import fit as command
from loadtest import fitted as fit
from loadtest import rates
from tests.fake_hub import FakeHub
from tests.http.test_hub import hub  # noqa: F401 - a fixture

_PLAIN = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 2048, "dtype": "bfloat16",
}  # fmt: skip
CONFIGS: Mapping[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **_PLAIN},
    "tied windows": {
        "model_type": "gemma3_text", **_PLAIN, "tie_word_embeddings": True, "head_dim": 16, "sliding_window": 64,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "recurrent": {
        "model_type": "qwen3_5_text", **_PLAIN, "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "experts": {
        "model_type": "qwen3_moe", **_PLAIN, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16,
    },
}  # fmt: skip
RATES = {kind: tuple(1e-12 * (at + 10) * (index + 1) for at in rates.AT) for index, kind in enumerate(rates.BYTES)}


def folder(path: Path, name: str) -> str:
    (path / "config.json").write_text(json.dumps(CONFIGS[name]))
    return str(path)


@pytest.mark.parametrize("has_bfloat16", [True, False])
@pytest.mark.parametrize("name", CONFIGS)
def test_what_is_counted_is_what_an_engine_has(
    name: str, has_bfloat16: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A processor without bfloat16 and kernels has the weights and the pool in float32."""
    monkeypatch.setattr(load, "type_in_16_bits", lambda _: "bfloat16" if has_bfloat16 else "float32")
    model, pool = folder(tmp_path, name), 1 << 20
    found = fit.read(EngineConfig(model=model))
    engine = build_engine(EngineConfig(model=model, load_format="dummy", kv_cache_memory_bytes=pool), lambda _: None)
    ours, real = found.scheduler(pool), engine.config
    assert (ours.num_blocks, ours.windows, ours.state_blocks) == (real.num_blocks, real.windows, real.state_blocks)
    assert found.context(pool, 1) == real.max_model_len
    assert sum(found.weights.values()) == pytest.approx(found.config.num_weights, rel=0.02)
    assert {kind for _, kind in found.weights} == {"BF16" if has_bfloat16 else "F32"}
    engine._runner.close()


def test_the_default_model_takes_what_its_file_has() -> None:
    path = find_model(None).path
    found = fit.read(EngineConfig(model=path))
    assert found.weight_bytes == pytest.approx(Path(path).stat().st_size, rel=0.03)
    assert {kind for role, kind in found.weights if role == "layers"} <= {"Q4_1", "Q8_0", "F32"}
    assert not found.is_plain


def test_contexts_fall_as_requests_share_the_pool(tmp_path: Path) -> None:
    found = fit.read(EngineConfig(model=folder(tmp_path, "recurrent")))
    pool = found.pool_bytes(512, 8)
    assert found.context(pool, 8) >= 512
    assert found.context(pool, 1) > found.context(pool, 8) > found.context(pool, 16)
    assert found.context(0, 1) == 0


def test_steps_follow_the_rates(tmp_path: Path) -> None:
    """More rows take longer, a batch less than its rows one by one, and few experts less than all."""
    for name in CONFIGS:
        found = fit.read(EngineConfig(model=folder(tmp_path, name)))
        steps = found.steps(RATES)
        assert list(steps.rows.values()) == sorted(steps.rows.values())
        assert list(steps.samples.values()) == sorted(steps.samples.values())
        assert steps.rows[32] < 32 * steps.rows[1]
        assert min(steps.context_s, steps.pair_s) > 0
        if name == "experts":
            weights = sum(num for (role, _), num in found.weights.items() if role == "experts")
            one = found._product("experts", found.own_kind, weights, RATES, 1)
            assert one == pytest.approx(weights / 4 * rates.seconds(RATES, found.own_kind, 1))


def test_narrower_weights_take_less(tmp_path: Path) -> None:
    found = fit.read(EngineConfig(model=folder(tmp_path, "tied windows")))
    sizes = [found.as_stored(kind).weight_bytes for kind in (found.own_kind, "INT8", "Q4_K")]
    assert sizes == sorted(sizes, reverse=True)
    assert found.as_stored("INT8").weights["embedding", found.own_kind] == 256 * 64, "rows of int8 cannot be looked up"


def test_packed_weights_are_counted() -> None:
    """Of few bits they take more than in a file, whose codes are of groups."""
    if native() is None:
        pytest.skip("no native library and no C compiler")
    for kind in Kind:
        if kind.name not in ("F32", "F16", "BF16"):
            assert kind.packed * 64 * 8 == native().quant_bytes(format_for([kind]), 64, kind.block * 8), kind.name


@pytest.mark.parametrize(
    ("settings", "num_bytes"),
    [({}, 60 * 2), ({"quantization": "int8"}, 36 * 2 + 24), ({"dtype": "float32"}, 60 * 4)],
)
def test_models_together_are_counted_as_they_are_held(settings: Any, num_bytes: int, tmp_path: Path) -> None:
    """Not as they lie in files; whatever the processor multiplies, which a dtype that is named does not ask."""
    shapes = {
        "model.embed_tokens.weight": (8, 4),
        "model.layers.0.mlp.up_proj.weight": (6, 4),
        "model.norm.weight": (4,),
    }
    save_file({name: torch.zeros(shape) for name, shape in shapes.items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"dtype": "float16"}))
    config = EngineConfig(model=str(tmp_path), device="cuda")
    assert weight_bytes(replace(config, **settings)) == num_bytes
    default = EngineConfig(model=find_model(None).path)
    assert weight_bytes(default) == pytest.approx(fit.read(default).weight_bytes, rel=0.01)
    assert weight_bytes(replace(default, dtype="float32")) > 4 * weight_bytes(default)
    assert weight_bytes(EngineConfig(model="org/not-here")) == weight_bytes(replace(config, load_format="dummy")) == 0


def test_where_there_are_no_kernels_the_reason_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler that is there may write to no folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(rates, "load_kernels", lambda *_: None)
    monkeypatch.setattr(rates, "native", lambda: None)
    monkeypatch.setattr(build, "find_compiler", lambda: "/usr/bin/cc")
    with pytest.raises(ConfigError, match=r"are no native kernels: .* did not compile, as a warning in the log says"):
        rates.product_rates({"BF16"}, lambda _: None)


def test_rates_are_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(rates, "load_kernels", lambda *_: None)
    monkeypatch.setattr(rates, "_SHAPE", (64, 256))
    monkeypatch.setattr(rates, "_LEAST_BYTES", 1)
    if rates.native() is None:
        pytest.skip("no native library and no C compiler")
    waited, said = iter([0.0, 1e9, *[0.0] * 9]), list[Progress]()  # for a processor, before and after
    monkeypatch.setattr(rates, "_waited_s", lambda: next(waited))
    first = rates.product_rates({"BF16", "INT8", "Q4_K", "F32"}, said.append)
    assert "other work took the processors meanwhile" in said[-1].detail
    assert all(len(each) == len(rates.AT) and min(each) > 0 for each in first.values())
    monkeypatch.setattr(rates, "_measure", lambda _: (1.0,) * len(rates.AT))
    assert rates.product_rates({"BF16", "INT8"}, lambda _: None) == {kind: first[kind] for kind in ("BF16", "INT8")}
    assert rates.product_rates({"BF16", "Q6_K"}, lambda _: None)["Q6_K"][0] == 1.0
    assert rates.product_rates({"BF16"}, lambda _: None, anew=True)["BF16"][0] == 1.0
    (tmp_path / "quire/rates.json").write_text("{")
    assert rates.product_rates({"F32"}, lambda _: None)["F32"][0] == 1.0


def test_of_a_hub_only_small_files_are_read(hub: FakeHub, tmp_path: Path) -> None:  # noqa: F811
    save_file({"x": torch.zeros(64)}, tmp_path / "model.safetensors")
    weights = (tmp_path / "model.safetensors").read_bytes()
    hub.repos["org/model"] = {"config.json": json.dumps(CONFIGS["llama"]).encode(), "model.safetensors": weights}
    assert fit.read(EngineConfig(model="org/model")).config.max_positions == 2048
    assert hub.named("org/model") == ["config.json"]


def test_of_a_gguf_file_of_a_hub_only_the_header_is_read(hub: FakeHub) -> None:  # noqa: F811
    path = Path(find_model(None).path)
    hub.repos["org/gguf"] = {"model.Q4_K_M.gguf": path.read_bytes()}
    found = fit.read(EngineConfig(model="org/gguf"))
    assert found.weights == fit.read(EngineConfig(model=str(path))).weights
    assert [each for each in hub.requests if each != "listing"] == ["model.Q4_K_M.gguf 0-33554431"]


def test_what_is_not_foreseen_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", "n_layer": 1}))
    with pytest.raises(ModelLoadError, match="only Quire's own families are foreseen"):
        fit.read(EngineConfig(model=str(tmp_path)))


@pytest.fixture
def measured(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rates of a machine that is always the same."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.setattr(rates, "product_rates", lambda kinds, *_, **__: {kind: RATES[kind] for kind in kinds})


def run(*flags: str) -> None:
    parser = argparse.ArgumentParser()
    command.add_options(parser)
    assert command.run(parser.parse_args(flags)) == 0


@pytest.mark.usefixtures("measured")
def test_the_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = folder(tmp_path, "llama")
    run(model)
    said = capsys.readouterr().out
    for part in ("weights, ", "K/V of 1,000 tokens, full", "| int8 ", "| Q4_K_M ", f"quire serve {model}"):
        assert part in said
    assert foreseen()[model] == said.splitlines()[-1], "a start prints the same line"
    assert "foreseen by quire fit: weights (bfloat16) " in said
    assert "; 1 at once " in said
    run(model, "--json", "--input-len", "16", "--output-len", "8")
    found = json.loads(capsys.readouterr().out)
    assert found["take"] == found["choices"][0]["name"], "it is fast enough"
    assert [each["num"] for each in found["choices"][0]["foreseen"]] == [1, 8, 32]
    assert all(one["tokens_per_s"] > 0 for each in found["choices"] for one in each["foreseen"])
    with pytest.raises(ConfigError, match=r"are together 2049, and contexts of .* have at most 2048 tokens"):
        run(model, "--input-len", "2000", "--output-len", "49")


@pytest.mark.usefixtures("measured")
def test_an_encoder_is_foreseen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It has matrices, which can be int8, and tables, which cannot; more and longer texts take longer."""
    sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    values = {"model_type": "bert", **sizes, "num_attention_heads": 4, "max_position_embeddings": 512}
    (tmp_path / "config.json").write_text(json.dumps(values))
    found = fit.read(EngineConfig(model=str(tmp_path)))
    assert isinstance(found, fit.FittedEncoder)
    tables = 64 * (256 + 512 + 2)
    assert found.weights == {("embedding", "F32"): tables, ("layers", "F32"): 2 * (4 * 64 * 64 + 2 * 64 * 96)}
    assert found.weight_bytes - found.as_stored("INT8").weight_bytes == 3 * found.weights["layers", "F32"]
    took = [found.seconds(RATES, length, num) for length, num in ((16, 1), (16, 2), (64, 2), (512, 2))]
    assert took == sorted(took)
    with pytest.raises(ConfigError, match=r"--input-len is 513, and contexts of .* have at most 512"):
        run(str(tmp_path), "--input-len", "513")
    run(str(tmp_path), "--json", "--input-len", "512")
    best, narrow = json.loads(capsys.readouterr().out)["choices"]
    assert (best["name"], narrow["flags"], best["pool_bytes"]) == ("float32", "--quantization int8", 0)
    assert [each["context"] for each in best["foreseen"]] == [512] * 3
    run(str(tmp_path))
    assert "weights (float32) " in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.usefixtures("measured")
def test_what_does_not_fit_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "available_memory", lambda: 1 << 20)
    run(folder(tmp_path, "llama"))
    assert "It does not fit" in capsys.readouterr().out


@pytest.mark.usefixtures("measured")
def test_models_are_proposed_by_memory(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "_resident", lambda: 0)
    monkeypatch.setattr(command, "available_memory", lambda: 8 << 30)
    run("--json")
    found = json.loads(capsys.readouterr().out)
    assert set(found["propose"]) == {"chat", "code", "tools", "embeddings"}
    for models in found["propose"].values():
        assert 1 <= len(models) <= 3
        assert all(each["bytes"] < 8 << 30 for each in models)
    run()
    assert f"Models as of {found['date']}" in capsys.readouterr().out


def test_a_line_that_cannot_be_read_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert foreseen() == {}
    for model in "ab":
        keep_foreseen(model, f"line {model}")
    assert foreseen() == {"a": "line a", "b": "line b"}
    (file,) = cache_folder().iterdir()
    for content in ("no JSON", "1", "[1]"):
        file.write_text(content)
        assert foreseen() == {}
