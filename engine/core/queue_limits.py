"""How much may wait before more is refused at the door: a pure rule, asked by the engine's loop and by simulations of it."""

from __future__ import annotations

from typing import NamedTuple

from engine.core.stats import Stats


class QueueLimits(NamedTuple):
    """How much may wait beyond what can run; None is no limit."""

    max_requests: int | None = None
    max_tokens: int | None = None

    def find_full(self, num_ahead: int, num_tokens: int, num_new_tokens: int) -> str:
        """What is full, behind so many requests and prompt tokens that wait, for one with so many more; empty if nothing is.

        Only others are ahead: an engine with a free slot takes any submission, else a large one would never be taken.
        """
        if num_ahead < 0:
            return ""
        if self.max_requests is not None and num_ahead >= self.max_requests:
            return f"{num_ahead} requests wait already (--max-num-queued-reqs {self.max_requests})"
        if self.max_tokens is not None and num_tokens + num_new_tokens > self.max_tokens:
            return f"{num_tokens} prompt tokens wait already (--max-num-queued-tokens {self.max_tokens})"
        return ""


NO_LIMITS = QueueLimits()


def count_ahead(stats: Stats, max_num_seqs: int) -> int:
    """Requests that wait and will still do so when all free slots are taken; negative while a slot is free."""
    num_running = stats.num_running - stats.num_background_running  # those of the background give way
    return stats.num_waiting + stats.num_preempted - max(max_num_seqs - num_running, 0)
