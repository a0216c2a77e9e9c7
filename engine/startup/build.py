"""Wires a configuration into an Engine: device, model, attention, pool, runner, scheduler.

Runs once, on the thread that starts the daemon. Importing it imports torch, so callers import it late. Settings that the
user left open are decided here, from the model and from measured memory, and reported.
"""

from __future__ import annotations

import atexit
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from engine.adapters import Adapters
from engine.arbiter import Arbiter
from engine.core.config import SchedulerConfig
from engine.core.errors import ConfigError, ModelLoadError
from engine.core.scheduling.admission import QueueLimits
from engine.core.scheduling.scheduler import Scheduler
from engine.core.step import Runner, StepResult
from engine.core.types import Progress, ReportProgress
from engine.handle import EngineFacts
from engine.loop import Engine, Outbound
from engine.resources import EngineResources
from engine.runtime.attention.backend import AttentionBackend
from engine.runtime.attention.table import describe_choice, load_backend
from engine.runtime.cuda.available import has_triton
from engine.runtime.cuda.device import check_device
from engine.runtime.cuda.toolchain import check_toolchain
from engine.runtime.execution.device import load_kernels, resolve_device, share_threads
from engine.runtime.execution.device_memory import (
    describe_use,
    explained_shortage,
    free_share,
    full_steps,
    hold_to_share,
    measure_memory,
    other_steps,
)
from engine.runtime.execution.runner import ModelRunner
from engine.runtime.execution.synthetic import warm_up_plan
from engine.runtime.guard import GuardedRunner, guard_cuda
from engine.runtime.kv_layout import AttentionSpec, StateSpec, attends
from engine.runtime.lora.loader import LoraLoader
from engine.runtime.models.causal_lm import CausalLM
from engine.runtime.models.config_file import is_native, read_model_config
from engine.runtime.models.load import load_model, load_vision, resolve_dtype
from engine.runtime.native.library import choose_kernels, native
from engine.runtime.parallel.group import SINGLE
from engine.runtime.pool import pool_size
from engine.runtime.pool.batch import ALONE, Ranks
from engine.runtime.pool.groups import LayerGroups, group_layers
from engine.runtime.pool.kv_cache import KVCache
from engine.runtime.pool.pool_size import PoolBudget, default_cpu_budget, fit_pool, resolve_kv_dtype
from engine.runtime.speculation.heads import Head
from engine.runtime.stores.pinned import STAGING_BYTES
from engine.runtime.stores.tier import Tier
from engine.settings.engine_config import EngineConfig
from engine.sources.adapter_config import check_folder, naming
from engine.sources.draft_source import config_path, fetch_models
from engine.startup.ahead import WeightMemory
from engine.startup.fingerprint import ModelContent, layout, reading
from engine.startup.speculation import Speculation, load_speculation
from engine.startup.stores import open_tiers
from engine.system.numa import spread_pages
from engine.system.progress import human_bytes

if TYPE_CHECKING:
    from engine.outbound.kv_events import KVEvents
    from engine.ranks.executor import Executor

_MAX_NUM_SEQS = {"cpu": 128, "cuda": 256}
# On a CPU, prompts compute no faster beyond 128 tokens a step (SmolLM2-135M, two cores: 3400 a second at 128 and at 256),
# and decoding sequences wait for the step: room for 384 prompt tokens beside 128 decoding sequences.
_MAX_NUM_BATCHED_TOKENS = {"cpu": 512, "cuda": 8192}
_MAX_QUEUED_REQUESTS = 1024
_MAX_QUEUED_POOLS = 8  # prompt tokens that may wait, in multiples of the pool's tokens


def check_foreign(config: EngineConfig) -> None:
    """Raise ModelLoadError if the model needs transformers' code, which cannot run it; of a hub, fetches its config alone."""
    path = config_path(config)
    if path is None or is_native(config, read_model_config(path, config.load_format, config.hf_overrides), path):
        return
    from engine.runtime.models.transformers_adapter import read_foreign_config

    read_foreign_config(path, config.hf_overrides)


@dataclass(frozen=True)
class _Parts:
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


def build_engine(
    config: EngineConfig,
    report: ReportProgress,
    memory: WeightMemory | None = None,
    *,
    hands_over: bool = False,
    arbiter: Arbiter | None = None,
) -> Engine:
    """Load the model, size and allocate the pool, and warm up; returns the engine unstarted.

    Packed weights are placed in `memory` first. `arbiter` has the thread of several models' engines. With `hands_over` other daemons take the engine's K/V, or it takes theirs.
    Raises ConfigError, ModelLoadError or MemoryBudgetError, each with a sentence that says what to change.
    """
    config = fetch_models(config, report)
    device, dtype = _prepare_device(config, report)
    if arbiter is not None and (library := native()) is not None:
        library.stay_aside(stays=arbiter.is_alive)
    if config.tensor_parallel_size == 1:
        with reading(config, hands_over=hands_over) as content:
            engine = _build(config, device, dtype, report, memory, content=content, arbiter=arbiter)
        if memory is not None and memory.kept is not None:
            memory.kept.write_later()
        return engine
    from engine.ranks.executor import start_ranks

    executor = start_ranks(config, device)
    report(Progress("ranks", f"{executor.size} processes hold the model, each with threads: {executor.num_threads}"))
    try:
        engine = _build(config, device, dtype, report, memory, executor)
    except BaseException as error:  # any: the ranks end, and may know the cause
        reason = executor.explain(error)
        executor.close()
        raise reason from None
    executor.watch_for(engine.fail)
    return engine


def _build(
    config: EngineConfig,
    device: torch.device,
    dtype: torch.dtype,
    report: ReportProgress,
    memory: WeightMemory | None,
    executor: Executor | None = None,
    content: ModelContent | None = None,
    arbiter: Arbiter | None = None,
) -> Engine:
    """Build an engine, or the first rank of one."""
    with _weights_in(memory):
        model = load_model(config, device, dtype, report, SINGLE if executor is None else executor.meet(device))
    tower = load_vision(config, model, device, report)
    share_threads(executor.num_threads if executor else config.num_threads, model)
    speculation = load_speculation(config, model, device, report)
    captures = _captures(config, model, device) and (speculation is None or speculation.head is None)
    if content is not None:
        content.facts()  # its threads would disturb the measurements that follow
    parts = _Parts(config, report, device, model, speculation, captures, executor or ALONE, content)
    settings = _scheduler_config(parts)
    adapters, adapter_bytes = _load_adapters(parts, settings.max_num_batched_tokens)
    resources = EngineResources(adapters) if tower is None else EngineResources(adapters, tower.check)
    parts = replace(parts, resources=resources)
    more_bytes = adapter_bytes if tower is None else adapter_bytes + config.image_cache_memory
    settings = _fit_pool(parts, settings, _pool_budget(parts, settings, more_bytes))
    runner = parts.make_runner(settings)
    if settings.whole_step and device.type == "cpu" and executor is None:  # no text is divided
        # Beside other models any step may pause. A model alone pauses in long ones: to pause takes a short one some 3 % longer.
        runner.pauses_above = settings.whole_step if arbiter is None else 0
    vision = None if tower is None else runner.take_images(tower, config.image_cache_memory)
    report(Progress("warm_up", f"on {device.type}"))
    (_warm_up_cuda if device.type == "cuda" else _warm_up_cpu)(parts, runner, settings)
    settings, tiers = open_tiers(runner, config, settings, model.dtype, report, content)
    if speculation is not None:
        settings = speculation.start(runner, settings, parts.captures, report)
    kv_events = _open_events(config, settings)
    depth = _depth(parts, settings)
    if executor is not None:
        executor.shares_ids = depth > 0
    return Engine(
        _make_scheduler(config, settings, tiers),
        _guarded(runner, device, executor),
        EngineFacts(
            model.vocab_size,
            model.capabilities.generates,
            config.tensor_parallel_size,
            None if content is None else layout(config, settings, runner, model.dtype, content),
            takes_images=tower is not None,
            vectors=model.vectors,
        ),
        depth=depth,
        limits=_queue_limits(config, settings),
        resources=parts.resources,
        vision=vision if device.type == "cpu" else None,  # on a GPU a tower takes no longer than a step
        outbound=Outbound(tiers, kv_events),
        arbiter=arbiter,
        share=config.model_share,
    )


def _depth(parts: _Parts, settings: SchedulerConfig) -> int:
    """Return how many steps are launched before the oldest is waited for."""
    asked, is_cuda = parts.config.async_scheduling, parts.device.type == "cuda"
    if parts.speculation is not None or (settings.whole_step and not is_cuda):  # a step that may pause runs alone
        return 0
    return int(is_cuda if asked is None else asked)


def _queue_limits(config: EngineConfig, settings: SchedulerConfig) -> QueueLimits:
    num_tokens = settings.num_blocks * settings.block_size // settings.num_groups
    return QueueLimits(
        config.max_num_queued_reqs or _MAX_QUEUED_REQUESTS,
        config.max_num_queued_tokens or _MAX_QUEUED_POOLS * num_tokens,
    )


def _guarded(runner: ModelRunner, device: torch.device, executor: Executor | None) -> Runner:
    """Return a runner whose errors are the engine's."""
    guarded: Runner = guard_cuda(runner, device) if device.type == "cuda" else runner
    return guarded if executor is None else GuardedRunner(guarded, executor.explain, close=executor.close)


def _prepare_device(config: EngineConfig, report: ReportProgress) -> tuple[torch.device, torch.dtype]:
    """Return the device and the model's dtype, with kernels loaded and whatever can be checked early checked."""
    device = resolve_device(config.device)
    if device.type == "cpu":
        if config.numa == "distribute" and config.tensor_parallel_size == 1 and (num_nodes := spread_pages()) > 1:
            report(Progress("memory", f"pages in turns on {num_nodes} nodes"))
        load_kernels(config.cpu_kernels, report, is_portable=config.portable_bits)
    elif config.portable_bits:
        raise ConfigError("--portable-bits is for CPUs, and --device is a GPU; leave it out, or set --device cpu.")
    else:
        choose_kernels("off")  # otherwise they would be compiled for nothing, at the first start on a machine
    _check_early(config, device)
    dtype = resolve_dtype(config, device)
    if device.type == "cuda":
        check_device(device, dtype)
        if has_triton(device):
            check_toolchain()
        report(Progress("attention", describe_choice(config.attention_backend, device)))
    return device, dtype


@contextmanager
def _weights_in(place: WeightMemory | None) -> Iterator[None]:
    """Let the native library place packed weights in memory, the rest of which is released, or find them in a file."""
    library, (memory, kept) = native(), place or WeightMemory()
    if library is None:
        if memory is not None:
            memory.release(0)
        yield
        return
    if memory is not None:
        library.weights.use(memory)
    library.kept = kept
    try:
        yield
    finally:
        library.kept = None
        library.weights.release()


def _scheduler_config(parts: _Parts) -> SchedulerConfig:
    """Return the core's settings, with a pool just large enough to measure a full step.

    If only the sequences or only the tokens of a step are given, the other's default adjusts to them.
    """
    config, kind, speculation = parts.config, parts.device.type, parts.speculation
    default_tokens = max(_MAX_NUM_BATCHED_TOKENS[kind], config.max_num_seqs or 0)
    max_num_batched_tokens = config.max_num_batched_tokens or default_tokens
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
    )


def _fit_pool(parts: _Parts, settings: SchedulerConfig, budget: PoolBudget) -> SchedulerConfig:
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


def _open_events(config: EngineConfig, settings: SchedulerConfig) -> KVEvents | None:
    """Return what publishes KV events, if that is configured. Raises ConfigError."""
    asked = config.kv_events
    if asked is None:
        return None
    try:
        from engine.outbound.kv_events import KVEvents
    except ImportError as error:
        raise ConfigError(
            f"--kv-events-config needs {error.name}, which is not installed; run pip install 'quire-serve[kv-events]'."
        ) from None
    return KVEvents(asked, settings.block_size, has_groups=len(settings.groups) > 1)


def _make_scheduler(config: EngineConfig, settings: SchedulerConfig, tiers: Mapping[str, Tier]) -> Scheduler:
    """Return a scheduler that knows what tiers have kept, one that records if that is asked for. Raises ConfigError."""
    if config.record is None:
        scheduler = Scheduler(settings)
    else:
        from engine.recording.recording import RecordingFile, RecordingScheduler

        file = RecordingFile(Path(config.record), settings)
        atexit.register(file.close)  # the engine's death is what a recording is for
        scheduler = RecordingScheduler(settings, file.note)
    for name, tier in tiers.items():
        scheduler.tiers.restore(name, tier.store.kept)
    return scheduler


def _check_early(config: EngineConfig, device: torch.device) -> None:
    """Raise ConfigError for what the device cannot do, and for missing adapters, before minutes of loading."""
    if config.kv_cache_dtype == "fp8":
        pool_size.require_fp8(device)
    load_backend(config.attention_backend, device)
    for module in config.lora_modules:
        with naming(module):
            check_folder(Path(module.path))
    if config.record is not None:
        from engine.recording.recording import check_path

        check_path(Path(config.record))


def _load_adapters(parts: _Parts, num_tokens: int) -> tuple[Adapters, int]:
    """Return the adapters of the start, and the bytes that later ones and steps of `num_tokens` with adapters may take."""
    config, model = parts.config, parts.model
    if not config.num_loras:
        return Adapters(), 0
    assert model.capabilities.adapters, "load_model has refused any other"
    loader = LoraLoader(
        model.adapter_targets,
        max_rank=config.max_lora_rank,
        dtype=model.dtype,
        device=parts.device,
    )
    adapters = Adapters(loader.load, config.num_loras)
    for module in config.lora_modules:
        with naming(module):
            adapters.load(*module)
    if config.lora_modules:
        named = ", ".join(module.name for module in config.lora_modules)
        limits = f"at most {config.num_loras} at a time, of ranks up to {config.max_lora_rank}"
        parts.report(Progress("adapters", f"{named}; {limits}"))
    num_to_come = config.num_loras - len(config.lora_modules)
    return adapters, num_to_come * loader.adapter_bytes() + loader.step_bytes(num_tokens)


def _pool_budget(parts: _Parts, settings: SchedulerConfig, more_bytes: int) -> PoolBudget:
    """Return the bytes for the pool: as asked, all that is useful on a CPU, or the rest of a GPU's but for `more_bytes`."""
    config, model, device = parts.config, parts.model, parts.device
    if config.kv_cache_memory_bytes is not None:
        return PoolBudget(config.kv_cache_memory_bytes)
    if config.num_gpu_blocks_override is not None:
        return PoolBudget(config.num_gpu_blocks_override * parts.bytes_per_block)
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


def _captures(config: EngineConfig, model: CausalLM, device: torch.device) -> bool:
    """Return whether decode steps are captured as CUDA graphs."""
    can = model.capabilities.graphs and not model.capabilities.both_ways
    is_wanted = device.type == "cuda" and not config.enforce_eager and can and has_triton(device)
    return is_wanted and load_backend(config.attention_backend, device).capabilities.graphs


def _warm_up_cuda(parts: _Parts, runner: ModelRunner, settings: SchedulerConfig) -> None:
    """Capture graphs, run full steps so that they reserve their memory, and report the GPU's use."""
    config, device = parts.config, parts.device
    with explained_shortage(settings, device):
        if parts.captures:
            runner.capture(parts.report)
        if config.kv_cache_memory_bytes is None:
            parts.ranks.hold_to_share()
            hold_to_share(device, config.gpu_memory_utilization)
        for plan in full_steps(settings, parts.model.vocab_size):
            _require_finite(runner.run(plan).wait())
        for plan in other_steps(settings):  # their context was never computed, so their numbers mean nothing
            runner.run(plan).wait()
    parts.report(Progress("memory", describe_use(device)))


def _require_finite(result: StepResult) -> None:
    """Raise ModelLoadError if the model's logits are not finite, so that no request could be answered."""
    if result.errors:
        raise ModelLoadError(
            "The model's first forward pass gave numbers that are not finite: its weights are damaged, its config.json is "
            "wrong, or --dtype has too small a range; download it again, or try --dtype bfloat16 or float32."
        )


def _warm_up_cpu(_parts: _Parts, runner: ModelRunner, settings: SchedulerConfig) -> None:
    num_tokens = min(16, settings.max_model_len, settings.max_num_batched_tokens)
    _require_finite(runner.run(warm_up_plan(settings, num_seqs=1, num_tokens=num_tokens)).wait())
    library = native()
    if library is not None:
        library.keep_memory()  # everything that lives long is allocated by now


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
