"""Measures a prompt that another daemon has computed: loaded from its K/V folder, against computed.

    python -m loadtest sharing            # two daemons on one folder
    python -m loadtest sharing --peer     # the second reads the first one's folder over TCP

Each round the first daemon computes a new prompt, and the second one answers it once it can know the blocks; then the
second one computes another prompt. Times are those of a request for one token, measured by its client.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from loadtest.arguments import positive_int
from loadtest.daemon import daemon, get_json, total
from loadtest.errors import LoadtestError
from loadtest.output import in_ms, print_table, save_json
from loadtest.peers.process import free_port

_BLOCK = 16  # tokens
_LIMIT_S = 60.0  # until a prompt is written
_LOOK_S = 2.5  # in which a daemon looks at the other's blocks


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("--peer", action="store_true", help="share over TCP, not through a common folder")
    parser.add_argument("--tokens", type=positive_int, default=2000, help="of a prompt; default 2000")
    parser.add_argument("--rounds", type=positive_int, default=5, help="default 5")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("settings", nargs="*", metavar="SETTING", help="after --, more of what `quire serve` takes")


def run(args: argparse.Namespace) -> int:
    """Run the rounds and print the medians."""
    address, loaded_s, computed_s, cached = f"127.0.0.1:{free_port()}", [], [], []
    with tempfile.TemporaryDirectory() as folder:
        own = {"host_gib": 1, "folder": folder, "disk_gib": 2}
        first_has = {**own, "listen": address} if args.peer else own
        second_has = {"host_gib": 1, "peer": address} if args.peer else own
        common = ["--block-size", str(_BLOCK), *args.settings, "--kv-offload-config"]
        with daemon([*common, json.dumps(first_has)]) as first, daemon([*common, json.dumps(second_has)]) as second:
            for number in range(args.rounds):
                shared, other = _prompt(2 * number, args.tokens), _prompt(2 * number + 1, args.tokens)
                _ask(first, shared)
                _await(first, (number + 1) * ((args.tokens - 1) // _BLOCK))
                seconds, usage = _ask(second, shared)
                loaded_s.append(seconds)
                cached.append(usage["prompt_tokens_details"]["cached_tokens"])
                computed_s.append(_ask(second, other)[0])
    rows = {"computed": median(computed_s), "loaded from the other": median(loaded_s)}
    print_table(
        (f"a prompt of {args.tokens} tokens, {min(cached)} of them cached", "ms"),
        [(name, in_ms(value)) for name, value in rows.items()],
    )
    if args.json is not None:
        save_json(args.json, {"tokens": args.tokens, "cached": cached, "loaded_s": loaded_s, "computed_s": computed_s})
    return 0


def _prompt(seed: int, num_tokens: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(100, 40_000) for _ in range(num_tokens)]


def _ask(port: int, prompt: list[int]) -> tuple[float, dict[str, Any]]:
    begun_s = time.perf_counter()
    answer = get_json(port, "/v1/completions", {"prompt": prompt, "max_tokens": 1, "temperature": 0})
    return time.perf_counter() - begun_s, answer["usage"]


def _await(port: int, num_blocks: int) -> None:
    """Wait until a daemon has written so many blocks, and others have looked."""
    end_s = time.monotonic() + _LIMIT_S
    while (found := total(port, "quire_kv_offload_disk_blocks")) < num_blocks:
        if time.monotonic() > end_s:
            raise LoadtestError(f"the first daemon has written {found} of {num_blocks} blocks.")
        time.sleep(0.2)
    time.sleep(_LOOK_S)
