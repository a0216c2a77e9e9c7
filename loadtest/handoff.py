"""What prefill on a daemon of its own does for running streams: one daemon against two, on the same two threads.

    python -m loadtest handoff --json handoff.json

The load is that of `loadtest latency`: streams, short requests, and one long prompt. On one machine nothing is gained in
all; what is told is who pays.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

from loadtest.daemon import daemon, get
from loadtest.latency import Drive, figures, show

_HEAD = """\
| | ITL p50 ms | ITL p99 ms | ratio | worst gap ms | TTFT of a short one ms | ratio | TTFT of the long one s |
|---|---|---|---|---|---|---|---|"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `handoff`."""
    parser.add_argument("--streams", type=int, default=8, metavar="N", help="that run; default %(default)s")
    parser.add_argument("--long", type=int, default=7000, metavar="TOKENS", help="the prompt; default %(default)s")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")


def run(options: argparse.Namespace) -> int:
    """Measure, print, write. 1 if no prompt was handed over."""
    print(_HEAD)
    rows, handed_over = {}, ""
    for name, variant in (("one daemon, two threads", _one), ("prefill and decode, a thread each", _two)):
        with variant() as port:
            rows[name] = figures(asyncio.run(Drive(port, options.streams, options.long).phases()))
            handed_over = "".join(
                line for line in get(port, "/metrics").splitlines() if "quire_handoffs_total{" in line
            )
        show(name, rows[name])
    print(f"\n{handed_over or 'nothing was handed over'}")
    if options.json:
        about = {"streams": options.streams, "long": options.long, "handoffs": handed_over}
        options.json.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    return 0 if 'outcome="received"' in handed_over else 1


@contextlib.contextmanager
def _one() -> Iterator[int]:
    with daemon(["--threads", "2"]) as port:
        yield port


@contextlib.contextmanager
def _two() -> Iterator[int]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:

        def transfer(**keys: str) -> list[str]:
            return ["--threads", "1", "--kv-transfer-config", json.dumps({"folder": folder, **keys})]

        with daemon(transfer(role="prefill")) as prefill:
            url = f"http://127.0.0.1:{prefill}"
            with daemon(transfer(role="decode", prefill_url=url)) as port:
                yield port
