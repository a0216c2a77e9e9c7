"""Writes docs/reference/: settings, API, fields, metrics, errors, headers and commands, from the code that defines them.

    python -m tests.reference

test_reference.py compares. This lies beside the tests because it reads parts of the code that may not import each other.
"""

from __future__ import annotations

from pathlib import Path

from tests.reference.pages import pages

FOLDER = Path("docs/reference")


def main() -> None:
    """Write the pages; leave unchanged ones alone."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, text in pages().items():
        path = FOLDER / name
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
