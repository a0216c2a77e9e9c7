"""Wires a configuration into an Engine: device, model, attention, pool, runner, scheduler.

Runs once, on the thread that starts the daemon. Importing it imports torch, so callers import it late. Settings that the
user left open are decided from the model and from measured memory (sizes.py), and reported.
"""

from __future__ import annotations

import atexit
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from engine.adapters import Adapters
from engine.arbiter import Arbiter
from engine.core.config import SchedulerConfig
from engine.core.errors import ConfigError, ModelLoadError
from engine.core.scheduling.scheduler import Scheduler
from engine.core.step import Runner, StepResult
from engine.core.types import Progress, ReportProgress
from engine.handle import EngineFacts
from engine.loop import Engine, Outbound
from engine.overload import QueueLimits
from engine.resources import EngineResources
from engine.runtime.attention.table import describe_choice, load_backend
from engine.runtime.cuda.available import has_triton
from engine.runtime.cuda.device import check_device
from engine.runtime.cuda.toolchain import check_toolchain
from engine.runtime.execution.device import load_kernels, resolve_device, share_threads
from engine.runtime.execution.device_memory import (
    describe_use,
    explained_shortage,
    full_steps,
    hold_to_share,
    other_steps,
)
from engine.runtime.execution.runner import ModelRunner
from engine.runtime.execution.synthetic import warm_up_plan
from engine.runtime.guard import GuardedRunner, guard_cuda
from engine.runtime.lora.loader import LoraLoader
from engine.runtime.models.causal_lm import CausalLM
from engine.runtime.models.config_file import is_native, read_model_config
from engine.runtime.models.load import load_model, load_vision, resolve_dtype
from engine.runtime.native.library import choose_kernels, native
from engine.runtime.parallel.group import SINGLE
from engine.runtime.pool import pool_size
from engine.runtime.pool.batch import ALONE
from engine.runtime.stores.tier import Tier
from engine.settings.engine_config import EngineConfig
from engine.sources.adapter_config import check_folder, naming
from engine.sources.draft_source import config_path, fetch_models
from engine.startup.ahead import WeightMemory
from engine.startup.fingerprint import ModelContent, layout, reading
from engine.startup.parts import Parts
from engine.startup.sizes import pool_budget, scheduler_config, with_pool
from engine.startup.speculation import load_speculation
from engine.startup.stores import open_tiers
from engine.system.numa import spread_pages
from engine.system.regular_file import expanded

if TYPE_CHECKING:
    from engine.outbound.kv_events import KVEvents
    from engine.ranks.executor import Executor

_MAX_QUEUED_REQUESTS = 1024
_MAX_QUEUED_POOLS = 8  # prompt tokens that may wait, in multiples of the pool's tokens


def check_foreign(config: EngineConfig) -> None:
    """Raise ModelLoadError if the model needs transformers' code, which cannot run it; of a hub, fetches its config alone."""
    path = config_path(config)
    if path is None or is_native(config, read_model_config(path, config.load_format, config.hf_overrides), path):
        return
    from engine.runtime.models.transformers_adapter import read_foreign_config

    read_foreign_config(path, config.hf_overrides)


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
    parts = Parts(config, report, device, model, speculation, captures, executor or ALONE, content)
    settings = scheduler_config(parts)
    adapters, adapter_bytes = _load_adapters(parts, settings.max_num_batched_tokens)
    resources = EngineResources(adapters) if tower is None else EngineResources(adapters, tower.check)
    parts = replace(parts, resources=resources)
    more_bytes = adapter_bytes if tower is None else adapter_bytes + config.image_cache_memory
    settings = with_pool(parts, settings, pool_budget(parts, settings, more_bytes))
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


def _depth(parts: Parts, settings: SchedulerConfig) -> int:
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

        file = RecordingFile(expanded(config.record), settings)
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

        check_path(expanded(config.record))


def _load_adapters(parts: Parts, num_tokens: int) -> tuple[Adapters, int]:
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


def _captures(config: EngineConfig, model: CausalLM, device: torch.device) -> bool:
    """Return whether decode steps are captured as CUDA graphs."""
    can = model.capabilities.graphs and not model.capabilities.both_ways
    is_wanted = device.type == "cuda" and not config.enforce_eager and can and has_triton(device)
    return is_wanted and load_backend(config.attention_backend, device).capabilities.graphs


def _warm_up_cuda(parts: Parts, runner: ModelRunner, settings: SchedulerConfig) -> None:
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


def _warm_up_cpu(_parts: Parts, runner: ModelRunner, settings: SchedulerConfig) -> None:
    num_tokens = min(16, settings.max_model_len, settings.max_num_batched_tokens)
    _require_finite(runner.run(warm_up_plan(settings, num_seqs=1, num_tokens=num_tokens)).wait())
    library = native()
    if library is not None:
        library.keep_memory()  # everything that lives long is allocated by now
