"""The shapes of the GPU part, and their model folders for `--load-format dummy`: a config.json and a tokenizer.

Each byte and each word of `quire bench` is a token. Every other id has a name, so that all drawn tokens become text.
"""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from loadtest.shapes import COMPARED, Shape
from loadtest.workload import WORDS

_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
QWEN3_06B = COMPARED["qwen3-0.6b"]
LLAMA_8B = Shape(
    "llama-3.1-8b", "llama", 32, 4096, 32, 8, 128, 14336, 128256, 131072, 5e5, 1e-5, is_tied=False,
    more={"rope_scaling": _LLAMA3_ROPE},
)  # fmt: skip
ON_GPU = {shape.name: shape for shape in (QWEN3_06B, LLAMA_8B)}


def write_model(shape: Shape, folder: Path) -> Path:
    """Write the folder of one shape under `folder`, and return it."""
    path = folder / shape.name
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(shape.config(), indent=2), encoding="utf-8")
    _tokenizer(shape.vocab).save(str(path / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    (path / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return path


def _tokenizer(vocab_size: int) -> Tokenizer:
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(f"Ġ{word}" for word in WORDS), *WORDS]
    tokens = list(dict.fromkeys(tokens))
    tokens += [f"Ġfill{index}" for index in range(len(tokens), vocab_size)]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
