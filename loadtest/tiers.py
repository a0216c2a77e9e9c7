"""Measures the time to first token with cached prefixes: after a restart, with a small pool, and with a pin.

The prefixes are of 2048 tokens, with 16 of each request's own behind them; times are until the first token, which is the
only one. Knows the daemon only as a command and an address.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from loadtest.arguments import save_json
from loadtest.daemon import daemon, get

_PREFIX, _OWN = 2048, 16
_NUM_PREFIXES, _ROUNDS = 4, 6
_FIRST_ID, _LAST_ID = 1000, 40_000  # ordinary tokens of the default model
# Room for one prefix and a bit; 2048 tokens of the default model are 45 MiB in bfloat16.
_SMALL_POOL = "70MiB"
# Room for three, one of which may be pinned; what comes between two requests for it is of five others.
_PINNING_POOL, _PINNED_SHARE, _SCANNED = "150MiB", "0.4", 5
_SETTLE_S = 60.0


class Asked(NamedTuple):
    """One request as it went."""

    first_token_s: float
    details: dict[str, Any]  # usage.prompt_tokens_details


def _ids(seed: int, count: int) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(_FIRST_ID, _LAST_ID) for _ in range(count)]


def _ask(port: int, prefix: int, own: int, **fields: Any) -> Asked:
    prompt = _ids(prefix, _PREFIX) + _ids(-1 - own, _OWN)
    body = json.dumps({"prompt": prompt, "max_tokens": 1, "temperature": 0, **fields}).encode()
    url = f"http://127.0.0.1:{port}/v1/completions"
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    begun_s = time.perf_counter()
    with urllib.request.urlopen(request, timeout=120) as answer:  # noqa: S310
        usage = json.loads(answer.read())["usage"]
    return Asked(time.perf_counter() - begun_s, usage["prompt_tokens_details"])


def _stored(port: int) -> int:
    lines = [line for line in get(port, "/metrics").splitlines() if line.startswith("quire_kv_offload_blocks_total")]
    return int(sum(float(line.split()[-1]) for line in lines if 'direction="store"' in line))


def _await_stores(port: int, num_blocks: int) -> None:
    until_s = time.monotonic() + _SETTLE_S
    while _stored(port) < num_blocks and time.monotonic() < until_s:
        time.sleep(0.05)


def _restart(flags: Sequence[str]) -> dict[str, Any]:
    """First tokens of one prefix: computed, found in the pool, and after a restart with the disk and without."""
    figures: dict[str, list[Asked]] = {"computed": [], "pool": [], "disk": [], "restart without": []}
    with tempfile.TemporaryDirectory(prefix="quire-kv-") as folder:
        tiered = [*flags, "--kv-offload-config", json.dumps({"host_gib": 1, "folder": folder})]
        with daemon(tiered) as port:
            for prefix in range(_NUM_PREFIXES):
                figures["computed"].append(_ask(port, prefix, 0))
                figures["pool"].append(_ask(port, prefix, 1))
            _await_stores(port, _NUM_PREFIXES * _PREFIX // 16)
        with daemon(tiered) as again, daemon(flags) as without:
            _ask(again, 99, 0)  # so that no daemon's first step is among them
            _ask(without, 99, 0)
            for prefix in range(_NUM_PREFIXES):
                figures["disk"].append(_ask(again, prefix, 2))
                figures["restart without"].append(_ask(without, prefix, 2))
    return {name: _summary(asked) for name, asked in figures.items()}


def _small_pool(flags: Sequence[str]) -> dict[str, Any]:
    """First tokens of prefixes asked about in turn, of which the pool holds one."""
    small = [*flags, "--kv-cache-memory-bytes", _SMALL_POOL]
    figures: dict[str, list[Asked]] = {"pool alone": [], "host memory behind it": []}
    with daemon(small) as without, daemon([*small, "--kv-offload-config", '{"host_gib": 1}']) as tiered:
        for turn in range(_NUM_PREFIXES * (1 + _ROUNDS)):
            for name, port in zip(figures, (without, tiered), strict=True):
                asked = _ask(port, turn % _NUM_PREFIXES, turn)
                if turn >= _NUM_PREFIXES:
                    figures[name].append(asked)
    return {name: _summary(asked) for name, asked in figures.items()}


def _pinned(flags: Sequence[str]) -> dict[str, Any]:
    """First tokens of a prefix, pinned and not, after requests for others that fill the pool twice."""
    figures: dict[str, list[Asked]] = {"first": [], "not retained, after a scan": [], "retained, after a scan": []}
    small = [*flags, "--kv-cache-memory-bytes", _PINNING_POOL, "--pinned-prefix-share", _PINNED_SHARE]
    with daemon(small) as port:
        _ask(port, 999, 0)  # so that no daemon's first step is among them
        for turn in range(_ROUNDS):
            for name, fields in (("not retained", {}), ("retained", {"prompt_cache_options": {"ttl": "30m"}})):
                prefix = 0 if fields else 1000 + turn
                first = _ask(port, prefix, 100 * turn, **fields)
                if not fields:
                    figures["first"].append(first)
                for other in range(_SCANNED):
                    _ask(port, 10_000 + (2 * turn + bool(fields)) * _SCANNED + other, 0)
                figures[f"{name}, after a scan"].append(_ask(port, prefix, 100 * turn + 1))
    return {name: _summary(asked) for name, asked in figures.items()}


_PARTS = {"restart": _restart, "pool too small": _small_pool, "pinned": _pinned}


def _summary(asked: Sequence[Asked]) -> dict[str, Any]:
    cached = {key for each in asked for key in each.details}
    return {
        "first_token_ms": round(1e3 * statistics.median(each.first_token_s for each in asked), 1),
        "all_ms": [round(1e3 * each.first_token_s, 1) for each in asked],
        "tokens": {key: sum(each.details.get(key) or 0 for each in asked) for key in sorted(cached)},
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `tiers`."""
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--parts", nargs="*", choices=tuple(_PARTS), default=[*_PARTS], help="default: all")
    parser.add_argument("--flags", nargs="*", default=["--dtype", "bfloat16"], help="of all daemons")


def run(options: argparse.Namespace) -> int:
    """Measure and print a table; write it as JSON if asked."""
    parts = {name: _PARTS[name](options.flags) for name in options.parts}
    print(
        f"first token after {_PREFIX} shared and {_OWN} own tokens\n\n| | median ms | cached tokens of {_PREFIX + _OWN} |"
    )
    print("|---|---|---|")
    for part, figures in parts.items():
        for name, summary in figures.items():
            cached = summary["tokens"]["cached_tokens"] / len(summary["all_ms"])
            print(f"| {part}: {name} | {summary['first_token_ms']:.0f} | {cached:.0f} |")
    save_json(options, {"flags": options.flags, **parts})
    return 0
