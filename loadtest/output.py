"""Reports: tables in Markdown, figures as JSON, progress on stderr."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


def markdown(head: Sequence[str], rows: Iterable[Sequence[object]], num_names: int = 1) -> Iterator[str]:
    """Yield the lines of a table; all columns but the first few are figures."""
    cells = [[str(cell) for cell in row] for row in (head, *rows)]
    widths = [max(3, *map(len, column)) for column in zip(*cells, strict=True)]
    rule = [("-" * (width - 1)) + ("-" if index < num_names else ":") for index, width in enumerate(widths)]
    for row in (cells[0], rule, *cells[1:]):
        padded = [
            cell.ljust(width) if index < num_names else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield f"| {' | '.join(padded)} |"


def print_table(head: Sequence[str], rows: Iterable[Sequence[object]], num_names: int = 1) -> None:
    """Print a table, and flush it: the next figure may take minutes."""
    print("\n" + "\n".join(markdown(head, rows, num_names)) + "\n", flush=True)


def in_ms(seconds: float, digits: int = 2) -> str:
    """Return seconds as milliseconds for a table; "-" for NaN."""
    return "-" if math.isnan(seconds) else f"{seconds * 1e3:,.{digits}f}"


def progress_bar() -> Progress:
    """Return one line a task, on stderr: the output may go to a file."""
    columns = TextColumn("{task.description:>24}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    return Progress(*columns, console=Console(stderr=True))


def save_json(path: Path | None, document: Any) -> None:
    """Write a document as JSON, if a file is named."""
    if path is not None:
        path.write_text(json.dumps(without_nan(document), indent=1, default=str) + "\n", encoding="utf-8")


def without_nan(value: Any) -> Any:
    """Return a document that JSON can hold: NaN becomes null, a dataclass an object."""
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, dict):
        return {key: without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(item) for item in value]
    return None if isinstance(value, float) and math.isnan(value) else value
