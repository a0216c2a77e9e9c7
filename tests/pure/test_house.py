"""CONTRIBUTING.md's table of figures is about what the sources are now. `python -m loadtest house --update CONTRIBUTING.md`"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from loadtest.house import BEGIN, END, ROOT, HouseError, Row, import_circles, measure_sources, read_table, update

CONTRIBUTING = ROOT / "CONTRIBUTING.md"
TOLERANCE = 0.05  # of a figure, or 2


def numbers(text: str) -> list[int]:
    return [int(number.replace(",", "")) for number in re.findall(r"[\d,]+", text)]


def test_the_table_has_a_row_for_every_figure() -> None:
    shown = read_table(CONTRIBUTING)
    measured = [row.name for row in measure_sources()]
    traced = [name for name in shown if name.startswith("traced token")]
    assert len(traced) == 2
    assert [*traced, *measured] == list(shown)


@pytest.mark.parametrize("row", measure_sources(), ids=lambda row: row.name)
def test_a_figure_is_current(row: Row) -> None:
    shown = numbers(read_table(CONTRIBUTING)[row.name])
    assert len(shown) == len(numbers(row.value))
    for old, new in zip(shown, numbers(row.value), strict=True):
        told = f"CONTRIBUTING.md says {old} and it is {new}: python -m loadtest house --update CONTRIBUTING.md"
        assert abs(old - new) <= max(2, TOLERANCE * new), told


def test_no_files_import_each_other_in_a_circle() -> None:
    assert import_circles().files == []


def test_an_update_replaces_the_table_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "document.md"
    path.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    update(path, [Row("lines", "12 / 3,400", "0")])
    assert read_table(path) == {"lines": "12 / 3,400"}
    assert path.read_text().startswith(f"before\n{BEGIN}\n| figure |")
    assert path.read_text().endswith(f"| 0 |\n{END}\nafter\n")
    path.write_text("nothing")
    with pytest.raises(HouseError, match="has no"):
        update(path, [])
