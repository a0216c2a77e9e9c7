"""CONTRIBUTING.md's table of figures is about what the sources are now. `python -m tools house --update CONTRIBUTING.md`"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from loadtest.errors import LoadtestError
from tools import house
from tools.house import BEGIN, END, ROOT, Row, measure_sources, read_table, update

CONTRIBUTING = ROOT / "CONTRIBUTING.md"
TOLERANCE = 0.05  # of a figure, or 2


def numbers(text: str) -> list[int]:
    return [int(number.replace(",", "")) for number in re.findall(r"[\d,]+", text)]


@pytest.fixture(scope="module")
def measured() -> dict[str, str]:
    """The figures of the sources. Seconds of a core, so they are measured once, and not when tests are collected."""
    return {row.name: row.value for row in measure_sources()}


def test_the_table_has_a_row_for_every_figure(measured: dict[str, str]) -> None:
    shown = list(read_table(CONTRIBUTING))
    assert all(name.startswith("traced ") for name in shown[:3])
    assert shown[3:] == list(measured)


def test_every_figure_is_current(measured: dict[str, str]) -> None:
    shown = read_table(CONTRIBUTING)
    for name, value in measured.items():
        check_figure(numbers(shown[name]), numbers(value))


def test_the_readme_counts_the_same_lines(measured: dict[str, str]) -> None:
    readme = (ROOT / "README.md").read_text()
    scheduler = (ROOT / "engine/core/scheduling/scheduler.py").read_text()
    limits = re.findall(r"under (\d+) lines of integers", readme)
    assert limits
    assert all(len(scheduler.splitlines()) < int(limit) for limit in limits)
    found = re.search(r"(\d+) k of Python, (\d+) k of C", readme)
    assert found is not None
    for thousands, row in zip(
        found.groups(), ("engine and server: lines of Python", "engine: lines of C"), strict=True
    ):
        assert abs(int(thousands) - numbers(measured[row])[0] / 1000) < 1


def check_figure(shown: list[int], measured: list[int]) -> None:
    """Compare the numbers of one row."""
    assert len(shown) == len(measured)
    for old, new in zip(shown, measured, strict=True):
        told = f"CONTRIBUTING.md says {old} and it is {new}: python -m tools house --update CONTRIBUTING.md"
        assert abs(old - new) <= max(2, TOLERANCE * new), told


def test_packages_that_contain_each_other_are_a_circle_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in (
        ("engine/a.py", "import engine.inner.b"),
        ("engine/inner/b.py", "import engine.c"),
        ("engine/c.py", "x = 1"),
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(house, "ROOT", tmp_path)
    circles = house.import_circles()
    assert circles == house.Circles([], [], [["engine", "engine/inner"]])


def test_a_broad_except_hides_what_it_does_not_raise_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    handlers = {
        "except Exception:\n    pass": False,
        "except (OSError, BaseException) as error:  # a plugin\n    print(error)": True,
        "except:\n    # a plugin\n    pass": True,
        "except OSError:\n    pass": None,
        "except BaseException:\n    undo()\n    raise": None,
    }
    monkeypatch.setattr(house, "ROOT", tmp_path)
    path = tmp_path / "a.py"
    for handler, has_reason in handlers.items():
        path.write_text(f"try:\n    work()\n{handler}\n")
        found = [each.has_reason for each in house.broad_excepts(path)]
        assert found == ([] if has_reason is None else [has_reason]), handler


def test_an_update_replaces_the_table_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "document.md"
    path.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    update(path, [Row("lines", "12 / 3,400", "0")])
    assert read_table(path) == {"lines": "12 / 3,400"}
    assert path.read_text().startswith(f"before\n{BEGIN}\n| figure |")
    assert path.read_text().endswith(f"| 0 |\n{END}\nafter\n")
    path.write_text("nothing")
    with pytest.raises(LoadtestError, match="has no"):
        update(path, [])
