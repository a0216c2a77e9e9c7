"""The parrot as a process of its own, whose memory can be measured: prints its URL, serves until its input ends."""

from __future__ import annotations

import sys

from harness import Live

if __name__ == "__main__":
    with Live().serving() as live:
        print(live.url, flush=True)
        sys.stdin.read()
