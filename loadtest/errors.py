"""The error that ends a command with one sentence and status 2."""

from __future__ import annotations


class LoadtestError(Exception):
    """The message says which value is wrong, or what is missing."""
