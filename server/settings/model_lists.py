"""Reads lists of models that other servers have: a folder or a preset of llama-server, and llama-swap's configuration.

Each model becomes a command line, whose flags server/settings/flags.py reads as those of a daemon. What means something else
here is refused.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Collection, Iterable, Mapping
from configparser import ConfigParser, ParsingError
from configparser import Error as IniError
from numbers import Real
from pathlib import Path
from typing import Any, NamedTuple

from engine.core.errors import ConfigError
from engine.settings.foreign import meaning
from engine.system.regular_file import read_setting, reason

_HEAD, _ALL = "version", "*"  # the sections of what stands before the first one, and of what is for all
AT_ONCE = 4  # models that llama-server has loaded at most by default
_MAX_COMMAND = 65_536  # characters, with its macros
_LATER_PART = re.compile(r"-0*[2-9]\d*-of-\d+|-0*1\d+-of-\d+")
_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+(:[\w.-]+)?")
_MACRO = re.compile(r"\$\{([\w.-]+)\}")
_KINDS: Mapping[type, str] = {Mapping: "a mapping", Real: "a number", list: "a list", str: "a text"}
_ABOVE: Mapping[str, type] = {
    "models": Mapping,
    "macros": Mapping,
    "globalTTL": Real,
    "apiKeys": list,
    "hooks": Mapping,
}
_OF_SWAP: Mapping[str, type] = {"cmd": str, "aliases": list, "ttl": Real, "macros": Mapping}  # of a model
_IDLE = {"name", "description", "proxy", "checkEndpoint", "cmdStop", "useModelName", "unlisted", "metadata"}
_IDLE |= {"sendLoadingState", "timeouts"}
_IDLE_ABOVE = {"healthCheckTimeout", "logLevel", "logToStdout", "logTimeFormat", "startPort", "metricsMaxInMemory"}
_IDLE_ABOVE |= {"captureBuffer", "includeAliasesInList", "sendLoadingState"}


class ListedModel(NamedTuple):
    """A model of a list: its name, and what would serve it."""

    name: str
    words: list[str]  # behind `quire serve`
    settings: dict[str, Any]


def in_folder(folder: Path) -> list[ListedModel]:
    """Return the models of --models-dir: its GGUF files, and its folders with such files or safetensors."""
    try:
        paths = sorted(folder.iterdir())
    except OSError as error:
        raise ConfigError(f"--models-dir is {str(folder)!r:.200}, which cannot be read: {reason(error)}.") from error
    found = []
    for path in paths:
        if path.is_dir() and not os.access(path, os.R_OK | os.X_OK):
            continue  # such as lost+found
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
    ini = ConfigParser(
        default_section="", interpolation=None, delimiters=("=",), inline_comment_prefixes=(";", "#"), strict=True
    )
    ini.optionxform = str  # type: ignore[assignment, method-assign]  # -C is not -c
    place = f"--models-preset is {str(path)!r}, which"
    try:
        ini.read_string(f"[{_HEAD}]\n" + read_setting("--models-preset", path, ConfigError))
    except IniError as error:  # whose words have lines of the file
        line = error.errors[0][0] if isinstance(error, ParsingError) else getattr(error, "lineno", 1)
        raise ConfigError(
            f"{place} is no INI file: line {line - 1} is neither a section nor KEY = VALUE, or stands twice."
        ) from error
    if stray := [key for key in ini[_HEAD] if key != "version"]:
        raise ConfigError(f"{place} has {stray[0]} before its first section; put it into one, or into [*] for all.")
    common = ini[_ALL] if ini.has_section(_ALL) else {}
    models = [_of_section(name, common, ini[name]) for name in ini.sections() if name not in (_HEAD, _ALL)]
    if not models:
        raise ConfigError(f"{place} has no section of a model.")
    return models


def _of_section(name: str, common: Mapping[str, str], own: Mapping[str, str]) -> ListedModel:
    """Return the model of a section, whose keys win over those for all that mean the same."""
    said = {meaning(_flag(key)) for key in own}
    keys = {key: value for key, value in common.items() if meaning(_flag(key)) not in said} | dict(own)
    words = (
        [] if {"model", "m", "hf-repo", "hf", "hfr"} & keys.keys() or not _REPOSITORY.fullmatch(name) else ["-hf", name]
    )
    for key, value in keys.items():
        if key in ("load-on-startup", "stop-timeout"):
            continue  # when a model is loaded changes no answer
        flag, is_on, is_off = _flag(key), value in ("true", "on", "enabled"), value in ("false", "off", "disabled")
        words.append(flag if is_on else f"--no-{flag.lstrip('-')}" if is_off else f"{flag}={value}")
    return ListedModel(name, words, {})


def _flag(key: str) -> str:
    """Return the flag that a key of a preset stands for."""
    if key.startswith("LLAMA_ARG_"):
        key = key.removeprefix("LLAMA_ARG_").replace("_", "-").lower()
    return key if key.startswith("-") else f"-{key}" if len(key) < 4 and "-" not in key else f"--{key}"


def of_llama_swap(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of llama-swap's configuration, whose `models` have names. Raises ConfigError."""
    place, models = "llama-swap's configuration", content["models"]
    _check(place, content, _ABOVE, _IDLE_ABOVE)
    if not models:
        raise ConfigError(f"{place} has no models.")
    hooks, macros = content.get("hooks") or {}, content.get("macros") or {}
    _check("llama-swap's hooks", hooks, {"on_startup": Mapping})
    _check("llama-swap's on_startup", on_startup := hooks.get("on_startup") or {}, {"preload": list})
    first = on_startup.get("preload") or []
    names = sorted(models, key=lambda name: name not in first)
    listed = [_of_swap(name, models[name], macros, content.get("globalTTL") or 0) for name in names]
    keys = [_filled(place, key, macros) if isinstance(key, str) else key for key in content.get("apiKeys") or ()]
    return {"models": listed, "models_max": 1, **({"api_key": keys} if keys else {})}


def _of_swap(name: str, model: Any, macros: Mapping[str, Any], ttl: float) -> ListedModel:
    place = f"llama-swap's model {name!r}"
    if not isinstance(model, Mapping) or not model.get("cmd"):
        raise ConfigError(f"{place} has no cmd; write the command of its server.")
    _check(place, model, _OF_SWAP, _IDLE)
    known = {**macros, **(model.get("macros") or {}), "MODEL_ID": name, "PORT": "0"}
    lines = [line for line in model["cmd"].splitlines(keepends=True) if not line.lstrip().startswith("#")]
    text = _filled(place, "".join(lines).replace("\\\n", " "), known)
    try:
        words = shlex.split(text, comments=True)
    except ValueError as error:
        raise ConfigError(f"{place} has a cmd that is no command: {error}.") from error
    program = Path(words[0]).name if words else ""
    if program in ("vllm", "quire") and words[1:2] == ["serve"]:
        words = words[1:]
    elif program != "llama-server":
        raise ConfigError(
            f"{place} is run by {program!r}; only llama-server, `vllm serve` and `quire serve` are understood."
        )
    own = model.get("ttl")
    seconds = ttl if own is None or own < 0 else own
    settings = {"idle_unload": seconds} if seconds > 0 else {}
    aliases = [alias.get("id") if isinstance(alias, Mapping) else alias for alias in model.get("aliases") or ()]
    return ListedModel(name, words[1:], {"served_model_name": [name, *aliases], **settings})


def _filled(place: str, text: str, macros: Mapping[str, Any]) -> str:
    """Return a text with the values of its macros and variables. Raises ConfigError."""

    def value(found: re.Match[str]) -> str:
        word = found[1].removeprefix("env.")
        if (word not in macros) if word == found[1] else (word not in os.environ):
            raise ConfigError(f"{place} names {found[0]}, which is not set.")
        return str(macros[word]) if word == found[1] else os.environ[word]

    rest = len(macros) + 1  # a macro may name another, and the last of a chain a variable
    while _MACRO.search(text):
        if not rest or len(text) > _MAX_COMMAND:
            raise ConfigError(f"{place} has macros that name each other.")
        text, rest = _MACRO.sub(value, text), rest - 1
    return text


def _check(place: str, keys: Mapping[str, Any], known: Mapping[str, type], idle: Collection[str] = ()) -> None:
    """Raise ConfigError for keys that are not known, and for values of other kinds; null leaves a key out."""
    if others := [str(key) for key in keys if key not in {*known, *idle}]:
        raise ConfigError(
            f"{place} has {', '.join(others)}, which has no meaning here; docs/guides/several-models.md says what has."
        )
    for key, kind in known.items():
        if keys.get(key) is not None and not isinstance(keys[key], kind):
            raise ConfigError(f"{place} has {key} of a wrong kind; it must be {_KINDS[kind]}.")
