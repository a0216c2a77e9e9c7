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

from loadtest.fleet.command import Run, show
from loadtest.fleet.daemons import Sizes
from loadtest.fleet.load import Load, add_load_options, draw, load_of
from loadtest.fleet.runs import figures_of, send_all, token_ids
from loadtest.peers.process import free_port
from loadtest.simulation.credits import cacheable
from loadtest.simulation.fleet_figures import Figures

POLICIES = ("pow2", "prefix")
_ROOT = Path(__file__).parents[1]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `ray`."""
    parser.add_argument("--policy", nargs="+", choices=POLICIES, default=POLICIES, help="default: both, in turns")
    add_load_options(parser)


def run(options: argparse.Namespace) -> int:
    """Run both policies in turns and print; 1 if a request failed."""
    load = load_of(options)
    sizes = Sizes(options.blocks, options.block_size, 2 * options.prefix_words + 512)
    runs: list[Run] = []
    with _cluster() as port:
        for seed in range(options.seed, options.seed + options.runs):
            for policy in options.policy:
                seen = _measure(port, policy, sizes, options, load, seed)
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


def _measure(port: int, policy: str, sizes: Sizes, options: argparse.Namespace, load: Load, seed: int) -> Figures:
    from ray import serve

    from server.ray_serve.deployment import build

    prompts = draw(load, seed)
    app = build({"flags": sizes.arguments(), "replicas": options.daemons, "router": policy})
    serve.run(app, name="quire", route_prefix="/")
    try:
        model = "SmolLM2-135M-Instruct"
        ideal = sum(cacheable(token_ids(port, model, prompts), sizes.block_size))
        outcomes = asyncio.run(send_all(port, model, prompts, options.clients))
    finally:
        serve.delete("quire")
    return figures_of(outcomes, ideal, ())
