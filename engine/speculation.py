"""Wires --speculative-config into an engine, for build.py.

Runs once, on the thread that starts the daemon; importing it imports torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from engine.config import EngineConfig
from engine.core.config import SchedulerConfig
from engine.core.errors import ConfigError, ModelLoadError
from engine.core.types import Progress
from engine.runtime.attention.table import load_backend
from engine.runtime.kv_cache import KVCache, block_bytes, resolve_kv_dtype
from engine.runtime.models.base import CausalLM
from engine.runtime.models.load import load_model, resolve_dtype
from engine.runtime.runner import ModelRunner
from engine.runtime.speculation.base import Drafter
from engine.runtime.speculation.costs import measure_draft_costs
from engine.runtime.speculation.draft_model import DraftModel
from engine.runtime.speculation.heads import Head
from engine.runtime.speculation.ngram import NgramDrafter
from engine.speculative_config import SpeculativeConfig

Report = Callable[[Progress], None]


@dataclass(frozen=True, slots=True)
class Speculation:
    """The configuration, and the draft model or the head if there is one."""

    asked: SpeculativeConfig
    config: EngineConfig
    device: torch.device
    model: CausalLM | None = None
    head: Head | None = None

    @property
    def bytes_per_block(self) -> int:
        """Return the bytes per block of the draft model's own pool; a head's layers are in the target's."""
        if self.model is None:
            return 0
        assert self.config.block_size is not None, "auto does not go with speculation"
        return block_bytes(self.model.attention_specs, self.config.block_size, self._kv_dtype(self.model))

    def start(self, runner: ModelRunner, settings: SchedulerConfig, captures: bool, report: Report) -> SchedulerConfig:
        """Measure the cost of drafts, and let the runner draft. Raises ConfigError if no draft has room."""
        for hint in self.asked.hints:
            report(Progress("speculation", hint))
        num_drafts = self.asked.num_speculative_tokens
        self.asked.check_room("--max-num-batched-tokens", settings.max_num_batched_tokens)
        self.asked.check_room("--max-model-len", settings.max_model_len)
        drafter = runner.heads or self._drafter(settings)
        costs = measure_draft_costs(runner, drafter, settings, num_drafts, captures=captures)
        runner.speculate(drafter)
        points = (costs.plain[0], costs.checking[-1])
        costs_shown = ", ".join(f"{1e3 * cost:.3g} ms with {rows} rows" for rows, cost in points)
        if self.model is not None or self.head is not None:
            costs_shown += f", a draft {1e3 * costs.drafting[0][1]:.3g} ms"
        report(
            Progress(
                "speculation", f"{self.asked.method}, up to {num_drafts} tokens at a time; a step takes {costs_shown}"
            )
        )
        return replace(settings, num_speculative_tokens=num_drafts, draft_costs=costs)

    def _drafter(self, settings: SchedulerConfig) -> Drafter:
        if self.model is None:
            return NgramDrafter(self.asked.prompt_lookup_min, self.asked.prompt_lookup_max)
        backend = load_backend(self.config.attention_backend, self.device, self.model.attention_specs)
        kv_cache = KVCache(
            self.model.attention_specs,
            backend,
            num_blocks=settings.num_blocks,
            block_size=settings.block_size,
            dtype=self._kv_dtype(self.model),
            device=self.device,
        )
        return DraftModel(self.model, backend, kv_cache, settings, self.device, self.asked.max_model_len)

    def _kv_dtype(self, model: CausalLM) -> torch.dtype:
        return resolve_kv_dtype(self.config.kv_cache_dtype, model.dtype, model.attention_specs)


def load_speculation(
    config: EngineConfig, target: CausalLM, device: torch.device, report: Report
) -> Speculation | None:
    """Return what is configured, if anything. Raises ConfigError for a draft model with another vocabulary."""
    asked = config.speculation
    if asked is None:
        return None
    if asked.model is None:
        return Speculation(asked, config, device)
    own = config.of_draft(asked)
    try:
        model = load_model(own, device, resolve_dtype(own, device), report)
    except (ConfigError, ModelLoadError) as error:
        raise type(error)(f"--speculative-config: the draft model could not be loaded: {error}") from error
    asked.check_vocabulary(model.vocab_size, target.vocab_size)
    return Speculation(asked, config, device, model)
