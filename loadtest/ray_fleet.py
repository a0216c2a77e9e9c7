"""`python -m loadtest ray`: the load of `loadtest fleet` on a local Ray cluster, by prefix and by power of two choices.

Needs `quire-serve[ray]`. Every run deploys new daemons, so that no cache outlives it; both policies get the same requests.
"""

from __future__ import annotations

import argparse
import asyncio
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from loadtest.arguments import positive_float, positive_int
from loadtest.fleet.command import Run, show
from loadtest.fleet.load import Load, draw, prefixes_of
from loadtest.fleet.runs import closed_loop, figures_of, token_ids
from loadtest.peers.process import free_port
from loadtest.simulation.credits import cacheable
from loadtest.simulation.fleet_figures import Figures

POLICIES = ("pow2", "prefix")
_ROOT = Path(__file__).parents[1]
_TEMPLATE_TOKENS = 16


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `ray`."""
    parser.add_argument("--policy", nargs="+", choices=POLICIES, default=POLICIES, help="default: both, in turns")
    parser.add_argument("--runs", type=positive_int, default=1, metavar="N", help="of each policy; default 1")
    parser.add_argument("--daemons", type=positive_int, default=2, metavar="N", help="default 2")
    parser.add_argument("--clients", type=positive_int, default=8, metavar="N", help="of the closed loop; default 8")
    parser.add_argument("--requests", type=positive_int, default=200, metavar="N", help="a run; default 200")
    parser.add_argument("--blocks", type=positive_int, default=512, metavar="N", help="of a daemon's pool; default 512")
    parser.add_argument("--overcommit", type=positive_float, default=1.7, metavar="X", help="pools; default 1.7")
    parser.add_argument("--prefix-words", type=positive_int, default=592, metavar="N", help="default 592")
    parser.add_argument("--distinct", action="store_true", help="give every prompt a prefix of its own")
    parser.add_argument("--seed", type=int, default=1, help="of the first run; default 1")


def run(options: argparse.Namespace) -> int:
    """Run both policies in turns and print; 1 if a request failed."""
    size = 16
    num = prefixes_of(options.overcommit, options.blocks * size, options.prefix_words + _TEMPLATE_TOKENS)
    load = Load(options.requests, 0 if options.distinct else num, options.prefix_words, 8, 8)
    flags = [
        *("--num-threads", "1", "--num-gpu-blocks-override", str(options.blocks), "--block-size", str(size)),
        *("--max-model-len", str(2 * options.prefix_words + 512)),
    ]
    runs: list[Run] = []
    with _cluster() as port:
        for seed in range(options.seed, options.seed + options.runs):
            for policy in options.policy:
                seen = _measure(port, policy, flags, options, load, seed, size)
                runs.append(Run("ray", policy, "distinct" if options.distinct else "prefixes", seed, seen, None))
    show(runs)
    return int(any(each.seen.num_failed for each in runs))


@contextmanager
def _cluster() -> Iterator[int]:
    """Start Ray on this machine's loopback; yields its HTTP proxy's port."""
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": str(_ROOT)}
    import ray
    from ray import serve

    ray.init(num_cpus=64, include_dashboard=False, log_to_driver=False, _node_ip_address="127.0.0.1")
    port = free_port()
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    try:
        yield port
    finally:
        serve.shutdown()
        ray.shutdown()


def _measure(
    port: int, policy: str, flags: list[str], options: argparse.Namespace, load: Load, seed: int, block_size: int
) -> Figures:
    from ray import serve

    from server.ray_serve.deployment import build

    prompts = draw(load, seed)
    serve.run(build({"flags": flags, "replicas": options.daemons, "router": policy}), name="quire", route_prefix="/")
    try:
        model = "SmolLM2-135M-Instruct"
        ideal = sum(cacheable(token_ids(port, model, prompts), block_size))
        outcomes = asyncio.run(closed_loop(port, model, prompts, options.clients))
    finally:
        serve.delete("quire")
    return figures_of(outcomes, ideal, ())
