"""Tiny random checkpoints with a tokenizer, which `quire serve` and LLM read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from tests.cpu.test_models_families import SIZES, Case, save_tiny


def save_servable(case: Case, folder: Path) -> Any:
    """Save a random model of transformers and a tokenizer with one word for each of its ids; returns the model."""
    model = save_tiny(case, folder)
    save_tokenizer(folder)
    return model


def save_tokenizer(folder: Path) -> None:
    """A tokenizer of the words w0, w1, w3, ...; 2 is the end."""
    words = {"</s>" if token_id == 2 else f"w{token_id}": token_id for token_id in range(SIZES["vocab_size"])}
    backend = Tokenizer(WordLevel(words, unk_token="w0"))
    backend.pre_tokenizer = Whitespace()
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}')


def say(token_ids: torch.Tensor) -> str:
    """The text of some ids."""
    return " ".join(f"w{token_id}" for token_id in token_ids.tolist())
