"""Runs `quire doctor`: prints what this machine has, and checks a file of settings without starting anything."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence

from engine.core.errors import QuireError
from engine.startup.doctor import Finding, check_machine
from server.settings.flags import load_settings
from server.settings.settings import ENV_PREFIX


def main(argv: Sequence[str]) -> int:
    """Check the machine and print the findings. Returns 0 if it can serve, 1 if not."""
    config = make_parser().parse_args(argv).config
    failed = False
    for check, found, advice, is_fatal in (*check_machine(), *_settings(config)):
        failed |= is_fatal
        sys.stdout.write(f"{check:14}{found}\n{' ' * 14 + advice + chr(10) if advice else ''}")
    sys.stdout.write("This machine cannot serve yet.\n" if failed else "This machine can serve.\n")
    return int(failed)


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command, which the reference lists."""
    parser = argparse.ArgumentParser("quire doctor", description="Check whether this machine can serve.")
    parser.add_argument("--config", metavar="FILE", help="check this file of settings, with the QUIRE_ variables")
    return parser


def _settings(path: str | None) -> Iterator[Finding]:
    """Check everything that `quire serve` checks before it binds the port; weights are not read."""
    if path is None and not any(name.startswith(ENV_PREFIX) for name in os.environ):
        return
    from server.plan import prepare_all

    try:
        settings = load_settings([] if path is None else ["--config", path])
        prepare_all(settings)
    except QuireError as error:
        yield Finding("settings", f"of {path or 'the variables'} are wrong", str(error), is_fatal=True)
    else:
        yield Finding("settings", f"{len(settings.origins)} given: {', '.join(sorted(settings.origins))}")
