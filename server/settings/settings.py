"""Collects all settings of `quire serve` from their sources.

The first source that names a setting wins: flag, then variable, then the file given by --config, then the default. An empty
variable counts as absent, but in the Security group it is refused, because it would leave the daemon open. Settings are read
once, before anything is loaded, and never change. server/settings/flags.py has the command line, and
engine/settings/foreign.py the flags and values of other servers.
"""

from __future__ import annotations

import glob
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, create_model

from engine.core.errors import ConfigError
from engine.settings.engine_config import EngineConfig
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
from engine.settings.setting import Declared, check_conflicts, declared, expand, features
from engine.system.similar import closest
from server.settings.app_config import AppConfig
from server.settings.conflicts import CONFLICTS
from server.settings.files import read_yaml
from server.settings.serve_config import ServeConfig
from server.settings.values import reveal, type_of

ENV_PREFIX = "QUIRE_"
DECLARED = declared(ServeConfig, EngineConfig, AppConfig)


def make_model(settings: Iterable[Declared]) -> type[BaseModel]:
    """Return the pydantic model that validates these settings, by name."""
    columns: dict[str, Any] = {
        each.name: (type_of(each), Field(each.default, description=each.setting.help)) for each in settings
    }
    config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())
    return create_model("SettingsModel", __config__=config, **columns)


_Model: Any = make_model(DECLARED)


class Settings(_Model):  # type: ignore[misc]  # its fields are those of DECLARED
    """All settings, as attributes by their names. `origins` and `notices` are filled by `load_settings`."""

    _origins: dict[str, str] = PrivateAttr(default_factory=dict)
    _notices: list[str] = PrivateAttr(default_factory=list)
    _remarks: list[str] = PrivateAttr(default_factory=list)

    @property
    def origins(self) -> dict[str, str]:
        """Return the variable or file that set each setting; "" for the command line."""
        return self._origins

    @property
    def notices(self) -> list[str]:
        """Return a sentence for each old spelling that was used."""
        return self._notices

    @property
    def remarks(self) -> list[str]:
        """Return the flags of other servers that have no effect here, with the reasons."""
        return self._remarks

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
    notices: list[str]
    remarks: list[str]
    faults: list[str]  # a sentence for each flag or value that is refused


def read_sources(
    settings: Iterable[Declared], flags: Mapping[str, Any], environ: Mapping[str, str], foreign: Iterable[Given] = ()
) -> Sources:
    """Combine the sources of settings; `foreign` are the command line's flags of other servers.

    Raises ConfigError for a file or a variable that cannot be read; what is refused is in `faults`.
    """
    settings = tuple(settings)
    variables = _read_variables(settings, environ)
    given = {name: value for name, (_, value) in variables.items()}
    translated = translate(foreign)
    flags = check_same(translated, flags)
    found = Sources({}, {}, [], translated.remarks, translated.faults)
    config = {**given, **flags}.get("config")
    file: dict[str, Any] = {}
    if config:
        file, in_file = split_file(read_config_file(Path(config)), names_of(settings))
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
            expanded, notices = expand(settings, {name: value})
            found.values.update(expanded)
            found.origins.update(dict.fromkeys(expanded, origins[name]))
            found.notices.extend(notices)
    return found


def names_of(settings: Iterable[Declared]) -> list[str]:
    """Return the names that users write: JSON settings instead of their keys."""
    settings = tuple(settings)
    return [each.name for each in settings if not each.setting.feature] + list(features(settings))


def _is_protective(each: Declared) -> bool:
    return each.setting.group == "Security"


def _read_variables(settings: tuple[Declared, ...], environ: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Return the variables of Quire that are set, and their values, by setting."""
    protective = {each.name for each in settings if _is_protective(each)}
    known = {each.name for each in settings} | set(names_of(settings))
    found: dict[str, tuple[str, str]] = {}
    for variable, value in environ.items():
        if not variable.upper().startswith(ENV_PREFIX):
            continue
        name = variable.upper().removeprefix(ENV_PREFIX).lower()
        if name not in known:
            hint = suggestion(variable.upper(), [ENV_PREFIX + each.upper() for each in names_of(settings)])
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
    content = read_yaml("--config", path)
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"--config is {str(path)!r}, which holds no settings; write one 'name: value' a line.")
    protective = {each.name for each in DECLARED if _is_protective(each)}
    values: dict[str, Any] = {}
    for key, value in content.items():
        name = str(key).replace("-", "_")
        if name in values:
            raise ConfigError(f"{path} sets {key!r} twice; keep one of the two spellings.")
        if value is None and name in protective:
            raise ConfigError(
                f"{path} sets {key!r} to nothing, but a setting that protects needs a value; give one, or remove it."
            )
        values[name] = value
    return {name: value for name, value in values.items() if value is not None}
