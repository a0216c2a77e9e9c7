"""`quire simulate sjf`: how well sjf does on some workloads, by what it knows (sjf.py)."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from functools import partial

from loadtest.arguments import open_console, positive_int
from loadtest.simulation import asked
from loadtest.simulation.calibrate import progress_bar
from loadtest.simulation.costs import StepCosts
from loadtest.simulation.replica import SimulationError
from loadtest.simulation.sjf import VARIANTS, compare, gained, show
from loadtest.simulation.variants import make_variants
from loadtest.simulation.workloads import WORKLOADS


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare what the way takes."""
    asked.add_options(parser)
    parser.add_argument(
        "--rounds",
        type=positive_int,
        default=3,
        metavar="N",
        help="of each workload, with other seeds; default 3",
    )


def run(options: argparse.Namespace) -> int:
    """Compare, print, write."""
    costs, console = StepCosts.load(options.costs), open_console()
    variants = make_variants(costs.settings, None, options.assignments)
    if len(variants) > 1:
        raise SimulationError(f"sjf is compared under one setting, and --set names {len(variants)}.")
    names = [asked.name(source) for source in options.source]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise SimulationError(f"two of the traces are called {twice!r}; give each a name of its own.")
    config = variants[0].config
    found = {}
    with progress_bar() as progress:
        for name, source in zip(names, options.source, strict=True):
            num_rounds = options.rounds if source in WORKLOADS else 1
            rounds = [
                asked.rows(source, options, config.max_model_len, console, num_before=n) for n in range(num_rounds)
            ]
            task = progress.add_task(name, total=len(VARIANTS) * len(rounds))
            found[name] = compare(
                rounds, config, costs, depth=options.depth, new_replica=asked.new_replica(options),
                on_run=partial(progress.advance, task),
            )  # fmt: skip
    show(found, console)
    if options.json:
        figures = [
            {"workload": workload, "variant": variant, "gained": gained(results, variant), **asdict(each)}
            for workload, results in found.items()
            for variant, each in results.items()
        ]
        asked.write(options, {"rounds": options.rounds, "config": asdict(config), "sjf": figures})
    if options.plot:
        from loadtest.simulation.plots import draw_sjf

        draw_sjf(options.plot, found)
    return 0
