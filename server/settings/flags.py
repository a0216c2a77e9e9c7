"""Makes the command line of `quire serve` from the declared settings.

`load_settings` is the only entry. It raises ConfigError and nothing else; a sentence names the setting as its flag, the value,
and the variable or file it came from. A secret's value is never repeated.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, cast, get_args

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from engine.core.errors import ConfigError
from engine.settings.foreign import SPELLINGS, check_same, narrower, refuse, split, translate, unread_variables
from engine.settings.setting import A_SIZE, Declared, describe, fault, features, names_of, to_flag
from server.settings.settings import DECLARED, ENV_PREFIX, Settings, read_entry, read_sources, suggestion

if TYPE_CHECKING:
    from server.settings.model_lists import ListedModel

GROUPS = (  # the headings of --help, in order
    "Model",
    "Device and memory",
    "Scheduling",
    "LoRA adapters",
    "Prefill and decode apart",
    "HTTP",
    "Files and batches",
    "Security",
    "Logging and configuration",
)
_EPILOG = (
    f"Every setting can also come from a variable (--max-num-seqs is {ENV_PREFIX}MAX_NUM_SEQS) or from the file given "
    "by --config (max-num-seqs: 64). A flag wins over a variable, a variable over the file. Flags of vLLM and llama-server "
    "are understood, too: docs/reference/foreign-flags.md."
)
_ALL = "all"  # of --help
_MANY_CHOICES = 8  # of a value, beyond which the essential help does not list them


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message.removeprefix('argument ')}; see `quire serve --help`.")


class _Help(argparse.Action):
    """Prints the essential settings, all of them, or those with a word in their names."""

    def __call__(
        self, parser: argparse.ArgumentParser, _namespace: object, word: Any, _option: object = None
    ) -> NoReturn:
        word = word or ""
        if word not in ("", _ALL) and not any(_names(name, word) for name in names_of(DECLARED)):
            raise ConfigError(f"No setting has {word!r} in its name; `quire serve --help=all` lists them.")
        make_parser(shown=word).print_help()
        parser.exit()


def make_parser(settings: Iterable[Declared] = DECLARED, shown: str = _ALL) -> argparse.ArgumentParser:
    """Return a parser with one option per setting and one heading per group. Values stay strings; absent ones are left out.

    Its help shows settings with the word `shown` in their names, the essential ones if it is empty.
    """
    parser = _Parser(
        prog="quire serve",
        usage="quire serve [MODEL ...] [--flag VALUE ...]",
        description="Serve a model to OpenAI clients.",
        epilog=_EPILOG,
        allow_abbrev=False,
        add_help=False,
        argument_default=argparse.SUPPRESS,
        formatter_class=lambda prog: argparse.HelpFormatter(
            prog, max_help_position=40, width=min(shutil.get_terminal_size().columns, 120)
        ),
    )
    settings = tuple(settings)
    known = features(settings)
    help_text = "show these settings; --help=all shows all, --help=WORD those with the word in their names"
    parser.add_argument_group("Help").add_argument(
        "-h", "--help", nargs="?", metavar="all", action=_Help, help=help_text
    )
    for group in GROUPS:
        section = parser.add_argument_group(group)
        own = [each for each in settings if each.setting.group == group]
        for each in own:
            if not each.setting.feature:
                _add_option(section, each, shown)
        for name in dict.fromkeys(each.setting.feature for each in own if each.setting.feature):
            keys = [f"{key}, {each.setting.help} [{default_of(each)}]" for key, each in known[name].items()]
            text = _escape("; ".join(keys)) if shown and _names(name, shown) else argparse.SUPPRESS
            section.add_argument(to_flag(name), metavar="JSON", help=text)
    return parser


def _names(name: str, word: str) -> bool:
    """Return whether a setting's flag has the word in it; all have `_ALL`."""
    return word == _ALL or word.replace("_", "-") in to_flag(name)


def _add_option(section: argparse._ArgumentGroup, each: Declared, shown: str) -> None:
    setting = each.setting
    flag = to_flag(each.name)
    text, metavar = setting.help, "{" + ",".join(setting.choices) + "}" if setting.choices else setting.unit
    if len(setting.choices) > _MANY_CHOICES:
        metavar = "NAME"
        text += f"; one of {', '.join(setting.choices)}" if shown else "; --help=all lists them"
    is_shown = _names(each.name, shown) if shown else setting.is_essential
    text = _escape(f"{text} [default: {default_of(each)}]") if is_shown else argparse.SUPPRESS
    if each.name == "model":
        section.add_argument(each.name, nargs="*", metavar=metavar, help=text)
    elif bool in (each.type, *get_args(each.type)):
        section.add_argument(flag, action=argparse.BooleanOptionalAction, help=text)
    elif each.default == ():
        section.add_argument(flag, nargs="+", action="extend", metavar=metavar, help=text)
    else:
        section.add_argument(flag, *setting.short.split(), metavar=metavar, help=text)


def _escape(text: str) -> str:
    return text.replace("%", "%%")


def default_of(each: Declared) -> str:
    """Return a setting's default as --help and the reference show it."""
    value = each.default
    if value is None or value == ():
        return each.setting.unset
    if isinstance(value, bool):
        return "on" if value else "off"
    if each.setting.unit == "SIZE":
        return f"{value >> 20}MiB"
    return f"{value:g}" if isinstance(value, float) else str(value)


def load_settings(argv: Sequence[str]) -> Settings:
    """Return the settings of a command line, the variables and the file they name. Raises ConfigError."""
    words, foreign = split(argv)
    given, unknown = make_parser().parse_known_args(words)
    flags = vars(given)
    if words := flags.pop("model", []):
        if len(words) > 1 and "models" in flags:
            raise ConfigError(f"--models does not go with the models {', '.join(words)}; name all in one place.")
        flags |= {"models": words} if len(words) > 1 else {"model": words[0]}
    sources = read_sources(DECLARED, flags, os.environ, foreign)
    rest = [word for word in unknown if word.startswith("-")] or unknown[:1]  # the others are their values
    refuse([*sources.faults, *map(_unknown, rest)])
    values = sources.values
    settings = _checked(values, sources.origins)
    folder, preset = settings.models_dir, settings.models_preset
    if folder or preset:
        from server.settings.model_lists import AT_ONCE, in_folder, in_preset

        listed = [*(in_folder(folder) if folder else ()), *(in_preset(preset) if preset else ())]
        values |= {"models": [*settings.models, *listed], "models_max": values.get("models_max", AT_ONCE)}
        settings = _checked(values, sources.origins)
    shared = {name: value for name, value in values.items() if name not in ("model", "models")}
    for index, entry in enumerate(settings.models, 1):
        own = read_entry(_of_list(cast("ListedModel", entry), settings) if isinstance(entry, tuple) else entry, index)
        settings.each.append(_checked(shared | own, sources.origins | dict.fromkeys(own, f"models, item {index}")))
    settings.remarks.extend([*sources.remarks, *narrower(settings)])
    if unread := unread_variables(os.environ):
        settings.remarks.append(f"{', '.join(unread)} (variables of other servers; Quire's begin with {ENV_PREFIX})")
    return settings


def _of_list(listed: ListedModel, settings: Settings) -> dict[str, Any]:
    """Return the settings of a model that another server's list has. Raises ConfigError."""
    words, foreign = split(listed.words)
    given, unknown = make_parser().parse_known_args(words)
    translated = translate(foreign)
    values = {"served_model_name": [listed.name]} | check_same(translated, vars(given)) | listed.settings
    faults = [*translated.faults, *map(_unknown, [word for word in unknown if word.startswith("-")])]
    refuse([f"{listed.name}: {fault}" for fault in faults])
    settings.remarks.extend(translated.remarks)
    model = values.pop("model", None)
    for name in ("host", "port"):
        values.pop(name, None)  # of a process that is not needed here
    return {"model": model[0] if isinstance(model, list) and model else model, **values}


def _checked(values: Mapping[str, Any], origins: Mapping[str, str]) -> Settings:
    """Return settings whose values are of the right types and within their bounds. Raises ConfigError."""
    try:
        settings = Settings(**values)
    except ValidationError as error:
        raise ConfigError(_sentence(error.errors()[0], origins)) from None
    for each in DECLARED:
        value = getattr(settings, each.name)
        if wanted := fault(each, value):
            raise ConfigError(f"{each.spelling} is {describe(value)}{_set_by(each.name, origins)}; {wanted}.")
    settings.origins.update(origins)
    return settings


def _unknown(argument: str) -> str:
    word = argument.split("=", maxsplit=1)[0]
    known = ["--help", *map(to_flag, names_of(DECLARED)), *SPELLINGS] if word.startswith("-") else []
    return f"{word} is not an argument of `quire serve`{suggestion(word, known) or '; see `quire serve --help`.'}"


def name_origins(message: str, settings: Settings) -> str:
    """Append the variables and files that set the settings which a sentence names, the command line aside."""
    found: dict[str, str] = {}
    known = features(DECLARED)
    for word in re.findall(r"--[a-z][a-z-]*", message):
        name = word[2:].replace("-", "_")
        names = [name, *(each.name for each in known.get(name, {}).values())]
        origin = next((settings.origins[each] for each in names if settings.origins.get(each)), "")
        if origin:
            found[word] = origin
    named = [f"{word} was set by {origin}" for word, origin in found.items()]
    return f"{message} ({', '.join(named)}.)" if named else message


def _set_by(name: str, origins: Mapping[str, str]) -> str:
    origin = origins.get(name, "")
    return f" (set by {origin})" if origin else ""


_WANTED = {
    "int_parsing": "a whole number",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_parsing": "a number",
    "float_type": "a number",
    "bool_parsing": "true or false",
    "bool_type": "true or false",
    "string_type": "a string",
    "path_type": "a path",
    "tuple_type": "a list",
}


def _sentence(error: ErrorDetails, origins: Mapping[str, str]) -> str:
    """Return the sentence for a fault that pydantic found."""
    name = str(error["loc"][0])
    each = next(each for each in DECLARED if each.name == name)
    is_hidden = each.setting.is_secret or error["type"] == "path_type"  # which may be tenants with their keys
    value = "not understood" if is_hidden else repr(error["input"])
    kind = A_SIZE if each.setting.unit == "SIZE" else _WANTED.get(error["type"])
    wanted = f"it must be {kind}" if kind else error["msg"]
    return f"{each.spelling} is {value}{_set_by(name, origins)}; {wanted}."
