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
from loadtest.arguments import open_console, positive_int
from loadtest.daemon import daemon
from loadtest.plots import require_matplotlib
from loadtest.report import percentile
from loadtest.simulation.costs import Front, Handoff, StepCosts
from loadtest.simulation.measure import Shape, fill_pool, grid, held_out, measure
from loadtest.simulation.moves import measure_copies, measure_handoff
from loadtest.simulation.observe import Observed, observe, warm_up
from loadtest.simulation.replay import replay
from loadtest.simulation.trace import TraceRequest
from loadtest.simulation.variants import measured_config
from loadtest.steps import build

_NUM_HELD_OUT = 32
_WAVES = (1, 4, 16, 48)  # requests at once, of 64 words and 64 tokens each
_NUM_WAVES = 3  # of each size
# Single requests of so many words, one every so many seconds: what a prompt's length adds to its way in.
_PROMPTS, _NUM_SINGLE, _APART_S = (16, 64, 256, 800), 6, 0.6


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `calibrate`."""
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help="the costs, as JSON")
    parser.add_argument("--model", metavar="MODEL", help="as `quire serve` takes it; default: its default")
    parser.add_argument(
        "--rounds", type=positive_int, default=7, metavar="N", help="times each step is measured; default 7"
    )
    parser.add_argument("--no-http", action="store_true", help="leave out what the daemon adds: the engine alone")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw what was measured and what was fitted")
    parser.add_argument("settings", nargs="*", metavar="SETTING", help="after --, more of what `quire serve` takes")


def run(options: argparse.Namespace) -> int:
    """Measure, fit, tell, write."""
    if options.plot:
        require_matplotlib()
    console = open_console()
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
    copies = measure_copies(runner, config)
    handoff = Handoff() if engine.layout is None else measure_handoff(runner, engine.layout, config.num_blocks)
    runner.close()
    costs = replace(fit(fitted, seconds[: len(fitted)]), copies=copies, handoff=handoff)
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
    return replace(costs, settings=_plain(config), about=about), shapes, seconds


def _plain(config: SchedulerConfig) -> dict[str, Any]:
    """Its settings that are numbers and words; what the engine measures for itself is nothing to compare."""
    return {name: value for name, value in asdict(config).items() if isinstance(value, (int, float, str))}


def _advance(progress: Progress, task: Any) -> Callable[[], None]:
    return lambda: progress.advance(task)


def _calibrate_front(costs: StepCosts, settings: Sequence[str], progress: Progress) -> StepCosts:
    """What a daemon of the same settings takes longer than the costs say."""
    waves = [[TraceRequest(0.0, 64, 64)] * num for num in _WAVES] * _NUM_WAVES
    single = [TraceRequest(_APART_S * index, words, 4) for index, words in enumerate(_PROMPTS * _NUM_SINGLE)]
    plan = [*waves, single]
    task = progress.add_task("the daemon", total=sum(map(len, plan)))
    with daemon(settings) as port:
        asyncio.run(warm_up(port))
        found = [
            asyncio.run(observe(port, rows, seed=seed, on_answer=_advance(progress, task)))
            for seed, rows in enumerate(plan)
        ]
    return fit_front(costs, [*found[:-1], *([each] for each in found[-1])])


def fit_front(costs: StepCosts, waves: Sequence[list[Observed]]) -> StepCosts:
    """Costs with a front that explains what clients see of requests that are sent at once.

    TPOT is explained by each step and each of its tokens, TTFT by each request and each of a prompt's tokens; twice
    over, since either has some part in the other.
    """
    from loadtest.simulation.fit import least_deviations

    config = measured_config(costs.settings)

    def explained(figure: str, front: Front, features: Callable[[list[Observed]], list[float]]) -> list[float]:
        """What of each feature makes up for what the front leaves unexplained, relative to what was seen."""
        told = replace(costs, front=front)
        seen = [median(getattr(each, figure) for each in wave) for wave in waves]
        replays = [replay([each.row for each in wave], config, told).served for wave in waves]
        simulated = [median(getattr(each, figure) for each in served) for served in replays]
        missing = [(real - guess) / real for real, guess in zip(seen, simulated, strict=True)]
        rows = [[each / real for each in features(wave)] for wave, real in zip(waves, seen, strict=True)]
        return least_deviations(rows, missing)

    front = Front()
    for _ in range(2):
        step_s, token_s = explained("tpot_s", replace(front, step_s=0.0, token_s=0.0), lambda wave: [1.0, len(wave)])
        front = replace(front, step_s=step_s, token_s=token_s)
        intake_s, prompt_token_s = explained(
            "ttft_s",
            replace(front, intake_s=0.0, prompt_token_s=0.0),
            lambda wave: [len(wave), sum(each.row.prompt_tokens for each in wave)],
        )
        front = replace(front, intake_s=intake_s, prompt_token_s=prompt_token_s)
    return replace(costs, front=front)


def _tell(costs: StepCosts, console: Console) -> None:
    about, front = costs.about, costs.front
    console.print(
        f"A step that was fitted is off by {about['median_error']:.1%}, one that was held out by "
        f"{about['held_out_median_error']:.1%} (medians; nine in ten of those within "
        f"{about['held_out_p90_error']:.1%})."
    )
    console.print(
        f"The daemon adds {front.step_s * 1e3:.2f} ms a step and {front.token_s * 1e6:.0f} us a token, and for each "
        f"request {front.intake_s * 1e3:.2f} ms and {front.prompt_token_s * 1e6:.1f} us a computed token."
    )
