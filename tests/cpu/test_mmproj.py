"""Images of GGUF models: a text half and a vision half in two files, against the checkpoint that both were made from."""

from __future__ import annotations

import shutil
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import pytest
import torch
import transformers
from fastapi.testclient import TestClient
from transformers import AutoModelForImageTextToText

from engine.core.errors import ConfigError, ModelLoadError
from engine.files.mmproj import find_mmproj, preference, read_mmproj
from engine.images import Image
from engine.runtime.models.tower import Tower, load_tower
from engine.runtime.weights.checkpoint import open_checkpoint
from engine.settings.engine_config import EngineConfig
from engine.sources.draft_source import fetch_models
from engine.startup.build import build_engine
from engine.startup.model_check import check_model
from engine.text.images.preprocessor import ImagePreprocessor
from engine.text.tokenizer_files import load_tokenizer
from server.app import create_app
from server.settings.app_config import AppConfig
from tests.cpu.gguf_rows import written
from tests.cpu.mmproj_files import HALVES, write_text, write_vision
from tests.cpu.model_driver import CPU
from tests.cpu.test_image_prompts import CONVERSATIONS, POOL, TINY, Lfm2Images, Theirs, answer_of, checkpoint, sent
from tests.cpu.test_images import CONFIGS, FAMILIES, picture

OPTIONS = {"gemma4": {"max_soft_tokens": 70}, "lfm2_vl": Lfm2Images.SETTINGS}  # which files have no keys for


class Files(NamedTuple):
    """A checkpoint, and its two halves."""

    theirs: Theirs
    text: Path
    vision: Path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@cache
def files(folder: Path, kind: str) -> Files:
    theirs, half = checkpoint(folder, kind), HALVES[kind]
    (here := folder / f"{kind}-gguf").mkdir()
    text = write_text(here / "model-f32.gguf", theirs.model, half)
    return Files(
        theirs, text, write_vision(here / "mmproj-f32.gguf", theirs.model, theirs.processor.image_processor, half)
    )


def tower_of(path: Path, mmproj: Path | None = None) -> Tower:
    found = open_checkpoint("auto", path, mmproj=None if mmproj is None else str(mmproj))
    return load_tower(found.config, found, torch.float32, CPU)


@pytest.mark.parametrize("kind", sorted(HALVES.keys() & TINY.keys()))
def test_vectors_and_answers_are_those_of_the_checkpoint(kind: str, folder: Path) -> None:
    """The vision half is found beside the text half; the last conversation has its image in the prefix cache."""
    theirs, text, vision = files(folder, kind)
    tokenizer = load_tokenizer(str(theirs.folder))
    config = fetch_models(EngineConfig(model=str(text), dtype="float32", **POOL), lambda progress: None)
    assert config.mmproj == str(vision)
    check_model(config, has_tokenizer=True)
    own = OPTIONS.get(kind, {})
    images = ImagePreprocessor.of(text, tokenizer, own, mmproj=config.mmproj)
    wanted = ImagePreprocessor.of(theirs.folder, tokenizer)
    assert images is not None
    assert wanted is not None
    pixels = np.random.default_rng(0).integers(0, 256, (70, 50, 3), dtype=np.uint8)
    ours, same = images.prepare(pixels, "messages"), wanted.prepare(pixels, "messages")
    assert ours.text == same.text
    for name, array in same.image.arrays.items():
        np.testing.assert_allclose(ours.image.arrays[name], array, atol=1e-5)
    assert torch.equal(tower_of(text, vision)(same.image), tower_of(theirs.folder)(same.image))
    engine = build_engine(config, lambda progress: None)
    app = AppConfig(model=str(text), served_model_names=("tiny",), shutdown_timeout_s=0.0)
    with TestClient(create_app(engine, tokenizer, app, images), base_url="http://127.0.0.1") as http:
        for parts in CONVERSATIONS:
            body = {"messages": [{"role": "user", "content": [sent(part) for part in parts]}], "temperature": 0}
            given = http.post("/v1/chat/completions", json={**body, "max_tokens": 16, "return_token_ids": True}).json()
            assert (given["prompt_token_ids"], given["choices"][0]["token_ids"]) == answer_of(theirs, parts)
        assert given["usage"]["prompt_tokens_details"]["cached_tokens"] > 20


@pytest.mark.parametrize("name", ["Mistral3Config", "Qwen2VLConfig"])
def test_towers_of_other_types(name: str, tmp_path: Path) -> None:
    known = CONFIGS | {name: each[0] for name, each in FAMILIES.items()}
    torch.manual_seed(0)
    theirs = AutoModelForImageTextToText.from_config(getattr(transformers, name)(**known[name]))
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(std=0.2)
    theirs.save_pretrained(tmp_path / "hf")
    half = HALVES[theirs.config.model_type]
    text = write_text(tmp_path / "text.gguf", theirs, half)
    found = tower_of(text, write_vision(tmp_path / "mmproj.gguf", theirs, None, half))
    image = picture(4, 8, 1)
    if name == "Mistral3Config":
        pixels = np.random.default_rng(0).standard_normal((1, 3, 16, 24), np.float32)
        image = Image(b"rows", {"pixel_values": pixels, "image_sizes": np.array([[16, 24]])}, 6)
    assert torch.equal(found(image), tower_of(tmp_path / "hf")(image))
    assert found(image).isfinite().all()
    settings = found._model.config.vision_config.to_dict()
    for key, value in theirs.config.vision_config.to_dict().items():
        assert key == "dtype" or settings[key] == value, key


def test_older_files_call_the_matrices_of_an_mlp_the_other_way_round(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs, text, vision = files(folder, "gemma3")
    from tests.cpu import mmproj_files

    usual = mmproj_files.vision_tensors
    swaps = {"ffn_up": "ffn_down", "ffn_down": "ffn_up"}

    def swapped(*given: Any) -> Any:
        for name, values in usual(*given):
            role = next((each for each in swaps if each in name), "")
            yield (name.replace(role, swaps[role]) if role else name), values

    monkeypatch.setattr(mmproj_files, "vision_tensors", swapped)
    old = write_vision(tmp_path / "old.gguf", theirs.model, theirs.processor.image_processor, HALVES["gemma3"])
    tensors = {tensor.name: tensor for tensor in open_checkpoint("auto", text, mmproj=str(old)).towers()}
    assert tensors.keys() == {tensor.name for tensor in open_checkpoint("auto", text, mmproj=str(vision)).towers()}
    found = torch.empty(48, 32)
    tensors["vision_tower.vision_model.encoder.layers.1.mlp.fc1.weight"].copy_to(found)
    assert torch.equal(found, theirs.model.state_dict()["model.vision_tower.encoder.layers.1.mlp.fc1.weight"])


def header(path: Path, arch: str, tokens: list[str] | None = None, **keys: Any) -> Path:
    """A file without tensors."""
    writer = gguf.GGUFWriter(path, arch)
    for key, value in keys.items():
        (writer.add_string if isinstance(value, str) else writer.add_uint32)(key, value)
    if tokens is not None:
        writer.add_token_list(tokens)
    return written(writer, path)


def test_a_wrong_file_is_refused_in_a_sentence(folder: Path, tmp_path: Path) -> None:
    theirs, text, vision = files(folder, "gemma3")
    qwen = files(folder, "qwen3_vl")
    half = HALVES["gemma3"]
    writing = theirs.model, theirs.processor.image_processor
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(vision.read_bytes()[:-100])
    none = tmp_path / "none.gguf"
    lacking = header(tmp_path / "lacking.gguf", "gemma3", ["a", "b"], **{"gemma3.embedding_length": 64})
    for model, mmproj, words in (
        (text, qwen.text, "its architecture is 'qwen3vl', not 'clip'"),
        (text, qwen.vision, "64 numbers for qwen3vl or qwen3vlmoe or qwen35 or qwen35moe, and .* is gemma3 of 64"),
        (
            text,
            write_vision(tmp_path / "wide.gguf", *writing, half, projection_dim=65),
            "of 65 numbers for gemma3, and",
        ),
        (
            text,
            header(tmp_path / "b.gguf", "clip", **{"clip.projector_type": "ldp"}),
            "'ldp' is not supported; Quire reads",
        ),
        (text, write_vision(tmp_path / "unset.gguf", *writing, half, patch_size=None), "'patch_size' is missing"),
        (text, write_vision(tmp_path / "mean.gguf", *writing, half, image_mean=None), "'image_mean' is missing"),
        (text, write_vision(tmp_path / "other.gguf", *writing, half._replace(projector="idefics3")), "for llama, and"),
        (text, cut, "is truncated or damaged"),
        (text, none, "cannot be read"),
        (lacking, vision, "needs the token '<image_soft_token>', which"),
    ):
        with pytest.raises(ModelLoadError, match=words) as caught:
            open_checkpoint("auto", model, mmproj=str(mmproj)) if model == text else read_mmproj(mmproj, model)
        assert str(caught.value).count("\n") == 0
    with pytest.raises(ConfigError, match="is no GGUF file, whose vision half that would be; leave it out"):
        check_model(EngineConfig(model=str(theirs.folder), mmproj=str(vision)), has_tokenizer=True)
    with pytest.raises(ModelLoadError, match="is the vision half of a model; name the file of its text"):
        open_checkpoint("auto", vision)
    few = write_vision(tmp_path / "few.gguf", *writing, half, block_count=3)
    with pytest.raises(ModelLoadError, match="its tower lacks 16 tensors"):
        tower_of(text, few)


def test_a_fitting_file_is_found_beside_the_model(folder: Path, tmp_path: Path) -> None:
    _, text, vision = files(folder, "gemma3")
    other = files(folder, "qwen3_vl")
    model = shutil.copy(text, tmp_path / "model.gguf")
    assert find_mmproj(model) is None
    shutil.copy(other.vision, tmp_path / "mmproj-BF16.gguf")
    (tmp_path / "mmproj-F16.gguf").write_bytes(b"GGUF")
    assert find_mmproj(model) is None
    shutil.copy(vision, tmp_path / "model.mmproj-Q8_0.gguf")
    assert find_mmproj(model) == tmp_path / "model.mmproj-Q8_0.gguf"
    assert fetch_models(EngineConfig(model=str(model), image_cache_memory=0), lambda progress: None).mmproj is None
    names = ["mmproj-model-f32.gguf", "mmproj-Q8_0.gguf", "mmproj-F16.gguf", "mmproj-BF16.gguf"]
    assert sorted(names, key=preference) == names[::-1]
