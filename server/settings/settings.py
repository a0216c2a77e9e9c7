"""Collects all settings of `quire serve` from their sources.

The first source that names a setting wins: flag, then variable, then the file given by --config, then the default. An empty
variable counts as absent, but in the Security group it is refused, because it would leave the daemon open. Settings are read
once, before anything is loaded, and never change. server/settings/flags.py has the command line, and
engine/settings/foreign.py the flags and values of other servers.

pydantic types turn text of flags, variables and YAML into values: of the settings that are given, since a model of all takes
25 ms of a start.
"""

from __future__ import annotations

import glob
import json
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, NamedTuple, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, SecretStr, create_model
from pydantic_core import PydanticCustomError

from engine.core.errors import ConfigError
from engine.settings.engine_config import EngineConfig, LoraModule
from engine.settings.foreign import (
    IN_CHECKPOINT,
    OF_CHECKPOINT,
    Given,
    check_same,
    keys_of,
    known_value,
    split_file,
    translate,
)
from engine.settings.setting import Declared, check_conflicts, declared, expand, names_of, read_number
from engine.system.regular_file import expanded
from engine.system.similar import closest
from server.settings.app_config import AppConfig
from server.settings.conflicts import CONFLICTS
from server.settings.serve_config import ServeConfig


def type_of(each: Declared) -> Any:
    """Return the type to validate a setting's value as."""
    setting = each.setting
    if setting.is_secret and type(None) in get_args(each.type):
        return SecretStr | None
    if setting.is_secret:
        return Annotated[tuple[SecretStr, ...], BeforeValidator(_split_keys)]
    if setting.unit in ("TOKENS", "N", "PORT", "SEED", "SIZE") and int in (each.type, *get_args(each.type)):
        count: Any = Annotated[each.type, BeforeValidator(partial(_number, setting.unit))]
        return Annotated[count, BeforeValidator(_none_if_auto)] if setting.is_auto else count
    if setting.is_auto:
        return Annotated[each.type, BeforeValidator(_none_if_auto)]
    if setting.unit == "JSON" and str not in get_args(each.type):
        return Annotated[each.type, BeforeValidator(_read_json)]
    if each.type == tuple[LoraModule, ...]:
        return Annotated[each.type, BeforeValidator(_read_modules)]
    if each.type in (tuple[str, ...], tuple[Any, ...]):
        return Annotated[each.type, BeforeValidator(_split), BeforeValidator(_given)]
    text = Annotated[each.type, BeforeValidator(_given)] if each.default != "" else each.type
    return (
        Annotated[text, AfterValidator(lambda path: path and expanded(path))] if Path in get_args(each.type) else text
    )


def _given(value: object) -> object:
    """Return a value that is not empty. An empty path would be the current folder."""
    if value == "" or (isinstance(value, list) and "" in value):
        raise PydanticCustomError("empty", "give a value, or leave the setting out")
    return value


def reveal(value: Any) -> Any:
    """Return a validated value as the configurations hold it: secrets as plain text."""
    if isinstance(value, SecretStr):
        return value.get_secret_value()
    if isinstance(value, tuple):
        return tuple(item.get_secret_value() if isinstance(item, SecretStr) else item for item in value)
    return value


def _split(value: object) -> object:
    """Return the items of a list, which variables and YAML strings separate with commas."""
    return [item.strip() for item in value.split(",") if item.strip()] if isinstance(value, str) else value


def _split_keys(value: object) -> object:
    """Return the items of a list of keys. Refuses an empty key: dropped, it would open the daemon to all."""
    keys = [item.strip() for item in value.split(",")] if isinstance(value, str) else value
    if isinstance(keys, list):  # llama-server's --api-key separates keys with commas, too
        keys = [key for each in keys for key in (each.split(",") if isinstance(each, str) else [each])]
    if isinstance(keys, list) and not (
        keys and all(not isinstance(key, str) or (key and key == key.strip() and key.isprintable()) for key in keys)
    ):
        sentence = (
            "a key is empty, or begins or ends with a space, or has a character that no client sends; give every key, or "
            "leave the setting out"
        )
        raise PydanticCustomError("empty_key", sentence)
    return keys


def _number(unit: str, value: object) -> object:
    """Return what may be a number of a unit; YAML's true is none."""
    if isinstance(value, bool):
        raise PydanticCustomError("int_type", "it must be a whole number")
    return read_number(unit, value) if isinstance(value, str) else value


def _read_json(value: object) -> object:
    """Return the object of a JSON setting."""
    try:
        found = json.loads(value) if isinstance(value, str) else value
        json.dumps(found, allow_nan=False)  # YAML has dates, too
    except (TypeError, ValueError, RecursionError) as error:
        raise PydanticCustomError("not_json", "it is not JSON, or nested too deeply") from error
    if found is not None and not isinstance(found, dict):
        raise PydanticCustomError("not_object", "it must be a JSON object")
    return found


def _none_if_auto(value: object) -> object:
    return None if value == "auto" else value


def _read_modules(value: object) -> tuple[LoraModule, ...]:
    """Return adapters given as name=path, or as objects of `name` and `path` like vLLM's."""
    try:
        if isinstance(value, str):
            is_json = value.lstrip().startswith(("[", "{"))
            value = json.loads(value) if is_json else [item.strip() for item in value.split(",") if item.strip()]
        return tuple(_module(item) for item in (value if isinstance(value, list | tuple) else [value]))
    except (ValueError, RecursionError) as error:
        sentence = 'write each adapter as name=path, or as {"name": ..., "path": ...}'
        raise PydanticCustomError("lora_modules", sentence) from error


def _module(item: object) -> LoraModule:
    if isinstance(item, LoraModule):
        return item
    if isinstance(item, str) and item.lstrip().startswith("{"):
        item = json.loads(item)
    elif isinstance(item, str):
        name, _, path = item.partition("=")
        item = {"name": name.strip(), "path": path.strip()}
    if isinstance(item, dict):  # vLLM's third key changes a card's parent, which is the served model here
        item = {key: value for key, value in item.items() if key != "base_model_name"}
    if not isinstance(item, dict) or item.keys() != {"name", "path"}:
        raise ValueError(item)
    if not all(isinstance(text, str) and text for text in item.values()):
        raise ValueError(item)
    return LoraModule(item["name"], str(expanded(item["path"])))


ENV_PREFIX = "QUIRE_"
DECLARED = declared(ServeConfig, EngineConfig, AppConfig)


def make_model(settings: Iterable[Declared]) -> type[BaseModel]:
    """Return the pydantic model that validates these settings, by name."""
    columns: dict[str, Any] = {
        each.name: (type_of(each), Field(each.default, description=each.setting.help)) for each in settings
    }
    config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())
    return create_model("SettingsModel", __config__=config, **columns)


class Settings(SimpleNamespace):
    """All settings, as attributes by their names. `origins` and `remarks` are filled by `load_settings`."""

    def __init__(self, **given: Any) -> None:
        """Raises pydantic's ValidationError."""
        values = make_model(each for each in DECLARED if each.name in given)(**given)
        super().__init__(
            **{each.name: each.default for each in DECLARED} | {name: getattr(values, name) for name in given}
        )
        self.given = frozenset(given)
        self.origins: dict[str, str] = {}  # of what was given; "" is the command line
        self.remarks: list[str] = []  # on what has no effect, and why
        self.each: list[Settings] = []  # of several models, with what they share

    def engine_config(self, model: str) -> EngineConfig:
        """Return the engine's settings, with the path of the model. Raises ConfigError."""
        return EngineConfig(model=model, **self._part(EngineConfig))

    def serve_config(self) -> ServeConfig:
        """Return the settings of the process."""
        return ServeConfig(**self._part(ServeConfig))

    def app_config(self, model: str, served_name: str) -> AppConfig:
        """Return the HTTP application's settings; `served_name` is for a user who gave no name."""
        names = tuple(name for name in self.served_model_name if "*" not in name)
        aliases = tuple(name for name in self.served_model_name if "*" in name)
        if not names and self.model not in (None, served_name):
            aliases += (glob.escape(self.model),)  # vLLM's name of a local model is its path as it was given
        return AppConfig(
            model=model,
            served_model_names=names or (served_name,),
            model_aliases=aliases,
            allow_runtime_lora_updating=self.allow_runtime_lora_updating,
            **self._part(AppConfig),
        )

    def check_together(self) -> None:
        """Raise ConfigError for settings that do not go with each other."""
        check_conflicts(self, CONFLICTS)

    def _part(self, cls: type) -> dict[str, Any]:
        return {each.attribute: reveal(getattr(self, each.name)) for each in declared(cls)}


class Sources(NamedTuple):
    """The values that flags, variables and the file give, each with its origin."""

    values: dict[str, Any]
    origins: dict[str, str]  # "" for the command line
    remarks: list[str]
    faults: list[str]  # a sentence for each flag or value that is refused


def read_sources(
    settings: Iterable[Declared], flags: Mapping[str, Any], environ: Mapping[str, str], foreign: Iterable[Given] = ()
) -> Sources:
    """Combine the sources of settings; `foreign` are the command line's flags of other servers.

    Raises ConfigError for a file or a variable that cannot be read; what is refused is in `faults`.
    """
    settings = tuple(settings)
    names = names_of(settings)
    variables = _read_variables(settings, environ)
    given = {name: value for name, (_, value) in variables.items()}
    translated = translate(foreign)
    flags = check_same(translated, flags)
    found = Sources({}, {}, translated.remarks, translated.faults)
    config = {**given, **flags}.get("config")
    file: dict[str, Any] = {}
    if config:
        file, in_file = split_file(read_config_file(Path(config)), names)
        translated = translate(in_file)
        file = check_same(translated, file)
        found.remarks.extend(translated.remarks)
        found.faults.extend(translated.faults)
    other = keys_of(environ)
    keys = {} if other is None else {"api_key": other[1]}
    for values, origins in (
        (keys, {} if other is None else {"api_key": other[0]}),
        (file, dict.fromkeys(file, str(config))),
        (given, {name: variable for name, (variable, _) in variables.items()}),
        (flags, dict.fromkeys(flags, "")),
    ):
        for name, value in values.items():
            if name == "quantization" and value in IN_CHECKPOINT:
                found.remarks.append(f"--quantization {value} ({OF_CHECKPOINT})")
            try:
                value = known_value(name, value)
            except ConfigError as error:
                found.faults.append(str(error))
                continue
            if name not in names:
                key = name.replace("_", "-")
                hint = suggestion(key, [known.replace("_", "-") for known in names])
                raise ConfigError(
                    f"{origins[name]} sets {key!r}, which is not a setting of Quire{hint or '; remove it.'}"
                )
            expanded = expand(settings, name, value)
            found.values.update(expanded)
            found.origins.update(dict.fromkeys(expanded, origins[name]))
    return found


_OWN_GROUPS = ("Model", "Device and memory", "Scheduling", "LoRA adapters")  # of what a model may have apart


def read_entry(entry: object, index: int) -> dict[str, Any]:
    """Return the settings of an item of `models`. Raises ConfigError."""
    if isinstance(entry, str):
        return {"model": entry}
    place = f"--models, item {index},"
    if not isinstance(entry, dict) or not isinstance(entry.get("model"), str):
        raise ConfigError(f"{place} is {entry!r}; it must be a model, or a mapping with a key model.")
    own = names_of(
        [each for each in DECLARED if each.setting.group in _OWN_GROUPS and not each.name.startswith("models")]
    )
    found: dict[str, Any] = {}
    for key, value in entry.items():
        name = str(key).replace("-", "_")
        if name not in own:
            hint = suggestion(str(key), [each.replace("_", "-") for each in own])
            raise ConfigError(f"{place} sets {key!r}, which is not a setting of one model{hint or '; remove it.'}")
        if name in found:
            raise ConfigError(f"{place} sets {key!r} twice; keep one of the two spellings.")
        found |= expand(DECLARED, name, known_value(name, value))
    if "keep" in found:
        if not isinstance(found["keep"], bool):
            raise ConfigError(f"{place} has keep: {found['keep']!r}; it must be true or false.")
        names = found.get("served_model_name") or entry["model"]  # of which another item may have the model, too
        found["keep"] = (names[:1] if isinstance(names, list) else [names]) * found["keep"]
    return found


def _is_protective(each: Declared) -> bool:
    return each.setting.group == "Security"


def _read_variables(settings: tuple[Declared, ...], environ: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Return the variables of Quire that are set, and their values, by setting."""
    protective = {each.name for each in settings if _is_protective(each)}
    known = names_of(settings)
    found: dict[str, tuple[str, str]] = {}
    for variable, value in environ.items():
        if not variable.upper().startswith(ENV_PREFIX):
            continue
        name = variable.upper().removeprefix(ENV_PREFIX).lower()
        if name not in known:
            hint = suggestion(variable.upper(), [ENV_PREFIX + each.upper() for each in known])
            raise ConfigError(f"The variable {variable} is not a setting of Quire{hint or '; unset it.'}")
        if name in protective and not value.strip():
            raise ConfigError(
                f"The variable {variable} is empty, but a setting that protects needs a value; set it, or unset it."
            )
        if value:
            found[name] = (variable, value)
    return found


def suggestion(word: str, known: Iterable[str]) -> str:
    """Return a hint at the known word that a misspelt one was meant to be, or ""."""
    match = closest(word, known)
    return f"; did you mean {match}?" if match else ""


def read_config_file(path: Path) -> dict[str, Any]:
    """Return the settings in a YAML file by name, keys in either spelling and nulls left out. Raises ConfigError."""
    from server.settings.yaml_files import read_yaml

    content = read_yaml("--config", path)
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"--config is {str(path)!r}, which holds no settings; write one 'name: value' a line.")
    protective = {each.name for each in DECLARED if _is_protective(each)}
    if isinstance(content.get("models"), dict):
        from server.settings.model_lists import of_llama_swap

        content = of_llama_swap(content)
    values: dict[str, Any] = {}
    for key, value in content.items():
        name = str(key).replace("-", "_")
        if name == "config":
            raise ConfigError(f"{path} sets 'config', but one file is read; put the other's settings into it.")
        if name in values:
            raise ConfigError(f"{path} sets {key!r} twice; keep one of the two spellings.")
        if value is None and name in protective:
            raise ConfigError(
                f"{path} sets {key!r} to nothing, but a setting that protects needs a value; give one, or remove it."
            )
        values[name] = value
    return {name: value for name, value in values.items() if value is not None}
