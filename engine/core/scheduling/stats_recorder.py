"""Counts events of sequences and steps in Stats, one method for each event. Engine thread.

Background work is counted, but its waits and gaps, which are long by intent, are left out of the latencies.
"""

from __future__ import annotations

from collections import deque

from engine.core.config import SchedulerConfig
from engine.core.in_flight import InFlightStep
from engine.core.kv.manager import KVCacheManager
from engine.core.kv.prefix_cache import BlockIndex
from engine.core.sequence import Sequence
from engine.core.stats import FailureCause, PreemptionKind, Stats, SwapDirection, Target
from engine.core.types import FinishReason, RequestTimings

_NUM_RECENT = 1024  # completed sequences whose lengths are kept: minutes of a busy server, and milliseconds to sort


class StatsRecorder:
    """Counts equal gaps between tokens together, once a step, to keep the path of a token short."""

    def __init__(self, config: SchedulerConfig, stats: Stats, kv: KVCacheManager) -> None:
        self._target_ttft_s, self._target_itl_s = config.target_ttft_s, config.target_itl_s
        self._has_targets = config.target_ttft_s is not None or config.target_itl_s is not None
        self._stats = stats
        self._pool, self._groups = kv.pool, dict[str, list[BlockIndex]]()
        for kind, group in kv.groups:
            self._groups.setdefault(kind, []).append(group)
        stats.findable_blocks = dict.fromkeys(self._groups, 0)
        self._host_pool = kv.tiers.host.pool
        self._store_pools = {name: store.pool for name, store in kv.tiers.stores.items()}
        self.gaps: dict[float, int] = {}  # time of the previous token -> sequences that drew their next since
        self.lengths: deque[int] = deque(maxlen=_NUM_RECENT)  # in tokens, of the sequences that were completed last
        self.gauges(0, 0)

    def queued(self, seq: Sequence, change: int) -> None:
        """Count a sequence that joins (1) or leaves (-1) the waiting queue."""
        stats = self._stats
        if seq.params.adapter is not None:
            _count(stats.adapters_waiting, seq.params.adapter.name, change)
        if seq.is_background:
            stats.num_background_waiting += change
            return
        stats.num_waiting_tokens += change * (len(seq.tokens) - seq.kv.num_saved)
        stats.num_further += change * seq.request.is_further
        if seq.is_resuming:
            stats.num_preempted += change
        else:
            stats.num_waiting += change

    def ran(self, seq: Sequence, change: int) -> None:
        """Count a sequence that joins (1) or leaves (-1) the running ones."""
        if seq.params.adapter is not None:
            _count(self._stats.adapters_running, seq.params.adapter.name, change)

    def admitted(self, seq: Sequence, now: float) -> None:
        """Count a sequence that is admitted for the first time."""
        if seq.is_resuming:
            return
        seq.history.first_scheduled_s = now
        seq.history.num_cached, seq.history.num_matched = seq.num_computed, seq.kv.branch
        if not seq.is_background:
            self._stats.queue_s.observe(now - seq.request.arrival_s)
        self._stats.prefix_queried_tokens += seq.num_prompt
        self._stats.prefix_hit_tokens += seq.history.num_cached
        hits = self._stats.prefix_hits
        hits["pool"] += seq.history.num_cached - sum(seq.kv.num_from.values())
        for tier, num_tokens in seq.kv.num_from.items():
            hits[tier] = hits.get(tier, 0) + num_tokens

    def preempted(self, seq: Sequence) -> None:
        """Count a preemption: the sequence has a ticket, or is to be recomputed."""
        kind = PreemptionKind.SWAP if seq.kv.ticket is not None else PreemptionKind.RECOMPUTE
        self._stats.preempted[kind] += 1

    def first_token(self, seq: Sequence, now: float) -> None:
        """Count a sequence's first token."""
        seq.history.first_token_s = now
        self._stats.generation_tokens += 1
        if not seq.is_background:
            self._stats.ttft_s.observe(now - seq.request.arrival_s)
        if seq.choice == 0:
            self.prompt_computed(seq, now)

    def prompt_computed(self, seq: Sequence, now: float) -> None:
        """Count the prompt of a request that goes on to generate."""
        self._stats.prompt_tokens += seq.num_prompt
        if not seq.is_background:
            self._stats.prefill_s.observe(now - seq.history.first_scheduled_s)

    def found(self, seq: Sequence, reason: FinishReason, num_tokens: int, now: float) -> RequestTimings:
        """Count an answer of a beam search, whose first and last token come together."""
        seq.last_token_s = now
        self._stats.generation_tokens += num_tokens
        if not seq.is_background:
            self._stats.ttft_s.observe(now - seq.request.arrival_s)
        return self.finished(seq, reason, now, 1, num_tokens)

    def stepped(self, step: InFlightStep, num_tokens: int, now: float) -> None:
        """Count a committed step: of background work, or of all other, never of both."""
        stats = self._stats
        is_background = (step.sequences[0] if step.sequences else next(step.all_sequences)).is_background
        for previous, times in self.gaps.items():
            if not is_background:
                stats.itl_s.observe(now - previous, times)
            stats.generation_tokens += times
        self.gaps.clear()
        stats.steps += 1
        stats.background_steps += is_background
        stats.step_tokens.observe(num_tokens)
        stats.step_sequences.observe(len(step.sequences))
        if step.swap_out or step.swap_in:
            stats.swapped_blocks[SwapDirection.OUT] += len(step.swap_out)
            stats.swapped_blocks[SwapDirection.IN] += len(step.swap_in)

    def finished(
        self, seq: Sequence, reason: FinishReason, now: float, num_choices: int, num_generated: int
    ) -> RequestTimings:
        """Count a sequence that ended; latencies only if its answer was completed."""
        stats, arrival = self._stats, seq.request.arrival_s
        stats.end(reason, num_choices, seq.num_prompt, num_generated)
        has_token = seq.history.first_token_s >= 0
        decode_s = seq.last_token_s - seq.history.first_token_s if has_token else 0.0
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            self.lengths.append(seq.num_prompt + num_generated)
            if not has_token:
                stats.prompt_tokens += seq.num_prompt
            if not seq.is_background:
                self._completed(seq, now, decode_s, num_generated)
        started = seq.history.first_scheduled_s if seq.history.first_scheduled_s >= 0 else now
        return RequestTimings(
            queue_s=started - arrival,
            prefill_s=(seq.history.first_token_s if has_token else now) - started,
            decode_s=decode_s,
            num_preemptions=seq.history.num_preemptions,
            num_drafted=0 if seq.drafts is None else seq.drafts.num_drafted,
            num_accepted=0 if seq.drafts is None else seq.drafts.num_accepted,
            preempted_s=seq.history.preempted_s,
        )

    def dropped(self, seq: Sequence, target: Target) -> None:
        """Count a request that was dropped from the queue, because it could not be in time."""
        stats, num_choices = self._stats, seq.params.n
        stats.dropped[target] += num_choices
        stats.missed[target] += num_choices
        stats.targeted += num_choices

    def _completed(self, seq: Sequence, now: float, decode_s: float, num_generated: int) -> None:
        if self._has_targets or seq.request.deadline_s is not None or seq.request.max_queue_s is not None:
            self._judge(seq, now, num_generated)
        self._stats.e2e_s.observe(now - seq.request.arrival_s)
        answer_s = now - seq.history.first_scheduled_s
        weight = 1 / min(self._stats.num_completed, _NUM_RECENT)
        self._stats.answer_s += weight * (answer_s - self._stats.answer_s)
        if seq.history.first_token_s >= 0:
            self._stats.decode_s.observe(decode_s)
        if num_generated > 1:
            self._stats.tpot_s.observe(decode_s / (num_generated - 1))

    def _judge(self, seq: Sequence, now: float, num_generated: int) -> None:
        """Count which of its targets a completed answer missed, by the times that the engine sees."""
        request, first_token_s, num_gaps = seq.request, seq.history.first_token_s, num_generated - 1
        first_s, mean_gap_s = (first_token_s if first_token_s >= 0 else now), 0.0
        if num_gaps > 0:
            mean_gap_s = (seq.last_token_s - first_token_s) / num_gaps
        held = (
            (Target.TTFT, self._target_ttft_s, first_s - request.arrival_s),
            (Target.ITL, self._target_itl_s, mean_gap_s),
            (Target.DEADLINE, request.deadline_s, now - request.arrival_s),
            (Target.QUEUE, request.max_queue_s, seq.history.first_scheduled_s - request.arrival_s),
        )
        judged = [(target, seconds > limit) for target, limit, seconds in held if limit is not None]
        self._stats.targeted += 1
        self._stats.met += not any(is_missed for _, is_missed in judged)
        for target, is_missed in judged:
            self._stats.missed[target] += is_missed

    def failed(self, cause: FailureCause, num_choices: int) -> None:
        """Count choices of a request that ended on an error."""
        self._stats.failed[cause] += num_choices

    def gauges(self, num_running: int, num_background: int) -> None:
        """Bring the gauges up to date."""
        stats, pool, host = self._stats, self._pool, self._host_pool
        stats.num_running = num_running
        stats.num_background_running = num_background
        stats.blocks_free, stats.blocks_cached, stats.blocks_held = pool.counts
        stats.blocks_pinned = pool.num_pinned
        for kind, groups in self._groups.items():
            stats.findable_blocks[kind] = sum([group.num_findable for group in groups])
        if host.num_blocks:  # else there are no stores either
            stats.host_blocks_free, stats.host_blocks_cached, stats.host_blocks_held = host.counts
            stats.host_blocks_pinned = host.num_pinned
            for name, store in self._store_pools.items():
                stats.store_blocks[name], stats.store_blocks_pinned[name] = store.num_cached, store.num_pinned


def _count(counts: dict[str, int], name: str, change: int) -> None:
    counts[name] = counts.get(name, 0) + change
    if not counts[name]:
        del counts[name]
