"""A sequence: one answer to a request, with its tokens, K/V and state. Engine thread.

            admit             prompt planned           stop, length, abort, error
    WAITING ------> PREFILL ----------------> RUNNING ----------------------------> DONE
                       ^ |                       |
                 admit | | pool exhausted        | pool exhausted
                       | v                       |
                    PREEMPTED <------------------+            (every state may go to DONE: abort)

A step that is rolled back leads from RUNNING to PREFILL: all of the sequence's tokens are known again.

    num_computed <= num_planned < max_total

num_computed positions have their K/V in the pool; num_planned adds those of steps in flight. In PREFILL all tokens are
known and num_planned catches up with them. In RUNNING exactly one token is ahead of num_planned: it is known, or a step
in flight is still sampling it. So planning needs counts, never values.
"""

from __future__ import annotations

from collections import abc
from copy import copy
from dataclasses import InitVar, dataclass, field
from enum import Enum
from typing import Protocol

from engine.core.page_table import SequenceKV
from engine.core.stats import SequenceView
from engine.core.step import POOLED_UNIT, RowStart, Sample
from engine.core.types import Params, Pooling, PoolingParams, PromptInfo, Request, TokenLogprob


class Status(Enum):
    WAITING = "waiting"
    PREFILL = "prefill"
    RUNNING = "running"
    PREEMPTED = "preempted"  # its K/V is recomputed on resume, except for what host memory holds
    DONE = "done"


_MOVES = {
    Status.WAITING: {Status.PREFILL, Status.DONE},
    Status.PREFILL: {Status.RUNNING, Status.PREEMPTED, Status.DONE},
    Status.RUNNING: {Status.PREFILL, Status.PREEMPTED, Status.DONE},
    Status.PREEMPTED: {Status.PREFILL, Status.DONE},
    Status.DONE: set(),
}


_RUNNING = Status.RUNNING  # looking up a member of an Enum costs 50 ns (Python 3.11), twice a block for every sequence


def choice_seed(seed: int, choice: int) -> int:
    """Return the seed of a request's n-th answer: choice 0 has the seed that it would have with n = 1."""
    return (seed + choice * 0x9E3779B97F4A7C15) & 0x7FFF_FFFF_FFFF_FFFF


class Account:
    """A tenant's service and its share of the batch; policies but `fair` use one for all."""

    __slots__ = ("num_running", "served", "weight")

    def __init__(self) -> None:
        self.weight = 1.0
        self.served = 0.0  # the virtual token counter: costs of what was served, divided by the weight
        self.num_running = 0

    @property
    def share(self) -> float:
        """Return how much of the batch the tenant holds."""
        return self.num_running / self.weight

    def charge(self, cost: float) -> None:
        """Count a cost of service."""
        self.served += cost / self.weight


@dataclass(slots=True)
class History:
    """What happened to a sequence, for statistics. Times are -1.0 until they are known."""

    first_scheduled_s: float = -1.0
    first_token_s: float = -1.0
    num_cached: int = 0  # positions that it was first admitted with
    num_matched: int = 0  # those that the first group had then; the others could not resume there if there are more
    num_preemptions: int = 0
    preempted_s: tuple[float, ...] = ()


@dataclass(slots=True)
class DraftHistory:
    """How many of a sequence's drafts were accepted; drafts.py writes it."""

    chance: float  # that a drafted token is right if those before it were
    is_allowed: bool = True
    num_drafted: int = 0  # tokens
    num_accepted: int = 0


class Group(Protocol):
    """Sequences that run, are preempted and end together: the beams of a search."""

    members: list[Sequence]  # the first is the request's own
    headroom: int  # blocks beyond the first one's that have to be available for a start

    def disband(self) -> list[Sequence]:
        """Remove all but the first and return them."""

    def restart(self, seq_id: int) -> None:
        """Forget all tokens, so that the first can start again from the prompt."""


@dataclass(slots=True, eq=False)
class Sequence:
    """Mutable, slotted, and touched by the scheduler alone."""

    request: Request
    choice: int
    seq_id: int
    key: InitVar[float]
    block_size: InitVar[int]
    first_names: list[bytes]  # that its chain begins with; see prefix_cache.py
    account: Account
    request_id: str = field(init=False)
    params: Params = field(init=False)
    is_background: bool = field(init=False)
    status: Status = Status.WAITING
    # Places in the queues: among those that wait, by policy and arrival, and among those that run.
    order: tuple[float, ...] = field(init=False)
    place: tuple[float, ...] = field(init=False)
    num_charged: int = 0  # tokens that the account was charged for; a prompt is charged as a whole
    tokens: list[int] = field(init=False)
    num_prompt: int = field(init=False)
    max_total: int = field(init=False)
    ending_ids: frozenset[int] = field(init=False)
    num_computed: int = 0
    num_planned: int = 0
    # Below these positions a decode only takes a place in the plan, and its token is only appended.
    fast_path_until: int = 0
    fast_commit_until: int = 0
    kv: SequenceKV = field(init=False)  # the KVCacheManager's
    slot: int = -1  # the runner row
    samples: tuple[Sample, ...] = ()
    has_row: bool = False  # the runner has been sent its ids and tables
    is_forked: bool = field(init=False)
    is_leaving: bool = False  # out of the queues, but a step in flight still names its blocks
    is_chunked_prefill: bool = False  # no single step could hold what was to compute when it was admitted
    beam_group: Group | None = None
    drafts: DraftHistory | None = None
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=lambda: [None])
    pooled: list[int] = field(default_factory=list)  # the sum of hidden states so far, as StepResult has it
    last_token_s: float = -1.0
    history: History = field(default_factory=History)

    def __post_init__(self, key: float, block_size: int) -> None:
        request = self.request
        self.request_id, self.params, self.is_background = request.request_id, request.params, request.is_background
        self.order = (key, self.seq_id)
        self.place = (self.is_background, *self.order)
        self.tokens = list(self.request.prompt)
        self.num_prompt = len(self.tokens)
        self.max_total = self.num_prompt + self.params.max_tokens
        self.ending_ids = self.params.eos_token_ids | self.params.stop_token_ids
        self.kv = SequenceKV(block_size, self.first_names.copy())
        self.is_forked = self.params.num_sequences == 1

    def move(self, status: Status) -> None:
        """Change the state, along the arrows above only."""
        assert status in _MOVES[self.status], f"sequence {self.seq_id} cannot go from {self.status} to {status}"
        self.status = status
        self.fast_path_until = self.fast_commit_until = 0

    def update_fast_path(self) -> None:
        """Set the positions below which a step samples one token and nothing else happens.

        Called when a token was sampled, so nothing of the prompt is in flight.
        """
        if self.status is _RUNNING and self.beam_group is None:
            last, kv = self.max_total - 1, self.kv
            self.fast_path_until = min(last, kv.writable_until)
            self.fast_commit_until = min(last, kv.next_publish)

    def start_row(self) -> RowStart:
        """Return the row that the runner keeps from now on."""
        self.has_row = True
        seed, tables = self.samples[0].seed, tuple(map(tuple, self.kv.tables))
        fields = (self.slot, self.seq_id, self.num_prompt, self.params, seed, tuple(self.tokens), tables)
        return RowStart(*fields, self.request.spans, self.first_names[0])

    @property
    def leads(self) -> bool:
        """Return whether the sequence computes blocks of its prompt that others will find."""
        kv, is_running = self.kv, self.status is Status.PREFILL or self.status is Status.RUNNING
        return is_running and kv.is_cacheable and (kv.num_published + 1) * kv.block_size <= self.num_prompt

    @property
    def is_waiting(self) -> bool:
        """Return whether the sequence runs, but cannot be planned until a step in flight is committed."""
        return self.status is Status.RUNNING and self.num_planned >= self.max_total - 1

    @property
    def is_in_flight(self) -> bool:
        """Return whether a launched step names the sequence."""
        return self.num_planned != self.num_computed or self.kv.is_arriving

    @property
    def first_beam(self) -> Sequence:
        """Return the sequence that reports a beam search's events; itself, if it belongs to no search."""
        return self if self.beam_group is None else self.beam_group.members[0]

    @property
    def headroom(self) -> int:
        """Return how many blocks beyond its own have to be available for it to start."""
        return 0 if self.beam_group is None else self.beam_group.headroom

    @property
    def num_slots(self) -> int:
        """Return the number of runner rows that admission must find."""
        return 1 if self.is_forked else self.params.num_sequences

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def is_resuming(self) -> bool:
        """Return whether the sequence was preempted and waits to resume."""
        return self.status is Status.PREEMPTED

    @property
    def wants_prompt_logprobs(self) -> bool:
        return self.params.prompt_logprobs is not None and self.history.first_token_s < 0

    @property
    def needs_every_position(self) -> bool:
        """Return whether cached K/V cannot stand in for any part of the prompt."""
        pooled = isinstance(self.params, PoolingParams) and self.params.pooling is not Pooling.LAST
        return self.wants_prompt_logprobs or pooled

    def pool(self, states: abc.Sequence[int]) -> None:
        """Add a step's hidden states to the sum."""
        self.pooled = [a + b for a, b in zip(self.pooled, states, strict=True)] if self.pooled else list(states)

    def prompt_info(self) -> PromptInfo:
        """Return what the first event of this choice says about the prompt."""
        wanted, params = self.params.prompt_logprobs is not None, self.params
        pooling = params.pooling if isinstance(params, PoolingParams) else None
        unit = POOLED_UNIT / (self.num_prompt if pooling is Pooling.MEAN else 1)
        history = self.history
        return PromptInfo(
            num_cached_tokens=history.num_cached,
            num_matched_tokens=history.num_matched,
            num_host_tokens=self.kv.num_from.get("host", 0),
            num_disk_tokens=sum(num for tier, num in self.kv.num_from.items() if tier != "host"),
            num_pinned_tokens=self.kv.num_pinned,
            logprobs=tuple(self.prompt_logprobs) if wanted else None,
            queue_s=history.first_scheduled_s - self.request.arrival_s,
            prefill_s=max(history.first_token_s - history.first_scheduled_s, 0.0),  # 0 where no token is sampled
            pooled=None if pooling is None else tuple([unit * total for total in self.pooled]),
        )

    def view(self) -> SequenceView:
        """Return the sequence as a snapshot shows it."""
        return SequenceView(
            seq_id=self.seq_id,
            request_id=self.request_id,
            tenant=self.request.tenant,
            choice=self.choice,
            status=self.status.value,
            num_prompt=self.num_prompt,
            num_tokens=len(self.tokens),
            num_computed=self.num_computed,
            num_cached=self.history.num_cached,
            num_preemptions=self.history.num_preemptions,
            arrival_s=self.request.arrival_s,
            first_scheduled_s=None if self.history.first_scheduled_s < 0 else self.history.first_scheduled_s,
            first_token_s=None if self.history.first_token_s < 0 else self.history.first_token_s,
            tables=tuple(map(tuple, self.kv.held)),
        )

    def take_slots(self, slots: list[int]) -> None:
        """Use these runner rows; the first is this sequence's own."""
        self.kv.slots = slots
        self.slot = slots[0]
        self.samples = (Sample(slots[0], choice_seed(self.params.seed, self.choice)),)

    def follow(self, other: Sequence, seq_id: int) -> None:
        """Copy another answer's state, sharing its blocks. The caller counts the references."""
        self.seq_id = seq_id  # a runner relies on this: under one id tokens are only ever appended
        self.tokens = list(other.tokens)
        self.num_computed = other.num_computed
        self.num_planned = other.num_planned
        self.kv.follow(other.kv)
        self.has_row = False

    def sibling(self, choice: int, seq_id: int) -> Sequence:
        """Return another answer to the same prompt, running and forked, with nothing computed."""
        block_size = self.kv.block_size
        sibling = Sequence(self.request, choice, seq_id, self.order[0], block_size, self.first_names, self.account)
        sibling.status = Status.RUNNING
        sibling.is_forked = True
        sibling.num_charged = self.num_charged
        sibling.history = copy(self.history)
        return sibling

    def fork(self, choice: int, seq_id: int) -> Sequence:
        """Return another answer to the same prompt, sharing every block. The caller counts the references."""
        child = self.sibling(choice, seq_id)
        child.follow(self, seq_id)
        child.prompt_logprobs = self.prompt_logprobs
        child.kv.num_from = self.kv.num_from
        return child

    def reset(self) -> None:
        """Forget all computed state, for a later start from scratch; its blocks are freed."""
        self.kv.clear()
        self.num_computed = self.num_planned = 0
        self.samples, self.has_row = (), False
        if self.wants_prompt_logprobs:
            self.prompt_logprobs = [None]
        self.pooled = []
