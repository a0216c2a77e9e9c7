"""Whose turn a step is, with the policy `fair`: whoever comes has to wait for the step that runs, and shares the next one.

Two rules keep both short for a newcomer beside a tenant that holds far more:

    its own step       The step that draws its first token is its own, others sit it out. Of a prompt that takes more steps, up
                       to LONGEST, each has all but a fifth (pacing.py).
    the step before    While newcomers are likely, steps of a tenant that holds more than all others together are cut into
                       n parts: each has an n-th of its sequences and an n-th of its prompts' tokens, so that these keep their
                       proportion. Who had a part longest ago is next, and who is new comes last: however many that
                       tenant starts meanwhile, nobody waits longer than about n steps. A part takes at most WAIT of a
                       newcomer's own step, but each costs what a step costs however little is in it: n is no more than
                       makes all of them together PRICE longer.

Among equals nobody holds most, and nothing is cut: it would cost throughput, which is latency for all of a crowd. Nor is it
while anybody else waits, who comes the sooner the more is served. Newcomers are likely for PATIENCE times the longest that
they lately stayed away.

A newcomer alone would take a step of its own, s seconds, and beside others waits for the one that runs, at most r: its first
token takes 1 + r / s times as long at worst. Where WAIT * s is less than what any sensible step costs, that is more than
promised: of small prompts.

Owned by the roster, engine thread; knows no clock.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from math import ceil, inf
from typing import NamedTuple

from engine.core.account import Account
from engine.core.fairness import INPUT_COST, YIELD_RATIO
from engine.core.sequence import NEVER, Sequence, Status
from engine.core.step_time import Load, StepTime

WAIT = 0.25  # so that a newcomer has its first token within 1.3 times what it takes alone: steps vary
PRICE = 0.25
LONGEST = 4  # steps; those who make way feel each of them
PATIENCE = 2.0
LATELY_S = 60.0  # whoever was away for so long is not expected
_PACE = 0.1  # at which a gap, or the size of a prompt, is forgotten


class Turn(NamedTuple):
    """Who has a part in a step."""

    out: Collection[Sequence] = ()  # these have none, though they run
    max_prompt_tokens: int = NEVER  # of all others
    admits: bool = True  # somebody who waits


EVERYBODY = Turn()


class Turns:
    """Remembers who comes beside whom, and says who sits out the next step."""

    __slots__ = ("_gap_s", "_last_s", "_max_tokens", "_num_tokens", "_queue")

    def __init__(self, max_num_batched_tokens: int) -> None:
        self._max_tokens = max_num_batched_tokens
        self._last_s = -inf  # when somebody came ...
        self._gap_s = 0.0  # ... the longest time lately that nobody did ...
        self._num_tokens = 0.0  # ... and what they had to compute in a step
        self._queue: dict[int, None] = {}  # whose turn it is next, in order, by sequence id

    def come(self, seq: Sequence, running: Iterable[Sequence]) -> None:
        """A sequence starts for the first time, beside those that run."""
        most = holder_of_most(running)
        if most is None or most is seq.account or seq.is_background:
            return
        now, count = seq.request.arrival_s, min(seq.num_prompt - seq.num_computed, self._max_tokens)
        gap_s = min(max(now - self._last_s, 0.0), LATELY_S)
        self._gap_s = max(gap_s, self._gap_s + _PACE * (gap_s - self._gap_s))
        self._num_tokens += (_PACE if self._num_tokens else 1.0) * (count - self._num_tokens)
        self._last_s = now

    def pressing(self, long: Iterable[Sequence], running: Collection[Sequence]) -> list[Sequence]:
        """Newcomers' prompts that take some steps, but not too many, beside whoever is to make way for them."""
        most = LONGEST * self._max_tokens
        return [seq for seq in long if seq.first_token_s < 0 and seq.num_prompt <= most and giving_way(seq, running)]

    def expects(self, now: float) -> bool:
        """True if another one may come any moment."""
        return now - self._last_s < min(PATIENCE * self._gap_s, LATELY_S)

    def cut(self, due: Collection[Sequence], most: Account, times: StepTime) -> Turn:
        """A part of the step that all of these would make, unless it has prompts of others."""
        decodes = [seq for seq in due if seq.status is Status.RUNNING and not seq.is_waiting]
        prompts = [seq for seq in due if seq.status is Status.PREFILL]
        if any(seq.account is not most for seq in prompts):
            return EVERYBODY
        num_prompt = 0
        if not any(seq.is_long for seq in prompts):  # those are paced already, by what the rest takes
            room = max(self._max_tokens - len(decodes), 0)
            num_prompt = min(sum([len(seq.tokens) - seq.num_planned for seq in prompts]), room)
        context = sum([seq.num_planned for seq in decodes])
        num_parts = self.num_parts(Load(len(decodes), context, num_prompt, num_prompt * num_prompt / 2), times)
        if num_parts == 1:
            return EVERYBODY
        # Without its searches, all beams of which are needed for the next tokens of any.
        mine = {seq.seq_id: seq for seq in decodes if seq.account is most and seq.search is None}
        out = self._others_turn(mine, num_parts)
        return Turn(out, -(-num_prompt // num_parts) if num_prompt else NEVER)

    def _others_turn(self, sequences: dict[int, Sequence], num_parts: int) -> set[Sequence]:
        """Of these, all but the next part. Whoever is not among them has no need of a turn: it sits nothing out."""
        queue = {seq_id: None for seq_id in self._queue if seq_id in sequences} | dict.fromkeys(sequences)
        part = list(queue)[: ceil(len(sequences) / num_parts)]
        for seq_id in part:
            del queue[seq_id]
        out = {sequences[seq_id] for seq_id in queue}
        self._queue = queue | dict.fromkeys(part)
        return out

    def num_parts(self, load: Load, times: StepTime) -> int:
        """How many parts a step of that load is to be cut into."""
        if not times.is_known:
            return 1
        count = self._num_tokens
        wait_s = WAIT * times.seconds(Load(num_prompt_tokens=round(count), prompt_context=count * count / 2))
        whole_s = times.seconds(load)
        fixed_s = times.fixed_s if load.num_prompt_tokens else times.seconds(Load())
        if whole_s <= wait_s:
            return 1
        finest = max(load.num_decodes, load.num_prompt_tokens, 1)
        wanted = (whole_s - fixed_s) / (wait_s - fixed_s) if wait_s > fixed_s else inf
        affordable = 1 + PRICE * whole_s / fixed_s if fixed_s > 0 else inf
        return min(ceil(min(wanted, finest)), int(min(affordable, finest)))


def holder_of_most(running: Iterable[Sequence]) -> Account | None:
    """The tenant that has more of the batch than all others together, weight for weight, and more than one sequence."""
    accounts = {seq.account for seq in running}
    most = max(accounts, key=lambda account: account.share, default=None)
    if most is None or most.num_running == 1 or 2 * most.share <= sum([account.share for account in accounts]):
        return None
    return most


def giving_way(seq: Sequence, running: Iterable[Sequence]) -> set[Account]:
    """Tenants that hold far more than a newcomer's own, and were served no less before it came.

    It was admitted as the one served least, and is charged for its prompt: nobody makes way for the next one before it has
    caught up.
    """
    account = seq.account
    before = account.served - INPUT_COST * seq.num_prompt / account.weight
    others = {other.account for other in running}
    return {other for other in others if other.share >= YIELD_RATIO * account.share and other.served >= before}


def sitting_out(running: Collection[Sequence], limit: int) -> set[Account]:
    """Who has no part in a step of `limit` tokens that can draw the first token of a newcomer."""
    newcomers = [
        seq
        for seq in running
        if seq.first_token_s < 0
        and seq.status is Status.PREFILL
        and not seq.is_long
        and len(seq.tokens) - seq.num_planned <= limit
    ]
    return {account for seq in newcomers for account in giving_way(seq, running)}
