"""Drives the real scheduler and the real runner over any CausalLM, without threads or clocks."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from engine.core.config import SchedulerConfig
from engine.core.scheduling.scheduler import Scheduler
from engine.core.step import Name, StepPlan
from engine.core.types import Adapter, GrammarKey, PoolingParams, Request, SamplingParams, TokenEvent
from engine.runtime.attention.table import load_backend
from engine.runtime.execution.model_step import ModelStep
from engine.runtime.execution.runner import ModelRunner
from engine.runtime.kv_layout import AttentionSpec
from engine.runtime.layers.parts import LayerAttention
from engine.runtime.models.causal_lm import CausalLM
from engine.runtime.pool.groups import group_layers, one_group
from engine.runtime.pool.kv_cache import KVCache
from engine.runtime.pool.states import place_states
from engine.runtime.speculation.heads import Head
from tests.cpu.dense_attention import DenseAttention
from tests.integrity import check_scheduler

CPU = torch.device("cpu")


def settings(**changes: int | bool | str) -> SchedulerConfig:
    """Room for everything at once; tests take away what they are about."""
    values = {
        "num_blocks": 200,
        "block_size": 4,
        "max_model_len": 256,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 256,
    } | changes
    return SchedulerConfig(**values)  # type: ignore[arg-type]  # mixed value types, checked by the class itself


def make_runner(
    model: CausalLM,
    config: SchedulerConfig,
    backend_name: str = "auto",
    kv_dtype: torch.dtype | None = None,
    device: torch.device = CPU,
    head: Head | None = None,
) -> ModelRunner:
    backend = load_backend(backend_name, device)
    specs = [*model.states, *(() if head is None else head.states)]
    pool = KVCache(
        specs,
        backend,
        num_blocks=config.num_blocks,
        block_size=config.block_size,
        dtype=kv_dtype or model.dtype,
        device=device,
        groups=group_layers(specs, kv_dtype or model.dtype, config.max_model_len) if config.windows else None,
        max_rows=config.max_num_seqs,
        max_drafts=config.num_speculative_tokens,
    )
    runner = ModelRunner(model, pool, config, device, head, resources=NAMED)
    if runner.heads is not None:
        runner.speculate(runner.heads)
    if config.num_host_blocks:
        runner.open_host_pool(config.num_host_blocks)
    return runner


class Named:
    """The grammars and adapters of all requests of a test, by what requests name."""

    def __init__(self) -> None:
        self.found: dict[object, Any] = {}

    def names(self, sampling: dict[str, Any]) -> dict[str, Any]:
        """Sampling with names in the place of what is alive."""
        grammar, adapter = sampling.get("grammar"), sampling.get("adapter")
        keys: dict[str, Any] = {}
        if grammar is not None:
            keys["grammar"] = GrammarKey(str(id(grammar)).encode())
            self.found[keys["grammar"]] = grammar
        if adapter is not None:
            keys["adapter"] = Adapter(adapter.name, adapter.digest)
            self.found[keys["adapter"]] = adapter
        return sampling | keys

    def find(self, name: Name) -> Any:
        return self.found[name]

    def has(self, name: Name) -> bool:
        return name in self.found


NAMED = Named()


def request(request_id: str, prompt: Sequence[int], **sampling: object) -> Request:
    if "pooling" in sampling:
        pooled = PoolingParams(pooling=sampling["pooling"])  # type: ignore[arg-type]
        return Request(request_id=request_id, prompt=tuple(prompt), params=pooled, arrival_s=0.0)
    sampling = NAMED.names(sampling)
    params = SamplingParams(**({"max_tokens": 12, "temperature": 0.0} | sampling))  # type: ignore[arg-type]
    return Request(request_id=request_id, prompt=tuple(prompt), params=params, arrival_s=0.0)


class Served:
    """What became of some requests: ids and every event, by (request id, choice)."""

    def __init__(self) -> None:
        self.ids: dict[tuple[str, int], list[int]] = {}
        self.events: dict[tuple[str, int], list[TokenEvent]] = {}

    def take(self, events: Iterable[TokenEvent]) -> None:
        for event in events:
            key = (event.request_id, event.choice)
            self.ids.setdefault(key, []).extend(event.token_ids)
            self.events.setdefault(key, []).append(event)


def serve(
    model: CausalLM,
    config: SchedulerConfig,
    requests: Sequence[Request],
    *,
    depth: int = 0,
    apart: int = 0,
    scheduler: Scheduler | None = None,
    runner: ModelRunner | None = None,
) -> Served:
    """Run requests to their ends; each is added `apart` steps after the one before it."""
    scheduler = scheduler or Scheduler(config)
    runner = runner or make_runner(model, config)
    served, launched, coming = Served(), deque(), deque(requests)
    step = 0
    while coming or scheduler.has_work:
        while coming and (apart == 0 or step % apart == 0):
            scheduler.add(coming.popleft())
            if apart:
                break
        plan = scheduler.plan(step * 0.01)
        if plan is not None:
            launched.append((plan, runner.run(plan)))
        if launched and (plan is None or len(launched) > depth):
            oldest, pending = launched.popleft()
            served.take(scheduler.commit(oldest, pending.wait(), step * 0.01))
        step += 1
        assert step < 5000, "requests did not end"
    check_scheduler(scheduler)
    return served


class Poisoner:
    """A runner in whose pool blocks without a holder are NaN."""

    def __init__(self, runner: ModelRunner, scheduler: Scheduler) -> None:
        self._runner, self._scheduler = runner, scheduler

    def run(self, plan: StepPlan) -> ModelStep:
        pool = self._scheduler.kv.pool
        read = {block for block, _ in (*plan.swap_out, *plan.copies)}
        blocks = (block for block in range(pool.num_blocks) if block not in read)
        unused = [block for block in blocks if not pool.is_held(block) and not pool.findable[block]]
        for view in self._runner.blocks:
            view[unused] = torch.nan
        return self._runner.run(plan)


class TinyModel:
    """Two layers of random attention over random embeddings: every logit depends on every token before it."""

    vocab_size, max_model_len, dtype = 61, 256, torch.float32
    described = None

    def __init__(
        self, poison: int | None = None, device: torch.device = CPU, windows: Sequence[int | None] = (None, 24)
    ) -> None:
        generator = torch.Generator().manual_seed(17)
        self.states = [AttentionSpec(4, 2, 8, 0.35, window=window) for window in windows]
        self._embedding = torch.randn(self.vocab_size, 32, generator=generator)
        self._weights = [torch.randn(32, 64, generator=generator) / 4 for _ in self.states]
        self._poison = poison  # an id whose embedding is NaN
        if poison is not None:
            self._embedding[poison] = torch.nan
        self._embedding, self._weights = self._embedding.to(device), [weight.to(device) for weight in self._weights]

    def forward(self, ids: Tensor, positions: Tensor, attention: LayerAttention, rows: Tensor | None = None) -> Tensor:
        x = self._embedding[ids]
        wave = torch.sin(positions[:, None] * torch.linspace(0.05, 1.5, 32, device=x.device))
        for layer, weight in enumerate(self._weights):
            q, k, v = ((x + wave) @ weight).split([32, 16, 16], dim=-1)
            out = attention(layer, q.view(-1, 4, 8), k.view(-1, 2, 8), v.view(-1, 2, 8))
            x = torch.nn.functional.layer_norm(x + 2 * out.reshape(-1, 32), (32,))
        return x if rows is None else x[rows]

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        logits = hidden @ self._embedding.nan_to_num(0.0).T
        return logits if out is None else out.copy_(logits)


def solo_greedy(model: CausalLM, prompt: Sequence[int], num: int) -> list[int]:
    """What the model says alone, over attention and states that are kept whole."""
    tokens, attention, start = list(prompt), DenseAttention(model.states), 0
    for _ in range(num):
        hidden = model.forward(torch.tensor(tokens[start:]), torch.arange(start, len(tokens)), attention)
        start = len(tokens)
        tokens.append(int(model.logits(hidden[-1:]).argmax()))
    return tokens[len(prompt) :]


def state_blocks(model: CausalLM, block_size: int) -> int:
    """The blocks of a slot of the model's recurrent state."""
    return place_states(model.states, block_size * one_group(model.states, model.dtype).cuts[-1]).num_blocks
