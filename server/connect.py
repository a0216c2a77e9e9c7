"""Runs `quire connect PROGRAM`: points a program at a running daemon, by the program's own file of settings.

The change is shown first, and written as a whole, with a backup beside it. All else in the file stays: what is written is
read back before, and a file that cannot be read, or not be changed so, is refused. Keys are named by their variable.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from difflib import unified_diff
from pathlib import Path
from string import Template
from typing import Any, NamedTuple
from urllib.parse import quote

import httpx

from engine.core.errors import ConfigError, QuireError
from engine.system.regular_file import expanded, read_json, read_text, reason

KEY = "QUIRE_API_KEY"  # the variable that has the daemon's key, if it wants one
_MAX_ANSWER = 8192
_LEAST_CONTEXT = 32_768  # for agents, whose instructions and tools take 8,000 to 20,000 tokens
_PATIENCE_S = 600.0  # for an answer of a large model
_TOOL = {
    "name": "get_weather",
    "description": "Return the weather in a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}

Values = Mapping[str, Any]  # None: the key goes


class Daemon(NamedTuple):
    """A running daemon, and the model to use."""

    url: str
    model: str
    context: int
    has_key: bool

    @property
    def max_answer(self) -> int:
        """Return how long an answer may be for there to be room for a conversation."""
        return min(_MAX_ANSWER, self.context // 4)

    def fill(self, values: Values) -> Values:
        """Return values of programs.json, with what this daemon is for `$url` and others; a number alone is one."""
        known = {"url": self.url, "model": self.model, "context": str(self.context), "cap": str(self.max_answer)}
        which = "$with a key" if self.has_key else "$without a key"
        text = json.dumps(values).replace('"$context"', str(self.context)).replace('"$cap"', str(self.max_answer))
        text = Template(text).safe_substitute({name: json.dumps(value)[1:-1] for name, value in known.items()})
        found: Values = json.loads(text, object_hook=lambda each: each.get(which, each))
        return found

    def ask(self, method: str, path: str, **body: Any) -> httpx.Response:
        """Return the answer to a request. Raises ConfigError if the daemon does not answer."""
        headers = {"Authorization": f"Bearer {os.environ.get(KEY) or 'none'}"} if self.has_key else {}
        try:
            return httpx.request(method, self.url + path, headers=headers, timeout=_PATIENCE_S, **body)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ConfigError(f"{self.url} does not answer ({error}); start `quire serve`, or set --url.") from None


class Format(NamedTuple):
    """How a kind of file is read, and changed: by its text, what it is to hold, and what of that is new."""

    parse: Callable[[str], Any]
    write: Callable[[str, Values, Values], str]


def _set(text: str, start: str, line: str | None, rest: str = "") -> str:
    """Return a text in which a line replaces the one that matches `start`, and the lines behind it that match `rest`."""
    new = "" if line is None else line.rstrip("\n") + "\n"
    text = text if not text or text.endswith("\n") else text + "\n"
    found, count = re.subn(rf"^{start}.*\n{rest}", lambda _: new, text, count=1, flags=re.MULTILINE)
    return found if count else text + new


def _to_json(_: str, goal: Values, __: Values) -> str:
    return json.dumps(goal, indent=2, ensure_ascii=False) + "\n"


def _parse_yaml(text: str) -> Any:
    import yaml

    try:
        return yaml.safe_load(text) or {}
    except yaml.YAMLError as error:
        raise ValueError(str(error).replace("\n", " ")) from None


def _to_yaml(text: str, goal: Values, values: Values) -> str:
    """Replace top-level keys with all below them; comments elsewhere stay."""
    import yaml

    for key in values:
        block = yaml.safe_dump({key: goal[key]}, sort_keys=False, allow_unicode=True) if key in goal else None
        text = _set(text, re.escape(key) + r"\s*:", block, r"(?:[ \t-].*\n|\n(?=[ \t-]))*")
    return text


def _parse_toml(text: str) -> Any:
    if not text:
        return {}
    try:
        return importlib.import_module("tomllib").loads(text)
    except ImportError:
        raise ValueError("Python before 3.11 reads no TOML") from None


def _to_toml(text: str, goal: Values, values: Values) -> str:
    """Set keys before the first table, and whole tables of the second level."""
    begin = re.search(r"^\s*\[", text, re.MULTILINE)
    head, tables = (text, "") if begin is None else (text[: begin.start()], text[begin.start() :])
    for key, value in values.items():
        if not isinstance(value, Mapping):
            head = _set(head, rf"{key}\s*=", f"{key} = {json.dumps(value)}")
            continue
        for name in value:
            rows = [f"[{key}.{name}]", *(f"{each} = {json.dumps(item)}" for each, item in goal[key][name].items())]
            tables = _set(tables, rf"\[{key}\.{name}\]", "\n".join(rows), r"(?:(?!\s*\[)(?=.*\S).*\n)*")
    return head + ("\n" if head and tables and not head.endswith("\n\n") else "") + tables


def _parse_env(text: str) -> dict[str, str]:
    lines = [re.sub(r"^export\s+", "", line.strip()).partition("=") for line in text.splitlines()]
    return {name: value.strip("'\"") for name, _, value in lines if name and not name.startswith("#")}


def _to_env(text: str, _: Values, values: Values) -> str:
    for name, value in values.items():
        text = _set(text, rf"(?:export\s+)?{name}=", f"{name}={value}")
    return text


JSON = Format(lambda text: json.loads(text or "{}"), _to_json)
YAML, TOML, ENV = Format(_parse_yaml, _to_yaml), Format(_parse_toml, _to_toml), Format(_parse_env, _to_env)


FORMATS = {"json": JSON, "yaml": YAML, "toml": TOML, "env": ENV}
PROGRAMS: Mapping[str, Values] = read_json(Path(__file__).with_name("programs.json"))


def main(argv: Sequence[str]) -> int:
    """Show, ask, write and try. Returns 0 if the files are as they should be, 1 if not, 2 for an error."""
    options = make_parser().parse_args(argv)
    try:
        return _connect(options, PROGRAMS[options.program])
    except QuireError as error:
        sys.stderr.write(f"quire: {error}\n")
        return 2


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command, which the reference lists."""
    parser = argparse.ArgumentParser("quire connect", description="Point a program at a running daemon.")
    parser.add_argument("program", choices=list(PROGRAMS), help="the program whose settings are changed")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the daemon's address; default: %(default)s")
    parser.add_argument("--model", help="a name that the daemon serves; default: its first")
    parser.add_argument("--file", type=Path, help="the program's file of settings; default: where it looks for it")
    parser.add_argument("--yes", action="store_true", help="write without asking")
    return parser


def _connect(options: argparse.Namespace, program: Values) -> int:
    daemon = find_daemon(options.url, options.model)
    changes = []
    for file in program["files"]:
        path, values = path_of(program, file, options.file), daemon.fill(file["values"])
        if change := changed(path, FORMATS[file["format"]], values, file.get("defaults", {})):
            changes.append(change)
    for where, old, new in changes:
        lines = unified_diff(old.splitlines(), new.splitlines(), str(where), str(where), lineterm="")
        _say("\n".join(lines))
    if not changes:
        _say(f"{options.program} is set up for {daemon.model} already.")
    elif not (options.yes or _agreed()):
        _say("Nothing was written.")
        return 1
    for where, old, new in changes:
        _say(write(where, old, new))
    if daemon.context < _LEAST_CONTEXT and program["is_agent"]:
        _say(f"{daemon.context} tokens are few for an agent, which wants {_LEAST_CONTEXT}: see --max-model-len.")
    _say(try_tool(daemon))
    _say(f"Start it: {daemon.fill(program)['start']}")
    return 0


def path_of(program: Values, file: Values, named: Path | None = None) -> Path:
    """Return where a program looks for a file; if its first is named, further ones are beside that."""
    variable, usual = program["folder"]
    folder = expanded(os.environ.get(variable) or usual) if named is None else named.parent
    return named if named is not None and file is program["files"][0] else folder / file["path"]


def find_daemon(url: str, model: str | None) -> Daemon:
    """Return what a daemon says of itself. Raises ConfigError."""
    daemon = Daemon(url.rstrip("/").removesuffix("/v1"), "", 0, has_key=False)
    answer = daemon.ask("GET", "/v1/models")
    if answer.status_code == httpx.codes.UNAUTHORIZED:
        daemon = daemon._replace(has_key=True)
        answer = daemon.ask("GET", "/v1/models")
        if answer.status_code == httpx.codes.UNAUTHORIZED:
            raise ConfigError(f"{url} wants a key, and not that of the variable {KEY}; set it to one of --api-key.")
    try:
        cards = {card["id"]: int(card["max_model_len"] or 0) for card in answer.raise_for_status().json()["data"]}
    except (httpx.HTTPStatusError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{url} does not list its models as Quire does: {error}.") from None
    name = model or next((each for each in cards if "*" not in each and cards[each]), next(iter(cards), ""))
    if name not in cards:
        raise ConfigError(f"{url} does not serve {name!r}; --model is one of {', '.join(cards)}.")
    if not cards[name]:
        raise ConfigError(f"{url} has not loaded {name!r}, so its context is not known yet; send it a request first.")
    if '"is_generation":false' in daemon.ask("GET", f"/model_info?model={quote(name)}").text:
        raise ConfigError(
            f"{name!r} generates nothing, which programs ask for; --model is another of {', '.join(cards)}."
        )
    return daemon._replace(model=name, context=cards[name])


def merged(old: Any, new: Any) -> Any:
    """Return one value over another: objects key by key, lists of objects by their names; None takes a key away."""
    if isinstance(new, Mapping):
        old = old if isinstance(old, Mapping) else {}
        both = {**old, **{key: merged(old.get(key), value) for key, value in new.items()}}
        return {key: value for key, value in both.items() if value is not None or key not in new}
    if isinstance(old, list) and isinstance(new, list) and all(isinstance(each, Mapping) for each in new):
        named = {each["name"]: each for each in new}
        rest = [merged(each, named.pop(each.get("name"), each)) if isinstance(each, Mapping) else each for each in old]
        return [*rest, *named.values()]
    return new


def changed(path: Path, form: Format, values: Values, first: Values) -> tuple[Path, str, str] | None:
    """Return a file, its text and its new text, with `first` if it had none; None if it has the values. Raises ConfigError."""
    old = ""
    try:
        with suppress(FileNotFoundError):
            old = read_text(path)
        before = form.parse(old)
        if not isinstance(before, Mapping):
            raise ValueError("it holds no keys")
    except (OSError, ValueError) as error:
        why = reason(error) if isinstance(error, OSError) else error
        raise ConfigError(f"{path} cannot be read, so it is left alone ({why}); correct it, or set --file.") from None
    values = values if old else {**first, **values}
    goal = merged(before, values)
    if goal == before:
        return None
    new = form.write(old, goal, values)
    if not _holds(form, new, goal):
        raise ConfigError(
            f"{path} cannot be changed without harm, so it is left alone; set in it: {json.dumps(values)}"
        )
    return path.resolve(), old, new  # a link stays one


def _holds(form: Format, text: str, goal: Values) -> bool:
    try:
        return bool(form.parse(text) == goal)
    except ValueError:
        return False


def _say(text: str) -> None:
    print(text)  # noqa: T201 - the command's output


def _agreed() -> bool:
    try:
        return input("Write this? [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:
        return False


def write(path: Path, old: str, new: str) -> str:
    """Replace a file as a whole, and return what was done. Raises ConfigError."""
    backup, temporary = (
        path.with_name(f"{path.name}.{time.time_ns()}.bak"),
        path.with_name(f"{path.name}.{os.getpid()}"),
    )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        mode = path.stat().st_mode & 0o777 if path.exists() else 0o600
        for where, text in ((backup, old), (temporary, new)):
            if text:
                with os.fdopen(
                    os.open(where, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w", encoding="utf-8"
                ) as file:
                    file.write(text)
        temporary.replace(path)
    except OSError as error:
        with suppress(OSError):  # a full disk has room for parts of them, and the file is as it was
            temporary.unlink(missing_ok=True)
            backup.unlink(missing_ok=True)
        raise ConfigError(f"{path} cannot be written: {reason(error)}.") from None
    return f"Written: {path}{f'; before: {backup.name}' if old else ''}"


def try_tool(daemon: Daemon) -> str:
    """Return how a call of a tool went."""
    body = {
        "model": daemon.model,
        "messages": [{"role": "user", "content": "What is the weather in Paris? Call the tool."}],
        "tools": [{"type": "function", "function": _TOOL}],
        "temperature": 0,
        "max_tokens": min(1024, daemon.max_answer),
    }
    answer = daemon.ask("POST", "/v1/chat/completions", json=body)
    try:
        message = answer.raise_for_status().json()["choices"][0]["message"]
        if not message.get("tool_calls"):
            return f"A tool call was tried, and the model answered in words: {message.get('content')!r:.100}. Serve one that calls tools."
        called = message["tool_calls"][0]["function"]
        return f"A tool call was tried, and works: {called['name']}({called['arguments']})."
    except (httpx.HTTPStatusError, ValueError, KeyError, IndexError):
        return f"A tool call was tried, and failed with {answer.status_code}: {answer.text:.300}"
