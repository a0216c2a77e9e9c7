"""`quire simulate paging`: the effect of paging on a few requests.

The scheduler is the one that serves; its clock advances by one a step. It shows the blocks in use rise and fall as sequences arrive, grow and end, against a static batch that reserves the
longest length for every request. Each figure says whether it is a formula or was measured in the pool.
"""

from __future__ import annotations

import argparse
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

from engine.core.config import SchedulerConfig
from engine.core.fake_runner import CostModel, FakeRunner
from engine.core.kv.page_table import blocks_for
from engine.core.queues import POLICIES
from engine.core.scheduler import Scheduler
from engine.core.stats import PreemptionKind
from engine.core.step import StepPlan
from engine.core.types import Request, SamplingParams
from loadtest.arguments import save_json
from loadtest.simulation.replica import SimulationError

COST = CostModel(step_s=1.0, token_s=0.0)  # the clock counts steps
NUM_CHATS, PREFIX_LEN, QUESTION_LEN = 16, 200, 24  # the shared system prompt of the example


class Sample(NamedTuple):
    """The engine after one step."""

    time: float
    held: int
    cached: int
    running: int
    waiting: int
    preempted: int


@dataclass(slots=True)
class Trace:
    """One simulated history. Times are virtual, one a step."""

    samples: list[Sample] = field(default_factory=list)
    tokens: dict[tuple[str, int], list[int]] = field(default_factory=dict)  # by request and choice
    finished: dict[str, float] = field(default_factory=dict)
    most_blocks: dict[int, int] = field(default_factory=dict)  # by sequence: its longest page table
    prefix_blocks: set[int] = field(default_factory=set)  # physical blocks that the example's prefix ever mapped to
    preempted: dict[PreemptionKind, int] = field(default_factory=dict)
    swapped_blocks: int = 0  # out and in
    hit_tokens: int = 0

    @property
    def blocks(self) -> list[int]:
        """The longest page table of each sequence, in order of arrival."""
        return [self.most_blocks[seq_id] for seq_id in sorted(self.most_blocks)]

    @property
    def peak(self) -> int:
        """Return the most blocks held at one time."""
        return max(sample.held for sample in self.samples)

    @property
    def preemptions(self) -> int:
        """Of both kinds."""
        return sum(self.preempted.values())

    def note(self, plan: StepPlan) -> None:
        """Remember the page tables of a plan; its lists grow on, so lengths are taken now."""
        for piece in plan.slices:
            self.most_blocks[piece.seq_id] = max(self.most_blocks.get(piece.seq_id, 0), len(piece.block_table))


def _arrival(request: Request) -> float:
    return request.arrival_s


def simulate(config: SchedulerConfig, requests: Sequence[Request]) -> Trace:
    """Run every request to its end. Raises a ClientError for one that can never fit."""
    scheduler, runner = Scheduler(config), FakeRunner(config)
    trace, stats = Trace(), scheduler.stats
    coming = deque(sorted(requests, key=_arrival))
    num_prefix_blocks = blocks_for(PREFIX_LEN, config.block_size)
    now = 0.0
    while coming or scheduler.has_work:
        while coming and coming[0].arrival_s <= now:
            scheduler.add(coming.popleft())
        plan = scheduler.plan(now)
        if plan is None:
            now = coming[0].arrival_s
            continue
        trace.note(plan)
        for piece in plan.slices:
            trace.prefix_blocks.update(piece.block_table[:num_prefix_blocks])
        now += COST.seconds(plan)
        for event in scheduler.commit(plan, runner.run(plan).wait(), now):
            trace.tokens.setdefault((event.request_id, event.choice), []).extend(event.token_ids)
            if event.finish_reason is not None:
                trace.finished[event.request_id] = now
        trace.samples.append(
            Sample(
                now, stats.blocks_held, stats.blocks_cached, stats.num_running, stats.num_waiting, stats.num_preempted
            )
        )
    scheduler.check_integrity()
    trace.preempted, trace.swapped_blocks = stats.preempted, sum(stats.swapped_blocks.values())
    trace.hit_tokens = stats.prefix_hit_tokens
    return trace


def batch(lengths: Sequence[int], arrivals: Sequence[float], prompt_len: int) -> list[Request]:
    """Requests whose K/V grows to exactly `lengths` positions: the last generated token is never fed back."""
    return [
        Request(
            request_id=f"r{index}",
            prompt=tuple((index * 31 + position) % 512 for position in range(prompt_len)),
            params=SamplingParams(max_tokens=length - prompt_len + 1, temperature=0.0),
            arrival_s=arrival,
        )
        for index, (length, arrival) in enumerate(zip(lengths, arrivals, strict=True))
    ]


@dataclass(frozen=True, slots=True)
class StaticBatch:
    """The cost of a batch that reserves the longest length for each request and ends with the longest."""

    blocks: int
    slots: int
    useful: int
    efficiency: float

    @classmethod
    def of(cls, lengths: Sequence[int], block_size: int) -> StaticBatch:
        slots = len(lengths) * max(lengths)
        return cls(len(lengths) * blocks_for(max(lengths), block_size), slots, sum(lengths), sum(lengths) / slots)


def block_bytes(num_layers: int, num_kv_heads: int, head_dim: int, dtype_bytes: int, block_size: int) -> int:
    """Return the bytes of one block: K and V of every layer."""
    return 2 * num_layers * num_kv_heads * head_dim * dtype_bytes * block_size


@dataclass(frozen=True, slots=True)
class Sharing:
    """The example of 16 chats with a 200-token system prompt, in blocks: two formulas, then measurements."""

    formula_shared: int
    formula_unshared: int
    forked: int  # held by 16 answers to one 200-token prompt, before any has written
    forked_diverged: int  # after each wrote its first token: the partial block is copied, the full ones stay shared
    chats_shared: int  # physical blocks under the prefix positions of 16 different chats, prefix cache on
    chats_unshared: int  # the same with the cache off
    chats_hit_tokens: int


def measure_sharing(block_size: int) -> Sharing:
    """Run the example through the scheduler: as forks of one prompt, and as separate chats with and without cache."""
    system = tuple(range(PREFIX_LEN))
    blocks = blocks_for(PREFIX_LEN, block_size)

    def config(caching: bool) -> SchedulerConfig:
        return SchedulerConfig(
            num_blocks=NUM_CHATS * blocks_for(PREFIX_LEN + QUESTION_LEN + 8, block_size),
            block_size=block_size,
            max_model_len=1024,
            max_num_seqs=NUM_CHATS,
            max_num_batched_tokens=8192,
            enable_prefix_caching=caching,
        )

    fork = Request(
        request_id="fork",
        prompt=system,
        params=SamplingParams(max_tokens=8, n=NUM_CHATS, temperature=1.0),
        arrival_s=0.0,
    )
    forked = simulate(config(True), [fork])
    chats = [
        Request(
            request_id=f"chat{chat}",
            prompt=system + tuple((chat * 37 + position) % 512 for position in range(QUESTION_LEN)),
            params=SamplingParams(max_tokens=8, temperature=0.0),
            arrival_s=float(chat > 0),  # the first chat's prefix must have been computed to be found
        )
        for chat in range(NUM_CHATS)
    ]
    with_cache, without = simulate(config(True), chats), simulate(config(False), chats)
    return Sharing(
        formula_shared=blocks,
        formula_unshared=NUM_CHATS * blocks,
        forked=forked.samples[0].held,
        forked_diverged=forked.samples[1].held,
        chats_shared=len(with_cache.prefix_blocks),
        chats_unshared=len(without.prefix_blocks),
        chats_hit_tokens=with_cache.hit_tokens,
    )


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `simulate paging`."""
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=[32, 128, 64, 256], help="K/V positions of each request"
    )
    parser.add_argument("--arrivals", type=float, nargs="+", help="in steps, one a length; default 0 2 4 ...")
    parser.add_argument("--prompt-len", type=int, default=1, help="how many of the positions are prompt")
    parser.add_argument("--policy", choices=tuple(POLICIES), default="fcfs", help="default %(default)s")
    parser.add_argument("--num-blocks", type=int, default=64, help="size of the pool; default %(default)s")
    parser.add_argument("--block-size", type=int, default=16, help="tokens a block; default %(default)s")
    parser.add_argument(
        "--num-host-blocks", type=int, default=0, help="swap space for preempted sequences; default %(default)s"
    )
    parser.add_argument("--max-num-seqs", type=int, default=256, help="default %(default)s")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every step's sample and the figures")


def run(options: argparse.Namespace) -> int:
    """Simulate, print, write."""
    lengths = options.lengths
    arrivals = range(0, 2 * len(lengths), 2) if options.arrivals is None else options.arrivals
    if len(lengths) != len(arrivals):
        raise SimulationError(f"--lengths names {len(lengths)} requests and --arrivals {len(arrivals)}; name as many.")
    if min(lengths) < options.prompt_len or options.prompt_len < 1:
        raise SimulationError(f"--prompt-len is {options.prompt_len}; it must be from 1 to the shortest length.")
    if min(arrivals) < 0:
        raise SimulationError(f"--arrivals names {min(arrivals):g}; times start at 0.")
    config = SchedulerConfig(
        num_blocks=options.num_blocks,
        block_size=options.block_size,
        max_model_len=max(lengths) + 1,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=max(2048, options.max_num_seqs),
        policy=options.policy,
        num_host_blocks=options.num_host_blocks,
    )
    requests = batch(lengths, arrivals, options.prompt_len)
    trace = simulate(config, requests)
    solo = {key: tokens for request in requests for key, tokens in simulate(config, [request]).tokens.items()}
    static = StaticBatch.of(lengths, options.block_size)
    sharing = measure_sharing(options.block_size)
    show(config, requests, trace, static, sharing, is_like_solo=solo == trace.tokens)
    document = {
        "config": asdict(config),
        "static": asdict(static),
        "sharing": asdict(sharing),
        "blocks_by_sequence": trace.blocks,
        "peak_blocks": trace.peak,
        "preemptions": trace.preemptions,
        "swapped_blocks": trace.swapped_blocks,
        "samples": [sample._asdict() for sample in trace.samples],
    }
    save_json(options, document)
    return 0


def show(
    config: SchedulerConfig,
    requests: Sequence[Request],
    trace: Trace,
    static: StaticBatch,
    sharing: Sharing,
    *,
    is_like_solo: bool,
) -> None:
    """Print requests, memory, time, sharing, and the size of a block."""
    each = trace.blocks
    print(f"policy {config.policy}, {config.num_blocks} blocks of {config.block_size} tokens; time is in steps\n")
    print("request   arrives    ends   blocks")
    for request, blocks in zip(sorted(requests, key=_arrival), each, strict=True):
        print(f"{request.request_id:<8}{request.arrival_s:>9g}{trace.finished[request.request_id]:>8g}{blocks:>9}")
    print(f"\n{_curve(trace, config.num_blocks)}\n")
    swaps = f"{trace.preempted[PreemptionKind.SWAP]} of them swapped, {trace.swapped_blocks} blocks copied both ways"
    rows: list[tuple[str, str, str]] = [
        ("static batch, formula", f"{static.blocks} blocks", "every request reserves the longest length"),
        ("paged, summed", f"{sum(each)} blocks", f"measured: {' + '.join(map(str, each))}"),
        ("paged, most held at one time", f"{trace.peak} blocks", "measured: not all are long at the same time"),
        ("preemptions", f"{trace.preemptions}", swaps if config.num_host_blocks else ""),
        ("efficiency of the static batch", f"{static.efficiency:.1%}", f"{static.useful} of {static.slots} slots"),
        ("continuous batching took", f"{trace.samples[-1].time:g} steps", "a sequence leaves in the step it ends"),
        ("tokens equal to solo runs", "yes" if is_like_solo else "NO", ""),
        (f"{NUM_CHATS} chats, a {PREFIX_LEN}-token prefix", "", "blocks under the prefix:"),
        ("  without sharing, formula", f"{sharing.formula_unshared} blocks", ""),
        ("  without sharing, measured", f"{sharing.chats_unshared} blocks", "separate chats, prefix cache off"),
        ("  shared, formula", f"{sharing.formula_shared} blocks", "the prefix once, rounded up"),
        ("  shared by forks, measured", f"{sharing.forked} blocks", f"n = {NUM_CHATS} of one prompt"),
        ("  forks, one token later", f"{sharing.forked_diverged} blocks", "the partial block is copied on write"),
        (
            "  shared by the prefix cache",
            f"{sharing.chats_shared} blocks",
            "full blocks; the partial one is each chat's",
        ),
        (
            "a block, formula",
            f"{block_bytes(32, 8, 128, 2, 16):,} bytes",
            "32 layers, 8 KV heads of 128, 16-bit, 16 tokens",
        ),
    ]
    for name, figure, note in rows:
        print(f"{name:<32}{figure:>16}   {note}".rstrip())


def _curve(trace: Trace, num_blocks: int, width: int = 72, height: int = 8) -> str:
    """Blocks held over time as a picture of characters."""
    count = len(trace.samples)
    columns = [
        max(
            sample.held
            for sample in trace.samples[i * count // width : max((i + 1) * count // width, i * count // width + 1)]
        )
        for i in range(width)
    ]
    top = max(columns) or num_blocks
    rows = [
        f"{top * level / height:>6.0f} |"
        + "".join("#" if held >= top * (level - 0.5) / height else " " for held in columns)
        for level in range(height, 0, -1)
    ]
    return "\n".join([*rows, f"{'0':>6} +{'-' * width} step {trace.samples[-1].time:g}"])
