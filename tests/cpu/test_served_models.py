"""Models that transformers' code runs say what transformers' own `generate` says: offline, and one in the real daemon.

Offline and daemon read a folder alike; a daemon takes seconds more.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Gemma3Config, Gemma3ForConditionalGeneration

from quire import LLM, SamplingParams
from tests.cpu.served_models import save_servable, save_tokenizer, say
from tests.cpu.test_models_families import CASES as NATIVE
from tests.cpu.test_models_families import SIZES
from tests.cpu.test_models_transformers import CASES
from tests.daemon.real_daemon import serve

PROMPT, NUM_NEW = [5, 17, 99, 3, 64, 23, 41], 12


def offline(folder: Path, prompt: str) -> str:
    params = SamplingParams(max_tokens=NUM_NEW, min_tokens=NUM_NEW, temperature=0)
    with LLM(str(folder), kv_cache_memory_bytes=4 << 20) as llm:
        return llm.generate(prompt, params, progress=False)[0].outputs[0].text


def in_a_daemon(folder: Path, prompt: str) -> str:
    with serve(folder, "--kv-cache-memory-bytes", "4MiB") as daemon:
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


def test_the_language_model_of_a_vision_checkpoint_is_served(tmp_path: Path) -> None:
    torch.manual_seed(0)
    windows = ["sliding_attention", "full_attention", "sliding_attention"]
    text = SIZES | {"head_dim": 16, "sliding_window": 8, "layer_types": windows, "query_pre_attn_scalar": 16}
    vision = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 32,
        "patch_size": 8,
    }
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=127)
    model = Gemma3ForConditionalGeneration(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.15)
    model.save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    check_served(model, tmp_path)


def test_a_body_that_was_saved_without_its_head_is_served(tmp_path: Path) -> None:
    """As Qwen3-Embedding's published weights: no prefix in their names, and the head is the embedding."""
    model = save_servable(NATIVE["qwen3-biased"], tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors = {name.removeprefix("model."): tensor for name, tensor in tensors.items() if name != "lm_head.weight"}
    save_file(tensors, tmp_path / "model.safetensors")
    check_served(model, tmp_path)


def test_tokens_beyond_the_models_vocabulary_are_refused_in_text(tmp_path: Path) -> None:
    """Published tokenizers have such: Gemma 3's image token is beyond the vocabulary of its models for text."""
    save_servable(NATIVE["llama"], tmp_path)
    tokenizer = json.loads((tmp_path / "tokenizer.json").read_text())
    extra = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    tokenizer["added_tokens"] = [{"id": SIZES["vocab_size"], "content": "<image>"} | extra]
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 128, -1, 10**9]}))
    with serve(str(tmp_path), "--kv-cache-memory-bytes", "4MiB") as daemon:
        body = {"prompt": "w5 <image> w7", "max_tokens": 3}
        answer = daemon.http.post("/v1/completions", json=body)
        assert answer.status_code == 400
        assert "'<image>', the tokenizer's id 128, and the model has 128 tokens" in answer.json()["error"]["message"]
        body = {"prompt": "w5 w7", "max_tokens": 3, "min_tokens": 3}
        assert daemon.http.post("/v1/completions", json=body).status_code == 200


def test_an_adapter_that_is_no_file_is_refused_and_the_daemon_ends(tmp_path: Path) -> None:
    """Opening a FIFO blocks, and a device is read without end: neither may hold the daemon, or its end."""
    save_servable(NATIVE["llama"], tmp_path)
    kinds: dict[str, Callable[[Path], object]] = {
        "fifo": os.mkfifo,
        "device": lambda path: path.symlink_to("/dev/zero"),
        "loop": lambda path: path.symlink_to(path),
        "folder": Path.mkdir,
    }
    with serve(str(tmp_path), "--allow-runtime-lora-updating", "--kv-cache-memory-bytes", "4MiB") as daemon:
        for kind, make in kinds.items():
            for name in ("adapter_config.json", "adapter_model.safetensors"):
                folder = tmp_path / kind / name
                folder.mkdir(parents=True)
                if name != "adapter_config.json":
                    (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}')
                make(folder / name)
                body = {"lora_name": "a", "lora_path": str(folder)}
                answer = daemon.http.post("/v1/load_lora_adapter", json=body)
                assert answer.status_code == 400, answer.text
                assert f"{name} cannot be read" in answer.json()["error"]["message"]
