"""Shared by the command lines of the package: types of argparse, a check of output files, and a console.

Output files are checked before anything is measured, so that minutes of measuring are not lost.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from math import inf, nan
from pathlib import Path
from typing import Any

from rich.console import Console

from loadtest.errors import LoadtestError
from loadtest.report import without_nan

_WRITTEN = ("output", "json", "plot", "save_trace")  # the options that name a file to be written
_PICTURES = (".png", ".svg", ".pdf")
_WIDE = 200  # columns for tables that go to a file or a pipe: as many as they need


class OutputError(LoadtestError):
    """A file that is to be written cannot be; the message says which and why."""


def positive_int(text: str) -> int:
    """A type of argparse."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"it is {text!r}, and must be a whole number from 1")
    return value


def positive_float(text: str) -> float:
    """A type of argparse."""
    return _within(text, lambda value: 0 < value < inf, "a number above 0")


def share(text: str) -> float:
    """A type of argparse."""
    return _within(text, lambda value: 0 < value <= 1, "a number above 0, at most 1")


def probability(text: str) -> float:
    """A type of argparse."""
    return _within(text, lambda value: 0 <= value <= 1, "a number from 0 to 1")


def _within(text: str, fits: Callable[[float], bool], what: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = nan
    if not fits(value):
        raise argparse.ArgumentTypeError(f"it is {text!r}, and must be {what}")
    return value


def refuse_unwritable(options: argparse.Namespace) -> None:
    """Raise OutputError for a file that could not be written at the end."""
    for name in _WRITTEN:
        path = getattr(options, name, None)
        if not isinstance(path, Path):
            continue
        flag = f"--{name.replace('_', '-')} is {str(path)!r}"
        if path.is_dir():
            raise OutputError(f"{flag}, which is a folder; name a file.")
        if not path.parent.is_dir():
            raise OutputError(f"{flag}, and there is no folder {str(path.parent)!r}; make it first.")
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise OutputError(f"{flag}, which may not be written; name a file elsewhere.")
        if name == "plot" and path.suffix.lower() not in _PICTURES:
            raise OutputError(f"{flag}; its name must end in {', '.join(_PICTURES[:-1])} or {_PICTURES[-1]}.")


def open_console() -> Console:
    """Standard output, for tables: as wide as they need. A narrow terminal wraps their lines, and no figure is cut."""
    return Console(width=max(Console().width, _WIDE))


def save_json(options: argparse.Namespace, document: Any) -> None:
    """Write figures where --json names a file; figures that are NaN become null."""
    if options.json:
        options.json.write_text(json.dumps(without_nan(document), indent=1) + "\n", encoding="utf-8")
