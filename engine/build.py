"""Wires a configuration into an Engine: device, model, attention, pool, runner, scheduler.

Runs once, on the thread that starts the daemon. Importing it imports torch, so callers import it late. Settings that the
user left open are decided here, from the model and from measured memory, and reported.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from engine.adapters import Adapters
from engine.block_size import CANDIDATES, choose, with_block_size
from engine.config import EngineConfig
from engine.core.admission import QueueLimits
from engine.core.config import SchedulerConfig
from engine.core.errors import ConfigError, ModelLoadError
from engine.core.kv.page_table import Layout
from engine.core.scheduler import Scheduler
from engine.core.step import StepResult
from engine.core.types import Progress
from engine.lengths import LengthsFile
from engine.loop import Engine
from engine.recording import RecordingFile, RecordingScheduler, check_path
from engine.runtime import kv_cache
from engine.runtime.attention.table import describe_choice, load_backend
from engine.runtime.block_speeds import measure_speeds
from engine.runtime.cuda.available import has_triton
from engine.runtime.cuda.device import check_device, explain_absence
from engine.runtime.cuda.faults import CudaRunner
from engine.runtime.cuda.toolchain import check_toolchain
from engine.runtime.device_memory import (
    describe_use,
    full_steps,
    hold_to_share,
    measure_memory,
    other_steps,
    shortage_told,
)
from engine.runtime.fingerprint import fingerprint
from engine.runtime.host_cpus import usable_cpus
from engine.runtime.kv_cache import (
    KVCache,
    PoolBudget,
    PoolSize,
    block_bytes,
    default_cpu_budget,
    fit_pool,
    resolve_kv_dtype,
)
from engine.runtime.lora.config import check_folder, naming
from engine.runtime.lora.loader import LoraLoader
from engine.runtime.models.base import CausalLM
from engine.runtime.models.config_file import is_native
from engine.runtime.models.load import load_model, resolve_dtype
from engine.runtime.models.source import resolve_model_path
from engine.runtime.native.build import must_compile
from engine.runtime.native.library import choose_kernels, native
from engine.runtime.runner import ModelRunner, warm_up_plan
from engine.runtime.transports.disk import has_blocks
from engine.runtime.transports.pinned import STAGING_BYTES
from engine.runtime.transports.table import open_tiers
from engine.speculation import Speculation, load_speculation

Report = Callable[[Progress], None]

_MAX_NUM_SEQS = {"cpu": 128, "cuda": 256}
# On a CPU, prompts compute no faster beyond 128 tokens a step (SmolLM2-135M, two cores: 3400 a second at 128 and at 256),
# and decoding sequences wait for the step: room for 384 prompt tokens beside 128 decoding sequences.
_MAX_NUM_BATCHED_TOKENS = {"cpu": 512, "cuda": 8192}
_FIRST_BLOCK_SIZE = 16  # of --block-size auto, until speeds are measured
_MAX_QUEUED_REQUESTS = 1024
_MAX_QUEUED_POOLS = 8  # prompt tokens that may wait, in multiples of the pool's tokens


def check_foreign(config: EngineConfig) -> None:
    """Raise ModelLoadError if the model needs transformers' code, which cannot run it; reads its config alone."""
    path = resolve_model_path(config.model, config.revision, weights=False)
    if is_native(config, path):
        return
    from engine.runtime.models.transformers_adapter import read_foreign_config

    read_foreign_config(path)


def build_engine(config: EngineConfig, report: Report) -> Engine:
    """Load the model, size and allocate the pool, and warm up; returns the engine unstarted.

    Raises ConfigError, ModelLoadError or MemoryBudgetError, each with a sentence that says what to change.
    """
    device, dtype = _prepare_device(config, report)
    max_num_seqs, max_num_batched_tokens = _batch_limits(config, device)
    model = load_model(config, device, dtype, report)
    _share_threads(config.num_threads, model)
    speculation = load_speculation(config, model, device, report)
    adapters, adapter_bytes = _load_adapters(config, model, device, max_num_batched_tokens, report)
    settings = _scheduler_config(config, model, speculation, max_num_seqs, max_num_batched_tokens)
    kv_dtype = resolve_kv_dtype(config.kv_cache_dtype, model.dtype, model.attention_specs)
    make_runner = partial(_make_runner, model, config.attention_backend, kv_dtype, device)
    captures = _captures(config, model, device)
    bytes_per_block = block_bytes(model.attention_specs, settings.block_size, kv_dtype)
    bytes_per_block += speculation.bytes_per_block if speculation else 0
    budget = _pool_budget(config, settings, model, device, bytes_per_block, adapter_bytes, make_runner, captures)
    settings = _fit_pool(config, settings, model, budget, bytes_per_block, report)
    runner = make_runner(settings)
    report(Progress("warm_up", f"on {device.type}"))
    if device.type == "cuda":
        _warm_up_cuda(runner, config, settings, model.vocab_size, device, report, captures)
    else:
        _warm_up_cpu(runner, settings)
    limits = _queue_limits(config, settings)
    lengths = LengthsFile(config.model) if config.block_size is None else None
    config, settings = _choose_block_size(runner, config, settings, model.dtype, lengths, report)
    settings, transports = open_tiers(runner, config, settings, model.dtype, report)
    if speculation is not None:
        settings = speculation.start(runner, settings, captures, report)
    scheduler = _make_scheduler(config, settings)
    for name, transport in transports.items():
        scheduler.tiers.restore(name, transport.kept)
    return Engine(
        scheduler,
        CudaRunner(runner, device) if device.type == "cuda" else runner,
        vocab_size=model.vocab_size,
        depth=0 if speculation else _depth(config.async_scheduling, device),
        limits=limits,
        adapters=adapters,
        keep_lengths=None if lengths is None else lengths.save,
        transports=transports,
        layout=_layout(config, settings, runner, model.dtype),
    )


def _prepare_device(config: EngineConfig, report: Report) -> tuple[torch.device, torch.dtype]:
    """Return the device and the model's dtype, with kernels loaded and whatever can be checked early checked."""
    device = resolve_device(config.device)
    if device.type == "cpu":
        _load_kernels(config.cpu_kernels, report)
    else:
        choose_kernels("off")  # otherwise they would be compiled for nothing, at the first start on a machine
    _check_early(config, device)
    dtype = resolve_dtype(config, device)
    if device.type == "cuda":
        _check_cuda(config, device, dtype, report)
    return device, dtype


def _scheduler_config(
    config: EngineConfig,
    model: CausalLM,
    speculation: Speculation | None,
    max_num_seqs: int,
    max_num_batched_tokens: int,
) -> SchedulerConfig:
    """Return what the core runs on, with a pool just large enough to measure a full step."""
    block_size = config.block_size or _FIRST_BLOCK_SIZE
    return SchedulerConfig(
        num_blocks=max_num_batched_tokens // block_size + 1,
        block_size=block_size,
        max_model_len=config.max_model_len or model.max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        enable_prefix_caching=config.enable_prefix_caching,
        eviction=config.prefix_cache_eviction,
        pinned_share=config.pinned_prefix_share if config.enable_prefix_caching else 0.0,
        policy=config.scheduling_policy,
        target_itl_s=_seconds(config.target_itl_ms),
        target_ttft_s=_seconds(config.target_ttft_ms),
        num_speculative_tokens=speculation.asked.num_speculative_tokens if speculation else 0,
    )


def _fit_pool(
    config: EngineConfig,
    settings: SchedulerConfig,
    model: CausalLM,
    budget: PoolBudget,
    bytes_per_block: int,
    report: Report,
) -> SchedulerConfig:
    """Return the settings with the blocks that the budget holds, and the context that they hold."""
    if budget.account:
        report(Progress("memory", budget.account))
    size = fit_pool(
        budget, bytes_per_block, settings.block_size, model_len=model.max_model_len, asked_len=config.max_model_len
    )
    if config.block_size is None:
        size = _in_any_blocks(size, settings.block_size)
    settings = replace(settings, num_blocks=size.num_blocks, max_model_len=size.max_model_len)
    report(Progress("kv_pool", _describe(config.max_model_len, settings, bytes_per_block, model)))
    return settings


def _queue_limits(config: EngineConfig, settings: SchedulerConfig) -> QueueLimits:
    return QueueLimits(
        config.max_num_queued_reqs or _MAX_QUEUED_REQUESTS,
        config.max_num_queued_tokens or _MAX_QUEUED_POOLS * settings.num_blocks * settings.block_size,
    )


def _make_scheduler(config: EngineConfig, settings: SchedulerConfig) -> Scheduler:
    """Return a scheduler, one that records if that is asked for. Raises ConfigError."""
    if config.record is None:
        return Scheduler(settings)
    file = RecordingFile(Path(config.record), settings, config.record_contents)
    atexit.register(file.close)  # the engine's death is what a recording is for
    return RecordingScheduler(settings, file.note)


def _check_early(config: EngineConfig, device: torch.device) -> None:
    """Raise ConfigError for what the device cannot do, and for missing adapters, before minutes of loading."""
    if config.kv_cache_dtype == "fp8":
        kv_cache.require_fp8(device)
    load_backend(config.attention_backend, device)
    for module in config.lora_modules:
        with naming(module):
            check_folder(Path(module.path))
    if config.record is not None:
        check_path(Path(config.record))


def _check_cuda(config: EngineConfig, device: torch.device, dtype: torch.dtype, report: Report) -> None:
    """Raise ConfigError for a GPU that cannot serve, or a machine that cannot compile kernels for it."""
    check_device(device, dtype)
    if has_triton(device):
        check_toolchain()
    report(Progress("attention", describe_choice(config.attention_backend, device)))


def _layout(config: EngineConfig, settings: SchedulerConfig, runner: ModelRunner, dtype: torch.dtype) -> Layout:
    """Return what two engines must have in common to exchange K/V."""
    num_bytes = sum(view[0].nbytes for view in runner.blocks)
    return Layout(fingerprint(config, str(dtype), runner.blocks), settings.block_size, num_bytes)


def _load_adapters(
    config: EngineConfig, model: CausalLM, device: torch.device, num_tokens: int, report: Report
) -> tuple[Adapters, int]:
    """Return the adapters of the start, and the bytes that later ones and steps of `num_tokens` with adapters may take."""
    if not config.num_loras:
        return Adapters(), 0
    assert model.capabilities.adapters, "load_model has refused any other"
    loader = LoraLoader(
        model.adapter_targets(),
        num_layers=len(model.attention_specs),
        max_rank=config.max_lora_rank,
        dtype=model.dtype,
        device=device,
    )
    adapters = Adapters(loader.load, config.num_loras)
    for module in config.lora_modules:
        with naming(module):
            adapters.load(*module)
    if config.lora_modules:
        named = ", ".join(module.name for module in config.lora_modules)
        report(
            Progress(
                "adapters", f"{named}; at most {config.num_loras} at a time, of ranks up to {config.max_lora_rank}"
            )
        )
    num_to_come = config.num_loras - len(config.lora_modules)
    return adapters, num_to_come * loader.adapter_bytes() + loader.step_bytes(num_tokens)


def _pool_budget(
    config: EngineConfig,
    settings: SchedulerConfig,
    model: CausalLM,
    device: torch.device,
    bytes_per_block: int,
    adapter_bytes: int,
    make_runner: Callable[[SchedulerConfig], ModelRunner],
    captures: bool,
) -> PoolBudget:
    """Return the bytes for the pool: as asked, all that is useful on a CPU, or what measuring leaves on a GPU."""
    if config.kv_cache_memory_bytes is not None:
        return PoolBudget(config.kv_cache_memory_bytes)
    if device.type == "cpu":
        useful_blocks = settings.max_num_seqs * -(-settings.max_model_len // settings.block_size)
        return PoolBudget(min(default_cpu_budget(), useful_blocks * bytes_per_block))
    memory = measure_memory(
        make_runner,
        settings,
        device,
        share=config.gpu_memory_utilization,
        num_tensors=2 * len(model.attention_specs),
        vocab_size=model.vocab_size,
        captures=captures,
    )
    remedy = "raise --gpu-memory-utilization, or lower --max-num-batched-tokens or --max-num-seqs"
    staging = 2 * STAGING_BYTES if config.swap_space or config.kv_offload_gib else 0
    return PoolBudget(memory.pool - staging - adapter_bytes, str(memory), remedy)


def _captures(config: EngineConfig, model: CausalLM, device: torch.device) -> bool:
    """Return whether decode steps are captured as CUDA graphs; their memory is measured with the rest."""
    is_wanted = device.type == "cuda" and not config.enforce_eager and model.capabilities.graphs
    return is_wanted and has_triton(device) and load_backend(config.attention_backend, device).capabilities.graphs


def _warm_up_cuda(
    runner: ModelRunner,
    config: EngineConfig,
    settings: SchedulerConfig,
    vocab_size: int,
    device: torch.device,
    report: Report,
    captures: bool,
) -> None:
    """Capture graphs, run full steps so that they reserve their memory, and report the GPU's use."""
    with shortage_told(settings, device):
        if captures:
            runner.capture(report)
        if config.kv_cache_memory_bytes is None:
            hold_to_share(device, config.gpu_memory_utilization)
        for plan in full_steps(settings, vocab_size):
            _require_finite(runner.run(plan).wait())
        for plan in other_steps(settings):  # their context was never computed, so their numbers mean nothing
            runner.run(plan).wait()
    report(Progress("memory", describe_use(device)))


def _require_finite(result: StepResult) -> None:
    """Raise ModelLoadError if the model's logits are not finite, so that no request could be answered."""
    if result.errors:
        raise ModelLoadError(
            "The model's first forward pass gave numbers that are not finite: its weights are damaged, its config.json is "
            "wrong, or --dtype has too small a range; download it again, or try --dtype bfloat16 or float32."
        )


def _warm_up_cpu(runner: ModelRunner, settings: SchedulerConfig) -> None:
    num_tokens = min(16, settings.max_model_len, settings.max_num_batched_tokens)
    _require_finite(runner.run(warm_up_plan(settings, num_seqs=1, num_tokens=num_tokens)).wait())
    library = native()
    if library is not None:
        library.keep_memory()  # everything that lives long is allocated by now


def _in_any_blocks(size: PoolSize, block_size: int) -> PoolSize:
    """Return a pool that holds as many tokens in blocks of each candidate size, so that the choice changes no limit."""
    grain = max(CANDIDATES) // block_size
    num_blocks = max(size.num_blocks - size.num_blocks % grain, min(size.num_blocks, grain))
    return PoolSize(num_blocks, min(size.max_model_len, num_blocks * block_size))


def _choose_block_size(
    runner: ModelRunner,
    config: EngineConfig,
    settings: SchedulerConfig,
    dtype: torch.dtype,
    lengths: LengthsFile | None,
    report: Report,
) -> tuple[EngineConfig, SchedulerConfig]:
    """With --block-size auto, choose the size of the blocks in the K/V folder, else from speeds and lengths."""
    if lengths is None:
        return config, settings
    speeds = measure_speeds(runner, settings)
    size = _kept_block_size(runner, config, settings, dtype, speeds) or choose(speeds, lengths.load())
    settings = with_block_size(settings, size)
    runner.repartition(settings)
    best = max(speeds.values())
    rates = ", ".join(f"{each}: {speed / best:.0%}" for each, speed in speeds.items())
    report(Progress("block_size", f"{settings.block_size}; speed of decoding by size: {rates}"))
    return replace(config, block_size=size), settings


def _kept_block_size(
    runner: ModelRunner, config: EngineConfig, settings: SchedulerConfig, dtype: torch.dtype, sizes: Iterable[int]
) -> int | None:
    """Return the size of this model's blocks in the folder of --kv-offload-config, if it has any."""
    if config.kv_offload_dir is None:
        return None
    folder = Path(config.kv_offload_dir).expanduser()
    for size in sizes:
        runner.repartition(with_block_size(settings, size), is_trial=True)
        if has_blocks(folder, fingerprint(replace(config, block_size=size), str(dtype), runner.blocks)):
            return size
    return None


def _depth(asked: bool | None, device: torch.device) -> int:
    """Return how many steps are launched before the last one's tokens are known."""
    return int(device.type == "cuda" if asked is None else asked)


def _make_runner(
    model: CausalLM, backend_name: str, kv_dtype: torch.dtype, device: torch.device, config: SchedulerConfig
) -> ModelRunner:
    backend = load_backend(backend_name, device)
    kv_cache = KVCache(
        model.attention_specs,
        backend,
        num_blocks=config.num_blocks,
        block_size=config.block_size,
        dtype=kv_dtype,
        device=device,
    )
    return ModelRunner(model, backend, kv_cache, config, device)


def resolve_device(name: str) -> torch.device:
    """Return the device of --device; `auto` takes a GPU if there is one. Raises ConfigError if it is missing."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"--device is 'cuda', but {explain_absence()}; use 'cpu' or 'auto'.")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda":
        _configure_allocator()
        torch.cuda.set_per_process_memory_fraction(1.0)  # an engine before this one may have been held to a share
        return torch.device(name, torch.cuda.current_device())  # parts of torch.cuda refuse a device without a number
    return torch.device(name)


def _configure_allocator() -> None:
    """Let torch's cache of GPU memory grow in place: steps of varying sizes would fragment fixed segments.

    The variable is read with the first allocation; one that is set already is left alone.
    """
    if not os.environ.keys() & {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}:
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


def _load_kernels(setting: str, report: Report) -> None:
    if setting != "off" and must_compile():
        report(Progress("kernels", "compiling them for this machine, once"))
    choose_kernels(setting)
    library = native()
    report(Progress("kernels", "torch's own" if library is None else f"native, {library.isa.name.lower()}"))


def _share_threads(asked: int | None, model: CausalLM) -> None:
    """Give the cores to one team of threads: torch's, which wait by spinning, would slow down the native library's.

    The team has as many threads as asked for, else one per core, but no more than a container's limit allows.
    """
    library = native()
    num_threads = asked or min(library.num_threads if library else torch.get_num_threads(), usable_cpus())
    torch.set_num_threads(num_threads)
    if library is not None:
        library.use_threads(num_threads)
    if library is not None and model.capabilities.native:
        torch.set_num_threads(1)


def _batch_limits(config: EngineConfig, device: torch.device) -> tuple[int, int]:
    """Return the most sequences and tokens per step; if only one was given, the other's default adjusts to it."""
    seqs, tokens = config.max_num_seqs, config.max_num_batched_tokens
    if tokens is None:
        tokens = max(_MAX_NUM_BATCHED_TOKENS[device.type], seqs or 0)
    if seqs is None:
        seqs = min(_MAX_NUM_SEQS[device.type], tokens)
    return seqs, tokens


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1e3


def _describe(asked_len: int | None, config: SchedulerConfig, bytes_per_block: int, model: CausalLM) -> str:
    size = config.num_blocks * bytes_per_block / (1 << 30)
    shorter = ""
    if config.max_model_len < model.max_model_len:
        why = "--max-model-len auto: as many as the pool holds; " if asked_len is None else ""
        shorter = f" ({why}the model's own limit is {model.max_model_len})"
    return (
        f"{config.num_blocks} blocks of {config.block_size} tokens, {size:.2f} GiB; "
        f"contexts up to {config.max_model_len} tokens{shorter}"
    )
