"""Runs `quire completion SHELL`: prints a script that completes commands, flags and their values.

The script is made from the tables of commands and settings, so it is as complete as --help=all.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import NamedTuple, get_args

from engine.settings.setting import features, to_flag
from server.cli import COMMANDS
from server.settings.settings import DECLARED, names_of

_PATHS = ("FILE", "DIR", "PATH", "MODEL", "NAME=PATH")


class _Flag(NamedTuple):
    name: str
    help: str
    choices: tuple[str, ...] = ()  # of its value
    takes_path: bool = False
    is_switch: bool = False


def main(argv: Sequence[str]) -> int:
    """Print the script of a shell and return the exit status."""
    if len(argv) != 1 or argv[0] not in SHELLS:
        usage = f"usage: quire completion {{{','.join(SHELLS)}}}\n\nPrint a script for a shell to load:\n\n"
        text = usage + "".join(f"  {shell:6}{how}\n" for shell, (how, _) in SHELLS.items())
        is_help = list(argv) in (["-h"], ["--help"])
        (sys.stdout if is_help else sys.stderr).write(text)
        return 0 if is_help else 2
    sys.stdout.write("\n".join(SHELLS[argv[0]][1]()) + "\n")
    return 0


def _flags() -> Iterator[_Flag]:
    """Yield the flags of `quire serve`."""
    for each in DECLARED:
        setting = each.setting
        if each.name == "model" or setting.feature:
            continue
        name, is_switch = to_flag(each.name), bool in (each.type, *get_args(each.type))
        yield _Flag(name, setting.help, setting.choices, setting.unit in _PATHS, is_switch)
        if is_switch:
            yield _Flag(f"--no-{name[2:]}", f"not: {setting.help}", is_switch=True)
    for name in names_of(DECLARED):
        if name in features(DECLARED):
            yield _Flag(to_flag(name), "JSON")
    yield _Flag("--help", "show the essential settings")
    yield _Flag("--help=all", "show all settings", is_switch=True)


def _bash() -> Iterator[str]:
    flags = list(_flags())
    yield "# bash completion for quire"
    yield "_quire() {"
    yield '  local cur="${COMP_WORDS[COMP_CWORD]}" prev="${COMP_WORDS[COMP_CWORD-1]}"'
    yield '  if [ "$prev" = \'=\' ]; then prev="${COMP_WORDS[COMP_CWORD-2]}"; fi'
    yield "  if [ \"$cur\" = '=' ]; then prev=\"${COMP_WORDS[COMP_CWORD-1]}\"; cur=''; fi"
    yield '  if [ "$COMP_CWORD" = 1 ]; then'
    yield f'    COMPREPLY=($(compgen -W "{" ".join(COMMANDS)} --help --version" -- "$cur")); return'
    yield "  fi"
    yield '  if [ "${COMP_WORDS[1]}" = completion ]; then'
    yield f'    COMPREPLY=($(compgen -W "{" ".join(SHELLS)}" -- "$cur")); return'
    yield "  fi"
    yield '  if [ "${COMP_WORDS[1]}" = serve ]; then'
    yield '    case "$prev" in'
    for flag in flags:
        if flag.choices:
            yield f'      {flag.name}) COMPREPLY=($(compgen -W "{" ".join(flag.choices)}" -- "$cur")); return ;;'
    yield "    esac"
    yield '    case "$cur" in'
    yield f'      -*) COMPREPLY=($(compgen -W "{" ".join(flag.name for flag in flags)}" -- "$cur")); return ;;'
    yield "    esac"
    yield "  fi"
    yield '  COMPREPLY=($(compgen -f -- "$cur"))'
    yield "}"
    yield "complete -o filenames -F _quire quire"


def _zsh() -> Iterator[str]:
    def quoted(text: str) -> str:
        return text.replace("'", "'\\''").replace("[", "(").replace("]", ")").replace(":", "\\:")

    yield "#compdef quire"
    yield "_quire() {"
    yield "  local -a commands=("
    for name, command in COMMANDS.items():
        yield f"    '{name}:{quoted(command.summary)}'"
    yield "  )"
    yield "  if (( CURRENT == 2 )); then _describe command commands; return; fi"
    yield "  case $words[2] in"
    yield f"    completion) _values shell {' '.join(SHELLS)} ;;"
    yield "    serve)"
    yield "      shift words; (( CURRENT-- ))"
    yield "      _arguments \\"
    for flag in _flags():
        value = f"({' '.join(flag.choices)})" if flag.choices else "_files" if flag.takes_path else ""
        takes = "" if flag.is_switch else f":value:{value}"
        yield f"        '{flag.name}[{quoted(flag.help)}]{takes}' \\"
    yield "        '1:model:_files' ;;"
    yield "    *) _files ;;"
    yield "  esac"
    yield "}"
    yield 'if [ "$funcstack[1]" = _quire ]; then _quire "$@"; else compdef _quire quire; fi'


def _fish() -> Iterator[str]:
    def quoted(text: str) -> str:
        return text.replace("\\", "\\\\").replace("'", "\\'")

    yield "# fish completion for quire"
    for name, command in COMMANDS.items():
        yield f"complete -c quire -f -n __fish_use_subcommand -a {name} -d '{quoted(command.summary)}'"
    yield f"complete -c quire -f -n '__fish_seen_subcommand_from completion' -a '{' '.join(SHELLS)}'"
    for flag in _flags():
        if "=" in flag.name:
            continue
        value = f" -x -a '{' '.join(flag.choices)}'" if flag.choices else " -r" if flag.takes_path else " -x"
        takes = "" if flag.is_switch else value
        yield f"complete -c quire -n '__fish_seen_subcommand_from serve' -l {flag.name[2:]}{takes} -d '{quoted(flag.help)}'"


SHELLS = {
    "bash": ("quire completion bash > ~/.local/share/bash-completion/completions/quire", _bash),
    "zsh": ('quire completion zsh > "${fpath[1]}/_quire"', _zsh),
    "fish": ("quire completion fish > ~/.config/fish/completions/quire.fish", _fish),
}
