"""Served models say what transformers' own `generate` says: offline, and one of each of today's families in the real daemon.

Offline and daemon read a folder alike; a daemon takes more time.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from quire import LLM, SamplingParams
from tests.cpu.served_models import save_servable, save_tokenizer, say
from tests.cpu.test_models_families import CASES as NATIVE
from tests.cpu.test_models_families import GEMMA4, LFM2, QWEN3_5, QWEN3_5_MOE, QWEN3_MOE, SIZES
from tests.cpu.test_models_transformers import CASES
from tests.daemon.real_daemon import Daemon, serve

PROMPT, NUM_NEW = [5, 17, 99, 3, 64, 23, 41], 12


def offline(folder: Path, prompt: str) -> str:
    params = SamplingParams(max_tokens=NUM_NEW, min_tokens=NUM_NEW, temperature=0)
    with LLM(str(folder), tokenizer=tokenizer_of(folder), kv_cache_memory_bytes=4 << 20) as llm:
        return llm.generate(prompt, params, progress=False)[0].outputs[0].text


def tokenizer_of(folder: Path) -> str:
    """It is apart from models for whose kind transformers replaces it."""
    words = folder / "words"
    return str(words if words.exists() else folder)


def in_a_daemon(folder: Path, prompt: str) -> str:
    with serve(folder, "--kv-cache-memory-bytes", "4MiB", "--tokenizer", tokenizer_of(folder)) as daemon:
        return daemon.text(prompt, max_tokens=NUM_NEW, min_tokens=NUM_NEW)


def check_served(model: Any, folder: Path, generate: Callable[[Path, str], str] = offline) -> None:
    """Compare a greedy text with transformers' own."""
    ids = torch.tensor([PROMPT])
    with torch.no_grad():
        told = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_NEW, min_new_tokens=NUM_NEW, do_sample=False
        )
    assert generate(folder, say(ids[0])).split() == say(told[0, len(PROMPT) :]).split()


@pytest.mark.parametrize("name", ["gpt2", "gpt_neox", "phi", "deepseek_v3", "gpt_oss"])
def test_it_says_what_generate_says(name: str, tmp_path: Path) -> None:
    check_served(save_servable(CASES[name], tmp_path), tmp_path, in_a_daemon if name == "gpt2" else offline)


@pytest.mark.parametrize(
    "name", ["granitemoehybrid-mamba", "nemotron_h", "qwen3_next", "lfm2-moe", "falcon_h1", "mamba2", "lfm3"]
)
def test_a_daemon_says_what_generate_says(name: str, tmp_path: Path) -> None:
    check_served(save_servable(NATIVE[name], tmp_path), tmp_path, in_a_daemon)


VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 8,
}
QWEN_VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64}
AXES = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}}
WIDE_AXES = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [6, 5, 5]}}
GEMMA3 = {
    "head_dim": 16,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "query_pre_attn_scalar": 16,
}
UNIFIED = {key: value for key, value in GEMMA4.items() if not key.endswith("per_layer_input")}
# The class, the settings of the language model, and of the tower for images.
WRAPPERS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "gemma3": ("Gemma3", GEMMA3, VISION),
    "gemma4": (
        "Gemma4",
        GEMMA4 | {"hidden_size_per_layer_input": 8},
        VISION | {"head_dim": 16, "num_key_value_heads": 2},
    ),
    "gemma4_unified": ("Gemma4Unified", UNIFIED, {"mm_embed_dim": 32, "mm_posemb_size": 8, "patch_size": 4}),
    "idefics3": ("Idefics3", {"model_type": "llama"}, VISION),
    "internvl": ("InternVL", {"model_type": "qwen2"}, VISION | {"image_size": [32, 32], "patch_size": [8, 8]}),
    "lfm2_vl": (
        "Lfm2Vl",
        {"model_type": "lfm2"} | LFM2,
        {key: size for key, size in VISION.items() if key != "image_size"} | {"model_type": "siglip2_vision_model"},
    ),
    "llava": ("Llava", {"model_type": "llama"}, VISION | {"model_type": "clip_vision_model"}),
    "llava_next": ("LlavaNext", {"model_type": "mistral"}, VISION | {"model_type": "clip_vision_model"}),
    "mistral3": ("Mistral3", {"model_type": "mistral", "head_dim": 16}, VISION | {"model_type": "pixtral"}),
    "qwen2_vl": ("Qwen2VL", AXES, {"depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2}),
    "qwen2_5_vl": ("Qwen2_5_VL", AXES, QWEN_VISION),
    "qwen3_5": ("Qwen3_5", QWEN3_5, QWEN_VISION),
    "qwen3_5_moe": ("Qwen3_5Moe", QWEN3_5_MOE, QWEN_VISION),
    "qwen3_vl": ("Qwen3VL", WIDE_AXES | {"head_dim": 32}, QWEN_VISION | {"deepstack_visual_indexes": [0]}),
    "qwen3_vl_moe": ("Qwen3VLMoe", WIDE_AXES | QWEN3_MOE, QWEN_VISION | {"deepstack_visual_indexes": [0]}),
    "smolvlm": ("SmolVLM", {"model_type": "llama"}, VISION),
}


def save_wrapper(name: str, folder: Path) -> Any:
    """A random model that takes images, too, saved with a tokenizer."""
    torch.manual_seed(0)
    kind, text, vision = WRAPPERS[name]
    config = getattr(transformers, f"{kind}Config")(text_config=SIZES | text, vision_config=vision, image_token_id=126)
    config.tie_word_embeddings = name.startswith("gemma")
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.15)
    model.save_pretrained(folder)
    words = folder / "words" if name.startswith("qwen3_5") else folder
    words.mkdir(exist_ok=True)
    save_tokenizer(words)
    return model


@pytest.mark.parametrize("name", WRAPPERS)
def test_the_language_model_inside_another_is_served(name: str, tmp_path: Path) -> None:
    is_new = name in ("qwen3_5", "qwen3_5_moe", "lfm2_vl", "gemma4", "gemma4_unified")
    check_served(save_wrapper(name, tmp_path), tmp_path, in_a_daemon if is_new else offline)


def test_settings_beside_those_of_a_tower_and_transposed_experts_are_read(tmp_path: Path) -> None:
    """As Qwen 2 VL and Qwen 3 VL with experts were published; transformers saves neither so."""
    model = save_wrapper("qwen2_vl", tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    text = values.pop("text_config") | {"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}
    flat = {key: value for key, value in text.items() if key not in ("rope_parameters", "model_type")}
    (tmp_path / "config.json").write_text(json.dumps(flat | values))
    check_served(model, tmp_path)
    model = save_wrapper("qwen3_vl_moe", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    turned = {name: each.transpose(1, 2).contiguous() for name, each in tensors.items() if ".experts." in name}
    assert len(turned) == 6
    save_file(tensors | turned, tmp_path / "model.safetensors")
    check_served(model, tmp_path)


def test_the_language_model_of_gemma_3n_is_served(tmp_path: Path) -> None:
    """Its tower for images needs another library, so the checkpoint is put together here."""
    model = save_servable(NATIVE["gemma3n"], tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}
    towers = {f"model.{name}.weight": torch.zeros(2) for name in ("vision_tower.a", "audio_tower.b", "embed_audio.c")}
    save_file(tensors | towers, tmp_path / "model.safetensors")
    text = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "gemma3n", "text_config": text, "vision_config": {"model_type": "gemma3n_vision"}})
    )
    (tmp_path / "words").mkdir(exist_ok=True)
    save_tokenizer(tmp_path / "words")
    check_served(model, tmp_path, in_a_daemon)


def test_a_body_that_was_saved_without_its_head_is_served(tmp_path: Path) -> None:
    """As Qwen3-Embedding's published weights: no prefix in their names, and the head is the embedding."""
    model = save_servable(NATIVE["qwen3-biased"], tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors = {name.removeprefix("model."): tensor for name, tensor in tensors.items() if name != "lm_head.weight"}
    save_file(tensors, tmp_path / "model.safetensors")
    check_served(model, tmp_path)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A daemon whose tokenizer and generation config know tokens beyond the model's vocabulary."""
    folder = tmp_path_factory.mktemp("llama")
    save_servable(NATIVE["llama"], folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    extra = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    tokenizer["added_tokens"] = [{"id": SIZES["vocab_size"], "content": "<image>"} | extra]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 128, -1, 10**9]}))
    with serve(str(folder), "--allow-runtime-lora-updating", "--kv-cache-memory-bytes", "4MiB") as daemon:
        yield daemon


def test_tokens_beyond_the_models_vocabulary_are_refused_in_text(llama: Daemon) -> None:
    """Published tokenizers have such: Gemma 3's image token is beyond the vocabulary of its models for text."""
    answer = llama.http.post("/v1/completions", json={"prompt": "w5 <image> w7", "max_tokens": 3})
    assert answer.status_code == 400
    assert "'<image>', the tokenizer's id 128, and the model has 128 tokens" in answer.json()["error"]["message"]
    body = {"prompt": "w5 w7", "max_tokens": 3, "min_tokens": 3}
    assert llama.http.post("/v1/completions", json=body).status_code == 200


def test_an_adapter_that_is_no_file_is_refused_and_the_daemon_ends(llama: Daemon, tmp_path: Path) -> None:
    """Opening a FIFO blocks, and a device is read without end: neither may hold the daemon, or its end."""
    kinds: dict[str, Callable[[Path], object]] = {
        "fifo": os.mkfifo,
        "device": lambda path: path.symlink_to("/dev/zero"),
        "loop": lambda path: path.symlink_to(path),
        "folder": Path.mkdir,
    }
    for kind, make in kinds.items():
        for name in ("adapter_config.json", "adapter_model.safetensors"):
            folder = tmp_path / kind / name
            folder.mkdir(parents=True)
            if name != "adapter_config.json":
                (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}')
            make(folder / name)
            body = {"lora_name": "a", "lora_path": str(folder)}
            answer = llama.http.post("/v1/load_lora_adapter", json=body)
            assert answer.status_code == 400, answer.text
            assert f"{name} cannot be read" in answer.json()["error"]["message"]
