"""Types of argparse, and a check of output files before anything is measured."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from math import inf, nan
from pathlib import Path

from loadtest.errors import LoadtestError

_WRITTEN = ("output", "json", "plot", "save_trace")  # the options that name a file to be written
_PICTURES = (".png", ".svg", ".pdf")


def positive_int(text: str) -> int:
    """Return a whole number from 1; a type of argparse."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"it is {text!r}, and must be a whole number from 1")
    return value


def positive_float(text: str) -> float:
    """Return a number above 0; a type of argparse."""
    return _within(text, lambda value: 0 < value < inf, "a number above 0")


def not_negative(text: str) -> float:
    """Return a number from 0; a type of argparse."""
    return _within(text, lambda value: 0 <= value < inf, "a number from 0")


def share(text: str) -> float:
    """Return a number above 0, at most 1; a type of argparse."""
    return _within(text, lambda value: 0 < value <= 1, "a number above 0, at most 1")


def _within(text: str, fits: Callable[[float], bool], what: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = nan
    if not fits(value):
        raise argparse.ArgumentTypeError(f"it is {text!r}, and must be {what}")
    return value


def given(options: argparse.Namespace) -> dict[str, object]:
    """Return the options as a document shows them: without functions and the key."""
    return {name: value for name, value in vars(options).items() if name != "api_key" and not callable(value)}


def refuse_unwritable(options: argparse.Namespace) -> None:
    """Raise LoadtestError for a file that could not be written at the end."""
    for name in _WRITTEN:
        path = getattr(options, name, None)
        if not isinstance(path, Path):
            continue
        flag = f"--{name.replace('_', '-')} is {str(path)!r}"
        if path.is_dir():
            raise LoadtestError(f"{flag}, which is a folder; name a file.")
        if not path.parent.is_dir():
            raise LoadtestError(f"{flag}, and there is no folder {str(path.parent)!r}; make it first.")
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise LoadtestError(f"{flag}, which may not be written; name a file elsewhere.")
        if name == "plot" and path.suffix.lower() not in _PICTURES:
            raise LoadtestError(f"{flag}; its name must end in {', '.join(_PICTURES[:-1])} or {_PICTURES[-1]}.")
