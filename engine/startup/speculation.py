"""Wires --speculative-config into an engine, for build.py: a class for each method.

Runs once, on the thread that starts the daemon; importing it imports torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace

import torch
from typing_extensions import Self

from engine.core.config import SchedulerConfig
from engine.core.types import Progress, ReportProgress
from engine.runtime.attention.table import load_backend
from engine.runtime.execution.draft_costs import measure_draft_costs
from engine.runtime.execution.runner import ModelRunner
from engine.runtime.models.causal_lm import CausalLM
from engine.runtime.models.load import load_eagle3, load_model, load_mtp, resolve_dtype
from engine.runtime.pool.kv_cache import KVCache, block_bytes, resolve_kv_dtype
from engine.runtime.speculation.draft_model import DraftModel
from engine.runtime.speculation.drafter import Drafter, UpToLength
from engine.runtime.speculation.heads import Head
from engine.runtime.speculation.ngram import NgramDrafter
from engine.settings.engine_config import EngineConfig
from engine.settings.speculative_config import METHODS, SpeculativeConfig
from engine.sources.draft_source import naming_draft
from engine.system.lazy import load


@dataclass(frozen=True, slots=True)
class Setup:
    """What a method is loaded from."""

    asked: SpeculativeConfig
    config: EngineConfig
    target: CausalLM
    device: torch.device
    report: ReportProgress

    @property
    def of_draft(self) -> EngineConfig:
        """Return the settings that a draft is loaded with."""
        return self.config.of_draft(self.asked)


class Speculation(ABC):
    """A loaded method. A new one is a subclass here and a line of METHODS."""

    head: Head | None = None  # its layers are in the target's pool

    def __init__(self, setup: Setup) -> None:
        self.asked, self._config, self._device = setup.asked, setup.config, setup.device

    @classmethod
    def load(cls, setup: Setup) -> Self:
        """Return the method with its weights. Raises ConfigError or ModelLoadError."""
        return cls(setup)

    def bytes_per_block(self, block_size: int) -> int:  # noqa: ARG002 - for others
        """Return the bytes of a block of the pool that a drafter has beside the target's."""
        return 0

    @abstractmethod
    def drafter(self, runner: ModelRunner, settings: SchedulerConfig) -> Drafter:
        """Return what drafts for a runner."""

    def start(
        self, runner: ModelRunner, settings: SchedulerConfig, captures: bool, report: ReportProgress
    ) -> SchedulerConfig:
        """Measure the cost of drafts, and let the runner draft. Raises ConfigError if no draft has room."""
        for hint in self.asked.hints:
            report(Progress("speculation", hint))
        num_drafts = self.asked.num_speculative_tokens
        self.asked.check_room("--max-num-batched-tokens", settings.max_num_batched_tokens)
        self.asked.check_room("--max-model-len", settings.max_model_len)
        drafter = self.drafter(runner, settings)
        costs = measure_draft_costs(runner, drafter, settings, num_drafts, captures=captures)
        runner.speculate(drafter if self.asked.max_model_len is None else UpToLength(drafter, self.asked.max_model_len))
        points = (costs.plain[0], costs.checking[-1])
        costs_shown = ", ".join(f"{1e3 * cost:.3g} ms with {rows} rows" for rows, cost in points)
        if self.asked.method != "ngram":
            costs_shown += f", a draft {1e3 * costs.drafting[0][1]:.3g} ms"
        report(
            Progress(
                "speculation", f"{self.asked.method}, up to {num_drafts} tokens at a time; a step takes {costs_shown}"
            )
        )
        return replace(settings, num_speculative_tokens=num_drafts, draft_costs=costs)


class FromText(Speculation):
    """Drafts from the text so far."""

    def drafter(self, runner: ModelRunner, settings: SchedulerConfig) -> Drafter:  # noqa: ARG002 - for others
        return NgramDrafter(self.asked.prompt_lookup_min, self.asked.prompt_lookup_max)


class FromModel(Speculation):
    """Drafts by a smaller model, with a separate pool."""

    def __init__(self, setup: Setup, model: CausalLM) -> None:
        super().__init__(setup)
        self._model = model

    @classmethod
    def load(cls, setup: Setup) -> Self:
        own, device = setup.of_draft, setup.device
        with naming_draft():
            model = load_model(own, device, resolve_dtype(own, device), setup.report)
        setup.asked.check_vocabulary(model.vocab_size, setup.target.vocab_size)
        return cls(setup, model)

    def bytes_per_block(self, block_size: int) -> int:
        return block_bytes(self._model.states, block_size, self._kv_dtype)

    def drafter(self, runner: ModelRunner, settings: SchedulerConfig) -> Drafter:  # noqa: ARG002 - for others
        specs = self._model.states
        backend = load_backend(self._config.attention_backend, self._device)
        kv_cache = KVCache(
            specs,
            backend,
            num_blocks=settings.num_blocks,
            block_size=settings.block_size,
            dtype=self._kv_dtype,
            device=self._device,
        )
        return DraftModel(self._model, backend, kv_cache, settings, self._device)

    @property
    def _kv_dtype(self) -> torch.dtype:
        return resolve_kv_dtype(self._config.kv_cache_dtype, self._model.dtype, self._model.states)


class FromHead(Speculation):
    """Drafts by layers that read the target's states; subclasses load them."""

    def __init__(self, setup: Setup, head: Head) -> None:
        super().__init__(setup)
        self.head = head

    def drafter(self, runner: ModelRunner, settings: SchedulerConfig) -> Drafter:  # noqa: ARG002 - for others
        assert runner.heads is not None, "build.py gives the runner this head"
        return runner.heads


class FromMTP(FromHead):
    """Drafts by the MTP layer of the target's checkpoint."""

    @classmethod
    def load(cls, setup: Setup) -> Self:
        with naming_draft():
            return cls(setup, load_mtp(setup.config, setup.target, setup.device, setup.report))


class FromEagle3(FromHead):
    """Drafts by an EAGLE-3 checkpoint."""

    @classmethod
    def load(cls, setup: Setup) -> Self:
        served_len = setup.config.max_model_len or setup.target.max_model_len
        with naming_draft():
            head = load_eagle3(setup.of_draft, setup.target, setup.device, setup.report, served_len=served_len)
        return cls(setup, head)


def load_speculation(
    config: EngineConfig, target: CausalLM, device: torch.device, report: ReportProgress
) -> Speculation | None:
    """Return what is configured, if anything. Raises ConfigError or ModelLoadError for a draft that cannot be."""
    asked = config.speculation
    if asked is None:
        return None
    method: type[Speculation] = load(METHODS[asked.method].place)
    return method.load(Setup(asked, config, target, device, report))
