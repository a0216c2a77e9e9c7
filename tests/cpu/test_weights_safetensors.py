"""Folders of safetensors: whole, sharded, and broken in every way a download can break."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.core.errors import ModelLoadError
from engine.core.types import Progress
from engine.runtime.models.load import load_model
from engine.runtime.weights.safetensors import SafetensorsCheckpoint
from engine.settings.engine_config import EngineConfig
from tests.cpu.test_models_families import CASES, SIZES, load, logits_of, write_tiny

IDS = torch.arange(3, 23)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_tiny(CASES["llama"], tmp_path)
    return tmp_path


def shard(folder: Path) -> list[str]:
    """Split model.safetensors in two, with an index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    files = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    parts = [names[: len(names) // 2], names[len(names) // 2 :]]
    for file, part in zip(files, parts, strict=True):
        save_file({name: tensors[name] for name in part}, folder / file)
    weight_map = {name: file for file, part in zip(files, parts, strict=True) for name in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return files


def change(folder: Path, edit: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Rewrite model.safetensors after `edit`."""
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_shards_are_one_checkpoint(folder: Path) -> None:
    whole = logits_of(load(folder), IDS, [20])
    shard(folder)
    torch.testing.assert_close(logits_of(load(folder), IDS, [20]), whole, atol=0, rtol=0)


def test_progress_counts_every_byte(folder: Path) -> None:
    heard: list[Progress] = []
    config = EngineConfig(model=str(folder))
    load_model(config, torch.device("cpu"), torch.float32, heard.append)
    size = sum(tensor.nbytes for tensor in load_file(folder / "model.safetensors").values())
    assert heard[-1].done == heard[-1].total == size
    assert [step.done for step in heard] == sorted(step.done for step in heard)
    assert {(step.stage, step.unit) for step in heard} == {("weights", "bytes")}


def test_weights_are_converted_to_the_asked_type(folder: Path) -> None:
    whole = logits_of(load(folder), IDS, [20])
    change(folder, lambda tensors: tensors.update({name: tensor.double() for name, tensor in tensors.items()}))
    torch.testing.assert_close(logits_of(load(folder), IDS, [20]), whole, atol=0, rtol=0)


def test_computed_buffers_and_a_tied_head_are_passed_over(folder: Path) -> None:
    write_tiny(CASES["granite"], folder)
    whole = logits_of(load(folder), IDS, [20])

    def edit(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)

    change(folder, edit)
    torch.testing.assert_close(logits_of(load(folder), IDS, [20]), whole, atol=0, rtol=0)


def test_a_second_head_that_contradicts_the_config_is_refused(folder: Path) -> None:
    write_tiny(CASES["granite"], folder)
    change(folder, lambda tensors: tensors.update({"lm_head.weight": torch.ones(128, 64)}))
    with pytest.raises(ModelLoadError, match=r"'lm_head\.weight' differs from .*'tie_word_embeddings' to false"):
        load(folder)


def _drop(tensors: dict[str, torch.Tensor]) -> None:
    for index in range(3):
        del tensors[f"model.layers.{index}.self_attn.o_proj.weight"]
    del tensors["model.norm.weight"]


def _add(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.0.self_attn.q_proj.bias"] = torch.ones(64)


def _reshape(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.1.mlp.up_proj.weight"] = torch.ones(97, 64)


def _quantise(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.norm.weight"] = torch.ones(64, dtype=torch.int8)


@pytest.mark.parametrize(
    ("edit", "sentence"),
    [
        (_drop, r"it lacks 'model\.layers\.0\.self_attn\.o_proj\.weight', .* and 1 more tensors\."),
        (_add, r"it has 'model\.layers\.0\.self_attn\.q_proj\.bias' that its config does not call for"),
        (
            _reshape,
            r"model\.safetensors: tensor 'model\.layers\.1\.mlp\.up_proj\.weight' has shape \[97, 64\].*\[96, 64\]",
        ),
        (_quantise, r"tensor 'model\.norm\.weight' is stored as I8"),
    ],
)
def test_a_checkpoint_that_is_not_the_model_is_refused(
    edit: Callable[[dict[str, torch.Tensor]], None], sentence: str, folder: Path
) -> None:
    change(folder, edit)
    with pytest.raises(ModelLoadError, match=sentence):
        load(folder)


def test_a_truncated_file_is_refused(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ModelLoadError, match=r"model\.safetensors is truncated or not a safetensors file"):
        load(folder)


def test_a_missing_shard_is_named(folder: Path) -> None:
    files = shard(folder)
    (folder / files[1]).unlink()
    with pytest.raises(ModelLoadError, match=r"model-00002-of-00002\.safetensors is missing"):
        load(folder)


@pytest.mark.parametrize("name", ["../../secret.safetensors", "/etc/passwd", "passwd", "", ".", None, 3, ["a"]])
def test_an_index_names_weights_beside_itself(name: object, folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(ModelLoadError, match=r"the weights must be \.safetensors files beside it"):
        next(SafetensorsCheckpoint(folder).tensors({}))


@pytest.mark.parametrize("text", ['{"weight_map": 3}', "{}", "[]", "{"])
def test_a_broken_index_is_refused(text: str, folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ModelLoadError, match=r"index\.json"):
        load(folder)


def test_pickles_are_refused(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelLoadError, match=r"only pickled weights \(pytorch_model\.bin\)"):
        load(folder)


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"has no config\.json"):
        load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(SIZES | {"model_type": "llama"}))
    with pytest.raises(ModelLoadError, match=r"holds no \.safetensors file"):
        load(tmp_path)
