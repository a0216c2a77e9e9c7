"""Packs matrices in the background, in order, while a model's parts are made.

Between two matrices a thread needs the GIL, for which it waits while the HTTP side is imported. So `Packer.behind` gives
the calls of the library to two threads: while one waits, the other one packs. The thread that builds the engine owns the
packer; the others only run the calls.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

_THREADS = 2
_MAX_PENDING = 64  # calls and reports, while one thread packs the largest matrix; more would show progress late


class Packer:
    """Runs calls that pack matrices, and reports on them."""

    def __init__(self) -> None:
        self.begin: Callable[[], None] = lambda: None  # what each thread does first
        self._pool: ThreadPoolExecutor | None = None
        self._pending: deque[Future[None] | Callable[[], None]] = deque()

    @contextmanager
    def behind(self) -> Iterator[None]:
        """Inside the block, calls run on other threads; at its end all are done. Raises what a call raised."""
        pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="packer", initializer=self.begin)
        self._pool = pool
        try:
            yield
            self._finish(0)
        finally:
            self._pool = None
            self._pending.clear()
            pool.shutdown(cancel_futures=True)

    def run(self, call: Callable[[], None]) -> None:
        """Run a call: now, or in a block of `behind` soon."""
        if self._pool is None:
            call()
            return
        self._pending.append(self._pool.submit(call))
        self._finish(_MAX_PENDING)

    def after(self, report: Callable[[], None]) -> None:
        """Run a report on this thread, once all calls before it are done."""
        self._pending.append(report)
        self._finish(_MAX_PENDING if self._pool else 0)

    def _finish(self, num_left: int) -> None:
        """Wait for the first calls until `num_left` are pending, and for no more than that."""
        while self._pending:
            first = self._pending[0]
            if isinstance(first, Future):
                if len(self._pending) <= num_left and not first.done():
                    return
                self._pending.popleft()
                first.result()
            else:
                self._pending.popleft()
                first()
