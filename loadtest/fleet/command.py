"""`python -m loadtest fleet`: real daemons behind a real router, under policies in turn.

Every run starts new daemons and a new router, so that no cache and no router's memory outlives it; all policies of a
round get the same requests. --foresee repeats each run on the simulator's virtual clock.
"""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from engine.core.types import Request, SamplingParams
from loadtest.arguments import given
from loadtest.fleet.daemons import Sizes, fleet, scratch
from loadtest.fleet.foresee import what_is_known
from loadtest.fleet.kill import kill_and_return
from loadtest.fleet.load import add_load_options, draw, load_of
from loadtest.fleet.routers import KINDS, Routing
from loadtest.fleet.runs import measure, token_ids
from loadtest.output import in_ms, print_table
from loadtest.simulation.closed_loop import Known, foresee
from loadtest.simulation.fleet_figures import Figures, middle, show_fleet

_FAR_SEED = 1 << 20  # of the run that step times are measured in
_TIMES = ("ttft_p50_s", "ttft_p95_s", "ttft_mean_s", "e2e_p50_s", "e2e_p95_s", "e2e_mean_s")


class Run(NamedTuple):
    """One run of one policy, and what the simulator foresaw of it."""

    router: str
    policy: str
    load: str  # "prefixes" or "distinct"
    seed: int
    seen: Figures
    foreseen: Figures | None

    @property
    def name(self) -> str:
        return f"{self.router} {self.policy}"

    def plain(self) -> dict[str, Any]:
        """Return it as a JSON object."""
        foreseen = self.foreseen.plain() if self.foreseen else None
        return {**self._asdict(), "seen": self.seen.plain(), "foreseen": foreseen}

    @classmethod
    def read(cls, document: Mapping[str, Any]) -> Run:
        """Return a run from a file."""
        foreseen = Figures.read(document["foreseen"]) if document["foreseen"] else None
        return cls(**{**document, "seen": Figures.read(document["seen"]), "foreseen": foreseen})


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `fleet`."""
    parser.add_argument("--router", choices=tuple(KINDS), required=True, help="the kind of router")
    parser.add_argument("--router-bin", metavar="COMMAND", default="", help="its command; default: as it is installed")
    parser.add_argument(
        "--router-flags", default="", metavar="FLAGS", help='more of its flags, as in --router-flags="--a 1"'
    )
    parser.add_argument(
        "--policy", nargs="+", metavar="NAME", help="the router's policies; default: blind, least loaded, prefix-aware"
    )
    add_load_options(parser)
    parser.add_argument("--foresee", action="store_true", help="simulate the same runs, from step times measured here")
    parser.add_argument(
        "--costs", type=Path, metavar="FILE", help="with --foresee: write the step times, for `quire simulate fleet`"
    )
    parser.add_argument("--kill", action="store_true", help="kill a daemon under load instead, and start it again")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="add all runs to this file; the table is over all in it"
    )
    parser.add_argument("--logs", type=Path, metavar="DIR", help="keep the logs of the last run here")
    parser.add_argument("settings", nargs="*", metavar="SETTING", help="after --, more of what `quire serve` takes")


def run(options: argparse.Namespace) -> int:
    """Run every policy in turn, print, write; 1 if a request failed."""
    kind = KINDS[options.router]
    policies = options.policy or [*dict.fromkeys((kind.blind, kind.least_loaded, kind.aware))]
    runs = _read(options.json)
    with scratch(options.logs) as folder:
        if options.kill:
            return kill_and_return(
                _routing(options, policies[-1]), _sizes(options), options.daemons, options.clients, folder
            )
        known = _known(options, policies, folder) if options.foresee else {}
        for seed in range(options.seed, options.seed + options.runs):
            for policy in policies:
                runs.append(_one(options, policy, seed, folder, known.get(policy)))
                _write(options, runs)
    show(runs)
    return int(any(each.seen.num_failed for each in runs))


def _routing(options: argparse.Namespace, policy: str) -> Routing:
    return Routing(options.router, policy, options.router_bin, shlex.split(options.router_flags))


def _sizes(options: argparse.Namespace) -> Sizes:
    length = 2 * (options.prefix_words + options.own_words + options.max_tokens) + 256
    return Sizes(options.blocks, options.block_size, length, flags=options.settings)


def _known(options: argparse.Namespace, policies: Sequence[str], folder: Path) -> dict[str, Known]:
    """Measure step times in a recorded run of each policy, with requests that no other run has."""
    recorded = {}
    prompts = draw(load_of(options), _FAR_SEED)
    for policy in policies:
        paths = [folder / f"recording-{policy}-{place}.jsonl" for place in range(options.daemons)]
        for path in paths:
            path.unlink(missing_ok=True)
        more = [["--record", str(path)] for path in paths]
        with fleet(_routing(options, policy), _sizes(options), options.daemons, folder, more) as found:
            seen, _ = measure(found, prompts, options.clients, options.block_size)
        recorded[policy] = paths, seen
    known = what_is_known(recorded)
    if options.costs:
        next(iter(known.values())).costs.save(options.costs)
    return known


def _one(options: argparse.Namespace, policy: str, seed: int, folder: Path, known: Known | None) -> Run:
    load, foreseen = load_of(options), None
    prompts = draw(load, seed)
    with fleet(_routing(options, policy), _sizes(options), options.daemons, folder) as found:
        seen, _ = measure(found, prompts, options.clients, options.block_size)
        tokens = token_ids(found.members[0].port, found.model, prompts) if known else []
    if known is not None:
        foreseen = foresee(
            _requests(tokens, load.max_tokens),
            known,
            policy=policy,
            num_daemons=options.daemons,
            num_clients=options.clients,
        )
    return Run(options.router, policy, "distinct" if options.distinct else "prefixes", seed, seen, foreseen)


def _requests(prompts: Sequence[Sequence[int]], max_tokens: int) -> list[Request]:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    return [
        Request(request_id=str(place), prompt=tuple(prompt), params=params, arrival_s=0.0)
        for place, prompt in enumerate(prompts)
    ]


def _read(path: Path | None) -> list[Run]:
    if path is None or not path.exists():
        return []
    return [Run.read(each) for each in json.loads(path.read_text(encoding="utf-8"))["runs"]]


def _write(options: argparse.Namespace, runs: Sequence[Run]) -> None:
    if options.json is not None:
        document = {"settings": given(options), "runs": [each.plain() for each in runs]}
        options.json.write_text(json.dumps(document, indent=1, default=str) + "\n", encoding="utf-8")


def show(runs: Sequence[Run]) -> None:
    """Print the medians of each policy under each load, and how well they were foreseen."""
    for load in dict.fromkeys(each.load for each in runs):
        groups: dict[str, list[Run]] = {}
        for each in runs:
            if each.load == load:
                groups.setdefault(each.name, []).append(each)
        medians = {name: middle([each.seen for each in group]) for name, group in groups.items()}
        basis = next(iter(medians.values()))
        print(
            f"Load: {load}. Ideal: {basis.ideal_tokens:,.0f} cached tokens of {basis.prompt_tokens:,.0f}. Times in ms."
        )
        show_fleet({name: (len(groups[name]), seen) for name, seen in medians.items()})
        _show_foreseen({name: [each for each in group if each.foreseen] for name, group in groups.items()})


def _show_foreseen(groups: Mapping[str, Sequence[Run]]) -> None:
    """Print real and foreseen medians beside each other, and the largest difference of a policy."""
    rows = []
    for name, group in groups.items():
        if not group:
            continue
        seen = middle([each.seen for each in group])
        guess = middle([each.foreseen for each in group if each.foreseen])
        cells = [f"{seen.of_ideal:.1%} / {guess.of_ideal:.1%}"]
        for field in _TIMES:
            real, foreseen = getattr(seen, field), getattr(guess, field)
            cells.append(f"{in_ms(real, 0)} / {in_ms(foreseen, 0)} ({foreseen / real - 1:+.0%})")
        rows.append((name, *cells))
    if rows:
        print("Real / foreseen")
        print_table(("policy", "of ideal", *(field.removesuffix("_s").replace("_", " ") for field in _TIMES)), rows)
