"""Compares Quire with other servers, with the same model and requests.

`python -m loadtest compare --vllm PYTHON --llama-server FILE ...` starts one server after another on loopback, drives
each through the chosen workloads, stops it, and starts the next round. A server that dies or hangs is reported with the
end of its log and skipped. Results are written after every server. It installs nothing, and takes minutes to hours.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shlex
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from loadtest.arguments import positive_int
from loadtest.bench import Asking, Level, Sweep
from loadtest.client import Client, ClientError, Target
from loadtest.comparison import IDLE_LOAD, ROOT, Drive, Results, describe_host
from loadtest.errors import LoadtestError
from loadtest.peers.process import PeerError, ServerProcess, free_port, running
from loadtest.peers.table import (
    DEFAULT_EXECUTABLES,
    FORMATS,
    PEERS,
    PRECISIONS,
    Peer,
    Setup,
    file_of,
    installed_bytes,
    version,
)
from loadtest.shapes import COMPARED, HYBRIDS
from loadtest.workload import Job, Length, synthetic

_MARGIN_TOKENS = 64  # of a context, beyond the words of a workload
_NUM_TRIES = 3


class Workload(NamedTuple):
    """Requests of one kind; a point sends `waves` times its concurrency."""

    name: str
    prompt: int
    output: int
    prefix: int = 0
    waves: int = 2
    at_least: int = 8

    @property
    def num_tokens(self) -> int:
        return self.prefix + self.prompt + self.output

    def jobs(self, num: int, seed: int) -> list[Job]:
        prompt, output = Length(self.prompt, self.prompt), Length(self.output, self.output)
        return synthetic(num, prompt=prompt, output=output, seed=seed, prefix_len=self.prefix)

    def level(self, concurrency: int, seed: int) -> Level:
        num = max(self.at_least, self.waves * concurrency)
        return Level(f"{self.name} x {concurrency}", concurrency, concurrency, self.jobs(num, seed))


WORKLOADS = (
    Workload("distinct", prompt=128, output=64),
    Workload("long-prompt", prompt=2000, output=32, waves=1, at_least=2),
    Workload("shared-prefix", prompt=64, output=64, prefix=512),
    Workload("long-decode", prompt=32, output=512, waves=1, at_least=2),
)
ON_REQUEST = (  # of Red Hat's suite for CPUs, with a quarter of its 512 tokens of answers
    Workload("chat", prompt=512, output=128, waves=1, at_least=2),
    Workload("rag", prompt=7680, output=128, waves=1, at_least=1),
)


class PeerAsking(Asking):
    """Requests without `min_tokens`, which slows some servers down."""

    def body(self, job: Job) -> dict[str, Any]:
        body = super().body(job)
        del body["min_tokens"]
        return body


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `compare`."""
    who = parser.add_argument_group("the servers; one that is not named is not here")
    for peer in PEERS:
        default = DEFAULT_EXECUTABLES.get(peer.name)
        purpose = f"{peer.purpose}; default: the Python that runs this" if default else peer.purpose
        who.add_argument(f"--{peer.name}", metavar=peer.executable, type=Path, default=default, help=purpose)
    who.add_argument(
        "--only", nargs="+", metavar="NAME", choices=[peer.name for peer in PEERS], help="leave out others"
    )
    more = "more flags for a server: --flags quire='--block-size 32'"
    who.add_argument("--flags", action="append", type=_flags, default=[], metavar="NAME=FLAGS", help=more)
    what = parser.add_argument_group("the work")
    precisions = (
        "; ".join(f"{name}: {meaning}" for name, meaning in PRECISIONS.items()) + f"; or one of {', '.join(FORMATS)}"
    )
    what.add_argument("--models-dir", type=Path, metavar="DIR", required=True, help="where --prepare writes models")
    what.add_argument(
        "--prepare", action="store_true", help="write the files of this precision that are not there yet, and end"
    )
    models = f"folders of DIR; --prepare writes {', '.join((*COMPARED, *HYBRIDS))}; default %(default)s"
    what.add_argument("--models", nargs="+", metavar="NAME", default=[next(iter(COMPARED))], help=models)
    default = f"default: {' '.join(load.name for load in WORKLOADS)}"
    what.add_argument("--workloads", nargs="+", choices=[load.name for load in WORKLOADS + ON_REQUEST], help=default)
    what.add_argument("--concurrency", nargs="+", type=positive_int, metavar="N", help="default 1 2 8 32 128")
    what.add_argument("--precision", choices=(*PRECISIONS, *FORMATS), metavar="NAME", default="bf16", help=precisions)
    what.add_argument("--rounds", type=positive_int, metavar="N", help="times that each server is driven; default 2")
    requests = "requests of a point, but one a client at least; default: two a client and 8, of long ones one and 2"
    what.add_argument("--requests", type=positive_int, metavar="N", help=requests)
    what.add_argument("--quick", action="store_true", help="distinct prompts, concurrency 1 8 32, one round")
    what.add_argument(
        "--num-threads", type=positive_int, metavar="N", default=os.cpu_count(), help="default: one a core"
    )
    what.add_argument(
        "--kv-gib", type=positive_int, metavar="N", default=4, help="K/V memory of each server; default %(default)s"
    )
    what.add_argument("--start-limit", type=float, metavar="S", default=600.0, help="default %(default)s")
    what.add_argument("--point-limit", type=float, metavar="S", default=600.0, help="default %(default)s")
    what.add_argument(
        "--others", type=float, metavar="CORES", default=0.1,
        help="that other work may take; with more, a point is measured again, and in the end left out; default %(default)s",
    )  # fmt: skip
    what.add_argument("--out", type=Path, metavar="DIR", help="results.json and table.md")


def _flags(text: str) -> tuple[str, list[str]]:
    name, equals, flags = text.partition("=")
    if not equals or name not in {peer.name for peer in PEERS}:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=FLAGS of one of the servers")
    return name, shlex.split(flags)


def run(options: argparse.Namespace) -> int:
    """Prepare models, or compare; return 1 if a server failed, 130 if interrupted."""
    if options.prepare:
        return _prepare(options)
    plan = Plan.of(options)
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    host = describe_host()
    if host["load_average"] > IDLE_LOAD:
        print(f"The load average is {host['load_average']:.1f}: other work on this machine will affect the figures.")
    results = Results(host, plan.settings())
    for peer in PEERS:
        if peer.name in plan.wanted:
            results.peers[peer.name] = known = _describe(peer, plan.executables.get(peer.name))
            print(f"{peer.name}: {known.get('version', 'not here')}")
    try:
        for turn in plan.turns():
            _drive(plan, turn, results)
            if options.out:
                results.write(options.out)
    except KeyboardInterrupt:
        results.is_interrupted = True
        print("Interrupted: these are the figures measured until then.")
    print("\n" + results.markdown())
    if options.out:
        results.write(options.out)
        print(f"written: {options.out}")
    return 130 if results.is_interrupted else int(any(drive.failures for drive in results.drives))


class Turn(NamedTuple):
    """One server, started once, with one model."""

    model: str
    round: int
    peer: Peer


@dataclass(slots=True)
class Plan:
    """The servers, workloads and their order, without points that took too long."""

    options: argparse.Namespace
    wanted: Sequence[str]
    executables: dict[str, str]
    workloads: list[Workload]
    levels: list[int]
    rounds: int
    skipped: dict[tuple[str, str, str], int] = field(default_factory=dict)

    @classmethod
    def of(cls, options: argparse.Namespace) -> Plan:
        """Check the options. Raises LoadtestError."""
        wanted = options.only or [peer.name for peer in PEERS]
        given = {peer.name: getattr(options, peer.name.replace("-", "_")) for peer in PEERS}
        executables = {name: str(path) for name, path in given.items() if path and name in wanted}
        for name, path in executables.items():
            if not os.access(path, os.X_OK):
                raise LoadtestError(f"--{name} is {path!r}, which is not an executable file.")
        names = options.workloads or [load.name for load in WORKLOADS[: 1 if options.quick else None]]
        levels = options.concurrency or ([1, 8, 32] if options.quick else [1, 2, 8, 32, 128])
        for model in options.models:
            for name in executables:
                file = file_of(name, options.precision)
                if file and not (options.models_dir / model / file).exists():
                    prepare = f"--prepare --models {model} --precision {options.precision}"
                    how = (
                        f"write it with {prepare}"
                        if model in (*COMPARED, *HYBRIDS)
                        else "--prepare does not know this model"
                    )
                    raise LoadtestError(f"--models-dir {options.models_dir} has no {model}/{file}; {how}.")
        workloads = [load for load in WORKLOADS + ON_REQUEST if load.name in names]
        if options.requests:
            workloads = [load._replace(at_least=options.requests, waves=1) for load in workloads]
        return cls(
            options, wanted, executables, workloads, sorted(levels), options.rounds or (1 if options.quick else 2)
        )

    def turns(self) -> Iterator[Turn]:
        for model in self.options.models:
            for index in range(self.rounds):
                for peer in PEERS:
                    if peer.name in self.executables and file_of(peer.name, self.options.precision):
                        yield Turn(model, index, peer)

    def setup(self, turn: Turn) -> Setup:
        tokens = max(load.num_tokens for load in self.workloads) + _MARGIN_TOKENS
        return Setup(
            model=(self.options.models_dir / turn.model).absolute(),
            port=free_port(),
            precision=self.options.precision,
            num_threads=self.options.num_threads,
            max_num_seqs=self.levels[-1],
            max_model_len=-(-tokens // 256) * 256,
            kv_gib=self.options.kv_gib,
        )

    def points(self, turn: Turn) -> Iterator[tuple[Workload, int]]:
        """Yield the workloads and concurrencies to measure."""
        for load in self.workloads:
            for level in self.levels:
                if level < self.skipped.get((turn.model, turn.peer.name, load.name), sys.maxsize):
                    yield load, level

    def seed(self, turn: Turn, load: Workload, level: int, index: int) -> int:
        """Return the seed of a point's prompts: the same for each server, and others at each try."""
        return 1_000_000 * index + 10_000 * turn.round + 1_000 * self.workloads.index(load) + level

    def more_flags(self, name: str) -> list[str]:
        return [word for peer, words in self.options.flags if peer == name for word in words]

    def without_paths(self, text: str) -> str:
        """Replace the paths of this machine by names."""
        folders = {str(self.options.models_dir.absolute()): "MODELS"}
        for peer in PEERS:
            if path := self.executables.get(peer.name):
                folders[str(peer.environment(Path(path)))] = peer.name.upper()
        folders |= {str(ROOT): "REPOSITORY", tempfile.gettempdir(): "TMP", str(Path.home()): "HOME"}
        for folder in sorted(folders, key=len, reverse=True):
            text = text.replace(folder, folders[folder])
        return text

    def settings(self) -> dict[str, Any]:
        names = ("models", "precision", "num_threads", "kv_gib", "start_limit", "point_limit")
        workloads = [load._asdict() for load in self.workloads]
        chosen = {"workloads": workloads, "concurrency": self.levels, "rounds": self.rounds}
        return {name: getattr(self.options, name) for name in names} | chosen


def _drive(plan: Plan, turn: Turn, results: Results) -> None:
    """Start, drive and stop one server; note its failures."""
    print(f"\n{turn.model}, round {turn.round + 1} of {plan.rounds}: {turn.peer.name}", flush=True)
    setup = plan.setup(turn)
    drive = Drive(turn.peer.name, turn.model, turn.round)
    command = turn.peer.command(plan.executables[turn.peer.name], setup)
    command = command._replace(argv=[*command.argv, *plan.more_flags(turn.peer.name)])
    drive.command = plan.without_paths(str(command))
    asking = PeerAsking(setup.model.name)
    results.drives.append(drive)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        try:
            first = asking.body(Job("time year people", 1))
            with running(command, setup.port, log, first, plan.options.start_limit) as server:
                drive.ready_s = server.ready_s
                print(f"first token {server.ready_s:.1f} s after its start", flush=True)
                try:
                    for load, level in plan.points(turn):
                        _measure(plan, turn, drive, server, asking, load, level)
                finally:
                    drive.peak_rss_bytes = server.peak_rss_bytes
        except PeerError as error:
            drive.failures.append(str(error))
    drive.failures = [plan.without_paths(failure) for failure in drive.failures]
    for failure in drive.failures:
        print(failure)


def _measure(
    plan: Plan, turn: Turn, drive: Drive, server: ServerProcess, asking: Asking, load: Workload, level: int
) -> None:
    """Measure one point, again while other work disturbs it. Raises PeerError, or KeyboardInterrupt after a signal."""
    limit_s = plan.options.point_limit
    for index in range(_NUM_TRIES):
        point = load.level(level, plan.seed(turn, load, level, index))
        warm_up = load.jobs(2, -1 - level) if level == plan.levels[0] else []
        with server.watch_others() as shares:
            sweep = asyncio.run(_sweep(server.port, asking, warm_up, point, limit_s))
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # a closing event loop takes its handlers with it
        if not server.is_alive():
            raise PeerError(f"{point.load}: it died.\n{server.log_tail()}")
        if sweep.is_interrupted or shares[0] <= plan.options.others:
            break
        print(f"{point.load}: other work took {shares[0]:.2f} of a core", flush=True)
    else:
        drive.failures.append(f"{point.load}: left out, because other work disturbed it {_NUM_TRIES} times.")
        return
    for each in sweep.points:
        drive.points.append({"workload": load.name, "concurrency": level, "others_cores": shares[0]} | asdict(each))
        drive.failures += [f"{point.load}: {count} x {error}" for error, count in each.errors.items()]
    if sweep.is_interrupted:
        plan.skipped[turn.model, turn.peer.name, load.name] = level
        drive.failures.append(
            f"{point.load}: not done within {limit_s:g} s; the requests answered by then are counted."
        )


async def _sweep(port: int, asking: Asking, warm_up: Sequence[Job], level: Level, limit_s: float) -> Sweep:
    loop, stopped = asyncio.get_running_loop(), False
    client, sweep = Client(Target.local(port), limit_s), Sweep()
    task = asyncio.ensure_future(sweep.run(client, asking, warm_up, [level]))

    def stop() -> None:
        nonlocal stopped
        stopped = True
        task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
    loop.call_later(limit_s, task.cancel)
    try:
        await task
    except ClientError as error:
        raise PeerError(f"{level.load}: {error}") from None
    finally:
        client.close()
    if stopped:
        raise KeyboardInterrupt
    return sweep


def _describe(peer: Peer, executable: str | None) -> dict[str, Any]:
    if executable is None:
        return {"here": False}
    size = installed_bytes(peer.environment(Path(executable)))
    return {"here": True, "version": version(peer, executable), "installed_bytes": size}


def _prepare(options: argparse.Namespace) -> int:
    from engine.sources.model_source import find_model
    from loadtest.peers.hybrids import prepare as prepare_hybrid
    from loadtest.peers.models import prepare

    source, names = Path(find_model(None).path), options.only or [peer.name for peer in PEERS]
    files = {file_of(name, options.precision) for name in names} - {""}
    for model in options.models:
        if model in HYBRIDS:
            checkout = (options.llama_server or Path("llama-server")).absolute().parents[2]
            prepare_hybrid(HYBRIDS[model], source, options.models_dir / model, sorted(files), checkout)
        elif model in COMPARED:
            prepare(COMPARED[model], source, options.models_dir, sorted(files), print)
        else:
            raise LoadtestError(f"--models is {model!r}, and --prepare writes {', '.join((*COMPARED, *HYBRIDS))}.")
    return 0
