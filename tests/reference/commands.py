"""The page of the command line, from the parsers."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from loadtest.__main__ import COMMANDS as LOADTEST
from server.cli import COMMANDS
from server.completion import SHELLS
from server.connect import make_parser as make_connect_parser
from server.doctor import make_parser as make_doctor_parser
from tests.reference.tables import MADE, cell, table

_PARSERS = {"connect": make_connect_parser, "doctor": make_doctor_parser}
_HEAD = f"""# Command line

{MADE}

`quire COMMAND --help` explains a command, `quire --version` prints the version. The exit status is 0 when done, 1 after a failure,
2 for a wrong command line or configuration, or for one that names what cannot be read or reached, 130 after an interrupt.
"""


def commands_page() -> str:
    """Return the page."""
    lines = [_HEAD, *table(("command", "does"), ((f"`quire {n}`", c.summary) for n, c in COMMANDS.items()))]
    for name in COMMANDS:
        lines += [f"## quire {name}\n"]
        if name == "serve":
            lines.append(
                "`quire serve [MODEL] [FLAGS]`. Its flags are the [settings](settings.md), and [those of other servers]"
                "(foreign-flags.md). `--help` shows the essential ones, `--help=all` all, `--help=WORD` those with it in their names.\n"
            )
        elif name == "completion":
            lines += table(("shell", "load it by"), ((shell, f"`{how}`") for shell, how in SHELLS.items()))
        elif name in LOADTEST:
            parser = argparse.ArgumentParser(prog=f"quire {name}")
            LOADTEST[name][1](parser)
            lines += _options(parser, f"quire {name}")
        elif name in _PARSERS:
            lines += _options(_PARSERS[name](), f"quire {name}")
        else:
            lines.append(f"{COMMANDS[name].summary[0].upper()}{COMMANDS[name].summary[1:]}.\n")
    return "\n".join(lines)


def _options(parser: argparse.ArgumentParser, command: str) -> Iterator[str]:
    """The table of a command's arguments, or of each of its commands."""
    rows = []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, inner in action.choices.items():
                yield f"### {command} {name}\n"
                yield from _options(inner, f"{command} {name}")
            return
        if isinstance(action, argparse._HelpAction):
            continue
        names = ", ".join(f"`{name}`" for name in action.option_strings) or f"`{action.metavar or action.dest}`"
        choices = ", ".join(f"`{choice}`" for choice in action.choices or ())
        text = (action.help or "") % {"default": action.default}
        rows.append((names, cell(choices or _metavar(action)), cell(text)))
    yield from table(("argument", "takes", ""), rows)


def _metavar(action: argparse.Action) -> str:
    if action.nargs == 0:
        return "" if not isinstance(action, argparse.BooleanOptionalAction) else "on, off"
    return str(action.metavar or action.dest.upper())
