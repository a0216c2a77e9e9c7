"""docs/models.md is what the code and its tests say now."""

from __future__ import annotations

from pathlib import Path

from engine.runtime.models.families import FAMILIES
from tests.cpu.models_page import page

PAGE = Path(__file__).parents[2] / "docs/models.md"


def test_the_page_is_up_to_date() -> None:
    found = page()
    assert PAGE.read_text(encoding="utf-8") == found, "run: python -m tests.cpu.models_page > docs/models.md"
    for family in FAMILIES:
        assert f"| `{family}` |" in found
