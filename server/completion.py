"""Runs `quire completion SHELL`: prints a script that completes commands, flags and their values.

shtab makes it from the parsers of the commands, so it is as complete as --help=all.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from server import connect, doctor
from server.cli import COMMANDS
from server.settings import flags
from server.settings.settings import DECLARED

SHELLS = {  # and how each loads its script
    "bash": "quire completion bash > ~/.local/share/bash-completion/completions/quire",
    "zsh": 'quire completion zsh > "${fpath[1]}/_quire"',
    "fish": "quire completion fish > ~/.config/fish/completions/quire.fish",
}
_PATHS = ("FILE", "DIR", "PATH", "MODEL", "NAME=PATH")


def main(argv: Sequence[str]) -> int:
    """Print the script of a shell and return the exit status."""
    if len(argv) != 1 or argv[0] not in SHELLS:
        usage = f"usage: quire completion {{{','.join(SHELLS)}}}\n\nPrint a script for a shell to load:\n\n"
        text = usage + "".join(f"  {shell:6}{how}\n" for shell, how in SHELLS.items())
        is_help = list(argv) in (["-h"], ["--help"])
        (sys.stdout if is_help else sys.stderr).write(text)
        return 0 if is_help else 2
    import shtab  # which no other command needs

    sys.stdout.write(shtab.complete(_parser(shtab.FILE), argv[0]) + "\n")
    return 0


def _parser(path: object) -> argparse.ArgumentParser:
    """Return a parser of all commands; `path` is how shtab completes one."""
    serve = flags.make_parser()
    choices = {each.name: each.setting.choices for each in DECLARED if each.setting.choices}
    for action in serve._actions:  # noqa: SLF001 - where shtab, too, finds them
        action.choices = choices.get(action.dest)
        if action.metavar in _PATHS:
            action.complete = path  # type: ignore[attr-defined]
    parser = argparse.ArgumentParser("quire")
    parser.add_argument("--version", action="version")
    commands = parser.add_subparsers()
    parents = {"serve": [serve], "doctor": [doctor.make_parser()], "connect": [connect.make_parser()]}
    for name, command in COMMANDS.items():
        commands.add_parser(name, help=command.summary, parents=parents.get(name, []), add_help=False)
    commands.choices["completion"].add_argument("shell", choices=list(SHELLS))
    return parser
