"""The running version, as --version, /version, answers and metrics report it. Its number is in pyproject.toml alone."""

from __future__ import annotations

import shutil
import subprocess
from importlib import metadata
from pathlib import Path

COMMIT_FILE = "commit.txt"  # in engine/, in a wheel
_ENGINE = Path(__file__).resolve().parents[1]


def _installed() -> str:
    try:
        return metadata.version("quire-serve")
    except metadata.PackageNotFoundError:  # a checkout that was never installed
        return "0+uninstalled"


VERSION = _installed()


def commit() -> str:
    """Return the commit this code was built from, or the checkout's; "" if neither is known."""
    noted = _ENGINE / COMMIT_FILE
    if noted.is_file():
        return noted.read_text(encoding="ascii").strip()
    git = shutil.which("git")
    if git is None or not (_ENGINE.parent / ".git").exists():
        return ""
    command = (git, "-C", str(_ENGINE.parent), "describe", "--always", "--dirty", "--abbrev=12")
    run = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - our own words
    return run.stdout.strip()
