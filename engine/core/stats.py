"""Counters, gauges, histograms and snapshots, as plain numbers.

The engine thread writes them. The event loop reads Stats without a lock, which the interpreter makes safe number by
number: a scrape may see one histogram a step ahead of another, never a torn value. A Snapshot does not change.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, abc
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import NamedTuple

from engine.core.page_table import NO_BLOCK
from engine.core.types import AbortCause, FinishReason

# Bounds of buckets in seconds: from 0.1 ms, so that tokens of 1 ms spread over several, to ten minutes for requests.
TOKEN_BUCKETS_S = (
    0.0001, 0.00025, 0.0005, 0.00075, 0.001, 0.0015, 0.002, 0.003, 0.004, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04,
    0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 30.0,
)  # fmt: skip
REQUEST_BUCKETS_S = (
    0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 0.75, 1.0, 1.5, 2.5, 5.0, 7.5, 10.0, 20.0,
    40.0, 60.0, 120.0, 300.0, 600.0,
)  # fmt: skip
COUNT_BUCKETS = tuple(float(1 << power) for power in range(18))  # tokens or sequences, to the longest contexts


class FailureCause(str, Enum):
    """Why a sequence ended on an error; a label of the failure counter."""

    NOT_FINITE = "not_finite"  # its logits were not finite numbers
    IMAGE = "image"  # the vision tower could not compute an image of its prompt
    GRAMMAR = "grammar"  # its grammar's matcher failed on the way
    RULED_OUT = "ruled_out"  # what its client ruled out left it no token
    OUT_OF_MEMORY = "out_of_memory"  # the device had no memory for its step, nor for a smaller one
    ENGINE_DEATH = "engine_death"  # it was open when the engine died


class PreemptionKind(str, Enum):
    """How a preempted sequence gets its K/V back; a label of the preemption counter."""

    RECOMPUTE = "recompute"
    SWAP = "swap"  # from host memory


class Target(str, Enum):
    """What an answer is measured against; a label of the counters of missed targets and dropped requests."""

    TTFT = "ttft"  # --target-ttft-ms: its first token
    ITL = "itl"  # --target-itl-ms: the mean gap between its tokens
    DEADLINE = "deadline"  # its own deadline_ms
    QUEUE = "queue"  # its own max_queue_ms


class SwapDirection(str, Enum):
    """Where a block was copied; a label of the counter of swapped blocks."""

    OUT = "out"  # to host memory
    IN = "in"


class TransferKind(str, Enum):
    """Which way a block went between host memory and a store; a label of those counters."""

    LOAD = "fetch"
    SAVE = "store"


class Histogram:
    """Bucket counts, not cumulative: counts[i] is for (bounds[i-1], bounds[i]], the last for the rest."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: abc.Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count `value` so many `times`."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    @property
    def count(self) -> int:
        return sum(self.counts)

    @property
    def mean(self) -> float:
        """Return the mean, 0 if nothing was observed."""
        return self.sum / max(self.count, 1)


_token_seconds = partial(Histogram, TOKEN_BUCKETS_S)
_request_seconds = partial(Histogram, REQUEST_BUCKETS_S)
_counts = partial(Histogram, COUNT_BUCKETS)


@dataclass(slots=True)
class Stats:
    """What an engine has done so far. Durations are seconds."""

    # gauges
    num_running: int = 0
    num_waiting: int = 0  # never yet scheduled
    num_waiting_tokens: int = 0  # prompt tokens of waiting requests that are still to be computed
    num_preempted: int = 0  # waiting to resume
    num_further: int = 0  # of num_waiting and num_preempted, inputs that are not the first of their client's request
    num_background_running: int = 0  # of num_running, those that pause while there is other work
    num_background_waiting: int = 0  # beside num_waiting and num_preempted: both of the background
    blocks_free: int = 0
    blocks_cached: int = 0
    blocks_held: int = 0
    findable_blocks: dict[str, int] = field(default_factory=lambda: {"full": 0})  # by kind of group of layers
    host_blocks_free: int = 0  # of the swap space
    host_blocks_held: int = 0
    host_blocks_cached: int = 0
    blocks_pinned: int = 0  # of prefixes that requests, or the operator, want retained: in the pool ...
    host_blocks_pinned: int = 0
    store_blocks: dict[str, int] = field(
        default_factory=lambda: {"disk": 0, "shared": 0}
    )  # cached blocks of each store ...
    store_blocks_pinned: dict[str, int] = field(
        default_factory=lambda: {"disk": 0, "shared": 0}
    )  # ... and the pinned ones of these
    last_step_s: float = 0.0  # clock reading at the last commit
    answer_s: float = 0.0  # moving average of the seconds from an answer's start to its completion
    tokens_per_s: float = 0.0  # recent rate of computed tokens, prompt and generation, while busy
    adapters_running: dict[str, int] = field(default_factory=dict)  # sequences by the name of their LoRA adapter
    adapters_waiting: dict[str, int] = field(default_factory=dict)  # the same of waiting and preempted ones
    # counters
    steps: int = 0
    background_steps: int = 0  # of these
    prompt_tokens: int = 0  # prompt tokens of requests whose prefill completed
    generation_tokens: int = 0
    prefix_queried_tokens: int = 0
    prefix_hit_tokens: int = 0
    pins_refused: int = 0  # times that there was no place for one more block to retain
    blocks_waste: float = 0.0  # share of the recent sequences' blocks that was empty at their end; updated while idle
    integrity_failures: int = 0  # times the books did not balance while idle: a bug of ours
    failed_copies: int = 0  # steps rolled back because blocks could not be copied to host memory or back
    out_of_memory_steps: int = 0  # rolled back because the device had no memory for them
    yielded: int = 0  # preemptions for the sake of a tenant that held far less; counted in `preempted` too
    rejected: int = 0  # because the queue was full
    spec_drafts: int = 0  # times that tokens were drafted for a sequence
    spec_draft_tokens: int = 0
    spec_accepted_tokens: int = 0  # of these, those that were drawn
    spec_accepted_at: list[int] = field(default_factory=lambda: [0])  # the same by their place in a draft
    targeted: int = 0  # completed or dropped answers that were held to any target
    met: int = 0  # of these, those that met all of theirs
    missed: dict[Target, int] = field(default_factory=lambda: dict.fromkeys(Target, 0))
    dropped: dict[Target, int] = field(default_factory=lambda: dict.fromkeys((Target.DEADLINE, Target.QUEUE), 0))
    finished: dict[FinishReason, int] = field(default_factory=lambda: dict.fromkeys(FinishReason, 0))
    failed: dict[FailureCause, int] = field(default_factory=lambda: dict.fromkeys(FailureCause, 0))
    aborted: dict[AbortCause, int] = field(default_factory=lambda: dict.fromkeys(AbortCause, 0))
    preempted: dict[PreemptionKind, int] = field(default_factory=lambda: dict.fromkeys(PreemptionKind, 0))
    swapped_blocks: dict[SwapDirection, int] = field(default_factory=lambda: dict.fromkeys(SwapDirection, 0))
    prefix_hits: dict[str, int] = field(
        default_factory=lambda: {"pool": 0, "host": 0, "disk": 0, "shared": 0}
    )  # tokens, by tier
    transferred: dict[TransferKind, int] = field(default_factory=lambda: dict.fromkeys(TransferKind, 0))  # blocks
    failed_transfers: dict[TransferKind, int] = field(default_factory=lambda: dict.fromkeys(TransferKind, 0))
    # histograms
    ttft_s: Histogram = field(default_factory=_request_seconds)
    tpot_s: Histogram = field(default_factory=_token_seconds)  # a request's mean time per output token after the first
    itl_s: Histogram = field(default_factory=_token_seconds)  # every gap between two tokens
    e2e_s: Histogram = field(default_factory=_request_seconds)
    queue_s: Histogram = field(default_factory=_request_seconds)
    prefill_s: Histogram = field(default_factory=_request_seconds)
    decode_s: Histogram = field(default_factory=_request_seconds)
    step_s: Histogram = field(default_factory=_token_seconds)
    step_tokens: Histogram = field(default_factory=_counts)
    step_sequences: Histogram = field(default_factory=_counts)
    request_prompt_tokens: Histogram = field(default_factory=_counts)
    request_generation_tokens: Histogram = field(default_factory=_counts)
    grammar_s: Histogram = field(default_factory=_request_seconds)  # compilations of grammars that were not cached

    def end(self, reason: FinishReason, num_sequences: int, num_prompt: int, num_generated: int) -> None:
        """Count sequences that ended alike, for any reason; everything that counts ends relies on it.

        Their tokens were counted in `generation_tokens` as they were drawn. So when none is open that is the sum of
        `request_generation_tokens`, and each of both histograms has counted as many as `finished`.
        """
        self.finished[reason] += num_sequences
        self.request_prompt_tokens.observe(num_prompt, num_sequences)
        self.request_generation_tokens.observe(num_generated, num_sequences)

    @property
    def num_completed(self) -> int:
        """Return how many sequences completed their answers."""
        return self.finished[FinishReason.STOP] + self.finished[FinishReason.LENGTH]

    @property
    def preemptions(self) -> int:
        """Return the preemptions of both kinds."""
        return sum(self.preempted.values())

    @property
    def kv_cache_usage_ratio(self) -> float:
        """Return the share of the pool that sequences hold; cached blocks do not count."""
        total = self.blocks_free + self.blocks_cached + self.blocks_held
        return self.blocks_held / total if total else 0.0


class SequenceView(NamedTuple):
    """One sequence and its page table."""

    seq_id: int
    request_id: str
    tenant: str
    choice: int
    status: str  # a Status's value
    num_prompt: int
    num_tokens: int  # prompt and answer so far
    num_computed: int  # of these, with K and V in the pool
    num_cached: int  # of these, found in the prefix cache
    num_preemptions: int
    arrival_s: float
    first_scheduled_s: float | None  # None until it is known
    first_token_s: float | None
    tables: tuple[tuple[int, ...], ...]  # by group, blocks in logical order; NO_BLOCK where a window has passed

    @property
    def all_blocks(self) -> list[int]:
        """Return the blocks of all groups of layers."""
        return [block for table in self.tables for block in table if block != NO_BLOCK]

    def blocks_by_group(self, names: abc.Sequence[str]) -> dict[str, int]:
        """Return how many blocks it has of these groups of layers; all slots of a state are tables of the last group."""
        found = Counter[str]()
        for index, table in enumerate(self.tables):
            found[names[min(index, len(names) - 1)]] += len(table) - table.count(NO_BLOCK)
        return +found  # without those of which it has none


class Snapshot(NamedTuple):
    """The pool and its holders between two steps."""

    num_free_blocks: int
    num_held_blocks: int
    num_cached_blocks: int  # not held, but found by prompts
    findable: bytes  # 1 for each block that prompts find, held or cached
    sequences: tuple[SequenceView, ...]
    queue: tuple[str, ...]  # ids of the waiting requests, the next one first
