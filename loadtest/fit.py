"""`quire fit`: what a model needs and gives on this machine, before it is fetched; without one, which models to take.

fitted.py counts and knows the seconds of a step; the simulator's scheduler makes requests of them.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from engine.core.errors import ConfigError
from engine.core.types import Progress, TokenEvent
from engine.system.cache_folder import keep_foreseen
from engine.system.host_limits import available_memory, read
from engine.system.progress import human_bytes
from loadtest.arguments import positive_int
from loadtest.output import in_ms, print_table, without_nan
from loadtest.simulation.costs import DEFAULT_COSTS, StepCosts, Table
from loadtest.simulation.replica import Replica
from loadtest.simulation.trace import TraceRequest, to_request

if TYPE_CHECKING:
    from loadtest.fitted import Fitted, FittedEncoder
    from loadtest.rates import Rates

LEVELS = (1, 8, 32)  # requests at once
_ROUNDS = 2  # requests of each client
_USUAL_CONTEXT = 8192
_POOL = 2 << 30  # the most that a daemon takes by itself on a CPU
_FAST_ENOUGH = 10.0  # tokens a second of one request, about as fast as people read
_SPEEDS = (_FAST_ENOUGH, 0), (200.0, -1)  # tokens a second that are enough, and the rows of a step: answers, embeddings
_FLOATS = {"BF16": "bfloat16", "F32": "float32"}
_CHOICES = {
    "int8": ("INT8", "--quantization int8"),
    "Q4_K_M": ("Q4_K", ""),
}  # how weights may be held else: the kind, flags


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `fit`."""
    parser.add_argument(
        "model", nargs="?", metavar="MODEL", help="as `quire serve` takes it; none: models are proposed"
    )
    parser.add_argument(
        "--input-len", type=positive_int, default=128, metavar="N", help="tokens of a prompt; default 128"
    )
    parser.add_argument(
        "--output-len", type=positive_int, default=64, metavar="N", help="tokens of an answer; default 64"
    )
    parser.add_argument("--revision", metavar="REV", help="branch, tag or commit of a Hugging Face id")
    parser.add_argument(
        "--measure", action="store_true", help="measure this machine again; the figures are kept in the cache folder"
    )
    parser.add_argument("--json", action="store_true", help="print a JSON object")


def run(options: argparse.Namespace) -> int:
    """Read, measure, foresee, print."""
    report = propose if options.model is None else fit
    report(options)
    return 0


@dataclass(frozen=True)
class Foreseen:
    """What so many requests at once get."""

    num: int
    context: int  # of each; 0: so many do not fit
    ttft_s: float
    tokens_per_s: float  # of all


@dataclass(frozen=True)
class Choice:
    """One way to hold the weights."""

    name: str
    flags: str
    weight_bytes: int
    pool_bytes: int
    fits: bool
    foreseen: list[Foreseen]


def fit(options: argparse.Namespace) -> None:
    """Print what a model needs and gives."""
    from engine.settings.engine_config import EngineConfig
    from loadtest.fitted import FittedEncoder
    from loadtest.fitted import read as read_model
    from loadtest.rates import product_rates

    model = read_model(EngineConfig(model=options.model, revision=options.revision))
    is_encoder, most = isinstance(model, FittedEncoder), model.config.max_positions
    asked = options.input_len + (0 if is_encoder else options.output_len)
    if asked > most:
        lengths = "--input-len is" if is_encoder else "--input-len and --output-len are together"
        raise ConfigError(f"{lengths} {asked}, and contexts of {model.name} have at most {most} tokens; give less.")
    forms = {_FLOATS[model.own_kind] if model.is_plain else "as stored": (model, "")}
    if model.is_plain:
        others = list(_CHOICES.items())[: 1 if is_encoder else None]  # whose files are no Q4_K_M
        forms |= {name: (model.as_stored(kind), flags) for name, (kind, flags) in others}
    kinds = {kind for form, _ in forms.values() for kind in form.kinds}
    process, free = _resident(), available_memory()
    rates = product_rates(kinds, _say, anew=options.measure)
    choose = partial(_choice, rates=rates, room=free - process, lengths=(options.input_len, options.output_len))
    choices = [choose(name, form, flags) for name, (form, flags) in forms.items()]
    best = _best(choices)
    if options.json:
        found = {"model": model.name, "free_bytes": free, "process_bytes": process, "state_bytes": model.state_bytes}
        document = {**found, "choices": list(map(asdict, choices)), "take": None if best is None else best.name}
        print(json.dumps(without_nan(document), indent=1))
        return
    _show(model, choices, best, process, free)
    line = _line(choices[0])
    print(line)
    keep_foreseen(options.model, line)


def _line(choice: Choice) -> str:
    """Return what a start prints, too."""
    each = ", ".join(
        f"{one.num} at once {one.tokens_per_s:.1f} tokens/s after {in_ms(one.ttft_s, 0)} ms"
        for one in choice.foreseen
        if choice.fits and one.context
    )
    return f"foreseen by quire fit: weights ({choice.name}) {human_bytes(choice.weight_bytes)}; {each or 'it does not fit'}"


def _say(progress: Progress) -> None:
    if progress.detail:  # not each file that is compiled
        print(f"{progress.stage}: {progress.detail}", file=sys.stderr, flush=True)


def _resident() -> int:
    return int(read(Path("/proc/self/statm")).split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _choice(
    name: str, form: Fitted | FittedEncoder, flags: str, *, rates: Rates, room: int, lengths: tuple[int, int]
) -> Choice:
    """Return what the model gives with its weights held so."""
    from loadtest.fitted import Fitted

    rest = room - form.weight_bytes
    if not isinstance(form, Fitted):
        took = {num: form.seconds(rates, lengths[0], num) for num in LEVELS}
        read = [Foreseen(num, form.config.max_positions, s, num * lengths[0] / s) for num, s in took.items()]
        return Choice(name, flags, form.weight_bytes, 0, rest > 0, read)
    pool = max(min(_POOL, rest // 4), 0)
    wanted = form.pool_bytes(min(_USUAL_CONTEXT, form.config.max_positions), LEVELS[1])
    if pool < wanted <= rest // 2:
        pool, flags = wanted, f"{flags} --kv-cache-memory-bytes {-(-wanted >> 20) or 1}MiB".strip()
    costs = _costs(form, rates)
    foreseen = [_foresee(form, costs, pool, num, lengths) for num in LEVELS]
    return Choice(name, flags, form.weight_bytes, pool, rest > 0 and bool(foreseen[0].context), foreseen)


def _costs(form: Fitted, rates: Rates) -> StepCosts:
    steps = form.steps(rates)
    rows, samples = (Table(tuple(each), tuple(each.values())) for each in (steps.rows, steps.samples))
    return StepCosts(rows, samples, steps.context_s, steps.pair_s, StepCosts.load(DEFAULT_COSTS).front)


def _foresee(form: Fitted, costs: StepCosts, pool: int, num: int, lengths: tuple[int, int]) -> Foreseen:
    """Return what requests get in a closed loop of so many clients, whose prompts share nothing."""
    context = form.context(pool, num)
    if context < sum(lengths):
        return Foreseen(num, 0, float("nan"), float("nan"))
    ttfts_s = list[float]()

    def answered(event: TokenEvent) -> None:
        assert event.timings is not None, "it has no deadline"
        ttfts_s.append(event.timings.queue_s + event.timings.prefill_s)

    replica, total = Replica(form.scheduler(pool), costs, on_finish=answered), _ROUNDS * num
    coming = deque([to_request(TraceRequest(0.0, *lengths), index) for index in range(total)])
    while coming or replica.has_work:
        while coming and total - len(coming) - len(ttfts_s) < num:
            replica.submit(replace(coming.popleft(), arrival_s=replica.now), replica.now)
        replica.turn()
    return Foreseen(num, context, fmean(ttfts_s), total * lengths[1] / replica.now)


def _best(choices: Sequence[Choice]) -> Choice | None:
    """Return the most precise weights that are fast enough, else the fastest; None if none fit."""
    fitting = [each for each in choices if each.fits]
    fast = [each for each in fitting if each.foreseen[0].tokens_per_s >= _FAST_ENOUGH]
    return fast[0] if fast else max(fitting, key=lambda each: each.foreseen[0].tokens_per_s, default=None)


def _show(
    model: Fitted | FittedEncoder, choices: Sequence[Choice], best: Choice | None, process: int, free: int
) -> None:
    print(f"{model.name}: {model.num_layers} layers, contexts up to {model.config.max_positions:,} tokens.")
    states = {
        f"{name} state of a sequence" if name == "recurrent" else f"K/V of 1,000 tokens, {name}": size
        * (1 if name == "recurrent" else 1000)
        for name, size in model.state_bytes.items()
    }
    weights = {f"weights, {each.name}": each.weight_bytes for each in choices}
    rows = {**weights, **states, "the process without them": process, "free here": free}
    print_table(("memory", "takes"), [(name, human_bytes(size)) for name, size in rows.items()])
    head = ("weights", "at once", "pool", "context each", "TTFT, ms", "tokens/s")
    table = []
    for each in choices:
        for one in each.foreseen if each.fits else ():
            cells = (
                (f"{one.context:,}", in_ms(one.ttft_s, 0), f"{one.tokens_per_s:.1f}")
                if one.context
                else ("0", "-", "-")
            )
            table.append((each.name, one.num, human_bytes(each.pool_bytes), *cells))
    print_table(head, table)
    if best is None:
        need = human_bytes(min(each.weight_bytes for each in choices) + process)
        print(f"It does not fit: {need} and K/V are needed, and {human_bytes(free)} are free; take a smaller model.")
    else:
        source = "NAME-GGUF:Q4_K_M" if best.name == "Q4_K_M" else model.name
        print(f"Take {best.name}: quire serve {source} {best.flags}".rstrip())


def propose(options: argparse.Namespace) -> None:
    """Print the three largest models for each use that fit and are fast enough here."""
    from loadtest.rates import AT, BYTES, product_rates

    known = json.loads(Path(__file__).with_name("known_models.json").read_text(encoding="utf-8"))
    free = available_memory() - _resident()
    rates = product_rates({"Q4_K", "Q8_0", "BF16"}, _say, anew=options.measure)
    found: dict[str, list[dict[str, Any]]] = {}
    for use, models in known["models"].items():
        rows, enough, at = [], *_SPEEDS[use == "embeddings"]
        for name, (billions, active, kv_bytes, file) in models.items():
            kind = "BF16" if not file else "Q8_0" if file.endswith("Q8_0") else "Q4_K"
            takes = round(billions * 1e9 * BYTES[kind]) + kv_bytes * _USUAL_CONTEXT
            rate = AT[at] / (active * 1e9 * rates[kind][at])
            rows.append({"model": file or name, "bytes": takes, "tokens_per_s": round(rate, 1)})
        fitting = [row for row in rows if row["bytes"] < free]
        fitting.sort(
            key=lambda row: (row["tokens_per_s"] >= enough and row["bytes"], row["tokens_per_s"]), reverse=True
        )
        found[use] = fitting[:3]
    if options.json:
        print(json.dumps({"date": known["date"], "free_bytes": free, "propose": found}, indent=1))
        return
    print(f"{human_bytes(free)} are free. Models as of {known['date']}; with K/V of {_USUAL_CONTEXT:,} tokens:")
    table = [
        (use, each["model"], human_bytes(each["bytes"]), f"{each['tokens_per_s']:.0f}")
        for use, some in found.items()
        for each in some
    ]
    print_table(("for", "model", "takes", "tokens/s, at most"), table, num_names=2)
    print("For a prediction: quire fit MODEL")
