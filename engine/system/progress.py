"""Reports the progress of start-up by bars and log lines, and that of offline runs by bars.

Runs on the main thread, before the server listens. On a terminal a bar shows what can be counted, elsewhere a line every
ten seconds does. Everywhere, each stage that is done is one log line.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, final

from engine.core.types import Progress

if TYPE_CHECKING:
    from rich.progress import Progress as Bars
    from rich.progress import TaskID

log = logging.getLogger("quire.startup")

LINE_EVERY_S = 10.0  # where no bar shows the progress of a long stage
_UNITS = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))


@final
class StartupProgress:
    """A context manager around loading; build_engine calls its `report`."""

    def __init__(self, *, show_bars: bool | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        show = sys.stderr.isatty() if show_bars is None else show_bars
        self._bars = _make_bars() if show else None
        self._tasks: dict[str, TaskID] = {}
        self._clock = clock
        self._said = ""
        self._said_s = clock()

    def __enter__(self) -> StartupProgress:
        if self._bars:
            self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bars:
            self._bars.stop()

    def report(self, progress: Progress) -> None:
        """Move the stage's bar, or log where it stands; log the stage once it is complete."""
        line = f"{_title(progress)}: {_count(progress) if progress.total else progress.detail}"
        is_done = progress.done >= progress.total
        if is_done and line == self._said:
            return
        if progress.total and self._bars:
            self._show(self._bars, progress)
        is_due = not self._bars and self._clock() - self._said_s >= LINE_EVERY_S
        if is_done or is_due:
            self._said, self._said_s = line, self._clock()
            log.info("%s", line)

    def _show(self, bars: Bars, progress: Progress) -> None:
        """Move a stage's bar, which goes once the stage is complete."""
        task = self._tasks.get(progress.stage)
        if progress.done >= progress.total:
            if task is not None:
                bars.remove_task(self._tasks.pop(progress.stage))
            return
        count = _count(progress)
        if task is None:  # begun where the stage stands, which may be resumed: the rate counts from there
            task = bars.add_task(_title(progress), total=progress.total, completed=progress.done, count=count)
            self._tasks[progress.stage] = task
        bars.update(task, completed=progress.done, total=progress.total, count=count)


def _make_bars() -> Bars:
    """Return bars on the terminal of standard error."""
    from rich.console import Console  # 20 ms, and most daemons have no terminal
    from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    columns = (
        TextColumn("{task.description:12}"),
        BarColumn(),
        TextColumn("{task.fields[count]}"),
        TimeRemainingColumn(),
    )
    return Bars(*columns, console=Console(stderr=True), transient=True)


def run_bars(*, show: bool) -> Bars:
    """Return the bars of an offline run, with items counted; disabled where standard error is no terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
    )
    return Bars(*columns, console=console, disable=not (show and (console.is_terminal or console.is_jupyter)))


def _title(progress: Progress) -> str:
    return progress.stage.replace("_", " ")


def _count(progress: Progress) -> str:
    if progress.unit != "bytes":
        return f"{progress.done:,} of {progress.total:,} {progress.unit}"
    return f"{human_bytes(progress.done)} of {human_bytes(progress.total)}"


def human_bytes(size: int) -> str:
    """Return a size with about three significant figures: 93.8 MiB."""
    return next((f"{size / scale:.1f} {unit}" for unit, scale in _UNITS if size >= scale), f"{size} B")
