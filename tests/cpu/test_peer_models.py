"""The models a comparison writes are one model: the same numbers in every format, read by readers that are not ours."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine.files.gguf_header import read_header
from engine.files.gguf_kinds import Kind
from engine.runtime.weights.gguf import GGUFCheckpoint, dequantised
from engine.sources.model_source import find_model
from loadtest.errors import LoadtestError
from loadtest.peers.gguf_file import random_blocks
from loadtest.peers.hybrids import prepare as prepare_hybrid
from loadtest.peers.models import bfloat16_bits, prepare
from loadtest.peers.packed import PACKINGS
from loadtest.peers.table import GGUF_FORMATS, PACKED_FORMATS
from loadtest.shapes import COMPARED, HYBRIDS, Shape
from quire import LLM, SamplingParams
from tests.cpu import packers
from tests.cpu.test_stored import unpacked
from tools.accuracy import TINY as TINY_512
from tools.accuracy import kl_of

VOCAB = 49152 + 8  # the embedded tokenizer's, and some of the fillers that a larger shape needs
TINY = {
    "llama": Shape("tiny-llama", "llama", 2, 32, 4, 2, 8, 64, VOCAB, 128, 100000.0, 1e-5),
    "qwen2": Shape("tiny-qwen2", "qwen2", 2, 32, 4, 2, 8, 64, VOCAB, 128, 1e6, 1e-6, bias=True),
}
FILES = ("hf", "w8a8", "bf16.gguf", "f16.gguf", "q8_0.gguf")
OTHERS = {
    shape.arch: replace(shape, layers=2, hidden=32, heads=4, kv_heads=2, head_dim=8, ffn=32, vocab=VOCAB)
    for shape in COMPARED.values()
    if shape.arch not in TINY and shape.arch != "gpt-oss"
}


@pytest.fixture(scope="module", params=TINY)
def prepared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Shape, Path]:
    shape, folder = TINY[request.param], tmp_path_factory.mktemp("models")
    prepare(shape, Path(find_model(None).path), folder, FILES, lambda _: None)
    return shape, folder / shape.name


def test_transformers_reads_the_folder_whole(prepared: tuple[Shape, Path]) -> None:
    shape, folder = prepared
    model, told = AutoModelForCausalLM.from_pretrained(folder / "hf", dtype="bfloat16", output_loading_info=True)
    assert not told["missing_keys"]
    assert not told["unexpected_keys"]
    assert model.config.rope_parameters["rope_theta"] == shape.rope_base
    assert model(torch.tensor([[1, 2, VOCAB - 1]])).logits.isfinite().all()


def test_the_gguf_holds_the_same_model(prepared: tuple[Shape, Path]) -> None:
    """Quire's reader of GGUF brings rows into transformers' order by its own rule; the writer must have undone it."""
    _, folder = prepared
    wanted = load_file(folder / "hf" / "model.safetensors")
    for name, tolerance in (("bf16.gguf", 0.0), ("f16.gguf", 1e-6), ("q8_0.gguf", 1e-3)):
        stored = {tensor.name: tensor for tensor in GGUFCheckpoint(folder / name).tensors({})}
        assert stored.keys() == wanted.keys()
        for key, tensor in stored.items():
            read = torch.empty(tensor.shape)
            tensor.copy_to(read)
            torch.testing.assert_close(read, wanted[key].float(), rtol=0, atol=tolerance)


def test_packed_folders_have_the_tensors_of_their_format(prepared: tuple[Shape, Path]) -> None:
    _, folder = prepared
    wanted = load_file(folder / "hf" / "model.safetensors")
    stored = load_file(folder / "w8a8" / "model.safetensors")
    assert {key.removesuffix("_scale") for key in stored} == wanted.keys()
    packed = [key for key in stored if key + "_scale" in stored]
    assert len(packed) == 2 * 7
    assert {stored[key].dtype for key in packed} == {torch.int8}


@pytest.mark.parametrize("name", PACKED_FORMATS)
def test_a_packed_matrix_is_near_its_weights(name: str, tmp_path: Path) -> None:
    """A wrong order of nibbles or a shifted zero point would leave nothing of a random matrix."""
    packing, weight = PACKINGS[name], torch.randn(192, 256, generator=torch.Generator().manual_seed(0))
    given = packers.Packing(lambda *_: (packing.pack(weight, 64), weight.numpy()), packing.config(64))
    read = unpacked(tmp_path, given, *weight.shape)[0].dequantise().float()
    allowed = 0.04 if "8" in name else 0.15
    assert 0 < (read - weight).square().mean().sqrt() < allowed


def test_a_prompt_is_the_same_tokens_and_every_token_has_a_text(prepared: tuple[Shape, Path]) -> None:
    _, folder = prepared
    tokenizer = AutoTokenizer.from_pretrained(folder / "hf")
    words = "time year people"
    assert len(tokenizer(words)["input_ids"]) == 3
    assert tokenizer.decode(tokenizer(words)["input_ids"]) == words
    assert tokenizer.decode([VOCAB - 1]) == f" fill{VOCAB - 1}"
    assert len(tokenizer) == VOCAB


def test_what_is_there_is_not_written_again(prepared: tuple[Shape, Path]) -> None:
    shape, folder = prepared
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    prepare(shape, Path(find_model(None).path), folder.parent, FILES, lambda _: None)
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == before


def test_bfloat16_is_rounded_as_torch_rounds() -> None:
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    values[:4] = torch.tensor([1.00390625, 1.01171875, 0.0, -3e38])  # ties, and the ends
    assert (bfloat16_bits(values.numpy()) == values.bfloat16().view(torch.uint16).numpy()).all()


@pytest.mark.parametrize("shape", OTHERS.values(), ids=list(OTHERS))
def test_it_is_the_same_model_for_every_reader(shape: Shape, tmp_path: Path) -> None:
    prepare(shape, Path(find_model(None).path), tmp_path, ("hf", "bf16.gguf"), lambda _: None)
    _, told = AutoModelForCausalLM.from_pretrained(tmp_path / shape.name / "hf", output_loading_info=True)
    assert not told["missing_keys"]
    assert not told["unexpected_keys"]
    tokens = [1, 2, 30, VOCAB - 1]
    logprobs = []
    for file in ("hf", "bf16.gguf"):
        with LLM(str(tmp_path / shape.name / file), dtype="float32", quantization="none") as llm:
            (output,) = llm.generate([tokens], SamplingParams(max_tokens=0, prompt_logprobs=0))
        logprobs.append([next(iter(entry.values())).logprob for entry in output.prompt_logprobs[1:]])
    assert np.allclose(*logprobs, atol=1e-5)


def test_gpt_oss_is_written_as_gguf_alone(tmp_path: Path) -> None:
    size = {"layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "head_dim": 32, "ffn": 64, "vocab": VOCAB}
    shape = replace(COMPARED["gpt-oss-20b-12"], **size)
    with pytest.raises(LoadtestError, match="GGUF alone"):
        prepare(shape, Path(find_model(None).path), tmp_path, ["hf"], lambda _: None)
    prepare(shape, Path(find_model(None).path), tmp_path, ["mxfp4.gguf"], lambda _: None)
    kinds = {each.name: each.kind for each in read_header(tmp_path / shape.name / "mxfp4.gguf").tensors}
    assert kinds["blk.1.ffn_up_exps.weight"] == Kind.MXFP4
    assert kinds["blk.1.attn_q.weight"] == Kind.Q8_0
    with LLM(str(tmp_path / shape.name / "mxfp4.gguf")) as llm:
        (output,) = llm.generate([[1, 2, 30]], SamplingParams(max_tokens=2, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == 2


@pytest.mark.parametrize("name", [name for name in GGUF_FORMATS if name != "q8_0" and not name.endswith("k_m")])
def test_random_blocks_are_numbers_around_zero(name: str) -> None:
    kind = Kind[name.upper()]
    numbers = dequantised(random_blocks("blk.0.ffn_up.weight", (3, 8, 1024), kind, 0.02), kind)
    assert numbers.shape == (3, 8, 1024)
    assert abs(numbers.mean()) < 0.006
    assert 0.015 < numbers.std() < 0.027


def test_the_divergence_of_a_format_is_that_of_bytes(tmp_path: Path) -> None:
    prepare(TINY_512, Path(find_model(None).path), tmp_path, ["q8_0.gguf"], lambda _: None)
    assert 1e-5 < kl_of(tmp_path / TINY_512.name / "q8_0.gguf") < 1e-2


@pytest.mark.parametrize("name", {config["model_type"]: name for name, config in HYBRIDS.items()}.values())
def test_a_hybrid_is_written_as_it_is_served(name: str, tmp_path: Path) -> None:
    """The first of its layers, narrow."""
    narrow = dict.fromkeys(
        ("hidden_size", "intermediate_size", "moe_intermediate_size", "conv_dim", "conv_dim_out"), 192
    )
    small = narrow | {
        "shared_expert_intermediate_size": 64,
        "shared_intermediate_size": 64,
        "num_experts": 16,
        "mamba_n_heads": 6,
        "mamba_d_state": 16,
    }
    small |= dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCAB + 256)
    config = HYBRIDS[name]
    layers = {"granitemoehybrid": 6, "gemma4_text": 10}.get(config["model_type"], 4)
    sizes = {"num_hidden_layers": layers, "layer_types": config["layer_types"][:layers], "num_kv_shared_layers": 5}
    config = {key: (small | sizes | {"mamba_d_head": 64}).get(key, value) for key, value in config.items()}
    prepare_hybrid(config, Path(find_model(None).path), tmp_path, ["hf"], tmp_path)
    with LLM(tmp_path / "hf", kv_cache_memory_bytes=1 << 26) as llm:
        answer = llm.generate("A bird", SamplingParams(max_tokens=2, temperature=0))[0]
    assert len(answer.outputs[0].token_ids) == 2
    with pytest.raises(LoadtestError, match="name a server in a checkout"):
        prepare_hybrid(config, Path(find_model(None).path), tmp_path, ["q4_k_m.gguf"], tmp_path)
    with pytest.raises(LoadtestError, match="as hf and GGUF, not as w8a8"):
        prepare_hybrid(config, Path(find_model(None).path), tmp_path, ["hf", "w8a8"], tmp_path)


def test_the_embedded_model_has_its_shape() -> None:
    shape = next(shape for shape in COMPARED.values() if shape.is_embedded)
    stored = {tensor.name: tensor.shape for tensor in read_header(Path(find_model(None).path)).tensors}
    assert stored["token_embd.weight"] == (shape.vocab, shape.hidden)
    assert stored["blk.0.attn_k.weight"] == (shape.kv_heads * shape.head_dim, shape.hidden)
    assert stored["blk.0.ffn_up.weight"] == (shape.ffn, shape.hidden)
    assert f"blk.{shape.layers - 1}.ffn_up.weight" in stored
    assert f"blk.{shape.layers}.ffn_up.weight" not in stored
