"""`python -m loadtest validate-simulation`: the real daemon and the simulator, given the same three traces.

A daemon is started and driven over HTTP; what its clients saw is compared with what the simulator says of the requests as
they were sent, and of the lengths that the server counted. Best on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table

from loadtest.arguments import open_console, positive_float
from loadtest.daemon import daemon
from loadtest.plots import require_matplotlib
from loadtest.report import Spread
from loadtest.simulation.calibrate import progress_bar
from loadtest.simulation.costs import DEFAULT_COSTS, StepCosts
from loadtest.simulation.observe import Observed, observe, warm_up
from loadtest.simulation.replay import replay
from loadtest.simulation.trace import TraceRequest
from loadtest.simulation.variants import measured_config

_DURATION_S = 45.0
_PROMISED = 0.15


class Case(NamedTuple):
    """One trace: requests a second, how bursty, and the ranges of lengths in words and tokens."""

    name: str
    rate: float
    burstiness: float
    prompt: tuple[int, int]
    output: tuple[int, int]
    prefix: int = 0  # words that one of three groups shares

    def rows(self, duration_s: float, seed: int) -> list[TraceRequest]:
        """Gamma arrivals over about so many seconds."""
        rng = random.Random(f"{self.name} {seed}")
        rows, now = [], 0.0
        while now < duration_s:
            prompt, output = rng.randint(*self.prompt), rng.randint(*self.output)
            row = TraceRequest(now, prompt + self.prefix, output)
            if self.prefix:
                row = row._replace(prefix_group=f"group {rng.randrange(3)}", prefix_tokens=self.prefix)
            rows.append(row)
            now += rng.gammavariate(self.burstiness, 1.0 / (self.rate * self.burstiness))
        return rows


CASES = (
    Case("steady chat", 5.0, 1.0, (16, 200), (32, 128)),
    Case("bursts, shared prefixes", 4.0, 0.25, (16, 100), (32, 128), prefix=200),
    Case("long prompts", 1.2, 1.0, (300, 1200), (32, 96)),
)
FIGURES: tuple[tuple[str, Callable[[Spread, Spread], float]], ...] = (
    ("TTFT p50", lambda ttft, _: ttft.p50),
    ("TTFT p99", lambda ttft, _: ttft.p99),
    ("TPOT p50", lambda _, tpot: tpot.p50),
    ("TPOT p99", lambda _, tpot: tpot.p99),
)


class Comparison(NamedTuple):
    """A case: what was seen and what was predicted, TTFT then TPOT of each request."""

    case: Case
    seen: list[tuple[float, float]]
    predicted: list[tuple[float, float]]

    def figures(self) -> dict[str, tuple[float, float]]:
        """By name: seen, predicted, in seconds."""
        seen, predicted = ([Spread.of(each) for each in zip(*pairs, strict=True)] for pairs in self[1:])
        return {name: (figure(*seen), figure(*predicted)) for name, figure in FIGURES}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `validate-simulation`."""
    parser.add_argument("--costs", type=Path, default=DEFAULT_COSTS, metavar="FILE", help="from `quire calibrate`")
    parser.add_argument(
        "--duration", type=positive_float, default=_DURATION_S, metavar="S", help="of each trace; default 45"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every request, seen and predicted")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw both distributions")


def run(options: argparse.Namespace) -> int:
    """Drive, simulate, compare. 1 if a figure is further off than was promised."""
    if options.plot:
        require_matplotlib()
    costs, console = StepCosts.load(options.costs), open_console()
    traces = [case.rows(options.duration, options.seed) for case in CASES]
    seen = _drive(costs.about.get("settings", []), traces, options.seed, console)
    found = [compare(case, observed, costs) for case, observed in zip(CASES, seen, strict=True)]
    console.print(_table(found))
    if options.json:
        options.json.write_text(json.dumps(_document(found, seen), indent=1) + "\n", encoding="utf-8")
    if options.plot:
        from loadtest.simulation.plots import draw_validation

        draw_validation(options.plot, [(each.case.name, each.seen, each.predicted) for each in found])
    worst = max(abs(b / a - 1) for each in found for a, b in each.figures().values())
    return int(worst > _PROMISED)


def _drive(
    settings: Sequence[str], traces: Sequence[Sequence[TraceRequest]], seed: int, console: Console
) -> list[list[Observed]]:
    """What clients of a real daemon see."""
    seen = []
    with progress_bar(console) as progress, daemon(settings) as port:
        asyncio.run(warm_up(port))
        for number, (case, rows) in enumerate(zip(CASES, traces, strict=True)):
            task = progress.add_task(case.name, total=len(rows))

            def on_answer(task: Any = task) -> None:
                progress.advance(task)

            seen.append(asyncio.run(observe(port, rows, seed=1000 * seed + number, on_answer=on_answer)))
    return seen


def compare(case: Case, observed: Sequence[Observed], costs: StepCosts) -> Comparison:
    """Replay what was sent, when it was sent."""
    sent = sorted(observed, key=lambda each: each.row.arrival_s)
    served = replay([each.row for each in sent], measured_config(costs.settings), costs).served
    return Comparison(
        case, [(each.ttft_s, each.tpot_s) for each in sent], [(each.ttft_s, each.tpot_s) for each in served]
    )


def _table(found: Sequence[Comparison]) -> Table:
    table = Table(title="Seen by clients of the daemon, and predicted, ms", box=box.SIMPLE_HEAD)
    for column in ("workload", "requests", "figure", "seen", "predicted", "off by"):
        table.add_column(column, justify="left" if column in ("workload", "figure") else "right")
    for each in found:
        for name, (seen, predicted) in each.figures().items():
            off = predicted / seen - 1
            colour = "green" if abs(off) <= _PROMISED else "red"
            first = name == FIGURES[0][0]
            table.add_row(
                each.case.name if first else "",
                str(len(each.seen)) if first else "",
                name,
                f"{seen * 1e3:.1f}",
                f"{predicted * 1e3:.1f}",
                f"[{colour}]{off:+.1%}[/{colour}]",
            )
    return table


def _document(found: Sequence[Comparison], seen: Sequence[Sequence[Observed]]) -> list[dict[str, Any]]:
    return [
        {
            "workload": each.case._asdict(),
            "figures": {
                name: {"seen_s": a, "predicted_s": b, "off_by": b / a - 1} for name, (a, b) in each.figures().items()
            },
            "requests": [
                {**one.row._asdict(), "seen_ttft_s": one.ttft_s, "seen_tpot_s": one.tpot_s} for one in observed
            ],
        }
        for each, observed in zip(found, seen, strict=True)
    ]
