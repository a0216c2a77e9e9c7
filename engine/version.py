"""The running version, as /version, answers and metrics report it."""

from __future__ import annotations

from importlib import metadata


def _installed() -> str:
    try:
        return metadata.version("quire")
    except metadata.PackageNotFoundError:  # a checkout that was never installed
        return "0+uninstalled"


VERSION = _installed()
