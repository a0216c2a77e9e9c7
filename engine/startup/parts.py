"""What an engine is made of before its pool has a size: the model, where it computes, and what is in the pool."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch

from engine.core.config import SchedulerConfig
from engine.core.errors import ConfigError
from engine.core.types import ReportProgress
from engine.resources import EngineResources
from engine.runtime.attention.backend import AttentionBackend
from engine.runtime.attention.table import load_backend
from engine.runtime.execution.runner import ModelRunner
from engine.runtime.kv_layout import AttentionSpec, StateSpec, attends
from engine.runtime.models.causal_lm import CausalLM
from engine.runtime.pool.batch import ALONE, Ranks
from engine.runtime.pool.groups import LayerGroups, group_layers
from engine.runtime.pool.kv_cache import KVCache
from engine.runtime.pool.pool_size import resolve_kv_dtype
from engine.runtime.speculation.heads import Head
from engine.settings.engine_config import EngineConfig
from engine.startup.fingerprint import ModelContent
from engine.startup.speculation import Speculation


@dataclass(frozen=True)
class Parts:
    """The parts that the KV pool is sized for and shared by."""

    config: EngineConfig
    report: ReportProgress
    device: torch.device
    model: CausalLM
    speculation: Speculation | None = None
    captures: bool = False  # decode steps are captured as CUDA graphs; their memory is measured with the rest
    ranks: Ranks = ALONE
    content: ModelContent | None = None  # where K/V outlives or leaves the process
    resources: EngineResources = field(default_factory=EngineResources)

    @property
    def head(self) -> Head | None:
        """Return the head that drafts, if there is one."""
        return None if self.speculation is None else self.speculation.head

    @property
    def states(self) -> list[StateSpec]:
        """Return the layers of the pool: the model's, then the head's."""
        return [*self.model.states, *(() if self.head is None else self.head.states)]

    @property
    def kv_dtype(self) -> torch.dtype:
        """Return the number format of the pool."""
        return resolve_kv_dtype(self.config.kv_cache_dtype, self.model.dtype, self.states)

    @cached_property
    def groups(self) -> LayerGroups:
        """Return the groups of layers; what is below the pool, or a draft model, needs one that keeps every position."""
        config = self.config
        below = config.swap_space or config.kv_offload_gib or config.kv_events or self.content
        needs_full = bool(self._drafts_bytes or below)
        max_model_len = config.max_model_len or self.model.max_model_len
        return group_layers(self.states, self.kv_dtype, max_model_len, needs_full=needs_full)

    @property
    def _drafts_bytes(self) -> int:
        """Return the bytes of a block in a draft model's own pool."""
        return self.speculation.bytes_per_block(self.config.block_size) if self.speculation else 0

    @property
    def bytes_per_block(self) -> int:
        """Return the bytes of a block of the pool, with the draft model's."""
        return self.config.block_size * self.groups.cuts[-1] + self._drafts_bytes

    @cached_property
    def state_blocks(self) -> int:
        """Return the blocks that recurrent state takes of the pool, a sequence; 0 in a model without."""
        if all(isinstance(spec, AttentionSpec) for spec in self.states):
            return 0
        from engine.runtime.pool.states import place_states

        return place_states(self.states, self.config.block_size * self.groups.cuts[-1]).num_blocks

    @property
    def used_bytes(self) -> int:
        """Return the bytes that layers have in one block of each group; a draft model's are in the first group's."""
        states = sum(spec.bytes_a_token(self.kv_dtype) for spec in attends(self.states))
        return self.config.block_size * states + self._drafts_bytes

    def _backend(self) -> AttentionBackend:
        """Return the attention backend; of a model that attends both ways, one that can. Raises ConfigError."""
        name = self.config.attention_backend
        backend = load_backend(name, self.device)
        if not self.model.capabilities.both_ways or backend.capabilities.both_ways:
            return backend
        if name != "auto":
            raise ConfigError(
                f"--attention-backend is {name!r}, and this model attends both ways, which it cannot; use 'torch'."
            )
        return load_backend("torch", self.device)

    def make_runner(self, settings: SchedulerConfig) -> ModelRunner:
        """Return a runner with a new pool."""
        kv_cache = KVCache(
            self.states,
            self._backend(),
            num_blocks=settings.num_blocks,
            block_size=settings.block_size,
            dtype=self.kv_dtype,
            device=self.device,
            groups=self.groups,
            max_rows=settings.max_num_seqs,
            max_drafts=settings.num_speculative_tokens,
        )
        self.ranks.configure(settings)
        runner = ModelRunner(self.model, kv_cache, settings, self.device, self.head, self.ranks, self.resources)
        runner.pooler = self.model.pooler
        return runner
