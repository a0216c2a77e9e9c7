"""`quire bench`, `simulate`, `calibrate` and `tune`, and other benchmarks: `python -m loadtest COMMAND --help`."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from engine.core.errors import QuireError
from loadtest import (
    beside,
    compare,
    eviction,
    front,
    hostile,
    house,
    levers,
    perplexity,
    scheduler,
    steps,
    tiers,
)
from loadtest.arguments import open_console, positive_float, positive_int, refuse_unwritable
from loadtest.bench import PATHS, Asking, Level, Sweep, first_model
from loadtest.client import Client, Target
from loadtest.errors import LoadtestError
from loadtest.plots import draw_bench, require_matplotlib
from loadtest.report import show, write_json
from loadtest.simulation import calibrate, command, validate
from loadtest.tuning import command as tuning
from loadtest.workload import Job, Length, WorkloadError, arrivals, dataset, synthetic


def add_bench_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `bench`."""
    _add_target_options(parser)
    _add_load_options(parser)
    _add_request_options(parser)
    out = parser.add_argument_group("the report")
    out.add_argument("--json", type=Path, metavar="FILE", help="write all figures")
    out.add_argument("--plot", type=Path, metavar="FILE", help="a picture, .png or .svg")


def _add_target_options(parser: argparse.ArgumentParser) -> None:
    target = parser.add_argument_group("the server")
    target.add_argument("--base-url", metavar="URL", default="http://127.0.0.1:8000", help="default %(default)s")
    target.add_argument("--model", metavar="NAME", help="default: the first that /v1/models lists")
    target.add_argument("--endpoint", choices=tuple(PATHS), default="completions", help="default %(default)s")
    target.add_argument("--api-key", metavar="KEY", default="", help="sent as a bearer token")
    target.add_argument(
        "--timeout", metavar="S", type=positive_float, default=600.0, help="seconds a request may take; default 600"
    )


def _add_load_options(parser: argparse.ArgumentParser) -> None:
    load = parser.add_argument_group("the load")
    how = load.add_mutually_exclusive_group()
    how.add_argument(
        "--concurrency",
        metavar="N",
        type=positive_int,
        nargs="+",
        default=[1, 4, 16],
        help="requests in flight; default 1 4 16",
    )
    how.add_argument(
        "--request-rate",
        metavar="RATE",
        type=positive_float,
        nargs="+",
        help="requests a second, sent without waiting",
    )
    load.add_argument(
        "--burstiness",
        metavar="SHAPE",
        type=positive_float,
        default=1.0,
        help="with --request-rate: 1 is Poisson, less is burstier",
    )
    load.add_argument(
        "--num-prompts",
        metavar="N",
        type=positive_int,
        help="requests a point; default 4 a concurrent one, at least 16",
    )
    load.add_argument(
        "--num-warmups", metavar="N", type=int, default=2, help="requests sent before measuring; default %(default)s"
    )
    load.add_argument("--seed", metavar="N", type=int, default=0, help="what prompts, lengths and arrivals follow from")


def _add_request_options(parser: argparse.ArgumentParser) -> None:
    work = parser.add_argument_group("the requests")
    work.add_argument(
        "--input-len",
        metavar="N",
        type=_length,
        default=Length(64, 64),
        help="words a prompt, N or LOW:HIGH; default 64",
    )
    work.add_argument(
        "--output-len",
        metavar="N",
        type=_length,
        default=Length(64, 64),
        help="tokens to generate, N or LOW:HIGH; default 64",
    )
    work.add_argument(
        "--dataset",
        metavar="FILE",
        type=Path,
        help='JSONL of {"prompt": ..., "max_tokens": ...}, instead of random words',
    )
    work.add_argument("--prefix-len", metavar="N", type=int, default=0, help="words of a prefix that prompts share")
    work.add_argument(
        "--num-prefixes", metavar="N", type=positive_int, default=1, help="how many such prefixes there are"
    )
    work.add_argument("--temperature", metavar="T", type=float, default=0.0, help="default 0: greedy")
    work.add_argument(
        "--respect-eos",
        action="store_true",
        help="let answers end early; by default ignore_eos and min_tokens are sent",
    )


def _length(text: str) -> Length:
    try:
        return Length.parse(text)
    except WorkloadError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def run_bench(options: argparse.Namespace) -> int:
    """Sweep, print, write. 1 if any request failed, 130 if interrupted."""
    if options.plot:
        require_matplotlib()
    return asyncio.run(_bench(options))


async def _bench(options: argparse.Namespace) -> int:
    client = Client(Target.parse(options.base_url, options.api_key), options.timeout)
    sweep = Sweep()
    try:
        asking = Asking(
            options.model or await first_model(client), options.endpoint, options.temperature, not options.respect_eos
        )
        console = open_console()
        console.print(f"{asking.model} at {options.base_url}{asking.path}", style="bold", markup=False)
        running = asyncio.ensure_future(
            sweep.run(client, asking, _jobs(options, options.num_warmups, options.seed), _levels(options))
        )
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, running.cancel)
        await running
    finally:
        client.close()
    show(sweep.points, console)
    settings = {key: value for key, value in vars(options).items() if key not in ("run", "api_key")}
    if options.json:
        write_json(options.json, settings | {"model": asking.model}, sweep.points)
    if options.plot and sweep.points:
        draw_bench(options.plot, sweep.points, sweep.outcomes)
    if sweep.is_interrupted:
        console.print("Interrupted: the figures above are of what had been answered.", style="yellow")
        return 130
    return 1 if any(point.num_failed for point in sweep.points) else 0


def _jobs(options: argparse.Namespace, num: int, seed: int) -> list[Job]:
    if options.dataset:
        return dataset(options.dataset, num, output=options.output_len, seed=seed)
    return synthetic(
        num,
        prompt=options.input_len,
        output=options.output_len,
        seed=seed,
        prefix_len=options.prefix_len,
        num_prefixes=options.num_prefixes,
    )


def _levels(options: argparse.Namespace) -> list[Level]:
    """The points of the sweep, each with prompts of its own: a prefix cache must not answer for the level before."""
    levels = []
    for index, level in enumerate(options.request_rate or options.concurrency):
        seed = options.seed + 1 + index
        if options.request_rate:
            jobs = _jobs(options, options.num_prompts or 64, seed)
            timed = arrivals(jobs, rate=level, burstiness=options.burstiness, seed=seed)
            levels.append(Level(f"{level:g} requests/s", level, None, timed))
        else:
            jobs = _jobs(options, options.num_prompts or max(16, 4 * level), seed)
            levels.append(Level(f"concurrency {level}", level, level, jobs))
    return levels


COMMANDS: dict[str, tuple[str, Callable[[argparse.ArgumentParser], None], Callable[[argparse.Namespace], int]]] = {
    "bench": ("load an OpenAI-compatible server and measure it", add_bench_options, run_bench),
    "simulate": ("run the scheduler on a virtual clock", command.add_options, command.run),
    "calibrate": ("measure the time of steps here, for the simulator", calibrate.add_options, calibrate.run),
    "validate-simulation": ("compare the simulator with the real daemon", validate.add_options, validate.run),
    "tune": ("find this machine's settings for a model", tuning.add_options, tuning.run),
    "front": ("measure the HTTP front alone, over a fake engine", front.add_options, front.run),
    "compare": ("drive Quire and its peers by the same requests", compare.add_options, compare.run),
    "levers": ("measure the effect of each setting", levers.add_options, levers.run),
    "hostile": ("send hostile and heavy bodies, and watch /health", hostile.add_options, hostile.run),
    "house": ("measure the code itself", house.add_options, house.run),
    "beside": ("measure requests beside a long prompt", beside.add_options, beside.run),
    "eviction": ("compare the orders in which cached blocks go", eviction.add_options, eviction.run),
    "perplexity": ("score a text under settings of the daemon", perplexity.add_options, perplexity.run),
    "steps": ("time the parts of a step of the real engine", steps.add_options, steps.run),
    "tiers": ("measure host memory and a disk behind the KV pool", tiers.add_options, tiers.run),
    "scheduler": ("time the scheduler alone", scheduler.add_options, scheduler.run),
}

_QUIRES = ("bench", "simulate", "calibrate", "tune")  # the `quire` command has these too


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status. A user's mistake is one sentence on stderr."""
    parser = argparse.ArgumentParser(prog="python -m loadtest", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, (summary, add_options, run) in COMMANDS.items():
        command = commands.add_parser(
            name,
            prog=f"{'quire' if name in _QUIRES else 'python -m loadtest'} {name}",
            help=summary,
            description=summary[0].upper() + summary[1:] + ".",
        )
        add_options(command)
        command.set_defaults(run=run)
    options = parser.parse_args(argv)
    try:
        refuse_unwritable(options)
        status: int = options.run(options)
    except (QuireError, LoadtestError, OSError) as error:
        print(f"quire: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("quire: Interrupted.", file=sys.stderr)
        return 130
    return status


if __name__ == "__main__":
    sys.exit(main())
