"""Declares a setting as a dataclass field: its default, unit, bounds and help.

EngineConfig (engine/settings/engine_config.py) and the server's classes (server/settings/) consist of such fields. Flags, variables, YAML
keys, --help and docs/reference/ are made from them, and `check` holds a configuration to its bounds and conflicts however
it was made. Standard library only. Any thread.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from itertools import chain
from math import isfinite
from numbers import Integral, Real
from operator import ge, gt, le, lt
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, NamedTuple, Union, get_args, get_origin, get_type_hints

from engine.core.errors import ConfigError
from engine.system.similar import closest

_METADATA = "setting"
_COUNT = re.compile(r"(\d{1,18}(?:\.\d{1,18})?)([kmgtKMGT])")
_SIZE = re.compile(r"\s*(\d{0,18}\.?\d{1,18})\s*(?:([kmgtpe]i?)?b)?\s*", re.IGNORECASE)
_MOST = 2**63 - 1  # that libraries count
A_SIZE = "a size such as 2GiB, 512MB or 1048576"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One setting as its field declares it, apart from the name, type and default."""

    group: str  # heading of --help
    unit: str  # "MS", "GIB", ...; "SIZE" also takes 2GiB, "JSON" an object
    help: str
    name: str = ""  # on the command line, where it differs from the field's
    unset: str = ""  # meaning of a default of None or of no items
    choices: tuple[str, ...] = ()
    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None
    is_auto: bool = False  # "auto" stands for None
    is_secret: bool = False
    short: str = ""  # other flags for it, with spaces between
    is_essential: bool = False  # shown by --help; --help=all shows the others, too
    feature: str = ""  # the JSON setting that this is a key of ...
    key: str = ""  # ... and the key


class Declared(NamedTuple):
    """A setting with what its field says."""

    name: str  # as flags, variables and YAML keys spell it
    attribute: str  # of the dataclass
    type: Any
    default: Any
    setting: Setting

    @property
    def spelling(self) -> str:
        """Return the setting as a sentence names it."""
        feature = self.setting.feature
        return f"{to_flag(feature)}: {self.setting.key}" if feature else to_flag(self.name)


class Conflict(NamedTuple):
    """One row of a table: a condition on a configuration that is refused, and the sentence to refuse it with."""

    applies: Callable[[Any], object]
    sentence: str  # `{c.name}` is a value of the configuration


def section(group: str) -> Callable[..., Any]:
    """Return a function that declares settings under one heading of --help: default, unit, help, further `Setting` fields."""

    def declare(default: Any, unit: str, text: str, **more: Any) -> Any:
        setting = Setting(group=group, unit=unit, help=text, **more)
        return field(default=default, metadata={_METADATA: setting}, repr=not setting.is_secret)

    return declare


def feature(name: str, group: str) -> Callable[..., Any]:
    """Return a function that declares keys of the JSON setting `name`: key, default, unit, help, further `Setting` fields."""
    declare = section(group)

    def declare_key(key: str, default: Any, unit: str, text: str, **more: Any) -> Any:
        return declare(default, unit, text, feature=name, key=key, **more)

    return declare_key


def declared(*classes: type) -> tuple[Declared, ...]:
    """Return the settings that dataclasses declare, in order."""
    return tuple(chain.from_iterable(map(_declared, classes)))


@cache
def _declared(cls: type) -> list[Declared]:
    found, hints = [], get_type_hints(cls, include_extras=True)
    for each in fields(cls):
        setting = each.metadata.get(_METADATA)
        if setting is not None:
            name = setting.name or each.name
            found.append(Declared(name, each.name, hints[each.name], each.default, setting))
    return found


def to_flag(name: str) -> str:
    """Return a setting's name as it is typed on the command line."""
    return "--" + name.replace("_", "-")


def fault(each: Declared, value: Any) -> str:
    """Return what a value must be instead, or "" for one within the setting's bounds."""
    setting = each.setting
    if value is None or value == ():
        return ""
    if value == "" and each.default != "":
        return "give a value, or leave the setting out"
    if setting.choices:
        return "" if value in setting.choices else f"choose one of {', '.join(setting.choices)}"
    if not setting.is_secret and (wanted := wrong_kind(each.type, value)):  # a secret may be one of pydantic's
        return f"it must be {A_SIZE}" if setting.unit == "SIZE" else wanted
    for bound, is_kept, words in (
        (setting.at_least, ge, "at least"),
        (setting.above, gt, "more than"),
        (setting.at_most, le, "at most"),
        (setting.below, lt, "less than"),
    ):
        if bound is not None and not is_kept(value, bound):
            return f"it must be {words} {describe(bound)}"
    if isinstance(value, float) and not isfinite(value):
        return "it must be a finite number"
    return f"it must be at most {_MOST}" if isinstance(value, int | float) and value > _MOST else ""


def read_number(unit: str, text: str) -> int | str:
    """Return the whole number that a text is in a setting of a unit: 64, 32k tokens, 2GiB of memory; or the text."""
    scale = "kmgtpe"
    if unit == "SIZE" and (found := _SIZE.fullmatch(text)):
        power = (found[2] or "").lower()
        return int(float(found[1]) * (1024 if "i" in power else 1000) ** (scale.find(power[0]) + 1 if power else 0))
    if unit in ("SIZE", "TOKENS", "N") and (found := _COUNT.fullmatch(text)):  # as vLLM takes it: 32K is 32,768
        return int(float(found[1]) * (1000 if found[2].islower() else 1024) ** (scale.index(found[2].lower()) + 1))
    return int(text) if unit in ("TOKENS", "N") and text.isdecimal() and len(text) < 20 else text


def wrong_kind(annotation: Any, value: object) -> str:
    """Return what a value must be, or "" for one of the annotated types, or if one of these is not in _KEPT."""
    members = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    kinds = [get_origin(each) or each for each in members if each is not NoneType]
    if any(kind not in _KEPT or _is_kept(kind, value) for kind in kinds):
        return ""
    return f"it must be {' or '.join(dict.fromkeys(_KINDS[kind.__name__] for kind in kinds))}"


def _is_kept(kind: type, value: object) -> bool:
    if kind is Sequence and isinstance(value, str | bytes | Mapping):
        return False
    return isinstance(value, _KEPT[kind]) and isinstance(value, bool) == (kind is bool)


def describe(value: Any) -> str:
    """Return a value as a sentence shows it."""
    return f"{value:g}" if isinstance(value, float) else repr(value)


def check(config: object, conflicts: Sequence[Conflict]) -> None:
    """Raise ConfigError for a configuration with a value out of bounds, or with a conflict."""
    cls: type = type(config)
    for each in declared(cls):
        value = getattr(config, each.attribute)
        wanted = fault(each, value)
        if wanted:
            raise ConfigError(f"{each.spelling} is {describe(value)}; {wanted}.")
    check_conflicts(config, conflicts)


def check_conflicts(config: Any, conflicts: Iterable[Conflict]) -> None:
    """Raise ConfigError for the first row of the table that applies."""
    for conflict in conflicts:
        if conflict.applies(config):
            raise ConfigError(conflict.sentence.format(c=config))


def read_object(flag: str, given: object) -> Mapping[str, Any]:
    """Return a JSON setting's keys and values, from JSON or what was read from it; paths as texts. Raises ConfigError."""
    try:
        values = json.loads(given) if isinstance(given, str) else given
    except ValueError as error:
        raise ConfigError(f"{flag} is {given!r}, which is not JSON: {error}.") from None
    except RecursionError:
        raise ConfigError(f"{flag} has JSON that is nested too deeply.") from None
    if not isinstance(values, Mapping):
        raise ConfigError(f"{flag} is {given!r}; it must be a JSON object.")
    return {str(name): str(value) if isinstance(value, Path) else value for name, value in values.items()}


# What passes for each type: a number of NumPy is one, a path is a text, and what can be iterated is a list.
_KEPT: Mapping[type, Any] = {
    bool: bool,
    int: Integral,
    float: Real,
    str: (str, Path),
    Mapping: Mapping,
    Sequence: Iterable,
}
_KINDS = {
    "bool": "true or false",
    "int": "a whole number",
    "float": "a number",
    "str": "a string",
    "Mapping": "a JSON object",
    "Sequence": "a list",
}


def key(default: Any, **bounds: Any) -> Any:
    """Declare a key of a JSON setting that has a class of its own: default and bounds."""
    return section("")(default, "", "", **bounds)


def check_key(flag: str, each: Declared, value: object) -> None:
    """Raise ConfigError for a key's value of another type, or out of bounds."""
    if wanted := fault(each, value):
        raise ConfigError(f"{flag}: {each.name} is {describe(value)}; {wanted}.")


def unknown_key(flag: str, key: object, known: Iterable[str]) -> ConfigError:
    """Return the error for a key that a JSON setting does not have."""
    known = list(known)
    close = closest(str(key), known)
    hint = f"did you mean {close!r}?" if close else f"the keys are {', '.join(known)}."
    return ConfigError(f"{flag} has no key {key!r}; {hint}")


def features(settings: Iterable[Declared]) -> dict[str, dict[str, Declared]]:
    """Return the JSON settings by name, each with its keys."""
    found: dict[str, dict[str, Declared]] = {}
    for each in settings:
        if each.setting.feature:
            found.setdefault(each.setting.feature, {})[each.setting.key] = each
    return found


def names_of(settings: Sequence[Declared]) -> list[str]:
    """Return the names that users write: JSON settings instead of their keys."""
    return [each.name for each in settings if not each.setting.feature] + list(features(settings))


def expand(settings: Iterable[Declared], name: str, value: Any) -> dict[str, Any]:
    """Return a setting and its value, or those that a JSON setting consists of. Raises ConfigError for a malformed one."""
    keys = features(settings).get(name)
    if keys is None:
        return {name: value}
    given = read_object(to_flag(name), value)
    for key in given:
        if key not in keys:
            raise unknown_key(to_flag(name), key, keys)
    return {keys[key].name: item for key, item in given.items()}
