"""`python -m loadtest validate-simulation`: the real daemon and the simulator, given the same three traces.

A daemon is started and driven over HTTP; the times that clients saw are compared with those that the simulator predicts
for the same arrivals and the lengths that the server counted. Best on an idle machine; the range of the daemon's figures
over several rounds is shown beside the error.
"""

from __future__ import annotations

import argparse
import asyncio
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from rich import box
from rich.table import Table

from loadtest.arguments import open_console, positive_float, positive_int, save_json
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
_ROUNDS = 3
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
    """A round of a case: seen and predicted (TTFT, TPOT) of each request."""

    seen: list[tuple[float, float]]
    predicted: list[tuple[float, float]]

    def figures(self) -> dict[str, tuple[float, float]]:
        """By name: seen, predicted, in seconds."""
        seen, predicted = ([Spread.of(each) for each in zip(*pairs, strict=True)] for pairs in self)
        return {name: (figure(*seen), figure(*predicted)) for name, figure in FIGURES}


class Figure(NamedTuple):
    """One figure over all rounds, in seconds."""

    seen: list[float]
    predicted: list[float]

    @property
    def off_by(self) -> float:
        """Return the relative error of the median prediction."""
        return median(self.predicted) / median(self.seen) - 1


def over_rounds(rounds: Sequence[Comparison]) -> dict[str, Figure]:
    """Each figure of all rounds, by name."""
    figures = [each.figures() for each in rounds]
    return {
        name: Figure([each[name][0] for each in figures], [each[name][1] for each in figures]) for name, _ in FIGURES
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `validate-simulation`."""
    parser.add_argument("--costs", type=Path, default=DEFAULT_COSTS, metavar="FILE", help="from `quire calibrate`")
    parser.add_argument(
        "--duration", type=positive_float, default=_DURATION_S, metavar="S", help="of each trace; default 45"
    )
    parser.add_argument("--rounds", type=positive_int, default=_ROUNDS, metavar="N", help="default 3")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every request, seen and predicted")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw both distributions")


def run(options: argparse.Namespace) -> int:
    """Drive, simulate, compare. 1 if a figure is further off than was promised."""
    if options.plot:
        require_matplotlib()
    costs, console = StepCosts.load(options.costs), open_console()
    traces = [case.rows(options.duration, options.seed) for case in CASES]
    seen = _drive(costs.about.get("settings", []), traces, options)
    found = [[compare(observed, costs) for observed in rounds] for rounds in seen]
    figures = [over_rounds(rounds) for rounds in found]
    console.print(_table(figures, [len(rows) for rows in traces]))
    console.print(_summary([figure for named in figures for figure in named.values()]))
    save_json(options, _document(figures, seen))
    if options.plot:
        from loadtest.simulation.plots import draw_validation

        pooled = [
            (
                case.name,
                [one for each in rounds for one in each.seen],
                [one for each in rounds for one in each.predicted],
            )
            for case, rounds in zip(CASES, found, strict=True)
        ]
        draw_validation(options.plot, pooled)
    return int(any(abs(figure.off_by) > _PROMISED for each in figures for figure in each.values()))


def _drive(
    settings: Sequence[str], traces: Sequence[Sequence[TraceRequest]], options: argparse.Namespace
) -> list[list[list[Observed]]]:
    """Return what clients of a real daemon see, for each case and round."""
    seen: list[list[list[Observed]]] = [[] for _ in CASES]
    with progress_bar() as progress, daemon(settings) as port:
        asyncio.run(warm_up(port))
        tasks = [
            progress.add_task(case.name, total=options.rounds * len(rows))
            for case, rows in zip(CASES, traces, strict=True)
        ]
        for number in range(options.rounds):
            for place, (task, rows) in enumerate(zip(tasks, traces, strict=True)):

                def on_answer(task: Any = task) -> None:
                    progress.advance(task)

                # New words in each round, so that it finds nothing that the last round left in the cache.
                own = [
                    row._replace(prefix_group=f"{row.prefix_group} {number}" * bool(row.prefix_group)) for row in rows
                ]
                seed = 1000 * options.seed + 10 * number + place
                seen[place].append(asyncio.run(observe(port, own, seed=seed, on_answer=on_answer)))
    return seen


def compare(observed: Sequence[Observed], costs: StepCosts) -> Comparison:
    """Replay the requests at the times they were sent."""
    sent = sorted(observed, key=lambda each: each.row.arrival_s)
    served = replay([each.row for each in sent], measured_config(costs.settings), costs).served
    return Comparison([(each.ttft_s, each.tpot_s) for each in sent], [(each.ttft_s, each.tpot_s) for each in served])


def _table(figures: Sequence[dict[str, Figure]], counts: Sequence[int]) -> Table:
    table = Table(title="Seen by clients of the daemon, and predicted, ms; medians of the rounds", box=box.SIMPLE_HEAD)
    for column in ("workload", "requests", "figure", "seen", "its range", "predicted", "off by"):
        table.add_column(column, justify="left" if column in ("workload", "figure") else "right")
    for case, named, count in zip(CASES, figures, counts, strict=True):
        for place, (name, figure) in enumerate(named.items()):
            colour = "green" if abs(figure.off_by) <= _PROMISED else "red"
            table.add_row(
                "" if place else case.name,
                "" if place else str(count),
                name,
                f"{median(figure.seen) * 1e3:.1f}",
                f"{min(figure.seen) * 1e3:.1f} - {max(figure.seen) * 1e3:.1f}",
                f"{median(figure.predicted) * 1e3:.1f}",
                f"[{colour}]{figure.off_by:+.1%}[/{colour}]",
            )
    return table


def _summary(figures: Sequence[Figure]) -> str:
    foreseen = sum(abs(figure.off_by) <= _PROMISED for figure in figures)
    repeated = sum(max(figure.seen) <= (1 + _PROMISED) * min(figure.seen) for figure in figures)
    return (
        f"{foreseen} of {len(figures)} figures were foreseen within {_PROMISED:.0%}. The daemon's own rounds, with the same "
        f"requests, are within that of each other in {repeated}."
    )


def _document(
    figures: Sequence[dict[str, Figure]], seen: Sequence[Sequence[Sequence[Observed]]]
) -> list[dict[str, Any]]:
    return [
        {
            "workload": case._asdict(),
            "figures": {
                name: {"seen_s": figure.seen, "predicted_s": figure.predicted, "off_by": figure.off_by}
                for name, figure in named.items()
            },
            "rounds": [
                [{**one.row._asdict(), "seen_ttft_s": one.ttft_s, "seen_tpot_s": one.tpot_s} for one in observed]
                for observed in rounds
            ],
        }
        for case, named, rounds in zip(CASES, figures, seen, strict=True)
    ]
