"""Measures the effect of settings: daemons that differ in one, driven in turns.

All variants of a setting run side by side and get the same requests round by round, so that a drift of the machine's
speed affects all of them. The table shows medians of the rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
from typing import NamedTuple

from loadtest.arguments import positive_int
from loadtest.bench import Level, measure
from loadtest.daemon import daemon, total
from loadtest.output import in_ms, print_table
from loadtest.report import Point
from loadtest.workload import Job, Length, copying, synthetic


class Lever(NamedTuple):
    """One setting, its variants, and a workload that shows its effect."""

    flag: str
    variants: tuple[str, ...]
    concurrency: int
    num_prompts: int
    prompt: Length
    output: Length
    prefix_len: int = 0
    shared: str = ""  # flags of all variants
    copies: bool = False  # answers are copied from their prompts
    temperature: float = 0.0

    def jobs(self, seed: int) -> list[Job]:
        """Return new prompts for each round, the same for every variant."""
        if self.copies:
            return copying(self.num_prompts, prompt=self.prompt, output=self.output, seed=seed)
        return synthetic(
            self.num_prompts, prompt=self.prompt, output=self.output, seed=seed, prefix_len=self.prefix_len
        )


SHORT, MEDIUM, LONG = Length(8, 32), Length(64, 64), Length(400, 600)
LEVERS = (
    Lever("--kv-cache-memory-bytes", ("16MiB", "32MiB", "2GiB"), 16, 32, MEDIUM, MEDIUM),
    Lever("--max-num-seqs", ("1", "4", "16"), 16, 32, MEDIUM, MEDIUM),
    Lever("--max-num-batched-tokens", ("64", "256", "512", "2048"), 8, 24, Length(8, 600), MEDIUM),
    Lever("--block-size", ("4", "16", "64"), 16, 32, MEDIUM, MEDIUM),
    Lever("--enable-prefix-caching", ("off", "on"), 4, 16, SHORT, Length(16, 16), prefix_len=400),
    Lever("--scheduling-policy", ("fcfs", "sjf"), 16, 48, SHORT, Length(4, 128), shared="--max-num-seqs 4"),
    Lever(
        "--swap-space", ("0", "1"), 16, 32, Length(128, 256), Length(128, 256), shared="--kv-cache-memory-bytes 48MiB"
    ),
    Lever("--async-scheduling", ("off", "on"), 16, 32, MEDIUM, MEDIUM),
    Lever("--dtype", ("float32", "bfloat16"), 16, 32, MEDIUM, MEDIUM),
    Lever("--quantization", ("none", "gguf", "int8"), 16, 32, MEDIUM, MEDIUM),
    Lever("--kv-cache-dtype", ("auto", "int8"), 8, 16, LONG, MEDIUM),
    *(
        Lever(
            "--speculative-config",
            ("default", '{"method": "ngram"}'),
            num,
            2 * num,
            MEDIUM,
            MEDIUM,
            copies=copies,
            temperature=temperature,
        )
        for num in (1, 8, 32)
        for copies, temperature in ((True, 0.0), (False, 1.0))
    ),
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `levers`."""
    names = list(dict.fromkeys(lever.flag.removeprefix("--") for lever in LEVERS))
    parser.add_argument("--only", choices=names, nargs="+", default=names, metavar="FLAG", help=", ".join(names))
    parser.add_argument(
        "--rounds", type=positive_int, default=3, metavar="N", help="times each variant is driven; default 3"
    )


def run(options: argparse.Namespace) -> int:
    """Measure the chosen levers, one after another."""
    for lever in LEVERS:
        if lever.flag.removeprefix("--") in options.only:
            _print(lever, *asyncio.run(_compare(lever, options.rounds)))
    return 0


async def _compare(lever: Lever, rounds: int) -> tuple[list[list[Point]], list[int]]:
    """Return a point a round for each variant, and the preemptions of each."""
    with contextlib.ExitStack() as daemons:
        print(f"{lever.flag}: starting {len(lever.variants)} daemons")
        ports = [daemons.enter_context(daemon(_flags(lever, variant))) for variant in lever.variants]
        points: list[list[Point]] = [[] for _ in ports]
        for index in range(rounds):
            for port, measured in zip(ports, points, strict=True):
                level = Level(lever.flag, lever.concurrency, lever.concurrency, lever.jobs(index))
                measured += await measure(port, lever.jobs(-1 - index)[:2], level, lever.temperature)
        return points, [total(port, "quire_preemptions_total") for port in ports]


def _print(lever: Lever, points: list[list[Point]], preemptions: list[int]) -> None:
    shape = f"{lever.concurrency} concurrent, {lever.prompt.low}-{lever.prompt.high} words in"
    if lever.prefix_len:
        shape += f" after {lever.prefix_len} shared ones"
    kind = "copied from the prompt" if lever.copies else f"temperature {lever.temperature:g}"
    print(f"\n{shape}, {lever.output.low}-{lever.output.high} tokens out, {kind} {lever.shared}")
    rows = []
    for variant, measured, preempted in zip(lever.variants, points, preemptions, strict=True):
        rate, *latencies = [statistics.median(figure) for figure in zip(*map(_figures, measured), strict=True)]
        rows.append((variant, f"{rate:.0f}", *(in_ms(each, 0) for each in latencies), preempted))
    latency_names = ("TTFT p50 ms", "TTFT p99 ms", "ITL p50 ms", "ITL p99 ms", "e2e p50 ms")
    print_table((f"`{lever.flag}`", "out tok/s", *latency_names, "preemptions"), rows)


def _figures(point: Point) -> tuple[float, ...]:
    """Return output tokens a second, then seconds."""
    latencies = (point.ttft_s.p50, point.ttft_s.p99, point.itl_s.p50, point.itl_s.p99, point.e2e_s.p50)
    return (point.output_tokens_per_s, *latencies)


def _flags(lever: Lever, variant: str) -> list[str]:
    """Return the flags of a variant: the default model with one setting changed."""
    if variant == "default":
        return ["--dtype", "bfloat16", *lever.shared.split()]
    flag = [lever.flag.replace("--", "--no-", 1)] if variant == "off" else [lever.flag]
    value = [] if variant in ("on", "off") else [variant]
    dtype = [] if lever.flag in ("--dtype", "--quantization") else ["--dtype", "bfloat16"]
    return [*dtype, *flag, *value, *lever.shared.split()]
