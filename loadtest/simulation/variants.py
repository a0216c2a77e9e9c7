"""The schedulers that a simulation compares."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, fields
from itertools import product
from typing import Any, NamedTuple, get_type_hints

from engine.core.config import SchedulerConfig
from loadtest.errors import LoadtestError

_WINDOWS = re.compile(r"\d+(\+\d+)*")
_NOT_SIMULATED = ("stores", "num_host_blocks", "num_speculative_tokens")
_FIELDS = {field.name: field for field in fields(SchedulerConfig) if field.name not in _NOT_SIMULATED}
_TYPES = get_type_hints(SchedulerConfig)
_WORDS = {"true": True, "on": True, "false": False, "off": False, "none": None}


class Variant(NamedTuple):
    """A scheduler, named by the settings in which it differs."""

    name: str
    config: SchedulerConfig


def measured_config(measured: Mapping[str, Any]) -> SchedulerConfig:
    """Return the settings of the measured engine's scheduler. Raises LoadtestError."""
    return make_variants(measured, None, [])[0].config


def make_variants(
    measured: Mapping[str, Any], policies: Sequence[str] | None, assignments: Sequence[str]
) -> list[Variant]:
    """Return every combination of policies and of "field=value[,value...]".

    Raises LoadtestError for an unknown field or value, ConfigError for one out of bounds.
    """
    axes = {"policy": list(policies)} if policies else {}
    for assignment in assignments:
        name, equals, values = assignment.partition("=")
        name = name.strip().replace("-", "_")
        if name not in _FIELDS or not equals:
            known = ", ".join(_FIELDS)
            raise LoadtestError(f"--set is {assignment!r}; write it as FIELD=VALUE[,VALUE...], of {known}.")
        axes[name] = [_value(name, value.strip()) for value in values.split(",")]
    base = {
        name: tuple(value) if isinstance(value, list) else value for name, value in measured.items() if name in _FIELDS
    }
    missing = [name for name, field in _FIELDS.items() if name not in base and field.default is MISSING]
    for name in missing:
        if name not in axes:
            raise LoadtestError(f"the costs have no {name}; give it as --set {name}=VALUE.")
    differing = [name for name, values in axes.items() if len(values) > 1]
    variants = []
    for combination in product(*axes.values()):
        chosen = dict(zip(axes, combination, strict=True))
        names = [str(chosen[name]) if name == "policy" else f"{name} {_as_text(chosen[name])}" for name in differing]
        config = _config({**base, **chosen})
        variants.append(Variant(", ".join(names) or config.policy, config))
    return variants


def _as_text(value: Any) -> str:
    return ("+".join(map(str, value)) or "none") if isinstance(value, tuple) else str(value)


def plain_settings(config: SchedulerConfig) -> dict[str, Any]:
    """Return the settings that `measured_config` reads: numbers, words and windows."""
    kept = {name: value for name, value in asdict(config).items() if isinstance(value, int | float | str)}
    return kept | {"windows": config.windows}


def groups_of(config: SchedulerConfig) -> str:
    """Return the groups of layers in words, for reports."""
    states = [f"recurrent state of {config.state_blocks:,} blocks"] if config.state_blocks else []
    return ", ".join(["full attention", *(f"windows of {window:,} tokens" for window in config.windows), *states])


def _config(settings: dict[str, Any]) -> SchedulerConfig:
    """Return settings as a SchedulerConfig. Raises LoadtestError."""
    try:
        return SchedulerConfig(**settings)
    except AssertionError as error:
        raise LoadtestError(f"no engine has such settings{f': {error}' if str(error) else ''}.") from None


def _value(name: str, text: str) -> Any:
    """Return a value of the field's type."""
    kind = str(_TYPES[name])
    if name == "windows" and (text.lower() == "none" or _WINDOWS.fullmatch(text)):  # of groups of layers: 128+1024
        return tuple(map(int, text.split("+"))) if text[0].isdigit() else ()
    word = _WORDS.get(text.lower(), text)
    if (word is None and "None" in kind) or (isinstance(word, bool) and "bool" in kind):
        return word
    for wanted in (int, float):
        if wanted.__name__ in kind:
            try:
                return wanted(text)
            except ValueError:
                continue
    if "str" not in kind:
        raise LoadtestError(f"--set {name} is {text!r}; it must be {getattr(_TYPES[name], '__name__', kind)}.")
    return text
