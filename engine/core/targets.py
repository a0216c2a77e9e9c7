"""What answers are held to: the operator's latency targets, and the deadlines that requests bring with them.

Pure functions of a sequence that has ended. Its waits for a first token and between tokens are those that the engine
sees: the way of a token to its client is not in them.
"""

from __future__ import annotations

from typing import NamedTuple

from engine.core.sequence import Sequence
from engine.core.stats import Target


class Targets(NamedTuple):
    """Seconds, None for no target."""

    ttft_s: float | None = None
    itl_s: float | None = None  # of a sequence's mean gap

    def judge(self, seq: Sequence, now: float, num_generated: int) -> tuple[Target, ...] | None:
        """Which of its targets an answer that is completed `now` has missed; None if it had none."""
        request = seq.request
        has_first, num_gaps = seq.first_token_s >= 0, num_generated - 1
        held = (
            (Target.TTFT, self.ttft_s, (seq.first_token_s if has_first else now) - request.arrival_s),
            (Target.ITL, self.itl_s, (seq.last_token_s - seq.first_token_s) / num_gaps if num_gaps > 0 else 0.0),
            (Target.DEADLINE, request.deadline_s, now - request.arrival_s),
            (Target.QUEUE, request.max_queue_s, seq.first_scheduled_s - request.arrival_s),
        )
        judged = [(target, seconds > limit) for target, limit, seconds in held if limit is not None]
        return tuple([target for target, is_missed in judged if is_missed]) if judged else None
