"""Refuses requests: those that can never run, by their lengths, and all while the queue is full.

Places become free one by one, at the pace at which recent answers were completed. Each refused client is given the time
of a different place, because clients return at the time they were given. Any thread may ask; it knows no clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from math import ceil
from typing import NamedTuple

from engine.core.config import SchedulerConfig
from engine.core.errors import ContextLengthError, InvalidRequestError, NeverFitsError, OverloadedError
from engine.core.shown import shorten
from engine.core.stats import Stats
from engine.core.types import Request

MAX_RETRY_S = 120.0  # OpenAI's clients obey a Retry-After of up to two minutes
MIN_RETRY_S = 0.1
INPUTS_AS_ONE = 64  # that wait; of 4 kB each, behind a limit of 1,024 requests they are at most 260 MB
UNKNOWN_S = 1.0  # until a place is free, while no answer was completed


def peak_positions(num_prompt: int, max_tokens: int) -> int:
    """Return the most positions whose K/V a sequence holds: the last generated token is never fed back."""
    return num_prompt + max(max_tokens - 1, 0)


def check_ids(ids: Sequence[int], vocab_size: int, param: str) -> None:
    """Raise InvalidRequestError for an id that the model does not have: it would be read from beyond a table."""
    for token_id in (min(ids, default=0), max(ids, default=0)):
        if not 0 <= token_id < vocab_size:
            message = f"{param} has the token id {shorten(str(token_id))}; ids of this model are 0 to {vocab_size - 1}."
            raise InvalidRequestError(message, param=param)


def check_request(request: Request, config: SchedulerConfig) -> None:
    """Raise a ClientError if the request can never be served, however long it waits."""
    params = request.params
    num_prompt, max_tokens = len(request.prompt), params.max_tokens
    if not num_prompt:
        raise InvalidRequestError("The prompt is empty; send at least one token.", param="prompt")
    if num_prompt > config.max_model_len:
        raise ContextLengthError(
            f"This model's maximum context length is {config.max_model_len} tokens, but the prompt has {num_prompt}; "
            "shorten the prompt.",
            param="prompt",
            num_prompt=num_prompt,
            limit=config.max_model_len,
        )
    if num_prompt + max_tokens > config.max_model_len:
        raise ContextLengthError(
            f"This model's maximum context length is {config.max_model_len} tokens, but {num_prompt + max_tokens} were "
            f"requested ({num_prompt} in the prompt, {max_tokens} to generate); shorten the prompt or lower max_tokens.",
            param="max_tokens",
            num_prompt=num_prompt,
            limit=config.max_model_len,
            max_tokens=max_tokens,
        )
    if request.spans:
        _check_spans(request, config)
    if params.beam is not None and params.grammar is not None:
        raise InvalidRequestError(
            "A beam search cannot follow a grammar yet; leave out use_beam_search, or what constrains the answer.",
            param="use_beam_search",
        )
    if params.num_sequences > config.max_num_seqs:
        name = "n" if params.num_sequences == params.n else "best_of"
        raise NeverFitsError(
            f"{name} is {params.num_sequences}, but this server runs at most {config.max_num_seqs} sequences concurrently "
            f"(--max-num-seqs); lower {name}.",
            param=name,
        )
    # Answers that fork read one state, and each writes another; one of each may be a snapshot's that was found.
    num_states = 2 if params.num_sequences == 1 else params.num_sequences + 2
    longest = request.longest_atomic
    needed = config.max_blocks(peak_positions(num_prompt, max_tokens), num_states, longest)
    if params.beam is not None:
        # No beam can wait for the others, so all have to fit; in the first group they share the prompt's full blocks.
        num_shared, num_states = config.has_full * (num_prompt // config.block_size), 2 * params.beam.width + 2
        needed = config.max_blocks(peak_positions(num_prompt, max_tokens), 0, longest)
        needed = num_shared + params.beam.width * (needed - num_shared) + num_states * config.state_blocks
    if needed > config.num_blocks:
        raise NeverFitsError(
            f"The request needs up to {needed} KV blocks ({num_prompt} prompt + {max_tokens} generated tokens), but the "
            f"pool has {config.num_blocks}; shorten the prompt or lower max_tokens.",
            param="max_tokens",
        )


def _check_spans(request: Request, config: SchedulerConfig) -> None:
    ends = [0, *[span.end for span in request.spans]]
    assert all(span.start >= end for span, end in zip(request.spans, ends, strict=False)), "spans overlap"
    assert ends[-1] <= len(request.prompt), "a span is behind the prompt"
    longest = request.longest_atomic
    if longest > config.max_num_batched_tokens:
        raise NeverFitsError(
            f"The prompt has an input of {longest} tokens that is computed in one step, but a step holds "
            f"{config.max_num_batched_tokens} (--max-num-batched-tokens); send a smaller one, or raise it.",
            param="prompt",
        )


class QueueLimits(NamedTuple):
    """The most requests and tokens that may wait; None is no limit."""

    max_requests: int | None = None
    max_tokens: int | None = None

    def find_full(self, num_ahead: int, num_tokens: int, num_new_tokens: int) -> str:
        """Return a sentence about the limit that a request of `num_new_tokens` would exceed, or "".

        With a free slot any request is accepted: a large one would never be accepted otherwise.
        """
        if num_ahead < 0:
            return ""
        if self.max_requests is not None and num_ahead >= self.max_requests:
            return f"{num_ahead} requests wait already (--max-num-queued-reqs {self.max_requests})"
        if self.max_tokens is not None and num_tokens + num_new_tokens > self.max_tokens:
            return f"{num_tokens} prompt tokens wait already (--max-num-queued-tokens {self.max_tokens})"
        return ""

    def count_departures(self, num_ahead: int, num_tokens: int) -> int:
        """Return how many waiting requests have to start before there is a place."""
        num_departures = 1
        if self.max_requests is not None:
            num_departures = max(num_departures, num_ahead - self.max_requests + 1)
        if self.max_tokens is not None:
            per_request = max(num_tokens / (num_ahead + 1), 1.0)
            num_departures = max(num_departures, ceil((num_tokens - self.max_tokens) / per_request))
        return num_departures


NO_LIMITS = QueueLimits()


class RetryTimes:
    """The times that refused clients were given."""

    def __init__(self) -> None:
        self._times: list[float] = []  # a heap

    def give(self, now: float, wait_s: float, each_s: float) -> float:
        """Return a client's wait: `each_s` more for each client with an earlier time."""
        while self._times and self._times[0] <= now:
            heappop(self._times)
        wait_s = max(wait_s + len(self._times) * each_s, MIN_RETRY_S)
        if wait_s >= MAX_RETRY_S:
            return MAX_RETRY_S
        heappush(self._times, now + wait_s)
        return wait_s


class OverloadControl:
    """Checks each submission against the queue's limits."""

    def __init__(self, config: SchedulerConfig, stats: Stats, limits: QueueLimits) -> None:
        self._max_num_seqs, self._stats, self._limits = config.max_num_seqs, stats, limits
        self._retry_times = RetryTimes()

    def check(
        self,
        now: float,
        num_new_tokens: int,
        *,
        num_unseen: int = 0,
        num_unseen_further: int = 0,
        num_unseen_tokens: int = 0,
    ) -> None:
        """Raise OverloadedError if the queue is full; `num_unseen` requests are still in the inbox.

        A client's request counts as one until its first input runs, and so do INPUTS_AS_ONE inputs: each takes memory.
        """
        stats = self._stats
        num_running = stats.num_running - stats.num_background_running  # background work yields its slots
        num_waiting = stats.num_waiting + stats.num_preempted + num_unseen
        num_ahead = num_waiting - max(self._max_num_seqs - num_running, 0)  # when all free slots are taken
        num_clients = num_waiting - stats.num_further - num_unseen_further
        num_ahead = max(min(num_ahead, num_clients), num_ahead // INPUTS_AS_ONE)
        num_tokens = stats.num_waiting_tokens + num_unseen_tokens
        full = self._limits.find_full(num_ahead, num_tokens, num_new_tokens)
        if not full:
            return
        stats.rejected += 1
        num_departures = self._limits.count_departures(num_ahead, num_tokens + num_new_tokens)
        each_s = stats.answer_s / max(num_running, 1) or UNKNOWN_S
        wait_s = self._retry_times.give(now, num_departures * each_s, each_s)
        raise OverloadedError(f"The queue is full: {full}; try again in {ceil(wait_s)} s.", retry_after_s=wait_s)
