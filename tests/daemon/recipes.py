"""Commands from vLLM's and llama.cpp's own documents, as printed there in 2025 and 2026; only the model is another."""

from __future__ import annotations

import shlex
from typing import NamedTuple


class Recipe(NamedTuple):
    """A command, and the document that has it."""

    source: str
    command: str
    model: str  # the name in it

    def argv(self, model: str) -> list[str]:
        """Return the arguments of `quire serve` for another model."""
        words = shlex.split(self.command)
        return [model if word == self.model else word for word in words[words.index("serve") + 1 :]]


def _vllm(document: str, model: str, flags: str) -> Recipe:
    return Recipe(f"vLLM, docs/{document}", f"vllm serve {model} {flags}", model)


def _llama(document: str, model: str, flags: str) -> Recipe:
    return Recipe(f"llama.cpp, {document}", f"llama serve {flags.format(model)}", model)


RECIPES = (
    _vllm("getting_started/quickstart.md", "Qwen/Qwen2.5-1.5B-Instruct", ""),
    _vllm("getting_started/quickstart.md", "Qwen/Qwen2.5-1.5B-Instruct", "--attention-backend FLASH_ATTN"),
    _vllm("serving/openai_compatible_server.md", "NousResearch/Meta-Llama-3-8B-Instruct", "--dtype auto --api-key token-abc123"),
    _vllm(
        "features/reasoning_outputs.md",
        "Qwen/Qwen3-8B",
        "--reasoning-parser qwen3 --default-chat-template-kwargs '{\"enable_thinking\": false}'",
    ),
    _vllm(
        "serving/integrations/claude_code.md",
        "openai/gpt-oss-120b",
        "--served-model-name my-model --enable-auto-tool-choice --tool-call-parser openai",
    ),
    _llama("tools/server/README.md, Quick Start", "models/7B/ggml-model.gguf", "-m {} -c 2048"),
    _llama("tools/server/README.md, Docker", "models/7B/ggml-model.gguf", "-m {} -c 512 --host 0.0.0.0 --port 8080 --n-gpu-layers 99"),
    _llama("README.md, multiple users", "model.gguf", "-m {} -c 16384 -np 4"),
    _llama("docs/function-calling.md", "bartowski/Qwen2.5-7B-Instruct-GGUF:Q4_K_M", "--jinja -fa -hf {}"),
    _llama("docs/docker.md", "/models/7B/ggml-model-q4_0.gguf", "-m {} --port 8080 --host 0.0.0.0 -n 512 --n-gpu-layers 1"),
)  # fmt: skip
