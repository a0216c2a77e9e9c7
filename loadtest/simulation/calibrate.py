"""`quire calibrate`: what steps cost on this machine, for `quire simulate`, measured on the real engine and daemon.

First single steps of the engine in this process, without HTTP: a grid of shapes to fit, random shapes to say how well
it fits. Then a daemon of the same settings under a few loads: what it takes longer than the engine alone is the front's.
"""

from __future__ import annotations

import argparse
import asyncio
import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from engine.core.config import SchedulerConfig
from loadtest.daemon import daemon
from loadtest.plots import require_matplotlib
from loadtest.report import percentile
from loadtest.simulation.costs import Front, StepCosts
from loadtest.simulation.measure import Shape, fill_pool, grid, held_out, measure
from loadtest.simulation.observe import Observed, median_tpot, observe
from loadtest.simulation.replay import replay
from loadtest.simulation.trace import TraceRequest
from loadtest.steps import build

_NUM_HELD_OUT = 32
_WAVES = (1, 4, 16, 48)  # requests at once, of 64 words and 64 tokens each
_NUM_WAVES = 3  # of each size
_PROMPTS = (16, 128, 384)  # words, one request at a time: what a prompt's length adds to its way in


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `calibrate`."""
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help="the costs, as JSON")
    parser.add_argument("--model", metavar="MODEL", help="as `quire serve` takes it; default: its default")
    parser.add_argument("--rounds", type=int, default=7, metavar="N", help="times each step is measured; default 7")
    parser.add_argument("--no-http", action="store_true", help="leave out what the daemon adds: the engine alone")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw what was measured and what was fitted")
    parser.add_argument("settings", nargs="*", metavar="SETTING", help="after --, more of what `quire serve` takes")


def run(options: argparse.Namespace) -> int:
    """Measure, fit, tell, write."""
    if options.plot:
        require_matplotlib()
    console = Console()
    settings = [*([options.model] if options.model else []), *options.settings]
    with progress_bar(console) as progress:
        costs, shapes, seconds = _calibrate_engine(settings, options.rounds, progress)
        if not options.no_http:
            costs = _calibrate_front(costs, settings, progress)
    costs.save(options.output)
    _tell(costs, console)
    if options.plot:
        from loadtest.simulation.plots import draw_costs

        draw_costs(options.plot, costs, shapes, seconds)
    return 0


def progress_bar(console: Console) -> Progress:
    """One line a task: how far, and how long it will take."""
    return Progress(
        TextColumn("{task.description:>24}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), console=console
    )


def _calibrate_engine(
    settings: Sequence[str], rounds: int, progress: Progress
) -> tuple[StepCosts, list[Shape], list[float]]:
    """Costs without a front, and what they were made from, the held-out steps at the end."""
    from loadtest.simulation.fit import fit, predict  # here, for it brings numpy

    loading = progress.add_task("loading the model", total=1)
    engine = build(settings)
    progress.advance(loading)
    config, runner = engine.config, engine._runner  # noqa: SLF001 - measured without its loop
    fitted, others = grid(config), held_out(config, _NUM_HELD_OUT)
    shapes = [*fitted, *others]
    task = progress.add_task("steps of the engine", total=len(shapes) * (rounds + 1))
    fill_pool(runner, config, shapes, engine.vocab_size)
    on_step = _advance(progress, task)
    measure(runner, config, shapes, vocab_size=engine.vocab_size, rounds=1, on_step=on_step)  # memory is touched
    seconds = measure(runner, config, shapes, vocab_size=engine.vocab_size, rounds=rounds, on_step=on_step)
    runner.close()
    costs = fit(fitted, seconds[: len(fitted)])
    errors = sorted(abs(predict(costs, shape) / taken - 1) for shape, taken in zip(shapes, seconds, strict=True))
    unseen = sorted(
        abs(predict(costs, shape) / taken - 1) for shape, taken in zip(others, seconds[len(fitted) :], strict=True)
    )
    about = {
        "settings": list(settings),
        "machine": platform.processor() or platform.machine(),
        "rounds": rounds,
        "fitted_steps": len(fitted),
        "held_out_steps": len(others),
        "median_error": median(errors),
        "held_out_median_error": median(unseen),
        "held_out_p90_error": percentile(unseen, 0.9),
    }
    return replace(costs, settings=asdict(config), about=about), shapes, seconds


def _advance(progress: Progress, task: Any) -> Callable[[], None]:
    return lambda: progress.advance(task)


def _calibrate_front(costs: StepCosts, settings: Sequence[str], progress: Progress) -> StepCosts:
    """What a daemon of the same settings takes longer than the costs say."""
    waves = [[TraceRequest(0.0, 64, 64)] * num for num in _WAVES] * _NUM_WAVES
    singles = [[TraceRequest(0.0, words, 4)] for words in _PROMPTS] * 8
    plan = [*waves[:3], *waves, *singles]  # the first are to warm up
    task = progress.add_task("the daemon", total=sum(map(len, plan)))
    with daemon(settings) as port:
        found = [
            asyncio.run(observe(port, rows, seed=seed, on_answer=_advance(progress, task)))
            for seed, rows in enumerate(plan)
        ]
    return fit_front(costs, found[3:])


def fit_front(costs: StepCosts, waves: Sequence[list[Observed]]) -> StepCosts:
    """Costs with a front that explains TPOT of requests sent at once, and TTFT of single ones."""
    import numpy as np

    from loadtest.simulation.fit import non_negative

    config = SchedulerConfig(**costs.settings)

    def explain(features: Sequence[Sequence[float]], missing: Sequence[float], weights: Sequence[float]) -> list[float]:
        weight = np.array(weights)
        found = non_negative(np.array(features) / weight[:, None], np.array(missing) / weight)
        return [float(each) for each in found]

    tpots = [(len(wave), median_tpot(wave), _simulated(costs, config, wave, "tpot_s")) for wave in waves]
    step_s, token_s = explain([[1, n] for n, *_ in tpots], [r - s for _, r, s in tpots], [r for _, r, _ in tpots])
    costs = replace(costs, front=Front(step_s=step_s, token_s=token_s))
    alone = [wave for wave in waves if len(wave) == 1]
    ttfts = [(wave[0].row.prompt_tokens, wave[0].ttft_s, _simulated(costs, config, wave, "ttft_s")) for wave in alone]
    intake_s, intake_token_s = explain(
        [[1, n] for n, *_ in ttfts], [r - s for _, r, s in ttfts], [r for _, r, _ in ttfts]
    )
    return replace(costs, front=Front(intake_s, intake_token_s, step_s, token_s))


def _simulated(costs: StepCosts, config: SchedulerConfig, wave: Sequence[Observed], figure: str) -> float:
    """The median of a figure over the requests of a wave, as the costs have it."""
    served = replay([each.row for each in wave], config, costs).served
    return float(median(getattr(each, figure) for each in served))


def _tell(costs: StepCosts, console: Console) -> None:
    about, front = costs.about, costs.front
    console.print(
        f"A step that was fitted is off by {about['median_error']:.1%}, one that was held out by "
        f"{about['held_out_median_error']:.1%} (medians; nine in ten of those within "
        f"{about['held_out_p90_error']:.1%})."
    )
    console.print(
        f"The daemon adds {front.step_s * 1e3:.2f} ms a step, {front.token_s * 1e6:.0f} us a token, and to a first "
        f"token {front.intake_s * 1e3:.2f} ms + {front.intake_token_s * 1e6:.1f} us a prompt token."
    )
