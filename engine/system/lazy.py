"""Imports what a table names as "module:attribute", when it is asked for. Standard library only."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def load(place: str) -> Any:
    """Return the attribute of a module."""
    module, _, attribute = place.partition(":")
    return getattr(import_module(module), attribute)
