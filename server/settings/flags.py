"""The command line of `quire serve`, made from the fields of Settings, and every fault of a setting as one sentence.

load_settings() is the only way in. It raises ConfigError and nothing else; a sentence names the setting as its flag,
the value, and the variable or file it came from. A secret's value is never repeated.
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import Any, NoReturn, get_args

from pydantic import BaseModel, SecretStr, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails
from pydantic_settings import BaseSettings

from engine.core.errors import ConfigError
from server.settings.groups import SecuritySettings
from server.settings.settings import ENV_PREFIX, Settings

GROUPS: tuple[type[BaseModel], ...] = tuple(base for base in Settings.__bases__ if base is not BaseSettings)
_SHORTER = {"num_threads": "--threads"}  # second spellings, on the command line alone
_EPILOG = (
    f"Every setting can also come from a variable (--max-num-seqs is {ENV_PREFIX}MAX_NUM_SEQS) or from the file given "
    "by --config (max-num-seqs: 64). A flag wins over a variable, a variable over the file."
)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message.removeprefix('argument ')}; see `quire serve --help`.")


def make_parser() -> argparse.ArgumentParser:
    """One option a field, one heading a group. Values stay strings, and what is not given is left out."""
    parser = _Parser(
        prog="quire serve",
        usage="quire serve [MODEL] [--flag VALUE ...]",
        description="Serve a model to OpenAI clients.",
        epilog=_EPILOG,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        formatter_class=lambda prog: argparse.HelpFormatter(
            prog, max_help_position=40, width=min(shutil.get_terminal_size().columns, 120)
        ),
    )
    for group in GROUPS:
        section = parser.add_argument_group(group.__doc__)
        for name, field in group.model_fields.items():
            extra = field.json_schema_extra
            assert isinstance(extra, dict)
            text = f"{field.description} [{_default(field, str(extra['unset']))}]".replace("%", "%%")
            if name == "model":
                section.add_argument(name, nargs="?", metavar="MODEL", help=text)
            elif bool in (field.annotation, *get_args(field.annotation)):
                section.add_argument(flag(name), action=argparse.BooleanOptionalAction, help=text)
            elif field.default == ():
                metavar = str(extra["metavar"])
                section.add_argument(flag(name), nargs="+", action="extend", metavar=metavar, help=text)
            else:
                names = [flag(name), _SHORTER[name]] if name in _SHORTER else [flag(name)]
                section.add_argument(*names, metavar=str(extra["metavar"]), help=text)
    return parser


def load_settings(argv: Sequence[str]) -> Settings:
    """Settings of a command line, the variables and the file it names. Raises ConfigError."""
    given, unknown = make_parser().parse_known_args(argv)
    if unknown:
        word = unknown[0].split("=")[0]
        hint = _suggestion(word, [flag(name) for name in Settings.model_fields]) if word.startswith("-") else ""
        raise ConfigError(f"{word} is not an argument of `quire serve`{hint or '; see `quire serve --help`.'}")
    _refuse_unknown_variables(os.environ)
    _refuse_empty_protection(os.environ)
    flags = vars(given)
    try:
        return Settings(**flags)
    except ValidationError as error:
        raise ConfigError(_sentence(error.errors()[0], flags)) from None


def name_origins(message: str, settings: Settings, argv: Sequence[str]) -> str:
    """Append where the settings that a sentence speaks of were set, as far as that was not the command line."""
    flags = vars(make_parser().parse_args(argv))
    names = dict.fromkeys(word[2:].replace("-", "_") for word in re.findall(r"--[a-z][a-z-]*", message))
    origins = {name: _origin(name, flags, settings.config) for name in names if name in settings.model_fields_set}
    told = [f"{flag(name)} was set by {origin}" for name, origin in origins.items() if origin]
    return f"{message} ({', '.join(told)}.)" if told else message


def flag(name: str) -> str:
    """A field's name as it is typed on the command line."""
    return "--" + name.replace("_", "-")


def _default(field: FieldInfo, unset: str) -> str:
    value = field.default.value if isinstance(field.default, Enum) else field.default
    return f"default: {unset if value in (None, ()) else 'on' if value is True else 'off' if value is False else value}"


def _origin(name: str, flags: Mapping[str, Any], config: object) -> str:
    """The variable or file that set a setting; empty for the command line."""
    if name in flags:
        return ""
    variable = next(
        (key for key, value in os.environ.items() if value and key.upper() == ENV_PREFIX + name.upper()), ""
    )
    return variable or str(config)


def _refuse_unknown_variables(environ: Iterable[str]) -> None:
    for variable in environ:
        name = variable.upper().removeprefix(ENV_PREFIX).lower()
        if variable.upper().startswith(ENV_PREFIX) and name not in Settings.model_fields:
            known = [ENV_PREFIX + field.upper() for field in Settings.model_fields]
            raise ConfigError(
                f"The variable {variable} is not a setting of Quire{_suggestion(variable.upper(), known) or '; unset it.'}"
            )


def _refuse_empty_protection(environ: Mapping[str, str]) -> None:
    """An empty variable counts as absent, and an absent key is an open daemon."""
    for variable, value in environ.items():
        name = variable.upper().removeprefix(ENV_PREFIX).lower()
        if variable.upper().startswith(ENV_PREFIX) and name in SecuritySettings.model_fields and not value.strip():
            raise ConfigError(
                f"The variable {variable} is empty, but a setting that protects needs a value; set it, or unset it."
            )


def _suggestion(word: str, known: Sequence[str]) -> str:
    return "".join(f"; did you mean {match}?" for match in difflib.get_close_matches(word, known, 1))


_WANTED = {
    "int_parsing": "a whole number",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_parsing": "a number",
    "float_type": "a number",
    "bool_parsing": "true or false",
    "bool_type": "true or false",
    "string_type": "a string",
    "byte_size": "a size such as 2GiB, 512MB or 1048576",
    "byte_size_unit": "a size such as 2GiB, 512MB or 1048576",
}


def _sentence(error: ErrorDetails, flags: Mapping[str, Any]) -> str:
    """One fault that pydantic found, in our words."""
    name = str(error["loc"][0])
    config = flags.get("config") or os.environ.get(ENV_PREFIX + "CONFIG")
    if error["type"] == "extra_forbidden":
        keys = [field.replace("_", "-") for field in Settings.model_fields]
        key = name.replace("_", "-")
        return f"{config} sets {key!r}, which is not a setting of Quire{_suggestion(key, keys) or '; remove it.'}"
    origin = _origin(name, flags, config)
    by = f" (set by {origin})" if origin else ""
    value = "not understood" if _is_secret(name) else repr(error["input"])
    context = error.get("ctx", {})
    if "expected" in context:
        wanted = f"choose {context['expected']}"
    elif "ge" in context:
        wanted = f"it must be at least {context['ge']:g}"
    elif "gt" in context:
        wanted = f"it must be more than {context['gt']:g}"
    elif "le" in context:
        wanted = f"it must be at most {context['le']:g}"
    else:
        wanted = f"it must be {_WANTED[error['type']]}" if error["type"] in _WANTED else error["msg"]
    return f"{flag(name)} is {value}{by}; {wanted}."


def _is_secret(name: str) -> bool:
    return SecretStr in get_args(Settings.model_fields[name].annotation)
