"""Finds a model: a folder, a .gguf file, or a Hugging Face id that is downloaded.

Imports no torch, because the tokenizer's loader uses it too.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

from engine.core.errors import ModelLoadError

# Weights only as safetensors, beside them configuration and tokenizer; never pickles, never code.
_PATTERNS = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model")
_DUPLICATES = ("consolidated*", "*/*")  # duplicates of the weights in other formats


@cache
def resolve_model_path(model: str, revision: str | None = None, *, weights: bool = True) -> Path:
    """Return the local folder or .gguf file of `model`, downloading it from the hub if needed.

    Without `weights` only the small files are downloaded, which is enough to refuse a model.
    """
    path = Path(model).expanduser()
    try:
        is_folder, is_file = path.is_dir(), path.is_file()
    except OSError as error:
        raise ModelLoadError(f"{model:.200} cannot be read: {error.strerror}.") from error
    if is_folder or (is_file and path.suffix == ".gguf"):
        return path
    if is_file:
        raise ModelLoadError(f"{model} is a {path.suffix or 'plain'} file; name a .gguf file or a model folder.")
    if model.startswith(("/", "./", "../", "~")) or path.suffix == ".gguf" or model.count("/") > 1:
        raise ModelLoadError(f"{model} does not exist; name a model folder, a .gguf file or a Hugging Face id.")
    return _download(model, revision, _PATTERNS if weights else _PATTERNS[1:])


def _download(model: str, revision: str | None, patterns: Sequence[str]) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(
                model, revision=revision, allow_patterns=list(patterns), ignore_patterns=list(_DUPLICATES)
            )
        )
    except (OSError, ValueError) as error:  # base classes of the hub's errors
        reason = " ".join(str(error).split()).split(". ")[0]
        raise ModelLoadError(
            f"{model!r} is not a local path and could not be fetched from the Hugging Face hub ({reason:.300}); check "
            "the name and the network, or name a local folder or .gguf file."
        ) from None
