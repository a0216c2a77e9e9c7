"""Sizes the steps and the KV pool of an engine, from its settings, the model and measured memory."""

from __future__ import annotations

from dataclasses import replace

from engine.core.config import SchedulerConfig
from engine.core.types import Progress
from engine.runtime.execution.device_memory import (
    free_share,
    measure_memory,
)
from engine.runtime.models.causal_lm import CausalLM
from engine.runtime.native.build import Isa
from engine.runtime.native.library import native
from engine.runtime.pool.pool_size import PoolBudget, default_cpu_budget, fit_pool
from engine.runtime.stores.pinned import STAGING_BYTES
from engine.startup.parts import Parts
from engine.system.progress import human_bytes

_MAX_NUM_SEQS = {"cpu": 128, "cuda": 256}
# On a CPU, prompts compute no faster beyond 128 tokens a step (SmolLM2-135M, two cores: 3400 a second at 128 and at 256),
# and decoding sequences wait for the step: room for 384 prompt tokens beside 128 decoding sequences. On tiles larger steps are faster.
_MAX_NUM_BATCHED_TOKENS = {"cpu": 512, "tiles": 1024, "cuda": 8192}


def default_step_tokens(kind: str) -> int:
    """Return how many tokens a step holds on a kind of device, unless a setting says it."""
    library = native() if kind == "cpu" else None
    return _MAX_NUM_BATCHED_TOKENS["tiles" if library is not None and library.isa is Isa.AMX else kind]


def scheduler_config(parts: Parts) -> SchedulerConfig:
    """Return the core's settings, with a pool just large enough to measure a full step.

    If only the sequences or only the tokens of a step are given, the other's default adjusts to them.
    """
    config, kind, speculation = parts.config, parts.device.type, parts.speculation
    max_num_batched_tokens = config.max_num_batched_tokens or max(default_step_tokens(kind), config.max_num_seqs or 0)
    max_num_seqs = config.max_num_seqs or min(_MAX_NUM_SEQS[kind], max_num_batched_tokens)
    max_model_len, is_whole = config.max_model_len or parts.model.max_model_len, parts.model.capabilities.both_ways
    whole_step = max_num_batched_tokens if is_whole else 0
    max_num_batched_tokens = max(max_num_batched_tokens, max_model_len if is_whole else 0)
    return SchedulerConfig(
        num_blocks=max(max_num_batched_tokens // config.block_size + 1, parts.state_blocks),
        block_size=config.block_size,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        whole_step=whole_step,
        enable_prefix_caching=config.enable_prefix_caching and not is_whole,  # a text's end changes its beginning
        pinned_share=config.pinned_prefix_share if config.enable_prefix_caching and not is_whole else 0.0,
        policy=config.scheduling_policy,
        target_itl_s=_seconds(config.target_itl_ms),
        target_ttft_s=_seconds(config.target_ttft_ms),
        num_speculative_tokens=speculation.asked.num_speculative_tokens if speculation else 0,
        windows=parts.groups.windows,
        has_full=parts.groups.has_full,
        state_blocks=parts.state_blocks,
        writes_midway=kind == "cpu" and parts.state_blocks > 0,
    )


def with_pool(parts: Parts, settings: SchedulerConfig, budget: PoolBudget) -> SchedulerConfig:
    """Return the settings with the blocks that the budget holds, and the context that they hold."""
    config, model, report = parts.config, parts.model, parts.report
    bytes_per_block, size = parts.bytes_per_block, settings.block_size
    if budget.account:
        report(Progress("memory", budget.account))
    num_blocks, max_model_len = fit_pool(
        budget,
        bytes_per_block,
        size,
        settings.max_blocks,
        model_len=model.max_model_len,
        asked_len=config.max_model_len,
    )
    settings = replace(settings, num_blocks=num_blocks, max_model_len=max_model_len)
    groups = ""
    if settings.windows:
        num_groups = settings.num_groups - (not settings.has_full)
        unused = 1 - parts.used_bytes / (num_groups * bytes_per_block)
        kinds = f"in one of {num_groups} groups of layers" if num_groups > 1 else "of the layers' window"
        groups = f" {kinds} ({unused:.0%} of their bytes unused)"
    shown = _describe(config.max_model_len, settings, bytes_per_block, groups, model)
    if settings.state_blocks:
        taken = human_bytes(settings.state_blocks * bytes_per_block)
        shown += f"; a recurrent state is {settings.state_blocks} blocks, {taken}"
    report(Progress("kv_pool", shown))
    return settings


def pool_budget(parts: Parts, settings: SchedulerConfig, more_bytes: int) -> PoolBudget:
    """Return the bytes for the pool: as asked, all that is useful on a CPU, or the rest of a GPU's but for `more_bytes`."""
    config, model, device = parts.config, parts.model, parts.device
    if config.kv_cache_memory_bytes is not None:
        return PoolBudget(config.kv_cache_memory_bytes)
    if config.num_gpu_blocks_override is not None:
        size = config.num_gpu_blocks_override * parts.bytes_per_block
        return PoolBudget(size, remedy="raise --num-gpu-blocks-override")
    if device.type == "cpu":
        useful_blocks = settings.max_num_seqs * settings.max_blocks(settings.max_model_len)
        if settings.whole_step:  # no keys and values are kept behind a step
            useful_blocks = settings.max_num_seqs + 2 * settings.max_blocks(settings.max_num_batched_tokens)
        own_budget = (
            config.most_pool_bytes or default_cpu_budget()
        ) // config.tensor_parallel_size  # the ranks share one memory
        return PoolBudget(min(own_budget, useful_blocks * parts.bytes_per_block))
    room = free_share(device, config.gpu_memory_utilization)
    shortfall = room - parts.ranks.least_room(room)
    memory = measure_memory(
        parts.make_runner,
        settings,
        device,
        share=config.gpu_memory_utilization,
        num_tensors=len(parts.groups.cuts),
        vocab_size=model.vocab_size,
        captures=parts.captures,
    )._replace(shortfall=shortfall)
    remedy = "raise --gpu-memory-utilization, or lower --max-num-batched-tokens or --max-num-seqs"
    staging = 2 * STAGING_BYTES if config.swap_space or config.kv_offload_gib else 0
    return PoolBudget(memory.pool - staging - more_bytes, str(memory), remedy)


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1e3


def _describe(
    asked_len: int | None, config: SchedulerConfig, bytes_per_block: int, groups: str, model: CausalLM
) -> str:
    size = human_bytes(config.num_blocks * bytes_per_block)
    is_shorter, why = config.max_model_len < model.max_model_len, []
    if asked_len is None:
        why = ["--max-model-len auto: " + ("as many as the pool holds" if is_shorter else "the model's own limit")]
    if is_shorter:
        why.append(f"the model's own limit is {model.max_model_len}")
    reason = f" ({'; '.join(why)})" if why else ""
    return (
        f"{config.num_blocks} blocks of {config.block_size} tokens{groups}, {size}; "
        f"contexts up to {config.max_model_len} tokens{reason}"
    )
