"""How long a test waits for what must happen: a bound, never a measurement.

A wait ends on its event. The bound only turns a hang into a failure, so it is far beyond what a loaded machine takes.
"""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE_S = 120.0
POLL_S = 0.002


def eventually(holds: Callable[[], bool]) -> None:
    """Return once `holds()` is true; fail after PATIENCE_S."""
    give_up_s = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < give_up_s, "it never happened"
        time.sleep(POLL_S)
