"""Runs the `quire` command: finds the subcommand and passes it the arguments.

It imports little, so that --help is instant.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

from engine.system.version import VERSION, commit


class Command(NamedTuple):
    """A subcommand: its summary, and the module whose `main(argv) -> int` runs it."""

    summary: str
    module: str
    passes_name: bool  # whether `main` serves several commands and needs the name


COMMANDS = {
    "serve": Command("serve a model to OpenAI clients", "server.serve", False),
    "bench": Command("load an OpenAI-compatible server and report its latencies", "loadtest.__main__", True),
    "tune": Command("find this machine's settings for a model by timing real steps", "loadtest.__main__", True),
    "simulate": Command("replay traces through the scheduler on a virtual clock", "loadtest.__main__", True),
    "calibrate": Command("measure what steps cost on this machine, for simulate", "loadtest.__main__", True),
    "doctor": Command("check whether this machine can serve, and what to do if not", "server.doctor", False),
    "completion": Command("print a script that completes commands and flags in a shell", "server.completion", False),
}

# Commands of other servers, the server, and what to do instead.
_HUB = "`quire serve ORG/NAME` fetches a model of the hub into its cache, once"
_PAGE = "open the page of a daemon at /, or write a script with the OpenAI SDK"
ELSEWHERE = {
    "chat": ("vLLM", _PAGE),
    "complete": ("vLLM", "send requests to /v1/completions of a daemon"),
    "run-batch": ("vLLM", "start `quire serve --data-dir DIR`, upload the file to /v1/files and post it to /v1/batches"),
    "collect-env": ("vLLM", "run `quire doctor`"),
    "launch": ("vLLM", "run `quire serve`"),
    "launch_server": ("SGLang", "run `quire serve`"),
    "launcher": ("TGI", "run `quire serve`"),
    "download-weights": ("TGI", _HUB),
    "run": ("Ollama", f"`quire serve MODEL` serves one; then {_PAGE}"),
    "pull": ("Ollama", _HUB),
    "list": ("Ollama", "one daemon serves one model, which /v1/models names; `ls ~/.cache/huggingface/hub` lists those of the cache"),
    "ps": ("Ollama", "one daemon serves one model, which /v1/models names"),
    "show": ("Ollama", "`quire doctor` and the first lines of `quire serve` describe the model"),
    "stop": ("Ollama", "stop the daemon: Ctrl-C, or SIGTERM, lets streams finish"),
    "rm": ("Ollama", "delete the model's folder in ~/.cache/huggingface/hub"),
    "create": ("Ollama", "settings stand in flags or in a file for --config; `quire serve --help` shows them"),
    "cp": ("Ollama", "`quire serve MODEL --served-model-name NAME OTHER` serves a model under several names"),
    "push": ("Ollama", "Quire serves models and does not publish them"),
    "signin": ("Ollama", "a hub's token is read from HF_TOKEN"),
}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return the exit status: 0 done, 1 failed, 2 misused."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    name = arguments[0] if arguments else "--help"
    if name in ("-h", "--help", "help"):
        sys.stdout.write(_help())
        return 0 if arguments else 2
    if name in ("-V", "--version", "version"):
        built_from = commit()
        sys.stdout.write(f"quire {VERSION}{f' ({built_from})' if built_from else ''}\n")
        return 0
    command = COMMANDS.get(name)
    if command is None:
        sys.stderr.write(_unknown(name))
        return 2
    run: Callable[[Sequence[str]], int] = importlib.import_module(command.module).main
    return run(arguments if command.passes_name else arguments[1:])


def _unknown(name: str) -> str:
    """Return the error for a word that is not a command."""
    if name in ELSEWHERE:
        server, instead = ELSEWHERE[name]
        return f"quire: {name!r} is a command of {server}; {instead}.\n"
    if name.startswith("-"):
        return f"quire: {name} needs a command before it, such as `quire serve {name}`; see `quire --help`.\n"
    from engine.system.similar import closest

    close = closest(name, COMMANDS)
    hint = f"did you mean `quire {close}`?" if close else f"choose one of {', '.join(COMMANDS)}, or see `quire --help`."
    return f"quire: {name!r} is not a command; {hint}\n"


def _help() -> str:
    lines = [f"  {name:11}{command.summary}\n" for name, command in COMMANDS.items()]
    return (
        "usage: quire COMMAND [ARGUMENT ...]\n\nAn OpenAI-compatible LLM serving daemon.\n\ncommands:\n"
        + "".join(lines)
        + "\n`quire COMMAND --help` explains a command, `quire serve --help=all` every setting; `quire --version` prints the version.\n"
    )
