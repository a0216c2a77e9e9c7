"""Chooses the files of a hub's repository that a model needs, from their names.

Standard library only; no network. engine/hub/transfer.py fetches the files.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import PurePosixPath

from engine.core.errors import ModelLoadError
from engine.files.gguf_header import part_names
from engine.files.mmproj import preference

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
LORA_CONFIG, LORA_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
SMALL = (".json", ".jinja", ".txt", ".model")  # configuration and tokenizer; read whole
_PICKLED = (".bin", ".pt", ".pth", ".ckpt")

# llama.cpp's rules: the words of GGUF files that are no language model, and the types it prefers.
_OTHER_GGUF = ("mmproj", "imatrix", "mtp-", "eagle3-", "dflash-", "dspark-")
_PREFERRED = ("Q4_K_M", "Q8_0")
_MODULE = re.compile(r"\d+_[A-Za-z]+/(?:config\.json|model\.safetensors)")
_LATER_PART = re.compile(r".+-(?!00001-)[0-9]{5}-of-[0-9]{5}\.gguf")


def split_tag(model: str) -> tuple[str, str | None]:
    """Return the repository and the tag of `org/repo:TAG`; None without a tag."""
    repo, _, tag = model.partition(":")
    return repo, tag or None


def is_folder(names: Sequence[str], tag: str | None) -> bool:
    """Return whether a model is served from safetensors, as a folder; otherwise it is a GGUF file."""
    return tag is None and (bool(_safetensors(names)) or not _gguf(names))


def small_files(names: Iterable[str]) -> list[str]:
    """Return the files of configuration and tokenizer, and those of sentence-transformers' modules."""
    return [
        name
        for name in names
        if ("/" not in name and name.endswith(SMALL) and name != INDEX) or _MODULE.fullmatch(name)
    ]


def weight_files(names: Sequence[str], shards: Sequence[str], subject: str) -> list[str]:
    """Return the files of a folder's weights; `shards` are those that the index names.

    Copies of the weights in other formats and pickles are never among them; `subject` names the repository in errors.
    Raises ModelLoadError.
    """
    found = _safetensors(names)
    if shards:
        return list(shards)
    if "model.safetensors" in found:
        return ["model.safetensors"]
    if found:
        return found
    if "adapter_config.json" in names:
        raise ModelLoadError(
            f"{subject} is an adapter; serve the model that its adapter_config.json names, and this one by --lora-modules."
        )
    pickled = [name for name in names if name.endswith(_PICKLED)]
    if pickled:
        raise ModelLoadError(
            f"{subject} holds only pickled weights ({pickled[0]}), which can run code when read; name a repository with "
            ".safetensors or .gguf files."
        )
    raise ModelLoadError(f"{subject} holds no .safetensors or .gguf file; name a repository of a language model.")


def gguf_files(names: Sequence[str], tag: str | None, subject: str) -> list[str]:
    """Return the file that a tag names, and the other parts of a split one; chosen as llama.cpp does.

    A tag is a type such as Q4_K_M, or the name of a file. Raises ModelLoadError.
    """
    models = [name for name in _gguf(names) if not _LATER_PART.fullmatch(name)]
    for wanted in (tag,) if tag else _PREFERRED:
        pattern = re.compile(re.escape(wanted) + "[.-]", re.IGNORECASE)
        found = next((name for name in models if name == wanted or pattern.search(name)), None)
        if found is not None:
            return part_names(found)
    if tag or not models:
        held = ", ".join(PurePosixPath(name).name for name in models) or "no GGUF model"
        asked = f"has no GGUF file for {tag!r}" if tag else "has no GGUF file of a language model"
        raise ModelLoadError(f"{subject} {asked}; it holds {held:.600}.")
    return part_names(models[0])


def mmproj_files(names: Iterable[str], model: str) -> list[str]:
    """Return the vision half in the folder of a GGUF file, as a list of one name or none."""
    folder = PurePosixPath(model).parent
    halves = [path for path in map(PurePosixPath, names) if "mmproj" in path.name and path.suffix == ".gguf"]
    return [str(path) for path in sorted(halves, key=lambda path: preference(path.name)) if path.parent == folder][:1]


def _gguf(names: Iterable[str]) -> list[str]:
    return [
        name
        for name in names
        if name.endswith(".gguf") and not any(word in PurePosixPath(name).name for word in _OTHER_GGUF)
    ]


def _safetensors(names: Iterable[str]) -> list[str]:
    return [
        name
        for name in names
        if "/" not in name and name.endswith(".safetensors") and not name.startswith(("consolidated", "adapter_"))
    ]
