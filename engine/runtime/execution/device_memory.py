"""Measures a CUDA device's memory on full steps, to size the K/V pool; checks it afterwards.

The share (--gpu-memory-utilization) is of the whole GPU: memory of other processes and of the CUDA context counts too.
Everything is measured on the device or as torch's reserved memory, not as its allocated memory, because a fragmented
cache costs as much as a used one. Runs once, on the thread that starts the daemon.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from engine.core.config import SchedulerConfig
from engine.core.errors import MemoryBudgetError
from engine.core.step import StepPlan, plan_prompts
from engine.core.types import SamplingParams
from engine.runtime.execution.runner import ModelRunner
from engine.runtime.execution.synthetic import state_slots, synthetic_row, warm_up_plan

_GIB = 1 << 30
_SEGMENT = 2 << 20  # torch reserves large tensors in multiples of this
_TOLERANCE = 0.01  # of the GPU: how far torch's cache may exceed the share before it is emptied
_LONG_CONTEXT = 4096  # a context long enough that one chunk's keys are split between programs
_NUM_TOP = 20  # log probabilities a token, the maximum of OpenAI's API


class CudaMemory(NamedTuple):
    """Bytes of one GPU."""

    total: int
    share: int  # the limit on memory in use, by all processes
    others: int  # other processes, the CUDA context, loaded kernels
    weights: int
    step: int  # the peak of a step beside weights and pool, with what a runner keeps for drafts
    graphs: int
    rounding: int  # of the pool's tensors
    shortfall: int = 0  # by which the GPU of another rank has less left; all ranks have pools of one size

    @property
    def pool(self) -> int:
        """Return the bytes left for K and V; negative if the rest exceeds the limit."""
        used = self.others + self.weights + self.step + self.graphs + self.rounding
        return self.share - used - self.shortfall

    def __str__(self) -> str:
        return (
            f"of {_gib(self.total)} GiB, {_gib(self.share)} may be used: weights {_gib(self.weights)}, a full step "
            f"{_gib(self.step)}, CUDA graphs {_gib(self.graphs)}, other processes and CUDA itself {_gib(self.others)}, "
            f"{f'less on another rank {_gib(self.shortfall)}, ' if self.shortfall else ''}which leaves {_gib(max(self.pool, 0))} for K/V"
        )


def full_steps(config: SchedulerConfig, vocab_size: int) -> list[StepPlan]:
    """Return the largest steps: full of prompts with every sampling rule, and a scored prompt."""
    params = SamplingParams(
        max_tokens=2,
        temperature=1.0,
        top_k=50,
        top_p=0.9,
        min_p=0.01,
        repetition_penalty=1.1,
        presence_penalty=0.1,
        frequency_penalty=0.1,
        logit_bias=((0, 1.0),),
        allowed_token_ids=frozenset({0, 1}),
        bad_words=((0, 0),),
        min_tokens=1,
        eos_token_ids=frozenset({0}),
        logprobs=min(_NUM_TOP, vocab_size),
    )
    num_tokens = min(config.max_num_batched_tokens, config.max_num_seqs * config.max_model_len)
    crowd = warm_up_plan(config, config.max_num_seqs, num_tokens)
    first, *others = crowd.chunks
    first = first._replace(samples=first.samples * (1 + config.max_num_rows - config.max_num_seqs))
    crowd = crowd._replace(chunks=(first, *others), num_samples=config.max_num_rows)
    scored = warm_up_plan(config, 1, min(config.max_num_batched_tokens, config.max_model_len))
    scored = scored._replace(chunks=(scored.chunks[0]._replace(prompt_logprobs=0),))
    return [plan._replace(rows=tuple(row._replace(params=params) for row in plan.rows)) for plan in (crowd, scored)]


def other_steps(config: SchedulerConfig) -> list[StepPlan]:
    """Return steps that use other kernels than full ones, so that all are compiled at the start.

    They have a few tokens, and a hundred, after a long context; greedy, and with temperature alone. Where a step has whole
    texts there are none.
    """
    if config.whole_step:
        return []
    context = min(_LONG_CONTEXT, config.max_model_len, config.num_blocks * config.block_size)
    table = list(range(-(-context // config.block_size)))
    plans = []
    for num, temperature in ((8, 0.0), (128, 1.0)):
        length = min(num, context, config.max_num_batched_tokens)
        params = SamplingParams(max_tokens=1, temperature=temperature)
        row = synthetic_row(config, 0, context, table, params)
        plans.append(plan_prompts([row], [length], state_slots(config, 1)))
    return plans


def measure_memory(
    make_runner: Callable[[SchedulerConfig], ModelRunner],
    config: SchedulerConfig,
    device: torch.device,
    *,
    share: float,
    num_tensors: int,
    vocab_size: int,
    captures: bool,
) -> CudaMemory:
    """Run full steps over a small pool and measure memory; with `captures`, record graphs too.

    `config` is the engine's except for its pool; the real pool will have `num_tensors` tensors. Only the loaded model
    is kept afterwards. Raises MemoryBudgetError if the GPU is too small even for this.
    """
    torch.cuda.empty_cache()
    weights = torch.cuda.memory_reserved(device)
    try:
        step, graphs = _try(make_runner(config), config, device, vocab_size, captures, weights)
        is_full = False
    except (torch.OutOfMemoryError, MemoryBudgetError):
        is_full = True
    # Outside the handler, because the exception keeps the step's tensors alive.
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    if is_full:
        raise MemoryBudgetError(
            f"A step of {config.max_num_batched_tokens} tokens of {config.max_num_seqs} sequences does not fit what the "
            f"weights ({_gib(weights)} GiB) leave of the memory of {device}, {_gib(free)} of {_gib(total)} GiB; lower "
            "--max-num-batched-tokens or --max-num-seqs."
        )
    others = total - free - torch.cuda.memory_reserved(device)
    return CudaMemory(total, int(total * share), others, weights, step, graphs, num_tensors * _SEGMENT)


def _try(
    runner: ModelRunner, config: SchedulerConfig, device: torch.device, vocab_size: int, captures: bool, weights: int
) -> tuple[int, int]:
    """Return the peak bytes of full steps and of the runner beside weights and pool, and the bytes that graphs keep."""
    before = weights + sum(view.nbytes for view in runner.blocks)
    torch.cuda.reset_peak_memory_stats(device)
    for plan in full_steps(config, vocab_size):
        runner.run(plan).wait()
    step = torch.cuda.max_memory_reserved(device) - before
    graphs = 0
    if captures:
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(device)
        runner.capture(lambda _: None)
        torch.cuda.empty_cache()
        graphs = max(free - torch.cuda.mem_get_info(device)[0], 0)
    runner.close()
    return step, graphs


@contextmanager
def explained_shortage(config: SchedulerConfig, device: torch.device) -> Iterator[None]:
    """A scope that prepares the engine; out-of-memory in it is a MemoryBudgetError."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        free, total = torch.cuda.mem_get_info(device)
        raise MemoryBudgetError(
            f"A step of {config.max_num_batched_tokens} tokens of {config.max_num_seqs} sequences does not fit beside "
            f"weights and KV pool: {_gib(free)} of {_gib(total)} GiB of {device} are free; lower --kv-cache-memory-bytes "
            "or --gpu-memory-utilization, --max-num-batched-tokens or --max-num-seqs."
        ) from error


def free_share(device: torch.device, share: float) -> int:
    """Return the bytes of the share that nothing uses yet; negative if more is in use."""
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return int(total * share) - (total - free)


def hold_to_share(device: torch.device, share: float) -> None:
    """Have torch empty its cache, and then fail, before the GPU exceeds the share.

    A small excess is allowed: at the exact limit a fragmented cache would be emptied again and again.
    """
    free, total = torch.cuda.mem_get_info(device)
    others = total - free - torch.cuda.memory_reserved(device)
    fraction = min(share + _TOLERANCE, 1.0) - others / total
    torch.cuda.set_per_process_memory_fraction(min(max(fraction, 0.0), 1.0), device)


def describe_use(device: torch.device) -> str:
    """Return a sentence about the memory in use on the GPU."""
    free, total = torch.cuda.mem_get_info(device)
    ours = torch.cuda.memory_reserved(device)
    return (
        f"{_gib(total - free)} of {_gib(total)} GiB in use ({(total - free) / total:.1%}), {_gib(ours)} of them for "
        "weights, K/V, CUDA graphs and steps"
    )


def _gib(size: int) -> str:
    return f"{size / _GIB:.2f}"
