"""The offline API on the real model: grammars and calls of tools hold there too."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import jsonschema
import pytest
import torch

from engine.core.errors import InvalidRequestError
from engine.runtime.models.decoder import Decoder
from engine.runtime.models.load import load_model
from engine.settings.engine_config import EngineConfig
from engine.sources.model_source import find_model
from quire import LLM, SamplingParams
from tests.cpu.lora_folders import save_adapter
from tests.cpu.model_driver import CPU

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 1, "maximum": 99}}, "required": ["n"]}
CLOSED = {**SCHEMA, "additionalProperties": False}

# Two greedy prompts and their tokens in float32, where margins are far above the rounding that instruction sets differ by.
GOLDEN = {
    "The capital of France is": [
        7042, 30, 198, 198, 504, 2988, 314, 42, 216, 34, 32, 33, 40, 29, 32, 33, 29, 34, 34, 216, 33, 34, 42, 33,
    ],
    "def fibonacci(n):": [
        472, 585, 304, 1758, 216, 32, 42, 448, 1003, 216, 33, 472, 1003, 304, 1672, 3987, 46477, 24, 94, 731, 216, 33, 25, 198,
    ],
}  # fmt: skip


@pytest.mark.parametrize("kernels", ["portable", "auto"])
def test_the_default_model_says_what_it_always_said(kernels: str) -> None:
    with LLM(dtype="float32", cpu_kernels=kernels, max_model_len=256, kv_cache_memory_bytes=32 << 20) as llm:
        outputs = llm.generate(list(GOLDEN), SamplingParams(max_tokens=24, temperature=0))
    assert [list(output.outputs[0].token_ids) for output in outputs] == list(GOLDEN.values())


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(max_model_len=512, kv_cache_memory_bytes=64 << 20) as llm:
        yield llm


def test_grammars_and_calls_hold(llm: LLM) -> None:
    asked = [{"regex": "[A-Z][a-z]{2,8}"}, {"choice": ["yes", "no"]}, {"json": CLOSED}]
    each = [SamplingParams(structured_outputs=one, seed=seed, temperature=1.0) for one in asked for seed in range(4)]
    said = [output.outputs[0].text for output in llm.generate(["Say it: "] * len(each), each)]
    assert all(re.fullmatch("[A-Z][a-z]{2,8}", text) for text in said[:4])
    assert all(text in ("yes", "no") for text in said[4:8])
    for text in said[8:]:
        jsonschema.validate(json.loads(text), SCHEMA)
    assert len(set(said)) > 4

    question = [{"role": "user", "content": "How many?"}]
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}}
    params = SamplingParams(max_tokens=40, response_format=schema, seed=1)
    jsonschema.validate(json.loads(llm.chat(question, params)[0].outputs[0].text), CLOSED)
    tool = {"type": "function", "function": {"name": "count", "parameters": SCHEMA}}
    params = SamplingParams(max_tokens=60, seed=1)
    [output] = llm.chat(question, params, tools=[tool], tool_choice="required", parallel_tool_calls=False)
    [call] = output.outputs[0].tool_calls
    assert call.name == "count"
    jsonschema.validate(json.loads(call.arguments), CLOSED)


def test_words_and_tokens_are_ruled_out(llm: LLM) -> None:
    prompt = "The capital of Japan is"
    greedy = SamplingParams(max_tokens=8, temperature=0)
    assert "Tokyo" in llm.generate(prompt, greedy)[0].outputs[0].text
    params = SamplingParams(max_tokens=8, temperature=0, bad_words=("Tokyo", "Kyoto"))
    text = llm.generate(prompt, params)[0].outputs[0].text
    assert text
    assert "Tokyo" not in text
    params = SamplingParams(max_tokens=8, seed=1, allowed_token_ids=(1, 5, 9))
    assert set(llm.generate(prompt, params)[0].outputs[0].token_ids) <= {1, 5, 9}


def test_adapters_by_name(tmp_path: Path) -> None:
    """Adapters that change so much that nobody needs to look twice."""
    settings = {"max_model_len": 256, "kv_cache_memory_bytes": 32 << 20, "dtype": "bfloat16"}
    model = load_model(EngineConfig(model=find_model(None).path), CPU, torch.bfloat16, lambda progress: None)
    assert isinstance(model, Decoder)
    modules = {name: str(save_adapter(model, tmp_path / name, seed=seed)) for seed, name in enumerate("ab")}
    params = SamplingParams(max_tokens=6, temperature=0)
    with LLM(**settings, lora_modules=modules) as llm:
        said = [
            llm.generate("Once upon a time", params, lora=lora)[0].outputs[0].text for lora in (None, "a", "b", "a")
        ]
        assert said[1] == said[3]
        assert len(set(said)) == 3
        chat = [{"role": "user", "content": "Hello"}]
        answers = [llm.chat(chat, params, lora=lora)[0].outputs[0].text for lora in (None, "a")]
        assert answers[0] != answers[1]
        with pytest.raises(InvalidRequestError, match="lora is 'c'; of lora_modules there are: a, b"):
            llm.generate("x", params, lora="c")
