"""Model folders that nothing need be fetched for: a published shape's config.json, and a tokenizer made on the spot.

Weights come from `--load-format dummy`. The tokenizer knows all bytes and the words that `quire bench` writes, each as one
token, and has a name for every other id of the vocabulary, so that whatever a random model draws is text to be decoded
and sent like any other.
"""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from loadtest.gpu.shapes import Shape
from loadtest.workload import WORDS


def write_model(shape: Shape, folder: Path) -> Path:
    """The folder of one shape under `folder`."""
    path = folder / shape.name
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(dict(shape.config), indent=2), encoding="utf-8")
    _tokenizer(shape.vocab).save(str(path / "tokenizer.json"))
    told = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    (path / "tokenizer_config.json").write_text(json.dumps(told), encoding="utf-8")
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
