"""Wires --speculative-config into an engine, for build.py.

Runs once, on the thread that starts the daemon; importing it imports torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch

from engine.core.config import DraftCosts, SchedulerConfig
from engine.core.errors import ConfigError
from engine.core.page_table import blocks_for
from engine.core.rows import Rows
from engine.core.scheduling.drafts import lower_hull
from engine.core.step import StepPlan, plan_prompts
from engine.core.types import Progress, ReportProgress, SamplingParams
from engine.runtime.attention.table import load_backend
from engine.runtime.execution.runner import ModelRunner
from engine.runtime.execution.synthetic import state_slots, warm_up_plan
from engine.runtime.kv_layout import attends
from engine.runtime.models.causal_lm import CausalLM
from engine.runtime.models.load import load_eagle3, load_model, load_mtp, resolve_dtype
from engine.runtime.pool.kv_cache import KVCache
from engine.runtime.pool.pool_size import resolve_kv_dtype
from engine.runtime.speculation.draft_model import DraftModel
from engine.runtime.speculation.drafter import Drafter, UpToLength
from engine.runtime.speculation.heads import Head
from engine.runtime.speculation.text_drafter import TextDrafter
from engine.settings.engine_config import EngineConfig
from engine.sources.draft_source import naming_draft


class Speculation:
    """A loaded method: what drafts is a head in the target's pool, a model with a separate pool, or the text so far."""

    def __init__(
        self, config: EngineConfig, device: torch.device, *, head: Head | None = None, model: CausalLM | None = None
    ) -> None:
        assert config.speculation is not None, "a method is configured"
        self.asked, self.head = config.speculation, head
        self._config, self._device, self._model = config, device, model

    def bytes_per_block(self, block_size: int) -> int:
        """Return the bytes of a block of the pool that a draft model has beside the target's."""
        if self._model is None:
            return 0
        return block_size * sum(spec.bytes_a_token(self._kv_dtype) for spec in attends(self._model.states))

    def start(
        self, runner: ModelRunner, settings: SchedulerConfig, captures: bool, report: ReportProgress
    ) -> SchedulerConfig:
        """Measure the cost of drafts, and let the runner draft. Raises ConfigError if no draft has room."""
        for hint in self.asked.hints:
            report(Progress("speculation", hint))
        num_drafts = self.asked.num_speculative_tokens
        self.asked.check_room("--max-num-batched-tokens", settings.max_num_batched_tokens)
        self.asked.check_room("--max-model-len", settings.max_model_len)
        drafter = self._drafter(runner, settings)
        costs = measure_draft_costs(runner, drafter, settings, num_drafts, captures=captures)
        runner.speculate(drafter if self.asked.max_model_len is None else UpToLength(drafter, self.asked.max_model_len))
        points = (costs.plain[0], costs.checking[-1])
        costs_shown = ", ".join(f"{1e3 * cost:.3g} ms with {rows} rows" for rows, cost in points)
        if not self.asked.is_text:
            costs_shown += f", a draft {1e3 * costs.drafting[0][1]:.3g} ms"
        shown = f"{self.asked.method}, up to {num_drafts} tokens at a time; a step takes {costs_shown}"
        report(Progress("speculation", shown))
        return replace(settings, num_speculative_tokens=num_drafts, draft_costs=costs)

    def _drafter(self, runner: ModelRunner, settings: SchedulerConfig) -> Drafter:
        if self.head is not None:
            assert runner.heads is not None, "build.py gives the runner this head"
            return runner.heads
        if self._model is None:
            return self._text_drafter()
        backend = load_backend(self._config.attention_backend, self._device)
        kv_cache = KVCache(
            self._model.states,
            backend,
            num_blocks=settings.num_blocks,
            block_size=settings.block_size,
            dtype=self._kv_dtype,
            device=self._device,
        )
        return DraftModel(self._model, backend, kv_cache, settings, self._device)

    def _text_drafter(self) -> TextDrafter:
        asked = self.asked
        if asked.method == "ngram":
            return TextDrafter(asked.prompt_lookup_min, asked.prompt_lookup_max)
        return TextDrafter(
            min(2, asked.suffix_decoding_max_tree_depth),
            asked.suffix_decoding_max_tree_depth,
            factor=asked.suffix_decoding_max_spec_factor,
            least=asked.suffix_decoding_min_token_prob,
            num_answers=asked.suffix_decoding_max_cached_requests,
        )

    @property
    def _kv_dtype(self) -> torch.dtype:
        assert self._model is not None
        return resolve_kv_dtype(self._config.kv_cache_dtype, self._model.dtype, self._model.states)


def load_speculation(
    config: EngineConfig, target: CausalLM, device: torch.device, report: ReportProgress
) -> Speculation | None:
    """Return what is configured, if anything. Raises ConfigError or ModelLoadError for a draft that cannot be."""
    asked = config.speculation
    if asked is None:
        return None
    head: Head | None = None
    model: CausalLM | None = None
    with naming_draft():
        if asked.method == "mtp":
            head = load_mtp(config, target, device, report)
        elif asked.method == "eagle3":
            served_len = config.max_model_len or target.max_model_len
            head = load_eagle3(config.of_draft(asked), target, device, report, served_len=served_len)
        elif asked.method == "draft_model":
            own = config.of_draft(asked)
            model = load_model(own, device, resolve_dtype(own, device), report)
            if len(attends(model.states)) < len(model.states):
                raise ConfigError(
                    f"{own.model} has layers with recurrent state, from which rejected drafts cannot be taken back; choose "
                    "a draft model whose layers all attend, or the method mtp, ngram or suffix."
                )
    if model is not None:
        asked.check_vocabulary(model.vocab_size, target.vocab_size)
    return Speculation(config, device, head=head, model=model)


_MIN_TIMES, _MAX_TIMES, _LONG_S = 3, 10, 0.05
_ENOUGH = 4.0  # times the first; beyond, the cost is linear
_MAX_ROWS = 256


def measure_draft_costs(
    runner: ModelRunner, drafter: Drafter, config: SchedulerConfig, num_drafts: int, *, captures: bool
) -> DraftCosts:
    """Time the drafter, and steps of growing size; the runner must not speculate yet, a head runs in its steps.

    Steps with drafts are launched operation by operation; others become a graph (`captures`), or are plain steps.
    """

    def run(plan: StepPlan) -> None:
        runner.run(plan).wait()

    checking = list(_points(config, num_drafts, run, partial(_checking, config, num_drafts=num_drafts)))
    if not captures:
        checking += _points(config, 0, run, partial(_checking, config, num_drafts=0))
    drafting = tuple(_drafting(drafter, config, num_drafts, run))
    if runner.heads is not None:
        runner.heads.rest()  # as it does where no draft pays
    plain = list(_points(config, 0, run, partial(_decoding, config, run)))
    return DraftCosts(lower_hull(plain), lower_hull(checking or plain), drafting)


def _points(
    config: SchedulerConfig, num_drafts: int, run: Callable[[StepPlan], None], make: Callable[[int], StepPlan]
) -> Iterator[tuple[int, float]]:
    """Yield (rows, seconds) of steps that are made of numbers of sequences, until they are long enough."""
    first = 0.0
    for num_seqs in _numbers(config, num_drafts):
        plan = make(num_seqs)
        cost = _time(lambda plan=plan: run(plan))  # type: ignore[misc]
        yield num_seqs * (1 + num_drafts), cost
        first = first or cost
        if cost > _ENOUGH * first:
            break


def _drafting(
    drafter: Drafter, config: SchedulerConfig, num_drafts: int, run: Callable[[StepPlan], None]
) -> Iterator[tuple[int, float]]:
    params = SamplingParams(max_tokens=1 + num_drafts, temperature=0.0)
    width = blocks_for(config.max_model_len, config.block_size)
    for num_seqs in _numbers(config, num_drafts):
        rows = []
        for row in warm_up_plan(config, num_seqs, num_seqs * (1 + num_drafts)).rows:
            # The last draft's entry is noted and not read.
            tables = tuple([(*table, table[-1])[:width] for table in row.tables])
            rows.append(row._replace(params=params, ids=(0,), num_prompt=1, tables=tables))
        plan = plan_prompts(rows, [1] * num_seqs, state_slots(config, num_seqs))
        run(plan)  # for the states that a head reads
        slices = [piece._replace(tokens=[0, 0], start=1) for piece in Rows().follow(plan)]
        plan = plan._replace(drafts=tuple([(index, num_drafts) for index in range(num_seqs)]))
        yield num_seqs, _time(lambda plan=plan, slices=slices: drafter.draft(plan, slices)) / num_drafts  # type: ignore[misc]


def _numbers(config: SchedulerConfig, num_drafts: int) -> Iterator[int]:
    """Yield numbers of sequences 1, 2, 4, ... that a step and the pool can hold."""
    num_seqs, rows = 1, 1 + num_drafts
    blocks = blocks_for(rows, config.block_size)
    most_rows = min(_MAX_ROWS, config.max_num_batched_tokens)
    while num_seqs <= min(config.max_num_seqs, config.num_blocks // blocks) and num_seqs * rows <= most_rows:
        yield num_seqs
        num_seqs *= 2


def _decoding(config: SchedulerConfig, run: Callable[[StepPlan], None], num_seqs: int) -> StepPlan:
    """Begin sequences of one token, and return a step that decodes them."""
    prompts = warm_up_plan(config, num_seqs, num_seqs)
    params = SamplingParams(max_tokens=2, temperature=0.0)
    run(prompts._replace(rows=tuple([row._replace(params=params) for row in prompts.rows])))
    return StepPlan(0, num_seqs, num_seqs, slots=tuple(range(num_seqs)), positions=(1,) * num_seqs)


def _checking(config: SchedulerConfig, num_seqs: int, num_drafts: int) -> StepPlan:
    """Return a step of sequences of one token and its drafts, with a draw for each; it is not plain."""
    plan = warm_up_plan(config, num_seqs, num_seqs * (1 + num_drafts))
    params = SamplingParams(max_tokens=1 + num_drafts, temperature=0.0, min_tokens=1)
    return plan._replace(
        rows=tuple([row._replace(params=params) for row in plan.rows]),
        chunks=tuple([chunk._replace(samples=chunk.samples * (1 + num_drafts)) for chunk in plan.chunks]),
        num_samples=plan.num_tokens,
    )


def _time(compute: Callable[[], object]) -> float:
    """Return the minimum of a few timings after a warm-up; of more if they are short."""
    compute()
    times: list[float] = []
    while len(times) < _MIN_TIMES or (sum(times) < _LONG_S and len(times) < _MAX_TIMES):
        begun = time.perf_counter()
        compute()
        times.append(time.perf_counter() - begun)
    return min(times)
