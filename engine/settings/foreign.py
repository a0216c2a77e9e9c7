"""Flags of vLLM, llama-server, SGLang and TGI, and their meaning here: elsewhere.json, one table.

A row says one of three things: the flag has no effect, which the start reports once; it is another name of a setting, and its
values are translated; or it is refused, with the reason and the remedy. A flag that differs in speed or memory only has no
effect. A flag that would change an answer is translated or refused, so that no meaning changes silently.

`split` takes the rows' flags off a command line and `translate` turns them into settings. `known_value` translates values that
other servers spell differently in settings of the same name. The table's page is docs/reference/foreign-flags.md.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

from engine.core.errors import ConfigError
from engine.settings.setting import to_flag


class Takes(Enum):
    """The number of values behind a flag."""

    SWITCH = "no value; --no-FLAG is its opposite"
    MAYBE = "on, off, auto, or no value"
    ONE = "one value"
    MANY = "one or more values"


@dataclass(frozen=True, slots=True, kw_only=True)
class Foreign:
    """One row: the flag is another name of a setting, has no effect, or is refused."""

    flags: tuple[str, ...]
    takes: Takes = Takes.ONE
    setting: str = ""  # that it is another name of ...
    key: str = ""  # ... or of this key in it, which has JSON
    values: Mapping[str, Any] = field(default_factory=dict)  # translated; others are passed on
    convert: Callable[[Any], Any] | None = None  # of a value that is not in `values`
    note: str = ""
    wins: bool = False  # over the setting's own flag, which other servers give another meaning
    no_effect: str = ""  # why it changes nothing; with `only`, that holds for these values, and others are refused
    only: tuple[str, ...] = ()
    otherwise: str = ""
    refused: str = ""  # why

    @property
    def name(self) -> str:
        """Return the flag that names the row: the first long one."""
        return next((flag for flag in self.flags if flag.startswith("--")), self.flags[0])


class Given(NamedTuple):
    """A foreign flag of a command line or a file: its row, its spelling and value. A switch's value is True or False."""

    row: Foreign
    flag: str
    value: Any

    @property
    def text(self) -> str:
        """Return the flag as a sentence shows it."""
        if isinstance(self.value, bool):
            return self.flag
        words = self.value if isinstance(self.value, list) else [self.value]
        return " ".join(
            [self.flag, *(f"{word:.60}" if isinstance(word, str) else json.dumps(word, default=str) for word in words)]
        )


class Translated(NamedTuple):
    """The settings that foreign flags stand for, the flag behind each, and a remark for each one without effect.

    `faults` are the sentences of those that are refused: `refuse` raises all of them together.
    """

    values: dict[str, Any]
    flags: dict[str, Given]
    remarks: list[str]
    faults: list[str]


_ROPE = 'write --hf-overrides with the keys of config.json, such as \'{"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}\''


def _pooler(value: Any) -> str:
    """Return --pooling for vLLM's --pooler-config."""
    given = _object(value)
    extra = given.keys() - {"pooling_type", "seq_pooling_type", "normalize", "use_activation"}
    if extra or given.get("normalize", True) is not True or given.get("use_activation", True) is not True:
        raise ValueError('vectors are of length one, and only {"pooling_type": "LAST"} or "MEAN" can be chosen')
    return str(given.get("pooling_type", given.get("seq_pooling_type", "last"))).lower()


def _object(value: Any) -> Mapping[str, Any]:
    given = json.loads(value) if isinstance(value, str) else value
    if not isinstance(given, Mapping):
        raise ValueError("it must be a JSON object")
    return given


def _device_of_layers(value: Any) -> str:
    """Return --device for llama-server's -ngl: without layers on the GPU the model runs on the CPU."""
    return "cpu" if str(value) == "0" else "auto"


def _thinking(value: Any) -> Any:
    raise ValueError(
        f"{value!r} cannot be set for all requests; send thinking_token_budget or reasoning_effort with them"
    )


def _rope(value: Any) -> Mapping[str, Any]:
    """Return vLLM's --rope-scaling; llama-server's and TGI's are the name of a kind."""
    if isinstance(value, str) and value in ("none", "linear", "dynamic", "yarn"):
        raise ValueError(_ROPE)
    return _object(value)


_CONVERSIONS: dict[str, Callable[[Any], Any]] = {
    "device_of_layers": _device_of_layers,
    "float": float,
    "int": int,
    "pooler": _pooler,
    "rope": _rope,
    "thinking": _thinking,
}


def _read(row: Mapping[str, Any]) -> Foreign:
    """Return a row of the file."""
    named = {
        "flags": tuple(row["flags"].split()),
        "takes": Takes[row.get("takes", "one").upper()],
        "only": tuple(row.get("only", ())),
        "convert": _CONVERSIONS[row["convert"]] if "convert" in row else None,
    }
    return Foreign(**{**row, **named})


# What other servers have under other names, or Quire has not: flags, values of settings, names of the offline API, routes.
ELSEWHERE: Mapping[str, Any] = json.loads(Path(__file__).with_name("elsewhere.json").read_text(encoding="utf-8"))

PROGRAMS = {name: tuple(map(_read, rows)) for name, rows in ELSEWHERE["programs"].items()}
_ROWS = {flag: row for rows in PROGRAMS.values() for row in rows for flag in row.flags}
SPELLINGS = tuple(_ROWS)

IN_CHECKPOINT = ("awq", "awq_marlin", "gptq", "gptq_marlin", "compressed-tensors", "auto-round", "mxfp4", "modelopt")
OF_CHECKPOINT = "a checkpoint's own format is recognised; others stay as they are"

# Values of Quire's own settings that other servers spell differently, and words in them that are refused, and why.
VALUES: Mapping[str, Mapping[str, str]] = ELSEWHERE["values"]
REFUSED_VALUES: Sequence[tuple[str, str, str]] = ELSEWHERE["refused_values"]

KEY_VARIABLES = ("VLLM_API_KEY", "LLAMA_API_KEY")  # served as --api-key: ignored, they would leave a daemon open
_VARIABLES = ("VLLM_", "LLAMA_ARG_")

_NUMBER = re.compile(r"-\d[\d.]*")
_WORD = re.compile(r"[\w-]+")
_LEVEL = re.compile(r"-O(\d+)")


def split(argv: Sequence[str]) -> tuple[list[str], list[Given]]:
    """Return a command line without the foreign flags, and these. Raises ConfigError.

    Underscores in names become hyphens, and `--FLAG.KEY VALUE` becomes a key of a JSON setting, as in vLLM.
    """
    words, rest, found = list(argv), list[str](), list[Given]()
    keys: dict[str, dict[str, Any]] = {}  # of JSON settings, given one by one
    while words:
        word = words.pop(0)
        name, equals, value = word.partition("=")
        if name.startswith("--"):
            name, dot, key = name.partition(".")
            name = name.replace("_", "-")
            if dot and name not in _ROWS:
                keys.setdefault(name, {})[key] = _json_value(value if equals else words.pop(0) if words else "")
                continue
        if level := _LEVEL.fullmatch(name):
            name, equals, value = "-O", "=", level[1]
        is_on, row = _find(name)
        if row is None:
            rest.append(name + equals + value)
        elif row.takes is Takes.SWITCH:
            if equals:
                raise ConfigError(f"{name} takes no value; write {name} or leave it out.")
            found.append(Given(row, name, is_on))
        else:
            found.append(Given(row, name, _values(row, name, [value] if equals else [], words)))
    for name, values in keys.items():
        rest += [name, json.dumps(values)]
    return rest, found


def _json_value(text: str) -> Any:
    """Return the value of `--FLAG.KEY VALUE`: JSON, or else a string."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _values(row: Foreign, name: str, values: list[str], words: list[str]) -> Any:
    """Return the value behind a flag, taken off the words that follow it."""
    most = {Takes.MAYBE: 1, Takes.ONE: 1, Takes.MANY: len(words)}[row.takes] if not values else 0
    for _ in range(most):
        if not words or (words[0].startswith("-") and not _NUMBER.fullmatch(words[0])):
            break
        if row.takes is Takes.MAYBE and words[0] not in ("on", "off", "auto", "0", "1"):
            break
        values.append(words.pop(0))
    if not values and row.takes is not Takes.MAYBE:
        raise ConfigError(f"{name} needs a value; write it behind the flag.")
    return values if row.takes is Takes.MANY else (values[0] if values else True)


def _find(name: str) -> tuple[bool, Foreign | None]:
    """Return the row of a flag; False with it for the `--no-` form of a switch."""
    row = _ROWS.get(name)
    if row is not None or not name.startswith("--no-"):
        return True, row
    row = _ROWS.get("--" + name.removeprefix("--no-"))
    return False, row if row is not None and row.takes is Takes.SWITCH else None


def meaning(flag: str) -> str:
    """Return what the flags have in common that set the same: the name of a setting, with its key, or of a row."""
    row = _find(flag)[1]
    if row is None:
        return flag.lstrip("-").replace("-", "_")
    return f"{row.setting} {row.key}".rstrip() if row.setting else row.name


def split_file(values: Mapping[str, Any], known: Iterable[str]) -> tuple[dict[str, Any], list[Given]]:
    """Return the settings of a file that are not foreign flags, and those that are. `known` are Quire's settings."""
    known, rest, found = set(known), dict[str, Any](), list[Given]()
    for name, value in values.items():
        is_on, row = _find(to_flag(name))
        if name in known or row is None:
            rest[name] = value
        elif row.takes is Takes.SWITCH:
            found.append(Given(row, to_flag(name), bool(value) == is_on))
        else:
            found.append(Given(row, to_flag(name), value))
    return rest, found


def translate(given: Iterable[Given]) -> Translated:
    """Return the meaning of foreign flags."""
    made = Translated({}, {}, [], [])
    without: dict[str, list[str]] = {}  # by the reason
    for each in given:
        row = each.row
        if row.setting:
            _set(made, each)
        elif row.refused:
            if each.value is not False:
                made.faults.append(f"{each.text} is not served: {row.refused}.")
        elif row.only and not _is_harmless(each.value, row.only):
            made.faults.append(f"{each.text} is not served: {row.otherwise}.")
        else:
            without.setdefault(row.no_effect, []).append(each.text)
    _share_context(made)
    made.remarks.extend(f"{', '.join(texts)} ({why})" for why, texts in without.items())
    return made


def _is_harmless(value: Any, harmless: tuple[str, ...]) -> bool:
    return all(str(each).lower() in harmless for each in (value if isinstance(value, list) else [value]))


def _set(made: Translated, given: Given) -> None:
    """Add the setting that a flag stands for, or a fault."""
    row, value = given.row, given.value
    try:
        if str(value) in row.values:
            value = row.values[str(value)]
        elif row.convert is not None:
            value = row.convert(value)
    except (ValueError, TypeError) as error:
        made.faults.append(f"{given.text} is not understood: {error}.")
        return
    if value is None:
        return  # the default
    name, other = row.setting, made.flags.get(row.setting)
    if row.key:
        made.values[name] = {**made.values.get(name, {}), row.key: value}
    elif other is not None and made.values[name] != value:
        made.faults.append(
            f"{other.flag} and {given.flag} set {to_flag(name)} to different values; leave one of them out."
        )
    else:
        made.values[name] = value
    made.flags[name] = given


def _share_context(made: Translated) -> None:
    """Divide llama-server's context among its slots, as it does."""
    context, slots = made.flags.get("max_model_len"), made.values.get("max_num_seqs")
    if context is None or slots is None or context.row.name != "--ctx-size" or made.values["max_model_len"] == "auto":
        return
    try:
        made.values["max_model_len"] = int(made.values["max_model_len"]) // int(slots)
    except (ValueError, ZeroDivisionError):
        return  # the settings' own bounds say what is wrong


def refuse(faults: Sequence[str]) -> None:
    """Raise ConfigError with all sentences, if there are any, so that one start names all that has to change."""
    if faults:
        head = "" if len(faults) == 1 else f"{len(faults)} arguments have to change:\n  "
        raise ConfigError(head + "\n  ".join(faults))


def check_same(made: Translated, flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return Quire's flags and the translated ones together; a setting with two values is a fault."""
    for name, given in made.flags.items():
        if name in flags and flags[name] != made.values[name] and not given.row.wins:
            own = "MODEL" if name == "model" else to_flag(name)
            made.faults.append(
                f"{own} and {given.flag} mean the same and have different values; leave one of them out."
            )
    return {**flags, **made.values}


def known_value(name: str, value: Any) -> Any:
    """Return Quire's spelling of a value of its setting `name`. Raises ConfigError for one that is refused."""
    for setting, word, why in REFUSED_VALUES:
        if name == setting and word in _WORD.findall(str(value)):
            raise ConfigError(f"{to_flag(name)} {value} is not served: {why}.")
    return VALUES.get(name, {}).get(str(value), value)


def narrower(settings: Any) -> list[str]:
    """Return remarks on settings that mean more to other servers than they do here."""
    if not settings.seed or settings.load_format == "dummy":
        return []
    return [f"--seed {settings.seed} (it seeds random weights; a request names the seed of its answer)"]


def keys_of(environ: Mapping[str, str]) -> tuple[str, str] | None:
    """Return the variable of another server that has API keys, and its value."""
    return next(((name, environ[name]) for name in KEY_VARIABLES if name in environ), None)


def unread_variables(environ: Iterable[str]) -> list[str]:
    """Return the variables of other servers, which may be for another program on the machine and are not read."""
    return sorted(name for name in environ if name.startswith(_VARIABLES) and name not in KEY_VARIABLES)
