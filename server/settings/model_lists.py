"""Reads lists of models that other servers have: a folder or a preset of llama-server, and llama-swap's configuration.

Each model becomes a command line, whose flags server/settings/flags.py reads as those of a daemon. What means something else
here is refused.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable, Mapping
from configparser import ConfigParser
from configparser import Error as IniError
from pathlib import Path
from typing import Any, NamedTuple

from engine.core.errors import ConfigError
from server.settings.files import read_setting_file

AT_ONCE = 4  # models that llama-server has loaded at most by default
_MAX_COMMAND = 65_536  # characters, with its macros
_LATER_PART = re.compile(r"-0*[2-9]\d*-of-\d+|-0*1\d+-of-\d+")
_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+(:[\w.-]+)?")
_MACRO = re.compile(r"\$\{([\w.-]+)\}")
_OF_SWAP = {"cmd", "aliases", "ttl", "macros"}  # keys of a model that mean something here
_IDLE = {"name", "description", "proxy", "checkEndpoint", "cmdStop", "useModelName", "unlisted", "metadata"}
_IDLE_ABOVE = {"healthCheckTimeout", "logLevel", "logToStdout", "logTimeFormat", "startPort", "metricsMaxInMemory"}
_IDLE_ABOVE |= {"captureBuffer", "includeAliasesInList", "sendLoadingState"}


class ListedModel(NamedTuple):
    """A model of a list: its name, and what would serve it."""

    name: str
    words: list[str]  # behind `quire serve`
    settings: dict[str, Any]


def in_folder(folder: Path) -> list[ListedModel]:
    """Return the models of --models-dir: its GGUF files, and its folders with such files or safetensors."""
    if not folder.is_dir():
        raise ConfigError(f"--models-dir is {str(folder)!r}, which is no folder.")
    found = []
    for path in sorted(folder.iterdir()):
        files = _models(path.iterdir()) if path.is_dir() else _models([path])
        if files or (path.is_dir() and (path / "config.json").exists()):
            model = files[0] if files else path
            found.append(ListedModel(path.name if path.is_dir() else path.stem, [str(model)], {}))
    return found


def _models(paths: Iterable[Path]) -> list[Path]:
    """Return the GGUF files that are models: neither vision halves nor later parts."""
    files = [path for path in sorted(paths) if path.suffix == ".gguf" and not path.name.startswith("mmproj")]
    return [path for path in files if not _LATER_PART.search(path.name)]


def in_preset(path: Path) -> list[ListedModel]:
    """Return the models of --models-preset, an INI file with a section for each, and one for all, `[*]`."""
    ini = ConfigParser(default_section="*", interpolation=None, delimiters=("=",), strict=True)
    try:
        ini.read_string("[version]\n" + read_setting_file("--models-preset", path))
    except IniError as error:
        why = error.message.partition("\n")[0]  # then come lines of the file
        raise ConfigError(f"--models-preset is {str(path)!r}, which is no INI file: {why}") from error
    return [_of_section(name, dict(ini[name])) for name in ini.sections() if name != "version"]


def _of_section(name: str, keys: dict[str, str]) -> ListedModel:
    words = (
        [] if {"model", "m", "hf-repo", "hf", "hfr"} & keys.keys() or not _REPOSITORY.fullmatch(name) else ["-hf", name]
    )
    for key, value in keys.items():
        if key in ("load-on-startup", "stop-timeout"):
            continue  # when a model is loaded changes no answer
        flag = key if key.startswith("-") else f"-{key}" if len(key) < 4 and "-" not in key else f"--{key}"
        no_flag = f"--no-{key.lstrip('-')}"
        words += [flag] if value in ("true", "on") else [no_flag] if value in ("false", "off") else [flag, value]
    return ListedModel(name, words, {})


def of_llama_swap(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of llama-swap's configuration, whose `models` have names. Raises ConfigError."""
    models, macros = content["models"], content.get("macros") or {}
    above = {"models", "macros", "globalTTL", "apiKeys", "hooks", *_IDLE_ABOVE}
    _refuse_others("llama-swap's configuration", content, above)
    first = ((content.get("hooks") or {}).get("on_startup") or {}).get("preload") or []
    names = sorted(models, key=lambda name: name not in first)
    listed = [_of_swap(name, models[name], macros, content.get("globalTTL", 0)) for name in names]
    keys = {"api_key": content["apiKeys"]} if content.get("apiKeys") else {}
    return {"models": listed, "models_max": 1, **keys}


def _of_swap(name: str, model: Any, macros: Mapping[str, Any], ttl: float) -> ListedModel:
    place = f"llama-swap's model {name!r}"
    if not isinstance(model, Mapping) or not isinstance(model.get("cmd"), str):
        raise ConfigError(f"{place} has no cmd; write the command of its server.")
    _refuse_others(place, model, _OF_SWAP | _IDLE)
    known = {**macros, **(model.get("macros") or {}), "MODEL_ID": name, "PORT": "0"}

    def value(found: re.Match[str]) -> str:
        word = found[1].removeprefix("env.")
        if (word not in known) if word == found[1] else (word not in os.environ):
            raise ConfigError(f"{place} names {found[0]}, which is not set.")
        return str(known[word]) if word == found[1] else os.environ[word]

    text = model["cmd"].replace("\\\n", " ")
    rest = len(known)  # a macro may name another, and the last of a chain names none
    while _MACRO.search(text):
        if not rest or len(text) > _MAX_COMMAND:
            raise ConfigError(f"{place} has macros that name each other.")
        text, rest = _MACRO.sub(value, text), rest - 1
    words = shlex.split(text, comments=True)
    program = Path(words[0]).name if words else ""
    if program in ("vllm", "quire") and words[1:2] == ["serve"]:
        words = words[1:]
    elif program != "llama-server":
        raise ConfigError(
            f"{place} is run by {program!r}; only llama-server, `vllm serve` and `quire serve` are understood."
        )
    seconds = model.get("ttl", ttl)
    settings = {"idle_unload": seconds} if seconds > 0 else {}
    return ListedModel(name, words[1:], {"served_model_name": [name, *(model.get("aliases") or ())], **settings})


def _refuse_others(place: str, keys: Mapping[str, Any], known: set[str]) -> None:
    """Raise ConfigError for keys that are not known."""
    if others := [str(key) for key in keys if key not in known]:
        raise ConfigError(
            f"{place} has {', '.join(others)}, which has no meaning here; docs/guides/several-models.md says what has."
        )
