"""Runs the `quire` command: finds the subcommand and passes it the arguments.

It imports little, so that --help is instant.
"""

from __future__ import annotations

import errno
import gc
import importlib
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from engine.system.version import VERSION, commit


class Command(NamedTuple):
    """A subcommand: its summary, and the module whose `main(argv) -> int` runs it."""

    summary: str
    module: str
    passes_name: bool  # whether `main` serves several commands and needs the name


COMMANDS = {
    "serve": Command("serve a model to OpenAI clients", "server.serve", False),
    "fit": Command(
        "tell what a model needs and gives on this machine, before it is fetched", "loadtest.__main__", True
    ),
    "connect": Command("point Claude Code, Codex, opencode and others at a running daemon", "server.connect", False),
    "bench": Command("load an OpenAI-compatible server and report its latencies", "loadtest.__main__", True),
    "tune": Command("find this machine's settings for a model by timing real steps", "loadtest.__main__", True),
    "simulate": Command("replay traces through the scheduler on a virtual clock", "loadtest.__main__", True),
    "calibrate": Command("measure what steps cost on this machine, for simulate", "loadtest.__main__", True),
    "doctor": Command("check whether this machine can serve, and what to do if not", "server.doctor", False),
    "completion": Command("print a script that completes commands and flags in a shell", "server.completion", False),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return the exit status: 0 done, 1 failed, 2 misused."""
    _open_streams()
    try:
        status = _run(argv)
        sys.stdout.flush()
    except OSError as error:
        if not tell_output_failed(error):
            raise
        return 1
    return status


def tell_output_failed(error: OSError) -> bool:
    """Return whether it is the output that failed, and then write no more of it."""
    if error.errno not in (errno.EPIPE, errno.ENOSPC) or error.filename is not None:
        return False
    # What is left is written as the interpreter ends, and would fail there, too.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if error.errno == errno.ENOSPC:  # a reader of a pipe that has enough is no fault
        sys.stderr.write(f"quire: The output cannot be written: {error.strerror}.\n")
    return True


def _run(argv: Sequence[str] | None) -> int:
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
    try:
        Path.cwd()
    except FileNotFoundError:  # a library of torch's would end the process, with another reason
        sys.stderr.write("quire: The current folder has been deleted; change to another one.\n")
        return 2
    gc.disable()  # nothing that an import makes is garbage, and to look for some takes 20 ms, now or later
    try:
        if name == "serve":
            # Until the daemon does. The kernel drops a signal that a container's first process has no handler for.
            _take_signals(_interrupt)
            os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy's threads, of no use here, would spin for 0.1 s
            from engine.startup.torch_ahead import load_torch_libraries

            load_torch_libraries()
        run: Callable[[Sequence[str]], int] = importlib.import_module(command.module).main
        gc.freeze()
        gc.enable()
        return run(arguments if command.passes_name else arguments[1:])
    except KeyboardInterrupt:  # while it imports
        return 130


def _open_streams() -> None:
    """Open the null device for standard streams that are closed: else sockets get their numbers, and libuv aborts."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest number that is free
            setattr(sys, name, os.fdopen(number, "w" if number else "r", encoding="utf-8"))


def _take_signals(handler: Callable[[int, FrameType | None], None]) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, handler)


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    """End the start; a second signal ends the process, for which threads that load libraries would not."""
    _take_signals(lambda *_: os._exit(130))
    raise KeyboardInterrupt


def _unknown(name: str) -> str:
    """Return the error for a word that is not a command."""
    if name.startswith("-"):
        return f"quire: {name} needs a command before it, such as `quire serve {name}`; see `quire --help`.\n"
    from engine.settings.foreign import ELSEWHERE
    from engine.system.similar import closest

    if name in ELSEWHERE["commands"]:
        server, instead = ELSEWHERE["commands"][name]
        return f"quire: {name!r} is a command of {server}; {instead}.\n"
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
