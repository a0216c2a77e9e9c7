"""`quire calibrate`: measures the time of steps for `quire simulate`.

It times single steps of the engine in this process: a grid of shapes to fit, and random shapes for the error of the fit.
It also drives a daemon of the same settings, whose additional time is that of HTTP. The two take turns, because the
speed of a shared machine drifts by a fifth within minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import platform
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median

from rich.progress import Progress

from loadtest.arguments import positive_int
from loadtest.daemon import daemon
from loadtest.engines import build, device_of
from loadtest.output import progress_bar
from loadtest.report import percentile
from loadtest.simulation.costs import Front, StepCosts
from loadtest.simulation.measure import Times, fill_pool, grid, held_out
from loadtest.simulation.observe import Observed, observe, warm_up
from loadtest.simulation.replay import replay
from loadtest.simulation.trace import TraceRequest
from loadtest.simulation.variants import measured_config, plain_settings

_NUM_HELD_OUT = 32
_WAVES = (1, 2, 4, 8, 16, 32, 48)  # concurrent requests, of 64 words and 64 tokens each
_NUM_TURNS = 5  # of the engine and the daemon
# Single requests of these lengths in words, for the front's cost of a prompt: repetitions a turn, seconds between two.
_PROMPTS, _NUM_SINGLE, _APART_S = (16, 64, 256, 800), 2, 0.6


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `calibrate`."""
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help="the costs, as JSON")
    parser.add_argument("--model", metavar="MODEL", help="as `quire serve` takes it; default: its default")
    parser.add_argument(
        "--rounds", type=positive_int, default=10, metavar="N", help="times each step is measured; default 10"
    )
    parser.add_argument("--no-http", action="store_true", help="measure the engine alone, without the daemon")
    parser.add_argument("settings", nargs="*", metavar="SETTING", help="after --, more of what `quire serve` takes")


def run(options: argparse.Namespace) -> int:
    """Measure, fit, write, print."""
    settings = [*([options.model] if options.model else []), *options.settings]
    with progress_bar() as progress:
        steps = _Steps(settings, options.rounds, progress)
        costs = _engine_alone(steps, settings) if options.no_http else _measure(steps, settings, progress)
    costs.save(options.output)
    _print(costs)
    return 0


def _engine_alone(steps: _Steps, settings: Sequence[str]) -> StepCosts:
    for turn in range(_NUM_TURNS):
        steps.measure(turn)
    return steps.fit(settings)


def _measure(steps: _Steps, settings: Sequence[str], progress: Progress) -> StepCosts:
    """Measure the engine and a daemon in turns; a GPU has no room for both."""
    if device_of(settings) != "cpu":
        costs = _engine_alone(steps, settings)
        with daemon(settings) as port:
            waves = _Waves(port, progress)
            for turn in range(_NUM_TURNS):
                waves.measure(turn)
        return fit_front(costs, waves.seen)
    with daemon(settings) as port:
        waves = _Waves(port, progress)
        for turn in range(_NUM_TURNS):
            steps.measure(turn)
            waves.measure(turn)
    return fit_front(steps.fit(settings), waves.seen)


class _Steps:
    """The engine in this process."""

    def __init__(self, settings: Sequence[str], rounds: int, progress: Progress) -> None:
        loading = progress.add_task("loading the model", total=1)
        self._engine = engine = build(settings)
        progress.advance(loading)
        self._config, self._runner = engine.config, engine._runner  # noqa: SLF001 - measured without its loop
        self._rounds = [len(range(turn, rounds, _NUM_TURNS)) for turn in range(_NUM_TURNS)]
        self._fitted, self._held_out = grid(self._config), held_out(self._config, _NUM_HELD_OUT)
        shapes = [*self._fitted, *self._held_out]
        task = progress.add_task("steps of the engine", total=len(shapes) * (rounds + 1))
        self._on_step = partial(progress.advance, task)
        fill_pool(self._runner, self._config, shapes, engine.facts.vocab_size)
        self.times = Times(self._runner, self._config, shapes, engine.facts.vocab_size)
        self.times.measure(1, self._on_step)  # memory is touched
        self.times.forget()

    def measure(self, turn: int) -> None:
        """Measure this turn's share of the rounds."""
        self.times.measure(self._rounds[turn], self._on_step)

    def fit(self, settings: Sequence[str]) -> StepCosts:
        """Return the costs without a front, and close the engine."""
        from loadtest.simulation.fit import fit  # here, because it imports numpy

        config, seconds, num_fitted = self._config, self.times.seconds, len(self._fitted)
        self._runner.close()
        costs = fit(self._fitted, seconds[:num_fitted])
        errors = [abs(costs.step(plan) / taken - 1) for plan, taken in zip(self.times.plans, seconds, strict=True)]
        unseen = sorted(errors[num_fitted:])
        about = {
            "settings": list(settings),
            "machine": platform.processor() or platform.machine(),
            "rounds": sum(self._rounds),
            "fitted_steps": num_fitted,
            "held_out_steps": len(unseen),
            "median_error": median(errors),
            "held_out_median_error": median(unseen),
            "held_out_p90_error": percentile(unseen, 0.9),
        }
        return replace(costs, settings=plain_settings(config), about=about)


class _Waves:
    """The daemon under waves of concurrent requests."""

    def __init__(self, port: int, progress: Progress) -> None:
        self._port = port
        self._waves = [[TraceRequest(0.0, 64, 64)] * num for num in _WAVES]
        self._single = [TraceRequest(_APART_S * index, words, 4) for index, words in enumerate(_PROMPTS * _NUM_SINGLE)]
        total = _NUM_TURNS * sum(map(len, [*self._waves, self._single]))
        self._on_answer = partial(progress.advance, progress.add_task("the daemon", total=total))
        self.seen: list[list[Observed]] = []
        asyncio.run(warm_up(port))

    def measure(self, turn: int) -> None:
        """Each wave once, and single requests."""
        *waves, single = [
            asyncio.run(observe(self._port, rows, seed=100 * turn + number, on_answer=self._on_answer))
            for number, rows in enumerate([*self._waves, self._single])
        ]
        self.seen += [*waves, *([each] for each in single)]


def fit_front(costs: StepCosts, waves: Sequence[list[Observed]]) -> StepCosts:
    """Fit the front to the times that clients see of concurrent requests.

    Steps and their tokens explain TPOT; requests and their prompts' tokens explain TTFT. Each affects the other, so the
    fit is repeated.
    """
    from loadtest.simulation.fit import least_deviations

    config = measured_config(costs.settings)

    def explained(figure: str, front: Front, features: Callable[[list[Observed]], list[float]]) -> list[float]:
        """Return the weight of each feature that explains the rest of the measured time."""
        known = replace(costs, front=front)
        seen = [median(getattr(each, figure) for each in wave) for wave in waves]
        replays = [replay([each.row for each in wave], config, known).served for wave in waves]
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


def _print(costs: StepCosts) -> None:
    about, front = costs.about, costs.front
    print(
        f"The median error is {about['median_error']:.1%} for fitted steps and {about['held_out_median_error']:.1%} for "
        f"others, nine in ten of which are within {about['held_out_p90_error']:.1%}."
    )
    if front != Front():
        print(
            f"The daemon adds {front.step_s * 1e3:.2f} ms a step and {front.token_s * 1e6:.0f} us a token, and for each "
            f"request {front.intake_s * 1e3:.2f} ms and {front.prompt_token_s * 1e6:.1f} us a computed token."
        )
