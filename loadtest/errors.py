"""The base of all errors of a benchmark that are the user's to mend: one sentence on stderr, exit status 2."""

from __future__ import annotations


class LoadtestError(Exception):
    """The message says which value is wrong, or what is missing."""
