"""The one place that wires a configuration into an Engine: device, model, attention, pool, runner, scheduler.

Runs once, on the thread that starts the daemon. Importing it imports torch, so whoever calls it does that late. What the
user left open is decided here, from the model and from measured memory, and told through `report`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from engine.core.config import EngineConfig, SchedulerConfig
from engine.core.errors import ConfigError, MemoryBudgetError
from engine.core.scheduler import Scheduler
from engine.core.types import Progress
from engine.loop import Engine, QueueLimits
from engine.runtime.attention.base import CausalLM
from engine.runtime.attention.table import load_backend
from engine.runtime.host_cpus import usable_cpus
from engine.runtime.kv_cache import KVCache, block_bytes, default_cpu_budget, fit_pool, resolve_kv_dtype
from engine.runtime.models.load import load_model, resolve_dtype
from engine.runtime.native.build import must_compile
from engine.runtime.native.library import choose_kernels, native
from engine.runtime.runner import ModelRunner, warm_up_plan

Report = Callable[[Progress], None]

_MAX_NUM_SEQS = {"cpu": 128, "cuda": 256}
# On a CPU, prompts compute no faster beyond 128 tokens a step (SmolLM2-135M, two cores: 3400 a second at 128 and at 256),
# while those who decode beside them wait for the step: room for 384 of prompts beside a full house of decoding sequences.
_MAX_NUM_BATCHED_TOKENS = {"cpu": 512, "cuda": 8192}
_MAX_QUEUED_REQUESTS = 1024
_MAX_QUEUED_POOLS = 8  # prompt tokens that may wait, in times of what the pool holds


def build_engine(config: EngineConfig, report: Report) -> Engine:
    """Load the model, size and allocate the pool, warm up; the engine is returned unstarted.

    Raises ConfigError, ModelLoadError or MemoryBudgetError, each with a sentence that says what to change.
    """
    device = _resolve_device(config.device)
    if device.type == "cpu":
        _load_kernels(config.cpu_kernels, report)
    backend_name = config.attention_backend
    load_backend(backend_name, device)  # a wrong name is told before minutes of loading
    max_num_seqs, max_num_batched_tokens = _batch_limits(config, device)
    model = load_model(config, device, resolve_dtype(config, device), report)
    _check_model_len(config, model)
    _share_threads(config.num_threads, model)

    kv_dtype = resolve_kv_dtype(config.kv_cache_dtype, model.dtype, model.attention_specs)
    bytes_per_block = block_bytes(model.attention_specs, config.block_size, kv_dtype)
    model_len = config.max_model_len or model.max_model_len
    useful_blocks = max_num_seqs * -(-model_len // config.block_size)
    if config.kv_cache_memory_bytes is not None:
        budget = config.kv_cache_memory_bytes
    elif device.type == "cuda":
        budget = _measure_cuda_budget(config, model, device, max_num_seqs, max_num_batched_tokens)
    else:
        budget = min(default_cpu_budget(), useful_blocks * bytes_per_block)
    size = fit_pool(
        budget, bytes_per_block, config.block_size, model_len=model.max_model_len, asked_len=config.max_model_len
    )
    scheduler_config = SchedulerConfig(
        num_blocks=size.num_blocks,
        block_size=config.block_size,
        max_model_len=size.max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        enable_prefix_caching=config.enable_prefix_caching,
        policy=config.scheduling_policy,
    )
    report(Progress("kv_pool", _describe(scheduler_config, bytes_per_block, model)))
    runner = _make_runner(model, scheduler_config, backend_name, kv_dtype, device)
    report(Progress("warm_up", f"one step on {device.type}"))
    num_tokens = min(16, size.max_model_len, max_num_batched_tokens)
    runner.run(warm_up_plan(scheduler_config, num_seqs=1, num_tokens=num_tokens)).wait()
    library = native()
    if library is not None and device.type == "cpu":
        library.keep_memory()  # now that all that lives long has its place
    return Engine(
        Scheduler(scheduler_config),
        runner,
        vocab_size=model.vocab_size,
        depth=int(device.type == "cuda" if config.async_scheduling is None else config.async_scheduling),
        limits=QueueLimits(
            config.max_num_queued_reqs or _MAX_QUEUED_REQUESTS,
            config.max_num_queued_tokens or _MAX_QUEUED_POOLS * size.num_blocks * config.block_size,
        ),
    )


def _make_runner(
    model: CausalLM, config: SchedulerConfig, backend_name: str, kv_dtype: torch.dtype, device: torch.device
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


def _resolve_device(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device is 'cuda', but torch sees no CUDA device here; use 'cpu' or 'auto'.")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def _load_kernels(setting: str, report: Report) -> None:
    if setting != "off" and must_compile():
        report(Progress("kernels", "compiling them for this machine, once"))
    choose_kernels(setting)
    library = native()
    report(Progress("kernels", "torch's own" if library is None else f"native, {library.isa.name.lower()}"))


def _share_threads(asked: int | None, model: CausalLM) -> None:
    """Give the cores to one team: torch's threads, which wait by spinning, would hold up the native library's.

    As many as were asked for, else one a core, but no more than a container's limit keeps running.
    """
    library = native()
    num_threads = asked or min(library.num_threads if library else torch.get_num_threads(), usable_cpus())
    torch.set_num_threads(num_threads)
    if library is not None:
        library.use_threads(num_threads)
    if library is not None and model.is_native:
        torch.set_num_threads(1)


def _batch_limits(config: EngineConfig, device: torch.device) -> tuple[int, int]:
    """Sequences and tokens a step; where only one was given, the other's default yields to it."""
    seqs, tokens = config.max_num_seqs, config.max_num_batched_tokens
    if tokens is None:
        tokens = max(_MAX_NUM_BATCHED_TOKENS[device.type], seqs or 0)
    if seqs is None:
        seqs = min(_MAX_NUM_SEQS[device.type], tokens)
    return seqs, tokens


def _check_model_len(config: EngineConfig, model: CausalLM) -> None:
    if config.max_model_len is not None and config.max_model_len > model.max_model_len:
        raise ConfigError(
            f"--max-model-len is {config.max_model_len}, but the model was made for {model.max_model_len} positions; "
            f"set it to at most {model.max_model_len}."
        )


def _measure_cuda_budget(
    config: EngineConfig, model: CausalLM, device: torch.device, max_num_seqs: int, max_num_batched_tokens: int
) -> int:
    """Bytes left for the pool: the share we may use, less what others use, the weights, and a full step's peak."""
    num_blocks = max_num_seqs + max_num_batched_tokens // config.block_size + 1
    trial = SchedulerConfig(
        num_blocks=num_blocks,
        block_size=config.block_size,
        max_model_len=max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
    )
    weights = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    kv_dtype = resolve_kv_dtype(config.kv_cache_dtype, model.dtype, model.attention_specs)
    runner = _make_runner(model, trial, config.attention_backend, kv_dtype, device)
    try:
        runner.run(warm_up_plan(trial, max_num_seqs, max_num_batched_tokens)).wait()
    except torch.OutOfMemoryError:
        raise MemoryBudgetError(
            f"A step of {max_num_batched_tokens} tokens of {max_num_seqs} sequences does not fit what {config.model} "
            f"leaves of the memory of {device}; lower --max-num-batched-tokens or --max-num-seqs."
        ) from None
    pool = num_blocks * block_bytes(model.attention_specs, config.block_size, kv_dtype)
    step = torch.cuda.max_memory_allocated(device) - weights - pool
    runner.close()
    free, total = torch.cuda.mem_get_info(device)
    others = total - free - torch.cuda.memory_reserved(device)
    return int(total * config.gpu_memory_utilization) - others - weights - step


def _describe(config: SchedulerConfig, bytes_per_block: int, model: CausalLM) -> str:
    size = config.num_blocks * bytes_per_block / (1 << 30)
    shorter = (
        "" if config.max_model_len == model.max_model_len else f" (the model's own limit is {model.max_model_len})"
    )
    return (
        f"{config.num_blocks} blocks of {config.block_size} tokens, {size:.2f} GiB; "
        f"contexts up to {config.max_model_len} tokens{shorter}"
    )
