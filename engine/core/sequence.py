"""A sequence: one running answer to a request, with its tokens, its page table and its place in the state machine.

            admit             prompt planned           stop, length, abort, error
    WAITING ------> PREFILL ----------------> RUNNING ----------------------------> DONE
                       ^ |                       |
                 admit | | pool exhausted        | pool exhausted
                       | v                       |
                    PREEMPTED <------------------+            (every state may go to DONE: abort)

A step that is taken back leads from RUNNING to PREFILL: all of the sequence's tokens are known again.

There is no prefill step and no decode step: a sequence has positions still to compute, and a step computes some.

    num_computed <= num_planned < max_total

num_computed positions have their K/V in the pool; num_planned adds those of steps in flight. In PREFILL all tokens are
known and num_planned catches up with them. In RUNNING exactly one token is ahead of num_planned, known or still being
drawn by a step in flight, so planning needs counts, never values.

The beams of a search are sequences too, the first of them the request's own, which alone owes events. A beam's
max_total is one more than the tokens it has, so it waits for its next one: beams.py chooses that when the outcomes of
all of them are known. Engine thread only.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from enum import Enum

from engine.core.account import Account
from engine.core.beam_search import BeamSearch, row_params
from engine.core.kv.page_table import NEVER, SequenceKV
from engine.core.step import POOLED_UNIT, Sample, SequenceSlice
from engine.core.types import Pooling, PromptInfo, Request, TokenLogprob


class Status(Enum):
    WAITING = "waiting"
    PREFILL = "prefill"
    RUNNING = "running"
    PREEMPTED = "preempted"  # to be recomputed, but for what host memory has of it
    DONE = "done"


_MOVES = {
    Status.WAITING: {Status.PREFILL, Status.DONE},
    Status.PREFILL: {Status.RUNNING, Status.PREEMPTED, Status.DONE},
    Status.RUNNING: {Status.PREFILL, Status.PREEMPTED, Status.DONE},
    Status.PREEMPTED: {Status.PREFILL, Status.DONE},
    Status.DONE: set(),
}


_RUNNING = Status.RUNNING  # looking a member up on its Enum costs 50 ns (Python 3.11), twice a block for every sequence


def choice_seed(seed: int, choice: int) -> int:
    """The seed of a request's n-th answer: choice 0 draws exactly what the request would draw with n = 1."""
    return (seed + choice * 0x9E3779B97F4A7C15) & 0x7FFF_FFFF_FFFF_FFFF


class Sequence:
    """Mutable, slotted, and touched by the scheduler alone."""

    __slots__ = (
        "account",
        "beams",
        "choice",
        "draft_chance",
        "ending_ids",
        "fast_commit_until",
        "fast_path_until",
        "first_scheduled_s",
        "first_token_s",
        "headroom",
        "is_chunked_prefill",
        "is_forked",
        "is_leaving",
        "kv",
        "last_token_s",
        "max_drafts",
        "max_total",
        "num_accepted",
        "num_cached",
        "num_charged",
        "num_computed",
        "num_drafted",
        "num_expected",
        "num_in_flight",
        "num_planned",
        "num_preemptions",
        "num_prompt",
        "order",
        "params",
        "place",
        "pooled",
        "prompt_logprobs",
        "request",
        "request_id",
        "samples",
        "search",
        "seq_id",
        "slices",
        "slot",
        "status",
        "tokens",
    )

    def __init__(
        self,
        request: Request,
        choice: int,
        seq_id: int,
        key: float,
        block_size: int,
        names: Seq[bytes],
        account: Account,
    ) -> None:
        self.request = request
        self.request_id = request.request_id
        self.params = request.params
        self.choice = choice
        self.seq_id = seq_id
        # The place among those that wait: policy first, then first come; beams stand right behind their first.
        self.order: tuple[float, ...] = (key, seq_id)
        self.place: tuple[float, ...] = (self.is_background, *self.order)  # among those that run; `fair` has another
        self.account = account
        self.num_expected: float | None = None  # tokens of the answer, where somebody predicts them
        self.num_charged = 0  # of `tokens`, those that the account was charged for; a prompt is charged as a whole
        self.status = Status.WAITING
        self.tokens = list(request.prompt)
        self.num_prompt = len(self.tokens)
        self.max_total = self.num_prompt + request.params.max_tokens
        self.ending_ids = request.params.eos_token_ids | request.params.stop_token_ids
        self.num_computed = self.num_planned = 0
        self.num_in_flight = 0  # launched steps that name this sequence
        # See `rest`: a position below the first needs nothing but a place in the plan; its token, below the second, to be noted.
        self.fast_path_until = self.fast_commit_until = 0
        self.slices: tuple[SequenceSlice, ...] = ()  # of its decode steps, while it has a slot
        self.kv = SequenceKV(block_size, names)  # the KVCacheManager's
        self.slot = -1  # the runner row
        self.samples: tuple[Sample, ...] = ()
        self.search: BeamSearch | None = None  # that all beams of the request share, as they do ...
        self.beams: list[Sequence] = []  # ... the list of them
        self.headroom = 0  # blocks beyond its own that have to be available for it to start
        self.is_forked = request.params.num_sequences == 1
        self.is_leaving = False  # out of the queues, but a step in flight still names its blocks
        self.is_chunked_prefill = (
            False  # no step holds what was to compute when it was admitted: it catches up at a measured pace
        )
        self.prompt_logprobs: list[TokenLogprob | None] = [None]
        self.pooled: list[int] = []  # the sum of hidden states so far, as StepResult has it
        self.num_cached = 0  # positions that it was first admitted with
        self.num_preemptions = 0
        self.draft_chance = -1.0  # that one more drafted token is right; negative while nothing is known
        self.max_drafts = NEVER  # no limit of its own
        self.num_drafted = self.num_accepted = 0  # tokens
        self.first_scheduled_s = self.first_token_s = self.last_token_s = -1.0

    @property
    def is_background(self) -> bool:
        return self.request.is_background

    def move(self, status: Status) -> None:
        """Change state, along the arrows above only."""
        assert status in _MOVES[self.status], f"sequence {self.seq_id} cannot go from {self.status} to {status}"
        self.status = status
        self.fast_path_until = self.fast_commit_until = 0

    def rest(self) -> None:
        """Find out until where it only draws a token a step: no end, no new block; and nothing for the prefix cache.

        Called when a token of it was drawn, so that it has a first one and nothing of its prompt is in flight.
        """
        if self.status is _RUNNING and self.search is None:
            last, kv = self.max_total - 1, self.kv
            self.fast_path_until = min(last, kv.writable_until)
            self.fast_commit_until = min(last, kv.next_publish)

    def _make_slices(self) -> None:
        """Two, for decode steps to take turns: a plan may be in flight while the next is made.

        Only `start` differs from one step to the next, and writing it takes a tenth of the time of a new slice.
        """
        fields = (self.slot, self.tokens, self.num_prompt, 0, 1, self.kv.blocks, self.samples, self.params)
        self.slices = tuple([SequenceSlice(*fields, prompt_logprobs=-1, seq_id=self.seq_id) for _ in range(2)])

    @property
    def is_waiting(self) -> bool:
        """Running, but with nothing to plan before a plan in flight is committed, or other beams are."""
        return self.status is Status.RUNNING and self.num_planned >= self.max_total - 1

    @property
    def num_slots(self) -> int:
        """Runner rows that admission must find."""
        return 1 if self.is_forked else self.params.num_sequences

    @property
    def first_names(self) -> list[bytes]:
        """What its chain began with; see prefix_cache.py."""
        return self.kv.chain[: self.request.num_public // self.kv.block_size + 1]

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def is_resuming(self) -> bool:
        """Waiting, but not for the first time."""
        return self.status is Status.PREEMPTED

    @property
    def wants_prompt_logprobs(self) -> bool:
        return self.params.prompt_logprobs is not None and self.first_token_s < 0

    @property
    def needs_every_position(self) -> bool:
        """What is made of the prompt is made while it is computed, all of it in one go: no cached K/V stands in for it."""
        return self.wants_prompt_logprobs or self.params.pooling is Pooling.MEAN

    def pool(self, states: Seq[int]) -> None:
        """Add a step's hidden states to the sum."""
        self.pooled = [a + b for a, b in zip(self.pooled, states, strict=True)] if self.pooled else list(states)

    def prompt_info(self) -> PromptInfo:
        """What the first event of this choice tells about the prompt."""
        wanted, pooling = self.params.prompt_logprobs is not None, self.params.pooling
        unit = POOLED_UNIT / (self.num_prompt if pooling is Pooling.MEAN else 1)
        return PromptInfo(
            num_cached_tokens=self.num_cached,
            num_host_tokens=self.kv.num_from.get("host", 0),
            num_disk_tokens=sum(num for tier, num in self.kv.num_from.items() if tier != "host"),
            num_pinned_tokens=self.kv.num_pinned,
            logprobs=tuple(self.prompt_logprobs) if wanted else None,
            queue_s=self.first_scheduled_s - self.request.arrival_s,
            prefill_s=max(self.first_token_s - self.first_scheduled_s, 0.0),  # 0 where no token is drawn
            pooled=None if pooling is None else tuple([unit * total for total in self.pooled]),
        )

    def take_slots(self, slots: list[int]) -> None:
        """Use these runner rows; the first is this sequence's own."""
        self.kv.slots = slots
        self.slot = slots[0]
        self.samples = (Sample(slots[0], choice_seed(self.params.seed, self.choice)),)
        self._make_slices()

    def follow(self, other: Sequence, seq_id: int) -> None:
        """Copy the state of another answer to the same prompt, sharing its blocks. The caller counts the references."""
        self.seq_id = seq_id  # under another id, for under one id tokens only ever come to those that are there
        self.tokens = list(other.tokens)
        self.num_computed = other.num_computed
        self.num_planned = other.num_planned
        self.kv.follow(other.kv)
        self._make_slices()

    def _sibling(self, choice: int, seq_id: int) -> Sequence:
        """Another answer to the same prompt, with nothing yet."""
        block_size = self.kv.block_size
        sibling = Sequence(self.request, choice, seq_id, self.order[0], block_size, self.first_names, self.account)
        sibling.num_charged = self.num_charged
        sibling.num_expected = self.num_expected
        return sibling

    def fork(self, choice: int, seq_id: int) -> Sequence:
        """Another answer to the same prompt, sharing every block. The caller adds the references."""
        child = self._sibling(choice, seq_id)
        child.follow(self, seq_id)
        child.status = Status.RUNNING
        child.num_in_flight = 1
        child.prompt_logprobs = self.prompt_logprobs
        child.num_cached = self.num_cached
        child.kv.num_from = self.kv.num_from
        child.num_preemptions = self.num_preemptions
        child.first_scheduled_s = self.first_scheduled_s
        child.is_forked = True
        return child

    def begin_search(self, seq_id: int) -> None:
        """Be the first beam of a search, and know the prompt alone."""
        self.params = row_params(self.request.params)
        self.search = BeamSearch(self.request.params)
        self.beams = [self]
        self.seq_id = seq_id
        self.tokens = list(self.request.prompt)
        self.max_total = self.num_prompt + 1
        self.kv.chain = self.first_names

    def add_beam(self, slot: int, seq_id: int) -> Sequence:
        """One more beam of the first one's search. It has nothing yet, and is to follow another."""
        beam = self._sibling(self.choice, seq_id)
        beam.params, beam.search, beam.beams = self.params, self.search, self.beams
        beam.order = (*self.order, len(self.beams))
        beam.place = (self.is_background, *beam.order)
        beam.status = Status.RUNNING
        beam.is_forked = True
        beam.num_cached = self.num_cached
        beam.first_token_s = self.first_token_s
        beam.take_slots([slot])
        self.beams.append(beam)
        return beam

    def reset(self) -> list[int]:
        """Forget all computed state, for a later start from scratch; returns the blocks to free."""
        blocks = self.kv.blocks
        self.kv.clear()
        self.num_computed = self.num_planned = 0
        self.samples = ()
        self.slices = ()
        if self.wants_prompt_logprobs:
            self.prompt_logprobs = [None]
        self.pooled = []
        return blocks
