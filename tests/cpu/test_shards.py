"""The parts of weights that ranks read: together they are the whole, in every format, and no more is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from engine.core.errors import ConfigError
from engine.core.types import Progress
from engine.runtime.layers.shards import Shards, colwise
from engine.runtime.models.decoder import Decoder
from engine.runtime.models.families import read_config
from engine.runtime.models.load import load_eagle3, load_model, load_mtp
from engine.runtime.native.library import WeightFormat
from engine.runtime.parallel.group import SINGLE, Group
from engine.runtime.weights.safetensors import SafetensorsCheckpoint
from engine.settings.engine_config import EngineConfig
from tests.cpu import packers
from tests.cpu.test_models_families import QWEN3_5, Case, save_tiny, write_tiny
from tests.cpu.test_moe_stored import save_gpt_oss, save_packed
from tests.cpu.test_quant import quantise
from tests.cpu.test_stored import CASES as PACKINGS
from tests.cpu.test_weights_gguf import convert, write

DELTA = Case("Qwen3_5TextConfig", QWEN3_5)
# What cannot be divided, and the reason that is given.
REFUSED = {
    "w4a16-actorder": "g_idx",
    "gptq-4-actorder": "g_idx",
    "w3a16": "stored together",
    "w5a16": "stored together",
    "gptq-3": "stored together",
    "modelopt-fp8-block": "not in rows",
    "nf4": "not in rows",
    "nf4-nested": "not in rows",
}


class Rank(Group):
    """A rank without others: for loading, in which nothing is sent."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


def load(path: Path, group: Group, **settings: Any) -> Decoder:
    config = EngineConfig(**({"model": str(path), "dtype": "float32"} | settings))
    model = load_model(config, torch.device("cpu"), torch.float32, lambda progress: None, group)
    assert isinstance(model, Decoder)
    return model


def parts_are_the_whole(path: Path, size: int = 2, **settings: Any) -> None:
    """Compare products of the first layer's matrices: divided by outputs to the bit, by inputs as sums."""
    whole, ranks = load(path, SINGLE, **settings), [load(path, Rank(rank, size), **settings) for rank in range(size)]
    first, layers = whole._layers[0], [model._layers[0] for model in ranks]
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(5, whole.config.hidden_size, generator=generator)
    every = whole.config.layers[0].heads
    heads = (every.num_heads, every.num_kv_heads, every.num_kv_heads)
    parts = []
    for model, layer in zip(ranks, layers, strict=True):
        config = model.config
        own = config.layers[0].heads
        sizes = [n * own.head_dim for n in (own.num_heads, own.num_kv_heads, own.num_kv_heads)]
        parts.append(layer._mixer._qkv(x).split(sizes, 1))
    found = torch.cat([torch.cat(each, 1) for each in zip(*parts, strict=True)], 1)
    assert found.shape[1] == sum(heads) * every.head_dim
    assert torch.equal(found, first._mixer._qkv(x))
    inner = first._feed_forward._gate_up(x)
    assert torch.equal(torch.cat([layer._feed_forward._gate_up(x) for layer in layers], 1), inner)
    attended = torch.randn(5, heads[0] * every.head_dim, generator=generator)
    for y, matrix, theirs in (
        (attended, first._mixer._o, [layer._mixer._o for layer in layers]),
        (inner, first._feed_forward._down, [layer._feed_forward._down for layer in layers]),
    ):
        widths = [linear.args.k for linear in theirs]
        total = sum(linear(part.contiguous()) for linear, part in zip(theirs, y.split(widths, 1), strict=True))
        expected = matrix(y)
        # On tiles bytes with one scale a row round inputs to 16 bits of a part's largest; a part of one group has one scale.
        formats = {each.args.format for each in (matrix, *theirs)}
        error = 1e-5 if WeightFormat.INT8 not in formats else 1e-2 if len(formats) > 1 else 1e-4
        torch.testing.assert_close(total, expected, atol=error * float(expected.abs().max()), rtol=error)
    ids = torch.arange(whole.vocab_size)
    rows = torch.cat(
        [model.embed(ids)[model._shards.vocabulary.first :][: model._shards.vocabulary.num] for model in ranks]
    )
    assert torch.equal(rows, whole.embed(ids))
    columns = torch.cat([model._head.in_float32(x) for model in ranks], 1)
    assert torch.equal(columns, whole._head.in_float32(x))


@pytest.mark.parametrize(
    ("name", "quantization"),
    [
        *((name, "auto") for name in PACKINGS),
        *((name, "none") for name in ("awq", "gptq-4-asym", "fp8-block", "w4a16-asym")),
    ],
)
def test_packed_matrices(name: str, quantization: str, tmp_path: Path) -> None:
    settings = {"quantization": quantization} | ({"dtype": "auto"} if quantization == "auto" else {})
    packers.save(tmp_path, PACKINGS[name], inner=512, num_hidden_layers=1)
    if name in REFUSED:
        with pytest.raises(ConfigError, match=REFUSED[name]):
            load(tmp_path, Rank(0, 2), **settings)
    else:
        parts_are_the_whole(tmp_path, **settings)


@pytest.mark.parametrize("quantization", ["gguf", "none", "int8"])
def test_gguf_files(quantization: str, tmp_path: Path) -> None:
    settings = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3, "vocab_size": 127}
    theirs = save_tiny(Case("LlamaConfig", settings), tmp_path / "hf")
    kinds = {"attn_v": Kind.Q5_1, "attn_output": Kind.Q4_0, "ffn_gate": Kind.Q4_1}
    path = write(tmp_path / "model.gguf", "llama", theirs.config, quantise(convert(theirs, "llama", {}), **kinds))
    if quantization == "int8":  # rows are rounded by what they hold, so parts differ from the whole
        assert load(path, Rank(1, 2), quantization="int8").config.layers[0].heads.num_heads == 2
    else:
        parts_are_the_whole(path, quantization=quantization)


@pytest.mark.parametrize("name", ["gpt-oss", "mixtral"])
def test_packed_experts(name: str, tmp_path: Path) -> None:
    """Three blocks of inputs, of which the first rank has two."""
    if name == "gpt-oss":
        save_gpt_oss(tmp_path)
    else:
        save_packed(name, tmp_path, tmp_path / "plain")
    for quantization in ("none", "stored"):
        whole, *ranks = (load(tmp_path, group, quantization=quantization) for group in (SINGLE, Rank(0, 2), Rank(1, 2)))
        x = torch.randn(5, whole.config.hidden_size, generator=torch.Generator().manual_seed(2))
        expected, *parts = (model._layers[0]._feed_forward._total(x) for model in (whole, *ranks))
        torch.testing.assert_close(sum(parts), expected, atol=1e-5 * float(expected.abs().max()), rtol=1e-5)
        widths = [model.config.layers[0].moe.width for model in ranks]
        assert widths == ([64, 32] if name == "gpt-oss" else [128, 64])


def test_experts_whose_blocks_are_cut_are_refused(tmp_path: Path) -> None:
    save_packed("qwen3-moe", tmp_path, tmp_path / "plain")
    with pytest.raises(ConfigError, match="width of 192 has too few blocks of 128"):
        load(tmp_path, Rank(0, 2))


def test_random_weights(tmp_path: Path) -> None:
    write_tiny(Case("LlamaConfig"), tmp_path)
    parts_are_the_whole(tmp_path, load_format="dummy")


def test_a_rank_reads_its_slices_only(tmp_path: Path) -> None:
    counts = Path("/proc/self/io")
    if not counts.exists():
        pytest.skip("the system does not count what is read")
    settings = {"hidden_size": 512, "intermediate_size": 4096, "vocab_size": 4096, "num_hidden_layers": 2}
    write_tiny(Case("LlamaConfig", settings), tmp_path)
    size = (tmp_path / "model.safetensors").stat().st_size

    def read(group: Group) -> int:
        before = int(counts.read_text().split()[1])
        load(tmp_path, group)
        return int(counts.read_text().split()[1]) - before

    assert read(SINGLE) == pytest.approx(size, rel=0.02)
    reports: list[Progress] = []
    load_model(EngineConfig(model=str(tmp_path)), torch.device("cpu"), torch.float32, reports.append, Rank(0, 2))
    assert reports[-1].total == pytest.approx(size / 2, rel=0.02)
    assert all(read(Rank(rank, 2)) == pytest.approx(size / 2, rel=0.06) for rank in range(2))
    assert read(Rank(3, 4)) == pytest.approx(size / 4, rel=0.15)  # the rows of o_proj are too short to leave parts out


@pytest.mark.parametrize(
    ("case", "size", "settings", "reason"),
    [
        (
            Case("LlamaConfig", {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3}),
            4,
            {},
            "6 heads",
        ),
        (Case("LlamaConfig", {"num_attention_heads": 4}), 8, {}, "4 heads, and 2 of keys"),
        (Case("LlamaConfig", {"intermediate_size": 6, "num_key_value_heads": 4}), 4, {}, "width of 6"),
        (Case("LlamaConfig"), 2, {"allow_runtime_lora_updating": True}, "adapters cannot be divided"),
        (Case("LlamaConfig"), 2, {"model_impl": "transformers"}, "transformers' code runs this model"),
        (
            DELTA,
            2,
            {"hf_overrides": {"linear_value_heads_tiled": True}},
            "heads of its recurrent layers in another order",
        ),
        (
            Case("Qwen3_5TextConfig", QWEN3_5 | {"num_attention_heads": 6, "num_key_value_heads": 3}),
            2,
            {},
            "not be of one size",
        ),
    ],
    ids=str,
)
def test_what_cannot_be_divided_is_said(
    case: Case, size: int, settings: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    write_tiny(case, tmp_path)
    with pytest.raises(ConfigError, match=rf"--tensor-parallel-size is {size}, .*{reason}"):
        load(tmp_path, Rank(0, size), **settings)


def test_heads_that_draft_need_a_whole_target(tmp_path: Path) -> None:
    write_tiny(Case("LlamaConfig"), tmp_path)
    config, device = EngineConfig(model=str(tmp_path), dtype="float32"), torch.device("cpu")
    target = load(tmp_path, Rank(0, 2))
    with pytest.raises(ConfigError, match="MTP and EAGLE-3 heads cannot be divided"):
        load_mtp(config, target, device, lambda progress: None)
    with pytest.raises(ConfigError, match="MTP and EAGLE-3 heads cannot be divided"):
        load_eagle3(config, target, device, lambda progress: None, served_len=64)


def test_merged_matrices_are_divided_as_floats_only(tmp_path: Path) -> None:
    write_tiny(Case("Phi3Config"), tmp_path)
    checkpoint = SafetensorsCheckpoint(tmp_path)
    shards = Shards(read_config(checkpoint.config.values, checkpoint.config.source), Rank(1, 2))
    name = "model.layers.0.self_attn.qkv_proj"
    merged = colwise("heads", "kv_heads", "kv_heads")
    spans = shards.spans(merged, 64, 64)
    assert [(span.rows.first, span.rows.num, span.rows.total) for span in spans if span.rows] == [
        (32, 32, 128), (80, 16, 128), (112, 16, 128),
    ]  # fmt: skip
    tensors = {
        tensor.name.removeprefix(name): tensor for tensor in checkpoint.tensors({}) if tensor.name.startswith(name)
    }
    assert shards.slices(name, merged, spans[0], tensors)[".weight"].shape == (32, 64)
    with pytest.raises(ConfigError, match="several matrices in one"):
        shards.slices(name, merged, spans[0], tensors | {".weight_scale": tensors[".weight"]})
