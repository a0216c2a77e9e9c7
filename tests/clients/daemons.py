"""Daemons in processes of their own, for clients to talk to.

The clients' Python may be another than the daemon's (`make clients`); then DAEMON_PYTHON names the latter.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.patience import PATIENCE_S

ROOT = Path(__file__).parents[2]
SERVE = ("-m", "server")  # what Python runs to be the `quire` command


@contextmanager
def serving(*flags: str, command: Sequence[str] = SERVE) -> Iterator[str]:
    """Start a daemon, give its address, and end it."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("QUIRE_")}
    process = subprocess.Popen(
        [os.environ.get("DAEMON_PYTHON", sys.executable), *command, "serve", "--port", "0", *flags],
        cwd=ROOT,
        env=kept,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    told: list[str] = []
    try:
        for line in process.stderr:
            told.append(line)
            if found := re.search(r"ready in [\d.]+ s: (\S+)", line):
                break
        else:
            raise AssertionError(f"the daemon did not start: {''.join(told)}")
        # What it says later has to be read, or it would wait when the pipe is full.
        reader = threading.Thread(target=told.extend, args=(process.stderr,), daemon=True)
        reader.start()
        yield found.group(1)
        process.terminate()
        assert process.wait(timeout=PATIENCE_S) == 0, "".join(told)
        assert not any("Traceback" in line for line in told), "".join(told)
    finally:
        process.kill()
        process.wait()
        process.stderr.close()
