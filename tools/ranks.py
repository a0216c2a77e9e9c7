"""Measures what dividing a model among processes costs on this machine's CPUs.

    python -m tools ranks -- --dtype bfloat16

First one packet of a decode step: encoded, sent, received and decoded by another process, which spins or sleeps before.
Then whole steps: one process with as many threads as there are ranks, and ranks of one thread each, in turns.
"""

from __future__ import annotations

import argparse
import gc
import mmap
import multiprocessing
import os
import random
import statistics
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from loadtest.arguments import positive_int
from loadtest.engines import build
from loadtest.output import print_table, save_json

if TYPE_CHECKING:
    from engine.loop import Engine
    from engine.runtime.pool.batch import Packet

_NUM_ROWS, _CONTEXT, _BLOCK_SIZE = 256, 500, 16
_PROMPT = 512
_PACES_S = {"spins": 0.0005, "sleeps": 0.01}  # between packets: a reader spins for 2 ms


def _packet() -> Packet:
    """Return a decode step of 256 sequences."""
    from engine.runtime.pool.batch import Packet

    rng = np.random.default_rng(0)
    contexts = rng.integers(_CONTEXT - 50, _CONTEXT + 50, _NUM_ROWS)
    ints = np.concatenate([np.arange(_NUM_ROWS + 1), contexts])
    return Packet(
        longs=np.arange(4 * _NUM_ROWS),
        ints=ints.astype(np.int32),
        slots=np.arange(_NUM_ROWS),
        changes=rng.integers(0, 10_000, (_NUM_ROWS // _BLOCK_SIZE, 2)).astype(np.int32),
        num_slices=_NUM_ROWS,
        num_tokens=_NUM_ROWS,
        num_samples=_NUM_ROWS,
        scored=(),
        keeps_all=False,
        query_lens=[1] * _NUM_ROWS,
        contexts=contexts.tolist(),
    )


def _packets_us(num: int, pace_s: float, *, spins: bool) -> list[float]:
    """Return the microseconds from a packet's encoding until another process has decoded it, sorted."""
    from engine.runtime.execution.packet import Kind, Step, decode, encode
    from engine.runtime.parallel.ring import RingReader, RingWriter, make_memory

    memory, waker = make_memory(64 << 20), os.eventfd(0)
    times = np.frombuffer(mmap.mmap(-1, 8 * (num + 1)), np.int64)  # shared with the fork

    def read() -> None:
        reader, at = RingReader(memory, waker, 0, spins=spins), 0
        times[num] = 1
        while decode(reader.receive()) is not Kind.CLOSE:
            times[at] = time.perf_counter_ns()
            reader.release()
            at += 1

    process = multiprocessing.get_context("fork").Process(target=read)
    process.start()
    while not times[num]:
        time.sleep(0.01)
    writer, packet, begun = RingWriter(memory, [waker], timeout_s=60.0), _packet(), []
    for _ in range(num):
        end_s = time.perf_counter() + pace_s
        while time.perf_counter() < end_s:
            pass  # a first rank that computes has its core
        begun.append(time.perf_counter_ns())
        writer.send(encode(Step(packet, is_shared=False)))
    writer.send(encode(Kind.CLOSE))
    process.join()
    os.close(memory)
    os.close(waker)
    return sorted(((times[:num] - begun) / 1000).tolist())


def _decode_ms(engine: Engine, num_seqs: int, num_steps: int) -> float:
    from engine.core.types import SamplingParams
    from tools.steps import Stopwatch, decode

    params = SamplingParams(max_tokens=num_steps + 16, temperature=0.0)
    return decode(engine, Stopwatch(), num_seqs, num_steps, params)["step"] / 1000


def _prefill_ms(engine: Engine, number: int) -> float:
    """Return the time of a prompt's step."""
    from engine.core.types import Request, SamplingParams

    rng = random.Random(number)
    prompt = tuple(rng.randrange(engine.facts.vocab_size) for _ in range(_PROMPT))
    params = SamplingParams(max_tokens=1, temperature=0.0)
    engine.submit(Request(request_id=f"p{number}", prompt=prompt, params=params, arrival_s=engine.clock()))
    begun, before = time.perf_counter(), engine.stats.generation_tokens
    while engine.stats.generation_tokens == before:
        engine._turn()  # noqa: SLF001 - the loop's own body, without its thread
    elapsed_s = time.perf_counter() - begun
    while engine.stats.num_running:
        engine._turn()  # noqa: SLF001
    return 1000 * elapsed_s


def _serve(settings: Sequence[str], num_steps: int, pipe: Connection) -> None:
    """Hold an engine and measure what is asked for. Runs in a process: a process has one number of threads."""
    engine = build([*settings, "--no-enable-prefix-caching"])
    gc.freeze()
    pipe.send(None)
    number = 0
    while (num_seqs := pipe.recv()) is not None:
        number += 1
        pipe.send(_decode_ms(engine, num_seqs, num_steps) if num_seqs else _prefill_ms(engine, number))
    engine.stop(0)


def _steps(options: argparse.Namespace) -> dict[str, dict[int, list[float]]]:
    """Return milliseconds of a step by engine and level (0: the prompt), a figure a round."""
    size = str(options.ranks)
    engines = {"threads": ["--num-threads", size], "ranks": ["--num-threads", "1", "--tensor-parallel-size", size]}
    context, held = multiprocessing.get_context("spawn"), {}
    for name, flags in engines.items():
        pipe, other = context.Pipe()
        settings = [*options.settings, *flags]
        process = context.Process(target=_serve, args=(settings, options.num_steps, other))
        process.start()
        other.close()
        pipe.recv()
        held[name] = (pipe, process)
    levels = [*options.num_seqs, 0]
    found: dict[str, dict[int, list[float]]] = {name: {level: [] for level in levels} for name in engines}
    for number in range(options.rounds + 1):
        for level in levels:
            for name in list(engines)[:: 1 if number % 2 else -1]:
                held[name][0].send(level)
                taken: float = held[name][0].recv()
                if number:  # the first round warms up
                    found[name][level].append(taken)
    for pipe, process in held.values():
        pipe.send(None)
        process.join()
    return found


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `ranks`."""
    parser.add_argument("--ranks", type=positive_int, default=2, metavar="N", help="default %(default)s")
    parser.add_argument("--num-seqs", type=positive_int, nargs="+", default=[1, 8, 32], metavar="N")
    parser.add_argument(
        "--num-steps", type=positive_int, default=32, metavar="N", help="in a round; default %(default)s"
    )
    parser.add_argument("--rounds", type=positive_int, default=7, metavar="N", help="default %(default)s")
    parser.add_argument("--packets", type=positive_int, default=1000, metavar="N", help="default %(default)s")
    parser.add_argument("--only", choices=("packets", "steps"), help="leave the other part out")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")
    parser.add_argument("settings", nargs="*", metavar="SETTING", help="after --, what `quire serve` takes")


def run(options: argparse.Namespace) -> int:
    """Measure and print."""
    print(f"load average: {os.getloadavg()[0]:.2f} on {os.cpu_count()} processors")
    figures: dict[str, Any] = {}
    if options.only != "steps":
        figures["packets_us"] = packets = {
            name: _packets_us(options.packets, pace_s, spins=name == "spins") for name, pace_s in _PACES_S.items()
        }
        print(f"\na decode step of {_NUM_ROWS} rows to another process, microseconds; the reader ...")
        shares = {"p5": 0.05, "median": 0.5, "p95": 0.95}
        rows = (
            (name, *(f"{each[int(share * (len(each) - 1))]:.0f}" for share in shares.values()))
            for name, each in packets.items()
        )
        print_table(("reader", *shares), rows)
    if options.only != "packets":
        figures["steps_ms"] = steps = _steps(options)
        print(f"\nmilliseconds of a step, medians of {options.rounds} rounds in turns; ratio: threads / ranks")
        print_table(
            ("step", f"1 x {options.ranks} threads", f"{options.ranks} ranks", "ratio", "worst", "best"),
            (_compared(level, one, steps["ranks"][level]) for level, one in steps["threads"].items()),
        )
    save_json(options.json, figures)
    return 0


def _compared(level: int, one: list[float], other: list[float]) -> tuple[str, ...]:
    """Return a row: medians, and the ratio of pairs of rounds."""
    ratios = sorted(first / second for first, second in zip(one, other, strict=True))
    name = f"decode {level}" if level else f"prompt of {_PROMPT}"
    times = (f"{statistics.median(each):.2f}" for each in (one, other))
    return (name, *times, *(f"{ratio:.2f}" for ratio in (statistics.median(ratios), ratios[0], ratios[-1])))
